"""Every CUDA source that the tests before this one generated compiles for sm_90: no warnings, no spills, shared memory in limits."""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor

import pytest

from stagedtensor.runtime.nvrtc import compile_cuda
from stagedtensor.runtime.thread_pool import available_cpus
from tests.cuda.running import SOURCES
from tests.cuda.test_training import train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed"),
]


def test_every_source_compiles_without_warnings() -> None:
    train("cuda-emulated", steps=1)
    assert SOURCES
    complaints: list[str] = []
    with ThreadPoolExecutor(available_cpus()) as pool:  # the compiler does not hold the interpreter's lock
        binaries = list(pool.map(compile_cuda, SOURCES))
    for binary in binaries:
        assert binary.arch == "sm_90"
        complaints += binary.warnings
        complaints += [str(item) for item in binary.resources if item.spill_bytes or item.shared_bytes > 48 * 1024]
    assert not complaints, "\n".join(complaints)
