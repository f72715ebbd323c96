"""Maxima over all results of a product, taken in its epilogue: whether a gradient is finite costs no sweep of its own.

In: blocks in order. Out: for a reduction of one buffer into one cell, the product that computes the buffer, and a
:class:`Note`: each tile of the product leaves the maximum of its results in a cell of its own. What a result is worth,
and what it is tested for, are the expressions that the two blocks have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stagedtensor.codegen.affine import as_index, constant, flat_index
from stagedtensor.codegen.loop_ir import (
    Accumulator,
    Apply,
    Assign,
    Block,
    Buffer,
    Declare,
    Expr,
    If,
    Let,
    Load,
    Stmt,
    Store,
    Symbol,
    Var,
)
from stagedtensor.codegen.rewrite import Rewriter, buffers_read, buffers_written
from stagedtensor.codegen.schedule.cuda.launch import WARP, points_of
from stagedtensor.codegen.schedule.cuda.rows import meet_across_warps, meet_in_warp
from stagedtensor.codegen.schedule.nest import collapse, fresh, loads_in
from stagedtensor.precision import i64


@dataclass(frozen=True, eq=False)
class Note:
    """``item`` is updated with every cell of ``source``: ``state`` in a thread, one of ``cells`` for each tile."""

    item: Accumulator
    source: Buffer
    state: Symbol
    cells: Buffer

    @property
    def result(self) -> str:
        """What the notes are parts of."""
        return self.cells.name.removesuffix("_tiles")

    def taken(self, store: Store) -> list[Stmt]:
        """Return the store of a result, and the update of the state with what it stores."""
        if store.buffer is not self.source:
            return [store]
        value = Symbol(self.source.name, store.value.type)
        update = _Put(self.source, Var(value), self.item.symbol, self.state).expr(self.item.update)
        return [Let(value, store.value), Store(store.buffer, store.indices, Var(value)), Assign(self.state, update)]

    def around(
        self, tile: Sequence[Stmt], number: Symbol, thread: Symbol, threads: int
    ) -> tuple[list[Stmt], list[Stmt]]:
        """Return shared arrays, and the work of tile ``number`` with the note taken and left in its cell."""
        assert self.item.neutral is not None
        names = {self.item.symbol: self.state}
        arrays, across = meet_across_warps((self.item,), names, thread, threads // WARP)
        first = If(Apply("eq", (Var(thread), as_index(0)), i64), (Store(self.cells, (Var(number),), Var(self.state)),))
        return arrays, [
            Declare(self.state, self.item.neutral),
            *tile,
            *meet_in_warp((self.item,), names),
            *across,
            first,
        ]


class _Put(Rewriter):
    """Puts a value in place of the cell it is stored to, and the thread's state in place of the accumulator."""

    def __init__(self, source: Buffer, value: Expr, old: Symbol, new: Symbol) -> None:
        self._source, self._value, self._old, self._new = source, value, old, new

    def symbol(self, symbol: Symbol) -> Symbol:
        return self._new if symbol is self._old else symbol

    def expr(self, expr: Expr) -> Expr:
        if isinstance(expr, Load) and expr.buffer is self._source:
            return self._value
        return super().expr(expr)


def noted(blocks: Sequence[Block], place: int) -> tuple[int, Buffer] | None:
    """Return the place of the block that computes what the reduction at ``place`` reads, and the buffer; None where the
    reduction is of something else, or of values that are known only later."""
    block = collapse(blocks[place])
    if block.guard is not None or block.lets or len(block.reduce) != 1:
        return None
    (item,), (along,) = block.accumulators, block.reduce
    loads = loads_in(item.update)
    moving = [load for load in loads if load.buffer.size > 1]
    if len(moving) != 1 or constant(along.extent) != along.bound or along.bound != moving[0].buffer.size:
        return None
    source = moving[0].buffer
    flat = flat_index(source, moving[0].indices)
    if source.layout.steps or flat.constant or flat.coefficient(along.symbol) != 1 or len(flat.terms) != 1:
        return None
    writers = {
        buffer: max((at for at in range(place) if buffer in buffers_written((blocks[at],))), default=-1)
        for buffer in dict.fromkeys(load.buffer for load in loads)
    }
    maker = writers.pop(source)
    if maker < 0 or any(at >= maker for at in writers.values()) or source in buffers_read((blocks[maker],)):
        return None
    stores = [store for store in blocks[maker].stores if store.buffer is source]
    whole = blocks[maker].accumulators and not blocks[maker].scatter and points_of(blocks[maker].data) == source.size
    return (maker, source) if len(stores) == 1 and whole else None


def note(block: Block, source: Buffer, tiles: int) -> Note:
    """Return the note for the reduction ``block`` that the product of ``source`` takes in ``tiles`` tiles."""
    (item,) = block.accumulators
    cells = Buffer(f"{block.stores[0].buffer.name}_tiles", item.symbol.type, (tiles,))
    return Note(item, source, fresh(item.symbol), cells)


__all__ = ["Note", "note", "noted"]
