"""``bench``: training steps and kernels beside torch and JAX, and how costs grow; all of it is in ``benchmarks/``."""

from __future__ import annotations

from stagedtensor.benchmarks.command import configure, run

__all__ = ["configure", "run"]
