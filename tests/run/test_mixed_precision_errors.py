"""What the recipes refuse, by name, before anything is built or run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor.errors import CheckpointError, ContextError, GradientError, PrecisionError
from stagedtensor.train import _check_zeroing

from .mixed_models import same_bits
from .test_mixed_precision_optimizers import P0, Line


@pytest.fixture
def ctx() -> Iterator[st.Context]:
    with st.Session(), st.Context("reference") as context:
        yield context


# -- twins ------------------------------------------------------------------------------------------------------------


def test_twins_of_what_is_no_parameter(ctx: st.Context) -> None:
    x = st.placeholder("x", output=[2], requires_grad=True)
    w = st.param("w", output=[2])
    for wrong in (x, st.cast_param(w, "bf16"), w + 1.0, 3.0):
        with pytest.raises(TypeError, match="parameter"):
            st.cast_param(wrong, "bf16")  # type: ignore[arg-type]


def test_twin_placements(ctx: st.Context) -> None:
    w = st.param("w", output=[2])
    with pytest.raises(ValueError, match="'shared'"):
        st.cast_param(w, "bf16", placement="shared")
    assert st.twin_of(w) is None
    assert w.node.specified is None
    twin = st.cast_param(w, "bf16", placement="virtual")
    assert st.cast_param(w, "bf16", placement=st.TwinPlacement.VIRTUAL) is twin
    with pytest.raises(ValueError, match="'virtual' already"):
        st.cast_param(w, "bf16", placement="materialized")
    for prec in ("bf16", None):
        with pytest.raises(ValueError, match="'shared'"), st.master_weights(prec, "shared"):
            pass


@pytest.mark.parametrize(
    ("prec", "master", "message"),
    [
        ("i8", "f32", "i8"),
        ("bf16", "i32", "i32"),
        ("fp4", "f32", "fp4"),
        ("f32", "bf16", "cannot hold"),
        ("bf16", "f16", "cannot hold"),
        ("f16", "bf16", "cannot hold"),
        ("f64", "f32", "cannot hold"),
    ],
)
def test_twin_formats(ctx: st.Context, prec: str, master: str, message: str) -> None:
    w = st.param("w", output=[2])
    assert w.grad is not None
    with pytest.raises(PrecisionError, match=message):
        st.cast_param(w, prec, master_prec=master)
    assert st.twin_of(w) is None
    assert (w.node.specified, w.grad.node.specified, w.node.consumers) == (None, None, [])
    with pytest.raises(PrecisionError, match=message), st.master_weights(prec, master_prec=master):
        pass


def test_a_settled_master_is_not_pinned_elsewhere(ctx: st.Context) -> None:
    w = st.param("w", output=[2], init=0.5)
    y = st.sum(w * st.placeholder("x", output=[2], prec="bf16"))
    ctx.compile(y)
    assert w.grad is not None
    with pytest.raises(PrecisionError, match="w: cannot specify f32"):
        st.cast_param(w, "f16")
    assert w.grad.node.specified is None
    assert st.twin_of(w) is None


def test_only_is_a_test(ctx: st.Context) -> None:
    with pytest.raises(TypeError, match="only"), st.master_weights("bf16", only="bias"):  # type: ignore[arg-type]
        pass


# -- building steps ---------------------------------------------------------------------------------------------------

BUILDERS: dict[str, Callable[..., Any]] = {
    "grad_update": lambda s, loss, **o: st.grad_update(loss, **o),
    "zero_param_grads": lambda s, loss, **o: st.zero_param_grads(loss, **o),
    "grad_checksum": lambda s, loss, **o: st.grad_checksum(loss, **o),
    "clip_by_global_norm": lambda s, loss, **o: st.clip_by_global_norm(loss, 1.0, **o),
    "sgd_update": lambda s, loss, **o: st.sgd_update(loss, 0.1, **o),
    "adamw_update": lambda s, loss, **o: st.adamw_update(loss, 0.1, **o),
    "scaled_grad_update": lambda s, loss, **o: st.scaled_grad_update(s, loss, **o),
    "scaled_sgd_update": lambda s, loss, **o: st.scaled_sgd_update(s, loss, 0.1, **o),
    "gated_scaled_update": lambda s, loss, **o: st.gated_scaled_update(s, loss, 0.1, **o),
    "gated_apply_update": lambda s, loss, **o: st.gated_apply_update(s, loss, 0.1, **o),
    "static_scaled_update": lambda s, loss, **o: st.static_scaled_update(loss, 0.1, scale=8.0, **o),
}


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
def test_losses_that_train_nothing(ctx: st.Context, build: Callable[..., Any]) -> None:
    scaler, line = st.LossScaler(), Line(ctx)
    with pytest.raises(GradientError, match="no parameters"):
        build(scaler, st.sum(st.placeholder("x", output=[2])))
    frozen = st.sum(st.stop_gradient(st.param("w", output=[2])) * st.placeholder("y", output=[2], requires_grad=True))
    if build is not BUILDERS["grad_update"]:  # which may be after the placeholder's gradient
        with pytest.raises(GradientError, match="no parameters"):
            build(scaler, frozen)
    with pytest.raises(GradientError, match="no parameters"):
        build(scaler, line.loss, params=[])
    other = st.param("other", output=[2])
    with pytest.raises(GradientError, match="'other'"):
        build(scaler, line.loss, params=[line.p, other])
    assert scaler.windows == []


@pytest.mark.parametrize("max_norm", [-1.0, float("nan"), float("inf"), True, "1"])
def test_max_norm(ctx: st.Context, max_norm: Any) -> None:
    line, scaler = Line(ctx), st.LossScaler()
    builds: list[Callable[[], object]] = [
        lambda: st.clip_by_global_norm(line.loss, max_norm),
        lambda: st.gated_scaled_update(scaler, line.loss, 0.1, max_norm=max_norm),
        lambda: st.static_scaled_update(line.loss, 0.1, scale=2.0, max_norm=max_norm),
    ]
    for build in builds:
        with pytest.raises(ValueError, match="max_norm"):
            build()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentum": 1.0}, "momentum"),
        ({"momentum": -0.1}, "momentum"),
        ({"momentum": True}, "momentum"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"weight_decay": float("inf")}, "weight_decay"),
        ({"nesterov": True}, "nesterov"),
    ],
)
def test_sgd_settings(ctx: st.Context, options: dict[str, Any], message: str) -> None:
    line, scaler = Line(ctx), st.LossScaler()
    builds: list[Callable[[], object]] = [
        lambda: st.sgd_one(line.p, 0.1, **options),
        lambda: st.sgd_update(line.loss, 0.1, **options),
        lambda: st.scaled_sgd_update(scaler, line.loss, 0.1, **options),
        lambda: st.gated_scaled_update(scaler, line.loss, 0.1, **options),
    ]
    for build in builds:
        with pytest.raises(ValueError, match=message):
            build()
    assert line.p.node.states == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"betas": (1.0, 0.9)}, "betas"),
        ({"betas": (0.9, -0.1)}, "betas"),
        ({"betas": 0.9}, "betas"),
        ({"eps": 0.0}, "eps"),
        ({"eps": float("nan")}, "eps"),
        ({"weight_decay": -1.0}, "weight_decay"),
    ],
)
def test_adamw_settings(ctx: st.Context, options: dict[str, Any], message: str) -> None:
    line = Line(ctx)
    with pytest.raises(ValueError, match=message):
        st.adamw_update(line.loss, 0.1, **options)
    assert line.p.node.states == {}


def test_updater_options_are_never_dropped(ctx: st.Context) -> None:
    line, scaler = Line(ctx), st.LossScaler()
    builds: list[Callable[[], object]] = [
        lambda: st.gated_scaled_update(scaler, line.loss, 0.1, momentun=0.9),
        lambda: st.gated_scaled_update(scaler, line.loss, 0.1, update=st.adamw_update, momentum=0.9),
        lambda: st.gated_apply_update(scaler, line.loss, 0.1, betas=(0.9, 0.99)),
        lambda: st.static_scaled_update(line.loss, 0.1, scale=2.0, update=st.adamw_update, nesterov=True),
        lambda: st.gated_scaled_update(scaler, line.loss, 0.1, max_norm=1.0, grad_scale=st.host_scalar("rescale", 1.0)),
    ]
    for build in builds:
        with pytest.raises(TypeError, match=r"momentun|momentum|betas|nesterov|grad_scale"):
            build()
    assert scaler.windows == []


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan"), 2.0**-127, 2.0**127])
def test_static_scales(ctx: st.Context, scale: float) -> None:
    line = Line(ctx)
    with pytest.raises(ValueError, match="scale"):
        st.static_scaled_update(line.loss, 0.1, scale=scale)
    if not 0 < scale < float("inf"):
        with pytest.raises(ValueError, match="loss_scale"):
            st.grad_update(line.loss, loss_scale=scale)


def test_arguments_of_a_wrong_kind(ctx: st.Context) -> None:
    line, scaler = Line(ctx), st.LossScaler()
    loose: Any = st
    builds: list[Callable[[], object]] = [
        lambda: loose.scaled_grad_update(65536.0, line.loss),
        lambda: loose.gated_scaled_update(scaler.scale, line.loss, 0.1),
        lambda: loose.gated_apply_update(None, line.loss, 0.1),
        lambda: loose.scaled_sgd_update(line.loss, scaler, 0.1),
        lambda: loose.static_scaled_update(line.loss, 0.1, scale="8"),
        lambda: loose.grad_update(line.loss, loss_scale="8"),
        lambda: loose.sgd_update(line.loss, "0.1"),
        lambda: loose.grad_update([line.loss, 1.0]),
    ]
    for build in builds:
        with pytest.raises(TypeError):
            build()


@pytest.mark.parametrize("accum_steps", [0, -1, True, 2.0])
def test_accum_steps(ctx: st.Context, accum_steps: Any) -> None:
    line, scaler = Line(ctx), st.LossScaler()
    builds: list[Callable[[], object]] = [
        lambda: st.grad_update(line.loss, accum_steps=accum_steps),
        lambda: st.scaled_grad_update(scaler, line.loss, accum_steps=accum_steps),
    ]
    for build in builds:
        with pytest.raises(ValueError, match="accum_steps"):
            build()


@pytest.mark.parametrize("directly", [True, False])
def test_saturating_gradients_hide_overflow(ctx: st.Context, directly: bool) -> None:
    line, scaler = Line(ctx, "f16"), st.LossScaler()
    product = line.p * line.c
    loss = st.sum(product)
    assert product.grad is not None
    st.specify(product.grad, "f16", saturate=True, only_if=None if directly else st.is_float)
    builds: list[Callable[[], object]] = [
        lambda: st.scaled_grad_update(scaler, loss),
        lambda: st.gated_scaled_update(scaler, loss, 0.1),
        lambda: st.gated_apply_update(scaler, loss, 0.1),
    ]
    for build in builds:
        with pytest.raises(PrecisionError, match=r"mul\.grad"):
            build()
    assert scaler.windows == []
    st.scaled_grad_update(scaler, line.loss)  # another loss, whose gradients do not saturate
    st.grad_update(loss)  # no scaler, nothing to hide


def test_a_saturation_whose_condition_fails(ctx: st.Context) -> None:
    line, scaler = Line(ctx), st.LossScaler()
    assert line.p.grad is not None
    st.specify(line.p.grad, "bf16", saturate=True, only_if=st.is_integer)
    st.scaled_grad_update(scaler, line.loss)


def test_a_missing_zeroing_is_noticed(ctx: st.Context) -> None:
    """The internal check of what grad_update builds, fed a computation without its zeroing."""
    line = Line(ctx)
    whole = st.grad_update(line.loss)
    statements = [statement for statement, _ in whole.statements() if statement.stage.value != "zero"]
    _check_zeroing(whole, set())
    with pytest.raises(GradientError, match="never zeroed"):
        _check_zeroing(st.Comp(tuple(statements)), set())


# -- running steps ----------------------------------------------------------------------------------------------------


@dataclass
class Steps:
    """Routines of both recipes on one line."""

    line: Line
    scaler: st.LossScaler
    flag: st.Tensor
    gradients: st.Routine
    update: st.Routine
    window: st.Tensor
    gated: st.Routine
    zero: st.Routine
    micro: st.Routine
    apply_window: st.Tensor
    apply: st.Routine


def steps_of(ctx: st.Context) -> Steps:
    line, scaler = Line(ctx), st.LossScaler(8.0)
    flag, gradients = st.scaled_grad_update(scaler, line.loss)
    window, gated = st.gated_scaled_update(scaler, line.loss, 0.1)
    apply_window, apply = st.gated_apply_update(scaler, line.loss, 0.1)
    micro = st.grad_update(line.loss, loss_scale=scaler.scale, accum_steps=4)
    return Steps(
        line,
        scaler,
        flag,
        ctx.compile(gradients, name="gradients"),
        ctx.compile(st.scaled_sgd_update(scaler, line.loss, 0.1), name="update"),
        window,
        ctx.compile(gated, name="gated"),
        ctx.compile(st.zero_param_grads(line.loss), name="zero"),
        ctx.compile(micro, name="micro"),
        apply_window,
        ctx.compile(apply, name="apply"),
    )


def refuse(ctx: st.Context, steps: Steps, error: type[Exception], match: str, act: Callable[[], object]) -> None:
    """Check that ``act`` raises and that nothing ran or changed."""
    runs, state = ctx.stats.runs, steps.scaler.state_dict()
    with pytest.raises(error, match=match):
        act()
    assert ctx.stats.runs == runs
    assert steps.scaler.state_dict() == state
    assert same_bits(steps.line.values(), np.array(P0, np.float32))


def test_scaled_steps(ctx: st.Context) -> None:
    s = steps_of(ctx)
    right: dict[str, Any] = {
        "scaler": s.scaler, "grad_routine": s.gradients, "update_routine": s.update, "checksum": s.flag,
    }  # fmt: skip
    other = st.LossScaler()
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"scaler": other}, ContextError, "'gradients' was not built from this scaler"),
        ({"grad_routine": s.zero}, ContextError, "'zero' was not built from this scaler"),
        ({"update_routine": s.zero}, ContextError, "'zero' was not built from this scaler"),
        ({"checksum": s.window}, ContextError, "'gradients' was not built from this flag"),
        ({"scaler": 8.0}, TypeError, "LossScaler"),
        ({"accum_steps": 0}, ValueError, "accum_steps"),
        ({"accum_steps": True}, ValueError, "accum_steps"),
        ({"accum_steps": 4}, ValueError, "zero_routine"),
        ({"accum_steps": 4, "zero_routine": s.zero}, ValueError, "built for 1"),
        ({"grad_routine": s.micro}, ValueError, "zero_routine"),
    ]
    for change, error, match in wrong:
        refuse(ctx, s, error, match, partial(st.scaled_step, ctx, **{**right, **change}))
    assert st.scaled_step(ctx, **right)


def test_gated_steps(ctx: st.Context) -> None:
    s = steps_of(ctx)
    right: dict[str, Any] = {
        "scaler": s.scaler, "routine": s.gated, "window_checksum": s.window, "check_interval": 1, "step": 0,
    }  # fmt: skip
    micro: dict[str, Any] = {
        **right, "routine": s.apply, "window_checksum": s.apply_window, "micro_routine": s.micro,
        "zero_routine": s.zero, "accum_steps": 4,
    }  # fmt: skip
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({**right, "check_interval": 0}, ValueError, "check_interval"),
        ({**right, "check_interval": True}, ValueError, "check_interval"),
        ({**right, "step": -1}, ValueError, "step"),
        ({**right, "step": True}, ValueError, "step"),
        ({**right, "accum_steps": 0}, ValueError, "accum_steps"),
        ({**right, "accum_steps": 4}, ValueError, "micro_routine and zero_routine"),
        ({**right, "accum_steps": 4, "zero_routine": s.zero}, ValueError, "micro_routine and zero_routine"),
        ({**right, "scaler": st.LossScaler()}, ContextError, "no window of this scaler"),
        ({**right, "window_checksum": s.flag}, ContextError, "no window of this scaler"),
        ({**right, "window_checksum": s.apply_window}, ContextError, "'gated' was not built from this window"),
        ({**right, "routine": s.update}, ContextError, "'update' was not built from this scaler"),
        ({**right, "routine": s.apply}, ContextError, "'apply' was not built from this scaler"),
        ({**micro, "zero_routine": None}, ValueError, "zero_routine"),
        ({**micro, "accum_steps": 2}, ValueError, "built for 4"),
        ({**micro, "micro_routine": s.zero, "accum_steps": 1}, ContextError, "'zero' was not built from this scaler"),
        ({**micro, "routine": s.gated, "window_checksum": s.window}, ValueError, "backward of its own"),
    ]
    for arguments, error, match in wrong:
        refuse(ctx, s, error, match, partial(st.gated_step, ctx, **arguments))
    assert st.gated_step(ctx, **right)
    assert st.gated_step(ctx, **micro)
    assert s.scaler.steps == 2


def test_reading_a_window_is_counted_and_gives_fresh_arrays(ctx: st.Context) -> None:
    s = steps_of(ctx)
    for step in range(2):
        st.gated_step(ctx, scaler=s.scaler, routine=s.gated, window_checksum=s.window, check_interval=100, step=step)
    before = ctx.stats
    runs = ctx.get_values(s.scaler.windows[0].runs)
    assert (runs.shape, runs.dtype, int(runs)) == ((), np.int32, 2)
    runs[...] = 7
    assert int(ctx.get_values(s.scaler.windows[0].runs)) == 2
    assert ctx.stats.downloads == before.downloads + 2
    assert ctx.stats.downloaded_bytes == before.downloaded_bytes + 8
    ctx.close()
    with pytest.raises(ContextError, match="closed"):
        ctx.get_values(s.scaler.windows[0].runs)


def test_a_scaler_serves_one_context(ctx: st.Context) -> None:
    s = steps_of(ctx)
    s.scaler.update(ctx, True)
    with st.Context("reference") as other:
        state = s.scaler.state_dict()
        acts: list[Callable[[], object]] = [
            lambda: s.scaler.update(other, True),
            lambda: s.scaler.load_state_dict(other, state),
            lambda: st.scaled_step(
                other, scaler=s.scaler, grad_routine=s.gradients, update_routine=s.update, checksum=s.flag
            ),
            lambda: st.gated_step(
                other, scaler=s.scaler, routine=s.gated, window_checksum=s.window, check_interval=1, step=0
            ),
        ]
        for act in acts:
            with pytest.raises(ContextError, match="another context"):
                act()
        assert s.scaler.state_dict() == state
        assert other.stats.runs == 0


def test_states_are_checked_before_anything_is_uploaded(ctx: st.Context) -> None:
    scaler = st.LossScaler(8.0)
    with pytest.raises(CheckpointError, match="'scale'"):
        scaler.load_state_dict(ctx, {**scaler.state_dict(), "scale": -1.0})
    assert ctx.stats.uploads == 0
    assert scaler.scale_value() == float(ctx.get_values(scaler.scale)) == 8.0
