"""Settings of blocks and losses that are not what they should be: the message says what was expected, and where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor import nn
from stagedtensor.errors import ShapeError

pytestmark = pytest.mark.usefixtures("session")


def x() -> st.Tensor:
    return st.placeholder("x", batch=[2, 5], output=[8])


def labels() -> st.Tensor:
    return st.placeholder("labels", batch=[2, 5], prec=st.i32)


LOSSES: Any = st  # wrong on purpose, and a type checker would know
WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "size": (lambda: nn.dense(2.0), ShapeError, "dense: out: expected an integer of at least 1, got 2.0"),
    "widths": (lambda: nn.mlp(5), TypeError, "a list of widths, got 5"),
    "activation": (
        lambda: nn.dense(3, activation="relu"),
        TypeError,
        "a function of a tensor such as st.relu, not 'relu'",
    ),
    "norm": (
        lambda: nn.gpt(9, width=8, layers=1, heads=2, tokens=4, norm="batch"),
        ValueError,
        '"layer" or "rms", not',
    ),
    "momentum": (lambda: nn.batch_norm(momentum=2.0), ValueError, "momentum is a number from 0 to 1, not 2.0"),
    "eps": (lambda: st.layer_norm(x(), eps=-1.0), ValueError, "eps: expected a finite number >= 0, got -1.0"),
    "rate": (
        lambda: nn.dropout(1.0, step=st.host_scalar("s", 0, st.i32))(x()),
        ValueError,
        r"rate is in \[0, 1\), got 1.0",
    ),
    "reduction": (lambda: LOSSES.mse(x(), x(), reduction="avg"), ValueError, '"mean", "sum" or "none", not'),
    "smoothing": (lambda: st.cross_entropy(x(), labels(), label_smoothing=1.0), ValueError, r"in \[0, 1\), not 1.0"),
    "ignored": (lambda: LOSSES.cross_entropy(x(), labels(), ignore_index=1.5), TypeError, "an integer, not 1.5"),
    "delta": (lambda: st.huber(x(), x(), delta=0), ValueError, "positive finite number, not 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_settings_are_named(name: str) -> None:
    call, error, text = WRONG[name]
    with pytest.raises(error, match=text) as info:
        call()
    assert "test_nn_settings.py" in str(info.value)


def test_sizes_may_be_integers_of_numpy() -> None:
    width, vocabulary = np.int64(4), np.int32(7)
    assert nn.dense(width)(x()).shape.dims == (2, 5, 4)
    assert nn.embedding(vocabulary, width)(labels()).shape.dims == (2, 5, 4)
    assert nn.conv2d(width, 3)(st.placeholder("image", batch=[1], output=[5, 5, 2])).shape.dims == (1, 3, 3, 4)
