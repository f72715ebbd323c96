"""The one analysis that lets a storage rounding go: ``exact_in`` proves that a value already is in a format.

In: an expression and a format. Out: True only where converting the value to the format and back changes no bit (the
bits of a NaN aside). Nothing is rewritten here; ``simplify`` asks.
"""

from __future__ import annotations

import math

from stagedtensor.codegen import loop_ir as ir
from stagedtensor.codegen.lower_expr import constant
from stagedtensor.op_table import OPS
from stagedtensor.precision import Prec, bool_, u4x32


def contains(outer: Prec, inner: Prec) -> bool:
    """Whether every value of ``inner`` is a value of ``outer``."""
    if outer is inner:
        return True
    if u4x32 in (outer, inner):
        return False
    if inner is bool_:
        return True
    if outer is bool_ or (inner.is_float and not outer.is_float):
        return False
    if inner.is_float:
        return (
            outer.exponent_bits >= inner.exponent_bits
            and outer.mantissa_bits >= inner.mantissa_bits
            and (outer.has_inf or not inner.has_inf)
        )
    if outer.is_float:  # an integer of n value bits needs n significant digits
        return inner.mantissa_bits <= outer.mantissa_bits + 1 and inner.max_finite <= outer.max_finite
    return outer.min_finite <= inner.min_finite and inner.max_finite <= outer.max_finite


def exact_in(expr: ir.Expr, prec: Prec) -> bool:
    """Whether the value of ``expr`` is certainly a value of ``prec``."""
    if contains(prec, expr.type):
        return True
    match expr:
        case ir.Const(value, source):
            if prec is u4x32:
                return False
            back = constant(constant(value, prec, source).value, source).value
            return back == value and math.copysign(1, back) == math.copysign(1, value)
        case ir.Cast(arg, through):
            # What was in the format stays in it through a conversion that keeps its values.
            return contains(through, prec) and exact_in(arg, prec) and not expr.flush
        case ir.Apply(op, args):
            row = OPS[op]
            if op == "add" and any(isinstance(arg, ir.Const) and arg.value == 0 for arg in args):
                return all(exact_in(arg, prec) for arg in args)  # one of the two, or 0
            if row.op_class in ("comparison", "logic") and op != "nonfinite":
                return True
            if not row.keeps_format or (op in ("neg", "abs") and not prec.is_float):
                return False
            return all(exact_in(arg, prec) for at, arg in enumerate(args) if at not in row.predicates)
        case _:
            return False
