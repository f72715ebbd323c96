"""Values of the loop IR's scalar operations on NumPy arrays: constants, conversions, ``fma``, rows of the op table.

In: arrays (or NumPy scalars) of the argument types' ``numpy_dtype``. Out: an array of the result type. f32 and integer
results are exact bit for bit on every back end; what the prelude defines comes from its NumPy mirror. Everything here
expects to run under ``np.errstate(all="ignore")``: overflow, wrapping and NaN are results, not events.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from stagedtensor.codegen.loop_ir import Const
from stagedtensor.codegen.prelude.mirror import MIRROR
from stagedtensor.codegen.prelude.mirror_arithmetic import fma_f32, fma_f64
from stagedtensor.conversion import convert
from stagedtensor.errors import InternalError
from stagedtensor.op_table import OPS
from stagedtensor.precision import Prec, f32, f64

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

_PRELUDE_NAMES = {"floordiv": "floordiv", "mod": "floormod", "pow": "pow"}
"""What the prelude calls the ops whose meaning it defines, where the name is not the op's own."""

_INTEGRAL = ("floor", "ceil", "round", "trunc")
"""Ops that leave an integer as it is (NumPy would answer in f64)."""

_DOUBLE = struct.Struct("=d")
_BITS = struct.Struct("=q")


def constant(const: Const) -> Array:
    """Return a literal as a 0-d array of its type, rounded once."""
    return np.asarray(const.value, dtype=const.type.numpy_dtype)


def cast(value: Array, source: Prec, target: Prec, *, saturate: bool = False, flush: bool = False) -> Array:
    """Return ``value`` converted by the rules of the formats: one rounding, subnormals kept unless ``flush``."""
    if source is target and not flush:
        return value
    if source.is_narrow and target is f32 and not flush:
        return np.asarray(value).astype(np.float32)  # widening is exact, and this is its fastest form
    return convert(np.asarray(value), target, source=source, saturate=saturate, flush_subnormal=flush)


def operation(op: str, type_: Prec) -> Callable[..., Array]:
    """Return the function that computes an op of the table on arguments of ``type_``; its result has that type too."""
    if op == "fma" and type_.is_float:
        return lambda a, b, c: fma(a, b, c, type_)
    row = OPS[op]
    if row.prelude or op in _PRELUDE_NAMES:
        mirrored = MIRROR.get(f"st_{_PRELUDE_NAMES.get(op, op)}_{type_}")
        if mirrored is not None:
            return mirrored
        if type_ is f32:
            raise InternalError(f"the prelude's mirror lacks {op} for f32")
    dtype = type_.numpy_dtype
    function = row.numpy
    if op in _INTEGRAL and not type_.is_float:
        return lambda value: np.asarray(value)
    return lambda *args: np.asarray(function(*args), dtype=dtype)


def fma(a: Array, b: Array, c: Array, type_: Prec) -> Array:
    """Return a*b + c rounded once; f32 and f64."""
    if type_ is f32:
        if np.ndim(a) == np.ndim(b) == np.ndim(c) == 0:
            return _fma_of_scalars(float(a), float(b), float(c))
        return fma_f32(a, b, c)
    if type_ is f64:
        return fma_f64(a, b, c)
    raise InternalError(f"there is no fma on {type_}")


def _fma_of_scalars(a: float, b: float, c: float) -> Array:
    """The f32 fma on Python floats, ten times as fast: a chain over a whole vector is a loop of these."""
    product = a * b  # exact: 24 + 24 bits fit in 53
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)
    if error < 0.0 or error > 0.0:  # inexact, and neither infinite nor NaN
        (bits,) = _BITS.unpack(_DOUBLE.pack(total))
        if not bits & 1:  # to odd, so that the rounding to f32 is as if it were the first
            (total,) = _DOUBLE.unpack(_BITS.pack(bits + (1 if (error > 0.0) == (total > 0.0) else -1)))
    return np.asarray(total, np.float32)
