"""Formats in exported modules: integers, truth values, saturating casts, counter state; and options that do not exist."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor.errors import ExportError

from .interpreter import both, interpret

Array = np.ndarray[Any, Any]
INTEGERS = (st.i8, st.i16, st.i32, st.i64, st.u8, st.u16, st.u32, st.u64)


def operands(prec: st.Prec) -> tuple[Array, Array]:
    """All pairs of the ends of a format, small numbers and zero."""
    low, high = int(prec.min_finite), int(prec.max_finite)
    cells = [low, low + 1, 0, 1, 2, 3, 7, high - 1, high, *((-1, -2, -7) if low else ())]
    values = np.array(cells, prec.numpy_dtype)
    return np.repeat(values, len(values)), np.tile(values, len(values))


OPS: dict[str, Callable[[st.Tensor, st.Tensor], st.Tensor]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "floor_div": lambda a, b: a // b,
    "mod": lambda a, b: a % b,
    "maximum": st.maximum,
    "minimum": st.minimum,
    "abs": lambda a, b: st.abs(a) + b * 0,
    "sign": lambda a, b: st.sign(a) + b * 0,
    "where": lambda a, b: st.where(a > b, a, b),
    "eq": lambda a, b: a == b,
    "le": lambda a, b: a <= b,
    "and": st.logical_and,
    "not": lambda a, b: st.logical_not(a) + b * 0,
}


@pytest.mark.parametrize("prec", INTEGERS, ids=str)
def test_integers_have_the_bits_of_the_package(prec: st.Prec) -> None:
    left, right = operands(prec)
    a, b = (st.placeholder(name, output=[left.size], prec=prec) for name in "ab")
    root = st.concat([st.reshape(st.cast(op(a, b), prec), output=[1, left.size]) for op in OPS.values()], axis=0)
    text = st.export.to_stablehlo(root)
    unsigned = "u" if prec.name.startswith("u") else ""
    assert f"%arg0: tensor<{left.size}x{unsigned}i{prec.bits}>" in text
    found, wanted, _ = both(root, {"a": left, "b": right}, root)
    for name, got, want in zip(OPS, found[0], wanted[0], strict=True):
        np.testing.assert_array_equal(got, want, err_msg=name)


def test_truth_values_are_one_bit() -> None:
    a = st.placeholder("a", output=[4], prec=st.bool)
    b = st.placeholder("b", output=[4], prec=st.f32)
    root = st.where(st.logical_and(a, b > 0.0), b, -1.0)
    assert "%arg1: tensor<4xi1>" in st.export.to_stablehlo(root) or "%arg0: tensor<4xi1>" in st.export.to_stablehlo(
        root
    )
    found, wanted, _ = both(root, {"a": np.array([1, 0, 1, 1], bool), "b": np.array([1, 2, -3, 4], np.float32)}, root)
    np.testing.assert_array_equal(found[0], wanted[0])
    np.testing.assert_array_equal(found[0], [1, -1, -1, 4])


@pytest.mark.parametrize("prec", [st.f16, st.bf16, st.f8e5m2, st.f8e4m3], ids=str)
def test_saturating_casts_clamp_finite_numbers(prec: st.Prec) -> None:
    top = float(prec.max_finite)
    with np.errstate(over="ignore"):
        values = np.array([top, -top, top * 1.5, -top * 1.5, 3e38, np.inf, -np.inf, np.nan, 1.0, 2.0**-30], np.float32)
    x = st.placeholder("x", output=[10], prec=st.f32)
    root = st.cast(st.cast(x, prec, saturate=True), st.f64)
    found, wanted, _ = both(root, {"x": values}, root)
    np.testing.assert_array_equal(found[0], wanted[0])
    assert (np.abs(found[0][:5]) == top).all() or prec is st.bf16
    assert np.isinf(found[0][5]) is np.bool_(prec.has_inf) or np.isnan(found[0][5])


def test_formats_have_their_names() -> None:
    x = st.placeholder("x", output=[2], prec=st.f32)
    for prec, name in (
        (st.f8e5m2, "f8E5M2"),
        (st.f8e4m3, "f8E4M3FN"),
        (st.bf16, "bf16"),
        (st.f16, "f16"),
        (st.f64, "f64"),
    ):
        assert f"-> tensor<2x{name}>" in st.export.to_stablehlo(st.cast(x, prec))
    with pytest.raises(ExportError, match="counter"):
        st.export.to_stablehlo(st.placeholder("state", output=[4], prec=st.u4x32))


@pytest.mark.parametrize("option", ["params", "twins", "accum", "encoded"])
def test_unknown_options(option: str) -> None:
    x = st.placeholder("x", output=[2])
    exports: tuple[Callable[..., Any], ...] = (st.export.to_stablehlo, st.export.signature)
    for export in exports:
        with pytest.raises(ValueError, match=f"{option} is "):
            export(x, **{option: "maybe"})


NAMES = ("main", "a name", "9", 'with "quotes" and \\', "größe", "{0}")


def test_names_are_quoted_where_they_must_be() -> None:
    for name in NAMES:
        x = st.placeholder(f"of {name}", output=[2], prec=st.f32)
        y = st.stage(f"region {name}", prec=st.f16)(st.exp)(x).named(f"result {name}")
        text = st.export.to_stablehlo(st.cast(y, st.f32) * 0.0 + x * 2.0, name)
        assert text.isascii()
        np.testing.assert_array_equal(interpret(text, [np.array([1, 2], np.float32)]).results[0], [2, 4])
