"""CUDA template for contractions in f32, f64 and integers: tiles of both operands in shared memory, results in
registers.

In: a :class:`Product`. Out: its loops. A block of 256 threads computes a tile of results, each thread a small square of
them; depth is walked in order, one multiply-add per step, so a result does not depend on the tile's size. Edges are
guarded: cells outside an operand are staged as 0, results outside are not stored.
"""

from __future__ import annotations

from dataclasses import dataclass

from stagedtensor.codegen.affine import add, floor_divide, modulo, multiply
from stagedtensor.codegen.loop_ir import (
    Alloc,
    Apply,
    Barrier,
    Buffer,
    Const,
    Expr,
    Fma,
    If,
    Let,
    Load,
    Stmt,
    Store,
    Symbol,
    Var,
)
from stagedtensor.codegen.schedule.cuda.launch import THREADS, Launch
from stagedtensor.codegen.schedule.cuda.operands import (
    Multiplied,
    Product,
    Side,
    Tiles,
    initial,
    nest_of,
    result_stores,
    stage,
    tiles,
)
from stagedtensor.codegen.schedule.nest import index_symbol, loop
from stagedtensor.precision import i64, u8

_SIDE = 16
"""Threads along each side of a tile."""


@dataclass(frozen=True)
class TileShape:
    """Rows, columns and depth of one tile."""

    rows: int
    columns: int
    depth: int

    @property
    def per_thread(self) -> tuple[int, int]:
        """Rows and columns of one thread."""
        return self.rows // _SIDE, self.columns // _SIDE


def tile_shape(given: Product) -> TileShape:
    """Larger tiles read each operand fewer times; smaller ones leave more blocks to run side by side."""
    rows, columns, _ = given.sizes
    rows_each = 64 if rows > 32 else 32 if rows > 16 else 16
    columns_each = 64 if columns > 32 else 32 if columns > 16 else 16
    if rows >= 1024 and columns >= 1024 and given.accumulator.symbol.type.bytes <= 4:
        rows_each = columns_each = 128
    return TileShape(rows_each, columns_each, 16)


def tile(given: Product, reason: str) -> tuple[tuple[Stmt, ...], Launch, str]:
    """Return the statements of a product, their launch and a few words; ``reason`` says why not another template."""
    shape = tile_shape(given)
    thread = Symbol("thread", i64)
    across = tiles(given, shape.rows, shape.columns)
    parts = tiled(given, shape, across, thread)
    nest, words = nest_of(parts, given, across, thread, THREADS)
    return nest, across.launch(THREADS, thread), f"{words}; {reason}"


def tiled(given: Product, shape: TileShape, across: Tiles, thread: Symbol) -> Multiplied:
    """Return the work of one tile of ``shape`` at ``across``."""
    prec = given.accumulator.symbol.type
    # One cell of padding: threads that store down a column then meet different banks.
    left_tile = Buffer("left_tile", given.left.type, (shape.depth, shape.rows + 1), "shared")
    right_tile = Buffer("right_tile", given.right.type, (shape.depth, shape.columns + 1), "shared")
    down_each, across_each = shape.per_thread
    states = Buffer(given.accumulator.symbol.hint, prec, (down_each, across_each), "register")
    down, right = index_symbol("thread_row"), index_symbol("thread_column")
    here: list[Stmt] = [
        Let(down, floor_divide(Var(thread), _SIDE)),
        Let(right, modulo(Var(thread), _SIDE)),
    ]
    layer = index_symbol("i_depth")
    start = multiply(Var(layer), shape.depth)
    masks = {
        "left": Buffer("left_counts", u8, (shape.depth, shape.rows), "shared"),
        "right": Buffer("right_counts", u8, (shape.depth, shape.columns), "shared"),
    }
    mask = masks.get(given.guarded)
    guards = {side: given.guard if side == given.guarded else None for side in masks}
    left = Side(given.left, given.rows, given.depth, across.batch, guards["left"])
    other = Side(given.right, given.columns, given.depth, across.batch, guards["right"])
    depth = given.sizes[2]
    steps: list[Stmt] = [
        stage(
            *(left, left_tile, (shape.rows, shape.depth), across.row, start, thread, THREADS),
            mask if given.guarded == "left" else None,
        ),
        stage(
            *(other, right_tile, (shape.columns, shape.depth), across.column, start, thread, THREADS),
            mask if given.guarded == "right" else None,
        ),
        Barrier(),
        _multiply(given, shape, states, left_tile, right_tile, mask, Var(down), Var(right)),
        Barrier(),
    ]
    body: list[Stmt] = [
        Alloc(states),
        _fill(given, across, states, Var(down), Var(right)),
        loop(layer, -(-depth // shape.depth), steps),
        _stores(given, across, states, Var(down), Var(right)),
    ]
    arrays = [left_tile, right_tile, *([] if mask is None else [mask])]
    words = (
        f"contraction, tiles of {shape.rows} x {shape.columns} x {shape.depth} in shared memory, {prec} multiply-add"
    )
    if mask is not None:
        words += ", points outside an operand skipped"
    return Multiplied(tuple(arrays), tuple(here), tuple(body), words)


def _fill(given: Product, across: Tiles, states: Buffer, thread_row: Expr, thread_column: Expr) -> Stmt:
    down, right = index_symbol("i_down"), index_symbol("i_right")
    row, column = index_symbol("row"), index_symbol("column")
    lets, value = initial(given, across, Var(row), Var(column))
    place: list[Stmt] = []
    if lets or not isinstance(value, Const):
        place = [
            Let(row, add(across.row, add(multiply(thread_row, states.shape[0]), Var(down)))),
            Let(column, add(across.column, add(thread_column, multiply(Var(right), _SIDE)))),
        ]
    store = Store(states, (Var(down), Var(right)), value)
    inner = loop(right, states.shape[1], [*place, *lets, store], "unroll")
    return loop(down, states.shape[0], [inner], "unroll")


def _multiply(
    given: Product,
    shape: TileShape,
    states: Buffer,
    left: Buffer,
    right: Buffer,
    mask: Buffer | None,
    thread_row: Expr,
    thread_column: Expr,
) -> Stmt:
    layer, down, across = index_symbol("i_layer"), index_symbol("i_down"), index_symbol("i_right")
    down_each, across_each = shape.per_thread
    row = add(multiply(thread_row, down_each), Var(down))
    column = add(thread_column, multiply(Var(across), _SIDE))
    a, b = Load(left, (Var(layer), row)), Load(right, (Var(layer), column))
    cell = (Var(down), Var(across))
    state = Load(states, cell)
    prec = states.type
    summed = Apply(given.sign, (state, Apply("mul", (a, b), prec)), prec)
    value: Expr = Fma(a, b, state) if given.sign == "fma" else summed
    step: Stmt = Store(states, cell, value)
    if mask is not None and given.guarded == "right":
        step = If(Load(mask, (Var(layer), column)), (step,))
    inner: Stmt = loop(across, across_each, [step], "unroll")
    if mask is not None and given.guarded == "left":
        inner = If(Load(mask, (Var(layer), row)), (inner,))
    return loop(layer, shape.depth, [loop(down, down_each, [inner], "unroll")], "unroll")


def _stores(given: Product, across: Tiles, states: Buffer, thread_row: Expr, thread_column: Expr) -> Stmt:
    down, right = index_symbol("i_down"), index_symbol("i_right")
    row, column = index_symbol("row"), index_symbol("column")
    place = add(across.row, add(multiply(thread_row, states.shape[0]), Var(down)))
    beside = add(across.column, add(thread_column, multiply(Var(right), _SIDE)))
    stores = result_stores(given, across, Var(row), Var(column), Load(states, (Var(down), Var(right))))
    inner = loop(right, states.shape[1], [Let(row, place), Let(column, beside), *stores], "unroll")
    return loop(down, states.shape[0], [inner], "unroll")
