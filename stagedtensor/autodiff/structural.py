"""Gradient rules of whole ops: reductions by maximum or product, softmax, logsumexp, norms, clamp.

A rule takes the op's record and gives the backward statements. Auxiliary values (the position of a maximum, a row's dot
product) are ops of their own, built once and remembered on the record; inside a composite they join its interior.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from stagedtensor.node import Node
from stagedtensor.precision import i32
from stagedtensor.regions import _region
from stagedtensor.specs import ShapeSpec, Spec
from stagedtensor.statements import Access, Apply, Expr, LinearIndex, OpRecord, Slot, Stage, Statement
from stagedtensor.tensor import Tensor, _composite, apply_op, no_gradient, tensor_of

from .rules import adjoints, div, mul, number, sub, where

StructuralRule = Callable[[OpRecord, set[Node]], list[Statement]]


def contribution(record: OpRecord, statement: Statement, access: Access, expr: Expr) -> Statement:
    """``access.node.grad[access.rows] += expr`` in the op's own scope."""
    gradient = access.node.gradient
    assert gradient is not None
    return Statement(
        Access(gradient, access.rows),
        expr,
        statement.scope,
        op="add",
        reset=False,
        stage=Stage.BACKWARD,
        source=record.source,
        text=f"{gradient.label} += d {statement.text}",
    )


def incoming(record: OpRecord, statement: Statement) -> Access:
    """The gradient of the op's result, read at the statement's target."""
    gradient = record.result.gradient
    assert gradient is not None
    return Access(gradient, statement.target.rows)


def carriers(record: OpRecord, useful: set[Node]) -> Callable[[Access], bool]:
    """Tell which accesses lead to a wanted gradient; a convert of a tensor to itself would add it onto itself."""
    data = {operand.node for operand in record.operands if operand.slot is Slot.DATA} - {record.result}

    def carries(access: Access) -> bool:
        return access.node in data and access.node in useful and access.node.gradient is not None

    return carries


@contextmanager
def _inside(record: OpRecord) -> Iterator[None]:
    """Build auxiliary ops in the composite and the region the record belongs to, without gradients."""
    token = _composite.set(record.result.composite)
    region_token = _region.set(record.result.region)
    try:
        with no_gradient():
            yield
    finally:
        _region.reset(region_token)
        _composite.reset(token)


def _auxiliary(record: OpRecord, name: str, build: Callable[[], Tensor]) -> tuple[Node, list[Statement]]:
    known: dict[str, Node] = record.attributes.setdefault("auxiliary", {})
    if name not in known:
        with _inside(record):
            known[name] = build().node
    made = known[name].record
    assert made is not None
    return known[name], [replace(statement, stage=Stage.BACKWARD) for statement in made.statements]


def tree(record: OpRecord, useful: set[Node]) -> list[Statement]:
    """Differentiate the expression trees of the forward statements."""
    carries = carriers(record, useful)
    made = []
    for statement in record.statements:
        stored = statement.target if statement.op is None else None
        contraction = statement.op is not None or record.kind == "einsum"
        g = incoming(record, statement)
        for access, expr in adjoints(statement.expr, g, stored, carries, contraction=contraction).items():
            made.append(contribution(record, statement, access, expr))
    return made


def extremum(record: OpRecord, useful: set[Node]) -> list[Statement]:
    """max / min: the gradient goes to the first extremal cell in row-major order of the reduced axes; NaN wins."""
    (statement,) = record.statements
    removed = _removed(record)
    operands = [tensor_of(operand.node) for operand in record.operands]
    slots = [operand.slot for operand in record.operands]
    kind: Any = "argmax" if statement.op == "max" else "argmin"

    position, made = _auxiliary(
        record,
        "position",
        lambda: apply_op(
            kind,
            operands,
            record.scope.spec,
            lambda *_: statement.expr,
            reduction=kind,
            slots=slots,
            rule=None,
            prec=i32,
            sizes=record.scope.sizes,
            label=f"{record.result.label}_position",
            source=record.source,
        ),
    )
    here = Apply("eq", (LinearIndex(removed), Access(position, statement.target.rows)))
    g = where(here, incoming(record, statement), number(0.0))
    for access, expr in adjoints(statement.expr, g, None, carriers(record, useful)).items():
        made.append(contribution(record, statement, access, expr))
    return made


def _removed(record: OpRecord) -> ShapeSpec:
    axes = record.attributes.get("axes")
    removed: ShapeSpec = axes.removed if axes is not None else record.attributes["removed"]
    return removed


def product(record: OpRecord, useful: set[Node]) -> list[Statement]:
    """prod: g times the product of the other cells, exact where cells are 0.

    With no zero among the cells that is y / x; with one, only that cell has a gradient, the product of the others; with
    more there is none. So it needs the number of zeros and the product of the other cells, two reductions.
    """
    (statement,) = record.statements
    operands = [tensor_of(operand.node) for operand in record.operands]
    value, spec = statement.expr, record.scope.spec
    is_zero = Apply("eq", (value, number(0.0)))

    def reduction(kind: str, expr: Expr, op: Any) -> Callable[[], Tensor]:
        return lambda: apply_op(
            kind,
            operands,
            spec,
            lambda *_: expr,
            reduction=op,
            rule=None,
            sizes=record.scope.sizes,
            source=record.source,
        )

    zeros, made = _auxiliary(record, "zeros", reduction("count_zeros", where(is_zero, number(1.0), number(0.0)), "add"))
    rest, more = _auxiliary(record, "rest", reduction("prod_nonzero", where(is_zero, number(1.0), value), "mul"))
    made += more
    rows = statement.target.rows
    count, others = Access(zeros, rows), Access(rest, rows)
    slope = where(
        Apply("eq", (count, number(0.0))),
        div(others, value),
        where(Apply("and", (Apply("eq", (count, number(1.0))), is_zero)), others, number(0.0)),
    )
    g = mul(incoming(record, statement), slope)
    for access, expr in adjoints(value, g, None, carriers(record, useful)).items():
        made.append(contribution(record, statement, access, expr))
    return made


def softmax(record: OpRecord, useful: set[Node]) -> list[Statement]:
    """y * (g - sum(y * g)); reads the result only."""
    (statement,) = record.statements
    axes = record.attributes["axes"]
    gradient = record.result.gradient
    assert gradient is not None
    dot, made = _auxiliary(
        record,
        "dot",
        lambda: apply_op(
            "sum",
            (tensor_of(record.result), tensor_of(gradient)),
            Spec((axes.full, axes.full), axes.kept),
            lambda y, g: Apply("mul", (y, g)),
            reduction="add",
            rule=None,
            label="softmax_dot",
            source=record.source,
        ),
    )
    y = statement.target
    expr = mul(y, sub(incoming(record, statement), Access(dot, axes.kept)))
    x = Access(record.operands[0].node, axes.full)
    return [*made, contribution(record, statement, x, expr)] if carriers(record, useful)(x) else []


def logsumexp(record: OpRecord, useful: set[Node]) -> list[Statement]:
    """g * exp(x - maximum) / sum(exp(x - maximum)), exact however large x is; 0 for a row that is all -inf."""
    (statement,) = record.statements
    axes = record.attributes["axes"]
    x = Access(record.operands[0].node, axes.full)
    if not carriers(record, useful)(x):
        return []
    top, total = (Access(operand.node, axes.kept) for operand in record.operands[1:])
    shift = where(Apply("eq", (top, number(-math.inf))), number(0.0), top)
    slope = where(Apply("eq", (total, number(0.0))), number(0.0), div(Apply("exp", (sub(x, shift),)), total))
    return [contribution(record, statement, x, mul(incoming(record, statement), slope))]


def norm(record: OpRecord, useful: set[Node]) -> list[Statement]:
    """g * x / y; 0 where the norm is 0."""
    (statement,) = record.statements
    x = Access(record.operands[1].node, record.attributes["axes"].full)
    if not carriers(record, useful)(x):
        return []
    y = statement.target
    slope = where(Apply("eq", (y, number(0.0))), number(0.0), div(x, y))
    return [contribution(record, statement, x, mul(incoming(record, statement), slope))]


def clamp(record: OpRecord, useful: set[Node]) -> list[Statement]:
    """The gradient passes where low <= x <= high."""
    (statement,) = record.statements
    x, *bounds = (
        Access(operand.node, rows) for operand, rows in zip(record.operands, record.scope.spec.operands, strict=True)
    )
    if not carriers(record, useful)(x):
        return []
    tests: list[Expr] = []
    if record.attributes["low"] is not None:
        tests.append(Apply("lt", (x, bounds[0])))
    if record.attributes["high"] is not None:
        tests.append(Apply("gt", (x, bounds[-1])))
    outside = tests[0] if len(tests) == 1 else Apply("or", tuple(tests))
    return [contribution(record, statement, x, where(outside, number(0.0), incoming(record, statement)))]


def softplus(record: OpRecord, useful: set[Node]) -> list[Statement]:
    """g * sigmoid(x)."""
    (statement,) = record.statements
    x = Access(record.operands[0].node, record.scope.spec.operands[0])
    if not carriers(record, useful)(x):
        return []
    expr = mul(incoming(record, statement), Apply("sigmoid", (x,)))
    return [contribution(record, statement, x, expr)]


STRUCTURAL: dict[str, StructuralRule] = {
    "tree": tree,
    "extremum": extremum,
    "prod": product,
    "softmax": softmax,
    "logsumexp": logsumexp,
    "norm": norm,
    "clamp": clamp,
    "softplus": softplus,
}
"""Rules by the name that records carry."""
