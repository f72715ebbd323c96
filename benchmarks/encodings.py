"""Encoded weights: a matrix-vector product fused with decoding, against decoding first, beside the copy speed.

Run ``python -m stagedtensor.benchmarks.encodings [--size 4096] [--threads 2] [ENCODING ...]``. Prints medians over runs
that take turns: the fused product, the encoded bytes it reads per second, a routine that decodes into a buffer and
multiplies after, and the same product with the weight decoded beforehand. The copy speed counts the bytes that are
copied, once. Asserts nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np
from rich.console import Console
from rich.table import Table

import stagedtensor as st
from stagedtensor.benchmarks import ceilings
from stagedtensor.encodings import PACKED_ENCODINGS, Dense, Encoded, Encoding

_REST_S = 0.001


def random_weight(encoding: Encoding, size: int) -> Encoded:
    """Return a square weight of random codes with scales around 1/64."""
    rng = np.random.default_rng(0)
    if encoding.whole:
        codes = rng.integers(0, 3, (size * size // 4, 4), dtype=np.uint8)
        data = (codes[:, 0] | codes[:, 1] << 2 | codes[:, 2] << 4 | codes[:, 3] << 6).tobytes()
        tail = np.float32(1 / 64).tobytes() if encoding.scale_bytes else b""
        return Encoded((size, size), st.f32, encoding, data + tail, scale=None if tail else 1 / 64)
    blocks = rng.integers(0, 256, (size * size // encoding.elements, encoding.nbytes), dtype=np.uint8)
    if encoding.name == "TQ2_0":
        blocks[:, :64] &= 0x55
    for offset in encoding.scales:
        scales = np.asarray(rng.uniform(0.5, 1, blocks.shape[0]) / 64)
        blocks[:, offset : offset + 2] = scales.astype("<f2")[:, None].view(np.uint8)
    return Encoded((size, size), st.f32, encoding, blocks.tobytes())


def seconds(run: Callable[[], None]) -> float:
    """Return the wall time of one call, after a rest in which threads that wait for work of other routines go to sleep."""
    time.sleep(_REST_S)
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def measure(encoding: Encoding, size: int, threads: int, rounds: int) -> tuple[float, float, float, int]:
    """Return median seconds of the fused product, of decoding and multiplying, of the dense product; and encoded bytes."""
    weight = random_weight(encoding, size)
    vector = np.random.default_rng(1).normal(0, 1, size).astype(np.float32)
    runs: list[Callable[[], None]] = []
    contexts = []
    for kind in ("fused", "decoded", "dense"):
        ctx = st.Context("cpu", threads=threads)
        x = st.placeholder("x", output=[size])
        table = st.constant(weight.repack_to(Dense(4)) if kind == "dense" else weight)
        whole = st.place(st.maximum(table, -np.inf), "materialized") if kind == "decoded" else table
        ctx.set_values(x, vector)
        routine = ctx.compile(whole @ x, keep=[whole] if kind == "decoded" else [])
        routine()
        runs.append(routine)
        contexts.append(ctx)
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for taken, run in zip(times, runs, strict=True):
            taken.append(seconds(run))
    fused, decoded, dense = map(median, times)
    return fused, decoded, dense, weight.nbytes


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("encodings", nargs="*", default=["Q4_K", "Q6_K", "Q8_0"])
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args(arguments)
    known = {encoding.name: encoding for encoding in PACKED_ENCODINGS}
    copied = ceilings.measure(options.threads).copy / 2
    table = Table(
        title=f"{options.size} x {options.size} times a vector, {options.threads} threads; copy {copied / 1e9:.1f} GB/s"
    )
    for title in ("encoding", "fused ms", "GB/s read", "of copy", "decode + multiply ms", "gain", "dense f32 ms"):
        table.add_column(title, justify="right")
    for name in options.encodings:
        fused, decoded, dense, nbytes = measure(known[name], options.size, options.threads, options.rounds)
        speed = nbytes / fused
        table.add_row(
            name, f"{fused * 1e3:.2f}", f"{speed / 1e9:.2f}", f"{speed / copied:.0%}",
            f"{decoded * 1e3:.2f}", f"{decoded / fused:.1f}x", f"{dense * 1e3:.2f}",
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
