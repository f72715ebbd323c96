"""Reductions: sum, mean, max, min, prod, argmax, variance, norms of vectors.

``axis`` is None (all axes of all rows), an int in memory order, a row name, ``(row, position)``, an axis label, or a
list of these. A removed axis leaves its row; ``keepdims`` keeps it with size 1. Narrow operands accumulate in f32.
"""

from __future__ import annotations

from typing import Any

from stagedtensor.composite import composite
from stagedtensor.precision import i32
from stagedtensor.specs import Spec
from stagedtensor.statements import Access, Apply, DimValue, Expr, NumberLiteral, WriteOp
from stagedtensor.tensor import Tensor, TensorLike, apply_op, lift, no_gradient

from .axes import LAST_OUTPUT, Axes, axes_of


def _reduce(kind: str, op: WriteOp, x: TensorLike, axis: Any, keepdims: bool, rule: str | None) -> Tensor:
    tensor = lift(x)
    axes = axes_of(tensor, axis, keepdims=keepdims, what=kind)
    return apply_op(
        kind,
        (tensor,),
        Spec((axes.full,), axes.result(keepdims)),
        lambda a: a,
        reduction=op,
        rule=rule,
        attributes={"reduction": op, "axes": axes, "keepdims": keepdims},
        prec=i32 if kind.startswith("arg") else None,
    )


def sum_(x: TensorLike, axis: Any = None, *, keepdims: bool = False) -> Tensor:
    """Sum over ``axis``. Booleans and integers under 32 bits give i32."""
    return _reduce("sum", "add", x, axis, keepdims, "tree")


def prod(x: TensorLike, axis: Any = None, *, keepdims: bool = False) -> Tensor:
    """Product over ``axis``; its gradient is exact with zeros."""
    return _reduce("prod", "mul", x, axis, keepdims, "prod")


def max_(x: TensorLike, axis: Any = None, *, keepdims: bool = False) -> Tensor:
    """Maximum over ``axis``; NaN wins; the gradient goes to the first maximum in row-major order."""
    return _reduce("max", "max", x, axis, keepdims, "extremum")


def min_(x: TensorLike, axis: Any = None, *, keepdims: bool = False) -> Tensor:
    """Minimum over ``axis``; NaN wins; the gradient goes to the first minimum in row-major order."""
    return _reduce("min", "min", x, axis, keepdims, "extremum")


def argmax(x: TensorLike, axis: Any = LAST_OUTPUT, *, keepdims: bool = False) -> Tensor:
    """Row-major position (i32) of the first maximum over ``axis``; NaN wins."""
    return _reduce("argmax", "argmax", x, axis, keepdims, None)


def argmin(x: TensorLike, axis: Any = LAST_OUTPUT, *, keepdims: bool = False) -> Tensor:
    """Row-major position (i32) of the first minimum over ``axis``; NaN wins."""
    return _reduce("argmin", "argmin", x, axis, keepdims, None)


# -- composites ---------------------------------------------------------------------------------------------------


def reduce_tree(
    kind: str, operands: tuple[Tensor, ...], axes: Axes, specs: tuple[Any, ...], tree: Any, op: WriteOp = "add"
) -> Tensor:
    """Reduce an expression of several operands over ``axes.removed``; the result has ``axes.kept``."""
    return apply_op(
        kind, operands, Spec(specs, axes.kept), tree, reduction=op, attributes={"reduction": op, "axes": axes}
    )


def divided_by_count(total: Tensor, x: Tensor, axes: Axes, keepdims: bool, correction: float = 0.0) -> Tensor:
    """``total`` (shape ``axes.kept``) over the number of reduced cells (the current extent where it is dynamic)."""
    count: Expr = DimValue(axes.names)
    if correction:
        count = Apply("sub", (count, NumberLiteral(correction)))
    return apply_op(
        "divide_by_count",
        (total, x),
        Spec((axes.kept, axes.full), axes.result(keepdims)),
        lambda s, _: Apply("div", (s, count)),
    )


@composite("mean", float_only=True)
def _mean(x: Tensor, axis: Any, keepdims: bool) -> Tensor:
    axes = axes_of(x, axis, keepdims=keepdims, what="mean")
    total = reduce_tree("sum", (x,), axes, (axes.full,), lambda a: a)
    return divided_by_count(total, x, axes, keepdims)


def mean(x: TensorLike, axis: Any = None, *, keepdims: bool = False) -> Tensor:
    """Arithmetic mean over ``axis``, accumulated and divided at compute precision, rounded once."""
    return _mean(lift(x), axis, keepdims)


def centred(x: Tensor, axes: Axes) -> Tensor:
    """x minus its mean over ``axes`` (inside a composite)."""
    middle = divided_by_count(reduce_tree("sum", (x,), axes, (axes.full,), lambda a: a), x, axes, keepdims=False)
    return centred_with(x, middle, axes)


def centred_with(x: Tensor, middle: Tensor, axes: Axes) -> Tensor:
    """x minus ``middle``, which has the shape ``axes.kept``."""
    return apply_op("centre", (x, middle), Spec((axes.full, axes.kept), axes.full), lambda a, m: Apply("sub", (a, m)))


@composite("var", float_only=True)
def _var(x: Tensor, axis: Any, keepdims: bool, correction: float) -> Tensor:
    axes = axes_of(x, axis, keepdims=keepdims, what="var")
    c = centred(x, axes)
    total = reduce_tree("sum", (c,), axes, (axes.full,), lambda a: Apply("mul", (a, a)))
    return divided_by_count(total, x, axes, keepdims, correction)


def var(x: TensorLike, axis: Any = None, *, keepdims: bool = False, correction: float = 0.0) -> Tensor:
    """Variance over ``axis`` by the two-pass formula; ``correction`` is subtracted from the count (1: unbiased)."""
    return _var(lift(x), axis, keepdims, float(correction))


@composite("norm", float_only=True)
def _norm(x: Tensor, axis: Any, keepdims: bool) -> Tensor:
    axes = axes_of(x, axis, keepdims=keepdims, what="norm")

    def square(a: Access) -> Expr:
        return Apply("mul", (a, a))

    with no_gradient():
        total = reduce_tree("sum", (x,), axes, (axes.full,), square)
    return apply_op(
        "norm",
        (total, x),
        Spec((axes.kept, axes.full), axes.result(keepdims)),
        lambda s, _: Apply("sqrt", (s,)),
        rule="norm",
        attributes={"axes": axes},
    )


def norm(x: TensorLike, axis: Any = None, *, keepdims: bool = False) -> Tensor:
    """Euclidean norm over ``axis``; the gradient at 0 is 0."""
    return _norm(lift(x), axis, keepdims)
