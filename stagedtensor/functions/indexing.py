"""Indexing and layout: slices, static indices, gather, one_hot, concat, reshape, transpose, permute."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from stagedtensor.dims import MEMORY_ORDER, RowKind
from stagedtensor.errors import PrecisionError, ShapeError
from stagedtensor.precision import i32
from stagedtensor.settings import is_integer
from stagedtensor.source import user_source
from stagedtensor.specs import (
    AxisTerm,
    Concat,
    Gathered,
    Name,
    RowSpec,
    ShapeSpec,
    Sliced,
    Spec,
    with_row,
)
from stagedtensor.statements import Access, Apply, IterValue, Slot, Statement
from stagedtensor.tensor import Tensor, TensorLike, apply_op, lift

from .axes import LAST_OUTPUT, axes_of, solved_shape


def narrow(x: TensorLike, start: int, stop: int | None = None, *, axis: Any = LAST_OUTPUT, step: int = 1) -> Tensor:
    """Keep cells ``start:stop:step`` of one axis (NumPy's meaning of negative bounds)."""
    tensor = lift(x)
    if not is_integer(step, 1):
        raise ShapeError(f"narrow: expected a step of at least 1, got {step!r} ({user_source().quoted()})")
    kind, position = one_axis(tensor, axis, "narrow")
    shape = solved_shape(tensor)
    row = shape.row(kind)
    if not -len(row) <= position < len(row):
        raise ShapeError(
            f"narrow: {tensor.label!r} of shape {shape} has no {kind} axis {position} ({user_source().quoted()})"
        )
    size = row[position].size
    first, last, step = slice(start, stop, step).indices(size)
    count = max(0, -(-(last - first) // step))
    term = Sliced("kept", first, count, step)
    names = tuple(Name(f"axis{at}") for at in range(position if position >= 0 else -position - 1))
    if position >= 0:
        full, kept = RowSpec((*names, term), kind), RowSpec((*names, Name("kept")), kind)
    else:
        full, kept = RowSpec((), kind, (term, *names)), RowSpec((), kind, (Name("kept"), *names))
    return apply_op(
        "slice",
        (tensor,),
        Spec((with_row(kind, full),), with_row(kind, kept)),
        lambda a: a,
        label=tensor.label,
        text=f"{tensor.label}[{first}:{last}]",
    )


def one_axis(x: Tensor, axis: Any, what: str) -> tuple[RowKind, int]:
    """Return the one axis that ``axis`` names as (row, position); raises ShapeError."""
    axes = axes_of(x, axis, what=what)
    if len(axes.names) != 1 or axes.names[0] in MEMORY_ORDER:
        raise ShapeError(f"{what}: expected one axis, got {axis!r} ({user_source().quoted()})")
    for kind in MEMORY_ORDER:
        row = axes.full.row(kind)
        for at, term in enumerate(row.leading):
            if isinstance(term, Name) and term.name in axes.names:
                return kind, at
        for at, term in enumerate(row.trailing):
            if isinstance(term, Name) and term.name in axes.names:
                return kind, at - len(row.trailing)
    raise ShapeError(f"{what}: axis {axis!r} not found in {x.label!r}")


# -- integer ids --------------------------------------------------------------------------------------------------


def check_ids(ids: Tensor, what: str) -> Tensor:
    """Refuse ids that are known to be floats; open terminals become i32."""
    specified = ids.node.settled or ids.node.specified
    if specified is not None and specified.prec.is_float:
        raise PrecisionError(
            f"{what}: ids must be integers, {ids.label!r} is {specified.prec}\n  {ids.node.source.quoted()}\n"
            f"  {user_source().quoted()}\n  declare it with prec=st.i32 or use st.cast(ids, st.i32)"
        )
    if ids.node.data is not None and ids.node.data.dtype.kind == "f":
        raise PrecisionError(f"{what}: ids must be integers, got {ids.node.literal!r} ({user_source().quoted()})")
    return ids


def _id_axes(ids: Tensor) -> tuple[Name, ...]:
    """Name the output axes of ids given as a plain vector (batch axes go by the row variable)."""
    shape = solved_shape(ids)
    return tuple(Name(f"id{at}") for at in range(len(shape.output)))


def gather(table: TensorLike, ids: TensorLike) -> Tensor:
    """Rows of ``table`` (``d -> vocab``, memory (vocab, d)) at integer ``ids``: ``ids.batch | -> d``.

    Ids out of range are clamped. The gradient scatters into the rows that were read; the table stays a float.
    """
    source, where = lift(table), check_ids(lift(ids), "gather")
    names = _id_axes(where)
    table_spec = ShapeSpec(RowSpec(), RowSpec(variable="features"), RowSpec((Gathered(1),)))
    ids_spec = ShapeSpec(RowSpec(variable="batch"), RowSpec(), RowSpec(names))
    result_spec = ShapeSpec(RowSpec(variable="batch"), RowSpec(), RowSpec(names, "features"))
    return apply_op(
        "gather",
        (source, where),
        Spec((table_spec, ids_spec), result_spec),
        lambda t, _: t,
        slots=(Slot.DATA, Slot.INDEX),
        text=f"{source.label}[{where.label}]",
    )


def positions(x: TensorLike, axis: Any = ("batch", -1)) -> Tensor:
    """0 .. n-1 along one axis of ``x``, by default the tokens of a sequence: ``n | ->`` in i32.

    The axis stays in its row, and a dynamic extent stays dynamic: ``gather(table, positions(x))`` reads a row per
    token.
    """
    tensor = lift(x)
    kind, at = one_axis(tensor, axis, "positions")
    count = at if at >= 0 else -at - 1
    here = Name("position")
    others = tuple(Name(f"axis{number}") for number in range(count))
    full = RowSpec((*others, here), kind) if at >= 0 else RowSpec((), kind, (here, *others))
    rows = ShapeSpec(**{name: RowSpec((here,)) if name == kind else RowSpec() for name in MEMORY_ORDER})
    return apply_op(
        "positions",
        (tensor,),
        Spec((with_row(kind, full),), rows),
        lambda _: IterValue("position"),
        slots=(Slot.PREDICATE,),
        rule=None,
        prec=i32,
    )


def one_hot(ids: TensorLike, n: int) -> Tensor:
    """1 at position ``ids`` of a new last output axis of size n, else 0; ids out of range give zeros."""
    if not is_integer(n, 1):
        raise ShapeError(f"one_hot: expected a number of classes >= 1, got {n!r} ({user_source().quoted()})")
    where = check_ids(lift(ids), "one_hot")
    names = _id_axes(where)
    return apply_op(
        "one_hot",
        (where,),
        Spec(
            (ShapeSpec(RowSpec(variable="batch"), RowSpec(), RowSpec(names)),),
            ShapeSpec(RowSpec(variable="batch"), RowSpec(), RowSpec((*names, Name("class")))),
        ),
        lambda a: Apply("eq", (IterValue("class"), a)),
        slots=(Slot.INDEX,),
        rule=None,
        sizes={"class": int(n)},
        top_down=True,
        text=f"one_hot({where.label}, {n})",
    )


# -- layout -------------------------------------------------------------------------------------------------------


def concat(tensors: Sequence[TensorLike], axis: Any = LAST_OUTPUT) -> Tensor:
    """Join tensors along one axis; their other axes agree."""
    if isinstance(tensors, Tensor):
        raise TypeError(f"concat takes a list of tensors, st.concat([a, b], axis=...) ({user_source().quoted()})")
    parts = [lift(item) for item in tensors]
    if not parts:
        raise ShapeError(f"concat: expected at least one tensor ({user_source().quoted()})")
    kind, position = one_axis(parts[0], axis, "concat")
    names = tuple(Name(f"part{at}") for at in range(len(parts)))
    count = position if position >= 0 else -position - 1
    others = tuple(Name(f"axis{at}") for at in range(count))

    def row(term: AxisTerm) -> ShapeSpec:
        if position >= 0:
            return with_row(kind, RowSpec((*others, term), kind))
        return with_row(kind, RowSpec((), kind, (term, *others)))

    result_rows = row(Concat(names) if len(parts) > 1 else names[0])
    result = apply_op(
        "concat",
        parts,
        Spec(tuple(row(name) for name in names), result_rows),
        lambda *reads: reads[0],
        attributes={"axis": (kind, position)},
    )
    record = result.node.record
    assert record is not None
    first = record.statements[0]
    record.statements = tuple(
        Statement(
            first.target,
            Access(part.node, row(name)),
            first.scope,
            source=first.source,
            text=f"concat: {part.label}",
        )
        for part, name in zip(parts, names, strict=True)
    )
    return result


def reshape(
    x: TensorLike,
    *,
    batch: Sequence[int | None] | None = None,
    input: Sequence[int | None] | None = None,
    output: Sequence[int | None] | None = None,
) -> Tensor:
    """Split the cells of a row another way, in row-major order; rows not named stay. One size may be None."""
    tensor = lift(x)
    wanted = {"batch": batch, "input": input, "output": output}
    full, result, sizes = {}, {}, {}
    for kind in MEMORY_ORDER:
        entry = wanted[kind]
        full[kind] = result[kind] = RowSpec(variable=kind)
        if entry is None:
            continue
        dims = _reshaped_sizes(tensor, kind, list(entry))
        names = tuple(Name(f"{kind}{at}") for at in range(len(dims)))
        sizes.update({name.name: size for name, size in zip(names, dims, strict=True)})
        full[kind] = RowSpec(variable=kind, flatten=True)
        result[kind] = RowSpec(names)
    if not sizes and all(entry is None for entry in wanted.values()):
        raise TypeError("reshape: name at least one row, e.g. st.reshape(x, output=[4, 32])")
    return apply_op(
        "reshape",
        (tensor,),
        Spec(
            (ShapeSpec(full["batch"], full["input"], full["output"]),),
            ShapeSpec(result["batch"], result["input"], result["output"]),
        ),
        lambda a: a,
        sizes=sizes,
        label=tensor.label,
        text=f"reshape({tensor.label})",
    )


def _reshaped_sizes(x: Tensor, kind: RowKind, entry: list[int | None]) -> list[int]:
    shape = solved_shape(x)
    total = math.prod(axis.size for axis in shape.row(kind))
    known = math.prod(size for size in entry if size is not None)
    unknown = sum(size is None for size in entry)
    fits = unknown <= 1 and (total == known if not unknown else known > 0 and total % known == 0)
    if not fits:
        raise ShapeError(
            f"reshape: the {kind} row of {x.label!r} (shape {shape}) has {total} cells, which do not split into "
            f"{entry}\n  {x.node.source.quoted()}\n  {user_source().quoted()}"
        )
    return [total // known if size is None else size for size in entry]


def permute(x: TensorLike, order: Sequence[int], *, row: RowKind = "output") -> Tensor:
    """Reorder the axes of one row: result axis i is the operand's axis ``order[i]``."""
    tensor, positions = lift(x), list(order)
    if sorted(positions) != list(range(len(positions))):
        raise ShapeError(f"permute: expected a permutation of 0..n-1, got {order!r} ({user_source().quoted()})")
    names = tuple(Name(f"axis{at}") for at in range(len(positions)))
    return apply_op(
        "permute",
        (tensor,),
        Spec(
            (with_row(row, RowSpec(names)),),
            with_row(row, RowSpec(tuple(names[at] for at in positions))),
        ),
        lambda a: a,
        label=tensor.label,
        text=f"permute({tensor.label}, {positions})",
    )


def transpose(x: TensorLike, *, row: RowKind = "output") -> Tensor:
    """Swap the last two axes of one row."""
    tensor = lift(x)
    first, second = Name("axis0"), Name("axis1")
    return apply_op(
        "permute",
        (tensor,),
        Spec(
            (with_row(row, RowSpec((), row, (first, second))),),
            with_row(row, RowSpec((), row, (second, first))),
        ),
        lambda a: a,
        label=tensor.label,
        text=f"transpose({tensor.label})",
    )
