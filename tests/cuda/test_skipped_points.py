"""Products on tensor cores that skip points outside an operand: a skipped point never multiplies, not even an infinity."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor.codegen import loop_ir as ir
from stagedtensor.precision import Prec, bf16, f8e4m3, f16, f32, i64
from stagedtensor.runtime.nvrtc import compile_cuda
from tests.cuda.running import emitted, run_emulated
from tests.run.blocks import ZERO, Array, apply, at, axis, load, module, random_array, run_reference, store

needs_nvrtc = pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")
TF32, FP8 = st.Numerics(tf32_matmul=True), st.Numerics(fp8_fast_accumulate=True)


def padded(
    prec: Prec, channels: int, *, swapped: bool, width: int = 10
) -> tuple[ir.Module, dict[ir.Buffer, Array], ir.Buffer, ir.Buffer]:
    """A convolution along one axis with one cell of padding on either side, as a product."""
    size = 24
    x, w = ir.Buffer("x", prec, (size, channels)), ir.Buffer("w", prec, (3, channels, width))
    y = ir.Buffer("y", f32, (width, size) if swapped else (size, width))
    i, o = axis("i", size), axis("o", width)
    k, c = axis("k", 3, "reduce"), axis("c", channels, "reduce")
    place = apply("sub", apply("add", ir.Var(i.symbol), ir.Var(k.symbol), prec=i64), ir.index(1), prec=i64)
    inside = apply(
        "and", apply("ge", place, ir.index(0), prec=i64), apply("lt", place, ir.index(size), prec=i64), prec=i64
    )
    acc = ir.Symbol("acc", f32)

    def wide(value: ir.Expr) -> ir.Expr:
        return value if value.type is f32 else ir.Cast(value, f32)

    update = ir.Fma(wide(ir.Load(x, (place, *at(c)))), wide(load(w, k, c, o)), ir.Var(acc))
    item = ir.Accumulator(acc, ZERO, update, "add", ZERO)
    data = (o, i) if swapped else (i, o)
    whole = module(ir.Block("conv", (*data, k, c), (store(y, data, ir.Var(acc)),), (item,), guard=inside))
    return whole, {x: random_array(x), w: random_array(w, 1), y: np.zeros(y.shape, np.float32)}, w, y


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("special", [None, np.inf, -np.inf, np.nan])
@pytest.mark.parametrize(("prec", "channels"), [(bf16, 16), (f16, 5), (f32, 8), (f8e4m3, 16)])
def test_skipped_points_multiply_nothing(prec: Prec, channels: int, special: float | None, swapped: bool) -> None:
    numerics = {f32: TF32, f8e4m3: FP8}.get(prec)  # the instructions of fp8 have nothing that watches their operands
    whole, arrays, w, y = padded(prec, channels, swapped=swapped)
    path = emitted(whole, numerics).kernels[0].proc.path
    assert "tensor cores" in path
    assert "points outside an operand skipped" in path
    if special is not None:
        arrays[w][0, 0, 3] = special
    (kernel,) = emitted(whole, numerics).kernels
    assert "not_finite[0] = 0u;" in kernel.text.partition("st_note_not_finite")[0].partition("i_depth")[0]
    expected = run_reference(whole, arrays)[y]
    found = run_emulated(whole, arrays, numerics=numerics)[y]
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    np.testing.assert_allclose(found, expected, rtol=2e-2 if prec is f32 else 1e-4, atol=2e-2 if prec is f32 else 1e-4)
    if special is not None:  # the first row skips the weight, the others meet it
        column = found[3] if swapped else found[:, 3]
        assert np.isfinite(column[0])
        assert not np.isfinite(column[1:]).any()


def test_a_tile_that_met_an_infinity_is_the_reference_s_bit_for_bit() -> None:
    whole, arrays, w, y = padded(bf16, 16, swapped=False)
    arrays[w][2, 1, 0] = np.inf
    np.testing.assert_array_equal(run_emulated(whole, arrays)[y], run_reference(whole, arrays)[y])


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_nothing_spills(arch: str) -> None:
    whole, *_ = padded(bf16, 16, swapped=False)
    binary = compile_cuda(emitted(whole).text, arch)
    assert binary.warnings == ()
    assert binary.resources[0].spill_bytes == 0


def test_the_gradient_of_a_convolution_uses_tensor_cores() -> None:
    found, paths = {}, []
    for device in ("reference", "cuda-emulated"):
        with st.Session(), st.Context(device) as ctx:
            x = st.param("x", output=[6, 6, 8])
            layer = st.nn.conv2d(16, kernel=3, padding=1)
            with st.master_weights("bf16"):
                loss = st.sum(layer(x) ** 2)
            st.PrecisionPolicy(activation="bf16", grad="bf16").apply(loss)
            ctx.init_params(loss, seed=1)
            assert x.grad is not None
            step = ctx.compile(st.grad_update(loss))
            ctx.run(step)
            found[device] = ctx.get_values(x.grad).astype(np.float64)
            paths = [kernel.path for kernel in step.kernels]
    assert any("points outside an operand skipped" in path and "tensor cores" in path for path in paths), paths
    np.testing.assert_allclose(found["cuda-emulated"], found["reference"], rtol=2.0**-6, atol=2.0**-6)
