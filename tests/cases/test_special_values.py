"""Special values: masks, infinities, limits of narrow formats, subnormals, finiteness under fast math."""

from __future__ import annotations

import math

import numpy as np
import pytest

import stagedtensor as st
from tests.oracles.gradients import grad_of

from .running import FLOATS, both_devices, program, same, wide

NAN, INF = float("nan"), float("inf")


# -- masks --------------------------------------------------------------------------------------------------------


def test_a_mask_constant_too_large_for_a_narrowed_node_is_named() -> None:
    with program() as p:
        scores, mask = p.input([1.0, 2.0, 3.0]), p.input([1, 0, 1], st.u8)
        masked = st.where(mask, scores, -1e9)
        weights = st.softmax(masked)
        st.PrecisionPolicy(activation=st.f16).apply(weights)
        with pytest.raises(st.errors.ConstantRangeError) as caught:
            p.ctx.compile(weights)
        message = str(caught.value)
        assert "-1000000000.0" in message
        assert "f16" in message
        assert "65504" in message
        assert "test_special_values.py" in message


@both_devices
@pytest.mark.parametrize("fill", [-INF, -65504.0, -1e4])
def test_a_masked_softmax_in_f16_gives_exact_zeros(device: str, fill: float) -> None:
    with program(device) as p:
        scores, mask = p.input([1.0, 2.0, 3.0]), p.input([1, 0, 1], st.u8)
        weights = st.softmax(st.where(mask, scores, fill))
        st.PrecisionPolicy(activation=st.f16).apply(weights)
        (found,) = p.run(weights)
        assert found.dtype == np.float16
        assert found[1] == 0
        assert abs(float(found.astype(np.float64).sum()) - 1) < 1e-3
        np.testing.assert_allclose(found.astype(np.float64), [1 / (1 + math.e**2), 0, 1 / (1 + math.e**-2)], atol=5e-4)


@both_devices
def test_a_large_mask_constant_is_fine_where_the_node_stays_wide(device: str) -> None:
    with program(device) as p:
        scores, mask = p.input([1.0, 2.0, 3.0], st.f16), p.input([1, 0, 1], st.u8)
        masked = st.where(mask, st.cast(scores, st.f32), -1e9)
        (found,) = p.run(st.softmax(masked))
        assert found[1] == 0
        assert abs(float(found.sum()) - 1) < 1e-6


@both_devices
@pytest.mark.parametrize("fast", [False, True])
def test_softmax_of_infinite_masks(device: str, fast: bool) -> None:
    with program(device) as p:
        rows = [[1.0, -INF, -INF], [-INF, -INF, -INF], [-INF, 5.0, 5.0]]
        results = [st.softmax(p.input(rows, prec)) for prec in (st.f16, st.bf16, st.f32, st.f64)]
        for found in p.run(*results, numerics=st.Numerics(fast_math=fast)):
            same(found, [[1, 0, 0], [0, 0, 0], [0, 0.5, 0.5]])


@both_devices
def test_two_masks_may_add_up_to_minus_infinity(device: str) -> None:
    with program(device) as p:
        low, score = p.input([-65504.0, -65504.0], st.f16), p.input([-17.0, -1.0], st.f16)
        total = low + score
        found, weights = p.run(total, st.softmax(st.where(st.constant([1, 0]), total, -INF)))
        same(found, [-INF, -65504])
        same(weights, [0, 0])


def test_an_all_masked_row_has_gradient_zero_and_skips_no_step() -> None:
    with program() as p:
        w = st.param("w", output=[3], init=1.0)
        mask = p.input([[1, 0, 1], [0, 0, 0]], st.u8, batch=1)
        weights = st.softmax(st.where(mask, w, -INF))
        loss = st.sum(weights * st.constant([1.0, 2.0, 4.0]))
        flag, gradients = st.grad_checksum(loss), None
        gradients = st.grad_update(loss)
        step = p.ctx.compile(st.sequence(gradients, flag[1]))
        p.ctx.init_params(loss)
        p.feed()
        p.ctx.run(step)
        assert p.ctx.get_values(flag[0]).item() == 0.0
        np.testing.assert_allclose(p.ctx.get_values(grad_of(w)), [-0.75, 0, 0.75], rtol=1e-6)


# -- fast math ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prec", [st.f16, st.bf16, st.f32, st.f64])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_non_finite_gradient_is_seen_under_fast_math(prec: st.Prec, bad: float) -> None:
    with program() as p:
        x = p.input([1.0, bad, 2.0], st.f64 if prec is st.f64 else st.f32)
        w = st.param("w", output=[3], init=1.0, prec=st.f64 if prec is st.f64 else st.f32)
        loss = st.sum(st.cast(w, prec) * x)
        flag, check = st.grad_checksum(loss)
        step = p.ctx.compile(st.sequence(st.grad_update(loss), check), numerics=st.Numerics(fast_math=True))
        p.ctx.init_params(loss)
        p.feed()
        p.ctx.run(step)
        assert p.ctx.get_values(flag).item() == INF
        p.ctx.set_values(x, [1.0, 3.0, 2.0])
        p.ctx.run(step)
        assert p.ctx.get_values(flag).item() == 0.0


@both_devices
@pytest.mark.parametrize("fast", [False, True])
def test_subnormals_are_kept(device: str, fast: bool) -> None:
    tiny = float(np.float32(1e-40))
    with program(device) as p:
        x, inf = p.input([tiny]), p.input([INF])
        half = p.input([2.0**-24], st.f16)
        log, root, twice, times_inf, is_zero, half_twice, half_wide = p.run(
            st.log(x),
            st.sqrt(x),
            x * 2.0,
            x * inf,
            x == 0.0,
            half * 2.0,
            st.cast(half, st.f32) * 2.0,
            numerics=st.Numerics(fast_math=fast),
        )
        np.testing.assert_allclose(log, [math.log(tiny)], rtol=1e-6)
        np.testing.assert_allclose(root, [math.sqrt(tiny)], rtol=1e-6)
        same(twice, [float(np.float32(tiny) * np.float32(2))])
        same(times_inf, [INF])
        same(is_zero, [0])
        same(half_twice, [2.0**-23])
        same(half_wide, [2.0**-23])


# -- limits -------------------------------------------------------------------------------------------------------


@both_devices
def test_nan_to_num_uses_the_limits_of_the_format(device: str) -> None:
    values = [NAN, INF, -INF, 1.5, -0.0]
    with program(device) as p:
        precs = (*FLOATS, st.f8e5m2)
        found = p.run(*(st.nan_to_num(p.input(values, prec)) for prec in precs))
        for cells, prec in zip(found, precs, strict=True):
            assert cells.dtype == prec.numpy_dtype
            same(cells, [0, prec.max_finite, -prec.max_finite, 1.5, -0.0])
        (e4m3,) = p.run(st.nan_to_num(p.input([NAN, 448.0, -448.0, 1.5], st.f8e4m3)))
        same(e4m3, [0, 448, -448, 1.5])
    with program(device) as p:
        x = p.input(values, st.f16)
        (limited,) = p.run(st.nan_to_num(x, nan=7.0, posinf=1.0, neginf=-2.0))
        same(limited, [7, 1, -2, 1.5, -0.0])


@both_devices
def test_nan_to_num_leaves_integers_and_passes_finite_gradients(device: str) -> None:
    with program(device) as p:
        signed = p.input([-128, 127, 0], st.i8)
        unsigned = p.input([0, 255, 7], st.u8)
        for found, want in zip(
            p.run(st.nan_to_num(signed), st.nan_to_num(unsigned)), ([-128, 127, 0], [0, 255, 7]), strict=True
        ):
            assert found.tolist() == want
    with program(device) as p:
        x = p.input([NAN, INF, -INF, 1.5, 65504.0], st.f16, requires_grad=True)
        same(p.gradients(st.sum(st.nan_to_num(x)), x)[0], [0, 0, 0, 1, 1])


@both_devices
def test_clamp_by_the_limits_of_halves(device: str) -> None:
    with program(device) as p:
        half, brain = p.input([NAN, INF, -INF, 1.5], st.f16), p.input([NAN, INF, -INF, 1.5], st.bf16)
        top = st.bf16.max_finite
        clamped, wide_clamped = p.run(st.clamp(half, -65504.0, 65504.0), st.clamp(brain, -top, top))
        same(clamped, [NAN, 65504, -65504, 1.5])
        same(wide_clamped, [NAN, top, -top, 1.5])
        assert abs(top / 3.38953e38 - 1) < 1e-5


@both_devices
def test_extrema_start_from_nothing_but_the_data(device: str) -> None:
    with program(device) as p:
        results = []
        for prec in (*FLOATS, st.f8e5m2, st.f8e4m3, st.i32, st.i8):
            positive, negative = p.input([3, 1, 4], prec), p.input([-3, -1, -4], prec)
            results += [st.min(positive), st.max(negative)]
        for prec in (st.u8, st.u32, st.u64):
            results += [st.min(p.input([3, 1, 4], prec)), st.min(p.input([3, 1, 4], prec)) * 0 - 1]
        found = p.run(*results)
        for low, high in zip(found[:16:2], found[1:16:2], strict=True):
            assert (wide(low), wide(high)) == (1, -1)
        assert [cell.item() for cell in found[16::2]] == [1, 1, 1]


@both_devices
def test_extrema_of_infinities(device: str) -> None:
    with program(device) as p:
        for prec in FLOATS:
            low, high = p.run(st.max(p.input([-INF, -INF], prec)), st.min(p.input([INF, INF], prec)))
            assert (wide(low), wide(high)) == (-INF, INF)
        nan_max, nan_min = p.run(st.max(p.input([1.0, NAN, 3.0])), st.min(p.input([NAN, 1.0])))
        assert math.isnan(nan_max)
        assert math.isnan(nan_min)
