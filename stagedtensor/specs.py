"""Index specs: how each tensor of one statement is indexed, before shapes are known.

A spec gives every operand and the result three rows of axis terms, each row with at most one row variable. Terms of one
spec that share a name share an iterator. The einsum parser, the pointwise operators and the contraction all speak
this form; ``shapes.projections`` resolves it once shapes are solved. Nothing here knows nodes or sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import TypeAlias

from .dims import MEMORY_ORDER, RowKind


@dataclass(frozen=True)
class Name:
    """An axis iterated under ``name``."""

    name: str


@dataclass(frozen=True)
class Position:
    """The axis is read (or written) at one fixed position, negative from its end.

    In a result this is an axis of size ``position + 1`` at least (1 for position 0).
    """

    position: int


@dataclass(frozen=True)
class Anonymous:
    """``_``: in an operand, an axis that is summed away under an anonymous name; in a result, an axis of size 1."""

    key: int


@dataclass(frozen=True)
class StaticIndex:
    """The axis is read at the position a static index (``st.index``) is bound to when the routine runs."""

    name: str
    size: int


@dataclass(frozen=True)
class Sliced:
    """The axis is indexed ``start + step * name`` with ``name`` running over ``size`` cells (None: to the end)."""

    name: str
    start: int
    size: int | None
    step: int = 1


@dataclass(frozen=True)
class Affine:
    """A convolution axis indexed ``stride * over + dilation * kernel`` (minus the left padding when padded)."""

    stride: int
    over: str
    dilation: int
    kernel: str
    padded: bool = False


@dataclass(frozen=True)
class Concat:
    """``a^b``: the axis is the concatenation of parts; an integer part is a plain size without a name."""

    parts: tuple[Name | int, ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Asked for again and again, and joining many tensors makes many parts."""
        return hash(self.parts)


@dataclass(frozen=True)
class Gathered:
    """The axis is indexed by the integer value of operand number ``operand`` of the same spec (clamped to range)."""

    operand: int


AxisTerm: TypeAlias = Name | Position | Anonymous | StaticIndex | Sliced | Affine | Concat | Gathered


@dataclass(frozen=True)
class RowSpec:
    """Axis terms before and after at most one row variable.

    ``flatten``: this row holds the same cells as the row variable's axes elsewhere in the spec, split another way
    (reshape): only the total size and the row-major order agree.
    """

    leading: tuple[AxisTerm, ...] = ()
    variable: str | None = None
    trailing: tuple[AxisTerm, ...] = ()
    flatten: bool = False

    @cached_property
    def terms(self) -> tuple[AxisTerm, ...]:
        """All terms, the row variable left out."""
        return self.leading + self.trailing

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Asked for with every statement that has the row, again and again."""
        return hash((self.leading, self.variable, self.trailing, self.flatten))


@dataclass(frozen=True)
class ShapeSpec:
    """One tensor's rows."""

    batch: RowSpec = RowSpec()
    input: RowSpec = RowSpec()
    output: RowSpec = RowSpec()

    def row(self, kind: RowKind) -> RowSpec:
        """Return one row by its kind."""
        row: RowSpec = getattr(self, kind)
        return row

    @cached_property
    def terms(self) -> tuple[AxisTerm, ...]:
        """All terms in memory order, row variables left out."""
        return tuple(term for kind in MEMORY_ORDER for term in self.row(kind).terms)

    @cached_property
    def static(self) -> tuple[StaticIndex, ...]:
        """The terms that are bound when a routine runs, in memory order."""
        return tuple(term for term in self.terms if isinstance(term, StaticIndex))

    @cached_property
    def gathered(self) -> tuple[Gathered, ...]:
        """The terms that are indexed by a tensor, in memory order."""
        return tuple(term for term in self.terms if isinstance(term, Gathered))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Like that of a row."""
        return hash((self.batch, self.input, self.output))


@dataclass(frozen=True)
class Spec:
    """All operands and the result of one statement.

    ``broadcast``: sizes of 1 and missing leading axes of a row variable's expansion adapt (pointwise, contraction);
    otherwise only what row variables say.
    """

    operands: tuple[ShapeSpec, ...]
    result: ShapeSpec
    broadcast: bool = False
    text: str = ""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Like that of a row."""
        return hash((self.operands, self.result, self.broadcast, self.text))


def _rows(batch: str | None, input_: str | None, output: str | None) -> ShapeSpec:
    return ShapeSpec(RowSpec(variable=batch), RowSpec(variable=input_), RowSpec(variable=output))


ALL_ROWS = _rows("batch", "input", "output")


@cache
def pointwise(arity: int) -> Spec:
    """``...|...->...; ... => ...|...->...`` with NumPy broadcasting, row by row, right-aligned."""
    return Spec((ALL_ROWS,) * arity, ALL_ROWS, broadcast=True)


FILL = Spec((), ALL_ROWS)
"""One value for every cell."""

CONTRACTION = Spec(
    (_rows("batch", "contracted", "output"), _rows("batch", "input", "contracted")),
    _rows("batch", "input", "output"),
    broadcast=True,
)
"""``a @ b``: the input row of a meets the output row of b."""


def with_row(kind: RowKind, row: RowSpec) -> ShapeSpec:
    """Return all rows as row variables of their own names, except ``kind``."""
    rows: dict[RowKind, RowSpec] = {name: RowSpec(variable=name) for name in MEMORY_ORDER}
    rows[kind] = row
    return ShapeSpec(rows["batch"], rows["input"], rows["output"])
