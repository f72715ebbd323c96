"""Maxima over a whole buffer, taken where the buffer is written: tests for overflow without a pass of their own.

In: a block that takes the maximum of something of every cell of a buffer, and the kernels scheduled so far. Out: the
kernel that writes the buffer, extended by one maximum per iteration of its parallel loop, and the block that merges
these::

    parallel for tile: ...g[i] = v...                 ->    parallel for tile: ...g[i] = v; m[c] = max(m[c], f(v))...
    flag = max over i: f(g[i])                                   parts[tile] = max over c: m[c]
                                                            flag = max over tile: parts[tile]

A maximum is exact, so any order gives the same bits. Where f tells whether a value is finite, the lanes hold the sum of
0 times each value instead, one multiply-add: it is NaN as soon as one value is not finite, else 0. None where the
kernel stores in more than one place, where its threads do not keep to parts of fixed number, or where what ``f`` reads
besides has changed since.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stagedtensor.codegen.affine import constant
from stagedtensor.codegen.loop_ir import (
    Accumulator,
    Alloc,
    Apply,
    Block,
    Buffer,
    Const,
    Expr,
    Fma,
    For,
    Let,
    Load,
    Proc,
    Stmt,
    Store,
    Symbol,
    Var,
)
from stagedtensor.codegen.passes.ownership import parallel_loop
from stagedtensor.codegen.rewrite import Rewriter, buffers_read, buffers_written, map_stmts, symbols_of, walk_stmts
from stagedtensor.codegen.schedule.analysis import without_single_lets
from stagedtensor.codegen.schedule.machine import Machine
from stagedtensor.codegen.schedule.nest import fresh, loads_in
from stagedtensor.codegen.schedule.rows import fill, finals, merge_tree
from stagedtensor.codegen.schedule.split import merge
from stagedtensor.precision import f32

_MOST_COLUMNS = 128


@dataclass(frozen=True)
class Taken:
    """The kernel at ``place`` extended, the block that merges its ``parts``."""

    place: int
    kernel: Proc
    merge: Block
    parts: Buffer


@dataclass(frozen=True)
class _Maximum:
    """``accumulator`` takes the maximum of ``value`` for every cell of ``buffer``, which is ``cell`` in it."""

    block: Block
    accumulator: Accumulator
    cell: Load
    value: Expr


def taken_where_written(block: Block, kernels: Sequence[Proc], machine: Machine) -> Taken | None:
    """Return how the last of ``kernels`` to write the buffer takes the maximum as it goes; None where it cannot."""
    wanted = _maximum(without_single_lets(block), machine)
    if wanted is None:
        return None
    others = {load.buffer for load in loads_in(wanted.value)} - {wanted.cell.buffer}
    for place in range(len(kernels) - 1, -1, -1):
        written = buffers_written(kernels[place].body)
        if others.intersection(written):
            return None
        if wanted.cell.buffer in written:
            return _extended(kernels[place], place, wanted)
    return None


def _maximum(block: Block, machine: Machine) -> _Maximum | None:
    if block.data or block.scatter or block.guard is not None or block.lets or len(block.accumulators) != 1:
        return None
    (item,) = block.accumulators
    update = item.update
    if item.combine != "max" or item.neutral is None or item.symbol.type is not f32:
        return None
    if not isinstance(update, Apply) or update.op != "maximum" or update.args[0] != Var(item.symbol):
        return None
    value = update.args[1]
    cells = dict.fromkeys(load for load in loads_in(value) if load.buffer.size > 1)
    if len(cells) != 1 or item.symbol in symbols_of(value):
        return None
    (cell,) = cells
    buffer, walked = cell.buffer, tuple(Var(given.symbol) for given in block.reduce)
    whole = cell.indices == walked and buffer.shape == tuple(constant(given.extent) for given in block.reduce)
    if not whole or buffer.type is not f32 or buffer.size < machine.noted_cells:
        return None
    elsewhere = _with_cell(value, cell, Var(item.symbol))
    if any(given.symbol in symbols_of(elsewhere) for given in block.reduce):
        return None
    return _Maximum(block, item, cell, value)


def _extended(kernel: Proc, place: int, wanted: _Maximum) -> Taken | None:
    outer, buffer = parallel_loop(kernel), wanted.cell.buffer
    count = None if outer is None else constant(outer.iterator.extent)
    stores = [stmt for stmt in walk_stmts(kernel.body) if isinstance(stmt, Store) and stmt.buffer is buffer]
    if outer is None or count is None or len(stores) != 1 or buffer in buffers_read(kernel.body):
        return None
    (store,) = stores
    around = [
        stmt
        for stmt in walk_stmts(outer.body)
        if isinstance(stmt, For) and stmt.kind == "vector" and any(inner is store for inner in walk_stmts(stmt.body))
    ]
    if len(around) != 1 or around[0].iterator.bound > _MOST_COLUMNS:
        return None
    column, lanes = around[0].iterator, 1 << (around[0].iterator.bound - 1).bit_length()
    item = wanted.accumulator
    assert item.neutral is not None
    item = replace(item, symbol=fresh(item.symbol), init=item.neutral)  # where it starts from comes in when parts merge
    tests = isinstance(wanted.value, Apply) and wanted.value.op == "nonfinite"
    if tests:
        zero = Const(0.0, f32)
        item = replace(item, init=zero, neutral=zero, combine="add")
    states = {item.symbol: Buffer("noted", item.symbol.type, (lanes,), "register")}
    parts = Buffer(f"{wanted.block.stores[0].buffer.name.replace('.', '_')}_parts", item.symbol.type, (count,))
    noted = _Noted(store, wanted, states[item.symbol], column.symbol)
    lets, results = finals((item,), states)
    whole_tile = results[item.symbol]
    body = (
        *(Alloc(state) for state in states.values()),
        fill((item,), states, lanes),
        *map_stmts(outer.body, noted),
        *merge_tree((item,), states, lanes),
        *lets,
        Store(parts, (Var(outer.iterator.symbol),), Apply("nonfinite", (whole_tile,), f32) if tests else whole_tile),
    )
    whole = tuple(replace(outer, body=body) if stmt is outer else stmt for stmt in kernel.body)
    own = {stmt.buffer for stmt in walk_stmts(whole) if isinstance(stmt, Alloc)}
    params = dict.fromkeys((*buffers_read(whole), *buffers_written(whole)))
    path, ending, where = kernel.path.partition(", static partition")
    extended = replace(
        kernel,
        body=whole,
        params=tuple(given for given in params if given not in own),
        origins=tuple(dict.fromkeys((*kernel.origins, *wanted.block.origins))),
        path=f"{path}, maxima for {wanted.block.name} on the way{ending}{where}",
    )
    return Taken(place, extended, merge(wanted.block, {wanted.accumulator.symbol: parts}, count), parts)


class _Noted:
    """Puts the maximum behind the one store."""

    def __init__(self, store: Store, wanted: _Maximum, states: Buffer, column: Symbol) -> None:
        self.store, self.wanted, self.states, self.column = store, wanted, states, column

    def __call__(self, stmt: Stmt) -> Stmt | tuple[Stmt, ...]:
        if stmt is not self.store:
            return stmt
        symbol = Symbol(self.store.buffer.name, self.store.buffer.type)
        state = Load(self.states, (Var(self.column),))
        given = _with_cell(self.wanted.value, self.wanted.cell, Var(symbol))
        if isinstance(given, Apply) and given.op == "nonfinite":
            noted: Expr = Fma(given.args[0], Const(0.0, f32), state)
        else:
            noted = Apply("maximum", (state, given), self.states.type)
        return (
            Let(symbol, self.store.value),
            replace(self.store, value=Var(symbol)),
            Store(self.states, (Var(self.column),), noted),
        )


def _with_cell(expr: Expr, cell: Load, by: Expr) -> Expr:
    """Return ``expr`` with ``by`` in place of one cell."""
    return _Cell(cell, by).expr(expr)


class _Cell(Rewriter):
    def __init__(self, cell: Load, by: Expr) -> None:
        self.cell, self.by = cell, by

    def expr(self, expr: Expr) -> Expr:
        return self.by if expr == self.cell else super().expr(expr)
