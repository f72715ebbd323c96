"""Random programs give the same bits on the reference and compiled, fused and not, on every target."""

from __future__ import annotations

import re
from functools import partial

import numpy as np
import pytest

import stagedtensor as st
from tests.oracles.rounding import codes_of

from .random_programs import random_program
from .running import (
    FUSED,
    REFERENCE,
    UNFUSED,
    Program,
    Setting,
    assert_same_bits,
    assert_same_everywhere,
    run,
    runnable_targets,
)

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
        for cells in run(partial(random_program, seed, gradients=seed % 2 == 0), REFERENCE)
    ]
    assert sum(distinct) > 500


@pytest.mark.parametrize("seed", range(4))
def test_pointwise_programs(seed: int) -> None:
    check(seed, gradients=False)


@pytest.mark.parametrize("seed", range(3))
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


@pytest.mark.parametrize("seed", range(2))
def test_programs_with_reductions(seed: int) -> None:
    check_reductions(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200, 240))
def test_more_programs_with_reductions(seed: int) -> None:
    check_reductions(seed)


# -- sequences of assignments ----------------------------------------------------------------------------------------

STATES = (("p", "f32"), ("q", "bf16"), ("r", "f16"), ("s", "f8e5m2"))
TERMS = ("x", "y", "lr", "p", "q", "r", "s", "0.5", "2.0", "-0.25")
FORMS = (
    "{0} + {1}",
    "{0} - {1}",
    "{0} *. {1}",
    "relu({0}) + {1}",
    "maximum({0}, {1})",
    "where({0}, {1}, {2})",
    "tanh({0}) *. {1}",
    "{0}",
)
WRITES = ("=:", "=:", "=+", "=-", "=*", "=@^", "=@-")


def random_assignments(seed: int) -> Program:
    """Statements that read and update states of four formats in place, many times."""
    rng = np.random.default_rng(seed)
    named = {name: st.param(name, output=[83], prec=prec, trainable=False) for name, prec in STATES}
    feeds = [(tensor, rng.standard_normal(83).astype(np.float32)) for tensor in named.values()]
    x, y = st.placeholder("x", output=[83], prec="bf16"), st.placeholder("y", output=[83], prec="f32")
    feeds += [(x, rng.standard_normal(83).astype(np.float32)), (y, rng.standard_normal(83).astype(np.float32))]
    lines = []
    for _ in range(14):
        target = STATES[int(rng.integers(len(STATES)))][0]
        form = FORMS[int(rng.integers(len(FORMS)))]
        terms = [TERMS[int(rng.integers(len(TERMS)))] for _ in range(3)]
        terms[0] = TERMS[int(rng.integers(7))]  # a tensor
        lines.append(f"{target} {WRITES[int(rng.integers(len(WRITES)))]} {form.format(*terms)}")
    used = {**named, "x": x, "y": y, "lr": st.host_scalar("lr", 0.75)}
    mentioned = {name: t for name, t in used.items() if re.search(rf"\b{name}\b", "; ".join(lines))}
    kept = [tensor for name, tensor in named.items() if name in mentioned]
    comp = st.computation("; ".join(lines), **mentioned)
    return Program([(t, values) for t, values in feeds if any(t is other for other in mentioned.values())], kept, comp)


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(300, 340))])
def test_assignments_round_one_by_one(seed: int) -> None:
    assert_same_everywhere(lambda: random_assignments(seed), names=[f"seed {seed}, state {at}" for at in range(4)])


def test_a_value_outlives_the_change_of_what_it_was_made_of() -> None:
    """p is made of r, r changes, p is used again: one sweep, in which the first p must not be spelt with the new r."""
    cells = [np.random.default_rng(seed).standard_normal(41).astype(np.float32) for seed in range(3)]

    def build() -> Program:
        p, r = (st.param(name, output=[41], trainable=False) for name in "pr")
        y = st.placeholder("y", output=[41], prec="f32")
        comp = st.computation("p =: r *. 0.5; r =: y *. y; p =@^ y", p=p, r=r, y=y)
        return Program(list(zip((p, r, y), cells, strict=True)), [p, r], comp)

    p, r = assert_same_everywhere(build)
    assert_same_bits(p, np.maximum(cells[1] * np.float32(0.5), cells[2]), "p")
    assert_same_bits(r, cells[2] * cells[2], "r")
