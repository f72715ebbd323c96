"""Expressions as C text: what C and CUDA share.

In: typed expressions of the loop IR, the names of their variables and buffers, a dialect. Out: text with as few
parentheses as the precedences need, and the prelude functions it calls. Knows no statements.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

import numpy as np

from stagedtensor.codegen.affine import Affine, affine, constant, flat_index
from stagedtensor.codegen.emit.names import Names
from stagedtensor.codegen.loop_ir import Apply, Buffer, Cast, Const, Expr, Fma, Load, Symbol, Var
from stagedtensor.codegen.prelude import conversion, round_trip
from stagedtensor.errors import InternalError
from stagedtensor.precision import Prec, f32, f64, i32, i64, u32, u64


class Level(IntEnum):
    """Precedence of C operators, loosest first."""

    TERNARY = 3
    OR = 4
    AND = 5
    EQUALITY = 9
    RELATION = 10
    SUM = 12
    PRODUCT = 13
    UNARY = 14
    POSTFIX = 15
    PRIMARY = 16


@dataclass(frozen=True)
class Text:
    """A piece of C with the precedence of its outermost operator."""

    code: str
    level: Level = Level.PRIMARY

    def at(self, least: Level) -> str:
        """Return the code, in parentheses where it binds more loosely than ``least``."""
        return self.code if self.level >= least else f"({self.code})"


class Dialect(Protocol):
    """What differs between C and CUDA in expressions."""

    def type_name(self, prec: Prec) -> str:
        """Return the C type of a value of ``prec``."""


@dataclass(frozen=True)
class CDialect:
    """Plain C: narrow floats are their bits."""

    def type_name(self, prec: Prec) -> str:
        """Return the C type of a value of ``prec``."""
        return prec.c_type


# -- literals -----------------------------------------------------------------------------------------------------

_INFINITY = {f32: "0x7f800000u", f64: "0x7ff0000000000000u"}
_NAN = {f32: "0x7fc00000u", f64: "0x7ff8000000000000u"}
_INTEGER_SUFFIX = {u32: "u", u64: "u"}


def literal(value: float | int, prec: Prec) -> tuple[Text, str | None]:
    """Return a constant of a compute type, and the prelude function it needs where it is not finite.

    Finite floats are printed in the shortest decimal form that reads back as the same value.
    """
    if prec.is_float:
        number = float(value)
        if not math.isfinite(number):
            bits = (_NAN if math.isnan(number) else _INFINITY)[prec]
            maker = f"st_from_bits_{prec.name}"
            sign = "-" if number < 0 else ""
            return Text(f"{sign}{maker}({bits})", Level.UNARY if sign else Level.POSTFIX), maker
        text = _shortest(number, prec)
        return Text(text, Level.UNARY if text.startswith("-") else Level.PRIMARY), None
    whole = int(value)
    if prec is i64 and whole == prec.min_finite:
        return Text("INT64_MIN"), None
    if prec is i32 and whole == prec.min_finite:
        return Text("INT32_MIN"), None
    text = f"{whole}{_INTEGER_SUFFIX.get(prec, '')}"
    return Text(text, Level.UNARY if whole < 0 else Level.PRIMARY), None


def _shortest(number: float, prec: Prec) -> str:
    single = prec is f32
    text = repr(number) if not single else str(np.float32(number))
    if single and float(np.float32(text)) != number:
        raise InternalError(f"constant {number!r} is not a value of {prec}")
    if not any(mark in text for mark in ".e"):
        text += ".0"
    return f"{text}f" if single else text


# -- operators ----------------------------------------------------------------------------------------------------

_COMPARISONS = {
    "lt": ("<", Level.RELATION),
    "le": ("<=", Level.RELATION),
    "gt": (">", Level.RELATION),
    "ge": (">=", Level.RELATION),
    "eq": ("==", Level.EQUALITY),
    "ne": ("!=", Level.EQUALITY),
}
_INFIX = {
    "add": ("+", Level.SUM),
    "sub": ("-", Level.SUM),
    "mul": ("*", Level.PRODUCT),
    "div": ("/", Level.PRODUCT),
}
# Prelude functions; the format's name is appended.
_FUNCTIONS = {
    "floordiv": "st_floordiv",
    "mod": "st_floormod",
    "pow": "st_pow",
    "fma": "st_fma",
    "maximum": "st_max",
    "minimum": "st_min",
    "abs": "st_abs",
    "sign": "st_sign",
    "floor": "st_floor",
    "ceil": "st_ceil",
    "round": "st_round",
    "trunc": "st_trunc",
    "relu": "st_relu",
    "exp": "st_exp",
    "exp2": "st_exp2",
    "log": "st_log",
    "log2": "st_log2",
    "sqrt": "st_sqrt",
    "rsqrt": "st_rsqrt",
    "recip": "st_recip",
    "sin": "st_sin",
    "cos": "st_cos",
    "tanh": "st_tanh",
    "sigmoid": "st_sigmoid",
    "erf": "st_erf",
    "erfc": "st_erfc",
    "nonfinite": "st_nonfinite",
    "random_uniform": "st_random_uniform",
    "random_normal": "st_random_normal",
}
_WHOLE_ON_INTEGERS = ("floor", "ceil", "round", "trunc")
_BOOLEAN = (*_COMPARISONS, "and", "or", "not")
C_OPS: frozenset[str] = frozenset((*_COMPARISONS, *_INFIX, *_FUNCTIONS, "neg", "identity", "and", "or", "not", "where"))
"""Ops of the table that have C text: all of them (a test compares)."""

# Types narrower than int compute as int in C; their results are brought back.
_PROMOTED_BITS = 32


@dataclass
class ExpressionPrinter:
    """Prints expressions; collects the prelude names it used in ``used``.

    ``nonnegative`` tells whether an index is known not to be negative: C's own division is then the floored one.
    ``bounds`` are the limits of loop variables in scope.
    """

    dialect: Dialect
    names: Names
    used: set[str] = field(default_factory=set)
    nonnegative: Callable[[Expr], bool] = lambda _: False
    bounds: dict[Symbol, int] = field(default_factory=dict)

    def text(self, expr: Expr) -> str:
        """Return ``expr`` as it may stand anywhere a full expression may."""
        return self.expr(expr).code

    def expr(self, expr: Expr) -> Text:
        """Return ``expr`` with its precedence."""
        match expr:
            case Const(value, prec):
                text, needed = literal(value, prec)
                if needed is not None:
                    self.used.add(needed)
                return text
            case Var(symbol):
                return Text(self.names.of(symbol))
            case Load(buffer, indices):
                return self.cell(buffer, indices)
            case Cast():
                return self._cast(expr)
            case Fma(a, b, c):
                return self._call(f"st_fma_{expr.type.name}", a, b, c)
            case Apply():
                return self._apply(expr)
        raise InternalError(f"no C text for {expr!r}")

    def cell(self, buffer: Buffer, indices: tuple[Expr, ...]) -> Text:
        """Return the cell of ``buffer`` at logical ``indices``; a scratch array keeps its axes."""
        name = self.names.of(buffer)
        if buffer.space in ("register", "local") and indices and not buffer.layout.steps:
            subscripts = "".join(f"[{self.sum(affine(part, self.bounds)).code}]" for part in indices)
            return Text(f"{name}{subscripts}", Level.POSTFIX)
        return Text(f"{name}[{self.sum(flat_index(buffer, indices, self.bounds)).code}]", Level.POSTFIX)

    # -- index arithmetic -----------------------------------------------------------------------------------------
    def sum(self, value: Affine) -> Text:
        """Return an index sum."""
        if value.constant > 0 and value.terms and all(factor < 0 for _, factor in value.terms):
            taken = " - ".join(self._term(atom, -factor) for atom, factor in value.terms)
            return Text(f"{value.constant} - {taken}", Level.SUM)
        parts: list[str] = []
        for atom, factor in value.terms:
            parts.append(self._term(atom, abs(factor)))
            if len(parts) > 1 or factor < 0:
                sign = "-" if factor < 0 else "+"
                parts[-1] = f"{sign} {parts[-1]}" if len(parts) > 1 else f"-{parts[-1]}"
        if value.constant or not parts:
            magnitude = abs(value.constant)
            if not parts:
                return Text(str(value.constant), Level.UNARY if value.constant < 0 else Level.PRIMARY)
            parts.append(f"{'-' if value.constant < 0 else '+'} {magnitude}")
        if len(parts) == 1:
            (atom, factor) = value.terms[0]
            if factor == 1:
                return self._atom(atom)
            return Text(parts[0], Level.PRODUCT if factor > 0 or abs(factor) != 1 else Level.UNARY)
        return Text(" ".join(parts), Level.SUM)

    def _term(self, atom: Expr, factor: int) -> str:
        # A product is fine beside + and -, and so is anything that binds as tightly.
        if factor == 1:
            return self._atom(atom).at(Level.PRODUCT)
        return f"{factor} * {self._atom(atom).at(Level.UNARY)}"

    def _atom(self, atom: Expr) -> Text:
        if isinstance(atom, Apply) and atom.op in ("floordiv", "mod", "minimum", "maximum"):
            return self._index_apply(atom)
        return self.expr(atom)

    def index(self, expr: Expr) -> Text:
        """Return an index expression as a sum of terms."""
        return self.sum(affine(expr, self.bounds))

    def _index_apply(self, expr: Apply) -> Text:
        lhs, rhs = expr.args
        divisor = constant(rhs)
        if expr.op in ("floordiv", "mod") and divisor is not None and divisor > 0 and self.nonnegative(lhs):
            sign = "/" if expr.op == "floordiv" else "%"
            left = self.index(lhs).at(Level.PRODUCT)
            return Text(f"{left} {sign} {divisor}", Level.PRODUCT)
        name = f"{_FUNCTIONS[expr.op]}_{expr.type.name}"
        self.used.add(name)
        return Text(f"{name}({self.index(lhs).code}, {self.index(rhs).code})", Level.POSTFIX)

    # -- values ---------------------------------------------------------------------------------------------------
    def _call(self, name: str, *args: Expr) -> Text:
        self.used.add(name)
        return Text(f"{name}({', '.join(self.text(arg) for arg in args)})", Level.POSTFIX)

    def _cast(self, expr: Cast) -> Text:
        source, target = expr.arg.type, expr.type
        if isinstance(expr.arg, Apply) and expr.arg.op in _BOOLEAN and not target.is_narrow:
            return self._as_type(self.condition(expr.arg), target)
        inner = expr.arg
        if isinstance(inner, Cast) and target is inner.arg.type is f32 and not (inner.saturate or inner.flush):
            # Rounded and widened in one go; the narrow code itself is wanted nowhere.
            both = round_trip(source)
            if both is not None:
                value = self._call(both, inner.arg)
                return self._flushed(value, target) if expr.flush else value
        name = conversion(source, target, expr.saturate)
        if name is None:
            if source is target:
                result = self.expr(expr.arg)
            elif isinstance(expr.arg, Const) and target.is_float:
                result = self.expr(Const(_exact(expr.arg.value, target), target))
            else:
                result = self._as_type(self.expr(expr.arg), target)
        else:
            result = self._call(name, expr.arg)
        return self._flushed(result, target) if expr.flush else result

    def _flushed(self, value: Text, prec: Prec) -> Text:
        name = f"st_flush_{prec.name}"
        self.used.add(name)
        return Text(f"{name}({value.code})", Level.POSTFIX)

    def _as_type(self, value: Text, prec: Prec) -> Text:
        return Text(f"({self.dialect.type_name(prec)}){value.at(Level.UNARY)}", Level.UNARY)

    def _apply(self, expr: Apply) -> Text:
        op, args, prec = expr.op, expr.args, expr.type
        if op in _BOOLEAN:
            return self._as_type(self.condition(expr), prec)
        if op == "identity":
            return self.expr(args[0])
        if op == "where":
            test = self.condition(args[0]).at(Level.OR)
            return Text(f"{test} ? {self._branch(args[1])} : {self._branch(args[2])}", Level.TERNARY)
        if op == "neg":
            inner = self.expr(args[0]).at(Level.UNARY)
            inner = f"({inner})" if inner.startswith("-") else inner
            return self._narrowed(Text(f"-{inner}", Level.UNARY), prec)
        if prec is i64 and op in ("floordiv", "mod"):
            return self._index_apply(expr)
        if op in _INFIX and not (op == "div" and not prec.is_float):
            sign, level = _INFIX[op]
            lhs = self.expr(args[0]).at(level)
            # Floating-point sums and products do not associate: an equal level on the right keeps its parentheses.
            rhs = self.expr(args[1]).at(Level(level + 1))
            return self._narrowed(Text(f"{lhs} {sign} {rhs}", level), prec)
        if op in _WHOLE_ON_INTEGERS and not prec.is_float:
            return self.expr(args[0])
        if op in _FUNCTIONS:
            return self._call(f"{_FUNCTIONS[op]}_{prec.name}", *args)
        raise InternalError(f"op {op!r} has no C text in {prec}")

    def _branch(self, expr: Expr) -> str:
        return self.expr(expr).at(Level.OR)

    def _narrowed(self, value: Text, prec: Prec) -> Text:
        if prec.is_float or prec.bits >= _PROMOTED_BITS:
            return value
        return self._as_type(value, prec)

    def condition(self, expr: Expr) -> Text:
        """Return a test of ``expr`` against zero."""
        match expr:
            case Apply(op, args) if op in _COMPARISONS:
                sign, level = _COMPARISONS[op]
                lhs, rhs = (self._operand(arg) for arg in args)
                return Text(f"{lhs} {sign} {rhs}", level)
            case Apply("and" | "or" as op, args):
                # Compilers warn about && inside || without parentheses, so both ask for a comparison at least.
                sign, level = ("&&", Level.AND) if op == "and" else ("||", Level.OR)
                sides = [self.condition(arg) for arg in args]
                shown = [side.code if side.level == level else side.at(Level.EQUALITY) for side in sides]
                return Text(f" {sign} ".join(shown), level)
            case Apply("not", (inner,)):
                return self._negated(inner)
            case Cast(arg=Apply(op=op) as inner) if op in _BOOLEAN:
                return self.condition(inner)
            case Const(value):
                return Text("1" if value != 0 else "0")
        zero = "0.0f" if expr.type is f32 else "0.0" if expr.type is f64 else "0"
        return Text(f"{self._operand(expr)} != {zero}", Level.EQUALITY)

    def _operand(self, expr: Expr) -> str:
        """An operand of a comparison; nested comparisons take parentheses, which compilers also ask for."""
        return self.expr(expr).at(Level.SUM)

    def _negated(self, expr: Expr) -> Text:
        if isinstance(expr, Apply) and expr.op in ("eq", "ne"):
            return self.condition(Apply("ne" if expr.op == "eq" else "eq", expr.args, expr.type))
        if isinstance(expr, Apply) and expr.op in _BOOLEAN:
            return Text(f"!{self.condition(expr).at(Level.UNARY)}", Level.UNARY)
        return self.condition(Apply("eq", (expr, Const(0, expr.type)), expr.type))


def _exact(value: float | int, target: Prec) -> float:
    """The constant in a wide float format, rounded once by NumPy as the cast would."""
    return float(target.numpy_dtype.type(value))


__all__ = ["C_OPS", "CDialect", "Dialect", "ExpressionPrinter", "Level", "Text", "literal"]
