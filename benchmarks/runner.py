"""Runs a plan: one timing process per number of threads, then the memory of each arm in fresh processes.

In: a :class:`Plan`. Out: :class:`Results`, filled while they come in. A timing process that dies costs the leg it was
at and is started again for the others. Caches of compiled code are fresh folders, so that first compiles are cold.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import stagedtensor
from stagedtensor.benchmarks.arm import OURS
from stagedtensor.benchmarks.kernels import KERNELS
from stagedtensor.benchmarks.results import Results, Row
from stagedtensor.benchmarks.timing import Effort
from stagedtensor.errors import CompileError
from stagedtensor.runtime.compiler import find_compiler
from stagedtensor.runtime.target import processor_name
from stagedtensor.runtime.thread_pool import available_cpus


@dataclass(frozen=True)
class Plan:
    """What to measure: names of workloads, precisions, numbers of threads and arms, and how thoroughly.

    ``cached`` has torch compile a second time, from its cache; ``memory`` measures peak memory, ``profile`` our
    kernels.
    """

    workloads: tuple[str, ...]
    precisions: tuple[str, ...]
    threads: tuple[int, ...]
    arms: tuple[str, ...]
    effort: Effort
    cached: bool = True
    memory: bool = True
    profile: bool = True

    def legs(self) -> list[tuple[str, str]]:
        """Return (workload, precision) in the order of measurement."""
        return [(workload, precision) for workload in self.workloads for precision in self.precisions]


def machine() -> dict[str, str]:
    """Describe the machine and the versions that are compared."""
    try:
        compiler = find_compiler().version
    except CompileError:
        compiler = "none"
    found = {
        "processor": processor_name(),
        "threads": str(available_cpus()),
        "system": platform.platform(),
        "Python": platform.python_version(),
        "compiler": compiler,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "stagedtensor": stagedtensor.__version__,
    }
    for package in ("torch", "jax"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def run(
    plan: Plan,
    told: Callable[[str], None] = lambda line: None,
    kept: Callable[[Results], None] = lambda results: None,
) -> Results:
    """Measure everything in the plan; ``told`` gets one line per leg, ``kept`` what was found so far."""
    results = Results(machine=machine())
    with tempfile.TemporaryDirectory(prefix="stagedtensor-bench-") as scratch:
        for threads in plan.threads:
            for content in timed(plan, threads, Path(scratch) / f"threads{threads}"):
                keep(results, threads, content, told)
                kept(results)
            if plan.memory:
                measure_memory(plan, threads, Path(scratch) / f"threads{threads}", results.rows)
    return results


def keep(results: Results, threads: int, content: dict[str, Any], told: Callable[[str], None]) -> None:
    """Put what a worker said where it belongs."""
    if "peaks" in content:
        results.peaks[str(threads)] = content["peaks"]
    elif "overheads" in content:
        results.overheads = content["overheads"]
    elif "profile" in content:
        results.profiles[content["key"]] = content["profile"]
    else:
        rows = [Row(**row) for row in content["rows"]]
        results.rows += rows
        times = ", ".join(
            f"{row.arm} {'failed' if row.median_ms is None else f'{row.median_ms:.3g} ms'}" for row in rows
        )
        told(f"{rows[0].key}: {times}")


def environment(threads: int, scratch: Path) -> dict[str, str]:
    """Return the environment of a process that measures: fresh caches, as many threads as asked."""
    scratch.mkdir(parents=True, exist_ok=True)
    root = str(Path(stagedtensor.__file__).parents[1])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return os.environ | {
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": str(threads),
        "STAGEDTENSOR_CACHE": str(scratch / "stagedtensor"),
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "torch"),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(scratch / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONWARNINGS": "ignore",
    }


def timed(plan: Plan, threads: int, scratch: Path) -> Iterator[dict[str, Any]]:
    """Run the timing process over all legs, again after a leg that ended it."""
    legs: Sequence[tuple[str, str]] = plan.legs()
    while legs:
        job = {
            "threads": threads,
            "arms": plan.arms,
            "legs": legs,
            "effort": asdict(plan.effort),
            "cached": plan.cached,
            "profile": plan.profile,
        }
        command = [sys.executable, "-m", "stagedtensor.benchmarks.worker", json.dumps(job)]
        done = 0
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(threads, scratch)) as process:
            assert process.stdout is not None
            for line in process.stdout:
                content = json.loads(line)
                done += "rows" in content
                yield content
        if process.returncode == 0:
            return
        if done < len(legs):
            workload, precision = legs[done]
            reason = f"the timing process ended with status {process.returncode}"
            failed = [Row(workload, precision, threads, arm, error=reason) for arm in plan.arms]
            yield {"rows": [asdict(row) for row in failed]}
        legs = legs[done + 1 :]


def measure_memory(plan: Plan, threads: int, scratch: Path, rows: Sequence[Row]) -> None:
    """Fill in the memory of the training rows with this number of threads."""
    for arm in plan.arms:
        mine = [row for row in rows if row.arm == arm and row.threads == threads and row.workload not in KERNELS]
        wanted = [row for row in mine if row.error is None]
        if not wanted or not sys.platform.startswith("linux"):
            continue
        command = [sys.executable, "-m", "stagedtensor.benchmarks.memory", arm]
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(threads, scratch) | {"TORCHINDUCTOR_COMPILE_THREADS": "1"},
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            for row in wanted:
                request = {"arm": arm, "workload": row.workload, "precision": row.precision, "threads": threads}
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
                said = json.loads(process.stdout.readline() or '{"error": "the process died"}')
                row.peak_mb, row.process_mb = said.get("peak_mb"), said.get("process_mb")
                if "error" in said:
                    print(f"memory of {row.key} {arm}: {said['error']}", file=sys.stderr)
            process.stdin.close()


def first_arms(arms: Sequence[str]) -> tuple[str, ...]:
    """Return the arms with ours first."""
    return tuple(sorted(arms, key=lambda arm: arm != OURS))
