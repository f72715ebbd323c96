"""Reductions and contractions keep their partials wide and round once, whatever the schedule.

``Numerics(accumulate="storage")`` rounds at every step: the control that shows that the inputs can tell the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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
    different,
    run,
    runnable_targets,
)

STORAGE = st.Numerics(accumulate="storage")
Build = Callable[[], Program]


def everywhere(build: Build) -> list[Array]:
    """Run on every device and target, fused and not, with one and three threads; the bits agree."""
    settings = [
        UNFUSED,
        Setting(threads=1),
        Setting(threads=3),
        *(Setting(target=target) for target in runnable_targets()),
    ]
    first = run(build, REFERENCE)
    for setting in settings:
        for at, (cells, expected) in enumerate(zip(run(build, setting), first, strict=True)):
            assert_same_bits(cells, expected, f"result {at} on {setting}")
    return first


def numbers(cells: Array) -> Any:
    return cells.astype(np.float64).tolist()


def a1() -> Program:
    i, k = np.indices((64, 64))
    left = (((64 * i + k) % 3) + 1) * 0.375
    right = (((64 * i + k) % 5) - 1.5) * 0.625
    a = st.placeholder("a", output=[64, 64], prec="bf16")
    b = st.placeholder("b", output=[64, 64], prec="bf16")
    return Program([(a, left), (b, right)], [st.einsum("ij;jk=>ik", a, b)])


def test_a1_matmul() -> None:
    (found,) = everywhere(a1)
    left, right = (np.asarray(values, np.float64) for _, values in run_feeds(a1))
    assert_same_bits(found, (left @ right).astype(st.bf16.numpy_dtype), "the f64 product rounded once")
    assert found.astype(np.float64).sum() == 61323.6875
    (control,) = run(a1, Setting("reference", numerics=STORAGE))
    assert int(different(control, found).sum()) == 1391
    (compiled,) = run(a1, Setting(fusion=False, numerics=STORAGE))
    assert int(different(compiled, found).sum()) > 1000


def run_feeds(build: Build) -> Sequence[tuple[st.Tensor, Any]]:
    with st.Session():
        return build().feeds


def a2() -> Program:
    i, r, s = np.indices((4, 6, 6))
    x = st.placeholder("x", output=[4, 6, 6], prec="bf16")
    return Program([(x, (((36 * i + 6 * r + s) % 13) + 20) / 64)], [st.einsum("irs=>i", x)])


def test_a2_sum_over_two_axes() -> None:
    (found,) = everywhere(a2)
    assert numbers(found) == [14.375, 14.5, 14.6875, 14.8125]
    for device in ("reference", "cpu"):
        (control,) = run(a2, Setting(device, numerics=STORAGE))
        assert numbers(control) == [14.3125, 14.375, 14.625, 14.6875], device


def cell(prec: str, start: float, source: str, **others: tuple[Any, Any]) -> Build:
    """A program on one cell ``x``, with further tensors given as (shape, values)."""

    def build() -> Program:
        x = st.param("x", output=[1], prec=prec, trainable=False)
        given = {name: st.placeholder(name, output=list(shape), prec=prec) for name, (shape, _) in others.items()}
        feeds = [(x, [start]), *((given[name], values) for name, (_, values) in others.items())]
        return Program(feeds, [x], st.computation(source, x=x, **given))

    return build


ONE = ((1,), [1.0])
SUM = '~logic:"a => 0"'


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        pytest.param(cell("bf16", 256.0, "x =+ one; x =+ one", one=ONE), 256.0, id="A3 two assignments"),
        pytest.param(cell("bf16", 256.0, f"x =+ ones {SUM}", ones=((2,), [1.0, 1.0])), 258.0, id="A3 one reduction"),
        pytest.param(cell("bf16", 256.0, "x =: x - 0.5; x =: x - 0.5"), 256.0, id="A4 recurrence"),
        pytest.param(cell("bf16", 256.0, "x =: x + 1; x =: x *. 1; x =: x + 1"), 256.0, id="A4 three assignments"),
        pytest.param(cell("bf16", 256.0, "; ".join(["x =+ one"] * 5), one=ONE), 256.0, id="A5 five assignments"),
        pytest.param(cell("f16", 2048.0, f"x =+ ones {SUM}", ones=((8,), np.ones(8))), 2056.0, id="A6"),
    ],
)
def test_a3_to_a6_assignments_and_reductions(build: Build, expected: float) -> None:
    (found,) = everywhere(build)
    assert numbers(found) == [expected]


def test_a5_a_guarded_sum_of_five_ones() -> None:
    """A window of nine over five cells: what falls outside contributes nothing and narrows nothing."""

    def build() -> Program:
        ones = st.placeholder("ones", output=[5], prec="bf16")
        kernel = st.placeholder("kernel", output=[9], prec="bf16")
        x = st.param("x", output=[5], prec="bf16", trainable=False)
        comp = st.computation('x =+ ones * kernel ~logic:"o =+ k; k => o"', x=x, ones=ones, kernel=kernel)
        return Program([(x, np.full(5, 256.0)), (ones, np.ones(5)), (kernel, np.ones(9))], [x], comp)

    (found,) = everywhere(build)
    assert numbers(found) == [260.0] * 5  # 256 + 5 is 261, which rounds to 260


def test_a6_control() -> None:
    build = cell("f16", 2048.0, f"x =+ ones {SUM}", ones=((8,), np.ones(8)))
    for device in ("reference", "cpu"):
        (found,) = run(build, Setting(device, numerics=STORAGE))
        assert numbers(found) == [2048.0], device


def test_a7_tiles_add_without_narrowing() -> None:
    """144 products that sum to 9, one for each run of 16: tiled or not, 2057 rounds to 2056."""
    ones = np.zeros(144)
    ones[::16] = 1.0
    build = cell("f16", 2048.0, 'x =+ a * b ~logic:"k; k => 0"', a=((144,), ones), b=((144,), np.ones(144)))
    (found,) = everywhere(build)
    assert numbers(found) == [2056.0]
    (control,) = run(build, Setting("reference", numerics=STORAGE))
    assert numbers(control) == [2048.0]


def test_a7_in_a_matrix_product() -> None:
    """The same inside a contraction large enough to be tiled."""
    left, right = np.zeros((48, 144)), np.ones((144, 80))
    left[:, ::16] = 1.0

    def build() -> Program:
        a, b = st.placeholder("a", output=[48, 144], prec="f16"), st.placeholder("b", output=[144, 80], prec="f16")
        c = st.param("c", output=[48, 80], prec="f16", trainable=False)
        comp = st.computation('c =+ a * b ~logic:"i,k; k,j => i,j"', c=c, a=a, b=b)
        return Program([(a, left), (b, right), (c, np.full((48, 80), 2048.0))], [c], comp)

    (found,) = everywhere(build)
    assert set(numbers(found.reshape(-1))) == {2056.0}


A8 = {
    ("bf16", 128): ((33.25, 133.0), (32.75, 129.0)),
    ("f16", 1024): ((32.15625, 128.625), (32.09375, 128.125)),
}


@pytest.mark.parametrize(("prec", "divisor"), list(A8))
def test_a8_sums_over_lanes(prec: str, divisor: int) -> None:
    def build() -> Program:
        feeds, reads = [], []
        for count in (32, 128):
            x = st.placeholder(f"x{count}", output=[count], prec=prec)
            feeds.append((x, 1 + (np.arange(count) % 11) / divisor))
            reads.append(st.sum(x))
        return Program(feeds, reads)

    default, serial = A8[prec, divisor]
    assert tuple(float(found) for found in everywhere(build)) == default
    for device in ("reference", "cpu"):
        control = run(build, Setting(device, numerics=STORAGE))
        assert tuple(float(found) for found in control) == serial, device


@pytest.mark.parametrize("prec", ["f8e5m2", "f8e4m3"])
def test_sums_of_bytes_accumulate_wide(prec: str) -> None:
    def build() -> Program:
        x = st.placeholder("x", output=[3, 40], prec=prec)
        return Program([(x, np.full((3, 40), 0.25))], [st.sum(x, axis=1)])

    (found,) = everywhere(build)
    assert numbers(found) == [10.0] * 3
    (control,) = run(build, Setting("reference", numerics=STORAGE))
    assert max(numbers(control)) < 10.0


def test_integers_accumulate_modulo_their_width() -> None:
    cells = np.random.default_rng(3).integers(-(2**31), 2**31, (5, 400), dtype=np.int64).astype(np.int32)
    narrow = np.full((5, 400), 100, np.int8)

    def build() -> Program:
        x, y = st.placeholder("x", output=[5, 400], prec="i32"), st.placeholder("y", output=[5, 400], prec="i8")
        reads = [st.sum(x, axis=1), st.sum(y, axis=1), st.prod(x, axis=1), st.max(x, axis=0), st.argmax(x, axis=1)]
        return Program([(x, cells), (y, narrow)], reads)

    total, bytes_, product, greatest, where = everywhere(build)
    with np.errstate(over="ignore"):
        assert_same_bits(total, cells.sum(1, dtype=np.int32), "sum")
        assert_same_bits(product, np.multiply.reduce(cells, axis=1, dtype=np.int32), "product")
    assert bytes_.dtype == np.int32
    assert bytes_.tolist() == [40000] * 5
    assert greatest.tolist() == cells.max(0).tolist()
    assert where.tolist() == cells.argmax(1).tolist()


def test_fused_partials_stay_wide_between_kernels() -> None:
    """A bias and an activation join the contraction: the product still rounds once, to its own format."""
    rng = np.random.default_rng(9)
    left, right, bias = rng.standard_normal((33, 70)), rng.standard_normal((70, 41)), rng.standard_normal(41)

    def build(placement: str) -> Program:
        a, b = st.placeholder("a", output=[33, 70], prec="bf16"), st.placeholder("b", output=[70, 41], prec="bf16")
        c = st.placeholder("c", output=[41], prec="bf16")
        product = st.place(st.einsum("ij;jk=>ik", a, b), placement)
        return Program([(a, left), (b, right), (c, bias)], [st.relu(product + c)])

    fused = run(lambda: build("auto"), FUSED)[0]
    unfused = run(lambda: build("materialized"), UNFUSED)[0]
    dtype = st.bf16.numpy_dtype
    a, b, c = (values.astype(dtype).astype(np.float64) for values in (left, right, bias))
    once = (a @ b).astype(dtype)
    model = np.maximum((once + c.astype(dtype)).astype(np.float64), 0.0)
    for name, found in (("fused", fused), ("unfused", unfused)):
        gap = np.abs(found.astype(np.float64) - model)
        assert gap.max() <= 2.0**-7 * np.abs(model).max(), name
        assert (gap > 0).mean() < 0.01, name  # only where f32 and f64 sums round apart
