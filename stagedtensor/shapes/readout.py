"""Solved variables become shapes and extents: equal ones are one object, for a network has few different ones.

In: rows and sizes that the solver is done with. Out: ``Shape``, ``ScopeShapes`` and the user's lines behind a shape;
None for what is still unknown. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from stagedtensor.dims import MEMORY_ORDER, Axis, RowKind, Shape
from stagedtensor.errors import InternalError
from stagedtensor.node import Node
from stagedtensor.source import Source

from .equations import ScopeVariables
from .rows import Dim, Extent, Row
from .solution import ScopeShapes, sized_axis


class ReadOut:
    """Reads variables that change no more."""

    def __init__(self) -> None:
        self._axes: dict[tuple[Extent, str | None], Axis] = {}
        self._rows: dict[Row, tuple[Axis, ...] | None] = {}
        self._equal_rows: dict[tuple[Axis, ...], tuple[Axis, ...]] = {}
        self._shapes: dict[tuple[int, ...], Shape] = {}
        self._scopes: dict[Any, ScopeShapes] = {}
        self._extents: dict[Row, tuple[Extent, ...] | None] = {}

    def shape(self, rows: Mapping[RowKind, Row]) -> Shape | None:
        """Return the shape that three rows make up."""
        found: list[tuple[Axis, ...]] = []
        for kind in MEMORY_ORDER:
            axes = self._row(rows[kind].root)
            if axes is None:
                return None
            found.append(axes)
        key = tuple(map(id, found))
        shape = self._shapes.get(key)
        if shape is None:
            shape = self._shapes[key] = Shape(**dict(zip(MEMORY_ORDER, found, strict=True)))
        return shape

    def scope(self, variables: ScopeVariables) -> ScopeShapes | None:
        """Return the extents of a scope's variables."""
        names = _known(variables.names)
        anonymous = _known(variables.anonymous)
        if names is None or anonymous is None:
            return None
        rows: dict[str, tuple[Extent, ...]] = {}
        for name, row in variables.rows.items():
            extents = self._extents_of(row.root)
            if extents is None:
                return None
            rows[name] = extents
        key = (*names.items(), None, *rows.items(), None, *anonymous.items())
        shapes = self._scopes.get(key)
        if shapes is None:
            shapes = self._scopes[key] = ScopeShapes(names, rows, anonymous)
        return shapes

    def _row(self, row: Row) -> tuple[Axis, ...] | None:
        if row in self._rows:
            return self._rows[row]
        axes: tuple[Axis, ...] | None = None
        if row.dims is not None and all([dim.root.extent is not None for dim in row.dims]):
            axes = tuple([self._axis(dim.root) for dim in row.dims])
            axes = self._equal_rows.setdefault(axes, axes)
        self._rows[row] = axes
        return axes

    def _axis(self, dim: Dim) -> Axis:
        key = (extent_of(dim), dim.label)
        axis = self._axes.get(key)
        if axis is None:
            axis = self._axes[key] = sized_axis(*key)
        return axis

    def _extents_of(self, row: Row) -> tuple[Extent, ...] | None:
        if row in self._extents:
            return self._extents[row]
        axes = self._row(row)
        extents = self._extents[row] = None if axes is None else tuple([axis.dynamic or axis.size for axis in axes])
        return extents


def _known(dims: Mapping[Any, Dim]) -> dict[Any, Extent] | None:
    found: dict[Any, Extent] = {}
    for name, dim in dims.items():
        extent = dim.root.extent
        if extent is None:
            return None
        found[name] = extent
    return found


def extent_of(dim: Dim) -> Extent:
    """Return a size that is known."""
    extent = dim.root.extent
    if extent is None:
        raise InternalError("a size is still unknown after the shape solver finished")
    return extent


def origin(node: Node, rows: Mapping[RowKind, Row]) -> tuple[Source, ...]:
    """Return the user's lines that decided a shape, the node's own first."""
    reasons = [rows[kind].root.reason for kind in MEMORY_ORDER]
    reasons += [dim.root.reason for kind in MEMORY_ORDER for dim in rows[kind].root.dims or ()]
    sources: Iterable[Source] = (reason.source for reason in reasons if reason is not None)
    return tuple(dict.fromkeys((node.source, *sources)))
