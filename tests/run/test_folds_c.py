"""Halves of a vector merged onto halves, and loads that ask for what is to come: the bits of the plain forms."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor.codegen.affine import add
from stagedtensor.codegen.emit import vectors
from stagedtensor.codegen.emit.folds import fold
from stagedtensor.codegen.loop_ir import Apply, Buffer, Load, Stmt, Store, Var, index
from stagedtensor.codegen.prelude import prelude_source
from stagedtensor.codegen.prelude.vectors import CELLS, FEATURE, vector_functions
from stagedtensor.codegen.schedule.nest import index_symbol, loop
from stagedtensor.precision import f32
from stagedtensor.runtime.target import detect
from tests.run.prelude_loops import FLAGS, compiler

needs_vectors = pytest.mark.skipif(compiler() is None or not detect().has(FEATURE), reason="needs gcc and AVX-512")

_TEXT = """
void largest(float *to, const float *x, int count) { st_store_vf32(to, st_fold_max_vf32(count, st_load_vf32(x))); }
void least(float *to, const float *x, int count) { st_store_vf32(to, st_fold_min_vf32(count, st_load_vf32(x))); }
void floats(float *to, const float *x, int count) { st_store_vf32(to, st_ahead_vf32(x + count)); }
void halves(uint16_t *to, const uint16_t *x, int count) { st_store_vu16(to, st_ahead_vu16(x + count)); }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder, gcc = tmp_path_factory.mktemp("folds"), compiler()
    assert gcc is not None
    names = ("st_fold_max_vf32", "st_fold_min_vf32", "st_ahead_vf32", "st_ahead_vu16", "st_store_vf32", "st_store_vu16")
    text = prelude_source([], features=frozenset({"fma"})) + vector_functions(names) + _TEXT
    (folder / "folds.c").write_text(text)
    command = [gcc, *FLAGS, "-O2", *detect().flags, "-Wall", "-Wextra", "-Werror", "-Wno-psabi"]
    subprocess.run([*command, str(folder / "folds.c"), "-o", str(folder / "folds.so")], check=True, timeout=300)
    return ctypes.CDLL(str(folder / "folds.so"))


def _call(library: ctypes.CDLL, name: str, cells: np.ndarray[Any, Any], count: int) -> np.ndarray[Any, Any]:
    got = np.empty(CELLS, cells.dtype)
    getattr(library, name)(*(ctypes.c_void_p(array.ctypes.data) for array in (got, cells)), ctypes.c_int(count))
    return got


@needs_vectors
@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize("special", [None, np.nan, np.inf, -np.inf])
def test_halves_are_merged_and_others_stay(library: ctypes.CDLL, count: int, special: float | None) -> None:
    cells = np.random.default_rng(count).normal(0, 1, CELLS).astype(np.float32)
    for place in range(CELLS if special is not None else 1):
        x = cells.copy()
        if special is not None:
            x[place] = special
        for name, merge in (("largest", np.maximum), ("least", np.minimum)):
            expected = x.copy()
            expected[:count] = merge(x[:count], x[count : 2 * count])
            np.testing.assert_array_equal(_call(library, name, x, count), expected)


@needs_vectors
def test_loads_that_ask_ahead_load_the_same(library: ctypes.CDLL) -> None:
    floats = np.random.default_rng(0).normal(0, 1, 2 * CELLS).astype(np.float32)
    np.testing.assert_array_equal(_call(library, "floats", floats, 3), floats[3 : 3 + CELLS])
    halves = np.arange(2 * CELLS, dtype=np.uint16)
    np.testing.assert_array_equal(_call(library, "halves", halves, 5), halves[5 : 5 + CELLS])


def _step(states: Buffer, count: int, op: str = "maximum", distance: int | None = None) -> Stmt:
    lane = index_symbol("i_lane")
    high = add(Var(lane), count if distance is None else distance)
    value = Apply(op, (Load(states, (Var(lane),)), Load(states, (high,))), f32)
    return loop(lane, count, (Store(states, (Var(lane),), value),), "lane")


def test_only_merges_of_halves_are_folds() -> None:
    states = Buffer("acc", f32, (32,), "register")
    assert fold(_step(states, 8)) == ("st_fold_max_vf32", states, 8)
    assert fold(_step(states, 4, "minimum")) == ("st_fold_min_vf32", states, 4)
    last = Store(states, (index(0),), Apply("maximum", (Load(states, (index(0),)), Load(states, (index(1),))), f32))
    assert fold(last) == ("st_fold_max_vf32", states, 1)
    assert fold(_step(states, 16)) is None
    assert fold(_step(states, 8, "add")) is None
    assert fold(_step(states, 4, distance=8)) is None
    assert fold(_step(Buffer("acc", f32, (8,), "register"), 4)) is None


@needs_vectors
@pytest.mark.parametrize("prec", [st.f32, st.bf16, st.f16])
def test_greatest_cells_are_those_of_other_targets(prec: st.Prec, tmp_path: Path) -> None:
    """Rows whose greatest cell lies anywhere, infinite and empty ones too."""
    rows = np.random.default_rng(0).normal(0, 3, (40, 64)).astype(np.float32)
    rows[range(32), range(32)] = 20.0
    rows[33, 5], rows[34], rows[35, 60] = np.inf, -np.inf, np.nan
    found = []
    for target in ("avx512", "x86-64-v3"):
        with st.Session(), st.Context("cpu", target=target, threads=1, cache_dir=tmp_path) as ctx:
            x = st.placeholder("x", batch=[40], output=[64], prec=prec)
            ctx.set_values(x, rows)
            largest = st.max(x, axis=-1)
            routine = ctx.compile(largest, name="rows")
            assert ("st_fold_max_vf32" in routine.source) == (target == "avx512")
            ctx.run(routine)
            found.append(np.asarray(ctx.get_values(largest), np.float32))
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0][:32], 20.0)


@needs_vectors
@pytest.mark.parametrize("prec", [st.f32, st.bf16, st.f16])
def test_large_operands_are_asked_for_ahead(prec: st.Prec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = np.random.default_rng(1).normal(0, 3, (5, 200)).astype(np.float32)
    found = []
    for large in (1 << 25, 1):
        monkeypatch.setattr(vectors, "_LARGE", large)
        with st.Session(), st.Context("cpu", target="avx512", threads=1, cache_dir=tmp_path / str(large)) as ctx:
            x = st.placeholder("x", batch=[5], output=[200], prec=prec)
            y = st.softmax(x)
            st.specify(y, prec)
            ctx.set_values(x, rows)
            routine = ctx.compile(y, name="rows")
            assert ("st_ahead_v" in routine.source) == (large == 1)
            ctx.run(routine)
            found.append(np.asarray(ctx.get_values(y), np.float32))
    np.testing.assert_array_equal(found[0], found[1])
