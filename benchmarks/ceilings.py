"""The machine's measured peaks, by small C loops that are compiled when asked: operations and copied bytes per second.

The f32 peak is of fused multiply-adds in the widest registers. Where the processor multiplies bf16, in tiles or by dots
of pairs, the bf16 peak is theirs and the f16 peak a quarter of it (an f16 number is the sum of two bf16 numbers) if
that is more; elsewhere both are the f32 peak, because narrow operands are widened. The copy speed counts bytes read and
bytes written.
"""

from __future__ import annotations

import ctypes
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from stagedtensor.runtime.compiler import compile_shared, find_compiler
from stagedtensor.runtime.target import detect

COPIED_BYTES = 1 << 28
SAMPLE_S = 0.06
SAMPLES = 7
_PRODUCTS = {"tile_products": "amx_bf16", "dots": "avx512bf16"}
"""The loops of bf16 products and the features they need, the best first."""


@dataclass(frozen=True)
class Ceilings:
    """Operations per second by precision, and bytes per second of a copy, of ``threads`` threads."""

    threads: int
    flops: dict[str, float]
    copy: float
    target: str

    def floor_ms(self, flops: float, nbytes: float, precision: str) -> tuple[float, float]:
        """Return the milliseconds that the operations alone and the bytes alone would take."""
        return flops / self.flops[precision] * 1e3, nbytes / self.copy * 1e3


def measure(threads: int) -> Ceilings:
    """Compile the loops, run each on ``threads`` threads, keep the best of several samples."""
    compiler = find_compiler()
    target = compiler.usable(detect())
    flags = compiler.flags(target, ("-ffp-contract=fast", f"-DVECTOR_BYTES={target.vector_bytes}"))
    text = (Path(__file__).parent / "ceilings.c").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="stagedtensor-") as folder:
        path = Path(folder) / "ceilings.so"
        compile_shared(text, path, flags=flags, compiler=compiler, name="ceilings")
        library = ctypes.CDLL(str(path))
        f32 = _loop_peak(library.multiply_adds, threads)
        loop = next((name for name, feature in _PRODUCTS.items() if target.has(feature)), None)
        bf16 = 0.0 if loop is None else _loop_peak(getattr(library, loop), threads)
        flops = {"f32": f32, "bf16": max(bf16, f32), "f16": max(bf16 / 4, f32)}
        return Ceilings(threads, flops, _copy_peak(library.copy, threads), target.name)


def _loop_peak(loop: Callable[..., float], threads: int) -> float:
    loop.argtypes = [ctypes.c_int64, ctypes.c_void_p]  # type: ignore[attr-defined]
    loop.restype = ctypes.c_double  # type: ignore[attr-defined]
    sinks = [np.array([0.5, 0.0], np.float32) for _ in range(threads)]

    def run(rounds: int) -> float:
        return _together([partial(loop, rounds, sink.ctypes.data) for sink in sinks])

    work = float(loop(1, sinks[0].ctypes.data))
    rounds = 1 << 16
    while (taken := run(rounds)) < SAMPLE_S / 2:
        rounds *= 2
    best = min(taken, *(run(rounds) for _ in range(SAMPLES)))
    return work * rounds * threads / best


def _copy_peak(copy: Callable[..., None], threads: int) -> float:
    copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]  # type: ignore[attr-defined]
    copy.restype = None  # type: ignore[attr-defined]
    part = COPIED_BYTES // threads
    pairs = [(np.ones(part, np.uint8), np.ones(part, np.uint8)) for _ in range(threads)]
    calls = [partial(copy, a.ctypes.data, b.ctypes.data, part) for a, b in pairs]
    return 2.0 * part * threads / min(_together(calls) for _ in range(SAMPLES))


def _together(calls: Sequence[Callable[[], object]]) -> float:
    """Return the seconds that the calls take, each on a thread of its own."""
    gate = threading.Barrier(len(calls) + 1)

    def work(call: Callable[[], object]) -> None:
        gate.wait()
        call()

    workers = [threading.Thread(target=work, args=(call,)) for call in calls]
    for worker in workers:
        worker.start()
    gate.wait()
    began = time.perf_counter()
    for worker in workers:
        worker.join()
    return time.perf_counter() - began
