"""The tests of ``tests/numerics``, run on the emulated device where they would compile for the CPU."""

from __future__ import annotations

import pytest

from tests.cuda.numeric_suite import put_on, suite

globals().update(suite())


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every setting for the CPU means the emulated device."""
    put_on("cuda-emulated", monkeypatch)


def test_the_suite_is_here() -> None:
    assert len(suite()) > 50
