"""The parity legs of mixed precision on the emulated device: twins, static and dynamic scales, gated steps."""

from __future__ import annotations

import pytest

from tests.run import test_mixed_precision_legs as legs

DEVICE = "cuda-emulated"


def test_leg_a() -> None:
    legs.test_leg_a_moves(DEVICE)


def test_leg_b_bf16_twins() -> None:
    legs.test_leg_b_bf16_twins_need_no_scaling(DEVICE)


def test_leg_c_scaled_steps() -> None:
    legs.test_leg_c_scaled_steps(DEVICE)


def test_leg_d_backs_off_and_grows() -> None:
    legs.test_leg_d_backs_off_and_grows(DEVICE)


def test_leg_e1_gated_steps() -> None:
    legs.test_leg_e1_gated_steps(DEVICE)


@pytest.mark.parametrize("scale", [65536.0, 2.0**19])
def test_leg_e2_skips_by_itself(scale: float) -> None:
    legs.test_leg_e2_skips_by_itself(DEVICE, scale)


def test_leg_f_static_scale() -> None:
    legs.test_leg_f_static_scale(DEVICE)
