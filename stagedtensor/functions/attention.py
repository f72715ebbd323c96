"""Scaled dot-product attention and rotary positions on ``..batch, s | -> heads, dh``."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from stagedtensor.composite import composite
from stagedtensor.errors import ShapeError
from stagedtensor.source import user_source
from stagedtensor.specs import Name, RowSpec, ShapeSpec, Spec
from stagedtensor.statements import Apply, DimValue, Expr, IterValue, NumberLiteral
from stagedtensor.tensor import Tensor, TensorLike, apply_op, lift
from stagedtensor.terminals import constant

from .axes import solved_shape
from .indexing import concat, gather, narrow, positions
from .normalised import softmax
from .pointwise import where

_CONTRACTION = {"reduction": "add", "combine": "mul"}


def _rows(position: str, *output: str) -> ShapeSpec:
    return ShapeSpec(RowSpec((), "batch", (Name(position),)), RowSpec(), RowSpec(tuple(Name(name) for name in output)))


_SCORES = ShapeSpec(RowSpec((), "batch"), RowSpec(), RowSpec((Name("head"), Name("query"), Name("key"))))


@composite("attention", float_only=True)
def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    scores = apply_op(
        "einsum",
        (q, k),
        Spec((_rows("query", "head", "feature"), _rows("key", "head", "feature")), _SCORES),
        lambda a, b: Apply("mul", (a, b)),
        reduction="add",
        attributes=_CONTRACTION,
        label="scores",
    )
    scaled = apply_op(
        "scale_scores",
        (scores, q),
        Spec((_SCORES, _rows("query", "head", "feature")), _SCORES),
        lambda s, _: _masked(Apply("div", (s, Apply("sqrt", (DimValue(("feature",)),)))), causal),
        label="scaled_scores",
    )
    if mask is not None:
        scaled = where(mask, scaled, -math.inf)
    weights = softmax(scaled)
    return apply_op(
        "einsum",
        (weights, v),
        Spec((_SCORES, _rows("key", "head", "value")), _rows("query", "head", "value")),
        lambda a, b: Apply("mul", (a, b)),
        reduction="add",
        attributes=_CONTRACTION,
        label="attended",
    )


def _masked(score: Expr, causal: bool) -> Expr:
    if not causal:
        return score
    return Apply("where", (Apply("le", (IterValue("key"), IterValue("query"))), score, NumberLiteral(-math.inf)))


def attention(
    q: TensorLike, k: TensorLike, v: TensorLike, *, causal: bool = False, mask: TensorLike | None = None
) -> Tensor:
    """softmax(q k^T / sqrt(dh)) v per head, on ``..batch, s | -> heads, dh``; s is the last batch axis.

    ``causal`` lets a query see keys up to its own position. ``mask`` (not 0: visible) broadcasts to
    ``..batch | -> heads, queries, keys``. A query that sees nothing gives 0.
    """
    return _attention(lift(q), lift(k), lift(v), None if mask is None else lift(mask), causal)


def rotary_angles(length: int, features: int, base: float) -> np.ndarray[Any, Any]:
    """Return position * base^(-2 i / features): f64, shape (length, features / 2)."""
    frequencies = base ** (-2.0 * np.arange(features // 2) / features)
    return np.arange(length)[:, None] * frequencies[None, :]


@composite("rope", float_only=True)
def _rope(x: Tensor, cos: Tensor, sin: Tensor, half: int) -> Tensor:
    first, second = narrow(x, 0, half), narrow(x, half, 2 * half)
    return concat([first * cos - second * sin, second * cos + first * sin])


def rope(x: TensorLike, *, base: float = 10000.0) -> Tensor:
    """Rotary position embedding (Su et al. 2021) on ``..batch, s | -> heads, dh``: halves of dh rotate together.

    Angles are formed in f64 and stored as f32, so far positions keep distinct phases in any precision.
    """
    tensor = lift(x)
    shape = solved_shape(tensor)
    if len(shape.output) != 2 or not shape.batch or shape.output[1].size % 2:
        raise ShapeError(
            f"rope: expected ..batch, s | -> heads, dh with dh even, {tensor.label!r} has shape {shape} "
            f"({user_source().quoted()})"
        )
    features = shape.output[1].size
    angles = rotary_angles(shape.batch[-1].size, features, base)
    cos, sin = (
        token_table(table.astype(np.float32)[:, None, :], tensor, name)
        for table, name in ((np.cos(angles), "rope_cos"), (np.sin(angles), "rope_sin"))
    )
    return _rope(tensor, cos, sin, features // 2)


def token_table(table: TensorLike, x: Tensor, label: str) -> Tensor:
    """Return the first rows of ``table`` (greatest extent, ...) along the tokens of ``x``: ``tokens | -> ...``."""
    if solved_shape(x).batch[-1].dynamic is None:
        return constant(table, batch=1, label=label)
    return gather(constant(table, output=1, input=np.ndim(table) - 1, label=label), positions(x))
