"""The blocks of ``st.nn`` written with torch's functions, on parameters given by path in this package's layout."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

torch = pytest.importorskip("torch")
F: Any = torch.nn.functional
Params = Mapping[str, Any]


def part(p: Params, path: str) -> Params:
    """Return the parameters below a path."""
    return {name[len(path) + 1 :]: value for name, value in p.items() if name.startswith(path + ".")}


def linear(p: Params, path: str, x: Any) -> Any:
    w = p[f"{path}.w"]
    y = x.flatten(x.ndim - (w.ndim - 1 if path.endswith("out.dense") else 1)) @ w.reshape(w.shape[0], -1).T
    return y + p[f"{path}.b"] if f"{path}.b" in p else y


def dense(p: Params, x: Any) -> Any:
    return F.gelu(linear(p, "dense", x))


def mlp(p: Params, x: Any) -> Any:
    x = torch.tanh(linear(p, "mlp.dense", x))
    x = torch.tanh(linear(p, "mlp.dense_1", x))
    return linear(p, "mlp.dense_2", x)


def images(x: Any) -> Any:
    return x.permute(0, 3, 1, 2)


def back(x: Any) -> Any:
    return x.permute(0, 2, 3, 1)


def conv2d(p: Params, path: str, x: Any, **options: Any) -> Any:
    return back(F.conv2d(images(x), images(p[f"{path}.w"]), p.get(f"{path}.b"), **options))


def depthwise_separable_conv2d(p: Params, x: Any) -> Any:
    path = "depthwise_separable_conv2d"
    x = conv2d(p, f"{path}.depthwise.conv2d", x, stride=2, padding=1, groups=x.shape[-1])
    return conv2d(p, f"{path}.pointwise.conv2d", x)


def pools(p: Params, x: Any) -> Any:
    return F.avg_pool2d(F.max_pool2d(images(x), 3, 2, 1), 2).mean((2, 3))


def lenet(p: Params, x: Any) -> Any:
    for name in ("conv2d", "conv2d_1"):
        y = torch.relu(conv2d(p, f"lenet.{name}", x, padding=p[f"lenet.{name}.w"].shape[1] // 2))
        x = back(F.max_pool2d(images(y), 2))
    x = x.flatten(1)
    x = torch.relu(linear(p, "lenet.dense", x))
    x = torch.relu(linear(p, "lenet.dense_1", x))
    return linear(p, "lenet.dense_2", x)


def layer_norm(p: Params, path: str, x: Any) -> Any:
    return F.layer_norm(x, x.shape[-1:], p[f"{path}.layer_norm.gain"], p[f"{path}.layer_norm.bias"])


def layer_norm_alone(p: Params, x: Any) -> Any:
    return F.layer_norm(x, x.shape[-1:], p["layer_norm.gain"], p["layer_norm.bias"])


def rms(x: Any, gain: Any) -> Any:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * gain


def rms_norm(p: Params, path: str, x: Any) -> Any:
    return rms(x, p[f"{path}.rms_norm.gain"])


def rms_norm_alone(p: Params, x: Any) -> Any:
    return rms(x, p["rms_norm.gain"])


def group_norm_alone(p: Params, x: Any) -> Any:
    return back(F.group_norm(images(x), 2, p["group_norm.gain"], p["group_norm.bias"]))


def batch_norm(p: Params, path: str, x: Any, *, training: bool = True) -> Any:
    running = p[f"{path}.running_mean"].clone(), p[f"{path}.running_var"].clone()
    image = images(x) if x.ndim == 4 else x
    y = F.batch_norm(image, *running, p[f"{path}.gain"], p[f"{path}.bias"], training)
    return back(y) if x.ndim == 4 else y


def batch_norm_alone(p: Params, x: Any) -> Any:
    return batch_norm(p, "batch_norm", x)


def resnet_block(p: Params, x: Any, path: str = "resnet_block") -> Any:
    stride = 2 if f"{path}.short.conv2d.w" in p else 1
    y = torch.relu(
        batch_norm(p, f"{path}.first_norm.batch_norm", conv2d(p, f"{path}.first.conv2d", x, stride=stride, padding=1))
    )
    y = batch_norm(p, f"{path}.second_norm.batch_norm", conv2d(p, f"{path}.second.conv2d", y, padding=1))
    if stride == 2:
        x = batch_norm(p, f"{path}.short_norm.batch_norm", conv2d(p, f"{path}.short.conv2d", x, stride=2))
    return torch.relu(y + x)


def sinusoidal_positions(p: Params, x: Any) -> Any:
    length, width = x.shape[1:]
    angles = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(0, width, 2).double() / width)[None, :]
    table = torch.stack([torch.sin(angles), torch.cos(angles)], -1).reshape(length, width)
    return x + table.to(x.dtype)


def rotate(x: Any) -> Any:
    """Rotate halves of the features of ``batch, tokens, heads, features``."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1])[:, None].double() * 10000.0 ** (-2.0 * torch.arange(half).double() / (2 * half))
    # the tables are stored as f32
    cos, sin = (table.float().to(x.dtype)[None, :, None, :] for table in (torch.cos(angles), torch.sin(angles)))
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def attention(
    p: Params,
    path: str,
    x: Any,
    *,
    memory: Any = None,
    causal: bool = False,
    rotary: bool = False,
    padding: Any = None,
) -> Any:
    source = x if memory is None else memory

    def project(name: str, t: Any) -> Any:
        y = torch.einsum("bsd,hfd->bshf", t, p[f"{path}.{name}.dense.w"])
        return y + p[f"{path}.{name}.dense.b"] if f"{path}.{name}.dense.b" in p else y

    q, k, v = project("query", x), project("key", source), project("value", source)
    if rotary:
        q, k = rotate(q), rotate(k)
    scores = torch.einsum("bqhf,bkhf->bhqk", q, k) / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)
    if padding is not None:
        scores = scores.masked_fill((padding == 0)[:, None, None, :], -math.inf)
    # a query that sees nothing gives 0
    hidden = (scores == -math.inf).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(hidden, 0.0), -1).masked_fill(hidden, 0.0)
    return linear(p, f"{path}.out.dense", torch.einsum("bhqk,bkhf->bqhf", weights, v))


def attention_alone(p: Params, x: Any) -> Any:
    return attention(p, "multi_head_attention", x)


def feed_forward(p: Params, path: str, x: Any, activation: Any = None) -> Any:
    hidden = linear(p, f"{path}.feed_forward.first.dense", x)
    return linear(p, f"{path}.feed_forward.second.dense", (activation or F.gelu)(hidden))


def encoder_block(
    p: Params,
    path: str,
    x: Any,
    *,
    norm: str = "layer",
    causal: bool = False,
    rotary: bool = False,
    activation: Any = None,
) -> Any:
    normed = layer_norm if norm == "layer" else rms_norm
    x = x + attention(
        p, f"{path}.multi_head_attention", normed(p, f"{path}.attend_norm", x), causal=causal, rotary=rotary
    )
    return x + feed_forward(p, path, normed(p, f"{path}.feed_norm", x), activation)


def encoder_block_alone(p: Params, x: Any) -> Any:
    return encoder_block(p, "encoder_block", x)


def decoder_block(p: Params, x: Any, memory: Any, padding: Any) -> Any:
    path = "decoder_block"
    x = x + attention(p, f"{path}.attend.multi_head_attention", rms_norm(p, f"{path}.attend_norm", x), causal=True)
    read = rms_norm(p, f"{path}.read_norm", x)
    x = x + attention(p, f"{path}.read.multi_head_attention", read, memory=memory, padding=padding)
    return x + feed_forward(p, path, rms_norm(p, f"{path}.feed_norm", x))


def gpt(p: Params, ids: Any, *, norm: str = "layer", rotary: bool = False, activation: Any = None) -> Any:
    p = part(p, "gpt")
    table = p["embedding.table"]
    x = F.embedding(ids.long(), table)
    if not rotary:
        x = x + p["learned_positions.table"][: ids.shape[1]]
    count = len({name.split(".")[0] for name in p if name.startswith("layer")})
    for at in range(count):
        x = encoder_block(
            p, f"layer{at}.encoder_block", x, norm=norm, causal=True, rotary=rotary, activation=activation
        )
    normed = layer_norm if norm == "layer" else rms_norm
    return normed(p, "final_norm", x) @ table.T
