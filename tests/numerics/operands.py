"""Operands for the op matrix: random codes, ordinary numbers and the pairs where something special happens."""

from __future__ import annotations

import numpy as np

from stagedtensor.precision import Prec
from tests.oracles.rounding import cells_of, layout_of

from .running import Array

CELLS = 1801  # leaves a tail after every vector width


def special_cells(prec: Prec) -> Array:
    """Return zeros, ones, extremes, subnormals, infinities and NaN of a float format, or the ends of an integer one."""
    layout = layout_of(prec)
    if layout.exponent:
        magnitudes = [0, 1, 2, (1 << layout.mantissa) - 1, 1 << layout.mantissa, layout.greatest_code]
        magnitudes += [layout.greatest_code - 1, layout.overflow_code, layout.sign - 1]
        codes = np.array([code | sign for code in magnitudes for sign in (0, layout.sign)], np.uint64)
        ordinary = np.array([0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 16.0, -0.5, -1.0, -1.5, -2.0, -2.5, -3.0])
        return np.concatenate([cells_of(codes, prec.numpy_dtype), ordinary.astype(prec.numpy_dtype)])
    values = [0, 1, 2, 3, 7, layout.sign - 1, layout.sign, (1 << layout.bits) - 1, (1 << layout.bits) - 2]
    return cells_of(np.array(values, np.uint64), prec.numpy_dtype)


def operands(prec: Prec, count: int, seed: int = 0, cells: int = CELLS) -> list[Array]:
    """Return `count` arrays: all pairs of special cells first, then ordinary numbers, then random codes."""
    rng = np.random.default_rng(seed)
    special = special_cells(prec)
    pairs = len(special) ** 2
    assert pairs < cells
    ordinary = (cells - pairs) // 2
    arrays = []
    for at in range(count):
        paired = (
            np.repeat(special, len(special)),
            np.tile(special, len(special)),
            rng.permutation(np.tile(special, len(special))),
        )
        drawn = rng.standard_normal(ordinary) * 4.0
        if not prec.is_float:
            drawn = np.clip(np.rint(drawn), 0 if not prec.is_signed else -100, 100)
        codes = rng.integers(0, 1 << min(prec.bits, 63), cells - pairs - ordinary, dtype=np.uint64)
        if prec.bits == 64:
            codes = codes * np.uint64(2) + rng.integers(0, 2, codes.size, dtype=np.uint64)
        arrays.append(
            np.concatenate(
                [
                    paired[at],
                    drawn.astype(np.float32 if prec.is_float else np.int64).astype(prec.numpy_dtype),
                    cells_of(codes, prec.numpy_dtype),
                ]
            )
        )
    return arrays
