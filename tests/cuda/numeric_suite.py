"""The tests of ``tests/numerics`` for another device than the CPU: all of them by name, and what puts them there."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest

from tests.numerics import running

PARTS = (
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


def modules() -> dict[str, ModuleType]:
    """Return the modules of the suite by their part of the name."""
    return {part: importlib.import_module(f"tests.numerics.test_{part}") for part in PARTS}


def suite() -> dict[str, Any]:
    """Return the tests of the suite by name."""
    found: dict[str, Any] = {}
    for part, module in modules().items():
        for name, function in vars(module).items():
            if name.startswith("test_") and getattr(function, "__module__", "") == module.__name__:
                found[f"test_{part}_{name.removeprefix('test_')}"] = function
    return found


def put_on(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every setting for the CPU mean ``device``, until the test ends."""
    monkeypatch.setattr(running, "COMPILED", device)
    for module in modules().values():
        if hasattr(module, "DEVICES"):
            monkeypatch.setattr(module, "DEVICES", ("reference", device))
