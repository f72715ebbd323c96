"""Narrow contractions on tensor cores: the model of the instructions, the template, its epilogue, the PTX that results."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

import stagedtensor as st
from stagedtensor.codegen import loop_ir as ir
from stagedtensor.codegen.affine import add
from stagedtensor.codegen.emit.cuda import CudaKernel, CudaSource
from stagedtensor.codegen.passes.plan_memory import MemoryPlan
from stagedtensor.codegen.prelude import prelude_source
from stagedtensor.codegen.prelude.cuda import cuda_functions
from stagedtensor.codegen.rewrite import Rewriter
from stagedtensor.codegen.schedule.cuda import Launch, mma
from stagedtensor.errors import MemoryCheckError
from stagedtensor.precision import Prec, bf16, f8e4m3, f8e5m2, f16, f32, i64, u32
from stagedtensor.runtime.emulated import EmulatedRoutine, WatchedBuffer, load_emulated
from stagedtensor.runtime.nvrtc import compile_cuda
from tests.cuda.running import emitted, run_emulated
from tests.run.blocks import (
    ZERO,
    Array,
    apply,
    at,
    axis,
    cache,
    contraction,
    load,
    module,
    random_array,
    run_reference,
    store,
)

needs_nvrtc = pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")
DTYPES = {f16: np.dtype(np.float16), bf16: np.dtype(ml_dtypes.bfloat16)}

ONE_TILE = """\
extern "C" __global__ void one_tile(const uint32_t *a, const uint32_t *b, float *d) {{
    const int lane = threadIdx.x;
    uint32_t left[4] = {{a[4 * lane], a[4 * lane + 1], a[4 * lane + 2], a[4 * lane + 3]}};
    uint32_t right[2] = {{b[2 * lane], b[2 * lane + 1]}};
    float sums[4] = {{d[4 * lane], d[4 * lane + 1], d[4 * lane + 2], d[4 * lane + 3]}};
    st_mma_m16n8k16_{prec}(sums, left, right);
    for (int k = 0; k < 4; k++) d[4 * lane + k] = sums[k];
}}
"""


def by_hand(
    text: str, names: list[str], buffers: tuple[ir.Buffer, ...], writes: ir.Buffer, values: list[Array]
) -> list[Array]:
    """Run a kernel written by hand with one warp."""
    whole = prelude_source([], dialect="cuda") + cuda_functions(names) + text
    launch = Launch(1, 32, cooperative=True)
    kernel = CudaKernel(
        ir.Proc("one_tile", buffers, ()), "one_tile", text, (0, 0), launch, buffers, frozenset({writes}), False, 0
    )
    source = CudaSource(whole, (kernel,), buffers, (), 0, MemoryPlan())
    held = {buffer: WatchedBuffer(buffer.size, buffer.type, written=True) for buffer in buffers}
    for watched, cells in zip(held.values(), values, strict=True):
        watched.cells[...] = cells.reshape(-1)
    EmulatedRoutine(load_emulated(source, cache()), source, held, np.zeros(1, np.int64)).run()
    return [watched.cells.copy() for watched in held.values()]


@pytest.mark.parametrize("prec", [f16, bf16])
def test_fragments_lie_as_the_ptx_manual_says(prec: Prec) -> None:
    """Element i of a: row g (+ 8 for i in 2, 3, 6, 7), column 2t + (i & 1) (+ 8 for i >= 4); b and d likewise."""
    rng = np.random.default_rng(4)
    a, b = (rng.integers(-8, 9, shape).astype(DTYPES[prec]) for shape in ((16, 16), (16, 8)))
    d = rng.integers(-8, 9, (16, 8)).astype(np.float32)
    left, right, sums = np.zeros((32, 8), DTYPES[prec]), np.zeros((32, 4), DTYPES[prec]), np.zeros((32, 4), np.float32)
    cells = [(lane // 4 + 8 * (i >> 1), 2 * (lane % 4) + (i & 1)) for lane in range(32) for i in range(4)]
    for lane in range(32):
        group, member = lane >> 2, lane % 4
        for i in range(8):
            row = group if i in (0, 1, 4, 5) else group + 8
            left[lane, i] = a[row, member * 2 + (i & 1) + (8 if i >= 4 else 0)]
        for i in range(4):
            right[lane, i] = b[member * 2 + (i & 1) + (8 if i >= 2 else 0), group]
    sums.reshape(-1)[:] = [d[cell] for cell in cells]
    buffers = ir.Buffer("a", u32, (128,)), ir.Buffer("b", u32, (64,)), ir.Buffer("d", f32, (128,))
    *_, found = by_hand(
        ONE_TILE.format(prec=prec.name),
        [f"st_mma_m16n8k16_{prec.name}"],
        buffers,
        buffers[2],
        [left.view(np.uint32), right.view(np.uint32), sums],
    )
    expected = d + a.astype(np.float32) @ b.astype(np.float32)  # small integers: exact
    np.testing.assert_array_equal(found, [expected[cell] for cell in cells])


def narrow_product(
    left: Prec, right: Prec, size: tuple[int, int, int], form: str, out: Prec = f32
) -> tuple[ir.Module, dict[ir.Buffer, Array], ir.Buffer]:
    m, n, k = size
    a = ir.Buffer("a", left, (k, m) if form == "TN" else (m, k))
    b = ir.Buffer("b", right, (n, k) if form == "NT" else (k, n))
    bias, c = ir.Buffer("bias", f32, (n,)), ir.Buffer("c", out, (m, n))

    def epilogue(value: ir.Expr, _m: ir.BlockIterator, column: ir.BlockIterator) -> ir.Expr:
        return apply("relu", apply("add", value, load(bias, column)))

    whole = module(contraction(a, b, c, size, form, epilogue))
    arrays = {
        a: random_array(a),
        b: random_array(b, 1),
        bias: random_array(bias, 2),
        c: np.zeros((m, n), out.numpy_dtype),
    }
    return whole, arrays, c


CASES = [
    (f16, f16, (41, 25, 50), "NN", f32),
    (bf16, bf16, (40, 24, 56), "NN", bf16),
    (bf16, bf16, (70, 70, 33), "NT", f32),
    (f16, f16, (72, 72, 72), "NT", f32),
    (bf16, bf16, (72, 40, 130), "TN", f32),
    (f16, f16, (264, 260, 20), "TN", f16),
    (f8e4m3, f8e5m2, (17, 9, 65), "NN", f32),
    (f8e5m2, bf16, (33, 34, 35), "NT", f32),
]


@pytest.mark.parametrize("enough", [1, 96])
@pytest.mark.parametrize(("left", "right", "size", "form", "out"), CASES)
def test_products_with_epilogue(
    left: Prec,
    right: Prec,
    size: tuple[int, int, int],
    form: str,
    out: Prec,
    enough: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mma, "ENOUGH_TILES", enough)  # 1: the largest tiles that fit
    whole, arrays, c = narrow_product(left, right, size, form, out)
    assert "tensor cores" in emitted(whole).kernels[0].proc.path
    expected, found = (run(whole, arrays)[c].astype(np.float64) for run in (run_reference, run_emulated))
    a, b = (np.abs(cells.astype(np.float64)) for cells in list(arrays.values())[:2])
    magnitude = (a.T if form == "TN" else a) @ (b.T if form == "NT" else b) + 2
    unit = {f32: 2.0**-24, f16: 2.0**-11, bf16: 2.0**-8}[out]
    np.testing.assert_array_less(
        np.abs(found - expected), 2 * size[2] * 2.0**-24 * magnitude + 2 * unit * np.abs(expected) + 1e-30
    )
    assert np.count_nonzero(found) > found.size // 4


def test_products_that_are_subtracted_keep_their_sign() -> None:
    a, b, c = ir.Buffer("a", f16, (16, 16)), ir.Buffer("b", f16, (16, 16)), ir.Buffer("c", f32, (16, 16))
    i, j, k = axis("i", 16), axis("j", 16), axis("k", 16, "reduce")
    acc = ir.Symbol("acc", f32)
    update = apply("sub", ir.Var(acc), apply("mul", load(a, i, k), load(b, k, j)))
    item = ir.Accumulator(acc, ZERO, update, "add", ZERO)
    whole = module(ir.Block("less", (i, j, k), (store(c, [i, j], ir.Var(acc)),), (item,)))
    assert "no mma: products are subtracted" in emitted(whole).kernels[0].proc.path
    arrays = {a: random_array(a), b: random_array(b, 1), c: np.zeros((16, 16), np.float32)}
    np.testing.assert_array_equal(run_emulated(whole, arrays)[c], run_reference(whole, arrays)[c])


@pytest.mark.parametrize(
    ("size", "form", "words"),
    [
        ((64, 64, 64), "NN", "16-byte copies"),
        ((64, 64, 64), "TN", "16-byte copies"),
        ((64, 63, 64), "NT", "16-byte copies"),
        ((64, 63, 64), "NN", "16-byte copies of one operand"),
        ((63, 63, 63), "NT", "copies cell by cell"),
    ],
)
def test_how_tiles_get_there(size: tuple[int, int, int], form: str, words: str) -> None:
    whole, *_ = narrow_product(bf16, bf16, size, form)
    assert emitted(whole).kernels[0].proc.path.endswith(words)


def beside(kind: str) -> tuple[ir.Module, dict[ir.Buffer, Array], ir.Buffer, dict[ir.Symbol, int]]:
    """A product whose left operand 16-byte copies would read beside its cells."""
    rows, columns, depth = 13, 10, 16
    x, w = ir.Buffer("x", bf16, (rows, 24)), ir.Buffer("w", bf16, (depth, columns))
    i, j, k = axis("i", rows), axis("j", columns), axis("k", depth, "reduce")
    scalars: dict[ir.Symbol, int] = {}
    place: ir.Expr = ir.Var(k.symbol)
    guard: ir.Expr | None = None
    row: tuple[ir.Expr, ...] = at(i)
    if kind == "run-time depth":
        count = ir.Symbol("count", i64)
        scalars[count] = 11
        k = ir.BlockIterator(k.symbol, ir.Var(count), depth, "reduce")
    elif kind == "first cell of a row that is no multiple":
        place = apply("add", place, ir.index(1), prec=i64)
    else:  # a window of 16 at every eighth cell, the last ones half outside
        x, row = ir.Buffer("x", bf16, (100,)), ()
        place = apply("add", apply("mul", ir.Var(i.symbol), ir.index(8), prec=i64), place, prec=i64)
        guard = apply("lt", place, ir.index(100), prec=i64)
    acc, y = ir.Symbol("acc", f32), ir.Buffer("y", f32, (rows, columns))
    update = ir.Fma(ir.Cast(ir.Load(x, (*row, place)), f32), load(w, k, j), ir.Var(acc))
    item = ir.Accumulator(acc, ZERO, update, "add", ZERO)
    block = ir.Block("beside", (i, j, k), (store(y, [i, j], ir.Var(acc)),), (item,), guard=guard)
    arrays = {x: random_array(x), w: random_array(w, 1), y: np.zeros(y.shape, np.float32)}
    if kind == "run-time depth":
        arrays[x][:, 11:] = np.nan
    return module(block, scalars=list(scalars)), arrays, y, scalars


@pytest.mark.parametrize("kind", ["run-time depth", "first cell of a row that is no multiple", "guard within 16 bytes"])
def test_cells_that_16_bytes_would_not_hold_alone_are_copied_one_by_one(kind: str) -> None:
    whole, arrays, y, scalars = beside(kind)
    path = emitted(whole).kernels[0].proc.path
    assert "tensor cores" in path
    assert "copies cell by cell" in path
    found, expected = (run(whole, arrays, scalars)[y] for run in (run_emulated, run_reference))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_copies_that_are_not_waited_for_are_found() -> None:
    whole, arrays, _ = narrow_product(f16, f16, (64, 64, 128), "NN")
    with pytest.raises(MemoryCheckError, match="nobody wrote"):
        run_emulated(whole, arrays, edit=lambda text: text.replace("            st_copy_async_wait_1();\n", "\n"))


def test_a_stage_that_is_overwritten_too_early_is_found() -> None:
    whole, arrays, _ = narrow_product(f16, f16, (64, 64, 256), "NN")

    def two_ahead(text: str) -> str:
        return text.replace("(i_depth + 2) % 3", "(i_depth + 3) % 3")

    with pytest.raises(MemoryCheckError, match="_tile"):
        run_emulated(whole, arrays, edit=two_ahead)


@pytest.mark.parametrize(("width", "first"), [(40, 1), (36, 0)])
def test_an_operand_whose_rows_start_between_multiples_of_16_bytes_is_copied_cell_by_cell(
    width: int, first: int
) -> None:
    a, b, c = ir.Buffer("a", f16, (32, width)), ir.Buffer("b", f16, (32, 32)), ir.Buffer("c", f32, (32, 32))

    class Shifted(Rewriter):
        def expr(self, expr: ir.Expr) -> ir.Expr:
            if isinstance(expr, ir.Load) and expr.buffer is a:
                row, deep = expr.indices
                return ir.Load(a, (row, add(deep, first)))
            return super().expr(expr)

    whole = module(Shifted().block(contraction(a, b, c, (32, 32, 32), "NN")))
    arrays = {a: random_array(a), b: random_array(b, 1), c: np.zeros((32, 32), np.float32)}
    assert emitted(whole).kernels[0].proc.path.endswith("16-byte copies of one operand")
    exact = arrays[a].astype(np.float64)[:, first : first + 32] @ arrays[b].astype(np.float64)
    np.testing.assert_allclose(run_emulated(whole, arrays)[c], exact, rtol=1e-5, atol=1e-5)


def test_rows_of_matrices_must_be_aligned() -> None:
    whole, arrays, _ = narrow_product(f16, f16, (40, 24, 50), "NN")
    with pytest.raises(MemoryCheckError, match="multiple of 16"):
        run_emulated(whole, arrays, edit=lambda text: text.replace("8 * (lane / 16)", "7 * (lane / 16)"))


def test_a_tile_that_misses_the_barrier_is_found() -> None:
    whole, arrays, _ = narrow_product(f16, f16, (40, 24, 56), "NN")
    with pytest.raises(MemoryCheckError, match=r"left_tile|right_tile"):
        run_emulated(whole, arrays, edit=lambda text: text.replace("__syncthreads();", ";", 1))


@needs_nvrtc
@pytest.mark.parametrize("size", [(40, 24, 50), (64, 64, 64), (256, 256, 64)])
def test_ptx_shows_tensor_core_instructions_and_no_spills(
    size: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mma, "ENOUGH_TILES", 1)
    whole, *_ = narrow_product(bf16, bf16, size, "NN", bf16)
    text = emitted(whole).text
    ptx = compile_cuda(text, "sm_80", "ptx").data.decode()
    assert "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" in ptx
    assert "ldmatrix.sync.aligned.m8n8.x4.shared.b16" in ptx
    assert "cp.async.cg.shared.global" in ptx
    binary = compile_cuda(text, "sm_90")
    assert binary.warnings == ()
    assert binary.resources[0].spill_bytes == 0


def test_bf16_training_step_runs_on_tensor_cores() -> None:
    results = {}
    for device in ("reference", "cuda-emulated"):
        with st.Session(), st.Context(device) as ctx:
            x, y = st.placeholder("x", batch=[32], output=[24]), st.placeholder("y", batch=[32], prec=st.i32)
            with st.master_weights("bf16"):
                w1, b1 = st.param("w1", output=[40], input=[24]), st.param("b1", output=[40])
                w2, b2 = st.param("w2", output=[16], input=[40]), st.param("b2", output=[16])
            loss = st.mean(st.cross_entropy(w2 @ st.relu(w1 @ x + b1) + b2, y))
            st.PrecisionPolicy(activation="bf16", grad="bf16").apply(loss)
            ctx.init_params(loss, seed=0)
            step = ctx.compile(st.sequence(st.grad_update(loss), st.sgd_update(loss, 0.1)))
            rng = np.random.default_rng(0)
            ctx.set_values(x, rng.normal(size=(32, 24)).astype(np.float32))
            ctx.set_values(y, rng.integers(0, 16, 32))
            losses = []
            for _ in range(4):
                ctx.run(step)
                losses.append(float(ctx.get_values(loss)))
            results[device] = losses, [kernel.path for kernel in step.kernels]
    losses, paths = results["cuda-emulated"]
    assert sum("tensor cores" in path for path in paths) >= 3, paths
    np.testing.assert_allclose(losses, results["reference"][0], rtol=4e-3)
    assert losses[-1] < losses[0]


def test_tensor_core_kernel_is_readable(golden: Callable[[str], None]) -> None:
    whole, *_ = narrow_product(bf16, bf16, (64, 48, 96), "NT", bf16)
    golden(emitted(whole).kernels[0].text)
