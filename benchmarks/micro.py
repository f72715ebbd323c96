"""Kernels by themselves against torch: contraction in all operand forms, an elementwise chain, softmax rows.

Arms alternate in one process; the figure is the ratio of medians, torch's time over ours (above 1: ours is faster). Times are
CPU time of the calling thread with one thread, which neighbours on the machine disturb least, and wall time with more.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import stagedtensor as st

try:
    import torch
except ImportError as missing:  # torch is an optional peer
    raise SystemExit('this benchmark compares with torch: pip install "stagedtensor[peers]"') from missing

PRECISIONS = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
ELEMENTS, ROWS, WIDTH = 1 << 24, 16384, 1024
Arm = Callable[[], Any]


def routine(result: st.Tensor, inputs: dict[str, tuple[st.Tensor, np.ndarray]], ctx: st.Context) -> Arm:
    """Compile a result; return a call that computes it."""
    compiled = ctx.compile(result)
    for tensor, cells in inputs.values():
        ctx.set_values(tensor, cells)
    return lambda: ctx.run(compiled)


def gemm(size: int, form: str, prec: str, ctx: st.Context) -> tuple[Arm, Arm, float]:
    """``[size, size]`` contraction; both sides read and write row-major operands of ``prec``."""
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=(size, size)).astype(np.float32) for _ in range(2))
    left, right = (st.placeholder(name, output=[size, size], prec=prec) for name in "ab")
    spec = {"NN": "i k; k j => i j", "NT": "i k; j k => i j", "TN": "k i; k j => i j"}[form]
    product = st.einsum(spec, left, right)
    st.specify(product, prec)
    ours = routine(product, {"a": (left, a), "b": (right, b)}, ctx)
    x, y = torch.tensor(a, dtype=PRECISIONS[prec]), torch.tensor(b, dtype=PRECISIONS[prec])
    x, y = (x.T if form == "TN" else x), (y.T if form == "NT" else y)
    return ours, lambda: x @ y, 2.0 * size**3


def gelu(prec: str, ctx: st.Context) -> tuple[Arm, Arm, float]:
    """gelu(x * w + b) on 16M cells, the tanh form."""
    cells = np.random.default_rng(0).normal(size=ELEMENTS).astype(np.float32)
    x = st.placeholder("x", output=[ELEMENTS], prec=prec)
    y = st.gelu(x * 1.5 + 0.25, approximate="tanh")
    st.specify(y, prec)
    peer = torch.tensor(cells, dtype=PRECISIONS[prec])
    theirs = lambda: torch.nn.functional.gelu(peer * 1.5 + 0.25, approximate="tanh")  # noqa: E731
    return routine(y, {"x": (x, cells)}, ctx), theirs, 2.0 * ELEMENTS * PRECISIONS[prec].itemsize


def softmax(prec: str, ctx: st.Context) -> tuple[Arm, Arm, float]:
    """Softmax of 16384 rows of 1024."""
    cells = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
    x = st.placeholder("x", batch=[ROWS], output=[WIDTH], prec=prec)
    y = st.softmax(x)
    st.specify(y, prec)
    peer = torch.tensor(cells, dtype=PRECISIONS[prec])
    return (
        routine(y, {"x": (x, cells)}, ctx),
        lambda: torch.softmax(peer, -1),
        2.0 * cells.size * PRECISIONS[prec].itemsize,
    )


def medians(arms: tuple[Arm, Arm], rounds: int, clock: Callable[[], float]) -> tuple[float, float]:
    """Seconds of each arm, alternating; the first round does not count."""
    times: tuple[list[float], list[float]] = ([], [])
    for at in range(rounds + 1):
        for arm, taken in zip(arms, times, strict=True):
            began = clock()
            arm()
            if at:
                taken.append(clock() - began)
    return statistics.median(times[0]), statistics.median(times[1])


Maker = Callable[[st.Context], tuple[Arm, Arm, float]]


def cases(sizes: list[int], precisions: list[str]) -> Iterator[tuple[str, str, Maker]]:
    """Yield (workload, precision, maker of both arms and the work)."""
    for prec in precisions:
        for size in sizes:
            for form in ("NN", "NT", "TN"):
                yield f"gemm {form} {size}", prec, partial(gemm, size, form, prec)
        yield "gelu(x*w+b) 16M", prec, partial(gelu, prec)
        yield "softmax 16384x1024", prec, partial(softmax, prec)


def main() -> None:
    """Run all cases and print one line each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--size", type=int, action="append", help="gemm sizes (default 256, 512, 1024)")
    parser.add_argument("--precision", action="append", choices=tuple(PRECISIONS))
    parser.add_argument("--json", type=Path, help="write the rows here too")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    rows = []
    for workload, prec, make in cases(args.size or [256, 512, 1024], args.precision or list(PRECISIONS)):
        with st.Session(), st.Context("cpu", threads=args.threads) as ctx:
            ours, theirs, work = make(ctx)
            mine, peer = medians((ours, theirs), args.rounds, clock)
        row = {
            "workload": workload,
            "precision": prec,
            "threads": args.threads,
            "ours_ms": round(mine * 1e3, 3),
            "torch_ms": round(peer * 1e3, 3),
            "giga_per_s": round(work / mine / 1e9, 1),
            "ratio": round(peer / mine, 2),
        }
        rows.append(row)
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
