"""Learning-rate schedules: the host function and its setter on a host scalar."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .settings import is_integer
from .tensor import Tensor
from .terminals import host_scalar

if TYPE_CHECKING:
    from .runtime.context import Context

KINDS = ("constant", "cosine", "linear", "wsd")


@dataclass(frozen=True)
class LrSchedule:
    """A schedule over ``total_steps`` steps: linear warm-up, then a decay to ``base_lr * final_frac``.

    ``kind``: "constant", "cosine", "linear", or "wsd" (warm-up, stable, decay by 1 - sqrt over the last ``decay_frac``
    of the steps). Raises ValueError for settings out of range.
    """

    kind: Literal["constant", "cosine", "linear", "wsd"]
    base_lr: float
    total_steps: int
    warmup_steps: int = 0
    final_frac: float = 0.0
    decay_frac: float = 0.2

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"LrSchedule: unknown kind {self.kind!r}; expected one of {', '.join(KINDS)}")
        if not math.isfinite(self.base_lr):
            raise ValueError(f"LrSchedule: base_lr must be finite, got {self.base_lr}")
        for name, least in (("total_steps", 1), ("warmup_steps", 0)):
            value = getattr(self, name)
            if not is_integer(value, least):
                raise ValueError(f"LrSchedule: {name} must be an integer of at least {least}, got {value!r}")
        for name in ("final_frac", "decay_frac"):
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"LrSchedule: {name} must be in [0, 1], got {value!r}")


def lr_at(schedule: LrSchedule, step: int) -> float:
    """Return the learning rate of ``step`` (from 0).

    While step < warmup and step < total: base * (step + 1) / warmup. Then by kind, with
    r(s0) = clamp((step - s0) / (total - s0)), 1 where total <= s0.

    >>> lr_at(LrSchedule("cosine", 1.0, 25, 5, 0.1), 15)
    0.55
    """
    base, total, warmup = schedule.base_lr, schedule.total_steps, schedule.warmup_steps
    if step < warmup and step < total:
        return base * (step + 1) / warmup

    def ratio(start: int) -> float:
        return 1.0 if total <= start else min(1.0, max(0.0, (step - start) / (total - start)))

    low = base * schedule.final_frac
    if schedule.kind == "constant":
        return base
    if schedule.kind == "cosine":
        return low + (base - low) * (1.0 + math.cos(math.pi * ratio(warmup))) / 2.0
    if schedule.kind == "linear":
        return low + (base - low) * (1.0 - ratio(warmup))
    start = round((1.0 - schedule.decay_frac) * total)
    return base if step < start else low + (base - low) * (1.0 - math.sqrt(ratio(start)))


def scheduled_learning_rate(schedule: LrSchedule, label: str = "lr") -> tuple[Tensor, Callable[[Context, int], None]]:
    """Return a host scalar and a setter ``set_lr(ctx, step)`` that writes the schedule's value into it."""
    rate = host_scalar(label, lr_at(schedule, 0))

    def set_lr(ctx: Context, step: int) -> None:
        ctx.set_values(rate, lr_at(schedule, step))

    return rate, set_lr
