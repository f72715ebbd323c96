"""Rows of results, their ratios, their JSON form and their table.

A row is one arm of one workload, precision and number of threads. A ratio is the time of the fastest peer over ours. It
exists where our row counts: its losses agree with torch's f32 trajectory within the gate and the loss moved. A peer's
row takes part where its loss moved.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from stagedtensor.benchmarks.arm import OURS

GATES = {"f32": 2e-3, "bf16": 4e-3, "f16": 2e-3}
"""Largest relative difference of the first losses from torch's in f32."""
GROUPS = ("gemm",)
"""Workloads of several sizes: their ratio is the geometric mean."""


@dataclass
class Row:
    """One measurement. Times are per step; ``None`` is what was not measured or does not exist.

    ``parity`` is the largest relative difference of the first losses from the reference (for kernels: of the cells from
    f64, relative to the largest). ``peak_mb`` is the memory of a fresh process at its peak less what the imports took,
    ``process_mb`` with them. ``share`` is a kernel's speed over the machine's peak.
    """

    workload: str
    precision: str
    threads: int
    arm: str
    median_ms: float | None = None
    p10_ms: float | None = None
    p90_ms: float | None = None
    compile_s: float | None = None
    cached_s: float | None = None
    peak_mb: float | None = None
    final_loss: float | None = None
    parity: float | None = None
    counts: bool = False
    noisy: bool = False
    process_mb: float | None = None
    share: float | None = None
    error: str | None = None

    @property
    def key(self) -> str:
        """The name that ratios have."""
        return f"{self.workload}/{self.precision}/{self.threads}"


@dataclass
class Results:
    """Everything that one run found: the machine, peaks by number of threads, rows, profiles by ratio key, costs of calls."""

    machine: dict[str, str] = field(default_factory=dict)
    peaks: dict[str, dict[str, Any]] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    profiles: dict[str, list[list[Any]]] = field(default_factory=dict)
    overheads: dict[str, float] = field(default_factory=dict)

    def ratios(self) -> dict[str, float]:
        """Return the time of the fastest peer over ours, by workload/precision/threads."""
        return ratios(self.rows)

    def save(self, path: Path) -> None:
        """Write everything as JSON."""
        content = {
            "machine": self.machine,
            "peaks": self.peaks,
            "rows": [asdict(row) for row in self.rows],
            "ratios": self.ratios(),
            "profiles": self.profiles,
            "overheads": self.overheads,
        }
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def merge(self, other: Results) -> None:
        """Take over another run's findings; its rows replace rows of the same arm."""
        self.machine |= other.machine
        self.peaks |= other.peaks
        self.profiles |= other.profiles
        self.overheads |= other.overheads
        fresh = {(row.key, row.arm) for row in other.rows}
        self.rows = [row for row in self.rows if (row.key, row.arm) not in fresh] + other.rows


def load(path: Path) -> Results:
    """Read what :meth:`Results.save` wrote."""
    content = json.loads(path.read_text(encoding="utf-8"))
    rows = [Row(**row) for row in content["rows"]]
    return Results(content["machine"], content["peaks"], rows, content["profiles"], content["overheads"])


def ratios(rows: Iterable[Row]) -> dict[str, float]:
    """Return the time of the fastest peer over ours, by workload/precision/threads, and the groups' geometric means."""
    by_key: dict[str, list[Row]] = {}
    for row in rows:
        by_key.setdefault(row.key, []).append(row)
    found: dict[str, float] = {}
    for key, members in by_key.items():
        mine = [row.median_ms for row in members if row.arm == OURS and row.counts and row.median_ms]
        peers = [row.median_ms for row in members if row.arm != OURS and row.counts and row.median_ms]
        if mine and peers:
            found[key] = round(min(peers) / mine[0], 3)
    for group in GROUPS:
        gathered: dict[str, list[float]] = {}
        for key, ratio in found.items():
            workload, precision, threads = key.split("/")
            if workload.startswith(f"{group}-"):
                gathered.setdefault(f"{group}/{precision}/{threads}", []).append(ratio)
        for key, members_ratios in gathered.items():
            found[key] = round(math.exp(sum(map(math.log, members_ratios)) / len(members_ratios)), 3)
    return found


def judged(losses: Sequence[float], reference: Sequence[float], precision: str, *, ours: bool) -> tuple[float, bool]:
    """Return the largest relative difference of the first losses, and whether the trajectory counts.

    Ours has to stay within the gate and to move; a peer has to move.
    """
    parity = max(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=False))
    moved = all(map(math.isfinite, losses)) and losses[-1] < losses[0]
    return parity, moved and (not ours or parity <= GATES[precision])


def table(rows: Sequence[Row], arms: Sequence[str]) -> Table:
    """Return one line per workload, precision and number of threads: medians of the arms, and the ratio."""
    shown = Table(title="milliseconds per step, median (p10 to p90)")
    for title in ("workload", "precision", "threads"):
        shown.add_column(title)
    for arm in arms:
        shown.add_column(arm, justify="right")
    shown.add_column("ratio", justify="right")
    found = ratios(rows)
    for key in dict.fromkeys(row.key for row in rows):
        by_arm = {row.arm: row for row in rows if row.key == key}
        ratio = found.get(key)
        shown.add_row(
            *key.split("/"),
            *(cell(by_arm.get(arm)) for arm in arms),
            "-" if ratio is None else f"{ratio:.2f}",
        )
    return shown


def cell(row: Row | None) -> str:
    """Return ``1.23 (1.2-1.4)``, marked where it was noisy or does not count."""
    if row is None:
        return "-"
    if row.median_ms is None or row.p10_ms is None or row.p90_ms is None:
        return "failed" if row.error else "-"
    marks = ("~" if row.noisy else "") + ("" if row.counts else "!")
    return f"{row.median_ms:.3g} ({row.p10_ms:.3g}-{row.p90_ms:.3g}){marks}"
