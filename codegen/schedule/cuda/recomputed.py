"""Matrices that groups would have to store for later kernels, computed again where those read them instead.

In: groups of blocks that go through tiles of rows. Out: the groups with more members: a later reader gets copies of the
blocks that lead from small values to the matrix (scores from queries and keys, their exponentials from these and the
sums of rows), and reads them from shared memory. A product that sums over the rows, as in the gradients of keys and
values, becomes a group of its own whose rows are the matrix's columns. Only where every product is one of tensor cores,
all readers are served and all tiles fit: else the matrix is stored as before. A copy does what its original does, in
the same order of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from stagedtensor.codegen.loop_ir import Block, Buffer, Store, Symbol, Var
from stagedtensor.codegen.rewrite import Rewriter
from stagedtensor.codegen.schedule.cuda.operands import Product
from stagedtensor.codegen.schedule.cuda.row_group import (
    Member,
    RowGroup,
    accesses,
    as_product,
    at_axes,
    axes_of,
    is_static,
)
from stagedtensor.codegen.schedule.nest import expressions, loads_in

LEAST_CELLS = 1 << 20
"""Cells of a matrix from which it is computed again: what is smaller stays in a device's cache."""


class Recomputation:
    """Groups, and what becomes of them as matrices are computed again. ``by_start`` is the present state."""

    def __init__(
        self,
        groups: Sequence[RowGroup],
        blocks: Sequence[Block],
        temporaries: Collection[Buffer],
        fits: Callable[[RowGroup], bool],
        on_tensor_cores: Callable[[Product], bool],
    ) -> None:
        self.by_start = {group.start: group for group in groups}
        self._blocks = blocks
        self._temporaries = temporaries
        self._fits = fits
        self._on_tensor_cores = on_tensor_cores
        self._writers: dict[Buffer, list[int]] = {}
        self._readers: dict[Buffer, list[int]] = {}
        for place, block in enumerate(blocks):
            for store in block.stores:
                self._writers.setdefault(store.buffer, []).append(place)
            written = {store.buffer for store in block.stores}
            for buffer in dict.fromkeys(buffer for buffer, _ in accesses(block) if buffer not in written):
                self._readers.setdefault(buffer, []).append(place)
        for group in groups:
            self._spare(group.start)

    def _spare(self, start: int) -> None:
        """Do without the matrices that the group at ``start`` stores, if that can be done."""
        group = self.by_start[start]
        own = set(group.own)
        shape = self._blocks[group.own[0]].stores[0].buffer.shape
        stored = tuple(
            store.buffer
            for member in group.members[group.copies :]
            for store in member.block.stores
            if store.buffer not in group.slabs and self.is_matrix(store.buffer, shape)
        )
        outside = dict.fromkeys(place for buffer in stored for place in self._readers[buffer] if place not in own)
        if not outside:
            return
        changed: dict[int, RowGroup] = {}
        needed: set[Buffer] = set()
        for place in outside:
            user = next((other for other in self.by_start.values() if place in other.own), None)
            if user is not None and user.start in changed:
                continue
            copies = _Copies(self, shape, {})
            new = self._with_copies(user, copies, stored) if user is not None else self._across(place, copies, stored)
            if new is None:
                return
            changed[new.start] = new
            needed |= copies.needed
        changed[start] = self._without(group, stored)
        whole = {**self.by_start, **changed}
        for key, item in whole.items():
            if needed & item.slabs.keys():
                slabs = {buffer: axes for buffer, axes in item.slabs.items() if buffer not in needed}
                changed[key] = replace(item, slabs=slabs)
        if all(self._fits(item) for item in changed.values()):
            self.by_start |= changed

    def is_matrix(self, buffer: Buffer, shape: tuple[int, ...]) -> bool:
        """Tell whether ``buffer`` is a matrix of ``shape`` that copies make anew: large, written once, not kept."""
        large = buffer in self._temporaries and buffer.shape == shape and buffer.size >= LEAST_CELLS
        return large and len(self._writers[buffer]) == 1 and buffer in self._readers

    def _without(self, group: RowGroup, stored: Collection[Buffer]) -> RowGroup:
        """The group with ``stored`` within a tile only, and not even there where no other member reads it."""
        read = {
            buffer
            for member in group.members
            for buffer, _ in accesses(member.block)
            if buffer in stored and all(store.buffer is not buffer for store in member.block.stores)
        }
        members: list[Member] = []
        slabs = dict(group.slabs)
        for member in group.members:
            kept = tuple(item for item in member.block.stores if item.buffer not in stored or item.buffer in read)
            for item in member.block.stores:
                if item.buffer in read and (axes := axes_of(item.indices, member.symbols)) is not None:
                    slabs[item.buffer] = axes
            if kept == member.block.stores:
                members.append(member)
            elif kept:
                members.append(_renewed(member, replace(member.block, stores=kept)))
        return replace(group, members=tuple(members), slabs=slabs)

    def _with_copies(self, group: RowGroup, copies: _Copies, stored: Collection[Buffer]) -> RowGroup | None:
        """A group that computes what it reads of ``stored`` by itself."""
        for member in group.members:
            for buffer, indices in accesses(member.block):
                if buffer in stored:
                    axes = axes_of(indices, member.symbols)
                    if axes is None or not copies.of(buffer, axes):
                        return None
        renamed = [_renewed(member, copies.renamed(member.block)) for member in group.members]
        slabs = {**group.slabs, **copies.slabs}
        return replace(
            group, members=(*copies.members, *renamed), slabs=slabs, copies=group.copies + len(copies.members)
        )

    def _across(self, place: int, copies: _Copies, stored: Collection[Buffer]) -> RowGroup | None:
        """A group that ends in the product at ``place``, which sums over the rows of a stored matrix."""
        block = self._blocks[place]
        data = {item.symbol: item.bound for item in block.data}
        if not is_static(block):
            return None
        symbols: tuple[Symbol, ...] = ()
        for buffer, indices in accesses(block):
            if buffer not in stored:
                continue
            axes = tuple(at for at, part in enumerate(indices) if isinstance(part, Var) and part.symbol in data)
            found = at_axes(indices, axes)
            if found is None or len(axes) < 2 or (symbols and symbols != found) or not copies.of(buffer, axes):
                return None
            symbols = found
        given = as_product(block, symbols) if symbols else None
        if given is None or not self._on_tensor_cores(given):
            return None
        renamed = copies.renamed(block)
        last = Member(place, renamed, symbols, as_product(renamed, symbols))
        extents = tuple(data[symbol] for symbol in symbols)
        return RowGroup((*copies.members, last), extents, copies.slabs, (), len(copies.members))

    def copied(self, buffer: Buffer) -> tuple[int, Block, Store] | None:
        """Return the place of ``buffer``'s writer, the block with that store alone, the store; None if none serves."""
        (place,) = self._writers[buffer]
        block = self._blocks[place]
        written = {store.buffer for store in block.stores}
        if not is_static(block) or any(load.buffer in written for load in loads_in(*expressions(block))):
            return None  # stores build on one another
        (store,) = (store for store in block.stores if store.buffer is buffer)
        return place, replace(block, stores=(store,)), store

    def unchanged(self, buffer: Buffer, place: int) -> bool:
        """Tell whether nothing from ``place`` on writes ``buffer``."""
        return all(other < place for other in self._writers.get(buffer, ()))

    def allows(self, given: Product | None) -> bool:
        """Tell whether a block may be copied, a product only if tensor cores compute it."""
        return given is None or self._on_tensor_cores(given)


@dataclass
class _Copies:
    """Copies of blocks for one group, in order. ``needed`` are the values that they start from."""

    source: Recomputation
    shape: tuple[int, ...]
    made: dict[Buffer, Buffer]
    members: list[Member] = field(default_factory=list)
    slabs: dict[Buffer, tuple[int, ...]] = field(default_factory=dict)
    needed: set[Buffer] = field(default_factory=set)

    def of(self, buffer: Buffer, axes: tuple[int, ...]) -> bool:
        """Make a copy of ``buffer``, the outer iterators and the row at ``axes``; False where that is not possible."""
        if buffer in self.made:
            return self.slabs[self.made[buffer]] == axes
        found = self.source.copied(buffer)
        if found is None:
            return False
        place, block, store = found
        symbols = at_axes(store.indices, axes)
        if symbols is None or not set(symbols) <= {item.symbol for item in block.data}:
            return False
        given = as_product(block, symbols) if block.accumulators else None
        if (block.accumulators and given is None) or not self.source.allows(given):
            return False
        for other, indices in accesses(block):
            if other is buffer:
                continue
            if self.source.is_matrix(other, self.shape):
                below = axes_of(indices, symbols)
                if below is None or not self.of(other, below):
                    return False
            elif not self.source.unchanged(other, place):
                return False
            else:
                self.needed.add(other)
        new = replace(buffer, node=None)
        self.made[buffer] = new
        self.slabs[new] = axes
        copy = self.renamed(block)
        self.members.append(Member(place, copy, symbols, as_product(copy, symbols) if block.accumulators else None))
        return True

    def renamed(self, block: Block) -> Block:
        """Return ``block`` on the copies that were made."""
        return _Renamed(self.made).block(block)


class _Renamed(Rewriter):
    def __init__(self, made: dict[Buffer, Buffer]) -> None:
        self._made = made

    def buffer(self, buffer: Buffer) -> Buffer:
        return self._made.get(buffer, buffer)


def _renewed(member: Member, block: Block) -> Member:
    return replace(member, block=block, product=None if member.product is None else as_product(block, member.symbols))


__all__ = ["LEAST_CELLS", "Recomputation"]
