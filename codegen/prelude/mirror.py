"""Every function of the prelude in NumPy, by its C name: the oracle of the C text and the interpreter's mathematics.

In and out: arrays in the format's numpy dtype (float16, ml_dtypes' bfloat16 and float8, bool_; never raw codes), any
shape, 0-d included. Results are bit for bit those of C on every target, NaN payloads aside; f64 transcendentals agree
within 2 ulp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from types import MappingProxyType

import numpy as np

from stagedtensor.codegen.prelude import conversion, mirror_arithmetic, mirror_random, mirror_transcendental
from stagedtensor.codegen.prelude.mirror_arithmetic import Array, Function
from stagedtensor.conversion import convert
from stagedtensor.precision import ALL, Prec, bf16, f16, f32, i64, u4x32, u64


def _quiet(function: Function) -> Callable[..., Array]:
    """Overflow, division by zero and invalid operations are results here, not events; inputs become arrays."""

    @wraps(function)
    def evaluate(*operands: Array) -> Array:
        with np.errstate(all="ignore"):
            return np.asarray(function(*(np.asarray(operand) for operand in operands)))

    return evaluate


def _converting(source: Prec, target: Prec, saturate: bool) -> Function:
    def run(x: Array) -> Array:
        return convert(x, target, source=source, saturate=saturate)

    return run


def _through(narrow: Prec) -> Function:
    """From f32 to a narrow format and back."""

    def run(x: Array) -> Array:
        return convert(convert(x, narrow, source=f32), f32, source=narrow)

    return run


def _f64_to_f32_odd(x: Array) -> Array:
    """To f32, an inexact value taking the neighbour whose last bit is set."""
    nearest = x.astype(np.float32)
    back = np.abs(nearest.astype(np.float64))
    bits = mirror_arithmetic.bits_f32(nearest)
    even = bits & np.uint32(1) == 0
    bits = bits + ((np.abs(x) > back) & even) - ((np.abs(x) < back) & even).astype(np.uint32)
    return mirror_arithmetic.from_bits_f32(bits)


def _integer_to_f64_odd(x: Array) -> Array:
    """To f64, from 2^53 up with the low 11 bits folded into the last one kept."""
    kind = x.dtype.type
    folded = (x & ~kind(0x7FF)) | ((x & kind(0x7FF)) != 0).astype(x.dtype) << kind(11)
    limit = kind(1 << 53)
    exact = x < limit if x.dtype.kind == "u" else (x < limit) & (x > -limit)
    return np.where(exact, x, folded).astype(np.float64)


def _conversions() -> dict[str, Function]:
    table: dict[str, Function] = {
        "st_f64_to_f32_odd": _f64_to_f32_odd,
        f"st_{i64}_to_f64_odd": _integer_to_f64_odd,
        f"st_{u64}_to_f64_odd": _integer_to_f64_odd,
        **{f"st_f32_through_{narrow}": _through(narrow) for narrow in (f16, bf16)},
    }
    formats = [prec for prec in ALL if prec is not u4x32]
    for source in formats:
        for target in formats:
            for saturate in (False, True):
                name = conversion(source, target, saturate)
                if name is not None and name.endswith("_sat") == saturate:
                    table[name] = _converting(source, target, saturate)
    return table


def _all() -> dict[str, Callable[..., Array]]:
    tables = (
        mirror_arithmetic.functions(),
        mirror_transcendental.functions(),
        mirror_random.functions(),
        _conversions(),
    )
    return {name: _quiet(function) for table in tables for name, function in table.items()}


MIRROR: Mapping[str, Callable[..., Array]] = MappingProxyType(_all())
"""The NumPy form of every function by its C name."""
