"""The inner loops of a contraction as a call of one function: rows times columns into a tile of accumulators.

In: the accumulators of a register tile, the multiply-add of one of them, and the reduce iterators around it. Out: a
:class:`Tile` whose meaning are these loops, with the start and the steps of both operands as arguments; None where an
operand is anything but a load that every iterator moves by a fixed step. Every kernel with tiles of one size shares the
function, and what a kernel computes around its sums takes no registers from them. Where a guard cuts off both ends of a
loop, the function runs over what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from stagedtensor.codegen.affine import add, affine, constant, flat_index, maximum, minimum, multiply, subtract, to_expr
from stagedtensor.codegen.loop_ir import (
    Apply,
    BlockIterator,
    Buffer,
    Const,
    Expr,
    Fma,
    If,
    Let,
    Load,
    Stmt,
    Symbol,
    Tile,
    Var,
    index,
)
from stagedtensor.codegen.rewrite import symbols_of
from stagedtensor.codegen.schedule.analysis import points
from stagedtensor.codegen.schedule.guards import conjunction, conjuncts
from stagedtensor.codegen.schedule.nest import index_symbol, nest
from stagedtensor.precision import f32, f64, i64

MULTIPLY = "multiply"
"""Name of the tile whose accumulators start from 0."""
MULTIPLY_ADD = "multiply_add"
"""Name of the tile whose accumulators go on from what they are.

``arguments`` of both: accumulators, the first cell of the tile; row operand, its first cell, its step from row to row;
column operand, its first cell; then for each loop of terms, the outermost first: their number, and the steps of row and
column operand.
"""

_LOOPS = 3


@dataclass(frozen=True)
class Accumulation:
    """One step of a tile: ``states[*place, row, column] = update`` for all rows and columns, inside ``reduce``."""

    states: Buffer
    place: tuple[Expr, ...]
    update: Expr
    row: Symbol
    column: Symbol
    reduce: tuple[BlockIterator, ...]
    guard: Expr | None
    step: tuple[Stmt, ...]
    """The loops of one step over rows and columns, without the guard."""


MicroKernel: TypeAlias = Callable[
    [Accumulation, Mapping[Symbol, int], Sequence[Stmt], Expr | None], tuple[Stmt, ...] | None
]
"""A function like :func:`multiply_add`."""


@dataclass(frozen=True)
class _Operand:
    buffer: Buffer
    start: Expr
    row: int
    column: int
    terms: tuple[int, ...]


@dataclass
class _Range:
    """What a guard leaves of an iterator: from the greatest of ``low`` to the least of ``high``, which is not in it."""

    low: list[Expr] = field(default_factory=list)
    high: list[Expr] = field(default_factory=list)


def multiply_add(
    work: Accumulation, bounds: Mapping[Symbol, int], fill: Sequence[Stmt], init: Expr | None
) -> tuple[Stmt, ...] | None:
    """Return ``fill`` and the loops of ``work`` with a tile in place of the innermost ones.

    ``bounds`` are the limits of the index variables in scope, ``fill`` sets the accumulators to ``init``, if it is
    given.
    """
    prec = work.states.type
    if prec not in (f32, f64) or not isinstance(work.update, Fma) or not _is_state(work.update.c, work.states):
        return None
    inner = work.reduce[-_LOOPS:]
    outer = work.reduce[: len(work.reduce) - len(inner)]
    moving = tuple(item.symbol for item in inner)
    if any(symbol in symbols_of(item.extent) for item in inner for symbol in moving):
        return None
    pair = [_operand(part, work, moving, bounds) for part in (work.update.a, work.update.b)]
    if pair[0] is not None and pair[0].column == 0:
        pair.reverse()
    columns, rows = pair
    if rows is None or columns is None or (rows.column, columns.row, columns.column) != (0, 0, 1):
        return None
    outside = [part for part in conjuncts(work.guard) if not any(symbol in moving for symbol in symbols_of(part))]
    inside = [part for part in conjuncts(work.guard) if part not in outside]
    ranges = _ranges(inside, inner, bounds)
    if ranges is None:
        return None
    from_zero = not outer and not outside and isinstance(init, Const) and repr(float(init.value)) == "0.0"
    guard = conjunction(inside)
    step = work.step if guard is None else (If(guard, work.step),)
    lets: list[Let] = []
    row_start, column_start, terms = rows.start, columns.start, list[Expr]()
    for item, row, column in zip(inner, rows.terms, columns.terms, strict=True):
        first, count = _named(ranges[item.symbol], item, lets)
        row_start = add(row_start, multiply(first, row))
        column_start = add(column_start, multiply(first, column))
        terms += (count, index(row), index(column))
    acc_start = to_expr(flat_index(work.states, (*work.place, index(0), index(0)), bounds))
    loops = nest(inner, step, {})
    tile = Tile(
        MULTIPLY if from_zero else MULTIPLY_ADD,
        work.states.shape[-2],
        work.states.shape[-1],
        points(tuple(inner)),
        (*fill, *loops) if from_zero else loops,
        (work.states, acc_start, rows.buffer, row_start, index(rows.row), columns.buffer, column_start, *terms),
    )
    body: tuple[Stmt, ...] = (*lets, tile)
    condition = conjunction(outside)
    if condition is not None:
        body = (If(condition, body),)
    return (*lets, tile) if from_zero else (*fill, *nest(outer, body, {}))


def _is_state(expr: Expr, states: Buffer) -> bool:
    return isinstance(expr, Load) and expr.buffer is states


def _operand(
    expr: Expr, work: Accumulation, moving: tuple[Symbol, ...], bounds: Mapping[Symbol, int]
) -> _Operand | None:
    if not isinstance(expr, Load) or expr.buffer.space != "global" or expr.type is not work.states.type:
        return None
    flat = flat_index(expr.buffer, expr.indices, bounds)
    steps = [flat.coefficient(symbol) for symbol in (work.row, work.column, *moving)]
    known = [step for step in steps if step is not None]
    if len(known) < len(steps):
        return None
    for symbol in (work.row, work.column, *moving):
        flat = flat.without(symbol)
    return _Operand(expr.buffer, to_expr(flat), known[0], known[1], tuple(known[2:]))


def _ranges(
    guards: Sequence[Expr], inner: Sequence[BlockIterator], bounds: Mapping[Symbol, int]
) -> dict[Symbol, _Range] | None:
    """Return what comparisons leave of the iterators, None where one is no limit of a single iterator."""
    ranges = {item.symbol: _Range() for item in inner}
    for guard in guards:
        if not isinstance(guard, Apply) or guard.op not in ("lt", "le", "gt", "ge"):
            return None
        lhs, rhs = guard.args
        if lhs.type is not i64 or rhs.type is not i64:
            return None
        less, strict = guard.op in ("lt", "le"), guard.op in ("lt", "gt")
        # lesser + (1 if strict) <= greater, as rest + factor * symbol >= 0
        lesser, greater = (lhs, rhs) if less else (rhs, lhs)
        space = affine(subtract(subtract(greater, lesser), 1 if strict else 0), bounds)
        found = [symbol for symbol in ranges if space.depends_on(symbol)]
        if len(found) != 1 or space.coefficient(found[0]) not in (1, -1):
            return None
        (symbol,) = found
        rest = to_expr(space.without(symbol))
        if space.coefficient(symbol) == 1:
            ranges[symbol].low.append(to_expr(affine(subtract(0, rest))))
        else:
            ranges[symbol].high.append(to_expr(affine(add(rest, 1))))
    return ranges


def _named(limits: _Range, iterator: BlockIterator, lets: list[Let]) -> tuple[Expr, Expr]:
    """Return the first value and the number of values; lets name what is not constant."""
    first: Expr = index(0)
    for low in limits.low:
        first = maximum(first, low)
    end = iterator.extent
    for high in limits.high:
        end = minimum(end, high)
    hint = iterator.symbol.hint.removeprefix("i_")
    if constant(first) is None:
        symbol = index_symbol(f"first_{hint}")
        lets.append(Let(symbol, first))
        first = Var(symbol)
    count = subtract(end, first)
    if limits.low or limits.high:
        symbol = index_symbol(f"{hint}_count")
        lets.append(Let(symbol, count))
        count = Var(symbol)
    return first, count
