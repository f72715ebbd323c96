"""Dense layers, multi-layer perceptrons, embeddings and dropout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stagedtensor.blocks import block, qualified
from stagedtensor.boundary import Weights, stage
from stagedtensor.composite import composite
from stagedtensor.functions.dropout import dropout as drop
from stagedtensor.functions.indexing import gather
from stagedtensor.functions.pointwise import relu
from stagedtensor.precision import PrecLike
from stagedtensor.source import user_source
from stagedtensor.tensor import Tensor
from stagedtensor.terminals import Rows, normal, param

from .layer import Activation, Layer, activated, function_of_tensor, row_of_sizes, whole


@composite("dense")
def _dense(x: Tensor, w: Tensor, b: Tensor | None, activation: Activation) -> Tensor:
    y = w @ x
    return activated(y if b is None else y + b, activation)


@block
def dense(
    out: int | Sequence[int],
    *,
    activation: Activation = None,
    bias: bool = True,
    input: Rows = None,
    prec: PrecLike | None = None,
    weights: Weights = "master",
) -> Layer:
    """activation(w @ x + b) with ``w`` of output row ``out``; product, bias and activation round once.

    ``out`` is a size or a row of sizes. ``w`` contracts the whole output row of x, which is inferred unless ``input``
    gives it. With ``prec`` the layer is a region of that precision, see :func:`stagedtensor.stage`.
    """
    if prec is None:
        return _layer(out, activation, bias, input)
    path = qualified("w").rpartition(".")[0]
    region = stage(path, prec, weights, labels=False)
    layer: Layer = region(lambda: _layer(out, activation, bias, input))()
    return lambda x: layer(x)


def _layer(out: int | Sequence[int], activation: Activation, bias: bool, input: Rows) -> Layer:
    row, activation = row_of_sizes(out, "dense: out"), function_of_tensor(activation, "dense")
    w = param("w", input=input, output=row)
    b = param("b", output=row, init=0.0) if bias else None
    return lambda x: _dense(x, w, b, activation)


@block
def mlp(widths: Sequence[int], *, activation: Activation = relu) -> Layer:
    """Dense layers of the given widths, with the activation after all but the last."""
    if not isinstance(widths, list | tuple):
        raise TypeError(f"mlp: expected a list of widths, got {widths!r} ({user_source().quoted()})")
    if not widths:
        raise ValueError(f"mlp: expected at least one width ({user_source().quoted()})")
    layers = [dense(width, activation=activation) for width in widths[:-1]] + [dense(widths[-1])]

    def apply(x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x)
        return x

    return apply


class Embedding:
    """A table of vectors: ``layer(ids)`` reads rows, ``layer.attend(h)`` is the output layer tied to it."""

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def __call__(self, ids: Tensor) -> Tensor:
        """Return ``ids.batch | -> width``; ids out of range are clamped."""
        return gather(self.table, ids)

    def attend(self, h: Tensor) -> Tensor:
        """Return one logit per entry of the table."""
        return self.table @ h


@block
def embedding(count: int, width: int, *, init: Any = None) -> Embedding:
    """Vectors of ``width`` for the integer ids 0 .. count-1; standard normal unless ``init`` says otherwise."""
    sizes = whole(count, "embedding: count"), whole(width, "embedding: width")
    return Embedding(param("table", output=[sizes[0]], input=[sizes[1]], init=normal() if init is None else init))


@block
def dropout(rate: float, *, step: Tensor | None = None, seed: int = 0) -> Layer:
    """Set cells to 0 with probability ``rate`` in training, scale the others up; nothing in evaluation.

    ``step`` is an integer host scalar that the host advances: each value draws another mask. The mask's stream is
    keyed by ``seed`` and the layer's path, so that every layer of a network draws its own.
    """
    if rate and step is None:
        raise ValueError(
            f"dropout: rate {rate} needs step=, e.g. st.host_scalar('step', 0, st.i32), set before every run "
            f"({user_source().quoted()})"
        )
    name = qualified("mask")
    return lambda x, *, training=True: drop(x, rate, step=step, seed=seed, name=name) if training else x
