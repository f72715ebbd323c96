"""The axes of one access: each memory axis of the node with the term, or the place in a row variable, that indexes it.

In: an ``Access`` and solved shapes. Out: ``AxisUse`` records in memory order. It assigns no iterators.
"""

from __future__ import annotations

from dataclasses import dataclass

from stagedtensor.dims import MEMORY_ORDER, Axis
from stagedtensor.errors import InternalError
from stagedtensor.specs import AxisTerm
from stagedtensor.statements import Access

from .index import Extent
from .solution import ShapeSolution


@dataclass(frozen=True)
class VariableAxis:
    """An axis of a row variable's expansion: ``place`` counts from 1 at the right end.

    ``sizes`` are the extents of the whole expansion in this tensor; ``flat``: the same cells split another way.
    """

    variable: str
    place: int
    sizes: tuple[Extent, ...]
    flat: bool


@dataclass(frozen=True)
class AxisUse:
    """One memory axis and what indexes it."""

    axis: Axis
    source: AxisTerm | VariableAxis


def axis_extent(axis: Axis) -> Extent:
    """Return the run-time extent of an axis, or its size."""
    return axis.dynamic or axis.size


def axis_uses(access: Access, solution: ShapeSolution) -> list[AxisUse]:
    """Return what indexes each memory axis of an access."""
    shape = solution.shape(access.node)
    uses: list[AxisUse] = []
    for kind in MEMORY_ORDER:
        axes, row = shape.row(kind), access.rows.row(kind)
        before, after = len(row.leading), len(row.trailing)
        middle = axes[before : len(axes) - after]
        if len(axes) < before + after or (middle and row.variable is None):
            raise InternalError(
                f"the {kind} row of {access.node!r} has {len(axes)} axes, the spec has {before + after}"
            )
        uses += [AxisUse(axis, term) for axis, term in zip(axes, row.leading, strict=False)]
        if row.variable is not None:
            sizes = tuple(map(axis_extent, middle))
            places = range(len(middle), 0, -1)
            uses += [
                AxisUse(axis, VariableAxis(row.variable, place, sizes, row.flatten))
                for axis, place in zip(middle, places, strict=True)
            ]
        uses += [AxisUse(axis, term) for axis, term in zip(axes[len(axes) - after :], row.trailing, strict=True)]
    return uses
