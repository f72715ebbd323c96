"""Optimizer precision: hyperparameters stay wide, literals never promote, equal numbers behave equally."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import stagedtensor as st

from .running import Array, both_devices, program, same


def adam_reference(gradients: list[Array], beta2: float) -> Array:
    """AdamW without decay in f64 with f32 learning rate 0.01."""
    p, m, v = np.full(3, 0.5), np.zeros(3), np.zeros(3)
    for t, g in enumerate(gradients, 1):
        m += (1 - 0.9) * (g - m)
        v += (1 - beta2) * (g * g - v)
        p -= 0.01 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - beta2**t)) + 1e-8)
    return p


@both_devices
def test_adam_betas_near_one_survive_a_narrow_policy(device: str) -> None:
    rng = np.random.default_rng(3)
    gradients = [rng.uniform(-1, 1, 3).astype(np.float32) * (1 + at % 3) for at in range(10)]

    def train(beta2: float) -> Array:
        with program(device) as p:
            with st.master_weights(st.bf16):
                twin = st.param("w", output=[3], init=0.5)
            w = twin.params[0]
            x = st.placeholder("x", output=[3], prec=st.f32)
            loss = st.sum(st.cast(twin, st.f32) * x)
            st.PrecisionPolicy(activation=st.bf16).apply(loss)
            p.ctx.init_params(loss)
            update = st.adamw_update(loss, 0.01, betas=(0.9, beta2), weight_decay=0.0)
            routine = p.ctx.compile(st.sequence(st.grad_update(loss), update))
            for gradient in gradients:
                p.ctx.set_values(x, gradient)
                p.ctx.run(routine)
            return p.ctx.get_values(w)

    first, second = train(0.999), train(0.9999)
    assert (first != second).any()
    for found, beta2 in ((first, 0.999), (second, 0.9999)):
        assert np.isfinite(found).all()
        np.testing.assert_allclose(found, adam_reference(gradients, beta2), rtol=2e-5)


@both_devices
def test_an_average_of_bf16_values_keeps_its_decay(device: str) -> None:
    """ema = 0.999 ema + 0.001 w: the factors would be 1 and 0.001 in bf16."""
    with program(device) as p:
        w = p.input([1.0, -2.0], st.bf16)
        ema = st.param("ema", output=[2], init=0.0, prec=st.f32, trainable=False)
        step = p.ctx.compile(st.computation("ema =: decay *. ema + (1 - decay) *. w", ema=ema, w=w, decay=0.999))
        p.ctx.init_params(ema)
        p.feed()
        for _ in range(100):
            p.ctx.run(step)
        expected = 1 - 0.999**100
        np.testing.assert_allclose(p.ctx.get_values(ema), [expected, -2 * expected], rtol=1e-4)


@pytest.mark.parametrize("prec", [st.bf16, st.f16, st.f32, st.f64])
def test_numbers_never_promote(prec: st.Prec) -> None:
    numbers: list[Any] = [0.5, np.float32(0.5), np.float64(0.5), np.float16(0.5), 2, np.int64(2), True, np.bool_(True)]
    with program() as p:
        x = p.input([1.0, 3.0], prec)
        results = [operation for number in numbers for operation in (x * number, number * x, x + number, x**number)]
        assert {result.precision for result in results} == {prec}
        found = p.run(*results)
        per_number = len(results) // len(numbers)
        for at in range(1, 4):  # equal values give equal results
            for left, right in zip(found[:per_number], found[at * per_number : (at + 1) * per_number], strict=True):
                same(left, right.astype(np.float64))


def test_arrays_and_tensors_bring_their_format() -> None:
    with program() as p:
        x = p.input([1.0, 3.0], st.bf16)
        zero_d: Any = np.array(0.5, np.float32)
        assert (x * zero_d).precision is st.f32
        assert (zero_d * x).precision is st.f32
        assert (x * st.host_scalar("rate", 0.5)).precision is st.f32
        assert (x * st.constant(0.5)).precision is st.bf16
        assert (x * st.constant([0.5, 0.5])).precision is st.bf16
        assert (x * st.constant(0.5, prec=st.f16)).precision is st.f32  # bf16 with f16
        assert (x * np.array([0.5, 0.5])).precision is st.f64


@both_devices
def test_a_learning_rate_of_any_type_trains_alike(device: str) -> None:
    def train(rate: Any) -> list[float]:
        with program(device) as p:
            with st.master_weights(st.bf16):
                twin = st.param("w", output=[2], init=1.0)
            loss = st.sum(twin * st.constant([1.0, 3.0]))
            st.PrecisionPolicy(activation=st.bf16, grad=st.bf16).apply(loss)
            p.ctx.init_params(loss)
            if rate == "scalar":
                rate = st.host_scalar("lr", 0.001)
            routine = p.ctx.compile(st.sequence(st.grad_update(loss), st.sgd_update(loss, rate)))
            p.ctx.run(routine)
            w = twin.params[0]
            assert w.precision is st.f32
            values: list[float] = p.ctx.get_values(w).tolist()
            return values

    plain = train(0.001)
    rate = np.float32(0.001)
    assert plain == [float(np.float32(1) - rate), float(np.float32(1) - rate * np.float32(3))]
    assert train(np.float64(0.001)) == train(np.float32(0.001)) == train("scalar") == plain
