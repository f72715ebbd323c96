"""The digits example end to end, as a user starts it: every leg learns, and a second start compiles nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import stagedtensor as st

PACKAGE = Path(st.__file__).parents[1]
EXAMPLE = Path(__file__).parents[2] / "examples" / "digits.py"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not EXAMPLE.exists(), reason="not in a checkout: there is no example"),
]


def start(*arguments: str, cache: Path, folder: Path) -> str:
    """Run the example in ``folder`` with a kernel cache of its own; return what it printed."""
    pytest.importorskip("sklearn")
    # COLUMNS: the table is as wide as it likes, so that a row is one line
    environment = {**os.environ, "STAGEDTENSOR_CACHE": str(cache), "COLUMNS": "200", "PYTHONPATH": str(PACKAGE)}
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *arguments],
        capture_output=True,
        text=True,
        env=environment,
        cwd=folder,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def legs(output: str) -> dict[str, list[str]]:
    """Return the cells of the final table by leg."""
    rows = [[cell.strip() for cell in line.strip("│ ").split("│")] for line in output.splitlines() if "│" in line]
    return {row[0]: row[1:] for row in rows if row[0] in ("f32", "bf16", "f16")}


def compiled(output: str) -> dict[str, tuple[str, str]]:
    """Return how many routines each leg compiled, and how many came from the cache."""
    found = re.findall(r"^(\w+): (\d+) compiled, (\d+) from the cache$", output, flags=re.MULTILINE)
    return {leg: (fresh, cached) for leg, fresh, cached in found}


def test_every_leg_learns_and_a_second_start_compiles_nothing(tmp_path: Path) -> None:
    output = start(cache=tmp_path / "kernels", folder=tmp_path)
    first = legs(output)
    accuracy = {leg: float(cells[0].rstrip("%")) for leg, cells in first.items()}
    assert set(accuracy) == {"f32", "bf16", "f16"}
    assert min(accuracy.values()) >= 97
    assert max(accuracy.values()) - min(accuracy.values()) <= 1
    assert 3 <= int(first["f16"][3]) <= 12, "a scale of 2^24 is backed off in a few steps"
    assert compiled(output) == {leg: ("2", "0") for leg in first}

    second = start("--quick", cache=tmp_path / "kernels", folder=tmp_path)
    assert compiled(second) == {leg: ("0", "2") for leg in first}


def test_source_and_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    arguments = ("--quick", "--leg", "f16", "--show-source", "--plot", "digits.png")
    output = start(*arguments, cache=tmp_path / "kernels", folder=tmp_path)
    assert "void digits_f16" in output
    assert (tmp_path / "digits.png").read_bytes().startswith(b"\x89PNG")
