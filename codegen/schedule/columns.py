"""Template for reductions into a register tile: accumulators stay in registers while the reduce iterators run outside.

In: a block, the vector iterator (adjacent cells of the result), perhaps a row iterator that shares its loads, and the
tile's size. Out: its loops:

    for tile: acc[rows][columns] = init
        for k (in the block's order):
            for row (unrolled): for column (vector): acc = update
        for row: for column: store

Each sum keeps its own order of k, so results are the same bits as the serial nest's for any tile and thread count. A
last tile that would stick out starts early instead; its cells are computed again and only the new ones stored. Where
the number of rows is known at run time only, rows beyond the end repeat the last one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from stagedtensor.codegen.affine import add, constant, floor_divide, minimum, multiply, subtract
from stagedtensor.codegen.loop_ir import (
    Alloc,
    Apply,
    Block,
    BlockIterator,
    Buffer,
    Cast,
    Const,
    Expr,
    Fma,
    If,
    Let,
    Load,
    LoopKind,
    Stmt,
    Store,
    Symbol,
    Tile as MicroTile,
    Var,
    index,
    with_children,
)
from stagedtensor.codegen.rewrite import substitute, symbols_of, walk_stmts
from stagedtensor.codegen.schedule.guards import conjunction, conjuncts
from stagedtensor.codegen.schedule.microkernel import Accumulation, MicroKernel, multiply_add
from stagedtensor.codegen.schedule.nest import (
    Point,
    index_symbol,
    loads_in,
    loop,
    nest,
    point,
    rename,
    stores,
    to_threads,
)
from stagedtensor.codegen.schedule.rows import updates_in_place
from stagedtensor.precision import i64


@dataclass(frozen=True)
class TileShape:
    """Rows and columns of accumulators; ``rows`` is 1 where there is no row iterator.

    An axis is padded where all its operands are packed in whole tiles: the last tile then computes from padding.
    """

    rows: int
    columns: int
    padded_rows: bool = False
    padded_columns: bool = False


@dataclass(frozen=True)
class _Axis:
    """One tiled iterator: the symbol of its tile, their number, and the first index of a tile."""

    tile: Symbol
    count: Expr
    most: int
    first: Expr
    size: int
    extent: Expr
    padded: bool

    @property
    def ragged(self) -> bool:
        """Whether the last tile may stick out."""
        value = constant(self.extent)
        return value is None or value % self.size != 0

    @property
    def clamped(self) -> bool:
        """Whether indices beyond the end read the last one instead."""
        return self.ragged and (self.padded or constant(self.extent) is None)

    def within(self, position: Expr) -> Expr:
        """Return ``position``, held back to the last index."""
        return minimum(position, subtract(self.extent, 1))


def _axis(iterator: BlockIterator, size: int, hint: str, padded: bool) -> _Axis:
    extent = constant(iterator.extent)
    tile = index_symbol(hint)
    most = -(-iterator.bound // size)
    count = floor_divide(add(iterator.extent, size - 1), size)
    start = multiply(Var(tile), size) if most > 1 else index(0)
    if extent is None or padded or extent % size == 0:
        return _Axis(tile, count, most, start, size, iterator.extent, padded)
    return _Axis(tile, count, most, minimum(start, extent - size), size, iterator.extent, False)


def columns(
    block: Block,
    vector: BlockIterator,
    row: BlockIterator | None,
    shape: TileShape,
    *,
    parallel: bool,
    rows_outside: bool = False,
    kernel: MicroKernel = multiply_add,
) -> tuple[tuple[Stmt, ...], str]:
    """Return the tiled nest of ``block`` and a few words on it.

    ``rows_outside`` walks all columns for one tile of rows. ``kernel`` turns the loops of one tile into a call where it
    can.
    """
    column_axis = _axis(vector, shape.columns, _tile_hint(vector), shape.padded_columns)
    row_axis = None if row is None else _axis(row, shape.rows, _tile_hint(row), shape.padded_rows)
    extents = (shape.columns,) if row_axis is None else (shape.rows, shape.columns)
    states = {
        item.symbol: Buffer(item.symbol.hint, item.symbol.type, extents, "register") for item in block.accumulators
    }
    tile = _Tile(block, vector, row, column_axis, row_axis, states, kernel=kernel)
    body: list[Stmt] = [Alloc(buffer) for buffer in states.values()]
    starts = _starts(row_axis, column_axis)
    body = [*starts.lets, *body, *tile.sums(starts), *tile.finalise(starts)]
    order = _order(block, tile, rows_outside=rows_outside)
    return _outer(order, body, to_threads(order) if parallel and order else None), _describe(block, shape, row)


def blocked_columns(
    block: Block, vector: BlockIterator, row: BlockIterator, shape: TileShape, steps: int, *, parallel: bool
) -> tuple[tuple[Stmt, ...], str, Buffer] | None:
    """Return the nest with the outermost reduce iterator cut into blocks of ``steps``, and the accumulators' memory::

        for block: for tile:
            in the first block: acc[tile] = init
            acc[tile][rows][columns] += the block's terms
            in the last block: store

    What a block reads stays in the cache while all tiles pass by. Each sum still takes its terms in order. None where
    the sums are no plain multiply-adds.
    """
    (item,) = block.accumulators
    part, whole = index_symbol("i_block"), block.reduce[0]
    count = whole.bound // steps
    within = BlockIterator(index_symbol(whole.symbol.hint), index(steps), steps, "reduce")
    position = add(multiply(Var(part), steps), Var(within.symbol)) if steps > 1 else Var(part)
    iterators = [within if given is whole else given for given in block.iterators]
    cut = replace(
        rename(block, {whole.symbol: position}),
        iterators=tuple(given for given in iterators if given is not within or steps > 1),
    )
    column_axis = _axis(vector, shape.columns, _tile_hint(vector), shape.padded_columns)
    row_axis = _axis(row, shape.rows, _tile_hint(row), shape.padded_rows)
    bare = _Tile(cut, vector, row, column_axis, row_axis, {})
    order = _order(cut, bare, rows_outside=False)
    extents = (*(given.bound for given in order), shape.rows, shape.columns)
    label = block.stores[0].buffer.name.replace(".", "_")
    sums = Buffer(f"{label}_sums", item.symbol.type, extents)
    tile = replace(bare, states={item.symbol: sums}, place=tuple(Var(given.symbol) for given in order))
    starts = _starts(row_axis, column_axis)
    added = tile.sums(starts, fresh=False)
    if not order or not any(isinstance(stmt, MicroTile) for stmt in walk_stmts(added)):
        return None
    body = (
        *starts.lets,
        If(Apply("eq", (Var(part), index(0)), i64), tile.fill(starts)),
        *added,
        If(Apply("eq", (Var(part), index(count - 1)), i64), tile.finalise(starts)),
    )
    # Where the loop that is dealt out lies does not matter to threads: a panel of columns stays nearest while rows pass
    # by.
    shared = max(order, key=lambda given: given.bound)
    nested = nest(order, body, {shared.symbol: "parallel"} if parallel else {})
    return (loop(part, count, nested),), f"{_describe(block, shape, row)}, {count} blocks of it", sums


def _describe(block: Block, shape: TileShape, row: BlockIterator | None) -> str:
    size = f"{shape.rows}x{shape.columns}" if row is not None else f"{shape.columns}"
    return f"register tile {size}, reduction in order"


def _tile_hint(iterator: BlockIterator) -> str:
    plain = iterator.symbol.hint.removeprefix("i_").removeprefix("i")
    return f"i_{plain}_tile" if plain else "i_tile"


@dataclass(frozen=True)
class _Starts:
    """First row and column of the tile; lets of their own where a last tile starts early."""

    lets: tuple[Let, ...]
    row: Expr
    column: Expr
    early_row: bool
    early_column: bool


def _starts(row: _Axis | None, column: _Axis) -> _Starts:
    lets: list[Let] = []

    def named(axis: _Axis | None, hint: str) -> tuple[Expr, bool]:
        if axis is None:
            return index(0), False
        if isinstance(axis.first, Apply) and axis.first.op == "minimum":
            symbol = index_symbol(hint)
            lets.append(Let(symbol, axis.first))
            return Var(symbol), True
        return axis.first, False

    first_row, early_row = named(row, "first_row")
    first_column, early_column = named(column, "first_column")
    return _Starts(tuple(lets), first_row, first_column, early_row, early_column)


@dataclass(frozen=True)
class _Tile:
    block: Block
    vector: BlockIterator
    row: BlockIterator | None
    column_axis: _Axis
    row_axis: _Axis | None
    states: Mapping[Symbol, Buffer]
    place: tuple[Expr, ...] = ()
    """Where the tile lies in ``states``, where these hold all tiles."""
    kernel: MicroKernel = multiply_add

    def _mapping(self, starts: _Starts, row: Expr, column: Expr, *, states: bool) -> dict[Symbol, Expr]:
        mapping: dict[Symbol, Expr] = {self.vector.symbol: add(starts.column, column)}
        if self.row is not None and self.row_axis is not None:
            position = add(starts.row, row)
            late = self.row_axis.clamped and not self.row_axis.padded
            mapping[self.row.symbol] = self.row_axis.within(position) if late else position
        if states:
            cell = self._cell(row, column)
            mapping.update({symbol: Load(buffer, cell) for symbol, buffer in self.states.items()})
        return mapping

    def _cell(self, row: Expr, column: Expr) -> tuple[Expr, ...]:
        return (*self.place, column) if self.row is None else (*self.place, row, column)

    def _rows(self, symbol: Symbol, body: Sequence[Stmt], kind: LoopKind) -> tuple[Stmt, ...]:
        if self.row_axis is None:
            return tuple(body)
        return (loop(symbol, self.row_axis.size, body, kind),)

    def fill(self, starts: _Starts) -> tuple[Stmt, ...]:
        """Initial states."""
        row, column = index_symbol("i_row"), index_symbol("i_column")
        mapping = self._mapping(starts, Var(row), Var(column), states=False)
        # The old value of a cell that is not there is never used, but must not be read either.
        if self.column_axis.clamped:
            mapping[self.vector.symbol] = self.column_axis.within(add(starts.column, Var(column)))
        if self.row is not None and self.row_axis is not None and self.row_axis.clamped:
            mapping[self.row.symbol] = self.row_axis.within(add(starts.row, Var(row)))
        cell = self._cell(Var(row), Var(column))
        body = [
            Store(self.states[item.symbol], cell, substitute(item.init, mapping)) for item in self.block.accumulators
        ]
        return self._rows(row, (loop(column, self.column_axis.size, body, "vector"),), "serial")

    def sums(self, starts: _Starts, *, fresh: bool = True) -> tuple[Stmt, ...]:
        """Initial states where they are ``fresh``, and the reduce loops around one step of the whole tile."""
        fill = self.fill(starts) if fresh else ()
        row, column = index_symbol("i_row"), index_symbol("i_column")
        mapping = self._mapping(starts, Var(row), Var(column), states=True)
        work = point(self.block, mapping)
        lets = {let.symbol for let in work.lets}
        guards = conjuncts(work.guard)
        cell_guard, guards = _depending(guards, {column, *lets})
        row_guard, guards = _depending(guards, {row})
        tile_guard = conjunction(guards)
        updates = updates_in_place(
            self.block.accumulators, self.states, self._cell(Var(row), Var(column)), work.mapping
        )
        plain = self.row is not None and len(self.states) == 1 and not work.lets and cell_guard is row_guard is None
        early: list[Let] = []
        if cell_guard is None:
            # A load in front of the columns is safe only where no column's guard can be what protects it.
            updates = [_hoisted(stmt, (column, *lets), early) for stmt in updates]
        inner = Point(work.lets, cell_guard, work.mapping).wrap(updates)
        body: tuple[Stmt, ...] = (*early, loop(column, self.column_axis.size, inner, "vector"))
        if row_guard is not None:
            body = (If(row_guard, body),)
        body = self._rows(row, body, "unroll")
        if plain:
            (item,), (state,) = self.block.accumulators, self.states.values()
            update = substitute(item.update, work.mapping)
            step = Accumulation(state, self.place, update, row, column, self.block.reduce, tile_guard, body)
            called = self.kernel(step, self._bounds(starts, row, column), fill, item.init if fresh else None)
            if called is not None:
                return called
        if tile_guard is not None:
            body = (If(tile_guard, body),)
        return (*fill, *nest(self.block.reduce, body, {}))

    def _bounds(self, starts: _Starts, row: Symbol, column: Symbol) -> dict[Symbol, int]:
        """The limits of the index variables inside the tile."""
        bounds = {item.symbol: item.bound for item in self.block.iterators}
        for axis, first, within in ((self.row_axis, starts.row, row), (self.column_axis, starts.column, column)):
            if axis is None:
                continue
            bounds |= {axis.tile: axis.most, within: axis.size}
            extent = constant(axis.extent)
            if isinstance(first, Var) and extent is not None:
                bounds[first.symbol] = extent - axis.size + 1  # a last tile starts early and ends where the axis does
        return bounds

    def finalise(self, starts: _Starts) -> tuple[Stmt, ...]:
        """The stores of the tile's new cells."""
        row, column = index_symbol("i_row"), index_symbol("i_column")
        mapping: dict[Symbol, Expr] = {self.vector.symbol: _position(self.column_axis, column)}
        # The tile may have started early: a new cell's place in it is its distance from where it did start.
        own_column = subtract(mapping[self.vector.symbol], starts.column) if starts.early_column else Var(column)
        own_row: Expr = Var(row)
        if self.row is not None and self.row_axis is not None:
            mapping[self.row.symbol] = _position(self.row_axis, row)
            own_row = subtract(mapping[self.row.symbol], starts.row) if starts.early_row else own_row
        cell = self._cell(own_row, own_column)
        mapping.update({symbol: Load(buffer, cell) for symbol, buffer in self.states.items()})
        body = _inside(self.column_axis, mapping[self.vector.symbol], stores(self.block, mapping))
        inner: tuple[Stmt, ...] = (loop(column, self.column_axis.size, body, "vector"),)
        if self.row is None or self.row_axis is None:
            return inner
        return (loop(row, self.row_axis.size, _inside(self.row_axis, mapping[self.row.symbol], inner)),)


def _inside(axis: _Axis, position: Expr, body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    """Keep the stores of a last tile within the result."""
    if not axis.ragged:
        return body
    return (If(Apply("lt", (position, axis.extent), i64), body),)


def _position(axis: _Axis, offset: Symbol) -> Expr:
    """The iterator's value at a new cell: these follow the tiles' regular starts."""
    start = multiply(Var(axis.tile), axis.size) if axis.most > 1 else index(0)
    return add(start, Var(offset))


def _hoisted(stmt: Stmt, moving: Sequence[Symbol], early: list[Let]) -> Stmt:
    """Move what does not change along the vector out in front of it: the broadcast operand is loaded once."""

    def visit(expr: Expr) -> Expr:
        if isinstance(expr, Const | Var):
            return expr
        if not any(symbol in moving for symbol in symbols_of(expr)):
            if not loads_in(expr) or any(load.buffer.space == "register" for load in loads_in(expr)):
                return expr
            for let in early:
                if let.value == expr:
                    return Var(let.symbol)
            hint = loads_in(expr)[-1].buffer.name if isinstance(expr, Load | Cast) else "value"
            symbol = Symbol(f"{hint}_k", expr.type)
            early.append(Let(symbol, expr))
            return Var(symbol)
        if isinstance(expr, Load):
            return expr
        if isinstance(expr, Apply | Cast | Fma):
            parts = tuple(visit(part) for part in _parts(expr))
            return with_children(expr, parts)
        return expr

    if isinstance(stmt, Store):
        return Store(stmt.buffer, stmt.indices, visit(stmt.value))
    if isinstance(stmt, Let):
        return Let(stmt.symbol, visit(stmt.value))
    return stmt


def _parts(expr: Apply | Cast | Fma) -> tuple[Expr, ...]:
    if isinstance(expr, Apply):
        return expr.args
    if isinstance(expr, Cast):
        return (expr.arg,)
    return (expr.a, expr.b, expr.c)


def _depending(parts: Sequence[Expr], symbols: set[Symbol]) -> tuple[Expr | None, tuple[Expr, ...]]:
    """Return the conjunction of the parts that read one of ``symbols``, and the other parts."""
    taken = [part for part in parts if any(symbol in symbols for symbol in symbols_of(part))]
    return conjunction(taken), tuple(part for part in parts if part not in taken)


def _order(block: Block, tile: _Tile, *, rows_outside: bool) -> list[BlockIterator]:
    """The loops around one tile, the outermost first.

    Columns outside rows: a panel of columns stays in cache while rows pass by. Rows outside columns: results are
    written, and read where they are updated, in the order of memory.
    """
    tiles: list[BlockIterator] = []
    if tile.column_axis.most > 1:
        tiles.append(_tile_iterator(tile.column_axis))
    if tile.row_axis is not None and (tile.row_axis.most > 1 or constant(tile.row_axis.count) is None):
        tiles.append(_tile_iterator(tile.row_axis))
    if rows_outside:
        tiles.reverse()
    return [*(item for item in block.data if item is not tile.vector and item is not tile.row), *tiles]


def _outer(order: list[BlockIterator], body: Sequence[Stmt], parallel: BlockIterator | None) -> tuple[Stmt, ...]:
    """``body`` in its loops, the one that is dealt out to threads in front."""
    if parallel is None:
        return nest(order, body, {})
    return nest([parallel, *(item for item in order if item is not parallel)], body, {parallel.symbol: "parallel"})


def _tile_iterator(axis: _Axis) -> BlockIterator:
    return BlockIterator(axis.tile, axis.count, axis.most)
