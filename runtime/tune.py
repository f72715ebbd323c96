"""The search behind ``ctx.compile(..., tune=True)``: other choices of schedule, timed against the cost model's.

In: a function that builds the routine with given choices, one that times two builds in alternating runs, and seconds.
Out: :class:`Tuning`: the choices to take, and what was measured. The default is one of the candidates and wins unless
another is faster by more than noise, so a tuned routine is never slower but by chance. Every candidate gives the same
bits.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from stagedtensor.codegen.choices import DEFAULT, Choices

Built = TypeVar("Built")
Pairs = Sequence[tuple[float, float]]
"""Seconds of one run of the default and of a candidate, measured one after the other."""

DEFAULT_SECONDS = 30.0
_GAIN = 0.98
"""A candidate must take less than this share of the default's time; anything else counts as a tie."""
_PAIRS_WON = 2 / 3

CANDIDATES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("{threads}", {"one_thread": None}),
    ("no slabs", {"slabs": False}),
    ("operands in place", {"panels": False}),
    ("tiles of 2 vectors and up to 14 rows", {"tile_vectors": 2, "tile_rows": 14}),
    ("tiles of up to 4 vectors", {"tile_vectors": 4}),
    ("blocks for half the cache", {"cache_bytes": DEFAULT.cache_bytes // 2}),
    ("blocks for twice the cache", {"cache_bytes": DEFAULT.cache_bytes * 2}),
)
"""What is tried, in order: name, and what it changes.

The first runs on one thread what by default runs on all, or the reverse.
"""


@dataclass(frozen=True)
class Trial:
    """One candidate: its median and the default's in the same alternating runs, in seconds per run."""

    name: str
    choices: Choices
    seconds: float
    default_seconds: float


@dataclass(frozen=True)
class Tuning:
    """What a search found: the choices taken, the trials in order, what there was no time for, and the seconds it took."""

    chosen: Choices
    name: str
    trials: tuple[Trial, ...]
    left_out: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        lines = [f"tuned: {self.name}, found in {self.seconds:.1f} s"]
        lines += [
            f"  {trial.name}: {trial.seconds * 1e3:.4g} ms, default {trial.default_seconds * 1e3:.4g} ms"
            for trial in self.trials
        ]
        if self.left_out:
            lines.append(f"  no time for: {', '.join(self.left_out)}")
        return "\n".join(lines)

    def dumps(self) -> str:
        """Return all of it as one text, for :func:`loads`."""
        return json.dumps(asdict(self))


def loads(text: str) -> Tuning:
    """Return what :meth:`Tuning.dumps` wrote; ValueError, KeyError or TypeError for anything else."""
    raw: dict[str, Any] = json.loads(text)
    trials = tuple(Trial(**item | {"choices": Choices.loads(item["choices"])}) for item in raw["trials"])
    read = {"chosen": Choices.loads(raw["chosen"]), "trials": trials, "left_out": tuple(raw["left_out"])}
    return Tuning(**raw | read)


def allowed_seconds(tune: object) -> float | None:
    """Return the seconds that ``tune`` allows, None for no tuning; ValueError or TypeError for what is neither."""
    if tune is True:
        return DEFAULT_SECONDS
    if tune is False:
        return None
    if not isinstance(tune, int | float):
        raise TypeError(f"tune is True, False or a number of seconds, not {tune!r}")
    if not 0 < tune < math.inf:
        raise ValueError(f"tune is a positive number of seconds, not {tune!r}")
    return float(tune)


def search(
    build: Callable[[Choices], Built],
    is_known: Callable[[Built, Sequence[Built]], bool],
    compare: Callable[[Built, Built, float], Pairs],
    *,
    seconds: float,
    one_thread: bool | None,
    clock: Callable[[], float] = time.perf_counter,
) -> Tuning:
    """Try the candidates one by one, then the winners together, then the best against the default once more.

    ``is_known`` tells whether a build does the same as one of several others. ``compare`` times default and candidate
    within so many seconds, and returns no pairs where these are too few. ``one_thread`` says how the default runs; None
    where there is one thread anyway. A candidate is begun only while the time that the longest so far took is left.
    """
    started = clock()

    def left() -> float:
        return seconds - (clock() - started)

    default = build(DEFAULT)
    tried = [default]
    longest = clock() - started
    found: list[tuple[Trial, Built]] = []
    trials: list[Trial] = []
    left_out: list[str] = []

    def attempt(name: str, choices: Choices) -> None:
        nonlocal longest
        if left() <= longest:
            left_out.append(name)
            return
        begun = clock()
        candidate = build(choices)
        if is_known(candidate, tried):
            return
        tried.append(candidate)
        pairs = compare(default, candidate, left() / 3)
        longest = max(longest, clock() - begun)
        if not pairs:
            left_out.append(name)
            return
        trials.append(_trial(name, choices, pairs))
        if _wins(pairs):
            found.append((trials[-1], candidate))

    for name, changes in CANDIDATES:
        if "one_thread" in changes:
            if one_thread is None:
                continue
            name, changes = "all threads" if one_thread else "one thread", {"one_thread": not one_thread}
        attempt(name, replace(DEFAULT, **changes))
    if len(found) > 1:
        attempt(" and ".join(trial.name for trial, _ in found), _together(trial.choices for trial, _ in found))
    while found:
        best = min(found, key=lambda item: item[0].seconds / item[0].default_seconds)
        pairs = compare(default, best[1], max(0.0, left()))
        if not pairs or _wins(pairs):
            return Tuning(best[0].choices, best[0].name, tuple(trials), tuple(left_out), clock() - started)
        found.remove(best)
    return Tuning(DEFAULT, "the default", tuple(trials), tuple(left_out), clock() - started)


def _together(choices: Iterable[Choices]) -> Choices:
    """All that the choices change; where two change the same, the later one."""
    plain = DEFAULT.dumps()
    changed: dict[str, Any] = {}
    for item in choices:
        changed |= {name: value for name, value in item.dumps().items() if value != plain[name]}
    return replace(DEFAULT, **changed)


def _trial(name: str, choices: Choices, pairs: Pairs) -> Trial:
    return Trial(name, choices, statistics.median(b for _, b in pairs), statistics.median(a for a, _ in pairs))


def _wins(pairs: Pairs) -> bool:
    """Whether the candidate is faster by more than noise: in the median, and in most of the pairs."""
    won = sum(candidate < default for default, candidate in pairs)
    trial = _trial("", DEFAULT, pairs)
    return trial.seconds < _GAIN * trial.default_seconds and won >= _PAIRS_WON * len(pairs)
