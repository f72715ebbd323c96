"""Random programs give the same bits on the reference and compiled, fused and not, on every target."""

from __future__ import annotations

import numpy as np
import pytest

from tests.oracles.rounding import codes_of

from .random_programs import random_program
from .running import FUSED, REFERENCE, UNFUSED, Setting, assert_same_bits, assert_same_everywhere, run, runnable_targets

PLAIN = Setting(target=runnable_targets()[0])


def check(seed: int, *, gradients: bool) -> None:
    assert_same_everywhere(
        lambda: random_program(seed, gradients=gradients),
        (REFERENCE, UNFUSED if seed % 2 else PLAIN, FUSED),
        [f"seed {seed}, gradients {gradients}, result {at}" for at in range(40)],
    )


def test_the_programs_compute_something() -> None:
    distinct = [
        np.unique(codes_of(cells)).size
        for seed in range(6)
        for cells in run(lambda seed=seed: random_program(seed, gradients=seed % 2 == 0), REFERENCE)  # type: ignore[misc]
    ]
    assert sum(distinct) > 500


@pytest.mark.parametrize("seed", range(6))
def test_pointwise_programs(seed: int) -> None:
    check(seed, gradients=False)


@pytest.mark.parametrize("seed", range(6))
def test_gradients_of_pointwise_programs(seed: int) -> None:
    check(seed, gradients=True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 160))
def test_more_pointwise_programs(seed: int) -> None:
    check(seed, gradients=seed % 2 == 0)


def check_reductions(seed: int) -> None:
    """Compiled code, fused or not, with one thread or three: one order of addition, whatever the placement."""
    first = run(lambda: random_program(seed, reductions=True, gradients=seed % 2 == 0), UNFUSED)
    for setting in (FUSED, Setting(threads=3)):
        found = run(lambda: random_program(seed, reductions=True, gradients=seed % 2 == 0), setting)
        for at, (cells, expected) in enumerate(zip(found, first, strict=True)):
            assert_same_bits(cells, expected, f"seed {seed}, result {at} on {setting}")


@pytest.mark.parametrize("seed", range(4))
def test_programs_with_reductions(seed: int) -> None:
    check_reductions(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200, 240))
def test_more_programs_with_reductions(seed: int) -> None:
    check_reductions(seed)
