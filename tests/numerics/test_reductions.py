"""Reductions around the vector widths and on special values: NaN wins, the first of equals is found."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import stagedtensor as st

from .running import (
    FUSED,
    REFERENCE,
    UNFUSED,
    Array,
    Program,
    Setting,
    assert_same_bits,
    assert_same_everywhere,
    run,
    runnable_targets,
)

SIZES = (1, 2, 7, 16, 17, 33, 65, 257)
ROWS = 5


def exact_cells(size: int, seed: int) -> Array:
    """Multiples of 1/8 whose sums are exact, with many ties."""
    return (np.random.default_rng(seed).integers(-12, 13, (ROWS, size)) / 8).astype(np.float32)


def special_cells(size: int, seed: int) -> Array:
    """Return exact cells with infinities in row 1, a NaN in row 2, NaN beside an infinity in row 3, -inf all over row
    4.
    """
    rng = np.random.default_rng(seed + 100)
    cells = exact_cells(size, seed)
    cells[1, rng.integers(size)] = np.inf
    cells[1, rng.integers(size)] = -np.inf
    cells[2, rng.integers(size)] = np.nan
    cells[3, rng.integers(0, size, 2)] = np.nan
    cells[3, rng.integers(size)] = np.inf
    cells[4] = -np.inf
    return cells


def first(cells: Array, sign: float) -> Array:
    """Return the positions of the first NaN, else of the first extremum, along the last axis."""
    found: Array = np.where(np.isnan(cells).any(-1), np.isnan(cells).argmax(-1), (sign * cells).argmax(-1))
    return found.astype(np.int32)


@pytest.mark.parametrize("prec", ["f32", *(pytest.param(prec, marks=pytest.mark.slow) for prec in ("bf16", "f64"))])
def test_rows_and_columns_of_many_sizes(prec: str) -> None:
    data = {size: special_cells(size, size) for size in SIZES}

    def build() -> Program:
        feeds, reads = [], []
        for size in SIZES:
            x = st.placeholder(f"x{size}", output=[ROWS, size], prec=prec)
            y = st.placeholder(f"y{size}", output=[size, ROWS], prec=prec)
            feeds += [(x, data[size]), (y, data[size].T)]
            for t, axis in ((x, 1), (y, 0)):
                reads += [st.sum(t, axis=axis), st.max(t, axis=axis), st.min(t, axis=axis)]
                reads += [st.argmax(t, axis=axis), st.argmin(t, axis=axis)]
        return Program(feeds, reads)

    others = [Setting(target=target) for target in runnable_targets()[:1]] if prec == "f32" else []
    with np.errstate(invalid="ignore"):
        found = iter(assert_same_everywhere(build, (REFERENCE, FUSED, *others)))
        for size in SIZES:
            for _ in range(2):
                cells = data[size].astype(np.float64)
                total, top, bottom, at_top, at_bottom = (next(found) for _ in range(5))
                expected = cells.sum(1).astype(np.float32).astype(total.dtype)
                assert_same_bits(total, expected, f"sum of {size}")
                np.testing.assert_array_equal(top.astype(np.float64), cells.max(1), err_msg=f"max of {size}")
                np.testing.assert_array_equal(bottom.astype(np.float64), cells.min(1), err_msg=f"min of {size}")
                assert at_top.tolist() == first(cells, 1.0).tolist(), f"argmax of {size}"
                assert at_bottom.tolist() == first(cells, -1.0).tolist(), f"argmin of {size}"


def test_the_sign_of_zero_in_reductions() -> None:
    """A sum of zeros that are all -0 is +0, for accumulation starts at +0; a product keeps signs."""
    zeros = np.full((3, 40), -0.0, np.float32)
    ones = np.ones((3, 40), np.float32)
    ones[:, 3] = -0.0

    def build() -> Program:
        z, o = st.placeholder("z", output=[3, 40], prec="f32"), st.placeholder("o", output=[3, 40], prec="f32")
        return Program([(z, zeros), (o, ones)], [st.sum(z, axis=1), st.prod(o, axis=1), st.max(z, axis=1), z + 0.0])

    total, product, top, shifted = assert_same_everywhere(build)
    assert_same_bits(total, np.zeros(3, np.float32), "sum")
    assert_same_bits(product, np.full(3, -0.0, np.float32), "product")
    assert_same_bits(top, np.full(3, -0.0, np.float32), "max")
    assert_same_bits(shifted, np.zeros((3, 40), np.float32), "-0 + 0")


@pytest.mark.parametrize("prec", ["f32", "bf16", "f16"])
def test_sums_and_contractions_stay_within_their_bound(prec: str) -> None:
    """Of any order: n u sum|x| before the store, with u of f32."""
    rng = np.random.default_rng(11)
    dtype = st.precision(prec).numpy_dtype
    left, right = (rng.standard_normal(shape).astype(np.float32).astype(dtype) for shape in ((37, 301), (301, 53)))

    def build() -> Program:
        a, b = st.placeholder("a", output=[37, 301], prec=prec), st.placeholder("b", output=[301, 53], prec=prec)
        product, total = st.einsum("ij;jk=>ik", a, b), st.sum(a, axis=1)
        for result in (product, total):
            st.specify(result, "f32")
        return Program([(a, left), (b, right)], [product, total])

    a, b = left.astype(np.float64), right.astype(np.float64)
    for setting in (REFERENCE, FUSED, UNFUSED, *(Setting(target=target) for target in runnable_targets())):
        product, total = run(build, setting)
        bound = 301 * 2.0**-24
        assert (np.abs(product - a @ b) <= bound * (np.abs(a) @ np.abs(b))).all(), setting
        assert (np.abs(total - a.sum(1)) <= bound * np.abs(a).sum(1)).all(), setting


def test_fusion_does_not_show_in_plain_reductions() -> None:
    """A sum alone, and one that shares its kernel with others or reads a virtual operand: one order of addition."""
    rng = np.random.default_rng(12)
    cells = rng.standard_normal((19, 203)).astype(np.float32)

    def alone(axis: int) -> Program:
        x = st.placeholder("x", output=[19, 203], prec="f32")
        return Program([(x, cells)], [st.sum(x, axis=axis)])

    def together(axis: int) -> Program:
        x = st.placeholder("x", output=[19, 203], prec="f32")
        y = x * 1.0
        total = st.sum(y, axis=axis)
        others = [
            st.max(x, axis=axis),
            st.argmax(y, axis=axis),
            st.sum(y * y, axis=axis),
            total * 2.0,
            st.softmax(x, axis=axis),
        ]
        return Program([(x, cells)], [total, *others])

    for axis in (0, 1):
        (expected,) = run(partial(alone, axis), FUSED)
        for setting in (FUSED, UNFUSED):
            found = run(partial(together, axis), setting)[0]
            assert_same_bits(found, expected, f"axis {axis} on {setting}")


@pytest.mark.parametrize("prec", ["f16", "f8e5m2", "f8e4m3"])
def test_saturation_acts_at_the_store_of_a_reduction(prec: str) -> None:
    largest = st.precision(prec).max_finite

    def build() -> Program:
        x = st.placeholder("x", output=[2, 33], prec="f32")
        clamped, plain = st.sum(x, axis=1), st.sum(x, axis=1)
        st.specify(clamped, prec, saturate=True)
        st.specify(plain, prec)
        return Program([(x, np.full((2, 33), 1e5))], [clamped, plain])

    clamped, plain = assert_same_everywhere(build)
    assert clamped.astype(np.float64).tolist() == [largest] * 2
    assert not np.isfinite(plain.astype(np.float64)).any()
