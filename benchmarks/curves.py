"""How costs grow: step time against batch, width, depth and threads, compile time against the size of the graph.

Measures our side alone, f32 and bf16 taking turns, and writes one page with a chart and a table per curve. Compile times are
of fresh kernel caches.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

import stagedtensor as st
from stagedtensor.benchmarks import ours, runner
from stagedtensor.benchmarks.chart import line_chart
from stagedtensor.benchmarks.pages import NOTICE, markdown, number
from stagedtensor.benchmarks.timing import Effort, take_turns
from stagedtensor.benchmarks.workloads import Mlp, start
from stagedtensor.runtime.thread_pool import available_cpus

PRECISIONS = ("f32", "bf16")
EFFORT = Effort(rounds=9, block_s=0.04, leg_s=3.0)
CLASSES = 10
GRAPH_SIZES = (10, 30, 100, 300, 1000, 2000)


@dataclass
class Curve:
    """One curve: what grows, what is counted, and the points of each series as (x, y)."""

    name: str
    title: str
    x_label: str
    y_label: str
    series: dict[str, list[tuple[float, float]]]


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


def graph(nodes: int) -> st.Tensor:
    """Return the last of about ``nodes`` nodes in layers of four: product, sum, tanh, residual."""
    h = st.placeholder("x", batch=[16], output=[16])
    for at in range(max(1, nodes // 4)):
        h = h + st.tanh(st.param(f"w{at}", output=[16]) @ h + st.param(f"b{at}", init=0.0))
    return h


def compile_times(sizes: Sequence[int]) -> dict[str, list[tuple[float, float]]]:
    """Return seconds to compile a forward pass, cold and from the cache, by number of nodes."""
    series: dict[str, list[tuple[float, float]]] = {"cold": [], "from the cache": []}
    with fresh_cache():
        for size in sizes:
            for line in series.values():
                with st.Session(), st.Context("cpu") as ctx:
                    y = graph(size)
                    began = time.perf_counter()
                    ctx.compile(y, name=f"graph{size}")
                    line.append((size, time.perf_counter() - began))
            told = ", ".join(f"{line[-1][1]:.3g} s" for line in series.values())
            print(f"graph of {size} nodes: {told}", file=sys.stderr)
    return series


def measure() -> list[Curve]:
    """Measure every curve."""
    cpus = available_cpus()
    two, unit = min(2, cpus), "ms per step"
    with fresh_cache():
        return [
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
            Curve(
                "graph", "Compile time against the size of the graph", "nodes", "seconds", compile_times(GRAPH_SIZES)
            ),
        ]  # fmt: skip


def thread_steps(cpus: int) -> list[int]:
    """Return 1, 2, 4, ... up to the number of processors."""
    return [count for count in (1, 2, 4, 8, 16, 32, 64) if count < cpus] + [cpus]


def page(curves: Sequence[Curve], machine: dict[str, str]) -> str:
    """Return the page; its charts lie beside it in ``figures/``."""
    parts = [
        NOTICE.replace("bench --write-docs", "bench --curves --write-docs"),
        "# How costs grow\n",
        f"Our side alone, on {machine['processor']} with {machine['threads']} threads, {machine['date']}. Medians of "
        "blocks, f32 and bf16 taking turns.\nA step is forward, backward and SGD with momentum. Measured and written by\n"
        "`python -m stagedtensor bench --curves --write-docs docs`. How it compares: [Benchmarks](benchmarks.md).\n",
    ]
    for curve in curves:
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
    return "\n".join(parts)


def slope(line: Sequence[tuple[float, float]], at: int) -> str:
    """Return the exponent with which y grew with x since the point before."""
    if at == 0:
        return ""
    (x0, y0), (x1, y1) = line[at - 1], line[at]
    return f"{math.log(y1 / y0) / math.log(x1 / x0):.2f}"


def save(curves: Sequence[Curve], machine: dict[str, str], path: Path) -> None:
    """Write the curves as JSON."""
    content = {"machine": machine, "curves": [asdict(curve) for curve in curves]}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def load(path: Path) -> tuple[list[Curve], dict[str, str]]:
    """Read what :func:`save` wrote."""
    content = json.loads(path.read_text(encoding="utf-8"))
    return [Curve(**curve) for curve in content["curves"]], content["machine"]


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Measure the curves (or take saved ones), print their tables, write what was asked for."""
    if arguments.saved:
        curves, machine = load(arguments.saved[-1])
    else:
        curves, machine = measure(), runner.machine()
    text = page(curves, machine)
    console.print(text, markup=False)
    if arguments.json:
        save(curves, machine, arguments.json)
    if arguments.write_docs:
        write(curves, text, arguments.write_docs)
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
