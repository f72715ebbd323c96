"""Row kernels that follow one another over the same rows become one: softmax, norms, their gradients.

In: kernels of one block each, in order. Out: groups of neighbours that walk the same rows, where whatever one writes and
another touches lies in the row at hand; and the statements of a group. One block of threads takes a row through all steps,
with barriers between, so that a row is read from memory once. Sums keep the order that they have in kernels of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from stagedtensor.codegen.affine import as_index, constant, flat_index
from stagedtensor.codegen.loop_ir import (
    Apply,
    Barrier,
    Block,
    BlockIterator,
    Buffer,
    Expr,
    For,
    If,
    Load,
    Stmt,
    Symbol,
    Var,
    walk,
)
from stagedtensor.codegen.rewrite import substitute
from stagedtensor.codegen.schedule.cuda.launch import (
    MOST_BLOCKS,
    WARP,
    Dealt,
    Launch,
    flatten,
    points_of,
    strided,
)
from stagedtensor.codegen.schedule.cuda.rows import row, scoped, threads_for
from stagedtensor.codegen.schedule.nest import collapse, expressions, fresh, index_symbol, point, stores
from stagedtensor.precision import i64

_LEAST_ROWS = 64
"""Fewer rows leave most of a device idle for the length of several steps."""
_MOST_STEPS = 12
_MOST_COLUMNS = 4
"""Points of a row that a step may have, as a multiple of those that are summed: there are threads for these."""


def groups(blocks: Sequence[Block], by_rows: Callable[[Block], bool]) -> list[list[int]]:
    """Return the places of ``blocks`` in groups, in order; ``by_rows`` tells which ones are reductions of rows."""
    found: list[list[int]] = []
    start = 0
    while start < len(blocks):
        end = _end(blocks, start, by_rows)
        found.append(list(range(start, end)))
        start = end
    return found


def _end(blocks: Sequence[Block], start: int, by_rows: Callable[[Block], bool]) -> int:
    """Where the group that starts at ``start`` ends."""
    first = next((block for block in blocks[start : start + 3] if not _pointwise(block)), None)
    if first is None or not by_rows(first) or not _static(first):
        return start + 1
    rows = tuple(item.bound for item in first.data)
    if points_of(first.data) < _LEAST_ROWS:
        return start + 1
    threads = threads_for(first)
    members: list[Block] = []
    reductions = 0
    for block in blocks[start : start + _MOST_STEPS]:
        reduces = not _pointwise(block)
        fits = (
            _static(block)
            and (by_rows(block) and _bounds(block.data) == rows and threads_for(block) == threads)
            if reduces
            else _static(block)
            and _bounds(block.iterators)[: len(rows)] == rows
            and points_of(block.iterators[len(rows) :]) <= _MOST_COLUMNS * points_of(first.reduce)
        )
        if not fits or (members and not _joins(members, block, rows)):
            break
        members.append(block)
        reductions += reduces
    return start + len(members) if len(members) > 1 and reductions else start + 1


def _pointwise(block: Block) -> bool:
    return not block.accumulators


def _static(block: Block) -> bool:
    return not block.scatter and all(item.bound and constant(item.extent) == item.bound for item in block.iterators)


def _bounds(iterators: Sequence[BlockIterator]) -> tuple[int, ...]:
    return tuple(item.bound for item in iterators)


def _joins(members: Sequence[Block], block: Block, rows: tuple[int, ...]) -> bool:
    """Tell whether ``block`` has something in common with the others, and nothing outside the row at hand."""
    common = False
    for other in members:
        mine, theirs = dict.fromkeys(_touched(block)), dict.fromkeys(_touched(other))
        shared = [buffer for buffer in mine if buffer in theirs]
        common = common or bool(shared)
        written = {item.buffer for item in (*block.stores, *other.stores)}
        for buffer in shared:
            if buffer in written:
                steps = {_step(item, buffer, rows) for item in (block, other)}
                if len(steps) != 1 or None in steps:
                    return False
    return common


def _touched(block: Block) -> Iterator[Buffer]:
    for buffer, _ in _accesses(block):
        yield buffer


def _accesses(block: Block) -> Iterator[tuple[Buffer, tuple[Expr, ...]]]:
    for expr in expressions(block):
        for part in walk(expr):
            if isinstance(part, Load):
                yield part.buffer, part.indices
    for store in block.stores:
        yield store.buffer, store.indices
        for index in store.indices:
            for part in walk(index):
                if isinstance(part, Load):
                    yield part.buffer, part.indices


def _step(block: Block, buffer: Buffer, rows: tuple[int, ...]) -> int | None:
    """Return how many neighbouring cells of ``buffer`` belong to a row; None where some access leaves its row."""
    leading = block.iterators[: len(rows)] if _pointwise(block) else block.data
    total = 1
    for bound in rows:
        total *= bound
    if buffer.layout.steps or buffer.size % total:
        return None
    step = buffer.size // total
    bounds = {item.symbol: item.bound for item in block.iterators}
    for other, indices in _accesses(block):
        if other is not buffer:
            continue
        flat = flat_index(buffer, indices)
        weight = step
        for item in reversed(leading):
            if item.bound > 1 and flat.coefficient(item.symbol) != weight:
                return None
            weight *= item.bound
        greatest = flat.constant
        own = {item.symbol for item in leading}
        for atom, factor in flat.terms:
            if isinstance(atom, Var) and atom.symbol in own:
                continue
            if not isinstance(atom, Var) or atom.symbol not in bounds or factor < 0:
                return None
            greatest += factor * (bounds[atom.symbol] - 1)
        if flat.constant < 0 or greatest >= step:
            return None
    return step


def together(blocks: Sequence[Block]) -> tuple[tuple[Stmt, ...], Launch, str]:
    """Return the statements of a group, its launch and a few words."""
    first = next(block for block in blocks if not _pointwise(block))
    rows, threads = len(first.data), threads_for(first)
    thread, current = Symbol("thread", i64), index_symbol("row")
    dealt: dict[Symbol, Dealt] = {current: "blocks"}
    scratch: list[Stmt] = []
    body: list[Stmt] = []
    for place, block in enumerate(blocks):
        if place:
            body.append(Barrier())  # what the last step wrote is there for every thread
        if _pointwise(block):
            leading, steps = block.iterators[:rows], _pointwise_row(block, rows, thread, dealt)
        else:
            plain = collapse(block)
            found = row(plain, thread)
            scratch += found.scratch
            dealt.update(found.dealt)
            leading, steps = plain.data, found.body
        flat = flatten(leading, "row", Var(current))
        body.append(scoped(flat.wrap(substitute(steps, flat.mapping))))
    total = points_of(first.data)
    if threads > WARP:
        body.append(Barrier())  # the next row writes the shared states again
    walked = flatten((BlockIterator(current, as_index(total), total),), "row")
    loops = (*scratch, strided(walked, substitute(tuple(body), walked.mapping)))
    dealt[walked.symbol] = dealt.pop(current)
    launch = Launch(max(1, min(MOST_BLOCKS * 8, total)), threads, dealt, cooperative=True, thread=thread)
    return loops, launch, f"rows through {len(blocks)} steps, {threads} threads per row"


def _pointwise_row(block: Block, rows: int, thread: Symbol, dealt: dict[Symbol, Dealt]) -> tuple[Stmt, ...]:
    """The points of one row, dealt out to the threads."""
    rest = block.iterators[rows:]
    if not rest:
        work = point(block, {})
        return (If(Apply("eq", (Var(thread), as_index(0)), i64), work.wrap(stores(block, work.mapping))),)
    flat = flatten(rest, "column")
    if len(rest) == 1:
        flat = flatten((BlockIterator(fresh(rest[0].symbol), rest[0].extent, rest[0].bound),), "column")
        mapping: dict[Symbol, Expr] = {rest[0].symbol: Var(flat.symbol)}
    else:
        mapping = flat.mapping
    dealt[flat.symbol] = "threads of a block"
    work = point(block, mapping)
    inner = flat.wrap(work.wrap(stores(block, work.mapping)))
    return (For(BlockIterator(flat.symbol, flat.extent, flat.bound), inner, "lane"),)

