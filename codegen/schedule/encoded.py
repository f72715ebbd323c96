"""Templates for contractions with an encoded weight: decode in the loop that reads, in the order of the block's bytes.

In: a multiply-add reduction one of whose operands decodes blocks. Out: its loops, cut so that within each the position
in the block is a constant plus a lane: every choice of the encoding (which nibble, which scale) is settled when the
code is made. A block falls into segments, the longest for which that holds::

    for i_block: for l in 0..31: acc[l] <- fma((d*S0)*low(qs[l]) - dmin*M0, x[256*i_block + l], acc[l])
                 for l in 0..31: acc[l] <- fma((d*S1)*high(qs[l]) - dmin*M1, x[256*i_block + 32 + l], acc[l])   ...

Lanes and their merge are those of the template for dense rows, so the sums are the same bits as for the decoded weight.
No scratch holds more than one row of the weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from stagedtensor.codegen.affine import add, constant, multiply
from stagedtensor.codegen.intervals import Interval
from stagedtensor.codegen.loop_ir import (
    Alloc,
    Apply,
    Block,
    BlockIterator,
    Buffer,
    Cast,
    Const,
    Expr,
    Let,
    Load,
    Stmt,
    Store,
    Symbol,
    Var,
    children,
    index,
    walk,
    with_children,
)
from stagedtensor.codegen.passes.simplify import simplify_positions
from stagedtensor.codegen.rewrite import substitute, symbols_of
from stagedtensor.codegen.schedule.analysis import Contraction, contraction, depends
from stagedtensor.codegen.schedule.block_scales import either, side_by_side
from stagedtensor.codegen.schedule.nest import index_symbol, inline_lets, loads_in, loop, nest, stores
from stagedtensor.codegen.schedule.rows import fill, finals, merge_tree
from stagedtensor.encoded import Encoded
from stagedtensor.precision import f16, i64

_LEAST_SEGMENT = 4
_WHOLE_TENSOR_STEP = 64
_MOST_ROW_BYTES = 1 << 18
_TILE = 4
_SMALL_BLOCK = 32
_WIDE = 32
"""Lanes of a target whose vectors hold several runs of scales and choose between them by a mask."""
_KEY = Symbol("key", i64)


def encoded_in(*exprs: Expr) -> Encoded | None:
    """Return the encoded value that ``exprs`` decode, if any."""
    for load in loads_in(*exprs):
        value: Encoded | None = getattr(load.buffer.node, "encoded", None)
        if value is not None:
            return value
    return None


@dataclass(frozen=True)
class Segment:
    """Elements ``start .. start + length - 1`` of a block; ``lane`` runs over them in ``value``."""

    start: int
    length: int
    lane: Symbol
    value: Expr


@dataclass(frozen=True)
class _Cut:
    """A weight read along ``along``, which is ``step * block + position``."""

    along: BlockIterator
    step: int
    block: Symbol
    segments: tuple[Segment, ...]


def encoded_contraction(block: Block, lanes: int, *, parallel: bool) -> tuple[tuple[Stmt, ...], str] | None:
    """Return the loops of a contraction with an encoded weight, or None where it is no such thing."""
    found = contraction(block)
    if found is None or found.block.guard is not None or any(item.bound == 0 for item in block.iterators):
        return None
    weight, other = (found.lhs, found.rhs) if encoded_in(found.lhs) is not None else (found.rhs, found.lhs)
    value = encoded_in(weight)
    if value is None or encoded_in(other) is not None or len(found.block.reduce) != 1:
        return None
    (inner,) = found.block.reduce
    step = _WHOLE_TENSOR_STEP if value.encoding.whole else value.encoding.elements
    if value.shape[-1] % step:
        return None
    cut = _cut(found.block, weight, inner, step)
    if cut is not None and constant(inner.extent) == value.shape[-1]:
        return _along_rows(found, weight, cut, lanes, parallel)
    for item in found.block.data:
        if constant(item.extent) == value.shape[-1] and not depends(other, item):
            cut = _cut(found.block, weight, item, step)
            if cut is not None:
                return _across_rows(found, weight, cut, parallel)
    return None


def encoded_elementwise(block: Block, *, parallel: bool) -> tuple[tuple[Stmt, ...], str] | None:
    """Return the loops of a block that decodes into its results (rows of a table, a dense copy), or None."""
    if (
        block.accumulators
        or block.guard is not None
        or len(block.stores) != 1
        or any(item.bound == 0 for item in block.iterators)
    ):
        return None
    (store,) = block.stores
    result = inline_lets(block, store.value)
    value = encoded_in(result)
    if value is None:
        return None
    step = _WHOLE_TENSOR_STEP if value.encoding.whole else value.encoding.elements
    along = next((item for item in reversed(block.data) if constant(item.extent) == value.shape[-1]), None)
    cut = None if along is None or value.shape[-1] % step else _cut(block, result, along, step)
    if along is None or cut is None:
        return None
    tables, cut = _prepared(cut, scales=False)
    steps: list[Stmt] = [*tables]
    for part in cut.segments:
        where = {along.symbol: _position(cut, part.start, Var(part.lane))}
        cell = tuple(substitute(place, where) for place in store.indices)
        lets, decoded = _lifted(part)
        steps += [*lets, loop(part.lane, part.length, (replace(store, indices=cell, value=decoded),), "lane")]
    blocks = BlockIterator(cut.block, index(along.bound // step), along.bound // step)
    others = [item for item in block.data if item is not along]
    return _data_nest((*others, blocks), steps, parallel), f"decodes blocks in {len(cut.segments)} segments"


# -- segments -----------------------------------------------------------------------------------------------------


def _cut(block: Block, weight: Expr, along: BlockIterator, step: int) -> _Cut | None:
    if not depends(weight, along):
        return None
    number = index_symbol(f"{along.symbol.hint}_block")
    ranges = {item.symbol: Interval(0, max(item.bound - 1, 0)) for item in block.iterators}
    ranges[number] = Interval(0, along.bound // step - 1)
    found = _segments(weight, along, number, step, 0, step, ranges)
    return None if found is None else _Cut(along, step, number, found)


def _segments(
    weight: Expr,
    along: BlockIterator,
    number: Symbol,
    step: int,
    start: int,
    length: int,
    ranges: Mapping[Symbol, Interval],
) -> tuple[Segment, ...] | None:
    lane = index_symbol("i_lane")
    position = add(add(multiply(Var(number), step), start), Var(lane))
    value = simplify_positions(substitute(weight, {along.symbol: position}), {**ranges, lane: Interval(0, length - 1)})
    if not _chooses(value, lane):
        return (Segment(start, length, lane, value),)
    if length <= _LEAST_SEGMENT:
        return None
    half = length // 2
    first = _segments(weight, along, number, step, start, half, ranges)
    if first is None:
        return None
    second = _segments(weight, along, number, step, start + half, half, ranges)
    if second is None:
        return None
    joined = _joined(first[0], second[0], ranges) if len(first) == len(second) == 1 else None
    return (*first, *second) if joined is None else (joined,)


def _joined(first: Segment, second: Segment, ranges: Mapping[Symbol, Interval]) -> Segment | None:
    """One segment of two halves that differ in values which no lane changes, such as the scale of 16 elements of a run."""
    lane, half = first.lane, first.length
    moved = simplify_positions(
        substitute(second.value, {second.lane: add(Var(lane), -half)}), {**ranges, lane: Interval(half, 2 * half - 1)}
    )
    value = either(Apply("lt", (Var(lane), index(half)), i64), lane, first.value, moved)
    return None if value is None else Segment(first.start, 2 * half, lane, value)


def _lifted(part: Segment) -> tuple[list[Let], Expr]:
    """Name what no lane of a segment changes: scales are computed once, and no choice between lanes holds a load."""
    lets: dict[Expr, Let] = {}

    def visit(expr: Expr) -> Expr:
        if isinstance(expr, Const | Var) or expr.type is i64:
            return expr
        if part.lane not in symbols_of(expr):
            return Var(lets.setdefault(expr, Let(Symbol(_hint(expr), expr.type), expr)).symbol)
        return expr if isinstance(expr, Load) else with_children(expr, tuple(map(visit, children(expr))))

    value = visit(part.value)
    return list(lets.values()), value


def _hint(expr: Expr) -> str:
    return "step" if expr.type.is_float else "bits"


def _chooses(value: Expr, lane: Symbol) -> bool:
    """Whether the value still divides a position of the lane: bytes and scales then change within the segment."""
    return any(
        isinstance(part, Apply)
        and part.type is i64
        and part.op in ("floordiv", "mod", "ge")
        and any(isinstance(inner, Var) and inner.symbol is lane for inner in walk(part))
        for part in walk(value)
    )


# -- the weight's rows along the reduction: y = W x ---------------------------------------------------------------


def _along_rows(
    found: Contraction, weight: Expr, cut: _Cut, lanes: int, parallel: bool
) -> tuple[tuple[Stmt, ...], str]:
    """Per row of the weight, and per tile of the other operand's rows, lanes of partial sums."""
    block = found.block
    shared = [item for item in block.data if depends(weight, item)]
    repeated = [item for item in block.data if not depends(weight, item)]
    lanes = _fitting(lanes, cut)
    row_bytes = cut.along.bound * weight.type.bytes
    note = f"decodes blocks in {len(cut.segments)} segments, {lanes} lanes"
    if all(item.extent == index(1) for item in repeated) or row_bytes > _MOST_ROW_BYTES:
        return _data_nest(
            (*shared, *repeated), _sums(block, weight, cut, lanes, None), parallel
        ), f"encoded rows, {note}"
    row = Buffer("row", weight.type, (cut.along.bound,), "local")
    body = [Alloc(row), *_decode_row(cut, row), *_tiles(block, weight, cut, lanes, row, repeated)]
    return _data_nest(shared, body, parallel), f"encoded rows, each decoded once, {note}"


def _fitting(lanes: int, cut: _Cut) -> int:
    """As many lanes as a dense row would take; a segment fills them or a part of them."""
    while lanes > 4 and (lanes > cut.along.bound or cut.step % lanes):
        lanes //= 2
    return lanes


def _data_nest(iterators: Sequence[BlockIterator], body: Sequence[Stmt], parallel: bool) -> tuple[Stmt, ...]:
    ordered = list(iterators)
    if parallel and ordered:
        outer = next((item for item in ordered if item.bound >= 4), max(ordered, key=lambda item: item.bound))
        ordered.remove(outer)
        ordered.insert(0, outer)
        return nest(ordered, body, {outer.symbol: "parallel"})
    return nest(ordered, body, {})


def _decode_row(cut: _Cut, row: Buffer) -> tuple[Stmt, ...]:
    prepared, cut = _prepared(cut, scales=True)
    return (*prepared, loop(cut.block, cut.along.bound // cut.step, _decoding(cut, row, Var(cut.block))))


def _decoding(cut: _Cut, target: Buffer, block: Expr) -> list[Stmt]:
    """The loops that decode one block into ``target``, whose block number is ``block``."""
    body: list[Stmt] = []
    for part in cut.segments:
        lets, value = _lifted(part)
        cell = add(add(multiply(block, cut.step), part.start), Var(part.lane))
        body += [*lets, loop(part.lane, part.length, (Store(target, (cell,), value),), "lane")]
    return body


def _position(cut: _Cut, start: int, lane: Expr) -> Expr:
    return add(add(multiply(Var(cut.block), cut.step), start), lane)


def _tiles(
    block: Block, weight: Expr, cut: _Cut, lanes: int, row: Buffer, repeated: Sequence[BlockIterator]
) -> tuple[Stmt, ...]:
    """All rows of the other operand against one decoded row: a few at a time, so that each load of it serves them all."""
    *outer, last = repeated
    extent = constant(last.extent)
    height = next((size for size in (_TILE, 2) if extent is not None and extent % size == 0), 1)
    if height == 1 or extent is None:
        return nest(repeated, _sums(block, weight, cut, lanes, row), {})
    tile = index_symbol(f"{last.symbol.hint}_tile")
    within = [add(multiply(Var(tile), height), place) for place in range(height)]
    body = _row_sums(block, weight, cut, lanes, row, [{last.symbol: place} for place in within])
    return nest(outer, (loop(tile, extent // height, body),), {})


def _sums(block: Block, weight: Expr, cut: _Cut, lanes: int, row: Buffer | None) -> tuple[Stmt, ...]:
    """One result: decoding in flight, or from a decoded row."""
    if row is not None:
        return _row_sums(block, weight, cut, lanes, row, [{}])
    states = _states(block, lanes, 1)[0]
    prepared, cut = _prepared(cut, scales=True)
    lifted = [_lifted(part) for part in cut.segments]
    blocks = cut.along.bound // cut.step
    scales = side_by_side([let for lets, _ in lifted for let in lets], cut.block, blocks, join=lanes >= _WIDE)
    steps: list[Stmt] = []
    for part, (lets, value) in zip(cut.segments, lifted, strict=True):
        steps += [let for let in lets if let.symbol not in scales.values]
        steps += _steps(block, states, cut, part, lanes, weight, substitute(value, scales.values))
    return (
        *prepared,
        *scales.filling,
        *(Alloc(buffer) for buffer in states.values()),
        fill(block.accumulators, states, lanes),
        loop(cut.block, blocks, steps),
        *_results(block, states, lanes, {}),
    )


def _prepared(cut: _Cut, *, scales: bool) -> tuple[tuple[Stmt, ...], _Cut]:
    """Compute ahead, many at a time, what would cost as much as the products one by one.

    These are tables of what depends on the lane alone, and (``scales``) the widened halves of a row's small blocks.
    """
    prepared: list[Stmt] = []
    known: dict[Expr, Buffer] = {}

    def ahead(expr: Expr, old: Symbol, extent: int, hint: str) -> Buffer:
        at = index_symbol("i_lane" if hint == "place" else "i_block")
        key = substitute(expr, {old: Var(_KEY)})
        if key not in known:
            known[key] = Buffer(hint, expr.type, (extent,), "local")
            filled = Store(known[key], (Var(at),), substitute(expr, {old: Var(at)}))
            prepared.extend((Alloc(known[key]), loop(at, extent, (filled,), "lane")))
        return known[key]

    def visit(expr: Expr, part: Segment) -> Expr:
        if isinstance(expr, Const | Var) or expr.type is i64:
            return expr
        if _is_half(expr) and scales and cut.step <= _SMALL_BLOCK:
            return Load(ahead(expr, cut.block, cut.along.bound // cut.step, "scale"), (Var(cut.block),))
        if isinstance(expr, Load):
            return expr
        if isinstance(expr, Apply) and expr.op == "where" and symbols_of(expr) == (part.lane,) and not loads_in(expr):
            return Load(ahead(expr, part.lane, part.length, "place"), (Var(part.lane),))
        return with_children(expr, tuple(visit(child, part) for child in children(expr)))

    segments = tuple(replace(part, value=visit(part.value, part)) for part in cut.segments)
    return tuple(prepared), replace(cut, segments=segments)


def _is_half(expr: Expr) -> bool:
    return isinstance(expr, Cast) and isinstance(expr.arg, Load) and expr.arg.type is f16


def _steps(
    block: Block, states: dict[Symbol, Buffer], cut: _Cut, part: Segment, lanes: int, weight: Expr, decoded: Expr
) -> list[Stmt]:
    """The multiply-adds of one segment, whose elements are ``decoded``, at most ``lanes`` at a time."""
    width = min(lanes, part.length)
    steps: list[Stmt] = []
    for start in range(part.start, part.start + part.length, width):
        lane = index_symbol("i_lane")
        here = add(start - part.start, Var(lane))
        value = substitute(decoded, {part.lane: here})
        cell = (add(start % lanes, Var(lane)),)
        steps.append(
            loop(lane, width, _step(block, states, cell, weight, value, _position(cut, start, Var(lane)), cut), "lane")
        )
    return steps


def _step(
    block: Block,
    states: Mapping[Symbol, Buffer],
    cell: tuple[Expr, ...],
    weight: Expr,
    value: Expr,
    position: Expr,
    cut: _Cut,
    extra: Mapping[Symbol, Expr] | None = None,
) -> tuple[Stmt, ...]:
    (item,) = block.accumulators
    mapping: dict[Symbol, Expr] = {
        cut.along.symbol: position,
        item.symbol: Load(states[item.symbol], cell),
        **(extra or {}),
    }
    # the weight is exchanged for a variable first: its own expression must not be substituted into
    taken = Symbol("w", weight.type)
    update = substitute(_exchanged(item.update, weight, Var(taken)), mapping)
    return (Store(states[item.symbol], cell, substitute(update, {taken: value})),)


def _exchanged(expr: Expr, old: Expr, new: Expr) -> Expr:
    if expr is old or expr == old:
        return new
    parts = children(expr)
    if not parts or isinstance(expr, Load):
        return expr
    return with_children(expr, tuple(_exchanged(part, old, new) for part in parts))


def _states(block: Block, lanes: int, count: int) -> list[dict[Symbol, Buffer]]:
    (item,) = block.accumulators
    names = [item.symbol.hint if count == 1 else f"{item.symbol.hint}_{place}" for place in range(count)]
    return [{item.symbol: Buffer(name, item.symbol.type, (lanes,), "register")} for name in names]


def _row_sums(
    block: Block, weight: Expr, cut: _Cut, lanes: int, row: Buffer, places: Sequence[Mapping[Symbol, Expr]]
) -> tuple[Stmt, ...]:
    """Sums of several results at once from one decoded row."""
    states = _states(block, lanes, len(places))
    chunk, bound = index_symbol("i_chunk"), cut.along.bound
    steps: list[Stmt] = []
    for held, place in zip(states, places, strict=True):
        lane = index_symbol("i_lane")
        position = add(multiply(Var(chunk), lanes), Var(lane))
        value = Load(row, (position,))
        steps.append(loop(lane, lanes, _step(block, held, (Var(lane),), weight, value, position, cut, place), "lane"))
    body: list[Stmt] = [Alloc(buffer) for held in states for buffer in held.values()]
    body += [fill(block.accumulators, held, lanes) for held in states]
    body.append(loop(chunk, bound // lanes, steps))
    for held, place in zip(states, places, strict=True):
        body += _results(block, held, lanes, place)
    return tuple(body)


def _results(block: Block, states: dict[Symbol, Buffer], lanes: int, place: Mapping[Symbol, Expr]) -> tuple[Stmt, ...]:
    lets, results = finals(block.accumulators, states)
    placed = [replace(let, value=substitute(let.value, place)) for let in lets]
    return (*merge_tree(block.accumulators, states, lanes), *placed, *stores(block, {**place, **results}))


# -- the weight's rows across the reduction: dx = W^T dy ----------------------------------------------------------


def _across_rows(found: Contraction, weight: Expr, cut: _Cut, parallel: bool) -> tuple[tuple[Stmt, ...], str] | None:
    """Per block of columns, and per tile of the other operand's rows: sums over the weight's rows, in their order."""
    block = found.block
    (item,), (rows,) = block.accumulators, block.reduce
    repeated = [data for data in block.data if data is not cut.along]
    if any(depends(weight, data) for data in repeated):
        return None
    last = repeated[-1] if repeated else None
    extent = None if last is None else constant(last.extent)
    height = next((size for size in (8, 4, 2) if extent is not None and extent % size == 0), 1)
    tile = None if last is None or height == 1 else index_symbol(f"{last.symbol.hint}_tile")
    places: list[Mapping[Symbol, Expr]] = [{}]
    if tile is not None and last is not None:
        places = [{last.symbol: add(multiply(Var(tile), height), place)} for place in range(height)]
    states = _states(block, cut.step, len(places))
    piece = Buffer("piece", weight.type, (cut.step,), "local")
    cells = [{item.symbol: replace(held[item.symbol], space="local")} for held in states]
    tables, cut = _prepared(cut, scales=False)
    steps = _decoding(cut, piece, index(0))
    finish: list[Stmt] = []
    start: list[Stmt] = []
    for held, place in zip(cells, places, strict=True):
        first, lane, last_lane = index_symbol("i_lane"), index_symbol("i_lane"), index_symbol("i_lane")
        where = {cut.along.symbol: _position(cut, 0, Var(first)), **place}
        start.append(
            loop(first, cut.step, (Store(held[item.symbol], (Var(first),), substitute(item.init, where)),), "lane")
        )
        value, position = Load(piece, (Var(lane),)), _position(cut, 0, Var(lane))
        steps.append(
            loop(lane, cut.step, _step(block, held, (Var(lane),), weight, value, position, cut, place), "lane")
        )
        done: dict[Symbol, Expr] = {
            cut.along.symbol: _position(cut, 0, Var(last_lane)), item.symbol: Load(held[item.symbol], (Var(last_lane),)), **place
        }  # fmt: skip
        finish.append(loop(last_lane, cut.step, stores(block, done), "lane"))
    body: list[Stmt] = [*tables, Alloc(piece), *(Alloc(held[item.symbol]) for held in cells), *start]
    body += [*nest((rows,), steps, {}), *finish]
    inner: tuple[Stmt, ...] = tuple(body)
    if tile is not None and extent is not None:
        inner = (loop(tile, extent // height, inner),)
        repeated = repeated[:-1]
    inner = nest(repeated, inner, {})
    blocks = cut.along.bound // cut.step
    return (loop(cut.block, blocks, inner, "parallel" if parallel else "serial"),), (
        f"columns of encoded blocks, decoded once for {len(places)} row{'s' if len(places) > 1 else ''}"
    )
