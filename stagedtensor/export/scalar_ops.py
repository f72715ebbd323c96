"""StableHLO forms of the scalar ops: one row per op of the op table.

A row takes the builder, the op's operands (of one type and dims; predicates are i1) and gives the result. Ops without
a form of their own are made of others; ``missing_rows`` names what has none, which is random numbers only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

from stagedtensor.op_table import OPS
from stagedtensor.precision import f64

from .values import Lines, Value

Form: TypeAlias = Callable[..., Value]


def _splat(b: Lines, x: Value, value: float | int) -> Value:
    return b.number(float(value) if x.prec.is_float else int(value), x.prec, x.dims)


def _unary(op: str) -> Form:
    return lambda b, x: b.unary(op, x)


def _binary(op: str) -> Form:
    return lambda b, x, y: b.binary(op, x, y)


def _compare(direction: str) -> Form:
    return lambda b, x, y: b.compare(direction, x, y)


def _mod(b: Lines, x: Value, y: Value) -> Value:
    """The remainder with the sign of the divisor; for floats a - floor(a / b) * b, for integers 0 where b is 0."""
    if x.prec.is_float:
        return b.binary("subtract", x, b.binary("multiply", b.unary("floor", b.binary("divide", x, y)), y))
    zero, safe, by_zero = _safe(b, y)
    rest = b.binary("remainder", x, safe)
    if x.prec.is_signed:
        rest = b.select(_wrong_side(b, rest, safe, zero), b.binary("add", rest, safe), rest)
    return b.select(by_zero, zero, rest)


def _floordiv(b: Lines, x: Value, y: Value) -> Value:
    if x.prec.is_float:
        return b.unary("floor", b.binary("divide", x, y))
    zero, safe, by_zero = _safe(b, y)
    quotient = b.binary("divide", x, safe)
    if x.prec.is_signed:
        rest = b.binary("remainder", x, safe)
        less = b.binary("subtract", quotient, _splat(b, x, 1))
        quotient = b.select(_wrong_side(b, rest, safe, zero), less, quotient)
    return b.select(by_zero, zero, quotient)


def _safe(b: Lines, y: Value) -> tuple[Value, Value, Value]:
    zero = _splat(b, y, 0)
    by_zero = b.compare("EQ", y, zero)
    return zero, b.select(by_zero, _splat(b, y, 1), y), by_zero


def _wrong_side(b: Lines, rest: Value, divisor: Value, zero: Value) -> Value:
    """Where a remainder is not 0 and has the sign that the divisor has not."""
    signs = b.compare("NE", b.compare("LT", rest, zero), b.compare("LT", divisor, zero))
    return b.binary("and", b.compare("NE", rest, zero), signs)


def _pow(b: Lines, x: Value, y: Value) -> Value:
    if x.prec.is_float:
        return b.binary("power", x, y)
    zero = _splat(b, x, 0)
    return b.select(b.compare("LT", y, zero), zero, b.binary("power", x, b.binary("maximum", y, zero)))


def _scaled(op: str, factor: float, *, before: bool) -> Form:
    def form(b: Lines, x: Value) -> Value:
        if before:
            return b.unary(op, b.binary("multiply", x, _splat(b, x, factor)))
        return b.binary("multiply", b.unary(op, x), _splat(b, x, factor))

    return form


def _trunc(b: Lines, x: Value) -> Value:
    return b.select(b.compare("LT", x, _splat(b, x, 0)), b.unary("ceil", x), b.unary("floor", x))


def _whole(op: str) -> Form:
    """Rounding to whole numbers; integers are whole."""
    return lambda b, x: b.unary(op, x) if x.prec.is_float else x


def _horner(b: Lines, x: Value, coefficients: tuple[float, ...]) -> Value:
    total = _splat(b, x, coefficients[0])
    for coefficient in coefficients[1:]:
        total = b.binary("add", b.binary("multiply", total, x), _splat(b, x, coefficient))
    return total


_FRACTION_TERMS = 60


def _erfc_magnitude(b: Lines, z: Value) -> Value:
    """erfc(z) of z >= 1 by its continued fraction, from the innermost term outwards."""
    fraction = z
    for term in range(_FRACTION_TERMS, 0, -1):
        fraction = b.binary("add", z, b.binary("divide", _splat(b, z, term / 2.0), fraction))
    power = b.unary("exponential", b.unary("negate", b.binary("multiply", z, z)))
    return b.binary("divide", b.binary("multiply", power, _splat(b, z, 1.0 / math.sqrt(math.pi))), fraction)


_SERIES = tuple(
    2.0 / math.sqrt(math.pi) * (-1.0) ** term / (math.factorial(term) * (2 * term + 1)) for term in range(28, -1, -1)
)


def _error_functions(b: Lines, x: Value) -> tuple[Value, Value, Value, Value]:
    """(near 0, erf near 0, sign of x, erfc of the magnitude farther out), in f64."""
    magnitude = b.unary("abs", x)
    near = b.compare("LT", magnitude, _splat(b, x, 1.5))
    small = b.binary("multiply", x, _horner(b, b.binary("multiply", x, x), _SERIES))
    # an infinite operand would make inf / inf of the fraction
    bounded = b.binary("minimum", b.binary("maximum", magnitude, _splat(b, x, 1.5)), _splat(b, x, 30.0))
    return near, small, b.unary("sign", x), _erfc_magnitude(b, bounded)


def _in_f64(form: Form) -> Form:
    def wide(b: Lines, x: Value) -> Value:
        if x.prec is f64:
            return form(b, x)
        return b.convert(form(b, b.convert(x, f64, "mix:error function:-")), x.prec, "mix:error function:-")

    return wide


def _erf(b: Lines, x: Value) -> Value:
    near, small, sign, tail = _error_functions(b, x)
    return b.select(near, small, b.binary("multiply", sign, b.binary("subtract", _splat(b, x, 1), tail)))


def _erfc(b: Lines, x: Value) -> Value:
    near, small, sign, tail = _error_functions(b, x)
    far = b.select(b.compare("LT", sign, _splat(b, x, 0)), b.binary("subtract", _splat(b, x, 2), tail), tail)
    far = b.select(b.compare("NE", x, x), x, far)
    return b.select(near, b.binary("subtract", _splat(b, x, 1), small), far)


def _nonfinite(b: Lines, x: Value) -> Value:
    magnitude = b.unary("abs", x)
    finite = b.compare("LT", magnitude, _splat(b, x, math.inf))
    return b.select(finite, _splat(b, x, 0), _splat(b, x, math.inf))


FORMS: dict[str, Form] = {
    "add": _binary("add"),
    "sub": _binary("subtract"),
    "mul": _binary("multiply"),
    "div": _binary("divide"),
    "floordiv": _floordiv,
    "mod": _mod,
    "pow": _pow,
    "fma": lambda b, x, y, z: b.binary("add", b.binary("multiply", x, y), z),
    "maximum": _binary("maximum"),
    "minimum": _binary("minimum"),
    "neg": _unary("negate"),
    "abs": lambda b, x: b.unary("abs", x) if x.prec.is_float or x.prec.is_signed else x,
    "sign": lambda b, x: (
        b.unary("sign", x) if x.prec.is_float or x.prec.is_signed else b.binary("minimum", x, _splat(b, x, 1))
    ),
    "floor": _whole("floor"),
    "ceil": _whole("ceil"),
    "round": _whole("round_nearest_even"),
    "trunc": lambda b, x: _trunc(b, x) if x.prec.is_float else x,
    "relu": lambda b, x: b.binary("maximum", x, _splat(b, x, 0)),
    "identity": lambda b, x: x,
    "exp": _unary("exponential"),
    "exp2": _scaled("exponential", math.log(2.0), before=True),
    "log": _unary("log"),
    "log2": _scaled("log", 1.0 / math.log(2.0), before=False),
    "sqrt": _unary("sqrt"),
    "rsqrt": _unary("rsqrt"),
    "recip": lambda b, x: b.binary("divide", _splat(b, x, 1), x),
    "sin": _unary("sine"),
    "cos": _unary("cosine"),
    "tanh": _unary("tanh"),
    "sigmoid": _unary("logistic"),
    "erf": _in_f64(_erf),
    "erfc": _in_f64(_erfc),
    "lt": _compare("LT"),
    "le": _compare("LE"),
    "gt": _compare("GT"),
    "ge": _compare("GE"),
    "eq": _compare("EQ"),
    "ne": _compare("NE"),
    "and": _binary("and"),
    "or": _binary("or"),
    "not": _unary("not"),
    "nonfinite": _nonfinite,
    "where": lambda b, c, x, y: b.select(c, x, y),
}
"""Forms by the name of the op."""

PREDICATES = ("and", "or", "not")
"""Ops that take and give truth values."""


def missing_rows() -> list[str]:
    """Return the ops of the op table without a form."""
    return [name for name in OPS if name not in FORMS]
