"""Pieces of a training step: gradients, their zeroing, the finiteness flag, clipping, loss accumulation.

Everything here builds computations; nothing runs. Gradients of trained parameters are materialised and observable,
since the host or another routine reads them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from .autodiff.backprop import backward_statements, fill, gradient_of, trained, useful_nodes, zero_statements
from .errors import GradientError, PrecisionError
from .functions.pointwise import sqrt, where
from .node import Node, Placement, Role
from .precision import f32, join
from .precision_requests import specify_node
from .program import Comp, comment, forward, forward_of, sequence
from .settings import is_integer, is_number
from .source import user_source
from .specs import ALL_ROWS, ShapeSpec, Spec
from .statements import Access, Apply, Expr, NumberLiteral, Scope, Stage, Statement, WriteOp
from .tensor import Tensor, apply_op, lift, no_gradient, tensor_of
from .terminals import cell, cell_like, host_scalar

CELL_ROWS = ShapeSpec()
"""The rows of one cell."""


def loss_accumulator(label: str = "loss_accum") -> Tensor:
    """Make an f32 cell, zero at allocation, that ``grad_update(accum_loss=)`` adds each unscaled loss to."""
    return cell(label)


def trainable_params(loss: Tensor) -> list[Tensor]:
    """Return the parameters whose gradient a backward pass from ``loss`` writes, in construction order."""
    if not isinstance(loss, Tensor):
        raise TypeError(f"trainable_params: a loss is a tensor, not {type(loss).__name__} ({user_source().quoted()})")
    return [tensor_of(node) for node in trained([loss.node])]


def chosen_params(loss: Tensor | Sequence[Tensor], params: Sequence[Tensor] | None, what: str) -> list[Tensor]:
    """Return the parameters to train: all of the loss's, or a checked choice of them. Raises GradientError."""
    roots = list(loss) if isinstance(loss, list | tuple) else [cast("Tensor", loss)]
    if not roots:
        raise GradientError(f"{what}: expected at least one loss")
    for root in roots:
        if not isinstance(root, Tensor):
            raise TypeError(f"{what}: a loss is a tensor, not {type(root).__name__} ({user_source().quoted()})")
        gradient_of(root, what)
    available = [tensor_of(node) for node in trained([root.node for root in roots])]
    if params is None:
        chosen = available
    else:
        chosen = list(params)
        for param in chosen:
            if not any(param is entry for entry in available):
                names = ", ".join(entry.label for entry in available)
                raise GradientError(
                    f"{what}: {getattr(param, 'label', param)!r} is not among the trained parameters of "
                    f"{roots[0].label!r} ({names})\n  {user_source().quoted()}"
                )
        chosen.sort(key=lambda param: param.node.number)
    if not chosen:
        raise GradientError(
            f"{what}: the loss trains no parameters: {roots[0].label!r} reaches no trainable parameter, or params=[] was "
            f"given\n  {user_source().quoted()}"
        )
    return chosen


def positive_scalar(value: Tensor | float | None, name: str) -> Tensor | None:
    """Return a host scalar for a positive finite number; tensors are returned as they are. Raises ValueError."""
    if value is None or isinstance(value, Tensor):
        return value
    if not is_number(value):
        raise TypeError(f"{name} is a number or a host scalar, not {value!r}")
    if not (0 < value <= f32.max_finite):
        raise ValueError(f"{name} must be positive and finite in f32 (at most 3.4e38), got {value!r}")
    return host_scalar(name, float(value))


def check_count(value: Any, name: str) -> int:
    """Return a count of at least 1. Raises ValueError."""
    if not is_integer(value, 1):
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
    return int(value)


# -- gradients ----------------------------------------------------------------------------------------------------


def grad_update(
    loss: Tensor | Sequence[Tensor],
    *,
    loss_scale: Tensor | float | None = None,
    accum_steps: int | None = None,
    accum_loss: Tensor | None = None,
    params: Sequence[Tensor] | None = None,
) -> Comp:
    """Forward, zero gradients, seed, backward, as one computation.

    The seed is 1, ``loss_scale``, 1/accum_steps or loss_scale/accum_steps; ``loss`` itself stays unscaled. With
    ``accum_steps`` the trained parameters' gradients are not zeroed (run ``zero_param_grads`` once per cycle).
    ``accum_loss`` adds the unscaled loss to a cell. Several roots: all forwards, one zeroing, all seeds, one backward.
    The loss's value and gradient are f32 or wider unless specified. Raises GradientError if nothing is trained.
    """
    roots = list(loss) if isinstance(loss, list | tuple) else [cast("Tensor", loss)]
    wanted = _wanted(roots, params)
    count = None if accum_steps is None else check_count(accum_steps, "accum_steps")
    scale = positive_scalar(loss_scale, "loss_scale")
    for root in roots:
        widen_loss(root)
    nodes = [root.node for root in roots]
    useful = useful_nodes(nodes, wanted)
    for node in wanted:
        assert node.gradient is not None
        cell_like(node.gradient)
    parts: list[Any] = [comment("forward", forward(*roots))]
    if accum_loss is not None:
        if not isinstance(accum_loss, Tensor):
            raise TypeError(f"grad_update: accum_loss is a cell from loss_accumulator, not {type(accum_loss).__name__}")
        total = [accumulate_into(accum_loss, root, "add", lambda a: a) for root in roots]
        parts.append(comment("accumulate the loss", Comp(tuple(total))))
    kept = set() if count is None else {node for node in wanted if node.role is Role.PARAM}
    seeds = [_seed(root, scale, count) for root in roots]
    parts += [
        comment("zero gradients", Comp(tuple(zero_statements(node for node in useful if node not in kept)))),
        comment("backward", sequence(Comp(tuple(seeds)), Comp(tuple(backward_statements(nodes, useful))))),
    ]
    made = comment("gradients", sequence(*parts))
    _check_zeroing(made, kept)
    return replace(made, name="gradients", attributes={**made.attributes, "accum_steps": count})


def _wanted(roots: Sequence[Tensor], params: Sequence[Tensor] | None) -> list[Node]:
    if params is not None:
        return [param.node for param in chosen_params(roots, params, "grad_update")]
    for root in roots:
        if not isinstance(root, Tensor):
            raise TypeError(f"grad_update: a loss is a tensor, not {type(root).__name__} ({user_source().quoted()})")
        gradient_of(root, "grad_update")
    useful = useful_nodes([root.node for root in roots])
    wanted = [node for node in useful if node.record is None]
    if not wanted:
        chosen_params(roots, None, "grad_update")
    return wanted


def _check_zeroing(comp: Comp, kept: set[Node]) -> None:
    """Every gradient that the backward code adds to starts from a value of this run, but for the accumulated ones."""
    started = {node.gradient for node in kept}
    for statement, _ in comp.statements():
        gradient = statement.target.node
        if not gradient.is_gradient:
            continue
        if statement.op is not None and not statement.reset and gradient not in started:
            raise GradientError(f"{gradient.label!r} would accumulate over runs: it is never zeroed")
        started.add(gradient)


def widen_loss(root: Tensor) -> None:
    """Specify the loss's value and gradient at join(f32, session default), and make it observable.

    Values that the user specified stay. Raises PrecisionError where a routine has settled the loss narrow.
    """
    wide = join(f32, root.node.session.default_prec)
    for node in (root.node, root.node.gradient):
        assert node is not None
        if node.settled is not None:
            if node.settled.prec.is_narrow and node.specified is None:
                raise PrecisionError(
                    f"loss {node.label!r} was settled at {node.settled.prec} by routine {node.settled.routine!r} "
                    f"({node.settled.source}), before it became a loss\n  {user_source().quoted()}\n"
                    "  build grad_update before compiling its forward, or specify the loss's precision"
                )
        elif node.specified is None:
            specify_node(node, wide, by="loss", source=user_source())
    root.node.observable = True
    if root.node.placement is Placement.VIRTUAL:
        root.node.placement = Placement.AUTO


def _seed(root: Tensor, scale: Tensor | None, count: int | None) -> Statement:
    gradient = gradient_of(root, "grad_update")
    value: Expr = NumberLiteral(1.0) if scale is None else Access(scale.node, CELL_ROWS)
    if count is not None and scale is None:
        value = NumberLiteral(1.0 / count)
    elif count is not None:
        value = Apply("div", (value, NumberLiteral(float(count))))
    text = "1" if scale is None else scale.label
    text += f" / {count}" if count is not None else ""
    if scale is None:
        return fill(gradient, value, Stage.SEED, f"{gradient.label} =: {text}")
    spec = Spec((CELL_ROWS,), ALL_ROWS)
    scope = Scope(spec, (scale.node,), root.node, user_source(), "seed", derives=False)
    return Statement(
        Access(gradient, ALL_ROWS),
        value,
        scope,
        stage=Stage.SEED,
        source=scope.source,
        text=f"{gradient.label} =: {text}",
    )


def zero_param_grads(loss: Tensor | Sequence[Tensor], *, params: Sequence[Tensor] | None = None) -> Comp:
    """Zero the trained parameters' gradients: once per accumulation cycle."""
    chosen = chosen_params(loss, params, "zero_param_grads")
    for param in chosen:
        assert param.node.gradient is not None
        cell_like(param.node.gradient)
    zeroed = Comp(tuple(zero_statements(param.node for param in chosen)), "zero_gradients")
    return comment("zero parameter gradients", zeroed)


# -- reductions to one cell ---------------------------------------------------------------------------------------


def accumulate_into(
    target: Tensor,
    source: Tensor,
    op: WriteOp,
    tree: Any,
    *others: Tensor,
    reset: bool = False,
    stage: Stage = Stage.UPDATE,
) -> Statement:
    """``target (op)= tree(source, *others)`` reduced over all cells of ``source``; target and others are one cell."""
    spec = Spec((ALL_ROWS, *(CELL_ROWS for _ in others)), CELL_ROWS)
    nodes = (source.node, *(other.node for other in others))
    shape_nodes = tuple(node.shape_node for node in nodes)
    scope = Scope(spec, shape_nodes, target.node, user_source(), op, derives=False)
    reads = (Access(source.node, ALL_ROWS), *(Access(other.node, CELL_ROWS) for other in others))
    return Statement(
        Access(target.node, CELL_ROWS),
        tree(*reads),
        scope,
        op=op,
        reset=reset,
        stage=stage,
        source=scope.source,
        text=f"{target.label} {op} {source.label}",
    )


def grad_checksum(
    loss: Tensor | Sequence[Tensor], *, grad_unscale: Tensor | None = None, params: Sequence[Tensor] | None = None
) -> tuple[Tensor, Comp]:
    """Return (flag, computation): an f32 cell, +0 if every cell of every trained gradient is finite, else +inf.

    Each cell's exponent bits are tested and the results OR-ed (as a maximum of 0 and inf), so no sum overflows. With
    ``grad_unscale`` the value tested is g * unscale, the one the optimizer reads.
    """
    flag = cell("grad_flag")
    made = []
    for at, param in enumerate(chosen_params(loss, params, "grad_checksum")):
        gradient = param.grad
        assert gradient is not None
        cell_like(gradient.node)
        others = () if grad_unscale is None else (grad_unscale,)

        def tree(g: Access, *scale: Access) -> Expr:
            return Apply("nonfinite", (Apply("mul", (g, *scale)) if scale else g,))

        made.append(accumulate_into(flag, gradient, "max", tree, *others, reset=at == 0))
    return flag, comment("finiteness of the gradients", Comp(tuple(made), "checksum"))


@dataclass(frozen=True)
class GradClip:
    """The global norm, the factor for the update, and the computation of both."""

    grad_norm: Tensor
    grad_scale: Tensor
    comp: Comp


def clip_by_global_norm(
    loss: Tensor | Sequence[Tensor],
    max_norm: float,
    *,
    grad_unscale: Tensor | None = None,
    params: Sequence[Tensor] | None = None,
) -> GradClip:
    """norm = sqrt(sum (g * unscale)^2) over all trained gradients; scale = max_norm / norm where the norm is above.

    Accumulated in f32 (f64 if a gradient is f64); gradient buffers are untouched. A NaN norm gives scale 1, an infinite
    one 0. Raises ValueError unless max_norm is finite and at least 0.
    """
    if not is_number(max_norm) or not (math.isfinite(max_norm) and max_norm >= 0):
        raise ValueError(f"max_norm must be finite and at least 0, got {max_norm!r}")
    chosen = chosen_params(loss, params, "clip_by_global_norm")
    # joined in so that narrow gradients square and add up in f32
    anchor = grad_unscale if grad_unscale is not None else lift(np.asarray(1.0, np.float32), label="one")
    spec = Spec((ALL_ROWS, CELL_ROWS), CELL_ROWS)

    def square(g: Access, scale: Access) -> Expr:
        value: Expr = Apply("mul", (g, scale)) if grad_unscale is not None else g
        return Apply("mul", (value, value))

    total: Tensor | None = None
    with no_gradient():
        for param in chosen:
            gradient = param.grad
            assert gradient is not None
            cell_like(gradient.node)
            squares = apply_op(
                "sum",
                (gradient, anchor),
                spec,
                square,
                reduction="add",
                rule=None,
                attributes={"reduction": "add"},
                label=f"{param.label}_square",
            )
            total = squares if total is None else total + squares
        assert total is not None
        norm = sqrt(total).named("grad_norm")
        limit = float(max_norm)
        scale = where(limit < norm, limit / norm, 1.0).named("grad_scale")
    for result in (norm, scale):
        cell_like(result.node)
    stop = {param.grad.node for param in chosen if param.grad is not None}
    comp = comment("clip", forward_of([norm, scale], stage=Stage.UPDATE, until=stop))
    return GradClip(norm, scale, replace(comp, name="clip"))
