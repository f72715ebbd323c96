"""Blocks of the loop IR on NumPy: whole data grids at a time, reduce points one after another.

In: a Block and a frame. Out: the block's effect on the frame's memory. The order of the reduce points is what defines a
reduction's result: an accumulator takes them one by one, in row-major order, for all data points at once. Only what
does not depend on an accumulator is evaluated for many reduce points ahead. Scatter points that hit one cell take
effect in row-major order of the iterators.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from stagedtensor.codegen.interpret_expr import Compiler, Evaluate, Frame, Mask, locator
from stagedtensor.codegen.interpret_ops import Array
from stagedtensor.codegen.loop_ir import (
    Block,
    BlockIterator,
    Buffer,
    Const,
    Expr,
    Let,
    Load,
    Store,
    Symbol,
    Var,
    children,
    walk,
    with_children,
)
from stagedtensor.codegen.rewrite import symbols_of

_AHEAD = 1 << 16
"""Cells evaluated ahead of the accumulators at a time; bounds the memory of a reduction, never changes its result."""


@dataclass(frozen=True)
class _Named:
    """A value to be computed and the symbol it is bound to."""

    symbol: Symbol
    evaluate: Evaluate


class BlockRunner:
    """One Block, prepared: what can be computed ahead of the accumulators is told apart from what cannot."""

    def __init__(self, block: Block, compiler: Compiler) -> None:
        self.block = block
        self._compiler = compiler
        self._guard = None if block.guard is None else compiler(block.guard)
        self._extents = {item.symbol: compiler(item.extent) for item in block.iterators}
        self._init = [_Named(item.symbol, compiler(item.init)) for item in block.accumulators]
        self._lets = [_named(let, compiler) for let in block.lets]
        self._stores = [_StoreRunner(store, compiler) for store in block.stores]
        # Blocks without accumulators have nothing to prepare; the lists stay empty.
        self._ahead: list[_Named] = []
        self._step_lets: list[_Named] = []
        self._updates: list[_Named] = []
        if block.accumulators:
            self._split()

    def _split(self) -> None:
        """Sort lets into those before the accumulators and those of each step, and lift what updates can have ahead."""
        carried = {item.symbol for item in self.block.accumulators}
        slots: dict[Expr, Symbol] = {}
        step_lets: list[Let] = []
        for let in self.block.lets:
            if carried.isdisjoint(symbols_of(let.value)):
                self._ahead.append(_named(let, self._compiler))
            else:
                carried.add(let.symbol)
                step_lets.append(let)
        lifted = [Let(let.symbol, _lift(let.value, carried, slots)) for let in step_lets]
        updates = [Let(item.symbol, _lift(item.update, carried, slots)) for item in self.block.accumulators]
        self._step_lets = [_named(let, self._compiler) for let in lifted]
        self._updates = [_named(let, self._compiler) for let in updates]
        self._ahead += [_Named(symbol, self._compiler(expr)) for expr, symbol in slots.items()]

    def run(self, frame: Frame) -> None:
        """Execute the block."""
        frame = frame.inner()
        extents = {symbol: int(extent(frame, None)) for symbol, extent in self._extents.items()}
        if self.block.scatter:
            self._run_scatter(frame, extents)
            return
        grid = tuple(extents[item.symbol] for item in self.block.data)
        if 0 in grid:
            return
        _bind_grid(frame, self.block.data, grid, lead=0)
        mask: Mask = None
        if self.block.accumulators:
            self._reduce(frame, grid, tuple(extents[item.symbol] for item in self.block.reduce))
        else:
            if self._guard is not None:
                mask = np.asarray(self._guard(frame, None)) != 0
            for let in self._lets:
                frame.values[let.symbol] = let.evaluate(frame, mask)
        for store in self._stores:
            store.run(frame, mask, grid)

    def _reduce(self, frame: Frame, grid: tuple[int, ...], domain: tuple[int, ...]) -> None:
        """Leave the accumulators' final states in ``frame``, and the lets where there is a single reduce point."""
        for item in self._init:
            frame.values[item.symbol] = item.evaluate(frame, None)
        points = math.prod(domain)
        ahead = max(1, _AHEAD // math.prod(grid))
        for start in range(0, points, ahead):
            count = min(ahead, points - start)
            for step, mask in self._prepared(frame, grid, domain, start, count):
                inner = Frame(frame.values | step, frame.memory)
                states = inner.values
                for let in self._step_lets:
                    states[let.symbol] = let.evaluate(inner, mask)
                new = [item.evaluate(inner, mask) for item in self._updates]
                for item, value in zip(self._updates, new, strict=True):
                    old = frame.values[item.symbol]
                    frame.values[item.symbol] = value if mask is None else np.where(mask, value, old)
                if not domain:  # the stores may read the lets of the only point
                    frame.values.update({let.symbol: states[let.symbol] for let in self._lets})

    def _prepared(
        self, frame: Frame, grid: tuple[int, ...], domain: tuple[int, ...], start: int, count: int
    ) -> Iterator[tuple[dict[Symbol, Array], Mask]]:
        """Yield, for each of ``count`` reduce points from ``start``, the values computed ahead and the guard's mask."""
        points = Frame(dict(frame.values), frame.memory)
        _bind_grid(points, self.block.data, grid, lead=1)
        lead = (count,) + (1,) * len(grid)
        positions = np.unravel_index(np.arange(start, start + count), domain) if domain else ()
        for iterator, position in zip(self.block.reduce, positions, strict=True):
            points.values[iterator.symbol] = position.astype(np.int64).reshape(lead)
        mask: Mask = None
        if self._guard is not None:
            mask = np.broadcast_to(np.asarray(self._guard(points, None)) != 0, (count, *grid))
            if mask.all():
                mask = None
            elif not mask.any():
                return
        computed: dict[Symbol, Array] = {}
        for item in self._ahead:
            computed[item.symbol] = points.values[item.symbol] = item.evaluate(points, mask)
        rank = 1 + len(grid)
        # A value without the leading axis, or with one of length 1, is the same at every point.
        fixed = {symbol: value[0] if np.ndim(value) == rank else value for symbol, value in computed.items()}
        moving = {
            symbol: value
            for symbol, value in computed.items()
            if np.ndim(value) == rank and value.shape[0] == count > 1
        }
        for point in range(count):
            here = None if mask is None else mask[point]
            if here is not None and not here.any():
                continue
            yield fixed | {symbol: value[point] for symbol, value in moving.items()}, here

    # -- scatter

    def _run_scatter(self, frame: Frame, extents: dict[Symbol, int]) -> None:
        domain = tuple(extents.values())
        if 0 in domain:
            return
        positions = np.unravel_index(np.arange(math.prod(domain)), domain) if domain else ()
        points = {symbol: position.astype(np.int64) for symbol, position in zip(extents, positions, strict=True)}
        frame.values.update(points)
        if self._guard is not None:
            held = np.broadcast_to(np.asarray(self._guard(frame, None)) != 0, (math.prod(domain),))
            points = {symbol: position[held] for symbol, position in points.items()}
            frame.values.update(points)
        if domain and not next(iter(points.values())).size:
            return
        if not domain:
            if self._guard is None or held.all():
                self._run_points(frame)
            return
        if self._touches_own_cell_only():
            (store,) = self._stores
            for chosen in _rounds(np.broadcast_to(store.offsets(frame, None), next(iter(points.values())).shape)):
                frame.values.update({symbol: position[chosen] for symbol, position in points.items()})
                self._run_points(frame, chosen.shape)
        else:
            for point in zip(*points.values(), strict=True):
                frame.values.update(dict(zip(points, point, strict=True)))
                self._run_points(frame)

    def _run_points(self, frame: Frame, shape: tuple[int, ...] = ()) -> None:
        for let in self._lets:
            frame.values[let.symbol] = let.evaluate(frame, None)
        for store in self._stores:
            store.run(frame, None, shape)

    def _touches_own_cell_only(self) -> bool:
        """Whether each point reads the target at the cell it writes at most, so that different cells are independent."""
        if len(self.block.stores) != 1:
            return False
        (store,) = self.block.stores
        if any(_loads_of(store.buffer, index) for index in store.indices):
            return False
        if self.block.lets and any(
            symbol in store_symbols(store) for symbol in (let.symbol for let in self.block.lets)
        ):
            return False
        values = [store.value, *(let.value for let in self.block.lets)]
        guards = [] if self.block.guard is None else [self.block.guard]
        own = all(load.indices == store.indices for value in values for load in _loads_of(store.buffer, value))
        return own and not any(_loads_of(store.buffer, guard) for guard in guards)


def store_symbols(store: Store) -> tuple[Symbol, ...]:
    """Return the symbols that the indices of a store read."""
    return tuple(symbol for index in store.indices for symbol in symbols_of(index))


class _StoreRunner:
    def __init__(self, store: Store, compiler: Compiler) -> None:
        self._buffer = store.buffer
        self._value = compiler(store.value)
        self._indices = [compiler(index) for index in store.indices]
        self._locate = locator(store.buffer, "store to")

    def offsets(self, frame: Frame, mask: Mask) -> Array:
        return self._locate([index(frame, mask) for index in self._indices], mask)

    def run(self, frame: Frame, mask: Mask, grid: tuple[int, ...]) -> None:
        """Write the value at every point of ``grid`` where the mask holds."""
        cells = frame.cells(self._buffer)
        value = np.broadcast_to(self._value(frame, mask), grid)
        offsets = np.broadcast_to(self.offsets(frame, mask), grid)
        if mask is None:
            cells[offsets] = value
        else:
            held = np.broadcast_to(mask, grid)
            cells[offsets[held]] = value[held]


def _named(let: Let, compiler: Compiler) -> _Named:
    return _Named(let.symbol, compiler(let.value))


def _lift(expr: Expr, carried: set[Symbol], slots: dict[Expr, Symbol]) -> Expr:
    """Replace the greatest parts of ``expr`` that read no carried symbol by slots; literals stay."""
    if isinstance(expr, Const):
        return expr
    if carried.isdisjoint(symbols_of(expr)):
        slot = slots.setdefault(expr, Symbol("ahead", expr.type))
        return Var(slot)
    return with_children(expr, tuple(_lift(part, carried, slots) for part in children(expr)))


def _bind_grid(frame: Frame, iterators: tuple[BlockIterator, ...], grid: tuple[int, ...], *, lead: int) -> None:
    """Bind data iterators to arrays that span ``grid``, each along its axis, with ``lead`` axes of extent 1 before."""
    for axis, (item, extent) in enumerate(zip(iterators, grid, strict=True)):
        shape = (1,) * (lead + axis) + (extent,) + (1,) * (len(grid) - axis - 1)
        frame.values[item.symbol] = np.arange(extent, dtype=np.int64).reshape(shape)


def _loads_of(buffer: Buffer, expr: Expr) -> list[Load]:
    return [part for part in walk(expr) if isinstance(part, Load) and part.buffer is buffer]


def _rounds(offsets: Array) -> Iterator[Array]:
    """Yield sets of points that hit different cells: first every cell's first point, then the second ones, and so on."""
    order = np.argsort(offsets, kind="stable")
    ordered = offsets[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    lengths = np.diff(np.concatenate((starts, [len(ordered)])))
    rank = np.arange(len(ordered)) - np.repeat(starts, lengths)
    by_rank = np.argsort(rank, kind="stable")
    counts = np.bincount(rank)
    for chosen in np.split(order[by_rank], np.cumsum(counts)[:-1]):
        yield np.sort(chosen)
