"""JAX's arm of a training workload: the whole step jitted, its state donated.

Narrow precision casts weights and inputs by hand and keeps norms and the loss in f32; f16 scales the loss inside the
step. The number of threads is the number of processors that the process may use when JAX is first used. JAX is imported
by the functions alone.
"""

from __future__ import annotations

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

Arrays = Mapping[str, Any]
Forward = Callable[[Arrays, Any], Any]


def parameters(workload: Workload, begin: Start) -> dict[str, Any]:
    """Return the starting parameters, in the layouts that JAX is fastest with: products as inputs x outputs."""
    import jax.numpy as jnp

    found = joined_projections(workload, begin)
    for name, cells in found.items():
        if name.endswith("conv2d.w"):
            found[name] = cells.transpose(1, 2, 3, 0)
        elif name.endswith(".w"):
            found[name] = cells.T
    return {name: jnp.array(cells) for name, cells in found.items()}


def forward(workload: Workload, dtype: Any) -> Forward:
    """Return the function from parameters and inputs to logits."""
    match workload:
        case Mlp():
            return _mlp(workload, dtype)
        case Convolutions():
            return _convolutions(workload, dtype)
        case Gpt():
            return _gpt(workload, dtype)


def _linear(p: Arrays, path: str, x: Any) -> Any:
    return x @ p[f"{path}.w"].astype(x.dtype) + p[f"{path}.b"].astype(x.dtype)


def _mlp(workload: Mlp, dtype: Any) -> Forward:
    import jax

    layers = [path.removesuffix(".w") for path in list(workload.parameters())[::2]]

    def run(p: Arrays, x: Any) -> Any:
        x = x.astype(dtype)
        for at, path in enumerate(layers):
            x = _linear(p, path, jax.nn.relu(x) if at else x)
        return x

    return run


def _convolutions(workload: Convolutions, dtype: Any) -> Forward:
    import jax

    def convolved(p: Arrays, path: str, x: Any) -> Any:
        form = ("NHWC", "HWIO", "NHWC")
        w, b = (p[f"{path}.{kind}"].astype(dtype) for kind in "wb")
        return jax.lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=form) + b

    def pooled(x: Any) -> Any:
        count, height, width, channels = x.shape
        x = x[:, : height // 2 * 2, : width // 2 * 2]
        return x.reshape(count, height // 2, 2, width // 2, 2, channels).max((2, 4))

    def run(p: Arrays, x: Any) -> Any:
        x = x.astype(dtype)
        for at in range(len(workload.channels)):
            x = pooled(jax.nn.relu(convolved(p, f"conv{at}.conv2d", x)))
        x = x.reshape(len(x), -1)
        for at in range(len(workload.widths)):
            x = _linear(p, f"dense{at}.dense", jax.nn.relu(x) if at else x)
        return x

    return run


def _gpt(workload: Gpt, dtype: Any) -> Forward:
    import jax
    import jax.numpy as jnp

    heads, width, tokens = workload.heads, workload.width, workload.tokens
    visible = jnp.tril(jnp.ones((tokens, tokens), bool))

    def norm(p: Arrays, path: str, x: Any) -> Any:
        x = x.astype(jnp.float32)
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        return (scaled * p[f"{path}.layer_norm.gain"] + p[f"{path}.layer_norm.bias"]).astype(dtype)

    def run(p: Arrays, ids: Any) -> Any:
        x = (p["embedding.table"][ids] + p["learned_positions.table"]).astype(dtype)
        for at in range(workload.layers):
            path = f"layer{at}.encoder_block"
            attention, feed = f"{path}.multi_head_attention", f"{path}.feed_forward"
            together = _linear(p, f"{attention}.qkv", norm(p, f"{path}.attend_norm", x))
            q, k, v = jnp.moveaxis(together.reshape(len(ids), tokens, 3, heads, width // heads), 2, 0)
            scores = jnp.einsum("bqhf,bkhf->bhqk", q, k).astype(jnp.float32) * (width // heads) ** -0.5
            weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), -1).astype(dtype)
            mixed = jnp.einsum("bhqk,bkhf->bqhf", weights, v).reshape(len(ids), tokens, width)
            x = x + _linear(p, f"{attention}.out.dense", mixed)
            inner = _linear(p, f"{feed}.first.dense", norm(p, f"{path}.feed_norm", x))
            x = x + _linear(p, f"{feed}.second.dense", jax.nn.gelu(inner, approximate=True))
        return _linear(p, "head.dense", norm(p, "final_norm", x)).reshape(-1, workload.vocabulary)

    return run


def step_function(workload: Workload, precision: str) -> Callable[..., Any]:
    """Return the pure step: state, inputs, targets -> state, loss."""
    import jax
    import jax.numpy as jnp

    dtype = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}[precision]
    run = forward(workload, dtype)

    def loss_of(p: Arrays, x: Any, y: Any) -> Any:
        chances = jax.nn.log_softmax(run(p, x).astype(jnp.float32))
        return -jnp.take_along_axis(chances, y[:, None], 1).mean()

    def moved(state: Any, gradients: Any) -> Any:
        p, velocity = state
        velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, gradients)
        return jax.tree.map(lambda w, v: w - workload.rate * v, p, velocity), velocity

    def plain(state: Any, x: Any, y: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(state[0], x, y)
        return moved(state, gradients), loss

    def scaled(state: Any, x: Any, y: Any) -> Any:
        inner, scale, calm = state

        def both(p: Arrays) -> Any:
            loss = loss_of(p, x, y)
            return loss * scale, loss

        (_, loss), gradients = jax.value_and_grad(both, has_aux=True)(inner[0])
        gradients = jax.tree.map(lambda g: g / scale, gradients)
        finite = jnp.all(jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(gradients)]))
        inner = jax.tree.map(lambda new, old: jnp.where(finite, new, old), moved(inner, gradients), inner)
        grown = finite & (calm + 1 >= GROWTH_INTERVAL)
        scale = jnp.where(finite, jnp.where(grown, scale * 2, scale), scale / 2)
        return (inner, scale, jnp.where(finite & ~grown, calm + 1, 0)), loss

    return scaled if precision == "f16" else plain


def train_arm(workload: Workload, precision: str, begin: Start, *, cached: bool = True) -> Arm:
    """Return a jitted step; with ``cached``, compile it once more from JAX's cache on disk."""
    import jax

    arm = _compiled(workload, precision, begin)
    if cached:
        jax.clear_caches()
        arm.cached_s = _compiled(workload, precision, begin).compile_s
    return arm


def _compiled(workload: Workload, precision: str, begin: Start) -> Arm:
    import jax
    import jax.numpy as jnp

    def fresh() -> Any:
        p = parameters(workload, begin)
        state = p, {name: jnp.zeros_like(cells) for name, cells in p.items()}
        return (state, jnp.float32(LOSS_SCALE), jnp.int32(0)) if precision == "f16" else state

    data = [(jnp.array(inputs), jnp.array(targets.reshape(-1))) for inputs, targets in begin.batches]
    run = jax.jit(step_function(workload, precision), donate_argnums=0)
    state = fresh()
    began = time.perf_counter()
    float(run(state, *data[0])[1])
    compile_s = time.perf_counter() - began
    held = [fresh()]

    def step(at: int) -> Any:
        held[0], loss = run(held[0], *data[at % len(data)])
        return loss

    return Arm("jax", step, lambda handle: handle.block_until_ready(), float, held.clear, compile_s)
