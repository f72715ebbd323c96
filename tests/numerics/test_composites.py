"""A library function rounds once: within 1 ulp of its f64 value, forward and gradient, under a bf16 policy.

The f64 value is that of the rounded arguments. The same formula written out rounds at each node and is not that near.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import stagedtensor as st
from tests.oracles.gradients import grad_of

from .running import FUSED, REFERENCE, Array, Program, Setting, run

Function = Callable[..., st.Tensor]
NARROW = st.bf16


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> Array:
    """Return f64 values that bf16 holds."""
    values = np.random.default_rng(seed).standard_normal(shape) * scale
    return values.astype(np.float32).astype(NARROW.numpy_dtype).astype(np.float64)


def ulp(exact: Array) -> Array:
    """Return the spacing of bf16 at each value."""
    _, exponent = np.frexp(np.abs(exact))
    spacing: Array = np.ldexp(1.0, np.maximum(exponent - 8, -133))
    return spacing


def distance(found: Array, exact: Array) -> float:
    """Return the greatest distance in bf16 ulp."""
    wide = found.astype(np.float64)
    assert wide.shape == exact.shape
    assert np.isfinite(wide).all()
    return float((np.abs(wide - exact) / ulp(exact)).max())


def program(function: Function, values: tuple[Array, ...], prec: str, *, is_loss: bool) -> Program:
    """The function of its arguments and the gradient of sum(result * weights) in each of them."""
    xs = [
        st.placeholder(f"x{at}", output=list(value.shape), prec=prec, requires_grad=True)
        for at, value in enumerate(values)
    ]
    y = function(*xs)
    if is_loss:
        loss = y
    else:
        weights = draw(*y.shape.dims, seed=99)
        loss = st.sum(y * st.constant(weights, prec=prec))
    if prec != "f64":
        st.PrecisionPolicy.uniform(prec).apply(loss)
    return Program(list(zip(xs, values, strict=True)), [y, *map(grad_of, xs)], st.grad_update(loss))


def distances(function: Function, *values: Array, setting: Setting = FUSED, is_loss: bool = False) -> list[float]:
    """Return how far the result and each gradient are from f64, in bf16 ulp."""
    exact = run(lambda: program(function, values, "f64", is_loss=is_loss), REFERENCE, session={"default_prec": st.f64})
    found = run(lambda: program(function, values, NARROW.name, is_loss=is_loss), setting)
    assert is_loss or found[0].dtype == NARROW.numpy_dtype
    assert all(cells.dtype == NARROW.numpy_dtype for cells in found[1:])
    return [distance(cells, wide) for cells, wide in zip(found, exact, strict=True)]


ROWS = draw(3, 1024)
CASES: dict[str, tuple[Function, tuple[Array, ...]]] = {
    "softmax": (st.softmax, (ROWS,)),
    "softmax_first_axis": (lambda x: st.softmax(x, axis=0), (draw(40, 17),)),
    "log_softmax": (st.log_softmax, (ROWS,)),
    "logsumexp": (st.logsumexp, (ROWS,)),
    "mean": (lambda x: st.mean(x, axis=-1), (ROWS + 2.0,)),
    "gelu": (st.gelu, (draw(501, scale=2.0),)),
    "gelu_tanh": (lambda x: st.gelu(x, approximate="tanh"), (draw(501, scale=2.0),)),
    "silu": (st.silu, (draw(501, scale=3.0),)),
    "softplus": (st.softplus, (draw(501, scale=4.0),)),
    "leaky_relu": (lambda x: st.leaky_relu(x, 0.1), (draw(501),)),
}
TWO_ULP: dict[str, tuple[Function, tuple[Array, ...]]] = {
    "var": (lambda x: st.var(x, axis=-1), (ROWS,)),
    "var_far_from_zero": (lambda x: st.var(x, axis=-1), (300.0 + 2.0 * np.sign(ROWS),)),
    "norm": (lambda x: st.norm(x, axis=-1), (ROWS,)),
    "layer_norm": (st.layer_norm, (ROWS,)),
    "layer_norm_affine": (st.layer_norm, (ROWS, draw(1024, seed=1), draw(1024, seed=2))),
    "rms_norm": (st.rms_norm, (ROWS,)),
    "rms_norm_gain": (st.rms_norm, (ROWS, draw(1024, seed=1))),
}


@pytest.mark.parametrize("name", [*CASES, *TWO_ULP])
def test_composites(name: str) -> None:
    function, values = (CASES | TWO_ULP)[name]
    assert max(distances(function, *values)) <= (1.0 if name in CASES else 2.0)


@pytest.mark.parametrize("name", ["softmax", "layer_norm_affine", "gelu"])
def test_composites_unfused_and_interpreted(name: str) -> None:
    function, values = (CASES | TWO_ULP)[name]
    for setting in (Setting(fusion=False), REFERENCE):
        assert max(distances(function, *values, setting=setting)) <= (1.0 if name in CASES else 2.0), setting


LABELS = np.random.default_rng(5).integers(0, 40, 57).astype(np.int32)
LOSSES: dict[str, tuple[Function, tuple[Array, ...]]] = {
    "mse": (st.mse, (draw(57, 40), draw(57, 40, seed=1))),
    "mae": (st.mae, (draw(57, 40), draw(57, 40, seed=1))),
    "cross_entropy": (lambda x: st.cross_entropy(x, st.constant(LABELS)), (draw(57, 40, scale=2.0),)),
    "cross_entropy_smooth": (
        lambda x: st.cross_entropy(x, st.constant(LABELS), label_smoothing=0.1, reduction="sum"),
        (draw(57, 40, scale=2.0),),
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str) -> None:
    function, values = LOSSES[name]
    forward, *gradients = distances(function, *values, is_loss=True)
    assert forward <= 2.0**-8  # the loss itself is f32
    assert max(gradients) <= 2.0


# -- the same formulas written out -----------------------------------------------------------------------------------


def written_softmax(x: st.Tensor) -> st.Tensor:
    e = st.exp(x - st.max(x, axis=-1, keepdims=True))
    return e / st.sum(e, axis=-1, keepdims=True)


def written_layer_norm(x: st.Tensor) -> st.Tensor:
    size = 1.0 / x.shape.output[-1].size
    centred = x - st.sum(x, axis=-1, keepdims=True) * size
    variance = st.sum(centred * centred, axis=-1, keepdims=True) * size
    return centred * st.rsqrt(variance + 1e-5)


@pytest.mark.parametrize(("function", "bound"), [(written_softmax, 1.0), (written_layer_norm, 2.0)])
def test_written_out_formulas_round_per_node(function: Function, bound: float) -> None:
    forward, gradient = distances(function, ROWS)
    assert forward > bound
    assert gradient > bound


@pytest.mark.parametrize(("function", "bound"), [(written_softmax, 1.0), (written_layer_norm, 2.0)])
def test_composite_makes_them_round_once(function: Function, bound: float) -> None:
    wrapped = st.composite("written")(function)
    assert max(distances(wrapped, ROWS)) <= bound
    assert max(distances(st.composite("outer")(lambda x: wrapped(x)), ROWS)) <= bound  # nested


def test_values_agree_with_numpy_in_f64() -> None:
    """The f64 programs that the others are measured against are right themselves."""
    x = draw(5, 33)
    shifted = np.exp(x - x.max(-1, keepdims=True))
    probabilities = shifted / shifted.sum(-1, keepdims=True)
    centred = x - x.mean(-1, keepdims=True)
    phi = np.vectorize(lambda v: 0.5 * (1.0 + math.erf(v / math.sqrt(2.0))))(x)
    expected: dict[str, Any] = {
        "softmax": probabilities,
        "log_softmax": np.log(probabilities),
        "logsumexp": np.log(np.exp(x).sum(-1)),
        "gelu": x * phi,
        "silu": x / (1.0 + np.exp(-x)),
        "softplus": np.log1p(np.exp(x)),
        "layer_norm": centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5),
        "rms_norm": x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6),
        "norm": np.sqrt((x**2).sum(-1)),
        "var": x.var(-1),
    }

    def build() -> Program:
        t = st.placeholder("t", output=[5, 33], prec="f64")
        return Program([(t, x)], [(CASES | TWO_ULP)[name][0](t) for name in expected])

    for name, found in zip(expected, run(build, FUSED, session={"default_prec": st.f64}), strict=True):
        np.testing.assert_allclose(found, expected[name], rtol=1e-12, atol=1e-14, err_msg=name)


# -- a masked softmax in f16 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("keep", "tolerance"), [(st.KEEP_F32, 5e-4), ((), 2e-3)])
def test_causal_softmax_in_f16(keep: tuple[str, ...], tolerance: float) -> None:
    size = 24
    scores = np.random.default_rng(3).standard_normal((size, size)).astype(np.float16)
    mask = np.tril(np.ones((size, size), bool))

    def build() -> Program:
        x = st.placeholder("x", output=[size, size])
        visible = st.constant(mask)
        y = st.softmax(st.where(visible, x, -math.inf))
        st.PrecisionPolicy(activation="f16").apply(y, keep_f32=keep)
        return Program([(x, scores)], [y])

    (found,) = run(build)
    assert found.dtype == (np.float32 if keep else np.float16)
    wide = np.where(mask, scores.astype(np.float64), -np.inf)
    exact = np.exp(wide - wide.max(-1, keepdims=True))
    exact /= exact.sum(-1, keepdims=True)
    cells = found.astype(np.float64)
    assert (cells[~mask] == 0).all()
    assert np.abs(cells.sum(-1) - 1.0).max() <= 0.01
    assert np.abs(cells - exact).max() <= tolerance
