"""NumPy forms of the prelude's exp, log, tanh, erf, erfc, sin, pow and the like.

In and out: f32 or f64 arrays. The f32 functions repeat the C text operation by operation and give its bits; those in
f64 are numpy's or the C library's and agree within 2 ulp. Reasons and error bounds stand in ``transcendental.h``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from stagedtensor.codegen.prelude.mirror_arithmetic import (
    F32,
    F64,
    Array,
    Function,
    bits_f32,
    bits_f64,
    fma_f32,
    from_bits_f32,
    from_bits_f64,
)
from stagedtensor.codegen.prelude.sections import two_over_pi_words


def _f32(literal: str) -> Any:  # a scalar, which numpy broadcasts like any array
    return F32(float.fromhex(literal))


def _horner(x: Array, *coefficients: str) -> Array:
    """A polynomial by fma in f32, the highest coefficient first."""
    value = np.full_like(x, _f32(coefficients[0]))
    for coefficient in coefficients[1:]:
        value = fma_f32(value, x, _f32(coefficient))
    return value


def _horner_f64(x: Array, *coefficients: float) -> Array:
    """A polynomial by product and sum in f64, the highest coefficient first."""
    value = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value = value * x + F64(coefficient)
    return value


_SHIFT = _f32("0x1.8p23")
_LN2_HIGH, _LN2_LOW = _f32("0x1.62e43p-1"), _f32("-0x1.05c61p-29")
_LOG2_E = _f32("0x1.715476p+0")


def exp_reduced_f32(r: Array) -> Array:
    """e^r for |r| <= ln(2) / 2."""
    return _horner(
        r, "0x1.6a4d6p-10", "0x1.12398ep-7", "0x1.5558bp-5", "0x1.555492p-3", "0x1.fffffcp-2", "0x1p0", "0x1p0"
    )


def _split_exponent(x: Array) -> tuple[Array, Array]:
    """The shifted sum that holds round(x / ln 2) in its low bits, and the remainder."""
    shifted = fma_f32(x, _LOG2_E, _SHIFT)
    n = np.asarray(shifted - _SHIFT)
    r = fma_f32(n, -_LN2_HIGH, x)
    return shifted, fma_f32(n, -_LN2_LOW, r)


def exp_bounded_f32(x: Array) -> Array:
    """e^x for |x| <= 87."""
    shifted, r = _split_exponent(x)
    return np.asarray(exp_reduced_f32(r) * from_bits_f32((bits_f32(shifted) << np.uint32(23)) + np.uint32(0x3F800000)))


def scale_f32(x: Array, n: Array) -> Array:
    """x * 2^n in two factors."""
    half = n >> np.int32(1)
    x = x * from_bits_f32((half + np.int32(127)).astype(np.uint32) << np.uint32(23))
    return np.asarray(x * from_bits_f32((n - half + np.int32(127)).astype(np.uint32) << np.uint32(23)))


def _clamped(x: Array, low: int, high: int) -> Array:
    bits = np.minimum(bits_f32(x), np.uint32(low)).view(np.int32)
    return from_bits_f32(np.minimum(bits, np.int32(high)).view(np.uint32))


def _low_integer(shifted: Array) -> Array:
    return (bits_f32(shifted) - np.uint32(0x4B400000)).view(np.int32)


def exp_f32(x: Array) -> Array:
    """e^x."""
    shifted, r = _split_exponent(_clamped(x, 0xC2D00000, 0x42B20000))
    return np.where(np.isnan(x), x, scale_f32(exp_reduced_f32(r), _low_integer(shifted)))


def exp2_f32(x: Array) -> Array:
    """2^x."""
    clamped = _clamped(x, 0xC3170000, 0x43010000)
    shifted = clamped + _SHIFT
    r = clamped - (shifted - _SHIFT)
    q = _horner(
        r,
        "0x1.417284p-13",
        "0x1.5f0976p-10",
        "0x1.3b2ddap-7",
        "0x1.c6af7ap-5",
        "0x1.ebfbdcp-3",
        "0x1.62e43p-1",
        "0x1p0",
    )
    return np.where(np.isnan(x), x, scale_f32(q, _low_integer(shifted)))


def _normal_bits(x: Array) -> tuple[Array, Array]:
    bits = bits_f32(x)
    subnormal = bits < np.uint32(0x00800000)
    return np.where(subnormal, bits_f32(x * F32(8388608.0)), bits), subnormal


def log_exponent_f32(x: Array) -> Array:
    """The n that brings x / 2^n into [sqrt(1/2), sqrt(2))."""
    bits, subnormal = _normal_bits(x)
    exponent = (bits - np.uint32(0x3F3504F3)).view(np.int32) >> np.int32(23)
    return np.asarray(exponent - np.where(subnormal, np.int32(23), np.int32(0)))


def log_mantissa_f32(x: Array) -> Array:
    """x / 2^n - 1 for that n."""
    bits, _ = _normal_bits(x)
    exponent = (bits - np.uint32(0x3F3504F3)) & np.uint32(0xFF800000)
    return np.asarray(from_bits_f32(bits - exponent) - F32(1))


def log_special_f32(x: Array, logarithm: Array) -> Array:
    """The logarithm, or the special value where x is not positive and finite."""
    bits = bits_f32(x)
    special = np.where(bits >= np.uint32(0x7F800000), F32(np.nan), logarithm)
    special = np.where(bits == np.uint32(0x7F800000), F32(np.inf), special)
    return np.where(bits & np.uint32(0x7FFFFFFF) == 0, F32(-np.inf), special)


def log_f32(x: Array) -> Array:
    """Natural logarithm."""
    n, f = log_exponent_f32(x).astype(F32), log_mantissa_f32(x)
    p = _horner(
        f,
        "-0x1.38d132p-4",
        "0x1.05689ep-3",
        "-0x1.0d857ap-3",
        "0x1.22d7fp-3",
        "-0x1.54721p-3",
        "0x1.99a026p-3",
        "-0x1.000228p-2",
        "0x1.555554p-2",
        "-0x1p-1",
    )
    tail = fma_f32(f * f, p, n * _LN2_LOW)
    return log_special_f32(x, fma_f32(n, _LN2_HIGH, f + tail))


def log2_f32(x: Array) -> Array:
    """Binary logarithm."""
    n, f = log_exponent_f32(x).astype(F32), log_mantissa_f32(x)
    r = _horner(
        f,
        "0x1.0200ccp-3",
        "-0x1.a89fb4p-3",
        "0x1.b9bab8p-3",
        "-0x1.e95522p-3",
        "0x1.26d402p-2",
        "-0x1.715c84p-2",
        "0x1.ec73d4p-2",
        "-0x1.71547p-1",
        "-0x1.360016p-26",
    )
    leading = f * _LOG2_E
    return log_special_f32(x, n + (leading + fma_f32(f, r, fma_f32(f, _LOG2_E, -leading))))


def sigmoid_f32(x: Array) -> Array:
    """1 / (1 + e^-x)."""
    e = exp_f32(-np.abs(x))
    numerator = np.where(x < 0, e, F32(1))
    denominator = F32(1) + e
    quotient = numerator / denominator
    remainder = fma_f32(-quotient, denominator, numerator)
    remainder = fma_f32(-quotient, e - (denominator - F32(1)), remainder)
    return fma_f32(remainder, np.where(x < 0, F32(1) - quotient, quotient), quotient)


def _odd_function(x: Array, limit: int, border: int, near: Function, far: Function) -> Array:
    """An odd function from its two parts for |x|, which is clamped to the bit pattern `limit`."""
    sign = bits_f32(x) & np.uint32(0x80000000)
    bits = np.minimum(bits_f32(x) & np.uint32(0x7FFFFFFF), np.uint32(limit))
    a = from_bits_f32(bits)
    chosen = np.where(bits < np.uint32(border), near(a), far(a))
    return np.where(np.isnan(x), x, from_bits_f32(bits_f32(chosen) | sign))


def tanh_f32(x: Array) -> Array:
    """Hyperbolic tangent."""

    def near(a: Array) -> Array:
        s = a * a
        t = _horner(s, "-0x1.75619ap-8", "0x1.5207b8p-6", "-0x1.b83738p-5", "0x1.1106fcp-3", "-0x1.555532p-2")
        return fma_f32(a * s, t, a)

    def far(a: Array) -> Array:
        return np.asarray(F32(1) - F32(2) / (exp_bounded_f32(F32(2) * a) + F32(1)))

    return _odd_function(x, 0x41200000, 0x3F200000, near, far)


def erf_f32(x: Array) -> Array:
    """Error function."""

    def near(a: Array) -> Array:
        e = _horner(
            a * a,
            "-0x1.308246p-11",
            "0x1.44c0d4p-8",
            "-0x1.b618b6p-6",
            "0x1.ce12p-4",
            "-0x1.8126aep-2",
            "0x1.06eba4p-3",
        )
        return fma_f32(a, e, a)

    def far(a: Array) -> Array:
        exponent = _horner(
            a,
            "0x1.78e02cp-17",
            "-0x1.527e46p-12",
            "0x1.dd6e36p-9",
            "-0x1.8551d2p-6",
            "0x1.b3259cp-4",
            "0x1.45328ap-1",
            "0x1.20ef1cp+0",
        )
        return np.asarray(F32(1) - exp_bounded_f32(-(exponent * a)))

    return _odd_function(x, 0x40800000, 0x3F700000, near, far)


_LOG2_SERIES = tuple(float.fromhex("0x1.71547652b82fep+1") / divisor for divisor in range(17, 0, -2))
_EXP2_SERIES = tuple(
    float.fromhex(literal)
    for literal in (
        "0x1.b3de1e6c146fep-24",
        "0x1.63e6b89414a67p-20",
        "0x1.ffce2fd4addbdp-17",
        "0x1.430897d5d515ap-13",
        "0x1.5d87fd93868c8p-10",
        "0x1.3b2ab724210f3p-7",
        "0x1.c6b08d70c87b5p-5",
        "0x1.ebfbdff81bd83p-3",
        "0x1.62e42fefa37d2p-1",
        "0x1p0",
    )
)


def erfc_f32(x: Array) -> Array:
    """1 - erf(x) without its cancellation."""
    x = np.asarray(x, F32, order="C")
    magnitude = np.abs(x)
    stays = magnitude < F32(10.0625)
    a = np.where(stays, magnitude, F32(0))
    one, half = np.full_like(a, 1), np.full_like(a, 0.5)
    s = a * a
    shifted, r = _split_exponent(-s)
    r = r - fma_f32(a, a, -s)
    q = _horner(r, "0x1.6a4d6p-10", "0x1.12398ep-7", "0x1.5558bp-5", "0x1.555492p-3", "0x1.fffffcp-2")
    less_one = fma_f32(r * r, q, r)
    d = fma_f32(half, a, one)
    t = F32(1) / d
    t_lost = fma_f32(-fma_f32(half, a, one - d), t, fma_f32(-d, t, one))
    u = t - F32(0.25)
    c = _horner(
        u,
        "0x1.526b8ep-5",
        "-0x1.db19d4p-4",
        "0x1.0b6dccp-4",
        "0x1.b557d4p-4",
        "-0x1.5852ep-4",
        "-0x1.060f9p-3",
        "0x1.50e712p-9",
        "0x1.dde88cp-3",
        "0x1.9f34fcp-2",
        "0x1.c5f07ap-2",
    )
    last = np.full_like(a, _f32("0x1.7c0348p-2"))
    whole = fma_f32(c, u, last)
    whole_lost = fma_f32(c, u, last - whole)
    w = t * whole
    w_lost = fma_f32(t, whole_lost, fma_f32(t, whole, -w))
    w_lost = fma_f32(w, fma_f32(t, np.full_like(a, _f32("0x1.41bap+0")), one) * t_lost, w_lost)
    power = w + fma_f32(w, less_one, fma_f32(w_lost, less_one, w_lost))
    power = np.where(stays, scale_f32(power, _low_integer(shifted)), F32(0))
    result = np.where(x < 0, F32(2) - power, power)
    return np.asarray(np.where(np.isnan(x), x, result))


def pow_f32(x: Array, y: Array) -> Array:
    """x to the y, with the special cases of C99."""
    x, y = (np.array(part, order="C") for part in np.broadcast_arrays(np.asarray(x, F32), np.asarray(y, F32)))
    base = np.abs(x).astype(F64)
    bits = bits_f64(base)
    exponent = ((bits >> np.uint64(32)).astype(np.uint32) - np.uint32(0x3FE6A09E)).view(np.int32) >> np.int32(20)
    m = from_bits_f64(bits - (exponent.astype(np.uint32).astype(np.uint64) << np.uint64(52)))
    s = (m - 1.0) / (m + 1.0)
    logarithm = exponent.astype(F64) + s * _horner_f64(s * s, *_LOG2_SERIES)
    logarithm = np.where(base < np.inf, logarithm, base)
    logarithm = np.where(base == 0, -np.inf, logarithm)
    product = np.where((logarithm == 0) | (y == 0), 0.0, logarithm * y.astype(F64))
    product = np.where(product > 200.0, 200.0, product)
    product = np.where(product < -200.0, -200.0, product)
    shifted = product + float.fromhex("0x1.8p52")
    r = product - (shifted - float.fromhex("0x1.8p52"))
    power = _horner_f64(r, *_EXP2_SERIES)
    power = power * from_bits_f64((bits_f64(shifted) << np.uint64(52)) + np.uint64(0x3FF0000000000000))
    magnitude = np.abs(y)
    small = magnitude < F32(2**24)
    whole = np.where(small, magnitude, F32(0)).astype(np.int32)
    integer = (whole.astype(F32) == magnitude) | (magnitude >= F32(2**24))
    sign = np.where(integer, bits_f32(x) & (whole.astype(np.uint32) << np.uint32(31)), np.uint32(0))
    result = from_bits_f32(bits_f32(power.astype(F32)) | sign)
    return np.where((x < 0) & (base < np.inf) & ~integer, F32(np.nan), result)


_TWO_OVER_PI = np.array(two_over_pi_words(), np.uint64)
_HALF_QUARTER = np.uint64(1 << 61)


def quarter_turns_f32(x: Array) -> Array:
    """|x| * 2 / pi modulo 4 in fixed point with 62 fractional bits."""
    bits = bits_f32(x) & np.uint32(0x7FFFFFFF)
    place = np.maximum((bits >> np.uint32(23)).astype(np.int32) - np.int32(119), np.int32(0))
    mantissa = ((bits & np.uint32(0x7FFFFF)) | np.uint32(0x800000)).astype(np.uint64)
    mantissa = mantissa << (place & np.int32(7)).astype(np.uint64)
    entry = place >> np.int32(3)
    top, middle, bottom = (mantissa * _TWO_OVER_PI[entry + offset] for offset in (0, 4, 8))
    return np.asarray((top << np.uint64(32)) + middle + (bottom >> np.uint64(32)))


def remainder_of_turns(turns: Array) -> Array:
    """The distance of fixed-point quarter turns from the nearest whole one, in radians, f64."""
    signed = np.asarray(turns << np.uint64(2)).view(np.int64)
    # C sums two halves and loses the last of the 64 bits; the sum rounds as this conversion does.
    return np.asarray((signed >> np.int64(1)).astype(F64) * float.fromhex("0x1.921fb54442d18p-63"))


def sin_of_turns(quarter: Array, r: Array) -> Array:
    """sin(quarter * pi / 2 + r) in f64."""
    s = r * r
    sine = _horner_f64(
        s,
        float.fromhex("0x1.6cd1af2b5a03fp-19"),
        float.fromhex("-0x1.a00f7e0e31b52p-13"),
        float.fromhex("0x1.111108690305ap-7"),
        float.fromhex("-0x1.5555554c6ff03p-3"),
    )
    sine = sine * s * r + r
    cosine = _horner_f64(
        s,
        float.fromhex("0x1.99eb47b782b9ap-16"),
        float.fromhex("-0x1.6c0c32857cbbbp-10"),
        float.fromhex("0x1.55554a0f87c84p-5"),
        -0.5,
        1.0,
    )
    value = np.where(quarter & np.uint32(1) != 0, cosine, sine)
    return np.where(quarter & np.uint32(2) != 0, -value, value)


def nearest_quarter(turns: Array) -> Array:
    """The nearest whole quarter turn, modulo 4, uint32."""
    return np.asarray((turns + _HALF_QUARTER) >> np.uint64(62)).astype(np.uint32)


def _sine(x: Array, shift: int) -> Array:
    turns = quarter_turns_f32(x)
    small = np.abs(x) <= _f32("0x1.921fb4p-1")
    r = np.where(small, np.abs(x).astype(F64), remainder_of_turns(turns))
    return sin_of_turns(np.where(small, np.uint32(0), nearest_quarter(turns)) + np.uint32(shift), r)


def sin_f32(x: Array) -> Array:
    """Sine."""
    value = _sine(x, 0)
    value = np.where(np.signbit(x), -value, value)
    return np.where(np.isfinite(x), value.astype(F32), F32(np.nan))


def cos_f32(x: Array) -> Array:
    """Cosine."""
    return np.where(np.isfinite(x), _sine(x, 1).astype(F32), F32(np.nan))


_ERF = np.vectorize(math.erf, otypes=[F64])
_ERFC = np.vectorize(math.erfc, otypes=[F64])


def sigmoid_f64(x: Array) -> Array:
    """1 / (1 + e^-x)."""
    e = np.exp(-np.abs(x))
    return np.asarray(np.where(x < 0, e, 1.0) / (1.0 + e))


def functions() -> dict[str, Function]:
    """Return the functions of this file by C name."""
    return {
        "st_exp_reduced_f32": exp_reduced_f32,
        "st_exp_bounded_f32": exp_bounded_f32,
        "st_scale_f32": scale_f32,
        "st_exp_f32": exp_f32,
        "st_exp2_f32": exp2_f32,
        "st_log_exponent_f32": log_exponent_f32,
        "st_log_mantissa_f32": log_mantissa_f32,
        "st_log_special_f32": log_special_f32,
        "st_log_f32": log_f32,
        "st_log2_f32": log2_f32,
        "st_sigmoid_f32": sigmoid_f32,
        "st_tanh_f32": tanh_f32,
        "st_erf_f32": erf_f32,
        "st_erfc_f32": erfc_f32,
        "st_pow_f32": pow_f32,
        "st_quarter_turns_f32": quarter_turns_f32,
        "st_remainder_of_turns": remainder_of_turns,
        "st_sin_of_turns": sin_of_turns,
        "st_sin_f32": sin_f32,
        "st_cos_f32": cos_f32,
        "st_exp_f64": np.exp,
        "st_exp2_f64": np.exp2,
        "st_log_f64": np.log,
        "st_log2_f64": np.log2,
        "st_tanh_f64": np.tanh,
        "st_erf_f64": _ERF,
        "st_erfc_f64": _ERFC,
        "st_sin_f64": np.sin,
        "st_cos_f64": np.cos,
        "st_pow_f64": np.power,
        "st_sigmoid_f64": sigmoid_f64,
    }
