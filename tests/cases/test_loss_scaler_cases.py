"""Loss scaling: the scale's format and limits, what is skipped, what is reported, resuming, accumulation, clipping."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import stagedtensor as st

from .running import both_devices, program, same

NAN, INF = float("nan"), float("inf")


@dataclass
class Line:
    """loss = mean(w * x), w a parameter of four cells: the gradient of w is x / 4."""

    ctx: st.Context
    x: st.Tensor
    w: st.Tensor
    loss: st.Tensor

    def value(self) -> list[float]:
        values: list[float] = self.ctx.get_values(self.w).tolist()
        return values


def line(ctx: st.Context, *, prec: st.Prec | None = None, init: float = 1.0, scale: float = 1.0) -> Line:
    """Build the line; with ``prec`` it reads a twin and keeps activations and gradients at ``prec``."""
    x = st.placeholder("x", output=[4], prec=st.f32)
    with st.master_weights(prec):
        read = st.param("w", output=[4], init=init)
    w = read.params[0]
    loss = st.mean(read * x) * scale if scale != 1.0 else st.mean(read * x)
    if prec is not None:
        st.PrecisionPolicy(activation=prec, grad=prec).apply(loss)
    ctx.init_params(loss)
    return Line(ctx, x, w, loss)


def two_routines(model: Line, scaler: st.LossScaler, rate: float = 1.0, **options: Any) -> Callable[[Any], bool]:
    """Return a function that feeds x and runs one step whose verdict the host takes."""
    flag, comp = st.scaled_grad_update(scaler, model.loss)
    gradients = model.ctx.compile(comp)
    update = model.ctx.compile(st.scaled_sgd_update(scaler, model.loss, rate, **options))

    def step(x: Any) -> bool:
        model.ctx.set_values(model.x, x)
        return st.scaled_step(model.ctx, scaler=scaler, grad_routine=gradients, update_routine=update, checksum=flag)

    return step


def one_routine(model: Line, scaler: st.LossScaler, rate: float = 1.0, **options: Any) -> Callable[[Any, int], bool]:
    """Return a function that feeds x and runs one step that skips itself on the device."""
    window, comp = st.gated_scaled_update(scaler, model.loss, rate, **options)
    routine = model.ctx.compile(comp)

    def step(x: Any, at: int) -> bool:
        model.ctx.set_values(model.x, x)
        return st.gated_step(
            model.ctx, scaler=scaler, routine=routine, window_checksum=window, check_interval=1, step=at
        )

    return step


# -- the scale itself ---------------------------------------------------------------------------------------------


@both_devices
def test_the_scale_is_f32_whatever_the_policy(device: str) -> None:
    with program(device) as p:
        model = line(p.ctx, prec=st.f16)
        scaler = st.LossScaler(2.0**15, growth_interval=1, max_scale=2.0**20)
        step = two_routines(model, scaler)
        for at in range(3):
            assert step([1e-3] * 4)
            assert scaler.scale_value() == 2.0 ** (16 + at)
            assert p.ctx.get_values(scaler.scale).dtype == np.float32
            assert p.ctx.get_values(scaler.scale).item() == 2.0 ** (16 + at)
            assert p.ctx.get_values(scaler.unscale).item() == 2.0 ** -(16 + at)
        assert model.w.grad is not None
        assert model.w.grad.precision is st.f32
        twin = st.twin_of(model.w)
        assert twin is not None
        assert twin.grad is not None
        assert (twin.precision, twin.grad.precision) == (st.f16, st.f16)


@both_devices
def test_a_narrow_loss_is_seeded_wide(device: str) -> None:
    with program(device) as p:
        model = line(p.ctx, prec=st.f16, init=30000.0)  # loss 3, gradients 2.5e-5
        scaler = st.LossScaler(2.0**16)
        step = two_routines(model, scaler)
        assert step([1e-4] * 4)
        assert scaler.scale_value() == 2.0**16
        np.testing.assert_allclose(p.ctx.get_values(model.loss), 3.0, rtol=1e-3)
        assert model.loss.precision is st.f32
        assert p.ctx.get_values(model.w)[0] == np.float32(30000.0) - np.float32(25e-6)


def test_the_scale_may_fall_below_one() -> None:
    with program() as p:
        model = line(p.ctx, prec=st.f16)
        scaler = st.LossScaler(2.0**10)
        step = two_routines(model, scaler, 1e-7)
        ran = [step([4e6] * 4) for _ in range(18)]  # the gradient is 1e6: it needs a scale of 2^-4
        assert ran == [False] * 14 + [True] * 4
        assert scaler.scale_value() == 2.0**-4
        np.testing.assert_allclose(model.value(), 1 - 4 * 0.1, rtol=1e-3)
    with program() as p:  # a floor of 1 is a choice, and reaching it shows
        model = line(p.ctx, prec=st.f16)
        scaler = st.LossScaler(4.0, min_scale=1.0)
        step = two_routines(model, scaler, 1e-7)
        assert [step([4e6] * 4) for _ in range(5)] == [False] * 5
        assert (scaler.scale_value(), scaler.floor_hits, scaler.skipped_steps) == (1.0, 3, 5)
        assert model.value() == [1.0] * 4


@both_devices
def test_a_loss_that_is_always_nan_stops_at_the_floor(device: str) -> None:
    with program(device) as p:
        model = line(p.ctx)
        scaler = st.LossScaler()
        step = one_routine(model, scaler, momentum=0.9, weight_decay=0.1)
        for at in range(200):
            assert not step([NAN] * 4, at)
        assert scaler.scale_value() == 2.0**-14
        assert p.ctx.get_values(scaler.scale).item() == 2.0**-14
        assert p.ctx.get_values(scaler.unscale).item() == 2.0**14
        assert (scaler.steps, scaler.skipped_steps, scaler.floor_hits) == (200, 200, 170)
        assert model.value() == [1.0] * 4
        assert step([1.0] * 4, 200)
        assert np.isfinite(model.value()).all()
        assert model.value() != [1.0] * 4


@pytest.mark.parametrize("prec", [st.bf16, None])
def test_bad_batches_are_skipped_without_scaling(prec: st.Prec | None) -> None:
    with program() as p:
        model = line(p.ctx, prec=prec)
        scaler = st.LossScaler(1.0, min_scale=1.0, max_scale=1.0)
        step = one_routine(model, scaler, update=st.adamw_update, weight_decay=0.0)
        batches = [1.0, 1.0, INF, 1.0, NAN, -INF, 1.0]
        verdicts = [step([size] * 4, at) for at, size in enumerate(batches)]
        assert verdicts == [True, True, False, True, False, False, True]
        assert (scaler.skipped_steps, scaler.steps, scaler.scale_value()) == (3, 7, 1.0)
        np.testing.assert_allclose(model.value(), [1.0 - 4.0] * 4, rtol=1e-5)  # four applied steps of size 1


# -- clipping, static scale, reporting ----------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 1024.0, 65536.0])
def test_gradients_are_clipped_after_unscaling(scale: float) -> None:
    def model(ctx: st.Context) -> tuple[st.Tensor, st.Tensor]:
        w = st.param("w", output=[2], init=0.0)
        loss = st.sum(w * st.constant([3.0, 4.0]))
        ctx.init_params(loss)
        return w, loss

    with program() as p:
        w, loss = model(p.ctx)
        scaler = st.LossScaler(scale)
        window, comp = st.gated_scaled_update(scaler, loss, 1.0, max_norm=1.0)
        routine = p.ctx.compile(comp)
        st.gated_step(p.ctx, scaler=scaler, routine=routine, window_checksum=window, check_interval=1, step=0)
        np.testing.assert_allclose(p.ctx.get_values(w), [-0.6, -0.8], rtol=1e-6)
    with program() as p:
        w, loss = model(p.ctx)
        p.ctx.run(p.ctx.compile(st.static_scaled_update(loss, 1.0, scale=scale, max_norm=1.0)))
        np.testing.assert_allclose(p.ctx.get_values(w), [-0.6, -0.8], rtol=1e-6)
    with program() as p:
        w, loss = model(p.ctx)
        scaler = st.LossScaler(scale)
        flag, comp = st.scaled_grad_update(scaler, loss)
        clip = st.clip_by_global_norm(loss, 1.0, grad_unscale=scaler.unscale)
        update = st.scaled_sgd_update(scaler, loss, 1.0, grad_scale=clip.grad_scale)
        gradients, applied = p.ctx.compile(comp), p.ctx.compile(st.sequence(clip.comp, update))
        assert st.scaled_step(p.ctx, scaler=scaler, grad_routine=gradients, update_routine=applied, checksum=flag)
        assert p.ctx.get_values(clip.grad_norm).item() == 5.0
        np.testing.assert_allclose(p.ctx.get_values(w), [-0.6, -0.8], rtol=1e-6)


def test_a_static_scale_changes_nothing_and_never_moves() -> None:
    def train(scale: float | None) -> list[float]:
        with program() as p:
            model = line(p.ctx)
            options: dict[str, Any] = {"momentum": 0.9, "weight_decay": 0.05}
            comp = (
                st.sequence(st.grad_update(model.loss), st.sgd_update(model.loss, 0.1, **options))
                if scale is None
                else st.static_scaled_update(model.loss, 0.1, scale=scale, **options)
            )
            routine = p.ctx.compile(comp)
            for at in range(5):
                p.ctx.set_values(model.x, [0.3, -0.7, 1.1, 0.01 * at])
                p.ctx.run(routine)
            return model.value()

    plain = train(None)
    assert train(128.0) == plain
    assert plain != [1.0] * 4
    with program() as p:
        model = line(p.ctx)
        scaler = st.LossScaler(128.0, min_scale=128.0, max_scale=128.0)
        step = two_routines(model, scaler)
        assert not step([INF] * 4)
        assert step([1.0] * 4)
        assert scaler.scale_value() == 128.0
        assert scaler.skipped_steps == 1


@both_devices
def test_the_loss_that_is_read_is_not_scaled(device: str) -> None:
    batches = [[0.5 * at, 1.0, -0.25, 2.0] for at in range(8)]
    with program(device) as p:
        model = line(p.ctx, init=3.0)
        scaler = st.LossScaler(2048.0)
        step = two_routines(model, scaler, 0.0)
        for batch in batches:
            assert step(batch)
            assert p.ctx.get_values(model.loss).item() == 3.0 * sum(batch) / 4
    with program(device) as p:
        model = line(p.ctx, init=3.0)
        scaler, total = st.LossScaler(2048.0), st.loss_accumulator()
        flag, comp = st.scaled_grad_update(scaler, model.loss, accum_steps=8, accum_loss=total)
        assert st.scaled_step(
            p.ctx,
            scaler=scaler,
            grad_routine=p.ctx.compile(comp),
            update_routine=p.ctx.compile(st.scaled_sgd_update(scaler, model.loss, 1.0)),
            zero_routine=p.ctx.compile(st.zero_param_grads(model.loss)),
            checksum=flag,
            accum_steps=8,
            feed=lambda ctx, at: ctx.set_values(model.x, batches[at]),
        )
        assert p.ctx.get_values(total).item() == sum(3.0 * sum(batch) / 4 for batch in batches)
        mean = np.mean(batches, axis=0) / 4
        np.testing.assert_allclose(model.value(), 3.0 - mean, rtol=1e-6)


# -- parameters without gradient ----------------------------------------------------------------------------------


def test_parameters_that_the_loss_does_not_reach_are_left_alone() -> None:
    with program() as p:
        used, unused = st.param("used", output=[2], init=1.0), st.param("unused", output=[2], init=5.0)
        frozen = st.param("frozen", output=[2], init=7.0)
        detached, fixed = st.param("detached", output=[2], init=9.0, trainable=False), st.stop_gradient(frozen)
        loss = st.sum(used * fixed * detached)
        assert list(st.trainable_params(loss)) == [used]
        p.ctx.init_params([loss, unused])
        scaler = st.LossScaler(16.0)
        window, comp = st.gated_scaled_update(scaler, loss, 1.0, weight_decay=0.5, max_norm=1e9)
        routine = p.ctx.compile(comp)
        assert st.gated_step(p.ctx, scaler=scaler, routine=routine, window_checksum=window, check_interval=1, step=0)
        same(p.ctx.get_values(used), [1 - 63.5, 1 - 63.5])
        for tensor, value in ((unused, 5.0), (frozen, 7.0), (detached, 9.0)):
            same(p.ctx.get_values(tensor), [value, value])


def test_a_loss_that_trains_nothing_is_an_error() -> None:
    with program():
        frozen = st.param("frozen", output=[2], init=1.0, trainable=False)
        other = st.param("other", output=[2], init=1.0)
        scaler = st.LossScaler()
        for loss in (st.sum(frozen * frozen), st.sum(st.stop_gradient(other))):
            for build in (
                lambda loss=loss: st.grad_update(loss),
                lambda loss=loss: st.scaled_grad_update(scaler, loss),
                lambda loss=loss: st.gated_scaled_update(scaler, loss, 0.1),
                lambda loss=loss: st.sgd_update(loss, 0.1),
                lambda loss=loss: st.grad_checksum(loss),
            ):
                with pytest.raises(st.errors.GradientError, match=r"test_loss_scaler_cases\.py"):
                    build()


# -- accumulation -------------------------------------------------------------------------------------------------


@both_devices
@pytest.mark.parametrize("gated", [False, True])
def test_accumulation_is_one_step_of_the_scale(device: str, gated: bool) -> None:
    good = [[1.0, 2.0, 3.0, 4.0], [0.5, 0.0, 1.0, -1.0], [2.0, 2.0, 2.0, 2.0], [-4.0, 1.0, 0.25, 8.0]]
    bad = [good[0], good[1], [1.0, INF, 1.0, 1.0], good[3]]
    with program(device) as p:
        model = line(p.ctx)
        scaler = st.LossScaler(64.0, growth_interval=1)
        zero = p.ctx.compile(st.zero_param_grads(model.loss))
        scales: list[float] = []

        if gated:
            micro = p.ctx.compile(st.grad_update(model.loss, loss_scale=scaler.scale, accum_steps=4))
            window, comp = st.gated_apply_update(scaler, model.loss, 1.0, momentum=0.9)
            routine = p.ctx.compile(comp)
        else:
            window, comp = st.scaled_grad_update(scaler, model.loss, accum_steps=4)
            micro = p.ctx.compile(comp)
            routine = p.ctx.compile(st.scaled_sgd_update(scaler, model.loss, 1.0, momentum=0.9))

        def cycle(batches: list[list[float]], at: int) -> bool:
            def feed(ctx: st.Context, index: int) -> None:
                scales.append(ctx.get_values(scaler.scale).item())
                ctx.set_values(model.x, batches[index])

            if gated:
                return st.gated_step(
                    p.ctx, scaler=scaler, routine=routine, window_checksum=window, check_interval=1, step=at,
                    micro_routine=micro, zero_routine=zero, accum_steps=4, feed=feed,
                )  # fmt: skip
            return st.scaled_step(
                p.ctx, scaler=scaler, grad_routine=micro, update_routine=routine, checksum=window,
                accum_steps=4, zero_routine=zero, feed=feed,
            )  # fmt: skip

        assert cycle(good, 0)
        after_one = model.value()
        np.testing.assert_allclose(after_one, 1 - np.mean(good, axis=0) / 4, rtol=1e-6)
        assert not cycle(bad, 1)
        assert model.value() == after_one
        assert cycle(good, 2)
        assert scales == [64.0] * 4 + [128.0] * 4 + [64.0] * 4
        assert (scaler.scale_value(), scaler.steps, scaler.skipped_steps) == (128.0, 3, 1)
        second = np.mean(good, axis=0) / 4 * 1.9  # momentum kept its bits over the skipped cycle
        np.testing.assert_allclose(model.value(), np.array(after_one) - second, rtol=1e-5)


# -- protocol -----------------------------------------------------------------------------------------------------


@both_devices
def test_an_update_cannot_unscale_twice(device: str) -> None:
    with program(device) as p:
        model = line(p.ctx)
        scaler = st.LossScaler(256.0)
        _, comp = st.scaled_grad_update(scaler, model.loss)
        gradients = p.ctx.compile(comp)
        update = p.ctx.compile(st.scaled_sgd_update(scaler, model.loss, 1.0))
        p.ctx.set_values(model.x, [4.0] * 4)
        p.ctx.run(gradients)
        p.ctx.run(update)
        held = model.value()
        assert held == [0.0] * 4
        with pytest.raises(st.errors.ContextError, match="second time"):
            p.ctx.run(update)
        assert model.value() == held
        p.ctx.run(gradients)
        p.ctx.run(update)
        assert model.value() == [-1.0] * 4


def test_two_optimizers_move_the_scale_once() -> None:
    with program() as p:
        a, b = st.param("a", output=[2], init=1.0), st.param("b", output=[2], init=1.0)
        x = st.placeholder("x", output=[2], prec=st.f32)
        loss = st.sum(a * x + b * x)
        p.ctx.init_params(loss)
        scaler = st.LossScaler(64.0, growth_interval=1)
        flag, comp = st.scaled_grad_update(scaler, loss)
        gradients = p.ctx.compile(comp)
        update = p.ctx.compile(
            st.sequence(
                st.scaled_sgd_update(scaler, loss, 0.5, params=[a]),
                st.adamw_update(loss, 0.25, weight_decay=0.0, grad_unscale=scaler.unscale, params=[b]),
            )
        )
        for at, (cell, expected) in enumerate(((1.0, True), (NAN, False), (1.0, True)), 1):
            p.ctx.set_values(x, [cell, cell])
            ran = st.scaled_step(p.ctx, scaler=scaler, grad_routine=gradients, update_routine=update, checksum=flag)
            assert ran is expected
            assert scaler.steps == at
        assert scaler.scale_value() == 128.0  # 64 -> 128 -> 64 -> 128
        same(p.ctx.get_values(a), [0.0, 0.0])
        np.testing.assert_allclose(p.ctx.get_values(b), [0.5, 0.5], rtol=1e-5)


# -- resuming -----------------------------------------------------------------------------------------------------


def test_the_scaler_state_survives_json_and_grows_as_if_never_interrupted() -> None:
    settings: dict[str, Any] = {"init_scale": 512.0, "growth_interval": 2, "min_scale": 0.5}
    with program() as p:
        model = line(p.ctx)
        scaler = st.LossScaler(**settings)
        step = two_routines(model, scaler)
        for _ in range(3):
            step([1.0] * 4)
        text = json.dumps(scaler.state_dict())
        step([1.0] * 4)
        uninterrupted, weights = scaler.state_dict(), model.value()
    state = json.loads(text)
    assert (state["scale"], state["good_steps"], state["min_scale"]) == (1024.0, 1, 0.5)
    with program() as p:
        model = line(p.ctx)
        scaler = st.LossScaler()  # default settings: everything comes from the state
        scaler.load_state_dict(p.ctx, state)  # before first use
        assert scaler.state_dict() == state
        assert p.ctx.get_values(scaler.scale).item() == 1024.0
        step = two_routines(model, scaler)
        p.ctx.set_values(model.w, [0.25] * 4)
        step([1.0] * 4)
        assert scaler.state_dict() == uninterrupted
        assert model.value() == weights
        for key in state:
            broken = {name: value for name, value in state.items() if name != key}
            with pytest.raises(st.errors.CheckpointError, match=key):
                scaler.load_state_dict(p.ctx, broken)
        assert scaler.state_dict() == uninterrupted


# -- master weights -----------------------------------------------------------------------------------------------


@both_devices
@pytest.mark.parametrize("placement", ["auto", "virtual", "materialized"])
def test_setting_a_parameter_sets_both_copies(device: str, placement: str) -> None:
    with program(device) as p, st.master_weights(st.bf16, placement):
        twin = st.param("w", output=[2], init=3.0)
        w = twin.params[0]
        x = p.input([0.0, 0.0], st.bf16)
        y = twin * 1.0
        loss = st.sum(twin * x)
        p.ctx.init_params(loss)
        keep = [twin, y] if placement != "virtual" else [y]
        step = p.ctx.compile(st.sequence(st.grad_update(loss), st.forward(y), st.sgd_update(loss, 0.1)), keep=keep)
        p.feed()
        p.ctx.run(step)
        p.ctx.set_values(w, [0.1, 70000.0])
        if placement != "virtual":
            same(p.ctx.get_values(twin), [0.10009765625, 70144])
        p.ctx.run(step)
        same(p.ctx.get_values(w), [float(np.float32(0.1)), 70000])
        same(p.ctx.get_values(y), [0.10009765625, 70144])
        assert p.ctx.get_values(w).dtype == np.float32
        with pytest.raises(st.errors.ContextError, match="master"):
            p.ctx.set_values(twin, [1.0, 2.0])
