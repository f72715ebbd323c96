"""Mixed-precision recipes: training steps that scale the loss, test the gradients and skip what overflowed.

In: a loss, a ``LossScaler``, an optimizer and its options. Out: computations to compile (``scaled_*``, ``gated_*``,
``static_*_update``), and the step functions that run their routines and keep the scaler's schedule. Two routines with
the verdict on the host, or one routine with the verdict on the device. Cast twins and the scaler are re-exported here;
precision inference and the optimizers are elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from .autodiff.backprop import useful_nodes
from .cast_twins import TwinPlacement, cast_param, master_weights, twin_of, with_master_weights
from .errors import ContextError, PrecisionError
from .functions.pointwise import logical_and
from .language.computation import computation
from .loss_scaler import HIGHEST, LOWEST, LossScaler, Window
from .node import Node
from .optim import Loss, Updater, sgd_update
from .precision import i32
from .precision_solver import solve_precisions
from .program import Comp, comment, forward_of, sequence
from .settings import is_integer, is_number
from .source import user_source
from .statements import Stage
from .tensor import Tensor, no_gradient
from .terminals import cell, cell_like, host_scalar
from .train import check_count, clip_by_global_norm, grad_checksum, grad_update

if TYPE_CHECKING:
    from .runtime.context import Context
    from .runtime.routine import Routine

__all__ = [
    "LossScaler",
    "TwinPlacement",
    "cast_param",
    "gated_apply_update",
    "gated_scaled_update",
    "gated_step",
    "master_weights",
    "scaled_grad_update",
    "scaled_sgd_update",
    "scaled_step",
    "static_scaled_update",
    "twin_of",
    "with_master_weights",
]

FLAG_LIMIT = 3.0e38
"""A flag is 0 or inf; ordered comparisons with a finite number tell them apart whatever a compiler assumes of inf."""


# -- building -----------------------------------------------------------------------------------------------------


def _check_scaler(scaler: LossScaler, what: str) -> None:
    if not isinstance(scaler, LossScaler):
        raise TypeError(f"{what}: scaler is a LossScaler, not {type(scaler).__name__} ({user_source().quoted()})")


def _check_saturation(loss: Loss, what: str) -> None:
    """Refuse gradients that clamp overflow: the scaler would never see one."""
    roots = [loss] if isinstance(loss, Tensor) else list(loss)
    gradients = [node.gradient for node in useful_nodes([root.node for root in roots]) if node.gradient is not None]
    clamped = [gradient for gradient in gradients if gradient.saturate]
    if not clamped and _pending_saturation(gradients):
        solution = solve_precisions(gradients)
        clamped = [gradient for gradient in gradients if solution.saturates(gradient)]
    if clamped:
        raise PrecisionError(
            f"{what}: {clamped[0].label!r} saturates, which hides overflow from the loss scaler of "
            f"{roots[0].label!r}\n  {user_source().quoted()}\n  specify this gradient without saturate=True"
        )


def _pending_saturation(gradients: Iterable[Node]) -> bool:
    members = set(gradients)
    sessions = {gradient.session for gradient in members}
    return any(
        update.saturate and not members.isdisjoint(update.targets) for session in sessions for update in session.updates
    )


def scaled_grad_update(
    scaler: LossScaler,
    loss: Loss,
    *,
    accum_steps: int | None = None,
    accum_loss: Tensor | None = None,
    params: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Comp]:
    """Return (flag, computation): gradients seeded with the scale, then their finiteness.

    The flag is 0 if every trained gradient, unscaled, is finite, else inf. The loss itself stays unscaled. With
    ``accum_steps`` gradients add up over routine runs (see :func:`stagedtensor.train.grad_update`).
    """
    _check_scaler(scaler, "scaled_grad_update")
    gradients = grad_update(
        loss, loss_scale=scaler.scale, accum_steps=accum_steps, accum_loss=accum_loss, params=params
    )
    _check_saturation(loss, "scaled_grad_update")
    flag, test = grad_checksum(loss, grad_unscale=scaler.unscale, params=params)
    return flag, replace(sequence(gradients, test), name="scaled_gradients")


def scaled_sgd_update(
    scaler: LossScaler,
    loss: Loss,
    learning_rate: Tensor | float,
    *,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    grad_scale: Tensor | None = None,
    update_gate: Tensor | None = None,
    params: Sequence[Tensor] | None = None,
) -> Comp:
    """``sgd_update`` of gradients that carry the scale: the second routine of :func:`scaled_step`."""
    _check_scaler(scaler, "scaled_sgd_update")
    return sgd_update(
        loss,
        learning_rate,
        momentum=momentum,
        weight_decay=weight_decay,
        nesterov=nesterov,
        grad_unscale=scaler.unscale,
        grad_scale=grad_scale,
        update_gate=update_gate,
        params=params,
    )


def gated_scaled_update(
    scaler: LossScaler,
    loss: Loss,
    learning_rate: Tensor | float,
    *,
    update: Updater = sgd_update,
    max_norm: float | None = None,
    accum_loss: Tensor | None = None,
    params: Sequence[Tensor] | None = None,
    **options: Any,
) -> tuple[Tensor, Comp]:
    """Return (window, computation): a whole training step that skips itself on the device when a gradient overflows.

    Forward, scaled backward, finiteness, gate, window and counters, clipping if ``max_norm``, then ``update`` with
    ``options``. A closed gate selects the old bits of parameters and optimizer state. Run it with :func:`gated_step`.
    An option that the updater does not know is a TypeError.
    """
    flag, gradients = scaled_grad_update(scaler, loss, accum_loss=accum_loss, params=params)
    window, applied = _gated(scaler, flag, loss, learning_rate, update, max_norm, params, options)
    return window, replace(comment("gated step", sequence(gradients, applied)), name="gated_step")


def gated_apply_update(
    scaler: LossScaler,
    loss: Loss,
    learning_rate: Tensor | float,
    *,
    update: Updater = sgd_update,
    max_norm: float | None = None,
    params: Sequence[Tensor] | None = None,
    **options: Any,
) -> tuple[Tensor, Comp]:
    """Return (window, computation): :func:`gated_scaled_update` without forward and backward.

    The gradients come from micro-steps, ``grad_update(loss, loss_scale=scaler.scale, accum_steps=k)``.
    """
    _check_scaler(scaler, "gated_apply_update")
    _check_saturation(loss, "gated_apply_update")
    flag, test = grad_checksum(loss, grad_unscale=scaler.unscale, params=params)
    window, applied = _gated(scaler, flag, loss, learning_rate, update, max_norm, params, options)
    return window, replace(comment("gated update", sequence(test, applied)), name="gated_update")


def _gated(
    scaler: LossScaler,
    flag: Tensor,
    loss: Loss,
    learning_rate: Tensor | float,
    update: Updater,
    max_norm: float | None,
    params: Sequence[Tensor] | None,
    options: dict[str, Any],
) -> tuple[Tensor, Comp]:
    """Gate, window, clip and update of gradients whose flag is computed already."""
    with no_gradient():
        gate = logical_and(flag > -FLAG_LIMIT, flag < FLAG_LIMIT).named("update_gate")
    cell_like(gate.node)
    window = Window(cell("flag_window"), cell("skip_count", i32), cell("run_count", i32))
    counted = computation(
        "flags =+ flag; skips =+ where(gate, 0, 1); runs =+ 1",
        flags=window.flags,
        skips=window.skips,
        runs=window.runs,
        flag=flag,
        gate=gate,
    )
    parts = [
        comment("gate", forward_of([gate], stage=Stage.UPDATE, until={flag.node})),
        comment("window", counted),
    ]
    if max_norm is not None:
        clip = clip_by_global_norm(loss, max_norm, grad_unscale=scaler.unscale, params=params)
        parts.append(clip.comp)
        options = {"grad_scale": clip.grad_scale, **_without("grad_scale", options)}
    parts.append(update(loss, learning_rate, grad_unscale=scaler.unscale, update_gate=gate, params=params, **options))
    scaler.windows.append(window)
    return window.flags, sequence(*parts)


def _without(name: str, options: dict[str, Any]) -> dict[str, Any]:
    if name in options:
        raise TypeError(f"{name} is what max_norm computes; give one of the two ({user_source().quoted()})")
    return options


def static_scaled_update(
    loss: Loss,
    learning_rate: Tensor | float,
    *,
    scale: float,
    update: Updater = sgd_update,
    max_norm: float | None = None,
    params: Sequence[Tensor] | None = None,
    **options: Any,
) -> Comp:
    """Return a whole training step at a fixed loss scale: no finiteness test, no gate.

    Raises ValueError unless ``scale`` and its reciprocal are positive normal f32 numbers.
    """
    if not is_number(scale):
        raise TypeError(f"static_scaled_update: scale is a number, not {scale!r} ({user_source().quoted()})")
    if not (math.isfinite(scale) and LOWEST <= scale <= HIGHEST):
        raise ValueError(
            f"static_scaled_update: scale must be positive and finite, between 2^-126 and 2^126, got {scale!r}"
        )
    rounded = float(np.float32(scale))
    seed = host_scalar("static_scale", rounded)
    unscale = host_scalar("static_unscale", float(np.float32(1.0 / rounded)))
    parts = [grad_update(loss, loss_scale=seed, params=params)]
    if max_norm is not None:
        clip = clip_by_global_norm(loss, max_norm, grad_unscale=unscale, params=params)
        parts.append(clip.comp)
        options = {"grad_scale": clip.grad_scale, **_without("grad_scale", options)}
    parts.append(update(loss, learning_rate, grad_unscale=unscale, params=params, **options))
    return replace(comment("statically scaled step", sequence(*parts)), name="static_scaled_step")


# -- running ------------------------------------------------------------------------------------------------------


def _require(routine: Routine, node: Node, argument: str, what: str) -> None:
    """Refuse a routine that was not built from this scaler or flag."""
    if not hasattr(routine, "stored_nodes"):
        raise TypeError(
            f"{argument}: expected a routine from ctx.compile, not {type(routine).__name__} ({user_source().quoted()})"
        )
    if node not in routine.stored_nodes:
        raise ContextError(
            f"{argument}: routine {routine.name!r} was not built from this {what}: it never touches {node.label!r} "
            f"({node.source})\n  {user_source().quoted()}"
        )


def _check_accumulation(accum_steps: int, zero_routine: Routine | None, gradient_routine: Routine, what: str) -> int:
    count = check_count(accum_steps, "accum_steps")
    built_for = gradient_routine.attributes.get("accum_steps")
    if zero_routine is None and (count > 1 or built_for is not None):
        raise ValueError(
            f"{what}: accumulation over {built_for or count} micro-steps needs zero_routine, compiled from "
            "zero_param_grads"
        )
    if (built_for or 1) != count:
        raise ValueError(
            f"{what}: accum_steps is {count}, but routine {gradient_routine.name!r} was built for {built_for or 1}"
        )
    return count


def _finite(flag: float) -> bool:
    return -FLAG_LIMIT < flag < FLAG_LIMIT


def scaled_step(
    ctx: Context,
    *,
    scaler: LossScaler,
    grad_routine: Routine,
    update_routine: Routine,
    checksum: Tensor,
    accum_steps: int = 1,
    zero_routine: Routine | None = None,
    feed: Callable[[Context, int], None] | None = None,
) -> bool:
    """Run one step, or one accumulation cycle, of two routines; return whether the update ran.

    ``feed(ctx, i)`` is called before each of the ``accum_steps`` runs of ``grad_routine``. The flag is read once; the
    update runs if the gradients are finite; the scaler accounts for one step. Raises ContextError for routines not
    built from this scaler and flag, ValueError for accumulation without ``zero_routine``.
    """
    _check_scaler(scaler, "scaled_step")
    count = _check_accumulation(accum_steps, zero_routine, grad_routine, "scaled_step")
    _require(grad_routine, scaler.scale.node, "grad_routine", "scaler")
    _require(grad_routine, checksum.node, "grad_routine", "flag")
    _require(update_routine, scaler.unscale.node, "update_routine", "scaler")
    scaler.bind(ctx)
    if zero_routine is not None:
        ctx.run(zero_routine)
    for micro_step in range(count):
        if feed is not None:
            feed(ctx, micro_step)
        ctx.run(grad_routine)
    finite = _finite(float(ctx.get_values(checksum)))
    if finite:
        ctx.run(update_routine)
    scaler.update(ctx, finite)
    return finite


def gated_step(
    ctx: Context,
    *,
    scaler: LossScaler,
    routine: Routine,
    window_checksum: Tensor,
    check_interval: int,
    step: int,
    micro_routine: Routine | None = None,
    zero_routine: Routine | None = None,
    accum_steps: int = 1,
    feed: Callable[[Context, int], None] | None = None,
) -> bool:
    """Run one gated step, or one accumulation cycle; every ``check_interval`` steps let the scaler see the window.

    ``step`` counts from 0. On a sampling step the window and its counters are read and zeroed, the scaler accounts for
    them, and the result says whether the window was finite. On others nothing is read and True means "no verdict".
    With ``micro_routine`` (``grad_update(..., accum_steps=k)``) the ``routine`` is a ``gated_apply_update``.
    """
    _check_scaler(scaler, "gated_step")
    interval = check_count(check_interval, "check_interval")
    if not is_integer(step, 0):
        raise ValueError(f"gated_step: step must be an integer of at least 0, got {step!r}")
    window = _window_of(scaler, window_checksum)
    if micro_routine is None:
        count = check_count(accum_steps, "accum_steps")
        if count > 1:
            raise ValueError(f"gated_step: accumulation over {count} micro-steps needs micro_routine and zero_routine")
        _require(routine, scaler.scale.node, "routine", "scaler")
    else:
        if routine.produces:
            raise ValueError(
                f"gated_step: micro_routine was given, but routine {routine.name!r} holds a backward of its own; build it "
                "with gated_apply_update"
            )
        count = _check_accumulation(accum_steps, zero_routine, micro_routine, "gated_step")
        _require(micro_routine, scaler.scale.node, "micro_routine", "scaler")
    _require(routine, scaler.unscale.node, "routine", "scaler")
    _require(routine, window.flags.node, "routine", "window")
    scaler.bind(ctx)
    if zero_routine is not None:
        ctx.run(zero_routine)
    for micro_step in range(count):
        if feed is not None:
            feed(ctx, micro_step)
        if micro_routine is not None:
            ctx.run(micro_routine)
    ctx.run(routine)
    return True if (step + 1) % interval else _sample(ctx, scaler, window)


def _window_of(scaler: LossScaler, window_checksum: Tensor) -> Window:
    for window in scaler.windows:
        if window.flags is window_checksum:
            return window
    raise ContextError(
        f"window_checksum {getattr(window_checksum, 'label', window_checksum)!r} is no window of this scaler; pass the "
        f"first result of gated_scaled_update or gated_apply_update ({user_source().quoted()})"
    )


def _sample(ctx: Context, scaler: LossScaler, window: Window) -> bool:
    """Let the scaler account for what the window holds, and zero it; cells that are zero stay as they are."""
    flags = float(ctx.get_values(window.flags))
    skips, runs = int(ctx.get_values(window.skips)), int(ctx.get_values(window.runs))
    if flags:
        ctx.set_values(window.flags, 0.0)
    if skips:
        ctx.set_values(window.skips, 0)
    ctx.set_values(window.runs, 0)
    finite = _finite(flags)
    scaler.update_n(ctx, finite, runs, skips if not finite else 1)
    return finite
