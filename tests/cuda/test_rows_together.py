"""Row kernels over the same rows in one launch: softmax, norms, gradients; what keeps kernels apart."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor.codegen import loop_ir as ir
from stagedtensor.errors import MemoryCheckError
from stagedtensor.precision import f32
from stagedtensor.runtime.inspection import generated
from stagedtensor.runtime.nvrtc import compile_cuda
from tests.cuda.running import emitted, run_emulated
from tests.run.blocks import ZERO, apply, axis, load, module, random_array, run_reference, store

Build = Callable[[st.Tensor], st.Tensor]
CASES: dict[str, tuple[Build, tuple[int, ...]]] = {
    "softmax": (st.softmax, (70, 100)),
    "softmax of long rows": (st.softmax, (130, 700)),
    "layer norm": (st.layer_norm, (8, 9, 64)),
    "log softmax": (st.log_softmax, (65, 33)),
}


@pytest.mark.parametrize("prec", ["f32", "bf16"])
@pytest.mark.parametrize("name", list(CASES))
def test_forward_and_gradient(name: str, prec: str) -> None:
    build, shape = CASES[name]
    weights = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    found: dict[str, list[Any]] = {}
    paths: list[str] = []
    for device in ("reference", "cuda-emulated"):
        with st.Session(), st.Context(device) as ctx:
            x = st.param("x", output=list(shape), prec=prec)
            y = build(x)
            weighting = st.placeholder("weights", output=list(shape))
            step = ctx.compile(st.grad_update(st.sum(st.cast(y, "f32") * weighting)), keep=y)
            ctx.set_values(x, np.random.default_rng(0).standard_normal(shape))
            ctx.set_values(weighting, weights)
            ctx.run(step)
            assert x.grad is not None
            found[device] = [ctx.get_values(t).astype(np.float64) for t in (y, x.grad)]
            paths = [kernel.path for kernel in step.kernels]
    assert any(path.startswith("rows through") for path in paths), paths
    unit = 2.0**-8 if prec == "bf16" else 2.0**-21
    for ours, expected in zip(found["cuda-emulated"], found["reference"], strict=True):
        np.testing.assert_allclose(ours, expected, rtol=2 * unit, atol=2 * unit * np.abs(expected).max())


def test_the_bits_are_those_of_kernels_of_their_own() -> None:
    found = []
    for fusion in (True, False):
        with st.Session(), st.Context("cuda-emulated") as ctx:
            x = st.placeholder("x", batch=[80], output=[90])
            y = st.softmax(x)
            routine = ctx.compile(y, fusion=fusion)
            ctx.set_values(x, np.random.default_rng(0).standard_normal((80, 90)))
            ctx.run(routine)
            found.append(ctx.get_values(y))
            assert any("rows through" in kernel.path for kernel in routine.kernels) == fusion
    np.testing.assert_array_equal(found[0], found[1])


def centred(rows: int, columns: int, *, across: bool = False) -> tuple[ir.Module, dict[ir.Buffer, Any], ir.Buffer]:
    """Row sums, then each cell less the sum of its row (``across``: of another row)."""
    x, y, total = (
        ir.Buffer("x", f32, (rows, columns)),
        ir.Buffer("y", f32, (rows, columns)),
        ir.Buffer("total", f32, (rows,)),
    )
    i, k = axis("i", rows), axis("k", columns, "reduce")
    acc = ir.Symbol("acc", f32)
    item = ir.Accumulator(acc, ZERO, apply("add", ir.Var(acc), load(x, i, k)), "add", ZERO)
    sums = ir.Block("total", (i, k), (store(total, [i], ir.Var(acc)),), (item,))
    r, c = axis("r", rows), axis("c", columns)
    row: ir.Expr = ir.Var(r.symbol)
    if across:
        row = apply("sub", ir.index(rows - 1), row, prec=st.i64)
    less = ir.Block("less", (r, c), (store(y, [r, c], apply("sub", load(x, r, c), ir.Load(total, (row,)))),))
    whole = module(sums, less)
    return whole, {x: random_array(x), y: np.zeros((rows, columns), np.float32), total: np.zeros(rows, np.float32)}, y


def test_what_stays_in_its_row_is_one_kernel() -> None:
    whole, arrays, y = centred(80, 40)
    (kernel,) = emitted(whole).kernels
    assert kernel.proc.path == "rows through 2 steps, 32 threads per row"
    np.testing.assert_allclose(run_emulated(whole, arrays)[y], run_reference(whole, arrays)[y], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("rows", "across"), [(80, True), (20, False)])
def test_what_reads_another_row_or_has_few_rows_stays_apart(rows: int, across: bool) -> None:
    whole, arrays, y = centred(rows, 40, across=across)
    assert len(emitted(whole).kernels) == 2
    np.testing.assert_allclose(run_emulated(whole, arrays)[y], run_reference(whole, arrays)[y], rtol=1e-5, atol=1e-5)


def test_sums_that_take_other_numbers_of_threads_stay_apart() -> None:
    whole, arrays, _ = centred(130, 40)
    (sums, _), (total,) = whole.kernels, [buffer for buffer in arrays if buffer.name == "total"]
    x, y = ir.Buffer("z", f32, (130, 600)), ir.Buffer("largest", f32, (130,))
    i, k = axis("i", 130), axis("k", 600, "reduce")
    acc, start = ir.Symbol("acc", f32), ir.Const(float("-inf"), f32)
    update = apply("maximum", ir.Var(acc), apply("add", load(x, i, k), load(total, i)))
    longer = ir.Block(
        "largest", (i, k), (store(y, [i], ir.Var(acc)),), (ir.Accumulator(acc, start, update, "max", start),)
    )
    (first,) = sums.body
    assert isinstance(first, ir.Block)
    both = module(first, longer)
    assert [kernel.launch.threads for kernel in emitted(both).kernels] == [32, 256]
    values = {**{buffer: arrays[buffer] for buffer in arrays if buffer.name != "y"}, x: random_array(x, 2)}
    values[y] = np.zeros(130, np.float32)
    np.testing.assert_allclose(run_emulated(both, values)[y], run_reference(both, values)[y], rtol=1e-5, atol=1e-5)


def test_a_missing_barrier_between_steps_is_found() -> None:
    whole, arrays, _ = centred(80, 40)
    with pytest.raises(MemoryCheckError, match="total"):
        run_emulated(whole, arrays, edit=lambda text: text.replace("__syncthreads();", ";"))


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_compiles(arch: str) -> None:
    with st.Session():
        x = st.param("x", output=[160, 700], prec="bf16")
        made = generated(st.grad_update(st.sum(st.cast(st.layer_norm(st.softmax(x)), "f32") ** 2)), "cuda")
    assert sum("rows through" in kernel.path for kernel in made.kernels) >= 2
    binary = compile_cuda(made.source, arch)
    assert binary.warnings == ()
    assert all(item.spill_bytes == 0 for item in binary.resources)
