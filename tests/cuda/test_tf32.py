"""Contractions through tf32: the model of the instruction, f32 operands where numerics allow it, narrow pairs without a
common format.
"""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor.codegen import loop_ir as ir
from stagedtensor.codegen.schedule.cuda import mma
from stagedtensor.precision import Prec, bf16, f8e4m3, f16, f32, u32
from stagedtensor.runtime.nvrtc import compile_cuda
from tests.cuda.running import emitted, run_emulated
from tests.cuda.test_tensor_cores import by_hand, narrow_product
from tests.run.blocks import Array, run_reference

TF32 = st.Numerics(tf32_matmul=True)
needs_nvrtc = pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")

ONE_TILE = """\
extern "C" __global__ void one_tile(const uint32_t *a, const uint32_t *b, float *d) {
    const int lane = threadIdx.x;
    uint32_t left[4] = {a[4 * lane], a[4 * lane + 1], a[4 * lane + 2], a[4 * lane + 3]};
    uint32_t right[2] = {b[2 * lane], b[2 * lane + 1]};
    float sums[4] = {d[4 * lane], d[4 * lane + 1], d[4 * lane + 2], d[4 * lane + 3]};
    st_mma_m16n8k8_tf32(sums, left, right);
    for (int k = 0; k < 4; k++) d[4 * lane + k] = sums[k];
}
"""
ROUND = """\
extern "C" __global__ void one_tile(const uint32_t *a, const uint32_t *b, float *d) {
    uint32_t fragment[1];
    const float cell = __uint_as_float(a[threadIdx.x]);
    st_load_tf32(fragment, &cell);
    d[threadIdx.x] = __uint_as_float(fragment[0]);
}
"""


def test_fragments_lie_as_the_ptx_manual_says() -> None:
    """a0 is (g, t), a1 (g + 8, t), a2 (g, t + 4), a3 (g + 8, t + 4); b0 is (t, g), b1 (t + 4, g); d as for 16-bit
    operands.
    """
    rng = np.random.default_rng(4)
    a, b, d = (rng.integers(-8, 9, shape).astype(np.float32) for shape in ((16, 8), (8, 8), (16, 8)))
    left, right = np.zeros((32, 4), np.float32), np.zeros((32, 2), np.float32)
    for lane in range(32):
        g, t = lane >> 2, lane % 4
        left[lane] = a[g, t], a[g + 8, t], a[g, t + 4], a[g + 8, t + 4]
        right[lane] = b[t, g], b[t + 4, g]
    cells = [(lane // 4 + 8 * (i >> 1), 2 * (lane % 4) + (i & 1)) for lane in range(32) for i in range(4)]
    sums = np.array([d[cell] for cell in cells], np.float32)
    buffers = ir.Buffer("a", u32, (128,)), ir.Buffer("b", u32, (64,)), ir.Buffer("d", f32, (128,))
    fed: list[Array] = [left.view(np.uint32), right.view(np.uint32), sums]
    *_, found = by_hand(ONE_TILE, ["st_mma_m16n8k8_tf32"], buffers, buffers[2], fed)
    expected = d + a @ b
    np.testing.assert_array_equal(found, [expected[cell] for cell in cells])


def rounded(cells: Array) -> Array:
    """To 10 bits of mantissa, to nearest, ties away from zero."""
    mantissa, exponent = np.frexp(cells.astype(np.float64))
    scaled = mantissa * 2.0**11
    return np.asarray(np.ldexp(np.sign(scaled) * np.floor(np.abs(scaled) + 0.5), exponent - 11))


def test_operands_are_rounded_to_nearest() -> None:
    special = [1 + 2.0**-11, -1 - 2.0**-11, 1 + 2.0**-11 - 2.0**-23, 0.0, -0.0, np.inf, -np.inf, 3.0]
    values = np.array(special + list(np.random.default_rng(0).standard_normal(24)), np.float32)
    buffers = ir.Buffer("a", u32, (32,)), ir.Buffer("b", u32, (32,)), ir.Buffer("d", f32, (32,))
    fed: list[Array] = [values.view(np.uint32), np.zeros(32, np.uint32), np.zeros(32, np.float32)]
    *_, found = by_hand(ROUND, ["st_load_tf32"], buffers, buffers[2], fed)
    finite = np.isfinite(values)
    np.testing.assert_array_equal(found[finite], rounded(values[finite]).astype(np.float32))
    np.testing.assert_array_equal(found[~finite], values[~finite])
    assert (found[finite] != values[finite]).sum() > 16


@pytest.mark.parametrize("enough", [1, 96])
@pytest.mark.parametrize(
    ("size", "form"),
    [
        ((41, 25, 50), "NN"),
        ((40, 24, 56), "NN"),
        ((70, 70, 33), "NT"),
        ((72, 72, 72), "NT"),
        ((72, 40, 130), "TN"),
        ((264, 260, 20), "TN"),
    ],
)
def test_f32_products(size: tuple[int, int, int], form: str, enough: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mma, "ENOUGH_TILES", enough)
    whole, arrays, c = narrow_product(f32, f32, size, form)
    assert "tensor cores, tf32 x tf32" in emitted(whole, TF32).kernels[0].proc.path
    found = run_emulated(whole, arrays, numerics=TF32)[c].astype(np.float64)
    a, b, bias = list(arrays.values())[:3]
    x, y = (rounded(cells) for cells in (a.T if form == "TN" else a, b.T if form == "NT" else b))
    expected = np.maximum(x @ y + bias, 0)
    bound = (2 * size[2] + 2) * 2.0**-24 * (np.abs(x) @ np.abs(y) + np.abs(bias) + 1)
    np.testing.assert_array_less(np.abs(found - expected), bound)
    exact = np.maximum(
        (a.T if form == "TN" else a).astype(np.float64) @ (b.T if form == "NT" else b).astype(np.float64) + bias, 0
    )
    assert (np.abs(found - exact) > bound).any(), "operands should have lost bits"


def test_f32_products_keep_their_bits_unless_numerics_allow_tf32() -> None:
    whole, arrays, c = narrow_product(f32, f32, (40, 24, 56), "NN")
    path = emitted(whole).kernels[0].proc.path
    assert "f32 multiply-add" in path
    assert path.endswith("no mma: f32 operands, which Numerics(tf32_matmul=True) would allow")
    np.testing.assert_array_equal(run_emulated(whole, arrays)[c], run_reference(whole, arrays)[c])


@pytest.mark.parametrize(("left", "right"), [(f16, bf16), (bf16, f16), (f8e4m3, f32)])
def test_operands_that_share_no_16_bit_format(left: Prec, right: Prec) -> None:
    """f16 and bf16 are exact in tf32, so nothing is lost and nobody has to allow it."""
    numerics = TF32 if f32 in (left, right) else None
    whole, arrays, c = narrow_product(left, right, (40, 24, 50), "NN")
    assert "tensor cores, tf32 x tf32" in emitted(whole, numerics).kernels[0].proc.path
    expected = run_reference(whole, arrays)[c].astype(np.float64)
    found = run_emulated(whole, arrays, numerics=numerics)[c].astype(np.float64)
    a, b = (np.abs(cells.astype(np.float64)) for cells in list(arrays.values())[:2])
    lost = 2.0**-11 if numerics else 0.0
    np.testing.assert_array_less(np.abs(found - expected), (lost + 2 * 51 * 2.0**-24) * (a @ b + 2))
    assert np.count_nonzero(found) > found.size // 4


@needs_nvrtc
@pytest.mark.parametrize(("size", "form"), [((40, 24, 50), "NN"), ((256, 256, 64), "NN"), ((256, 256, 64), "TN")])
def test_ptx_shows_the_instruction_and_nothing_spills(
    size: tuple[int, int, int], form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mma, "ENOUGH_TILES", 1)
    whole, *_ = narrow_product(f32, f32, size, form)
    text = emitted(whole, TF32).text
    ptx = compile_cuda(text, "sm_80", "ptx").data.decode()
    assert "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32" in ptx
    assert "cvt.rna.tf32.f32" in ptx
    for arch in ("sm_80", "sm_90"):
        binary = compile_cuda(text, arch)
        assert binary.warnings == ()
        assert binary.resources[0].spill_bytes == 0
        assert binary.resources[0].shared_bytes <= 48 * 1024


def test_numerics_reach_the_routine() -> None:
    found = {}
    for numerics in (st.Numerics(), TF32):
        with st.Session(), st.Context("cuda-emulated", numerics=numerics) as ctx:
            x = st.placeholder("x", batch=[32], output=[48])
            y = (
                st.param("w", output=[24], init=np.random.default_rng(0).standard_normal((24, 48)).astype(np.float32))
                @ x
            )
            routine = ctx.compile(y)
            ctx.init_params(y)
            ctx.set_values(x, np.random.default_rng(1).standard_normal((32, 48)))
            ctx.run(routine)
            found[numerics.tf32_matmul] = ctx.get_values(y), routine.kernels[0].path
    (exact, plain), (rough, tensor) = found[False], found[True]
    assert "tensor cores" not in plain
    assert "tensor cores" in tensor
    assert 0 < np.abs(exact - rough).max() < 0.05
