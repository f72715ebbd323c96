"""What is measured: one implementation of a workload, ready to run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

OURS = "ours"
PEERS = ("torch", "torch.compile", "jax")
ARMS = (OURS, *PEERS)


@dataclass
class Arm:
    """One implementation: ``step(i)`` trains on batch i, or computes once, and ``wait`` waits for what it returned.

    ``read`` waits as well and returns the loss of a step, or the whole result of a kernel. ``compile_s`` is None where
    nothing is compiled, ``cached_s`` where no cache was asked.
    """

    name: str
    step: Callable[[int], Any]
    wait: Callable[[Any], object]
    read: Callable[[Any], Any]
    close: Callable[[], None] = lambda: None
    compile_s: float | None = None
    cached_s: float | None = None


Maker = Callable[[], Arm]
