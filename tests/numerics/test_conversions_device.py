"""``st.cast`` between all pairs of formats in compiled code, against an exact rounder in integer arithmetic."""

from __future__ import annotations

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor.precision import precision
from tests.oracles.rounding import (
    FLOAT_NAMES,
    INTEGER_NAMES,
    cells_of,
    codes_of,
    convert_codes,
    edge_codes,
    layout_of,
    same_codes,
)

from .running import FUSED, REFERENCE, UNFUSED, Array, Program, Setting, assert_same_bits, run, runnable_targets

NAMES = (*FLOAT_NAMES, *INTEGER_NAMES)


def float_codes(source: str, *, thorough: bool) -> Array:
    """Codes of f32 or f64 at which some conversion is decided."""
    layout = layout_of(source)
    dtype = precision(source).numpy_dtype
    rng = np.random.default_rng(1)
    parts = [
        rng.integers(0, 1 << 62, 1 << (20 if thorough else 12), dtype=np.uint64) * np.uint64(4)
        >> np.uint64(64 - layout.bits)
    ]
    for target in ("f8e5m2", "f8e4m3", "f16", "bf16"):
        edges = edge_codes(source, target)
        parts.append(edges if thorough or edges.size < 4000 else np.concatenate([edges[::41], edges[-3000:]]))
    powers = 2.0 ** np.arange(-1, 65)
    whole = np.concatenate([powers, powers - 1, powers + 1, powers + 0.5, powers - 0.5, powers * 1.5]).astype(dtype)
    near = np.concatenate([whole, np.nextafter(whole, dtype.type(0)), np.nextafter(whole, dtype.type(np.inf))])
    parts.append(codes_of(np.concatenate([near, -near])))
    if source == "f64":  # midpoints of two f32 and their neighbours; where f32 overflows
        single = rng.integers(0, 0x7F800000, 2000, dtype=np.uint64)
        single = np.concatenate(
            [single, np.arange(20, dtype=np.uint64), np.arange(0x7F7FFFF0, 0x7F800000, dtype=np.uint64)]
        )
        lower = cells_of(single, np.float32).astype(np.float64)
        upper = np.where(single == 0x7F7FFFFF, 2.0**128, cells_of(single + np.uint64(1), np.float32).astype(np.float64))
        middle = codes_of((lower + upper) / 2)
        parts += [middle, middle + np.uint64(1), middle - np.uint64(1), middle | np.uint64(1 << 63)]
    return np.concatenate(parts)


def integer_codes(source: str) -> Array:
    """Codes of a wide integer: ends, powers of two, and midpoints of neighbouring floats above them."""
    layout = layout_of(source)
    rng = np.random.default_rng(2)
    mask = (1 << layout.bits) - 1
    values = [0, 1, mask, layout.sign, layout.sign - 1, layout.sign + 1]
    for power in range(layout.bits):
        for mantissa in (2, 3, 7, 10, 23, 52):
            half = (1 << power) + ((1 << power) >> (mantissa + 1))
            values += [half + step for step in (-1, 0, 1)] + [
                half + ((1 << power) >> mantissa) + step for step in (-1, 0, 1)
            ]
        values += [(1 << power) - 1, -(1 << power), -(1 << power) - 1]
    drawn = rng.integers(0, 1 << 62, 2000, dtype=np.uint64) * np.uint64(4) >> rng.integers(
        64 - layout.bits, 64, 2000
    ).astype(np.uint64)
    return np.concatenate([np.array([value & mask for value in values], np.uint64), drawn])


def source_codes(source: str, *, thorough: bool = False) -> Array:
    bits = layout_of(source).bits
    if bits <= 16:
        return np.arange(1 << bits, dtype=np.uint64)
    return float_codes(source, thorough=thorough) if source in FLOAT_NAMES else integer_codes(source)


def converted(source: str, cells: Array, setting: Setting) -> list[tuple[str, bool, Array]]:
    """Cast to every format, and to every float once more with ``saturate``."""
    wanted = [(target, False) for target in (*NAMES, "bool") if target != source]
    wanted += [(target, True) for target in FLOAT_NAMES]

    def build() -> Program:
        x = st.placeholder("x", output=[cells.size], prec=source)
        return Program([(x, cells)], [st.cast(x, target, saturate=saturate) for target, saturate in wanted])

    return [(*want, found) for want, found in zip(wanted, run(build, setting), strict=True)]


def check(source: str, codes: Array, setting: Setting) -> None:
    cells = cells_of(codes, precision(source).numpy_dtype)
    for target, saturate, found in converted(source, cells, setting):
        if target == "bool":
            with np.errstate(invalid="ignore"):  # signalling NaN
                assert_same_bits(found, cells != 0, f"{source} to bool")
            continue
        expected = convert_codes(codes, source, target, saturate=saturate)
        wrong = np.flatnonzero(~same_codes(codes_of(found), expected, target))
        if wrong.size:
            at = wrong[:4]
            raise AssertionError(
                f"{source} to {target}, saturate={saturate} on {setting}: {wrong.size} of {codes.size} codes differ, "
                f"{list(map(hex, codes[at].tolist()))} -> {list(map(hex, codes_of(found)[at].tolist()))}, "
                f"expected {list(map(hex, expected[at].tolist()))}"
            )


@pytest.mark.parametrize("source", NAMES)
def test_compiled_casts(source: str) -> None:
    codes = source_codes(source)
    check(source, codes, FUSED)
    if source in ("f64", "f32", "i64", "u64", "bf16", "f16"):
        check(source, codes, Setting(target=runnable_targets()[0]))


@pytest.mark.parametrize("source", ["f64", "f32", "f16", "f8e4m3", "i64", "u16"])
def test_interpreted_casts(source: str) -> None:
    check(source, source_codes(source)[::3], REFERENCE)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["f64", "f32"])
def test_compiled_casts_thoroughly(source: str) -> None:
    codes = source_codes(source, thorough=True)
    for target in runnable_targets():
        check(source, codes, Setting(target=target))


def test_bools_cast_to_zero_and_one() -> None:
    cells = np.array([False, True, True])
    for target, _, found in converted("bool", cells, FUSED):
        assert found.astype(np.float64).tolist() == [0.0, 1.0, 1.0], target


VECTORS = [
    ("f32", "bf16", np.array([0x7FFFFFFF, 0xFFFFFFFF], np.uint32).view(np.float32), [np.nan, np.nan]),
    ("f64", "bf16", [1 + 2.0**-8 + 2.0**-40], [1 + 2.0**-7]),
    ("f64", "f8e5m2", [1.125 + 2.0**-40], [1.25]),
    ("f64", "f8e4m3", [1.0625 + 2.0**-40], [1.125]),
    ("i64", "bf16", [2**40 + 2**32 + 1], [2.0**40 + 2.0**33]),
    (
        "f32",
        "i32",
        [np.nan, np.inf, -np.inf, 3e9, -3e9, 300.7, -1.7],
        [0, 2**31 - 1, -(2**31), 2**31 - 1, -(2**31), 300, -1],
    ),
    ("f32", "u8", [np.nan, np.inf, -np.inf, 3e9, -3e9, 300.7, -1.7], [0, 255, 0, 255, 0, 255, 0]),
    ("i32", "u8", [300, -1, 128], [44, 255, 128]),
    ("i32", "i8", [300, -1, 128], [44, -1, -128]),
]


def test_known_vectors_through_virtual_nodes() -> None:
    """The casts are read by another op, so that fusion could lose or double them."""

    def build() -> Program:
        feeds, reads = [], []
        for at, (source, target, values, _) in enumerate(VECTORS):
            cells = np.asarray(values, precision(source).numpy_dtype)
            x = st.placeholder(f"x{at}", output=[cells.size], prec=source)
            narrow = st.cast(x, target)
            wide = st.cast(narrow, "f64" if precision(target).is_float else "i64")
            feeds.append((x, cells))
            reads.append(wide)
        return Program(feeds, reads)

    for setting in (REFERENCE, FUSED, UNFUSED):
        for (source, target, _, expected), found in zip(VECTORS, run(build, setting), strict=True):
            np.testing.assert_array_equal(
                found.astype(np.float64), np.asarray(expected, np.float64), err_msg=f"{source} to {target}"
            )


def test_host_values_are_converted_once() -> None:
    """Values given from the host follow the same rule: f64 and integers are not rounded twice."""
    for source, codes in (
        ("f64", float_codes("f64", thorough=False)),
        ("i64", integer_codes("i64")),
        ("f32", float_codes("f32", thorough=False)),
    ):
        cells = cells_of(codes, precision(source).numpy_dtype)
        for target in ("bf16", "f16", "f8e4m3", "f8e5m2", "f32"):
            with st.Session(), st.Context("reference") as ctx:
                x = st.placeholder("x", output=[cells.size], prec=target)
                ctx.set_values(x, cells)
                found = codes_of(ctx.get_values(x))
            assert same_codes(found, convert_codes(codes, source, target), target).all(), (source, target)
