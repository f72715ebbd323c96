"""Elementwise blocks over many points: a thread takes several neighbouring cells and moves them 16 bytes at a time.

In: a block without accumulators, collapsed. Out: the block over groups of cells, or None where some access does not
walk its cells one by one from a multiple of the group. Each buffer's cells lie in registers from their load to their
store, so a store is seen by the loads after it, as in the block. Every value is computed as in the plain form.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stagedtensor.codegen.affine import Affine, add, constant, flat_index, multiply
from stagedtensor.codegen.loop_ir import (
    Alloc,
    Block,
    BlockIterator,
    Buffer,
    Expr,
    Load,
    Stmt,
    Store,
    Tile,
    Var,
    index,
    walk,
)
from stagedtensor.codegen.rewrite import Rewriter, substitute
from stagedtensor.codegen.schedule.cuda.launch import points_of
from stagedtensor.codegen.schedule.nest import expressions, index_symbol, loop, point, stores
from stagedtensor.precision import Prec, bf16, f16, f32

_BYTES = 16
_LEAST_POINTS = 1 << 14
"""Fewer points are better spread over more threads."""
_MOST_STREAMS = 12
"""Buffers whose cells one thread holds: more would cost registers that hide no latency."""
_KINDS: dict[Prec, str] = {f32: "f32x4", f16: "u16x8", bf16: "u16x8"}


@dataclass(frozen=True)
class _Stream:
    """One buffer walked cell by cell: where its group starts, and its cells in registers."""

    buffer: Buffer
    indices: tuple[Expr, ...]
    cells: Buffer
    read: bool
    written: bool


def grouped(block: Block) -> tuple[tuple[BlockIterator, ...], tuple[Stmt, ...], str] | None:
    """Return iterators, the last over groups, the work of a group, and a few words; None where groups do not serve."""
    if block.guard is not None or not block.iterators or points_of(block.iterators) < _LEAST_POINTS:
        return None
    last = block.iterators[-1]
    found = _streams(block, last)
    if found is None:
        return None
    size, accesses = found
    group, cell = index_symbol(f"{last.symbol.hint}_group"), index_symbol("cell")
    first = multiply(Var(group), size)
    streams: dict[Buffer, _Stream] = {}
    written = {store.buffer for store in block.stores}
    reads = _read_first(block)
    for buffer, indices in accesses.items():
        start = tuple(substitute(part, {last.symbol: first}) for part in indices)
        cells = Buffer(f"{buffer.name}_cells", buffer.type, (size,), "register")
        streams[buffer] = _Stream(buffer, start, cells, buffer in reads, buffer in written)
    work = point(block, {last.symbol: add(first, Var(cell))})
    inner = _Redirect(streams, Var(cell)).body(work.wrap(stores(block, work.mapping)))
    body: list[Stmt] = [Alloc(item.cells) for item in streams.values()]
    body += [move for item in streams.values() if item.read for move in _moves("load", item, size)]
    body.append(loop(cell, size, inner, "unroll"))
    body += [move for item in streams.values() if item.written for move in _moves("store", item, size)]
    groups = BlockIterator(group, index(last.bound // size), last.bound // size)
    return (*block.iterators[:-1], groups), tuple(body), f"elementwise, {size} points per thread, 16-byte accesses"


def _moves(verb: str, stream: _Stream, size: int) -> Iterator[Tile]:
    kind = _KINDS[stream.buffer.type]
    each = _BYTES // stream.buffer.type.bytes
    *outer, inner = stream.indices
    for start in range(0, size, each):
        there = tuple(Load(stream.buffer, (*outer, add(inner, start + at))) for at in range(each))
        here = tuple(Load(stream.cells, (index(start + at),)) for at in range(each))
        to, source = (here, there) if verb == "load" else (there, here)
        meaning = tuple(Store(cell.buffer, cell.indices, value) for cell, value in zip(to, source, strict=True))
        yield Tile(f"st_{verb}_{kind}", 1, each, 1, meaning, (to[0], source[0]))


def _streams(block: Block, last: BlockIterator) -> tuple[int, dict[Buffer, tuple[Expr, ...]]] | None:
    """Return the size of a group and the buffers walked along ``last``, each at one place."""
    found: dict[Buffer, tuple[Expr, ...]] = {}
    flats: dict[Buffer, Affine] = {}
    cells: list[tuple[Buffer, tuple[Expr, ...]]] = [(item.buffer, item.indices) for item in block.stores]
    written = {item.buffer for item in block.stores}
    for expr in expressions(block):
        cells += [(part.buffer, part.indices) for part in walk(expr) if isinstance(part, Load)]
    for buffer, indices in cells:
        flat = flat_index(buffer, indices)
        step = flat.coefficient(last.symbol)
        if step == 0 and buffer not in written:
            continue
        if step != 1 or buffer.type not in _KINDS or not indices or buffer.layout.steps:
            return None
        known = flats.setdefault(buffer, flat)
        if not known.same_as(flat) or not _inside(flat, buffer, block):
            return None
        found.setdefault(buffer, indices)
    if not found or len(found) > _MOST_STREAMS:
        return None
    size = max(_BYTES // buffer.type.bytes for buffer in found)
    aligned = all(
        flat.constant % size == 0
        and all(
            isinstance(atom, Var) and (atom.symbol is last.symbol or factor % size == 0) for atom, factor in flat.terms
        )
        for flat in flats.values()
    )
    whole = constant(last.extent) == last.bound and last.bound % size == 0
    return (size, found) if aligned and whole else None


def _inside(flat: Affine, buffer: Buffer, block: Block) -> bool:
    """Tell whether the access stays in the buffer at every point, so that it may be made whatever a condition says."""
    bounds = {item.symbol: item.bound for item in block.iterators}
    greatest = flat.constant
    for atom, factor in flat.terms:
        if not isinstance(atom, Var) or atom.symbol not in bounds or factor < 0:
            return False
        greatest += factor * (bounds[atom.symbol] - 1)
    return flat.constant >= 0 and greatest < buffer.size


def _read_first(block: Block) -> set[Buffer]:
    """The buffers that some expression loads."""
    return {part.buffer for expr in expressions(block) for part in walk(expr) if isinstance(part, Load)}


class _Redirect(Rewriter):
    """Cells of the streams become those in registers."""

    def __init__(self, streams: dict[Buffer, _Stream], cell: Expr) -> None:
        self._streams = streams
        self._cell = cell

    def expr(self, expr: Expr) -> Expr:
        if isinstance(expr, Load) and expr.buffer in self._streams:
            return Load(self._streams[expr.buffer].cells, (self._cell,))
        return super().expr(expr)

    def store(self, store: Store) -> Store:
        return Store(self._streams[store.buffer].cells, (self._cell,), self.expr(store.value))
