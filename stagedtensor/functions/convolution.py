"""Convolution and pooling on images ``batch | -> h, w, c``; arithmetic of sizes as in PyTorch.

``padding`` pads symmetrically, out = floor((in + 2 padding - dilation (k - 1) - 1) / stride) + 1; input cells that no
window reads are narrowed off first. Weights are ``kh, kw, ic -> oc`` (memory (oc, kh, kw, ic)).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from stagedtensor.composite import composite
from stagedtensor.errors import ShapeError
from stagedtensor.settings import is_integer
from stagedtensor.source import user_source
from stagedtensor.specs import ALL_ROWS, Affine, AxisTerm, Concat, Name, RowSpec, ShapeSpec, Spec, with_row
from stagedtensor.statements import Apply, NumberLiteral, WriteOp
from stagedtensor.tensor import Tensor, TensorLike, apply_op, lift

from .axes import solved_shape
from .indexing import narrow, reshape
from .reductions import mean

Pair = int | Sequence[int]
IMAGE_ROW = ("output", -3), ("output", -2)


def pair(value: Pair, name: str, least: int) -> tuple[int, int]:
    """Return (height, width) of a setting given once or twice."""
    entries = tuple(value) if isinstance(value, Sequence) else (value, value)
    if len(entries) != 2 or not all(is_integer(entry, least) for entry in entries):
        raise ShapeError(
            f"{name}: expected an integer of at least {least} or two of them, got {value!r} ({user_source().quoted()})"
        )
    return int(entries[0]), int(entries[1])


def image_size(x: Tensor, what: str) -> tuple[int, int]:
    """Return (height, width) of an image ``-> h, w, c``."""
    row = solved_shape(x).output
    if len(row) != 3:
        raise ShapeError(
            f"{what}: expected images of output row h, w, c; {x.label!r} has shape {solved_shape(x)} "
            f"({user_source().quoted()})"
        )
    return row[0].size, row[1].size


def padded(x: Tensor, amounts: tuple[int, ...], fill: Literal["zero", "lowest"] = "zero") -> Tensor:
    """Surround the axes before channels with ``amounts`` (rows, columns) of zeros, or of the identity of max."""
    if not any(amounts):
        return x

    def axis(name: str, amount: int) -> AxisTerm:
        return Concat((amount, Name(name), amount)) if amount else Name(name)

    names = ("d", "h", "w")[-len(amounts) :]
    operand = RowSpec((*map(Name, names), Name("c")))
    target = RowSpec((*map(axis, names, amounts), Name("c")))
    op: WriteOp = "add" if fill == "zero" else "max"
    return apply_op(
        "pad",
        (x,),
        Spec((with_row("output", operand),), with_row("output", target)),
        lambda a: a,
        reduction=op,
        label=f"{x.label}_padded",
        attributes={"fill": fill, "amounts": amounts},
    )


def windows(
    x: Tensor,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    what: str,
) -> Tensor:
    """Pad ``x`` and narrow off what no window reads, so that the windows cover it exactly. Raises ShapeError."""
    size = image_size(x, what)
    lengths = []
    for at in range(2):
        reach = dilation[at] * (kernel[at] - 1) + 1
        available = size[at] + 2 * padding[at]
        if available < reach:
            raise ShapeError(
                f"{what}: windows of {reach} cells (kernel {kernel[at]}, dilation {dilation[at]}) do not fit into "
                f"{size[at]} cells padded by {padding[at]} on each side of {x.label!r} ({user_source().quoted()})"
            )
        lengths.append((available - reach) // stride[at] * stride[at] + reach)
    x = padded(x, padding, "lowest" if what == "max_pool2d" else "zero")
    for at in range(2):
        if lengths[at] != size[at] + 2 * padding[at]:
            x = narrow(x, 0, lengths[at], axis=IMAGE_ROW[at])
    return x


def _window_row(stride: tuple[int, int], dilation: tuple[int, int], *rest: AxisTerm) -> RowSpec:
    return RowSpec((Affine(stride[0], "oh", dilation[0], "kh"), Affine(stride[1], "ow", dilation[1], "kw"), *rest))


@composite("conv2d")
def _conv2d(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    groups: int,
    kernel: tuple[int, int] | None,
) -> Tensor:
    if kernel is None:
        row = solved_shape(w).input
        if len(row) != 3:
            raise ShapeError(
                f"conv2d: expected weights kh,kw,ic -> oc, {w.label!r} has shape {solved_shape(w)}; pass kernel= where "
                f"the weights are still open ({user_source().quoted()})"
            )
        kernel = row[0].size, row[1].size
    x = windows(x, kernel, stride, padding, dilation, "conv2d")
    sizes = {"kh": kernel[0], "kw": kernel[1]}
    if groups == 1:
        w_spec = ShapeSpec(RowSpec(), RowSpec((Name("kh"), Name("kw"), Name("ic"))), RowSpec((Name("oc"),)))
        x_spec = with_row("output", _window_row(stride, dilation, Name("ic")))
        y_spec = with_row("output", RowSpec((Name("oh"), Name("ow"), Name("oc"))))
        y = _contract(w, x, w_spec, x_spec, y_spec, sizes)
    else:
        y = _grouped(x, w, stride, dilation, groups, sizes)
    return y if bias is None else y + bias


def _contract(w: Tensor, x: Tensor, w_spec: ShapeSpec, x_spec: ShapeSpec, y_spec: ShapeSpec, sizes: Any) -> Tensor:
    return apply_op(
        "einsum",
        (w, x),
        Spec((w_spec, x_spec), y_spec),
        lambda a, b: Apply("mul", (a, b)),
        reduction="add",
        attributes={"reduction": "add", "combine": "mul"},
        sizes=sizes,
        label="conv2d",
        text=f"conv2d({x.label}, {w.label})",
    )


def _grouped(
    x: Tensor, w: Tensor, stride: tuple[int, int], dilation: tuple[int, int], groups: int, sizes: dict[str, int]
) -> Tensor:
    """Channels split into groups: group g of the input meets group g of the outputs."""
    image, weight = solved_shape(x).output, solved_shape(w)
    channels, outputs = image[2].size, math.prod(axis.size for axis in weight.output)
    if channels % groups or outputs % groups or weight.input[2].size * groups != channels:
        raise ShapeError(
            f"conv2d: {channels} input channels and {outputs} output channels do not split into {groups} groups of "
            f"weights {weight} ({user_source().quoted()})"
        )
    x = reshape(x, output=[image[0].size, image[1].size, groups, channels // groups])
    w = reshape(w, output=[groups, outputs // groups])
    w_spec = ShapeSpec(RowSpec(), RowSpec((Name("kh"), Name("kw"), Name("ic"))), RowSpec((Name("g"), Name("oc"))))
    x_spec = with_row("output", _window_row(stride, dilation, Name("g"), Name("ic")))
    y_spec = with_row("output", RowSpec((Name("oh"), Name("ow"), Name("g"), Name("oc"))))
    y = _contract(w, x, w_spec, x_spec, y_spec, sizes)
    rows = solved_shape(y).output
    return reshape(y, output=[rows[0].size, rows[1].size, outputs])


def conv2d(
    x: TensorLike,
    w: TensorLike,
    bias: TensorLike | None = None,
    *,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
    kernel: Pair | None = None,
) -> Tensor:
    """Two-dimensional cross-correlation of images with weights ``kh, kw, ic -> oc``, plus ``bias`` (one per channel).

    One composite: product, sum and bias round once. ``kernel`` gives (kh, kw) where the weights' input row is open.
    Raises ShapeError where windows do not fit or channels do not split into ``groups``.
    """
    if not is_integer(groups, 1):
        raise ShapeError(f"conv2d: groups is an integer of at least 1, got {groups!r} ({user_source().quoted()})")
    return _conv2d(
        lift(x),
        lift(w),
        None if bias is None else lift(bias),
        pair(stride, "conv2d: stride", 1),
        pair(padding, "conv2d: padding", 0),
        pair(dilation, "conv2d: dilation", 1),
        int(groups),
        None if kernel is None else pair(kernel, "conv2d: kernel", 1),
    )


# -- pooling ------------------------------------------------------------------------------------------------------


def _pool_settings(
    size: Pair, stride: Pair | None, padding: Pair, what: str
) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    kernel = pair(size, f"{what}: size", 1)
    steps = kernel if stride is None else pair(stride, f"{what}: stride", 1)
    around = pair(padding, f"{what}: padding", 0)
    if 2 * around[0] > kernel[0] or 2 * around[1] > kernel[1]:
        raise ShapeError(
            f"{what}: padding {padding!r} is more than half of the window {size!r} ({user_source().quoted()})"
        )
    return kernel, steps, around


def max_pool2d(x: TensorLike, size: Pair, *, stride: Pair | None = None, padding: Pair = 0) -> Tensor:
    """Maximum over windows; NaN wins; the gradient goes to the first maximum of a window in row-major order."""
    kernel, steps, around = _pool_settings(size, stride, padding, "max_pool2d")
    tensor = windows(lift(x), kernel, steps, around, (1, 1), "max_pool2d")
    return apply_op(
        "max",
        (tensor,),
        Spec(
            (with_row("output", _window_row(steps, (1, 1), Name("c"))),),
            with_row("output", RowSpec((Name("oh"), Name("ow"), Name("c")))),
        ),
        lambda a: a,
        reduction="max",
        rule="extremum",
        attributes={"reduction": "max", "removed": ShapeSpec(output=RowSpec((Name("kh"), Name("kw"))))},
        sizes={"kh": kernel[0], "kw": kernel[1]},
        label="max_pool2d",
        text=f"max_pool2d({tensor.label})",
    )


@composite("avg_pool2d", float_only=True)
def _avg_pool2d(x: Tensor, kernel: tuple[int, int], steps: tuple[int, int], around: tuple[int, int]) -> Tensor:
    x = windows(x, kernel, steps, around, (1, 1), "avg_pool2d")
    total = apply_op(
        "sum",
        (x,),
        Spec(
            (with_row("output", _window_row(steps, (1, 1), Name("c"))),),
            with_row("output", RowSpec((Name("oh"), Name("ow"), Name("c")))),
        ),
        lambda a: a,
        reduction="add",
        attributes={"reduction": "add"},
        sizes={"kh": kernel[0], "kw": kernel[1]},
    )
    count = float(kernel[0] * kernel[1])
    return apply_op(
        "divide_by_count", (total,), Spec((ALL_ROWS,), ALL_ROWS), lambda s: Apply("div", (s, NumberLiteral(count)))
    )


def avg_pool2d(x: TensorLike, size: Pair, *, stride: Pair | None = None, padding: Pair = 0) -> Tensor:
    """Mean over windows; padding counts as zeros."""
    return _avg_pool2d(lift(x), *_pool_settings(size, stride, padding, "avg_pool2d"))


def global_avg_pool2d(x: TensorLike) -> Tensor:
    """Mean over height and width: ``-> h, w, c`` gives ``-> c``."""
    return mean(lift(x), axis=list(IMAGE_ROW))
