"""The prelude compiled by the machine's C compiler: bits against the mirror and an exact oracle, accuracy,
vectorisation.

Two builds of every function: for this machine, vectorised, with the hardware's fma; and for the plainest target,
without any feature. They must agree in every bit, so each is compared with one and the same expectation.
"""

from __future__ import annotations

import math
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stagedtensor.codegen.prelude import conversion, known_names, prelude_source
from stagedtensor.codegen.prelude.mirror import MIRROR
from stagedtensor.precision import ALL, FLOATS, Prec, bool_, f16, f32, f64, u4x32
from stagedtensor.runtime.target import TARGETS, detect
from tests.oracles.rounding import cells_of, codes_of, convert_codes, edge_codes, nan_codes, same_codes
from tests.run.prelude_loops import FLAGS, Array, Loops, compiler, differing, loop_text, signatures

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C compiler found")

FORMATS = [prec for prec in ALL if prec is not u4x32]
WIDE_RANDOM = 1 << 16
NAMES = sorted(name for name in known_names() if name not in {"u4x32_t", "st_two_over_pi"} and "threefry" not in name)
CONVERSIONS = {
    name: (source, target, saturate)
    for source in FORMATS
    for target in FORMATS
    for saturate in (False, True)
    if (name := conversion(source, target, saturate)) is not None and name.endswith("_sat") == saturate
}
# Functions of f64 that the C library computes: numpy's may differ in the last digits.
LIBRARY = {f"st_{stem}_f64": 2 for stem in ("exp", "exp2", "log", "log2", "tanh", "erf", "erfc", "sin", "cos", "pow")}
# Made of several library calls.
LIBRARY |= {"st_sigmoid_f64": 4, "st_normal_f64": 8, "st_random_normal_f64": 8}
# Their contract covers less than all bit patterns; they are tested through the functions that call them.
INTERNAL = {
    "st_exp_bounded_f32",
    "st_exp_reduced_f32",
    "st_scale_f32",
    "st_log_exponent_f32",
    "st_log_mantissa_f32",
    "st_sin_of_turns",
}


@pytest.fixture(scope="module", params=["machine", "plain"])
def loops(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loops:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "machine":
        target = detect()
        return Loops(folder, NAMES, target.features, target.flags, "-O3")
    plain = TARGETS["x86-64"] if detect().has("sse2") else TARGETS["generic"]
    return Loops(folder, NAMES, frozenset(), plain.flags, "-O1")


def source_codes(source: Prec, target: Prec) -> Array:
    """Every code of a narrow source; of a wide one, where rounding is decided, and random patterns."""
    if source is bool_:
        return np.arange(2, dtype=np.uint64)
    if source.bits <= 16:
        return np.arange(1 << source.bits, dtype=np.uint64)
    rng = np.random.default_rng(source.bits + target.bits)
    parts = [rng.integers(0, 1 << 64, WIDE_RANDOM, dtype=np.uint64) >> np.uint64(64 - source.bits)]
    # Numbers of every magnitude: uniform patterns of integers are nearly all of the largest.
    parts.append(parts[0] >> rng.integers(0, source.bits, WIDE_RANDOM, dtype=np.uint64))
    ends = np.array([0, 1, 2, (1 << source.bits) - 1, (1 << source.bits) - 2], np.uint64)
    middle = np.uint64(1 << (source.bits - 1))
    parts.append(np.concatenate([ends, middle - np.uint64(1) + ends[:3]]))
    if source.is_float:
        if target.is_narrow:
            parts.append(edge_codes(source.name, target.name))
        else:
            limits = [0.0, -0.0, 0.5, -0.5, 1.0, math.inf, -math.inf, math.nan]
            limits += [sign * (2.0**power) for power in (7, 8, 15, 16, 31, 32, 63, 64) for sign in (1, -1)]
            values = np.array(limits, source.numpy_dtype)
            with np.errstate(over="ignore"):
                near = [np.nextafter(values, values.dtype.type(end)) for end in (-math.inf, math.inf)]
            parts.extend(codes_of(cells) for cells in (values, *near))
    elif target.is_narrow:
        # Integers on the midpoints of the target's numbers, and beside them.
        powers = np.uint64(1) << np.arange(source.bits - 1, dtype=np.uint64)
        halves = powers + (powers >> np.uint64(target.mantissa_bits + 1))
        parts.extend([halves, halves - np.uint64(1), halves + np.uint64(1)])
        top = np.uint64(int(min(target.max_finite, source.max_finite)))
        parts.append(top + np.arange(64, dtype=np.uint64) - np.uint64(32))
    mask = np.uint64((1 << source.bits) - 1)
    return np.concatenate(parts) & mask


@pytest.mark.parametrize("source", FORMATS, ids=str)
def test_conversions_are_exact_and_equal_the_mirror(loops: Loops, source: Prec) -> None:
    for name, (start, target, saturate) in CONVERSIONS.items():
        if start is not source:
            continue
        codes = source_codes(source, target)
        cells = cells_of(codes, source.numpy_dtype)
        got = loops(name, cells_of(codes, source.storage_dtype))
        mirrored = MIRROR[name](cells)
        assert mirrored.dtype == target.numpy_dtype
        assert differing(got, mirrored).size == 0, name
        if target is bool_:
            magnitude = codes & np.uint64((1 << (source.bits - 1)) - 1) if source.is_float else codes
            assert (got == (magnitude != 0)).all(), name
            continue
        # The oracle knows no bool; as integers its cells are the same.
        kind = "u8" if source is bool_ else source.name
        wanted = convert_codes(codes, kind, target.name, saturate=saturate)
        assert same_codes(codes_of(got), wanted, target.name).all(), name


@pytest.mark.parametrize("prec", [prec for prec in FLOATS if prec.bits <= 16], ids=str)
def test_every_code_survives_widening(loops: Loops, prec: Prec) -> None:
    codes = np.arange(1 << prec.bits, dtype=np.uint64)
    for wide in (f32, f64):
        widened = loops(f"st_{prec}_to_{wide}", cells_of(codes, prec.storage_dtype))
        back = codes_of(loops(f"st_{wide}_to_{prec}", widened))
        assert same_codes(back, codes, prec.name).all()
        nan = nan_codes(codes, prec.name)
        assert np.isnan(widened[nan]).all()
        assert not np.isnan(widened[~nan]).any()


EDGES = np.array(
    [
        *(0, 1, 2, 0x7FFFFF, 0x800000, 0x3F800000, 0x3F800001, 0x3F7FFFFF, 0x7F7FFFFF, 0x7F800000, 0x7FC00000),
        *(0x7F800001, 0x40000000, 0x40400000, 0x3F000000, 0x4B000000, 0x4B800000, 0x4AFFFFFF, 0x41200000, 0x3FC00000),
        # Ends of the ranges of exp and the borders between the two forms of tanh, erf and sin.
        *(0x42B17218, 0x42B17217, 0xC2CE8ED0, 0xC2CFF1B5, 0x3F1FFFFF, 0x3F200000, 0x3F700000, 0x3F6FFFFF, 0x3F490FDA),
    ],
    np.uint32,
)


def operands(kind: str, size: int, seed: int) -> Array:
    """Random bit patterns, ordinary numbers, small integers and edge values of a C type."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype({"float": "float32", "double": "float64"}.get(kind, kind.removesuffix("_t")))
    cells: Array = rng.integers(0, 256, size * dtype.itemsize, dtype=np.uint8).view(dtype).copy()
    half = size // 2
    if dtype.kind == "f":
        numbers = rng.standard_normal(size - half) * 10 ** rng.uniform(-6, 4, size - half)
        cells[half:] = numbers
        cells[half : half + size // 8] = rng.integers(-20, 20, size // 8)
        edges = np.concatenate([EDGES, EDGES ^ np.uint32(1 << 31)]).view(np.float32)
        with np.errstate(invalid="ignore"):  # a signalling NaN among them
            cells[: edges.size] = edges
    else:
        limits = np.iinfo(dtype)
        cells[half:] = rng.integers(0, 20, size - half)
        cells[:6] = [limits.min, limits.max, 0, 1, limits.max - 1, limits.min + 1]
    return cells if seed == 0 else rng.permutation(cells)


def ulps_apart(left: Array, right: Array) -> float:
    """The largest distance of two f64 arrays in units of the last place; equal values, NaN among them, are 0 apart."""
    different = ~((left == right) | (np.isnan(left) & np.isnan(right)))
    if not different.any():
        return 0.0
    spacing = np.spacing(np.abs(right[different]))
    return float((np.abs(left[different] - right[different]) / spacing).max())


@pytest.mark.parametrize("name", [name for name in NAMES if name not in CONVERSIONS and name not in INTERNAL])
def test_functions_have_the_bits_of_the_mirror(loops: Loops, name: str) -> None:
    parameters = loops.signatures[name].parameters
    cells = [operands(kind, 1 << 15, seed) for seed, kind in enumerate(parameters)]
    numbers = cells
    stored = re.fullmatch(r"st_(?:is_nonfinite|flush)_(f16|bf16|f8e5m2|f8e4m3)", name)
    if stored:
        prec = next(prec for prec in FLOATS if prec.name == stored[1])
        numbers = [cells_of(codes_of(cells[0]), prec.numpy_dtype)]
    got, mirrored = loops(name, *cells), MIRROR[name](*numbers)
    if name in LIBRARY:
        assert ulps_apart(got, mirrored) <= LIBRARY[name]
        return
    wrong = differing(got, mirrored)
    assert wrong.size == 0, [(*(cell[i] for cell in numbers), got[i], mirrored[i]) for i in wrong[:5]]


def in_ulps(got: Array, exact: Array) -> tuple[float, int]:
    """The largest error in f32 units of the last place, and how many special values or signs are wrong."""
    with np.errstate(all="ignore"):
        rounded = exact.astype(np.float32)
        both = np.isfinite(got) & np.isfinite(rounded)
        special = ~both & ~((got == rounded) | (np.isnan(got) & np.isnan(rounded)))
        signs = ~np.isnan(got) & (np.signbit(got) != np.signbit(exact))
        magnitude = np.where(both & (exact != 0), np.abs(exact), 1.0)
        exponent = np.maximum(np.floor(np.log2(magnitude)), -126)
        error = np.where(both, np.abs(got.astype(np.float64) - exact) / np.exp2(exponent - 23), 0.0)
    return float(error.max()), int((special | signs).sum())


def exact_sigmoid(x: Array) -> Array:
    tail: Array = np.exp(-np.abs(x))
    return np.where(x < 0, tail, 1.0) / (1.0 + tail)


EXACT: dict[str, tuple[Callable[[Array], Any], float]] = {
    "exp": (np.exp, 0.9),
    "exp2": (np.exp2, 0.9),
    "log": (np.log, 0.9),
    "log2": (np.log2, 1.3),
    "tanh": (np.tanh, 1.4),
    "sigmoid": (exact_sigmoid, 1.5),
    "erf": (np.vectorize(math.erf, otypes=[np.float64]), 1.2),
    "erfc": (np.vectorize(math.erfc, otypes=[np.float64]), 1.9),
    "sin": (np.sin, 0.51),
    "cos": (np.cos, 0.51),
    "rsqrt": (lambda x: 1.0 / np.sqrt(x), 1.5),
}


@pytest.mark.parametrize("stem", EXACT)
def test_accuracy_over_all_magnitudes(loops: Loops, stem: str) -> None:
    exact, bound = EXACT[stem]
    x = np.arange(0, 1 << 32, 20011, dtype=np.uint64).astype(np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        error, wrong = in_ulps(loops(f"st_{stem}_f32", x), exact(x.astype(np.float64)))
    assert wrong == 0
    assert error <= bound


def test_accuracy_of_pow(loops: Loops) -> None:
    rng = np.random.default_rng(3)
    for spread in (120.0, 0.1):
        x = np.exp2(rng.uniform(-spread, spread, 1 << 15)).astype(np.float32)
        y = (rng.uniform(-150, 128, x.size) / np.log2(x.astype(np.float64))).astype(np.float32)
        with np.errstate(over="ignore"):
            exact = np.power(x.astype(np.longdouble), y.astype(np.longdouble)).astype(np.float64)
        error, wrong = in_ulps(loops("st_pow_f32", x, y), exact)
        assert wrong == 0
        assert error <= 0.51


def test_f16_overflow_begins_at_65520(loops: Loops) -> None:
    x = np.array([65504, 65519.996, 65520, -65520, math.inf], np.float32)
    assert loops("st_f32_to_f16", x).view(f16.numpy_dtype).tolist() == [65504, 65504, math.inf, -math.inf, math.inf]
    assert loops("st_f32_to_f16_sat", x).view(f16.numpy_dtype).tolist() == [65504, 65504, 65504, -65504, math.inf]


VECTORISED = [
    *(
        f"st_{stem}_f32"
        for stem in ("exp", "exp2", "log", "log2", "tanh", "sigmoid", "erf", "erfc", "sin", "cos", "pow", "rsqrt")
    ),
    *("st_f32_to_bf16", "st_f32_to_f16_sat", "st_f32_to_f8e4m3", "st_f16_to_f32", "st_f8e5m2_to_f32", "st_f64_to_bf16"),
    *(
        "st_f32_to_i32",
        "st_f32_to_i8",
        "st_f16_to_u8",
        "st_floor_f32",
        "st_max_f32",
        "st_floordiv_f32",
        "st_normal_f32",
    ),
    *("st_is_nonfinite_f32", "st_flush_f32", "st_fma_f32", "st_random_uniform_f32"),
]


@pytest.mark.parametrize("name", VECTORISED)
def test_loops_vectorise(name: str, tmp_path: Path) -> None:
    gcc = compiler()
    assert gcc is not None
    banner = subprocess.run([gcc, "--version"], capture_output=True, text=True, check=True).stdout
    if "Free Software Foundation" not in banner or not detect().has("avx2"):
        pytest.skip("the vectoriser's report is read in gcc's form, and the list is for AVX2 and wider")
    target = detect()
    prelude = prelude_source([name], features=target.features)
    source = tmp_path / "loop.c"
    source.write_text(prelude + "\n" + loop_text(name, signatures(prelude)[name]))
    flags = [flag for flag in FLAGS if flag != "-shared"]
    command = [gcc, *flags, *target.flags, "-O3", "-fopt-info-vec", "-c", str(source), "-o", str(tmp_path / "loop.o")]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "loop vectorized" in report


@pytest.mark.slow
def test_the_cuda_text_compiles_as_cpp_beside_its_built_ins(tmp_path: Path) -> None:
    gcc = compiler()
    assert gcc is not None
    built_ins = """\
#include <cmath>
#include <cstdint>
#include <cstring>
#define __device__
#define __forceinline__ inline
template <class To, class From> static To bit_copy(From x) { To y; std::memcpy(&y, &x, sizeof y); return y; }
static inline uint32_t __float_as_uint(float x) { return bit_copy<uint32_t>(x); }
static inline float __uint_as_float(uint32_t x) { return bit_copy<float>(x); }
static inline long long __double_as_longlong(double x) { return bit_copy<long long>(x); }
static inline double __longlong_as_double(long long x) { return bit_copy<double>(x); }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
static inline float __fsqrt_rn(float x) { return sqrtf(x); }
"""
    source = tmp_path / "prelude.cpp"
    source.write_text(built_ins + prelude_source(known_names(), dialect="cuda"))
    warnings = ["-Wall", "-Wextra", "-Werror", "-Wno-unused-function", "-Wno-unused-variable"]
    command = [gcc, "-x", "c++", "-std=c++17", *warnings, "-fsyntax-only", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "cc1plus" in done.stderr:
        pytest.skip("the compiler has no C++ front end")
    assert done.returncode == 0, done.stderr
