"""One kernel of each family: its text, and that it compiles for every generation of GPUs without warnings and spills."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable

import pytest

import stagedtensor as st
from stagedtensor.numerics import Numerics
from stagedtensor.runtime.inspection import generated
from stagedtensor.runtime.nvrtc import compile_cuda

needs_nvrtc = pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")
TF32 = Numerics(tf32_matmul=True)
EXACT = Numerics()


def pointwise() -> st.Tensor:
    x = st.placeholder("x", batch=[5], output=[7], prec="bf16")
    return st.tanh(x) * 2.0


def wide_pointwise() -> st.Tensor:
    x = st.placeholder("x", batch=[256], output=[128], prec="f16")
    return st.relu(x) + x


def short_rows() -> st.Tensor:
    return st.sum(st.placeholder("x", batch=[12], output=[300]), axis="output")


def long_rows() -> st.Tensor:
    return st.max(st.placeholder("x", batch=[200], output=[3000]), axis="output")


def rows_together() -> st.Tensor:
    return st.softmax(st.placeholder("x", batch=[200], output=[3000], prec="bf16"))


def columns() -> st.Tensor:
    return st.sum(st.placeholder("x", batch=[300], output=[5000]), axis="batch")


def two_passes() -> st.Tensor:
    return st.sum(st.placeholder("x", output=[100_000]))


def tiles() -> st.Tensor:
    a = st.placeholder("a", output=[96], input=[80])
    return st.relu(a @ st.placeholder("b", output=[80], input=[72]))


def halves() -> st.Tensor:
    a = st.placeholder("a", output=[96], input=[80], prec="f16")
    return st.relu(a @ st.placeholder("b", output=[80], input=[72], prec="f16"))


def bytes_() -> st.Tensor:
    a = st.placeholder("a", output=[96], input=[80], prec="f8e4m3")
    return st.cast(a @ st.placeholder("b", output=[80], input=[72], prec="f8e5m2"), "f32")


def deep() -> st.Tensor:
    a = st.placeholder("a", output=[32], input=[2048], prec="bf16")
    return st.relu(a @ st.placeholder("b", output=[2048], input=[40], prec="bf16"))


def image() -> st.Tensor:
    x = st.placeholder("x", batch=[4], output=[12, 12, 8], prec="bf16")
    w = st.placeholder("w", output=[16], input=[3, 3, 8], prec="bf16")
    return st.conv2d(x, w)


def rows_by_ids() -> st.Tensor:
    ids = st.placeholder("ids", batch=[20], prec="i32")
    return st.gather(st.placeholder("table", output=[16], input=[50]), ids)


FAMILIES: dict[str, tuple[Callable[[], st.Tensor], Numerics, str]] = {
    "pointwise": (pointwise, EXACT, "elementwise, one thread per point"),
    "wide_pointwise": (wide_pointwise, EXACT, "elementwise, 8 points per thread, 16-byte accesses"),
    "short_rows": (short_rows, EXACT, "row reduction, 32 threads per result"),
    "long_rows": (long_rows, EXACT, "row reduction, 256 threads per result"),
    "rows_together": (rows_together, EXACT, "rows through 3 steps, 256 threads per row"),
    "columns": (columns, EXACT, "reduction in order, one thread per result"),
    "two_passes": (two_passes, EXACT, "parts"),
    "tiles": (tiles, EXACT, "f32 multiply-add; no mma: f32 operands, which Numerics(tf32_matmul=True) would allow"),
    "tf32": (tiles, TF32, "tensor cores, tf32 x tf32 into f32"),
    "f16": (halves, EXACT, "tensor cores, f16 x f16 into f32"),
    "fp8": (bytes_, EXACT, "tensor cores, f16 x f16 into f32"),
    "deep": (deep, EXACT, "depth in 8 parts for want of tiles"),
    "image": (image, EXACT, "tensor cores, bf16 x bf16 into f32"),
    "gather": (rows_by_ids, EXACT, "elementwise"),
}
GRADIENTS = {
    "padded_image": ("points outside an operand skipped", "tensor cores"),
    "scatter": ("scatter", "scatter"),
}


def gradient(name: str) -> st.Comp:
    if name == "scatter":
        table = st.param("table", output=[16], input=[50])
        loss = st.sum(st.gather(table, st.placeholder("ids", batch=[20], prec="i32")) ** 2)
        return st.grad_update(loss)
    x = st.param("x", output=[6, 6, 8])
    w = st.placeholder("w", output=[16], input=[3, 3, 8], prec="bf16")
    loss = st.sum(st.cast(st.conv2d(st.cast(x, "bf16"), w, padding=1), "f32") ** 2)
    return st.grad_update(loss)


def text_of(name: str) -> tuple[str, str, str]:
    """The whole source, the family's kernels alone, and the words that their paths must have."""
    with st.Session():
        if name in GRADIENTS:
            words, _ = GRADIENTS[name]
            made = generated(gradient(name), "cuda")
            chosen = [kernel for kernel in made.kernels if words in kernel.path]
        else:
            build, numerics, words = FAMILIES[name]
            made = generated(build(), "cuda", numerics=numerics)
            chosen = list(made.kernels)
    assert chosen, [kernel.path for kernel in made.kernels]
    assert any(words in kernel.path for kernel in chosen), [kernel.path for kernel in chosen]
    return made.source, "\n".join(kernel.source for kernel in chosen), words


@pytest.mark.parametrize("name", [*FAMILIES, *GRADIENTS])
def test_text(name: str, golden: Callable[[str], None]) -> None:
    golden(re.sub(r"  \(test_families\.py:\d+\)", "", text_of(name)[1]))


@needs_nvrtc
@pytest.mark.parametrize("name", [*FAMILIES, *GRADIENTS])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_compiles(name: str, arch: str) -> None:
    source, _, words = text_of(name)
    binary = compile_cuda(source, arch)
    assert binary.warnings == ()
    assert binary.resources
    assert all(item.spill_bytes == 0 and item.shared_bytes <= 48 * 1024 for item in binary.resources)
    if "tensor cores" in words:
        assert "mma.sync" in compile_cuda(source, arch, "ptx").data.decode()
