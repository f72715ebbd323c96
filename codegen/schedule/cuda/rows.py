"""CUDA template for reductions along memory: one block of threads per result.

In: a block whose accumulators combine. Out: its loops. Each thread takes every T-th reduce point in order; the states
of a warp meet through shuffles, halves onto halves, those of the warps through shared memory in the same way. T depends
on shapes alone and there are no atomics, so the sum is the same in every run and for any grid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stagedtensor.codegen.affine import as_index, floor_divide, modulo
from stagedtensor.codegen.loop_ir import (
    Accumulator,
    Alloc,
    Apply,
    Assign,
    Barrier,
    Block,
    BlockIterator,
    Buffer,
    Declare,
    Expr,
    For,
    If,
    Let,
    Load,
    Stmt,
    Store,
    Symbol,
    Var,
)
from stagedtensor.codegen.rewrite import substitute
from stagedtensor.codegen.schedule.analysis import depends
from stagedtensor.codegen.schedule.cuda.elementwise import assignments
from stagedtensor.codegen.schedule.cuda.launch import (
    THREADS,
    WARP,
    Dealt,
    Launch,
    cooperative_blocks,
    flatten,
    less,
    points_of,
    shuffled,
    strided,
)
from stagedtensor.codegen.schedule.nest import collapse, combined, fresh, index_symbol, loads_in, point, stores
from stagedtensor.codegen.schedule.rows import same_constant
from stagedtensor.precision import i64

_POINTS_OF_A_WARP = 512
"""Reduce points that one warp takes by itself; more are worth a whole block and its barriers."""


def rows(block: Block) -> tuple[tuple[Stmt, ...], Launch, str]:
    """Return the nest; every accumulator must name how it combines and have a neutral state."""
    block = collapse(block)
    thread = Symbol("thread", i64)
    threads = threads_for(block)
    found = row(block, thread)
    body = list(found.body)
    if threads > WARP:
        body.append(Barrier())  # the next row writes the shared states again
    loops: tuple[Stmt, ...] = (*found.scratch, *body)
    dealt, blocks = dict(found.dealt), 1
    if block.data:
        results = flatten(block.data, "row")
        blocks = cooperative_blocks(results.bound)
        inner = substitute(tuple(body), results.mapping)
        loops = (*found.scratch, strided(results, results.wrap(inner)))
        dealt[results.symbol] = "blocks"
    launch = Launch(blocks, threads, dealt, cooperative=True, thread=thread)
    return loops, launch, f"row reduction, {threads} threads per result"


def threads_for(block: Block) -> int:
    """Return how many threads share one result of ``block``."""
    return WARP if points_of(block.reduce) <= _POINTS_OF_A_WARP else THREADS


@dataclass(frozen=True)
class Row:
    """The work of one result, in the data iterators of its block: shared arrays, statements, and who walks its loop."""

    scratch: tuple[Stmt, ...]
    body: tuple[Stmt, ...]
    dealt: dict[Symbol, Dealt]


def row(block: Block, thread: Symbol) -> Row:
    """Return the reduction of one row by :func:`threads_for` threads; ``thread`` is the thread's number."""
    along = flatten(block.reduce, "k")
    threads = threads_for(block)
    names = {item.symbol: fresh(item.symbol) for item in block.accumulators}
    states: dict[Symbol, Expr] = {old: Var(new) for old, new in names.items()}
    work = point(block, {**states, **along.mapping})
    step = along.wrap(work.wrap(assignments(block.accumulators, names, work.mapping)))
    body: list[Stmt] = []
    for item in block.accumulators:
        assert item.neutral is not None
        body.append(Declare(names[item.symbol], item.neutral))
    body.append(For(BlockIterator(along.symbol, along.extent, along.bound), step, "lane"))
    body += meet_in_warp(block.accumulators, names)
    scratch: list[Stmt] = []
    if threads > WARP:
        scratch, across = meet_across_warps(block.accumulators, names, thread, threads // WARP)
        body += across
    elif _read_by_all(block):
        body.append(Barrier())  # a result may be stored in place of a cell that every thread has read
    body.append(If(Apply("eq", (Var(thread), as_index(0)), i64), tuple(results_of(block, names))))
    return Row(tuple(scratch), tuple(body), {along.symbol: "threads of a block"})


def _read_by_all(block: Block) -> bool:
    """Tell whether some operand's cell belongs to a whole row of the reduction, not to one point of it."""
    read = (*(item.update for item in block.accumulators), *(let.value for let in block.lets))
    return any(not any(depends(load, item) for item in block.reduce) for load in loads_in(*read))


def meet_in_warp(accumulators: tuple[Accumulator, ...], names: dict[Symbol, Symbol]) -> list[Stmt]:
    """Return the exchange in which every thread of the warp takes part; thread 0 of it has the whole afterwards."""
    steps: list[Stmt] = []
    width = WARP // 2
    while width >= 1:
        others = {item.symbol: Symbol(f"other_{item.symbol.hint}", item.symbol.type) for item in accumulators}
        for item in accumulators:
            steps.append(Let(others[item.symbol], shuffled(Var(names[item.symbol]), width)))
        mine: dict[Symbol, Expr] = {old: Var(new) for old, new in names.items()}
        theirs: dict[Symbol, Expr] = {old: Var(new) for old, new in others.items()}
        steps += _merge(accumulators, names, mine, theirs)
        width //= 2
    return [scoped(tuple(part)) for part in _chunks(steps)]


def _chunks(steps: list[Stmt]) -> list[list[Stmt]]:
    """One chunk per width, so that each has names of its own."""
    size = len(steps) // (WARP.bit_length() - 1)
    return [steps[start : start + size] for start in range(0, len(steps), size)]


def scoped(body: tuple[Stmt, ...]) -> Stmt:
    """Return a body with a scope of its own: a loop of one iteration, which emission prints as braces."""
    symbol = index_symbol("once")
    return For(BlockIterator(symbol, as_index(1), 1), body)


def _merge(
    accumulators: tuple[Accumulator, ...],
    names: dict[Symbol, Symbol],
    mine: Mapping[Symbol, Expr],
    theirs: Mapping[Symbol, Expr],
) -> list[Stmt]:
    merged = combined(accumulators, mine, theirs)
    if len(accumulators) == 1:
        (item,) = accumulators
        return [Assign(names[item.symbol], merged[item.symbol])]
    lets = {item.symbol: Let(fresh(item.symbol), merged[item.symbol]) for item in accumulators}
    return [*lets.values(), *(Assign(names[old], Var(let.symbol)) for old, let in lets.items())]


def meet_across_warps(
    accumulators: tuple[Accumulator, ...], names: dict[Symbol, Symbol], thread: Symbol, warps: int
) -> tuple[list[Stmt], list[Stmt]]:
    """Return shared arrays, and how the states of warps meet in them; thread 0 has the whole afterwards."""
    cells = {
        item.symbol: Buffer(f"{item.symbol.hint}_warps", item.symbol.type, (warps,), "shared") for item in accumulators
    }
    lane, warp = modulo(Var(thread), WARP), floor_divide(Var(thread), WARP)
    first = tuple(Store(cells[old], (warp,), Var(new)) for old, new in names.items())
    again: list[Stmt] = []
    for item in accumulators:
        assert item.neutral is not None
        loaded = Load(cells[item.symbol], (Var(thread),))
        value = Apply("where", (less(Var(thread), warps), loaded, item.neutral), item.symbol.type)
        again.append(Assign(names[item.symbol], value))
    again += meet_in_warp(accumulators, names)
    steps: list[Stmt] = [
        If(Apply("eq", (lane, as_index(0)), i64), first),
        Barrier(),
        If(less(Var(thread), WARP), tuple(again)),
    ]
    return [Alloc(buffer) for buffer in cells.values()], steps


def results_of(block: Block, names: dict[Symbol, Symbol]) -> list[Stmt]:
    """Return the initial states merged with the sums, then the stores."""
    sums: dict[Symbol, Expr] = {old: Var(new) for old, new in names.items()}
    initial: dict[Symbol, Expr] = {item.symbol: item.init for item in block.accumulators}
    merged = combined(block.accumulators, initial, sums)
    by_symbol = {item.symbol: item for item in block.accumulators}
    body: list[Stmt] = []
    results: dict[Symbol, Expr] = {}
    for item in block.accumulators:
        value = item if item.paired_with is None else by_symbol[item.paired_with]
        if same_constant(value.init, value.neutral):
            results[item.symbol] = sums[item.symbol]
        else:
            let = Let(fresh(item.symbol), merged[item.symbol])
            body.append(let)
            results[item.symbol] = Var(let.symbol)
    return [*body, *stores(block, results)]
