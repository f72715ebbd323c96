"""Train a small network on the handwritten digits that scikit-learn ships, in f32, bf16 and f16.

Each leg is one compiled routine per step: forward, backward and the optimizer in one C function. The bf16 leg reads
cast twins of f32 master weights; the f16 leg adds dynamic loss scaling whose overflow decision is taken inside the
routine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, field

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import stagedtensor as st

BATCH, HIDDEN, CLASSES, FEATURES = 32, 128, 10, 64
LEGS = ("f32", "bf16", "f16")


@dataclass
class Result:
    """What one leg reports."""

    leg: str
    accuracy: float = 0.0
    step_us: float = 0.0
    compile_s: float = 0.0
    skipped: int | None = None
    scale: float | None = None
    parameter_bytes: int = 0
    activation_bytes: int = 0
    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    stats: str = ""


def digits(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return (train images, train labels, test images, test labels): an 80/20 split, pixels in [0, 1]."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        sys.exit('this example needs scikit-learn: pip install "stagedtensor[examples]"')
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(images))
    images, labels = (images[order] / 16.0).astype(np.float32), labels[order]
    cut = int(0.8 * len(images))
    return images[:cut], labels[:cut], images[cut:], labels[cut:]


def model(x: st.Tensor) -> st.Tensor:
    """Return the logits of a 64-128-128-10 network."""
    for layer, width in enumerate((HIDDEN, HIDDEN), start=1):
        w, b = st.param(f"w{layer}"), st.param(f"b{layer}", output=[width], init=0.0)
        x = st.relu(w @ x + b).named(f"hidden{layer}")
    w, b = st.param("w_out"), st.param("b_out", output=[CLASSES], init=0.0)
    return (w @ x + b).named("logits")


def train(leg: str, args: argparse.Namespace, progress: Progress) -> Result:
    """Train one leg and measure it."""
    train_x, train_y, test_x, test_y = digits(args.seed)
    result = Result(leg)
    prec = None if leg == "f32" else leg
    with st.Session(), st.Context(args.device, threads=args.threads) as ctx:
        x = st.placeholder("x", batch=[st.dynamic("n", max=BATCH)], output=[FEATURES])
        y = st.placeholder("y", batch=[st.dynamic("n", max=BATCH)], prec=st.i32)
        with st.master_weights(prec):
            logits = model(x)
        loss = st.cross_entropy(logits, y).named("loss")
        if prec is not None:
            st.PrecisionPolicy(activation=prec, grad=prec).apply(loss)
        steps = args.epochs * (len(train_x) // BATCH)
        schedule = st.LrSchedule("cosine", args.lr, steps, warmup_steps=min(20, steps))
        rate, set_rate = st.scheduled_learning_rate(schedule)
        scaler = None
        if leg == "f16":
            scaler = st.LossScaler(init_scale=args.init_scale)
            window, update = st.gated_scaled_update(scaler, loss, rate, momentum=0.9)
        else:
            update = st.sequence(st.grad_update(loss), st.sgd_update(loss, rate, momentum=0.9))
        step = ctx.compile(update, name=f"digits_{leg}")
        prediction = st.argmax(logits).named("prediction")
        predict = ctx.compile(prediction, name=f"predict_{leg}")
        result.compile_s = step.compile_seconds + predict.compile_seconds
        ctx.init_params(loss, seed=args.seed)

        times, rng, at = [], np.random.default_rng(args.seed), 0
        task = progress.add_task(f"training in {leg}", total=steps)
        for _ in range(args.epochs):
            order = rng.permutation(len(train_x))
            for start in range(0, len(order) - BATCH + 1, BATCH):
                batch = order[start : start + BATCH]
                set_rate(ctx, at)
                ctx.set_values(x, train_x[batch])
                ctx.set_values(y, train_y[batch])
                began = time.perf_counter()
                if scaler is None:
                    ctx.run(step)
                else:
                    st.gated_step(ctx, scaler=scaler, routine=step, window_checksum=window, check_interval=1, step=at)
                times.append(time.perf_counter() - began)
                result.losses.append(float(ctx.get_values(loss)))
                result.scales.append(1.0 if scaler is None else scaler.scale_value())
                at += 1
                progress.advance(task)

        correct = 0
        for start in range(0, len(test_x), BATCH):
            rows = slice(start, start + BATCH)
            ctx.set_values(x, test_x[rows])
            ctx.set_values(y, test_y[rows])
            ctx.run(predict)
            correct += int((ctx.get_values(prediction) == test_y[rows]).sum())
        result.accuracy = correct / len(test_x)
        result.step_us = statistics.median(times) * 1e6
        if scaler is not None:
            result.skipped, result.scale = scaler.skipped_steps, scaler.scale_value()
        report = ctx.memory_report()
        result.parameter_bytes = sum(ctx.get_values(p).nbytes for p in loss.params)
        result.activation_bytes = report.arena_bytes[step.name]
        result.stats = f"{ctx.stats.compiles} compiled, {ctx.stats.cache_hits} from the cache"
        if args.show_source:
            print(step.source)
    return result


def table(results: list[Result]) -> Table:
    """Return the final table."""
    out = Table(title="handwritten digits, 64-128-128-10 (step: median; sizes: bytes)")
    for column in ("leg", "test accuracy", "step", "compile", "skipped", "final scale", "parameters", "activations"):
        out.add_column(column, justify="left" if column == "leg" else "right", no_wrap=True)
    for r in results:
        out.add_row(
            r.leg,
            f"{r.accuracy:.2%}",
            f"{r.step_us:.0f} us",
            f"{r.compile_s:.2f} s",
            "-" if r.skipped is None else str(r.skipped),
            "-" if r.scale is None else f"2^{np.log2(r.scale):g}",
            f"{r.parameter_bytes:,}",
            f"{r.activation_bytes:,}",
        )
    return out


def plot(results: list[Result], path: str) -> None:
    """Draw loss and loss scale of every leg into a file."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        sys.exit('--plot needs matplotlib: pip install "stagedtensor[plot]"')
    figure = Figure(figsize=(9, 6))
    upper, lower = figure.subplots(2, 1, sharex=True)
    for r in results:
        upper.semilogy(r.losses, label=r.leg, linewidth=0.8)
        lower.semilogy(r.scales, label=r.leg, base=2)
    upper.set_ylabel("training loss")
    lower.set_ylabel("loss scale")
    lower.set_xlabel("step")
    upper.legend()
    figure.savefig(path, dpi=120)
    print(f"wrote {path}")


def main() -> None:
    """Parse arguments, train the legs, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--leg", choices=LEGS, action="append", help="train only this leg (may be repeated)")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--init-scale", type=float, default=2.0**24, help="first loss scale of the f16 leg")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--quick", action="store_true", help="a few epochs only")
    parser.add_argument("--show-source", action="store_true", help="print the generated C")
    parser.add_argument("--plot", nargs="?", const="digits.png", metavar="FILE", help="draw loss and loss scale")
    args = parser.parse_args()
    if args.quick:
        args.epochs = min(args.epochs, 6)
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        results = [train(leg, args, progress) for leg in args.leg or LEGS]
    console.print(table(results))
    for result in results:
        print(f"{result.leg}: {result.stats}")
    if args.plot:
        plot(results, args.plot)
    print(f"result: worst_accuracy {min(r.accuracy for r in results):.4f}")


if __name__ == "__main__":
    main()
