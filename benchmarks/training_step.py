"""Whole training steps against torch eager: arms alternating in one process, medians and ratios.

Workload mlp-small: a 64-128-128-10 relu network, cross-entropy, batch 32, SGD with momentum 0.9; f32, bf16 (autocast on the
torch side, cast twins and narrow activations on ours) and f16 with dynamic loss scaling. Both sides start from the same
weights and see the same batches; a result counts only if the losses agree and fell.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import stagedtensor as st

try:
    import torch
except ImportError as missing:  # torch is an optional peer
    raise SystemExit('this benchmark compares with torch: pip install "stagedtensor[peers]"') from missing

WIDTHS = (64, 128, 128, 10)
BATCH, RATE, MOMENTUM = 32, 0.05, 0.9
TOLERANCE = {"f32": 2e-3, "bf16": 4e-3, "f16": 2e-3}


def weights(rng: np.random.Generator) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (weight, bias) of each layer."""
    return [
        (rng.uniform(-1, 1, (after, before)).astype(np.float32) / np.sqrt(before), np.zeros(after, np.float32))
        for before, after in pairwise(WIDTHS)
    ]


def ours(prec: str, start: list[Any], threads: int) -> tuple[Callable[[Any, Any], None], Callable[[], float], float]:
    """Return (step, loss reader, seconds to compile)."""
    ctx = st.Context("cpu", threads=threads)
    x = st.placeholder("x", batch=[BATCH], output=[WIDTHS[0]])
    y = st.placeholder("y", batch=[BATCH], prec=st.i32)
    h = x
    with st.master_weights(None if prec == "f32" else prec):
        layers = [(st.param(f"w{at}", init=w), st.param(f"b{at}", init=b)) for at, (w, b) in enumerate(start)]
        for at, (w, b) in enumerate(layers):
            h = w @ h + b
            if at < len(layers) - 1:
                h = st.relu(h)
    loss = st.cross_entropy(h, y)
    if prec != "f32":
        st.PrecisionPolicy(activation=prec, grad=prec).apply(loss)
    scaler = st.LossScaler(init_scale=2.0**12)
    if prec == "f16":
        window, comp = st.gated_scaled_update(scaler, loss, RATE, momentum=MOMENTUM)
    else:
        comp = st.sequence(st.grad_update(loss), st.sgd_update(loss, RATE, momentum=MOMENTUM))
    routine = ctx.compile(comp, name=f"step_{prec}")
    ctx.init_params(loss)
    count = iter(range(10**9))

    def step(xs: Any, ys: Any) -> None:
        ctx.set_values(x, xs)
        ctx.set_values(y, ys)
        if prec == "f16":
            st.gated_step(
                ctx, scaler=scaler, routine=routine, window_checksum=window, check_interval=10, step=next(count)
            )
        else:
            ctx.run(routine)

    return step, lambda: float(ctx.get_values(loss)), routine.compile_seconds


def theirs(prec: str, start: list[Any]) -> tuple[Callable[[Any, Any], None], Callable[[], float]]:
    """Return the same step in torch eager."""
    modules: list[torch.nn.Module] = []
    for at, (w, b) in enumerate(start):
        linear = torch.nn.Linear(w.shape[1], w.shape[0])
        with torch.no_grad():
            linear.weight.copy_(torch.tensor(w))
            linear.bias.copy_(torch.tensor(b))
        modules += [linear] if at == len(start) - 1 else [linear, torch.nn.ReLU()]
    net = torch.nn.Sequential(*modules)
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=MOMENTUM)
    dtype = {"f32": None, "bf16": torch.bfloat16, "f16": torch.float16}[prec]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, enabled=prec == "f16")
    last = [0.0]

    def step(xs: Any, ys: Any) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = torch.nn.functional.cross_entropy(net(xs), ys)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        last[0] = loss.detach()

    return step, lambda: float(last[0])


def compare(prec: str, rounds: int, threads: int) -> dict[str, Any]:
    """Alternate blocks of steps of both sides; return medians in microseconds and their ratio."""
    rng = np.random.default_rng(0)
    start = weights(rng)
    batches = [
        (rng.normal(size=(BATCH, WIDTHS[0])).astype(np.float32), rng.integers(0, 10, BATCH)) for _ in range(16)
    ]
    our_data = [(x, y.astype(np.int32)) for x, y in batches]
    their_data = [(torch.tensor(x), torch.tensor(y)) for x, y in batches]
    our_step, our_loss, compile_s = ours(prec, start, threads)
    their_step, their_loss = theirs(prec, start)
    losses = []
    for at in range(10):
        our_step(*our_data[at % 16])
        their_step(*their_data[at % 16])
        losses.append((our_loss(), their_loss()))
    parity = max(abs(a - b) / abs(b) for a, b in losses)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for arm, (step, data) in enumerate(((our_step, our_data), (their_step, their_data))):
            time.sleep(0.003)  # let the other side's spinning workers go to sleep
            for at in range(20):
                began = time.perf_counter()
                step(*data[at % 16])
                if at >= 4:
                    times[arm].append(time.perf_counter() - began)
    our_us, their_us = (statistics.median(arm) * 1e6 for arm in times)
    return {
        "workload": "mlp-small",
        "precision": prec,
        "threads": threads,
        "ours_us": round(our_us, 1),
        "torch_eager_us": round(their_us, 1),
        "ratio": round(their_us / our_us, 2),
        "compile_s": round(compile_s, 2),
        "parity": float(f"{parity:.2e}"),
        "counts": parity < TOLERANCE[prec] and losses[-1][0] < losses[0][0],
    }


def main() -> None:
    """Run all precisions and print one line each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", action="append", choices=("f32", "bf16", "f16"))
    parser.add_argument("--json", type=Path, help="write the rows here too")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = [compare(prec, args.rounds, args.threads) for prec in args.precision or ("f32", "bf16", "f16")]
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
