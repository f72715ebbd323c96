"""Copies of bf16 operands in the layouts that matrix tiles read: panels with pairs of terms, rows of terms.

In: an operand of a contraction, its iterators of terms and of columns or rows. Out: :class:`Copied`: the buffer, the
block that fills it, and its loops. A copy also applies what the operand's expression holds, such as the rounding of a
master weight. Where the operand lies across, squares of 16 x 16 pairs are turned in registers, as in
``schedule/transpose.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from stagedtensor.codegen.affine import add, as_index, flat_index, minimum, multiply, to_expr
from stagedtensor.codegen.loop_ir import (
    Alloc,
    Block,
    BlockIterator,
    Buffer,
    Expr,
    Layout,
    Load,
    LoopKind,
    Reorder,
    Split,
    Stmt,
    Store,
    Symbol,
    Tile,
    Var,
    index,
)
from stagedtensor.codegen.rewrite import substitute
from stagedtensor.codegen.schedule.analysis import depends, stride
from stagedtensor.codegen.schedule.elementwise import elementwise
from stagedtensor.codegen.schedule.nest import index_symbol, loads_in, loop, nest
from stagedtensor.precision import bf16

TERMS = 32
"""Terms of a block: one row of a matrix tile of bf16."""
SIDE = 16
"""Rows of a matrix tile, and columns of one of f32."""
COLUMNS = 2 * SIDE
"""Columns of a panel: two matrix tiles side by side."""
HALF = SIDE // 2
"""Columns of the narrowest panel for dots, which also take panels of ``SIDE``: half a vector."""


TRANSPOSE_PAIRS = "transpose_pairs"
"""Name of the tile: ``arguments`` are target, flat index of its first cell, its stride in pairs, and the square."""


@dataclass(frozen=True)
class _Squares:
    """Squares of pairs: line r of a square goes to places r of the target, 16 pairs a line, ``stride`` pairs from one
    to the next.

    ``fill`` are the stores of line r into the square, for the point ``(first, other)`` of the two tiled axes: the first
    cells of a strip of 16 along ``strips``, and of a block of 32 terms. ``cell`` is the target's cell there. A line has
    the terms of one column, or (``lines_of_terms`` not set) two terms of every row.
    """

    outer: tuple[BlockIterator, ...]
    strips: int
    terms: int
    fill: Callable[[Buffer, Expr, Expr], Stmt]
    cell: Callable[[Expr, Expr], tuple[Expr, ...]]
    stride: int
    lines_of_terms: bool


@dataclass(frozen=True)
class Copied:
    """An operand's copy: the buffer, the block that says what it holds, and the same in squares where it lies across."""

    buffer: Buffer
    block: Block
    squares: _Squares | None = None

    def filled(self, *, parallel: bool) -> tuple[tuple[Stmt, ...], str]:
        """Return the loops that fill the copy, and words on them for reports."""
        if self.squares is None:
            return elementwise(self.block, parallel=parallel, keep_nest=True)[0], ""
        return _turned(self.buffer, self.squares, parallel=parallel), f", turning squares of {SIDE} pairs"


def outer_axes(block: Block, operand: Expr, inner: Sequence[BlockIterator]) -> tuple[BlockIterator, ...]:
    """Return the iterators that ``operand`` depends on besides ``inner``."""
    return tuple(item for item in block.iterators if item not in inner and depends(operand, item))


def reading(block: Block, buffer: Buffer, operand: Expr, inner: tuple[BlockIterator, BlockIterator]) -> Load:
    """Return the load of a copy of ``operand`` whose last axes are ``inner``."""
    return Load(buffer, tuple(Var(item.symbol) for item in (*outer_axes(block, operand, inner), *inner)))


def panels_of_pairs(block: Block, operand: Expr, terms: BlockIterator, column: BlockIterator, width: int) -> Copied:
    """Return the column operand in panels of ``width`` columns, two terms of a column side by side::

        [outer axes..., column // width, term // 2, column % width, term % 2]

    Beyond the ends the last column and the last term stand again, which nobody uses.
    """
    outer = outer_axes(block, operand, (terms, column))
    rank = len(outer)
    # after the splits: term // 2, term % 2, column // width, column % width
    layout = Layout(
        (Split(rank + 1, width), Split(rank, 2), Reorder((*range(rank), rank + 2, rank, rank + 3, rank + 1)))
    )
    buffer = Buffer(
        _name(operand, "pairs"), bf16, (*(item.bound for item in outer), terms.bound, column.bound), layout=layout
    )
    axes, fresh = _fresh(outer)
    panel, half, within = (index_symbol(hint) for hint in ("i_panel", f"{terms.symbol.hint}_half", column.symbol.hint))

    def value(term: Expr, place: Expr) -> Expr:
        at = {terms.symbol: term, column.symbol: minimum(place, column.bound - 1) if column.bound % width else place}
        return substitute(operand, {**fresh, **at})

    def cell(term: Expr, place: Expr) -> tuple[Expr, ...]:
        return (*(fresh[item.symbol] for item in outer), term, place)

    place = add(multiply(Var(panel), width), Var(within))
    stores: list[Store] = []
    for at in range(2):
        term = add(multiply(Var(half), 2), at)
        there = minimum(term, terms.bound - 1) if at and terms.bound % 2 else term
        stores.append(Store(buffer, cell(term, place), value(there, place)))
    panels, halves = -(-column.bound // width), -(-terms.bound // 2)
    iterators = (*axes, _fixed(panel, panels), _fixed(half, halves), _fixed(within, width))
    filling = Block(buffer.name, iterators, tuple(stores), origins=block.origins, composite=block.composite)
    if not _lies_along(operand, terms, column) or terms.bound % 2 or terms.bound < TERMS or width < SIDE:
        return Copied(buffer, filling)

    def fill(square: Buffer, strip: Expr, first: Expr) -> Stmt:
        line, k = index_symbol("i_line"), index_symbol(terms.symbol.hint)
        one = Store(square, (Var(line), Var(k)), value(add(first, Var(k)), add(strip, Var(line))))
        return loop(line, SIDE, (loop(k, TERMS, (one,), "vector"),))

    turned = _Squares(
        axes, panels * width // SIDE, terms.bound, fill, lambda strip, first: cell(first, strip), width, True
    )
    return Copied(buffer, filling, turned)


def rows_of_terms(block: Block, operand: Expr, terms: BlockIterator, row: BlockIterator) -> Copied:
    """Return the row operand with its terms side by side: ``[outer axes..., row, term]``."""
    outer = outer_axes(block, operand, (row, terms))
    every, fresh = _fresh((*outer, row, terms))
    buffer = Buffer(_name(operand, "rows"), bf16, tuple(item.bound for item in every))
    here = tuple(Var(item.symbol) for item in every)
    filling = Block(
        buffer.name,
        every,
        (Store(buffer, here, substitute(operand, fresh)),),
        origins=block.origins,
        composite=block.composite,
    )
    if not _lies_along(operand, row, terms) or row.bound % SIDE or terms.bound % 2 or terms.bound < TERMS:
        return Copied(buffer, filling)

    def fill(square: Buffer, strip: Expr, first: Expr) -> Stmt:
        line, column = index_symbol("i_line"), index_symbol(row.symbol.hint)
        stores: list[Store] = []
        for at in range(2):
            term = add(first, add(multiply(Var(line), 2), at))
            value = substitute(operand, {**fresh, terms.symbol: term, row.symbol: add(strip, Var(column))})
            stores.append(Store(square, (Var(line), add(multiply(Var(column), 2), at)), value))
        return loop(line, SIDE, (loop(column, SIDE, stores, "vector"),))

    axes = every[: len(outer)]

    def cell(strip: Expr, first: Expr) -> tuple[Expr, ...]:
        return (*(Var(item.symbol) for item in axes), strip, first)

    return Copied(buffer, filling, _Squares(axes, row.bound // SIDE, terms.bound, fill, cell, terms.bound // 2, False))


def _lies_along(operand: Expr, near: BlockIterator, far: BlockIterator) -> bool:
    """Whether memory runs along ``near`` and not along ``far``."""
    loads = loads_in(operand)
    return all(stride(load, near.symbol) in (0, 1) for load in loads) and any(
        stride(load, far.symbol) not in (0, 1) for load in loads
    )


def _turned(target: Buffer, copy: _Squares, *, parallel: bool) -> tuple[Stmt, ...]:
    strip, step = index_symbol("i_strip"), index_symbol("i_step")
    first_strip, first_term = multiply(Var(strip), SIDE), multiply(Var(step), TERMS)
    if copy.terms % TERMS:
        first_term = minimum(first_term, copy.terms - TERMS)  # the last block starts early and writes some cells again
    square = Buffer("square", bf16, (SIDE, TERMS), "register")
    line, pair, which = index_symbol("i_line"), index_symbol("i_pair"), index_symbol("i_of_two")
    start = to_expr(flat_index(target, copy.cell(first_strip, first_term)))
    tile = Tile(
        TRANSPOSE_PAIRS,
        SIDE,
        SIDE,
        1,
        _moved(target, copy, square, first_strip, first_term, (line, pair, which)),
        (target, start, index(copy.stride), square),
    )
    inner = (Alloc(square), copy.fill(square, first_strip, first_term), tile)
    order = [*copy.outer, _fixed(strip, copy.strips)]
    kinds: dict[Symbol, LoopKind] = {item.symbol: "serial" for item in order}
    if parallel:
        outermost = next((item for item in order if item.bound >= 4), max(order, key=lambda item: item.bound))
        order.remove(outermost)
        order.insert(0, outermost)
        kinds[outermost.symbol] = "parallel"
    return nest(order, (loop(step, -(-copy.terms // TERMS), inner),), kinds)


def _moved(
    target: Buffer, copy: _Squares, square: Buffer, strip: Expr, first: Expr, symbols: tuple[Symbol, Symbol, Symbol]
) -> tuple[Stmt, ...]:
    """What a turned square means: pair p of line r to the target, as copies of cells."""
    line, pair, which = symbols
    if copy.lines_of_terms:
        cell = copy.cell(add(strip, Var(line)), add(first, add(multiply(Var(pair), 2), Var(which))))
    else:
        cell = copy.cell(add(strip, Var(pair)), add(first, add(multiply(Var(line), 2), Var(which))))
    moved = Store(target, cell, Load(square, (Var(line), add(multiply(Var(pair), 2), Var(which)))))
    return (loop(line, SIDE, (loop(pair, SIDE, (loop(which, 2, (moved,)),)),)),)


def _name(operand: Expr, ending: str) -> str:
    return f"{loads_in(operand)[0].buffer.name.replace('.', '_')}_{ending}"


def _fresh(iterators: Sequence[BlockIterator]) -> tuple[tuple[BlockIterator, ...], dict[Symbol, Expr]]:
    """Return data iterators of their own for a copy, and what stands for the old ones."""
    symbols = [index_symbol(item.symbol.hint) for item in iterators]
    axes = tuple(replace(item, symbol=symbol, kind="data") for item, symbol in zip(iterators, symbols, strict=True))
    return axes, {item.symbol: Var(symbol) for item, symbol in zip(iterators, symbols, strict=True)}


def _fixed(symbol: Symbol, extent: int) -> BlockIterator:
    return BlockIterator(symbol, as_index(extent), extent)
