"""Contractions on AMX matrix tiles, on any x86-64 with AVX-512: the tiles' C model executes the text that the processor
would.

The order of sums is fixed: blocks of 32 terms, even and odd terms apart. An oracle in NumPy has it once more.
"""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import stagedtensor as st
from stagedtensor.codegen import interpret, loop_ir as ir
from stagedtensor.codegen.pipeline import generate
from stagedtensor.codegen.schedule import schedule
from stagedtensor.precision import bf16
from stagedtensor.program import as_computation, solve_program
from stagedtensor.runtime import cpu, linking
from stagedtensor.runtime.compiler import compile_shared, find_compiler
from stagedtensor.runtime.target import TARGETS, detect
from tests.numerics import test_accumulators as accumulators
from tests.numerics.running import Array, Program, Setting, run
from tests.run.blocks import random_array, run_c
from tests.run.test_schedule_convolution import input_gradient

AMX = "avx512+amx"

pytestmark = pytest.mark.skipif(
    bool(TARGETS["avx512"].missing(detect())), reason="needs AVX-512 around the modelled tiles"
)


@pytest.fixture(autouse=True)
def _modelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target without the compiler's flags for tiles: generated source then brings their model."""
    monkeypatch.setitem(TARGETS, AMX, replace(TARGETS[AMX], flags=TARGETS["avx512"].flags))
    monkeypatch.setattr(cpu, "_runnable", lambda target: target)


def flushed(x: Array) -> Array:
    """What is below the least normal number counts as 0."""
    return np.where(np.abs(x) < 2.0**-126, np.float32(0.0) * x, x).astype(np.float32)


def oracle(a: Array, b: Array, start: Array | None = None) -> Array:
    """a [m, k] times b [k, n] in the order of matrix tiles; products of bf16 are exact in f64."""
    total = np.zeros((a.shape[0], b.shape[1]), np.float32) if start is None else start.astype(np.float32)
    left, right = (flushed(side.astype(np.float32)).astype(np.float64) for side in (a, b))
    for first in range(0, a.shape[1], 32):
        parts = [np.zeros_like(total), np.zeros_like(total)]
        for k in range(first, min(first + 32, a.shape[1])):
            with np.errstate(invalid="ignore", over="ignore"):
                parts[k % 2] = flushed((left[:, k : k + 1] * right[k : k + 1] + parts[k % 2]).astype(np.float32))
        with np.errstate(invalid="ignore"):
            total = flushed(flushed(total) + flushed(parts[0] + parts[1]))
    return total


def narrow(shape: tuple[int, ...], seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(ml_dtypes.bfloat16)


def product(spec: str, left: Array, right: Array, *, target: str = AMX, threads: int = 2) -> tuple[Array, st.Routine]:
    """The contraction of two bf16 arrays with an f32 result."""
    with st.Session(), st.Context("cpu", target=target, threads=threads) as ctx:
        a = st.placeholder("a", output=list(left.shape), prec="bf16")
        b = st.placeholder("b", output=list(right.shape), prec="bf16")
        y = st.einsum(spec, a, b)
        st.specify(y, "f32")
        routine = ctx.compile(y, name="product")
        ctx.set_values(a, left)
        ctx.set_values(b, right)
        ctx.run(routine)
        return ctx.get_values(y), routine


def check_guarded_windows(
    target: str, whole: ir.Module, order: Callable[[Array, Array, Array], Array], unit: str
) -> None:
    """A convolution's input gradient, ``dx`` of ``dy`` and ``weights``: channels innermost, cells outside skipped."""
    dy, weights, dx = whole.external
    arrays = {buffer: random_array(buffer, seed) for seed, buffer in enumerate(whole.external)}
    expected = np.zeros(dx.shape, np.float32)
    kernel, small = weights.shape[1], dy.shape[1]
    for h, w, kh, kw in itertools.product(*(range(dx.shape[1]),) * 2, *(range(kernel),) * 2):
        if 0 <= h - kh < small and 0 <= w - kw < small:
            expected[:, h, w] = order(arrays[dy][:, h - kh, w - kw], arrays[weights][:, kh, kw], expected[:, h, w])
    scheduled = schedule(whole, TARGETS[target], st.Numerics())
    assert any(unit in kernel.path for kernel in scheduled.kernels)
    for threads in (1, 3):
        got = run_c(whole, arrays, threads=threads, target=TARGETS[target])
        np.testing.assert_array_equal(got[dx], expected.astype(ml_dtypes.bfloat16))


def path(routine: st.Routine) -> str:
    return routine.kernels[-1].path


@pytest.mark.parametrize(
    ("rows", "columns", "terms"),
    [(32, 32, 32), (48, 40, 64), (33, 17, 70), (16, 16, 33), (20, 100, 95), (128, 96, 784), (65, 33, 129)],
)
def test_products_have_the_units_order_of_sums(rows: int, columns: int, terms: int) -> None:
    a, b = narrow((rows, terms), 1), narrow((terms, columns), 2)
    expected = oracle(a, b)
    cells, routine = product("ik; kj => ij", a, b)
    np.testing.assert_array_equal(cells, expected)
    assert f"bf16 matrix tiles {32 if rows >= 32 else 16}x32" in path(routine)
    assert "st_tile_multiply_bf16" in routine.source
    exact = a.astype(np.float64) @ b.astype(np.float64)
    bound = 2 * terms * 2.0**-24 * (np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64)))
    assert (np.abs(cells - exact) <= bound).all()


@pytest.mark.parametrize("spec", ["ik; jk => ij", "ki; kj => ij", "ki; jk => ij", "ik; kj => ji"])
@pytest.mark.parametrize("sizes", [{"i": 40, "j": 52, "k": 69}, {"i": 48, "j": 52, "k": 70}], ids=["uneven", "squares"])
def test_operands_may_lie_any_way(spec: str, sizes: dict[str, int]) -> None:
    left, right = (spec.replace("=>", ";").replace(" ", "").split(";")[at] for at in (0, 1))
    a, b = (narrow(tuple(sizes[axis] for axis in axes), at) for at, axes in enumerate((left, right)))
    rows, columns = (a if left == "ik" else a.T), (b if right == "kj" else b.T)
    expected = oracle(rows, columns)
    cells, routine = product(spec, a, b)
    np.testing.assert_array_equal(cells, expected.T if spec.endswith("ji") else expected)
    assert "matrix tiles" in path(routine)
    turned = [kernel for kernel in routine.kernels if "turning squares of 16 pairs" in kernel.path]
    across = (left == "ki") + (right == "jk")
    assert spec.endswith("ji") or len(turned) == (across if sizes["k"] % 2 == 0 else 0)


def test_batches_and_sums_over_several_axes() -> None:
    a, b = narrow((3, 24, 2, 40), 3), narrow((3, 40, 2, 36), 4)
    cells, routine = product("nihk; nkhj => nij", a, b)
    for n in range(3):
        total = np.zeros((24, 36), np.float32)
        for h in range(2):
            total = oracle(a[n, :, h], b[n, :, h], total)
        np.testing.assert_array_equal(cells[n], total)
    assert "matrix tiles" in path(routine)


@pytest.mark.parametrize("sizes", [(33, 5, 3, 16, 32), (20, 4, 2, 24, 70)])
def test_guards_skip_whole_tiles(sizes: tuple[int, int, int, int, int]) -> None:
    check_guarded_windows(AMX, input_gradient(*sizes, bf16), oracle, "bf16 matrix tiles")


def test_threads_change_no_bit() -> None:
    a, b = narrow((160, 96), 5), narrow((96, 224), 6)
    one, three = (product("ik; kj => ij", a, b, threads=threads)[0] for threads in (1, 3))
    np.testing.assert_array_equal(one, three)


def test_what_tiles_cannot_do_is_widened_and_says_why() -> None:
    for shape, reason in (
        ((8, 64, 64), "fewer than 16 rows or 16 columns"),
        ((64, 64, 20), "fewer than 32 terms in a row"),
    ):
        a, b = narrow(shape[::2], 7), narrow((shape[2], shape[1]), 8)
        cells, routine = product("ik; kj => ij", a, b)
        np.testing.assert_array_equal(cells, product("ik; kj => ij", a, b, target="avx512")[0])
        assert f"not on the matrix unit: {reason}" in path(routine)
        assert "st_tile" not in routine.source


def test_infinities_and_nan_come_out_where_they_should() -> None:
    a, b = narrow((32, 70), 9), narrow((70, 33), 10)
    a[3, 69], a[5, 2] = np.inf, np.nan  # one among the last terms, which stand beside zeros
    b[69] = np.abs(b[69])
    cells, _ = product("ik; kj => ij", a, b)
    assert np.isposinf(cells[3]).all()
    assert np.isnan(cells[5]).all()
    assert np.isfinite(np.delete(cells, (3, 5), 0)).all()


def test_subnormal_operands_and_sums_count_as_zero() -> None:
    a, b = narrow((32, 32), 11), narrow((32, 32), 12)
    a[:] = 0
    a[0, 0], a[1, 0] = 2.0**-130, 2.0**-126
    b[0] = 2.0**20
    b[0, :16] = 2.0**-1
    cells, _ = product("ik; kj => ij", a, b)
    np.testing.assert_array_equal(cells, oracle(a, b))
    assert not cells[0].any()  # 2**-110 elsewhere, within the bound for matrix units
    assert not cells[1, :16].any()
    assert (cells[1, 16:] == 2.0**-106).all()


def test_exact_sums_are_those_of_every_other_target() -> None:
    tiles, wide = (run(accumulators.a1, Setting(target=target)) for target in (AMX, "avx512"))
    for one, other in zip(tiles, wide, strict=True):
        np.testing.assert_array_equal(one, other)


def training() -> Program:
    with st.master_weights("bf16"):
        x = st.placeholder("x", batch=[64], output=[48])
        hidden = st.relu(st.param("w1", output=[80], init=st.normal(0.2)) @ x)
        loss = st.mean(st.tanh(st.param("w2", output=[32], init=st.normal(0.2)) @ hidden))
    st.PrecisionPolicy(activation=st.bf16, grad=st.bf16).apply(loss)
    grads = [grad for param in loss.params if (grad := param.grad) is not None]
    values = [
        (param, np.random.default_rng(at).standard_normal(shape))
        for at, (param, shape) in enumerate(zip(loss.params, ((80, 48), (32, 80)), strict=True))
    ]
    return Program([(x, narrow((64, 48), 13)), *values], [loss, *grads], st.grad_update(loss))


def test_a_training_step_runs_on_tiles_and_agrees_with_widened_operands() -> None:
    seen: list[st.Routine] = []

    def build() -> Program:
        made = training()
        made.inspect = seen.append
        return made

    tiles, wide = run(build, Setting(target=AMX)), run(build, Setting(target="avx512"))
    for one, other in zip(tiles, wide, strict=True):
        one, other = one.astype(np.float32), other.astype(np.float32)
        assert np.abs(one - other).max() <= 2.0**-7 * np.abs(other).max()
    products = [kernel.path for kernel in seen[0].kernels if "contraction" in kernel.path]
    assert len(products) >= 4
    assert all("matrix tiles" in item for item in products)
    for fusion in (True, False):
        for one, other in zip(run(training, Setting(target=AMX, fusion=fusion, threads=3)), tiles, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(("spec", "terms"), [("ik; kj => ij", 35), ("ki; jk => ij", 64)])
def test_the_meaning_of_a_tile_is_what_it_computes(spec: str, terms: int) -> None:
    sizes = {"i": 16, "j": 20, "k": terms}
    axes = spec.split(" => ")[0].split("; ")
    a, b = (narrow(tuple(sizes[axis] for axis in side), at) for at, side in enumerate(axes))
    cells, _ = product(spec, a, b)
    with st.Session():
        left, right = (
            st.placeholder(name, output=list(side.shape), prec="bf16") for name, side in (("a", a), ("b", b))
        )
        y = st.einsum(spec, left, right)
        st.specify(y, "f32")
        solved = solve_program(as_computation(y)[0], "product", keep=frozenset((left.node, right.node, y.node)))
        module = generate(linking.for_codegen(solved, frozenset((y.node,))), TARGETS[AMX], st.Numerics(), check=True)
    given = {
        buffer: {"a": a, "b": b}.get(buffer.name, np.zeros(buffer.shape, np.float32)) for buffer in module.external
    }
    interpret.run_module(module, given)
    (result,) = (given[buffer] for buffer in module.external if buffer.name not in ("a", "b"))
    np.testing.assert_array_equal(result, cells)


def test_the_instructions_assemble(tmp_path: Path) -> None:
    """The same text with the target's real flags: the compiler takes it and the library holds the instructions."""
    compiler = find_compiler()
    _, routine = product("ik; kj => ij", narrow((33, 70), 16), narrow((70, 40), 17))
    real = replace(TARGETS[AMX], flags=(*TARGETS["avx512"].flags, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"))
    compile_shared(routine.source, tmp_path / "real.so", flags=compiler.flags(real), compiler=compiler)
    listing = subprocess.run(["objdump", "-d", tmp_path / "real.so"], capture_output=True, text=True, check=False)
    if listing.returncode == 0 and "tdpbf16ps" not in listing.stdout:
        pytest.fail("the library has no matrix instructions")
    assert listing.stdout.count("ldtilecfg") == listing.stdout.count("tilerelease") == 1
