"""Autodiff: branches not taken, ties, powers, precision of gradients, several roots over shared tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import stagedtensor as st

from .running import both_devices, program, same

NAN, INF = float("nan"), float("inf")


def slopes(build: Callable[[st.Tensor], st.Tensor], values: Any, device: str, prec: st.Prec = st.f32) -> Any:
    """Return the gradient of sum(build(x)) at ``values``."""
    with program(device) as p:
        x = p.input(values, prec, requires_grad=True)
        return p.gradients(st.sum(build(x)), x)[0]


@both_devices
@pytest.mark.parametrize("prec", [st.f32, st.f16, st.bf16])
def test_no_gradient_leaks_through_the_branch_not_taken(device: str, prec: st.Prec) -> None:
    cases: list[tuple[Callable[[st.Tensor], st.Tensor], float]] = [
        (lambda x: st.where(x < 1.0, x, st.sqrt(x)), 1.0),
        (lambda x: st.where(x > 0.0, st.log(x), 0.0), 0.0),
        (lambda x: st.where(x > 0.0, 1.0 / x, x), 1.0),
        (lambda x: st.where(x > 0.0, st.rsqrt(x) * 3.0, x * 2.0), 2.0),
        (lambda x: st.where(x > 0.0, x**-0.5, 0.0), 0.0),
        (lambda x: st.where(x > 0.0, st.recip(st.sqrt(x)), x), 1.0),
        (lambda x: st.where(x > 0.0, x / st.abs(x), x), 1.0),
        (lambda x: st.where(x > 0.0, st.exp(1.0 / x), x), 1.0),
        (lambda x: st.where(x > 0.0, st.log2(x) * st.log(x), x), 1.0),
        (lambda x: st.where(x != 0.0, x * st.log(st.abs(x)), 0.0), 0.0),
        (lambda x: st.where(x != 0.0, st.sin(1.0 / x) + st.cos(1.0 / x), x), 1.0),
        (lambda x: st.where(x != 0.0, st.exp2(1.0 / x) * x, x), 1.0),
        (lambda x: st.where(x != 0.0, st.tanh(x / x) + st.sigmoid(x / x) + st.erf(x / x), x), 1.0),
        (lambda x: st.where(x != 0.0, st.abs(x / x) + st.fma(x / x, 1.0 / x, x), x), 1.0),
        (st.norm, 0.0),
    ]
    with program(device) as p:
        inputs = [p.input([0.0, -0.0], prec, requires_grad=True) for _ in cases]
        losses = [st.sum(build(x)) for (build, _), x in zip(cases, inputs, strict=True)]
        loss = sum(losses[1:], losses[0])
        for found, (_, expected) in zip(p.gradients(loss, *inputs), cases, strict=True):
            same(found, [expected, expected])


def test_a_masked_branch_triggers_no_skip() -> None:
    with program() as p:
        w = st.param("w", output=[3], init=0.0)
        loss = st.sum(st.where(w > 0.0, st.sqrt(w) * st.log(w), w * 0.5))
        p.ctx.init_params(loss)
        scaler = st.LossScaler(1024.0)
        window, comp = st.gated_scaled_update(scaler, loss, 1.0)
        routine = p.ctx.compile(comp)
        assert st.gated_step(p.ctx, scaler=scaler, routine=routine, window_checksum=window, check_interval=1, step=0)
        same(p.ctx.get_values(w), [-0.5] * 3)


@both_devices
def test_ties(device: str) -> None:
    same(slopes(st.relu, [0.0, -0.0, 1.0, -1.0], device), [0, 0, 1, 0])
    same(slopes(lambda x: st.maximum(x, 0.0), [0.0], device), [1])  # the first operand
    same(slopes(lambda x: st.minimum(0.0, x), [0.0], device), [0])
    same(slopes(lambda x: st.maximum(x, x), [2.0], device), [1])
    same(slopes(lambda x: st.clamp(x, 0.0, 6.0), [0.0, 6.0, 6.5, -1.0], device), [1, 1, 0, 0])
    same(slopes(lambda x: st.clamp(x, high=6.0), [-9.0, 6.0, 7.0], device), [1, 1, 0])
    for prec in (st.f32, st.f16, st.bf16):
        same(slopes(st.max, [0.6, 0.6, 0.3], device, prec), [1, 0, 0])
        same(slopes(st.min, [0.6, 0.3, 0.3], device, prec), [0, 1, 0])
    same(slopes(lambda x: st.max(x, axis=0), [[1.0, 5.0], [1.0, 4.0]], device), [[1, 1], [0, 0]])
    same(slopes(lambda x: st.max(x, axis=1), [[1.0, 1.0], [4.0, 5.0]], device), [[1, 0], [0, 1]])
    same(slopes(lambda x: st.einsum("ij=>j", x, reduce="max"), [[1.0, 5.0], [1.0, 4.0]], device), [[1, 1], [0, 0]])
    same(slopes(st.abs, [0.0, -0.0, 2.0], device), [0, 0, 1])


@both_devices
def test_rounded_ties_send_the_gradient_to_one_cell(device: str) -> None:
    """Values that differ in f32 tie in bf16; the tie is decided on what is stored."""
    with program(device) as p:
        w = st.param("w", output=[3], init=np.array([1.0, 1.001, 1.002]))
        loss = st.max(st.cast(w, st.bf16))
        routine = p.ctx.compile(st.grad_update(loss))
        p.ctx.init_params(loss)
        p.ctx.run(routine)
        assert w.grad is not None
        same(p.ctx.get_values(w.grad), [1, 0, 0])


@both_devices
def test_powers(device: str) -> None:
    values = [-2.0, 0.0, 3.0]
    root3 = float(np.sqrt(np.float32(3)))
    with program(device) as p:
        x, n = p.input(values), p.input([-2, 0, 3], st.i32)
        half = p.input(values, st.f16)
        square, cube, zeroth, root, int_square, int_cube, int_zeroth, half_square, half_cube, base, negative = p.run(
            x**2, x**3, x**0, x**0.5, n**2, n**3, n**0, half**2, half**3.0, 2.0**x, n**-1
        )
        for found, want in (
            (square, [4, 0, 9]), (cube, [-8, 0, 27]), (zeroth, [1, 1, 1]), (half_square, [4, 0, 9]),
            (half_cube, [-8, 0, 27]), (base, [0.25, 1, 8]),
        ):  # fmt: skip
            same(found, want)
        same(root[:2], [NAN, 0])
        np.testing.assert_allclose(root[2], root3, rtol=2e-7)
        assert int_square.tolist() == [4, 0, 9]
        assert int_cube.tolist() == [-8, 0, 27]
        assert int_zeroth.tolist() == [1, 1, 1]
        assert negative.tolist() == [0, 0, 0]
        assert int_square.dtype == np.int32
        zero = p.run(st.constant(0.0) ** st.constant(0.0) + x * 0.0)[0]
        same(zero, [1, 1, 1])
    same(slopes(lambda x: x**2, values, device), [-4, 0, 6])
    same(slopes(lambda x: x**2.0, values, device, st.f16), [-4, 0, 6])
    same(slopes(lambda x: x**3, values, device), [12, 0, 27])
    same(slopes(lambda x: x**1, values, device), [1, 1, 1])
    same(slopes(lambda x: x**0, values, device), [0, 0, 0])
    found = slopes(lambda x: x**0.5, values, device)
    assert np.isnan(found[0])
    assert found[1] == INF
    np.testing.assert_allclose(found[2], 0.5 / root3, rtol=1e-6)
    same(slopes(lambda e: st.constant(0.0) ** e, [2.0, 0.5], device), [0, 0])


# -- precision ----------------------------------------------------------------------------------------------------


def test_gradients_have_precisions_of_their_own() -> None:
    for prec, expected in ((st.f16, st.f32), (st.bf16, st.f32), (st.f32, st.f32), (st.f64, st.f64)):
        with program() as p:
            x = p.input([1.0, 2.0], prec, requires_grad=True)
            loss = st.sum(x * x)
            p.gradients(loss, x)
            assert x.grad is not None
            assert x.grad.precision is expected
            assert loss.precision is st.f32
    with program(default_prec=st.f64) as p:
        w = st.param("w", output=[2], init=1.0)
        hidden = st.tanh(w * 0.1)
        loss = st.sum(hidden)
        routine = p.ctx.compile(st.grad_update(loss))
        p.ctx.init_params(loss)
        p.ctx.run(routine)
        assert w.grad is not None
        assert hidden.grad is not None
        assert w.grad.precision is hidden.grad.precision is st.f64
        np.testing.assert_allclose(p.ctx.get_values(w.grad), 0.1 * (1 - np.tanh(0.1) ** 2), rtol=1e-15)


@both_devices
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("prec", [st.f16, st.f64])
def test_a_softmax_gradient_over_any_axis(device: str, axis: int, prec: st.Prec) -> None:
    data = np.array([[0.5, -1.0, 2.0], [1.5, 0.25, -0.5]])
    weight = np.array([[1.0, 2.0, -1.0], [0.5, 3.0, 1.0]])
    powers = np.exp(data - data.max(axis, keepdims=True))
    y = powers / powers.sum(axis, keepdims=True)
    expected = y * (weight - (y * weight).sum(axis, keepdims=True))
    with program(device) as p:
        x = p.input(data, prec, requires_grad=True)
        soft = st.softmax(x, axis=axis)
        loss = st.sum(soft * st.constant(weight.tolist()))
        if prec is st.f16:
            st.specify(x.grad, st.f16)
            assert soft.grad is not None
            st.specify(soft.grad, st.f16)
        found = p.gradients(loss, x)[0]
        assert found.dtype == prec.numpy_dtype
        np.testing.assert_allclose(found.astype(np.float64), expected, atol=1e-15 if prec is st.f64 else 2e-3)


# -- roots --------------------------------------------------------------------------------------------------------


@both_devices
@pytest.mark.parametrize("fusion", [True, False])
def test_roots_that_share_a_tensor_add_their_gradients(device: str, fusion: bool) -> None:
    b, c = np.array([1.0, 2.0]), np.array([10.0, 20.0])
    with program(device) as p:
        a = st.param("a", output=[2], init=3.0)
        shared = a * 2.0
        first, second = st.sum(shared * st.constant(b.tolist())), st.sum(shared * st.constant(c.tolist()))
        routine = p.ctx.compile(st.grad_update([first, second]), fusion=fusion)
        p.ctx.init_params([first, second])
        assert a.grad is not None
        for _ in range(3):
            p.ctx.run(routine)
            same(p.ctx.get_values(a.grad), 2 * (b + c))
            assert p.ctx.get_values(first).item() == 6 * b.sum()
            assert p.ctx.get_values(second).item() == 6 * c.sum()


@both_devices
def test_separate_backward_passes_do_not_see_each_other(device: str) -> None:
    b, c = np.array([1.0, 2.0]), np.array([10.0, 20.0])
    with program(device) as p:
        a = st.param("a", output=[2], init=3.0)
        first, second = st.sum(a * st.constant(b.tolist())), st.sum(a * st.constant(c.tolist()))
        one, other = p.ctx.compile(st.grad_update(first)), p.ctx.compile(st.grad_update(second))
        p.ctx.init_params([first, second])
        assert a.grad is not None
        for routine, expected in ((one, b), (one, b), (other, c), (one, b)):
            p.ctx.run(routine)
            same(p.ctx.get_values(a.grad), expected)


@both_devices
def test_a_tensor_used_many_times_gets_every_contribution(device: str) -> None:
    same(slopes(lambda x: x * x * x + x, [2.0, -1.0], device), [13, 4])
    same(slopes(lambda x: st.einsum("i,i->", x, x), [2.0, -1.0], device), [4, -2])
    same(slopes(lambda x: st.concat([x, x * 2.0, x]), [2.0, -1.0], device), [4, 4])
