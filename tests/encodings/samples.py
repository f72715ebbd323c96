"""Encoded matrices of random bytes with sensible scales, a few of them zero or subnormal."""

from __future__ import annotations

import numpy as np

from stagedtensor.encodings import TQ2_0, Encoded, Encoding, TernaryPacked
from stagedtensor.precision import f32

_SCALES = (-0.0, 0.0, 2.0**-24, -(2.0**-17))
"""Zeros and subnormals: scales of single blocks where there are enough of them."""


def sample(encoding: Encoding, rows: int, blocks: int, seed: int = 0) -> Encoded:
    """Return ``rows`` rows of ``blocks`` blocks (of 256 elements for encodings without blocks)."""
    rng = np.random.default_rng(seed)
    if encoding.dense:
        values = rng.normal(0, 1, (rows, 256 * blocks)).astype(np.float32)
        return Encoded(values.shape, f32, encoding, values.tobytes())
    if encoding.whole:
        shape = (rows, 256 * blocks)
        codes = rng.integers(0, 3, (rows * 64 * blocks, 4), dtype=np.uint8)
        data = (codes[:, 0] | codes[:, 1] << 2 | codes[:, 2] << 4 | codes[:, 3] << 6).tobytes()
        if encoding is TernaryPacked:
            return Encoded(shape, f32, encoding, data, scale=0.75)
        return Encoded(shape, f32, encoding, data + np.float32(0.75).tobytes())
    cells = rng.integers(0, 256, (rows * blocks, encoding.nbytes), dtype=np.uint8)
    if encoding is TQ2_0:
        cells[:, :64] &= 0xAA  # codes 0 and 2
        cells[:, :64] ^= rng.integers(0, 2, (rows * blocks, 64), dtype=np.uint8) & ~(cells[:, :64] >> 1) & 0x55
    for at, offset in enumerate(encoding.scales):
        scales = rng.uniform(0.5, 1, rows * blocks) * (-1) ** rng.integers(0, 2, rows * blocks) / 64
        if at == 0 and scales.size > len(_SCALES):
            scales[1 : 1 + len(_SCALES)] = _SCALES
        cells[:, offset : offset + 2] = (scales / (at + 1)).astype("<f2")[:, None].view(np.uint8)
    return Encoded((rows, encoding.elements * blocks), f32, encoding, cells.tobytes())
