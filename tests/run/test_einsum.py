"""einsum against NumPy on both devices, and its gradients against directional derivatives in f64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor.errors import ShapeError, SpecError
from stagedtensor.tensor import Tensor

Array = np.ndarray[Any, Any]
_rng = np.random.default_rng(11)
A, B = _rng.standard_normal((3, 4)), _rng.standard_normal((4, 5))
S, T, U = _rng.standard_normal((4, 4)), _rng.standard_normal((2, 3, 4)), _rng.standard_normal((2, 4, 5))
X, K = _rng.standard_normal(9), _rng.standard_normal(3)
_PADDED = np.pad(X, 1)
_ZEROS = np.array([[0.0, 2.0, 3.0], [0.0, 0.0, 1.5], [1.0, -2.0, 0.5]])
_BLOCKS = np.zeros((5, 6))
_BLOCKS[:3, :4], _BLOCKS[3:, 4:] = A, A[:2, :2]


def _tropical(a: Array, b: Array) -> Array:
    best: Array = (a[:, :, None] + b).max(1)
    return best


CASES: list[tuple[str, tuple[Array, ...], dict[str, Any], Any]] = [
    ("ij;jk=>ik", (A, B), {}, A @ B),
    ("ij,jk", (A, B), {}, A @ B),
    ("bij,bjk->bik", (T, U), {}, T @ U),
    ("...ij,...jk->...ik", (T, U[:1]), {}, T @ U[:1]),
    ("ij;jk;k=>i", (A, B, B[0]), {}, A @ B @ B[0]),
    ("i;j=>ij", (X, K), {}, np.outer(X, K)),
    ("ii=>i", (S,), {}, np.diag(S)),
    ("ii", (S,), {}, np.trace(S)),
    ("ij=>ji", (A,), {}, A.T),
    ("...=>0", (A,), {}, [A.sum()]),
    ("i_=>i", (A,), {}, A.sum(1)),
    ("i2=>i", (A,), {}, A[:, 2]),
    ("i=>_i", (X,), {}, X[None]),
    ("i=>i,1", (X,), {}, np.stack([np.zeros(9), X], 1)),
    ("i=>ij", (K,), {"sizes": {"j": 2}}, np.repeat(K[:, None], 2, 1)),
    ("2*o+k;k=>o", (X, K), {}, [X[2 * o : 2 * o + 3] @ K for o in range(4)]),
    ("o+2*k;k=>o", (X, K), {}, [X[o : o + 5 : 2] @ K for o in range(5)]),
    ("o=+k;k=>o", (X, K), {}, [_PADDED[o : o + 3] @ K for o in range(9)]),
    ("o;k=>2*o+k", (X[:4], K), {}, sum(np.pad(np.kron(X[:4], [1, 0])[:7] * K[j], (j, 2 - j)) for j in range(3))),
    ("a;b=>a^b", (X, K), {}, np.concatenate([X, K])),
    ("a,c;b,c=>a^b,c", (A, A[:1]), {}, np.concatenate([A, A[:1]])),
    ("a,c;b=>a^b", (A, K), {}, np.concatenate([A.sum(1), K])),
    ("a,c;e,f=>a^e,c^f", (A, A[:2, :2]), {}, _BLOCKS),
    ("a^b=>a", (X,), {"sizes": {"a": 4}}, X[:4]),
    ("a^3=>a", (X,), {}, X[:-3]),
    ("3^a=>a", (X,), {}, X[3:]),
    ("a=>a^3", (X,), {}, np.concatenate([X, np.zeros(3)])),
    ("a=>a^b", (X,), {"sizes": {"b": 2}}, np.concatenate([X, np.zeros(2)])),
    ("a^b=>b^a", (X,), {"sizes": {"a": 4}}, np.concatenate([X[4:], X[:4]])),
    ("a^b;a;b=>", (X, X[:6], K), {}, X[:6] @ X[:6] + X[6:] @ K),
    ("i;j=>", (X, K), {"combine": "add"}, (X[:, None] + K).sum()),
    ("ij;k=>i", (A, K), {"combine": "add"}, (A[:, :, None] + K).sum((1, 2))),
    ("ij=>i", (A,), {"reduce": "max"}, A.max(1)),
    ("ij=>j", (A,), {"reduce": "min"}, A.min(0)),
    ("i_=>i", (A,), {"reduce": "max"}, A.max(1)),
    ("2*o+k=>o", (X[:8],), {"reduce": "max", "sizes": {"k": 2}}, X[:8].reshape(4, 2).max(1)),
    ("ij;jk=>ik", (A, B), {"reduce": "max", "combine": "add"}, _tropical(A, B)),
    ("ij=>i", (A,), {"reduce": "prod"}, A.prod(1)),
    ("ij=>i", (_ZEROS,), {"reduce": "prod"}, _ZEROS.prod(1)),
]
NAMES = [" ".join([spec, *(f"{value}" for value in options.values())]) for spec, _, options, _ in CASES]


def evaluate(spec: str, values: tuple[Array, ...], options: dict[str, Any], device: str) -> Array:
    with st.Session(), st.Context(device) as ctx:
        y = st.einsum(spec, *(st.constant(value.astype(np.float32)) for value in values), **options)
        ctx.run(ctx.compile(y))
        return ctx.get_values(y)


@pytest.mark.parametrize(("spec", "values", "options", "expected"), CASES, ids=NAMES)
def test_values_on_the_reference_device(
    spec: str, values: tuple[Array, ...], options: dict[str, Any], expected: Any
) -> None:
    found = evaluate(spec, values, options, "reference")
    assert found.shape == np.shape(expected)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "values", "options", "expected"), CASES, ids=NAMES)
def test_values_in_compiled_code(spec: str, values: tuple[Array, ...], options: dict[str, Any], expected: Any) -> None:
    np.testing.assert_allclose(evaluate(spec, values, options, "cpu"), expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("spec", "values", "options", "expected"), CASES, ids=NAMES)
def test_gradients_along_a_direction(
    spec: str, values: tuple[Array, ...], options: dict[str, Any], expected: Any
) -> None:
    rng = np.random.default_rng(5)
    weights, directions = rng.uniform(0.5, 1.5, np.shape(expected)), [rng.uniform(0.5, 1, v.shape) for v in values]
    with st.Session(default_prec=st.f64), st.Context("reference") as ctx:
        xs: list[Tensor] = [
            st.placeholder(f"x{at}", output=list(value.shape), requires_grad=True, prec=st.f64)
            for at, value in enumerate(values)
        ]
        y: Tensor = st.einsum(spec, *xs, **options)
        loss = st.sum(y * st.constant(weights))
        step = ctx.compile(st.grad_update(loss))

        def at(scale: float) -> float:
            for x, value, direction in zip(xs, values, directions, strict=True):
                ctx.set_values(x, value + scale * direction)
            ctx.run(step)
            return float(ctx.get_values(loss))

        numeric = (at(1e-6) - at(-1e-6)) / 2e-6
        at(0.0)
        gradients = [x.grad for x in xs]
        assert all(gradient is not None for gradient in gradients)
        slopes = [
            float((ctx.get_values(gradient) * direction).sum())
            for gradient, direction in zip(gradients, directions, strict=True)
            if gradient is not None
        ]
    assert all(slope != 0 for slope in slopes)
    assert sum(slopes) == pytest.approx(numeric, rel=1e-6, abs=1e-6)


def test_rows_move_between_kinds() -> None:
    with st.Session(), st.Context("reference") as ctx:
        x = st.constant(A.astype(np.float32), batch=1)
        y = st.einsum("..b..|..o.. => ..o..|..b..", x)
        assert str(y.shape) == "4 | -> 3"
        ctx.run(ctx.compile(y))
        np.testing.assert_array_equal(ctx.get_values(y), A.T.astype(np.float32))


def test_captured_sizes_serve_as_shapes_and_numbers() -> None:
    with st.Session(), st.Context("reference") as ctx:
        x = st.constant(T.astype(np.float32))
        total, dims = st.einsum("..., j => j", x, capture=["j", "output"])
        mean = (total / dims.output).named("mean")
        weight = st.param("weight", output=[dims.j], init=1.0)
        assert str(weight.shape) == "4"
        assert sorted(dims) == ["j", "output"]
        ctx.run(ctx.compile(mean))
        np.testing.assert_allclose(ctx.get_values(mean), T.reshape(-1, 4).mean(0), rtol=1e-5, atol=1e-6)
        with pytest.raises(AttributeError, match="no size 'k' was captured"):
            _ = dims.k


def test_captured_sizes_fix_sizes_of_another_einsum() -> None:
    with st.Session():
        _, dims = st.einsum("ij=>i", st.constant(A), capture=["i"])
        other = st.einsum("k=>ka", st.constant(K), sizes={"a": dims.i})
        assert str(other.shape) == "3,3"


FAULTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"reduce": "mean"}, ValueError, "reduce is one of sum, max, min, prod, not 'mean'"),
    ({"combine": "sub"}, ValueError, 'combine is "mul" or "add"'),
    ({"capture": "i"}, TypeError, r'list of names such as \["h"\]'),
    ({"capture": ["q"]}, SpecError, "capture= names 'q', which is no index of 'ij;jk=>ik'"),
    ({"sizes": {"q": 3}}, SpecError, "sizes= names 'q'"),
    ({"sizes": {"i": -3}}, SpecError, "is no size"),
    ({"sizes": {"i": 7}}, ShapeError, "7"),
]


@pytest.mark.parametrize(("options", "error", "message"), FAULTS, ids=[message for _, _, message in FAULTS])
def test_faulty_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with st.Session(), pytest.raises(error, match=message):
        _ = st.einsum("ij;jk=>ik", st.constant(A), st.constant(B), **options).shape


def test_faulty_uses() -> None:
    with st.Session():
        with pytest.raises(TypeError, match="at least one tensor"):
            st.einsum("i=>i")
        with pytest.raises(SpecError, match="the spec has 2 operands, 1 tensor was given"):
            st.einsum("ij;jk=>ik", st.constant(A))
        with pytest.raises(SpecError, match="cannot join blocks that are reduced"):
            st.einsum("a,c;b=>a^b", st.constant(A), st.constant(K), reduce="max")
        with pytest.raises(SpecError, match="more than three row variables"):
            st.einsum("..a..;..b..;..c..;..d..=>", *[st.constant(K)] * 4, reduce="prod")
        with pytest.raises(ShapeError, match="4"):
            _ = st.einsum("ij;jk=>ik", st.constant(A), st.constant(A)).shape


def test_einsum_does_not_broadcast_beyond_its_row_variables() -> None:
    with st.Session():
        with pytest.raises(ShapeError):
            _ = st.einsum("i;i=>i", st.constant(X), st.constant([1.0])).shape
        with pytest.raises(ShapeError):
            _ = st.einsum("...;...=>...", st.constant(X), st.constant([1.0])).shape


def test_a_plain_rearrangement_is_a_set_that_keeps_negative_zero() -> None:
    found = evaluate("ij=>ji", (np.full((1, 2), -0.0),), {}, "reference")
    assert np.signbit(found).all()
