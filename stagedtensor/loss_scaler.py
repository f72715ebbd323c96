"""``LossScaler``: the dynamic loss scale, its schedule on the host and its two scalars on the device.

The schedule is torch-AMP's: multiply by ``growth_factor`` after ``growth_interval`` finite steps, by ``backoff_factor``
at once after a non-finite one; between clamps that keep both the scale and its reciprocal normal f32 numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import CheckpointError, ContextError
from .settings import is_integer, is_number
from .tensor import Tensor
from .terminals import host_scalar

if TYPE_CHECKING:
    from .runtime.context import Context

LOWEST, HIGHEST = 2.0**-126, 2.0**126
_VERSION = 1
_SETTINGS = ("init_scale", "growth_factor", "backoff_factor", "growth_interval", "min_scale", "max_scale")
_COUNTERS = ("steps", "skipped_steps", "floor_hits")


def _f32(value: float) -> float:
    return float(np.float32(value))


def _checked_number(name: str, value: Any) -> float:
    if not is_number(value):
        raise ValueError(f"LossScaler: {name} must be a number, got {value!r}")
    if (isinstance(value, int) and abs(value) > HIGHEST) or not math.isfinite(value):
        raise ValueError(f"LossScaler: {name} must be finite, got {value!r}")
    return float(value)


def _check_settings(
    init_scale: Any, growth_factor: Any, backoff_factor: Any, growth_interval: Any, min_scale: Any, max_scale: Any
) -> None:
    numbers = {
        "init_scale": init_scale,
        "growth_factor": growth_factor,
        "backoff_factor": backoff_factor,
        "min_scale": min_scale,
        "max_scale": max_scale,
    }
    for name, value in numbers.items():
        _checked_number(name, value)
    if not is_integer(growth_interval, 1):
        raise ValueError(f"LossScaler: growth_interval must be an integer of at least 1, got {growth_interval!r}")
    if growth_factor <= 1.0:
        raise ValueError(f"LossScaler: growth_factor must be above 1, got {growth_factor!r}")
    if not 0.0 < backoff_factor < 1.0:
        raise ValueError(f"LossScaler: backoff_factor must lie between 0 and 1, got {backoff_factor!r}")
    if not LOWEST <= min_scale <= init_scale <= max_scale <= HIGHEST:
        raise ValueError(
            f"LossScaler: expected 2^-126 <= min_scale <= init_scale <= max_scale <= 2^126, got min_scale={min_scale!r}, "
            f"init_scale={init_scale!r}, max_scale={max_scale!r}"
        )


@dataclass(frozen=True)
class Window:
    """The device cells of one gated routine since the last sample: sum of the flags (sticky), closed gates, runs."""

    flags: Tensor
    skips: Tensor
    runs: Tensor


class LossScaler:
    """A dynamic loss scale.

    ``scale`` seeds the backward pass, ``unscale`` (f32(1/scale)) multiplies gradients before the optimizer; both are
    host scalars, so a change compiles nothing. ``good_steps`` counts finite steps since the last change, ``steps`` and
    ``skipped_steps`` all of them, ``floor_hits`` the non-finite steps at ``min_scale``. A scaler belongs to the first
    context it is used with. Raises ValueError for settings out of range.
    """

    def __init__(
        self,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 200,
        *,
        min_scale: float = 2.0**-14,
        max_scale: float = 2.0**126,
    ) -> None:
        _check_settings(init_scale, growth_factor, backoff_factor, growth_interval, min_scale, max_scale)
        self.init_scale = _f32(init_scale)
        self.growth_factor = float(growth_factor)
        self.backoff_factor = float(backoff_factor)
        self.growth_interval = int(growth_interval)
        self.min_scale = _f32(min_scale)
        self.max_scale = _f32(max_scale)
        self.good_steps = 0
        self.steps = 0
        self.skipped_steps = 0
        self.floor_hits = 0
        self._scale = self.init_scale
        self.scale = host_scalar("loss_scale", self._scale)
        self.unscale = host_scalar("loss_unscale", _f32(1.0 / self._scale))
        self.windows: list[Window] = []
        """The windows of the gated routines built from this scaler, in the order they were built."""
        self._context: Context | None = None

    def __repr__(self) -> str:
        return (
            f"<loss scaler: scale {self._scale:g}, {self.good_steps} good steps since it changed, "
            f"{self.skipped_steps} of {self.steps} steps skipped>"
        )

    def scale_value(self) -> float:
        """The present scale, exactly what the device holds."""
        return self._scale

    def set_scale(self, ctx: Context, value: float) -> None:
        """Set the scale (finite, within the clamps); ``good_steps`` stays."""
        number = _checked_number("scale", value)
        if not self.min_scale <= number <= self.max_scale:
            raise ValueError(
                f"LossScaler: scale {number} is outside [min_scale, max_scale] = [{self.min_scale}, {self.max_scale}]"
            )
        self.bind(ctx)
        self._upload(ctx, number)

    def update(self, ctx: Context, grads_finite: bool) -> None:
        """Account for one step."""
        self.update_n(ctx, grads_finite, 1)

    def update_n(self, ctx: Context, grads_finite: bool, steps: int, skipped: int = 1) -> None:
        """Account for ``steps`` steps at once.

        All finite: ``good_steps`` grows and the scale with it, the remainder is kept. Otherwise the scale backs off
        once, whatever ``steps``, and ``skipped`` (1 .. steps) are added to ``skipped_steps``.
        """
        if not isinstance(grads_finite, bool | np.bool_):
            raise TypeError(f"LossScaler: grads_finite is a bool, not {grads_finite!r}")
        if not is_integer(steps, 1):
            raise ValueError(f"LossScaler: steps must be an integer of at least 1, got {steps!r}")
        if not grads_finite and not 1 <= skipped <= steps:
            raise ValueError(f"LossScaler: skipped must lie in 1 .. {steps} for a non-finite window, got {skipped!r}")
        self.bind(ctx)
        scale = self._scale
        if grads_finite:
            growths, self.good_steps = divmod(self.good_steps + int(steps), self.growth_interval)
            while growths and scale < self.max_scale:
                growths -= 1
                scale = _f32(min(scale * self.growth_factor, self.max_scale))
        else:
            self.good_steps = 0
            if scale <= self.min_scale:
                self.floor_hits += 1
            scale = _f32(max(scale * self.backoff_factor, self.min_scale))
            self.skipped_steps += int(skipped)
        self.steps += int(steps)
        if scale != self._scale:
            self._upload(ctx, scale)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, ready for JSON."""
        state: dict[str, Any] = {"version": _VERSION, "scale": self._scale, "good_steps": self.good_steps}
        return state | {name: getattr(self, name) for name in _SETTINGS + _COUNTERS}

    def load_state_dict(self, ctx: Context, state: Mapping[str, Any]) -> None:
        """Restore a state; everything is validated before anything changes. Raises CheckpointError naming the key."""
        checked = validated_state(state)
        self.bind(ctx)
        for name in ("good_steps", *_SETTINGS, *_COUNTERS):
            setattr(self, name, checked[name])
        self._upload(ctx, float(checked["scale"]))

    def bind(self, ctx: Context) -> None:
        """Take possession of ``ctx``, or refuse a second one."""
        self.check_context(ctx)
        self._context = ctx

    def check_context(self, ctx: Context) -> None:
        """Refuse a context that is not the one this scaler belongs to; changes nothing."""
        if not hasattr(ctx, "set_values"):
            raise TypeError(f"LossScaler: expected a context, not {type(ctx).__name__}")
        if self._context is not None and self._context is not ctx:
            raise ContextError(
                "this LossScaler already belongs to another context; its device scalars and its host state would "
                "diverge. Make one scaler per context (state_dict / load_state_dict carry the state over)"
            )

    def _upload(self, ctx: Context, scale: float) -> None:
        self._scale = _f32(scale)
        ctx.set_values(self.scale, self._scale)
        ctx.set_values(self.unscale, _f32(1.0 / self._scale))


def validated_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a state dict that a scaler can take. Raises CheckpointError naming the key."""
    if not isinstance(state, Mapping):
        raise CheckpointError(f"loss scaler state: expected what state_dict() returned, got {type(state).__name__}")
    expected = {"version", "scale", "good_steps", *_SETTINGS, *_COUNTERS}
    for key in sorted(expected - set(state)):
        raise CheckpointError(f"loss scaler state: key {key!r} is missing")
    for key in sorted(set(state) - expected):
        raise CheckpointError(f"loss scaler state: unknown key {key!r}")
    if state["version"] != _VERSION:
        raise CheckpointError(f"loss scaler state: version is {state['version']!r}, expected {_VERSION}")
    try:
        _check_settings(*(state[name] for name in _SETTINGS))
    except (ValueError, TypeError) as error:
        culprit = next((name for name in _SETTINGS if name in str(error)), "settings")
        raise CheckpointError(f"loss scaler state: {culprit!r} is refused: {error}") from None
    for key in ("good_steps", *_COUNTERS):
        value = state[key]
        if type(value) is not int or value < 0:
            raise CheckpointError(f"loss scaler state: {key!r} must be an integer of at least 0, got {value!r}")
    if state["good_steps"] >= state["growth_interval"]:
        raise CheckpointError(
            f"loss scaler state: 'good_steps' is {state['good_steps']}, at least growth_interval {state['growth_interval']}"
        )
    scale = state["scale"]
    if not (type(scale) in (int, float) and state["min_scale"] <= scale <= state["max_scale"]):
        raise CheckpointError(f"loss scaler state: 'scale' is {scale!r}, outside [min_scale, max_scale]")
    return dict(state)
