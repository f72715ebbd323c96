"""The I2_S layout of ternary weights: import only.

In: code bytes in one of the groupings that producers use, and a scale. Out: a BITNET_B1_58 value. The bytes do not tell
their grouping, so the caller names it.
"""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias

import numpy as np

from stagedtensor.block_formats import BITNET_B1_58, Bytes, byte_array
from stagedtensor.block_packing import pack_codes, unpack_codes
from stagedtensor.encoded import Encoded, finite_f32
from stagedtensor.errors import EncodingError
from stagedtensor.precision import f32
from stagedtensor.settings import is_integer

Grouping: TypeAlias = Literal[64, 128, "sequential"]
TRAILER_BYTES = 32
_BYTES_AT_ONCE = 1 << 18
"""Codes that are unpacked at a time; a whole number of groups."""


def import_i2_s(
    data: Any, shape: tuple[int, ...] | list[int], grouping: Grouping, scale: float | None = None
) -> Encoded:
    """Read I2_S bytes as BITNET_B1_58.

    ``grouping``: with g = 64 or 128, a group of g elements lies in g/4 bytes, four runs of g/4 elements from the
    highest two bits down; ``"sequential"`` has the first element in the lowest bits. ``scale`` defaults to the first
    f32 of the 32-byte trailer behind the codes. Raises EncodingError where size, scale or a code is wrong.
    """
    if grouping not in (64, 128, "sequential"):
        raise EncodingError(
            f"I2_S: expected the grouping 64, 128 or 'sequential', got {grouping!r}; its bytes do not tell"
        )
    raw = byte_array(data)
    if not all(is_integer(extent, 1) for extent in shape):
        raise EncodingError(f"I2_S: expected positive extents, got the shape {shape!r}")
    count = math.prod(map(int, shape))
    step = 4 if grouping == "sequential" else grouping
    if count % step or count < 1:
        raise EncodingError(f"I2_S: {count} elements (shape {list(shape)}) are no whole number of groups of {step}")
    if raw.dtype != np.uint8 or raw.size not in (count // 4, count // 4 + TRAILER_BYTES):
        raise EncodingError(
            f"I2_S of shape {list(shape)} takes {count // 4} code bytes, or {TRAILER_BYTES} more with a trailer, "
            f"got {raw.size} of {raw.dtype}"
        )
    raw = np.ascontiguousarray(raw).reshape(-1)
    codes, trailer = raw[: count // 4], raw[count // 4 :]
    if scale is None:
        if not trailer.size:
            raise EncodingError("I2_S: no scale given, and no 32-byte trailer behind the codes that would hold it")
        scale = float(trailer[:4].view("<f4")[0])
    payload = codes if grouping == "sequential" else _in_sequence(codes, grouping)
    number = np.array(finite_f32(scale, BITNET_B1_58), "<f4")
    return Encoded(shape, f32, BITNET_B1_58, payload.tobytes() + number.tobytes())


def _in_sequence(codes: Bytes, group: int) -> Bytes:
    """Repack groups: bits 7:6 of the bytes of a group are its first quarter, bits 1:0 its last."""
    moved = np.empty_like(codes)
    for start in range(0, codes.size, _BYTES_AT_ONCE):
        four = unpack_codes(codes[start : start + _BYTES_AT_ONCE]).reshape(-1, group // 4, 4)
        turned = np.ascontiguousarray(four[:, :, ::-1].transpose(0, 2, 1)).reshape(-1)
        moved[start : start + _BYTES_AT_ONCE] = pack_codes(turned)
    return moved
