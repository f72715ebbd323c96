"""Normalisation layers: layer, RMS, group and batch norm; each rounds once, its statistics are f32 or wider."""

from __future__ import annotations

from typing import Any

from stagedtensor.blocks import block
from stagedtensor.composite import composite
from stagedtensor.errors import GradientError, ShapeError
from stagedtensor.functions import normalised
from stagedtensor.functions.axes import Axes, axes_of, solved_shape
from stagedtensor.functions.indexing import reshape
from stagedtensor.functions.reductions import centred_with, divided_by_count, reduce_tree
from stagedtensor.language.computation import computation
from stagedtensor.node import ancestors
from stagedtensor.precision import f32, join
from stagedtensor.program import Comp, comment, sequence
from stagedtensor.session import current_session
from stagedtensor.settings import is_number
from stagedtensor.source import user_source
from stagedtensor.specs import Spec
from stagedtensor.statements import Access, Apply, DimValue, Expr, NumberLiteral, Slot
from stagedtensor.tensor import Tensor, apply_op, no_gradient, tensor_of
from stagedtensor.terminals import param

from .layer import Layer, whole


def _gain_and_bias(bias: bool = True) -> tuple[Tensor, Tensor | None]:
    return param("gain", output=[None], init=1.0), param("bias", output=[None], init=0.0) if bias else None


@block
def layer_norm(*, eps: float = 1e-5, bias: bool = True) -> Layer:
    """(x - mean) / sqrt(var + eps) over the last output axis, times ``gain`` plus ``bias``."""
    g, b = _gain_and_bias(bias)
    return lambda x: normalised.layer_norm(x, g, b, eps=eps)


@block
def rms_norm(*, eps: float = 1e-6) -> Layer:
    """x / sqrt(mean(x^2) + eps) over the last output axis, times ``gain``."""
    g, _ = _gain_and_bias(bias=False)
    return lambda x: normalised.rms_norm(x, g, eps=eps)


@composite("group_norm", float_only=True)
def _group_norm(x: Tensor, gain: Tensor, bias: Tensor, groups: int, eps: float) -> Tensor:
    row = [axis.size for axis in solved_shape(x).output]
    split = reshape(x, output=[*row[:-1], groups, row[-1] // groups])
    # every axis of an example but the groups
    axes = [("output", at) for at in range(-len(row) - 1, 0) if at != -2]
    y = normalised.layer_norm(split, axis=axes, eps=eps)
    return reshape(y, output=row) * gain + bias


@block
def group_norm(groups: int, *, eps: float = 1e-5) -> Layer:
    """Normalise each example's channels (the last output axis) in ``groups`` groups (Wu and He 2018)."""
    whole(groups, "group_norm: groups")
    g, b = _gain_and_bias()
    assert b is not None

    def apply(x: Tensor) -> Tensor:
        row = solved_shape(x).output
        if not row or row[-1].size % groups:
            raise ShapeError(
                f"group_norm: the last output axis of {x.label!r} (shape {solved_shape(x)}) does not split into "
                f"{groups} groups ({user_source().quoted()})"
            )
        return _group_norm(x, g, b, groups, eps)

    return apply


# -- batch norm ---------------------------------------------------------------------------------------------------

_RUNNING = "running_statistics"


def _square(a: Access) -> Expr:
    return Apply("mul", (a, a))


def _scaled(centre: Tensor, variance: Tensor, axes: Axes, eps: float, gain: Tensor, bias: Tensor) -> Tensor:
    def tree(a: Access, v: Access) -> Expr:
        return Apply("mul", (a, Apply("rsqrt", (Apply("add", (v, NumberLiteral(eps))),))))

    return apply_op("rescale", (centre, variance), Spec((axes.full, axes.kept), axes.full), tree) * gain + bias


@composite("batch_norm", float_only=True)
def _batch_norm(
    x: Tensor, gain: Tensor, bias: Tensor, running: tuple[Tensor, Tensor], eps: float, momentum: float, training: bool
) -> Tensor:
    rank = len(solved_shape(x).output)
    axes = axes_of(x, ["batch", *(("output", at) for at in range(-rank, -1))], what="batch_norm")
    if not training:
        centre = centred_with(x, running[0], axes)
        return _scaled(centre, running[1], axes, eps, gain, bias)
    mean = divided_by_count(reduce_tree("sum", (x,), axes, (axes.full,), lambda a: a), x, axes, keepdims=False)
    centre = centred_with(x, mean, axes)
    squares = reduce_tree("sum", (centre,), axes, (axes.full,), _square)
    count = DimValue(axes.names)
    with no_gradient():
        rest = Apply("maximum", (Apply("sub", (count, NumberLiteral(1.0))), NumberLiteral(1.0)))
        unbiased = apply_op(
            "unbiased_variance",
            (squares, x),
            Spec((axes.kept, axes.full), axes.kept),
            lambda s, _: Apply("div", (s, rest)),
        )
    # the running statistics are operands that the expression does not read: so they belong to the parameters of what
    # is built from it, and get its shape
    variance = apply_op(
        "batch_variance",
        (squares, x, mean, unbiased, *running),
        Spec((axes.kept, axes.full, *(axes.kept,) * 4), axes.kept),
        lambda s, *_: Apply("div", (s, count)),
        slots=(Slot.DATA, Slot.DATA, *(Slot.PREDICATE,) * 4),
        attributes={_RUNNING: (mean.node, unbiased.node, running[0].node, running[1].node, momentum)},
    )
    return _scaled(centre, variance, axes, eps, gain, bias)


@block
def batch_norm(*, eps: float = 1e-5, momentum: float = 0.1) -> Layer:
    """Normalise each channel (last output axis) over batch and image (Ioffe and Szegedy 2015).

    ``layer(x)`` uses the statistics of the batch, ``layer(x, training=False)`` the running ones, which
    :func:`update_running` of the training loss moves by ``momentum``. All are parameters of both results.
    """
    for name, value in (("eps", eps), ("momentum", momentum)):
        if not is_number(value) or not 0.0 <= value <= 1.0:
            raise ValueError(f"batch_norm: {name} is a number from 0 to 1, not {value!r} ({user_source().quoted()})")
    g, b = _gain_and_bias()
    assert b is not None
    prec: Any = join(f32, current_session().default_prec)
    running = (
        param("running_mean", output=[None], init=0.0, prec=prec, trainable=False),
        param("running_var", output=[None], init=1.0, prec=prec, trainable=False),
    )
    return lambda x, *, training=True: _batch_norm(x, g, b, running, float(eps), float(momentum), training)


def update_running(*results: Tensor) -> Comp:
    """Move the running statistics of every ``batch_norm`` behind ``results`` toward those of the batch.

    Sequence it after the forward pass: ``st.sequence(st.grad_update(loss), st.nn.update_running(loss), optimizer)``.
    The variance is the unbiased one. Raises GradientError where no batch norm in training is behind the results.
    """
    parts = []
    for node in ancestors([result.node for result in results]):
        found = node.record.attributes.get(_RUNNING) if node.record is not None else None
        if found is None:
            continue
        mean, unbiased, running_mean, running_var, momentum = found
        for kept, batch in ((running_mean, mean), (running_var, unbiased)):
            text = "r =: r + momentum *. (s - r)"
            parts.append(computation(text, r=tensor_of(kept), s=tensor_of(batch), momentum=momentum))
    if not parts:
        raise GradientError(
            f"update_running: no batch_norm in training is behind {', '.join(t.label for t in results) or 'nothing'} "
            f"({user_source().quoted()})"
        )
    return comment("running statistics", sequence(*parts))
