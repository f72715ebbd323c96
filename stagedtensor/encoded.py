"""``Encoded``: a weight matrix as the packed bytes of an encoding.

In: a shape ``[..., out, in]``, a logical precision, an encoding and bytes, which every construction validates. Out: a
read-only value that decodes (``numpy``), changes the order of its blocks (``prepack``) or its encoding (``repack_to``).
An encoding is not a precision: packed weights are logically f32. Files and devices are no concern of this module.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import Enum
from typing import Any

import numpy as np

from .block_formats import BITNET_B1_58, TQ2_0, Bytes, Encoding, TernaryPacked, byte_array, decode_blocks
from .block_packing import check_packable, code_three_block, non_finite_block, pack_rows, pack_ternary
from .conversion import convert
from .errors import EncodingError, PrecisionError
from .precision import Prec, f32, f64, precision
from .settings import is_integer

Array = np.ndarray[Any, Any]


class Order(Enum):
    """Where block b of row o lies: after the blocks of its row, or after block b of the row before."""

    ROW_MAJOR = "row major"
    INPUT_BLOCK_MAJOR = "input block major"


ROW_MAJOR = Order.ROW_MAJOR
INPUT_BLOCK_MAJOR = Order.INPUT_BLOCK_MAJOR


class Encoded:
    """A weight ``[..., out, in]`` of logical precision ``prec`` in packed bytes; a vector is one row.

    ``data`` (bytes or a uint8 array) is kept uncopied where it is read-only and contiguous. ``scale`` is the scale of a
    TernaryPacked value and belongs to no other encoding. Raises EncodingError where size, extents, scales or codes are
    not those of the encoding, naming the block.
    """

    __slots__ = ("__weakref__", "_fixed", "data", "encoding", "order", "prec", "scale", "shape")
    __array_ufunc__ = None  # never an operand of NumPy by accident: decode it, or put it into a graph

    def __init__(
        self,
        shape: tuple[int, ...] | list[int],
        prec: Any,
        encoding: Encoding,
        data: Any,
        order: Order = ROW_MAJOR,
        scale: float | None = None,
    ) -> None:
        self.shape = _extents(shape)
        self.prec: Prec = precision(prec)
        self.encoding = encoding
        self.order = order
        self.data: Bytes = _read_only(data)
        self.scale = None if scale is None else finite_f32(scale, encoding)
        self._check()
        self._fixed = True

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(self, "_fixed"):  # what was checked stays: a shape that does not fit the bytes would read past them
            raise EncodingError(
                f"an encoded weight is fixed; its {name} cannot be set: make another Encoded, or repack_to"
            )
        super().__setattr__(name, value)

    def __reduce__(self) -> Any:
        return Encoded, (self.shape, self.prec.name, self.encoding, self.data, self.order, self.scale)

    # -- facts ----------------------------------------------------------------------------------------------------
    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def rows(self) -> int:
        """The number of rows: all axes but the last, folded."""
        return self.size // self.shape[-1]

    @property
    def row_blocks(self) -> int:
        """The number of blocks along a row."""
        return self.shape[-1] // self.encoding.elements

    @property
    def nbytes(self) -> int:
        """The packed bytes."""
        return self.data.size

    def __repr__(self) -> str:
        order = "" if self.order is ROW_MAJOR else f", {self.order.value}"
        return f"<encoded {list(self.shape)} {self.prec} as {self.encoding}, {self.nbytes} bytes{order}>"

    # -- validation -----------------------------------------------------------------------------------------------
    def _check(self) -> None:
        encoding = self.encoding
        if not isinstance(encoding, Encoding):
            raise EncodingError(f"expected an encoding of st.encodings, got {encoding!r}")
        if not isinstance(self.order, Order):
            raise EncodingError(f"{encoding}: expected an order (ROW_MAJOR or INPUT_BLOCK_MAJOR), got {self.order!r}")
        if encoding.dense and (self.prec.bytes != encoding.nbytes or self.prec.name == "u4x32"):
            raise EncodingError(
                f"{encoding} holds elements of {encoding.nbytes} bytes, {self.prec} has {self.prec.bytes}"
            )
        if not encoding.dense and self.prec is not f32:
            raise EncodingError(
                f"{encoding}: packed weights are logically f32, not {self.prec}; cast what they compute"
            )
        if self.order is not ROW_MAJOR and (encoding.whole or encoding.dense):
            raise EncodingError(f"{encoding} has one order, ROW_MAJOR; it cannot be {self.order.value}")
        if not encoding.whole and self.shape[-1] % encoding.elements:
            raise EncodingError(
                f"{encoding} has blocks of {encoding.elements} elements; rows of {self.shape[-1]} (shape {list(self.shape)}) "
                "are no whole number of blocks"
            )
        expected = encoding.size(self.size)
        if self.data.size != expected:
            raise EncodingError(f"{encoding} of shape {list(self.shape)} takes {expected} bytes, got {self.data.size}")
        if (self.scale is None) == (encoding is TernaryPacked):
            raise EncodingError(
                f"{encoding}: the field scale belongs to TernaryPacked, which needs it, and to no other encoding"
            )
        self._check_values()

    def _check_values(self) -> None:
        encoding = self.encoding
        if encoding.whole:
            codes = self.codes
            bad = code_three_block(codes[:-1], 0, 1, 1)
            # the last byte may be padded: only the codes of elements count
            last = int(codes[-1]) & (1 << 2 * (self.size - 4 * (codes.size - 1))) - 1
            if bad is None and last & last >> 1 & 0x55:
                bad = codes.size - 1
            if bad is not None:
                raise EncodingError(
                    f"{encoding}: byte {bad} (elements from {4 * bad}) holds code 3, which means no value"
                )
            finite_f32(self.tensor_scale, encoding)
        elif not encoding.dense:
            bad = non_finite_block(encoding, self.data)
            if bad is not None:
                raise EncodingError(f"{encoding}: {self._block(bad)} has a scale that is infinite or NaN")
            bad = code_three_block(self.data, 0, 64, TQ2_0.nbytes) if encoding is TQ2_0 else None
            if bad is not None:
                raise EncodingError(f"{encoding}: {self._block(bad)} holds code 3, which means no value")

    def _block(self, number: int) -> str:
        if self.order is ROW_MAJOR:
            row, block = divmod(number, self.row_blocks)
        else:
            block, row = divmod(number, self.rows)
        return f"block {number} (row {row}, block {block} of it)"

    # -- parts ----------------------------------------------------------------------------------------------------
    @property
    def codes(self) -> Bytes:
        """The bytes of 2-bit codes of a whole-tensor encoding."""
        return self.data[: self.data.size - self.encoding.scale_bytes]

    @property
    def tensor_scale(self) -> np.float32:
        """The scale of a whole-tensor encoding."""
        if self.encoding.scale_bytes:
            return np.float32(np.frombuffer(self.data[-4:].tobytes(), "<f4")[0])
        return np.float32(1 if self.scale is None else self.scale)

    @property
    def memory(self) -> Bytes:
        """The bytes as devices hold them: whole-tensor codes filled up to words, then their scale."""
        if not self.encoding.whole:
            return self.data
        fill = np.zeros(-self.codes.size % 4, np.uint8)
        return np.concatenate((self.codes, fill, np.array([self.tensor_scale], "<f4").view(np.uint8)))

    @property
    def memory_bytes(self) -> int:
        """The size of ``memory``."""
        return (self.codes.size + 3) // 4 * 4 + 4 if self.encoding.whole else self.data.size

    # -- conversions ----------------------------------------------------------------------------------------------
    def numpy(self) -> Array:
        """Return the matrix: f32 for packed encodings (these bits exactly), the own precision for dense ones."""
        if self.encoding.dense:
            return self.data.view(self.prec.numpy_dtype).reshape(self.shape)
        flat = decode_blocks(
            self.encoding, self.prepack(ROW_MAJOR).data, count=self.size, scale=float(self.tensor_scale)
        )
        return flat.reshape(self.shape)

    def prepack(self, order: Order) -> Encoded:
        """Return the same matrix with its blocks in ``order``: a copy, or this value where nothing changes."""
        if order is self.order:
            return self
        blocks = (self.rows, self.row_blocks) if self.order is ROW_MAJOR else (self.row_blocks, self.rows)
        if self.encoding.whole or self.encoding.dense:
            raise EncodingError(f"{self.encoding} has one order, ROW_MAJOR; it cannot be {order.value}")
        moved = self.data.reshape(*blocks, self.encoding.nbytes).swapaxes(0, 1)
        return Encoded(self.shape, self.prec, self.encoding, moved.tobytes(), order)

    def repack_to(self, encoding: Encoding, *, prec: Any = None, lossy: bool = False) -> Encoded:
        """Return the matrix in another encoding; this value where the encoding stays.

        To ``Dense(4)`` it is decoded, bit for bit. ``Dense(8)`` (f64) and ``Dense(2)`` (f16 or bf16, one rounding) need
        ``prec``. A dense value is quantized as ``pack`` does; one packed form becomes another only with ``lossy=True``,
        but the two ternary forms exchange their scale freely. Raises EncodingError.
        """
        ternary = (BITNET_B1_58, TernaryPacked)
        if not isinstance(encoding, Encoding):
            raise EncodingError(f"repack_to: expected an encoding of st.encodings, got {encoding!r}")
        if encoding == self.encoding and prec is None:
            return self
        if self.encoding in ternary and encoding in ternary:
            return _ternary(self.shape, encoding, self.codes, self.tensor_scale)
        if encoding.dense:
            return self._dense(encoding, prec)
        if prec is not None:
            raise EncodingError(f"repack_to({encoding}): prec belongs to dense encodings")
        if not self.encoding.dense and not lossy:
            raise EncodingError(
                f"repack_to: {self.encoding} to {encoding} rounds the weights once more; pass lossy=True to allow it"
            )
        return pack(self.numpy(), encoding)

    def _dense(self, encoding: Encoding, prec: Any) -> Encoded:
        if prec is None and encoding.nbytes != 4:
            raise EncodingError(f"repack_to({encoding}) needs prec=: which format of {encoding.nbytes} bytes")
        format_ = f32 if prec is None else precision(prec)
        if format_.bytes != encoding.nbytes or not (format_.is_float or self.encoding.dense):
            raise EncodingError(f"repack_to({encoding}): {format_} is no float format of {encoding.nbytes} bytes")
        if self.encoding.dense and format_ is self.prec:
            return self
        values = self.numpy()
        if format_ is not self.prec:
            values = values.astype(np.float64) if format_ is f64 and self.prec is f32 else convert(values, format_)
        return Encoded(self.shape, format_, encoding, np.ascontiguousarray(values).tobytes())


def pack(array: Any, encoding: Encoding, *, prec: Any = None) -> Encoded:
    """Encode an array ``[..., out, in]``; computes in f32 and refuses NaN, infinities and scales that overflow.

    ``prec`` (default: the array's own) is the format of a dense encoding. Raises EncodingError.
    """
    if not isinstance(encoding, Encoding):
        raise EncodingError(f"pack: expected an encoding of st.encodings, got {encoding!r}")
    try:
        values = np.asarray(array)
        own = precision(values.dtype)
    except PrecisionError as error:
        raise EncodingError(f"pack to {encoding}: {error}") from None
    if values.ndim == 0:
        raise EncodingError(f"pack to {encoding}: expected an array with at least one axis, got a single number")
    if encoding.dense:
        format_ = own if prec is None else precision(prec)
        cells = values if format_ is own else convert(values, format_)
        return Encoded(values.shape, format_, encoding, np.ascontiguousarray(cells).tobytes())
    if not own.is_float:
        raise EncodingError(f"pack to {encoding}: expected floats, got {own}")
    values = convert(values, f32)
    check_packable(values, encoding)
    if encoding.whole:
        return _ternary(values.shape, encoding, *pack_ternary(values))
    return Encoded(values.shape, f32, encoding, pack_rows(values, encoding).tobytes())


def _ternary(shape: tuple[int, ...], encoding: Encoding, codes: Bytes, scale: np.float32) -> Encoded:
    if encoding is TernaryPacked:
        return Encoded(shape, f32, encoding, codes.tobytes(), scale=float(scale))
    return Encoded(shape, f32, encoding, codes.tobytes() + np.array(scale, "<f4").tobytes())


def _extents(shape: Any) -> tuple[int, ...]:
    extents = tuple(shape) if isinstance(shape, Iterable) else ()
    whole = all(is_integer(size) for size in extents)
    if not extents or not whole or min(extents) < 1:
        raise EncodingError(f"expected a shape of at least one axis with extents of at least 1, got {shape!r}")
    return tuple(int(size) for size in extents)


def _read_only(data: Any) -> Bytes:
    """The bytes as a read-only flat array; memory that others may write is copied."""
    raw = byte_array(data)
    if raw.dtype != np.uint8:
        raise EncodingError(f"expected packed bytes (uint8), got an array of {raw.dtype}")
    shared = not isinstance(data, bytes) and (raw.flags.writeable or isinstance(data, bytearray | memoryview))
    flat = np.array(raw, copy=True).reshape(-1) if shared else np.ascontiguousarray(raw).reshape(-1)
    flat = flat.view(np.ndarray)
    flat.flags.writeable = False
    return flat


def finite_f32(scale: Any, encoding: Encoding) -> float:
    """Return a tensor's scale rounded to f32; raises EncodingError where it is no finite number."""
    try:
        with np.errstate(over="ignore"):  # what overflows is refused below
            value = float(np.float32(scale))
    except (TypeError, ValueError):
        raise EncodingError(f"{encoding}: expected a number as the scale, got {scale!r}") from None
    if not math.isfinite(value):
        raise EncodingError(f"{encoding}: the scale is {value}; it must be finite")
    return value
