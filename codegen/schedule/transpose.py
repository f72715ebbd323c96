"""A transposing copy, a square block at a time: lines of the source are read whole and turned in registers.

In: the block of a pack whose operand steps through memory along its last reduce axis, while panels want the tiled axis
adjacent. Out: its loops::

    for strip of the tiled axis: for step of the reduce axis:
        square[r][c] = operand(strip + r, step + c)      rows of the source, converted where they are narrow
        transpose: panels(step + c, strip + r) = square[r][c]
    what is left of the reduce axis, value by value

The square is as wide as a vector. Copies only; decides nothing about layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stagedtensor.codegen.affine import add, as_index, flat_index, multiply, to_expr
from stagedtensor.codegen.layout import Split
from stagedtensor.codegen.loop_ir import (
    Alloc,
    BlockIterator,
    Buffer,
    Expr,
    Load,
    LoopKind,
    Stmt,
    Store,
    Tile,
    Var,
    index,
)
from stagedtensor.codegen.schedule.nest import index_symbol, loop, nest
from stagedtensor.precision import f32

TRANSPOSE = "transpose"
"""Name of the tile: ``arguments`` are the target, its first cell's flat index, its stride along c, and the square."""


@dataclass(frozen=True)
class Transposing:
    """The copy ``target[cell(c, r)] = value(c, r)``: ``c`` runs along the source's memory, ``r`` along the target's.

    ``outer`` are iterators around both. ``rows`` counts r, whole squares of them; ``columns`` counts c.
    """

    target: Buffer
    outer: tuple[BlockIterator, ...]
    rows: int
    columns: int
    cell: Callable[[Expr, Expr], tuple[Expr, ...]]
    value: Callable[[Expr, Expr], Expr]


def fits(target: Buffer, rows: int, columns: int, lanes: int) -> bool:
    """Tell whether squares of ``lanes`` can carry the copy: whole ones, none of which reaches into the next panel."""
    panels = [step.factor for step in target.layout.steps if isinstance(step, Split)]
    whole = all(size % lanes == 0 for size in (rows, *panels))
    return target.type is f32 and lanes in (4, 8, 16) and whole and columns >= lanes


def transposing(copy: Transposing, lanes: int, *, parallel: bool) -> tuple[Stmt, ...]:
    """Return the loops of ``copy``."""
    strip, step = index_symbol("i_strip"), index_symbol("i_step")
    first_row, first_column = multiply(Var(strip), lanes), multiply(Var(step), lanes)
    steps = copy.columns // lanes
    body: list[Stmt] = []
    if steps:
        body.append(loop(step, steps, _square(copy, lanes, first_row, first_column)))
    if copy.columns % lanes:
        body.append(_rest(copy, lanes, first_row, steps * lanes))
    strips = BlockIterator(strip, as_index(copy.rows // lanes), copy.rows // lanes)
    order = [*copy.outer, strips]
    kinds: dict[object, LoopKind] = {}
    if parallel:
        outermost = next((item for item in order if item.bound >= 4), max(order, key=lambda item: item.bound))
        order.remove(outermost)
        order.insert(0, outermost)
        kinds[outermost.symbol] = "parallel"
    return nest(order, body, {item.symbol: kinds.get(item.symbol, "serial") for item in order})


def _square(copy: Transposing, lanes: int, first_row: Expr, first_column: Expr) -> Sequence[Stmt]:
    square = Buffer("square", f32, (lanes, lanes), "local")
    r, c = index_symbol("i_row"), index_symbol("i_column")
    fill = Store(square, (Var(r), Var(c)), copy.value(add(first_column, Var(c)), add(first_row, Var(r))))
    low, high = index_symbol("i_column"), index_symbol("i_row")
    turned = Store(
        copy.target,
        copy.cell(add(first_column, Var(low)), add(first_row, Var(high))),
        Load(square, (Var(high), Var(low))),
    )
    start = flat_index(copy.target, copy.cell(first_column, first_row))
    stride = flat_index(copy.target, copy.cell(Var(low), index(0))).coefficient(low)
    assert stride is not None
    tile = Tile(
        TRANSPOSE,
        lanes,
        lanes,
        1,
        (loop(low, lanes, (loop(high, lanes, (turned,), "vector"),)),),
        (copy.target, to_expr(start), index(stride), square),
    )
    return (Alloc(square), loop(r, lanes, (loop(c, lanes, (fill,), "vector"),)), tile)


def _rest(copy: Transposing, lanes: int, first_row: Expr, start: int) -> Stmt:
    r, c = index_symbol("i_row"), index_symbol("i_column")
    column, row = add(Var(c), start), add(first_row, Var(r))
    one = Store(copy.target, copy.cell(column, row), copy.value(column, row))
    return loop(c, copy.columns - start, (loop(r, lanes, (one,), "vector"),))
