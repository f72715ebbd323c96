"""Formats, their names, and the join: its stated values, its laws, and its refusals."""

from __future__ import annotations

import copy
import itertools
import pickle
import random
import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import stagedtensor
from stagedtensor.errors import PrecisionError
from stagedtensor.precision import (
    ALL,
    FLOATS,
    INTEGERS,
    Prec,
    Requirement,
    arithmetic_join,
    bf16,
    bool_,
    f8e4m3,
    f8e5m2,
    f16,
    f32,
    f64,
    i8,
    i16,
    i32,
    i64,
    join,
    join_requirement,
    precision,
    u4x32,
    u8,
    u16,
    u32,
    u64,
)

JOINABLE = tuple(prec for prec in ALL if prec is not u4x32)


# Formats.


def test_tuples_hold_every_format_once() -> None:
    assert [prec.name for prec in ALL] == (
        [
            "f64",
            "f32",
            "f16",
            "bf16",
            "f8e5m2",
            "f8e4m3",
            "i64",
            "i32",
            "i16",
            "i8",
            "u64",
            "u32",
            "u16",
            "u8",
            "bool",
            "u4x32",
        ]
    )
    assert (*FLOATS, *INTEGERS, bool_, u4x32) == ALL
    for prec in ALL:
        assert getattr(stagedtensor, prec.name) is prec
        assert repr(prec) == str(prec) == prec.name


@pytest.mark.parametrize("prec", FLOATS, ids=str)
def test_float_limits_are_those_of_the_dtype(prec: Prec) -> None:
    info: Any = (np.finfo if prec.bits >= 32 or prec is f16 else ml_dtypes.finfo)(prec.numpy_dtype)
    assert prec.bits == info.bits == 8 * prec.numpy_dtype.itemsize == 8 * prec.bytes
    assert prec.exponent_bits == info.iexp
    assert prec.mantissa_bits == info.nmant
    assert prec.max_finite == float(info.max) == -prec.min_finite
    assert prec.min_normal == float(info.smallest_normal)
    assert prec.min_subnormal == float(info.smallest_subnormal)
    assert prec.is_float
    assert prec.is_signed
    assert not prec.is_integer
    assert prec.is_narrow is (prec not in (f64, f32))
    assert prec.has_inf is (prec is not f8e4m3)
    assert prec.storage_dtype == (f"uint{prec.bits}" if prec.is_narrow else prec.numpy_dtype)


@pytest.mark.parametrize("prec", INTEGERS, ids=str)
def test_integer_limits_are_those_of_the_dtype(prec: Prec) -> None:
    info = np.iinfo(prec.numpy_dtype)
    assert (prec.min_finite, prec.max_finite, prec.bits) == (info.min, info.max, info.bits)
    assert prec.mantissa_bits == prec.bits - prec.is_signed
    assert prec.is_integer
    assert prec.storage_dtype == prec.numpy_dtype
    assert not any((prec.is_float, prec.is_narrow, prec.has_inf))


def test_greatest_finite_values() -> None:
    assert [prec.max_finite for prec in (f16, f8e5m2, f8e4m3, i8, u16, bool_)] == [65504, 57344, 448, 127, 65535, 1]
    assert bf16.max_finite == float.fromhex("0x1.FEp127")
    assert [prec.min_subnormal for prec in FLOATS] == [2.0**exponent for exponent in (-1074, -149, -24, -133, -16, -9)]


def test_bool_and_counter_state() -> None:
    assert (bool_.bits, bool_.numpy_dtype, bool_.storage_dtype, bool_.c_type) == (
        8,
        np.dtype(np.bool_),
        np.dtype(np.uint8),
        "uint8_t",
    )
    assert (u4x32.bits, u4x32.bytes, u4x32.numpy_dtype) == (128, 16, np.dtype(np.uint32))
    for prec in (bool_, u4x32):
        assert not any((prec.is_float, prec.is_integer, prec.is_narrow, prec.is_signed, prec.has_inf))


def test_types_of_generated_code() -> None:
    assert [prec.c_type for prec in ALL] == [
        "double", "float", "uint16_t", "uint16_t", "uint8_t", "uint8_t",
        "int64_t", "int32_t", "int16_t", "int8_t", "uint64_t", "uint32_t", "uint16_t", "uint8_t", "uint8_t", "u4x32_t",
    ]  # fmt: skip
    assert [prec.cuda_type for prec in ALL] == [
        "double", "float", "__half", "__nv_bfloat16", "__nv_fp8_e5m2", "__nv_fp8_e4m3",
        "long long", "int", "short", "signed char",
        "unsigned long long", "unsigned int", "unsigned short", "unsigned char", "bool", "uint4",
    ]  # fmt: skip


def test_formats_are_interned_and_frozen() -> None:
    for prec in ALL:
        assert copy.copy(prec) is copy.deepcopy(prec) is pickle.loads(pickle.dumps(prec)) is prec
    with pytest.raises(AttributeError):
        f32.bits = 16  # type: ignore[misc]


# Names.


@pytest.mark.parametrize(
    ("spellings", "prec"),
    [
        ("f64 F64 double fp64 float64", f64),
        ("f32 single Single fp32 float32", f32),
        ("f16 half HALF fp16 float16", f16),
        ("bf16 BF16 bfloat16 BFloat16", bf16),
        ("f8e5m2 fp8 FP8 float8_e5m2", f8e5m2),
        ("f8e4m3 F8E4M3 float8_e4m3fn", f8e4m3),
        ("i64 int64", i64),
        ("i32 int32", i32),
        ("i16 int16", i16),
        ("i8 int8", i8),
        ("u64 uint64", u64),
        ("u32 uint32", u32),
        ("u16 uint16", u16),
        ("u8 uint8 byte Byte", u8),
        ("bool Bool bool_", bool_),
        ("u4x32 U4x32", u4x32),
    ],
)
def test_names_and_aliases_in_any_case(spellings: str, prec: Prec) -> None:
    for spelling in spellings.split():
        assert precision(spelling) is prec


@pytest.mark.parametrize("prec", JOINABLE, ids=str)
def test_numpy_dtypes(prec: Prec) -> None:
    for dtype in (prec.numpy_dtype, prec.numpy_dtype.type, prec.numpy_dtype.newbyteorder(">")):
        assert precision(dtype) is prec
    assert precision(prec) is prec


def test_equivalent_dtypes() -> None:
    assert precision(np.dtype("longlong")) is i64
    assert precision(np.dtype("ulonglong")) is u64
    assert precision(bool) is bool_
    assert precision(u4x32.numpy_dtype) is u32  # counter state is named only, never deduced


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("fp4", "fp8"),
        ("bf61", "bf16"),
        ("float8_e4m3", "float8_e4m3fn"),
        ("f8", "f8e5m2"),
        ("float", "float32"),
        (np.float32(1).dtype.newbyteorder().str + "?", None),
        (np.complex64, None),
        (np.dtype(object), None),
        (ml_dtypes.float8_e5m2fnuz, "float8_e5m2"),
        (np.floating, None),
        (object, None),
        (complex, None),
        (float, "float32"),
        (int, None),
        (3, None),
        (None, None),
    ],
)
def test_unknown_precisions(name: Any, near: str | None) -> None:
    with pytest.raises(PrecisionError, match="unknown precision") as caught:
        precision(name)
    message = str(caught.value)
    assert "test_precision.py:" in message
    assert "known precisions: f64, f32" in message
    if near is not None:
        assert f" {near}" in message.split("near matches:")[1].split("\n")[0].replace(",", "")


# Join.


@pytest.mark.parametrize(
    ("operands", "expected"),
    [
        ((f8e4m3, f8e5m2), f16),
        ((f16, bf16), f32),
        ((f8e4m3, f16), f16),
        ((f8e5m2, f16), f16),
        ((f8e4m3, bf16), bf16),
        ((f8e5m2, bf16), bf16),
        ((f8e4m3, f8e5m2, bf16), bf16),
        ((f64, f8e4m3), f64),
        ((f32, bf16), f32),
        ((u8, i8), i16),
        ((u16, i8), i32),
        ((u32, i16), i64),
        ((u64, i8), i64),
        ((u8, u32), u32),
        ((u8, i16), i16),
        ((u8, u32, i8), i64),
        ((i8, i32), i32),
        ((i64, f16), f16),
        ((u64, bf16), bf16),
        ((u8, i8, f8e4m3), f8e4m3),
        ((bool_, u8), u8),
        ((bool_, i8), i8),
        ((bool_, f8e4m3), f8e4m3),
        ((bool_, bool_), bool_),
        ((u4x32, u4x32), u4x32),
    ],
)
def test_join_in_every_order(operands: tuple[Prec, ...], expected: Prec) -> None:
    for order in itertools.permutations(operands):
        assert join(*order) is expected
        assert join(*order, order[0]) is expected


def test_join_of_one_is_itself() -> None:
    for prec in ALL:
        assert join(prec) is prec
        assert Requirement.of(prec).realise() is prec


def test_folding_formats_pairwise_would_not_do() -> None:
    assert join(join(f8e4m3, f8e5m2), bf16) is f32
    assert join(f8e4m3, join(f8e5m2, bf16)) is bf16


def test_only_unsigned_64_with_signed_is_lossy() -> None:
    for left, right in itertools.product(JOINABLE, repeat=2):
        signed = {prec for prec in (left, right) if prec.is_integer and prec.is_signed}
        assert join_requirement(left, right).is_lossy is (u64 in (left, right) and bool(signed))
    assert join_requirement(u64, i8, u64, i64).is_lossy
    assert not join_requirement(u64, i8, f16).is_lossy


def test_requirements_of_one_meaning_are_equal() -> None:
    assert join_requirement(u8, i8) == Requirement.of(i16)
    assert join_requirement(u8, i32) == Requirement.of(i32)
    assert join_requirement(i64, bool_, f16) == Requirement.of(f16)
    assert join_requirement(u64, i64) != Requirement.of(i64)  # lossy, and says so


def test_arithmetic_of_bool_is_u8() -> None:
    assert arithmetic_join(bool_, bool_) is u8
    assert arithmetic_join(bool_, i32) is i32
    assert arithmetic_join(bool_, f16) is f16


def test_requirement_join_is_a_lattice_join() -> None:
    requirements = [Requirement.of(prec) for prec in ALL]
    pairs = {left | right for left, right in itertools.product(requirements, repeat=2)}
    elements = [*pairs, Requirement()]
    for left in elements:
        assert left | left == left
        assert left | Requirement() == Requirement() | left == left
        for right in elements:
            joined = left | right
            assert joined == right | left
            assert joined | left == joined
    for left, middle, right in itertools.product(requirements, repeat=3):
        assert (left | middle) | right == left | (middle | right)


def test_join_of_many_ignores_order_and_repetition() -> None:
    generator = random.Random(5)
    for _ in range(10_000):
        operands = generator.choices(JOINABLE, k=generator.randint(1, 7))
        joined = join(*operands)
        shuffled = [*operands, *generator.choices(operands, k=2)]
        generator.shuffle(shuffled)
        assert join(*shuffled) is joined
        cut = generator.randint(0, len(shuffled))
        parts = join_requirement(*shuffled[:cut]), join_requirement(*shuffled[cut:])
        assert join_requirement(*parts).realise() is joined


def test_float_join_holds_every_code_of_its_arguments() -> None:
    small = [prec for prec in FLOATS if prec.bits <= 16]
    with np.errstate(invalid="ignore"):  # signalling NaNs are among the codes
        values = {
            prec: np.arange(1 << prec.bits).astype(prec.storage_dtype).view(prec.numpy_dtype).astype(np.float64)
            for prec in small
        }
    for left, right in itertools.product(FLOATS, repeat=2):
        joined = join(left, right)
        for prec in {left, right} & set(small):
            with np.errstate(all="ignore"):
                kept = values[prec].astype(joined.numpy_dtype).astype(np.float64)
            assert np.array_equal(kept, values[prec], equal_nan=True), (left, right, prec)
        for prec in (left, right):
            assert joined.exponent_bits >= prec.exponent_bits
            assert joined.mantissa_bits >= prec.mantissa_bits


def test_integer_join_holds_its_arguments() -> None:
    for left, right in itertools.product(INTEGERS, repeat=2):
        joined = join(left, right)
        if not join_requirement(left, right).is_lossy:
            assert joined.min_finite <= min(left.min_finite, right.min_finite)
            assert joined.max_finite >= max(left.max_finite, right.max_finite)
            narrower = [
                prec
                for prec in INTEGERS
                if prec.bits < joined.bits
                and prec.min_finite <= min(left.min_finite, right.min_finite)
                and prec.max_finite >= max(left.max_finite, right.max_finite)
            ]
            assert not narrower


@settings(derandomize=True, max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(FLOATS), min_size=1, max_size=5), st.lists(st.sampled_from([*INTEGERS, bool_]), max_size=5)
)
def test_floats_dominate_integers(floats: list[Prec], integers: list[Prec]) -> None:
    assert join(*integers, *floats) is join(*floats)


@pytest.mark.parametrize("other", JOINABLE, ids=str)
def test_counter_state_joins_with_nothing_else(other: Prec) -> None:
    for operands in itertools.permutations((u4x32, other, other, u4x32)):
        assert join_requirement(*operands).conflict
        with pytest.raises(PrecisionError, match=r"u4x32 joins only with itself, got .*\n.*test_precision\.py"):
            join(*operands)
    with pytest.raises(PrecisionError, match="u4x32 joins only with itself"):
        join_requirement(u4x32, other, f32).realise()


def test_join_of_nothing_is_refused() -> None:
    with pytest.raises(PrecisionError, match="join of no precision"):
        join()


def test_import_is_light() -> None:
    """The value modules load numpy and ml_dtypes and no other third-party package."""
    program = (
        "import sys; before = set(sys.modules)\n"
        "import stagedtensor.conversion, stagedtensor.numerics\n"
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names))"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    loaded = {name for name in answer.stdout.split() if not name.startswith("_")}
    assert loaded <= {"ml_dtypes", "numpy", "safetensors", "stagedtensor"}
