"""The parity legs: one small model trained in f32, with bf16 twins, and with f16 twins under every scaling recipe."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest

import stagedtensor as st

from .mixed_models import DEVICES, Array, Perceptron, all_same_bits, perceptron, read, same_bits, start

RATE, STEPS = 0.05, 7
on_devices = pytest.mark.parametrize("device", DEVICES)


def f16_model(placement: str = "auto") -> Perceptron:
    return perceptron("f16", placement, activation="f16", grad="f16")


def train_plain(ctx: st.Context, model: Perceptron) -> list[float]:
    """Seven steps of one routine without scaling; the loss of each."""
    start(ctx, model)
    step = ctx.compile(st.sequence(st.grad_update(model.loss), st.sgd_update(model.loss, RATE)), name="step")
    losses = []
    for _ in range(STEPS):
        ctx.run(step)
        losses.append(read(ctx, model.loss))
    return losses


@lru_cache
def leg_a(device: str) -> list[float]:
    with st.Session(), st.Context(device) as ctx:
        return train_plain(ctx, perceptron())


def distance(losses: list[float], device: str) -> float:
    return max(abs(loss - expected) for loss, expected in zip(losses, leg_a(device), strict=True))


def precision_of(*tensors: st.Tensor | None) -> list[str]:
    assert all(t is not None for t in tensors)
    return [str(t.precision) for t in tensors if t is not None]


# -- A, B, F --------------------------------------------------------------------------------------------------------


@on_devices
def test_leg_a_moves(device: str) -> None:
    losses = leg_a(device)
    assert np.isfinite(losses).all()
    assert max(abs(loss - losses[0]) for loss in losses) > 0.1


@on_devices
def test_leg_b_bf16_twins_need_no_scaling(device: str) -> None:
    with st.Session(), st.Context(device) as ctx:
        model = perceptron("bf16", activation="bf16")
        losses = train_plain(ctx, model)
        w1, twin = model.params["w1"], model.twin("w1")
        assert precision_of(w1, w1.grad, twin, twin.grad, model.y) == ["f32", "f32", "bf16", "f32", "bf16"]
    assert distance(losses, device) < 0.1


@on_devices
def test_leg_f_static_scale(device: str) -> None:
    with st.Session(), st.Context(device) as ctx:
        model = f16_model()
        start(ctx, model)
        step = ctx.compile(st.static_scaled_update(model.loss, RATE, scale=8.0), name="static_step")
        losses = []
        for _ in range(STEPS):
            ctx.run(step)
            losses.append(read(ctx, model.loss))
        for word in ("flag", "gate", "nonfinite", "finiteness"):
            assert word not in step.source
    assert distance(losses, device) < 0.1


# -- C, D: two routines ---------------------------------------------------------------------------------------------


class TwoRoutines:
    """Gradients and update in routines of their own, verdict on the host."""

    def __init__(
        self,
        ctx: st.Context,
        model: Perceptron,
        scaler: st.LossScaler,
        fusion: bool = True,
        keep: tuple[st.Tensor, ...] = (),
    ) -> None:
        start(ctx, model)
        self.ctx, self.model, self.scaler = ctx, model, scaler
        self.flag, gradients = st.scaled_grad_update(scaler, model.loss)
        update = st.scaled_sgd_update(scaler, model.loss, RATE)
        self.grad_routine = ctx.compile(gradients, name="gradients", keep=keep, fusion=fusion)
        self.update_routine = ctx.compile(update, name="update", fusion=fusion)

    def step(self) -> bool:
        return st.scaled_step(
            self.ctx,
            scaler=self.scaler,
            grad_routine=self.grad_routine,
            update_routine=self.update_routine,
            checksum=self.flag,
        )


@lru_cache
def leg_c(device: str) -> tuple[list[float], list[Array]]:
    """Losses and final masters of leg C; its own claims are asserted on the way."""
    with st.Session(), st.Context(device) as ctx:
        model, scaler = f16_model(), st.LossScaler(8.0, growth_interval=100)
        steps = TwoRoutines(ctx, model, scaler)
        w1, twin = model.params["w1"], model.twin("w1")
        assert precision_of(w1, w1.grad, twin, twin.grad) == ["f32", "f32", "f16", "f16"]
        losses = []
        for _ in range(STEPS):
            assert steps.step()
            losses.append(read(ctx, model.loss))
        assert (scaler.steps, scaler.skipped_steps, scaler.good_steps, scaler.scale_value()) == (7, 0, 7, 8.0)
        return losses, model.values(ctx)


@on_devices
def test_leg_c_scaled_steps(device: str) -> None:
    assert distance(leg_c(device)[0], device) < 0.1


RAN = [False, True, True, True, False, True, True]
SCALES = [32768.0, 32768.0, 32768.0, 65536.0, 32768.0, 32768.0, 32768.0]


@on_devices
def test_leg_d_backs_off_and_grows(device: str) -> None:
    with st.Session(), st.Context(device) as ctx:
        model, scaler = f16_model(), st.LossScaler(65536.0, 2.0, 0.5, 3)
        y_grad, twin_grad = model.y.grad, model.twin("b2").grad
        assert y_grad is not None
        assert twin_grad is not None
        steps = TwoRoutines(ctx, model, scaler, keep=(y_grad, twin_grad))
        ran, scales, first = [], [], model.values(ctx)
        for at in range(STEPS):
            seed = scaler.scale_value()
            ran.append(steps.step())
            scales.append(scaler.scale_value())
            expected = np.full(2, seed if seed < 65504 else np.inf, np.float16)
            assert same_bits(ctx.get_values(y_grad), expected)
            assert same_bits(ctx.get_values(twin_grad), expected)
            assert np.isfinite(read(ctx, model.loss))
            if at == 0:
                assert all_same_bits(model.values(ctx), first)
        assert ran == RAN
        assert scales == SCALES
        assert scaler.skipped_steps == 2
        assert max(np.abs(now - then).max() for now, then in zip(model.values(ctx), first, strict=True)) > 0.01


def leg_d_masters(
    device: str, placement: str, gradient: str, fusion: bool
) -> tuple[list[bool], list[float], list[Array]]:
    with st.Session(), st.Context(device) as ctx:
        model, scaler = f16_model(placement), st.LossScaler(65536.0, 2.0, 0.5, 3)
        for name in model.params:
            twin_gradient = model.twin(name).grad
            assert twin_gradient is not None
            st.place(twin_gradient, gradient)
        steps = TwoRoutines(ctx, model, scaler, fusion)
        ran, scales = [], []
        for _ in range(STEPS):
            ran.append(steps.step())
            scales.append(scaler.scale_value())
        return ran, scales, model.values(ctx)


@lru_cache
def leg_d_auto(device: str) -> list[Array]:
    return leg_d_masters(device, "auto", "auto", True)[2]


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), "reference"])
@pytest.mark.parametrize("placement", ["virtual", "materialized"])
@pytest.mark.parametrize("gradient", ["virtual", "materialized"])
@pytest.mark.parametrize("fusion", [True, False])
def test_leg_d_whatever_is_stored(device: str, placement: str, gradient: str, fusion: bool) -> None:
    ran, scales, masters = leg_d_masters(device, placement, gradient, fusion)
    assert (ran, scales) == (RAN, SCALES)
    for found, expected in zip(masters, leg_d_auto(device), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


# -- E: one routine -------------------------------------------------------------------------------------------------


class OneRoutine:
    """The whole step in one routine, verdict on the device."""

    def __init__(self, ctx: st.Context, model: Perceptron, scaler: st.LossScaler, check_interval: int) -> None:
        start(ctx, model)
        self.ctx, self.model, self.scaler, self.check_interval = ctx, model, scaler, check_interval
        self.window, step = st.gated_scaled_update(scaler, model.loss, RATE)
        self.routine = ctx.compile(step, name="gated_step")

    def step(self, at: int) -> bool:
        return st.gated_step(
            self.ctx,
            scaler=self.scaler,
            routine=self.routine,
            window_checksum=self.window,
            check_interval=self.check_interval,
            step=at,
        )


@on_devices
def test_leg_e1_gated_steps(device: str) -> None:
    with st.Session(), st.Context(device) as ctx:
        model, scaler = f16_model(), st.LossScaler(8.0, growth_interval=100)
        steps = OneRoutine(ctx, model, scaler, 1)
        losses = []
        for at in range(STEPS):
            assert steps.step(at)
            losses.append(read(ctx, model.loss))
        masters = model.values(ctx)
    assert distance(losses, device) < 0.1
    for found, expected in zip(masters, leg_c(device)[1], strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


@on_devices
@pytest.mark.parametrize("init", [65536.0, 2.0**19])
def test_leg_e2_skips_by_itself(device: str, init: float) -> None:
    """The masters stay put on each step whose seed is above the largest half, before the host has read anything."""
    with st.Session(), st.Context(device) as ctx:
        model, scaler = f16_model(), st.LossScaler(init, growth_interval=100)
        steps = OneRoutine(ctx, model, scaler, 2)
        w1 = model.params["w1"]
        masters = ctx.view(w1)
        first, downloads = masters.copy(), ctx.stats.downloads
        overflowed, moved_at = [], None
        for at in range(12):
            scale = scaler.scale_value()
            overflowed.append(scale > 65504)
            before = masters.copy()
            ok = steps.step(at)
            assert same_bits(masters, before) == overflowed[-1]
            if moved_at is None and not same_bits(masters, first):
                moved_at = at
            if at % 2 == 0:
                assert ok
                assert scaler.scale_value() == scale
                assert ctx.stats.downloads == downloads
            else:
                bad = any(overflowed[-2:])
                assert ok is not bad
                assert scaler.scale_value() == (scale / 2 if bad else scale)
                downloads = ctx.stats.downloads
        assert moved_at == overflowed.index(False)
        assert scaler.skipped_steps == sum(overflowed) == 2 * int(np.log2(init) - 15)
        assert scaler.steps == 12
        assert scaler.scale_value() == 32768.0
