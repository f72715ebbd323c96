"""Block encodings of weights: one description each, from which every decoder is made.

A description says how many bytes a block has, where its scales lie, and which value element ``e`` of a block has,
written with ordinary operators over a :class:`Reader`. The host evaluates it with NumPy arrays (:func:`decode_blocks`),
code generation with expressions of the loop IR, so both have the same bits. Nothing here validates values or knows
shapes.

Integers are exact; each product, sum and difference of floats is one f32 operation with a rounding of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, TypeAlias

import numpy as np

from .errors import EncodingError

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
Value: TypeAlias = Any
"""An index, an integer or a float, as the reader at hand represents it; it takes the operators of Python numbers."""


class Reader(Protocol):
    """The bytes of one block (or of all blocks at once), read at offsets from its start."""

    def u8(self, offset: Value) -> Value:
        """Return an unsigned byte."""

    def i8(self, offset: Value) -> Value:
        """Return a signed byte."""

    def u16(self, place: Value) -> Value:
        """Return the unsigned 16-bit word at byte ``2 * place``."""

    def half(self, offset: int) -> Value:
        """Return an IEEE half, widened exactly to f32."""

    def scale(self) -> Value:
        """Return the f32 scale of a whole tensor."""

    def real(self, integer: Value) -> Value:
        """Return an integer as f32."""

    def where(self, condition: Value, then: Value, otherwise: Value) -> Value:
        """Choose between two values."""


Decode: TypeAlias = Callable[[Reader, Value], Value]


@dataclass(frozen=True)
class Encoding:
    """How blocks of elements lie in bytes.

    ``scales`` are the offsets of the halves that must be finite. A ``whole`` encoding has one block: all 2-bit codes of
    the tensor, then, where ``scale_bytes`` is 4, its f32 scale. ``quantizer`` says whether host code can make such
    blocks.
    """

    name: str
    elements: int
    nbytes: int
    decode: Decode | None = field(default=None, compare=False, repr=False)
    scales: tuple[int, ...] = ()
    quantizer: bool = False
    whole: bool = False
    scale_bytes: int = 0

    @property
    def dense(self) -> bool:
        """Whether the bytes are the elements themselves."""
        return self.decode is None

    def size(self, count: int) -> int:
        """Return the bytes of ``count`` elements, a whole number of blocks."""
        if self.whole:
            return -(-count // 4) + self.scale_bytes
        return count // self.elements * self.nbytes

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> Any:
        if globals().get(self.name) is self:
            return self.name  # copies and pickles of a known encoding are itself
        return Encoding, tuple(getattr(self, item.name) for item in fields(self))


# -- pieces -------------------------------------------------------------------------------------------------------


def _pick(block: Reader, at: Value, choices: Sequence[Value]) -> Value:
    """Return ``choices[at]``."""
    result = choices[-1]
    for number in reversed(range(len(choices) - 1)):
        result = block.where(at == number, choices[number], result)
    return result


def _nibble(block: Reader, offset: Value, high: Value) -> Value:
    byte = block.u8(offset)
    return block.where(high, byte // 16, byte % 16)


def _bit(block: Reader, byte: Value, at: Value) -> Value:
    return _pick(block, at, [byte // 2**number for number in range(8)]) % 2


def _bit_of_word(block: Reader, word: Value, at: Value) -> Value:
    """Move bit ``at`` of 16 to the top by a product with one constant per position: lanes do it side by side."""
    return word * _pick(block, at, [2 ** (15 - number) for number in range(16)]) // 2**15 % 2


def _two_bits(block: Reader, byte: Value, at: Value) -> Value:
    return _pick(block, at, [byte // 4**number for number in range(4)]) % 4


# -- blocks of 32 -------------------------------------------------------------------------------------------------


def _q4(block: Reader, e: Value, start: int) -> Value:
    return _nibble(block, e % 16 + start, e >= 16)


def _q5(block: Reader, e: Value, start: int) -> Value:
    """Four low bits as in the 4-bit formats; bit e of the four bytes before them is the fifth."""
    return _q4(block, e, start) + _bit_of_word(block, block.u16(e // 16 + (start // 2 - 2)), e % 16) * 16


def _q4_0(block: Reader, e: Value) -> Value:
    return block.half(0) * block.real(_q4(block, e, 2) - 8)


def _q4_1(block: Reader, e: Value) -> Value:
    return block.half(0) * block.real(_q4(block, e, 4)) + block.half(2)


def _q5_0(block: Reader, e: Value) -> Value:
    return block.half(0) * block.real(_q5(block, e, 6) - 16)


def _q5_1(block: Reader, e: Value) -> Value:
    return block.half(0) * block.real(_q5(block, e, 8)) + block.half(2)


def _q8_0(block: Reader, e: Value) -> Value:
    return block.real(block.i8(e + 2)) * block.half(0)


# -- blocks of 256 ------------------------------------------------------------------------------------------------


def _k_scales(block: Reader, s: Value) -> tuple[Value, Value]:
    """Scale and minimum of sub-block s: six bits each, in the 12 bytes from 4 on.

    The upper two bits of sub-blocks 4 to 7 lie above the six bits of sub-blocks 0 to 3.
    """
    low, low_min = block.u8(s % 4 + 4), block.u8(s % 4 + 8)
    both = block.u8(s % 4 + 12)
    late = s >= 4
    scale = block.where(late, both % 16 + low // 64 * 16, low % 64)
    minimum = block.where(late, both // 16 + low_min // 64 * 16, low_min % 64)
    return scale, minimum


def _k_value(block: Reader, q: Value, s: Value) -> Value:
    scale, minimum = _k_scales(block, s)
    step, least = block.half(0) * block.real(scale), block.half(2) * block.real(minimum)
    return step * block.real(q) - least


def _k_nibble(block: Reader, e: Value, start: int) -> Value:
    return _nibble(block, e // 64 * 32 + e % 32 + start, e // 32 % 2 == 1)


def _q4_k(block: Reader, e: Value) -> Value:
    return _k_value(block, _k_nibble(block, e, 16), e // 32)


def _q5_k(block: Reader, e: Value) -> Value:
    s = e // 32
    return _k_value(block, _k_nibble(block, e, 48) + _bit(block, block.u8(e % 32 + 16), s) * 16, s)


def _q6_k(block: Reader, e: Value) -> Value:
    half, within = e // 128, e % 128
    s, lane = within // 32, within % 32
    low = _nibble(block, half * 64 + lane + s % 2 * 32, s >= 2)
    high = _two_bits(block, block.u8(half * 32 + lane + 128), s)
    scale = block.i8(e // 16 + 192)
    return block.half(208) * block.real(scale) * block.real(low + high * 16 - 32)


def _tq1_0(block: Reader, e: Value) -> Value:
    """Five base-3 digits a byte, most significant first, as a fraction of 256."""
    early, middle = e < 160, e < 240
    offset = block.where(early, e % 32, block.where(middle, (e + 96) % 256 % 16 + 32, (e + 16) % 256 % 4 + 48))
    digit = block.where(early, e // 32, block.where(middle, (e + 96) % 256 // 16, (e + 16) % 256 // 4))
    byte = block.u8(offset)
    moved = _pick(block, digit, [byte * 3**number for number in range(5)]) % 256
    return block.half(52) * block.real(moved * 3 // 256 - 1)


def _tq2_0(block: Reader, e: Value) -> Value:
    byte = block.u8(e // 128 * 32 + e % 32)
    return block.half(64) * block.real(_two_bits(block, byte, e % 128 // 32) - 1)


# -- whole tensors ------------------------------------------------------------------------------------------------


def _ternary(block: Reader, e: Value) -> Value:
    return block.real(_two_bits(block, block.u8(e // 4), e % 4) - 1) * block.scale()


Q4_0 = Encoding("Q4_0", 32, 18, _q4_0, (0,), quantizer=True)
Q4_1 = Encoding("Q4_1", 32, 20, _q4_1, (0, 2), quantizer=True)
Q5_0 = Encoding("Q5_0", 32, 22, _q5_0, (0,), quantizer=True)
Q5_1 = Encoding("Q5_1", 32, 24, _q5_1, (0, 2), quantizer=True)
Q8_0 = Encoding("Q8_0", 32, 34, _q8_0, (0,), quantizer=True)
Q4_K = Encoding("Q4_K", 256, 144, _q4_k, (0, 2))
Q5_K = Encoding("Q5_K", 256, 176, _q5_k, (0, 2))
Q6_K = Encoding("Q6_K", 256, 210, _q6_k, (208,))
TQ1_0 = Encoding("TQ1_0", 256, 54, _tq1_0, (52,), quantizer=True)
TQ2_0 = Encoding("TQ2_0", 256, 66, _tq2_0, (64,), quantizer=True)
BITNET_B1_58 = Encoding("BITNET_B1_58", 1, 0, _ternary, quantizer=True, whole=True, scale_bytes=4)
TernaryPacked = Encoding("TernaryPacked", 1, 0, _ternary, quantizer=True, whole=True)

ROW_ENCODINGS: tuple[Encoding, ...] = (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, TQ1_0, TQ2_0)
PACKED_ENCODINGS: tuple[Encoding, ...] = (*ROW_ENCODINGS, BITNET_B1_58, TernaryPacked)


def Dense(nbytes: int) -> Encoding:  # noqa: N802
    """Return the encoding of plain elements of ``nbytes`` bytes each, little-endian."""
    if nbytes not in (1, 2, 4, 8):
        raise EncodingError(f"Dense({nbytes!r}): elements have 1, 2, 4 or 8 bytes")
    return Encoding(f"Dense({nbytes})", 1, nbytes, quantizer=True)


# -- the host's reader --------------------------------------------------------------------------------------------

_BLOCKS_AT_ONCE = 1 << 16


class _NumpyReader:
    """All blocks at once: axis 0 numbers blocks, axis 1 their elements."""

    def __init__(self, blocks: Bytes, scale: np.float32) -> None:
        self.blocks = blocks
        self._scale = scale

    def _at(self, offset: Any) -> Bytes:
        return self.blocks[:, np.atleast_1d(offset)]

    def u8(self, offset: Value) -> Value:
        return self._at(offset).astype(np.int32)

    def i8(self, offset: Value) -> Value:
        return self._at(offset).view(np.int8).astype(np.int32)

    def u16(self, place: Value) -> Value:
        words: np.ndarray[Any, Any] = np.ascontiguousarray(self.blocks).view("<u2")[:, np.atleast_1d(place)]
        return words.astype(np.int32)

    def half(self, offset: int) -> Value:
        return np.ascontiguousarray(self.blocks[:, offset : offset + 2]).view("<f2").astype(np.float32)

    def scale(self) -> Value:
        return self._scale

    def real(self, integer: Value) -> Value:
        return integer.astype(np.float32)

    def where(self, condition: Value, then: Value, otherwise: Value) -> Value:
        return np.where(condition, then, otherwise)


def byte_array(data: Any) -> np.ndarray[Any, Any]:
    """Return packed bytes as an array over the same memory, of uint8 unless ``data`` is an array of something else."""
    if not isinstance(data, bytes | bytearray | memoryview):
        return np.asarray(data)
    if isinstance(data, memoryview) and not data.c_contiguous:
        raise EncodingError("expected contiguous packed bytes, got a memoryview with gaps")
    return np.frombuffer(data, np.uint8)


def decode_blocks(
    encoding: Encoding, data: Any, *, count: int | None = None, scale: float = 1.0
) -> np.ndarray[Any, Any]:
    """Return the f32 values of whole blocks, flat; any bytes are accepted (2-bit code 3 decodes to +2).

    ``count`` (default: as many as there are) is the number of elements of a whole-tensor encoding; ``scale`` the
    scale of one that does not hold it. Raises EncodingError where the bytes are no whole number of blocks.
    """
    if not isinstance(encoding, Encoding):
        raise EncodingError(f"decode_blocks: expected an encoding of st.encodings, got {encoding!r}")
    raw = byte_array(data)
    if encoding.decode is None or raw.dtype != np.uint8:
        raise EncodingError(f"decode_blocks: expected bytes of a packed encoding, got {encoding} of {raw.dtype}")
    raw = np.ascontiguousarray(raw).reshape(-1)
    if encoding.whole:
        codes = raw.size - encoding.scale_bytes
        count = 4 * codes if count is None else count
        if codes < 0 or not 0 <= count <= 4 * codes:
            raise EncodingError(f"{encoding}: {raw.size} bytes do not hold {count} elements")
        factor = raw[codes:].view("<f4")[0] if encoding.scale_bytes else np.float32(scale)
        return _whole(encoding, raw[:codes], factor, count)
    if raw.size % encoding.nbytes:
        raise EncodingError(f"{encoding}: {raw.size} bytes are no whole number of blocks of {encoding.nbytes}")
    blocks = raw.reshape(-1, encoding.nbytes)
    if count is not None and count != blocks.shape[0] * encoding.elements:
        raise EncodingError(
            f"{encoding}: {raw.size} bytes hold {blocks.shape[0] * encoding.elements} elements in whole blocks, not {count}"
        )
    result = np.empty((blocks.shape[0], encoding.elements), np.float32)
    step = _BLOCKS_AT_ONCE // encoding.elements
    elements = np.arange(encoding.elements)
    for start in range(0, blocks.shape[0], step):
        result[start : start + step] = _decoded(encoding, blocks[start : start + step], elements, np.float32(1))
    return result.reshape(-1)


def _whole(encoding: Encoding, codes: Bytes, scale: Any, count: int) -> np.ndarray[Any, Any]:
    result = np.empty(count, np.float32)
    for start in range(0, count, _BLOCKS_AT_ONCE):
        stop = min(count, start + _BLOCKS_AT_ONCE)
        part = codes[start // 4 : -(-stop // 4)].reshape(1, -1)
        result[start:stop] = _decoded(encoding, part, np.arange(stop - start), np.float32(scale))[0]
    return result


def _decoded(encoding: Encoding, blocks: Bytes, elements: Any, scale: np.float32) -> np.ndarray[Any, Any]:
    assert encoding.decode is not None
    with np.errstate(over="ignore", invalid="ignore"):
        values: np.ndarray[Any, Any] = encoding.decode(_NumpyReader(blocks, scale), elements)
    return values
