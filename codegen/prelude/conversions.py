"""Which C function converts one storage format into another, and the text of those that are chains of codecs.

In: source and target format, saturating or not. Out: a function name (or None where a plain C cast is right) and, for
all pairs that ``codecs.h`` does not spell out, sections. Every conversion rounds the exact value once: on the way to a
narrow format a wider source passes through rounding to odd. The codecs themselves are in ``codecs.h``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from stagedtensor.codegen.prelude.sections import Section
from stagedtensor.errors import InternalError
from stagedtensor.precision import ALL, Prec, bf16, bool_, f8e4m3, f8e5m2, f16, f32, f64, i64, precision, u4x32, u64

_WIDE_FLOATS = (f64, f32)
_MAGNITUDE_MASKS = {f16: "0x7fffu", f8e5m2: "0x7fu", f8e4m3: "0x7fu"}


def _can_overflow(source: Prec, target: Prec) -> bool:
    return target.is_float and source.max_finite > target.max_finite


def conversion(src: Prec | str, dst: Prec | str, saturate: bool = False) -> str | None:
    """Return the name of the C function from cells of `src` to cells of `dst`; None where ``(T)x`` is right.

    `saturate` matters for float targets that the source can overflow; elsewhere the plain name is returned. f16 and
    bf16 cells are uint16_t, fp8 and bool cells uint8_t. Raises InternalError for u4x32, which converts to nothing.
    """
    source, target = precision(src), precision(dst)
    if u4x32 in (source, target):
        raise InternalError("counter state (u4x32) has no conversions")
    saturating = saturate and _can_overflow(source, target)
    if _is_plain_cast(source, target) and not saturating:
        return None
    return f"st_{source.name}_to_{target.name}{'_sat' if saturating else ''}"


def round_trip(through: Prec) -> str | None:
    """Return the name of the C function that rounds a float to `through` and widens it again, None where there is none."""
    return f"st_f32_through_{through.name}" if through in (f16, bf16) else None


def _is_plain_cast(source: Prec, target: Prec) -> bool:
    if source is target:
        return True
    if target is bool_ or (source is f64 and target is f32):
        return False
    whole_source = source.is_integer or source is bool_
    return ((whole_source or source in _WIDE_FLOATS) and target in _WIDE_FLOATS) or (whole_source and target.is_integer)


def _to_f32(source: Prec) -> tuple[str, tuple[str, ...]]:
    """The expression that brings `x` to a float without loss, or rounded to odd; and the functions it calls."""
    if source is f32:
        return "x", ()
    if source.is_narrow:
        name = f"st_{source.name}_to_f32"
        return f"{name}(x)", (name,)
    if source is f64:
        return "st_f64_to_f32_odd(x)", ("st_f64_to_f32_odd",)
    if source in (i64, u64):
        widen = f"st_{source.name}_to_f64_odd"
        return f"st_f64_to_f32_odd({widen}(x))", ("st_f64_to_f32_odd", widen)
    if source.bits == 32:
        return "st_f64_to_f32_odd((double)x)", ("st_f64_to_f32_odd",)
    return "(float)x", ()


def _remark(source: Prec, target: Prec, saturating: bool) -> str:
    if target is bool_:
        return "1 unless x is a zero; NaN gives 1."
    if not target.is_float:
        return "Truncate toward zero; beyond the range saturate; NaN gives 0."
    if target is f64 or (source.is_float and source.mantissa_bits <= target.mantissa_bits):
        remark = "Exact where the range allows." if _can_overflow(source, target) else "Exact."
    else:
        remark = "Rounded once, to nearest, ties to even."
    return remark + (" A finite number beyond the range becomes the largest one." if saturating else "")


def _body(source: Prec, target: Prec, saturating: bool) -> tuple[str, tuple[str, ...]]:
    """The statements of the function after its opening brace, and the functions it calls."""
    if target is bool_:
        if source.is_narrow:
            mask = _MAGNITUDE_MASKS.get(source, "0x7fffu")
            return f"return (uint8_t)((x & {mask}) != 0u);", ()
        return "return (uint8_t)(x != 0);", ()
    if target is f64:
        widened, needs = _to_f32(source)
        return f"return (double){widened};", needs
    if target is f32:
        raise InternalError(f"{source} to f32 is spelt out in codecs.h")
    if target.is_float:
        widened, needs = _to_f32(source)
        last = f"st_f32_to_{target.name}{'_sat' if saturating else ''}"
        return f"return {last}({widened});", (*needs, last)
    if source.is_narrow:
        widened, needs = _to_f32(source)
        last = f"st_f32_to_{target.name}"
        return f"return {last}({widened});", (*needs, last)
    # A clamp at the ends of the range and truncation commute; NaN, which the first comparison turns into the lower end,
    # is set apart last. In this order compilers keep the clamps free of branches.
    low, high = int(target.min_finite), int(target.max_finite)
    number = source.c_type
    clamped = (
        f"{number} above = x > ({number}){low} ? x : ({number}){low};\n"
        f"    {number} inside = above < ({number}){high} ? above : ({number}){high};\n"
        f"    int32_t whole = (int32_t)inside;\n"
        f"    return ({target.c_type})(x == x ? whole : 0);"
    )
    return clamped, ()


def _chains(spelt_out: frozenset[str]) -> Iterator[Section]:
    formats = [prec for prec in ALL if prec is not u4x32]
    for source in formats:
        for target in formats:
            for saturate in (False, True):
                name = conversion(source, target, saturate)
                if name is None or name in spelt_out or name.endswith("_sat") != saturate:
                    continue
                body, needs = _body(source, target, saturate)
                inner = f"\n    {body}\n" if "\n" in body else f" {body} "
                text = (
                    f"/* {_remark(source, target, saturate)} */\n"
                    f"ST_FN {target.c_type} {name}({source.c_type} x) {{{inner}}}"
                )
                yield Section(name=name, text=text, needs=needs)


@cache
def conversion_sections(spelt_out: frozenset[str]) -> tuple[Section, ...]:
    """Return a section for every conversion whose name is not in `spelt_out`."""
    return tuple(_chains(spelt_out))
