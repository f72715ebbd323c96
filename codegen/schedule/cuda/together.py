"""Row kernels that follow one another over the same rows become one: softmax, norms, their gradients.

In: kernels of one block each, in order. Out: groups of neighbours that walk the same rows, where whatever one writes
and another touches lies in the row at hand; and the statements of a group. One block of threads takes a row through all
steps, with barriers between, so that a row is read from memory once. Sums keep the order that they have in kernels of
their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stagedtensor.codegen.affine import Affine, as_index, constant
from stagedtensor.codegen.loop_ir import (
    Apply,
    Barrier,
    Block,
    BlockIterator,
    Buffer,
    For,
    If,
    Stmt,
    Symbol,
    Var,
)
from stagedtensor.codegen.rewrite import substitute
from stagedtensor.codegen.schedule.cuda.launch import (
    Dealt,
    Flat,
    Launch,
    cooperative_blocks,
    flatten,
    points_of,
    strided,
)
from stagedtensor.codegen.schedule.cuda.rows import row, scoped, threads_for
from stagedtensor.codegen.schedule.nest import accesses, collapse, index_symbol, point, stores
from stagedtensor.precision import i64

_LEAST_ROWS = 64
"""Fewer rows leave most of a device idle for the length of several steps."""
_MOST_STEPS = 12
_LATEST_REDUCTION = 3
"""Among how many blocks the first reduction is looked for: a group may begin with one or two that prepare its rows."""
_MOST_COLUMNS = 4
"""Points of a row that a step may have, as a multiple of those that are summed: there are threads for these."""


def groups(blocks: Sequence[Block], by_rows: Callable[[Block], bool]) -> list[list[int]]:
    """Return the places of ``blocks`` in groups, in order; ``by_rows`` tells which ones are reductions of rows."""
    found: list[list[int]] = []
    start = 0
    while start < len(blocks):
        count = max(1, _count(blocks[start : start + _MOST_STEPS], by_rows))
        found.append(list(range(start, start + count)))
        start += count
    return found


def _count(blocks: Sequence[Block], by_rows: Callable[[Block], bool]) -> int:
    """How many of ``blocks``, from the first on, walk the rows of the first reduction among them; 0 for none."""
    first = next((block for block in blocks[:_LATEST_REDUCTION] if not _pointwise(block)), None)
    if first is None or not by_rows(first) or not _static(first) or points_of(first.data) < _LEAST_ROWS:
        return 0
    rows = _bounds(first.data)
    members: list[Block] = []
    for block in blocks:
        alike = _points_of_rows(block, first) if _pointwise(block) else by_rows(block) and _sums_of_rows(block, first)
        if not alike or not _static(block) or (members and not _joins(members, block, rows)):
            break
        members.append(block)
    return len(members) if len(members) > 1 and any(block is first for block in members) else 0


def _points_of_rows(block: Block, first: Block) -> bool:
    """Tell whether ``block`` has the rows of ``first`` outermost, and no more points in a row than threads can do."""
    rows = len(first.data)
    leading, rest = block.iterators[:rows], block.iterators[rows:]
    return _bounds(leading) == _bounds(first.data) and points_of(rest) <= _MOST_COLUMNS * points_of(first.reduce)


def _sums_of_rows(block: Block, first: Block) -> bool:
    """Tell whether ``block`` has the rows of ``first`` and as many threads for each."""
    return _bounds(block.data) == _bounds(first.data) and threads_for(block) == threads_for(first)


def _pointwise(block: Block) -> bool:
    return not block.accumulators


def _static(block: Block) -> bool:
    return not block.scatter and all(item.bound and constant(item.extent) == item.bound for item in block.iterators)


def _bounds(iterators: Sequence[BlockIterator]) -> tuple[int, ...]:
    return tuple(item.bound for item in iterators)


def _joins(members: Sequence[Block], block: Block, rows: tuple[int, ...]) -> bool:
    """Tell whether ``block`` has something in common with the others, and nothing outside the row at hand."""
    mine = {buffer for buffer, _ in accesses(block)}
    common = False
    for other in members:
        shared = mine & {buffer for buffer, _ in accesses(other)}
        written = {item.buffer for item in (*block.stores, *other.stores)}
        if not all(_in_rows(block, buffer, rows) and _in_rows(other, buffer, rows) for buffer in shared & written):
            return False
        common = common or bool(shared)
    return common


def _in_rows(block: Block, buffer: Buffer, rows: tuple[int, ...]) -> bool:
    """Tell whether ``buffer`` lies row by row, and ``block`` touches of it only cells of the row at hand."""
    total = 1
    for bound in rows:
        total *= bound
    if buffer.layout.steps or buffer.size % total:
        return False
    cells = buffer.size // total
    return all(_in_row(flat, block, cells, len(rows)) for other, flat in accesses(block) if other is buffer)


def _in_row(flat: Affine, block: Block, cells: int, rows: int) -> bool:
    """Tell whether the access ``flat`` is the number of the row times ``cells``, plus less than that."""
    leading = block.iterators[:rows] if _pointwise(block) else block.data
    weight = cells
    for item in reversed(leading):
        if item.bound > 1 and flat.coefficient(item.symbol) != weight:
            return False
        weight *= item.bound
    of_row = {item.symbol for item in leading}
    bounds = {item.symbol: item.bound for item in block.iterators}
    greatest = flat.constant
    for atom, factor in flat.terms:
        if not isinstance(atom, Var) or atom.symbol not in bounds:
            return False
        if atom.symbol not in of_row:
            if factor < 0:
                return False
            greatest += factor * (bounds[atom.symbol] - 1)
    return flat.constant >= 0 and greatest < cells


def together(blocks: Sequence[Block]) -> tuple[tuple[Stmt, ...], Launch, str]:
    """Return the statements of a group, its launch and a few words."""
    first = next(block for block in blocks if not _pointwise(block))
    threads, total = threads_for(first), points_of(first.data)
    thread, current = Symbol("thread", i64), index_symbol("row")
    dealt: dict[Symbol, Dealt] = {current: "blocks"}
    scratch: list[Stmt] = []
    body: list[Stmt] = []
    for place, block in enumerate(blocks):
        if place:
            body.append(Barrier())  # what the last step wrote is there for every thread
        if _pointwise(block):
            leading, steps = block.iterators[: len(first.data)], _pointwise_row(block, len(first.data), thread, dealt)
        else:
            plain = collapse(block)
            found = row(plain, thread)
            scratch += found.scratch
            dealt.update(found.dealt)
            leading, steps = plain.data, found.body
        flat = flatten(leading, "row", Var(current))
        body.append(scoped(flat.wrap(substitute(steps, flat.mapping))))
    # between the use of shared states in one row and in the next there is a barrier: that between two of the steps
    loops = (*scratch, strided(Flat(current, as_index(total), total, (), {}, None), body))
    launch = Launch(cooperative_blocks(total), threads, dealt, cooperative=True, thread=thread)
    return loops, launch, f"rows through {len(blocks)} steps, {threads} threads per row"


def _pointwise_row(block: Block, rows: int, thread: Symbol, dealt: dict[Symbol, Dealt]) -> tuple[Stmt, ...]:
    """The points of one row, dealt out to the threads."""
    rest = block.iterators[rows:]
    if not rest:
        work = point(block, {})
        return (If(Apply("eq", (Var(thread), as_index(0)), i64), work.wrap(stores(block, work.mapping))),)
    flat = flatten(rest, "column")
    dealt[flat.symbol] = "threads of a block"
    work = point(block, flat.mapping)
    inner = flat.wrap(work.wrap(stores(block, work.mapping)))
    return (For(BlockIterator(flat.symbol, flat.extent, flat.bound), inner, "lane"),)
