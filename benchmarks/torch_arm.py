"""torch's arms of a training workload: eager, and the whole step compiled.

Narrow precision is autocast, f16 with a gradient scaler: what torch's documents recommend. Attention is written out in
the narrow legs, where it is faster on a CPU than the fused function; q, k and v are one product. torch is imported by
the functions alone, so that this module can be read where it is missing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from stagedtensor.benchmarks.arm import Arm
from stagedtensor.benchmarks.workloads import (
    GROWTH_INTERVAL,
    LOSS_SCALE,
    MOMENTUM,
    Convolutions,
    Gpt,
    Mlp,
    Start,
    Workload,
    joined_projections,
)

Tensors = Mapping[str, Any]
Forward = Callable[[Tensors, Any], Any]


def parameters(workload: Workload, begin: Start) -> dict[str, Any]:
    """Return the starting parameters as tensors, in the layouts that torch's functions take."""
    import numpy as np
    import torch

    found = joined_projections(workload, begin)
    if isinstance(workload, Convolutions):
        for name, cells in found.items():
            if name.endswith("conv2d.w"):
                found[name] = cells.transpose(0, 3, 1, 2)
    return {name: torch.tensor(np.ascontiguousarray(cells)) for name, cells in found.items()}


def batches(workload: Workload, begin: Start) -> list[tuple[Any, Any]]:
    """Return the batches as tensors, images channels first."""
    import numpy as np
    import torch

    found = []
    for inputs, targets in begin.batches:
        if isinstance(workload, Convolutions):
            given = torch.tensor(np.ascontiguousarray(inputs.transpose(0, 3, 1, 2)))
        else:
            given = torch.tensor(inputs)
        if isinstance(workload, Gpt):
            given = given.long()
        found.append((given, torch.tensor(targets).long().reshape(-1)))
    return found


def forward(workload: Workload, *, by_hand: bool) -> Forward:
    """Return the function from parameters and inputs to logits."""
    import torch

    functions: Any = torch.nn.functional
    match workload:
        case Mlp():
            return _mlp(workload, functions)
        case Convolutions():
            return _convolutions(workload, functions)
        case Gpt():
            return _gpt(workload, torch, functions, by_hand=by_hand)


def _mlp(workload: Mlp, functions: Any) -> Forward:
    paths = list(workload.parameters())[::2]
    layers = [path.removesuffix(".w") for path in paths]

    def run(p: Tensors, x: Any) -> Any:
        for at, path in enumerate(layers):
            x = functions.linear(functions.relu(x) if at else x, p[f"{path}.w"], p[f"{path}.b"])
        return x

    return run


def _convolutions(workload: Convolutions, functions: Any) -> Forward:
    height, width, channels = workload.flat()

    def run(p: Tensors, x: Any) -> Any:
        for at in range(len(workload.channels)):
            x = functions.conv2d(x, p[f"conv{at}.conv2d.w"], p[f"conv{at}.conv2d.b"])
            x = functions.max_pool2d(functions.relu(x), 2)
        x = x.permute(0, 2, 3, 1).reshape(len(x), height * width * channels)
        for at in range(len(workload.widths)):
            x = functions.linear(functions.relu(x) if at else x, p[f"dense{at}.dense.w"], p[f"dense{at}.dense.b"])
        return x

    return run


def _gpt(workload: Gpt, torch: Any, functions: Any, *, by_hand: bool) -> Forward:
    heads, width, tokens = workload.heads, workload.width, workload.tokens
    hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)

    def norm(p: Tensors, path: str, x: Any) -> Any:
        return functions.layer_norm(x, (width,), p[f"{path}.layer_norm.gain"], p[f"{path}.layer_norm.bias"])

    def linear(p: Tensors, path: str, x: Any) -> Any:
        return functions.linear(x, p[f"{path}.w"], p[f"{path}.b"])

    def attend(q: Any, k: Any, v: Any) -> Any:
        if not by_hand:
            return functions.scaled_dot_product_attention(q, k, v, is_causal=True)
        scores = torch.matmul(q, k.transpose(-1, -2)) * (width // heads) ** -0.5
        return torch.matmul(scores.masked_fill(hidden, -torch.inf).softmax(-1).to(v.dtype), v)

    def run(p: Tensors, ids: Any) -> Any:
        x = functions.embedding(ids, p["embedding.table"]) + p["learned_positions.table"]
        for at in range(workload.layers):
            path = f"layer{at}.encoder_block"
            attention, feed = f"{path}.multi_head_attention", f"{path}.feed_forward"
            together = linear(p, f"{attention}.qkv", norm(p, f"{path}.attend_norm", x))
            split = together.reshape(len(ids), tokens, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
            mixed = attend(split[0], split[1], split[2]).transpose(1, 2).reshape(len(ids), tokens, width)
            x = x + linear(p, f"{attention}.out.dense", mixed)
            inner = linear(p, f"{feed}.first.dense", norm(p, f"{path}.feed_norm", x))
            x = x + linear(p, f"{feed}.second.dense", functions.gelu(inner, approximate="tanh"))
        logits = linear(p, "head.dense", norm(p, "final_norm", x))
        return logits.reshape(-1, workload.vocabulary)

    return run


def _loss(workload: Workload, precision: str) -> Callable[[Tensors, Any, Any], Any]:
    import torch

    dtype = {"f32": None, "bf16": torch.bfloat16, "f16": torch.float16}[precision]
    run = forward(workload, by_hand=dtype is not None)

    def loss(p: Tensors, x: Any, y: Any) -> Any:
        with contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype):
            logits = run(p, x)
        return torch.nn.functional.cross_entropy(logits.float(), y)

    return loss


def eager_arm(workload: Workload, precision: str, begin: Start, *, threads: int) -> Arm:
    """Return a step in torch eager with the fused optimizer."""
    import torch

    torch.set_num_threads(threads)
    p = {name: tensor.requires_grad_() for name, tensor in parameters(workload, begin).items()}
    data = batches(workload, begin)
    loss_of = _loss(workload, precision)
    optimizer = torch.optim.SGD(p.values(), lr=workload.rate, momentum=MOMENTUM, fused=True)
    scaling: Any = torch.amp
    scaler = scaling.GradScaler("cpu", init_scale=LOSS_SCALE, enabled=precision == "f16")

    def step(at: int) -> Any:
        x, y = data[at % len(data)]
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(p, x, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return Arm("torch", step, float, float)


def compiled_arm(workload: Workload, precision: str, begin: Start, *, threads: int, cached: bool = True) -> Arm:
    """Return a step of which forward, backward, loss scaling and optimizer are one compiled function.

    ``cached`` compiles it a second time, from torch's cache on disk.
    """
    import torch

    torch.set_num_threads(threads)
    arm = _compiled(workload, precision, begin)
    if cached:
        torch._dynamo.reset()
        arm.cached_s = _compiled(workload, precision, begin).compile_s
    return arm


def _compiled(workload: Workload, precision: str, begin: Start) -> Arm:
    import torch

    weights = parameters(workload, begin)
    velocity = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    data = batches(workload, begin)
    loss_of = _loss(workload, precision)
    scale, calm = torch.tensor(LOSS_SCALE), torch.tensor(0.0)

    def update(gradients: Tensors, finite: Any) -> None:
        for name, w in weights.items():
            moved = MOMENTUM * velocity[name] + gradients[name]
            if finite is None:
                velocity[name].copy_(moved)
                w.sub_(moved, alpha=workload.rate)
            else:
                velocity[name].copy_(torch.where(finite, moved, velocity[name]))
                w.copy_(torch.where(finite, w - workload.rate * moved, w))

    def plain(x: Any, y: Any) -> Any:
        gradients, loss = torch.func.grad_and_value(loss_of)(weights, x, y)
        update(gradients, None)
        return loss

    def scaled(x: Any, y: Any) -> Any:
        def both(p: Tensors) -> tuple[Any, Any]:
            loss = loss_of(p, x, y)
            return loss * scale, loss

        gradients, (_, loss) = torch.func.grad_and_value(both, has_aux=True)(weights)
        gradients = {name: gradient / scale for name, gradient in gradients.items()}
        finite = torch.stack([gradient.isfinite().all() for gradient in gradients.values()]).all()
        update(gradients, finite)
        grown = finite & (calm + 1 >= GROWTH_INTERVAL)
        scale.copy_(torch.where(finite, torch.where(grown, scale * 2, scale), scale / 2))
        calm.copy_(torch.where(finite & ~grown, calm + 1, 0.0))
        return loss

    run = torch.compile(scaled if precision == "f16" else plain)

    def step(at: int) -> Any:
        with torch.no_grad():
            return run(*data[at % len(data)])

    return _timed_first(step, weights, velocity, (scale, calm))


def _timed_first(step: Callable[[int], Any], weights: Tensors, velocity: Tensors, cells: tuple[Any, Any]) -> Arm:
    """Compile by the first call, time it, and put everything back to the start."""
    kept = {name: tensor.clone() for name, tensor in weights.items()}
    started = [cell.clone() for cell in cells]
    began = time.perf_counter()
    float(step(0))
    compile_s = time.perf_counter() - began
    for name, tensor in weights.items():
        tensor.copy_(kept[name])
        velocity[name].zero_()
    for cell, value in zip(cells, started, strict=True):
        cell.copy_(value)
    return Arm("torch.compile", step, float, float, compile_s=compile_s)
