"""A contraction as a batch of matrix products: which iterators are rows, columns, batch and depth.

In: a recognised contraction. Out: :class:`Product`, with each group of iterators flattened, and the pieces that both
tiled templates need: the loop over tiles and the copy of one operand's tile into shared memory. Decides no tile size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from stagedtensor.codegen.affine import add, as_index, floor_divide, modulo, multiply
from stagedtensor.codegen.loop_ir import (
    Accumulator,
    Alloc,
    Apply,
    Block,
    BlockIterator,
    Buffer,
    Cast,
    Const,
    Expr,
    For,
    If,
    Let,
    Stmt,
    Store,
    Symbol,
    Var,
)
from stagedtensor.codegen.rewrite import substitute
from stagedtensor.codegen.schedule.analysis import Contraction, depends, stride
from stagedtensor.codegen.schedule.cuda.launch import (
    Flat,
    Launch,
    conjunction,
    cooperative_blocks,
    flatten,
    less,
    points_of,
    zero,
)
from stagedtensor.codegen.schedule.cuda.notes import Note
from stagedtensor.codegen.schedule.nest import collapse, index_symbol, loads_in, loop

LEAST_SIDE = 8
"""Rows, columns and depth of a product that is worth tiles."""


@dataclass(frozen=True)
class Product:
    """``left`` depends on ``rows``, ``right`` on ``columns``; ``batch`` are the other data iterators, ``depth`` is
    summed.

    ``guard`` (None: every point counts) depends on what the operand called ``guarded`` depends on, and on nothing else.
    """

    block: Block
    left: Expr
    right: Expr
    batch: tuple[BlockIterator, ...]
    rows: tuple[BlockIterator, ...]
    columns: tuple[BlockIterator, ...]
    depth: tuple[BlockIterator, ...]
    sign: str
    guard: Expr | None = None
    guarded: Literal["", "left", "right"] = ""
    note: Note | None = None
    """What is to be found out of the results besides."""

    @property
    def accumulator(self) -> Accumulator:
        """The one accumulator."""
        return self.block.accumulators[0]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Rows, columns and depth."""
        return points_of(self.rows), points_of(self.columns), points_of(self.depth)


def product(found: Contraction) -> Product | None:
    """Read a contraction as a batch of matrix products, columns along the results' memory; None where it is none."""
    block = found.block
    (item,) = block.accumulators
    sign = item.update.op if isinstance(item.update, Apply) else "fma"
    left, right = found.lhs, found.rhs
    rows = tuple(item for item in block.data if depends(left, item) and not depends(right, item))
    columns = tuple(item for item in block.data if depends(right, item) and not depends(left, item))
    if not rows or not columns or any(item.bound == 0 for item in block.iterators):
        return None
    if block.data[-1] in rows:
        left, right, rows, columns = right, left, columns, rows
    batch = tuple(item for item in block.data if item not in rows and item not in columns)
    guarded: Literal["", "left", "right"] = ""
    if block.guard is not None:
        on_rows, on_columns = (any(depends(block.guard, item) for item in group) for group in (rows, columns))
        if on_rows and on_columns:
            return None
        guarded = "right" if on_columns else "left"
    return Product(block, left, right, batch, rows, columns, block.reduce, sign, block.guard, guarded)


def collapsed(found: Contraction) -> Contraction:
    """Return the contraction with neighbouring iterators merged where every access walks them as one."""
    from_block = collapse(found.block)
    if from_block is found.block:
        return found
    (item,) = from_block.accumulators
    update = item.update
    operands = update.args[1].args if isinstance(update, Apply) and isinstance(update.args[1], Apply) else None
    if operands is not None:
        return Contraction(from_block, operands[0], operands[1])
    left, right = getattr(update, "a", None), getattr(update, "b", None)
    return found if left is None or right is None else Contraction(from_block, left, right)


@dataclass(frozen=True)
class Multiplied:
    """The parts of a product: shared arrays, what a thread finds out once, the work of one tile, a few words."""

    arrays: tuple[Buffer, ...]
    here: tuple[Stmt, ...]
    tile: tuple[Stmt, ...]
    words: str


def nest_of(
    parts: Multiplied, given: Product, across: Tiles, thread: Symbol, threads: int
) -> tuple[tuple[Stmt, ...], str]:
    """Return the statements of a whole product, and a few words."""
    arrays: list[Stmt] = [Alloc(buffer) for buffer in parts.arrays]
    work, words = list(parts.tile), parts.words
    if given.note is not None:
        more, work = given.note.around(work, across.symbol, thread, threads)
        arrays += more
        words += f", part of {given.note.result} in the epilogue"
    return (*arrays, *parts.here, across.loop(work)), words


@dataclass(frozen=True)
class Tiles:
    """The loop over result tiles: ``row`` and ``column`` are the tile's first, ``lets`` define them and the batch."""

    symbol: Symbol
    count: int
    lets: tuple[Let, ...]
    row: Expr
    column: Expr
    batch: dict[Symbol, Expr]
    guard: Expr | None

    def loop(self, body: Sequence[Stmt]) -> For:
        """Return the loop, one tile per block of threads and step."""
        inner = tuple(body) if self.guard is None else (If(self.guard, tuple(body)),)
        return For(BlockIterator(self.symbol, as_index(self.count), self.count), (*self.lets, *inner), "grid")

    def launch(self, threads: int, thread: Symbol) -> Launch:
        """Return the launch of one block of ``threads`` threads per tile."""
        blocks = cooperative_blocks(self.count)
        return Launch(blocks, threads, {self.symbol: "blocks"}, cooperative=True, thread=thread, resident=1)


def tiles(given: Product, height: int, width: int) -> Tiles:
    """Cut the results into tiles of ``height`` rows and ``width`` columns, columns fastest."""
    rows, columns, _ = given.sizes
    down, across = -(-rows // height), -(-columns // width)
    count = points_of(given.batch) * down * across
    symbol = index_symbol("tile")
    row, column = index_symbol("first_row"), index_symbol("first_column")
    lets = [
        Let(row, multiply(modulo(floor_divide(Var(symbol), across), down), height)),
        Let(column, multiply(modulo(Var(symbol), across), width)),
    ]
    mapping: dict[Symbol, Expr] = {}
    guard: Expr | None = None
    if given.batch:
        place = index_symbol("batch")
        lets.append(Let(place, floor_divide(Var(symbol), down * across)))
        flat = flatten(given.batch, "batch", Var(place))
        lets += flat.lets
        mapping, guard = flat.mapping, flat.guard
    return Tiles(symbol, count, tuple(lets), Var(row), Var(column), mapping, guard)


@dataclass(frozen=True)
class Side:
    """One operand: its expression in the type it is staged in, and the iterators along and across."""

    operand: Expr
    along: tuple[BlockIterator, ...]
    depth: tuple[BlockIterator, ...]
    batch: dict[Symbol, Expr]
    guard: Expr | None = None

    def at(self, along: Expr, deep: Expr) -> tuple[tuple[Let, ...], Expr]:
        """Return the value at a place, 0 outside the operand, and the lets that it reads."""
        first, second = flatten(self.along, "along", along), flatten(self.depth, "deep", deep)
        mapping = {**self.batch, **first.mapping, **second.mapping}
        value = substitute(self.operand, mapping)
        tests = [_inside(first, along), _inside(second, deep), first.guard, second.guard]
        if self.guard is not None:
            tests.append(substitute(self.guard, mapping))
        test = conjunction(tests)
        assert test is not None
        return (*first.lets, *second.lets), Apply("where", (test, value, zero(value.type)), value.type)

    @property
    def deep_in_memory(self) -> bool:
        """Whether neighbouring cells follow the depth."""
        loads = loads_in(self.operand)
        return any(stride(load, self.depth[-1].symbol) == 1 for load in loads) if self.depth else False


def _inside(flat: Flat, place: Expr) -> Expr:
    return less(place, flat.bound)


def stage(
    side: Side,
    tile: Buffer,
    shape: tuple[int, int],
    first: Expr,
    deep: Expr,
    thread: Symbol,
    threads: int,
    mask: Buffer | None = None,
) -> Stmt:
    """Return the copy of ``shape`` = (along, depth) cells from (``first``, ``deep``) on into ``tile``, depth outermost.

    Neighbouring threads read neighbouring cells. ``mask`` gets 1 where a cell counts.
    """
    along, depth = shape
    step = index_symbol("step")
    cell = add(multiply(Var(step), threads), Var(thread))
    named, place, layer = index_symbol("cell"), index_symbol("place"), index_symbol("layer")
    if side.deep_in_memory:
        split = [Let(place, floor_divide(Var(named), depth)), Let(layer, modulo(Var(named), depth))]
    else:
        split = [Let(layer, floor_divide(Var(named), along)), Let(place, modulo(Var(named), along))]
    lets, value = side.at(add(first, Var(place)), add(deep, Var(layer)))
    indices = (Var(layer), Var(place))
    stored = [Store(tile, indices, value)]
    if mask is not None:
        assert isinstance(value, Apply)
        stored.append(Store(mask, indices, Cast(value.args[0], mask.type)))
    body: list[Stmt] = [Let(named, cell), *split, *lets, *stored]
    total = along * depth
    if total % threads:
        body = [Let(named, cell), If(less(Var(named), total), (*split, *lets, *stored))]
    return loop(step, -(-total // threads), body, "unroll")


def initial(given: Product, tile: Tiles, row: Expr, column: Expr) -> tuple[tuple[Let, ...], Expr]:
    """Return the state that the result at (``row``, ``column``) starts from, 0 outside the results, and its lets."""
    item = given.accumulator
    if isinstance(item.init, Const):
        return (), item.init
    down, across = flatten(given.rows, "row", row), flatten(given.columns, "column", column)
    value = substitute(item.init, {**tile.batch, **down.mapping, **across.mapping})
    rows, columns, _ = given.sizes
    test = conjunction([less(row, rows), less(column, columns), down.guard, across.guard])
    assert test is not None
    return (*down.lets, *across.lets), Apply("where", (test, value, zero(value.type)), value.type)


def result_stores(given: Product, tile: Tiles, row: Expr, column: Expr, state: Expr) -> list[Stmt]:
    """Return the stores of one result at (``row``, ``column``) whose accumulator is ``state``."""
    down, across = flatten(given.rows, "row", row), flatten(given.columns, "column", column)
    mapping = {**tile.batch, **down.mapping, **across.mapping, given.accumulator.symbol: state}
    rows, columns, _ = given.sizes
    test = conjunction([less(row, rows), less(column, columns), down.guard, across.guard])
    assert test is not None
    plain = [
        Store(item.buffer, tuple(substitute(part, mapping) for part in item.indices), substitute(item.value, mapping))
        for item in given.block.stores
    ]
    stores = tuple(plain) if given.note is None else tuple(stmt for item in plain for stmt in given.note.taken(item))
    return (
        [If(test, (*down.lets, *across.lets, *stores))]
        if not (down.guard or across.guard)
        else [*down.lets, *across.lets, If(test, stores)]
    )


__all__ = [
    "LEAST_SIDE",
    "Multiplied",
    "Product",
    "Side",
    "Tiles",
    "collapsed",
    "initial",
    "nest_of",
    "product",
    "result_stores",
    "stage",
    "tiles",
]
