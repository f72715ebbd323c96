"""Products of fp8: through f16, exactly, unless numerics ask for the instructions of fp8 itself."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor.codegen import loop_ir as ir
from stagedtensor.numerics import Numerics
from stagedtensor.precision import Prec, f8e4m3, f8e5m2, f32, u32
from stagedtensor.runtime.inspection import generated
from stagedtensor.runtime.nvrtc import compile_cuda
from tests.cuda.running import emitted, run_emulated
from tests.cuda.test_tensor_cores import ONE_TILE, by_hand, narrow_product
from tests.run.blocks import run_reference

needs_nvrtc = pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")
FAST = Numerics(fp8_fast_accumulate=True)
PAIRS = [(f8e4m3, f8e4m3), (f8e4m3, f8e5m2), (f8e5m2, f8e4m3), (f8e5m2, f8e5m2)]


@pytest.mark.parametrize(("left", "right"), PAIRS)
@pytest.mark.parametrize(("size", "form"), [((33, 34, 67), "NN"), ((64, 40, 96), "NT"), ((40, 24, 64), "TN")])
def test_fp8_instructions_give_the_products(left: Prec, right: Prec, size: tuple[int, int, int], form: str) -> None:
    whole, arrays, c = narrow_product(left, right, size, form)
    path = emitted(whole, FAST).kernels[0].proc.path
    assert f"tensor cores, {left.name} x {right.name} into f32" in path
    found = run_emulated(whole, arrays, numerics=FAST)[c].astype(np.float64)
    expected = run_reference(whole, arrays)[c].astype(np.float64)
    a, b = (np.abs(cells.astype(np.float64)) for cells in list(arrays.values())[:2])
    magnitude = (a.T if form == "TN" else a) @ (b.T if form == "NT" else b) + 2
    np.testing.assert_array_less(np.abs(found - expected), size[2] * 2.0**-23 * magnitude + 1e-30)


def test_by_default_sums_are_those_of_f32() -> None:
    whole, *_ = narrow_product(f8e4m3, f8e5m2, (64, 64, 64), "NT")
    source = emitted(whole)
    assert "tensor cores, f16 x f16 into f32" in source.kernels[0].proc.path
    assert "m16n8k32" not in source.text


@pytest.mark.parametrize("prec", [f8e4m3, f8e5m2])
def test_fragments_hold_every_code(prec: Prec) -> None:
    """One instruction by itself: 256 codes times 1, in the layout of the manual's m16n8k32."""
    codes = np.arange(512, dtype=np.int64).reshape(16, 32).astype(np.uint8)
    ones = np.zeros((32, 8), np.uint8)
    one = np.ones(1, prec.numpy_dtype).view(np.uint8)[0]
    for column in range(8):
        ones[4 * column, column] = one  # column j of the result is column 4j of the codes
    left, right = np.zeros((32, 16), np.uint8), np.zeros((32, 8), np.uint8)
    for lane in range(32):
        group, place = lane // 4, lane % 4
        for cell in range(16):
            left[lane, cell] = codes[group + 8 * (cell // 4 % 2), 4 * place + cell % 4 + 16 * (cell // 8)]
        for cell in range(8):
            right[lane, cell] = ones[4 * place + cell % 4 + 16 * (cell // 4), group]
    buffers = ir.Buffer("a", u32, (128,)), ir.Buffer("b", u32, (64,)), ir.Buffer("d", f32, (128,))
    name = prec.name.removeprefix("f8")
    text = ONE_TILE.format(prec="bf16").replace("m16n8k16_bf16", f"m16n8k32_{name}_{name}")
    names = [f"st_mma_m16n8k32_{name}_{name}"]
    *_, flat = by_hand(text, names, buffers, buffers[2], [left.view(np.uint32), right.view(np.uint32), np.zeros(128)])
    found = flat.reshape(32, 4)
    values = codes.view(prec.numpy_dtype).astype(np.float32)
    for lane in range(32):
        for register in range(4):
            i, j = lane // 4 + 8 * (register // 2), 2 * (lane % 4) + register % 2
            finite = values[i][np.isfinite(values[i])].size == 32
            if finite:
                assert found[lane, register] == values[i, 4 * j]
            else:
                assert not np.isfinite(found[lane, register])  # 0 times an infinity


@needs_nvrtc
@pytest.mark.parametrize(("left", "right"), PAIRS)
def test_compiles_for_every_generation(left: Prec, right: Prec) -> None:
    with st.Session():
        a = st.placeholder("a", output=[64], input=[128], prec=left)
        b = st.placeholder("b", output=[72], input=[128], prec=right)
        source = generated(st.einsum("k -> i; k -> j => j -> i", a, b), "cuda", numerics=FAST).source
    for arch, instruction in (
        ("sm_80", "m16n8k16.row.col.f32.f16.f16"),
        ("sm_90", "m16n8k32.row.col.f32.e"),
        ("sm_100", "m16n8k32"),
    ):
        assert instruction in compile_cuda(source, arch, "ptx").data.decode()
        binary = compile_cuda(source, arch)
        assert binary.warnings == ()
        assert binary.resources[0].spill_bytes == 0
