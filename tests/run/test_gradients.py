"""Every gradient rule against central differences in f64, on the reference device; a cross-section again in compiled C."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import stagedtensor as st
from tests.oracles.gradients import grad_of

Build = Callable[..., st.Tensor]
Array = np.ndarray[Any, Any]


def gradients(build: Build, *values: Array, device: str = "reference") -> tuple[list[Array], list[Array]]:
    """Return (analytic, numeric) gradients of sum(build(*values) * weights) for each operand."""
    with st.Session(default_prec=st.f64), st.Context(device) as ctx:
        xs = [
            st.placeholder(f"x{at}", output=list(value.shape), requires_grad=True, prec=st.f64)
            for at, value in enumerate(values)
        ]
        y = build(*xs)
        rng = np.random.default_rng(7)
        weights = rng.uniform(0.5, 1.5, y.shape.dims)
        batch, out = len(y.shape.batch), len(y.shape.output)
        loss = st.sum(y * st.constant(weights, batch=batch, output=out, input=weights.ndim - batch - out))
        step = ctx.compile(st.grad_update(loss))
        for x, value in zip(xs, values, strict=True):
            ctx.set_values(x, value)
        ctx.run(step)
        analytic = [ctx.get_values(grad_of(x)) for x in xs]

        def value_at() -> float:
            ctx.run(step)
            return float(ctx.get_values(loss))

        numeric = []
        for x, value in zip(xs, values, strict=True):
            slope = np.zeros_like(value)
            for cell in np.ndindex(value.shape):
                step_size = 1e-6 * max(1.0, abs(float(value[cell])))
                sides = []
                for sign in (1.0, -1.0):
                    moved = value.copy()
                    moved[cell] += sign * step_size
                    ctx.set_values(x, moved)
                    sides.append(value_at())
                slope[cell] = (sides[0] - sides[1]) / (2 * step_size)
            ctx.set_values(x, value)
            numeric.append(slope)
        return analytic, numeric


def check(build: Build, *values: Array, device: str = "reference", tolerance: float = 2e-7) -> None:
    analytic, numeric = gradients(build, *values, device=device)
    for found, expected in zip(analytic, numeric, strict=True):
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * max(1.0, np.abs(expected).max()))
        assert np.abs(expected).max() > 1e-4, "the check would pass with no gradient at all"


def draw(*shape: int, low: float = -1.0, high: float = 1.0, seed: int = 0) -> Array:
    return np.random.default_rng(seed).uniform(low, high, shape)


def positive(*shape: int, seed: int = 0) -> Array:
    return draw(*shape, low=0.3, high=2.0, seed=seed)


def away_from_zero(*shape: int, seed: int = 0) -> Array:
    values = draw(*shape, seed=seed)
    return np.where(np.abs(values) < 0.1, 0.3, values)


UNARY: dict[str, tuple[Callable[[st.Tensor], st.Tensor], Array]] = {
    "exp": (st.exp, draw(5)),
    "exp2": (st.exp2, draw(5)),
    "log": (st.log, positive(5)),
    "log2": (st.log2, positive(5)),
    "sqrt": (st.sqrt, positive(5)),
    "rsqrt": (st.rsqrt, positive(5)),
    "recip": (st.recip, positive(5)),
    "sin": (st.sin, draw(5)),
    "cos": (st.cos, draw(5)),
    "tanh": (st.tanh, draw(5)),
    "sigmoid": (st.sigmoid, draw(5)),
    "erf": (st.erf, draw(5)),
    "erfc": (st.erfc, draw(5)),
    "abs": (st.abs, away_from_zero(5)),
    "neg": (lambda x: -x, draw(5)),
    "relu": (st.relu, away_from_zero(5)),
    "gelu": (st.gelu, draw(5)),
    "gelu_tanh": (lambda x: st.gelu(x, approximate="tanh"), draw(5)),
    "silu": (st.silu, draw(5)),
    "softplus": (st.softplus, draw(5)),
    "leaky_relu": (lambda x: st.leaky_relu(x, 0.1), away_from_zero(5)),
    "clamp": (lambda x: st.clamp(x, -0.5, 0.5), np.array([-0.9, -0.2, 0.1, 0.4, 0.8])),
    "square": (lambda x: x**2, away_from_zero(5)),
    "cube": (lambda x: x**3.0, away_from_zero(5)),
    "scalar_base": (lambda x: 2.0**x, draw(5)),
    "mod": (lambda x: x % 0.7, np.array([0.1, 0.9, 1.6, 2.3, -0.4])),
    "softmax": (st.softmax, draw(3, 4)),
    "softmax_first_axis": (lambda x: st.softmax(x, axis=0), draw(3, 4)),
    "log_softmax": (st.log_softmax, draw(3, 4)),
    "logsumexp": (st.logsumexp, draw(3, 4)),
    "layer_norm": (st.layer_norm, draw(3, 4)),
    "rms_norm": (st.rms_norm, draw(3, 4)),
    "sum": (st.sum, draw(3, 4)),
    "sum_axis": (lambda x: st.sum(x, axis=0) * st.sum(x, axis=0), draw(3, 4)),
    "sum_keepdims": (lambda x: x * st.sum(x, axis=1, keepdims=True), draw(3, 4)),
    "mean": (lambda x: st.mean(x, axis=-1) * 3.0, draw(3, 4)),
    "mean_all": (lambda x: st.mean(x) * st.mean(x), draw(3, 4) + 1.0),
    "var": (lambda x: st.var(x, axis=-1), draw(3, 4)),
    "norm": (lambda x: st.norm(x, axis=-1), draw(3, 4)),
    "max": (lambda x: st.max(x, axis=-1), draw(3, 4)),
    "max_all": (lambda x: st.max(x) * 2.0, draw(3, 4)),
    "min": (lambda x: st.min(x, axis=0), draw(3, 4)),
    "prod": (lambda x: st.prod(x, axis=-1), away_from_zero(3, 4)),
    "prod_one_zero": (lambda x: st.prod(x, axis=-1), np.array([[1.5, 0.0, -2.0], [1.0, 2.0, 0.5]])),
    "reshape": (lambda x: st.reshape(x, output=[2, 6]) * st.constant(draw(2, 6)), draw(3, 4)),
    "transpose": (lambda x: st.transpose(x) * st.constant(draw(4, 3)), draw(3, 4)),
    "permute": (lambda x: st.permute(x, [2, 0, 1]) * st.constant(draw(4, 2, 3)), draw(2, 3, 4)),
    "narrow": (lambda x: st.narrow(x, 1, 3) * st.narrow(x, 0, 2), draw(3, 4)),
    "narrow_step": (lambda x: st.narrow(x, 0, 4, step=2) * 2.0, draw(3, 4)),
    "concat": (lambda x: st.concat([x, x * x], axis=1) * st.constant(draw(3, 8)), draw(3, 4)),
    "square_of_itself": (lambda x: x * x, draw(5)),
    "many_uses": (lambda x: (x + 1.0) * x - st.exp(x) / (x + 3.0), draw(5)),
}

BINARY: dict[str, tuple[Build, Array, Array]] = {
    "add": (lambda a, b: a + b, draw(3, 4), draw(4, seed=1)),
    "sub": (lambda a, b: a - b, draw(4), draw(3, 4, seed=1)),
    "mul": (lambda a, b: a * b, draw(3, 1), draw(1, 4, seed=1)),
    "div": (lambda a, b: a / b, draw(3, 4), positive(4, seed=1)),
    "pow": (lambda a, b: a**b, positive(4), draw(4, seed=1)),
    "maximum": (st.maximum, draw(5), draw(5, seed=1)),
    "minimum": (st.minimum, draw(5), draw(5, seed=1)),
    "where": (lambda a, b: st.where(a > b, a * 2.0, b * 3.0), draw(5), draw(5, seed=1)),
    "fma": (lambda a, b: st.fma(a, b, a), draw(5), draw(5, seed=1)),
    "einsum_matmul": (lambda a, b: st.einsum("ij,jk->ik", a, b), draw(2, 3), draw(3, 4, seed=1)),
    "einsum_batch": (lambda a, b: st.einsum("bij,bjk->bik", a, b), draw(2, 2, 3), draw(2, 3, 2, seed=1)),
    "einsum_outer": (lambda a, b: st.einsum("i,j->ij", a, b), draw(3), draw(4, seed=1)),
    "layer_norm_gain": (lambda a, b: st.layer_norm(a, b), draw(3, 4), draw(4, seed=1)),
    "mse": (lambda a, b: st.mse(a, b), draw(3, 4), draw(3, 4, seed=1)),
    "mae": (lambda a, b: st.mae(a, b), draw(3, 4), draw(3, 4, seed=1)),
}


@pytest.mark.parametrize("name", UNARY)
def test_unary(name: str) -> None:
    build, value = UNARY[name]
    check(build, value)


@pytest.mark.parametrize("name", BINARY)
def test_binary(name: str) -> None:
    build, left, right = BINARY[name]
    check(build, left, right)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy(reduction: Any, smoothing: float) -> None:
    labels = st.constant(np.array([2, 0, 3], np.int32))
    check(lambda x: st.cross_entropy(x, labels, reduction=reduction, label_smoothing=smoothing), draw(3, 4))


def test_cross_entropy_with_ignored_and_masked_cells() -> None:
    labels = st.constant(np.array([2, -1, 3, 1], np.int32))
    mask = st.constant(np.array([1, 1, 0, 1], np.int8))
    check(lambda x: st.cross_entropy(x, labels, ignore_index=-1, mask=mask), draw(4, 4))


def test_cross_entropy_with_class_probabilities() -> None:
    probabilities = positive(3, 4)
    probabilities /= probabilities.sum(-1, keepdims=True)
    check(lambda x: st.cross_entropy(x, st.constant(probabilities)), draw(3, 4))


def test_gather_scatters_its_gradient_with_repeated_ids() -> None:
    ids = np.array([2, 0, 2, 1, 2], np.int32)
    upstream = draw(5, 3, seed=3)
    with st.Session(default_prec=st.f64), st.Context("reference") as ctx:
        table = st.param("table", output=[4], input=[3])
        rows = st.gather(table, st.constant(ids))
        loss = st.sum(rows * st.constant(upstream))
        step = ctx.compile(st.grad_update(loss))
        ctx.init_params(loss)
        ctx.run(step)
        expected = np.zeros((4, 3))
        np.add.at(expected, ids, upstream)
        np.testing.assert_allclose(ctx.get_values(grad_of(table)), expected, rtol=1e-14)


COMPILED = ("tanh", "softmax", "layer_norm", "max", "prod_one_zero", "concat", "reshape", "var", "many_uses")


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_gradients_equal_the_reference(name: str) -> None:
    build, value = UNARY[name]
    compiled, _ = gradients(build, value, device="cpu")
    interpreted, _ = gradients(build, value)
    for found, expected in zip(compiled, interpreted, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-13, atol=1e-15)


# -- the defined points -------------------------------------------------------------------------------------------


def slope_at(build: Callable[[st.Tensor], st.Tensor], values: list[float], device: str = "reference") -> list[float]:
    with st.Session(), st.Context(device) as ctx:
        x = st.placeholder("x", output=[len(values)], requires_grad=True, prec=st.f32)
        loss = st.sum(build(x))
        step = ctx.compile(st.grad_update(loss))
        ctx.set_values(x, np.array(values, np.float32))
        ctx.run(step)
        return [float(slope) for slope in ctx.get_values(grad_of(x))]


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_ties_and_edges(device: str) -> None:
    assert slope_at(st.relu, [0.0, -0.0, 1.0, -1.0], device) == [0.0, 0.0, 1.0, 0.0]
    assert slope_at(lambda x: st.maximum(x, 0.0), [0.0, 2.0], device) == [1.0, 1.0]
    assert slope_at(lambda x: st.maximum(0.0, x), [0.0, 2.0], device) == [0.0, 1.0]
    assert slope_at(lambda x: st.max(x), [0.6, 0.6, 0.3], device) == [1.0, 0.0, 0.0]
    assert slope_at(lambda x: st.clamp(x, 0.0, 6.0), [0.0, 6.0, 7.0, -1.0], device) == [1.0, 1.0, 0.0, 0.0]
    assert slope_at(st.abs, [0.0, -2.0], device) == [0.0, -1.0]
    assert slope_at(lambda x: x**2, [-2.0, 0.0, 3.0], device) == [-4.0, 0.0, 6.0]
    assert slope_at(lambda x: x**0, [-2.0, 0.0, 3.0], device) == [0.0, 0.0, 0.0]
    assert slope_at(lambda x: st.prod(x), [0.0, 0.0, 3.0], device) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_the_branch_not_taken_leaks_no_nan(device: str) -> None:
    assert slope_at(lambda x: st.where(x < 1.0, x, st.sqrt(x)), [0.0], device) == [1.0]
    assert slope_at(lambda x: st.where(x > 0.0, st.log(x), 0.0), [0.0], device) == [0.0]
    assert slope_at(st.norm, [0.0, 0.0], device) == [0.0, 0.0]
    assert slope_at(st.softmax, [-np.inf, -np.inf], device) == [0.0, 0.0]
    assert slope_at(lambda x: st.max(x), [1.0, np.nan, 3.0], device) == [0.0, 1.0, 0.0]
