"""``bench``: arguments of the command, and what it prints and writes.

Without filters it measures every training workload and every kernel, in three precisions and on one and two threads,
with every library that is installed. ``--curves`` measures how costs grow instead. Nothing here is measured in CI.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from stagedtensor.benchmarks import curves, pages, results as found, runner
from stagedtensor.benchmarks.arm import ARMS
from stagedtensor.benchmarks.kernels import KERNELS
from stagedtensor.benchmarks.timing import Effort
from stagedtensor.benchmarks.training import available
from stagedtensor.benchmarks.workloads import PRECISIONS, WORKLOADS
from stagedtensor.runtime.thread_pool import available_cpus

ALL = (*WORKLOADS, *KERNELS)
GROUPS = {
    "training": tuple(WORKLOADS),
    "micro": tuple(KERNELS),
    "gemm": tuple(name for name, kernel in KERNELS.items() if kernel.kind == "gemm"),
}
QUICK = ("mlp-small", "mlp-mid", "gpt-mini", "conv", "gemm-512", "gemm-1024", "elementwise", "rows")
QUICK_EFFORT = Effort(rounds=7, block_s=0.04, leg_s=4.0)


def several(
    known: Sequence[str], what: str, groups: dict[str, tuple[str, ...]] | None = None
) -> Callable[[str], tuple[str, ...]]:
    """Return the reader of a comma-separated list of known names."""

    def read(text: str) -> tuple[str, ...]:
        chosen: list[str] = []
        for name in filter(None, (part.strip() for part in text.split(","))):
            if name in (groups or {}):
                chosen += (groups or {})[name]
            elif name in known:
                chosen.append(name)
            else:
                choices = ", ".join((*(groups or {}), *known))
                raise argparse.ArgumentTypeError(f"no {what} is called {name!r}; there are {choices}")
        if not chosen:
            raise argparse.ArgumentTypeError(f"expected names of {what}s with commas between, not {text!r}")
        return tuple(dict.fromkeys(chosen))

    return read


def thread_counts(text: str) -> tuple[int, ...]:
    """Read a comma-separated list of numbers of threads."""
    limit = available_cpus()
    try:
        counts = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected whole numbers with commas between, not {text!r}") from None
    for count in counts:
        if not 1 <= count <= limit:
            raise argparse.ArgumentTypeError(f"{count} threads: this machine offers 1 to {limit}")
    return counts


def installed_arms(text: str) -> tuple[str, ...]:
    """Read a comma-separated list of arms whose libraries are installed."""
    arms = several(ARMS, "arm")(text)
    missing = [arm for arm in arms if arm not in available(arms)]
    if missing:
        raise argparse.ArgumentTypeError(
            f'{", ".join(missing)}: the library is not installed; pip install "stagedtensor[bench]"'
        )
    return arms


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``bench``."""
    parser.add_argument("--quick", action="store_true", help="the main workloads on two threads, few rounds")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--no-memory", action="store_true", help="leave peak memory out")
    parser.add_argument(
        "--workloads", type=several(ALL, "workload", GROUPS), metavar="A,B", help=f"of {', '.join((*GROUPS, *ALL))}"
    )
    parser.add_argument(
        "--precisions",
        type=several(PRECISIONS, "precision"),
        default=PRECISIONS,
        metavar="A,B",
        help="of f32, bf16, f16",
    )
    parser.add_argument("--threads", type=thread_counts, metavar="1,2", help="numbers of threads (default 1,2)")
    parser.add_argument(
        "--arms", type=installed_arms, metavar="A,B", help=f"of {', '.join(ARMS)} (default: those installed)"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write rows and ratios as JSON")
    parser.add_argument(
        "--from",
        dest="saved",
        type=Path,
        action="append",
        default=[],
        metavar="PATH",
        help="measure nothing, take the rows that --json wrote; may be given again, later files win",
    )
    parser.add_argument(
        "--write-docs",
        type=Path,
        nargs="?",
        const=Path("docs"),
        metavar="DIR",
        help="write the page of results, or of curves, into this folder (default docs)",
    )
    parser.add_argument("--curves", action="store_true", help="measure how step time and compile time grow, instead")


def plan(arguments: argparse.Namespace) -> runner.Plan:
    """Return what the arguments ask for."""
    quick = arguments.quick
    arms = arguments.arms or tuple(available(ARMS))
    if arguments.no_compile:
        arms = tuple(arm for arm in arms if arm != "torch.compile")
    cpus = available_cpus()
    threads = arguments.threads or ((min(2, cpus),) if quick else tuple(sorted({1, min(2, cpus)})))
    return runner.Plan(
        workloads=arguments.workloads or (QUICK if quick else ALL),
        precisions=arguments.precisions,
        threads=threads,
        arms=runner.first_arms(arms),
        effort=QUICK_EFFORT if quick else Effort(),
        cached=not quick,
        memory=not arguments.no_memory,
        profile=not quick or arguments.write_docs is not None,
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the table, write what was asked for."""
    console = Console(highlight=False)
    if arguments.curves:
        return curves.run(arguments, console)
    if arguments.saved:
        measured = found.Results()
        for path in arguments.saved:
            measured.merge(found.load(path))
    else:

        def told(line: str) -> None:
            print(line, file=sys.stderr, flush=True)

        def kept(so_far: found.Results) -> None:
            if arguments.json:  # a long run that is broken off leaves what it had
                so_far.save(arguments.json)

        measured = runner.run(plan(arguments), told, kept)
    arms = runner.first_arms(tuple(dict.fromkeys(row.arm for row in measured.rows)))
    console.print(found.table(measured.rows, arms))
    if arguments.json:
        measured.save(arguments.json)
    if arguments.write_docs:
        path = arguments.write_docs / "benchmarks.md"
        path.write_text(pages.benchmarks(measured), encoding="utf-8")
        print(f"wrote {path}")
    return 0
