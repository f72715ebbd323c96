"""Twenty steps of training beside torch in f64: LeNet, a small GPT and a ResNet block, in f32, bf16 and f16."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor import nn

from . import torch_networks as peer

torch = pytest.importorskip("torch")
F: Any = torch.nn.functional
Array = np.ndarray[Any, Any]

pytestmark = [pytest.mark.peers, pytest.mark.slow]

STEPS = 20
TOLERANCE = {"f32": 2e-3, "bf16": 4e-3, "f16": 2e-3}


def digits() -> tuple[Array, Array]:
    """Return images of blobs whose place says their class, and the classes."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, size=16)
    images = 0.5 * rng.normal(size=(16, 8, 8, 1))
    for at, label in enumerate(labels):
        row, column = divmod(int(label), 2)
        images[at, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 1.0
    return images.astype(np.float32), labels.astype(np.int32)


def text() -> tuple[Array, Array]:
    """Return ids of a periodic sequence, and the ids that follow."""
    ids = (np.arange(17)[None, :] * np.array([[1], [3], [5], [7]]) + np.arange(4)[:, None]) % 16
    return ids[:, :-1].astype(np.int32), ids[:, 1:].astype(np.int32)


def resnet() -> Callable[[st.Tensor], st.Tensor]:
    block, head = nn.resnet_block(8, stride=2), nn.dense(4)
    return lambda x: head(st.global_avg_pool2d(block(x)))


def torch_resnet(p: Mapping[str, Any], x: Any) -> Any:
    return peer.linear(p, "dense", peer.resnet_block(p, x).mean((1, 2)))


NETWORKS: Mapping[str, tuple[Callable[[], Any], Callable[..., Any], Callable[[], tuple[Array, Array]], float]] = {
    "lenet": (lambda: nn.lenet(4), peer.lenet, digits, 0.05),
    "gpt": (lambda: nn.gpt(16, width=128, layers=4, heads=4, tokens=16), peer.gpt, text, 0.005),
    "resnet_block": (resnet, torch_resnet, digits, 0.05),
}


def ours(name: str, leg: str) -> tuple[list[float], dict[str, Array]]:
    """Return our losses, and the parameters that training starts from."""
    build, _, data, rate = NETWORKS[name]
    inputs, labels = data()
    prec = None if leg == "f32" else leg
    with st.Session(), st.Context("cpu") as ctx:
        row = list(inputs.shape[1:])
        x = (
            st.placeholder("x", batch=[len(inputs)], output=row)
            if inputs.dtype.kind == "f"
            else st.placeholder("x", batch=list(inputs.shape), prec=st.i32)
        )
        y = st.placeholder("y", batch=list(labels.shape), prec=st.i32)
        with st.master_weights(prec):
            network = build()
        loss = st.cross_entropy(network(x), y)
        if prec is not None:
            st.PrecisionPolicy(activation=prec, grad=prec).apply(loss)
        window = scaler = None
        if leg == "f16":
            scaler = st.LossScaler(init_scale=1024.0)
            window, update = st.gated_scaled_update(scaler, loss, rate, momentum=0.9)
        else:
            update = st.sequence(st.grad_update(loss), st.sgd_update(loss, rate, momentum=0.9))
        step = ctx.compile(update, name=f"{name}_{leg}")
        ctx.init_params(loss, seed=1)
        start = {p.name: ctx.get_values(p) for p in loss.params}
        ctx.set_values(x, inputs)
        ctx.set_values(y, labels)
        losses = []
        for at in range(STEPS):
            if scaler is None or window is None:
                ctx.run(step)
            else:
                st.gated_step(ctx, scaler=scaler, routine=step, window_checksum=window, check_interval=1, step=at)
            losses.append(float(ctx.get_values(loss)))
        assert scaler is None or scaler.skipped_steps == 0
    return losses, start


def theirs(name: str, start: Mapping[str, Array]) -> list[float]:
    """Return the losses of the same training in torch, f64."""
    _, network, data, rate = NETWORKS[name]
    inputs, labels = data()
    params = {
        path: torch.tensor(cells.astype(np.float64), requires_grad="running" not in path)
        for path, cells in start.items()
    }
    optimizer = torch.optim.SGD([p for p in params.values() if p.requires_grad], lr=rate, momentum=0.9)
    x = torch.tensor(inputs.astype(np.float64) if inputs.dtype.kind == "f" else inputs)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        logits = network(params, x)
        loss = F.cross_entropy(logits.flatten(0, -2), torch.tensor(labels).long().flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("leg", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("name", NETWORKS)
def test_trajectory(name: str, leg: str) -> None:
    losses, start = ours(name, leg)
    expected = theirs(name, start)
    assert expected[-1] < 0.9 * expected[0], "the loss moves"
    np.testing.assert_allclose(losses, expected, rtol=TOLERANCE[leg])
