"""Every CUDA source that the tests before this one generated compiles for sm_90: no warnings, no spills in contractions."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path

import pytest

from stagedtensor.runtime.kernel_cache import default_directory
from stagedtensor.runtime.nvrtc import compile_cuda
from tests.cuda.test_training import train
from tests.run.blocks import cache

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed"),
]


STARTED = time.time() - 1.0


def sources() -> list[Path]:
    """Those of this run: the cache marks an entry when it is used."""
    folders = (default_directory(), cache().directory)
    found = {path for folder in folders for path in folder.glob("*/source.cu")}
    return sorted(path for path in found if path.parent.stat().st_mtime >= STARTED)


def test_every_source_compiles_without_warnings() -> None:
    train("cuda-emulated", steps=1)
    found = sources()
    assert found
    complaints = []
    for path in found:
        text = path.read_text(encoding="utf-8")
        binary = compile_cuda(text, "sm_90")
        complaints += [f"{path}: {line}" for line in binary.warnings]
        complaints += [
            f"{path}: {item}" for item in binary.resources if item.spill_bytes or item.shared_bytes > 48 * 1024
        ]
    assert not complaints, "\n".join(complaints)
