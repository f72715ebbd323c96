"""The examples of networks, as a user starts them: ``--help``, and ``--quick`` with a figure in the last line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import stagedtensor as st

PACKAGE = Path(st.__file__).parents[1]
FOLDER = Path(__file__).parents[2] / "examples"

# what --quick must reach; a loss that is not learned stands at ln(classes) or above
BOUNDS = {
    "moons": ("worst_loss", 0.0, 0.1),
    "lenet": ("worst_accuracy", 0.93, 1.0),
    "names": ("validation_loss", 0.0, 2.3),
    "fsm": ("valid_transitions", 0.9, 1.0),
    "char_gpt": ("validation_loss", 0.0, 3.7),
    "minilm": ("bf16_cosine", 0.999, 1.0),
}

pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="not in a checkout: there are no examples")


def start(name: str, *arguments: str, cache: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(FOLDER / f"{name}.py"), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "STAGEDTENSOR_CACHE": str(cache), "PYTHONPATH": str(PACKAGE)},
        cwd=cache,
        timeout=600,
    )
    last = (done.stderr.strip().splitlines() or [""])[-1]
    if done.returncode and ("pip install" in last or "PackageNotFoundError" in last):
        pytest.skip(last)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", BOUNDS)
def test_help(name: str, tmp_path: Path) -> None:
    assert "--quick" in start(name, "--help", cache=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", BOUNDS)
def test_quick(name: str, tmp_path: Path) -> None:
    figure, least, greatest = BOUNDS[name]
    last = start(name, "--quick", cache=tmp_path).splitlines()[-1].split()
    assert last[:2] == ["result:", figure]
    assert least <= float(last[2]) <= greatest


@pytest.mark.parametrize("name", BOUNDS)
def test_it_is_short(name: str) -> None:
    assert len((FOLDER / f"{name}.py").read_text().splitlines()) < 100
