"""Axis sizes, rows and solved shapes.

A shape has three rows, ``batch | input -> output``; memory order is batch, output, input. *Declared* shapes are what
the user wrote on a terminal (sizes and whole rows may be left open); *solved* shapes are what the shape solver found.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

RowKind: TypeAlias = Literal["batch", "input", "output"]
PRINT_ORDER: tuple[RowKind, ...] = ("batch", "input", "output")
MEMORY_ORDER: tuple[RowKind, ...] = ("batch", "output", "input")


@dataclass(frozen=True)
class DynamicDim:
    """A run-time extent up to ``max`` (``st.dynamic``); memory is laid out for ``max``."""

    name: str
    max: int

    def __str__(self) -> str:
        return f"{self.name}<={self.max}"


@dataclass(frozen=True)
class Index:
    """A static index (``st.index``): an integer bound when a routine runs (``ctx.run(routine, i=3)``)."""

    name: str
    size: int


@dataclass(frozen=True)
class CapturedDim:
    """A symbolic size handed out by ``einsum(..., capture=[...])``: the solver's variable ``key``.

    ``anchor`` is the result node of that einsum: a shape that uses the size is solved together with it.
    """

    name: str
    key: int
    anchor: object = field(default=None, compare=False, repr=False)


Size: TypeAlias = int | DynamicDim | CapturedDim | None


@dataclass(frozen=True)
class DeclaredAxis:
    """An axis as written: ``size`` None is inferred; ``label`` is a unit that never unifies with another."""

    size: Size
    label: str | None = None


@dataclass(frozen=True)
class DeclaredRow:
    """A row as written; an open row may take any axes from use."""

    axes: tuple[DeclaredAxis, ...] = ()
    open: bool = False


@dataclass(frozen=True)
class DeclaredShape:
    """The three rows as written on a terminal."""

    batch: DeclaredRow = DeclaredRow()
    input: DeclaredRow = DeclaredRow()
    output: DeclaredRow = DeclaredRow()

    def row(self, kind: RowKind) -> DeclaredRow:
        """Return one row by its kind."""
        row: DeclaredRow = getattr(self, kind)
        return row


@dataclass(frozen=True)
class Axis:
    """A solved axis. ``size`` is the allocated size (the maximum of a dynamic extent)."""

    size: int
    label: str | None = None
    dynamic: DynamicDim | None = None

    @property
    def is_one(self) -> bool:
        """Whether it has one cell at every run, so that it broadcasts; no dynamic extent does, whatever its maximum."""
        return self.size == 1 and self.dynamic is None

    def __str__(self) -> str:
        return str(self.dynamic) if self.dynamic else str(self.size)


@dataclass(frozen=True)
class Shape:
    """A solved shape; ``str`` gives ``32 | 784 -> 10``, ``dims`` the sizes in memory order."""

    batch: tuple[Axis, ...] = ()
    input: tuple[Axis, ...] = ()
    output: tuple[Axis, ...] = ()

    def row(self, kind: RowKind) -> tuple[Axis, ...]:
        """Return one row by its kind."""
        row: tuple[Axis, ...] = getattr(self, kind)
        return row

    def axes(self) -> Iterator[tuple[RowKind, int, Axis]]:
        """Yield (row kind, position in the row, axis) in memory order."""
        for kind in MEMORY_ORDER:
            for position, axis in enumerate(self.row(kind)):
                yield kind, position, axis

    @property
    def dims(self) -> tuple[int, ...]:
        """Allocated sizes in memory order (batch, output, input)."""
        return tuple(axis.size for _, _, axis in self.axes())

    @property
    def size(self) -> int:
        """Number of allocated cells."""
        count = 1
        for dim in self.dims:
            count *= dim
        return count

    def __str__(self) -> str:
        def text(row: tuple[Axis, ...]) -> str:
            return ",".join(map(str, row))

        parts = f"{text(self.batch)} | " if self.batch else ""
        parts += f"{text(self.input)} -> ".lstrip() if self.input or self.batch else ""
        return (parts + text(self.output)).strip() if (self.batch or self.input or self.output) else "()"
