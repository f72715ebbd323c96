"""Quantizers: f32 matrices -> packed bytes of an encoding.

In: finite f32 values whose last axis is whole blocks. Out: bytes in row-major order of blocks. Row encodings are
quantized by the ``gguf`` package (the ``gguf`` extra, imported at the first use), ternary codes here. Values that no
block can hold are refused, never clamped in silence.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import numpy as np

from .block_formats import Bytes, Encoding
from .errors import EncodingError

Array = np.ndarray[Any, Any]

_BYTES_AT_ONCE = 1 << 18
"""Checks of whole files look at so much at a time, so that they need little memory of their own."""


def gguf_package(purpose: str) -> ModuleType:
    """Import the ``gguf`` package; raises EncodingError naming the extra where it is missing."""
    try:
        return importlib.import_module("gguf")
    except ImportError as error:
        raise EncodingError(
            f"{purpose} needs the gguf package ({error}); install it with pip install 'stagedtensor[gguf]'"
        ) from None


def pack_rows(values: Array, encoding: Encoding) -> Bytes:
    """Quantize finite f32 rows; raises EncodingError where a scale overflows a half."""
    gguf = gguf_package(f"packing to {encoding}")
    # a scale that overflows is refused below; the quantizer need not warn of it
    with np.errstate(all="ignore"):
        packed: Bytes = gguf.quantize(
            np.ascontiguousarray(values, np.float32).reshape(-1, values.shape[-1]),
            gguf.GGMLQuantizationType[encoding.name],
        )
    packed = np.ascontiguousarray(packed, np.uint8).reshape(-1)
    bad = non_finite_block(encoding, packed)
    if bad is not None:
        raise EncodingError(
            f"pack to {encoding}: block {bad} holds values too large for its half-precision scale "
            f"(greatest magnitude {float(np.abs(values.reshape(-1, encoding.elements)[bad]).max())})"
        )
    return packed


def pack_ternary(values: Array) -> tuple[Bytes, np.float32]:
    """Return 2-bit codes, four a byte, and their scale, the mean magnitude; a code is 0, 1 or 2 for -1, 0 or +1 times it."""
    flat = np.asarray(values, np.float32).reshape(-1)
    mean = np.abs(flat.astype(np.float64)).sum() / flat.size
    scale = np.float32(mean)
    codes = np.zeros(-(-flat.size // 4) * 4, np.uint8)
    if scale == 0:
        codes[: flat.size] = 1
    else:
        with np.errstate(over="ignore"):  # far above a subnormal scale: +-inf is clipped like any other
            codes[: flat.size] = (1 + np.clip(np.rint(flat / scale), -1, 1)).astype(np.uint8)
    return pack_codes(codes), scale


def pack_codes(codes: Bytes) -> Bytes:
    """Put 2-bit codes into bytes, the first in the lowest bits; their number is a multiple of 4."""
    quads = codes.reshape(-1, 4)
    packed = quads[:, 0] | quads[:, 1] << 2 | quads[:, 2] << 4 | quads[:, 3] << 6
    return packed.astype(np.uint8, copy=False)


def unpack_codes(data: Bytes) -> Bytes:
    """Return the 2-bit codes of bytes, the lowest bits first."""
    shifts = np.arange(0, 8, 2, dtype=np.uint8)
    return (data.reshape(-1, 1) >> shifts & 3).reshape(-1).astype(np.uint8, copy=False)


def check_packable(values: Array, encoding: Encoding) -> None:
    """Refuse encodings without a quantizer, NaN and infinities (naming the first cell), and rows of no whole blocks."""
    if not encoding.quantizer:
        raise EncodingError(
            f"{encoding} has no quantizer here; pack to one of Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, TQ1_0, TQ2_0, or quantize "
            "with another tool and load the GGUF file"
        )
    finite = np.isfinite(values)
    if not finite.all():
        where = tuple(int(at) for at in np.argwhere(~finite)[0])
        raise EncodingError(
            f"pack to {encoding}: cell {list(where)} is {values[where]}; only finite values can be packed"
        )
    if values.shape[-1] % encoding.elements:
        raise EncodingError(
            f"{encoding} has blocks of {encoding.elements} elements; rows of {values.shape[-1]} "
            f"(shape {list(values.shape)}) are no whole number of blocks"
        )


def non_finite_block(encoding: Encoding, data: Bytes) -> int | None:
    """Return the first block with a scale field that is infinite or NaN, in the order of ``data``."""
    blocks = data.reshape(-1, encoding.nbytes)
    bad = np.zeros(blocks.shape[0], np.bool_)
    for offset in encoding.scales:
        # the exponent lies in the upper byte of a little-endian half; all ones means infinity or NaN
        bad |= blocks[:, offset + 1] & 0x7C == 0x7C
    return int(np.argmax(bad)) if bad.any() else None


def code_three_block(data: Bytes, start: int, stop: int, nbytes: int) -> int | None:
    """Return the first block whose bytes ``start`` to ``stop`` hold a 2-bit code 3."""
    blocks = data.reshape(-1, nbytes)
    step = _BYTES_AT_ONCE // nbytes
    for first in range(0, blocks.shape[0], step):
        codes = blocks[first : first + step, start:stop]
        bad = (codes & codes >> 1 & 0x55 != 0).any(axis=1)
        if bad.any():
            return first + int(np.argmax(bad))
    return None
