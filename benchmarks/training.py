"""One leg of a training workload: its arms built, held against the reference trajectory, timed.

In: a workload, a precision, the number of threads that this process was started with. Out: one row per arm. The memory
of an arm is measured elsewhere, in a process of its own.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import statistics
import sys
import time
from collections.abc import Sequence

from stagedtensor.benchmarks import jax_arm, ours, torch_arm
from stagedtensor.benchmarks.arm import OURS, Arm
from stagedtensor.benchmarks.kernel_times import profiled
from stagedtensor.benchmarks.results import Row, judged
from stagedtensor.benchmarks.timing import Effort, take_turns
from stagedtensor.benchmarks.workloads import WORKLOADS, start

GATED_STEPS = 10
"""Steps whose losses are compared with the reference."""
MOVED_STEPS = 20
"""Steps after which the loss has to have moved; the last one's loss is ``final_loss``."""

LIBRARIES = {"torch": "torch", "torch.compile": "torch", "jax": "jax"}


def available(arms: Sequence[str]) -> list[str]:
    """Return the arms whose library is installed."""
    return [arm for arm in arms if arm not in LIBRARIES or importlib.util.find_spec(LIBRARIES[arm]) is not None]


def build(arm: str, workload: str, precision: str, threads: int, *, cached: bool = False) -> Arm:
    """Build one arm of a training workload; ``cached`` compiles a second time, from the cache."""
    chosen = WORKLOADS[workload]
    begin = start(chosen)
    match arm:
        case "ours":
            return ours.train_arm(chosen, precision, begin, threads=threads, cached=cached)
        case "torch":
            return torch_arm.eager_arm(chosen, precision, begin, threads=threads)
        case "torch.compile":
            return torch_arm.compiled_arm(chosen, precision, begin, threads=threads, cached=cached)
        case "jax":
            return jax_arm.train_arm(chosen, precision, begin, cached=cached)
    raise ValueError(f"no arm is called {arm!r}")


@functools.cache
def reference(workload: str, threads: int) -> tuple[float, ...]:
    """Return the first losses of torch eager in f32; ours in f32 where torch is not installed."""
    arm = build(next(iter(available(["torch", OURS]))), workload, "f32", threads)
    losses = tuple(float(arm.read(arm.step(at))) for at in range(GATED_STEPS))
    arm.close()
    return losses


def leg(workload: str, precision: str, threads: int, arms: Sequence[str], effort: Effort, *, cached: bool) -> list[Row]:
    """Build, check and time the arms; a row of an arm that failed has its error.

    Ours and JAX's are compiled a second time, from their caches, torch's if ``cached`` says so: that takes seconds.
    """
    expected = reference(workload, threads)
    rows, ready = [], []
    for name in arms:
        row = Row(workload, precision, threads, name)
        rows.append(row)
        try:
            arm = build(name, workload, precision, threads, cached=cached or name != "torch.compile")
            began = time.perf_counter()
            losses = []
            for at in range(MOVED_STEPS):
                losses.append(float(arm.read(arm.step(at))))
                if at + 1 >= GATED_STEPS and time.perf_counter() - began > effort.leg_s:
                    break
        except Exception as failure:  # of any library: the other arms are still worth timing
            row.error = f"{type(failure).__name__}: {failure}"[:500]
            print(f"{row.key} {name}: {row.error}", file=sys.stderr)
            continue
        row.compile_s, row.cached_s, row.final_loss = arm.compile_s, arm.cached_s, losses[-1]
        row.parity, row.counts = judged(losses, expected, precision, ours=name == OURS)
        ready.append((row, arm))
    if ready:
        samples = take_turns([arm for _, arm in ready], effort, MOVED_STEPS)
        for row, arm in ready:
            taken = samples[arm.name]
            row.median_ms, row.p10_ms, row.p90_ms = (taken.quantile(share) for share in (0.5, 0.1, 0.9))
            row.noisy = taken.noisy
            arm.close()
    gc.collect()
    return rows


def profile(workload: str, precision: str, threads: int, steps: int = 20) -> list[tuple[str, float]]:
    """Return median milliseconds per step of each kernel of our step, and of waiting, the longest first."""
    with profiled() as seconds:
        arm = build(OURS, workload, precision, threads)
        for at in range(steps):
            arm.step(at)
        seconds()
        taken: dict[str, list[float]] = {}
        for at in range(steps):
            arm.step(at)
            for name, spent in seconds():
                taken.setdefault(name, []).append(spent * 1e3)
    arm.close()
    return sorted(((name, statistics.median(ms)) for name, ms in taken.items()), key=lambda entry: -entry[1])
