"""Attention and its kind in tiles of rows, one launch, intermediates in shared memory: values, bits, limits, what stays
apart.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor.codegen import loop_ir as ir
from stagedtensor.codegen.emit.cuda import emit_cuda
from stagedtensor.codegen.pipeline import generate_cuda
from stagedtensor.codegen.schedule.cuda import launch_of, recomputed, schedule_cuda
from stagedtensor.errors import MemoryCheckError
from stagedtensor.numerics import Numerics
from stagedtensor.precision import Prec, bf16, f8e4m3, f8e5m2, f16, f32
from stagedtensor.program import as_computation, solve_program
from stagedtensor.runtime import linking
from stagedtensor.runtime.inspection import generated
from stagedtensor.runtime.nvrtc import compile_cuda
from tests.cuda.running import emitted, run_emulated
from tests.run.blocks import ZERO, Array, apply, axis, load, module, random_array, run_reference, store

UNITS = {"f32": 2.0**-21, "f16": 2.0**-10, "bf16": 2.0**-7}


def attention(
    device: str,
    prec: str,
    sizes: tuple[int, int, int, int, int],
    *,
    causal: bool,
    masked: bool = False,
    fusion: bool = True,
    gradients: bool = True,
) -> tuple[list[Array], st.Routine]:
    """Attention of ``sizes`` (batch, heads, queries, keys, features), with its gradients; query 1 may see nothing."""
    batch, heads, queries, keys, features = sizes
    rng = np.random.default_rng(3)
    with st.Session(), st.Context(device) as ctx:
        feeds: list[tuple[st.Tensor, Array]] = []
        for name, length, width in (("q", queries, features), ("k", keys, features), ("v", keys, features + 8)):
            t = st.placeholder(name, batch=[batch, length], output=[heads, width], prec=prec, requires_grad=gradients)
            feeds.append((t, rng.standard_normal((batch, length, heads, width)).astype(np.float32)))
        q, k, v = (t for t, _ in feeds)
        mask = None
        if masked:
            mask = st.placeholder("mask", batch=[batch], output=[1, queries, keys])
            visible = (rng.random((batch, 1, queries, keys)) > 0.3).astype(np.float32)
            visible[:, :, 1] = 0
            feeds.append((mask, visible))
        y = st.attention(q, k, v, causal=causal, mask=mask)
        results = [y]
        comp: Any = y
        if gradients:
            w = st.placeholder("w", batch=[batch, queries], output=[heads, features + 8])
            feeds.append((w, rng.standard_normal((batch, queries, heads, features + 8)).astype(np.float32)))
            comp = st.grad_update(st.sum(st.cast(y, "f32") * w))
            results += [grad for t in (q, k, v) if (grad := t.grad) is not None]
        routine = ctx.compile(comp, keep=y, fusion=fusion)
        for t, cells in feeds:
            ctx.set_values(t, cells)
        ctx.run(routine)
        return [ctx.get_values(t).astype(np.float64) for t in results], routine


def tiled(routine: st.Routine) -> list[str]:
    """Paths of the kernels that go through tiles of rows."""
    return [kernel.path for kernel in routine.kernels if "tiles of" in kernel.path and "rows through" in kernel.path]


CASES: dict[str, tuple[str, tuple[int, int, int, int, int], bool, bool]] = {
    "f16 causal": ("f16", (2, 3, 40, 40, 16), True, False),
    "bf16 ragged, with a mask": ("bf16", (1, 2, 33, 50, 16), False, True),
    "f32 ragged, causal, with a mask": ("f32", (2, 2, 20, 37, 12), True, True),
    "more keys than a row of lanes": ("f16", (2, 1, 18, 150, 8), False, False),
}


@pytest.mark.parametrize("name", list(CASES))
def test_forward_and_gradients(name: str) -> None:
    prec, sizes, causal, masked = CASES[name]
    ours, routine = attention("cuda-emulated", prec, sizes, causal=causal, masked=masked)
    expected, _ = attention("reference", prec, sizes, causal=causal, masked=masked)
    assert tiled(routine), [kernel.path for kernel in routine.kernels]
    for mine, theirs in zip(ours, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2 * UNITS[prec], atol=UNITS[prec] * np.abs(theirs).max())
    if masked:
        assert not ours[0][:, 1].any(), "a query that sees nothing gives 0"


@pytest.mark.parametrize("prec", ["f16", "f32"])
def test_forward_is_one_kernel_with_the_bits_of_separate_ones(prec: str) -> None:
    sizes = (2, 2, 21, 40, 16)
    (together,), routine = attention("cuda-emulated", prec, sizes, causal=True, gradients=False)
    (apart,), separate = attention("cuda-emulated", prec, sizes, causal=True, gradients=False, fusion=False)
    (kernel,) = routine.kernels
    assert "tiles of 16 rows through 5 steps" in kernel.path
    assert routine.executable.arena_bytes == 0
    assert separate.executable.arena_bytes > 0
    np.testing.assert_array_equal(together, apart)


def forward(prec: str, length: int, *, batch: int = 2, shared_bytes: int | None = None) -> ir.Module:
    """Causal attention scheduled for CUDA."""
    with st.Session():
        q, k, v = (st.placeholder(name, batch=[batch, length], output=[4, 64], prec=prec) for name in "qkv")
        computation, wanted = as_computation(st.attention(q, k, v, causal=True))
        kept = frozenset(wanted)
        program = linking.for_codegen(solve_program(computation, "forward", keep=kept), kept)
        if shared_bytes is None:
            return generate_cuda(program, Numerics())
        return generate_cuda(program, Numerics(), shared_bytes=shared_bytes)


def test_tiles_are_as_high_as_shared_memory_allows() -> None:
    heights: list[int] = []
    for kib in (99, 163, 227):
        (kernel,) = forward("f16", 512, batch=16, shared_bytes=kib << 10).kernels
        found = re.match(r"tiles of (\d+) rows through", kernel.path)
        assert found is not None
        assert launch_of(kernel).dynamic_bytes <= kib << 10
        heights.append(int(found[1]))
    assert heights == sorted(heights)
    assert heights[0] < heights[-1]


def test_scores_that_do_not_fit_are_stored_and_the_path_says_why() -> None:
    kernels = forward("f16", 2048).kernels
    assert len(kernels) > 1
    assert re.search(
        r"result stored: 16 rows of what stands between take \d+ KiB of shared memory, of 99", kernels[0].path
    )
    (kernel,) = forward("f16", 2048, shared_bytes=227 << 10).kernels
    assert kernel.path.startswith("tiles of 16 rows through 5 steps")


def test_arrays_that_are_used_in_one_step_lie_apart() -> None:
    (kernel,) = forward("bf16", 300, batch=8, shared_bytes=163 << 10).kernels
    launch = launch_of(kernel)
    whole = {buffer for buffer in launch.offsets if not buffer.name.endswith("_tile")}  # panels belong to one step
    assert len(whole) == 4
    assert len(launch.offsets) == 7
    assert all(start % 128 == 0 for start in launch.offsets.values())
    spans = {buffer.name: (start, start + buffer.nbytes) for buffer, start in launch.offsets.items() if buffer in whole}
    for (_, one), (_, other) in combinations(spans.items(), 2):  # softmax reads all of the others in one step
        assert one[1] <= other[0] or other[1] <= one[0], spans


def chain(
    prec: Prec, rows: int = 19, keys: int = 40, width: int = 16
) -> tuple[ir.Module, dict[ir.Buffer, Any], ir.Buffer]:
    """``s = q k``, ``p`` its narrow double, ``out = p v``, for each of two outer points."""
    q, k, v = (ir.Buffer(name, prec, (2, length, width)) for name, length in (("q", rows), ("k", keys), ("v", keys)))
    s, p = ir.Buffer("s", f32, (2, rows, keys)), ir.Buffer("p", prec, (2, rows, keys))
    out = ir.Buffer("out", f32, (2, rows, width))
    blocks: list[ir.Block] = []
    for result, left, right, summed, across in ((s, q, k, width, keys), (out, p, v, keys, width)):
        b, i, j, d = axis("b", 2), axis("i", rows), axis("j", across), axis("d", summed, "reduce")
        factors = (load(left, b, i, d), load(right, b, j, d) if right is k else load(right, b, d, j))
        acc = ir.Symbol("acc", f32)
        item = ir.Accumulator(acc, ZERO, ir.Fma(*factors, ir.Var(acc)), "add", ZERO)
        blocks.append(ir.Block(result.name, (b, i, j, d), (store(result, [b, i, j], ir.Var(acc)),), (item,)))
    b, i, j = axis("b", 2), axis("i", rows), axis("j", keys)
    cell = load(s, b, i, j)
    blocks.insert(1, ir.Block("p", (b, i, j), (store(p, [b, i, j], apply("add", cell, cell)),)))
    whole = module(*blocks, temporaries=[s, p])
    arrays: dict[ir.Buffer, Any] = {item: random_array(item) for item in (q, k, v)}
    return whole, {**arrays, out: np.zeros(out.shape, np.float32)}, out


@pytest.mark.parametrize(
    ("prec", "numerics", "instruction"),
    [
        (f16, Numerics(), "f16 x f16"),
        (bf16, Numerics(), "bf16 x bf16"),
        (f32, Numerics(), "f32 multiply-add"),
        (f32, Numerics(tf32_matmul=True), "tf32 x tf32"),
        (f8e4m3, Numerics(), "f16 x f16"),
        (f8e5m2, Numerics(fp8_fast_accumulate=True), "f8e5m2 x f8e5m2"),
    ],
)
def test_chain_of_products(prec: Prec, numerics: Numerics, instruction: str) -> None:
    """The slab is read as fragments where it has the format of the instruction, else staged cell by cell."""
    whole, arrays, out = chain(prec)
    (kernel,) = emitted(whole, numerics).kernels
    assert kernel.proc.path.startswith("tiles of 16 rows through 3 steps")
    assert instruction in kernel.proc.path
    assert kernel.buffers[-1] is out
    assert len(kernel.buffers) == 4
    found, expected = run_emulated(whole, arrays, numerics=numerics)[out], run_reference(whole, arrays)[out]
    unit = 2e-3 if numerics.tf32_matmul else 1e-4
    np.testing.assert_allclose(found, expected, rtol=unit, atol=unit * np.abs(expected).max())
    np.testing.assert_array_equal(found, run_emulated(whole, arrays, numerics=numerics)[out])


def test_a_missing_barrier_between_steps_is_found() -> None:
    whole, arrays, _ = chain(f16)
    with pytest.raises(MemoryCheckError, match="of s"):
        run_emulated(
            whole,
            arrays,
            edit=lambda text: text.replace(
                "        __syncthreads();\n        for (int64_t i_row", "        for (int64_t i_row"
            ),
        )


def test_cells_beyond_a_slab_s_matrix_are_set() -> None:
    whole, arrays, _ = chain(f16)
    with pytest.raises(MemoryCheckError, match="nobody wrote"):
        run_emulated(whole, arrays, edit=lambda text: re.sub(r"p\[[^\n]*\] = 0;\n", ";\n", text))


def test_a_kernel_that_reads_other_rows_stays_between() -> None:
    whole, arrays, _ = chain(f32)
    s, p = whole.temporaries
    kernels = list(whole.kernels)
    reads = next(stmt for stmt in kernels[1].body if isinstance(stmt, ir.Block))
    b, i, j = reads.iterators
    turned = apply("sub", ir.index(s.shape[1] - 1), ir.Var(i.symbol), prec=st.i64)
    cell = ir.Load(s, (ir.Var(b.symbol), turned, ir.Var(j.symbol)))
    other = ir.Block("p", (b, i, j), (store(p, [b, i, j], apply("add", cell, cell)),))
    apart = ir.Module(
        whole.name,
        (kernels[0], ir.Proc("p", kernels[1].params, (other,)), kernels[2]),
        whole.external,
        whole.temporaries,
    )
    assert len(schedule_cuda(apart).kernels) == 3
    out = whole.external[-1]
    np.testing.assert_allclose(
        run_emulated(apart, arrays)[out], run_reference(apart, arrays)[out], rtol=1e-4, atol=1e-4
    )


def test_what_stands_between_goes_before() -> None:
    """What makes ``v`` goes before the group; where a sum over rows reads ``s`` too, it is stored, and nothing is
    spared.
    """
    whole, arrays, _ = chain(f32)
    s, _ = whole.temporaries
    v = next(item for item in whole.external if item.name == "v")
    source, total = ir.Buffer("source", f32, v.shape), ir.Buffer("total", f32, (2, s.shape[2]))
    b, i, j = (axis(name, extent) for name, extent in zip("bij", v.shape, strict=True))
    made = ir.Block("v", (b, i, j), (store(v, [b, i, j], apply("add", load(source, b, i, j), load(source, b, i, j))),))
    b, j, k = axis("b", 2), axis("j", s.shape[2]), axis("k", s.shape[1], "reduce")
    acc = ir.Symbol("acc", f32)
    item = ir.Accumulator(acc, ZERO, apply("add", ir.Var(acc), load(s, b, k, j)), "add", ZERO)
    summed = ir.Block("total", (b, j, k), (store(total, [b, j], ir.Var(acc)),), (item,))
    first, middle, last = (kernel.body[0] for kernel in whole.kernels)
    assert isinstance(first, ir.Block)
    assert isinstance(middle, ir.Block)
    assert isinstance(last, ir.Block)
    p2 = middle.stores[0].buffer
    kept = module(first, summed, middle, made, last, temporaries=[p2])
    values = {**{key: arrays[key] for key in arrays if key in kept.external}, source: random_array(source)}
    for buffer in kept.external:
        values.setdefault(buffer, np.zeros(buffer.shape, np.float32))
    alone = [kernel.proc.name for kernel in emitted(kept).kernels]
    assert alone == ["s", "total", "p", "v", "out"], "s is a result here, so that nothing would be spared"
    again = module(first, middle, made, last, temporaries=[s, p2])
    assert [kernel.proc.name for kernel in emitted(again).kernels] == ["v", "out"]
    for one in (kept, again):
        found, expected = run_emulated(one, values), run_reference(one, values)
        for buffer in one.external:
            np.testing.assert_allclose(found[buffer], expected[buffer], rtol=1e-4, atol=1e-4)


def test_text(golden: Callable[[str], None]) -> None:
    whole, _, _ = chain(f16)
    golden(emit_cuda(schedule_cuda(whole), prelude=False).kernels[0].text)


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_compiles(arch: str) -> None:
    source = emit_cuda(forward("bf16", 512, batch=16))
    (kernel,) = source.kernels
    assert kernel.shared_bytes > 48 << 10
    binary = compile_cuda(source.text, arch)
    assert binary.warnings == ()
    assert all(item.spill_bytes == 0 for item in binary.resources)


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")
@pytest.mark.parametrize("prec", ["f16", "f32"])
def test_gradients_compile(prec: str) -> None:
    with st.Session():
        q, k, v = (
            st.placeholder(name, batch=[8, 256], output=[4, 64], prec=prec, requires_grad=True) for name in "qkv"
        )
        made = generated(st.grad_update(st.sum(st.cast(st.attention(q, k, v), "f32") ** 2)), "cuda")
    assert any("rows through" in kernel.path and "tiles of" in kernel.path for kernel in made.kernels)
    binary = compile_cuda(made.source, "sm_90")
    assert binary.warnings == ()
    assert all(item.spill_bytes == 0 for item in binary.resources)


def training(device: str) -> tuple[list[Array], st.Routine]:
    """The gradients of causal attention between projections, everything in bf16."""
    with st.Session(), st.Context(device) as ctx:
        x = st.placeholder("x", batch=[2, 24], output=[32])
        with st.master_weights("bf16"):
            loss = st.mean(st.cast(st.nn.multi_head_attention(32, 2, causal=True)(x), "f32") ** 2)
        st.PrecisionPolicy(activation=st.bf16, grad=st.bf16).apply(loss)
        ctx.init_params(loss, seed=0)
        routine = ctx.compile(st.grad_update(loss))
        ctx.set_values(x, np.random.default_rng(0).standard_normal((2, 24, 32)))
        ctx.run(routine)
        return [ctx.get_values(p.grad).astype(np.float64) for p in loss.params if p.grad is not None], routine


def test_gradients_compute_scores_again_and_store_none(monkeypatch: pytest.MonkeyPatch) -> None:
    stored, before = training("cuda-emulated")
    monkeypatch.setattr(recomputed, "LEAST_CELLS", 0)
    again, after = training("cuda-emulated")
    scores = "[2, 2, 24, 24]"
    assert scores in {line.shape for line in before.executable.temporaries}
    assert scores not in {line.shape for line in after.executable.temporaries}
    assert after.executable.arena_bytes < before.executable.arena_bytes
    assert len(after.kernels) <= len(before.kernels)
    assert sum(kernel.path.count("rows through") for kernel in after.kernels) == 4, (
        "forward, and one for each of q, k, v"
    )
    for mine, same, expected in zip(again, stored, training("reference")[0], strict=True):
        np.testing.assert_array_equal(mine, same)
        np.testing.assert_allclose(mine, expected, rtol=UNITS["bf16"], atol=UNITS["bf16"] * np.abs(expected).max())


def test_scores_are_kept_where_a_later_product_is_not_on_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recomputed, "LEAST_CELLS", 0)
    _, routine = attention("cuda-emulated", "f32", (2, 2, 20, 20, 8), causal=True)
    assert "[2, 2, 20, 20]" in {line.shape for line in routine.executable.temporaries}
