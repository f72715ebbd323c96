"""Which iterators of a contraction run along vectors and along the rows of tiles, and how its operands lie for that.

In: a contraction. Out: its :class:`Roles`, None where no operand varies along adjacent results. Chooses no template.
"""

from __future__ import annotations

from dataclasses import dataclass

from stagedtensor.codegen.affine import cell_of, constant
from stagedtensor.codegen.loop_ir import Block, BlockIterator, Expr, Load
from stagedtensor.codegen.rewrite import symbols_of
from stagedtensor.codegen.schedule.analysis import Contraction, depends, points, stride
from stagedtensor.codegen.schedule.nest import loads_in

ROWS_OF_A_TILE = 8
"""Rows from which a tile of registers is filled well enough."""
MOST_REPEATS = 2
"""How often panels may hold each cell of an operand."""
_FAR = 1 << 40
_TERMS_THAT_REPAY = 1024
_LANES_THAT_REPAY = 1.15


@dataclass(frozen=True)
class Roles:
    """The parts of a contraction: vector iterator with its operand, row iterator with its own."""

    vector: BlockIterator
    row: BlockIterator | None
    column_operand: Expr
    row_operand: Expr


def roles_of(found: Contraction, lanes: int) -> Roles | None:
    """The roles with results adjacent along the vector, or along an operand where sums are long and other lanes few."""
    block = found.block
    usual = unit_iterator(block)
    roles = None if usual is None or constant(usual.extent) is None else _roles_along(found, usual)
    if block.guard is not None or points(block.reduce) < _TERMS_THAT_REPAY:
        return roles
    best, best_use = roles, 0.0 if roles is None else _LANES_THAT_REPAY * _lanes_used(block, roles, lanes)
    for item in block.data:
        other = _roles_along(found, item) if item is not usual and constant(item.extent) is not None else None
        if other is None or other.row is None or not unit_strides(other.column_operand, item):
            continue
        if (use := _lanes_used(block, other, lanes)) > best_use:
            best, best_use = other, use
    return best


def _lanes_used(block: Block, roles: Roles, lanes: int) -> float:
    """The share of lanes that compute results, with panels where they can be packed."""
    width, height = roles.vector.bound, 1 if roles.row is None else roles.row.bound
    packs = block.guard is None and height >= ROWS_OF_A_TILE and repeats(block, roles.column_operand) <= MOST_REPEATS
    return max(lanes_filled(width, lanes), width / (-(-width // lanes) * lanes) if packs else 0.0)


def lanes_filled(width: int, lanes: int) -> float:
    """The share of lanes that ``width`` adjacent results fill, the last ones in vectors of half the size, a quarter ..."""
    whole, rest = divmod(width, lanes)
    return width / ((whole + rest.bit_count()) * lanes)


def _roles_along(found: Contraction, vector: BlockIterator) -> Roles | None:
    block = found.block
    in_lhs, in_rhs = depends(found.lhs, vector), depends(found.rhs, vector)
    if in_lhs == in_rhs:
        return None
    column_operand, row_operand = (found.lhs, found.rhs) if in_lhs else (found.rhs, found.lhs)
    candidates = [
        item
        for item in block.data
        if item is not vector and depends(row_operand, item) and not depends(column_operand, item)
    ]
    guarded = () if block.guard is None else symbols_of(block.guard)
    free = [item for item in candidates if item.symbol not in guarded]
    return Roles(vector, _row(free or candidates, row_operand), column_operand, row_operand)


def _row(candidates: list[BlockIterator], operand: Expr) -> BlockIterator | None:
    """The longest, but of those long enough for a tile the one whose steps through the operand are shortest."""
    longest = max(candidates, key=lambda item: item.bound, default=None)
    if longest is None or longest.bound < ROWS_OF_A_TILE:
        return longest

    def step(item: BlockIterator) -> int:
        steps = [stride(load, item.symbol) for load in loads_in(operand)]
        return max((_FAR if step is None else abs(step) for step in steps), default=0)

    return min((item for item in candidates if item.bound >= ROWS_OF_A_TILE), key=step)


def unit_iterator(block: Block) -> BlockIterator | None:
    """The data iterator along which results are adjacent in memory."""
    for item in reversed(block.data):
        steps = [cell_of(store).coefficient(item.symbol) for store in block.stores]
        if item.bound > 1 and all(step == 1 for step in steps):
            return item
    return None


def unit_strides(expr: Expr, iterator: BlockIterator) -> bool:
    """Whether every load of ``expr`` is the same cell along ``iterator``, or adjacent ones."""
    return all(stride(load, iterator.symbol) in (0, 1) for load in loads_in(expr))


def is_plain(expr: Expr) -> bool:
    """Whether an operand is a load, without arithmetic."""
    return isinstance(expr, Load)


def repeats(block: Block, operand: Expr) -> float:
    """How often panels of ``operand`` would hold each cell of the buffers that it reads."""
    read = points(tuple(item for item in block.iterators if depends(operand, item)))
    cells = sum({load.buffer: load.buffer.size for load in loads_in(operand)}.values())
    return read / max(1, cells)
