"""softmax, log_softmax, logsumexp, layer_norm, rms_norm: composites over one or more axes.

A softmax row that is all -inf gives 0 everywhere, with gradient 0.
"""

from __future__ import annotations

import math
from typing import Any

from stagedtensor.composite import composite
from stagedtensor.settings import is_number
from stagedtensor.source import user_source
from stagedtensor.specs import Spec
from stagedtensor.statements import Access, Apply, Expr, NumberLiteral
from stagedtensor.tensor import Tensor, TensorLike, apply_op, lift, no_gradient

from .axes import LAST_OUTPUT, Axes, axes_of
from .reductions import centred, divided_by_count, reduce_tree


def finite_or_zero(m: Expr) -> Expr:
    """The row maximum, 0 where the whole row is -inf (so that -inf minus it stays -inf, not NaN)."""
    return Apply("where", (Apply("eq", (m, NumberLiteral(-math.inf))), NumberLiteral(0.0), m))


def _shifted_exp(x: Expr, m: Expr) -> Expr:
    return Apply("exp", (Apply("sub", (x, finite_or_zero(m))),))


def _row_statistics(x: Tensor, axes: Axes) -> tuple[Tensor, Tensor]:
    """Return (maximum, sum of exp(x - maximum)) over the axes, without gradients."""
    with no_gradient():
        top = reduce_tree("max", (x,), axes, (axes.full,), lambda a: a, "max")
        total = reduce_tree("sum", (x, top), axes, (axes.full, axes.kept), lambda a, m: _shifted_exp(a, m))
    return top, total


@composite("softmax", float_only=True)
def _softmax(x: Tensor, axis: Any) -> Tensor:
    axes = axes_of(x, axis, what="softmax")
    top, total = _row_statistics(x, axes)

    def quotient(a: Access, m: Access, s: Access) -> Expr:
        # one division a row; s is 0 for a row of -inf alone, else at least 1
        share = Apply("where", (Apply("eq", (s, NumberLiteral(0.0))), NumberLiteral(0.0), Apply("recip", (s,))))
        return Apply("mul", (_shifted_exp(a, m), share))

    return apply_op(
        "softmax_quotient",
        (x, top, total),
        Spec((axes.full, axes.kept, axes.kept), axes.full),
        quotient,
        rule="softmax",
        attributes={"axes": axes},
    )


def softmax(x: TensorLike, axis: Any = LAST_OUTPUT) -> Tensor:
    """exp(x - max) / sum(exp(x - max)) over ``axis``; an all -inf row gives zeros."""
    return _softmax(lift(x), axis)


def logsumexp_inside(x: Tensor, axes: Axes, keepdims: bool = False) -> Tensor:
    """log(sum(exp(x))) over the axes, as one op of a composite's interior."""
    top, total = _row_statistics(x, axes)
    return apply_op(
        "logsumexp",
        (x, top, total),
        Spec((axes.full, axes.kept, axes.kept), axes.result(keepdims)),
        lambda _, m, s: Apply("add", (finite_or_zero(m), Apply("log", (s,)))),
        rule="logsumexp",
        attributes={"axes": axes},
    )


@composite("logsumexp", float_only=True)
def _logsumexp(x: Tensor, axis: Any, keepdims: bool) -> Tensor:
    return logsumexp_inside(x, axes_of(x, axis, keepdims=keepdims, what="logsumexp"), keepdims)


def logsumexp(x: TensorLike, axis: Any = LAST_OUTPUT, *, keepdims: bool = False) -> Tensor:
    """log(sum(exp(x))) over ``axis`` without overflow."""
    return _logsumexp(lift(x), axis, keepdims)


def log_total_inside(x: Tensor, axes: Axes) -> tuple[Tensor, Tensor]:
    """Return (maximum m, log(sum(exp(x - m)))), as ops of a composite's interior; no gradient goes through m.

    What subtracts the two from x one after the other keeps the digits that m + log(...) would round away.
    """
    top, total = _row_statistics(x, axes)
    rest = apply_op(
        "log_total",
        (x, top, total),
        Spec((axes.full, axes.kept, axes.kept), axes.kept),
        lambda _x, _m, s: Apply("log", (s,)),
        rule="logsumexp",
        attributes={"axes": axes},
    )
    return top, rest


@composite("log_softmax", float_only=True)
def _log_softmax(x: Tensor, axis: Any) -> Tensor:
    axes = axes_of(x, axis, what="log_softmax")
    top, rest = log_total_inside(x, axes)
    return apply_op(
        "subtract_row",
        (x, top, rest),
        Spec((axes.full, axes.kept, axes.kept), axes.full),
        lambda a, m, s: Apply("sub", (Apply("sub", (a, finite_or_zero(m))), s)),
    )


def log_softmax(x: TensorLike, axis: Any = LAST_OUTPUT) -> Tensor:
    """x - logsumexp(x) over ``axis``."""
    return _log_softmax(lift(x), axis)


def _rescaled(x: Tensor, scale: Tensor, axes: Axes) -> Tensor:
    return apply_op("rescale", (x, scale), Spec((axes.full, axes.kept), axes.full), lambda a, s: Apply("mul", (a, s)))


def _reciprocal_root(total: Tensor, x: Tensor, axes: Axes, eps: float) -> Tensor:
    mean = divided_by_count(total, x, axes, keepdims=False)
    return apply_op(
        "reciprocal_root",
        (mean,),
        Spec((axes.kept,), axes.kept),
        lambda a: Apply("rsqrt", (Apply("add", (a, NumberLiteral(eps))),)),
    )


def _with_gain(y: Tensor, gain: Tensor | None, bias: Tensor | None) -> Tensor:
    if gain is not None:
        y = y * gain
    return y if bias is None else y + bias


def _square(a: Access) -> Expr:
    return Apply("mul", (a, a))


@composite("layer_norm", float_only=True)
def _layer_norm(x: Tensor, gain: Tensor | None, bias: Tensor | None, axis: Any, eps: float) -> Tensor:
    axes = axes_of(x, axis, what="layer_norm")
    c = centred(x, axes)
    total = reduce_tree("sum", (c,), axes, (axes.full,), _square)
    return _with_gain(_rescaled(c, _reciprocal_root(total, x, axes, eps), axes), gain, bias)


def layer_norm(
    x: TensorLike,
    gain: TensorLike | None = None,
    bias: TensorLike | None = None,
    *,
    axis: Any = LAST_OUTPUT,
    eps: float = 1e-5,
) -> Tensor:
    """(x - mean) / sqrt(var + eps) over ``axis``, times ``gain`` plus ``bias`` (Ba et al. 2016); two-pass moments."""
    return _layer_norm(lift(x), _optional(gain), _optional(bias), axis, _check_eps(eps))


@composite("rms_norm", float_only=True)
def _rms_norm(x: Tensor, gain: Tensor | None, axis: Any, eps: float) -> Tensor:
    axes = axes_of(x, axis, what="rms_norm")
    total = reduce_tree("sum", (x,), axes, (axes.full,), _square)
    return _with_gain(_rescaled(x, _reciprocal_root(total, x, axes, eps), axes), gain, None)


def rms_norm(x: TensorLike, gain: TensorLike | None = None, *, axis: Any = LAST_OUTPUT, eps: float = 1e-6) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over ``axis``, times ``gain`` (Zhang and Sennrich 2019)."""
    return _rms_norm(lift(x), _optional(gain), axis, _check_eps(eps))


def _optional(value: TensorLike | None) -> Tensor | None:
    return None if value is None else lift(value)


def _check_eps(eps: float) -> float:
    if not (is_number(eps) and math.isfinite(eps) and eps >= 0):
        raise ValueError(f"eps: expected a finite number >= 0, got {eps!r} ({user_source().quoted()})")
    return float(eps)
