"""Turning ``axis=`` arguments into index specs: which axes a reduction keeps and which it removes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from stagedtensor.dims import MEMORY_ORDER, RowKind, Shape
from stagedtensor.errors import ShapeError
from stagedtensor.settings import is_integer
from stagedtensor.shapes.solver import solve_shapes
from stagedtensor.source import user_source
from stagedtensor.specs import ALL_ROWS, AxisTerm, Name, Position, RowSpec, ShapeSpec
from stagedtensor.tensor import Tensor

LAST_OUTPUT = ("output", -1)
_ROWS = get_args(RowKind)


@dataclass(frozen=True)
class Axes:
    """Specs of one reduction: the whole operand, the result without the removed axes, with them as size 1, and alone."""

    full: ShapeSpec
    kept: ShapeSpec
    kept_dims: ShapeSpec
    removed: ShapeSpec
    names: tuple[str, ...]
    """Names and row variables that are removed (their extents multiply to the count of reduced cells)."""

    def result(self, keepdims: bool) -> ShapeSpec:
        """Return the result's spec."""
        return self.kept_dims if keepdims else self.kept


def solved_shape(x: Tensor) -> Shape:
    """Return the shape of ``x`` as far as everything built so far determines it."""
    return solve_shapes([x.node], partial=True).shape(x.node)


def axes_of(x: Tensor, axis: Any, *, keepdims: bool = False, what: str = "reduction") -> Axes:
    """Resolve ``axis``: None, an int in memory order, a row name, ``(row, position)``, an axis label, or a list."""
    if not isinstance(keepdims, bool):
        raise TypeError(f"{what}: keepdims is True or False, not {keepdims!r}")
    entries = _entries(axis)
    rows: set[RowKind] = set()
    positions: dict[RowKind, set[int]] = {kind: set() for kind in _ROWS}
    for entry in entries:
        if entry is None:
            rows.update(_ROWS)
        elif isinstance(entry, str) and entry in _ROWS:
            rows.add(entry)  # type: ignore[arg-type]
        else:
            row, position = _locate(x, entry, what)
            if position in positions[row]:
                raise ShapeError(f"{what}: axis {entry!r} is named twice in {axis!r} ({user_source().quoted()})")
            positions[row].add(position)
    if keepdims and rows:
        shape = solved_shape(x)
        for row in rows:
            positions[row].update(range(len(shape.row(row))))
        rows = set()
    return _specs(x, rows, positions, what)


def _entries(axis: Any) -> list[Any]:
    if isinstance(axis, list):
        return axis
    if isinstance(axis, tuple) and not (len(axis) == 2 and isinstance(axis[0], str) and is_integer(axis[1])):
        return list(axis)
    return [axis]


def _locate(x: Tensor, entry: Any, what: str) -> tuple[RowKind, int]:
    if isinstance(entry, tuple) and len(entry) == 2 and entry[0] in _ROWS and is_integer(entry[1]):
        return entry[0], int(entry[1])
    shape = solved_shape(x)
    flat = [(kind, position, item) for kind, position, item in shape.axes()]
    if is_integer(entry):
        if not -len(flat) <= entry < len(flat):
            raise ShapeError(
                f"{what}: axis {entry} is out of range for {x.label!r} of shape {shape} ({len(flat)} axes) "
                f"({user_source().quoted()})"
            )
        kind, position, _ = flat[entry]
        return kind, position - len(shape.row(kind))
    if isinstance(entry, str):
        for kind, position, item in flat:
            if item.label == entry:
                return kind, position - len(shape.row(kind))
        labels = sorted({item.label for _, _, item in flat if item.label})
        raise ShapeError(
            f"{what}: {x.label!r} of shape {shape} has no axis labelled {entry!r}; expected a row name "
            f"(batch, input, output) or one of {labels} ({user_source().quoted()})"
        )
    raise ShapeError(
        f"{what}: expected axis as None, an int, a row name, (row, position), a label or a list of these, got {entry!r} "
        f"({user_source().quoted()})"
    )


def _specs(x: Tensor, rows: set[RowKind], positions: dict[RowKind, set[int]], what: str) -> Axes:
    full: dict[RowKind, RowSpec] = {}
    kept: dict[RowKind, RowSpec] = {}
    kept_dims: dict[RowKind, RowSpec] = {}
    removed: dict[RowKind, RowSpec] = {}
    names: list[str] = []
    for kind in MEMORY_ORDER:
        variable = f"{kind}"
        if kind in rows:
            full[kind], kept[kind], kept_dims[kind] = RowSpec(variable=variable), RowSpec(), RowSpec()
            removed[kind] = RowSpec(variable=variable)
            names.append(variable)
            continue
        wanted = positions[kind]
        n_lead = max((at + 1 for at in wanted if at >= 0), default=0)
        n_trail = max((-at for at in wanted if at < 0), default=0)
        if n_lead and n_trail:  # mixed signs: count everything from the end
            rank = len(solved_shape(x).row(kind))
            wanted = {at - rank if at >= 0 else at for at in wanted}
            n_lead, n_trail = 0, max(-at for at in wanted)
        lead = tuple(Name(f"{kind}{at}") for at in range(n_lead))
        trail = tuple(Name(f"{kind}_{n_trail - at}") for at in range(n_trail))
        gone = {lead[at].name for at in wanted if at >= 0} | {trail[at + n_trail].name for at in wanted if at < 0}
        names.extend(term.name for term in lead + trail if term.name in gone)

        def keep(terms: tuple[Name, ...], gone: set[str] = gone) -> tuple[AxisTerm, ...]:
            return tuple(term for term in terms if term.name not in gone)

        def one(terms: tuple[Name, ...], gone: set[str] = gone) -> tuple[AxisTerm, ...]:
            return tuple(Position(0) if term.name in gone else term for term in terms)

        full[kind] = RowSpec(lead, variable, trail)
        kept[kind] = RowSpec(keep(lead), variable, keep(trail))
        kept_dims[kind] = RowSpec(one(lead), variable, one(trail))
        removed[kind] = RowSpec(tuple(term for term in lead + trail if term.name in gone))

    def shape_spec(parts: dict[RowKind, RowSpec]) -> ShapeSpec:
        return ShapeSpec(parts["batch"], parts["input"], parts["output"])

    return Axes(shape_spec(full), shape_spec(kept), shape_spec(kept_dims), shape_spec(removed), tuple(names))


def last_axis(row: RowKind = "output", name: str = "class") -> tuple[ShapeSpec, ShapeSpec]:
    """Return (all rows with ``row``'s last axis named, the rows without it)."""
    with_axis = {kind: RowSpec(variable=kind) for kind in MEMORY_ORDER}
    with_axis[row] = RowSpec(variable=row, trailing=(Name(name),))
    return ShapeSpec(with_axis["batch"], with_axis["input"], with_axis["output"]), ALL_ROWS
