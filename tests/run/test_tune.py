"""Tuned routines: the same bits with every choice, no winner that is not clearly faster, no side effects, found only
once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor import nn
from stagedtensor.codegen.choices import DEFAULT, Choices
from stagedtensor.codegen.schedule import slab
from stagedtensor.errors import ContextError
from stagedtensor.runtime import cpu, trial
from stagedtensor.runtime.device import Executable
from stagedtensor.runtime.target import detect
from stagedtensor.runtime.tune import CANDIDATES, DEFAULT_SECONDS, Pairs, Tuning, allowed_seconds, loads, search
from tests.numerics.running import runnable_targets

LENGTH, WIDTH = 40, 96


@dataclass
class Step:
    """A training step with contractions, dropout and perhaps attention, bound to a context."""

    folder: Path
    prec: str = "f32"
    attention: bool = False
    loss: st.Tensor = field(init=False)
    update: st.Comp = field(init=False)
    ctx: st.Context = field(init=False)

    def __post_init__(self) -> None:
        with st.Session():
            x = st.placeholder("x", batch=[2, LENGTH], output=[WIDTH])
            step = st.host_scalar("step", 3, st.i32)
            with st.master_weights(self.prec):
                hidden = st.relu(st.param("w1", output=[160]) @ x + st.param("b1", init=0.0))
                hidden = nn.dropout(0.2, step=step)(hidden)
                mixed = st.param("w2", output=[64]) @ hidden
                if self.attention:
                    mixed = nn.multi_head_attention(width=64, heads=2, causal=True)(mixed)
                self.loss = st.mean(mixed * mixed)
            if self.prec != "f32":
                st.PrecisionPolicy(activation=self.prec, grad=self.prec).apply(self.loss)
            self.update = st.sequence(st.grad_update(self.loss), st.sgd_update(self.loss, 0.05, momentum=0.9))
            self.ctx = st.Context("cpu", cache_dir=self.folder, threads=2)
            self.ctx.init_params(self.loss, seed=1)
            self.ctx.set_values(x, np.random.default_rng(0).standard_normal((2, LENGTH, WIDTH)))

    def compile(self, tune: bool | float = True) -> st.Routine:
        return self.ctx.compile(self.update, name="step", tune=tune)

    def after(self, steps: int, tune: bool | float = True) -> list[bytes]:
        """The parameters after some steps."""
        routine = self.compile(tune)
        for _ in range(steps):
            self.ctx.run(routine)
        return [self.ctx.get_values(param).tobytes() for param in self.loss.params]


def stand_in(faster: Callable[[Executable], bool]) -> Callable[[Executable, Callable[[], None], int], float]:
    """A clock that says half the time for what is ``faster``; the routine runs all the same."""

    def seconds_of(executable: Executable, launch: Callable[[], None], runs: int) -> float:
        launch()
        return 1e-3 if faster(executable) else 2e-3

    return seconds_of


# -- the search ---------------------------------------------------------------------------------------------------


class Clock:
    """Seconds that pass only where a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def searched(
    cost: Callable[[Choices], float],
    *,
    one_thread: bool | None = False,
    seconds: float = 30.0,
    build_seconds: float = 0.0,
) -> tuple[Tuning, list[Choices]]:
    """Search where a candidate takes ``cost`` of its choices; also return what was built."""
    clock, built = Clock(), list[Choices]()

    def build(choices: Choices) -> Choices:
        clock.now += build_seconds
        built.append(choices)
        return choices

    def compare(default: Choices, candidate: Choices, _: float) -> Pairs:
        return [(cost(default), cost(candidate))] * 5

    def known(candidate: Choices, others: object) -> bool:
        return False

    return search(build, known, compare, seconds=seconds, one_thread=one_thread, clock=clock), built


def test_the_default_wins_ties_and_what_is_noise() -> None:
    for share in (1.0, 0.985, 1.2):

        def cost(choices: Choices) -> float:
            return 1.0 if choices == DEFAULT else share

        tuning, built = searched(cost)
        assert tuning.chosen == DEFAULT
        assert tuning.name == "the default"
        assert len(built) == 1 + len(CANDIDATES) == 1 + len(tuning.trials)


def test_a_faster_candidate_is_taken() -> None:
    tuning, _ = searched(lambda choices: 1.0 if choices.slabs else 0.9)
    assert tuning.chosen == replace(DEFAULT, slabs=False)
    assert [trial.name for trial in tuning.trials if trial.seconds < trial.default_seconds] == ["no slabs"]


def test_winners_are_tried_together() -> None:
    def cost(choices: Choices) -> float:
        return (1.0 if choices.slabs else 0.9) * (1.0 if choices.panels else 0.8)

    tuning, _ = searched(cost)
    assert tuning.chosen == replace(DEFAULT, slabs=False, panels=False)
    assert tuning.name == "no slabs and operands in place"


def test_winners_that_do_not_go_together_stay_apart() -> None:
    def cost(choices: Choices) -> float:
        return {(True, True): 1.0, (False, True): 0.9, (True, False): 0.8, (False, False): 2.0}[
            choices.slabs, choices.panels
        ]

    tuning, _ = searched(cost)
    assert tuning.chosen == replace(DEFAULT, panels=False)


@pytest.mark.parametrize(("one_thread", "name", "chosen"), [(False, "one thread", True), (True, "all threads", False)])
def test_threads_are_one_of_the_choices(one_thread: bool, name: str, chosen: bool) -> None:
    tuning, _ = searched(lambda choices: 1.0 if choices.one_thread is None else 0.5, one_thread=one_thread)
    assert (tuning.name, tuning.chosen.one_thread) == (name, chosen)
    alone, _ = searched(lambda choices: 1.0, one_thread=None)
    assert all(item.choices.one_thread is None for item in alone.trials)


def test_a_winner_that_loses_when_measured_again_is_not_taken() -> None:
    calls: list[int] = []

    def compare(default: Choices, candidate: Choices, seconds: float) -> Pairs:
        calls.append(1)
        return [(1.0, 0.5 if len(calls) == 1 else 1.0)] * 5

    tuning = search(lambda choices: choices, lambda *_: False, compare, seconds=30.0, one_thread=False, clock=Clock())
    assert tuning.chosen == DEFAULT
    assert len(calls) == len(CANDIDATES) + 1


def test_the_search_ends_in_time_and_says_what_it_left_out() -> None:
    tuning, built = searched(lambda choices: 1.0 if choices.slabs else 0.5, seconds=10.0, build_seconds=3.0)
    assert tuning.seconds <= 10.0
    assert len(built) == 3  # the default and two candidates; a third might take longer than what is left
    assert tuning.chosen == replace(DEFAULT, slabs=False)
    assert len(tuning.trials) + len(tuning.left_out) == len(CANDIDATES)
    assert "no time for: operands in place" in str(tuning)


def test_a_search_survives_being_written() -> None:
    tuning, _ = searched(lambda choices: 1.0 if choices.panels else 0.5)
    assert loads(tuning.dumps()) == tuning
    with pytest.raises((ValueError, TypeError, KeyError)):
        loads(tuning.dumps().replace('"slabs": true', '"slabs": "yes"'))


def test_seconds() -> None:
    assert [allowed_seconds(given) for given in (True, False, 5, 0.5)] == [DEFAULT_SECONDS, None, 5.0, 0.5]
    for wrong in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="positive number of seconds"):
            allowed_seconds(wrong)
    with pytest.raises(TypeError, match="a number of seconds, not 'fast'"):
        allowed_seconds("fast")


# -- routines -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prec", "attention"), [("f32", False), ("bf16", False), pytest.param("bf16", True, marks=pytest.mark.slow)]
)
def test_no_choice_changes_a_bit(prec: str, attention: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab, "LEAST_BYTES", 1024)
    expected = Step(tmp_path, prec, attention).after(2, tune=False)
    sources = {Step(tmp_path, prec, attention).compile(False).source}
    every = Choices(slabs=False, panels=False, tile_vectors=2, tile_rows=14, cache_bytes=1 << 12, one_thread=True)
    single = [
        replace(DEFAULT, **({"one_thread": True} if "one_thread" in changes else changes)) for _, changes in CANDIDATES
    ]
    for choices in (*single, every):
        found = Tuning(choices, "given", (), (), 0.0)
        monkeypatch.setattr(cpu, "search", lambda *_, found=found, **__: found)
        step = Step(tmp_path, prec, attention)
        assert step.after(2) == expected, choices
        sources.add(step.compile().source)
    if prec == "f32" or detect().name in runnable_targets():  # a matrix unit leaves products of bf16 no choice
        assert len(sources) >= (5 if attention else 3)


def test_the_choice_of_a_stand_in_clock_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(tmp_path)
    default = step.compile(False)
    monkeypatch.setattr(trial, "seconds_of", stand_in(lambda built: built.source != default.source))
    routine = step.compile()
    assert routine is not default
    assert routine.tuning is not None
    assert routine.tuning.chosen != DEFAULT
    assert routine.source != default.source
    assert f"tuned: {routine.tuning.name}" in str(routine)
    assert default.tuning is None


def test_nothing_in_the_context_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "seconds_of", stand_in(lambda built: built.limit == 1))
    plain, tuned = Step(tmp_path), Step(tmp_path)
    plain.compile(False)
    tuned.compile(True)
    for one, other in zip(plain.loss.params, tuned.loss.params, strict=True):
        np.testing.assert_array_equal(plain.ctx.get_values(one), tuned.ctx.get_values(other))
    assert (tuned.ctx.stats.runs, tuned.ctx.stats.kernel_launches) == (0, 0)
    assert plain.after(3, tune=False) == tuned.after(3)


def test_a_routine_that_runs_is_tuned_on_copies_of_its_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "seconds_of", stand_in(lambda built: False))
    plain, tuned = Step(tmp_path), Step(tmp_path)
    plain.after(1, tune=False)
    tuned.after(1, tune=False)
    assert plain.after(2, tune=False) == tuned.after(2, tune=True)


def test_inputs_may_still_be_without_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "seconds_of", stand_in(lambda built: False))
    with st.Session():
        rows = st.dynamic("rows", max=32)
        ctx = st.Context("cpu", cache_dir=tmp_path)
        y = st.placeholder("y", batch=[rows], output=[16])
        total = st.param("w", output=[8]) @ y
        routine = ctx.compile(total, tune=True)
        with pytest.raises(ContextError, match="uninitialised"):
            ctx.run(routine)


def test_a_winner_is_found_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "generator_version", lambda: "one")
    monkeypatch.setattr(trial, "seconds_of", stand_in(lambda built: built.limit == 1))
    first = Step(tmp_path).compile()
    monkeypatch.setattr(cpu, "search", None)  # a second search would fail
    again = Step(tmp_path).compile()
    assert again.tuning == first.tuning
    assert again.source == first.source
    with pytest.raises(TypeError):
        Step(tmp_path).compile(7.0)  # other seconds, another search


def test_devices_without_choices_take_the_word(tmp_path: Path) -> None:
    with st.Session():
        total = st.sum(st.param("w", output=[8]) * 2.0)
        assert st.Context("reference").compile(total, tune=True).tuning is None
        with pytest.raises(ValueError, match="positive number of seconds"):
            st.Context("cpu", cache_dir=tmp_path).compile(total, tune=0)
