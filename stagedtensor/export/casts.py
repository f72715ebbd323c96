"""Conversions between formats in StableHLO, and casts of numbers.

In: values, or expressions of the loop IR, and a format. Out: values of that format by the rules of this package, where
StableHLO's own convert says nothing: integers from floats out of range, saturation.
"""

from __future__ import annotations

import numpy as np

from stagedtensor.codegen import loop_ir as ir
from stagedtensor.conversion import convert
from stagedtensor.precision import Prec, bool_, f32

from .values import Lines, Value


def converted(lines: Lines, x: Value, prec: Prec, where: str, *, saturate: bool = False) -> Value:
    """Convert; ``where`` is the location of the converts, ``saturate`` clamps finite numbers to a float format."""
    if x.prec is prec:
        return x
    if prec is bool_:
        return lines.compare("NE", x, lines.number(0.0 if x.prec.is_float else 0, x.prec, x.dims))
    if x.prec.is_float and not prec.is_float:
        return _to_integer(lines, x, prec, where)
    if saturate and prec.is_float:
        limit = float(prec.max_finite)
        low, high = lines.number(-limit, x.prec, x.dims), lines.number(limit, x.prec, x.dims)
        clamped = lines.binary("maximum", lines.binary("minimum", x, high), low)
        infinite = lines.compare("EQ", lines.unary("abs", x), lines.number(float("inf"), x.prec, x.dims))
        x = lines.select(infinite, x, clamped)
    return lines.convert(x, prec, where)


def _to_integer(lines: Lines, x: Value, prec: Prec, where: str) -> Value:
    """Truncate; NaN gives 0, what is out of range the nearest end."""
    if x.prec.bits < 32:
        x = lines.convert(x, f32, where)
    low, high = float(prec.min_finite), float(prec.max_finite)
    cut = lines.select(lines.compare("EQ", x, x), x, lines.number(0.0, x.prec, x.dims))
    above = lines.compare("GE", cut, lines.number(high, x.prec, x.dims))
    below = lines.compare("LE", cut, lines.number(low, x.prec, x.dims))
    zero = lines.number(0.0, x.prec, x.dims)
    inside = lines.select(above, zero, lines.select(below, zero, cut))
    whole = lines.convert(inside, prec, where)
    top, bottom = lines.number(int(prec.max_finite), prec, x.dims), lines.number(int(prec.min_finite), prec, x.dims)
    return lines.select(above, top, lines.select(below, bottom, whole))


def number_of(expr: ir.Expr) -> float | int | None:
    """Return the number that casts of a number give, None for other expressions."""
    if isinstance(expr, ir.Const):
        return float(expr.value) if expr.type.is_float else int(expr.value)
    if not isinstance(expr, ir.Cast) or expr.flush:
        return None
    number = number_of(expr.arg)
    if number is None:
        return None
    held = convert(np.asarray(number, np.float64 if isinstance(number, float) else np.int64), expr.arg.type)
    cell = convert(held, expr.type, saturate=expr.saturate)
    return float(cell) if expr.type.is_float else int(cell)


def is_exact(value: float | int, prec: Prec) -> bool:
    """Whether a number is in a narrow format as it is."""
    held = float(np.asarray(value, np.float64).astype(prec.numpy_dtype))
    return held == float(value) or value != value
