"""Bounds of integer expressions: interval analysis over iterators, with what guards say.

In: an i64 expression, the ranges of its symbols, and facts about whole expressions. Out: an :class:`Interval`. It knows
no relations between symbols, so it proves membership, and (where ``exact``) that both ends are reached.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeAlias

from stagedtensor.codegen.loop_ir import Apply, Cast, Const, Expr, Load, Symbol, Var
from stagedtensor.codegen.pieces import piece
from stagedtensor.codegen.rewrite import symbols_of
from stagedtensor.precision import Prec

Number: TypeAlias = int | float
"""An integer, or an infinity where nothing is known on that side."""


@piece(frozen=True)
class Interval:
    """Integers from ``low`` to ``high``, both included; ``exact`` if both ends are known to occur. Empty if low > high."""

    low: Number = -math.inf
    high: Number = math.inf
    exact: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether no value can occur: the code is never reached."""
        return self.low > self.high

    def within(self, low: Number, high: Number) -> bool:
        """Whether every value lies in ``low .. high``."""
        return self.is_empty or (self.low >= low and self.high <= high)

    def meet(self, other: Interval) -> Interval:
        """Return what both allow; exact where one of them settles it."""
        if other.low <= self.low and other.high >= self.high:
            return self
        return Interval(max(self.low, other.low), min(self.high, other.high))


UNKNOWN = Interval()
Ranges: TypeAlias = Mapping[Symbol, Interval]
Facts: TypeAlias = Mapping[Expr, Interval]


def interval(expr: Expr, ranges: Ranges, facts: Facts | None = None) -> Interval:
    """Return bounds on the value of an integer expression; symbols without a range are unknown."""
    found = _structural(expr, ranges, facts or {})
    if facts:
        fact = facts.get(expr)
        if fact is not None:
            return found.meet(fact)
    return found


def _structural(expr: Expr, ranges: Ranges, facts: Facts) -> Interval:
    match expr:
        case Const():
            return Interval(int(expr.value), int(expr.value), exact=True) if math.isfinite(expr.value) else UNKNOWN
        case Var():
            return ranges.get(expr.symbol, UNKNOWN)
        case Cast():
            kept = _of_type(expr.type)
            if expr.arg.type.is_float:
                return kept
            inner = interval(expr.arg, ranges, facts)
            return inner if inner.within(kept.low, kept.high) else kept
        case Load():
            return _of_type(expr.type)
        case Apply():
            parts = [interval(part, ranges, facts) for part in expr.args]
            if any(part.is_empty for part in parts):
                return Interval(1, 0)
            result = _apply(expr.op, parts)
            shared = len(expr.args) > 1 and _share_symbols(expr.args)
            return Interval(result.low, result.high, result.exact and not shared)
        case _:
            return UNKNOWN


def _of_type(type_: Prec) -> Interval:
    return UNKNOWN if type_.is_float else Interval(type_.min_finite, type_.max_finite)


def _share_symbols(args: tuple[Expr, ...]) -> bool:
    """Whether two arguments read one symbol: their ends need not occur together then."""
    seen: set[Symbol] = set()
    for arg in args:
        symbols = set(symbols_of(arg))
        if symbols & seen:
            return True
        seen |= symbols
    return False


def _apply(op: str, parts: list[Interval]) -> Interval:
    if op in ("lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not"):
        return Interval(0, 1)
    if op == "identity":
        return parts[0]
    if op == "neg":
        return Interval(-parts[0].high, -parts[0].low, parts[0].exact)
    if len(parts) != 2:
        return UNKNOWN if op != "where" else _hull(parts[1], parts[2])
    a, b = parts
    exact = a.exact and b.exact
    match op:
        case "add":
            return Interval(a.low + b.low, a.high + b.high, exact)
        case "sub":
            return Interval(a.low - b.high, a.high - b.low, exact)
        case "mul":
            ends = [_times(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
            return Interval(min(ends), max(ends), exact)
        case "maximum":
            return Interval(max(a.low, b.low), max(a.high, b.high), exact)
        case "minimum":
            return Interval(min(a.low, b.low), min(a.high, b.high), exact)
        case "floordiv" if b.low == b.high and b.low > 0:
            return Interval(_quotient(a.low, b.low), _quotient(a.high, b.low), a.exact)
        case "mod" if b.low == b.high and b.low > 0:
            same_turn = _quotient(a.low, b.low) == _quotient(a.high, b.low)
            if same_turn and math.isfinite(a.low) and math.isfinite(a.high):
                return Interval(a.low % b.low, a.high % b.low, a.exact)
            return Interval(0, b.low - 1)
        case _:
            return UNKNOWN


def _hull(a: Interval, b: Interval) -> Interval:
    return Interval(min(a.low, b.low), max(a.high, b.high))


def _times(x: Number, y: Number) -> Number:
    return 0 if x == 0 or y == 0 else x * y  # zero times infinity: the infinity only stands for "large"


def _quotient(x: Number, divisor: Number) -> Number:
    return x // divisor if math.isfinite(x) else x


def facts_of(condition: Expr) -> dict[Expr, Interval]:
    """Return what holds where ``condition`` is not zero: bounds on the expressions it compares with literals."""
    if not isinstance(condition, Apply):
        return {}
    if condition.op == "and":
        return merge_facts(facts_of(condition.args[0]), facts_of(condition.args[1]))
    if condition.op not in _MIRRORED:
        return {}
    left, right = condition.args
    op = condition.op
    if isinstance(left, Const):
        left, right, op = right, left, _MIRRORED[op]
    if not isinstance(right, Const) or right.type.is_float or isinstance(left, Const):
        return {}
    value = int(right.value)
    match op:
        case "lt":
            bound = Interval(high=value - 1)
        case "le":
            bound = Interval(high=value)
        case "gt":
            bound = Interval(low=value + 1)
        case "ge":
            bound = Interval(low=value)
        case _:
            bound = Interval(value, value)
    return {left: bound}


_MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq"}


def merge_facts(first: Facts, second: Facts) -> dict[Expr, Interval]:
    """Return the facts of both, met where they speak of one expression."""
    merged = dict(first)
    for expr, fact in second.items():
        merged[expr] = merged[expr].meet(fact) if expr in merged else fact
    return merged
