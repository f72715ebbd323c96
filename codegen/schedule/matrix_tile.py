"""Contractions of bf16 operands for processors with a matrix unit: which run there, and the tile's inner loops as one
call.

In: a contraction with f32 sums. Out: a :class:`MatrixPlan`: the copies to be made first and the block that reads them,
or the reason why the contraction is computed with widened operands. The order of sums for every cell: on AMX tiles
terms in blocks of 32; in each block the sum of the even terms and that of the odd ones, from 0, by fused multiply-adds;
the two added, then added to what the cell has so far. By dots, terms in pairs; the second of a pair is added first, by
fused multiply-adds. All of it is f32, where results and operands below 2^-126 count as 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from stagedtensor.codegen.affine import add, constant, flat_index, multiply, to_expr
from stagedtensor.codegen.loop_ir import (
    Alloc,
    Apply,
    Block,
    BlockIterator,
    Buffer,
    Cast,
    Const,
    Cost,
    Expr,
    Fma,
    If,
    Load,
    Stmt,
    Store,
    Symbol,
    Tile,
    Var,
    index,
)
from stagedtensor.codegen.rewrite import substitute
from stagedtensor.codegen.schedule.analysis import (
    Contraction,
    cost_of,
    depends,
    points,
    reads_every_cell,
    stride,
)
from stagedtensor.codegen.schedule.columns import TileShape, columns
from stagedtensor.codegen.schedule.machine import Machine, MatrixUnit
from stagedtensor.codegen.schedule.matrix_copy import (
    COLUMNS,
    HALF,
    SIDE,
    TERMS,
    Copied,
    panels_of_pairs,
    reading,
    rows_of_terms,
)
from stagedtensor.codegen.schedule.microkernel import Accumulation
from stagedtensor.codegen.schedule.nest import index_symbol, loads_in, loop, nest
from stagedtensor.codegen.schedule.nests import Nest, one_launch
from stagedtensor.precision import bf16, f32, i64

MATRIX_TILES = ("matrix_multiply", "matrix_multiply_add")
"""Names of the tiles on AMX: the first's sums start from 0, the second's go on from what they are.

``arguments`` of both: sums; row operand, its first cell, its step from row to row; panel, its first cell; number of
terms.
"""
DOT_TILES = ("dot_multiply", "dot_multiply_add")
"""Names of the tiles by dots, with the same arguments."""

_MOST_COPIED = 1 << 28
_LEAST_PAIRED = TERMS // 2
"""Terms from which dots repay the copies: no fewer than the rows of a tile of a slab, over which sums may run."""
_DOTS_THAT_REPAY = 0.7  # the share of a panel that is no padding: a dot does the work of two multiply-adds

_Body: TypeAlias = Callable[[tuple[Expr, ...]], tuple[Stmt, ...]]


@dataclass(frozen=True)
class MatrixPlan:
    """The block with its operands where tiles read them, its iterators of rows and columns, and the copies it reads."""

    block: Block
    row: BlockIterator
    column: BlockIterator
    shape: TileShape
    copies: tuple[Copied, ...]


@dataclass(frozen=True)
class _Roles:
    """``rows`` and ``columns`` are the operands in bf16, before they are widened."""

    row: BlockIterator
    column: BlockIterator
    rows: Expr
    columns: Expr


def matrix_nests(found: Contraction, machine: Machine, cost: Cost, *, parallel: bool) -> tuple[Nest, ...] | str:
    """Return the launches of ``found`` on the machine's matrix unit, or why it has none."""
    unit = machine.matrix_unit
    assert unit is not None
    plan = matrix_plan(found, unit)
    if isinstance(plan, str):
        return plan
    nests: list[Nest] = []
    for copy in plan.copies:
        spent = cost_of(copy.block)
        threads = spent.nbytes > machine.serial_bytes
        filling, how = copy.filled(parallel=threads)
        suffix = f"_{copy.buffer.name}"
        nests.append(
            one_launch(filling, f"copies an operand for the matrix unit{how}", spent, threads, suffix, (copy.buffer,))
        )
    kernel = matrix_multiply if unit is MatrixUnit.TILES else dot_multiply
    across = points(plan.block.reduce) * plan.column.bound * bf16.bytes <= machine.cache_bytes
    body, _ = columns(
        plan.block, plan.column, plan.row, plan.shape, parallel=parallel, rows_outside=across, kernel=kernel
    )
    size = f"{plan.shape.rows}x{plan.shape.columns}"
    copied = f"{len(plan.copies)} copied operand{'s' if len(plan.copies) > 1 else ''}"
    how = (
        f"bf16 matrix tiles {size}, blocks of {TERMS}"
        if unit is MatrixUnit.TILES
        else f"bf16 dots, tile {size}, pairs of"
    )
    path = f"contraction, {how} terms in order, {copied}"
    return (*nests, one_launch(body, path, cost, parallel))


def on_matrix_unit(found: Contraction, unit: MatrixUnit) -> bool:
    """Tell whether ``found`` runs on ``unit``."""
    return multiplies_bf16(found) and not isinstance(matrix_plan(found, unit), str)


def multiplies_bf16(found: Contraction) -> bool:
    """Tell whether both operands are bf16 numbers and the sums f32."""
    (item,) = found.block.accumulators
    fused = isinstance(item.update, Fma) and item.update.c == Var(item.symbol)
    return fused and item.symbol.type is f32 and all(_narrow(side) is not None for side in (found.lhs, found.rhs))


def _narrow(operand: Expr) -> Expr | None:
    """The bf16 expression that ``operand`` widens."""
    if (
        isinstance(operand, Cast)
        and operand.type is f32
        and operand.arg.type is bf16
        and not (operand.saturate or operand.flush)
    ):
        return operand.arg
    return None


def matrix_plan(found: Contraction, unit: MatrixUnit) -> MatrixPlan | str:
    """Return how ``found`` runs on ``unit``, or in a few words why it does not."""
    if not multiplies_bf16(found):
        return "not both operands are bf16"
    if any(constant(one.extent) is None for one in found.block.iterators):
        return "its loops have no fixed bounds"
    least, narrowest = (TERMS, SIDE) if unit is MatrixUnit.TILES else (_LEAST_PAIRED, HALF)
    if found.block.guard is not None:
        found = _longest_inside(found)
    block, terms = found.block, found.block.reduce[-1]
    if terms.bound < least:
        return f"fewer than {least} terms in a row"
    roles = _roles(found, narrowest)
    if roles is None:
        return f"fewer than {SIDE} rows or {narrowest} columns"
    if block.guard is not None and not _in_one_piece(block.guard, block, roles, terms):
        return "a guard skips some of a tile's terms"
    width = COLUMNS if unit is MatrixUnit.TILES else _panel_of_dots(roles.column.bound)
    if not width:
        return f"{roles.column.bound} columns leave too much of panels of {HALF} empty"
    copies = [panels_of_pairs(block, roles.columns, terms, roles.column, width)]
    panels = reading(block, copies[0].buffer, roles.columns, (terms, roles.column))
    rows = roles.rows
    if not _lies_in_rows(roles, terms):
        copies.append(rows_of_terms(block, roles.rows, terms, roles.row))
        rows = reading(block, copies[1].buffer, roles.rows, (roles.row, terms))
    if any(copy.buffer.nbytes > _MOST_COPIED for copy in copies):
        return "operands too large to be copied"
    (item,) = block.accumulators
    update = Fma(Cast(rows, f32), Cast(panels, f32), Var(item.symbol))
    # what follows the sums reads and writes fewer rows at a time by dots, which gain nothing from more of them
    height = 2 * SIDE if unit is MatrixUnit.TILES and roles.row.bound >= 2 * SIDE else SIDE
    planned = replace(block, accumulators=(replace(item, update=update),))
    shape = TileShape(height, width, padded_columns=True)
    return MatrixPlan(planned, roles.row, roles.column, shape, tuple(copies))


def _panel_of_dots(columns: int) -> int:
    """The columns of a panel that they fill well enough, the more the better; 0 where they fill none."""
    return next(
        (width for width in (COLUMNS, SIDE, HALF) if columns >= _DOTS_THAT_REPAY * -(-columns // width) * width), 0
    )


def _longest_inside(found: Contraction) -> Contraction:
    """Return ``found`` with its longest sum innermost: a guard cuts windows, of few cells, and leaves channels whole."""
    block = found.block
    terms = max(block.reduce, key=lambda item: item.bound)
    inside = replace(block, iterators=(*(item for item in block.iterators if item is not terms), terms))
    return replace(found, block=inside)


def _roles(found: Contraction, narrowest: int) -> _Roles | None:
    """Columns lie along the results' memory where they can, so that these are stored in whole vectors."""
    block = found.block
    sides = [(found.lhs, found.rhs), (found.rhs, found.lhs)]
    best: tuple[tuple[bool, int, int], _Roles] | None = None
    for along_rows, along_columns in sides:
        narrow_rows, narrow_columns = _narrow(along_rows), _narrow(along_columns)
        if narrow_rows is None or narrow_columns is None or not loads_in(narrow_rows) or not loads_in(narrow_columns):
            continue
        own_rows = [item for item in block.data if depends(narrow_rows, item) and not depends(narrow_columns, item)]
        for column in block.data:
            if not depends(narrow_columns, column) or depends(narrow_rows, column):
                continue
            adjacent = all(
                flat_index(store.buffer, store.indices).coefficient(column.symbol) == 1 for store in block.stores
            )
            if column.bound < (narrowest if adjacent else SIDE):
                continue
            for row in own_rows:
                if row.bound < SIDE:
                    continue
                # on a tie the row operand that needs no copy, and long rows
                roles = _Roles(row, column, narrow_rows, narrow_columns)
                score = (adjacent, int(_lies_in_rows(roles, block.reduce[-1])), row.bound)
                if best is None or score > best[0]:
                    best = score, roles
    return None if best is None else best[1]


def _lies_in_rows(roles: _Roles, terms: BlockIterator) -> bool:
    """Whether tiles can load the row operand where it is: terms side by side, rows a fixed step apart."""
    load = roles.rows
    if not isinstance(load, Load) or load.buffer.space != "global" or any(loads_in(part) for part in load.indices):
        return False
    return stride(load, terms.symbol) == 1 and stride(load, roles.row.symbol) is not None


def _in_one_piece(guard: Expr, block: Block, roles: _Roles, terms: BlockIterator) -> bool:
    """Whether ``guard`` skips whole tiles only, and copies read nothing that it protects."""
    if any(depends(guard, item) for item in (roles.row, roles.column, terms)):
        return False
    return _lies_in_rows(roles, terms) and reads_every_cell(roles.columns, block)


# -- the tile -----------------------------------------------------------------------------------------------------


def matrix_multiply(
    work: Accumulation, bounds: Mapping[Symbol, int], fill: Sequence[Stmt], init: Expr | None
) -> tuple[Stmt, ...] | None:
    """Return ``fill`` and the loops of ``work``, a block of :func:`matrix_plan`, an AMX tile for the innermost one."""
    return _called(MATRIX_TILES, _on_tiles, work, bounds, fill, init)


def dot_multiply(
    work: Accumulation, bounds: Mapping[Symbol, int], fill: Sequence[Stmt], init: Expr | None
) -> tuple[Stmt, ...] | None:
    """Return what :func:`matrix_multiply` returns, with a tile by dots."""
    return _called(DOT_TILES, _by_dots, work, bounds, fill, init)


def _called(
    names: tuple[str, str],
    meaning_of: Callable[[Accumulation, BlockIterator], tuple[Stmt, ...]],
    work: Accumulation,
    bounds: Mapping[Symbol, int],
    fill: Sequence[Stmt],
    init: Expr | None,
) -> tuple[Stmt, ...] | None:
    update, terms = work.update, work.reduce[-1]
    if not isinstance(update, Fma) or not isinstance(update.a, Cast) or not isinstance(update.b, Cast):
        return None
    rows, columns = update.a.arg, update.b.arg
    if not isinstance(rows, Load) or not isinstance(columns, Load):
        return None
    first_row = flat_index(rows.buffer, rows.indices, bounds)
    step = first_row.coefficient(work.row)
    if step is None or first_row.coefficient(terms.symbol) != 1:
        return None
    outer = work.reduce[:-1]
    from_zero = not outer and work.guard is None and isinstance(init, Const) and repr(float(init.value)) == "0.0"
    start = {work.column: index(0), terms.symbol: index(0)}
    panel = flat_index(columns.buffer, tuple(substitute(part, start) for part in columns.indices), bounds)
    meaning = meaning_of(work, terms)
    tile = Tile(
        names[0] if from_zero else names[1],
        work.states.shape[-2],
        work.states.shape[-1],
        terms.bound,
        (*fill, *meaning) if from_zero else meaning,
        (
            work.states,
            rows.buffer,
            to_expr(first_row.without(work.row).without(terms.symbol)),
            index(step),
            columns.buffer,
            to_expr(panel),
            index(terms.bound),
        ),
    )
    if from_zero:
        return (tile,)
    inner: tuple[Stmt, ...] = (tile,) if work.guard is None else (If(work.guard, (tile,)),)
    return (*fill, *nest(outer, inner, {}))


def _by_dots(work: Accumulation, terms: BlockIterator) -> tuple[Stmt, ...]:
    """The loops that say what a tile by dots computes, in its order of sums."""
    shape, pair = work.states.shape[-2:], index_symbol("i_pair")
    added: list[Stmt] = []
    for at in (1, 0):
        term = add(multiply(Var(pair), 2), at)
        step = _every(shape, partial(_add_product, work, terms, work.states, work.place, term))
        added.append(If(Apply("lt", (term, index(terms.bound)), i64), step) if at and terms.bound % 2 else step[0])
    return (loop(pair, -(-terms.bound // 2), added),)


def _on_tiles(work: Accumulation, terms: BlockIterator) -> tuple[Stmt, ...]:
    """The loops that say what an AMX tile computes, in its order of sums."""
    shape = work.states.shape[-2:]
    parts = [Buffer(hint, f32, shape, "register") for hint in ("even", "odd")]
    block, half = index_symbol("i_block"), index_symbol("i_half")
    halves = _every(shape, lambda cell: tuple(Store(part, cell, Const(0.0, f32)) for part in parts))
    added: list[Stmt] = []
    for at, part in enumerate(parts):
        term = add(add(multiply(Var(block), TERMS), multiply(Var(half), 2)), at)
        step = _every(shape, partial(_add_product, work, terms, part, (), term))
        inside = Apply("lt", (term, index(terms.bound)), i64)
        added.append(If(inside, step) if terms.bound % TERMS else step[0])

    def together(cell: tuple[Expr, ...]) -> tuple[Stmt, ...]:
        even, odd = (Load(part, cell) for part in parts)
        total = Apply("add", (Load(work.states, (*work.place, *cell)), Apply("add", (even, odd), f32)), f32)
        return (Store(work.states, (*work.place, *cell), total),)

    whole = loop(block, -(-terms.bound // TERMS), (*halves, loop(half, TERMS // 2, added), *_every(shape, together)))
    return (*map(Alloc, parts), whole)


def _add_product(
    work: Accumulation, terms: BlockIterator, sums: Buffer, place: tuple[Expr, ...], term: Expr, cell: tuple[Expr, ...]
) -> tuple[Stmt, ...]:
    assert isinstance(work.update, Fma)
    at, whole = {work.row: cell[0], work.column: cell[1], terms.symbol: term}, (*place, *cell)
    return (Store(sums, whole, Fma(substitute(work.update.a, at), substitute(work.update.b, at), Load(sums, whole))),)


def _every(shape: tuple[int, ...], body: _Body) -> tuple[Stmt, ...]:
    row, column = index_symbol("i_row"), index_symbol("i_column")
    inner = loop(column, shape[1], body((Var(row), Var(column))), "vector")
    return (loop(row, shape[0], (inner,)),)
