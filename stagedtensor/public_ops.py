"""The public ops, one row each: how a sample of an op is built, and why it has no gradient where it has none.

In: nothing. Out: ``PUBLIC_OPS``, from which the status page, the coverage checks and the tests of export and gradients
are made. A row says what cannot be derived; which back ends, gradient rules and encodings an op has is found by
building its sample (``op_status``). Functions made of these ops alone (``BLOCKS``) and samplers have no row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from . import losses
from .functions import (
    attention,
    convolution,
    convolution_nd,
    indexing,
    layout,
    normalised,
    pointwise,
    products,
    reductions,
)
from .functions.einsum import einsum
from .op_table import COMPARISON, STEP
from .precision import Prec, f32, i32
from .tensor import Tensor, cast
from .terminals import constant, param

Array: TypeAlias = np.ndarray[Any, Any]
Build: TypeAlias = Callable[..., Tensor]


@dataclass(frozen=True)
class Values:
    """Values of one operand: uniform between ``low`` and ``high``, none nearer to 0 than ``away``.

    ``input`` counts the trailing axes of that row, the others are output axes. With ``ids`` the values are integers
    below it, a constant.
    """

    shape: tuple[int, ...]
    low: float = -1.0
    high: float = 1.0
    away: float = 0.0
    input: int = 0
    ids: int = 0

    def draw(self, rng: np.random.Generator) -> Array:
        """Return an array of f64 numbers, or of i32 ids."""
        if self.ids:
            return rng.integers(0, self.ids, self.shape).astype(np.int32)
        drawn = rng.uniform(self.low, self.high, self.shape)
        return np.where(np.abs(drawn) < self.away, drawn + np.copysign(self.away, drawn), drawn)


@dataclass(frozen=True)
class PublicOp:
    """One op: a builder of samples and the operands it is given.

    ``non_differentiable`` is the reason for having no gradient. ``weight`` reads an encoded matrix ``[out, in]`` fused
    with what the op computes, None where no operand of the op is a weight matrix.
    """

    name: str
    build: Build
    operands: tuple[Values, ...]
    non_differentiable: str = ""
    weight: Build | None = None


@dataclass(frozen=True)
class Sample:
    """An op applied to operands with values: parameters, and constants where the values are ids."""

    op: PublicOp
    result: Tensor
    operands: tuple[Tensor, ...]
    values: tuple[Array, ...]

    @property
    def params(self) -> tuple[Tensor, ...]:
        """The operands that are parameters."""
        return tuple(tensor for tensor, given in zip(self.operands, self.op.operands, strict=True) if not given.ids)


def sample(op: PublicOp, prec: Prec = f32, *, seed: int = 0) -> Sample:
    """Build an op over parameters of ``prec`` that start with values; the same values for the same ``seed``."""
    rng = np.random.default_rng(seed)
    values, operands = [], []
    for at, given in enumerate(op.operands):
        drawn = given.draw(rng)
        if given.ids:
            operands.append(constant(drawn, prec=i32))
        else:
            drawn = drawn.astype(prec.numpy_dtype)
            output = drawn.ndim - given.input
            rows = list(drawn.shape[:output]), list(drawn.shape[output:]) or None
            operands.append(param(f"{op.name}{at}", output=rows[0], input=rows[1], init=drawn, prec=prec))
        values.append(drawn)
    return Sample(op, op.build(*operands), tuple(operands), tuple(values))


VECTOR, MATRIX = Values((5,)), Values((3, 4))
WIDE = Values((3, 4), -3.0, 3.0)
POSITIVE, AWAY = Values((5,), 0.3, 2.0), Values((5,), away=0.1)
IMAGE = Values((5, 4, 2))
POSITIONS = Values((4, 2, 3), input=2)

POSITION = "a position, not a number that varies with its operand"


def _unary(name: str, build: Build, values: Values = VECTOR, reason: str = "") -> PublicOp:
    return PublicOp(name, build, (values,), reason)


def _binary(name: str, build: Build, left: Values = MATRIX, right: Values = Values((4,)), reason: str = "") -> PublicOp:
    return PublicOp(name, build, (left, right), reason)


def _attention(*tables: Tensor) -> Tensor:
    """Attention over rows of tables, which parameters have and positions along the batch row need."""
    positions = constant(np.arange(4), batch=1, prec=i32)
    q, k, v = (indexing.gather(table, positions) for table in tables)
    return attention.attention(q, k, v, causal=True)


_ROWS: tuple[PublicOp, ...] = (
    # arithmetic
    _binary("add", lambda a, b: a + b),
    _binary("sub", lambda a, b: a - b),
    _binary("mul", lambda a, b: a * b),
    _binary("div", lambda a, b: a / b, right=Values((4,), 0.3, 2.0)),
    _unary("neg", lambda a: -a),
    _unary("recip", pointwise.recip, POSITIVE),
    _binary("pow", lambda a, b: a**b, left=Values((3, 4), 0.3, 2.0)),
    _binary("mod", lambda a, b: a % b, left=Values((3, 4), 2.2, 2.6), right=Values((4,), 0.95, 1.05)),
    PublicOp("fma", pointwise.fma, (VECTOR, VECTOR, VECTOR)),
    _unary("abs", pointwise.abs_, AWAY),
    _binary("maximum", pointwise.maximum),
    _binary("minimum", pointwise.minimum),
    _unary("clamp", lambda a: pointwise.clamp(a, -0.5, 0.5), MATRIX),
    PublicOp("where", lambda c, a, b: pointwise.where(c > 0.0, a, b), (AWAY, VECTOR, VECTOR)),
    # functions of one number
    _unary("exp", pointwise.exp),
    _unary("exp2", pointwise.exp2),
    _unary("expm1", pointwise.expm1),
    _unary("log", pointwise.log, POSITIVE),
    _unary("log2", pointwise.log2, POSITIVE),
    _unary("log10", pointwise.log10, POSITIVE),
    _unary("sqrt", pointwise.sqrt, POSITIVE),
    _unary("rsqrt", pointwise.rsqrt, POSITIVE),
    _unary("sin", pointwise.sin),
    _unary("cos", pointwise.cos),
    _unary("tanh", pointwise.tanh),
    _unary("erf", pointwise.erf),
    _unary("erfc", pointwise.erfc),
    # activations
    _unary("relu", pointwise.relu, AWAY),
    _unary("leaky_relu", pointwise.leaky_relu, AWAY),
    _unary("elu", pointwise.elu, AWAY),
    _unary("sigmoid", pointwise.sigmoid),
    _unary("silu", pointwise.silu),
    _unary("gelu", pointwise.gelu),
    _unary("softplus", pointwise.softplus),
    _unary("softmax", normalised.softmax, MATRIX),
    _unary("log_softmax", normalised.log_softmax, MATRIX),
    _unary("logsumexp", normalised.logsumexp, MATRIX),
    # products
    PublicOp(
        "matmul", lambda w, x: w @ x, (Values((2, 3), input=1), Values((3,))),
        weight=lambda weight, x, ids: weight @ x,
    ),
    PublicOp(
        "matmul_nt", products.matmul_nt, (Values((3,)), Values((2, 3), input=1)),
        weight=lambda weight, x, ids: products.matmul_nt(x, weight),
    ),
    PublicOp("einsum", lambda a, b: einsum("bij,bjk->bik", a, b), (Values((2, 2, 3)), Values((2, 3, 2)))),
    # reductions
    _unary("sum", lambda a: reductions.sum_(a, axis=-1), MATRIX),
    _unary("prod", lambda a: reductions.prod(a, axis=-1), Values((3, 4), away=0.1)),
    _unary("mean", lambda a: reductions.mean(a, axis=-1), MATRIX),
    _unary("variance", lambda a: reductions.var(a, axis=-1), MATRIX),
    _unary("norm", lambda a: reductions.norm(a, axis=-1), MATRIX),
    _unary("max", lambda a: reductions.max_(a, axis=-1), MATRIX),
    _unary("min", lambda a: reductions.min_(a, axis=-1), MATRIX),
    # layout
    _unary("transpose", indexing.transpose, MATRIX),
    _unary("permute", lambda a: indexing.permute(a, [2, 0, 1]), Values((2, 3, 4))),
    _unary("reshape", lambda a: indexing.reshape(a, output=[2, 6]), MATRIX),
    _unary("flatten", layout.flatten, MATRIX),
    _unary("squeeze", lambda a: layout.squeeze(a, ("output", 1)), Values((3, 1, 4))),
    _unary("unsqueeze", lambda a: layout.unsqueeze(a, ("output", 1)), MATRIX),
    _unary("narrow", lambda a: indexing.narrow(a, 1, 3), MATRIX),
    _binary("concat", lambda a, b: indexing.concat([a, b], axis=0), right=Values((2, 4))),
    _unary("split", lambda a: layout.split(a, [1, 3])[1], MATRIX),
    _unary("pad2d", lambda a: layout.pad2d(a, 1), IMAGE),
    _unary("tril", layout.tril, MATRIX),
    # rows picked by position
    PublicOp(
        "gather", indexing.gather, (Values((5, 3), input=1), Values((4,), ids=5)),
        weight=lambda weight, x, ids: indexing.gather(weight, ids),
    ),
    PublicOp(
        "index_select", lambda a, ids: layout.index_select(a, ids, axis=0), (MATRIX, Values((4,), ids=3)),
        weight=lambda weight, x, ids: layout.index_select(weight, ids, axis=0),
    ),
    _unary("unfold", lambda a: layout.unfold(a, 3), Values((2, 5))),
    # windows
    _binary("conv1d", convolution_nd.conv1d, Values((6, 2)), Values((3, 3, 2), input=2)),
    _binary("conv2d", convolution.conv2d, IMAGE, Values((3, 2, 2, 2), input=3)),
    _binary("conv3d", convolution_nd.conv3d, Values((3, 3, 3, 2)), Values((2, 2, 2, 2, 2), input=4)),
    _binary("conv_transpose1d", convolution_nd.conv_transpose1d, Values((4, 2)), Values((3, 3, 2), input=2)),
    _unary("max_pool2d", lambda a: convolution.max_pool2d(a, 2, stride=1), IMAGE),
    _unary("avg_pool2d", lambda a: convolution.avg_pool2d(a, 2, stride=1), IMAGE),
    _unary("upsample2d", lambda a: layout.upsample2d(a, 2), IMAGE),
    # norms, attention, losses
    PublicOp("layer_norm", normalised.layer_norm, (MATRIX, Values((4,)), Values((4,)))),
    PublicOp("rms_norm", normalised.rms_norm, (MATRIX, Values((4,)))),
    PublicOp("attention", _attention, (POSITIONS, POSITIONS, POSITIONS)),
    PublicOp("cross_entropy", losses.cross_entropy, (MATRIX, Values((3,), ids=4))),
    _binary("mse", losses.mse, right=MATRIX),
    _binary("mae", losses.mae, right=MATRIX),
    _binary("huber", losses.huber, WIDE, MATRIX),
    _binary("hinge", losses.hinge, right=Values((3, 4), 0.2, 0.8)),
    _binary("binary_cross_entropy", losses.binary_cross_entropy, Values((3, 4), 0.1, 0.9), Values((3, 4), 0.1, 0.9)),
    _binary("binary_cross_entropy_with_logits", losses.binary_cross_entropy_with_logits, right=Values((3, 4), 0.1, 0.9)),
    # precision and special values
    _unary("cast", lambda a: cast(a, "f16"), MATRIX),
    _unary("nan_to_num", pointwise.nan_to_num),
    # without a gradient
    _unary("sign", pointwise.sign, AWAY, STEP),
    _unary("floor", pointwise.floor, WIDE, STEP),
    _unary("ceil", pointwise.ceil, WIDE, STEP),
    _unary("round", pointwise.round_, WIDE, STEP),
    _unary("trunc", pointwise.trunc, WIDE, STEP),
    _binary("floor_div", lambda a, b: a // b, WIDE, Values((4,), 0.3, 2.0), STEP),
    _binary("lt", lambda a, b: a < b, reason=COMPARISON),
    _binary("le", lambda a, b: a <= b, reason=COMPARISON),
    _binary("gt", lambda a, b: a > b, reason=COMPARISON),
    _binary("ge", lambda a, b: a >= b, reason=COMPARISON),
    _binary("eq", lambda a, b: pointwise.round_(a) == pointwise.round_(b), reason=COMPARISON),
    _binary("ne", lambda a, b: pointwise.round_(a) != pointwise.round_(b), reason=COMPARISON),
    _binary("logical_and", lambda a, b: pointwise.logical_and(a > 0.0, b > 0.0), reason=COMPARISON),
    _binary("logical_or", lambda a, b: pointwise.logical_or(a > 0.0, b > 0.0), reason=COMPARISON),
    _unary("logical_not", lambda a: pointwise.logical_not(a > 0.0), reason=COMPARISON),
    _unary("argmax", reductions.argmax, MATRIX, POSITION),
    _unary("argmin", reductions.argmin, MATRIX, POSITION),
    PublicOp("one_hot", lambda ids: indexing.one_hot(ids, 5), (Values((4,), ids=5),), "its operand is an integer"),
    _unary("positions", lambda a: indexing.positions(a, ("output", -1)), MATRIX, POSITION),
    _unary("stop_gradient", pointwise.stop_gradient, VECTOR, "what it is for: nothing behind it is trained"),
)  # fmt: skip

PUBLIC_OPS: dict[str, PublicOp] = {row.name: row for row in _ROWS}
"""The rows by name, in the order of the status page."""

SPELLED: dict[str, str] = {"power": "pow", "var": "variance"}
"""Rows of functions of another name."""

BLOCKS: dict[str, str] = {
    "dropout": "a product with a random mask",
    "global_avg_pool2d": "a mean over the axes of an image",
    "rope": "slices, products and a concatenation",
}
"""Public functions without a row, and what they are made of."""
