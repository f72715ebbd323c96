"""What the prelude's functions become on a GPU: the instruction that the emulator's model of the same name is one of."""

from __future__ import annotations

import importlib.util
import re

import numpy as np
import pytest

from stagedtensor.codegen.prelude import prelude_source
from stagedtensor.codegen.prelude.cuda import cuda_functions, cuda_names
from stagedtensor.runtime.nvrtc import compile_cuda

pytestmark = pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")

KERNEL = """
extern "C" __global__ void kernel(float *sums, uint32_t *words, const {cell} *cells, int present) {{
    __shared__ __align__(16) {cell} tile[64];
    tile[threadIdx.x] = cells[threadIdx.x];
    uint32_t a[4] = {{words[0], words[1], words[2], words[3]}}, b[2] = {{words[4], words[5]}};
    float d[4] = {{sums[0], sums[1], sums[2], sums[3]}};
    {name}({arguments});
    for (int k = 0; k < 4; k++) {{
        sums[k] = d[k];
        words[k] = a[k] + tile[k] + b[k / 2];
    }}
}}
"""
PRODUCTS = {
    "m16n8k16_f16": "m16n8k16.row.col.f32.f16.f16.f32",
    "m16n8k16_bf16": "m16n8k16.row.col.f32.bf16.bf16.f32",
    "m16n8k8_tf32": "m16n8k8.row.col.f32.tf32.tf32.f32",
    "m16n8k32_e4m3_e4m3": "m16n8k32.row.col.f32.e4m3.e4m3.f32",
    "m16n8k32_e4m3_e5m2": "m16n8k32.row.col.f32.e4m3.e5m2.f32",
    "m16n8k32_e5m2_e4m3": "m16n8k32.row.col.f32.e5m2.e4m3.f32",
    "m16n8k32_e5m2_e5m2": "m16n8k32.row.col.f32.e5m2.e5m2.f32",
}
CELLS = {"": "uint16_t", "_f32": "float", "_u8": "uint8_t"}


def ptx(name: str, arguments: str, cell: str = "uint16_t", arch: str = "sm_90") -> str:
    """The PTX of a kernel that calls one function."""
    own = KERNEL.format(name=name, arguments=arguments, cell=cell)
    text = prelude_source([], dialect="cuda") + cuda_functions([name]) + own
    return compile_cuda(text, arch, "ptx").data.decode()


@pytest.mark.parametrize("name", list(PRODUCTS))
def test_products(name: str) -> None:
    text = ptx(f"st_mma_{name}", "d, a, b")
    assert re.findall(r"\bmma\.sync\.aligned\.(\S+)", text) == [PRODUCTS[name]]


def test_every_product_is_tested() -> None:
    assert {name.removeprefix("st_mma_") for name in cuda_names() if name.startswith("st_mma_")} == set(PRODUCTS)


@pytest.mark.parametrize(("left", "right"), [("e4m3", "e5m2"), ("e5m2", "e4m3")])
def test_products_of_fp8_before_sm_89_are_two_of_f16(left: str, right: str) -> None:
    text = ptx(f"st_mma_m16n8k32_{left}_{right}", "d, a, b", arch="sm_80")
    assert re.findall(r"\bmma\.sync\.aligned\.(\S+)", text) == 2 * [PRODUCTS["m16n8k16_f16"]]
    scale = int(np.array([256, 256], np.float16).view(np.uint32)[0])  # e4m3's exponents are 8 less than f16's
    halves = 8 if left == "e4m3" else 4  # registers of two cells: four of a and two of b, for each of the products
    assert len(re.findall(r"\bmul\.f16x2 ", text)) == halves
    assert str(scale) in text


@pytest.mark.parametrize("suffix", list(CELLS))
def test_matrices_come_from_shared_memory_four_at_a_time(suffix: str) -> None:
    text = ptx(f"st_ldmatrix_x4{suffix}", "a, tile", CELLS[suffix])
    assert re.findall(r"\bldmatrix\.(\S+)", text) == ["sync.aligned.m8n8.x4.shared.b16"]
    assert len(re.findall(r"\bcvt\.rna\.tf32\.f32", text)) == (4 if suffix == "_f32" else 0)


def test_transposed_matrices_and_single_cells() -> None:
    transposed = ptx("st_ldmatrix_x4_trans", "a, tile")
    assert re.findall(r"\bldmatrix\.(\S+)", transposed) == ["sync.aligned.m8n8.x4.trans.shared.b16"]
    assert re.findall(r"\bcvt\.\S+tf32\S*", ptx("st_load_tf32", "a, cells", "float")) == ["cvt.rna.tf32.f32"]


@pytest.mark.parametrize("suffix", list(CELLS))
def test_copies_are_of_16_bytes_or_of_zeros(suffix: str) -> None:
    text = ptx(f"st_copy_async{suffix}", "tile, cells, present", CELLS[suffix])
    (size,) = re.findall(r"\bcp\.async\.cg\.shared\.global \[\S+\], \[\S+\], 16, (%r\d+);", text)
    assert re.search(rf"\bselp\.\w+\s+{size}, (16, 0|0, 16),", text), text


@pytest.mark.parametrize(
    ("name", "instruction"), [("commit", "commit_group"), ("wait_0", "wait_group 0"), ("wait_1", "wait_group 1")]
)
def test_copies_are_waited_for(name: str, instruction: str) -> None:
    assert re.findall(r"\bcp\.async\.([^;]+);", ptx(f"st_copy_async_{name}", "")) == [instruction]


def test_all_threads_of_a_block_are_asked() -> None:
    text = ptx("st_any_in_block", "a")
    assert re.search(r"\bbar(rier)?(\.cta)?\.red\.(\w+\.)*or\.pred", text), text
