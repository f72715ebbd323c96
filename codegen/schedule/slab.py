"""Which kernels run together, one slab of their large intermediates at a time.

In: a module, one block per kernel. Out: its kernels in an order of equal meaning, some of them gathered in a
:class:`Group`: blocks that share outer axes (batch and head, say), and between them values of which each outer point
needs its own matrix only. Run point by point, such a value never exists as a whole::

    scores[b, h, q, k] <- q . k          for b, h:  slab[q, k] <- q . k
    p[b, h, q, k] <- exp(scores ...)   ->           p[q, k] <- exp(slab ...)
    out[b, q, h, v] <- p . v                        out[b, q, h, v] <- p . v

Legal where every buffer that a block of the group writes and another touches is divided among the outer points, and
where what stood between the blocks can go before or behind them. A matrix too large for a core's cache is cut into
tiles of rows: blocks that sum over the rows go on from tile to tile, all others have rows of their own. Schedules
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from stagedtensor.codegen.affine import constant
from stagedtensor.codegen.effects import loads
from stagedtensor.codegen.loop_ir import Block, BlockIterator, Buffer, Expr, Load, Module, Proc, Symbol, Var, walk
from stagedtensor.codegen.passes.dependence import covers, is_contraction
from stagedtensor.codegen.rewrite import buffers_read, buffers_written, symbols_of
from stagedtensor.precision import f32

LEAST_BYTES = 128 << 10
"""Bytes of a value from which it is worth not to exist as a whole: with less, one kernel after the other is as fast."""
LEAST_AGAIN = 1 << 20
"""Bytes in f32 of a value from which it is computed again for readers that cannot stand beside its maker.

Measured: the second product costs a tenth of attention's time at 1 MiB, nothing at 8; at 256 KiB it costs a sixth.
"""
LEAST_SLAB = 2 << 10
"""Bytes of one slab: with less than that per point, tiles of registers stay empty."""
MOST_BYTES = 2 << 20
"""Bytes of all slabs of one group that are whole matrices: about a core's second-level cache."""
MOST_WHOLE = 512 << 10
"""The same where tiles of rows are legal: panels and operands want room beside them."""
TILE_BYTES = 1 << 20
"""Bytes of all slabs of one group that are tiles of rows: beside them lie panels and sums that go on between tiles."""
MOST_ROWS = 64
"""Rows of a tile: with more, nothing is read less often that counts."""
LEAST_ROWS = 16
"""Rows of a tile, however long they are: with fewer, tiles of registers stay empty."""
LEAST_POINTS = 8
"""Outer points of a group: the threads divide them."""
LEAST_POINTS_OF_TILES = 4
"""The same for matrices too large for a cache."""
_INNER = 2
"""Axes of a slab: a matrix."""

Outer = tuple[Symbol, ...]


@dataclass(frozen=True)
class Group:
    """Kernels that run together. ``outer`` are the data iterators of each block's outer axes, ``slabs`` what becomes
    local.

    The first ``len(slab.shape) - 2`` axes of a slab are the outer axes, in this order, those of one cell left out.
    Where ``tile`` is not 0, so many rows at a time (the last but one axis of a slab): ``rows`` are the iterators that
    walk them, data or reduce, one per block.
    """

    kernels: tuple[Proc, ...]
    blocks: tuple[Block, ...]
    outer: tuple[Outer, ...]
    extents: tuple[int, ...]
    slabs: tuple[Buffer, ...]
    tile: int = 0
    rows: tuple[BlockIterator, ...] = ()


def grouped(module: Module) -> tuple[Proc | Group, ...]:
    """Return the kernels of ``module``, gathered where that spares large intermediates."""
    units = [_Unit.of(kernel) for kernel in module.kernels]
    by_rows: list[Buffer] = []
    for buffer, products in _candidates(module, units):
        if products:
            units = _gathered(units, buffer)
        else:
            by_rows.append(buffer)
    for buffer in by_rows:
        # kernels that only walk rows are jammed row by row, unless their neighbours run on slabs
        if any(unit.slabs for unit in units if unit.touches(buffer)):
            units = _gathered(units, buffer)
    return tuple(unit.kernels[0] if unit.outer[0] is None else unit.group() for unit in units)


def worth_again(buffer: Buffer) -> bool:
    """Tell whether a temporary is worth a second computation that lets it be a slab for all its readers."""
    return len(buffer.shape) > _INNER and buffer.size * f32.bytes >= LEAST_AGAIN and _enough(buffer)


def slabs_of(parts: Iterable[Proc | Group]) -> frozenset[Buffer]:
    """Return the buffers that groups make local."""
    return frozenset(buffer for part in parts if isinstance(part, Group) for buffer in part.slabs)


@dataclass(frozen=True)
class _Unit:
    """A kernel, or several that run together; ``outer`` is None for a kernel by itself."""

    kernels: tuple[Proc, ...]
    outer: tuple[Outer | None, ...]
    reads: frozenset[Buffer]
    writes: frozenset[Buffer]
    touched: tuple[Buffer, ...]
    """What it reads and writes, in order of appearance."""
    slabs: tuple[Buffer, ...] = ()
    tile: int = 0
    rows: tuple[BlockIterator, ...] = ()

    @staticmethod
    def of(kernel: Proc) -> _Unit:
        reads, writes = buffers_read(kernel.body), buffers_written(kernel.body)
        return _Unit((kernel,), (None,), frozenset(reads), frozenset(writes), tuple(dict.fromkeys((*reads, *writes))))

    def group(self) -> Group:
        blocks = tuple(block for kernel in self.kernels if (block := _block(kernel)) is not None)
        outer = tuple(item for item in self.outer if item is not None)
        extents = {item.symbol: item.bound for item in blocks[0].data}
        points = tuple(extents[symbol] for symbol in outer[0])
        return Group(self.kernels, blocks, outer, points, self.slabs, self.tile, self.rows)

    def touches(self, buffer: Buffer) -> bool:
        return buffer in self.reads or buffer in self.writes

    def conflicts(self, reads: frozenset[Buffer], writes: frozenset[Buffer]) -> bool:
        """Whether the order against something with these effects matters."""
        return bool(self.writes & (reads | writes) or self.reads & writes)


def _block(kernel: Proc) -> Block | None:
    if len(kernel.body) == 1 and isinstance(kernel.body[0], Block):
        return kernel.body[0]
    return None


def _candidates(module: Module, units: Sequence[_Unit]) -> Iterator[tuple[Buffer, bool]]:
    """Temporaries of more than two axes, large as a whole, whose one writer comes first and writes all of it.

    With each, whether a product makes or reads it.
    """
    temporaries = set(module.temporaries)
    seen: dict[Buffer, list[_Unit]] = {}
    for unit in units:
        for buffer in unit.touched:
            if buffer in temporaries and len(buffer.shape) > _INNER and buffer.nbytes >= LEAST_BYTES:
                seen.setdefault(buffer, []).append(unit)
    # the largest first: what belongs to two groups goes where it spares more
    for buffer in sorted(seen, key=lambda item: -item.nbytes):
        if len(seen[buffer]) < 2 or not _enough(buffer):
            continue
        first, *readers = seen[buffer]
        if buffer in first.reads or any(buffer in unit.writes for unit in readers):
            continue
        maker = _block(first.kernels[0])
        products = any(is_contraction(block) for unit in (first, *readers) if (block := _block(unit.kernels[0])))
        if maker is not None and covers(maker, buffer):
            yield buffer, products


def _gathered(units: list[_Unit], slab: Buffer) -> list[_Unit]:
    """Return ``units`` with all that touch ``slab`` in one, or as they are where that is not legal or too large."""
    places = [place for place, unit in enumerate(units) if unit.touches(slab)]
    slabs = (*dict.fromkeys(item for place in places for item in units[place].slabs), slab)
    kernels: list[Proc] = []
    outer: list[Outer | None] = []
    for place in places:
        for kernel, known in zip(units[place].kernels, units[place].outer, strict=True):
            own = known or _outer_of(kernel, slab)
            if own is None:
                return units
            kernels.append(kernel)
            outer.append(own)
    if not _divided(kernels, [item for item in outer if item is not None], slabs):
        return units
    tile, rows = 0, tuple[BlockIterator, ...]()
    inner = sum(item.nbytes // _points(item) for item in slabs)
    if inner > MOST_WHOLE and (found := _rows(kernels, slabs)) is not None:
        rows, tile = found, _tile(found[0].bound, inner)
    if tile == 0 and inner > MOST_BYTES:
        return units
    before, behind = _around(units, places)
    if before is None:
        return units
    reads = frozenset[Buffer]().union(*(units[place].reads for place in places))
    writes = frozenset[Buffer]().union(*(units[place].writes for place in places))
    touched = tuple(dict.fromkeys(buffer for place in places for buffer in units[place].touched))
    whole = _Unit(tuple(kernels), tuple(outer), reads, writes, touched, slabs, tile, rows)
    return [*units[: places[0]], *before, whole, *behind, *units[places[-1] + 1 :]]


def _outer_axes(slab: Buffer) -> tuple[int, ...]:
    """The axes of a slab that tell outer points apart: those in front of the matrix, but for axes of one cell."""
    return tuple(place for place, extent in enumerate(slab.shape[:-_INNER]) if extent > 1)


def _enough(slab: Buffer) -> bool:
    """Whether there are enough points for the threads, and enough bytes in each."""
    count = _points(slab)
    least = LEAST_POINTS if slab.nbytes <= MOST_BYTES * count else LEAST_POINTS_OF_TILES
    return count >= least and slab.nbytes >= LEAST_SLAB * count


def _points(slab: Buffer) -> int:
    points = 1
    for extent in slab.shape[:-_INNER]:
        points *= extent
    return points


def _around(units: Sequence[_Unit], places: Sequence[int]) -> tuple[list[_Unit] | None, list[_Unit]]:
    """What stands between the units at ``places`` goes before them or behind; None where something must stay between."""
    members = set(places)
    before: list[_Unit] = []
    behind: list[_Unit] = []
    reads: frozenset[Buffer] = frozenset()
    writes: frozenset[Buffer] = frozenset()
    for place in range(places[0], places[-1] + 1):
        unit = units[place]
        if place in members:
            if any(unit.conflicts(other.reads, other.writes) for other in behind):
                return None, []
            reads, writes = reads | unit.reads, writes | unit.writes
        elif unit.conflicts(reads, writes) or any(unit.conflicts(other.reads, other.writes) for other in behind):
            behind.append(unit)
        else:
            before.append(unit)
    return before, behind


def _outer_of(kernel: Proc, slab: Buffer) -> Outer | None:
    """The data iterators by which a kernel's every access selects the slab, None where it does anything else."""
    block = _block(kernel)
    if block is None or block.scatter or block.guard is not None:
        return None
    fixed = {item.symbol for item in block.data if constant(item.extent) is not None}
    found: Outer | None = None
    for indices in _accesses(block, slab):
        parts = [indices[place] for place in _outer_axes(slab)]
        leading = tuple(part.symbol for part in parts if isinstance(part, Var) and part.symbol in fixed)
        if not leading or len(leading) != len(parts) or len(set(leading)) != len(leading):
            return None
        if found is not None and found != leading:
            return None
        found = leading
    return found if found is not None and _varies(block, found) else None


def _varies(block: Block, outer: Outer) -> bool:
    """Whether no operand of a product is the same at all outer points: such a one would be packed again at each."""
    if not is_contraction(block):
        return True
    operands = [load for item in block.accumulators for load in walk(item.update) if isinstance(load, Load)]
    return all(any(symbol in outer for symbol in symbols_of(load)) for load in operands)


def _divided(kernels: Sequence[Proc], outer: Sequence[Outer], slabs: Sequence[Buffer]) -> bool:
    """Whether the outer points touch cells of their own of all that the kernels write and touch again."""
    blocks = [block for kernel in kernels if (block := _block(kernel)) is not None]
    if (
        len({len(item) for item in outer}) != 1
        or len({_extents(*pair) for pair in zip(blocks, outer, strict=True)}) != 1
    ):
        return False
    written = {store.buffer for block in blocks for store in block.stores}
    for buffer in written:
        axes = _outer_axes(buffer) if buffer in slabs else None
        for block, symbols in zip(blocks, outer, strict=True):
            for indices in _accesses(block, buffer):
                own = _axes(indices, symbols)
                if own is None or (axes is not None and own != axes):
                    return False
                axes = own
    return True


def _tile(rows: int, inner: int) -> int:
    """How many of ``rows`` rows, ``inner`` bytes in all, make a tile: a number that divides them where one is large
    enough.

    Else one that leaves enough rows over for the templates that suit a tile; 0 where there is none. Even, unless it is
    all rows: units for matrices take the terms of sums in pairs.
    """
    most = min(rows, max(LEAST_ROWS, min(MOST_ROWS, TILE_BYTES * rows // inner)))
    counts = [count for count in range(most, min(LEAST_ROWS, most) - 1, -1) if count % 2 == 0 or count == rows]
    dividing = (count for count in counts if rows % count == 0 and 2 * count >= most)
    leaving = (count for count in counts if rows % count >= LEAST_ROWS)
    return next(dividing, next(leaving, 0))


def _rows(kernels: Sequence[Proc], slabs: Sequence[Buffer]) -> tuple[BlockIterator, ...] | None:
    """The iterators that walk the rows of slabs, one per block, None where tiles of rows would change a value.

    A row that a block writes is read by others at that row only; what a block sums up over all rows, no other touches.
    """
    blocks = [block for kernel in kernels if (block := _block(kernel)) is not None]
    rows: list[BlockIterator] = []
    for block in blocks:
        walked = {indices[-_INNER] for slab in slabs for indices in _accesses(block, slab)}
        row = next((item for item in block.iterators if walked == {Var(item.symbol)}), None)
        if row is None or constant(row.extent) is None or (row.kind == "reduce" and row is not block.reduce[0]):
            return None
        rows.append(row)
    if len({row.bound for row in rows}) != 1:
        return None
    for buffer in {store.buffer for block in blocks for store in block.stores}.difference(slabs):
        axes: set[tuple[int, ...] | None] = set()
        users = [(block, row) for block, row in zip(blocks, rows, strict=True) if any(_accesses(block, buffer))]
        if any(row.kind == "reduce" and any(store.buffer is buffer for store in block.stores) for block, row in users):
            if len(users) > 1:
                return None
            continue
        for block, row in users:
            axes.update(_axes(indices, (row.symbol,)) for indices in _accesses(block, buffer))
        if len(axes) > 1 or None in axes:
            return None
    return tuple(rows)


def _extents(block: Block, outer: Outer) -> tuple[int, ...]:
    bounds: Mapping[Symbol, int] = {item.symbol: item.bound for item in block.data}
    return tuple(bounds[symbol] for symbol in outer)


def _axes(indices: Sequence[Expr], symbols: Outer) -> tuple[int, ...] | None:
    """At which axes an access has the outer iterators, None where one is missing or stands twice."""
    places = {part.symbol: place for place, part in enumerate(indices) if isinstance(part, Var)}
    found = tuple(places[symbol] for symbol in symbols if symbol in places)
    return found if len(found) == len(symbols) else None


def _accesses(block: Block, buffer: Buffer) -> Iterator[tuple[Expr, ...]]:
    for load in loads(block):
        if load.buffer is buffer:
            yield load.indices
    for store in block.stores:
        if store.buffer is buffer:
            yield store.indices
