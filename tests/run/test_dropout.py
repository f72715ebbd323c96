"""Dropout: rates, masks by step and by layer, the same mask forward and backward, nothing in evaluation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor import nn
from tests.oracles.gradients import grad_of

Array = np.ndarray[Any, Any]
SIZE = 4096


@pytest.fixture(autouse=True)
def _session() -> Any:
    with st.Session():
        yield


def masks(y: st.Tensor, step: st.Tensor, values: list[int], x: st.Tensor | None = None) -> list[Array]:
    """Return the values of ``y`` at several steps."""
    with st.Context("cpu") as ctx:
        routine = ctx.compile(y)
        if x is not None:
            ctx.set_values(x, np.ones(x.shape.dims, np.float32))
        found = []
        for value in values:
            ctx.set_values(step, value)
            ctx.run(routine)
            found.append(ctx.get_values(y))
        return found


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_rate_and_scale(rate: float) -> None:
    x, step = st.placeholder("x", batch=[SIZE], output=[4]), st.host_scalar("step", 0, st.i32)
    (y,) = masks(nn.dropout(rate, step=step)(x), step, [3], x)
    kept = y != 0
    np.testing.assert_allclose(y[kept], 1.0 / (1.0 - rate), rtol=1e-6)
    # five standard deviations of a count of independent draws
    assert abs(kept.mean() - (1.0 - rate)) < 5 * np.sqrt(rate * (1 - rate) / kept.size)
    for axis in (0, 1):
        assert len(np.unique(kept, axis=axis)) > 1, "cells are drawn one by one"


def test_each_step_draws_another_mask_and_a_step_the_same_again() -> None:
    x, step = st.placeholder("x", batch=[SIZE], output=[1]), st.host_scalar("step", 0, st.i32)
    first, second, again = masks(nn.dropout(0.5, step=step)(x), step, [0, 1, 0], x)
    np.testing.assert_array_equal(first, again)
    assert 0.4 < ((first != 0) == (second != 0)).mean() < 0.6


def test_each_layer_draws_its_own_mask() -> None:
    step = st.host_scalar("step", 0, st.i32)

    @st.block
    def two() -> nn.Layer:
        first, second = nn.dropout(0.5, step=step), nn.dropout(0.5, step=step)
        return lambda x: st.concat([first(x), second(x)])

    x = st.placeholder("x", batch=[SIZE], output=[1])
    (y,) = masks(two()(x), step, [0], x)
    assert 0.4 < ((y[:, 0] != 0) == (y[:, 1] != 0)).mean() < 0.6


def test_the_gradient_passes_where_the_value_did() -> None:
    x = st.placeholder("x", batch=[SIZE], output=[3], requires_grad=True)
    step = st.host_scalar("step", 5, st.i32)
    y = nn.dropout(0.3, step=step)(x)
    assert x.grad is not None
    with st.Context("cpu") as ctx:
        routine = ctx.compile(st.grad_update(st.sum(y)), keep=[y])
        ctx.set_values(x, np.ones((SIZE, 3), np.float32))
        ctx.run(routine)
        np.testing.assert_array_equal(ctx.get_values(x.grad), ctx.get_values(y))


def test_masks_are_the_same_on_every_device_and_with_any_threads() -> None:
    x, step = st.placeholder("x", batch=[64], output=[5]), st.host_scalar("step", 9, st.i32)
    y = nn.dropout(0.5, step=step)(x)
    found = []
    for options in ({"device": "reference"}, {"device": "cpu", "threads": 1}, {"device": "cpu", "threads": 2}):
        with st.Context(**options) as ctx:
            ctx.set_values(x, np.arange(320, dtype=np.float32).reshape(64, 5))
            ctx.run(ctx.compile(y))
            found.append(ctx.get_values(y))
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


def test_evaluation_and_rate_0_change_nothing() -> None:
    x, step = st.placeholder("x", batch=[4], output=[5]), st.host_scalar("step", 0, st.i32)
    assert nn.dropout(0.5, step=step)(x, training=False) is x
    assert nn.dropout(0.0)(x) is x
    with pytest.raises(ValueError, match="needs step="):
        nn.dropout(0.5)
    with pytest.raises(ValueError, match="rate"):
        st.dropout(x, 1.0)


@pytest.mark.parametrize("prec", ["bf16", "f16"])
def test_narrow_values_drop_the_same_cells(prec: str) -> None:
    cells = []
    for format_ in ("f32", prec):
        x, step = st.placeholder("x", batch=[256], output=[2], prec=format_), st.host_scalar("step", 1, st.i32)
        (y,) = masks(nn.dropout(0.25, step=step)(x), step, [1], x)
        cells.append(y != 0)
        assert y.dtype == st.precision(format_).numpy_dtype
    np.testing.assert_array_equal(*cells)


def test_steps_of_different_extents_draw_different_masks() -> None:
    """Step 10 of 100 rows, 20 of 50 and 40 of 25 would start at the same number if a step took as many as it has cells."""
    with st.Session(), st.Context("cpu") as ctx:
        step = st.host_scalar("step", 0, st.i32)
        x = st.placeholder("x", batch=[st.dynamic("n", max=100)], output=[64], requires_grad=True)
        y = st.dropout(x, 0.5, step=step)
        routine = ctx.compile(st.grad_update(st.sum(y)), keep=[y])
        kept = []
        for number, rows in ((10, 100), (20, 50), (40, 25)):
            ctx.set_values(x, np.ones((rows, 64)))
            ctx.set_values(step, number)
            ctx.run(routine)
            kept.append(ctx.get_values(y)[:25] > 0)
            np.testing.assert_array_equal(ctx.get_values(y), ctx.get_values(grad_of(x)))
    for other in kept[1:]:
        assert 0.4 < np.mean(kept[0] == other) < 0.6
