"""Which kernels go through tiles of rows together, their large intermediates in shared memory: attention, its
gradients.

In: blocks in the order of their kernels. Out: groups of blocks that walk the same rows, at least two of them products
of matrices, such that whatever one of them writes and another touches lies in the row at hand::

    scores[b, h, q, k] <- q . k          for b, h, 16 to 64 rows q:  slab[q, k] <- q . k
    p[b, h, q, k] <- exp(scores ...)   ->                            p[q, k] <- exp(slab ...)
    out[b, q, h, v] <- p . v                                         out[b, q, h, v] <- p . v

What stands between the members goes before them or behind. What nothing else touches exists a tile at a time only.
Chooses no tile and prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from stagedtensor.codegen.affine import constant
from stagedtensor.codegen.loop_ir import Block, BlockIterator, Buffer, Expr, Load, Symbol, Var
from stagedtensor.codegen.passes.dependence import Effects, conflict, effects_of
from stagedtensor.codegen.rewrite import symbols_of
from stagedtensor.codegen.schedule.analysis import contraction
from stagedtensor.codegen.schedule.cuda.operands import LEAST_SIDE, Product, product
from stagedtensor.codegen.schedule.nest import expressions, loads_in
from stagedtensor.codegen.schedule.split import combinable

_LOOK_AHEAD = 24
"""Kernels behind the first one that may join it."""


@dataclass(frozen=True)
class Member:
    """One block of a group: its place, its iterators of the outer axes and of the rows, its matrix product if any."""

    place: int
    block: Block
    symbols: tuple[Symbol, ...]
    product: Product | None

    @property
    def row(self) -> BlockIterator:
        """The iterator of the rows."""
        return next(item for item in self.block.iterators if item.symbol is self.symbols[-1])

    @property
    def kept(self) -> tuple[BlockIterator, ...]:
        """The data iterators within a row."""
        return tuple(item for item in self.block.data if item.symbol not in self.symbols)


@dataclass(frozen=True, eq=False)
class RowGroup:
    """Blocks that run together. ``extents`` are those of the outer axes and, last, the rows.

    ``slabs`` exist within a tile only: for each, at which of its axes the outer iterators and the rows stand.
    ``before`` are the places of blocks from between the members that must come before all of them. The first ``copies``
    members are copies of blocks that stand, and run, elsewhere.
    """

    members: tuple[Member, ...]
    extents: tuple[int, ...]
    slabs: dict[Buffer, tuple[int, ...]]
    before: tuple[int, ...]
    copies: int = 0

    @property
    def places(self) -> tuple[int, ...]:
        """Where the blocks stood."""
        return tuple(member.place for member in self.members)

    @property
    def own(self) -> tuple[int, ...]:
        """Where those blocks stood that run nowhere else."""
        return self.places[self.copies :]

    @property
    def start(self) -> int:
        """The place of the group in the order of kernels."""
        return self.own[0]


def row_groups(
    blocks: Sequence[Block], temporaries: Collection[Buffer], fits: Callable[[RowGroup], bool]
) -> list[RowGroup]:
    """Return the groups among ``blocks`` that ``fits`` takes; only ``temporaries`` become slabs. No block is in two."""
    effects = [effects_of(block) for block in blocks]
    found: list[RowGroup] = []
    taken: set[int] = set()
    for start, block in enumerate(blocks):
        if start in taken or not (symbols := _begins(block, temporaries)):
            continue
        gathered = _gathered(start, symbols, blocks, effects, temporaries, taken)
        group = _finished(gathered, blocks, temporaries)
        while group is not None and not fits(group):
            gathered.members = gathered.members[: len(group.members) - 1]
            group = _finished(gathered, blocks, temporaries)
        if group is not None:
            found.append(group)
            taken.update(group.places, group.before)
    return found


def _begins(block: Block, temporaries: Collection[Buffer]) -> tuple[Symbol, ...]:
    """The outer iterators and the row of a product that makes a matrix per outer point; () where it makes none."""
    if len(block.stores) != 1 or block.stores[0].buffer not in temporaries or not is_static(block):
        return ()
    (store,) = block.stores
    leading = zip(store.indices[:-1], store.buffer.shape, strict=False)
    parts = [part for part, extent in leading if extent > 1]
    symbols = tuple(part.symbol for part in parts if isinstance(part, Var))
    if len(symbols) != len(parts) or len(symbols) < 2 or not _iterates(block, symbols):
        return ()
    return symbols if as_product(block, symbols) is not None else ()


def is_static(block: Block) -> bool:
    """Tell whether the points of ``block`` are the same in every run: fixed extents, no guard, no scatter."""
    return (
        not block.scatter
        and block.guard is None
        and all(item.bound and constant(item.extent) == item.bound for item in block.iterators)
    )


def _iterates(block: Block, symbols: tuple[Symbol, ...]) -> bool:
    return len(set(symbols)) == len(symbols) and set(symbols) <= {item.symbol for item in block.data}


def as_product(block: Block, symbols: tuple[Symbol, ...]) -> Product | None:
    """Return a block as a product per outer point, its rows those of ``symbols``; None where all share an operand."""
    fixed = replace(block, iterators=tuple(item for item in block.iterators if item.symbol not in symbols[:-1]))
    found = contraction(fixed)
    given = None if found is None else product(found)
    if given is None or given.batch or min(given.sizes) < LEAST_SIDE:
        return None
    if [item.symbol for item in given.rows] != [symbols[-1]]:
        given = replace(given, left=given.right, right=given.left, rows=given.columns, columns=given.rows)
    if [item.symbol for item in given.rows] != [symbols[-1]]:
        return None
    # one that is the same for all would be read again for every outer point
    varies = all(any(symbol in symbols for symbol in symbols_of(operand)) for operand in (given.left, given.right))
    return given if varies else None


@dataclass
class _Gathered:
    """What may run together: for what it writes, at which axes outer iterators and rows stand; what goes before it."""

    members: list[Member]
    axes: dict[Buffer, tuple[int, ...]]
    before: list[int]


def _gathered(
    start: int,
    symbols: tuple[Symbol, ...],
    blocks: Sequence[Block],
    effects: Sequence[Effects],
    temporaries: Collection[Buffer],
    taken: Collection[int],
) -> _Gathered:
    """What may run with the block at ``start``."""
    first = Member(start, blocks[start], symbols, as_product(blocks[start], symbols))
    extents = _extents(first)
    found, behind = _Gathered([first], dict(_written_axes(first) or ()), []), list[int]()
    for place in range(start + 1, min(len(blocks), start + _LOOK_AHEAD)):
        member = None if place in taken else _member(place, blocks[place], found.axes, extents)
        if member is None and place not in taken and (own := _begins(blocks[place], temporaries)):
            beside = Member(place, blocks[place], own, as_product(blocks[place], own))
            made = blocks[place].stores[0].buffer
            # a second matrix of the same rows, which some member may read beside the first
            member = (
                beside if made.shape == first.block.stores[0].buffer.shape and _extents(beside) == extents else None
            )
        new = None if member is None else _written_axes(member)
        waits = any(conflict(effects[other], effects[place]) for other in behind)
        if member and new and not waits and _divided([*found.members, member], {**found.axes, **new}):
            found.members.append(member)
            found.axes.update(new)
        elif waits or any(conflict(effects[other.place], effects[place]) for other in found.members):
            behind.append(place)
        else:
            found.before.append(place)
    return found


def _finished(gathered: _Gathered, blocks: Sequence[Block], temporaries: Collection[Buffer]) -> RowGroup | None:
    """The group up to its last product, if it spares the matrix that the first one makes."""
    products = [place for place, member in enumerate(gathered.members) if member.product is not None]
    if len(products) < 2:
        return None
    members = gathered.members[: products[-1] + 1]
    places = {member.place for member in members}
    outside = {buffer for place, block in enumerate(blocks) if place not in places for buffer, _ in accesses(block)}
    written = dict.fromkeys(store.buffer for member in members for store in member.block.stores)
    slabs = {buffer: gathered.axes[buffer] for buffer in written if buffer in temporaries and buffer not in outside}
    first = members[0]
    before = tuple(place for place in gathered.before if place < members[-1].place)
    return RowGroup(tuple(members), _extents(first), slabs, before) if first.block.stores[0].buffer in slabs else None


def _extents(member: Member) -> tuple[int, ...]:
    bounds = {item.symbol: item.bound for item in member.block.iterators}
    return tuple(bounds[symbol] for symbol in member.symbols)


def _member(place: int, block: Block, axes: dict[Buffer, tuple[int, ...]], extents: tuple[int, ...]) -> Member | None:
    """``block`` as a member of the group that writes ``axes``, None where it is no step of the group's rows."""
    if not is_static(block):
        return None
    found = {at_axes(indices, axes[buffer]) for buffer, indices in accesses(block) if buffer in axes}
    if len(found) != 1 or None in found:
        return None
    (symbols,) = found
    bounds = {item.symbol: item.bound for item in block.iterators}
    if symbols is None or not _iterates(block, symbols) or tuple(bounds[symbol] for symbol in symbols) != extents:
        return None
    given = as_product(block, symbols) if block.reduce else None
    rowwise = not block.accumulators or (len(block.data) == len(symbols) and bool(block.reduce) and combinable(block))
    return Member(place, block, symbols, given) if given is not None or rowwise else None


def at_axes(indices: Sequence[Expr], axes: tuple[int, ...]) -> tuple[Symbol, ...] | None:
    """Return the symbols that stand at ``axes``, None where something else does."""
    found = tuple(part.symbol for axis in axes if isinstance(part := indices[axis], Var))
    return found if len(found) == len(axes) else None


def _written_axes(member: Member) -> dict[Buffer, tuple[int, ...]] | None:
    """For each buffer that a member writes, where its outer iterators and its row stand; None where one is missing."""
    found: dict[Buffer, tuple[int, ...]] = {}
    for store in member.block.stores:
        at = axes_of(store.indices, member.symbols)
        if at is None or found.setdefault(store.buffer, at) != at:
            return None
    return found


def axes_of(indices: Sequence[Expr], symbols: Sequence[Symbol]) -> tuple[int, ...] | None:
    """Return at which axes of an access ``symbols`` stand, None where one is missing."""
    places = {part.symbol: place for place, part in enumerate(indices) if isinstance(part, Var)}
    found = tuple(places[symbol] for symbol in symbols if symbol in places)
    return found if len(found) == len(symbols) else None


def _divided(members: Sequence[Member], axes: dict[Buffer, tuple[int, ...]]) -> bool:
    """Tell whether every access of what the members write keeps to the outer point and the row at hand."""
    return all(
        at_axes(indices, axes[buffer]) == member.symbols
        for member in members
        for buffer, indices in accesses(member.block)
        if buffer in axes
    )


def within_row(buffer: Buffer, axes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the axes of a slab within a row: those that are none of ``axes`` and have more than one place."""
    return tuple(place for place, extent in enumerate(buffer.shape) if place not in axes and extent > 1)


def accesses(block: Block) -> Iterator[tuple[Buffer, tuple[Expr, ...]]]:
    """Yield every buffer that a block loads or stores, with the indices."""
    loads: tuple[Load, ...] = loads_in(*expressions(block))
    for load in loads:
        yield load.buffer, load.indices
    for store in block.stores:
        yield store.buffer, store.indices
