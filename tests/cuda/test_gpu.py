"""On a real GPU: the numeric matrix, the templates and legs, and what only a device can show: streams, pool, graphs."""

from __future__ import annotations

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor.precision import Prec, precision
from stagedtensor.runtime.cuda import CudaDevice, is_available
from tests.cuda.test_row_tiles import attention, tiled
from tests.cuda.test_tensor_cores import CASES
from tests.cuda.test_tf32 import rounded
from tests.cuda.test_training import train
from tests.numerics.operands import operands
from tests.numerics.random_programs import random_program
from tests.numerics.running import REFERENCE, Setting, assert_same_bits, run
from tests.numerics.test_ops import FLOATS, INTEGERS, NAMES, close_or_same, outcomes
from tests.run import test_mixed_precision_legs as legs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not is_available(), reason="no GPU: these tests need CuPy, NVIDIA's driver and a device"),
]
GPU = Setting("cuda")


@pytest.mark.parametrize("name", [*FLOATS, *INTEGERS])
def test_every_op(name: str) -> None:
    prec = precision(name)
    args = operands(prec, 3, seed=1)
    expected, found = outcomes(prec, args, REFERENCE), outcomes(prec, args, GPU)
    for op in NAMES:
        close_or_same(op, prec, found[op], expected[op], f"{op} of {name}")


@pytest.mark.parametrize("seed", range(20))
def test_random_programs(seed: int) -> None:
    expected = run(lambda: random_program(seed, gradients=seed % 2 == 0), REFERENCE)
    for setting in (GPU, Setting("cuda", fusion=False)):
        found = run(lambda: random_program(seed, gradients=seed % 2 == 0), setting)
        for at, (cells, wanted) in enumerate(zip(found, expected, strict=True)):
            assert_same_bits(cells, wanted, f"seed {seed}, result {at} on {setting}")


@pytest.mark.parametrize("size", [1, 33, 1000, 70_000, 1_000_001])
def test_full_sums_are_the_same_in_every_run(size: int) -> None:
    values = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    with st.Session(), st.Context("cuda") as ctx:
        x = st.placeholder("x", output=[size])
        total = st.sum(x)
        routine = ctx.compile(total)
        ctx.set_values(x, values)
        found = []
        for _ in range(4):
            ctx.run(routine)
            found.append(float(ctx.get_values(total)))
    assert len(set(found)) == 1
    bound = 2 * np.log2(size + 1) * 2.0**-24 * np.abs(values).sum(dtype=np.float64) + size * 2.0**-40
    assert abs(found[0] - values.sum(dtype=np.float64)) <= max(bound, size * 2.0**-24)


@pytest.mark.parametrize("prec", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("size", [(33, 40, 50), (256, 512, 128), (1000, 1000, 1000)])
def test_products(prec: str, size: tuple[int, int, int]) -> None:
    m, n, k = size
    rng = np.random.default_rng(1)
    with st.Session(), st.Context("cuda") as ctx:
        a, b = (
            st.placeholder("a", output=[m], input=[k], prec=prec),
            st.placeholder("b", output=[k], input=[n], prec=prec),
        )
        c = st.cast(a, "f32") @ st.cast(b, "f32") if prec == "f32" else a @ b
        routine = ctx.compile(c)
        left, right = rng.standard_normal((m, k)), rng.standard_normal((k, n))
        ctx.set_values(a, left)
        ctx.set_values(b, right)
        ctx.run(routine)
        found = ctx.get_values(c).astype(np.float64)
        left, right = (ctx.get_values(t).astype(np.float64) for t in (a, b))
    unit = {"f16": 2.0**-11, "bf16": 2.0**-8, "f32": 2.0**-24}[prec]
    exact = left @ right
    bound = 2 * k * 2.0**-24 * (np.abs(left) @ np.abs(right)) + 2 * unit * np.abs(exact)
    assert np.all(np.abs(found - exact) <= bound + 1e-30)


@pytest.mark.parametrize(("left", "right", "size", "form", "out"), CASES)
def test_tensor_core_cases(left: Prec, right: Prec, size: tuple[int, int, int], form: str, out: Prec) -> None:
    m, n, k = size
    results = {}
    for device in ("reference", "cuda"):
        with st.Session(), st.Context(device) as ctx:
            a = st.placeholder("a", output=[m], input=[k], prec=left)
            b = st.placeholder("b", output=[k], input=[n], prec=right)
            c = st.cast(a @ b, out)
            rng = np.random.default_rng(2)
            ctx.set_values(a, rng.uniform(-2, 2, (m, k)))
            ctx.set_values(b, rng.uniform(-2, 2, (k, n)))
            ctx.run(ctx.compile(c))
            results[device] = ctx.get_values(c).astype(np.float64)
    np.testing.assert_allclose(
        results["cuda"], results["reference"], rtol=2.0**-2 if "f8" in str(left) else 2.0**-6, atol=0.1
    )


@pytest.mark.parametrize("size", [(33, 40, 50), (256, 512, 128), (64, 64, 4096)])
def test_tf32_products_and_deep_ones(size: tuple[int, int, int]) -> None:
    """Operands rounded to 10 bits of mantissa, sums in f32; the last size is cut along its depth."""
    m, n, k = size
    with st.Session(), st.Context("cuda", numerics=st.Numerics(tf32_matmul=True)) as ctx:
        a, b = st.placeholder("a", output=[m], input=[k]), st.placeholder("b", output=[k], input=[n])
        c = a @ b
        routine = ctx.compile(c)
        assert "tf32" in routine.kernels[0].path
        rng = np.random.default_rng(3)
        left, right = (rng.standard_normal(shape).astype(np.float32) for shape in ((m, k), (k, n)))
        ctx.set_values(a, left)
        ctx.set_values(b, right)
        found = []
        for _ in range(3):
            ctx.run(routine)
            found.append(ctx.get_values(c))
    x, y = (rounded(cells) for cells in (left, right))
    bound = 2 * k * 2.0**-24 * (np.abs(x) @ np.abs(y)) + 1e-30
    assert np.all(np.abs(found[0] - x @ y) <= bound)
    np.testing.assert_array_equal(found[0], found[2])


@pytest.mark.parametrize("prec", ["f16", "bf16", "f32"])
@pytest.mark.parametrize(
    "sizes", [(2, 3, 40, 40, 16), (1, 2, 33, 150, 24), (4, 8, 512, 512, 64), (1, 2, 100, 1024, 64)]
)
def test_attention_in_tiles_of_rows(prec: str, sizes: tuple[int, int, int, int, int]) -> None:
    """Shared memory up to what the device allows; gradients with scores computed again where they are large."""
    found, routine = attention("cuda", prec, sizes, causal=sizes[2] == sizes[3])
    again, _ = attention("cuda", prec, sizes, causal=sizes[2] == sizes[3])
    assert tiled(routine)
    for mine, same in zip(found, again, strict=True):
        np.testing.assert_array_equal(mine, same)
    separate, _ = attention("cuda", prec, sizes, causal=sizes[2] == sizes[3], fusion=False)
    unit = {"f32": 2.0**-20, "f16": 2.0**-9, "bf16": 2.0**-6}[prec]
    for mine, theirs in zip(found, separate, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=unit, atol=unit * np.abs(theirs).max())


@pytest.mark.parametrize("prec", ["f8e4m3", "f8e5m2"])
@pytest.mark.parametrize("size", [(33, 40, 50), (128, 64, 512)])
def test_fp8_instructions(prec: str, size: tuple[int, int, int]) -> None:
    """Products are exact; sums keep 13 bits at least, of which aligning to the greatest product takes some."""
    m, n, k = size
    with st.Session(), st.Context("cuda", numerics=st.Numerics(fp8_fast_accumulate=True)) as ctx:
        a, b = (
            st.placeholder("a", output=[m], input=[k], prec=prec),
            st.placeholder("b", output=[n], input=[k], prec=prec),
        )
        c = st.einsum("k -> i; k -> j => j -> i", a, b)
        st.specify(c, "f32")
        routine = ctx.compile(c)
        assert f"{prec} x {prec} into f32" in routine.kernels[0].path
        rng = np.random.default_rng(3)
        for t, shape in ((a, (m, k)), (b, (n, k))):
            ctx.set_values(t, rng.standard_normal(shape))
        ctx.run(routine)
        x, y, found = (ctx.get_values(t).astype(np.float64) for t in (a, b, c))
    bound = 2.0**-12 * k / 32 * (np.abs(x) @ np.abs(y.T)) + 1e-30
    assert np.all(np.abs(found - x @ y.T) <= bound)


def test_kernels_side_by_side() -> None:
    """Rows of a warp each, a lone result, a product and points in one launch, whose parts take ranges of its blocks."""
    found = []
    for fusion in (True, False):
        with st.Session(), st.Context("cuda") as ctx:
            x = st.placeholder("x", batch=[300], output=[40])
            a, b = (
                st.placeholder("a", output=[96], input=[80], prec="f16"),
                st.placeholder("b", output=[80], input=[72], prec="f16"),
            )
            results = [st.softmax(x), st.sum(x, axis="output"), st.max(x), x * 2.0, a @ b]
            routine = ctx.compile(results, fusion=fusion)
            assert ("side by side" in routine.kernels[0].path) == fusion
            rng = np.random.default_rng(4)
            for t, shape in ((x, (300, 40)), (a, (96, 80)), (b, (80, 72))):
                ctx.set_values(t, rng.standard_normal(shape))
            ctx.run(routine)
            found.append([ctx.get_values(t) for t in results])
    for mine, theirs in zip(*found, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("special", [0.5, np.inf, np.nan])
def test_skipped_points_multiply_nothing(special: float) -> None:
    found = {}
    for device in ("reference", "cuda"):
        with st.Session(), st.Context(device) as ctx:
            x = st.param("x", output=[12, 12, 16])
            w = st.placeholder("w", output=[8], input=[3, 3, 16], prec="bf16")
            loss = st.sum(st.conv2d(st.cast(x, "bf16"), w, padding=1))
            weights = np.random.default_rng(0).standard_normal((8, 3, 3, 16))
            weights[0, 0, 0, 0] = special
            ctx.init_params(loss, seed=0)
            ctx.set_values(w, weights)
            ctx.run(ctx.compile(st.grad_update(loss)))
            assert x.grad is not None
            found[device] = ctx.get_values(x.grad).astype(np.float64)
    np.testing.assert_allclose(found["cuda"], found["reference"], rtol=2.0**-6, atol=2.0**-6)
    assert np.isfinite(found["cuda"]).any()


def test_more_than_two_gigacells() -> None:
    rows = (1 << 21) + 65
    with st.Session(), st.Context("cuda") as ctx:
        x, w = st.placeholder("x", batch=[rows], prec="bf16"), st.placeholder("w", output=[1024], prec="bf16")
        every = (x + w).named("every")
        greatest = st.max(every, axis="output")
        routine = ctx.compile(greatest, keep=every)
        values = (np.arange(rows) % 128).astype(np.float32)
        ctx.set_values(x, values)
        ctx.set_values(w, np.arange(1024) % 100)
        ctx.run(routine)
        np.testing.assert_array_equal(ctx.get_values(greatest).astype(np.float32), values + 99)


def test_training_steps_are_those_of_the_emulator() -> None:
    losses, parameters, _ = train("cuda", steps=5)
    expected_losses, expected, _ = train("cuda-emulated", steps=5)
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    for found, wanted in zip(parameters, expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-8)


def test_legs_of_mixed_precision() -> None:
    for leg in (
        legs.test_leg_a_moves,
        legs.test_leg_b_bf16_twins_need_no_scaling,
        legs.test_leg_c_scaled_steps,
        legs.test_leg_d_backs_off_and_grows,
        legs.test_leg_e1_gated_steps,
        legs.test_leg_f_static_scale,
    ):
        leg("cuda")


@pytest.mark.parametrize("init", [st.normal(0.5), st.uniform(-2.0, 3.0)], ids=["normal", "uniform"])
def test_initial_values(init: st.Initializer) -> None:
    drawn = {}
    for device in ("reference", "cuda"):
        with st.Session(), st.Context(device) as ctx:
            w = st.param("w", output=[100_003], init=init)
            ctx.init_params(st.sum(w), seed=7)
            drawn[device] = ctx.get_values(w)
    np.testing.assert_array_equal(drawn["cuda"], drawn["reference"])


def test_values_set_between_replays() -> None:
    with st.Session(), st.Context("cuda") as ctx:
        x = st.placeholder("x", output=[1000])
        y = st.exp(x)
        routine = ctx.compile(y)
        for at in range(5):
            ctx.set_values(x, np.full(1000, at, np.float32))
            ctx.run(routine)
            np.testing.assert_allclose(ctx.get_values(y), np.exp(np.full(1000, at, np.float32)), rtol=1e-6)


def test_contexts_keep_apart_and_give_memory_back() -> None:
    import cupy

    pool = cupy.get_default_memory_pool()
    before = pool.used_bytes()
    with st.Session():
        x = st.placeholder("x", output=[1 << 20])
        y = x + x
        with st.Context("cuda") as one, st.Context("cuda") as two:
            assert isinstance(one._device, CudaDevice)
            assert isinstance(two._device, CudaDevice)
            assert one._device.stream.ptr != two._device.stream.ptr
            for ctx, value in ((one, 1.0), (two, 2.0)):
                ctx.set_values(x, np.full(1 << 20, value, np.float32))
                ctx.run(ctx.compile(y))
            assert float(one.get_values(y)[7]) == 2.0
            assert float(two.get_values(y)[7]) == 4.0
            assert pool.used_bytes() > before
    del one, two, ctx
    assert pool.used_bytes() <= before + (1 << 20)


def test_views_are_on_the_device_and_device_arrays_go_in() -> None:
    import cupy

    with st.Session(), st.Context("cuda") as ctx:
        x = st.placeholder("x", output=[16])
        y = x + 1.0
        routine = ctx.compile(y)
        ctx.set_values(x, cupy.arange(16, dtype=cupy.float32))
        ctx.run(routine)
        ctx.sync()
        view = ctx.view(y)
        assert isinstance(view, cupy.ndarray)
        assert cupy.asnumpy(view).tolist() == list(range(1, 17))
