"""The tests of ``tests/numerics`` on a real GPU."""

from __future__ import annotations

import pytest

from stagedtensor.runtime.cuda import is_available
from tests.cuda.numeric_suite import put_on, suite

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not is_available(), reason="no GPU: these tests need CuPy, NVIDIA's driver and a device"),
]
globals().update(suite())


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every setting for the CPU means the GPU."""
    put_on("cuda", monkeypatch)
