"""Peak memory of one arm, each in a process of its own.

``python -m stagedtensor.benchmarks.memory LIBRARY`` imports one library, then reads requests, one JSON object a line,
and answers each by a forked child that builds the arm, trains a few steps and looks at the most memory it ever had. The
figure less what the imports took is the arm's own. Linux only: elsewhere the answers are null.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import warnings
from typing import Any

STEPS = 5
IMPORTS = {
    "ours": ("stagedtensor",),
    "torch": ("torch", "torch._dynamo", "stagedtensor"),
    "torch.compile": ("torch", "torch._dynamo", "torch._inductor", "stagedtensor"),
    "jax": ("jax", "stagedtensor"),
}


def resident_kb(field: str) -> int:
    """Return a field of this process's status: ``VmRSS`` now, ``VmHWM`` at most."""
    with open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith(f"{field}:"):
                return int(line.split()[1])
    return 0


def child(arm: str, workload: str, precision: str, threads: int) -> dict[str, Any]:
    """Train a few steps and return the peak of this process in MB, with and without the imports."""
    from stagedtensor.benchmarks import training

    before = resident_kb("VmRSS")
    built = training.build(arm, workload, precision, threads)
    for at in range(STEPS):
        built.wait(built.step(at))
    peak = resident_kb("VmHWM")
    return {"peak_mb": (peak - before) / 1024, "process_mb": peak / 1024}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Fork, let the child measure, return what it says."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(reading)
        try:
            said = child(**request)
        except Exception as failure:  # of any library
            said = {"error": f"{type(failure).__name__}: {failure}"[:500]}
        with os.fdopen(writing, "w") as out:
            json.dump(said, out)
        os._exit(0)  # the parent's buffers and libraries are not ours to end
    os.close(writing)
    with os.fdopen(reading) as told:
        text = told.read()
    os.waitpid(process, 0)
    return json.loads(text) if text else {"error": "the process died"}


def main(arm: str) -> None:
    """Import, then serve requests."""
    warnings.simplefilter("ignore")
    threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    for module in IMPORTS[arm]:
        importlib.import_module(module)
    importlib.import_module("stagedtensor.benchmarks.training")
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
