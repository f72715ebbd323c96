"""Template for reductions along memory: partial states in lanes over the innermost reduce iterator.

In: a block whose accumulators may all be combined. Out: its loops: per data point, L partial states that each take
every L-th reduce point, merged by a fixed tree (halves onto halves). L depends on the named target and the type alone,
so the sum is the same for any thread count. ``serial`` is the same nest without lanes, in the block's own order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stagedtensor.codegen.affine import add, constant, floor_divide, modulo, multiply
from stagedtensor.codegen.loop_ir import (
    Accumulator,
    Alloc,
    Assign,
    Block,
    BlockIterator,
    Buffer,
    Const,
    Declare,
    Expr,
    For,
    Let,
    Load,
    LoopKind,
    Stmt,
    Store,
    Symbol,
    Var,
    index,
)
from stagedtensor.codegen.rewrite import substitute
from stagedtensor.codegen.schedule.nest import (
    collapse,
    combined,
    fresh,
    index_symbol,
    loop,
    nest,
    point,
    stores,
)


def _data_nest(block: Block, body: Sequence[Stmt], parallel: bool) -> tuple[Stmt, ...]:
    kinds: dict[Symbol, LoopKind] = {}
    data = list(block.data)
    if parallel and data:
        outer = next((item for item in data if item.bound >= 4), max(data, key=lambda item: item.bound))
        data.remove(outer)
        data.insert(0, outer)
        kinds[outer.symbol] = "parallel"
    return nest(data, body, kinds)


def serial(block: Block, *, parallel: bool) -> tuple[tuple[Stmt, ...], str]:
    """Return the nest in the block's own order: accumulators as scalars, reduce iterators innermost."""
    block = collapse(block)
    scalars: dict[Symbol, Expr] = {}
    body: list[Stmt] = []
    names: dict[Symbol, Symbol] = {}
    for item in block.accumulators:
        symbol = fresh(item.symbol)
        names[item.symbol] = symbol
        scalars[item.symbol] = Var(symbol)
        body.append(Declare(symbol, item.init))
    work = point(block, scalars)
    updates = work.wrap(_assignments(block.accumulators, names, work.mapping))
    body += nest(block.reduce, updates, {})
    body += stores(block, scalars)
    return _data_nest(block, body, parallel), "reduction in order"


def _assignments(
    accumulators: Sequence[Accumulator], names: Mapping[Symbol, Symbol], mapping: Mapping[Symbol, Expr]
) -> list[Stmt]:
    """New states, all from the old ones: an accumulator that others read is assigned after they are known."""
    if len(accumulators) == 1:
        (item,) = accumulators
        return [Assign(names[item.symbol], substitute(item.update, mapping))]
    lets = [Let(fresh(item.symbol), substitute(item.update, mapping)) for item in accumulators]
    return [
        *lets,
        *(Assign(names[item.symbol], Var(let.symbol)) for item, let in zip(accumulators, lets, strict=True)),
    ]


def rows(block: Block, lanes: int, *, parallel: bool) -> tuple[tuple[Stmt, ...], str]:
    """Return the nest with ``lanes`` partial states (a power of 2); every accumulator must name how it combines."""
    block = collapse(block)
    *outer, inner = block.reduce
    states = {
        item.symbol: Buffer(item.symbol.hint, item.symbol.type, (lanes,), "register") for item in block.accumulators
    }
    body: list[Stmt] = [Alloc(buffer) for buffer in states.values()]
    body.append(fill(block.accumulators, states, lanes))
    chunk, lane = index_symbol("i_chunk"), index_symbol("i_lane")
    chunks = floor_divide(inner.extent, lanes)
    main = loop(
        lane,
        lanes,
        _step(block, states, inner, Var(lane), add(multiply(Var(chunk), lanes), Var(lane))),
        "lane",
    )
    steps: list[Stmt] = []
    if constant(chunks) != 0:
        steps.append(loop(chunk, chunks, (main,), bound=max(1, inner.bound // lanes)))
    rest = modulo(inner.extent, lanes)
    if constant(rest) != 0:
        tail = index_symbol("i_lane")
        start = multiply(chunks, lanes)
        steps.append(loop(tail, rest, _step(block, states, inner, Var(tail), add(start, Var(tail))), bound=lanes - 1))
    body += nest(outer, steps, {})
    body += merge_tree(block.accumulators, states, lanes)
    lets, results = finals(block.accumulators, states)
    body += lets
    body += stores(block, results)
    return _data_nest(block, body, parallel), f"row reduction, {lanes} lanes"


def fill(accumulators: Sequence[Accumulator], states: Mapping[Symbol, Buffer], lanes: int) -> For:
    """Return the loop that sets every partial state to its neutral element."""
    lane = index_symbol("i_lane")
    body: list[Stmt] = []
    for item in accumulators:
        assert item.neutral is not None
        body.append(Store(states[item.symbol], (Var(lane),), item.neutral))
    return loop(lane, lanes, body, "lane")


def _step(
    block: Block, states: Mapping[Symbol, Buffer], inner: BlockIterator, lane: Expr, position: Expr
) -> tuple[Stmt, ...]:
    mapping: dict[Symbol, Expr] = {inner.symbol: position}
    for symbol, buffer in states.items():
        mapping[symbol] = Load(buffer, (lane,))
    work = point(block, mapping)
    return work.wrap(updates_in_place(block.accumulators, states, (lane,), work.mapping))


def updates_in_place(
    accumulators: Sequence[Accumulator],
    states: Mapping[Symbol, Buffer],
    cell: tuple[Expr, ...],
    mapping: Mapping[Symbol, Expr],
) -> list[Stmt]:
    """Return the stores of new states to ``cell`` of each array, all from the old states."""
    if len(accumulators) == 1:
        (item,) = accumulators
        return [Store(states[item.symbol], cell, substitute(item.update, mapping))]
    lets = [Let(fresh(item.symbol), substitute(item.update, mapping)) for item in accumulators]
    written = [Store(states[item.symbol], cell, Var(let.symbol)) for item, let in zip(accumulators, lets, strict=True)]
    return [*lets, *written]


def merge_tree(accumulators: Sequence[Accumulator], states: Mapping[Symbol, Buffer], lanes: int) -> list[Stmt]:
    """Return the loops that merge all lanes into lane 0, halves onto halves."""
    steps: list[Stmt] = []
    width = lanes // 2
    while width >= 1:
        lane = index_symbol("i_lane")
        low: dict[Symbol, Expr] = {symbol: Load(buffer, (Var(lane),)) for symbol, buffer in states.items()}
        high: dict[Symbol, Expr] = {symbol: Load(buffer, (add(Var(lane), width),)) for symbol, buffer in states.items()}
        steps.append(loop(lane, width, _merge(accumulators, states, (Var(lane),), low, high), "lane"))
        width //= 2
    return steps


def _merge(
    accumulators: Sequence[Accumulator],
    states: Mapping[Symbol, Buffer],
    cell: tuple[Expr, ...],
    low: Mapping[Symbol, Expr],
    high: Mapping[Symbol, Expr],
) -> list[Stmt]:
    merged = combined(accumulators, low, high)
    if len(accumulators) == 1:
        (item,) = accumulators
        return [Store(states[item.symbol], cell, merged[item.symbol])]
    lets = {item.symbol: Let(fresh(item.symbol), merged[item.symbol]) for item in accumulators}
    return [
        *lets.values(),
        *(Store(states[symbol], cell, Var(let.symbol)) for symbol, let in lets.items()),
    ]


def finals(
    accumulators: Sequence[Accumulator], states: Mapping[Symbol, Buffer]
) -> tuple[list[Let], dict[Symbol, Expr]]:
    """Return lets and results: the initial state merged with lane 0, which the tree left all others in."""
    first: dict[Symbol, Expr] = {symbol: Load(buffer, (index(0),)) for symbol, buffer in states.items()}
    initial: dict[Symbol, Expr] = {item.symbol: item.init for item in accumulators}
    merged = combined(accumulators, initial, first)
    by_symbol = {item.symbol: item for item in accumulators}
    lets: list[Let] = []
    results: dict[Symbol, Expr] = {}
    for item in accumulators:
        value = item if item.paired_with is None else by_symbol[item.paired_with]
        if same_constant(value.init, value.neutral):
            results[item.symbol] = first[item.symbol]
        else:
            lets.append(Let(fresh(item.symbol), merged[item.symbol]))
            results[item.symbol] = Var(lets[-1].symbol)
    return lets, results


def same_constant(lhs: Expr, rhs: Expr | None) -> bool:
    """Tell whether both are the same constant, the sign of zero included."""
    if not (isinstance(lhs, Const) and isinstance(rhs, Const) and lhs.type is rhs.type):
        return False
    return repr(lhs.value) == repr(rhs.value) or (not lhs.type.is_float and lhs.value == rhs.value)
