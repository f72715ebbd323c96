"""Exponentials that several loops over one row compute, kept in a buffer of that row from the first loop on.

In: scheduled kernels. Out: the same values, each costly one computed once::

    for j: sum += exp(x[i, j] - m)            ->    for j: kept[j] = exp(x[i, j] - m); sum += kept[j]
    for j: y[i, j] = exp(x[i, j] - m) * r           for j: y[i, j] = kept[j] * r

The loops are neighbours inside one iteration of an outer loop, the value is the same function of the position, and
nothing that it reads is written from the first loop to the last. Rows of up to 32 KiB, which stay in the nearest cache.
Moves no store and changes no operation.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from stagedtensor.codegen.affine import Affine, constant, flat_index, to_expr
from stagedtensor.codegen.loop_ir import (
    Alloc,
    Apply,
    Buffer,
    Const,
    Expr,
    For,
    Let,
    Load,
    Module,
    Stmt,
    Store,
    Symbol,
    Var,
    children,
    walk,
    with_children,
)
from stagedtensor.codegen.rewrite import buffers_written, map_stmts, substitute
from stagedtensor.codegen.schedule.analysis import prune

_COSTLY = frozenset({"exp", "exp2", "log", "log2", "tanh", "sigmoid", "erf", "erfc", "sin", "cos", "pow"})
_MOST_BYTES = 1 << 15
_LEAST_CELLS = 16

Lets: TypeAlias = Mapping[Symbol, Expr]
Interval: TypeAlias = tuple[int, int]


def keep_rows(module: Module) -> Module:
    """Return ``module`` with the costly values that loops over one row share computed by the first of them."""
    return replace(
        module,
        kernels=tuple(
            replace(kernel, body=prune(body)) if (body := map_stmts(kernel.body, _kept)) is not kernel.body else kernel
            for kernel in module.kernels
        ),
    )


@dataclass(frozen=True)
class _Value:
    """A costly value in the ``child``-th statement of a row: what it is, its position in the row and where that runs."""

    key: Hashable
    expr: Expr
    child: int
    position: Affine
    cells: Interval
    sure: bool
    reads: frozenset[Buffer]


def _kept(stmt: Stmt) -> Stmt:
    if not isinstance(stmt, For) or sum(isinstance(inner, For) for inner in stmt.body) < 2:
        return stmt
    found: dict[Hashable, list[_Value]] = {}
    lets: dict[Symbol, Expr] = {}
    for place, child in enumerate(stmt.body):
        if isinstance(child, Let):
            lets[child.symbol] = substitute(child.value, lets)
        elif isinstance(child, For):
            for value in _values(child, place, lets, ()):
                found.setdefault(value.key, []).append(value)
    body = list(stmt.body)
    buffers: list[Buffer] = []
    for values in found.values():
        buffer = _keep(body, values)
        if buffer is not None:
            buffers.append(buffer)
    return replace(stmt, body=(*(Alloc(buffer) for buffer in buffers), *body)) if buffers else stmt


# -- finding ------------------------------------------------------------------------------------------------------


def _values(loop: For, place: int, lets: Lets, outer: tuple[For, ...]) -> Iterator[_Value]:
    loops = (*outer, loop)
    known = dict(lets)
    for stmt in loop.body:
        match stmt:
            case For():
                yield from _values(stmt, place, known, loops)
            case Let(symbol, value):
                yield from _in(value, place, known, loops, sure=True)
                known[symbol] = substitute(value, known)
            case Store(_, _, value):
                yield from _in(value, place, known, loops, sure=True)
            case _:
                return  # what stands under a condition, or what this pass does not know


def _in(expr: Expr, place: int, lets: Lets, loops: tuple[For, ...], *, sure: bool) -> Iterator[_Value]:
    if isinstance(expr, Load):
        return
    if isinstance(expr, Apply) and expr.op in _COSTLY:
        value = _value(expr, place, lets, loops, sure)
        if value is not None:
            yield value
            return
    for number, part in enumerate(children(expr)):
        branch = isinstance(expr, Apply) and expr.op == "where" and number > 0
        yield from _in(part, place, lets, loops, sure=sure and not branch)


def _value(expr: Expr, place: int, lets: Lets, loops: tuple[For, ...], sure: bool) -> _Value | None:
    whole = substitute(expr, lets)
    inner = {loop.iterator.symbol: constant(loop.iterator.extent) for loop in loops}
    positions: list[Affine] = []
    key = _key(whole, inner, positions)
    if key is None or not positions or any(not other.same_as(positions[0]) for other in positions):
        return None
    steps = sorted(positions[0].terms, key=lambda term: term[1])
    length = 1
    for atom, factor in steps:
        extent = inner[atom.symbol] if isinstance(atom, Var) else None
        if extent is None or factor != length:
            return None
        length *= extent
    if len(steps) != len(inner):
        return None
    start = positions[0].constant
    reads = frozenset(part.buffer for part in walk(whole) if isinstance(part, Load))
    return _Value(key, expr, place, positions[0], (start, start + length), sure, reads)


def _key(expr: Expr, inner: Mapping[Symbol, int | None], positions: list[Affine]) -> Hashable | None:
    """What ``expr`` is apart from the position in the row, which goes into ``positions``; None where it is nothing such."""
    if isinstance(expr, Const):
        return expr
    if isinstance(expr, Var):
        return None if expr.symbol in inner else expr
    if isinstance(expr, Load):
        flat = flat_index(expr.buffer, expr.indices)
        moving = tuple(term for term in flat.terms if isinstance(term[0], Var) and term[0].symbol in inner)
        still = tuple(term for term in flat.terms if term not in moving)
        if any(Affine((term,)).depends_on(symbol) for term in still for symbol in inner):
            return None
        if not moving:
            return expr.buffer, frozenset(still), flat.constant
        positions.append(Affine(moving, flat.constant))
        return expr.buffer, frozenset(still)
    parts = tuple(_key(part, inner, positions) for part in children(expr))
    if any(part is None for part in parts):
        return None
    settings = (getattr(expr, "op", ""), expr.type, getattr(expr, "saturate", False), getattr(expr, "flush", False))
    return type(expr).__name__, settings, parts


# -- keeping ------------------------------------------------------------------------------------------------------


def _keep(body: list[Stmt], values: list[_Value]) -> Buffer | None:
    """Exchange the values in ``body`` where the first loops over the row cover what later ones want."""
    makers: list[_Value] = []
    readers: list[_Value] = []
    for value in values:
        covered = [maker.cells for maker in makers]
        if _covers(covered, value.cells):
            readers.append(value)
        elif value.sure and not any(_overlap(cells, value.cells) for cells in covered) and not readers:
            makers.append(value)
        else:
            return None
    if not readers or any(reader.child == maker.child for reader in readers for maker in makers):
        return None
    first, last = makers[0].child, readers[-1].child
    written = {buffer for stmt in body[first : last + 1] for buffer in buffers_written(stmt)}
    low, high = min(maker.cells[0] for maker in makers), max(maker.cells[1] for maker in makers)
    prec = makers[0].expr.type
    if written & values[0].reads or (high - low) * prec.bytes > _MOST_BYTES or high - low < _LEAST_CELLS:
        return None
    kept = Buffer("kept", prec, (high - low,), "local")
    for value in values:
        cell = (to_expr(Affine(value.position.terms, value.position.constant - low)),)
        loop = body[value.child]
        assert isinstance(loop, For)
        maker = value in makers
        body[value.child] = replace(loop, body=_exchanged(loop.body, value.expr, kept, cell, maker=maker))
    return kept


def _covers(parts: list[Interval], wanted: Interval) -> bool:
    at = wanted[0]
    for start, stop in sorted(parts):
        if start <= at < stop:
            at = stop
    return at >= wanted[1]


def _overlap(one: Interval, other: Interval) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _exchanged(
    body: tuple[Stmt, ...], old: Expr, kept: Buffer, cell: tuple[Expr, ...], *, maker: bool
) -> tuple[Stmt, ...]:
    done: list[Stmt] = []
    new: Expr = Load(kept, cell)
    named = False
    for stmt in body:
        if isinstance(stmt, For):
            done.append(replace(stmt, body=_exchanged(stmt.body, old, kept, cell, maker=maker)))
            continue
        assert isinstance(stmt, Let | Store)
        if maker and not named and any(part == old for part in walk(stmt.value)):
            name = Symbol("value", old.type)
            done += [Let(name, old), Store(kept, cell, Var(name))]
            new, named = Var(name), True
        done.append(replace(stmt, value=_replaced(stmt.value, old, new)))
    return tuple(done)


def _replaced(expr: Expr, old: Expr, new: Expr) -> Expr:
    if expr == old:
        return new
    if isinstance(expr, Load) or not children(expr):
        return expr
    return with_children(expr, tuple(_replaced(part, old, new) for part in children(expr)))
