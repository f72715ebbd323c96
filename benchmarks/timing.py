"""Timing of arms that take turns in one process.

In: arms that are ready to run. Out: milliseconds per step of each, one sample per round. Before an arm's block the
process pauses, so that spinning workers of the arm before go to sleep, and runs a few steps that do not count. Rounds
in which other processes used the machine are left out where enough quiet ones remain.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from stagedtensor.benchmarks.arm import Arm

PAUSE_S = 0.004
FOREIGN_SHARE = 0.08
"""The share of the machine that other processes may use in a round that counts as quiet."""
QUIET_ROUNDS = 3


@dataclass(frozen=True)
class Effort:
    """How long to measure: at most ``rounds`` blocks of ``block_s`` seconds per arm, ``leg_s`` seconds for all arms."""

    rounds: int = 15
    block_s: float = 0.06
    leg_s: float = 20.0
    at_least: int = 3


@dataclass
class Samples:
    """Milliseconds per step, one entry per round; ``noisy`` where other processes disturbed the rounds that count."""

    ms: list[float] = field(default_factory=list)
    noisy: bool = False

    def quantile(self, share: float) -> float:
        """Return the sample below which ``share`` of the samples lie, interpolated."""
        ordered = sorted(self.ms)
        at = share * (len(ordered) - 1)
        low = int(at)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


class Machine:
    """Seconds of processor time used since the last look, by everybody and by this process."""

    def __init__(self) -> None:
        self.last = self._now()

    def _now(self) -> tuple[float, float, float]:
        try:
            with open("/proc/stat", encoding="ascii") as stat:
                fields = [int(cell) for cell in stat.readline().split()[1:9]]
        except OSError:  # no Linux: nothing is known of others
            return time.perf_counter(), 0.0, 0.0
        user, nice, system, _, _, irq, soft, steal = fields
        everybody = (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")
        times = os.times()
        return time.perf_counter(), everybody, times.user + times.system + times.children_user + times.children_system

    def foreign_share(self) -> float:
        """Return the share of the machine that other processes used since the last call."""
        before, self.last = self.last, self._now()
        wall, everybody, own = (now - then for now, then in zip(self.last, before, strict=True))
        return max(0.0, everybody - own) / max(wall, 1e-9) / (os.cpu_count() or 1)


def timed_block(arm: Arm, steps: int, warm: int, at: int) -> float:
    """Return seconds per step of one block."""
    time.sleep(PAUSE_S)
    handle = None
    for number in range(warm):
        handle = arm.step(at + number)
    if warm:
        arm.wait(handle)
    began = time.perf_counter()
    for number in range(warm, warm + steps):
        handle = arm.step(at + number)
    arm.wait(handle)
    return (time.perf_counter() - began) / steps


def take_turns(arms: Sequence[Arm], effort: Effort, first: int = 0) -> dict[str, Samples]:
    """Time the arms in rounds, each round in another order; ``first`` is the batch to go on with."""
    estimates: dict[str, float] = {}
    for arm in arms:
        timed_block(arm, 1, 1, first)
        estimates[arm.name] = min(timed_block(arm, 1, 1, first + 2) for _ in range(2))
    at = dict.fromkeys(estimates, first + 6)
    machine, began = Machine(), time.perf_counter()
    rounds: list[tuple[float, dict[str, float]]] = []
    for number in range(effort.rounds):
        if number >= effort.at_least and time.perf_counter() - began > effort.leg_s:
            break
        taken = {}
        turn = number % len(arms)
        machine.foreign_share()
        for arm in (*arms[turn:], *arms[:turn]):
            step_s = estimates[arm.name]
            steps = max(1, min(1000, round(effort.block_s / step_s)))
            warm = max(1, min(20, steps // 4))
            taken[arm.name] = timed_block(arm, steps, warm, at[arm.name])
            at[arm.name] += steps + warm
            estimates[arm.name] = min(step_s, taken[arm.name])
        rounds.append((machine.foreign_share(), taken))
    return chosen(rounds)


def chosen(rounds: Sequence[tuple[float, dict[str, float]]]) -> dict[str, Samples]:
    """Return the samples of the quiet rounds, or of all where too few are quiet."""
    quiet = [taken for foreign, taken in rounds if foreign <= FOREIGN_SHARE]
    noisy = len(quiet) < min(QUIET_ROUNDS, len(rounds))
    used = [taken for _, taken in rounds] if noisy else quiet
    return {name: Samples([taken[name] * 1e3 for taken in used], noisy) for name in used[0]}
