"""Inputs on which generated CUDA is known to go wrong: literals, halves, names, grids, indices, options, cache,
scalars.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor.codegen import loop_ir as ir
from stagedtensor.codegen.schedule.cuda.launch import MOST_COOPERATIVE
from stagedtensor.precision import f32
from stagedtensor.runtime import nvrtc
from stagedtensor.runtime.inspection import generated
from stagedtensor.runtime.nvrtc import compile_cuda
from tests.cuda.running import emitted
from tests.run.blocks import apply, axis, contraction, load, module, store

NVRTC = importlib.util.find_spec("cupy") is not None
needs_nvrtc = pytest.mark.skipif(not NVRTC, reason="CuPy is not installed")


def on_emulator(build: Callable[[], tuple[st.Tensor, list[st.Tensor]]], values: Any) -> list[np.ndarray[Any, Any]]:
    """Run a program and, where NVRTC is at hand, compile its text for a GPU."""
    with st.Session(), st.Context("cuda-emulated") as ctx:
        x, results = build()
        routine = ctx.compile(results)
        if NVRTC:
            assert compile_cuda(routine.source, "sm_90").warnings == ()
        ctx.set_values(x, values)
        ctx.run(routine)
        return [ctx.get_values(result) for result in results]


@pytest.mark.parametrize("prec", ["f32", "f16", "bf16", "f64"])
def test_nan_and_infinite_literals(prec: str) -> None:
    def build() -> tuple[st.Tensor, list[st.Tensor]]:
        x = st.placeholder("x", output=[4], prec=prec)
        return x, [st.where(x > 0, x, float("nan")), st.where(x > 0, x, float("-inf")), st.max(x, axis="output")]

    masked, low, greatest = on_emulator(build, [-1.0, 2.0, -3.0, 4.0])
    assert np.isnan(masked.astype(np.float64)).tolist() == [True, False, True, False]
    assert low.astype(np.float64).tolist() == [-np.inf, 2.0, -np.inf, 4.0]
    assert float(greatest) == 4.0


@pytest.mark.parametrize("prec", ["f16", "bf16"])
def test_selections_between_a_half_and_a_literal(prec: str) -> None:
    def build() -> tuple[st.Tensor, list[st.Tensor]]:
        x = st.placeholder("x", output=[4], prec=prec)
        return x, [st.where(x > 0, x, 0.0), st.relu(x), st.where(x > 0, 1.0, x)]

    for found, expected in zip(
        on_emulator(build, [-1.5, 2.0, -0.25, 4.0]), ([0, 2, 0, 4], [0, 2, 0, 4], [-1.5, 1, -0.25, 1]), strict=True
    ):
        assert found.astype(np.float64).tolist() == expected


def test_no_text_needs_headers_for_halves() -> None:
    """Only the wheel of CuPy may be there: narrow formats are integers with the project's own conversions."""
    with st.Session():
        x = st.placeholder("x", output=[64], prec="f16")
        y = st.placeholder("y", output=[64], prec="bf16")
        text = generated([x * 2.0 + st.cast(y, "f16"), st.cast(x, "f8e4m3")], "cuda").source
    included = re.findall(r"#include\s*[<\"](.+?)[>\"]", text)
    assert included == ["stdint.h"], "and that one is for the host only"
    assert "#ifdef __CUDACC_RTC__" in text
    assert "__half" not in text
    assert "__nv_" not in text


@pytest.mark.parametrize(
    ("prec", "values", "expected"),
    [
        ("f8e4m3", [448, 464, 465, np.inf, np.nan], [448, 448, np.nan, np.nan, np.nan]),
        ("f8e5m2", [57344, 61439, 61440, np.inf, np.nan], [57344, 57344, np.inf, np.inf, np.nan]),
        ("bf16", [70000, 257, 258, 259, 261, 263, 0.2691408770292272], [70144, 256, 258, 260, 260, 264, 0.26953125]),
    ],
)
def test_narrowing(prec: str, values: list[float], expected: list[float]) -> None:
    def build() -> tuple[st.Tensor, list[st.Tensor]]:
        x = st.placeholder("x", output=[len(values)])
        return x, [st.cast(x, prec)]

    (found,) = on_emulator(build, values)
    np.testing.assert_array_equal(found.astype(np.float64), expected)


def test_integers_from_floats_outside_their_range() -> None:
    def build() -> tuple[st.Tensor, list[st.Tensor]]:
        x = st.placeholder("x", output=[7], prec="f32")
        return x, [st.cast(x, "i32"), st.cast(x, "u8")]

    signed, bytes_ = on_emulator(build, [np.nan, np.inf, -np.inf, 3e9, -3e9, 300.7, -1.7])
    assert signed.tolist() == [0, 2**31 - 1, -(2**31), 2**31 - 1, -(2**31), 300, -1]
    assert bytes_.tolist() == [0, 255, 0, 255, 0, 255, 0]


def test_subnormals_are_kept() -> None:
    def build() -> tuple[st.Tensor, list[st.Tensor]]:
        x = st.placeholder("x", output=[3])
        return x, [x * 2.0, st.sqrt(x), st.log(x), x == 0.0]

    double, root, log, zero = on_emulator(build, [1e-40, 1e-45, 0.0])
    assert double.tolist() == [float(np.float32(1e-40)) * 2, float(np.float32(1e-45)) * 2, 0.0]
    assert root[0] > 0
    assert np.isfinite(log[:2]).all()
    assert [bool(cell) for cell in zero] == [False, False, True]
    assert not any("ftz" in option for option in nvrtc.OPTIONS)
    assert "--fmad=false" in nvrtc.OPTIONS
    assert "--use_fast_math" not in nvrtc.OPTIONS


NAMES = (
    "asm",
    "double",
    "new",
    "max",
    "exp",
    "sinf",
    "fma",
    "half",
    "threadIdx",
    "blockIdx",
    "uint4",
    "warpSize",
    "thread",
)


def test_names_of_the_language_and_of_cuda() -> None:
    def build() -> tuple[st.Tensor, list[st.Tensor]]:
        x = st.placeholder("__syncthreads", output=[4])
        return x, [(x + float(at)).named(name) for at, name in enumerate(NAMES)]

    for at, found in enumerate(on_emulator(build, np.zeros(4))):
        assert found.tolist() == [at] * 4


def test_kernels_are_found_by_their_plain_names() -> None:
    a, b, c = ir.Buffer("a", f32, (64, 70)), ir.Buffer("b", f32, (70, 90)), ir.Buffer("c", f32, (64, 90))
    source = emitted(module(contraction(a, b, c, (64, 90, 70), "NN")))
    for kernel in source.kernels:
        assert re.search(rf'extern "C" __global__ void [^\n]*\b{kernel.name}\(', source.text)
    if NVRTC:
        ptx = compile_cuda(source.text, "sm_90", "ptx").data.decode()
        assert all(f".entry {kernel.name}(" in ptx for kernel in source.kernels)


@pytest.mark.parametrize("rows", [65_536, 3_000_000])
def test_grids_stay_within_their_limit(rows: int) -> None:
    """Only the first dimension is used, and loops stride: no product of sizes is ever a number of blocks."""
    x, y = ir.Buffer("x", f32, (rows, 64)), ir.Buffer("y", f32, (rows, 64))
    i, j = axis("i", rows), axis("j", 64)
    whole = module(ir.Block("scaled", (i, j), (store(y, [i, j], apply("mul", load(x, i, j), load(x, i, j))),)))
    with st.Session():
        t = st.placeholder("t", batch=[rows], output=[64])
        kernels = [*emitted(whole).kernels]
        sums = generated([st.sum(t, axis="output"), st.softmax(t)], "cuda").kernels
    assert all(kernel.launch.blocks <= MOST_COOPERATIVE for kernel in kernels)
    blocks = [int(kernel.launch.split()[0]) for kernel in sums]
    assert max(blocks) <= MOST_COOPERATIVE
    assert max(blocks) > 1000


@needs_nvrtc
def test_indices_over_two_gigacells_are_computed_in_64_bits() -> None:
    """3,000,000 rows of 1,024: the address of the last cell is beyond 32 bits, in cells and in bytes."""
    with st.Session():
        x = st.placeholder("x", batch=[3_000_000], output=[1024], prec="f16")
        made = generated([(x + 1.0).named("y"), st.sum(x, axis="output")], "cuda")
    loops = re.findall(r"for \((\w+) \w+ = [^;]*(?:blockIdx|threadIdx)", made.source)
    assert loops
    assert set(loops) == {"int64_t"}
    ptx = compile_cuda(made.source, "sm_90", "ptx").data.decode()
    assert re.search(r"setp\.\w+\.[su]64", ptx), "the loop's limit does not fit 32 bits"
    assert "mul.wide" in ptx or "shl.b64" in ptx or "mad.lo.s64" in ptx


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_tensors_without_cells(shape: tuple[int, ...]) -> None:
    def build() -> tuple[st.Tensor, list[st.Tensor]]:
        x = st.placeholder("x", output=list(shape))
        return x, [x + 1.0, st.sum(x)]

    same, total = on_emulator(build, np.zeros(shape))
    assert same.shape == shape
    assert float(total) == 0.0


def test_every_launch_has_a_block() -> None:
    with st.Session():
        x = st.placeholder("x", output=[0])
        a, b = st.placeholder("a", output=[2], input=[0]), st.placeholder("b", output=[0], input=[3])
        made = generated([x + 1.0, st.sum(x), a @ b], "cuda")
    assert all(int(kernel.launch.split()[0]) >= 1 for kernel in made.kernels)


def test_a_rate_and_an_index_reach_an_f32_kernel() -> None:
    """No scalar is passed by value: a host scalar is a cell, indices are one array of int64."""
    with st.Session(), st.Context("cuda-emulated") as ctx:
        x = st.placeholder("x", batch=[4], output=[8])
        at, rate = st.index("at", 4), st.host_scalar("rate", 0.5)
        y = x[at] * rate
        routine = ctx.compile(y)
        ctx.set_values(x, np.arange(32.0).reshape(4, 8))
        for position in range(4):
            ctx.set_values(rate, 0.5 + position)
            ctx.run(routine, at=position)
            assert ctx.get_values(y).tolist() == [(8 * position + k) * (0.5 + position) for k in range(8)]
    for parameters in re.findall(r"__global__ void [^(]*\([^)]*\)[^(]*\(([^)]*)\)", routine.source):
        assert all("*" in parameter for parameter in parameters.split(","))


def test_the_kernel_cache_tells_texts_and_numerics_apart(tmp_path: Path) -> None:
    def compiled(scale: float, **numerics: Any) -> tuple[int, int]:
        with st.Session(), st.Context("cuda-emulated", cache_dir=tmp_path, numerics=st.Numerics(**numerics)) as ctx:
            x = st.placeholder("x", batch=[16], output=[16])
            ctx.compile((st.param("w", output=[16], init=1.0) @ x) * scale, name="step")
            return ctx.stats.compiles, ctx.stats.cache_hits

    assert compiled(2.0) == (1, 0)
    assert compiled(2.0) == (0, 1)
    assert compiled(3.0) == (1, 0)
    assert compiled(2.0, tf32_matmul=True) == (1, 0)
    for entry in tmp_path.rglob("*.so"):
        entry.write_bytes(b"damaged")
    assert compiled(2.0) == (1, 0)
