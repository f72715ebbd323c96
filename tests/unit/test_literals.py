"""Numbers, lists and arrays that users give: what a format represents, which format an array brings, what is refused."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest

from stagedtensor.conversion import all_in_range, ingest, representable
from stagedtensor.errors import PrecisionError
from stagedtensor.precision import (
    FLOATS,
    INTEGERS,
    Prec,
    bool_,
    f8e4m3,
    f16,
    f32,
    f64,
    i8,
    i64,
    u4x32,
    u8,
)

NUMBERS = (*FLOATS, *INTEGERS)


@pytest.mark.parametrize("prec", FLOATS, ids=str)
def test_floats_represent_up_to_the_greatest_finite_value(prec: Prec) -> None:
    greatest = int(prec.max_finite)
    assert representable(greatest, prec)
    assert representable(-float(prec.max_finite), prec)
    assert not representable(greatest + 1, prec)
    assert not representable(-greatest - 1, prec)
    assert representable(0.1, prec)
    assert representable(math.nan, prec)
    assert representable(math.inf, prec) is (prec is not f8e4m3)


def test_half_takes_literals_beyond_16384() -> None:
    assert representable(16385, f16)
    assert representable(np.float64(65504.0), f16)
    assert not representable(65504.01, f16)


@pytest.mark.parametrize("prec", INTEGERS, ids=str)
def test_integers_represent_exactly_their_range(prec: Prec) -> None:
    least, greatest = int(prec.min_finite), int(prec.max_finite)
    assert representable(least, prec)
    assert representable(greatest, prec)
    assert representable(3.0, prec)
    assert not representable(least - 1, prec)
    assert not representable(greatest + 1, prec)
    assert not any(representable(value, prec) for value in (0.5, math.inf, -math.inf, math.nan, 1e300))


def test_bool_and_counter_literals() -> None:
    assert [representable(value, bool_) for value in (0, 1, True, 1.0, 2, -1, 0.5)] == [True] * 4 + [False] * 3
    assert not representable(0, u4x32)


def test_integer_arrays_in_range() -> None:
    assert all_in_range(np.array([0, 255]), u8)
    assert not all_in_range(np.array([0, 256]), u8)
    assert not all_in_range(np.array([-1]), u8)
    assert not all_in_range(np.array([2**64 - 1], np.uint64), i64)
    assert all_in_range(np.zeros(0, np.int64), u8)
    assert all_in_range(np.array([True]), i8)


@pytest.mark.parametrize(
    "data",
    [1, 2.5, True, np.float16(3), np.int64(4), ml_dtypes.bfloat16(5), [1, 2.5], [[1, 2], (3, 4)], [], [np.float32(1)]],
)
def test_numbers_scalars_and_lists_are_literals(data: object) -> None:
    array, prec = ingest(data)
    assert prec is None
    assert array.tolist() == np.asarray(data).tolist()


@pytest.mark.parametrize("prec", [*NUMBERS, bool_], ids=str)
def test_arrays_bring_their_format(prec: Prec) -> None:
    for shape in ((), (2,), (2, 0)):
        array = np.zeros(shape, prec.numpy_dtype)
        assert ingest(array).prec is prec
    swapped = np.ones(2, prec.numpy_dtype).astype(prec.numpy_dtype.newbyteorder(">"))
    array, found = ingest(swapped)
    assert found is prec
    assert array.dtype.isnative
    assert array.astype(np.float64).tolist() == [1, 1]


class _WithArray:
    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
        return np.array([1.5], np.float32)


class _WithDlpack:
    def __dlpack__(self, **options: Any) -> Any:
        return np.array([1.5], np.float16).__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


class _OnDevice:
    __cuda_array_interface__: ClassVar[dict[str, Any]] = {}

    def get(self) -> np.ndarray[Any, Any]:
        return np.array([1.5])


class _Refusing:
    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
        raise RuntimeError("call detach() first")


@pytest.mark.parametrize(("data", "prec"), [(_WithArray(), f32), (_WithDlpack(), f16), (_OnDevice(), f64)])
def test_foreign_arrays_bring_their_format(data: object, prec: Prec) -> None:
    array, found = ingest(data)
    assert found is prec
    assert array.tolist() == [1.5]


def test_literals_keep_integers_exact() -> None:
    assert ingest(2**64 - 1).array.dtype == np.uint64
    assert ingest([2**63, 1]).array.tolist() == [2**63, 1]
    assert ingest([2**63, -1]).array.tolist() == [2.0**63, -1.0]  # each is an f64 value
    assert ingest([2**70, 0.5]).array.tolist() == [2.0**70, 0.5]
    for lossy in ([2**63 + 1, -1], [2**64 + 1], 2**64 + 1, [0.5, 2**53 + 1]):
        with pytest.raises(PrecisionError, match="no format holds the integer"):
            ingest(lossy)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (1j, "expected numbers, nested lists or an array, got complex"),
        (np.array([1j]), "dtype complex128 cannot be held: take the real part"),
        ([1j], "complex128"),
        (np.array(["a"]), "dtype <U1 cannot be held"),
        (["a", 1], "unknown precision dtype <U"),
        ("1.5", "got str"),
        (None, "got NoneType"),
        ([None], "dtype object"),
        ([[1, 2], [3]], "rectangular nested list"),
        (np.zeros(1, np.longdouble), "unknown precision"),
        (np.zeros(1, "M8[s]"), "unknown precision"),
        (np.zeros(1, ml_dtypes.float8_e4m3fnuz), "near matches: .*float8_e4m3fn"),
        (_Refusing(), "its own conversion failed: call detach"),
    ],
)
def test_refusals_of_ingest(data: object, message: str) -> None:
    with pytest.raises(PrecisionError, match=message):
        ingest(data)
