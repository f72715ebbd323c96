"""Where compile time goes: solving, generating code, the C compiler; and what is left of it with the kernel cache.

In: networks of growing size and the training workloads. Out: a :class:`Row` each. Everything is measured on the CPU
device with a cache folder of its own. The parts are processor time, which neighbours on the machine disturb less than
the clock.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import stagedtensor as st
from stagedtensor.benchmarks.ours import model
from stagedtensor.benchmarks.workloads import PRECISIONS, WORKLOADS
from stagedtensor.codegen.fingerprint import fingerprint
from stagedtensor.program import Comp, solve_program
from stagedtensor.runtime import linking
from stagedtensor.runtime.cpu_generation import generate_cpu
from stagedtensor.runtime.target import detect

GRAPHS = (10, 30, 100, 300, 1000, 2000)
"""Numbers of nodes, gradients included."""
TARGETS = {"mlp-small": 2.0, "mlp-mid": 2.0, "gpt-mini": 6.0, "gpt2_mini": 6.0}
"""Seconds that a cold compile may take."""
CACHED_TARGET = 0.05
"""Seconds that a compile of an MLP may take from the cache."""


@dataclass(frozen=True)
class Row:
    """One program: its size, and seconds of compiling it.

    ``cold_s`` is ``ctx.compile`` with an empty cache, ``cached_s`` in a new session and context with a full one: by the
    clock. The rest is processor time: ``solve_s``, ``key_s`` (the fingerprint) and ``generate_s`` (Python up to the C
    text), ``compiler_s`` of all C compilers, ``cached_cpu_s`` of the compile from the cache.
    """

    name: str
    nodes: int
    kernels: int
    lines: int
    solve_s: float
    key_s: float
    generate_s: float
    compiler_s: float
    cold_s: float
    cached_s: float
    cached_cpu_s: float

    @property
    def python_ms_per_node(self) -> float:
        """Milliseconds of Python per node: constant where the work grows with the graph."""
        return 1e3 * (self.solve_s + self.generate_s) / self.nodes


def layers(nodes: int) -> Comp:
    """Return the training step of a relu network with about ``nodes`` nodes; all parameters take their inputs from use."""
    x = st.placeholder("x", batch=[16], output=[16])
    y = st.placeholder("y", batch=[16], prec=st.i32)
    h = x
    for at in range(max(0, nodes - 31) // 12):
        h = st.relu(st.param(f"w{at}", output=[16]) @ h + st.param(f"b{at}", init=0.0))
    return _step(st.cross_entropy(st.param("w", output=[4]) @ h + st.param("b", init=0.0), y))


def workload(name: str, precision: str) -> Comp:
    """Return the training step of a workload."""
    return _step(model(WORKLOADS[name], precision)[2])


def _step(loss: st.Tensor) -> Comp:
    return st.sequence(st.grad_update(loss), st.sgd_update(loss, st.host_scalar("rate", 0.05), momentum=0.9))


def measure(name: str, build: Callable[[], Comp], *, repeats: int = 3) -> Row:
    """Measure one program; all but the cold compile are medians of ``repeats``."""
    with tempfile.TemporaryDirectory(prefix="stagedtensor-bench-") as folder:
        cold_s, _, compiler_s, routine = _compiled(build, folder)
        cached = [_compiled(build, folder)[:2] for _ in range(repeats)]
    parts: list[tuple[float, ...]] = []
    nodes = 0
    for _ in range(repeats):
        with st.Session():
            comp = build()
            times = [time.process_time()]
            solved = solve_program(comp, "step")
            times.append(time.process_time())
            program = linking.for_codegen(solved, frozenset())
            fingerprint(program)
            times.append(time.process_time())
            generate_cpu(program, detect(), st.Numerics(), {}, fusion=True, check=False)
            times.append(time.process_time())
            parts.append(tuple(after - before for before, after in pairwise(times)))
            nodes = len(solved.nodes)
    solve_s, key_s, generate_s = (statistics.median(part) for part in zip(*parts, strict=True))
    return Row(
        name,
        nodes,
        len(routine.kernels),
        routine.source.count("\n"),
        solve_s,
        key_s,
        generate_s,
        compiler_s,
        cold_s,
        statistics.median(clock for clock, _ in cached),
        statistics.median(processor for _, processor in cached),
    )


def _compiled(build: Callable[[], Comp], folder: str) -> tuple[float, float, float, st.Routine]:
    """Return seconds by the clock, of this process and of its children, and the routine."""
    with st.Session():
        comp, ctx = build(), st.Context("cpu", cache_dir=folder)
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        clock, processor = time.perf_counter(), time.process_time()
        routine = ctx.compile(comp, name="step")
        clock, processor = time.perf_counter() - clock, time.process_time() - processor
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        compilers = after.ru_utime + after.ru_stime - children.ru_utime - children.ru_stime
        return clock, processor, compilers, routine


def rows(
    graphs: Iterable[int] = GRAPHS,
    workloads: Iterable[str] = tuple(TARGETS),
    precisions: Sequence[str] = PRECISIONS[:1],
    *,
    repeats: int = 3,
) -> list[Row]:
    """Measure graphs of these numbers of nodes, and these workloads in these precisions."""
    measure("warm-up", partial(layers, 10), repeats=1)  # the thread pool, the modules of the compiler
    found = [measure(f"{size} nodes", partial(layers, size), repeats=repeats) for size in graphs]
    found += [
        measure(f"{name} {precision}", partial(workload, name, precision), repeats=repeats)
        for name in workloads
        for precision in precisions
    ]
    return found


def table(found: Sequence[Row]) -> str:
    """Return the rows as text."""
    names = ("program", "nodes", "kernels", "lines", "solve", "key", "generate", "C", "cold", "cached", "cached CPU")
    lines = [f"{names[0]:<18}" + "".join(f"{name:>11}" for name in (*names[1:], "ms/node"))]
    for row in found:
        cells = [f"{row.nodes}", f"{row.kernels}", f"{row.lines}"]
        seconds = (row.solve_s, row.key_s, row.generate_s, row.compiler_s, row.cold_s, row.cached_s, row.cached_cpu_s)
        cells += [f"{value:.3f}" for value in seconds] + [f"{row.python_ms_per_node:.2f}"]
        line = f"{row.name:<18}" + "".join(f"{cell:>11}" for cell in cells)
        target = TARGETS.get(row.name.split()[0])
        if target is not None:
            line += f"  cold {row.cold_s / target:.2f} of its target"
            if row.name.startswith("mlp"):
                line += f", cached {row.cached_s / CACHED_TARGET:.2f}"
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graphs", type=lambda text: tuple(map(int, text.split(","))), default=GRAPHS)
    parser.add_argument("--workloads", type=lambda text: tuple(filter(None, text.split(","))), default=tuple(TARGETS))
    parser.add_argument("--precisions", type=lambda text: tuple(text.split(",")), default=PRECISIONS[:1])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    print(table(rows(args.graphs, args.workloads, args.precisions, repeats=args.repeats)))


if __name__ == "__main__":
    main()
