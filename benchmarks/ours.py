"""Our arm of a training workload: the network in ``stagedtensor.nn``, the whole step as one routine.

f32: plain. bf16: twins of the masters, activations and their gradients in bf16. f16: the same with dynamic loss
scaling, gated on the device. Each step copies its batch in.
"""

from __future__ import annotations

import time
from functools import partial
from itertools import count
from typing import Any

import stagedtensor as st
from stagedtensor import nn
from stagedtensor.benchmarks.arm import OURS, Arm
from stagedtensor.benchmarks.workloads import (
    CHECK_INTERVAL,
    LOSS_SCALE,
    MOMENTUM,
    Convolutions,
    Gpt,
    Mlp,
    Start,
    Workload,
)


def network(workload: Workload, x: st.Tensor) -> st.Tensor:
    """Return the logits of a batch."""
    match workload:
        case Mlp():
            return nn.mlp(workload.widths[1:])(x)
        case Convolutions():
            for at, channels in enumerate(workload.channels):
                layer = nn.conv2d(channels, workload.kernel, activation=st.relu, label=f"conv{at}")
                x = st.max_pool2d(layer(x), 2)
            x = st.flatten(x)
            for at, width in enumerate(workload.widths):
                last = at == len(workload.widths) - 1
                x = nn.dense(width, activation=None if last else st.relu, label=f"dense{at}")(x)
            return x
        case Gpt():
            x = nn.embedding(workload.vocabulary, workload.width)(x)
            x = nn.learned_positions(workload.tokens, workload.width)(x)
            for at in range(workload.layers):
                block = nn.encoder_block(
                    workload.width,
                    workload.heads,
                    causal=True,
                    activation=partial(st.gelu, approximate="tanh"),
                    label=f"layer{at}",
                )
                x = block(x)
            return nn.dense(workload.vocabulary, label="head")(nn.layer_norm(label="final_norm")(x))


def model(workload: Workload, precision: str) -> tuple[st.Tensor, st.Tensor, st.Tensor]:
    """Build a workload in the current session; return inputs, targets and loss."""
    shape = workload.input_shape
    if isinstance(workload, Gpt):
        x, y = (st.placeholder(name, batch=list(shape), prec=st.i32) for name in ("x", "y"))
    else:
        x = st.placeholder("x", batch=[shape[0]], output=list(shape[1:]))
        y = st.placeholder("y", batch=[shape[0]], prec=st.i32)
    with st.master_weights(None if precision == "f32" else precision):
        loss = st.cross_entropy(network(workload, x), y)
    if precision != "f32":
        st.PrecisionPolicy(activation=precision, grad=precision).apply(loss)
    return x, y, loss


def train_arm(workload: Workload, precision: str, begin: Start, *, threads: int, cached: bool = True) -> Arm:
    """Compile a step; with ``cached``, compile it once more in a fresh context, from the kernel cache."""
    arm = _compiled(workload, precision, begin, threads)
    if cached:
        again = _compiled(workload, precision, begin, threads)
        arm.cached_s = again.compile_s
        again.close()
    return arm


def _compiled(workload: Workload, precision: str, begin: Start, threads: int) -> Arm:
    ctx = st.Context("cpu", threads=threads)
    with st.Session():
        x, y, loss = model(workload, precision)
        scaler = st.LossScaler(init_scale=LOSS_SCALE)
        window: st.Tensor | None = None
        if precision == "f16":
            window, comp = st.gated_scaled_update(scaler, loss, workload.rate, momentum=MOMENTUM)
        else:
            comp = st.sequence(st.grad_update(loss), st.sgd_update(loss, workload.rate, momentum=MOMENTUM))
        began = time.perf_counter()
        routine = ctx.compile(comp, name=f"{workload.name}_{precision}".replace("-", "_"))
        compile_s = time.perf_counter() - began
        for p in loss.params:
            ctx.set_values(p, begin.parameters[p.label])
        ctx.init_params(loss)  # momentum and the like
    at_step = count()
    batches = begin.batches
    set_values, run = ctx.set_values, ctx.run

    def step(at: int) -> None:
        inputs, targets = batches[at % len(batches)]
        set_values(x, inputs)
        set_values(y, targets)
        if window is None:
            run(routine)
            return
        st.gated_step(
            ctx,
            scaler=scaler,
            routine=routine,
            window_checksum=window,
            check_interval=CHECK_INTERVAL,
            step=next(at_step),
        )

    def read(handle: Any) -> float:
        return float(ctx.get_values(loss))

    return Arm(OURS, step, lambda handle: None, read, ctx.close, compile_s)
