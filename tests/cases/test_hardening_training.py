"""Training pieces and statement strings under misuse: what is refused, by which class, and what formats state takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor.errors import CheckpointError, GradientError, SpecError


def parameter(name: str = "w", **options: Any) -> st.Tensor:
    return st.param(name, output=[3], init=1.0, **options)


@pytest.mark.parametrize(
    "call",
    [
        lambda: st.grad_update(None),  # type: ignore[arg-type]
        lambda: st.sgd_update(None, 0.1),  # type: ignore[arg-type]
        lambda: st.zero_param_grads(None),  # type: ignore[arg-type]
        lambda: st.grad_checksum("loss"),  # type: ignore[arg-type]
        lambda: st.trainable_params("loss"),  # type: ignore[arg-type]
        lambda: st.sgd_one("w", 0.1),  # type: ignore[arg-type]
        lambda: st.sgd_one(parameter() * 2.0, 0.1),
    ],
)
def test_what_is_no_loss_and_no_parameter_is_a_type_error(call: Callable[[], Any]) -> None:
    with st.Session(), pytest.raises(TypeError, match="test_hardening_training"):
        call()


def test_a_frozen_parameter_is_not_updated() -> None:
    with st.Session(), pytest.raises(GradientError, match="'w' has no gradient"):
        st.sgd_one(parameter(trainable=False), 0.1)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 1e40])
def test_a_loss_scale_that_f32_cannot_hold_is_refused(scale: float) -> None:
    with st.Session():
        w = parameter()
        with pytest.raises(ValueError, match="loss_scale"):
            st.grad_update(st.sum(w * w), loss_scale=scale)


@pytest.mark.parametrize("update", [st.sgd_update, st.adamw_update])
def test_state_of_an_inferred_f64_parameter_is_f64(update: Callable[..., st.Comp]) -> None:
    """The parameter is f64 because of what reads it, not because the user said so."""
    with st.Session(), st.Context("cpu") as ctx:
        w, x = parameter(), st.placeholder("x", output=[3], prec=st.f64)
        loss = st.sum(w * x)
        options = {"momentum": 0.9} if update is st.sgd_update else {"weight_decay": 0.0}
        routine = ctx.compile(st.sequence(st.grad_update(loss), update(loss, st.host_scalar("rate", 0.5), **options)))
        state = "w.momentum" if update is st.sgd_update else "w.adam_m"
        assert routine.precisions["w"].precision == "f64"
        assert routine.precisions[state].precision == "f64"
        ctx.init_params(loss)
        ctx.set_values(x, np.array([1 / 3, 0.1, 2 / 7]))
        ctx.run(routine)
        ctx.run(routine)
        if update is st.sgd_update:
            expected = 1.0 - 0.5 * np.array([1 / 3, 0.1, 2 / 7]) * (1 + 1.9)
            np.testing.assert_allclose(ctx.get_values(w), expected, rtol=0, atol=1e-15)


def test_a_scaler_takes_contexts_bools_and_its_own_states() -> None:
    scaler = st.LossScaler(8.0)
    with st.Context("reference") as ctx:
        with pytest.raises(TypeError, match="context"):
            scaler.update(None, True)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="bool"):
            scaler.update(ctx, "yes")  # type: ignore[arg-type]
        with pytest.raises(CheckpointError, match="NoneType"):
            scaler.load_state_dict(ctx, None)  # type: ignore[arg-type]
        assert scaler.steps == 0
        scaler.update(ctx, bool(np.isfinite(1.0)))
        assert (scaler.steps, scaler.good_steps, scaler.scale_value()) == (1, 1, 8.0)


def test_a_gated_step_takes_a_routine() -> None:
    with st.Session(), st.Context("reference") as ctx:
        w = parameter()
        scaler = st.LossScaler(8.0)
        window, _ = st.gated_scaled_update(scaler, st.sum(w * w), 0.1)
        missing: Any = None
        with pytest.raises(TypeError, match=r"ctx\.compile"):
            st.gated_step(ctx, scaler=scaler, routine=missing, window_checksum=window, check_interval=1, step=0)


@pytest.mark.parametrize(
    "expression", ["w + " * 3000 + "w", "relu(" * 400 + "w" + ")" * 400, "-" * 400 + "w", "3.5e400"]
)
def test_what_no_compiler_pass_could_walk_is_refused_at_the_text(expression: str) -> None:
    with st.Session(), pytest.raises(SpecError, match=r"levels|beyond every format"):
        st.computation(f"w =: {expression}", w=parameter())


def test_the_deepest_expression_runs() -> None:
    with st.Session(), st.Context("cpu") as ctx:
        w = parameter()
        routine = ctx.compile(st.computation("w =: " + "relu(" * 149 + "w + 1" + ")" * 149, w=w))
        ctx.init_params(w)
        ctx.run(routine)
        assert ctx.get_values(w).tolist() == [2.0, 2.0, 2.0]
