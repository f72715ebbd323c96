"""What each op must give, computed without the package: intervals of cells between which a result must lie.

Correctly rounded ops have an interval of one cell. The functions that the prelude defines may be 2 ulp of the compute
format away from the value that f64 (or, for f64, extended precision) gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from stagedtensor.precision import Prec
from tests.oracles.rounding import cells_of, codes_of, convert_codes, round_exact

from .running import Array

Function = Callable[..., Array]

_erf = np.vectorize(math.erf, otypes=[np.float64])
_erfc = np.vectorize(math.erfc, otypes=[np.float64])


def _sigmoid(x: Array) -> Array:
    return _where(x >= 0, 1.0 / (1.0 + np.exp(-np.abs(x))), np.exp(-np.abs(x)) / (1.0 + np.exp(-np.abs(x))))


#: Functions within 2 ulp; evaluated in a wider format than they are tested in.
APPROXIMATE: dict[str, Function] = {
    "pow": np.power,
    "exp": np.exp,
    "exp2": np.exp2,
    "log": np.log,
    "log2": np.log2,
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "sigmoid": _sigmoid,
    "erf": _erf,
    "erfc": _erfc,
}


def _where_nan(a: Array, b: Array, value: Array) -> Array:
    return _where(np.isnan(a), a, _where(np.isnan(b), b, value))


def _where(condition: Array, x: Array, y: Array) -> Array:
    return np.where(condition, x, y)


def _flags(a: Array, mask: Array) -> Array:
    return mask.astype(a.dtype)


#: Ops that one IEEE operation, or a choice, decides; on arrays of the compute format.
EXACT: dict[str, Function] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "maximum": lambda a, b: _where_nan(a, b, _where(a >= b, a, b)),
    "minimum": lambda a, b: _where_nan(a, b, _where(a <= b, a, b)),
    "neg": np.negative,
    "abs": np.abs,
    "sign": lambda a: _where(np.isnan(a), a, np.sign(a)),
    "floor": np.floor,
    "ceil": np.ceil,
    "round": np.rint,
    "trunc": np.trunc,
    "relu": lambda a: _where(np.isnan(a), a, _where(a > 0, a, np.zeros_like(a))),
    "identity": lambda a: a,
    "sqrt": np.sqrt,
    "recip": lambda a: a.dtype.type(1) / a,
    "lt": lambda a, b: _flags(a, a < b),
    "le": lambda a, b: _flags(a, a <= b),
    "gt": lambda a, b: _flags(a, a > b),
    "ge": lambda a, b: _flags(a, a >= b),
    "eq": lambda a, b: _flags(a, a == b),
    "ne": lambda a, b: _flags(a, a != b),
    "and": lambda a, b: _flags(a, (a != 0) & (b != 0)),
    "or": lambda a, b: _flags(a, (a != 0) | (b != 0)),
    "not": lambda a: _flags(a, a == 0),
    "nonfinite": lambda a: _where(np.isfinite(a), np.zeros_like(a), np.full_like(a, np.inf)),
    "where": lambda c, a, b: _where(c != 0, a, b),
}


def stored(values: Array, prec: Prec) -> Array:
    """Return values of f32 or f64 rounded once to a format, by integer arithmetic."""
    if values.dtype == prec.numpy_dtype:
        return values
    source = "f64" if values.dtype == np.float64 else "f32"
    return cells_of(convert_codes(codes_of(values), source, prec), prec.numpy_dtype)


def compute_dtype(prec: Prec) -> Any:
    """Return the NumPy type in which a float format computes."""
    return np.float64 if prec.name == "f64" else np.float32


def float_bounds(name: str, prec: Prec, args: list[Array]) -> tuple[Array, Array]:
    """Return the least and the greatest cell that an op on operands stored at a float format may give."""
    dtype = compute_dtype(prec)
    wide = [arg.astype(dtype) for arg in args]
    with np.errstate(all="ignore"):
        if name in EXACT:
            cells = stored(np.asarray(EXACT[name](*wide), dtype), prec)
            return cells, cells
        assert name in APPROXIMATE, f"no expectation for {name}"
        wider = np.longdouble if dtype is np.float64 and name not in ("erf", "erfc", "sigmoid") else np.float64
        exact = APPROXIMATE[name](*(arg.astype(wider) for arg in wide))
        near = exact.astype(dtype)
        low, high = near, near
        for _ in range(2):
            low, high = np.nextafter(low, dtype(-np.inf)), np.nextafter(high, dtype(np.inf))
        # what is special must be exactly so
        fixed = ~np.isfinite(near) & ~np.isfinite(exact) | (exact == 0)
        low, high = _where(fixed, near, low), _where(fixed, near, high)
        return stored(low, prec), stored(high, prec)


def fma_cells(prec: Prec, a: Array, b: Array, c: Array) -> Array:
    """Return a*b + c rounded once to the compute format, then to storage; exact fractions, so keep it short."""
    compute = "f64" if prec.name == "f64" else "f32"
    dtype = compute_dtype(prec)
    cells = np.empty(a.shape, dtype)
    with np.errstate(all="ignore"):
        plain = a.astype(dtype) * b.astype(dtype) + c.astype(dtype)
    for at, (x, y, z) in enumerate(zip(a.astype(np.float64), b.astype(np.float64), c.astype(np.float64), strict=True)):
        if not all(map(math.isfinite, (x, y, z))):
            cells[at] = z if math.isinf(z) and math.isfinite(x) and math.isfinite(y) else plain[at]
            continue
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        code = round_exact(exact if exact else float(x * y + z), compute)
        cells[at] = cells_of(np.array([code], np.uint64), dtype)[0]
    return stored(cells, prec)


def quotient_bounds(prec: Prec, a: Array, b: Array) -> tuple[Array, Array]:
    """Return bounds of floor(a / b) by Python's rules; 1 ulp wide where the compute format cannot hold the integer."""
    compute = "f64" if prec.name == "f64" else "f32"
    dtype = compute_dtype(prec)
    cells = np.empty(a.shape, dtype)
    for at, (x, y) in enumerate(zip(a.astype(np.float64).tolist(), b.astype(np.float64).tolist(), strict=True)):
        if math.isnan(x) or math.isnan(y) or math.isinf(x):
            cells[at] = math.nan
        elif y == 0 or x == 0:
            with np.errstate(all="ignore"):
                cells[at] = dtype(x) / dtype(y)
        else:
            whole = (
                -1
                if math.isinf(y) and (x < 0) != (y < 0)
                else 0
                if math.isinf(y)
                else math.floor(Fraction(x) / Fraction(y))
            )
            cells[at] = cells_of(np.array([round_exact(Fraction(whole), compute)], np.uint64), dtype)[0]
    large = np.isfinite(cells) & (np.abs(cells) >= 2.0 ** (28 if compute == "f32" else 53))
    with np.errstate(over="ignore"):
        low = _where(large, np.nextafter(cells, dtype(-np.inf)), cells)
        high = _where(large, np.nextafter(cells, dtype(np.inf)), cells)
    return stored(low, prec), stored(high, prec)


def remainder_cells(prec: Prec, a: Array, b: Array) -> Array:
    """Return a - floor(a / b) * b by Python's rules, rounded once to the compute format, then to storage."""
    compute = "f64" if prec.name == "f64" else "f32"
    dtype = compute_dtype(prec)
    cells = np.empty(a.shape, dtype)
    for at, (x, y) in enumerate(zip(a.astype(np.float64).tolist(), b.astype(np.float64).tolist(), strict=True)):
        if math.isnan(x) or math.isnan(y) or math.isinf(x) or y == 0:
            cells[at] = math.nan
        elif math.isinf(y):
            cells[at] = math.copysign(0.0, y) if x == 0 else x if (x < 0) == (y < 0) else y
        else:
            exact = Fraction(x) - math.floor(Fraction(x) / Fraction(y)) * Fraction(y)
            code = round_exact(exact if exact else math.copysign(0.0, y), compute)
            cells[at] = cells_of(np.array([code], np.uint64), dtype)[0]
    return stored(cells, prec)


# -- integers ------------------------------------------------------------------------------------------------------


def _int_pow(a: int, b: int) -> int:
    return 0 if b < 0 else pow(a, b, 1 << 64)


#: Ops on Python integers, to be wrapped to the format.
INTEGER: dict[str, Callable[..., int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "floordiv": lambda a, b: a // b if b else 0,
    "mod": lambda a, b: a % b if b else 0,
    "pow": _int_pow,
    "fma": lambda a, b, c: a * b + c,
    "maximum": max,
    "minimum": min,
    "neg": lambda a: -a,
    "abs": abs,
    "sign": lambda a: (a > 0) - (a < 0),
    **dict.fromkeys(("floor", "ceil", "round", "trunc", "identity"), lambda a: a),
    "relu": lambda a: max(a, 0),
    "lt": lambda a, b: int(a < b),
    "le": lambda a, b: int(a <= b),
    "gt": lambda a, b: int(a > b),
    "ge": lambda a, b: int(a >= b),
    "eq": lambda a, b: int(a == b),
    "ne": lambda a, b: int(a != b),
    "and": lambda a, b: int(bool(a) and bool(b)),
    "or": lambda a, b: int(bool(a) or bool(b)),
    "not": lambda a: int(not a),
    "where": lambda c, a, b: a if c else b,
}


def integer_cells(name: str, prec: Prec, args: list[Array]) -> Array:
    """Return what an op on integer cells gives, wrapped modulo 2**bits."""
    codes = [INTEGER[name](*map(int, row)) % (1 << prec.bits) for row in zip(*args, strict=True)]
    return cells_of(np.array(codes, np.uint64), prec.numpy_dtype)
