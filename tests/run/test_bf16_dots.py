"""Contractions by dots of bf16 pairs, on any x86-64 with AVX-512: the model of the instruction executes the text
everywhere else.

The order of sums is fixed: terms in pairs, the second of a pair first. An oracle in NumPy has it once more.
"""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import stagedtensor as st
from stagedtensor.codegen import interpret
from stagedtensor.codegen.pipeline import generate
from stagedtensor.codegen.schedule import slab
from stagedtensor.precision import bf16
from stagedtensor.program import as_computation, solve_program
from stagedtensor.runtime import cpu, linking
from stagedtensor.runtime.compiler import compile_shared, find_compiler
from stagedtensor.runtime.target import TARGETS, detect
from tests.numerics import test_accumulators as accumulators
from tests.numerics.running import Array, Program, Setting, assert_same_bits, run
from tests.numerics.test_slabs import attention
from tests.run.test_matrix_tiles import check_guarded_windows, flushed, narrow, path, product, training
from tests.run.test_schedule_convolution import input_gradient

DOTS = "avx512+bf16"

pytestmark = pytest.mark.skipif(
    bool(TARGETS["avx512"].missing(detect())), reason="needs AVX-512 around the modelled dots"
)
_HERE = not (TARGETS[DOTS].features - detect().features)


@pytest.fixture(autouse=True)
def _modelled_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the processor lacks the instruction, the target without its flag: generated source then brings the model."""
    if not _HERE:
        monkeypatch.setitem(TARGETS, DOTS, replace(TARGETS[DOTS], flags=TARGETS["avx512"].flags))
        monkeypatch.setattr(cpu, "_runnable", lambda target: target)


def oracle(a: Array, b: Array, start: Array | None = None) -> Array:
    """a [m, k] times b [k, n] in the order of dots; products of bf16 are exact in f64."""
    total = np.zeros((a.shape[0], b.shape[1]), np.float32) if start is None else start.astype(np.float32)
    left, right = (flushed(side.astype(np.float32)).astype(np.float64) for side in (a, b))
    for first in range(0, a.shape[1], 2):
        for k in (first + 1, first):
            if k < a.shape[1]:
                with np.errstate(invalid="ignore", over="ignore"):
                    total = flushed((left[:, k : k + 1] * right[k : k + 1] + total).astype(np.float32))
    return total


@pytest.mark.parametrize(
    ("rows", "columns", "terms", "panel"),
    [
        (32, 32, 32, 32), (48, 60, 64, 32), (33, 28, 70, 32), (16, 32, 33, 32), (20, 100, 95, 32), (128, 96, 784, 32), (65, 57, 129, 32),
        (48, 16, 64, 16), (33, 44, 35, 16), (20, 12, 96, 16), (48, 8, 64, 8), (33, 20, 71, 8),
    ],
)  # fmt: skip
def test_products_have_the_order_of_sums_of_dots(rows: int, columns: int, terms: int, panel: int) -> None:
    a, b = narrow((rows, terms), 1), narrow((terms, columns), 2)
    cells, routine = product("ik; kj => ij", a, b, target=DOTS)
    np.testing.assert_array_equal(cells, oracle(a, b))
    assert f"bf16 dots, tile 16x{panel}," in path(routine)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    bound = 2 * terms * 2.0**-24 * (np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64)))
    assert (np.abs(cells - exact) <= bound).all()


@pytest.mark.parametrize("spec", ["ik; jk => ij", "ki; kj => ij", "ki; jk => ij", "ik; kj => ji"])
@pytest.mark.parametrize("sizes", [{"i": 58, "j": 60, "k": 69}, {"i": 48, "j": 60, "k": 70}], ids=["uneven", "squares"])
def test_operands_may_lie_any_way(spec: str, sizes: dict[str, int]) -> None:
    left, right = (spec.replace("=>", ";").replace(" ", "").split(";")[at] for at in (0, 1))
    a, b = (narrow(tuple(sizes[axis] for axis in axes), at) for at, axes in enumerate((left, right)))
    expected = oracle(a if left == "ik" else a.T, b if right == "kj" else b.T)
    cells, routine = product(spec, a, b, target=DOTS)
    if spec.endswith("ji") and "dots" not in path(routine):
        pytest.fail(path(routine))
    np.testing.assert_array_equal(cells, expected.T if spec.endswith("ji") else expected)


def test_batches_and_sums_over_several_axes() -> None:
    a, b = narrow((3, 24, 2, 40), 3), narrow((3, 40, 2, 30), 4)
    cells, routine = product("nihk; nkhj => nij", a, b, target=DOTS)
    for n in range(3):
        total = np.zeros((24, 30), np.float32)
        for h in range(2):
            total = oracle(a[n, :, h], b[n, :, h], total)
        np.testing.assert_array_equal(cells[n], total)
    assert "bf16 dots" in path(routine)


@pytest.mark.parametrize("sizes", [(33, 5, 3, 8, 16), (20, 4, 2, 16, 35)])
def test_guards_skip_whole_tiles(sizes: tuple[int, int, int, int, int]) -> None:
    check_guarded_windows(DOTS, input_gradient(*sizes, bf16), oracle, "bf16 dots")


def test_threads_change_no_bit() -> None:
    a, b = narrow((160, 96), 5), narrow((96, 224), 6)
    one, three = (product("ik; kj => ij", a, b, target=DOTS, threads=threads)[0] for threads in (1, 3))
    np.testing.assert_array_equal(one, three)


@pytest.mark.parametrize(
    ("rows", "columns", "terms", "reason"),
    [
        (8, 64, 64, "fewer than 16 rows or 8 columns"),
        (64, 64, 12, "fewer than 16 terms in a row"),
        (64, 9, 64, "9 columns leave too much of panels of 8 empty"),
    ],
)
def test_what_dots_would_not_speed_up_is_widened_and_says_why(rows: int, columns: int, terms: int, reason: str) -> None:
    a, b = narrow((rows, terms), 7), narrow((terms, columns), 8)
    cells, routine = product("ik; kj => ij", a, b, target=DOTS)
    np.testing.assert_array_equal(cells, product("ik; kj => ij", a, b, target="avx512")[0])
    assert f"not on the matrix unit: {reason}" in path(routine)
    assert "st_dot" not in routine.source


def test_infinities_and_nan_come_out_where_they_should() -> None:
    a, b = narrow((32, 71), 9), narrow((71, 28), 10)
    a[3, 70], a[5, 2] = np.inf, np.nan  # one is the last term, which stands beside 0
    b[70] = np.abs(b[70])
    cells, _ = product("ik; kj => ij", a, b, target=DOTS)
    assert np.isposinf(cells[3]).all()
    assert np.isnan(cells[5]).all()
    assert np.isfinite(np.delete(cells, (3, 5), 0)).all()
    b[70, 4] = np.inf  # a panel's last pair has it twice
    cells, _ = product("ik; kj => ij", np.abs(a), b, target=DOTS)
    assert np.isposinf(cells[np.arange(32) != 5, 4]).all()


def test_subnormal_operands_and_sums_count_as_zero() -> None:
    a, b = narrow((32, 32), 11), narrow((32, 32), 12)
    a[:] = 0
    a[0, 0], a[1, 0] = 2.0**-130, 2.0**-126
    b[0] = 2.0**20
    b[0, :16] = 2.0**-1
    cells, _ = product("ik; kj => ij", a, b, target=DOTS)
    np.testing.assert_array_equal(cells, oracle(a, b))
    assert not cells[0].any()  # 2**-110 elsewhere, within the bound for matrix units
    assert not cells[1, :16].any()
    assert (cells[1, 16:] == 2.0**-106).all()


@pytest.mark.skipif(not _HERE, reason="needs the instruction")
@pytest.mark.parametrize("columns", [64, 16, 8])
def test_the_model_has_the_bits_of_the_instruction(
    columns: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rng = np.random.default_rng(18)
    a, b = (rng.integers(0, 1 << 16, shape, np.uint16).view(ml_dtypes.bfloat16) for shape in ((64, 67), (67, columns)))
    small = np.abs(a.astype(np.float32)) < 2.0**60
    a, b = (
        np.where(small, a, ml_dtypes.bfloat16(1.5)),
        np.where(np.isfinite(b.astype(np.float32)), b, ml_dtypes.bfloat16(-0.5)),
    )
    with_instruction, _ = product("ik; kj => ij", a, b, target=DOTS)
    monkeypatch.setitem(TARGETS, DOTS, replace(TARGETS[DOTS], flags=TARGETS["avx512"].flags))
    monkeypatch.setenv("STAGEDTENSOR_CACHE", str(tmp_path))
    modelled, _ = product("ik; kj => ij", a, b, target=DOTS)
    np.testing.assert_array_equal(modelled, with_instruction)


def test_exact_sums_are_those_of_every_other_target() -> None:
    dots, wide = (run(accumulators.a1, Setting(target=target)) for target in (DOTS, "avx512"))
    for one, other in zip(dots, wide, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_training_step_runs_by_dots_and_agrees_with_widened_operands() -> None:
    seen: list[st.Routine] = []

    def build() -> Program:
        made = training()
        made.inspect = seen.append
        return made

    dots, wide = run(build, Setting(target=DOTS)), run(build, Setting(target="avx512"))
    for one, other in zip(dots, wide, strict=True):
        one, other = one.astype(np.float32), other.astype(np.float32)
        assert np.abs(one - other).max() <= 2.0**-7 * np.abs(other).max()
    products = [kernel.path for kernel in seen[0].kernels if "contraction" in kernel.path]
    assert sum("bf16 dots" in item for item in products) >= 4
    for fusion in (True, False):
        for one, other in zip(run(training, Setting(target=DOTS, fusion=fusion, threads=3)), dots, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("rows", [0, 16])
def test_slabs_run_by_dots_and_have_the_bits_of_stored_matrices(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole matrices of one head, and tiles of rows, over which sums go on."""
    monkeypatch.setattr(cpu, "generator_version", lambda: None)
    monkeypatch.setattr(slab, "LEAST_BYTES", 1024)
    if rows:
        monkeypatch.setattr(slab, "MOST_WHOLE", 0)
        monkeypatch.setattr(slab, "MOST_ROWS", rows)
    seen: list[st.Routine] = []

    def build() -> Program:
        made = attention("bf16", 64, 64, 30, causal=True)
        made.inspect = seen.append
        return made

    together = run(build, Setting(target=DOTS))
    monkeypatch.setattr(slab, "LEAST_BYTES", 1 << 60)
    for found, expected in zip(together, run(build, Setting(target=DOTS)), strict=True):
        assert_same_bits(found, expected, "slabs")
    paths = [kernel.path for kernel in seen[0].kernels if "slabs" in kernel.path]
    assert paths
    assert all("bf16 dots" in path and "register tile" not in path for path in paths)
    assert any(f"slabs of {rows} rows" in path for path in paths) == bool(rows)


def test_long_sequences_store_no_scores() -> None:
    with st.Session(), st.Context("cpu", target=DOTS, threads=2) as ctx:
        q, k, v = (
            st.placeholder(name, batch=[1, 4096], output=[4, 32], prec="bf16", requires_grad=True) for name in "qkv"
        )
        loss = st.mean(st.cast(st.attention(q, k, v, causal=True), "f32"))
        routine = ctx.compile(st.grad_update(loss))
    assert routine.executable.arena_bytes < 4096 * 4096
    assert any("slabs of" in kernel.path and "bf16 dots" in kernel.path for kernel in routine.kernels)


@pytest.mark.parametrize(("spec", "terms"), [("ik; kj => ij", 35), ("ki; jk => ij", 64)])
@pytest.mark.parametrize("columns", [30, 16, 8])
def test_the_meaning_of_a_tile_is_what_it_computes(spec: str, terms: int, columns: int) -> None:
    sizes = {"i": 16, "j": columns, "k": terms}
    axes = spec.split(" => ")[0].split("; ")
    a, b = (narrow(tuple(sizes[axis] for axis in side), at) for at, side in enumerate(axes))
    cells, _ = product(spec, a, b, target=DOTS)
    with st.Session():
        left, right = (
            st.placeholder(name, output=list(side.shape), prec="bf16") for name, side in (("a", a), ("b", b))
        )
        y = st.einsum(spec, left, right)
        st.specify(y, "f32")
        solved = solve_program(as_computation(y)[0], "product", keep=frozenset((left.node, right.node, y.node)))
        module = generate(linking.for_codegen(solved, frozenset((y.node,))), TARGETS[DOTS], st.Numerics(), check=True)
    given = {
        buffer: {"a": a, "b": b}.get(buffer.name, np.zeros(buffer.shape, np.float32)) for buffer in module.external
    }
    interpret.run_module(module, given)
    (result,) = (given[buffer] for buffer in module.external if buffer.name not in ("a", "b"))
    np.testing.assert_array_equal(result, cells)


def test_the_instruction_assembles(tmp_path: Path) -> None:
    """The same text with the target's real flags: the compiler takes it and the library holds the instruction."""
    compiler = find_compiler()
    _, routine = product("ik; kj => ij", narrow((33, 71), 16), narrow((71, 30), 17), target=DOTS)
    real = replace(TARGETS[DOTS], flags=(*TARGETS["avx512"].flags, "-mavx512bf16"))
    compile_shared(routine.source, tmp_path / "real.so", flags=compiler.flags(real), compiler=compiler)
    listing = subprocess.run(["objdump", "-d", tmp_path / "real.so"], capture_output=True, text=True, check=False)
    if listing.returncode == 0 and "vdpbf16ps" not in listing.stdout:
        pytest.fail("the library has no dots")


def test_loops_that_fill_either_side_of_images_have_names_of_their_own() -> None:
    """Three pieces of a padded row in one sweep, 72 cells at either end: each ends in a vector under a mask."""
    images, weights = narrow((40, 13, 10, 24), 1), narrow((33, 1, 2, 24), 2)
    with st.Session(), st.Context("cpu", target=DOTS, threads=2) as ctx:
        x = st.placeholder("x", batch=[40], output=[13, 10, 24], prec="bf16")
        w = st.placeholder("w", input=[1, 2, 24], output=[33], prec="bf16")
        y = st.conv2d(x, w, padding=(0, 3))
        routine = ctx.compile(y)
        ctx.set_values(x, images)
        ctx.set_values(w, weights)
        ctx.run(routine)
        cells = ctx.get_values(y).astype(np.float64)
    assert routine.source.count("int64_t i_cell2_cell3_2 = 0;") == 1
    padded = np.pad(images.astype(np.float64), ((0, 0), (0, 0), (3, 3), (0, 0)))
    kernel = weights.astype(np.float64)[:, 0]
    exact = sum(padded[:, :, at : at + 15] @ kernel[:, at].T for at in range(2))
    np.testing.assert_allclose(cells, exact, rtol=2.0**-8, atol=1e-4)
