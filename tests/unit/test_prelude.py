"""The prelude's text assembly, and its NumPy mirror against independent definitions; no compiler runs here."""

from __future__ import annotations

import itertools
import math
import re
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from stagedtensor.codegen.prelude import DIALECTS, conversion, known_names, op_function, prelude_source
from stagedtensor.codegen.prelude.mirror import MIRROR
from stagedtensor.codegen.prelude.sections import two_over_pi_words
from stagedtensor.errors import InternalError
from stagedtensor.op_table import OPS
from stagedtensor.precision import ALL, FLOATS, INTEGERS, f32, f64, u4x32

F32 = np.float32
NOT_FUNCTIONS = {"u4x32_t", "st_two_over_pi"}


def apply(name: str, *operands: Any, dtype: Any = F32) -> list[Any]:
    result: list[Any] = MIRROR[name](*(np.array(operand, dtype) for operand in operands)).tolist()
    return result


# --- text ----------------------------------------------------------------------------------------------------------


def test_text_depends_on_the_set_of_names_only() -> None:
    names = ["st_tanh_f32", "st_f64_to_bf16", "st_exp_f32"]
    assert prelude_source(names) == prelude_source([*reversed(names), "st_exp_f32"])


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("features", [frozenset(), frozenset({"fma", "avx"})])
def test_definitions_come_before_uses_and_once(dialect: str, features: frozenset[str]) -> None:
    text = prelude_source(known_names(), dialect=dialect, features=features)
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    defined: set[str] = set()
    for match in re.finditer(r"^(?:ST_FN|ST_TABLE) \w+ (\w+)|\b(st_\w+)", text, flags=re.MULTILINE):
        definition, use = match.groups()
        if definition:
            assert definition not in defined
            defined.add(definition)
        else:
            assert use in defined, use
    assert defined == known_names() - {"u4x32_t"}


@pytest.mark.parametrize("name", sorted(known_names()))
def test_every_function_stands_with_its_declared_needs_alone(name: str) -> None:
    for features in (frozenset[str](), frozenset({"fma", "avx"})):
        text = re.sub(r"/\*.*?\*/", "", prelude_source([name], features=features), flags=re.DOTALL)
        defined = set(re.findall(r"^(?:ST_FN|ST_TABLE) \w+ (\w+)", text, flags=re.MULTILINE))
        assert set(re.findall(r"\bst_\w+", text)) == defined - {"u4x32_t"}
        calls_library = re.search(
            r"(?<!_)\b(exp|exp2|log|log2|tanh|erfc?|sin|cos|pow|fmod|floor|ceil|trunc|rint|sqrt|fma)\(", text
        )
        assert ("<math.h>" in text) == bool(calls_library or "copysign(" in text)


def test_only_what_is_used_is_printed() -> None:
    text = prelude_source(["st_f32_to_bf16"])
    assert re.findall(r"\bst_\w+(?=\()", text.split("ST_FN", 1)[1])[:2] == ["st_bits_f32", "st_pick_u32"]
    assert "math.h" not in text
    assert "string.h" not in text
    assert "st_fma_f32" not in text


def test_features_choose_the_hardware_form() -> None:
    assert "__builtin_fmaf" in prelude_source(["st_fma_f32"], features=frozenset({"fma", "unheard-of"}))
    assert "__builtin_fmaf" not in prelude_source(["st_fma_f32"])
    assert "__fmaf_rn" in prelude_source(["st_fma_f32"], dialect="cuda")
    assert "__builtin" not in prelude_source(known_names(), dialect="cuda")


def test_no_float_function_calls_the_library() -> None:
    names = [name for name in known_names() if "f64" not in name]
    for features in (frozenset[str](), frozenset({"fma", "avx"})):
        assert "math.h" not in prelude_source(names, features=features)


def test_no_bare_names_of_special_values() -> None:
    code = re.sub(r"/\*.*?\*/", "", prelude_source(known_names()), flags=re.DOTALL)
    assert not re.search(r"\b(nan|inf|inff|NAN|INFINITY|HUGE_VAL)\b", code)


@pytest.mark.parametrize(("names", "dialect"), [(["st_unheard_of"], "c"), (["st_exp_f32"], "opencl")])
def test_unknown_names_and_dialects_are_refused(names: list[str], dialect: str) -> None:
    with pytest.raises(InternalError, match=r"st_unheard_of|opencl"):
        prelude_source(names, dialect=dialect)


def test_every_function_has_a_mirror() -> None:
    assert set(MIRROR) == known_names() - NOT_FUNCTIONS


def test_every_prelude_op_has_an_f32_and_an_f64_function() -> None:
    for op in (row.name for row in OPS.values() if row.prelude):
        assert op_function(op, f32) in MIRROR
        assert op_function(op, f64) in MIRROR
    assert op_function("mod", "i8") == "st_floormod_i8"
    assert op_function("add", "f32") is None


# --- conversions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target", "saturate", "expected"),
    [
        ("f32", "f32", False, None),
        ("f32", "f64", True, None),
        ("f64", "f32", False, "st_f64_to_f32"),
        ("f64", "f32", True, "st_f64_to_f32_sat"),
        ("f64", "f16", False, "st_f64_to_f16"),
        ("f32", "bf16", True, "st_f32_to_bf16_sat"),
        ("f8e5m2", "f16", True, "st_f8e5m2_to_f16"),
        ("i64", "f32", True, None),
        ("i64", "i8", False, None),
        ("bool", "i32", False, None),
        ("i8", "bool", False, "st_i8_to_bool"),
        ("u16", "f16", True, "st_u16_to_f16_sat"),
        ("i16", "f16", True, "st_i16_to_f16"),
        ("f16", "u8", True, "st_f16_to_u8"),
    ],
)
def test_conversion_names(source: str, target: str, saturate: bool, expected: str | None) -> None:
    assert conversion(source, target, saturate) == expected


def test_conversion_names_exist_for_every_pair() -> None:
    formats = [prec for prec in ALL if prec is not u4x32]
    for source in formats:
        for target in formats:
            for saturate in (False, True):
                assert conversion(source, target, saturate) in known_names() | {None}
    with pytest.raises(InternalError, match="counter state"):
        conversion(u4x32, f32)


def test_conversion_vectors() -> None:
    half, quarter = np.float16, ml_dtypes.float8_e4m3fn
    assert apply("st_f64_to_bf16", [1 + 2**-8 + 2**-40], dtype=np.float64) == [1 + 2**-7]
    assert apply("st_f64_to_f8e5m2", [1.125 + 2**-40], dtype=np.float64) == [1.25]
    assert apply("st_i64_to_bf16", [2**40 + 2**32 + 1], dtype=np.int64) == [2**40 + 2**33]
    values = [math.nan, math.inf, -math.inf, 3e9, -3e9, 300.7, -1.7]
    assert apply("st_f32_to_i32", values) == [0, 2**31 - 1, -(2**31), 2**31 - 1, -(2**31), 300, -1]
    assert apply("st_f32_to_u8", values) == [0, 255, 0, 255, 0, 255, 0]
    assert apply("st_f32_to_f16_sat", [65520.0, -1e9, math.inf]) == [65504, -65504, math.inf]
    assert np.isnan(apply("st_f32_to_f8e4m3", [465.0, math.inf])).all()
    assert apply("st_f32_to_f8e4m3", [464.0, 448.0]) == [448, 448]
    assert MIRROR["st_f16_to_f32"](np.array([1, 0x3FF, 0x400], np.uint16).view(half)).tolist() == [
        2.0**-24,
        1023 * 2.0**-24,
        2.0**-14,
    ]
    assert MIRROR["st_f8e4m3_to_bool"](np.array([0x80, 0x01, 0x7F], np.uint8).view(quarter)).tolist() == [
        False,
        True,
        True,
    ]


# --- exact functions -----------------------------------------------------------------------------------------------


def exact_f32(value: Fraction) -> np.float32:
    """Round a fraction to f32: Python's division rounds once to f64, so decide ties on the fraction itself."""
    near = F32(float(value))
    candidates = [near, np.nextafter(near, F32(np.inf)), np.nextafter(near, F32(-np.inf))]
    return min(candidates, key=lambda c: (abs(Fraction(float(c)) - value), int(np.array(c).view(np.uint32)) & 1))


def test_fma_rounds_once() -> None:
    rng = np.random.default_rng(7)
    a, b = ((1 + rng.integers(0, 1 << 23, 600) * 2.0**-23).astype(F32) for _ in range(2))
    c = np.ldexp(rng.integers(1, 1 << 24, 600), rng.integers(-80, 4, 600)).astype(F32)
    # Products on the midpoint of two floats, and addends that vanish beside them in f64 but decide the rounding.
    a[:200], b[:200] = F32(1 + 2.0**-12), F32(1 + 2.0**-12)
    b[:100] = F32(1 + 3 * 2.0**-12)
    c[:200] = np.ldexp(np.where(rng.integers(0, 2, 200) == 1, 1, -1), rng.integers(-120, -50, 200)).astype(F32)
    a[:200:2] *= F32(-8)
    a[200:300] *= F32(2.0**-140)
    c[200:300] *= F32(2.0**-100)
    got = MIRROR["st_fma_f32"](a, b, c)
    triples = zip(a, b, c, strict=True)
    wanted = [float(exact_f32(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)))) for x, y, z in triples]
    assert got.tolist() == wanted
    twice = (a.astype(np.float64) * b + c).astype(F32).tolist()
    assert sum(x != y for x, y in zip(twice, wanted, strict=True)) > 50, "the cases must tell one rounding from two"


def test_fma_f64_rounds_once() -> None:
    rng = np.random.default_rng(8)
    a, b, c = (np.ldexp(rng.uniform(-1, 1, 400), rng.integers(-60, 60, 400)) for _ in range(3))
    a[:50] *= 2.0**-500
    b[:50] *= 2.0**-520
    c[:50] *= 2.0**-1040
    c[50:100] = -(a[50:100] * b[50:100])
    got = MIRROR["st_fma_f64"](a, b, c)
    wanted = [
        float(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))) for x, y, z in zip(a, b, c, strict=True)
    ]
    assert got.tolist() == wanted
    assert (a * b + c).tolist() != wanted


def test_maximum_and_minimum() -> None:
    nan, one = math.nan, 1.0
    assert np.isnan(apply("st_max_f32", [nan, one], [one, nan])).all()
    assert np.isnan(apply("st_min_f64", [nan, one], [one, nan], dtype=np.float64)).all()
    zeros = MIRROR["st_max_f32"](np.array([-0.0, 0.0], F32), np.array([0.0, -0.0], F32))
    assert np.signbit(zeros).tolist() == [True, False], "the first operand at ties"


@pytest.mark.parametrize("prec", [prec for prec in INTEGERS if prec.is_signed], ids=str)
def test_integer_division_floors(prec: Any) -> None:
    dtype, least = prec.numpy_dtype, prec.min_finite
    a, b = [-7, 7, -7, -1, 120, least, 5, 0], [2, -2, -2, 3, -27, -1, 0, 0]
    expected = [(x // y, x % y) if y else (0, 0) for x, y in zip(a, b, strict=True)]
    expected[5] = (least, 0)
    assert apply(f"st_floordiv_{prec}", a, b, dtype=dtype) == [quotient for quotient, _ in expected]
    assert apply(f"st_floormod_{prec}", a, b, dtype=dtype) == [remainder for _, remainder in expected]


def test_float_division_floors_as_python_does() -> None:
    a = [7.5, -7.5, 7.5, -7.5, 1.0, -1.0, 0.0, -0.0, 5.0, 1e30]
    b = [2.0, 2.0, -2.0, -2.0, math.inf, math.inf, 3.0, 3.0, -5.0, 3.0]
    for suffix, dtype in (("f32", np.float32), ("f64", np.float64)):
        x, y = np.array(a, dtype).tolist(), np.array(b, dtype).tolist()
        remainders = apply(f"st_floormod_{suffix}", a, b, dtype=dtype)
        quotients = apply(f"st_floordiv_{suffix}", a, b, dtype=dtype)
        assert remainders == np.array([p % q for p, q in zip(x, y, strict=True)], dtype).tolist()
        assert quotients == np.array([p // q for p, q in zip(x, y, strict=True)], dtype).tolist()
        assert [math.copysign(1, r) for r in remainders] == [math.copysign(1, p % q) for p, q in zip(x, y, strict=True)]
        assert apply(f"st_floordiv_{suffix}", [1.0, -1.0], [0.0, 0.0], dtype=dtype) == [math.inf, -math.inf]
        assert np.isnan(apply(f"st_floormod_{suffix}", [1.0, math.inf], [0.0, 2.0], dtype=dtype)).all()
    # 1 // 0.1 is 9: the quotient rounds to 10, which the remainder contradicts.
    assert apply("st_floordiv_f64", [1.0], [0.1], dtype=np.float64) == [9.0]


def test_integer_powers_wrap() -> None:
    assert apply("st_pow_i32", [3, -2, 0, 7, 2, 1], [4, 3, 0, 20, -1, -1], dtype=np.int32) == [
        81,
        -8,
        1,
        (7**20 + 2**31) % 2**32 - 2**31,
        0,
        0,
    ]
    assert apply("st_pow_u8", [3, 255], [9, 2], dtype=np.uint8) == [3**9 % 256, 1]


def test_unary_specials() -> None:
    values = [math.nan, math.inf, -math.inf, 0.0, -0.0, 2.5, -2.5, 3.5]
    relu = MIRROR["st_relu_f32"](np.array(values, F32))
    assert np.isnan(relu[0])
    assert relu[1:].tolist() == [math.inf, 0, 0, 0, 2.5, 0, 3.5]
    assert not np.signbit(relu[1:]).any()
    assert apply("st_sign_f32", values[1:]) == [1, -1, 0, 0, 1, -1, 1]
    assert apply("st_round_f32", values[5:]) == [2, -2, 4]
    assert apply("st_is_nonfinite_f32", values) == [1, 1, 1, 0, 0, 0, 0, 0]
    assert apply("st_nonfinite_f64", values, dtype=np.float64) == [math.inf] * 3 + [0.0] * 5


@pytest.mark.parametrize("prec", FLOATS, ids=str)
def test_flush_clears_subnormals_only(prec: Any) -> None:
    cells = np.array([prec.min_normal, -prec.min_normal, prec.min_subnormal, -prec.min_subnormal, 1.0]).astype(
        prec.numpy_dtype
    )
    flushed = MIRROR[f"st_flush_{prec}"](cells).astype(np.float64)
    assert flushed.tolist() == [prec.min_normal, -prec.min_normal, 0, 0, 1]
    assert not np.signbit(flushed[2:4]).any()


# --- transcendental functions --------------------------------------------------------------------------------------


def test_power_table_of_c99() -> None:
    inf, nan = math.inf, math.nan
    cases = [
        *[
            (x, y)
            for x in (-2.0, 0.0, 3.0, -0.0, -1.0, 1.0, inf, -inf, -0.5)
            for y in (2.0, 3.0, 0.0, -3.0, -2.0, inf, -inf)
        ],
        (0.25, 0.5),
        (-inf, 0.5),
        (-inf, -0.5),
        (1.0, nan),
        (nan, 0.0),
    ]

    def expected(x: float, y: float) -> float:
        try:
            return math.pow(x, y)  # C's pow, but it raises for 0 to a negative power
        except ValueError:
            return math.copysign(inf, x) if y % 2 == 1 else inf

    x, y = np.array(cases, F32).T
    got = MIRROR["st_pow_f32"](x, y)
    wanted = np.array([expected(*case) for case in cases], F32)
    assert got.view(np.uint32).tolist() == wanted.view(np.uint32).tolist()
    undefined = MIRROR["st_pow_f32"](np.array([-2, -1, nan, 2, -1], F32), np.array([0.5, 0.5, 1, nan, nan], F32))
    assert np.isnan(undefined).all()


def test_special_values() -> None:
    inf, nan = math.inf, math.nan
    tables: dict[str, list[tuple[float, float]]] = {
        "exp": [(-inf, 0), (inf, inf), (0, 1), (-0.0, 1), (-200, 0), (200, inf)],
        "exp2": [(-inf, 0), (inf, inf), (0, 1), (10, 1024), (-149, 2.0**-149), (-150.5, 0), (128, inf)],
        "log": [(0, -inf), (-0.0, -inf), (inf, inf), (1, 0)],
        "log2": [(0, -inf), (inf, inf), (1, 0), (2.0**-149, -149), (8, 3)],
        "tanh": [(-inf, -1), (inf, 1), (-0.0, -0.0), (1e-40, 1e-40)],
        "sigmoid": [(-inf, 0), (inf, 1), (0, 0.5)],
        "erf": [(-inf, -1), (inf, 1), (-0.0, -0.0)],
        "erfc": [(-inf, 2), (inf, 0), (-0.0, 1)],
        "sin": [(0, 0), (-0.0, -0.0), (1e-40, 1e-40)],
        "cos": [(0, 1), (-0.0, 1)],
        "rsqrt": [(0, inf), (inf, 0), (4, 0.5)],
    }
    for stem, pairs in tables.items():
        x, wanted = np.array(pairs, F32).T
        assert MIRROR[f"st_{stem}_f32"](x).view(np.uint32).tolist() == wanted.view(np.uint32).tolist(), stem
        assert np.isnan(MIRROR[f"st_{stem}_f32"](np.array([nan], F32))).all(), stem
    for stem, x in (("log", -1.0), ("log2", -inf), ("sin", inf), ("cos", -inf), ("rsqrt", -1.0)):
        assert np.isnan(apply(f"st_{stem}_f32", [x])).all(), stem


def test_bf16_through_f32_rounds_once() -> None:
    for stem, expected in (("exp", 162816.0), ("log", 2.484375), ("cos", 0.84375)):
        value = MIRROR[f"st_{stem}_f32"](np.array([12.0], F32))
        assert MIRROR["st_f32_to_bf16"](value).astype(np.float64).tolist() == [expected]


def test_sine_of_large_arguments() -> None:
    # 2^120 and friends lie millions of turns out; Python reduces them with all digits of pi as well.
    values = [2.0**120, 1e10, 123456.789, 3.4028234663852886e38, 22.0, 1e6]
    x = np.array(values, F32)
    for stem, function in (("sin", math.sin), ("cos", math.cos)):
        wanted = np.array([function(float(value)) for value in x])
        np.testing.assert_allclose(MIRROR[f"st_{stem}_f32"](x), wanted, rtol=2**-23)


def test_two_over_pi_words_overlap() -> None:
    words = two_over_pi_words()
    total = sum(Fraction(words[k], 2 ** (8 * k - 1)) for k in range(4, len(words), 4))
    assert abs(total - Fraction(2 / math.pi)) < Fraction(1, 2**53)
    for near, far in itertools.pairwise(words):
        assert near & 0xFFFFFF == far >> 8


# --- random numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        ([0] * 4, [0] * 4, [0x9C6CA96A, 0xE17EAE66, 0xFC10ECD4, 0x5256A7D8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 4, [0x2A881696, 0x57012287, 0xF6C7446E, 0xA16A6732]),
        (
            [0xA4093822, 0x299F31D0, 0x082EFA98, 0xEC4E6C89],
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0x59CD1DBB, 0xB8879579, 0x86B5D00C, 0xAC8B6D84],
        ),
    ],
)
def test_threefry_known_answers(key: list[int], counter: list[int], expected: list[int]) -> None:
    assert apply("st_threefry4x32", key, counter, dtype=np.uint32) == expected


def test_threefry_counters_broadcast() -> None:
    keys = np.uint32(3), np.uint32(4)
    together = MIRROR["st_threefry"](*keys, np.array([5, 6 + 2**40], np.uint64))
    assert together.shape == (2, 4)
    assert together[1].tolist() == MIRROR["st_threefry"](*keys, np.uint64(6 + 2**40)).tolist()


def test_random_numbers_have_the_right_moments() -> None:
    counter = np.arange(1 << 16, dtype=np.uint64)
    for suffix in ("f32", "f64"):
        uniform = MIRROR[f"st_random_uniform_{suffix}"](np.uint32(1), np.uint32(2), counter)
        normal = MIRROR[f"st_random_normal_{suffix}"](np.uint32(1), np.uint32(2), counter)
        assert uniform.min() >= 0
        assert uniform.max() < 1
        assert abs(uniform.mean() - 0.5) < 0.005
        assert abs(normal.mean()) < 0.02
        assert abs(normal.std() - 1) < 0.02
        assert abs((normal**4).mean() - 3) < 0.15
    extremes = MIRROR["st_normal_f32"](np.array([0, 2**32 - 1], np.uint32), np.array([0, 0], np.uint32))
    assert np.isfinite(extremes).all()
    assert extremes.tolist() == [pytest.approx(math.sqrt(48 * math.log(2)), rel=1e-6), 0.0]
    assert MIRROR["st_uniform_f32"](np.uint32(2**32 - 1)) == 1 - 2**-24
