"""How a buffer's logical indices map to memory: steps that split, reorder and pad axes, row-major after them.

In: a logical shape or logical indices, of any type (arrays in the interpreter, text or expressions in emission). Out:
the memory shape and indices. Code always speaks of logical indices; a layout is applied by whoever touches memory.

>>> layout = Layout((Pad(1, 4), Split(1, 4), Reorder((1, 0, 2))))
>>> layout.physical_shape((3, 10)), layout.addressable((3, 10))
((3, 3, 4), (3, 12))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

Index = TypeVar("Index")


@dataclass(frozen=True)
class Split:
    """Layout step: axis -> (axis // factor, axis % factor)."""

    axis: int
    factor: int


@dataclass(frozen=True)
class Reorder:
    """Layout step: memory axes in the order given."""

    order: tuple[int, ...]


@dataclass(frozen=True)
class Pad:
    """Layout step: the axis grows to a multiple; cells beyond the logical extent hold ``fill``."""

    axis: int
    multiple: int
    fill: float = 0.0


@dataclass(frozen=True)
class Layout:
    """How logical indices map to memory: row-major after the steps. No steps: plain row-major."""

    steps: tuple[Split | Reorder | Pad, ...] = ()

    def physical_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the memory shape of a buffer of logical ``shape``."""
        for step in self.steps:
            if isinstance(step, Split):
                size = shape[step.axis]
                outer = -(-size // step.factor)
                shape = (*shape[: step.axis], outer, step.factor, *shape[step.axis + 1 :])
            elif isinstance(step, Reorder):
                shape = tuple(shape[axis] for axis in step.order)
            else:
                size = shape[step.axis]
                padded = -(-size // step.multiple) * step.multiple
                shape = (*shape[: step.axis], padded, *shape[step.axis + 1 :])
        return shape

    def addressable(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the extents that logical indices may reach: ``shape`` grown by what pads and uneven splits add."""
        extents = list(shape)
        # Per memory axis: which logical axis it leads (so that its growth is growth of that axis) and in what unit.
        leads: list[tuple[int, int] | None] = [(axis, 1) for axis in range(len(shape))]
        memory = shape
        for step in self.steps:
            if isinstance(step, Reorder):
                leads = [leads[axis] for axis in step.order]
            memory = Layout((step,)).physical_shape(memory)
            if isinstance(step, Split):
                lead = leads[step.axis]
                leads[step.axis : step.axis + 1] = [lead and (lead[0], lead[1] * step.factor), None]
            if not isinstance(step, Reorder):
                lead = leads[step.axis]
                if lead is not None:
                    extents[lead[0]] = memory[step.axis] * lead[1]
        return tuple(extents)

    def memory_indices(
        self, indices: tuple[Index, ...], split: Callable[[Index, int], tuple[Index, Index]]
    ) -> tuple[Index, ...]:
        """Map logical indices to memory axes; ``split(index, factor)`` gives quotient and remainder."""
        for step in self.steps:
            if isinstance(step, Split):
                parts = split(indices[step.axis], step.factor)
                indices = (*indices[: step.axis], *parts, *indices[step.axis + 1 :])
            elif isinstance(step, Reorder):
                indices = tuple(indices[axis] for axis in step.order)
        return indices


ROW_MAJOR = Layout()
