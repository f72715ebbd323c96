"""What a step costs besides its arithmetic: a call from Python, a scalar set by the host, the test for overflow in f16."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import stagedtensor as st
from stagedtensor.benchmarks import checksum
from stagedtensor.benchmarks.workloads import CHECK_INTERVAL

CALLS, SAMPLES = 1000, 15
RUN = "ctx.run of a routine that does next to nothing, microseconds"
SET = "ctx.set_values of a scalar, microseconds"
STEP = "st.gated_step of a network of one weight, sampling every 10 steps, microseconds"
GATED = "gated f16 step of mlp_wide over the same step without the test for overflow"


def measure() -> dict[str, float]:
    """Return each cost by what it is of."""
    with st.Session(), st.Context("cpu") as ctx:
        scale = st.host_scalar("scale", 1.0)
        x = st.placeholder("x", output=[4])
        routine = ctx.compile(x * scale, name="next_to_nothing")
        ctx.set_values(x, [1.0, 2.0, 3.0, 4.0])
        run, set_values = ctx.run, ctx.set_values
        costs = {RUN: microseconds(lambda: run(routine)), SET: microseconds(lambda: set_values(scale, 0.5))}
        costs[STEP] = microseconds(gated_step(ctx))
    tested, untested = checksum.measure("cpu", 50)
    return costs | {GATED: tested / untested}


def gated_step(ctx: st.Context) -> Callable[[], object]:
    """Return a step that is hardly more than its test for overflow."""
    w = st.param("w", output=[4], init=1.0)
    scaler = st.LossScaler(8.0)
    window, comp = st.gated_scaled_update(scaler, st.sum(w * w), 0.125)
    routine = ctx.compile(comp, name="one_weight")
    ctx.init_params(comp)
    steps = itertools.count()
    return lambda: st.gated_step(
        ctx, scaler=scaler, routine=routine, window_checksum=window, check_interval=CHECK_INTERVAL, step=next(steps)
    )


def microseconds(call: Callable[[], object]) -> float:
    """Return the median time of a call."""
    samples = []
    for _ in range(SAMPLES):
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        samples.append((time.perf_counter() - began) / CALLS * 1e6)
    return statistics.median(samples)
