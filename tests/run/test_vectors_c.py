"""Explicit vectors: each function has the bits of the prelude's scalar form, and routines those of a target without
vectors.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor.codegen.emit import body
from stagedtensor.codegen.prelude import prelude_source
from stagedtensor.codegen.prelude.mirror import MIRROR
from stagedtensor.codegen.prelude.vectors import CELLS, FEATURE, vector_functions, vector_names
from stagedtensor.runtime.target import detect
from tests.run.prelude_loops import FLAGS, Array, compiler, differing

pytestmark = pytest.mark.skipif(compiler() is None or not detect().has(FEATURE), reason="needs gcc and AVX-512")

_LOAD, _HALVES = "st_load_vf32({0} + i)", "st_load_vu16({0} + i)"
# name: (parameters, result, vector expression, mirror)
FUNCTIONS: dict[str, tuple[tuple[str, ...], str, str, str]] = {
    **{
        stem: (("float",), "float", f"st_{stem}_vf32({_LOAD.format('a')})", f"st_{stem}_f32")
        for stem in ("exp", "sigmoid", "tanh", "erf", "erfc", "sqrt", "rsqrt", "recip", "nonfinite", "relu", "abs")
    },
    **{
        stem: (
            ("float", "float"),
            "float",
            f"st_{stem}_vf32({_LOAD.format('a')}, {_LOAD.format('b')})",
            f"st_{stem}_f32",
        )
        for stem in ("max", "min")
    },
    "fma": (
        ("float", "float", "float"),
        "float",
        f"st_fma_vf32({', '.join(_LOAD.format(name) for name in 'abc')})",
        "st_fma_f32",
    ),
    "f16": (("float",), "uint16_t", f"st_vf32_to_f16({_LOAD.format('a')})", "st_f32_to_f16"),
    "bf16": (("float",), "uint16_t", f"st_vf32_to_bf16({_LOAD.format('a')})", "st_f32_to_bf16"),
    "through_f16": (("float",), "float", f"st_through_f16_vf32({_LOAD.format('a')})", "st_f32_through_f16"),
    "through_bf16": (("float",), "float", f"st_through_bf16_vf32({_LOAD.format('a')})", "st_f32_through_bf16"),
    "from_f16": (("uint16_t",), "float", f"st_f16_to_vf32({_HALVES.format('a')})", "st_f16_to_f32"),
    "from_bf16": (("uint16_t",), "float", f"st_bf16_to_vf32({_HALVES.format('a')})", "st_bf16_to_f32"),
    "bytes": (("uint8_t",), "float", "st_i32_to_vf32(st_stream_u8_vi32(a + i))", ""),
    "signed_bytes": (("int8_t",), "float", "st_i32_to_vf32(st_stream_i8_vi32(a + i))", ""),
}
_DTYPES = {"float": np.float32, "uint16_t": np.uint16, "uint8_t": np.uint8, "int8_t": np.int8}


def _loop(name: str) -> str:
    parameters, result, value, _ = FUNCTIONS[name]
    given = ", ".join(f"const {kind} *{letter}" for kind, letter in zip(parameters, "abc", strict=False))
    store = "st_store_vf32" if result == "float" else "st_store_vu16"
    return (
        f"void loop_{name}(int64_t size, {result} *to, {given}) {{\n"
        f"    for (int64_t i = 0; i < size; i += {CELLS}) {store}(to + i, {value});\n}}\n"
    )


_OTHERS = """
void single_halves(int64_t size, float *to, const uint16_t *a) {
    for (int64_t i = 0; i < size; i++) to[i] = st_one_f16_to_f32(a[i]);
}
void taken(float *to, const float *table, const int32_t *places) {
    st_store_vf32(to, st_among_vf32(st_load_vf32(table), (st_vu32)st_load_vi32(places)));
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("vectors")
    target, gcc = detect(), compiler()
    assert gcc is not None
    text = prelude_source([], features=frozenset({"fma"})) + vector_functions(vector_names())
    (folder / "loops.c").write_text(text + "".join(map(_loop, FUNCTIONS)) + _OTHERS)
    command = [gcc, *FLAGS, "-O2", *target.flags, "-Wall", "-Wextra", "-Werror", "-Wno-psabi"]
    subprocess.run([*command, str(folder / "loops.c"), "-o", str(folder / "loops.so")], check=True, timeout=300)
    return ctypes.CDLL(str(folder / "loops.so"))


def test_tables_and_single_halves(library: ctypes.CDLL) -> None:
    codes = np.arange(1 << 16, dtype=np.uint16)
    wide = np.empty(codes.size, np.float32)
    library.single_halves(
        ctypes.c_int64(codes.size), wide.ctypes.data_as(ctypes.c_void_p), codes.ctypes.data_as(ctypes.c_void_p)
    )
    assert differing(wide, codes.view(np.float16).astype(np.float32)).size == 0
    table = np.random.default_rng(0).normal(0, 1, CELLS).astype(np.float32)
    places = np.random.default_rng(1).integers(0, 1 << 32, CELLS, dtype=np.uint32)
    taken = np.empty(CELLS, np.float32)
    library.taken(*(cells.ctypes.data_as(ctypes.c_void_p) for cells in (taken, table, places)))
    np.testing.assert_array_equal(taken, table[places % CELLS])


def _operands(kind: str, size: int, seed: int) -> Array:
    rng = np.random.default_rng(seed)
    if kind != "float":
        return rng.integers(0, 1 << 16, size).astype(np.uint16).view(np.uint16).astype(_DTYPES[kind])
    cells = rng.integers(0, 1 << 32, size, dtype=np.uint64).astype(np.uint32).view(np.float32)
    cells[: size // 2] = rng.normal(0, 30, size // 2).astype(np.float32)
    special = [
        0.0,
        -0.0,
        np.inf,
        -np.inf,
        np.nan,
        1e-45,
        -1e-45,
        88.72,
        88.73,
        89.5,
        -87.3,
        -103.9,
        -104.1,
        -1e30,
        65520.0,
    ]
    cells[: len(special)] = special
    cells[len(special) : 2 * len(special)] = rng.permutation(np.array(special, np.float32))
    return cells


@pytest.mark.parametrize("name", FUNCTIONS)
def test_vectors_have_the_bits_of_scalars(library: ctypes.CDLL, name: str) -> None:
    parameters, result, _, mirror = FUNCTIONS[name]
    cells = [_operands(kind, 1 << 15, seed) for seed, kind in enumerate(parameters)]
    got = np.empty(1 << 15, _DTYPES[result])
    loop = getattr(library, f"loop_{name}")
    loop.restype = None
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (got, *cells)]
    loop(ctypes.c_int64(got.size), *pointers)
    numbers: list[Any] = cells
    if name.startswith("from_"):
        numbers = [cells[0].view(st.precision(name.removeprefix("from_")).numpy_dtype)]
    with np.errstate(all="ignore"):
        expected = MIRROR[mirror](*numbers) if mirror else cells[0].astype(np.float32)
    wrong = differing(got.view(expected.dtype), expected)
    assert wrong.size == 0, [(*(cell[i] for cell in cells), got[i], expected[i]) for i in wrong[:5]]


def _results(prec: st.Prec, width: int, folder: Path, *, vectors: bool) -> list[Array]:
    rows = np.random.default_rng(0).normal(0, 4, (5, width)).astype(np.float32)
    rows[0, 0], rows[1, 1], rows[2] = -np.inf, -1e4, -np.inf
    results = []
    with st.Session(), st.Context("cpu", target="avx512", threads=1, cache_dir=folder) as ctx:
        x = st.placeholder("x", batch=[5], output=[width], prec=prec)
        ctx.set_values(x, rows)
        ids = st.placeholder("ids", batch=[5], prec=st.i32)
        ctx.set_values(ids, np.arange(5) * 31)
        gelu = st.gelu(x * 1.5 + 0.25, approximate="tanh")
        tests = st.softmax(x), gelu, st.exp(-st.abs(x)), st.log_softmax(x), st.tanh(x), st.cross_entropy(x, ids)
        for y in tests:
            if y is not tests[-1]:
                st.specify(y, prec)
            routine = ctx.compile(y)
            routine()
            assert ("st_vf32" in routine.source) == vectors
            results.append(ctx.get_values(y).reshape(-1))
    return results


@pytest.mark.parametrize("prec", [st.f32, st.bf16, st.f16], ids=str)
def test_routines_have_the_bits_of_scalar_text(prec: st.Prec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    got = _results(prec, 150, tmp_path / "vectors", vectors=True)
    monkeypatch.setattr(body, "in_vectors", lambda loop, bounds: False)
    monkeypatch.setattr(body, "fold", lambda stmt: None)
    for mine, expected in zip(got, _results(prec, 150, tmp_path / "scalars", vectors=False), strict=True):
        assert differing(mine, expected).size == 0


def _gradients(prec: st.Prec, folder: Path, *, vectors: bool) -> list[Array]:
    rng = np.random.default_rng(4)
    with st.Session(), st.Context("cpu", target="avx512", threads=1, cache_dir=folder) as ctx:
        scale = st.param("scale", output=[4, 32], init=st.normal(1.0))
        x = st.constant(rng.normal(0, 1, (8, 64, 4, 32)).astype(np.float32), batch=2) * scale
        hidden = st.gelu(st.attention(x, x * 0.5, x, causal=True), approximate="tanh")
        loss = st.sum(hidden * st.constant(rng.normal(0, 1, (8, 64, 4, 32)).astype(np.float32), batch=2))
        st.PrecisionPolicy(activation=prec, grad=prec).apply(loss)
        routine = ctx.compile(st.grad_update(loss))
        ctx.init_params(loss, seed=3)
        routine()
        assert ("const st_vf32 test =" in routine.source) == vectors  # gelu's
        assert ("st_eq_vf32(v, " in routine.source) == vectors  # the scores'
        assert scale.grad is not None
        return [ctx.get_values(scale.grad).reshape(-1)]


@pytest.mark.parametrize("prec", [st.bf16, st.f16], ids=str)
def test_gradients_round_in_vectors_and_have_the_bits_of_scalar_text(
    prec: st.Prec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Their loops test whether a factor is 0, name that, and read a row's own number, which a point of the grid
    selects.
    """
    got = _gradients(prec, tmp_path / "vectors", vectors=True)
    monkeypatch.setattr(body, "in_vectors", lambda loop, bounds: False)
    monkeypatch.setattr(body, "fold", lambda stmt: None)
    for mine, expected in zip(got, _gradients(prec, tmp_path / "scalars", vectors=False), strict=True):
        assert differing(mine, expected).size == 0
