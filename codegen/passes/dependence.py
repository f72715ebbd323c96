"""Dependences between unscheduled blocks: what each reads and writes, and whether two touch a buffer at one cell only.

In: blocks. Out: an ``Access`` summary per block, and answers about order: may one block hop over another, does a block
define all of a buffer. Nothing is changed here; placement, fusion and pruning ask.
"""

from __future__ import annotations

from dataclasses import dataclass

from stagedtensor.codegen import loop_ir as ir
from stagedtensor.codegen.affine import affine
from stagedtensor.codegen.effects import loads
from stagedtensor.codegen.rewrite import symbols_of


@dataclass(frozen=True)
class Effects:
    """The buffers a block reads and writes, in order of appearance."""

    reads: tuple[ir.Buffer, ...]
    writes: tuple[ir.Buffer, ...]
    read_set: frozenset[ir.Buffer]
    write_set: frozenset[ir.Buffer]


def effects_of(block: ir.Block) -> Effects:
    """Summarise a block."""
    reads = tuple(dict.fromkeys(load.buffer for load in loads(block)))
    writes = tuple(dict.fromkeys(store.buffer for store in block.stores))
    return Effects(reads, writes, frozenset(reads), frozenset(writes))


def conflict(earlier: Effects, later: Effects) -> bool:
    """Whether the two must keep their order."""
    changed = later.write_set
    return not (
        earlier.write_set.isdisjoint(later.read_set)
        and earlier.read_set.isdisjoint(changed)
        and earlier.write_set.isdisjoint(changed)
    )


def same_cell(left: tuple[ir.Expr, ...], right: tuple[ir.Expr, ...]) -> bool:
    """Whether two index tuples certainly name one cell."""
    return len(left) == len(right) and all(
        a is b or a == b or affine(a).same_as(affine(b)) for a, b in zip(left, right, strict=True)
    )


def covers(block: ir.Block, buffer: ir.Buffer) -> bool:
    """Whether a block writes every cell of ``buffer`` (of its present extents), each at one data point."""
    if block.scatter or (block.guard is not None and not block.accumulators):
        return False
    stores = [store for store in block.stores if store.buffer is buffer]
    if len(stores) != 1:
        return False
    extents = {item.symbol: item for item in block.data}
    for position, size in zip(stores[0].indices, buffer.shape, strict=True):
        if isinstance(position, ir.Var) and position.symbol in extents:
            if extents.pop(position.symbol).bound != size:
                return False
        elif not (size == 1 and isinstance(position, ir.Const) and position.value == 0):
            return False
    return not extents


def is_elementwise(block: ir.Block) -> bool:
    """Whether every point stands for itself: no accumulators, no scatter, no guard."""
    return not block.accumulators and not block.scatter and block.guard is None


def is_contraction(block: ir.Block) -> bool:
    """Whether a block sums products whose factors vary over different axes, so that operands are read again and again."""
    for item in block.accumulators:
        product = _factors(item)
        if product is None:
            continue
        left, right = (frozenset(symbols_of(factor)) for factor in product)
        axes = {iterator.symbol for iterator in block.iterators}
        if (left ^ right) & axes:
            return True
    return False


def _factors(item: ir.Accumulator) -> tuple[ir.Expr, ir.Expr] | None:
    update = item.update
    if isinstance(update, ir.Fma) and update.c == ir.Var(item.symbol):
        return update.a, update.b
    if isinstance(update, ir.Apply) and update.op in ("add", "sub"):
        value = update.args[1]
        if isinstance(value, ir.Apply) and value.op == "mul":
            return value.args[0], value.args[1]
    return None
