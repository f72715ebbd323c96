"""The export example as a user starts it: it trains, writes two modules, and their results are those of the package."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import stagedtensor as st

PACKAGE = Path(st.__file__).parents[1]
EXAMPLE = Path(__file__).parents[2] / "examples" / "export_digits.py"

pytestmark = pytest.mark.skipif(not EXAMPLE.exists(), reason="not in a checkout: there is no example")


def start(*arguments: str, folder: Path) -> str:
    pytest.importorskip("sklearn")
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *arguments],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(PACKAGE), *filter(None, [os.environ.get("PYTHONPATH")])]),
        },
        cwd=folder,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_trains_exports_and_agrees_with_the_interpreter(tmp_path: Path) -> None:
    pytest.importorskip("jaxlib")
    output = start("--steps", "120", folder=tmp_path)
    losses = [float(number) for number in re.findall(r"^step \d+: loss ([\d.]+)$", output, flags=re.MULTILINE)]
    assert losses[1] < 0.5 * losses[0]
    (difference,) = re.findall(r"in the StableHLO interpreter: (\S+)$", output, flags=re.MULTILINE)
    assert float(difference) < 0.05, "logits of ten units or so, an f16 body"

    forward = (tmp_path / "digits.mlir").read_text()
    step = (tmp_path / "digits_step.mlir").read_text()
    roles = ["boundary:body:enter", "boundary:body:exit"]
    assert [re.findall(r'loc\("(boundary:[^"]*)"', forward), forward.count("twin:")] == [roles, 2]
    assert set(re.findall(r'loc\("(boundary:[^"]*)"', step)) == {*roles, *(f"{role}:grad" for role in roles)}


def test_the_help_text(tmp_path: Path) -> None:
    assert "--quick" in start("--help", folder=tmp_path)
