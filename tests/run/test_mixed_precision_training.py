"""Clipping, accumulation, frozen layers and all of it together, against NumPy or against the plain f32 run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor.optim import states_of

from .mixed_models import DEVICES, Array, all_same_bits, read, same_bits

on_devices = pytest.mark.parametrize("device", DEVICES)


# -- clipping -----------------------------------------------------------------------------------------------------------

X4 = np.array([[0.5, -1.0, 2.0], [1.5, 0.3, -0.7], [-2.0, 1.0, 0.1], [0.2, 0.9, -1.4]], np.float32)
LABELS = np.array([1, 0, 0, 1], np.int32)


@dataclass
class Classifier:
    """Mean cross entropy of x @ w + b over a batch: 3 inputs, 2 classes."""

    x: st.Tensor
    labels: st.Tensor
    w: st.Tensor
    b: st.Tensor
    loss: st.Tensor


def classifier(ctx: st.Context, batch: int, x: Array = X4, labels: Array = LABELS, freeze: bool = False) -> Classifier:
    w = st.param("w", init=np.array([[0.4, -0.3, 0.2], [-0.5, 0.1, 0.6]], np.float32))
    b = st.param("b", init=np.array([0.1, -0.2], np.float32))
    data = st.placeholder("x", batch=[batch], output=[3])
    ids = st.placeholder("labels", batch=[batch], prec="i32")
    logits = (st.stop_gradient(w) if freeze else w) @ data + b
    loss = st.cross_entropy(logits, ids).named("loss")
    ctx.init_params(loss)
    ctx.set_values(data, x[:batch])
    ctx.set_values(ids, labels[:batch])
    return Classifier(data, ids, w, b, loss)


def host_gradients(w: Array, b: Array) -> tuple[Array, Array]:
    """Gradients of the mean cross entropy in f64."""
    logits = X4.astype(np.float64) @ w.T + b
    chances = np.exp(logits - logits.max(1, keepdims=True))
    chances /= chances.sum(1, keepdims=True)
    error = (chances - np.eye(2)[LABELS]) / len(LABELS)
    return error.T @ X4, error.sum(0)


@on_devices
def test_clipping_against_the_host(device: str) -> None:
    schedule = st.LrSchedule("linear", 0.05, 10, 0, 0.2)
    with st.Session(), st.Context(device) as ctx:
        model = classifier(ctx, 4)
        rate, set_rate = st.scheduled_learning_rate(schedule)
        clip = st.clip_by_global_norm(model.loss, 0.5)
        update = st.sgd_update(model.loss, rate, weight_decay=0.1, grad_scale=clip.grad_scale)
        step = ctx.compile(st.sequence(st.grad_update(model.loss), clip.comp, update), name="step")
        clipped = []
        for at in (0, 8):
            w, b = (ctx.get_values(p).astype(np.float64) for p in (model.w, model.b))
            dw, db = host_gradients(w, b)
            norm = np.sqrt((dw**2).sum() + (db**2).sum())
            scale = min(1.0, 0.5 / norm)
            set_rate(ctx, at)
            ctx.run(step)
            assert abs(read(ctx, clip.grad_norm) - norm) < 1e-4 * (1 + norm)
            assert abs(read(ctx, clip.grad_scale) - scale) < 1e-5
            lr = st.lr_at(schedule, at)
            np.testing.assert_allclose(ctx.get_values(model.w), w - lr * (scale * dw + 0.1 * w), rtol=0, atol=1e-5)
            np.testing.assert_allclose(ctx.get_values(model.b), b - lr * (scale * db + 0.1 * b), rtol=0, atol=1e-5)
            clipped.append(scale < 1)
        assert clipped == [True, True]


@on_devices
@pytest.mark.parametrize("recipe", ["two", "gated", "static"])
@pytest.mark.parametrize("scale", [1.0, 65536.0, 2.0**-10])
def test_clipping_comes_after_unscaling(device: str, recipe: str, scale: float) -> None:
    """Gradient [3, 4], max_norm 1, rate 1: the update is [.6, .8] and the norm 5, whatever the scale."""
    with st.Session(), st.Context(device) as ctx:
        p = st.param("p", init=np.zeros(2, np.float32))
        loss = st.sum(p * st.constant(np.array([3.0, 4.0], np.float32)))
        ctx.init_params(loss)
        scaler = st.LossScaler(scale)
        if recipe == "static":
            ctx.run(ctx.compile(st.static_scaled_update(loss, 1.0, scale=scale, max_norm=1.0)))
        elif recipe == "gated":
            window, step = st.gated_scaled_update(scaler, loss, 1.0, max_norm=1.0)
            ctx.run(ctx.compile(step))
            assert read(ctx, window) == 0.0
        else:
            clip = st.clip_by_global_norm(loss, 1.0, grad_unscale=scaler.unscale)
            _, gradients = st.scaled_grad_update(scaler, loss)
            update = st.scaled_sgd_update(scaler, loss, 1.0, grad_scale=clip.grad_scale)
            ctx.run(ctx.compile(st.sequence(gradients, clip.comp, update), name="step"))
            assert read(ctx, clip.grad_norm) == 5.0
        np.testing.assert_allclose(ctx.get_values(p), [-0.6, -0.8], rtol=1e-6)


@on_devices
def test_the_edges_of_clipping(device: str) -> None:
    def scale_of(gradient: list[float], max_norm: float) -> float:
        with st.Session(), st.Context(device) as ctx:
            p = st.param("p", init=np.zeros(2, np.float32))
            c = st.placeholder("c", output=[2])
            loss = st.sum(p * c)
            clip = st.clip_by_global_norm(loss, max_norm)
            ctx.init_params(loss)
            ctx.set_values(c, np.array(gradient, np.float32))
            ctx.run(ctx.compile(st.sequence(st.grad_update(loss), clip.comp)))
            assert p.grad is not None
            assert same_bits(ctx.get_values(p.grad), np.array(gradient, np.float32))  # the buffer is untouched
            return read(ctx, clip.grad_scale)

    assert scale_of([np.nan, 1.0], 1.0) == 1.0
    assert scale_of([np.inf, 1.0], 1.0) == 0.0
    assert scale_of([3.0, 4.0], 0.0) == 0.0
    assert scale_of([0.0, 0.0], 0.0) == 1.0
    assert scale_of([3.0, 4.0], 5.0) == 1.0
    assert scale_of([3.0, 4.0], 2.5) == 0.5


# -- accumulation -------------------------------------------------------------------------------------------------------


@on_devices
def test_two_small_batches_are_one_large_one(device: str) -> None:
    results = []
    for batch in (4, 2):
        with st.Session(), st.Context(device) as ctx:
            model = classifier(ctx, batch)
            count = 4 // batch
            total = st.loss_accumulator()
            comp = st.grad_update(model.loss, accum_steps=None if count == 1 else count, accum_loss=total)
            gradients = ctx.compile(comp, name="gradients")
            zero = ctx.compile(st.zero_param_grads(model.loss), name="zero")
            update = ctx.compile(st.sgd_update(model.loss, 0.5, momentum=0.9), name="update")
            for _ in range(2):
                ctx.run(zero)
                for at in range(count):
                    ctx.set_values(model.x, X4[at * batch : (at + 1) * batch])
                    ctx.set_values(model.labels, LABELS[at * batch : (at + 1) * batch])
                    ctx.run(gradients)
                ctx.run(update)
            seen = [ctx.get_values(t) for p in (model.w, model.b) for t in (p, p.grad) if t is not None]
            results.append([*seen, np.asarray(read(ctx, total) / count)])
    for large, small in zip(*results, strict=True):
        np.testing.assert_allclose(small, large, rtol=0, atol=1e-5)
    assert np.abs(results[0][1]).max() > 1e-3


class Cycles:
    """Accumulation cycles of four micro-batches, in two routines or gated."""

    def __init__(self, ctx: st.Context, model: Classifier, scaler: st.LossScaler, gated: bool, **options: Any) -> None:
        self.ctx, self.model, self.scaler, self.step, self.poison = ctx, model, scaler, 0, -1
        self.zero = ctx.compile(st.zero_param_grads(model.loss), name="zero")
        if gated:
            micro = st.grad_update(model.loss, loss_scale=scaler.scale, accum_steps=4)
            self.flag, update = st.gated_apply_update(scaler, model.loss, 0.1, **options)
        else:
            self.flag, micro = st.scaled_grad_update(scaler, model.loss, accum_steps=4)
            updater = options.pop("update", st.sgd_update)
            update = updater(model.loss, 0.1, grad_unscale=scaler.unscale, **options)
        self.gated = gated
        self.micro, self.update = ctx.compile(micro, name="micro"), ctx.compile(update, name="update")

    def feed(self, ctx: st.Context, at: int) -> None:
        x = np.repeat(X4[at : at + 1], 4, 0)
        ctx.set_values(self.model.x, x * np.float32(np.inf) if at == self.poison else x)

    def run(self) -> bool:
        self.step += 1
        if self.gated:
            return st.gated_step(
                self.ctx,
                scaler=self.scaler,
                routine=self.update,
                window_checksum=self.flag,
                check_interval=1,
                step=self.step - 1,
                micro_routine=self.micro,
                zero_routine=self.zero,
                accum_steps=4,
                feed=self.feed,
            )
        return st.scaled_step(
            self.ctx,
            scaler=self.scaler,
            grad_routine=self.micro,
            update_routine=self.update,
            checksum=self.flag,
            accum_steps=4,
            zero_routine=self.zero,
            feed=self.feed,
        )

    def everything(self) -> list[Array]:
        masters = (self.model.w, self.model.b)
        states = {id(t): t for p in masters for t in states_of(p).values()}
        return [self.ctx.get_values(t) for t in (*masters, *states.values())]


@on_devices
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("update", [st.sgd_update, st.adamw_update])
def test_one_bad_micro_step_skips_the_cycle(device: str, gated: bool, update: Callable[..., st.Comp]) -> None:
    options = {"momentum": 0.9} if update is st.sgd_update else {"weight_decay": 0.1}
    with st.Session(), st.Context(device) as ctx:
        scaler = st.LossScaler(1024.0, growth_interval=1)
        cycles = Cycles(ctx, classifier(ctx, 4), scaler, gated, update=update, **options)
        assert cycles.run()
        assert scaler.scale_value() == 2048.0  # growth between cycles, never within one
        before = cycles.everything()
        cycles.poison = 1
        assert not cycles.run()
        assert all_same_bits(cycles.everything(), before)
        assert (scaler.scale_value(), scaler.skipped_steps, scaler.steps) == (1024.0, 1, 2)
        cycles.poison = -1
        assert cycles.run()
        assert not any(same_bits(now, then) for now, then in zip(cycles.everything(), before, strict=True))
        assert (scaler.skipped_steps, scaler.steps) == (1, 3)


@on_devices
def test_gated_cycles_are_scaled_cycles(device: str) -> None:
    results = []
    for gated in (False, True):
        with st.Session(), st.Context(device) as ctx:
            cycles = Cycles(ctx, classifier(ctx, 4), st.LossScaler(64.0, growth_interval=2), gated, momentum=0.9)
            for _ in range(4):
                assert cycles.run()
            results.append(cycles.everything())
    for left, right in zip(*results, strict=True):
        np.testing.assert_allclose(left, right, rtol=0, atol=1e-6)


# -- frozen layers ------------------------------------------------------------------------------------------------------


@on_devices
@pytest.mark.parametrize("update", [st.sgd_update, st.adamw_update])
def test_frozen_weights_keep_their_bits(device: str, update: Callable[..., st.Comp]) -> None:
    with st.Session(), st.Context(device) as ctx:
        model = classifier(ctx, 4, freeze=True)
        assert [p.name for p in st.trainable_params(model.loss)] == ["b"]
        assert [p.name for p in model.loss.params] == ["w", "b"]
        before = ctx.get_values(model.w), ctx.get_values(model.b)
        comp = st.sequence(st.grad_update(model.loss), update(model.loss, 0.1, weight_decay=0.5))
        step = ctx.compile(comp, name="step")
        for _ in range(5):
            ctx.run(step)
        assert same_bits(ctx.get_values(model.w), before[0])
        assert np.abs(ctx.get_values(model.b) - before[1]).min() > 1e-3
        assert not states_of(model.w)


@on_devices
@pytest.mark.parametrize("gated", [False, True])
def test_frozen_weights_under_accumulation(device: str, gated: bool) -> None:
    with st.Session(), st.Context(device) as ctx:
        model = classifier(ctx, 4, freeze=True)
        before = ctx.get_values(model.w), ctx.get_values(model.b)
        cycles = Cycles(ctx, model, st.LossScaler(64.0), gated, weight_decay=0.5, momentum=0.5)
        for _ in range(3):
            assert cycles.run()
        assert same_bits(ctx.get_values(model.w), before[0])
        assert np.abs(ctx.get_values(model.b) - before[1]).min() > 1e-3


@on_devices
def test_a_parameter_that_the_loss_does_not_use(device: str) -> None:
    with st.Session(), st.Context(device) as ctx:
        unused = st.param("unused", output=[2], init=0.5)
        model = classifier(ctx, 4)
        ctx.set_values(unused, np.full(2, 0.5, np.float32))
        scaler = st.LossScaler(8.0)
        window, step = st.gated_scaled_update(scaler, model.loss, 0.1, weight_decay=0.1)
        before = ctx.get_values(model.w)
        routine = ctx.compile(step)
        assert st.gated_step(ctx, scaler=scaler, routine=routine, window_checksum=window, check_interval=1, step=0)
        assert not same_bits(ctx.get_values(model.w), before)
        assert same_bits(ctx.get_values(unused), np.full(2, 0.5, np.float32))


# -- everything ---------------------------------------------------------------------------------------------------------

CYCLES, MICRO = 200, 16


def teacher_data() -> tuple[Array, Array]:
    rng = np.random.default_rng(11)
    x = rng.uniform(-1, 1, (4 * MICRO, 8)).astype(np.float32)
    return x, np.tanh(x @ rng.normal(0, 0.5, (8, 2))).astype(np.float32)


def regression(twins: str | None) -> tuple[st.Tensor, st.Tensor, st.Tensor]:
    """relu MLP 8-32-32-2 with a frozen first weight; squared error."""
    with st.master_weights(twins):
        w1 = st.param("w1", input=[8], output=[32], init=st.kaiming())
        b1 = st.param("b1", output=[32], init=0.0)
        w2 = st.param("w2", input=[32], output=[32], init=st.kaiming())
        b2 = st.param("b2", output=[32], init=0.0)
        w3 = st.param("w3", input=[32], output=[2], init=st.xavier())
        b3 = st.param("b3", output=[2], init=0.0)
    x = st.placeholder("x", batch=[MICRO], output=[8])
    target = st.placeholder("target", batch=[MICRO], output=[2], prec="f32")
    hidden = st.relu(w2 @ st.relu(st.stop_gradient(w1) @ x + b1) + b2)
    loss = st.mse(w3 @ hidden + b3, target).named("loss")
    if twins is not None:
        st.PrecisionPolicy(activation=twins, grad=twins).apply(loss)
    return x, target, loss


def train_regression(ctx: st.Context, twins: str | None) -> tuple[list[float], int]:
    """Train 200 cycles with clipping and AdamW; return the mean loss of each cycle and how many were skipped."""
    data, wanted = teacher_data()
    x, target, loss = regression(twins)
    ctx.init_params(loss, seed=3)
    total = st.loss_accumulator()
    zero = ctx.compile(st.zero_param_grads(loss), name="zero")
    scaler = None
    if twins is None:
        micro = ctx.compile(st.grad_update(loss, accum_steps=4, accum_loss=total), name="micro")
        clip = st.clip_by_global_norm(loss, 1.0)
        update = ctx.compile(
            st.sequence(clip.comp, st.adamw_update(loss, 0.01, grad_scale=clip.grad_scale)), name="update"
        )
    else:
        scaler = st.LossScaler(2.0**24, growth_interval=50)
        comp = st.grad_update(loss, loss_scale=scaler.scale, accum_steps=4, accum_loss=total)
        micro = ctx.compile(comp, name="micro")
        window, apply = st.gated_apply_update(scaler, loss, 0.01, update=st.adamw_update, max_norm=1.0)
        update = ctx.compile(apply, name="update")
    frozen = loss.params[0]
    before = ctx.get_values(frozen)

    def feed(ctx: st.Context, at: int) -> None:
        ctx.set_values(x, data[at * MICRO : (at + 1) * MICRO])
        ctx.set_values(target, wanted[at * MICRO : (at + 1) * MICRO])

    losses = []
    for at in range(CYCLES):
        ctx.set_values(total, 0.0)
        if scaler is None:
            ctx.run(zero)
            for micro_step in range(4):
                feed(ctx, micro_step)
                ctx.run(micro)
            ctx.run(update)
        else:
            st.gated_step(
                ctx,
                scaler=scaler,
                routine=update,
                window_checksum=window,
                check_interval=1,
                step=at,
                micro_routine=micro,
                zero_routine=zero,
                accum_steps=4,
                feed=feed,
            )
        losses.append(read(ctx, total) / 4)
    assert same_bits(ctx.get_values(frozen), before)
    return losses, 0 if scaler is None else scaler.skipped_steps


def test_everything_together() -> None:
    with st.Session(), st.Context("cpu") as ctx:
        plain, _ = train_regression(ctx, None)
    with st.Session(), st.Context("cpu") as ctx:
        mixed, skipped = train_regression(ctx, "f16")
    assert skipped >= 1
    assert plain[0] == pytest.approx(mixed[0], rel=1e-2)
    assert plain[-1] < 0.01 * plain[0]
    assert mixed[-1] < 0.01 * mixed[0]
    assert abs(plain[-1] - mixed[-1]) < 0.001 * plain[0]
