"""The scaler's schedule on the host, its saved state, and the settings it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as some

import stagedtensor as st


class Uploads:
    """Takes the place of a context: remembers what was written."""

    def __init__(self) -> None:
        self.values: dict[st.Tensor, float] = {}
        self.count = 0

    def set_values(self, t: st.Tensor, value: float) -> None:
        self.values[t] = value
        self.count += 1


def scaler(*args: Any, **options: Any) -> tuple[st.LossScaler, Any]:
    with st.Session():
        return st.LossScaler(*args, **options), Uploads()


COUNTERS = ("good_steps", "steps", "skipped_steps", "floor_hits")


def state(s: st.LossScaler) -> tuple[float, ...]:
    return (s.scale_value(), *(getattr(s, name) for name in COUNTERS))


# -- the schedule -----------------------------------------------------------------------------------------------------


def test_growth_keeps_the_remainder() -> None:
    at_once, ctx = scaler(4.0, growth_interval=3)
    at_once.update_n(ctx, True, 7)
    one_by_one, other = scaler(4.0, growth_interval=3)
    for _ in range(7):
        one_by_one.update(other, True)
    assert state(at_once) == state(one_by_one) == (16.0, 1, 7, 0, 0)


@settings(max_examples=200, deadline=None)
@given(
    n=some.integers(1, 400),
    interval=some.integers(1, 50),
    good=some.integers(0, 49),
    exponent=some.integers(-14, 126),
    ceiling=some.integers(0, 126),
)
def test_n_steps_are_n_times_one_step(n: int, interval: int, good: int, exponent: int, ceiling: int) -> None:
    limits = {"max_scale": 2.0 ** max(exponent, ceiling)}
    results = []
    for chunks in ([n], [1] * n):
        one, ctx = scaler(2.0**exponent, growth_interval=interval, **limits)
        one.good_steps = good % interval
        for chunk in chunks:
            one.update_n(ctx, True, chunk)
        results.append(state(one))
    assert results[0] == results[1]


def test_a_bad_window_backs_off_once() -> None:
    one, ctx = scaler(1024.0, growth_interval=4)
    one.update_n(ctx, True, 3)
    one.update_n(ctx, False, 10, skipped=4)
    assert state(one) == (512.0, 0, 13, 4, 0)


def test_144_overflows_stop_at_the_floor() -> None:
    one, ctx = scaler()
    for at in range(144):
        one.update(ctx, False)
        assert (one.scale_value() == 2.0**-14) is (at >= 29)
    assert state(one) == (2.0**-14, 0, 144, 144, 114)
    assert ctx.values[one.unscale] == 2.0**14


def test_the_clamps_need_not_be_powers_of_the_factors() -> None:
    one, ctx = scaler(10.0, growth_interval=1, min_scale=3.0, max_scale=25.0)
    seen = []
    for finite in (True, True, True, False, False, False, False):
        one.update(ctx, finite)
        seen.append(one.scale_value())
    assert seen == [20.0, 25.0, 25.0, 12.5, 6.25, 3.125, 3.0]
    assert one.floor_hits == 0
    huge, ctx = scaler(2.0**126, growth_factor=1e300, growth_interval=1)
    huge.update(ctx, True)
    assert huge.scale_value() == 2.0**126


def test_scales_are_f32_and_uploaded_when_they_change() -> None:
    one, ctx = scaler(0.1, growth_factor=3.0, growth_interval=2)
    assert one.scale_value() == float(np.float32(0.1))
    one.update(ctx, True)
    assert ctx.count == 0
    one.update(ctx, True)
    tripled = float(np.float32(float(np.float32(0.1)) * 3.0))
    assert one.scale_value() == tripled == ctx.values[one.scale]
    assert ctx.values[one.unscale] == float(np.float32(1.0 / tripled))


def test_set_scale_leaves_the_counters() -> None:
    one, ctx = scaler(8.0, growth_interval=5)
    one.update_n(ctx, True, 3)
    one.set_scale(ctx, 2.0**20)
    assert state(one) == (2.0**20, 3, 3, 0, 0)
    assert ctx.values == {one.scale: 2.0**20, one.unscale: 2.0**-20}


# -- saving -----------------------------------------------------------------------------------------------------------


def test_every_field_round_trips() -> None:
    one, ctx = scaler(1024.0, 4.0, 0.25, 2, min_scale=0.5, max_scale=4096.0)
    for finite in (True, True, False, True):
        one.update(ctx, finite)
    saved = json.loads(json.dumps(one.state_dict()))
    fresh, other = scaler()
    fresh.load_state_dict(other, saved)
    assert fresh.state_dict() == one.state_dict() == saved
    assert other.values == {fresh.scale: 1024.0, fresh.unscale: 1 / 1024}
    for finite in (True, False, False, False, False, False, False, True):
        one.update(ctx, finite)
        fresh.update(other, finite)
        assert state(one) == state(fresh)
    assert fresh.floor_hits == 0 < fresh.skipped_steps


BAD_STATES: list[tuple[str, Any]] = [
    ("version", 2),
    ("version", None),
    ("scale", 0.0),
    ("scale", float("nan")),
    ("scale", 2.0**127),
    ("scale", "1"),
    ("good_steps", -1),
    ("good_steps", 200),
    ("good_steps", True),
    ("growth_factor", 1.0),
    ("backoff_factor", 1.0),
    ("growth_interval", 0),
    ("init_scale", float("inf")),
    ("min_scale", 0.0),
    ("max_scale", 2.0**127),
    ("steps", 1.5),
    ("skipped_steps", -3),
    ("floor_hits", "none"),
]


@pytest.mark.parametrize(("key", "value"), BAD_STATES)
def test_bad_states_are_refused_by_name(key: str, value: Any) -> None:
    one, ctx = scaler()
    before = one.state_dict()
    with pytest.raises(st.errors.CheckpointError, match=key):
        one.load_state_dict(ctx, {**before, key: value})
    assert one.state_dict() == before
    assert ctx.count == 0


def test_missing_and_unknown_keys() -> None:
    one, ctx = scaler()
    complete = one.state_dict()
    for key in complete:
        with pytest.raises(st.errors.CheckpointError, match=f"{key!r} is missing"):
            one.load_state_dict(ctx, {name: value for name, value in complete.items() if name != key})
    with pytest.raises(st.errors.CheckpointError, match="'extra'"):
        one.load_state_dict(ctx, {**complete, "extra": 1})


# -- refusals ---------------------------------------------------------------------------------------------------------

BAD_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"growth_factor": 1.0}, "growth_factor"),
    ({"growth_factor": float("inf")}, "growth_factor"),
    ({"backoff_factor": 0.0}, "backoff_factor"),
    ({"backoff_factor": 1.0}, "backoff_factor"),
    ({"growth_interval": 0}, "growth_interval"),
    ({"growth_interval": 2.0}, "growth_interval"),
    ({"growth_interval": True}, "growth_interval"),
    ({"init_scale": float("nan")}, "init_scale"),
    ({"init_scale": "8"}, "init_scale"),
    ({"init_scale": 10**400}, "init_scale"),
    ({"init_scale": 2.0**-15}, "min_scale"),
    ({"min_scale": 2.0**-127}, "min_scale"),
    ({"max_scale": 2.0**127}, "max_scale"),
    ({"max_scale": 1.0}, "max_scale"),
]


@pytest.mark.parametrize(("bad", "message"), BAD_SETTINGS)
def test_settings_out_of_range(bad: dict[str, Any], message: str) -> None:
    with st.Session(), pytest.raises(ValueError, match=message):
        st.LossScaler(**bad)


@pytest.mark.parametrize("value", [2.0**-15, 2.0**127, float("inf"), float("nan"), 0, -1.0])
def test_set_scale_outside_the_clamps(value: float) -> None:
    one, ctx = scaler()
    with pytest.raises(ValueError, match="scale"):
        one.set_scale(ctx, value)
    assert state(one) == (65536.0, 0, 0, 0, 0)
    assert ctx.count == 0


def test_update_n_out_of_range() -> None:
    one, ctx = scaler()
    for steps in (0, -1, True, 1.5):
        with pytest.raises(ValueError, match="steps"):
            one.update_n(ctx, True, steps)  # type: ignore[arg-type]
    for skipped in (0, 4, -1):
        with pytest.raises(ValueError, match="skipped"):
            one.update_n(ctx, False, 3, skipped)
    assert state(one) == (65536.0, 0, 0, 0, 0)


def test_a_scaler_belongs_to_one_context() -> None:
    one, ctx = scaler()
    one.update(ctx, False)
    other: Any = Uploads()
    acts: list[Callable[[], None]] = [
        lambda: one.update(other, True),
        lambda: one.set_scale(other, 8.0),
        lambda: one.load_state_dict(other, one.state_dict()),
    ]
    for act in acts:
        with pytest.raises(st.errors.ContextError, match="another context"):
            act()
    assert state(one) == (32768.0, 0, 1, 1, 0)
    assert other.count == 0
