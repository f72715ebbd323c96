"""How costs grow: step time against batch, width, depth and threads, compile time against the size of the graph.

Measures our side alone, f32 and bf16 taking turns, and writes one page with a chart and a table per curve. Compile
times are of fresh kernel caches.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from stagedtensor.benchmarks import compile_time, ours, runner
from stagedtensor.benchmarks.chart import line_chart
from stagedtensor.benchmarks.pages import NOTICE, markdown, number
from stagedtensor.benchmarks.timing import Effort, take_turns
from stagedtensor.benchmarks.workloads import Mlp, start
from stagedtensor.runtime.thread_pool import available_cpus

PRECISIONS = ("f32", "bf16")
EFFORT = Effort(rounds=9, block_s=0.04, leg_s=3.0)
CLASSES = 10


@dataclass
class Curve:
    """One curve: what grows, what is counted, and the points of each series as (x, y)."""

    name: str
    title: str
    x_label: str
    y_label: str
    series: dict[str, list[tuple[float, float]]]


@dataclass
class Growth:
    """All curves, the programs that were compiled, and the machine."""

    curves: list[Curve]
    compiles: list[compile_time.Row]
    machine: dict[str, str]


def mlp(width: int, depth: int, batch: int) -> Mlp:
    """Return a network of ``depth`` layers of one width and a last one of 10."""
    return Mlp(f"{width}x{depth}x{batch}", (*(width,) * (depth + 1), CLASSES), batch, rate=0.01)


def step_times(
    values: Sequence[int], network: Callable[[int], Mlp], threads: Callable[[int], int]
) -> dict[str, list[tuple[float, float]]]:
    """Return milliseconds per step by precision."""
    series: dict[str, list[tuple[float, float]]] = {precision: [] for precision in PRECISIONS}
    for value in values:
        workload = network(value)
        begin = start(workload)
        arms = []
        for precision in PRECISIONS:
            arm = ours.train_arm(workload, precision, begin, threads=threads(value), cached=False)
            arm.name = precision
            arms.append(arm)
        for precision, samples in take_turns(arms, EFFORT).items():
            series[precision].append((value, samples.quantile(0.5)))
        for arm in arms:
            arm.close()
        print(f"{workload.text}: {', '.join(f'{line[-1][1]:.3g} ms' for line in series.values())}", file=sys.stderr)
    return series


@contextmanager
def fresh_cache() -> Iterator[None]:
    """Keep compiled kernels in a new folder."""
    before = os.environ.get("STAGEDTENSOR_CACHE")
    with tempfile.TemporaryDirectory(prefix="stagedtensor-bench-") as folder:
        os.environ["STAGEDTENSOR_CACHE"] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ["STAGEDTENSOR_CACHE"]
            else:
                os.environ["STAGEDTENSOR_CACHE"] = before


def compile_curve(found: Sequence[compile_time.Row]) -> Curve:
    """Return seconds to compile against the number of nodes."""
    # the smallest step has some thirty nodes, whatever was asked for
    graphs = list({row.nodes: row for row in found if row.name.endswith(" nodes")}.values())
    series = {
        "cold": [(float(row.nodes), row.cold_s) for row in graphs],
        "C compilers (CPU)": [(float(row.nodes), row.compiler_s) for row in graphs],
        "Python (CPU)": [(float(row.nodes), row.solve_s + row.key_s + row.generate_s) for row in graphs],
        "from the cache": [(float(row.nodes), row.cached_s) for row in graphs],
    }
    return Curve("graph", "Compile time of a training step against its nodes", "nodes", "seconds", series)


def measure() -> Growth:
    """Measure every curve."""
    cpus = available_cpus()
    two, unit = min(2, cpus), "ms per step"
    with fresh_cache():
        curves = [
            Curve(
                "batch", f"Step time against the batch: MLP 256-256-256-10, {two} threads", "batch", unit,
                step_times([8 << at for at in range(8)], lambda batch: mlp(256, 2, batch), lambda _: two),
            ),
            Curve(
                "width", f"Step time against the width: two hidden layers, batch 64, {two} threads", "width", unit,
                step_times([32 << at for at in range(7)], lambda width: mlp(width, 2, 64), lambda _: two),
            ),
            Curve(
                "depth", f"Step time against the depth: width 128, batch 64, {two} threads", "layers", unit,
                step_times([1 << at for at in range(6)], lambda depth: mlp(128, depth, 64), lambda _: two),
            ),
            Curve(
                "threads", "Step time against the threads: MLP 1024-1024-1024-10, batch 256", "threads", unit,
                step_times(thread_steps(cpus), lambda _: mlp(1024, 2, 256), lambda threads: threads),
            ),
        ]  # fmt: skip
    print("compile times", file=sys.stderr, flush=True)
    compiles = compile_time.rows()
    return Growth([*curves, compile_curve(compiles)], compiles, runner.machine())


def thread_steps(cpus: int) -> list[int]:
    """Return 1, 2, 4, ... up to the number of processors."""
    return [count for count in (1, 2, 4, 8, 16, 32, 64) if count < cpus] + [cpus]


def page(growth: Growth) -> str:
    """Return the page; its charts lie beside it in ``figures/``."""
    machine = growth.machine
    parts = [
        NOTICE.replace("bench --write-docs", "bench --curves --write-docs"),
        "# How costs grow\n",
        f"Our side alone, on {machine['processor']} with {machine['threads']} threads, {machine['date']}. Medians of "
        "blocks, f32 and bf16 taking turns.\nA step is forward, backward and SGD with momentum. Measured and written by\n"
        "`python -m stagedtensor bench --curves --write-docs docs`. How it compares: [Benchmarks](benchmarks.md).\n",
    ]
    for curve in growth.curves:
        names, first = list(curve.series), next(iter(curve.series.values()))
        lines = [
            (f"{x:g}", *(number(line[at][1]) for line in curve.series.values()), slope(first, at))
            for at, (x, _) in enumerate(first)
        ]
        parts += [
            f"## {curve.title}\n",
            f"![{curve.title}](figures/{curve.name}.svg)\n",
            markdown(
                (curve.x_label, *(f"{name}, {curve.y_label}:" for name in names), f"exponent, {names[0]}:"), lines
            ),
        ]
    parts.append(
        "The exponent is of the growth since the line before: 1 is linear, 2 quadratic, -1 a perfect division of the work.\n"
    )
    if growth.compiles:
        parts.append(compile_table(growth.compiles))
    return "\n".join(parts)


def seconds(row: compile_time.Row) -> tuple[float, ...]:
    """Return the parts of a compile and its sums, in the order of the table."""
    return row.solve_s, row.generate_s, row.compiler_s, row.cold_s, row.cached_s


def compile_table(found: Sequence[compile_time.Row]) -> str:
    """Return where the compile time of each program goes."""
    head = (
        "training step",
        "nodes:",
        "kernels:",
        "lines of C:",
        "shapes and precisions:",
        "generating:",
        "C compiler:",
    )
    lines = [(row.name, *map(str, (row.nodes, row.kernels, row.lines)), *map(number, seconds(row))) for row in found]
    return (
        "## Where compile time goes\n\nSeconds: of the processors for the parts (C compilers run side by side), by the clock for "
        "a cold compile and one from the cache.\n\n"
    ) + markdown((*head, "cold:", "from the cache:"), lines)


def slope(line: Sequence[tuple[float, float]], at: int) -> str:
    """Return the exponent with which y grew with x since the point before."""
    if at == 0:
        return ""
    (x0, y0), (x1, y1) = line[at - 1], line[at]
    return f"{math.log(y1 / y0) / math.log(x1 / x0):.2f}"


def save(growth: Growth, path: Path) -> None:
    """Write everything as JSON."""
    path.write_text(json.dumps(asdict(growth), indent=1) + "\n", encoding="utf-8")


def load(path: Path) -> Growth:
    """Read what :func:`save` wrote."""
    content = json.loads(path.read_text(encoding="utf-8"))
    compiles = [compile_time.Row(**row) for row in content["compiles"]]
    return Growth([Curve(**curve) for curve in content["curves"]], compiles, content["machine"])


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Measure the curves (or take saved ones), print their tables, write what was asked for."""
    growth = load(arguments.saved[-1]) if arguments.saved else measure()
    text = page(growth)
    console.print(text, markup=False)
    if arguments.json:
        save(growth, arguments.json)
    if arguments.write_docs:
        write(growth.curves, text, arguments.write_docs)
    return 0


def write(curves: Sequence[Curve], text: str, folder: Path) -> None:
    """Write the page and its charts into a folder of documents."""
    figures = folder / "figures"
    figures.mkdir(exist_ok=True)
    for curve in curves:
        chart = line_chart(curve.title, curve.x_label, curve.y_label, curve.series)
        (figures / f"{curve.name}.svg").write_text(chart, encoding="utf-8")
    (folder / "growth.md").write_text(text, encoding="utf-8")
    print(f"wrote {folder / 'growth.md'} and {len(curves)} charts")
