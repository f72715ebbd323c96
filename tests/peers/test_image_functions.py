"""Convolution, pooling and attention against torch in f64: forward and every gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import stagedtensor as st

torch = pytest.importorskip("torch")
F: Any = torch.nn.functional
Array = np.ndarray[Any, Any]

pytestmark = pytest.mark.peers


def compare(
    ours: Callable[..., st.Tensor],
    theirs: Callable[..., Any],
    values: Sequence[Array],
    rows: Sequence[tuple[int, int]],
    device: str = "cpu",
) -> None:
    """Compare forward and gradients; ``rows`` gives (batch, output) axis counts of each operand."""
    rng = np.random.default_rng(1)
    with st.Session(default_prec=st.f64), st.Context(device) as ctx:
        operands = [
            st.placeholder(
                f"x{at}",
                batch=list(value.shape[:batch]),
                output=list(value.shape[batch : batch + output]),
                input=list(value.shape[batch + output :]),
                prec=st.f64,
                requires_grad=True,
            )
            for at, (value, (batch, output)) in enumerate(zip(values, rows, strict=True))
        ]
        y = ours(*operands)
        weights = rng.normal(size=y.shape.dims)
        loss = st.sum(y * st.constant(weights, batch=len(y.shape.batch)))
        step = ctx.compile(st.grad_update(loss), keep=[y])
        for operand, value in zip(operands, values, strict=True):
            ctx.set_values(operand, value)
        ctx.run(step)
        peers = [torch.tensor(value, requires_grad=True) for value in values]
        expected = theirs(*peers)
        (expected * torch.tensor(weights)).sum().backward()
        np.testing.assert_allclose(ctx.get_values(y), expected.detach().numpy(), rtol=1e-10, atol=1e-12)
        for operand, peer in zip(operands, peers, strict=True):
            assert operand.grad is not None
            np.testing.assert_allclose(ctx.get_values(operand.grad), peer.grad.numpy(), rtol=1e-10, atol=1e-12)


def draw(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).normal(size=shape)


def images(x: Any) -> Any:
    return x.permute(0, 3, 1, 2)


def back(x: Any) -> Any:
    return x.permute(0, 2, 3, 1)


@pytest.mark.parametrize(
    "options",
    [{}, {"stride": 2, "padding": 1}, {"dilation": 2, "padding": 2}, {"stride": (2, 1), "padding": (0, 1)}],
    ids=str,
)
def test_conv2d(options: dict[str, Any]) -> None:
    compare(
        lambda x, w, b: st.conv2d(x, w, b, **options),
        lambda x, w, b: back(F.conv2d(images(x), images(w), b, **options)),
        [draw(2, 9, 8, 4), draw(6, 3, 3, 4), draw(6)],
        [(1, 3), (0, 1), (0, 1)],
    )


@pytest.mark.parametrize("groups", [2, 4])
def test_grouped_and_depthwise_convolution(groups: int) -> None:
    compare(
        lambda x, w: st.conv2d(x, w, groups=groups, stride=2),
        lambda x, w: back(F.conv2d(images(x), images(w), groups=groups, stride=2)),
        [draw(2, 9, 8, 4), draw(8, 3, 3, 4 // groups)],
        [(1, 3), (0, 1)],
    )


@pytest.mark.parametrize(("size", "stride", "padding"), [(2, None, 0), (3, 2, 1), ((2, 3), 1, 0)], ids=str)
def test_pools(size: Any, stride: Any, padding: Any) -> None:
    value = draw(2, 9, 8, 4)
    compare(
        lambda x: st.max_pool2d(x, size, stride=stride, padding=padding),
        lambda x: back(F.max_pool2d(images(x), size, stride, padding)),
        [value],
        [(1, 3)],
    )
    compare(
        lambda x: st.avg_pool2d(x, size, stride=stride, padding=padding),
        lambda x: back(F.avg_pool2d(images(x), size, stride, padding)),
        [value],
        [(1, 3)],
    )


@pytest.mark.parametrize("causal", [False, True])
def test_attention(causal: bool) -> None:
    def peer(*tensors: Any) -> Any:
        q, k, v = (t.permute(0, 2, 1, 3) for t in tensors)
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal).permute(0, 2, 1, 3)

    compare(
        lambda q, k, v: st.attention(q, k, v, causal=causal),
        peer,
        [draw(2, 5, 3, 4), draw(2, 5, 3, 4) * 0.5, draw(2, 5, 3, 4) + 1.0],
        [(2, 2)] * 3,
    )
