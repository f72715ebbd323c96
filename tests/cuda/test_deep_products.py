"""Products with few tiles and a long depth: two passes, the same bits in every run, within the accumulation bound."""

from __future__ import annotations

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor.codegen import loop_ir as ir
from stagedtensor.precision import Prec, bf16, f16, f32, i32
from tests.cuda.running import emitted, run_emulated
from tests.cuda.test_tensor_cores import narrow_product
from tests.run.blocks import Array, contraction, module, random_array, run_reference


@pytest.mark.parametrize(
    ("prec", "size", "parts", "kernels"),
    [
        (bf16, (32, 32, 2048), 8, 2),
        (f16, (40, 24, 1000), 3, 3),
        (f32, (16, 20, 1536), 6, 2),
        (i32, (16, 16, 512), 2, 2),
    ],
)
def test_two_passes(prec: Prec, size: tuple[int, int, int], parts: int, kernels: int) -> None:
    whole, arrays, c = integers(size) if prec is i32 else narrow_product(prec, prec, size, "NN")
    source = emitted(whole)
    first, *_, last = source.kernels
    assert f"depth in {parts + (kernels == 3)} parts" in first.proc.path
    assert ("tensor cores" in first.proc.path) == prec.is_narrow
    assert len(source.kernels) == kernels
    assert first.name.endswith("_parts")
    assert last.name.endswith("_merge")
    found, again = (run_emulated(whole, arrays)[c] for _ in range(2))
    np.testing.assert_array_equal(found, again)
    expected = run_reference(whole, arrays)[c]
    if prec is i32:
        np.testing.assert_array_equal(found, expected)
        return
    a, b = (np.abs(cells.astype(np.float64)) for cells in list(arrays.values())[:2])
    bound = 2 * size[2] * 2.0**-24 * (a @ b + 2)
    np.testing.assert_array_less(np.abs(found.astype(np.float64) - expected), bound)


def integers(size: tuple[int, int, int]) -> tuple[ir.Module, dict[ir.Buffer, Array], ir.Buffer]:
    m, n, k = size
    a, b, c = ir.Buffer("a", i32, (m, k)), ir.Buffer("b", i32, (k, n)), ir.Buffer("c", i32, (m, n))
    arrays = {a: random_array(a), b: random_array(b, 1), c: np.zeros((m, n), np.int32)}
    return module(contraction(a, b, c, size, "NN")), arrays, c


@pytest.mark.parametrize("size", [(512, 512, 4096), (32, 32, 500), (320, 320, 512)])
def test_products_with_enough_tiles_or_little_depth_stay_whole(size: tuple[int, int, int]) -> None:
    whole, *_ = narrow_product(bf16, bf16, size, "NN")
    assert len(emitted(whole).kernels) == 1


def test_a_sum_onto_an_old_value_starts_from_it_once() -> None:
    """The gradient of a weight accumulates; its old value enters in the second pass only."""
    found = {}
    for device in ("reference", "cuda-emulated"):
        with st.Session(), st.Context(device) as ctx:
            x = st.placeholder("x", batch=[1024], output=[16], prec="bf16")
            w = st.param("w", output=[16], input=[16], init=0.5)
            loss = st.sum(st.cast(w, "bf16") @ x)
            ctx.init_params(loss)
            ctx.set_values(x, np.random.default_rng(0).standard_normal((1024, 16)))
            step = ctx.compile(st.sequence(st.grad_update(loss), st.sgd_update(loss, 0.01)))
            ctx.run(step)
            ctx.run(step)
            found[device] = ctx.get_values(w)
            paths = [kernel.path for kernel in step.kernels]
    assert any("parts" in path for path in paths), paths
    np.testing.assert_allclose(found["cuda-emulated"], found["reference"], rtol=1e-5)


def test_the_gradient_of_a_convolution_s_kernel_is_cut_over_the_batch() -> None:
    found, paths = {}, []
    for device in ("reference", "cuda-emulated"):
        with st.Session(), st.Context(device) as ctx:
            x = st.placeholder("x", batch=[16], output=[8, 8, 8])
            loss = st.sum(st.nn.conv2d(8, kernel=3)(x) ** 2)
            ctx.init_params(loss, seed=1)
            ctx.set_values(x, np.random.default_rng(0).standard_normal((16, 8, 8, 8)))
            step = ctx.compile(st.grad_update(loss))
            ctx.run(step)
            (w,) = [p for p in loss.params if len(p.shape.dims) == 4]
            assert w.grad is not None
            found[device] = ctx.get_values(w.grad)
            paths = [kernel.path for kernel in step.kernels]
    assert any("parts" in path and "contraction" in path for path in paths), paths
    np.testing.assert_allclose(found["cuda-emulated"], found["reference"], rtol=2e-4, atol=1e-4)
