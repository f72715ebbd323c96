"""Cost of the finiteness test of gradients: a gated f16 step of an MLP beside the same step without the test.

The workload mlp_wide: f16 twins, activations and gradients, SGD with momentum. The two steps alternate, so
that both see the same clock. Prints both medians; exits with 1 if the ratio is above the limit.

    python -m stagedtensor.benchmarks.checksum [--device cpu] [--steps 50] [--limit 1.03]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import stagedtensor as st
from stagedtensor.benchmarks.ours import model
from stagedtensor.benchmarks.workloads import MOMENTUM, WORKLOADS, start

WORKLOAD = WORKLOADS["mlp_wide"]
WARM_UP = 5


def prepared(ctx: st.Context, tested: bool) -> Callable[[], object]:
    """Compile one arm and return its step."""
    x, labels, loss = model(WORKLOAD, "f16")
    begin = start(WORKLOAD)
    ctx.init_params(loss)
    for p in loss.params:
        ctx.set_values(p, begin.parameters[p.label])
    for t, cells in zip((x, labels), begin.batches[0], strict=True):
        ctx.set_values(t, cells)
    scaler = st.LossScaler(1024.0)
    if tested:
        window, comp = st.gated_scaled_update(scaler, loss, WORKLOAD.rate, momentum=MOMENTUM)
        routine = ctx.compile(comp, name="tested")
        steps = iter(range(10**9))
        return lambda: st.gated_step(
            ctx, scaler=scaler, routine=routine, window_checksum=window, check_interval=100, step=next(steps)
        )
    update = st.sgd_update(
        loss, WORKLOAD.rate, momentum=MOMENTUM, grad_unscale=scaler.unscale, update_gate=st.host_scalar("gate", 1.0)
    )
    comp = st.sequence(st.grad_update(loss, loss_scale=scaler.scale), update)
    return ctx.compile(comp, name="untested")


def measure(device: str, steps: int) -> tuple[float, float]:
    """Return the median seconds of a step with and without the test."""
    with st.Session(), st.Context(device) as with_test, st.Context(device) as without:
        arms = [(with_test, prepared(with_test, True)), (without, prepared(without, False))]
        times: list[list[float]] = [[], []]
        for at in range(WARM_UP + steps):
            for (ctx, step), seen in zip(arms, times, strict=True):
                started = time.perf_counter()
                step()
                ctx.sync()
                if at >= WARM_UP:
                    seen.append(time.perf_counter() - started)
        return statistics.median(times[0]), statistics.median(times[1])


def main() -> int:
    """Measure, print and judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--limit", type=float, default=1.03)
    options = parser.parse_args()
    tested, untested = measure(options.device, options.steps)
    ratio = tested / untested
    print(f"{options.device}: {tested * 1e3:.3f} ms with the test, {untested * 1e3:.3f} ms without, ratio {ratio:.4f}")
    return 0 if ratio <= options.limit else 1


if __name__ == "__main__":
    raise SystemExit(main())
