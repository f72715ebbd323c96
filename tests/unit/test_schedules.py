"""Learning-rate schedules: values on the host, settings that are refused, and the setter."""

from __future__ import annotations

from typing import Any

import pytest

import stagedtensor as st

COSINE = st.LrSchedule("cosine", 1.0, 25, 5, 0.1)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 0.2),
        (2, 0.6),
        (4, 1),
        (5, 1),
        (10, 0.868198),
        (15, 0.55),
        (19, 0.285497),
        (20, 0.231802),
        (24, 0.105540),
        (30, 0.1),
    ],
)
def test_cosine(step: int, expected: float) -> None:
    assert st.lr_at(COSINE, step) == pytest.approx(expected, abs=1e-5)


def test_the_total_outranks_the_warmup() -> None:
    schedule = st.LrSchedule("cosine", 1.0, 5, 10, 0.1)
    assert st.lr_at(schedule, 6) == pytest.approx(0.1)
    assert st.lr_at(schedule, 4) == 0.5


@pytest.mark.parametrize(
    ("kind", "steps"),
    [
        ("constant", {0: 0.5, 1: 1.0, 2: 1.0, 10: 1.0, 99: 1.0}),
        ("linear", {0: 0.5, 1: 1.0, 2: 1.0, 6: 0.6, 10: 0.2, 99: 0.2}),
        ("wsd", {0: 0.5, 1: 1.0, 2: 1.0, 7: 1.0, 8: 1.0, 9: 0.2 + 0.8 * (1 - 0.5**0.5), 10: 0.2, 99: 0.2}),
    ],
)
def test_the_other_kinds(kind: Any, steps: dict[int, float]) -> None:
    schedule = st.LrSchedule(kind, 1.0, 10, 2, 0.2)
    for step, expected in steps.items():
        assert st.lr_at(schedule, step) == pytest.approx(expected), step


@pytest.mark.parametrize("kind", ["constant", "cosine", "linear", "wsd"])
def test_schedules_stay_between_their_bounds(kind: Any) -> None:
    for warmup in (0, 3, 20):
        for decay in (0.0, 0.3, 1.0):
            schedule = st.LrSchedule(kind, 0.5, 12, warmup, 0.25, decay)
            values = [st.lr_at(schedule, step) for step in range(30)]
            assert all(0 < value <= 0.5 for value in values)
            assert values[29] == pytest.approx(0.5 if kind == "constant" else 0.125)


BAD_SCHEDULES: list[tuple[dict[str, Any], str]] = [
    ({"kind": "step"}, "unknown kind 'step'"),
    ({"total_steps": 0}, "total_steps"),
    ({"total_steps": True}, "total_steps"),
    ({"warmup_steps": -1}, "warmup_steps"),
    ({"final_frac": 1.5}, "final_frac"),
    ({"final_frac": float("nan")}, "final_frac"),
    ({"decay_frac": -0.1}, "decay_frac"),
    ({"base_lr": float("inf")}, "base_lr"),
]


@pytest.mark.parametrize(("bad", "message"), BAD_SCHEDULES)
def test_settings_out_of_range(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        st.LrSchedule(**{"kind": "cosine", "base_lr": 1.0, "total_steps": 10, **bad})


def test_the_setter_writes_the_schedule() -> None:
    with st.Session(), st.Context("reference") as ctx:
        rate, set_rate = st.scheduled_learning_rate(COSINE, "rate")
        assert rate.name == "rate"
        assert float(ctx.get_values(rate)) == pytest.approx(0.2)
        set_rate(ctx, 15)
        assert float(ctx.get_values(rate)) == pytest.approx(0.55)
