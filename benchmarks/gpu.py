"""One command for one GPU: correctness against f64, then medians against torch, as a table and as JSON.

Products of matrices (against torch, which calls cuBLAS), elementwise and row kernels (against the bandwidth of a copy),
attention (against torch's fused one) and whole training steps (against torch eager, torch.compile, both with AMP where
the format is narrow). Needs torch and CuPy. ``--device cuda-emulated --quick`` runs our side alone, without a GPU, to
see that the workloads build; it measures nothing. A result whose check fails is printed, but does not count.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import stagedtensor as st
from stagedtensor.benchmarks import torch_arm
from stagedtensor.benchmarks.ours import model
from stagedtensor.benchmarks.workloads import (
    LOSS_SCALE,
    MOMENTUM,
    WORKLOADS,
    Convolutions,
    Gpt,
    Mlp,
    Start,
    Workload,
    start,
)

torch: Any = None
"""The peer, imported by :func:`main`; without it only our own side is run."""

BUDGET_S = 330.0
"""Seconds after which no further workload starts."""
PEAK = {"sm_80": 312, "sm_90": 989, "sm_100": 2250}
"""Dense 16-bit tensor-core TFLOP/s, for the share of peak."""
UNITS = {"f16": 2.0**-11, "bf16": 2.0**-8, "tf32": 2.0**-11, "f32": 2.0**-24}


@dataclass
class Row:
    """One measurement; times in microseconds, ``ratio`` is torch's time over ours, ``share`` of peak or of a copy."""

    workload: str
    precision: str
    ours_us: float
    torch_us: float | None = None
    compiled_us: float | None = None
    ratio: float | None = None
    share: float | None = None
    error: float | None = None
    counts: bool = True
    path: str = ""


@dataclass
class Bench:
    """Where and how much is measured."""

    device: str
    quick: bool
    rounds: int
    peer: str = "cuda"
    """Torch's device."""
    began: float = field(default_factory=time.perf_counter)

    def left(self) -> float:
        """Seconds of the budget that are left."""
        return BUDGET_S - (time.perf_counter() - self.began)

    @property
    def timed(self) -> bool:
        """Whether there is a GPU to time."""
        return self.device.startswith("cuda:") or self.device == "cuda"

    @property
    def gpu(self) -> int:
        """Number of the GPU."""
        return int(self.device.partition(":")[2] or 0)

    def ours(self, ctx: st.Context, run: Callable[[], Any]) -> float:
        """Median microseconds of ``run`` on the context's stream, by events."""
        for _ in range(3):
            run()  # launch, capture, replay
        ctx.sync()
        if not self.timed:
            began = time.perf_counter()
            run()
            return (time.perf_counter() - began) * 1e6
        import cupy

        stream = ctx._device.stream  # type: ignore[attr-defined]
        times = []
        for _ in range(self.rounds):
            first, last = cupy.cuda.Event(), cupy.cuda.Event()
            first.record(stream)
            run()
            last.record(stream)
            last.synchronize()
            times.append(cupy.cuda.get_elapsed_time(first, last) * 1e3)
        return float(statistics.median(times))

    def theirs(self, run: Callable[[], Any]) -> float | None:
        """Median microseconds of torch code by events; None where there is no torch or no GPU."""
        if torch is None or not self.timed:
            return None
        for _ in range(5):
            run()
        if self.peer != "cuda":
            began = time.perf_counter()
            run()
            return (time.perf_counter() - began) * 1e6
        torch.cuda.synchronize()
        times = []
        for _ in range(self.rounds):
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            run()
            last.record()
            last.synchronize()
            times.append(first.elapsed_time(last) * 1e3)
        return float(statistics.median(times))


def finished(row: Row) -> Row:
    """Fill in the ratio."""
    best = min((t for t in (row.torch_us, row.compiled_us) if t), default=None)
    row.ratio = None if best is None else round(best / row.ours_us, 3)
    return row


def products(bench: Bench) -> Iterator[Row]:
    """Square products; a sample of the results is checked against f64."""
    for size in (64,) if bench.quick else (512, 1024, 2048, 4096, 8192):
        rng = np.random.default_rng(0)
        left, right = (rng.standard_normal((size, size), np.float32) for _ in range(2))
        rows = rng.integers(0, size, 32)
        for prec in ("f16", "bf16", "tf32", "f32"):
            if prec == "f32" and size > 4096:
                continue
            stored = "f32" if prec == "tf32" else prec
            numerics = st.Numerics(tf32_matmul=prec == "tf32")
            with st.Session(), st.Context(bench.device, numerics=numerics) as ctx:
                a = st.placeholder("a", output=[size], input=[size], prec=stored)
                b = st.placeholder("b", output=[size], input=[size], prec=stored)
                c = a @ b
                routine = ctx.compile(c)
                ctx.set_values(a, left)
                ctx.set_values(b, right)
                ours = bench.ours(ctx, partial(ctx.run, routine))
                found = ctx.get_values(c).astype(np.float64)
                x, y = (ctx.get_values(t).astype(np.float64) for t in (a, b))
                exact = x[rows] @ y
                # operands lose bits in tf32, results in the narrow formats, sums a little everywhere
                lost = 2 * size * 2.0**-24 + (2 * UNITS["tf32"] if prec == "tf32" else 0)
                bound = lost * (np.abs(x[rows]) @ np.abs(y)) + 2 * UNITS[stored] * np.abs(exact)
                error = float((np.abs(found[rows] - exact) / bound).max())
                path = routine.kernels[0].path
            dtype = {"f16": "float16", "bf16": "bfloat16", "f32": "float32"}[stored]
            theirs = None
            if torch is not None and bench.timed:
                p, q = (torch.tensor(cells, device=bench.peer).to(getattr(torch, dtype)) for cells in (left, right))
                torch.backends.cuda.matmul.allow_tf32 = prec == "tf32"
                theirs = bench.theirs(partial(torch.matmul, p, q))
                torch.backends.cuda.matmul.allow_tf32 = False
            flops = 2 * size**3 / ours * 1e-6
            yield finished(
                Row(
                    f"product {size}",
                    prec,
                    ours,
                    theirs,
                    error=error,
                    counts=error <= 1,
                    path=path,
                    share=share(bench, prec, flops),
                )
            )


def share(bench: Bench, prec: str, tflops: float) -> float | None:
    """Return which part of the tensor cores' peak that is; None for plain f32, which does not use them."""
    if not bench.timed or prec == "f32":
        return None
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(bench.gpu)
    peak = PEAK.get(f"sm_{properties['major']}{properties['minor']}")
    return None if peak is None else round(tflops / (peak / 2 if prec == "tf32" else peak), 3)


def streams(bench: Bench) -> Iterator[Row]:
    """gelu(x*w+b) and row softmax; ``share`` is the bandwidth over that of a copy of the same bytes."""
    cells = 1 << 12 if bench.quick else 1 << 24
    rows, columns = (16, 64) if bench.quick else (16384, 1024)
    forms: list[tuple[str, tuple[int, ...], Callable[[st.Tensor], st.Tensor], Callable[[Any], Any]]] = [
        ("gelu(x*w+b)", (cells,), lambda x: st.gelu(x * 1.5 + 0.5), lambda x: torch.nn.functional.gelu(x * 1.5 + 0.5)),
        ("softmax", (rows, columns), lambda x: st.softmax(x), lambda x: torch.softmax(x, -1)),
    ]
    for label, shape, build, reference in forms:
        for prec in ("f32", "bf16"):
            values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
            with st.Session(), st.Context(bench.device) as ctx:
                x = st.placeholder("x", batch=list(shape[:-1]), output=[shape[-1]], prec=prec)
                y = build(x)
                routine = ctx.compile(y)
                ctx.set_values(x, values)
                ours = bench.ours(ctx, partial(ctx.run, routine))
                found = ctx.get_values(y).astype(np.float64)
                given = ctx.get_values(x).astype(np.float64)
            exact = expected(label, given)
            error = float(
                (np.abs(found - exact) / (4 * UNITS[prec] * (np.abs(exact) + np.abs(given) + 1) + 8 * 2.0**-24)).max()
            )
            theirs = compiled = copy = None
            if torch is not None and bench.timed:
                data = torch.tensor(values, device=bench.peer).to(torch.float32 if prec == "f32" else torch.bfloat16)
                target = torch.empty_like(data)
                theirs = bench.theirs(partial(reference, data))
                if bench.peer == "cuda":
                    compiled = bench.theirs(partial(torch.compile(reference), data))
                copy = bench.theirs(partial(target.copy_, data))
            part = None if copy is None else round(copy / ours, 3)
            yield finished(Row(label, prec, ours, theirs, compiled, share=part, error=error, counts=error <= 1))


def expected(label: str, x: Any) -> Any:
    """The same in f64."""
    if label == "softmax":
        powers = np.exp(x - x.max(-1, keepdims=True))
        return powers / powers.sum(-1, keepdims=True)
    from math import erf

    u = x * 1.5 + 0.5
    table = np.vectorize(erf, otypes=[np.float64])
    sample = slice(None, None, max(1, u.size // 4096))
    result = 0.5 * u * (1 + np.tanh(0.7978845608028654 * (u + 0.044715 * u**3)))  # within 1e-3 of the exact form
    result[sample] = 0.5 * u[sample] * (1 + table(u[sample] / np.sqrt(2)))
    return result


def attention(bench: Bench) -> Iterator[Row]:
    """Attention forward, written out on our side, beside torch's fused kernel."""
    batch, heads, length, width = (1, 2, 16, 16) if bench.quick else (8, 16, 1024, 64)
    scale = width**-0.5
    for prec in ("f16", "bf16"):
        rng = np.random.default_rng(0)
        values = [rng.standard_normal((batch, heads, length, width)).astype(np.float32) for _ in range(3)]
        with st.Session(), st.Context(bench.device) as ctx:
            q, k, v = (st.placeholder(name, batch=[batch, heads, length], output=[width], prec=prec) for name in "qkv")
            scores = st.einsum("... q | d; ... k | d => ... q | k", q, k) * scale
            mixed = st.einsum("... q | k; ... k | d => ... q | d", st.softmax(scores), v)
            routine = ctx.compile(mixed)
            for t, cells in zip((q, k, v), values, strict=True):
                ctx.set_values(t, cells)
            ours = bench.ours(ctx, partial(ctx.run, routine))
            found = ctx.get_values(mixed).astype(np.float64)[0, 0]
            path = routine.kernels[0].path
        x, y, z = (cells[0, 0].astype(np.float64) for cells in values)
        exact = expected("softmax", x @ y.T * scale) @ z
        error = float(np.abs(found - exact).max() / (16 * UNITS[prec]))
        theirs = None
        if torch is not None and bench.timed:
            dtype = torch.float16 if prec == "f16" else torch.bfloat16
            data = [torch.tensor(cells, device=bench.peer).to(dtype) for cells in values]
            theirs = bench.theirs(partial(torch.nn.functional.scaled_dot_product_attention, *data))
        yield finished(Row("attention", prec, ours, theirs, error=error, counts=error <= 1, path=path))


NETWORKS = ("mlp-small", "gpt2_mini", "cifar_conv", "mlp-mid", "gpt-mini", "conv", "mlp_wide", "lenet")
"""In the order of what they tell, for time may run out."""
TINY: tuple[Workload, ...] = (
    Mlp("tiny mlp", (12, 16, 10), 8),
    Convolutions("tiny conv", (10, 10, 2), (4,), (10,), batch=2, kernel=3),
    Gpt("tiny gpt", 1, 16, 2, 8, 12, 2),
)
"""One of each kind, small enough for the emulator."""


def training(bench: Bench) -> Iterator[Row]:
    """Whole steps, SGD with momentum, f32 masters; f16 with dynamic loss scaling, skips on the device."""
    for workload in TINY if bench.quick else [WORKLOADS[name] for name in NETWORKS]:
        begin = start(workload)
        for prec in ("bf16", "f16", "f32"):
            with st.Session(), st.Context(bench.device) as ctx:
                step, read = our_step(ctx, prec, workload, begin)
                losses = followed(step, read)
                ours = bench.ours(ctx, step)
            theirs = compiled = error = None
            if torch is not None and bench.timed:
                run, last = their_step(bench, prec, workload, begin, compiled=False)
                their_losses = followed(run, last)
                error = max(abs(a - b) / abs(b) for a, b in zip(losses, their_losses, strict=True))
                theirs = bench.theirs(run)
                if bench.peer == "cuda" and bench.left() > BUDGET_S / 3:  # compiling takes torch a minute
                    compiled = bench.theirs(their_step(bench, prec, workload, begin, compiled=True)[0])
            tolerance = {"f32": 2e-3, "bf16": 4e-3, "f16": 2e-3}[prec]
            counts = losses[-1] < losses[0] and (error is None or error <= tolerance)
            yield finished(Row(f"step {workload.name}", prec, ours, theirs, compiled, error=error, counts=counts))


def followed(step: Callable[[], Any], read: Callable[[], float]) -> list[float]:
    """Return the losses of five steps."""
    losses = []
    for _ in range(5):
        step()
        losses.append(read())
    return losses


def our_step(
    ctx: st.Context, prec: str, workload: Workload, begin: Start
) -> tuple[Callable[[], Any], Callable[[], float]]:
    """Return one step on the first batch, and the reader of its loss."""
    x, y, loss = model(workload, prec)
    scaler = st.LossScaler(init_scale=LOSS_SCALE)
    if prec == "f16":
        _, comp = st.gated_scaled_update(scaler, loss, workload.rate, momentum=MOMENTUM)
    else:
        comp = st.sequence(st.grad_update(loss), st.sgd_update(loss, workload.rate, momentum=MOMENTUM))
    ctx.init_params(loss)
    routine = ctx.compile(comp, name=f"step_{prec}")
    for p in loss.params:
        ctx.set_values(p, begin.parameters[p.label])
    for t, cells in zip((x, y), begin.batches[0], strict=True):
        ctx.set_values(t, cells)
    return partial(ctx.run, routine), lambda: float(ctx.get_values(loss))


def their_step(
    bench: Bench, prec: str, workload: Workload, begin: Start, *, compiled: bool
) -> tuple[Callable[[], None], Callable[[], float]]:
    """Return the same step in torch, and the reader of its loss."""
    p = {name: t.to(bench.peer).requires_grad_() for name, t in torch_arm.parameters(workload, begin).items()}
    optimizer = torch.optim.SGD(p.values(), lr=workload.rate, momentum=MOMENTUM, fused=True)
    dtype = {"f32": None, "bf16": torch.bfloat16, "f16": torch.float16}[prec]
    scaler = torch.amp.GradScaler(bench.peer, init_scale=LOSS_SCALE, enabled=prec == "f16")
    x, y = (t.to(bench.peer) for t in torch_arm.batches(workload, begin)[0])
    network = torch_arm.forward(workload, by_hand=False)
    last: list[Any] = [None]

    def forward() -> Any:
        with torch.autocast(bench.peer, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            logits = network(p, x)
        return torch.nn.functional.cross_entropy(logits.float(), y)

    if compiled:
        forward = torch.compile(forward, mode="reduce-overhead")

    def step() -> None:
        optimizer.zero_grad()
        loss = forward()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        last[0] = loss.detach()

    return step, lambda: float(last[0])


def table(rows: Sequence[Row]) -> str:
    """Return the rows as aligned text."""
    header = ("workload", "prec", "ours us", "torch us", "compiled us", "ratio", "share", "error", "counts")
    lines: list[tuple[str, ...]] = [header]
    for row in rows:
        cells = (row.ours_us, row.torch_us, row.compiled_us, row.ratio, row.share, row.error)
        lines.append(
            (row.workload, row.precision, *("-" if cell is None else f"{cell:.4g}" for cell in cells), str(row.counts))
        )
    widths = [max(len(line[at]) for line in lines) for at in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def measured(bench: Bench) -> list[Row]:
    """Run every workload that the budget allows; print each row as it comes."""
    rows: list[Row] = []
    for group in (products, streams, attention, training):
        for row in group(bench):
            rows.append(row)
            print(table(rows[-1:]).splitlines()[1], flush=True)
            if bench.left() <= 0:
                print("out of time: the rest is left out")
                return rows
    return rows


def find_torch() -> Any:
    """Return torch, or None where it is not installed."""
    with contextlib.suppress(ImportError):
        return importlib.import_module("torch")
    return None


def main(arguments: Sequence[str] | None = None) -> None:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    args = parser.parse_args(arguments)
    try:
        st.Context(args.device).close()
    except st.errors.ContextError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    global torch
    torch = find_torch()
    bench = Bench(args.device, args.quick, args.rounds)
    if bench.timed:  # both sides, and the events, on one GPU
        import cupy

        cupy.cuda.Device(bench.gpu).use()
        if torch is not None:
            torch.cuda.set_device(bench.gpu)
    rows = measured(bench)
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
