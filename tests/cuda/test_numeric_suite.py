"""The tests of ``tests/numerics``, run on the emulated device where they would compile for the CPU."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from tests.numerics import running

DEVICE = "cuda-emulated"
MODULES = (
    "accumulators",
    "composites",
    "conversions_device",
    "dynamic",
    "ops",
    "placement",
    "random_programs",
    "reductions",
    "round_trips",
    "rounding_guarantee",
)


def suite() -> dict[str, Any]:
    """Return the tests of the numeric suite by name."""
    found: dict[str, Any] = {}
    for part in MODULES:
        module = importlib.import_module(f"tests.numerics.test_{part}")
        for name, function in vars(module).items():
            if name.startswith("test_") and getattr(function, "__module__", "") == module.__name__:
                found[f"test_{part}_{name.removeprefix('test_')}"] = function
    return found


globals().update(suite())


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Every setting for the CPU means the emulated device."""
    if request.node.get_closest_marker("slow") is not None:
        pytest.skip("more of the same, and each program compiles for a second or two")
    monkeypatch.setattr(running, "COMPILED", DEVICE)
    for part in MODULES:
        module = importlib.import_module(f"tests.numerics.test_{part}")
        if hasattr(module, "DEVICES"):
            monkeypatch.setattr(module, "DEVICES", ("reference", DEVICE))
