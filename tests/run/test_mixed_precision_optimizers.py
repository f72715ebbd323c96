"""Optimizers on loss = sum(p * c) against values worked out by hand, and what gates, unscaling and clipping leave
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor.optim import states_of

from .mixed_models import DEVICES, Array, all_same_bits, same_bits

C = [0.5, -1.5, 2.0]
P0 = [1.0, -2.0, 0.25]
RATE, STEPS = 0.1, 4
on_devices = pytest.mark.parametrize("device", DEVICES)


class Line:
    """loss = sum(p * c), whose gradient is c."""

    def __init__(self, ctx: st.Context, prec: Any = "f32") -> None:
        self.ctx = ctx
        self.p = st.param("p", output=[3], prec=prec, init=np.array(P0, np.float32))
        self.c = st.placeholder("c", output=[3], prec="f32")
        self.loss = st.sum(self.p * self.c)
        ctx.init_params(self.loss)
        ctx.set_values(self.c, np.array(C, np.float32))

    def values(self) -> Array:
        return self.ctx.get_values(self.p)

    def everything(self) -> list[Array]:
        """p and all optimizer state."""
        return [self.values(), *(self.ctx.get_values(t) for _, t in sorted(states_of(self.p).items()))]


def run(
    device: str, update: Callable[..., st.Comp], factors: Sequence[float] = (1,) * STEPS, **options: Any
) -> list[Array]:
    """Train a line and return p and its state at the end."""
    with st.Session(), st.Context(device) as ctx:
        line = Line(ctx)
        step = ctx.compile(st.sequence(st.grad_update(line.loss), update(line.loss, RATE, **options)), name="step")
        for factor in factors:
            ctx.set_values(line.c, np.array(C, np.float32) * np.float32(factor))
            ctx.run(step)
        return line.everything()


def check(found: Array, expected: Sequence[float]) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    assert np.abs(np.array(found) - P0).min() > 1e-4


SGD_TABLE: list[tuple[dict[str, Any], list[float]]] = [
    ({}, [0.8, -1.4, -0.55]),
    ({"weight_decay": 0.05}, [0.781645, -1.364784, -0.548983]),
    ({"momentum": 0.9}, [0.54755, -0.64265, -1.5598]),
    ({"momentum": 0.9, "nesterov": True}, [0.392795, -0.178385, -2.17882]),
    ({"momentum": 0.9, "nesterov": True, "weight_decay": 0.05}, [0.341463, -0.084256, -2.159647]),
]


@on_devices
@pytest.mark.parametrize(("options", "expected"), SGD_TABLE)
def test_sgd(device: str, options: dict[str, Any], expected: list[float]) -> None:
    check(run(device, st.sgd_update, **options)[0], expected)


@on_devices
def test_sgd_with_a_gate_that_is_always_open(device: str) -> None:
    with st.Session():
        gated = run(device, st.sgd_update, update_gate=st.host_scalar("gate", 1.0))
    check(gated[0], SGD_TABLE[0][1])


@on_devices
def test_sgd_with_grad_scale(device: str) -> None:
    with st.Session():
        scaled = run(device, st.sgd_update, grad_scale=st.host_scalar("rescale", 2.0), momentum=0.9)
    check(scaled[0], [0.0951, 0.7147, -3.3696])


@on_devices
def test_grad_scale_zero_selects_zero(device: str) -> None:
    """0 * inf would be NaN; decay still applies."""
    with st.Session():
        found = run(
            device, st.sgd_update, factors=[np.inf], grad_scale=st.host_scalar("rescale", 0.0), weight_decay=0.5
        )
    np.testing.assert_allclose(found[0], np.array(P0) * 0.95, rtol=1e-6)


@on_devices
@pytest.mark.parametrize(
    ("weight_decay", "expected"), [(0.0, [0.803821, -1.803821, 0.053821]), (0.05, [0.785659, -1.765809, 0.050547])]
)
def test_adamw(device: str, weight_decay: float, expected: list[float]) -> None:
    p, m, v, t = run(device, st.adamw_update, factors=[1, -1, 2, 0.5], weight_decay=weight_decay)
    check(p, expected)
    assert t.dtype == np.int32
    assert t == 4
    if weight_decay:
        np.testing.assert_allclose(m, [0.11095, -0.33285, 0.4438], rtol=0, atol=1e-5)
        np.testing.assert_allclose(v, [0.001560, 0.014042, 0.024964], rtol=0, atol=1e-6)


UPDATERS: list[tuple[Callable[..., st.Comp], dict[str, Any]]] = [
    (st.sgd_update, {"momentum": 0.9, "weight_decay": 0.05, "nesterov": True}),
    (st.adamw_update, {"weight_decay": 0.05}),
]


@on_devices
@pytest.mark.parametrize(("update", "options"), UPDATERS)
def test_closed_steps_might_not_have_been(device: str, update: Callable[..., st.Comp], options: dict[str, Any]) -> None:
    """Even where gradient and learning rate are infinite, p, m, v and t are those of a run without these steps."""
    factors, gates = [1, -1, np.inf, 2, np.nan, 0.5], [1, 1, 0, 1, 0, 1]

    def train(steps: list[tuple[float, int]]) -> list[Array]:
        with st.Session(), st.Context(device) as ctx:
            line, gate, rate = Line(ctx), st.host_scalar("gate", 1.0), st.host_scalar("rate", RATE)
            made = st.sequence(st.grad_update(line.loss), update(line.loss, rate, update_gate=gate, **options))
            step = ctx.compile(made, name="step")
            for factor, is_open in steps:
                ctx.set_values(line.c, np.array(C, np.float32) * np.float32(factor))
                ctx.set_values(gate, float(is_open))
                ctx.set_values(rate, RATE if is_open else np.inf)
                ctx.run(step)
            return line.everything()

    steps = list(zip(factors, gates, strict=True))
    with_closed, without = train(steps), train([step for step in steps if step[1]])
    assert all_same_bits(with_closed, without)
    assert all(np.isfinite(values).all() and values.any() for values in with_closed)
    assert not same_bits(with_closed[0], np.array(P0, np.float32))


# -- momentum reaches the device by every way in -----------------------------------------------------------------------


def sgd_by_hand(ctx: st.Context, line: Line, momentum: float) -> None:
    update = st.sgd_one(line.p, RATE, momentum=momentum)
    step = ctx.compile(st.sequence(st.grad_update(line.loss), update), name="step")
    for _ in range(STEPS):
        ctx.run(step)


def sgd_of_loss(ctx: st.Context, line: Line, momentum: float) -> None:
    update = st.sgd_update(line.loss, RATE, momentum=momentum)
    step = ctx.compile(st.sequence(st.grad_update(line.loss), update), name="step")
    for _ in range(STEPS):
        ctx.run(step)


def sgd_scaled(ctx: st.Context, line: Line, momentum: float) -> None:
    scaler = st.LossScaler(8.0, growth_interval=100)
    flag, gradients = st.scaled_grad_update(scaler, line.loss)
    grad_routine = ctx.compile(gradients, name="gradients")
    update_routine = ctx.compile(st.scaled_sgd_update(scaler, line.loss, RATE, momentum=momentum), name="update")
    for _ in range(STEPS):
        assert st.scaled_step(
            ctx, scaler=scaler, grad_routine=grad_routine, update_routine=update_routine, checksum=flag
        )


def sgd_gated(ctx: st.Context, line: Line, momentum: float) -> None:
    scaler = st.LossScaler(8.0, growth_interval=100)
    window, step = st.gated_scaled_update(scaler, line.loss, RATE, momentum=momentum)
    routine = ctx.compile(step, name="gated")
    for at in range(STEPS):
        assert st.gated_step(ctx, scaler=scaler, routine=routine, window_checksum=window, check_interval=2, step=at)


@on_devices
@pytest.mark.parametrize("train", [sgd_by_hand, sgd_of_loss, sgd_scaled, sgd_gated])
def test_momentum_is_what_was_asked(device: str, train: Callable[[st.Context, Line, float], None]) -> None:
    results = {}
    for momentum in (0.9, 0.0):
        with st.Session(), st.Context(device) as ctx:
            line = Line(ctx)
            train(ctx, line, momentum)
            results[momentum] = line.values()
            assert len(states_of(line.p)) == (1 if momentum else 0)
    check(results[0.9], SGD_TABLE[2][1])
    assert np.abs(results[0.9] - results[0.0]).min() > 1e-3


# -- state, unscaling, subnormals -----------------------------------------------------------------------------------


@on_devices
@pytest.mark.parametrize("prec", ["f16", "bf16", "f64"])
def test_state_is_wide(device: str, prec: str) -> None:
    with st.Session(), st.Context(device) as ctx:
        line = Line(ctx, prec)
        for update in (st.sgd_update(line.loss, RATE, momentum=0.9), st.adamw_update(line.loss, RATE)):
            ctx.run(ctx.compile(st.sequence(st.grad_update(line.loss), update)))
        kinds = {kind: str(t.precision) for kind, t in states_of(line.p).items()}
        wide = "f64" if prec == "f64" else "f32"
        assert kinds == {"momentum": wide, "adam_m": wide, "adam_v": wide, "adamw_step": "i32"}
        assert ctx.get_values(states_of(line.p)["adam_m"]).any()


@on_devices
@pytest.mark.parametrize("grad", ["f32", "f16"])
def test_unscaling_in_place_or_on_the_read_side(device: str, grad: str) -> None:
    """The same bits either way; a gradient narrower than f32 keeps its scaled value."""
    results, buffers = [], []
    for in_place in (True, False):
        with st.Session(), st.Context(device) as ctx:
            line = Line(ctx)
            st.specify(line.p.grad, grad)
            unscale = st.host_scalar("unscale", 1 / 1024)
            update = st.sgd_update(line.loss, RATE, momentum=0.9, grad_unscale=unscale, unscale_in_place=in_place)
            step = ctx.compile(st.sequence(st.grad_update(line.loss, loss_scale=1024.0), update), name="step")
            for _ in range(STEPS):
                ctx.run(step)
            results.append(line.everything())
            assert line.p.grad is not None
            buffers.append(ctx.get_values(line.p.grad).astype(np.float64))
    assert all_same_bits(*results)
    check(results[0][0], SGD_TABLE[2][1])
    np.testing.assert_array_equal(buffers[0], np.array(C) * (1 if grad == "f32" else 1024))
    np.testing.assert_array_equal(buffers[1], np.array(C) * 1024)


@on_devices
@pytest.mark.parametrize("grad", ["f32", "f16"])
def test_a_second_update_without_gradients_is_refused(device: str, grad: str) -> None:
    with st.Session(), st.Context(device) as ctx:
        line = Line(ctx)
        st.specify(line.p.grad, grad)
        gradients = ctx.compile(st.grad_update(line.loss, loss_scale=8.0), name="gradients")
        unscale = st.host_scalar("unscale", 1 / 8)
        update = ctx.compile(st.sgd_update(line.loss, RATE, grad_unscale=unscale), name="update")
        ctx.run(gradients)
        ctx.run(update)
        before = line.values()
        with pytest.raises(st.errors.ContextError, match=r"p\.grad a second time"):
            ctx.run(update)
        assert same_bits(line.values(), before)
        ctx.run(gradients)
        ctx.run(update)
        np.testing.assert_allclose(line.values(), np.array(P0) - 2 * RATE * np.array(C), rtol=1e-6)


@on_devices
def test_state_never_lives_among_subnormals(device: str) -> None:
    with st.Session(), st.Context(device) as ctx:
        line = Line(ctx)
        update = st.sgd_update(line.loss, RATE, momentum=0.5)
        step = ctx.compile(st.sequence(st.grad_update(line.loss), update), name="step")
        tiny = np.float32(2.0**-126)
        momentum = states_of(line.p)["momentum"]
        for factor, expected in ((1, tiny), (0, np.float32(0))):
            ctx.set_values(line.c, np.full(3, tiny * factor, np.float32))
            ctx.run(step)
            assert same_bits(ctx.get_values(momentum), np.full(3, expected, np.float32))


@on_devices
def test_hyperparameters_do_not_take_the_parameters_format(device: str) -> None:
    """In bf16 both of these beta2 would round to 1."""
    moments = []
    for beta2 in (0.999, 0.9999):
        with st.Session(), st.Context(device) as ctx:
            line = Line(ctx, "bf16")
            update = st.adamw_update(line.loss, RATE, betas=(0.9, beta2))
            step = ctx.compile(st.sequence(st.grad_update(line.loss), update), name="step")
            for _ in range(10):
                ctx.run(step)
            moments.append(ctx.get_values(states_of(line.p)["adam_v"]))
            expected = np.square(np.array(C)) * (1 - beta2**10)
            np.testing.assert_allclose(moments[-1], expected, rtol=1e-4)
            assert np.isfinite(line.values().astype(np.float32)).all()
    assert (moments[0] / moments[1]).min() > 9


@on_devices
def test_a_number_is_a_host_scalar_that_costs_no_compile(device: str) -> None:
    with st.Session(), st.Context(device) as ctx:
        line, rate = Line(ctx), st.host_scalar("rate", RATE)
        step = ctx.compile(st.sequence(st.grad_update(line.loss), st.sgd_update(line.loss, rate)), name="step")
        ctx.run(step)
        compiles = ctx.stats.compiles
        ctx.set_values(rate, 0.5)
        ctx.run(step)
        assert ctx.stats.compiles == compiles
        np.testing.assert_allclose(line.values(), np.array(P0) - 0.6 * np.array(C), rtol=1e-6)


@on_devices
def test_two_optimizers_share_one_verdict(device: str) -> None:
    """One flag over all parameters, one scale change a step, whatever optimizer each parameter has."""
    with st.Session(), st.Context(device) as ctx:
        a, b = (st.param(name, output=[3], init=1.0) for name in "ab")
        c = st.placeholder("c", output=[3])
        loss = st.sum(a * c + b)
        ctx.init_params(loss)
        scaler = st.LossScaler(8.0)
        flag, gradients = st.scaled_grad_update(scaler, loss)
        update = st.sequence(
            st.scaled_sgd_update(scaler, loss, 0.1, params=[a]),
            st.adamw_update(loss, 0.1, grad_unscale=scaler.unscale, params=[b]),
        )
        grad_routine, update_routine = ctx.compile(gradients), ctx.compile(update)
        for factor, finite in ((1.0, True), (np.inf, False)):
            ctx.set_values(c, np.full(3, factor, np.float32))
            ran = st.scaled_step(
                ctx, scaler=scaler, grad_routine=grad_routine, update_routine=update_routine, checksum=flag
            )
            assert ran is finite
        np.testing.assert_allclose(ctx.get_values(a), 0.9, rtol=1e-6)
        np.testing.assert_allclose(ctx.get_values(b), 1 - 0.1 * 0.01 - 0.1, rtol=1e-6)
        assert (scaler.scale_value(), scaler.skipped_steps) == (4.0, 1)


def test_counts_belong_to_what_was_updated_together() -> None:
    with st.Session():
        a, b, c = (st.param(name, output=[2], init=1.0) for name in "abc")
        loss = st.sum(a + b + c)
        st.adamw_update(loss, 0.1, params=[b, c])
        st.adamw_update(loss, 0.1)
        counts = [states_of(p)["adamw_step"] for p in (a, b, c)]
        assert counts[1] is counts[2]
        assert counts[0] is not counts[1]
        assert [count.name for count in counts] == ["a.adamw_step", "b.adamw_step", "b.adamw_step"]
        assert {count.shape.size for count in counts} == {1}
