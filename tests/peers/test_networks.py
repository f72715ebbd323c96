"""Every block of ``st.nn`` and every loss against torch: forward and all gradients, in f64 and f32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor import nn

from . import torch_networks as peer

torch = pytest.importorskip("torch")
F: Any = torch.nn.functional
Array = np.ndarray[Any, Any]

pytestmark = pytest.mark.peers

TOLERANCE = {"f64": 1e-10, "f32": 1e-5}
PRECS = ["f64", pytest.param("f32", marks=pytest.mark.slow)]


@dataclass(frozen=True)
class Input:
    """One operand: its number of batch axes and its cells; integers are ids."""

    batch: int
    cells: Array


def draw(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).normal(size=shape)


def tokens(*shape: int, count: int) -> Array:
    return np.random.default_rng(sum(shape)).integers(0, count, size=shape)


def close(actual: Array, expected: Array, tolerance: float, what: str) -> None:
    """Compare to ``tolerance`` of the largest cell."""
    assert actual.shape == expected.shape, what
    # softmax does not see a bias of all keys: its gradient is the rounding error of a sum that cancels
    scale = 1.0 if what.endswith("key.dense.b") else max(float(np.abs(expected).max()), 1e-3)
    np.testing.assert_allclose(actual / scale, expected / scale, rtol=0, atol=tolerance, err_msg=what)


def compare(
    build: Callable[..., st.Tensor],
    theirs: Callable[..., Any],
    inputs: list[Input],
    prec: str,
    values: Callable[[str, Array], Array] | None = None,
) -> None:
    """Compare a network's result, its parameters' gradients and its inputs' with torch's.

    ``theirs`` takes the parameters by path, then the inputs.
    """
    wide = np.float64 if prec == "f64" else np.float32
    with st.Session(default_prec=prec, default_grad_prec=prec), st.Context("cpu") as ctx:
        operands = []
        for at, given in enumerate(inputs):
            whole = given.cells.dtype.kind in "iu"
            operands.append(
                st.placeholder(
                    f"input{at}",
                    batch=list(given.cells.shape[: given.batch]),
                    output=list(given.cells.shape[given.batch :]),
                    prec=st.i32 if whole else st.precision(prec),
                    requires_grad=not whole,
                )
            )
        y = build(*operands)
        weights = np.random.default_rng(9).normal(size=y.shape.dims).astype(wide)
        loss = st.sum(y * st.constant(weights, batch=len(y.shape.batch)))
        step = ctx.compile(st.grad_update(loss), keep=[y])
        ctx.init_params(loss, seed=3)
        rng = np.random.default_rng(4)
        for p in loss.params:
            cells = ctx.get_values(p)
            if cells.ndim <= 1:  # gains and biases away from 1 and 0
                ctx.set_values(p, cells + 0.3 * rng.uniform(size=cells.shape))
        for operand, given in zip(operands, inputs, strict=True):
            ctx.set_values(operand, given.cells.astype(wide) if given.cells.dtype.kind == "f" else given.cells)
        ctx.run(step)
        params = {p.name: torch.tensor(ctx.get_values(p), requires_grad=p.grad is not None) for p in loss.params}
        peers = [
            torch.tensor(given.cells.astype(wide), requires_grad=True)
            if given.cells.dtype.kind == "f"
            else torch.tensor(given.cells)
            for given in inputs
        ]
        expected = theirs(params, *peers)
        (expected * torch.tensor(weights)).sum().backward()
        tolerance = TOLERANCE[prec]
        close(ctx.get_values(y), expected.detach().numpy(), tolerance, "result")
        for p in loss.params:
            if p.grad is not None:
                close(ctx.get_values(p.grad), params[p.name].grad.numpy(), tolerance, p.name)
        for operand, other in zip(operands, peers, strict=True):
            if operand.grad is not None:
                close(ctx.get_values(operand.grad), other.grad.numpy(), tolerance, operand.name)


IMAGE = Input(1, draw(3, 8, 8, 4))
SEQUENCE = Input(2, draw(2, 6, 12))
MEMORY = Input(2, draw(2, 5, 12))
PADDING = Input(2, np.array([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0]]))
IDS = Input(2, tokens(2, 6, count=11))

Case = tuple[Callable[[], Callable[..., st.Tensor]], Callable[..., Any], list[Input]]

CASES: Mapping[str, Case] = {
    "dense": (lambda: nn.dense(7, activation=st.gelu), peer.dense, [SEQUENCE]),
    "mlp": (lambda: nn.mlp([9, 8, 5], activation=st.tanh), peer.mlp, [SEQUENCE]),
    "conv2d": (
        lambda: nn.conv2d(6, (3, 2), stride=2, padding=1, activation=st.relu),
        lambda p, x: torch.relu(peer.conv2d(p, "conv2d", x, stride=2, padding=1)),
        [IMAGE],
    ),
    "conv2d_grouped": (
        lambda: nn.conv2d(6, 3, dilation=2, groups=2, channels=4, bias=False),
        lambda p, x: peer.conv2d(p, "conv2d", x, dilation=2, groups=2),
        [IMAGE],
    ),
    "depthwise_separable_conv2d": (
        lambda: nn.depthwise_separable_conv2d(5, channels=4, stride=2, padding=1),
        peer.depthwise_separable_conv2d,
        [IMAGE],
    ),
    "pools": (
        lambda: lambda x: st.global_avg_pool2d(nn.avg_pool2d(2)(nn.max_pool2d(3, stride=2, padding=1)(x))),
        peer.pools,
        [IMAGE],
    ),
    "lenet": (lambda: nn.lenet(10, channels=(3, 4), widths=(12, 9), kernel=3), peer.lenet, [IMAGE]),
    "layer_norm": (nn.layer_norm, peer.layer_norm_alone, [SEQUENCE]),
    "layer_norm_image": (nn.layer_norm, peer.layer_norm_alone, [IMAGE]),
    "rms_norm": (nn.rms_norm, peer.rms_norm_alone, [SEQUENCE]),
    "group_norm": (lambda: nn.group_norm(2), peer.group_norm_alone, [IMAGE]),
    "batch_norm": (nn.batch_norm, peer.batch_norm_alone, [IMAGE]),
    "batch_norm_vector": (nn.batch_norm, peer.batch_norm_alone, [Input(1, draw(6, 5))]),
    "batch_norm_evaluation": (
        lambda: (lambda layer: lambda x: layer(x, training=False))(nn.batch_norm()),
        lambda p, x: peer.batch_norm(p, "batch_norm", x, training=False),
        [IMAGE],
    ),
    "resnet_block": (lambda: nn.resnet_block(4), peer.resnet_block, [IMAGE]),
    "resnet_block_down": (lambda: nn.resnet_block(5, stride=2), peer.resnet_block, [IMAGE]),
    "embedding": (
        lambda: (lambda table: lambda ids: table.attend(table(ids)))(nn.embedding(11, 5)),
        lambda p, ids: F.embedding(ids, p["embedding.table"]) @ p["embedding.table"].T,
        [IDS],
    ),
    "learned_positions": (
        lambda: nn.learned_positions(9),
        lambda p, x: x + p["learned_positions.table"][: x.shape[1]],
        [SEQUENCE],
    ),
    "sinusoidal_positions": (lambda: nn.sinusoidal_positions, peer.sinusoidal_positions, [SEQUENCE]),
    "multi_head_attention": (lambda: nn.multi_head_attention(12, 3), peer.attention_alone, [SEQUENCE]),
    "multi_head_attention_causal": (
        lambda: nn.multi_head_attention(12, 3, causal=True, bias=False),
        lambda p, x: peer.attention(p, "multi_head_attention", x, causal=True),
        [SEQUENCE],
    ),
    "multi_head_attention_rotary": (
        lambda: nn.multi_head_attention(12, 3, rotary=True),
        lambda p, x: peer.attention(p, "multi_head_attention", x, rotary=True),
        [SEQUENCE],
    ),
    "multi_head_attention_padding": (
        lambda: (lambda layer: lambda x, m, pad: layer(x, memory=m, padding=pad))(nn.multi_head_attention(12, 3)),
        lambda p, x, m, pad: peer.attention(p, "multi_head_attention", x, memory=m, padding=pad),
        [SEQUENCE, MEMORY, PADDING],
    ),
    "encoder_block": (lambda: nn.encoder_block(12, 3), peer.encoder_block_alone, [SEQUENCE]),
    "decoder_block": (
        lambda: (lambda block: lambda x, m, pad: block(x, m, padding=pad))(nn.decoder_block(12, 3, norm="rms")),
        peer.decoder_block,
        [SEQUENCE, MEMORY, PADDING],
    ),
    "gpt": (lambda: nn.gpt(11, width=12, layers=2, heads=3, tokens=8), peer.gpt, [IDS]),
    "gpt_rotary": (
        lambda: nn.gpt(11, width=12, layers=1, heads=3, tokens=8, norm="rms", rotary=True, activation=st.silu),
        lambda p, ids: peer.gpt(p, ids, norm="rms", rotary=True, activation=F.silu),
        [IDS],
    ),
}


@pytest.mark.parametrize("prec", PRECS)
@pytest.mark.parametrize("name", CASES)
def test_block(name: str, prec: str) -> None:
    build, theirs, inputs = CASES[name]
    compare(lambda *operands: build()(*operands), theirs, inputs, prec)


LOGITS, TARGETS = Input(1, draw(5, 4)), Input(1, np.abs(draw(5, 3))[:, [0, 1, 2, 0]] % 1.0)
CLASSES = Input(1, np.array([0, 2, 3, 1, 0]))
SIGNS = Input(1, np.sign(draw(5, 4)[::-1].copy()))
LOSSES: Mapping[str, tuple[Callable[..., st.Tensor], Callable[..., Any], list[Input]]] = {
    "mse": (st.mse, lambda p, x, y: F.mse_loss(x, y), [LOGITS, SIGNS]),
    "mae": (st.mae, lambda p, x, y: F.l1_loss(x, y), [LOGITS, SIGNS]),
    "huber": (
        lambda x, y: st.huber(x, y, delta=0.7, reduction="sum"),
        lambda p, x, y: F.huber_loss(x, y, delta=0.7, reduction="sum"),
        [LOGITS, SIGNS],
    ),
    "binary_cross_entropy": (
        lambda x, y: st.binary_cross_entropy(st.sigmoid(x), y),
        lambda p, x, y: F.binary_cross_entropy(torch.sigmoid(x), y),
        [LOGITS, TARGETS],
    ),
    "binary_cross_entropy_with_logits": (
        lambda x, y: st.binary_cross_entropy_with_logits(x, y, reduction="none"),
        lambda p, x, y: F.binary_cross_entropy_with_logits(x, y, reduction="none"),
        [LOGITS, TARGETS],
    ),
    "hinge": (st.hinge, lambda p, x, y: torch.relu(1 - x * y).mean(), [LOGITS, SIGNS]),
    "cross_entropy": (st.cross_entropy, lambda p, x, y: F.cross_entropy(x, y.long()), [LOGITS, CLASSES]),
    "cross_entropy_smoothed": (
        lambda x, y: st.cross_entropy(x, y, label_smoothing=0.2, reduction="sum"),
        lambda p, x, y: F.cross_entropy(x, y.long(), label_smoothing=0.2, reduction="sum"),
        [LOGITS, CLASSES],
    ),
    "cross_entropy_ignored": (
        lambda x, y: st.cross_entropy(x, y, label_smoothing=0.1, ignore_index=2),
        lambda p, x, y: F.cross_entropy(x, y.long(), label_smoothing=0.1, ignore_index=2),
        [LOGITS, CLASSES],
    ),
    "cross_entropy_masked": (
        lambda x, y: st.cross_entropy(x, y, mask=y, reduction="none"),
        lambda p, x, y: F.cross_entropy(x, y.long(), reduction="none") * (y != 0),
        [LOGITS, CLASSES],
    ),
    "cross_entropy_masked_mean": (
        lambda x, y: st.cross_entropy(x, y, mask=y),
        lambda p, x, y: (F.cross_entropy(x, y.long(), reduction="none") * (y != 0)).sum() / (y != 0).sum(),
        [LOGITS, CLASSES],
    ),
    "cross_entropy_probabilities": (
        lambda x, y: st.cross_entropy(x, st.softmax(y), label_smoothing=0.1),
        lambda p, x, y: F.cross_entropy(x, torch.softmax(y, -1), label_smoothing=0.1),
        [LOGITS, SIGNS],
    ),
    "cross_entropy_first_axis": (
        lambda x, y: st.cross_entropy(x, y, axis=("output", 0)),
        lambda p, x, y: F.cross_entropy(x, y.long()),
        [Input(1, draw(2, 4, 3)), Input(1, tokens(2, 3, count=4))],
    ),
}


@pytest.mark.parametrize("prec", PRECS)
@pytest.mark.parametrize("name", LOSSES)
def test_loss(name: str, prec: str) -> None:
    ours, theirs, inputs = LOSSES[name]
    compare(ours, theirs, inputs, prec)


VECTOR = Input(1, draw(2, 6))
MATRIX = Input(1, draw(2, 5, 7))
OPS: Mapping[str, tuple[Callable[..., st.Tensor], Callable[..., Any], list[Input]]] = {
    "expm1": (lambda x: st.expm1(1e-3 * x), lambda p, x: torch.expm1(1e-3 * x), [VECTOR]),
    "expm1_large": (lambda x: st.expm1(3.0 * x), lambda p, x: torch.expm1(3.0 * x), [VECTOR]),
    "log10": (lambda x: st.log10(x * x + 0.5), lambda p, x: torch.log10(x * x + 0.5), [VECTOR]),
    "elu": (lambda x: st.elu(x, 0.7), lambda p, x: F.elu(x, 0.7), [VECTOR]),
    "flatten": (st.flatten, lambda p, x: x.flatten(1), [MATRIX]),
    "unsqueeze": (
        lambda x: st.squeeze(st.unsqueeze(x, ("output", 1)), ("output", 1)),
        lambda p, x: x.unsqueeze(2).squeeze(2),
        [MATRIX],
    ),
    "split": (
        lambda x: st.concat(st.split(x, 3)[::-1]),
        lambda p, x: torch.cat(torch.split(x, 3, dim=-1)[::-1], -1),
        [MATRIX],
    ),
    "pad2d": (lambda x: st.pad2d(x, (1, 2)), lambda p, x: F.pad(x, (0, 0, 2, 2, 1, 1)), [IMAGE]),
    "tril": (lambda x: st.tril(x, 1), lambda p, x: torch.tril(x, 1), [MATRIX]),
    "index_select": (
        lambda x: st.index_select(x, np.array([2, 0, 2], np.int32), ("output", 0)),
        lambda p, x: x.index_select(1, torch.tensor([2, 0, 2])),
        [MATRIX],
    ),
    "unfold": (lambda x: st.unfold(x, 3, 2, ("output", 0)), lambda p, x: x.unfold(1, 3, 2), [MATRIX]),
    "conv1d": (
        lambda x, w, b: st.conv1d(x, st.einsum("k, i, o => k, i -> o", w), b, stride=2, padding=1),
        lambda p, x, w, b: F.conv1d(x.permute(0, 2, 1), w.permute(2, 1, 0), b, stride=2, padding=1).permute(0, 2, 1),
        [MATRIX, Input(0, draw(3, 7, 4)), Input(0, draw(4))],
    ),
    "conv3d": (
        lambda x, w: st.conv3d(
            x, st.einsum("d, h, w, i, o => d, h, w, i -> o", w), stride=(1, 2, 1), padding=(1, 0, 1)
        ),
        lambda p, x, w: F.conv3d(
            x.permute(0, 4, 1, 2, 3), w.permute(4, 3, 0, 1, 2), stride=(1, 2, 1), padding=(1, 0, 1)
        ).permute(0, 2, 3, 4, 1),
        [Input(1, draw(2, 3, 6, 4, 2)), Input(0, draw(2, 3, 2, 2, 5))],
    ),
    "conv_transpose1d": (
        lambda x, w, b: st.conv_transpose1d(
            x, st.einsum("k, i, o => k, i -> o", w), b, stride=3, padding=1, output_padding=2, dilation=2
        ),
        lambda p, x, w, b: F.conv_transpose1d(
            x.permute(0, 2, 1), w.permute(1, 2, 0), b, stride=3, padding=1, output_padding=2, dilation=2
        ).permute(0, 2, 1),
        [MATRIX, Input(0, draw(3, 7, 4)), Input(0, draw(4))],
    ),
    "upsample2d": (
        lambda x: st.upsample2d(x, (2, 3)),
        lambda p, x: x.repeat_interleave(2, 1).repeat_interleave(3, 2),
        [IMAGE],
    ),
}


@pytest.mark.parametrize("prec", PRECS)
@pytest.mark.parametrize("name", OPS)
def test_op(name: str, prec: str) -> None:
    ours, theirs, inputs = OPS[name]
    compare(ours, theirs, inputs, prec)
