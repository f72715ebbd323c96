"""Convolution layers and image networks on ``batch | -> height, width, channels``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stagedtensor.blocks import block
from stagedtensor.composite import composite
from stagedtensor.errors import ShapeError
from stagedtensor.functions import convolution
from stagedtensor.functions.convolution import Pair, global_avg_pool2d, max_pool2d as maximum_of_windows, pair
from stagedtensor.functions.layout import flatten
from stagedtensor.functions.pointwise import relu
from stagedtensor.source import user_source
from stagedtensor.tensor import Tensor
from stagedtensor.terminals import param

from .dense import dense
from .layer import Activation, Layer, activated, function_of_tensor, whole
from .norms import batch_norm

__all__ = [
    "avg_pool2d",
    "conv2d",
    "depthwise_separable_conv2d",
    "global_avg_pool2d",
    "lenet",
    "max_pool2d",
    "resnet_block",
]


@composite("conv2d")
def _conv2d(x: Tensor, w: Tensor, b: Tensor | None, activation: Activation, settings: dict[str, Any]) -> Tensor:
    return activated(convolution.conv2d(x, w, b, **settings), activation)


@block
def conv2d(
    out: int,
    kernel: Pair = 3,
    *,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
    channels: int | None = None,
    activation: Activation = None,
    bias: bool = True,
) -> Layer:
    """Convolution with ``out`` channels; sums, bias and activation round once.

    ``channels`` is the number of input channels, inferred where it is None and ``groups`` is 1.
    """
    out, activation = whole(out, "conv2d: out"), function_of_tensor(activation, "conv2d")
    sizes = pair(kernel, "conv2d: kernel", 1)
    if groups != 1 and (channels is None or channels % whole(groups, "conv2d: groups")):
        raise ShapeError(
            f"conv2d: {groups} groups need channels=, a multiple of them; got {channels!r} ({user_source().quoted()})"
        )
    w = param("w", input=[*sizes, None if channels is None else channels // groups], output=[out])
    b = param("b", output=[out], init=0.0) if bias else None
    settings = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "kernel": sizes}
    return lambda x: _conv2d(x, w, b, activation, settings)


@block
def depthwise_separable_conv2d(
    out: int, kernel: Pair = 3, *, channels: int, stride: Pair = 1, padding: Pair = 0, activation: Activation = None
) -> Layer:
    """A convolution of each of ``channels`` channels alone, then one of 1 x 1 cells across them (Howard et al. 2017)."""
    depthwise = conv2d(
        channels, kernel, stride=stride, padding=padding, groups=channels, channels=channels, label="depthwise"
    )
    pointwise = conv2d(out, 1, channels=channels, activation=activation, label="pointwise")
    return lambda x: pointwise(depthwise(x))


def max_pool2d(size: Pair, *, stride: Pair | None = None, padding: Pair = 0) -> Layer:
    """Maximum over windows, as a layer."""
    return lambda x: maximum_of_windows(x, size, stride=stride, padding=padding)


def avg_pool2d(size: Pair, *, stride: Pair | None = None, padding: Pair = 0) -> Layer:
    """Mean over windows, as a layer."""
    return lambda x: convolution.avg_pool2d(x, size, stride=stride, padding=padding)


@block
def lenet(
    classes: int = 10,
    *,
    channels: Sequence[int] = (6, 16),
    widths: Sequence[int] = (120, 84),
    kernel: int = 5,
    activation: Activation = relu,
) -> Layer:
    """Convolutions, each followed by a pool that halves the image, then dense layers (LeCun et al. 1998)."""
    convolutions = [conv2d(out, kernel, padding=kernel // 2, activation=activation) for out in channels]
    layers = [dense(width, activation=activation) for width in widths] + [dense(classes)]

    def apply(x: Tensor) -> Tensor:
        for layer in convolutions:
            x = maximum_of_windows(layer(x), 2)
        x = flatten(x)
        for layer in layers:
            x = layer(x)
        return x

    return apply


@block
def resnet_block(out: int, *, stride: int = 1, project: bool | None = None) -> Layer:
    """relu(norm(conv(relu(norm(conv(x))))) + x) with 3 x 3 kernels (He et al. 2016).

    ``project`` puts a 1 x 1 convolution and a norm on the short way, by default where ``stride`` is above 1.
    """
    first = conv2d(out, 3, stride=stride, padding=1, bias=False, label="first")
    second = conv2d(out, 3, padding=1, bias=False, label="second")
    first_norm, second_norm = batch_norm(label="first_norm"), batch_norm(label="second_norm")
    short = short_norm = None
    if project if project is not None else stride != 1:
        short, short_norm = conv2d(out, 1, stride=stride, bias=False, label="short"), batch_norm(label="short_norm")

    def apply(x: Tensor, *, training: bool = True) -> Tensor:
        y = relu(first_norm(first(x), training=training))
        y = second_norm(second(y), training=training)
        if short is not None and short_norm is not None:
            x = short_norm(short(x), training=training)
        return relu(y + x)

    return apply
