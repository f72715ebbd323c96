"""One row per scalar op: arity, meaning, precision behaviour.

Higher layers add their own tables keyed by these names: gradient rules (``autodiff.rules``), C and CUDA text
(``codegen.emit``), StableHLO forms (``export``). A test asserts that every op has its row everywhere or says why not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

Array: TypeAlias = Any
OpClass: TypeAlias = Literal["arithmetic", "comparison", "logic", "select", "random"]


@dataclass(frozen=True)
class ScalarOp:
    """A pointwise op on scalars of one compute type.

    ``numpy`` is its meaning on f64 and integer arrays; on f32 the transcendental functions are defined by the prelude
    (``prelude`` True) and the interpreter takes them from the prelude's mirror. ``float_only``: integer operands join
    with the session default. ``keeps_format``: the result of operands in a narrow format is in that format, so the
    storage rounding may be dropped. ``predicates``: argument positions that are tested against zero. ``neutral``: the
    element an accumulation with this op starts from. ``non_differentiable``: why no gradient rule has a row for it;
    empty where one must have.
    """

    name: str
    arity: int
    numpy: Callable[..., Array]
    op_class: OpClass = "arithmetic"
    float_only: bool = False
    keeps_format: bool = False
    prelude: bool = False
    predicates: tuple[int, ...] = ()
    neutral: float | None = None
    non_differentiable: str = ""
    symbol: str = ""
    """How the textual forms and comments print it, if infix."""

    @property
    def differentiable(self) -> bool:
        """Whether a gradient passes."""
        return not self.non_differentiable


STEP = "a step function: its slope is 0 wherever it has one"
COMPARISON = "a comparison: its result is 0 or 1"
_FLAG = "a truth value: its result is 0 or 1"
_DRAW = "a random draw: its operands are a key and a counter"


def _floordiv(a: Array, b: Array) -> Array:
    if np.issubdtype(np.asarray(a).dtype, np.integer):
        safe = np.where(b == 0, np.ones_like(b), b)
        with np.errstate(over="ignore"):
            return np.where(b == 0, np.zeros_like(b), np.floor_divide(a, safe))
    return np.floor(a / b)


def _mod(a: Array, b: Array) -> Array:
    if np.issubdtype(np.asarray(a).dtype, np.integer):
        safe = np.where(b == 0, np.ones_like(b), b)
        return np.where(b == 0, np.zeros_like(b), np.mod(a, safe))
    return a - np.floor(a / b) * b


def _pow(a: Array, b: Array) -> Array:
    if np.issubdtype(np.asarray(a).dtype, np.integer):
        return np.where(b < 0, np.zeros_like(a), np.power(a, np.maximum(b, 0)))
    return np.power(a, b)


def _as(a: Array, flags: Array) -> Array:
    return np.asarray(flags).astype(np.asarray(a).dtype)


def _maximum(a: Array, b: Array) -> Array:
    return np.where((a >= b) | (a != a), a, b)


def _minimum(a: Array, b: Array) -> Array:
    return np.where((a <= b) | (a != a), a, b)


def _sign(a: Array) -> Array:
    return np.where(a != a, a, np.sign(a))


def _erf(a: Array) -> Array:
    from math import erf

    return np.vectorize(erf, otypes=[np.float64])(a)


def _erfc(a: Array) -> Array:
    from math import erfc

    return np.vectorize(erfc, otypes=[np.float64])(a)


def _relu(a: Array) -> Array:
    return np.where((a > 0) | (a != a), a, np.zeros_like(a))


def _row(*ops: ScalarOp) -> dict[str, ScalarOp]:
    return {op.name: op for op in ops}


OPS: dict[str, ScalarOp] = _row(
    # arithmetic
    ScalarOp("add", 2, np.add, neutral=0.0, symbol="+"),
    ScalarOp("sub", 2, np.subtract, neutral=0.0, symbol="-"),
    ScalarOp("mul", 2, np.multiply, neutral=1.0, symbol="*"),
    ScalarOp("div", 2, np.divide, neutral=1.0, float_only=True, symbol="/"),
    ScalarOp("floordiv", 2, _floordiv, non_differentiable=STEP, symbol="//"),
    ScalarOp("mod", 2, _mod, symbol="%"),
    ScalarOp("pow", 2, _pow, prelude=True, symbol="**"),
    ScalarOp("fma", 3, lambda a, b, c: a * b + c),
    ScalarOp("maximum", 2, _maximum, keeps_format=True, neutral=float("-inf")),
    ScalarOp("minimum", 2, _minimum, keeps_format=True, neutral=float("inf")),
    ScalarOp("neg", 1, np.negative, keeps_format=True, symbol="-"),
    ScalarOp("abs", 1, np.abs, keeps_format=True),
    ScalarOp("sign", 1, _sign, keeps_format=True, non_differentiable=STEP),
    ScalarOp("floor", 1, np.floor, keeps_format=True, non_differentiable=STEP),
    ScalarOp("ceil", 1, np.ceil, keeps_format=True, non_differentiable=STEP),
    ScalarOp("round", 1, np.rint, keeps_format=True, non_differentiable=STEP),
    ScalarOp("trunc", 1, np.trunc, keeps_format=True, non_differentiable=STEP),
    ScalarOp("relu", 1, _relu, keeps_format=True),
    ScalarOp("identity", 1, lambda a: a, keeps_format=True),
    # float functions
    ScalarOp("exp", 1, np.exp, float_only=True, prelude=True),
    ScalarOp("exp2", 1, np.exp2, float_only=True, prelude=True),
    ScalarOp("log", 1, np.log, float_only=True, prelude=True),
    ScalarOp("log2", 1, np.log2, float_only=True, prelude=True),
    ScalarOp("sqrt", 1, np.sqrt, float_only=True),
    ScalarOp("rsqrt", 1, lambda a: 1.0 / np.sqrt(a), float_only=True, prelude=True),
    ScalarOp("recip", 1, lambda a: 1.0 / a, float_only=True),
    ScalarOp("sin", 1, np.sin, float_only=True, prelude=True),
    ScalarOp("cos", 1, np.cos, float_only=True, prelude=True),
    ScalarOp("tanh", 1, np.tanh, float_only=True, prelude=True),
    ScalarOp("sigmoid", 1, lambda a: 1.0 / (1.0 + np.exp(-a)), float_only=True, prelude=True),
    ScalarOp("erf", 1, _erf, float_only=True, prelude=True),
    ScalarOp("erfc", 1, _erfc, float_only=True, prelude=True),
    # comparisons: 0 or 1 in the operands' join
    ScalarOp("lt", 2, lambda a, b: _as(a, a < b), "comparison", non_differentiable=COMPARISON, symbol="<"),
    ScalarOp("le", 2, lambda a, b: _as(a, a <= b), "comparison", non_differentiable=COMPARISON, symbol="<="),
    ScalarOp("gt", 2, lambda a, b: _as(a, a > b), "comparison", non_differentiable=COMPARISON, symbol=">"),
    ScalarOp("ge", 2, lambda a, b: _as(a, a >= b), "comparison", non_differentiable=COMPARISON, symbol=">="),
    ScalarOp("eq", 2, lambda a, b: _as(a, a == b), "comparison", non_differentiable=COMPARISON, symbol="=="),
    ScalarOp("ne", 2, lambda a, b: _as(a, a != b), "comparison", non_differentiable=COMPARISON, symbol="!="),
    # logic on "is not zero"
    ScalarOp("and", 2, lambda a, b: _as(a, (a != 0) & (b != 0)), "logic", non_differentiable=_FLAG, predicates=(0, 1)),
    ScalarOp("or", 2, lambda a, b: _as(a, (a != 0) | (b != 0)), "logic", non_differentiable=_FLAG, predicates=(0, 1)),
    ScalarOp("not", 1, lambda a: _as(a, a == 0), "logic", non_differentiable=_FLAG, predicates=(0,)),
    # the finiteness test of gradients: +inf where the exponent field is all ones, else +0; on the integer bits
    ScalarOp(
        "nonfinite",
        1,
        lambda a: np.where(np.isfinite(a), np.zeros_like(a), np.full_like(a, np.inf)),
        "logic",
        float_only=True,
        non_differentiable="the finiteness test of gradients, which nothing trains",
    ),
    # select: a where the predicate is not zero, else b; nothing is evaluated into the result of the branch not taken
    ScalarOp("where", 3, lambda c, a, b: np.where(c != 0, a, b), "select", keeps_format=True, predicates=(0,)),
    # counter-based random numbers: (key0, key1, counter) -> [0, 1) or standard normal
    ScalarOp(
        "random_uniform", 3, lambda *_: _unavailable("random_uniform"), "random", prelude=True, non_differentiable=_DRAW
    ),
    ScalarOp(
        "random_normal", 3, lambda *_: _unavailable("random_normal"), "random", prelude=True, non_differentiable=_DRAW
    ),
)
"""The op table, by name."""


def _unavailable(name: str) -> Array:
    raise TypeError(f"{name} is defined by the prelude's mirror, not by a NumPy function")


@dataclass(frozen=True)
class Reduction:
    """How an accumulation combines: the scalar op, its neutral element and whether it pairs a position with a value."""

    name: str
    combine: str
    neutral: float
    paired: bool = False


REDUCTIONS: dict[str, Reduction] = {
    "add": Reduction("add", "add", 0.0),
    "sub": Reduction("sub", "sub", 0.0),
    "mul": Reduction("mul", "mul", 1.0),
    "div": Reduction("div", "div", 1.0),
    "max": Reduction("max", "maximum", float("-inf")),
    "min": Reduction("min", "minimum", float("inf")),
    "argmax": Reduction("argmax", "maximum", float("-inf"), paired=True),
    "argmin": Reduction("argmin", "minimum", float("inf"), paired=True),
}
"""Write ops of statements. Integer targets use the least or greatest value of their format for max and min."""
