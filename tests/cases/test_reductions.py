"""Reductions: accumulation, squares and divisions at compute precision, one rounding at the end."""

from __future__ import annotations

import math

import numpy as np
import pytest

import stagedtensor as st
from tests.oracles.gradients import grad_of

from .running import both_devices, program, same, wide

INF = float("inf")


@both_devices
def test_a_mean_of_halves_that_fits_does_not_overflow(device: str) -> None:
    with program(device) as p:
        large, ones, flat = (
            p.input([40000.0] * 3, st.f16),
            p.input(np.ones(65520), st.f16),
            p.input([60000.0] * 3, st.f16),
        )
        rows = p.input([[40000.0, 40000.0], [60000.0, 64000.0]], st.f16)
        mean, mean_of_ones, var, total, first_axis, last_axis = p.run(
            st.mean(large), st.mean(ones), st.var(flat), st.sum(large), st.mean(rows, axis=0), st.mean(rows, axis=1)
        )
        same(mean, 40000)
        same(mean_of_ones, 1)
        same(var, 0)
        same(total, INF)  # the sum itself is not a half
        same(first_axis, [49984, 52000])  # 50000 is a tie between halves
        same(last_axis, [40000, 62016])


@both_devices
def test_the_gradient_of_a_mean_divides_wide(device: str) -> None:
    count = 65520
    with program(device) as p:
        x = p.input(np.ones(count), st.f16, requires_grad=True)
        found = p.gradients(st.mean(x), x)[0]
        np.testing.assert_allclose(found.astype(np.float64), 1 / count, rtol=2**-11)
    with program(device) as p:
        w = st.param("w", output=[3], init=40000.0)
        half = st.cast(w, st.f16)
        policy_loss = st.mean(half)
        st.PrecisionPolicy(activation=st.f16, grad=st.f16).apply(policy_loss)
        routine = p.ctx.compile(st.grad_update(policy_loss))
        p.ctx.init_params(policy_loss)
        p.ctx.run(routine)
        same(p.ctx.get_values(policy_loss), 40000)
        np.testing.assert_allclose(wide(p.ctx.get_values(grad_of(w))), [1 / 3] * 3, rtol=2**-10)


@both_devices
def test_norms_of_halves_square_wide(device: str) -> None:
    with program(device) as p:
        flat, spike = p.input([300.0] * 4, st.f16), p.input([940.0, 0.0, 0.0, 0.0], st.f16)
        pair = p.input([300.0, 300.0], st.f16)
        rms, layer, length = p.run(st.rms_norm(flat), st.layer_norm(spike), st.norm(pair))
        np.testing.assert_allclose(wide(rms), [1, 1, 1, 1], rtol=2**-10)
        np.testing.assert_allclose(wide(layer), [math.sqrt(3), *[-1 / math.sqrt(3)] * 3], rtol=2**-9)
        np.testing.assert_allclose(wide(length), 300 * math.sqrt(2), rtol=2**-11)


@both_devices
@pytest.mark.parametrize("fusion", [True, False])
def test_a_sum_of_squares_of_halves_fits_f32(device: str, fusion: bool) -> None:
    with program(device) as p:
        x = p.input([300.0, 300.0], st.f16)
        by_einsum = st.einsum("i,i->", x, x)
        st.specify(by_einsum, st.f32)

        @st.composite("sum_of_squares")
        def sum_of_squares(a: st.Tensor) -> st.Tensor:
            return st.sum(a * a)

        by_composite = sum_of_squares(x)
        st.specify(by_composite, st.f32)
        by_cast = st.sum(st.cast(x, st.f32) ** 2)
        for found in p.run(by_einsum, by_composite, by_cast, fusion=fusion):
            assert found.dtype == np.float32
            same(found, 180000)


@both_devices
def test_a_written_out_square_rounds_as_if_it_had_a_buffer(device: str) -> None:
    with program(device) as p:
        x = p.input([300.0, 300.0], st.f16)
        square = x * x
        total = st.sum(square)
        st.specify(total, st.f32)
        same(p.run(total)[0], INF)
        assert square.precision is st.f16


@both_devices
def test_counts_beyond_the_mantissa_are_exact(device: str) -> None:
    with program(device) as p:
        ones = [p.input(np.ones(5000), prec) for prec in (st.f16, st.bf16)]
        found = p.run(*(st.sum(x) for x in ones), *(st.mean(x) for x in ones))
        same(found[0], 5000)
        same(found[1], 4992)  # the nearest bf16
        same(found[2], 1)
        same(found[3], 1)


@both_devices
def test_small_integers_add_up_in_i32(device: str) -> None:
    with program(device) as p:
        bytes_, flags = p.input(np.full(1000, 200), st.u8), p.input(np.ones(1000), st.bool)
        signed = p.input(np.full(1000, -100), st.i8)
        totals = p.run(st.sum(bytes_), st.sum(flags), st.sum(signed), st.mean(bytes_))
        assert [cell.item() for cell in totals] == [200000, 1000, -100000, 200.0]
        assert [cell.dtype for cell in totals] == [np.int32, np.int32, np.int32, np.float32]


@both_devices
def test_reductions_over_every_axis_of_a_rectangle(device: str) -> None:
    data = np.arange(24, dtype=np.float64).reshape(2, 3, 4) - 10.0
    with program(device) as p:
        x = p.input(data, st.f64, batch=1)
        axes: list[int | tuple[int, ...]] = [0, 1, 2, (0, 2), (0, 1, 2)]
        made = []
        for axis in axes:
            given = list(axis) if isinstance(axis, tuple) else axis
            made += [st.sum(x, axis=given), st.max(x, axis=given), st.min(x, axis=given), st.mean(x, axis=given)]
        found = iter(p.run(*made))
        for axis in axes:
            for expected in (data.sum(axis), data.max(axis), data.min(axis), data.mean(axis)):
                np.testing.assert_allclose(next(found), expected, rtol=1e-15)


@both_devices
def test_variance_far_from_zero_keeps_its_digits(device: str) -> None:
    data = np.array([299.0, 301.0, 300.0, 300.0] * 16)
    with program(device) as p:
        half, single = p.input(data, st.f16), p.input(data * 1000)
        var_half, var_single = p.run(st.var(half), st.var(single))
        same(var_half, 0.5)
        np.testing.assert_allclose(var_single, 500000.0, rtol=1e-6)
