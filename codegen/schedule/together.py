"""A group of kernels as one: a parallel loop over the outer points, inside it the nests of its blocks on local slabs.

In: a :class:`~stagedtensor.codegen.schedule.slab.Group`. Out: one kernel::

    parallel for point of the outer axes:
        slab[q][k]                          one worker's
        the nest of each block, in order, as it would be by itself: same tiles, same order of sums, so same bits

Panels of packed operands are local too. Narrow operands of contractions are widened into local copies, a point at a
time, unless a unit for matrices reads them as they are. Where slabs are tiles of rows, a loop over the tiles stands
inside the point. What is the same for all tiles (panels, wide copies) is made in front of it; sums over the rows lie in
local memory, take the terms of one tile after the other, in order, and are stored behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias

from stagedtensor.codegen.affine import add, as_index, floor_divide, modulo, multiply
from stagedtensor.codegen.loop_ir import (
    Alloc,
    Block,
    BlockIterator,
    Buffer,
    Cast,
    Cost,
    Expr,
    For,
    Layout,
    Let,
    Load,
    Proc,
    Reorder,
    Stmt,
    Store,
    Symbol,
    Var,
)
from stagedtensor.codegen.passes.dependence import is_contraction
from stagedtensor.codegen.passes.hoist import hoisted
from stagedtensor.codegen.passes.jam import jam_loops
from stagedtensor.codegen.rewrite import (
    Rewriter,
    buffers_read,
    buffers_written,
    free_symbols,
    fresh_copy,
    map_expr,
    substitute,
    walk_stmts,
)
from stagedtensor.codegen.schedule.analysis import contraction, cost_of, points, prune, without_trivial_loops
from stagedtensor.codegen.schedule.choose import plan_block
from stagedtensor.codegen.schedule.machine import Machine
from stagedtensor.codegen.schedule.matrix_tile import on_matrix_unit
from stagedtensor.codegen.schedule.nest import collapse, fresh, index_symbol, loop, rename
from stagedtensor.codegen.schedule.nests import Nest
from stagedtensor.codegen.schedule.slab import Group
from stagedtensor.codegen.schedule.widened import narrow_load, with_cell
from stagedtensor.precision import Prec, f32

_NEVER = 1 << 62

Plan: TypeAlias = Sequence[Nest]


def together(group: Group, machine: Machine) -> Proc | None:
    """Return the kernel of ``group``, None where a block would be computed in another order than by itself."""
    work = _Together(group, replace(machine, serial_flops=_NEVER, serial_bytes=_NEVER))
    body, plans = work.body()
    if any(not _keeps_order(group, place % len(group.blocks), nests, machine) for place, nests in enumerate(plans)):
        return None
    paths = [_plain(nests[-1].path) for nests in plans[: len(group.blocks)]]
    costs = [cost_of(block) for block in group.blocks]
    cost = Cost(sum(item.flops for item in costs), sum(item.nbytes for item in costs) - _spared(group))
    parallel = cost.flops > machine.serial_flops or cost.nbytes > machine.serial_bytes
    statements = prune(without_trivial_loops(work.loop(body, parallel=parallel)))
    own = {stmt.buffer for stmt in walk_stmts(statements) if isinstance(stmt, Alloc)}
    params = dict.fromkeys((*buffers_read(statements), *buffers_written(statements)))
    count = points(tuple(BlockIterator(index_symbol(""), as_index(item), item) for item in group.extents))
    slabs = f"slabs of {group.tile} rows" if group.tile else "slabs"
    path = f"{slabs}, {count} points: {'; '.join(dict.fromkeys(paths))}"
    last = group.kernels[-1]
    return replace(
        last,
        params=tuple(buffer for buffer in params if buffer not in own),
        scalars=tuple(dict.fromkeys(symbol for kernel in group.kernels for symbol in kernel.scalars)),
        body=statements,
        origins=tuple(dict.fromkeys(item for kernel in group.kernels for item in kernel.origins)),
        path=f"{path}, {'static partition over threads' if parallel else 'one thread'}",
        cost=cost,
    )


def _plain(path: str) -> str:
    return path.removesuffix(", one thread")


def _spared(group: Group) -> int:
    """Bytes that the slabs do not move: each was written once and read by every block that reads it."""
    moved = 0
    for slab in group.slabs:
        uses = sum(slab in buffers_read(block) for block in group.blocks)
        moved += slab.nbytes * (1 + uses)
    return moved


@dataclass
class _Together:
    group: Group
    machine: Machine
    allocations: list[Alloc] = field(default_factory=list)
    locals: dict[Buffer, Buffer] = field(default_factory=dict)
    """What the nests are planned with, and the local array in its place."""

    def __post_init__(self) -> None:
        self.outer = tuple(Symbol(symbol.hint, symbol.type) for symbol in self.group.outer[0])
        self.wide: dict[tuple[Buffer, Prec, tuple[int, ...]], Buffer] = {}
        self.written = {store.buffer for block in self.group.blocks for store in block.stores}

    def _planned(self, name: str, prec: Prec, shape: tuple[int, ...]) -> Buffer:
        """A buffer of one point; schedules see it as any other."""
        return self._allocated(Buffer(name, prec, shape))

    def _allocated(self, planned: Buffer) -> Buffer:
        """Bring ``planned`` into being as a local array, all cells in a row; returns it."""
        in_a_row = planned.layout if planned.layout.steps else Layout((Reorder(tuple(range(len(planned.shape)))),))
        self.locals[planned] = replace(planned, space="local", layout=in_a_row)
        self.allocations.append(Alloc(self.locals[planned]))
        return planned

    def body(self) -> tuple[list[Stmt], list[Plan]]:
        """The statements of one point, and the plans of the blocks, for whole tiles and for what is left over."""
        blocks = [self._inner(block, at) for at, block in enumerate(self.group.blocks)]
        if not self.group.tile:
            slabs = self._slabs(None)
            return self._statements([slabs.of(block) for block in blocks], None)
        total, tile = self.group.rows[0].bound, self.group.tile
        first: list[Block] = []
        last: list[Block] = []
        cut: list[tuple[Block, BlockIterator]] = []
        for block, row in zip(blocks, self.group.rows, strict=True):
            if row.kind == "reduce":
                start, block, stop = self._gathering(block)
                first.append(start)
                last.append(stop)
            cut.append((block, row))
        symbol = index_symbol("i_rows")
        count, rest = divmod(total, tile)
        before, _ = self._statements(first, None)
        inside, plans = self._statements(self._rows(cut, tile, multiply(Var(symbol), tile)), before, symbol)
        body = [*before, loop(symbol, count, inside)]
        if rest:
            behind, more = self._statements(self._rows(cut, rest, as_index(count * tile)), None)
            body, plans = [*body, *behind], [*plans, *more]
        return [*body, *self._statements(last, None)[0]], plans

    def _inner(self, block: Block, place: int) -> Block:
        """A block at one outer point."""
        at = {symbol: Var(new) for symbol, new in zip(self.group.outer[place], self.outer, strict=True)}
        kept = tuple(item for item in block.iterators if item.symbol not in at)
        return substitute(replace(block, iterators=kept), at)

    def _slabs(self, rows: int | None) -> _Slabs:
        """Local slabs of ``rows`` rows, of all rows where that is None."""
        local: dict[Buffer, Buffer] = {}
        for slab in self.group.slabs:
            *_, height, width = slab.shape
            local[slab] = self._planned(slab.name, slab.type, (height if rows is None else rows, width))
        return _Slabs(local)

    def _rows(self, blocks: Sequence[tuple[Block, BlockIterator]], count: int, start: Expr) -> list[Block]:
        """The blocks of a tile of ``count`` rows from ``start``."""
        slabs = self._slabs(count)
        done: list[Block] = []
        for block, row in blocks:
            within = BlockIterator(fresh(row.symbol), as_index(count), count, row.kind)
            local = slabs.of(block, (row.symbol, within.symbol))
            iterators = tuple(within if item.symbol is row.symbol else item for item in block.iterators)
            cut = replace(rename(local, {row.symbol: add(start, Var(within.symbol))}), iterators=iterators)
            done.append(fresh_copy(cut))
        return done

    def _gathering(self, block: Block) -> tuple[Block, Block, Block]:
        """A block that sums over the rows as three: its sums' start, a block that goes on from them, and its stores."""
        shape = tuple(item.bound for item in block.data)
        label = block.stores[0].buffer.name.replace(".", "_")
        sums = {item.symbol: self._planned(f"{label}_sums", item.symbol.type, shape) for item in block.accumulators}

        def cell(symbol: Symbol, names: Sequence[Symbol]) -> Load:
            return Load(sums[symbol], tuple(map(Var, names)))

        def copy(stores: Iterable[Store], names: Sequence[Symbol]) -> Block:
            iterators = tuple(replace(item, symbol=name) for item, name in zip(block.data, names, strict=True))
            at: dict[Symbol, Expr] = {item.symbol: Var(name) for item, name in zip(block.data, names, strict=True)}
            at.update({symbol: cell(symbol, names) for symbol in sums})
            return Block(block.name, iterators, tuple(substitute(store, at) for store in stores))

        own = [item.symbol for item in block.data]
        at_cell = tuple(map(Var, own))
        starts = (Store(sums[item.symbol], at_cell, item.init) for item in block.accumulators)
        states = tuple(replace(item, init=cell(item.symbol, own)) for item in block.accumulators)
        stores = tuple(Store(sums[item.symbol], at_cell, Var(item.symbol)) for item in block.accumulators)
        going_on = replace(block, accumulators=states, stores=stores)
        return copy(starts, [fresh(name) for name in own]), going_on, copy(block.stores, [fresh(name) for name in own])

    def _statements(
        self, blocks: Iterable[Block], before: list[Stmt] | None, tile: Symbol | None = None
    ) -> tuple[list[Stmt], list[Plan]]:
        """The nests of ``blocks`` in order; copies of operands that are the same for every ``tile`` go to ``before``."""
        body: list[tuple[Stmt, ...]] = []
        plans: list[Plan] = []
        changing = set(self.written)
        for block in blocks:
            widening, block = self._with_wide_operands(block)
            for part in (*widening, block):
                nests = plan_block(part, self.machine)
                if part is block:
                    plans.append(nests)
                for nest in nests:
                    for buffer in nest.scratch:
                        self._allocated(buffer)
                    # here, where only what this nest writes can change: a later nest may write what this one reads
                    statements = hoisted(Proc(nest.suffix, (), without_trivial_loops(nest.body))).body
                    copies = part is not block or nest is not nests[-1]
                    same = (
                        copies and tile not in free_symbols(statements) and changing.isdisjoint(buffers_read(nest.body))
                    )
                    if before is not None and same:
                        before += substitute(statements, {}, self.locals)
                    else:
                        body.append(statements)
                        changing.update(buffers_written(nest.body))
        # rows stay in the nearest cache from nest to nest
        fixed = self.outer if tile is None else (*self.outer, tile)
        joined = (substitute(statements, {}, self.locals) for statements in jam_loops(body, fixed))
        return [stmt for statements in joined for stmt in statements], plans

    def _with_wide_operands(self, block: Block) -> tuple[list[Block], Block]:
        """The blocks that widen narrow operands of a contraction, and the contraction of the wide ones."""
        widening: list[Block] = []
        if is_contraction(block) and not self._on_unit(block):
            widened = partial(self._widened, widening)
            states = tuple(replace(item, update=map_expr(item.update, widened)) for item in block.accumulators)
            block = replace(block, accumulators=states)
        return widening, block

    def _on_unit(self, block: Block) -> bool:
        """Whether the machine multiplies the operands as they are."""
        found, unit = contraction(collapse(block)), self.machine.matrix_unit
        return found is not None and unit is not None and on_matrix_unit(found, unit)

    def _widened(self, widening: list[Block], expr: Expr) -> Expr:
        load = narrow_load(expr)
        if load is None or load.buffer in self.locals:
            return expr
        symbols = [part.symbol if isinstance(part, Var) else None for part in load.indices]
        outer = tuple(place for place, symbol in enumerate(symbols) if symbol in self.outer)
        if len(outer) != len(self.outer):
            return expr
        inner = [place for place in range(len(symbols)) if place not in outer]
        assert isinstance(expr, Cast)
        key = (load.buffer, expr.arg.type, outer)
        if key not in self.wide:
            shape = tuple(load.buffer.shape[place] for place in inner)
            name = f"{load.buffer.name.replace('.', '_')}_wide"
            self.wide[key] = self._planned(name, f32, shape)
            axes = tuple(BlockIterator(index_symbol("cell"), as_index(extent), extent) for extent in shape)
            cells = iter(axes)
            at = tuple(
                load.indices[place] if place in outer else Var(next(cells).symbol) for place in range(len(symbols))
            )
            value = with_cell(expr, at)
            cell = tuple(Var(item.symbol) for item in axes)
            widening.append(Block(name, axes, (Store(self.wide[key], cell, value),)))
        return Load(self.wide[key], tuple(load.indices[place] for place in inner))

    def loop(self, body: Iterable[Stmt], *, parallel: bool) -> tuple[Stmt, ...]:
        """The loop over the outer points."""
        total = 1
        for extent in self.group.extents:
            total *= extent
        hint = "_".join(dict.fromkeys(symbol.hint.removeprefix("i_") for symbol in self.outer))
        point = index_symbol(hint)
        lets: list[Stmt] = []
        rest: Expr = Var(point)
        below = total
        for symbol, extent in zip(self.outer, self.group.extents, strict=True):
            below //= extent
            here = floor_divide(rest, below) if below > 1 else rest
            lets.append(Let(symbol, modulo(here, extent) if below * extent < total else here))
        iterator = BlockIterator(point, as_index(total), total)
        return (For(iterator, (*lets, *self.allocations, *body), "parallel" if parallel else "serial"),)


def _keeps_order(group: Group, place: int, nests: Plan, machine: Machine) -> bool:
    """Whether each sum of a block takes its terms in the order in which it would by itself."""
    block = group.blocks[place]
    if not block.accumulators:
        return True
    alone = _order(plan_block(block, machine))
    goes_on = bool(group.tile) and group.rows[place].kind == "reduce"
    return _order(nests) == alone and (not goes_on or alone in _GOING_ON)


_GOING_ON = (("reduction in order",), ("pairs of terms in order",))
"""Orders in which a sum goes on from one tile of rows to the next: tiles are even, so that no pair is parted."""


def _order(nests: Sequence[Nest]) -> tuple[str, ...]:
    """The parts of paths that say in which order sums are taken."""
    parts = [part for nest in nests for part in nest.path.split(", ")]
    return tuple(part for part in parts if part.endswith((" lanes", " parts", " in order")) or "parts in order" in part)


class _Slabs(Rewriter):
    """Accesses of slabs lose the outer axes; of tiles of rows, they have the row within the tile."""

    def __init__(self, slabs: dict[Buffer, Buffer]) -> None:
        self._slabs = slabs
        self._row: tuple[Symbol, Symbol] | None = None

    def of(self, block: Block, row: tuple[Symbol, Symbol] | None = None) -> Block:
        """Return ``block`` on local slabs; ``row`` is the iterator that walks the rows, and the one within a tile."""
        self._row = row
        return self.block(block)

    def expr(self, expr: Expr) -> Expr:
        if isinstance(expr, Load) and expr.buffer in self._slabs:
            return Load(self._slabs[expr.buffer], self._within(expr.indices))
        return super().expr(expr)

    def store(self, store: Store) -> Store:
        if store.buffer in self._slabs:
            return Store(self._slabs[store.buffer], self._within(store.indices), self.expr(store.value))
        return super().store(store)

    def _within(self, indices: tuple[Expr, ...]) -> tuple[Expr, ...]:
        inner = self.exprs(indices[-2:])
        if self._row is None:
            return inner
        row, within = self._row
        return tuple(Var(within) if part == Var(row) else part for part in inner)
