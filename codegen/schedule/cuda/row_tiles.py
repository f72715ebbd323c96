"""The launch of a group of blocks that go through tiles of rows together.

In: a :class:`~stagedtensor.codegen.schedule.cuda.row_group.RowGroup`. Out: its statements and launch, or the reason why
its intermediates do not fit into shared memory::

    for tile of rows:                       one block of threads
        slab[row][k]                        shared memory
        each step in order, a barrier behind it:
            a product: its columns tile by tile, fragments of a slab read where it lies
            a reduction along rows, or points: a warp takes a row at a time

A reduction takes the lanes' points in order, then their states halves onto halves; nothing depends on the launch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from stagedtensor.codegen.affine import add, as_index, floor_divide, modulo, multiply, subtract
from stagedtensor.codegen.loop_ir import (
    Alloc,
    Apply,
    Barrier,
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
from stagedtensor.codegen.rewrite import Rewriter, substitute
from stagedtensor.codegen.schedule.cuda.elementwise import assignments
from stagedtensor.codegen.schedule.cuda.formats import Instruction, for_tensor_cores
from stagedtensor.codegen.schedule.cuda.launch import (
    STATIC_SHARED,
    THREADS,
    WARP,
    Flat,
    Launch,
    conjunction,
    cooperative_blocks,
    flatten,
    less,
    strided,
    zero,
)
from stagedtensor.codegen.schedule.cuda.mma import ENOUGH_TILES, Shape, depth_of, multiplied
from stagedtensor.codegen.schedule.cuda.operands import Multiplied, Product, Tiles
from stagedtensor.codegen.schedule.cuda.panel import Resident
from stagedtensor.codegen.schedule.cuda.recomputed import Recomputation
from stagedtensor.codegen.schedule.cuda.row_group import Member, RowGroup, accesses, row_groups, within_row
from stagedtensor.codegen.schedule.cuda.rows import meet_in_warp, results_of, scoped
from stagedtensor.codegen.schedule.cuda.tile import TileShape, tiled
from stagedtensor.codegen.schedule.nest import fresh, index_symbol, loads_in, loop, point, stores
from stagedtensor.numerics import Numerics
from stagedtensor.precision import i64

_HEIGHTS = (64, 32, 16)
_WARPS = THREADS // WARP
_PAD_BYTES = 16
"""Rows of a slab lie this much apart from a multiple of 64 bytes: eight of them then start at different banks."""
_ROUND_BYTES = 64


@dataclass(frozen=True)
class RowTiles:
    """A group as one launch."""

    body: tuple[Stmt, ...]
    launch: Launch
    path: str


class RowTiling:
    """The groups among ``blocks`` whose intermediates fit into ``most_bytes`` of shared memory, by their place.

    ``members`` are the places of all their blocks, ``slabs`` what needs no other memory.
    """

    def __init__(
        self, blocks: Sequence[Block], temporaries: Collection[Buffer], numerics: Numerics, most_bytes: int
    ) -> None:
        self._planned: dict[RowGroup, _Plan] = {}
        self._stored: dict[int, str] = {}
        self._numerics = numerics
        self._most_bytes = most_bytes
        found = row_groups(blocks, temporaries, self._fits)
        self.groups = Recomputation(found, blocks, temporaries, self._fits, self._on_tensor_cores).by_start
        self.members = frozenset(place for group in self.groups.values() for place in group.own)
        written = {store.buffer for block in blocks for store in block.stores}
        kept = {buffer for buffer, _ in self._accesses(blocks)}
        self.slabs = frozenset(buffer for buffer in written if buffer in temporaries and buffer not in kept)

    def tiles(self, group: RowGroup) -> RowTiles:
        """Return the launch of a group."""
        return self._planned[group].finished()

    def said(self, place: int, path: str) -> str:
        """Return ``path`` of the block at ``place``, with the reason where it might have been the first of a group."""
        reason = self._stored.get(place)
        return path if reason is None else f"{path}; result stored: {reason}"

    def _accesses(self, blocks: Sequence[Block]) -> Iterator[tuple[Buffer, tuple[Expr, ...]]]:
        """What is still read or written in global memory."""
        for place, block in enumerate(blocks):
            if place not in self.members:
                yield from accesses(block)
        for group in self.groups.values():
            for member in group.members:
                yield from (item for item in accesses(member.block) if item[0] not in group.slabs)

    def _fits(self, group: RowGroup) -> bool:
        planned = _plan(group, self._numerics, self._most_bytes)
        if isinstance(planned, str):
            self._stored[group.start] = planned
            return False
        self._planned[group] = planned
        return True

    def _on_tensor_cores(self, given: Product) -> bool:
        return not isinstance(for_tensor_cores(given, self._numerics), str)


def _plan(group: RowGroup, numerics: Numerics, most_bytes: int) -> _Plan | str:
    """The launch of ``group``, its tiles as high as ``most_bytes`` of shared memory allow; else the reason."""
    rows = group.extents[-1]
    outer = prod(group.extents[:-1])
    plan: _Plan | None = None
    for height in _HEIGHTS:
        if rows <= height // 2 and height != _HEIGHTS[-1]:
            continue
        lower = _Plan(group, numerics, height)
        if lower.nbytes > most_bytes:
            needed = lower.nbytes
            continue
        plan = lower
        if outer * -(-rows // height) >= ENOUGH_TILES:
            break
    if plan is None:
        kib, most = -(-needed // 1024), most_bytes // 1024
        return f"{_HEIGHTS[-1]} rows of what stands between take {kib} KiB of shared memory, of {most}"
    return plan


class _Plan:
    """The statements of a group with tiles of ``height`` rows, and where its arrays lie."""

    def __init__(self, group: RowGroup, numerics: Numerics, height: int) -> None:
        self.group = group
        self.height = height
        self._numerics = numerics
        self._thread = Symbol("thread", i64)
        self._lane, self._warp = index_symbol("lane"), index_symbol("warp")
        self._tile, self._first = index_symbol("tile"), index_symbol("first_row")
        self._down = -(-group.extents[-1] // height)
        self._count = self._down * prod(group.extents[:-1])
        self._outer = tuple(Symbol(symbol.hint, symbol.type) for symbol in group.members[0].symbols[:-1])
        self._slabs = {buffer: _slab(buffer, axes, height) for buffer, axes in group.slabs.items()}
        self._resident: set[Buffer] = set()
        self._words: list[str] = []
        self._arrays: list[tuple[Buffer, int, int]] = []
        """Shared arrays, with the first and the last step that touches each."""
        self._steps = [self._step(place, member) for place, member in enumerate(group.members)]
        for buffer, cells in self._slabs.items():
            touched = [
                at for at, item in enumerate(group.members) if any(other is buffer for other, _ in accesses(item.block))
            ]
            first = -1 if cells in self._resident else touched[0]  # cells beyond the matrix are set before all steps
            self._arrays.insert(0, (cells, first, touched[-1]))
        self.launch = self._launched()

    # -- steps ----------------------------------------------------------------------------------------------------
    def _step(self, place: int, member: Member) -> list[Stmt]:
        at: dict[Symbol, Expr] = {old: Var(new) for old, new in zip(member.symbols, self._outer, strict=False)}
        kept = tuple(item for item in member.block.iterators if item.symbol not in at)
        block = substitute(replace(member.block, iterators=kept), at)
        if member.product is not None:
            given = member.product
            block = substitute(given.block, at)
            bound = replace(given, block=block, left=substitute(given.left, at), right=substitute(given.right, at))
            return self._product(place, bound)
        if block.accumulators:
            self._words.append("reductions of rows")
            return self._rows(block, member, self._reduction(block))
        self._words.append("points of rows")
        return self._rows(block, member, self._points(block, member))

    def _product(self, place: int, given: Product) -> list[Stmt]:
        """The columns of a product, tile by tile."""
        chosen = for_tensor_cores(given, self._numerics)
        width = 128 if given.sizes[1] > 64 or self.height == 16 else 64
        column, tile = index_symbol("first_column"), index_symbol("i_columns")
        across = Tiles(tile, 1, (), Var(self._first), Var(column), {}, None)
        if isinstance(chosen, str):
            width = 64 if given.sizes[1] > 32 else 32
            parts = tiled(given, TileShape(self.height, width, 16), across, self._thread)
            parts = replace(parts, words=f"{parts.words}; {chosen}")
        else:
            given, instruction = chosen
            down = 32 if self.height == 64 else 16
            shape = Shape(self.height, width, down, width * self.height // down // _WARPS)
            resident = self._in_place(given, instruction)
            in_slab = any(load.buffer in self._slabs for load in loads_in(given.left))
            parts = multiplied(given, instruction, shape, across, self._thread, resident, left_by_cell=in_slab)
        self._arrays += [(buffer, place, place) for buffer in parts.arrays]
        self._words.append(parts.words)
        count = -(-given.sizes[1] // width)
        ends_twice = count == 1 and parts.tile[-1] == Barrier()  # a step has a barrier of its own behind it
        work = parts.tile[:-1] if ends_twice else parts.tile
        return [*self._named(parts), loop(tile, count, [Let(column, multiply(Var(tile), width)), *work])]

    def _named(self, parts: Multiplied) -> list[Stmt]:
        return [*(Alloc(buffer) for buffer in parts.arrays), *parts.here]

    def _in_place(self, given: Product, instruction: Instruction) -> Resident | None:
        """The left operand where it is a slab of the instruction's format whose rows follow the depth."""
        left = given.left
        if not isinstance(left, Load) or left.buffer not in self._slabs or left.type is not instruction.staged:
            return None
        inner = [left.indices[place] for place in within_row(left.buffer, self.group.slabs[left.buffer])]
        if len(given.depth) != 1 or inner != [Var(given.depth[0].symbol)]:
            return None
        cells = self._slabs[left.buffer]
        self._resident.add(cells)
        return Resident(cells, depth_of(instruction), instruction)

    def _rows(self, block: Block, member: Member, work: Sequence[Stmt]) -> list[Stmt]:
        """``work`` for each row of the tile, written in the row's own symbol; a warp takes a row."""
        step, row = index_symbol("i_row"), member.row.symbol
        here = add(Var(self._first), add(multiply(Var(step), _WARPS), Var(self._warp)))
        inside = tuple(work) if not self._ragged else (If(less(Var(row), member.row.bound), tuple(work)),)
        return [loop(step, -(-self.height // _WARPS), [Let(row, here), *inside])]

    @property
    def _ragged(self) -> bool:
        return self.group.extents[-1] % self.height != 0

    def _along(self, flat: Flat, symbol: Symbol, step: Symbol, body: Sequence[Stmt]) -> Stmt:
        """``body`` for every point of a row, the lanes beside one another."""
        named = Let(symbol, add(multiply(Var(step), WARP), Var(self._lane)))
        test = conjunction([less(Var(symbol), flat.bound) if flat.bound % WARP else None, flat.guard])
        inner = (*flat.lets, *body)
        return loop(step, -(-flat.bound // WARP), [named, *(inner if test is None else (If(test, inner),))])

    def _reduction(self, block: Block) -> list[Stmt]:
        place, step = index_symbol("k"), index_symbol("i_k")
        along = flatten(block.reduce, "k", Var(place))
        names = {item.symbol: fresh(item.symbol) for item in block.accumulators}
        states: dict[Symbol, Expr] = {old: Var(new) for old, new in names.items()}
        work = point(block, {**states, **along.mapping})
        body: list[Stmt] = []
        for item in block.accumulators:
            assert item.neutral is not None
            body.append(Declare(names[item.symbol], item.neutral))
        updates = work.wrap(assignments(block.accumulators, names, work.mapping))
        body.append(self._along(along, place, step, updates))
        body += meet_in_warp(block.accumulators, names)
        body.append(If(self._first_lane, tuple(results_of(block, names))))
        return [scoped(tuple(body))]

    @property
    def _first_lane(self) -> Expr:
        return Apply("eq", (Var(self._lane), as_index(0)), i64)

    def _points(self, block: Block, member: Member) -> list[Stmt]:
        rest = tuple(item for item in block.iterators if item.symbol is not member.row.symbol)
        if not rest:
            work = point(block, {})
            return [If(self._first_lane, work.wrap(stores(block, work.mapping)))]
        place, step = index_symbol("column"), index_symbol("i_column")
        along = flatten(rest, "column", Var(place))
        work = point(block, along.mapping)
        return [self._along(along, place, step, work.wrap(stores(block, work.mapping)))]

    # -- the whole ------------------------------------------------------------------------------------------------
    def _launched(self) -> Launch:
        return Launch(
            cooperative_blocks(self._count),
            THREADS,
            {self._tile: "blocks"},
            cooperative=True,
            thread=self._thread,
            resident=1,
            offsets=_placed(self._arrays) if sum(cells.nbytes for cells, _, _ in self._arrays) > STATIC_SHARED else {},
        )

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory."""
        return self.launch.dynamic_bytes or sum(cells.nbytes for cells, _, _ in self._arrays)

    def finished(self) -> RowTiles:
        """Return the launch."""
        extents = self.group.extents
        lets: list[Stmt] = [Let(self._first, multiply(modulo(Var(self._tile), self._down), self.height))]
        below = self._count // self._down
        rest = floor_divide(Var(self._tile), self._down)
        for symbol, extent in zip(self._outer, extents[:-1], strict=True):
            below //= extent
            here = floor_divide(rest, below) if below > 1 else rest
            lets.append(Let(symbol, modulo(here, extent)))
        body: list[Stmt] = [*lets, *self._cleared()]
        local = _Local(self._slabs, self.group.slabs, Var(self._first))
        for step in self._steps:
            body += [scoped(local.body(tuple(step))), Barrier()]
        nest: tuple[Stmt, ...] = (
            *(Alloc(cells) for cells in self._slabs.values()),
            Let(self._lane, modulo(Var(self._thread), WARP)),
            Let(self._warp, floor_divide(Var(self._thread), WARP)),
            strided(Flat(self._tile, as_index(self._count), self._count, (), {}, None), body),
        )
        kib = -(-self.nbytes // 1024)
        path = (
            f"tiles of {self.height} rows through {len(self._steps)} steps, "
            f"intermediates in {kib} KiB of shared memory: {'; '.join(dict.fromkeys(self._words))}"
        )
        return RowTiles(nest, self.launch, path)

    def _cleared(self) -> Iterator[Stmt]:
        """Zeros where fragments reach beyond a slab's matrix: what is multiplied there must be finite."""
        cleared = False
        for buffer, cells in self._slabs.items():
            if cells not in self._resident:
                continue
            (axis,) = within_row(buffer, self.group.slabs[buffer])
            if not self._ragged and buffer.shape[axis] * cells.type.bytes % _ROUND_BYTES == 0:
                continue
            step, cell = index_symbol("step"), index_symbol("cell")
            height, width = cells.shape
            at = (floor_divide(Var(cell), width), modulo(Var(cell), width))
            store: Stmt = Store(cells, at, zero(cells.type))
            if height * width % THREADS:
                store = If(less(Var(cell), height * width), (store,))
            named = Let(cell, add(multiply(Var(step), THREADS), Var(self._thread)))
            yield loop(step, -(-height * width // THREADS), [named, store])
            cleared = True
        if cleared:
            yield Barrier()


def _slab(buffer: Buffer, axes: tuple[int, ...], height: int) -> Buffer:
    """The shared array of a tile's rows of ``buffer``: rows outermost, the last axis padded."""
    inner = [buffer.shape[place] for place in within_row(buffer, axes)]
    if not inner:
        return Buffer(buffer.name, buffer.type, (height,), "shared")
    cells = _ROUND_BYTES // buffer.type.bytes
    width = -(-inner[-1] // cells) * cells + _PAD_BYTES // buffer.type.bytes
    return Buffer(buffer.name, buffer.type, (height, *inner[:-1], width), "shared")


def _placed(arrays: Sequence[tuple[Buffer, int, int]]) -> dict[Buffer, int]:
    """An offset for every array; those that no step uses together may share bytes: between steps is a barrier."""
    placed: list[tuple[int, int, int, int]] = []
    offsets: dict[Buffer, int] = {}
    for buffer, first, last in sorted(arrays, key=lambda item: -item[0].nbytes):
        start = 0
        room = -(-buffer.nbytes // 128) * 128
        for begin, end, other_first, other_last in sorted(placed):
            if other_first <= last and first <= other_last and begin < start + room:
                start = max(start, end)
        offsets[buffer] = start
        placed.append((start, start + room, first, last))
    return offsets


class _Local(Rewriter):
    """Accesses of slabs go to the tile's own arrays: no outer axes, rows counted from the tile's first."""

    def __init__(self, slabs: dict[Buffer, Buffer], axes: dict[Buffer, tuple[int, ...]], first: Expr) -> None:
        self._slabs = slabs
        self._axes = axes
        self._first = first

    def _indices(self, buffer: Buffer, indices: Sequence[Expr]) -> tuple[Expr, ...]:
        axes = self._axes[buffer]
        row = subtract(indices[axes[-1]], self._first)
        return (row, *(indices[place] for place in within_row(buffer, axes)))

    def expr(self, expr: Expr) -> Expr:
        if isinstance(expr, Load) and expr.buffer in self._slabs:
            return Load(self._slabs[expr.buffer], self._indices(expr.buffer, self.exprs(expr.indices)))
        return super().expr(expr)

    def store(self, store: Store) -> Store:
        if store.buffer in self._slabs:
            indices = self._indices(store.buffer, self.exprs(store.indices))
            return Store(self._slabs[store.buffer], indices, self.expr(store.value))
        return super().store(store)
