"""NumPy forms of the prelude's exact functions: bits, fma, rounding, division, powers, extrema.

In and out: arrays of the format's numpy dtype (ml_dtypes for bf16 and fp8), any broadcastable shapes. Bit for bit what
the C text gives, NaN payloads aside. Each function follows its C namesake; see there for the reasons.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np

from stagedtensor.precision import FLOATS, INTEGERS, Prec, f32, f64

Array = np.ndarray[Any, np.dtype[Any]]
Function = Callable[..., Array]

F32 = np.float32
F64 = np.float64


def bits_f32(x: Array) -> Array:
    """The bit patterns of f32 cells, uint32."""
    return np.ascontiguousarray(x, dtype=F32).view(np.uint32).reshape(np.shape(x))


def from_bits_f32(bits: Array) -> Array:
    """The f32 cells with the given bit patterns."""
    return np.ascontiguousarray(bits, dtype=np.uint32).view(F32).reshape(np.shape(bits))


def bits_f64(x: Array) -> Array:
    """The bit patterns of f64 cells, uint64."""
    return np.ascontiguousarray(x, dtype=F64).view(np.uint64).reshape(np.shape(x))


def from_bits_f64(bits: Array) -> Array:
    """The f64 cells with the given bit patterns."""
    return np.ascontiguousarray(bits, dtype=np.uint64).view(F64).reshape(np.shape(bits))


def _sum_to_odd(a: Array, b: Array) -> Array:
    """a + b in f64, an inexact sum taking the neighbour whose last bit is set; infinities and NaN pass."""
    total = np.asarray(a + b)
    back = total - a
    error = (a - (total - back)) + (b - back)
    bits = bits_f64(total)
    inexact = ((error > 0) | (error < 0)) & (bits & np.uint64(1) == 0)
    away = (error > 0) == (total > 0)
    step = np.where(away, np.uint64(1), ~np.uint64(0))
    return from_bits_f64(np.where(inexact, bits + step, bits))


def fma_f32(a: Array, b: Array, c: Array) -> Array:
    """a * b + c rounded once: the product is exact in f64, the sum rounded to odd."""
    product = np.asarray(a, F64) * np.asarray(b, F64)
    return _sum_to_odd(product, np.asarray(c, F64)).astype(F32)


def _split_product(a: Array, b: Array) -> tuple[Array, Array]:
    """a * b as an exact sum of two f64 numbers (Veltkamp's splitting, Dekker's product)."""
    high = a * b
    a_top, b_top = a * 134217729.0, b * 134217729.0
    a_high, b_high = a_top - (a_top - a), b_top - (b_top - b)
    a_low, b_low = a - a_high, b - b_high
    return high, ((a_high * b_high - high) + a_high * b_low + a_low * b_high) + a_low * b_low


def fma_f64(a: Array, b: Array, c: Array) -> Array:
    """a * b + c rounded once (Boldo and Melquiond 2008); cells near the ends of the exponent range through fractions."""
    a, b, c = np.broadcast_arrays(np.asarray(a, F64), np.asarray(b, F64), np.asarray(c, F64))
    high, low = _split_product(a, b)
    middle = c + low
    back = middle - c
    middle_error = (c - (middle - back)) + (low - back)
    top = high + middle
    back = top - high
    top_error = (high - (top - back)) + (middle - back)
    result = np.asarray(top + _sum_to_odd(top_error, middle_error))
    finite = np.isfinite(a) & np.isfinite(b) & np.isfinite(c)
    magnitudes = [np.abs(part) for part in (a, b, c, high)]
    calm = finite & (high != 0) & (c != 0) & (magnitudes[3] > 2.0**-900) & (magnitudes[2] > 2.0**-900)
    for magnitude in magnitudes:
        calm &= magnitude < 2.0**990
    plain = ~finite | ((a == 0) | (b == 0))  # nothing to round in the product
    # a product that would overflow is finite beside an infinite addend
    settled = np.where(np.isinf(c) & np.isfinite(a) & np.isfinite(b), c, a * b + c)
    result = np.where(plain, settled, result)
    for index in np.argwhere(~calm & ~plain):
        cell = tuple(index)
        exact = Fraction(float(a[cell])) * Fraction(float(b[cell])) + Fraction(float(c[cell]))
        result[cell] = _nearest_f64(exact)
    return result


def _nearest_f64(value: Fraction) -> float:
    try:
        return float(value)  # Python divides integers with one correct rounding, subnormals included
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def relu(x: Array) -> Array:
    """x where positive, +0 where not; NaN stays."""
    return np.where(x <= 0, x.dtype.type(0), x)


def sign(x: Array) -> Array:
    """-1, +0 or 1; NaN stays."""
    steps = ((x > 0).astype(np.int8) - (x < 0).astype(np.int8)).astype(x.dtype)
    return np.where(np.isnan(x), x, steps)


def maximum(a: Array, b: Array) -> Array:
    """The larger, the first at ties, NaN if either is."""
    return np.where((a >= b) | np.isnan(a), a, b)


def minimum(a: Array, b: Array) -> Array:
    """The smaller, the first at ties, NaN if either is."""
    return np.where((a <= b) | np.isnan(a), a, b)


def rsqrt(x: Array) -> Array:
    """1 / sqrt(x), two roundings."""
    return np.asarray(x.dtype.type(1) / np.sqrt(x))


def floordiv_f32(a: Array, b: Array) -> Array:
    """floor(a / b) by Python's rules."""
    quotient = np.asarray(np.asarray(a, F64) / np.asarray(b, F64))
    whole = np.floor(quotient)
    opposite = (quotient == 0) & (a != 0) & ((a < 0) != (b < 0))
    whole = np.where(opposite, F64(-1), whole)
    return np.where(np.isfinite(a), whole.astype(F32), F32(np.nan))


def floormod_f32(a: Array, b: Array) -> Array:
    """a - floor(a / b) * b with the sign of b; the remainder is exact, adding b to it rounds once."""
    a, b = np.broadcast_arrays(np.asarray(a, F32), np.asarray(b, F32))
    return _signed_remainder(np.fmod(a, b), b)


def _signed_remainder(remainder: Array, b: Array) -> Array:
    shifted = np.where((remainder < 0) != (b < 0), remainder + b, remainder)
    return np.where(remainder == 0, np.copysign(remainder.dtype.type(0), b), shifted)


def floormod_f64(a: Array, b: Array) -> Array:
    """a - floor(a / b) * b with the sign of b."""
    a, b = np.broadcast_arrays(np.asarray(a, F64), np.asarray(b, F64))
    return _signed_remainder(np.fmod(a, b), b)


def floordiv_f64(a: Array, b: Array) -> Array:
    """floor(a / b) by Python's rules, through the exact remainder."""
    a, b = np.broadcast_arrays(np.asarray(a, F64), np.asarray(b, F64))
    remainder = np.fmod(a, b)
    quotient = (a - remainder) / b
    quotient = quotient - ((remainder != 0) & ((b < 0) != (remainder < 0)))
    whole = np.floor(quotient)
    whole = whole + (quotient - whole > 0.5)
    whole = np.where(quotient == 0, np.copysign(0.0, a / b), whole)
    return np.asarray(np.where(b == 0, a / b + (a - a), whole))


def floordiv_integer(a: Array, b: Array) -> Array:
    """floor(a / b); 0 where b is 0; the least integer over -1 wraps."""
    one, zero = b.dtype.type(1), b.dtype.type(0)
    return np.where(b == 0, zero, np.floor_divide(a, np.where(b == 0, one, b)))


def floormod_integer(a: Array, b: Array) -> Array:
    """a - floor(a / b) * b; 0 where b is 0."""
    one, zero = b.dtype.type(1), b.dtype.type(0)
    return np.where(b == 0, zero, np.mod(a, np.where(b == 0, one, b)))


def pow_integer(base: Array, exponent: Array) -> Array:
    """base to the exponent modulo 2^bits; 0 for a negative exponent."""
    zero = base.dtype.type(0)
    return np.where(exponent < 0, zero, np.power(base, np.where(exponent < 0, zero, exponent)))


def abs_integer(x: Array) -> Array:
    """|x|; the least integer wraps to itself."""
    return np.where(x < 0, np.negative(x), x)


def is_nonfinite(x: Array, prec: Prec) -> Array:
    """uint32 1 for infinities and NaN, else 0, read off the code."""
    codes = x.view(f"u{prec.bytes}")
    exponent = ((1 << prec.exponent_bits) - 1) << prec.mantissa_bits
    mask = exponent if prec.has_inf else exponent | ((1 << prec.mantissa_bits) - 1)
    return np.asarray((codes & codes.dtype.type(mask)) == mask).astype(np.uint32)


def flush(x: Array, prec: Prec) -> Array:
    """x, or +0 where its magnitude is below the least normal number."""
    codes = x.view(f"u{prec.bytes}")
    exponent = codes.dtype.type(((1 << prec.exponent_bits) - 1) << prec.mantissa_bits)
    kept: Array = np.where((codes & exponent) == 0, codes.dtype.type(0), codes)
    flushed: Array = kept.view(x.dtype)
    return flushed


def nonfinite(x: Array) -> Array:
    """Infinity for infinities and NaN, else +0."""
    return np.asarray(np.where(np.isfinite(x), x.dtype.type(0), x.dtype.type(np.inf)))


def pick_u32(test: Array, first: Array, second: Array) -> Array:
    """The first where test is 1, the second where it is 0, by masks."""
    mask = np.uint32(0) - test
    return np.asarray((first & mask) | (second & ~mask))


def functions() -> dict[str, Function]:
    """Return the functions of this file by C name."""
    table: dict[str, Function] = {
        "st_bits_f32": bits_f32,
        "st_from_bits_f32": from_bits_f32,
        "st_bits_f64": bits_f64,
        "st_from_bits_f64": from_bits_f64,
        "st_pick_u32": pick_u32,
        "st_fma_f32": fma_f32,
        "st_fma_f64": fma_f64,
        "st_floordiv_f32": floordiv_f32,
        "st_floormod_f32": floormod_f32,
        "st_floordiv_f64": floordiv_f64,
        "st_floormod_f64": floormod_f64,
    }
    for prec in FLOATS:
        table[f"st_is_nonfinite_{prec}"] = partial(is_nonfinite, prec=prec)
        table[f"st_flush_{prec}"] = partial(flush, prec=prec)
    exact_float: dict[str, Function] = {
        "abs": np.abs,
        "trunc": np.trunc,
        "floor": np.floor,
        "ceil": np.ceil,
        "round": np.rint,
        "sqrt": np.sqrt,
        "recip": np.reciprocal,
        "rsqrt": rsqrt,
        "nonfinite": nonfinite,
    }
    exact_any: dict[str, Function] = {"relu": relu, "sign": sign, "max": maximum, "min": minimum}
    for prec in (f32, f64):
        table.update({f"st_{stem}_{prec}": function for stem, function in (exact_float | exact_any).items()})
    exact_integer: dict[str, Function] = {
        "floordiv": floordiv_integer,
        "floormod": floormod_integer,
        "pow": pow_integer,
        "abs": abs_integer,
    }
    for prec in INTEGERS:
        table.update({f"st_{stem}_{prec}": function for stem, function in (exact_integer | exact_any).items()})
    return table
