"""Conversion of host arrays between formats, and what user data means before it reaches a node.

In: numpy arrays (of ml_dtypes for narrow floats) or anything array-like. Out: contiguous numpy arrays of the target's
``numpy_dtype``, each cell the exact source value rounded once, to nearest, ties to even. Nothing here depends on C's
undefined casts, on numpy's float-to-integer ``astype``, or on conversions that round through a middle format.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np

from stagedtensor.dlpack import narrow_from_dlpack
from stagedtensor.errors import PrecisionError
from stagedtensor.precision import Prec, bf16, bool_, f16, f32, f64, i64, precision, u4x32, u64
from stagedtensor.source import user_source

Array = np.ndarray[Any, np.dtype[Any]]

# Paths with several temporaries run over pieces that stay in the second-level cache.
_PIECE: Final = 1 << 14
# Integers of this magnitude and above are not all f64 values.
_F64_EXACT: Final = 1 << 53


def convert(
    array: Array,
    target: Prec,
    *,
    source: Prec | None = None,
    saturate: bool = False,
    flush_subnormal: bool = False,
) -> Array:
    """Return a fresh C-contiguous array of `array`'s shape holding its values in `target`.

    `source` tells how to read the cells where the dtype does not: an unsigned array of the format's ``storage_dtype``
    is taken as raw codes. `saturate` stores the greatest finite value where a *finite* value overflows a float target
    (an infinity stays one, or becomes NaN where the format has none). `flush_subnormal` stores +0 for every result
    whose magnitude is below the least normal number; integers have none, so it changes nothing there. A conversion to
    the same format keeps all bits.

    Float to integer truncates and saturates, NaN gives 0; integer to integer wraps; anything to bool is ``x != 0``.
    Raises PrecisionError for u4x32 with any other format, for `saturate` on a target that is no float, and where the
    dtype is not one of `source`.
    """
    cells, source = _as_source(array, source)
    if saturate and not target.is_float:
        raise PrecisionError(
            f"saturate=True is for float targets, got {target}\n  {user_source().quoted()}\n"
            "  conversions of floats to integers always saturate"
        )
    if source is target:
        result = cells.copy()
    elif source is u4x32 or target is u4x32:
        raise PrecisionError(
            f"cannot convert {source} to {target}: counter state converts to nothing else\n  {user_source().quoted()}"
        )
    else:
        with np.errstate(all="ignore"):  # overflow and NaN are results here, not events
            result = _convert_cells(cells, source, target, saturate)
    if flush_subnormal and target.is_float:
        _flush_in_place(result, target)
    return result.reshape(array.shape)


def to_codes(array: Array) -> Array:
    """Reinterpret narrow floats as the unsigned codes that generated code stores; other arrays are returned as given."""
    prec = precision(array.dtype)
    return array.view(prec.storage_dtype) if prec.is_narrow else array


def from_codes(codes: Array, prec: Prec) -> Array:
    """Reinterpret unsigned codes (or raw cells) as values of `prec` without copying; inverse of :func:`to_codes`."""
    return codes.view(prec.numpy_dtype)


def representable(value: float, prec: Prec) -> bool:
    """Tell whether the literal `value` may stand in a node of format `prec`.

    Floats: any finite magnitude up to the greatest finite one (it is rounded if need be), NaN, and infinities where the
    format has them. Integers and bool: exactly the integers of the range. u4x32: nothing.

    >>> representable(65504, precision("f16")), representable(65505, precision("f16")), representable(0.5, precision("i32"))
    (True, False, False)
    """
    if prec is u4x32:
        return False
    number: float | int = int(value) if isinstance(value, (int, np.integer, np.bool_)) else float(value)
    finite = isinstance(number, int) or math.isfinite(number)
    if prec.is_float:
        if finite:
            return abs(number) <= prec.max_finite
        return prec.has_inf or math.isnan(number)
    return finite and number == int(number) and prec.min_finite <= number <= prec.max_finite


def all_in_range(array: Array, target: Prec) -> bool:
    """Tell whether every cell of an integer or bool array is a value of the integer format `target`."""
    if array.size == 0 or array.dtype == np.bool_:
        return True
    return int(array.min()) >= target.min_finite and int(array.max()) <= target.max_finite


class Ingested(NamedTuple):
    """User data as a host array, with the format it brings; ``prec`` is None for literals, which bring none."""

    array: Array
    prec: Prec | None


def ingest(data: object) -> Ingested:
    """Read user data into a numpy array of native byte order and say which format it brings.

    Arrays, 0-d ones too, and whatever has ``__array__``, ``__dlpack__`` or ``__cuda_array_interface__`` bring their
    format; the array may share the caller's memory, so copy before keeping it. Python numbers, numpy scalars and
    (nested) lists or tuples are literals. Raises PrecisionError for complex numbers, strings, objects, ragged lists and
    integers that no 64-bit format holds.
    """
    if isinstance(data, np.ndarray):
        if isinstance(data, np.ma.MaskedArray) and np.ma.is_masked(data):
            raise PrecisionError(
                "this masked array has masked cells, which stand for no number\n"
                f"  {user_source().quoted()}\n  fill them first, e.g. values.filled(0.0)"
            )
        array, literal = np.asarray(data), False
    elif isinstance(data, (bool, int, float, np.generic, list, tuple)):
        array, literal = _literal_array(data), True
    else:
        array, literal = _foreign_array(data), False
    try:
        prec = precision(array.dtype)
    except PrecisionError as error:
        hint = "take the real part, or two arrays" if array.dtype.kind == "c" else "convert it with astype first"
        raise PrecisionError(f"{error}\n  data of dtype {array.dtype} cannot be held: {hint}") from None
    if not array.dtype.isnative:
        array = array.astype(prec.numpy_dtype)
    return Ingested(array, None if literal else prec)


def _literal_array(data: object) -> Array:
    try:
        array: Array = np.asarray(data)
    except ValueError as error:
        raise PrecisionError(
            f"expected a rectangular nested list of numbers: {error}\n  {user_source().quoted()}"
        ) from None
    is_sequence = isinstance(data, (list, tuple))
    if array.dtype == np.object_ or (is_sequence and array.dtype == np.float64 and array.size):
        # numpy turns integers that share no 64-bit format into objects or, losing digits, into f64.
        _check_literal_integers(np.asarray(data, dtype=np.object_))
        if array.dtype == np.object_:
            array = _object_numbers(array)
    return array


def _check_literal_integers(leaves: Array) -> None:
    for leaf in leaves.reshape(-1):
        if isinstance(leaf, int) and abs(leaf) > _F64_EXACT and not _is_f64(leaf):
            raise PrecisionError(
                f"no format holds the integer {leaf} together with the other numbers of its literal\n"
                f"  {user_source().quoted()}\n  write it as a float, or give an array of the wanted dtype"
            )


def _is_f64(number: int) -> bool:
    try:
        return int(float(number)) == number
    except OverflowError:  # beyond the greatest f64
        return False


def _object_numbers(array: Array) -> Array:
    if all(isinstance(leaf, (int, float)) for leaf in array.reshape(-1)):
        return array.astype(np.float64)
    return array


def _foreign_array(data: object) -> Array:
    """Read an object of another library through the protocols it offers."""
    copy_to_host = getattr(data, "get", None) or getattr(data, "cpu", None)
    if hasattr(type(data), "__cuda_array_interface__") and callable(copy_to_host):
        data = copy_to_host()
    readers: tuple[tuple[str, Callable[[Any], Any]], ...] = (
        ("__array__", np.asarray),
        ("__dlpack__", np.from_dlpack),
        ("__dlpack__", narrow_from_dlpack),
    )
    failure: Exception | None = None
    for protocol, read in readers:
        if hasattr(data, protocol):
            try:
                return np.asarray(read(data))
            except (TypeError, ValueError, RuntimeError, BufferError, AttributeError) as error:
                # quoted below if no protocol works; its frames would keep the other library's memory
                failure = error.with_traceback(None)
    what = f"numbers, nested lists or an array, got {type(data).__name__}"
    reason = f"\n  its own conversion failed: {failure}" if failure else ""
    raise PrecisionError(f"expected {what}\n  {user_source().quoted()}{reason}") from failure


def _as_source(array: Array, source: Prec | None) -> tuple[Array, Prec]:
    """Return the cells as a flat contiguous native array of the source format's numpy dtype, and that format."""
    if source is None:
        source = precision(array.dtype)
    name = array.dtype.name
    raw = name != source.numpy_dtype.name
    if raw and name != source.storage_dtype.name:
        accepted = dict.fromkeys((source.numpy_dtype.name, source.storage_dtype.name))
        raise PrecisionError(
            f"expected an array of {' or '.join(accepted)} as source {source}, got {name}\n  {user_source().quoted()}"
        )
    cells = np.ascontiguousarray(array).reshape(-1)
    if not cells.dtype.isnative:
        cells = cells.astype(cells.dtype.newbyteorder("="))
    if raw:
        cells = cells != 0 if source is bool_ else cells.view(source.numpy_dtype)
    return cells, source


def _convert_cells(cells: Array, source: Prec, target: Prec, saturate: bool) -> Array:
    if target is bool_:
        return np.not_equal(_magnitude_codes(cells, source), 0)
    if source.bits == 8 and (source.is_float or target.is_narrow):
        # One code of 256: convert the codes once and look every cell up.
        table = _code_table(source, target, saturate)
        return _in_pieces(cells.view(np.uint8), target, functools.partial(_look_up, table))
    if not source.is_float:
        if source is bool_:
            cells = cells.view(np.uint8)
        return _from_integers(cells, target, saturate) if target.is_float else cells.astype(target.numpy_dtype)
    saturate = saturate and source.max_finite > target.max_finite
    if source.is_narrow:
        cells, source = cells.astype(np.float32), f32
        if target is f32:
            return cells
    if not target.is_float:
        return _in_pieces(cells, target, functools.partial(_truncate, target=target))
    if source is f64 or saturate or target.bits == 8:
        return _in_pieces(cells, target, functools.partial(_round_piece, target=target, saturate=saturate))
    return cells.astype(target.numpy_dtype)


def _in_pieces(cells: Array, target: Prec, function: Callable[[Array], Array]) -> Array:
    result: Array = np.empty(cells.size, target.numpy_dtype)
    raw = result.view(target.storage_dtype)
    for start in range(0, cells.size, _PIECE):
        piece = slice(start, start + _PIECE)
        raw[piece] = function(cells[piece]).view(target.storage_dtype)
    return result


def _round_piece(cells: Array, target: Prec, saturate: bool) -> Array:
    """Round f32 or f64 cells once to a float target of the same size or narrower, or widen them."""
    if saturate:
        # Clamping first is the same as clamping the result: the greatest finite value is its own rounding.
        clamped = np.clip(cells, target.min_finite, target.max_finite)
        np.copyto(clamped, cells, where=np.isinf(cells))
        cells = clamped
    if cells.dtype == np.float64:
        # numpy rounds f64 to f32 and f16 once; ml_dtypes goes through f32, which must then be rounded to odd.
        if target in (f64, f32, f16):
            return cells.astype(target.numpy_dtype)
        cells = _round_to_odd(cells)
    if target.bits == 8:
        return _round_to_fp8(cells, target)
    return cells.astype(target.numpy_dtype)


def _round_to_odd(cells: Array) -> Array:
    """Narrow f64 to f32 so that any inexact value gets an odd last bit, which keeps a second rounding exact.

    f32 has more than two digits beyond bf16 and fp8, also among their subnormals, so rounding the odd value gives the
    rounding of the original one.
    """
    nearest = cells.astype(np.float32)
    widened = nearest.astype(np.float64)
    bits = nearest.view(np.uint32)
    bits -= np.abs(widened) > np.abs(cells)  # back to the neighbour toward zero; from inf to the greatest finite
    bits |= (widened != cells).astype(np.uint32)  # NaN differs from itself and stays NaN
    return nearest


def _round_to_fp8(cells: Array, target: Prec) -> Array:
    """Round f32 to fp8: cut to 16 bits with an odd last bit where inexact, then look the code up."""
    bits = cells.view(np.uint32)
    cut = (bits >> np.uint32(16)).astype(np.uint16)
    cut |= (bits & np.uint32(0xFFFF)) != 0
    return _look_up(_fp8_table(target), cut).view(target.numpy_dtype)


def _look_up(table: Array, codes: Array) -> Array:
    """Return the entry of every code; no code is out of range, and saying "clip" spares numpy the check for it."""
    return table.take(codes, mode="clip")


@functools.cache
def _fp8_table(target: Prec) -> Array:
    """The fp8 code of every bf16 code; ml_dtypes rounds correctly from this format."""
    with np.errstate(all="ignore"):
        return np.arange(1 << 16, dtype=np.uint16).view(bf16.numpy_dtype).astype(target.numpy_dtype).view(np.uint8)


@functools.cache
def _code_table(source: Prec, target: Prec, saturate: bool) -> Array:
    """Raw target cells for the 256 codes of an 8-bit format."""
    with np.errstate(all="ignore"):
        values = np.arange(256, dtype=np.uint8).view(source.numpy_dtype).astype(np.float32)
        table = values if target is f32 else _convert_cells(values, f32, target, saturate)
    return table.view(target.storage_dtype)


def _from_integers(cells: Array, target: Prec, saturate: bool) -> Array:
    """Round integers once to a float format."""
    if target in (f64, f32):  # one hardware rounding; no integer overflows either
        return cells.astype(target.numpy_dtype)
    if cells.dtype.itemsize <= 2:
        return _in_pieces(cells, target, lambda piece: _round_piece(piece.astype(np.float32), target, saturate))
    return _in_pieces(cells, target, lambda piece: _round_piece(_integers_to_f64(piece), target, saturate))


def _integers_to_f64(cells: Array) -> Array:
    """Widen integers to f64; those of more than 53 bits keep 42 or more, the last one odd if any lower bit was set.

    For targets of at most 11 digits only: the odd last digit makes the second rounding that of the integer.
    """
    if cells.dtype.itemsize < 8 or (cells.max() < _F64_EXACT and cells.min() > -_F64_EXACT):
        return cells.astype(np.float64)
    negative = cells < 0
    magnitude = cells.astype(np.uint64)
    np.negative(magnitude, out=magnitude, where=negative)  # modulo 2**64, so the least integer comes out right
    large = magnitude >= np.uint64(_F64_EXACT)
    if large.any():
        low = np.uint64((1 << 11) - 1)
        sticky = ((magnitude & low) != 0).astype(np.uint64) << np.uint64(11)
        magnitude = np.where(large, (magnitude & ~low) | sticky, magnitude)
    values = magnitude.astype(np.float64)
    np.negative(values, out=values, where=negative)
    return values


def _truncate(cells: Array, target: Prec) -> Array:
    """Truncate f32 or f64 toward zero, saturating; NaN gives 0."""
    if target.bits == 32:
        cells = cells.astype(np.float64)  # the bounds of 32-bit integers are not f32 values
    cells = np.where(np.isnan(cells), cells.dtype.type(0), cells)
    if target in (i64, u64):
        bound = cells.dtype.type(2.0**target.mantissa_bits)  # one above the greatest integer, which no float is
        inside = np.clip(cells, target.min_finite, np.nextafter(bound, cells.dtype.type(0)))
        result = inside.astype(target.numpy_dtype)
        result[cells >= bound] = target.max_finite
        return result
    return np.clip(cells, target.min_finite, target.max_finite).astype(target.numpy_dtype)


def _magnitude_codes(cells: Array, prec: Prec) -> Array:
    """The codes without their sign bit, as unsigned integers; for formats that are no floats the cells themselves."""
    if not prec.is_float:
        return cells
    codes = cells.view(f"u{prec.bytes}")
    magnitude: Array = codes & codes.dtype.type((1 << (prec.bits - 1)) - 1)
    return magnitude


def _flush_in_place(cells: Array, prec: Prec) -> None:
    least_normal = 1 << prec.mantissa_bits
    subnormal = _magnitude_codes(cells, prec) < least_normal
    np.copyto(cells.view(f"u{prec.bytes}"), 0, where=subnormal)
