"""What the exporter reads off the expressions of a block: plain positions, and what an accumulator adds up.

In: expressions of the loop IR. Out: facts about their form; no op is emitted here.
"""

from __future__ import annotations

from dataclasses import dataclass

from stagedtensor.codegen import loop_ir as ir
from stagedtensor.conversion import representable
from stagedtensor.op_table import OPS
from stagedtensor.precision import Prec, bf16, f16

from .casts import is_exact

REDUCERS = {"add": "add", "mul": "multiply", "maximum": "maximum", "minimum": "minimum"}
"""The StableHLO op of each way to accumulate."""


NARROW = (f16, bf16)
"""Formats whose ops may be done at their own width."""
_AT_NARROW = frozenset(
    {"add", "sub", "mul", "div", "neg", "abs", "maximum", "minimum", "relu", "where", "identity", "sqrt", "rsqrt", "recip",
     "exp", "log", "sin", "cos", "tanh", "sigmoid", "pow"}
)  # fmt: skip
"""Ops that need no wider type than that of their operands and result: one op, one rounding."""


@dataclass(frozen=True)
class Sum:
    """What an accumulator adds up: the op, the value of one point, and whether it is taken away."""

    op: str
    point: ir.Expr
    inverse: str = ""


def affine(index: ir.Expr) -> tuple[ir.Symbol | None, int, int]:
    """Return (iterator, step, start) of ``step * iterator + start``; (None, 0, n) of a number; step -1: neither."""
    match index:
        case ir.Const(value):
            return None, 0, int(value)
        case ir.Var(symbol):
            return symbol, 1, 0
        case ir.Apply("add", (a, b)):
            left, right = affine(a), affine(b)
            if -1 in (left[1], right[1]) or (left[0] is not None and right[0] is not None):
                return None, -1, 0
            return left[0] or right[0], left[1] + right[1], left[2] + right[2]
        case ir.Apply("mul", (a, b)):
            left, right = affine(a), affine(b)
            if left[0] is not None:
                left, right = right, left
            if left[0] is not None or -1 in (left[1], right[1]) or left[2] < 1:
                return None, -1, 0
            return right[0], right[1] * left[2], right[2] * left[2]
        case _:
            return None, -1, 0


def added_by(state: ir.Accumulator, store: ir.Store | None = None) -> Sum | None:
    """Read an update ``state op point``; in a scatter the state is the cell itself."""

    def is_state(expr: ir.Expr) -> bool:
        if store is not None:
            return isinstance(expr, ir.Load) and expr.buffer is store.buffer
        return isinstance(expr, ir.Var) and expr.symbol is state.symbol

    match state.update:
        case ir.Fma(a, b, c) if is_state(c):
            return Sum("add", ir.Apply("mul", (a, b), state.update.type))
        case ir.Apply(op, (held, point)) if is_state(held):
            if op in REDUCERS:
                return Sum(op, point)
            if op in ("sub", "div"):
                return Sum("add" if op == "sub" else "mul", point, "neg" if op == "sub" else "recip")
    return None


def neutral_number(op: str, prec: Prec) -> float | int:
    """Return the number that an accumulation starts from; formats without infinities start from their ends."""
    if op in ("add", "mul"):
        number = 0 if op == "add" else 1
        return float(number) if prec.is_float else number
    infinite = prec.is_float and prec.has_inf
    if op == "maximum":
        return -float("inf") if infinite else prec.min_finite
    return float("inf") if infinite else prec.max_finite


def is_neutral(init: ir.Const, op: str) -> bool:
    """Whether an accumulator starts from nothing."""
    return init.value == neutral_number(op, init.type)


def narrow_op(expr: ir.Cast) -> ir.Apply | None:
    """An op on values of one narrow format that is rounded to that format at once: no wider type is needed."""
    prec, op = expr.type, expr.arg
    if prec not in NARROW or expr.saturate or expr.flush or not isinstance(op, ir.Apply) or op.op not in _AT_NARROW:
        return None
    predicates = OPS[op.op].predicates
    data = [arg for at, arg in enumerate(op.args) if at not in predicates]
    fits = all(
        (isinstance(arg, ir.Cast) and arg.arg.type is prec and not arg.saturate)
        or (isinstance(arg, ir.Const) and representable(arg.value, prec) and is_exact(arg.value, prec))
        for arg in data
    )
    return op if fits and any(isinstance(arg, ir.Cast) for arg in data) else None
