"""Convolutions over one and three axes, and the transposed one; sizes as in PyTorch, channels last.

In: signals ``batch | -> length, c`` or volumes ``batch | -> d, h, w, c`` and weights ``k.., ic -> oc``. Each is one
composite: sums and bias round once.
"""

from __future__ import annotations

from collections.abc import Sequence

from stagedtensor.composite import composite
from stagedtensor.errors import ShapeError
from stagedtensor.settings import is_integer
from stagedtensor.source import user_source
from stagedtensor.specs import Affine, Name, RowSpec, ShapeSpec, Spec, with_row
from stagedtensor.statements import Apply
from stagedtensor.tensor import Tensor, TensorLike, apply_op, lift

from .axes import solved_shape
from .convolution import padded
from .indexing import narrow

Sizes = tuple[int, ...]


def _several(value: int | Sequence[int], count: int, name: str, least: int) -> Sizes:
    entries = tuple(value) if isinstance(value, Sequence) else (value,) * count
    if len(entries) != count or not all(is_integer(entry, least) for entry in entries):
        raise ShapeError(
            f"{name}: expected an integer of at least {least}"
            + (f" or {count} of them" if count > 1 else "")
            + f", got {value!r} ({user_source().quoted()})"
        )
    return tuple(int(entry) for entry in entries)


def _kernel(x: Tensor, w: Tensor, count: int, what: str) -> tuple[Sizes, Sizes]:
    """Return (sizes of the signal, sizes of the kernel); raises ShapeError."""
    row, window = solved_shape(x).output, solved_shape(w).input
    if len(row) != count + 1 or len(window) != count + 1:
        raise ShapeError(
            f"{what}: expected {count} axes and channels, and weights of {count} axes and channels -> channels; "
            f"{x.label!r} has shape {solved_shape(x)}, {w.label!r} {solved_shape(w)} ({user_source().quoted()})"
        )
    return tuple(axis.size for axis in row[:-1]), tuple(axis.size for axis in window[:-1])


def _weights(names: Sequence[str]) -> ShapeSpec:
    return ShapeSpec(RowSpec(), RowSpec((*map(Name, names), Name("ic"))), RowSpec((Name("oc"),)))


def _contracted(w: Tensor, x: Tensor, spec: Spec, what: str) -> Tensor:
    return apply_op(
        "einsum",
        (w, x),
        spec,
        lambda a, b: Apply("mul", (a, b)),
        reduction="add",
        attributes={"reduction": "add", "combine": "mul"},
        label=what,
        text=f"{what}({x.label}, {w.label})",
    )


@composite("convolution")
def _convolution(
    x: Tensor, w: Tensor, bias: Tensor | None, stride: Sizes, padding: Sizes, dilation: Sizes, what: str
) -> Tensor:
    count = len(stride)
    sizes, kernel = _kernel(x, w, count, what)
    signal = padded(x, padding)
    for at in range(count):
        reach = dilation[at] * (kernel[at] - 1) + 1
        available = sizes[at] + 2 * padding[at]
        if available < reach:
            raise ShapeError(
                f"{what}: windows of {reach} cells do not fit into {sizes[at]} cells padded by {padding[at]} on each side "
                f"of {x.label!r} ({user_source().quoted()})"
            )
        read = (available - reach) // stride[at] * stride[at] + reach
        if read != available:
            signal = narrow(signal, 0, read, axis=("output", at - count - 1))
    names = [f"k{at}" for at in range(count)]
    windows = [Affine(stride[at], f"o{at}", dilation[at], names[at]) for at in range(count)]
    result = [Name(f"o{at}") for at in range(count)]
    spec = Spec(
        (_weights(names), with_row("output", RowSpec((*windows, Name("ic"))))),
        with_row("output", RowSpec((*result, Name("oc")))),
    )
    y = _contracted(w, signal, spec, what)
    return y if bias is None else y + bias


def conv1d(
    x: TensorLike,
    w: TensorLike,
    bias: TensorLike | None = None,
    *,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
) -> Tensor:
    """Cross-correlation of signals ``-> length, c`` with weights ``k, ic -> oc``, plus ``bias``."""
    return _checked(x, w, bias, 1, stride, padding, dilation, "conv1d")


def conv3d(
    x: TensorLike,
    w: TensorLike,
    bias: TensorLike | None = None,
    *,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
) -> Tensor:
    """Cross-correlation of volumes ``-> d, h, w, c`` with weights ``kd, kh, kw, ic -> oc``, plus ``bias``."""
    return _checked(x, w, bias, 3, stride, padding, dilation, "conv3d")


def _checked(
    x: TensorLike,
    w: TensorLike,
    bias: TensorLike | None,
    count: int,
    stride: int | Sequence[int],
    padding: int | Sequence[int],
    dilation: int | Sequence[int],
    what: str,
) -> Tensor:
    return _convolution(
        lift(x),
        lift(w),
        None if bias is None else lift(bias),
        _several(stride, count, f"{what}: stride", 1),
        _several(padding, count, f"{what}: padding", 0),
        _several(dilation, count, f"{what}: dilation", 1),
        what,
    )


@composite("conv_transpose1d")
def _conv_transpose1d(
    x: Tensor, w: Tensor, bias: Tensor | None, stride: int, padding: int, dilation: int, extra: int
) -> Tensor:
    what = "conv_transpose1d"
    (size,), (kernel,) = _kernel(x, w, 1, what)
    length = (size - 1) * stride + dilation * (kernel - 1) + 1
    if length + extra <= 2 * padding:
        raise ShapeError(
            f"{what}: padding {padding} leaves nothing of {length} cells ({x.label!r}, {user_source().quoted()})"
        )
    spec = Spec(
        (_weights(["k"]), with_row("output", RowSpec((Name("o"), Name("ic"))))),
        with_row("output", RowSpec((Affine(stride, "o", dilation, "k"), Name("oc")))),
    )
    y = _contracted(w, x, spec, what)
    if extra:
        # more cells at the end than the windows reach: they hold zeros
        y = narrow(padded(y, (extra,)), extra, length + 2 * extra, axis=("output", -2))
    if padding:
        y = narrow(y, padding, length + extra - padding, axis=("output", -2))
    return y if bias is None else y + bias


def conv_transpose1d(
    x: TensorLike,
    w: TensorLike,
    bias: TensorLike | None = None,
    *,
    stride: int = 1,
    padding: int = 0,
    output_padding: int = 0,
    dilation: int = 1,
) -> Tensor:
    """Spread each cell of signals ``-> length, c`` over weights ``k, ic -> oc``: the transpose of :func:`conv1d`.

    The result has (length - 1) stride - 2 padding + dilation (k - 1) + output_padding + 1 cells.
    """
    what = "conv_transpose1d"
    (steps,), (holes,) = _several(stride, 1, f"{what}: stride", 1), _several(dilation, 1, f"{what}: dilation", 1)
    (around,) = _several(padding, 1, f"{what}: padding", 0)
    (extra,) = _several(output_padding, 1, f"{what}: output_padding", 0)
    if extra >= max(steps, holes):
        raise ShapeError(
            f"{what}: output_padding {extra} must be below stride {steps} or dilation {holes} ({user_source().quoted()})"
        )
    return _conv_transpose1d(lift(x), lift(w), None if bias is None else lift(bias), steps, around, holes, extra)
