"""Exact conversions between formats in integer arithmetic: the oracle for every back end's conversions.

In: codes (the bit patterns of cells) and format names. Out: the codes that one exact rounding, to nearest and ties to
even, gives. `round_exact` rounds one Python number, `convert_codes` a whole array; both work on integers only and share
neither tables nor code with the package. NaN comes out as some NaN: compare with `same_codes`.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

Codes = np.ndarray[Any, np.dtype[np.uint64]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]


class Layout(NamedTuple):
    """How a format spends its bits; `exponent` is 0 for integers."""

    bits: int
    exponent: int
    mantissa: int
    signed: bool
    has_inf: bool

    @property
    def bias(self) -> int:
        """The exponent bias."""
        return (1 << (self.exponent - 1)) - 1

    @property
    def least_exponent(self) -> int:
        """The power of two of the last digit of the subnormals."""
        return 1 - self.bias - self.mantissa

    @property
    def greatest_code(self) -> int:
        """The code of the greatest finite value."""
        top = ((1 << self.exponent) - 1) << self.mantissa
        return top - 1 if self.has_inf else top + (1 << self.mantissa) - 2

    @property
    def overflow_code(self) -> int:
        """What a finite overflow gives: the code of infinity, or of NaN where there is none."""
        return self.greatest_code + 1

    @property
    def sign(self) -> int:
        """The code's sign bit."""
        return 1 << (self.bits - 1)


LAYOUTS = {
    "f64": Layout(64, 11, 52, True, True),
    "f32": Layout(32, 8, 23, True, True),
    "f16": Layout(16, 5, 10, True, True),
    "bf16": Layout(16, 8, 7, True, True),
    "f8e5m2": Layout(8, 5, 2, True, True),
    "f8e4m3": Layout(8, 4, 3, True, False),
    **{f"i{bits}": Layout(bits, 0, bits - 1, True, False) for bits in (8, 16, 32, 64)},
    **{f"u{bits}": Layout(bits, 0, bits, False, False) for bits in (8, 16, 32, 64)},
}
FLOAT_NAMES = tuple(name for name, layout in LAYOUTS.items() if layout.exponent)
INTEGER_NAMES = tuple(name for name, layout in LAYOUTS.items() if not layout.exponent)


def layout_of(prec: object) -> Layout:
    """Return the layout of a format given by name or by anything whose text is the name."""
    return LAYOUTS[str(prec)]


def is_nan_code(code: int, prec: object) -> bool:
    """Tell whether one code is a NaN."""
    layout = layout_of(prec)
    infinity = layout.overflow_code - (0 if layout.has_inf else 1)
    return layout.exponent > 0 and code & (layout.sign - 1) > infinity


def decode_exact(code: int, prec: object) -> Fraction | float:
    """Return the value of one code: exact, or a float for infinities and NaN (minus zero decodes to 0)."""
    layout = layout_of(prec)
    if not layout.exponent:
        return Fraction(code - (1 << layout.bits) if layout.signed and code & layout.sign else code)
    negative, magnitude = bool(code & layout.sign), code & (layout.sign - 1)
    if magnitude > layout.greatest_code:
        infinite = layout.has_inf and magnitude == layout.overflow_code
        return (-math.inf if negative else math.inf) if infinite else math.nan
    field, digits = magnitude >> layout.mantissa, magnitude & ((1 << layout.mantissa) - 1)
    if field:
        digits += 1 << layout.mantissa
    value = Fraction(digits) * Fraction(2) ** (max(field, 1) - 1 + layout.least_exponent)
    return -value if negative else value


def round_exact(value: Fraction | float, prec: object, *, saturate: bool = False) -> int:
    """Return the code of `value` in format `prec`, rounded once; a float's sign of zero is kept.

    Integer formats: an int wraps; a Fraction or float truncates and saturates, NaN gives 0.
    """
    layout = layout_of(prec)
    if not layout.exponent:
        return _integer_code(value, layout)
    negative = math.copysign(1.0, value) < 0 if isinstance(value, float) else value < 0
    sign = layout.sign if negative else 0
    if isinstance(value, float):
        if math.isnan(value) or (math.isinf(value) and not layout.has_inf):
            return (1 << (layout.bits - 1)) - 1
        if math.isinf(value):
            return sign | layout.overflow_code
    magnitude = abs(Fraction(value))
    # The place of the last digit kept: where the leading one is, less the mantissa, but not below the subnormals.
    leading = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if magnitude and magnitude < Fraction(2) ** leading:
        leading -= 1
    place = max(leading - layout.mantissa, layout.least_exponent) if magnitude else layout.least_exponent
    digits = round(magnitude / Fraction(2) ** place)  # Python rounds a Fraction's ties to even
    if digits >> (layout.mantissa + 1):
        digits >>= 1
        place += 1
    hidden = 1 << layout.mantissa
    code = digits if digits < hidden else ((place - layout.least_exponent + 1) << layout.mantissa) + digits - hidden
    if code > layout.greatest_code:
        code = layout.greatest_code if saturate else layout.overflow_code
    return sign | code


def _integer_code(value: Fraction | float, layout: Layout) -> int:
    if isinstance(value, int):
        return value % (1 << layout.bits)
    least = -(1 << (layout.bits - 1)) if layout.signed else 0
    greatest = (1 << layout.mantissa) - 1
    if isinstance(value, float) and math.isnan(value):
        return 0
    if isinstance(value, float) and math.isinf(value):
        return (greatest if value > 0 else least) % (1 << layout.bits)
    return min(max(math.trunc(value), least), greatest) % (1 << layout.bits)


def convert_codes(codes: Codes, source: object, target: object, *, saturate: bool = False) -> Codes:
    """Convert an array of codes (uint64) between any two formats of `LAYOUTS`; returns codes (uint64)."""
    kind, wanted = layout_of(source), layout_of(target)
    if kind.exponent:
        negative, digits, place, infinite, invalid = _unpack_floats(codes, kind)
    else:
        negative = (codes & _word(kind.sign)) != 0 if kind.signed else np.zeros(codes.shape, bool)
        mask = _word((1 << kind.bits) - 1)
        digits = np.where(negative, (~codes + _word(1)) & mask, codes)
        place = np.zeros(codes.shape, np.int64)
        infinite = invalid = np.zeros(codes.shape, bool)
    if not wanted.exponent:
        if not kind.exponent:
            value = np.where(negative, ~digits + _word(1), digits)
            return value & _word((1 << wanted.bits) - 1)
        return _truncated(negative, digits, place, infinite, invalid, wanted)
    result = _rounded(digits, place, wanted)
    finite_overflow = result > _word(wanted.greatest_code)
    result[finite_overflow] = wanted.greatest_code if saturate else wanted.overflow_code
    result[infinite] = wanted.overflow_code
    result |= np.where(negative, _word(wanted.sign), _word(0))
    result[invalid] = wanted.sign - 1
    return result


def _unpack_floats(codes: Codes, layout: Layout) -> tuple[Any, Codes, Any, Any, Any]:
    magnitude = codes & _word(layout.sign - 1)
    field = (magnitude >> _word(layout.mantissa)).astype(np.int64)
    digits = magnitude & _word((1 << layout.mantissa) - 1)
    digits |= np.where(field > 0, _word(1 << layout.mantissa), _word(0))
    place = np.maximum(field, 1) - 1 + layout.least_exponent
    infinite = (magnitude == _word(layout.overflow_code)) if layout.has_inf else np.zeros(codes.shape, bool)
    invalid = (magnitude > _word(layout.greatest_code)) & ~infinite
    return (codes & _word(layout.sign)) != 0, digits, place, infinite, invalid


def _rounded(digits: Codes, place: Any, layout: Layout) -> Codes:
    """Codes, without sign, of digits * 2**place; beyond the greatest code where they overflow."""
    length = _bit_length(digits)
    # With the leading one in bit 63 every digit is to be dropped by a shift to the right.
    up = np.where(length > 0, 64 - length, 0)
    digits = digits << up.astype(np.uint64)
    place = place - up
    kept_place = np.maximum(place + 63 - layout.mantissa, layout.least_exponent)
    down = kept_place - place  # at least 63 - mantissa, so 11 or more
    shift = np.minimum(down, 63).astype(np.uint64)
    kept = digits >> shift
    rest = digits & ((_word(1) << shift) - _word(1))
    half = _word(1) << (shift - _word(1))
    up_one = (rest > half) | ((rest == half) & (kept & _word(1) == 1))
    # Shifts of 64 drop everything, bit 63 being the half; longer ones leave less than half.
    up_one = np.where(down == 64, digits > _word(1 << 63), np.where(down > 64, False, up_one))
    kept = np.where(down >= 64, _word(0), kept) + up_one.astype(np.uint64)
    field = kept_place - layout.least_exponent
    # A kept leading one counts as one step of the exponent field, and a carry into it does so by itself.
    code = np.minimum(field, 1 << 12).astype(np.uint64) * _word(1 << layout.mantissa) + kept
    return np.where(length == 0, _word(0), code)


def _truncated(negative: Any, digits: Codes, place: Any, infinite: Any, invalid: Any, layout: Layout) -> Codes:
    greatest = _word((1 << layout.mantissa) - 1)
    least = _word(1 << (layout.bits - 1) if layout.signed else 0)  # its magnitude
    whole = np.where(place <= -64, _word(0), digits >> np.clip(-place, 0, 63).astype(np.uint64))
    too_large = infinite | ((place > 0) & (_bit_length(digits) + place > 64) & (digits > 0))
    whole = np.where((place > 0) & ~too_large, digits << np.clip(place, 0, 63).astype(np.uint64), whole)
    limit = np.where(negative, least, greatest)
    whole = np.where(too_large | (whole > limit), limit, whole)
    value = np.where(negative, ~whole + _word(1), whole) & _word((1 << layout.bits) - 1)
    return np.where(invalid, _word(0), value)


def _bit_length(digits: Codes) -> Any:
    length = np.zeros(digits.shape, np.int64)
    rest = digits.copy()
    for step in (32, 16, 8, 4, 2, 1):
        high = rest >= _word(1 << step)
        length[high] += step
        rest = np.where(high, rest >> _word(step), rest)
    return length + (rest > 0)


def _word(value: int) -> np.uint64:
    return np.uint64(value)


def codes_of(array: np.ndarray[Any, Any]) -> Codes:
    """Return the codes of an array's cells as uint64."""
    flat = np.ascontiguousarray(array)
    return flat.view(f"u{flat.dtype.itemsize}").astype(np.uint64)


def cells_of(codes: Codes, dtype: Any) -> np.ndarray[Any, Any]:
    """Return the cells of numpy dtype `dtype` that have these codes."""
    dtype = np.dtype(dtype)
    return codes.astype(f"u{dtype.itemsize}").view(dtype)


def nan_codes(codes: Codes, prec: object) -> Mask:
    """Tell which codes are NaN."""
    layout = layout_of(prec)
    if not layout.exponent:
        return np.zeros(codes.shape, bool)
    infinity = layout.overflow_code if layout.has_inf else layout.greatest_code
    invalid: Mask = (codes & _word(layout.sign - 1)) > _word(infinity)
    return invalid


def same_codes(left: Codes, right: Codes, prec: object) -> Mask:
    """Tell where two arrays of codes agree bit for bit, any NaN agreeing with any NaN."""
    same: Mask = (left == right) | (nan_codes(left, prec) & nan_codes(right, prec))
    return same


def edge_codes(source: object, target: object) -> Codes:
    """Return the codes of a wide float `source` where rounding to a narrow `target` is decided, of both signs.

    Every finite target code, every midpoint of two neighbours, the point where overflow begins, and the source's
    neighbours of each of them; then the infinities, and NaNs with the lowest and the highest payloads.
    """
    wide, narrow = layout_of(source), layout_of(target)
    doubled = np.arange(2 * narrow.greatest_code + 2, dtype=np.uint64)  # even: a code; odd: the midpoint above it
    code, odd = doubled >> _word(1), doubled & _word(1)
    _, digits, place, _, _ = _unpack_floats(code, narrow)
    exact = _rounded(digits * _word(2) + odd, place - 1, wide)
    points = np.concatenate([exact[exact > 0] - _word(1), exact, exact + _word(1)])
    special = np.array([wide.overflow_code, wide.overflow_code + 1, wide.sign - 1], dtype=np.uint64)
    points = np.concatenate([points, special])
    return np.concatenate([points, points | _word(wide.sign)])
