"""Pointwise functions: rows of the op table by name, and composites of a few of them."""

from __future__ import annotations

import math

from stagedtensor.composite import composite
from stagedtensor.specs import pointwise as pointwise_spec
from stagedtensor.statements import Access, Apply, Expr, FiniteLimit, NumberLiteral
from stagedtensor.tensor import Tensor, TensorLike, apply_op, apply_pointwise, lift


def exp(x: TensorLike) -> Tensor:
    """e**x."""
    return apply_pointwise("exp", x)


def exp2(x: TensorLike) -> Tensor:
    """2**x."""
    return apply_pointwise("exp2", x)


def log(x: TensorLike) -> Tensor:
    """Natural logarithm; -inf at 0, NaN below."""
    return apply_pointwise("log", x)


def log2(x: TensorLike) -> Tensor:
    """Logarithm to base 2."""
    return apply_pointwise("log2", x)


def sqrt(x: TensorLike) -> Tensor:
    """Square root, correctly rounded."""
    return apply_pointwise("sqrt", x)


def rsqrt(x: TensorLike) -> Tensor:
    """1 / sqrt(x)."""
    return apply_pointwise("rsqrt", x)


def recip(x: TensorLike) -> Tensor:
    """1 / x."""
    return apply_pointwise("recip", x)


def sin(x: TensorLike) -> Tensor:
    """Sine of x in radians."""
    return apply_pointwise("sin", x)


def cos(x: TensorLike) -> Tensor:
    """Cosine of x in radians."""
    return apply_pointwise("cos", x)


def tanh(x: TensorLike) -> Tensor:
    """Hyperbolic tangent."""
    return apply_pointwise("tanh", x)


def sigmoid(x: TensorLike) -> Tensor:
    """1 / (1 + exp(-x))."""
    return apply_pointwise("sigmoid", x)


def erf(x: TensorLike) -> Tensor:
    """Error function."""
    return apply_pointwise("erf", x)


def erfc(x: TensorLike) -> Tensor:
    """1 - erf(x), accurate where that cancels."""
    return apply_pointwise("erfc", x)


def abs_(x: TensorLike) -> Tensor:
    """Absolute value; gradient 0 at 0."""
    return apply_pointwise("abs", x)


def sign(x: TensorLike) -> Tensor:
    """-1, 0 or 1; NaN stays NaN."""
    return apply_pointwise("sign", x)


def floor(x: TensorLike) -> Tensor:
    """Greatest integer not above x."""
    return apply_pointwise("floor", x)


def ceil(x: TensorLike) -> Tensor:
    """Least integer not below x."""
    return apply_pointwise("ceil", x)


def round_(x: TensorLike) -> Tensor:
    """Nearest integer, ties to even."""
    return apply_pointwise("round", x)


def trunc(x: TensorLike) -> Tensor:
    """Integer part, toward zero."""
    return apply_pointwise("trunc", x)


def relu(x: TensorLike) -> Tensor:
    """max(x, 0); NaN stays NaN; gradient 0 at 0."""
    return apply_pointwise("relu", x)


def maximum(x: TensorLike, y: TensorLike) -> Tensor:
    """Pointwise maximum; NaN wins; a tie's gradient goes to the first operand."""
    return apply_pointwise("maximum", x, y)


def minimum(x: TensorLike, y: TensorLike) -> Tensor:
    """Pointwise minimum; NaN wins; a tie's gradient goes to the first operand."""
    return apply_pointwise("minimum", x, y)


def power(x: TensorLike, y: TensorLike) -> Tensor:
    """x**y by C99's table of special values; integers to negative powers give 0."""
    return apply_pointwise("pow", x, y)


def fma(a: TensorLike, b: TensorLike, c: TensorLike) -> Tensor:
    """a*b + c with one rounding at compute precision."""
    return apply_pointwise("fma", a, b, c)


def where(condition: TensorLike, x: TensorLike, y: TensorLike) -> Tensor:
    """x where the condition is not 0, else y; the branch not taken gets gradient 0."""
    return apply_pointwise("where", condition, x, y)


def logical_and(x: TensorLike, y: TensorLike) -> Tensor:
    """1 where both are not 0, else 0."""
    return apply_pointwise("and", x, y)


def logical_or(x: TensorLike, y: TensorLike) -> Tensor:
    """1 where either is not 0, else 0."""
    return apply_pointwise("or", x, y)


def logical_not(x: TensorLike) -> Tensor:
    """1 where x is 0, else 0."""
    return apply_pointwise("not", x)


def clamp(x: TensorLike, low: float | None = None, high: float | None = None) -> Tensor:
    """min(max(x, low), high); the gradient passes on the closed interval; NaN stays NaN."""
    if low is None and high is None:
        raise TypeError("clamp: give low, high or both")
    if low is not None and high is not None and low > high:
        raise ValueError(f"clamp: low {low} is above high {high}")

    operands = [lift(x)]
    operands += [lift(bound) for bound in (low, high) if bound is not None]

    def tree(value: Access, *bounds: Access) -> Apply:
        inner: Apply | Access = value
        if low is not None:
            inner = Apply("maximum", (inner, bounds[0]))
        if high is not None:
            inner = Apply("minimum", (inner, bounds[-1]))
        assert isinstance(inner, Apply)
        return inner

    return apply_op(
        "clamp",
        operands,
        pointwise_spec(len(operands)),
        tree,
        rule="clamp",
        attributes={"low": low, "high": high},
    )


def nan_to_num(x: TensorLike, *, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None) -> Tensor:
    """Replace NaN by ``nan`` and infinities by ``posinf``, ``neginf``; None is the result's greatest and least number.

    Finite cells, and so integers, stay. The gradient passes at finite cells and is 0 at the others.
    """
    operands = [lift(x), *(lift(value) for value in (nan, posinf, neginf) if value is not None)]

    def tree(value: Access, *given: Access) -> Expr:
        for_nan, *rest = given
        above: Expr = rest[0] if posinf is not None else FiniteLimit(highest=True)
        below: Expr = rest[-1] if neginf is not None else FiniteLimit(highest=False)
        # ordered comparisons with the operand's own limits: none holds for an integer
        below = Apply("where", (Apply("lt", (value, FiniteLimit(highest=False, node=value.node))), below, value))
        above = Apply("where", (Apply("gt", (value, FiniteLimit(highest=True, node=value.node))), above, below))
        return Apply("where", (Apply("ne", (value, value)), for_nan, above))

    return apply_op("nan_to_num", operands, pointwise_spec(len(operands)), tree)


def stop_gradient(x: TensorLike) -> Tensor:
    """Return x with no gradient: what lies behind is frozen for this use."""
    return apply_op("identity", (lift(x),), pointwise_spec(1), lambda a: a, rule=None, label=lift(x).label)


# -- activations made of several ops ------------------------------------------------------------------------------


@composite("gelu", float_only=True)
def _gelu_erf(x: Tensor) -> Tensor:
    # 1 + erf(u) is erfc(-u), which does not cancel in the negative tail
    return 0.5 * x * erfc(x * -math.sqrt(0.5))


@composite("gelu", float_only=True)
def _gelu_tanh(x: Tensor) -> Tensor:
    # 0.5 x (1 + tanh u) = x sigmoid(2u): one exponential, no cancellation in the negative tail
    u = math.sqrt(2.0 / math.pi) * (x + 0.044715 * (x * x * x))
    return x * sigmoid(2.0 * u)


def gelu(x: TensorLike, *, approximate: str = "none") -> Tensor:
    """Gaussian error linear unit: x * Phi(x); ``approximate="tanh"`` gives Hendrycks and Gimpel's tanh form."""
    if approximate not in ("none", "tanh"):
        raise ValueError(f'gelu: approximate is "none" or "tanh", not {approximate!r}')
    return (_gelu_tanh if approximate == "tanh" else _gelu_erf)(lift(x))


@composite("silu", float_only=True)
def _silu(x: Tensor) -> Tensor:
    return x * sigmoid(x)


def silu(x: TensorLike) -> Tensor:
    """x * sigmoid(x)."""
    return _silu(lift(x))


def _log1p(u: Expr) -> Expr:
    """log(1 + u) for 0 <= u <= 1: log of the rounded sum w, times what the rounding made of u (Kahan)."""
    w = Apply("add", (NumberLiteral(1.0), u))
    change = Apply("sub", (w, NumberLiteral(1.0)))
    corrected = Apply("mul", (Apply("log", (w,)), Apply("div", (u, change))))
    return Apply("where", (Apply("eq", (change, NumberLiteral(0.0))), u, corrected))


@composite("softplus", float_only=True)
def _softplus(x: Tensor) -> Tensor:
    def tree(a: Access) -> Expr:
        u = Apply("exp", (Apply("neg", (Apply("abs", (a,)),)),))
        return Apply("add", (Apply("relu", (a,)), _log1p(u)))

    return apply_op("softplus", (x,), pointwise_spec(1), tree, rule="softplus")


def softplus(x: TensorLike) -> Tensor:
    """log(1 + exp(x)) without overflow."""
    return _softplus(lift(x))


@composite("leaky_relu")
def _leaky_relu(x: Tensor, slope: float) -> Tensor:
    return where(x > 0.0, x, slope * x)


def leaky_relu(x: TensorLike, slope: float = 0.01) -> Tensor:
    """x where positive, else slope * x."""
    return _leaky_relu(lift(x), slope)


@composite("expm1", float_only=True)
def _expm1(x: Tensor) -> Tensor:
    # near 0 the difference cancels; exp(x) - 1 = tanh(x / 2) (exp(x) + 1) does not
    return where(abs(x) < 1.0, tanh(0.5 * x) * (exp(x) + 1.0), exp(x) - 1.0)


def expm1(x: TensorLike) -> Tensor:
    """exp(x) - 1, accurate near 0."""
    return _expm1(lift(x))


@composite("log10", float_only=True)
def _log10(x: Tensor) -> Tensor:
    return log2(x) * math.log10(2.0)


def log10(x: TensorLike) -> Tensor:
    """Logarithm to base 10."""
    return _log10(lift(x))


@composite("elu", float_only=True)
def _elu(x: Tensor, alpha: float) -> Tensor:
    return where(x > 0.0, x, alpha * expm1(x))


def elu(x: TensorLike, alpha: float = 1.0) -> Tensor:
    """x where positive, else alpha (exp(x) - 1)."""
    return _elu(lift(x), alpha)
