"""Layout functions made of reshapes, slices and index maps: flatten, squeeze, split, windows, triangles, upsampling.

All act within one row and move cells without changing them; their gradients sum what was repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stagedtensor.dims import RowKind
from stagedtensor.errors import ShapeError
from stagedtensor.settings import is_integer
from stagedtensor.source import user_source
from stagedtensor.specs import Affine, AxisTerm, Gathered, Name, RowSpec, ShapeSpec, Spec, with_row
from stagedtensor.statements import Apply, IterValue, NumberLiteral, Slot
from stagedtensor.tensor import Tensor, TensorLike, apply_op, lift

from .axes import LAST_OUTPUT, solved_shape
from .convolution import Pair, padded, pair
from .indexing import check_ids, narrow, one_axis, reshape


def _row_sizes(x: Tensor, kind: RowKind) -> list[int]:
    return [axis.size for axis in solved_shape(x).row(kind)]


def _with_sizes(x: Tensor, kind: RowKind, sizes: Sequence[int]) -> Tensor:
    if kind == "batch":
        return reshape(x, batch=sizes)
    return reshape(x, input=sizes) if kind == "input" else reshape(x, output=sizes)


def _located(x: Tensor, axis: Any, what: str) -> tuple[RowKind, int, list[int]]:
    """Return (row, position counted from the left, sizes of the row); raises ShapeError."""
    kind, position = one_axis(x, axis, what)
    sizes = _row_sizes(x, kind)
    if not -len(sizes) <= position < len(sizes):
        raise ShapeError(
            f"{what}: {x.label!r} of shape {solved_shape(x)} has no {kind} axis {position} ({user_source().quoted()})"
        )
    return kind, position % len(sizes), sizes


def flatten(x: TensorLike, *, row: RowKind = "output") -> Tensor:
    """Join the axes of one row into one, in row-major order."""
    tensor = lift(x)
    size = 1
    for entry in _row_sizes(tensor, row):
        size *= entry
    return _with_sizes(tensor, row, [size])


def squeeze(x: TensorLike, axis: Any = LAST_OUTPUT) -> Tensor:
    """Remove an axis of size 1."""
    tensor = lift(x)
    kind, at, sizes = _located(tensor, axis, "squeeze")
    if sizes[at] != 1:
        raise ShapeError(
            f"squeeze: axis {axis!r} of {tensor.label!r} (shape {solved_shape(tensor)}) has size {sizes[at]}, not 1 "
            f"({user_source().quoted()})"
        )
    return _with_sizes(tensor, kind, sizes[:at] + sizes[at + 1 :])


def unsqueeze(x: TensorLike, axis: tuple[RowKind, int] = LAST_OUTPUT) -> Tensor:  # type: ignore[assignment]
    """Insert an axis of size 1, which the result has at ``axis``, a (row, position)."""
    tensor = lift(x)
    kind, position = axis
    sizes = _row_sizes(tensor, kind)
    if not -len(sizes) - 1 <= position <= len(sizes):
        raise ShapeError(
            f"unsqueeze: the result of {tensor.label!r} (shape {solved_shape(tensor)}) has no {kind} axis {position} "
            f"({user_source().quoted()})"
        )
    at = position % (len(sizes) + 1)
    return _with_sizes(tensor, kind, [*sizes[:at], 1, *sizes[at:]])


def split(x: TensorLike, sizes: int | Sequence[int], axis: Any = LAST_OUTPUT) -> list[Tensor]:
    """Cut one axis into parts of the given sizes, or of one size (the last part may be smaller, as in PyTorch)."""
    tensor = lift(x)
    _, at, row = _located(tensor, axis, "split")
    if is_integer(sizes, 1):
        sizes = [min(int(sizes), row[at] - start) for start in range(0, row[at], sizes)]
    if not isinstance(sizes, Sequence) or not all(is_integer(size) for size in sizes):
        raise ShapeError(
            f"split: expected a size of at least 1 or a list of sizes, got {sizes!r} ({user_source().quoted()})"
        )
    if sum(sizes) != row[at] or min(sizes, default=1) < 1:
        raise ShapeError(
            f"split: sizes {list(sizes)} do not sum to the {row[at]} cells of axis {axis!r} of {tensor.label!r} "
            f"({user_source().quoted()})"
        )
    starts = [sum(sizes[:part]) for part in range(len(sizes))]
    return [narrow(tensor, start, start + size, axis=axis) for start, size in zip(starts, sizes, strict=True)]


def pad2d(x: TensorLike, amounts: Pair) -> Tensor:
    """Surround images ``-> h, w, c`` with rows and columns of zeros."""
    return padded(lift(x), pair(amounts, "pad2d", 0))


def tril(x: TensorLike, diagonal: int = 0) -> Tensor:
    """Keep the cells of the last two output axes on and below a diagonal; 0 above."""
    tensor = lift(x)
    spec = with_row("output", RowSpec((), "output", (Name("row"), Name("column"))))
    below = Apply("le", (IterValue("column"), Apply("add", (IterValue("row"), NumberLiteral(diagonal)))))
    return apply_op(
        "tril", (tensor,), Spec((spec,), spec), lambda a: Apply("where", (below, a, NumberLiteral(0.0))), label="tril"
    )


def index_select(x: TensorLike, ids: TensorLike, axis: Any = LAST_OUTPUT) -> Tensor:
    """Pick cells of one axis at a vector ``-> n`` of integer ids, which are clamped; gradients add up at repeated ids."""
    tensor, where = lift(x), check_ids(lift(ids), "index_select")
    kind, at, sizes = _located(tensor, axis, "index_select")
    if len(_row_sizes(where, "output")) != 1:
        raise ShapeError(
            f"index_select: expected a vector of ids, {where.label!r} has shape {solved_shape(where)} "
            f"({user_source().quoted()})"
        )
    names = [Name(f"axis{position}") for position in range(len(sizes))]

    def row(term: AxisTerm) -> ShapeSpec:
        return with_row(kind, RowSpec((*names[:at], term, *names[at + 1 :])))

    ids_spec = ShapeSpec(RowSpec(), RowSpec(), RowSpec((Name("picked"),)))
    return apply_op(
        "gather",
        (tensor, where),
        Spec((row(Gathered(1)), ids_spec), row(Name("picked"))),
        lambda t, _: t,
        slots=(Slot.DATA, Slot.INDEX),
        text=f"index_select({tensor.label}, {where.label})",
    )


def unfold(x: TensorLike, size: int, step: int = 1, axis: Any = LAST_OUTPUT) -> Tensor:
    """Windows of ``size`` cells every ``step`` cells of one axis, as a new last axis of its row."""
    tensor = lift(x)
    kind, at, sizes = _located(tensor, axis, "unfold")
    for name, value in (("size", size), ("step", step)):
        if not is_integer(value, 1):
            raise ShapeError(f"unfold: expected a {name} of at least 1, got {value!r} ({user_source().quoted()})")
    size, step = int(size), int(step)
    if size > sizes[at]:
        raise ShapeError(
            f"unfold: windows of {size} cells do not fit into the {sizes[at]} of axis {axis!r} of {tensor.label!r} "
            f"({user_source().quoted()})"
        )
    read = (sizes[at] - size) // step * step + size
    if read != sizes[at]:
        tensor = narrow(tensor, 0, read, axis=axis)
    names = [Name(f"axis{position}") for position in range(len(sizes))]
    full = RowSpec((*names[:at], Affine(step, "window", 1, "cell"), *names[at + 1 :]))
    result = RowSpec((*names[:at], Name("window"), *names[at + 1 :], Name("cell")))
    return apply_op(
        "unfold",
        (tensor,),
        Spec((with_row(kind, full),), with_row(kind, result)),
        lambda a: a,
        sizes={"cell": size},
        label=tensor.label,
        text=f"unfold({tensor.label})",
    )


def upsample2d(x: TensorLike, factor: Pair) -> Tensor:
    """Repeat rows and columns of images ``-> h, w, c`` (nearest neighbour)."""
    tensor = lift(x)
    rows, columns = pair(factor, "upsample2d: factor", 1)
    sizes = _row_sizes(tensor, "output")
    if len(sizes) != 3:
        raise ShapeError(
            f"upsample2d: expected images of output row h, w, c; {tensor.label!r} has shape {solved_shape(tensor)} "
            f"({user_source().quoted()})"
        )
    h, w, c = Name("h"), Name("w"), Name("c")
    repeated = apply_op(
        "upsample2d",
        (tensor,),
        Spec(
            (with_row("output", RowSpec((h, w, c))),),
            with_row("output", RowSpec((h, Name("rows"), w, Name("columns"), c))),
        ),
        lambda a: a,
        sizes={"rows": rows, "columns": columns},
        label=tensor.label,
        text=f"upsample2d({tensor.label})",
    )
    return reshape(repeated, output=[sizes[0] * rows, sizes[1] * columns, sizes[2]])
