"""Promotion helpers: their table, and agreement with the join."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor import promotion
from stagedtensor.errors import PrecisionError
from stagedtensor.precision import ALL

NUMBERS = [prec for prec in ALL if prec is not st.u4x32]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("f16 bf16", "f32"), ("f16 f32", "f32"), ("i8 i32", "i32"), ("i32 f32", "f32"), ("i32 f16", "f16"),
        ("i64 bf16", "bf16"), ("u8 f16", "f16"), ("i8 u8", "i16"), ("u8 i16", "i16"), ("i8 u16", "i32"),
        ("i32 u32", "i64"), ("bool i8", "i8"), ("u64 i8", "i64"), ("u64 i8 f16", "f16"),
    ],
)  # fmt: skip
def test_table(given: str, expected: str) -> None:
    for order in itertools.permutations(given.split()):
        assert promotion.promote(*order) is st.precision(expected)


def test_table_is_the_join_in_any_order() -> None:
    for a, b in itertools.product(NUMBERS, repeat=2):
        assert promotion.promote(a, b) is promotion.promote(b, a) is st.join(a, b)
    for triple in itertools.combinations(NUMBERS, 3):
        assert len({promotion.promote(*order) for order in itertools.permutations(triple)}) == 1


def test_helpers_on_all_pairs() -> None:
    for a, b in itertools.product(ALL, repeat=2):
        fits = a is b or st.u4x32 not in (a, b)
        assert promotion.is_compatible(a, b) is promotion.is_convertible(a, b) is fits
        for validate in (promotion.validate_compatible, promotion.validate_convertible):
            if fits:
                validate(a, b)
            else:
                with pytest.raises(PrecisionError, match=f"(?s){a}.*{b}"):
                    validate(a, b)


def test_helpers_on_chains() -> None:
    chain: list[Any] = ["float32", "half", np.dtype(np.int32), st.i8]
    assert promotion.is_valid_chain(chain)
    assert promotion.validate_chain(chain) is chain
    assert not promotion.is_valid_chain([])
    with pytest.raises(PrecisionError, match="at least one"):
        promotion.validate_chain([])
    with pytest.raises(PrecisionError, match="pair 1: f16 cannot be cast to u4x32"):
        promotion.validate_chain(["f32", "f16", "u4x32"])
    for helper in (promotion.is_valid_chain, promotion.validate_chain):
        with pytest.raises(PrecisionError, match="unknown precision"):
            helper(["f32", "f17"])
    with pytest.raises(PrecisionError, match="unknown precision"):
        promotion.promote("f32", "float33")
