"""Losses: composites whose result is f32 or wider by construction, whatever the model's precision."""

from __future__ import annotations

import math
from typing import Any, Literal

from .composite import composite
from .errors import ShapeError
from .functions.axes import LAST_OUTPUT, Axes, axes_of
from .functions.indexing import check_ids
from .functions.normalised import finite_or_zero, log_total_inside
from .functions.pointwise import clamp, log, relu, softplus, where
from .functions.reductions import divided_by_count, reduce_tree
from .settings import is_integer, is_number
from .source import user_source
from .specs import Spec, pointwise
from .statements import LABELS, Access, Apply, DimValue, Expr, IterValue, NumberLiteral, Slot
from .tensor import Tensor, TensorLike, apply_op, lift, no_gradient

Reduction = Literal["mean", "sum", "none"]


def cross_entropy(
    logits: TensorLike,
    labels: TensorLike,
    *,
    axis: Any = LAST_OUTPUT,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    ignore_index: int | None = None,
    mask: TensorLike | None = None,
) -> Tensor:
    """-log softmax(logits)[label], over the class ``axis``.

    Integer labels have the logits' shape without the class axis (out of range: clamped); float labels are class
    probabilities of the logits' shape. The mean is over all remaining cells that ``mask`` (not 0; it broadcasts to
    them) and ``ignore_index`` leave, one cell; with none left it is 0. The result is f32 or wider.
    """
    x, target = lift(logits), lift(labels)
    _check(reduction, "cross_entropy")
    if not is_number(label_smoothing) or not 0.0 <= label_smoothing < 1.0:
        raise ValueError(
            f"cross_entropy: label_smoothing is in [0, 1), not {label_smoothing!r} ({user_source().quoted()})"
        )
    if ignore_index is not None and not is_integer(ignore_index):
        raise TypeError(f"cross_entropy: ignore_index is an integer, not {ignore_index!r} ({user_source().quoted()})")
    soft = _are_probabilities(target)
    if not soft:
        check_ids(target, "cross_entropy")
    elif ignore_index is not None:
        raise ValueError(
            "cross_entropy: ignore_index goes with integer labels; use mask= with class probabilities "
            f"({user_source().quoted()})"
        )
    weights = None if mask is None else lift(mask)
    ignored = None if ignore_index is None else int(ignore_index)
    return _cross_entropy(x, (target, soft, weights), axis, reduction, float(label_smoothing), ignored)


def _are_probabilities(labels: Tensor) -> bool:
    """Whether labels are floats; a terminal that nobody gave a precision is an integer."""
    specified = labels.node.settled or labels.node.specified
    if specified is not None:
        return specified.prec.is_float
    return labels.node.record is not None and labels.precision.is_float


@composite("cross_entropy", float_only=True, wide_result=True)
def _cross_entropy(
    x: Tensor,
    others: tuple[Tensor, bool, Tensor | None],
    axis: Any,
    reduction: Reduction,
    smoothing: float,
    ignore_index: int | None,
) -> Tensor:
    labels, soft, mask = others
    axes = axes_of(x, axis, what="cross_entropy")
    if len(axes.names) != 1:
        raise ShapeError(f"cross_entropy: expected one class axis, got {axis!r} ({user_source().quoted()})")
    row = log_total_inside(x, axes)
    cells = _expected(x, labels, row, axes) if soft else row[1] - _picked(x, labels, row[0], axes, ignore_index, mask)
    if smoothing:
        shifted = reduce_tree("sum", (x, row[0]), axes, (axes.full, axes.kept), _below_top)
        average = row[1] - divided_by_count(shifted, x, axes, keepdims=False)
        cells = cells * (1.0 - smoothing) + average * smoothing
    valid = _valid(cells, labels, mask, ignore_index)
    if valid is not None:
        cells = apply_op(
            "where",
            (valid, cells),
            Spec((axes.kept, axes.kept), axes.kept),
            lambda v, a: Apply("where", (v, a, NumberLiteral(0.0))),
            slots=(Slot.PREDICATE, Slot.DATA),
        )
    if reduction == "none":
        return cells
    every = axes_of(cells, None)
    summed = reduce_tree("sum", (cells,), every, (every.full,), lambda a: a)
    if reduction == "sum":
        return summed
    if valid is None:
        return divided_by_count(summed, cells, every, keepdims=False)
    with no_gradient():
        count = reduce_tree("sum", (valid,), every, (every.full,), lambda a: a)
    return apply_op(
        "divide_by_count",
        (summed, count),
        Spec((every.kept, every.kept), every.kept),
        lambda s, n: Apply("div", (s, Apply("maximum", (n, NumberLiteral(1.0))))),
    )


def _below_top(a: Expr, top: Expr) -> Expr:
    """A logit less its row's maximum."""
    return Apply("sub", (a, finite_or_zero(top)))


def _picked(
    x: Tensor, labels: Tensor, top: Tensor, axes: Axes, ignore_index: int | None, mask: Tensor | None
) -> Tensor:
    """The logit of the label less the row's maximum, a masked sum so that the gradient needs no scatter."""
    (name,) = axes.names

    def tree(a: Access, label: Access, m: Access) -> Expr:
        last = Apply("sub", (DimValue((name,)), NumberLiteral(1)))
        clamped = Apply("maximum", (Apply("minimum", (label, last)), NumberLiteral(0)))
        return Apply("where", (Apply("eq", (IterValue(name), clamped)), _below_top(a, m), NumberLiteral(0.0)))

    return apply_op(
        "pick_label",
        (x, labels, top),
        Spec((axes.full, axes.kept, axes.kept), axes.kept),
        tree,
        reduction="add",
        slots=(Slot.DATA, Slot.INDEX, Slot.DATA),
        attributes={
            "reduction": "add",
            "axes": axes,
            LABELS: (name, ignore_index, None if mask is None else mask.node),
        },
    )


def _expected(x: Tensor, labels: Tensor, row: tuple[Tensor, Tensor], axes: Axes) -> Tensor:
    """The sum of p * -log q over the classes; a class of probability 0 counts 0 whatever its logit is."""

    def tree(a: Access, p: Access, m: Access, s: Access) -> Expr:
        cost = Apply("mul", (p, Apply("sub", (s, _below_top(a, m)))))
        return Apply("where", (Apply("eq", (p, NumberLiteral(0.0))), NumberLiteral(0.0), cost))

    return reduce_tree("expected", (x, labels, *row), axes, (axes.full, axes.full, axes.kept, axes.kept), tree)


def _valid(cells: Tensor, labels: Tensor, mask: Tensor | None, ignore_index: int | None) -> Tensor | None:
    """1 in cells that count, of the cells' shape, to which a mask broadcasts."""
    if mask is None and ignore_index is None:
        return None
    operands, slots = [cells], [Slot.PREDICATE]  # read for its shape
    if ignore_index is not None:
        operands, slots = [*operands, labels], [*slots, Slot.INDEX]
    if mask is not None:
        operands, slots = [*operands, mask], [*slots, Slot.PREDICATE]

    def tree(*reads: Access) -> Expr:
        tests: list[Expr] = []
        if ignore_index is not None:
            tests.append(Apply("ne", (reads[1], NumberLiteral(ignore_index))))
        if mask is not None:
            tests.append(reads[-1])
        test = tests[0] if len(tests) == 1 else Apply("and", tuple(tests))
        return Apply("where", (test, NumberLiteral(1.0), NumberLiteral(0.0)))

    return apply_op("valid", operands, pointwise(len(operands)), tree, slots=slots, rule=None)


# -- regression and margin losses ---------------------------------------------------------------------------------


def _reduced(cells: Tensor, reduction: Reduction) -> Tensor:
    if reduction == "none":
        return cells
    every = axes_of(cells, None)
    total = reduce_tree("sum", (cells,), every, (every.full,), lambda a: a)
    return total if reduction == "sum" else divided_by_count(total, cells, every, keepdims=False)


def _check(reduction: str, what: str) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'{what}: reduction is "mean", "sum" or "none", not {reduction!r} ({user_source().quoted()})')


@composite("mse", float_only=True, wide_result=True)
def _mse(x: Tensor, y: Tensor, reduction: Reduction) -> Tensor:
    difference = x - y
    return _reduced(difference * difference, reduction)


def mse(x: TensorLike, y: TensorLike, *, reduction: Reduction = "mean") -> Tensor:
    """Squared error, reduced over all cells."""
    _check(reduction, "mse")
    return _mse(lift(x), lift(y), reduction)


@composite("mae", float_only=True, wide_result=True)
def _mae(x: Tensor, y: Tensor, reduction: Reduction) -> Tensor:
    return _reduced(abs(x - y), reduction)


def mae(x: TensorLike, y: TensorLike, *, reduction: Reduction = "mean") -> Tensor:
    """Absolute error, reduced over all cells."""
    _check(reduction, "mae")
    return _mae(lift(x), lift(y), reduction)


@composite("huber", float_only=True, wide_result=True)
def _huber(x: Tensor, y: Tensor, delta: float, reduction: Reduction) -> Tensor:
    distance = abs(x - y)
    near = 0.5 * (distance * distance)
    return _reduced(where(distance <= delta, near, delta * (distance - 0.5 * delta)), reduction)


def huber(x: TensorLike, y: TensorLike, *, delta: float = 1.0, reduction: Reduction = "mean") -> Tensor:
    """Half the squared error up to ``delta``, linear beyond (Huber 1964), reduced over all cells."""
    _check(reduction, "huber")
    if not is_number(delta) or not 0.0 < delta < math.inf:
        raise ValueError(f"huber: delta is a positive finite number, not {delta!r} ({user_source().quoted()})")
    return _huber(lift(x), lift(y), float(delta), reduction)


_LEAST_LOG = -100.0


@composite("binary_cross_entropy", float_only=True, wide_result=True)
def _binary_cross_entropy(p: Tensor, y: Tensor, reduction: Reduction) -> Tensor:
    # a logarithm of 0 counts as -100, so that a sure and wrong answer costs much, not everything
    hit, miss = (clamp(log(q), low=_LEAST_LOG) for q in (p, 1.0 - p))
    return _reduced(-(y * hit + (1.0 - y) * miss), reduction)


def binary_cross_entropy(p: TensorLike, y: TensorLike, *, reduction: Reduction = "mean") -> Tensor:
    """-(y log p + (1 - y) log(1 - p)) of probabilities; logarithms are at least -100.

    Prefer :func:`binary_cross_entropy_with_logits`, which loses no digits near 0 and 1.
    """
    _check(reduction, "binary_cross_entropy")
    return _binary_cross_entropy(lift(p), lift(y), reduction)


@composite("binary_cross_entropy", float_only=True, wide_result=True)
def _binary_cross_entropy_with_logits(x: Tensor, y: Tensor, reduction: Reduction) -> Tensor:
    return _reduced(softplus(x) - x * y, reduction)


def binary_cross_entropy_with_logits(x: TensorLike, y: TensorLike, *, reduction: Reduction = "mean") -> Tensor:
    """Binary cross-entropy of sigmoid(x) with targets y in [0, 1], without overflow."""
    _check(reduction, "binary_cross_entropy_with_logits")
    return _binary_cross_entropy_with_logits(lift(x), lift(y), reduction)


@composite("hinge", float_only=True, wide_result=True)
def _hinge(x: Tensor, y: Tensor, reduction: Reduction) -> Tensor:
    return _reduced(relu(1.0 - y * x), reduction)


def hinge(x: TensorLike, y: TensorLike, *, reduction: Reduction = "mean") -> Tensor:
    """max(0, 1 - y x) for targets y of -1 and 1, reduced over all cells."""
    _check(reduction, "hinge")
    return _hinge(lift(x), lift(y), reduction)
