"""Numbers as settings: NumPy's scalars mean what Python's numbers mean, truth values are none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor.errors import ShapeError
from stagedtensor.settings import is_integer, is_number


@pytest.mark.parametrize("value", [3, np.int8(3), np.uint64(3), np.int64(3)])
def test_integers(value: Any) -> None:
    assert is_integer(value)
    assert is_integer(value, 3)
    assert not is_integer(value, 4)
    assert is_number(value)


@pytest.mark.parametrize("value", [0.5, np.float16(0.5), np.float32(0.5), np.float64(0.5), float("inf"), float("nan")])
def test_floats(value: Any) -> None:
    assert is_number(value)
    assert not is_integer(value)


@pytest.mark.parametrize("value", [True, np.True_, "3", None, 1j, [3], np.array([3])])
def test_what_is_no_number(value: Any) -> None:
    assert not is_integer(value)
    assert not is_number(value)


def _images() -> st.Tensor:
    return st.constant(np.arange(64, dtype=np.float32).reshape(1, 8, 8, 1) / 64, batch=1)


def _vector() -> st.Tensor:
    return st.constant(np.arange(12, dtype=np.float32).reshape(3, 4), batch=1)


_BUILDERS: dict[str, Callable[[Any, Any], st.Tensor]] = {
    "placeholder": lambda two, half: st.exp(st.constant(np.ones((2, 2), np.float32), batch=two - 1)),
    "range": lambda two, half: st.cast(st.range(two), st.f32),
    "slice": lambda two, half: _vector()[0:3:two],
    "index": lambda two, half: _vector()[two],
    "narrow": lambda two, half: st.narrow(_vector(), 0, 4, step=two),
    "split": lambda two, half: st.split(_vector(), two)[1],
    "unfold": lambda two, half: st.unfold(_vector(), two, step=two),
    "one_hot": lambda two, half: st.one_hot(st.constant(np.array([0, 1])), two) * 1.0,
    "axis": lambda two, half: st.sum(_vector(), axis=two - 1),
    "pool": lambda two, half: st.max_pool2d(_images(), two),
    "pool of pairs": lambda two, half: st.avg_pool2d(_images(), (two, two), stride=two, padding=two - 1),
    "pad": lambda two, half: st.pad2d(_images(), two),
    "upsample": lambda two, half: st.upsample2d(_images(), two),
    "layer norm": lambda two, half: st.layer_norm(_vector(), eps=half),
    "huber": lambda two, half: st.huber(_vector(), _vector() * 2.0, delta=half),
    "label smoothing": lambda two, half: st.cross_entropy(
        _vector(), st.constant(np.array([0, 1, 2]), batch=1), label_smoothing=half, ignore_index=two
    ),
}


@pytest.mark.parametrize("build", _BUILDERS.values(), ids=_BUILDERS.keys())
def test_numpy_scalars_are_settings(build: Callable[[Any, Any], st.Tensor]) -> None:
    found = []
    for two, half in ((2, 0.5), (np.int64(2), np.float32(0.5)), (np.uint8(2), np.float64(0.5))):
        with st.Session(), st.Context("reference") as ctx:
            result = build(two, half)
            shape = repr(result.shape)
            ctx.run(ctx.compile(result))
            found.append((shape, ctx.get_values(result)))
    for shape, values in found[1:]:
        assert shape == found[0][0]
        np.testing.assert_array_equal(values, found[0][1])


def test_settings_of_training() -> None:
    def trained(one: Any, half: Any) -> np.ndarray[Any, Any]:
        with st.Session(), st.Context("cpu", threads=one) as ctx:
            w = st.param("w", output=[2 * one], init=1.0)
            loss = st.sum(w * w)
            scaler = st.LossScaler(half * 4, growth_interval=one)
            window, comp = st.gated_scaled_update(scaler, loss, half, momentum=half, max_norm=half)
            ctx.init_params(comp, seed=one)
            routine = ctx.compile(comp)
            assert st.gated_step(
                ctx,
                scaler=scaler,
                routine=routine,
                window_checksum=window,
                check_interval=one,
                step=one - 1,
                accum_steps=one,
            )
            assert type(scaler.growth_interval) is int
            return ctx.get_values(w)

    np.testing.assert_array_equal(trained(1, 0.5), trained(np.int64(1), np.float32(0.5)))


@pytest.mark.parametrize("wrong", [True, np.True_, "2"])
@pytest.mark.parametrize(
    "build",
    [
        lambda wrong: st.narrow(_vector(), 0, 4, step=wrong),
        lambda wrong: st.split(_vector(), wrong),
        lambda wrong: st.unfold(_vector(), wrong),
        lambda wrong: st.max_pool2d(_images(), wrong),
        lambda wrong: st.placeholder("x", output=[wrong]),
    ],
)
def test_a_truth_value_is_no_size(build: Callable[[Any], st.Tensor], wrong: Any) -> None:
    with st.Session(), pytest.raises(ShapeError, match="test_settings"):
        build(wrong)
