"""The scales of an encoded block, computed side by side.

What the segments name one by one is one expression at successive bytes.

In: the lets of all segments of a block. Out: loops of lanes that fill a small buffer with the values of a row's blocks,
ahead of the sums (so that those read them from memory, where a load spreads a value over lanes at no cost)::

    step = d * (b[4] % 64); step_2 = d * (b[5] % 64); ...  ->  for block: for l in 0..3: steps[block, l] = d * (b[4 + l] % 64)

Same operations, same values. Knows no encoding.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from stagedtensor.codegen.affine import Affine, add, flat_index, multiply, to_expr
from stagedtensor.codegen.loop_ir import (
    Alloc,
    Apply,
    Buffer,
    Const,
    Expr,
    Let,
    Load,
    Stmt,
    Store,
    Symbol,
    Var,
    children,
    index,
    with_children,
)
from stagedtensor.codegen.rewrite import substitute, symbols_of
from stagedtensor.codegen.schedule.nest import index_symbol, loop
from stagedtensor.precision import f32, i64

_LEAST = 4
Places = tuple[int, ...]


@dataclass(frozen=True)
class SideBySide:
    """``filling`` computes the values of all blocks of a row ahead; ``values`` stand for the lets that they replace."""

    filling: tuple[Stmt, ...]
    values: dict[Symbol, Expr]


def side_by_side(lets: Sequence[Let], block: Symbol, blocks: int, *, join: bool = True) -> SideBySide:
    """Return the runs of four and more among ``lets`` as loops of lanes, for each of ``blocks`` values of ``block``.

    ``join`` makes one loop of runs that follow each other but for what no lane changes.
    """
    alike: dict[Hashable, list[tuple[Places, Let]]] = {}
    for let in lets:
        places: list[int] = []
        key = _shape(let.value, places)
        if let.symbol.type is f32 and places:
            alike.setdefault(key, []).append((tuple(places), let))
    runs = [run for group in alike.values() for run in _runs(sorted(group, key=lambda item: item[0]))]
    if not runs:
        return SideBySide((), {})
    buffer = Buffer("steps", f32, (blocks, sum(map(len, runs))), "local")
    number = index_symbol(block.hint)
    filling: list[Stmt] = []
    values: dict[Symbol, Expr] = {}
    start = 0
    shared: dict[Expr, Let] = {}
    for run, value, lane in _loops(runs, join):
        value = substitute(_lifted(value, lane, shared), {block: Var(number)})
        filling.append(loop(lane, len(run), (Store(buffer, (Var(number), add(start, Var(lane))), value),), "lane"))
        values.update({let.symbol: Load(buffer, (Var(block), index(start + at))) for at, let in enumerate(run)})
        start += len(run)
    lets = [replace(let, value=substitute(let.value, {block: Var(number)})) for let in shared.values()]
    return SideBySide((Alloc(buffer), loop(number, blocks, (*lets, *filling))), values)


def _loops(runs: Sequence[list[tuple[Places, Let]]], join: bool) -> list[tuple[list[Let], Expr, Symbol]]:
    """Lets, value and lane of each loop."""
    found: list[tuple[list[Let], Expr, Symbol]] = []
    for run in runs:
        lets = [let for _, let in run]
        moves = [second - first for first, second in zip(run[0][0], run[1][0], strict=True)]
        if found and join:
            before, value, lane = found[-1]
            late = _moving(lets[0].value, list(moves), lane, len(before))
            both = either(Apply("lt", (Var(lane), index(len(before))), i64), lane, value, late)
            if both is not None:
                found[-1] = ([*before, *lets], both, lane)
                continue
        lane = index_symbol("i_lane")
        found.append((lets, _moving(lets[0].value, moves, lane, 0), lane))
    return found


def _lifted(expr: Expr, lane: Symbol, shared: dict[Expr, Let]) -> Expr:
    """Name what no lane changes, once for all runs."""
    if isinstance(expr, Const | Var) or expr.type is i64:
        return expr
    if lane not in symbols_of(expr):
        hint = "step" if expr.type.is_float else "bits"
        return Var(shared.setdefault(expr, Let(Symbol(hint, expr.type), expr)).symbol)
    return (
        expr
        if isinstance(expr, Load)
        else with_children(expr, tuple(_lifted(part, lane, shared) for part in children(expr)))
    )


def either(early: Expr, lane: Symbol, first: Expr, second: Expr) -> Expr | None:
    """Return what is ``first`` where ``early`` holds, else ``second``; None where they differ in what a lane changes."""
    if first == second:
        return first
    if type(first) is not type(second) or first.type is not second.type:
        return None
    if first.type is not i64 and lane not in (*symbols_of(first), *symbols_of(second)):
        return Apply("where", (early, first, second), first.type)
    if isinstance(first, Load | Const | Var) or getattr(first, "op", "") != getattr(second, "op", ""):
        return None
    parts = [either(early, lane, a, b) for a, b in zip(children(first), children(second), strict=True)]
    known = tuple(part for part in parts if part is not None)
    return with_children(first, known) if len(known) == len(parts) else None


def _shape(expr: Expr, places: list[int]) -> Hashable:
    """The expression apart from the constant part of each load's place, which goes into ``places``."""
    if isinstance(expr, Load):
        flat = flat_index(expr.buffer, expr.indices)
        places.append(flat.constant)
        return expr.buffer, frozenset(flat.terms)
    if not children(expr):
        return expr
    return (
        type(expr).__name__,
        getattr(expr, "op", ""),
        expr.type,
        tuple(_shape(part, places) for part in children(expr)),
    )


def _runs(group: list[tuple[Places, Let]]) -> list[list[tuple[Places, Let]]]:
    """Successive members whose loads all move on by the same one cell or none."""
    found: list[list[tuple[Places, Let]]] = []
    run: list[tuple[Places, Let]] = []
    for item in group:
        if run and not _follows(run, item[0]):
            found.append(run)
            run = []
        run.append(item)
    found.append(run)
    return [run for run in found if len(run) >= _LEAST]


def _follows(run: list[tuple[Places, Let]], places: Places) -> bool:
    step = tuple(new - old for old, new in zip(run[-1][0], places, strict=True))
    if set(step) not in ({1}, {0, 1}):
        return False
    return len(run) < 2 or step == tuple(new - old for old, new in zip(run[-2][0], run[-1][0], strict=True))


def _moving(expr: Expr, moves: list[int], lane: Symbol, first: int) -> Expr:
    """The run's first value with each load moving by its step, from lane ``first`` on."""
    if isinstance(expr, Load):
        flat = flat_index(expr.buffer, expr.indices)
        step = moves.pop(0)
        start = to_expr(Affine(flat.terms, flat.constant - step * first))
        return replace(expr, indices=(add(start, multiply(Var(lane), step)) if step else start,))
    if not children(expr):
        return expr
    return with_children(expr, tuple(_moving(part, moves, lane, first) for part in children(expr)))
