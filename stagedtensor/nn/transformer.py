"""Transformer blocks, norm first (Xiong et al. 2020), and a decoder-only language model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from stagedtensor.blocks import block
from stagedtensor.functions.pointwise import gelu
from stagedtensor.source import user_source
from stagedtensor.tensor import Tensor
from stagedtensor.terminals import normal

from .attention import learned_positions, multi_head_attention
from .dense import dense, dropout, embedding
from .layer import Activation, Layer
from .norms import layer_norm, rms_norm

Norm = Literal["layer", "rms"]
_NORMS: dict[Norm, Callable[..., Layer]] = {"layer": layer_norm, "rms": rms_norm}


def _norm(kind: Norm, label: str) -> Layer:
    if kind not in _NORMS:
        raise ValueError(f'norm is "layer" or "rms", not {kind!r} ({user_source().quoted()})')
    return _NORMS[kind](label=label)


@block
def feed_forward(width: int, hidden: int, *, activation: Activation = gelu) -> Layer:
    """Two dense layers, ``hidden`` wide between."""
    first, second = dense(hidden, activation=activation, label="first"), dense(width, label="second")
    return lambda x: second(first(x))


@block
def encoder_block(
    width: int,
    heads: int,
    *,
    hidden: int | None = None,
    causal: bool = False,
    rotary: bool = False,
    activation: Activation = gelu,
    norm: Norm = "layer",
    rate: float = 0.0,
    step: Tensor | None = None,
) -> Layer:
    """x + attention(norm(x)), then x + feed_forward(norm(x)); ``hidden`` is 4 width by default.

    ``rate`` drops cells of both branches in training (``step`` as in :func:`dropout`). ``causal`` makes it a block of a
    decoder without memory.
    """
    attend_norm, feed_norm = _norm(norm, "attend_norm"), _norm(norm, "feed_norm")
    attend = multi_head_attention(width, heads, causal=causal, rotary=rotary)
    feed = feed_forward(width, hidden or 4 * width, activation=activation)
    drops = [dropout(rate, step=step) for _ in range(2)]

    def apply(x: Tensor, *, mask: Tensor | None = None, padding: Tensor | None = None, training: bool = True) -> Tensor:
        x = x + drops[0](attend(attend_norm(x), mask=mask, padding=padding), training=training)
        return x + drops[1](feed(feed_norm(x)), training=training)

    return apply


@block
def decoder_block(
    width: int,
    heads: int,
    *,
    hidden: int | None = None,
    activation: Activation = gelu,
    norm: Norm = "layer",
    rate: float = 0.0,
    step: Tensor | None = None,
) -> Layer:
    """Causal attention to itself, attention to ``memory``, feed-forward; each x + f(norm(x)).

    ``layer(x, memory, padding=...)``: ``padding`` marks the tokens of memory.
    """
    norms = [_norm(norm, label) for label in ("attend_norm", "read_norm", "feed_norm")]
    attend = multi_head_attention(width, heads, causal=True, label="attend")
    read = multi_head_attention(width, heads, label="read")
    feed = feed_forward(width, hidden or 4 * width, activation=activation)
    drops = [dropout(rate, step=step) for _ in range(3)]

    def apply(x: Tensor, memory: Tensor, *, padding: Tensor | None = None, training: bool = True) -> Tensor:
        x = x + drops[0](attend(norms[0](x)), training=training)
        x = x + drops[1](read(norms[1](x), memory=memory, padding=padding), training=training)
        return x + drops[2](feed(norms[2](x)), training=training)

    return apply


@block
def gpt(
    vocabulary: int,
    *,
    width: int,
    layers: int,
    heads: int,
    tokens: int,
    hidden: int | None = None,
    norm: Norm = "layer",
    rotary: bool = False,
    activation: Activation = gelu,
    rate: float = 0.0,
    step: Tensor | None = None,
) -> Layer:
    """A decoder-only language model (Radford et al. 2019): ids ``..batch, tokens | ->`` to logits ``-> vocabulary``.

    The output layer is tied to the embedding. Positions are learned, for at most ``tokens`` of them, or ``rotary``.
    """
    table = embedding(vocabulary, width, init=normal(0.0, 0.02))
    positions = None if rotary else learned_positions(tokens)
    blocks = [
        encoder_block(
            width,
            heads,
            hidden=hidden,
            causal=True,
            rotary=rotary,
            activation=activation,
            norm=norm,
            rate=rate,
            step=step,
            label=f"layer{at}",
        )
        for at in range(layers)
    ]
    final = _norm(norm, "final_norm")

    def apply(ids: Tensor, *, training: bool = True) -> Tensor:
        x = table(ids)
        if positions is not None:
            x = positions(x)
        for part in blocks:
            x = part(x, training=training)
        return table.attend(final(x))

    return apply
