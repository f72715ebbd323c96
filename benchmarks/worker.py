"""The process that times: started once per number of threads, before any library is imported.

``python -m stagedtensor.benchmarks.worker JOB`` with a JSON object: threads, arms, legs as [workload, precision],
effort, and whether to compile a second time from the cache and to profile our step. Prints one JSON object a line: the
machine's peaks, then per leg its rows and our profile, at last what a call costs. What libraries print goes to standard
error.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any


def main(job: dict[str, Any]) -> None:
    """Measure the legs in order."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    threads = int(job["threads"])
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])

    from stagedtensor.benchmarks import ceilings, kernels, overheads, training
    from stagedtensor.benchmarks.timing import Effort

    def say(**content: Any) -> None:
        out.write(json.dumps(content) + "\n")
        out.flush()

    peaks = ceilings.measure(threads)
    say(peaks=asdict(peaks))
    effort = Effort(**job["effort"])
    for workload, precision in job["legs"]:
        if workload in kernels.KERNELS:
            rows = kernels.leg(kernels.KERNELS[workload], precision, job["arms"], effort, peaks)
        else:
            rows = training.leg(workload, precision, threads, job["arms"], effort, cached=job["cached"])
        say(rows=[asdict(row) for row in rows])
        if job["profile"] and workload not in kernels.KERNELS and "ours" in job["arms"]:
            with told(f"the profile of {workload} in {precision}"):
                say(profile=training.profile(workload, precision, threads), key=f"{workload}/{precision}/{threads}")
    if job["profile"]:
        with told("the overheads"):
            say(overheads=overheads.measure())


@contextmanager
def told(what: str) -> Iterator[None]:
    """Say what failed, and go on: the times are worth more."""
    try:
        yield
    except Exception as failure:  # of the compiler, of any library
        print(f"{what}: {type(failure).__name__}: {failure}"[:500], file=sys.stderr)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
