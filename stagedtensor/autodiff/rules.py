"""Derivative rows of the op table, and the adjoint of an expression tree.

``DERIVATIVES[op][i](g, y, *args)`` is the contribution to operand i of the incoming gradient g, where y is the op's
result. Rows use the result wherever the answer is the same, so that operands need not stay alive. Rules whose factor
may be infinite or NaN select 0 where g is 0: a branch not taken must not leak NaN. Only the product inside a
contraction stays a plain product, since matrix kernels compute it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from stagedtensor.node import Role
from stagedtensor.op_table import OPS
from stagedtensor.statements import Access, Apply, Expr, NumberLiteral

Rule = Callable[..., Expr]
Reads = Literal["nothing", "operands", "result"]


@dataclass(frozen=True)
class Derivative:
    """One op's row: a rule per operand (None: no gradient) and what the rules read besides g."""

    rules: tuple[Rule | None, ...]
    reads: Reads


def number(value: float) -> NumberLiteral:
    """Return a literal."""
    return NumberLiteral(value)


def mul(a: Expr, b: Expr) -> Expr:
    """a * b, leaving out factors of 1."""
    if a == NumberLiteral(1.0):
        return b
    if b == NumberLiteral(1.0):
        return a
    return Apply("mul", (a, b))


def add(a: Expr, b: Expr) -> Expr:
    """a + b."""
    return Apply("add", (a, b))


def sub(a: Expr, b: Expr) -> Expr:
    """a - b."""
    return Apply("sub", (a, b))


def div(a: Expr, b: Expr) -> Expr:
    """a / b."""
    return Apply("div", (a, b))


def neg(a: Expr) -> Expr:
    """-a."""
    return Apply("neg", (a,))


def where(condition: Expr, a: Expr, b: Expr) -> Expr:
    """Select."""
    return Apply("where", (condition, a, b))


def masked(g: Expr, value: Expr) -> Expr:
    """``value``, but 0 where g is 0."""
    return where(Apply("eq", (g, number(0.0))), number(0.0), value)


def scaled(g: Expr, factor: Expr) -> Expr:
    """g * factor, masked unless the factor is known to be finite."""
    match factor:
        case NumberLiteral(value) if math.isfinite(value):
            return mul(g, factor)
        case Access(node) if (
            node.data is not None and node.role in _FIXED and np.isfinite(node.data.astype(np.float64)).all()
        ):
            return mul(g, factor)
    return masked(g, mul(g, factor))


def _first_wins(test: str) -> Rule:
    """The first operand is the result: test(a, b), or a is NaN."""
    return lambda g, y, a, b: where(Apply("or", (Apply(test, (a, b)), Apply("ne", (a, a)))), g, number(0.0))


def _second_wins(test: str) -> Rule:
    return lambda g, y, a, b: where(Apply("or", (Apply(test, (a, b)), Apply("ne", (a, a)))), number(0.0), g)


def _power_base(g: Expr, y: Expr, a: Expr, b: Expr) -> Expr:
    slope = mul(b, Apply("pow", (a, sub(b, number(1.0)))))
    return where(Apply("eq", (b, number(0.0))), number(0.0), masked(g, mul(g, slope)))


def _power_exponent(g: Expr, y: Expr, a: Expr, b: Expr) -> Expr:
    return where(Apply("eq", (y, number(0.0))), number(0.0), masked(g, mul(g, mul(y, Apply("log", (a,))))))


_FIXED = (Role.LITERAL, Role.CONSTANT)
_TWO_OVER_ROOT_PI = 2.0 / math.sqrt(math.pi)

DERIVATIVES: dict[str, Derivative] = {
    "add": Derivative((lambda g, y, a, b: g, lambda g, y, a, b: g), "nothing"),
    "sub": Derivative((lambda g, y, a, b: g, lambda g, y, a, b: neg(g)), "nothing"),
    "mul": Derivative((lambda g, y, a, b: scaled(g, b), lambda g, y, a, b: scaled(g, a)), "operands"),
    "div": Derivative(
        (
            lambda g, y, a, b: masked(g, div(g, b)),
            lambda g, y, a, b: masked(g, neg(div(mul(g, y), b))),
        ),
        "operands",
    ),
    "mod": Derivative(
        (lambda g, y, a, b: g, lambda g, y, a, b: masked(g, neg(mul(g, Apply("floor", (div(a, b),)))))), "operands"
    ),
    "pow": Derivative((_power_base, _power_exponent), "operands"),
    "fma": Derivative(
        (lambda g, y, a, b, c: scaled(g, b), lambda g, y, a, b, c: scaled(g, a), lambda g, y, a, b, c: g), "operands"
    ),
    "maximum": Derivative((_first_wins("ge"), _second_wins("ge")), "operands"),
    "minimum": Derivative((_first_wins("le"), _second_wins("le")), "operands"),
    "neg": Derivative((lambda g, y, a: neg(g),), "nothing"),
    "abs": Derivative((lambda g, y, a: masked(g, mul(g, Apply("sign", (a,)))),), "operands"),
    # `le` is false for NaN, so a NaN lets g pass as a NaN value did
    "relu": Derivative((lambda g, y, a: where(Apply("le", (y, number(0.0))), number(0.0), g),), "result"),
    "identity": Derivative((lambda g, y, a: g,), "nothing"),
    "exp": Derivative((lambda g, y, a: masked(g, mul(g, y)),), "result"),
    "exp2": Derivative((lambda g, y, a: masked(g, mul(g, mul(y, number(math.log(2.0))))),), "result"),
    "log": Derivative((lambda g, y, a: masked(g, div(g, a)),), "operands"),
    "log2": Derivative((lambda g, y, a: masked(g, div(g, mul(a, number(math.log(2.0))))),), "operands"),
    "sqrt": Derivative((lambda g, y, a: masked(g, div(mul(g, number(0.5)), y)),), "result"),
    "rsqrt": Derivative((lambda g, y, a: masked(g, mul(mul(g, number(-0.5)), mul(y, mul(y, y)))),), "result"),
    "recip": Derivative((lambda g, y, a: masked(g, neg(mul(g, mul(y, y)))),), "result"),
    "sin": Derivative((lambda g, y, a: masked(g, mul(g, Apply("cos", (a,)))),), "operands"),
    "cos": Derivative((lambda g, y, a: masked(g, neg(mul(g, Apply("sin", (a,))))),), "operands"),
    "tanh": Derivative((lambda g, y, a: masked(g, mul(g, sub(number(1.0), mul(y, y)))),), "result"),
    "sigmoid": Derivative((lambda g, y, a: masked(g, mul(g, mul(y, sub(number(1.0), y)))),), "result"),
    "erf": Derivative(
        (lambda g, y, a: masked(g, mul(g, mul(number(_TWO_OVER_ROOT_PI), Apply("exp", (neg(mul(a, a)),))))),),
        "operands",
    ),
    "erfc": Derivative(
        (lambda g, y, a: masked(g, mul(g, mul(number(-_TWO_OVER_ROOT_PI), Apply("exp", (neg(mul(a, a)),))))),),
        "operands",
    ),
    "where": Derivative(
        (
            None,
            lambda g, y, c, a, b: where(c, g, number(0.0)),
            lambda g, y, c, a, b: where(c, number(0.0), g),
        ),
        "operands",
    ),
}
"""One row per differentiable op."""

_CONTRACTION = DERIVATIVES | {
    "mul": Derivative((lambda g, y, a, b: mul(g, b), lambda g, y, a, b: mul(g, a)), "operands")
}


def missing_rows() -> list[str]:
    """Return differentiable ops without a derivative row (empty: the table is complete)."""
    return [name for name, op in OPS.items() if op.differentiable and name not in DERIVATIVES]


def adjoints(
    expr: Expr, g: Expr, y: Expr | None, carries: Callable[[Access], bool], *, contraction: bool = False
) -> dict[Access, Expr]:
    """Return, per access that carries a gradient, the sum of its contributions to it.

    ``y`` is how the whole tree's value can be read (the stored result), None to recompute it. Products of a
    ``contraction`` are not masked.
    """
    found: dict[Access, Expr] = {}
    _collect(expr, g, y, carries, _CONTRACTION if contraction else DERIVATIVES, found)
    return found


def _collect(
    expr: Expr,
    g: Expr,
    y: Expr | None,
    carries: Callable[[Access], bool],
    rows: Mapping[str, Derivative],
    found: dict[Access, Expr],
) -> None:
    if isinstance(expr, Access):
        if carries(expr):
            found[expr] = add(found[expr], g) if expr in found else g
        return
    if not isinstance(expr, Apply) or not _any_carries(expr, carries):
        return
    row = rows.get(expr.op)
    if row is None:
        return
    result = y if y is not None else expr
    for arg, rule in zip(expr.args, row.rules, strict=True):
        if rule is not None and _any_carries(arg, carries):
            _collect(arg, rule(g, result, *expr.args), None, carries, rows, found)


def _any_carries(expr: Expr, carries: Callable[[Access], bool]) -> bool:
    if isinstance(expr, Access):
        return carries(expr)
    return isinstance(expr, Apply) and any(_any_carries(arg, carries) for arg in expr.args)
