"""Multi-head attention and positions of tokens, on ``..batch, tokens | -> width``."""

from __future__ import annotations

import numpy as np

from stagedtensor.blocks import block
from stagedtensor.errors import ShapeError
from stagedtensor.functions.attention import attention, rope, token_table
from stagedtensor.functions.axes import solved_shape
from stagedtensor.functions.einsum import einsum
from stagedtensor.functions.indexing import gather, positions
from stagedtensor.source import user_source
from stagedtensor.tensor import Tensor, lift
from stagedtensor.terminals import normal, param

from .dense import dense
from .layer import Layer, whole


def _tokens(x: Tensor, what: str) -> int:
    """Return the number of tokens: the size of the last batch axis."""
    shape = solved_shape(x)
    if not shape.batch:
        raise ShapeError(
            f"{what}: expected tokens on the last batch axis (..batch, tokens | -> width), {x.label!r} has shape {shape} "
            f"({user_source().quoted()})"
        )
    return shape.batch[-1].size


@block
def multi_head_attention(
    width: int, heads: int, *, causal: bool = False, rotary: bool = False, bias: bool = True
) -> Layer:
    """Attention of ``heads`` heads of width // heads features each, and the layer that mixes them.

    ``layer(x)`` attends to itself, ``layer(x, memory=m)`` to other tokens. ``mask`` (not 0: visible) broadcasts to
    ``..batch | -> heads, queries, keys``; ``padding`` is 1 where a key is a token and 0 where it is padding,
    ``..batch, keys | ->``. A query that sees nothing gives 0. ``rotary`` turns queries and keys by position.
    """
    if whole(width, "multi_head_attention: width") % whole(heads, "multi_head_attention: heads"):
        raise ShapeError(
            f"multi_head_attention: width {width} does not split into {heads} heads ({user_source().quoted()})"
        )
    query, key, value = (dense([heads, width // heads], bias=bias, label=label) for label in ("query", "key", "value"))
    out = dense(width, bias=bias, label="out")

    def apply(
        x: Tensor, *, memory: Tensor | None = None, mask: Tensor | None = None, padding: Tensor | None = None
    ) -> Tensor:
        _tokens(x, "multi_head_attention")
        source = x if memory is None else memory
        q, k, v = query(x), key(source), value(source)
        if rotary:
            q, k = rope(q), rope(k)
        visible = None if mask is None else lift(mask)
        if padding is not None:
            keys = einsum("..b.., keys | => ..b.. | _, _, keys", padding)
            visible = keys if visible is None else visible * keys
        return out(attention(q, k, v, causal=causal, mask=visible))

    return apply


@block
def learned_positions(count: int, width: int | None = None) -> Layer:
    """x plus a learned vector per position, for at most ``count`` tokens; ``width`` is inferred from x."""
    table = param("table", output=[whole(count, "learned_positions: count")], input=[width], init=normal(0.0, 0.02))

    def apply(x: Tensor) -> Tensor:
        tokens = _tokens(x, "learned_positions")
        if tokens > count:
            raise ShapeError(
                f"learned_positions: {x.label!r} has {tokens} tokens, the table {count} positions "
                f"({user_source().quoted()})"
            )
        return x + gather(table, positions(x))

    return apply


def sinusoidal_positions(x: Tensor, *, base: float = 10000.0) -> Tensor:
    """x plus sines (even features) and cosines (odd ones) of position / base^(2 i / width) (Vaswani et al. 2017)."""
    tokens, row = _tokens(x, "sinusoidal_positions"), solved_shape(x).output
    if len(row) != 1 or row[0].size % 2:
        raise ShapeError(
            f"sinusoidal_positions: expected one output axis of even size, {x.label!r} has shape {solved_shape(x)} "
            f"({user_source().quoted()})"
        )
    width = row[0].size
    angles = np.arange(tokens)[:, None] * base ** (-np.arange(0, width, 2) / width)[None, :]
    table = np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(tokens, width)
    return x + token_table(table.tolist(), x, "sinusoids")
