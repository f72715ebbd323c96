"""Unknown sizes and rows: union-find variables that remember why they are what they are.

In: equalities between sizes (``Dim``) and between rows (``Row``), each with the place that demands it. Out: the
variables' values, or a ``ShapeError`` that names both sides. Whoever waits for a variable is noted with it, and every
change says who has something to look at. Knows nothing of nodes, specs or broadcasting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from stagedtensor.dims import DynamicDim
from stagedtensor.errors import ShapeError
from stagedtensor.source import Source

Extent: TypeAlias = int | DynamicDim


@dataclass(frozen=True)
class Reason:
    """Why a size, label or row is what it is: ``declared for 'w' (output row, axis -1)`` and the user's line."""

    text: str
    source: Source

    def __str__(self) -> str:
        return f"{self.text}, {self.source.quoted()}"


class Where(NamedTuple):
    """The place that demands something: an op's label, the user's line, which row of it, which term of a spec."""

    label: str
    source: Source
    row: str = ""
    term: str = ""

    @property
    def reason(self) -> Reason:
        """This place as a reason."""
        return Reason(f"result of {self.label}", self.source)

    def error(self, problem: str, sides: Sequence[tuple[str, Reason | None]], hint: str) -> ShapeError:
        """Build the error of this place: the problem, where it is, each side with its reason, what to do."""
        lines = [f"{self.label}: {problem}", f"  {self.source.quoted()}"]
        lines += [f"  {side}: {reason}" if reason else f"  {side}" for side, reason in sides]
        return ShapeError("\n".join([*lines, f"  hint: {hint}"]))


class Dim:
    """The size of one axis. ``minimum`` is the least size that fixed positions on it need."""

    __slots__ = ("_link", "extent", "label", "label_reason", "minimum", "reason", "watchers")

    def __init__(self) -> None:
        self._link: Dim | None = None
        self.extent: Extent | None = None
        self.reason: Reason | None = None
        self.label: str | None = None
        self.label_reason: Reason | None = None
        self.minimum = 0
        self.watchers: dict[Any, None] = {}
        """Of the representative: who waits for it."""

    @property
    def root(self) -> Dim:
        """The representative of everything known to be equal."""
        dim = self
        while dim._link is not None:
            if dim._link._link is not None:
                dim._link = dim._link._link
            dim = dim._link
        return dim

    def __str__(self) -> str:
        root = self.root
        return "?" if root.extent is None else str(root.extent)


class Row:
    """One row: unknown (``dims`` None) or a tuple of sizes."""

    __slots__ = ("_link", "dims", "place", "reason", "watchers")

    def __init__(self, dims: tuple[Dim, ...] | None = None, reason: Reason | None = None) -> None:
        self._link: Row | None = None
        self.dims = dims
        self.reason = reason
        self.place: tuple[int, Where] | None = None
        """Of the representative: the first node it belongs to, by the node's number."""
        self.watchers: dict[Any, None] = {}
        """Of the representative: who waits for it."""

    @property
    def root(self) -> Row:
        """The representative of everything known to be equal."""
        row = self
        while row._link is not None:
            if row._link._link is not None:
                row._link = row._link._link
            row = row._link
        return row

    def __str__(self) -> str:
        dims = self.root.dims
        return "(unknown)" if dims is None else f"({', '.join(map(str, dims))})"


def distinct(unknowns: Sequence[Row]) -> list[Row]:
    """Return the representatives without repeats, in order."""
    return list(dict.fromkeys(row.root for row in unknowns))


def distinct_dims(unknowns: Sequence[Dim]) -> list[Dim]:
    """Return the representatives without repeats, in order."""
    return list(dict.fromkeys(dim.root for dim in unknowns))


BROADCAST_HINT = (
    "sizes must be equal or 1, aligned at the right end of each row; reshape or permute one side, or correct its size"
)
EQUAL_HINT = "make the sizes equal; a spec broadcasts nothing, a size of 1 included"


class Unknowns:
    """Every change of a variable goes through here.

    ``changed`` collects the variables, ``woken`` their watchers. Two variables that become one tell only those
    something who watch both, or who watched the one that knew less.
    """

    def __init__(self) -> None:
        self.woken: dict[Any, None] = {}
        self.changed: dict[Dim | Row, None] = {}

    def _learn(self, root: Dim | Row) -> None:
        self.woken.update(root.watchers)
        self.changed[root] = None

    def _join(self, kept: Dim | Row, given_up: Dim | Row) -> None:
        """Note who watches what two variables have become."""
        few, many = sorted((kept.watchers, given_up.watchers), key=len)
        self.woken.update(dict.fromkeys(watcher for watcher in few if watcher in many))
        many.update(few)
        kept.watchers, given_up.watchers = many, {}
        self.changed[kept] = self.changed[given_up] = None

    def set_extent(self, dim: Dim, extent: Extent, reason: Reason | None, where: Where, hint: str = EQUAL_HINT) -> None:
        """Give a size its value; a different earlier value is a ``ShapeError``."""
        root = dim.root
        if root.extent is None:
            root.extent, root.reason = extent, reason or where.reason
            self._learn(root)
        elif root.extent != extent:
            raise where.error(
                f"sizes {root.extent} and {extent} do not fit{_in_row(where)}",
                [(str(root.extent), root.reason), (str(extent), reason)],
                hint,
            )

    def copy_extent(self, dim: Dim, source: Dim, where: Where, hint: str = EQUAL_HINT) -> None:
        """Give a size the value of another, with its reason, if that is known."""
        known = source.root
        if known.extent is not None:
            self.set_extent(dim, known.extent, known.reason, where, hint)

    def set_label(self, dim: Dim, label: str, reason: Reason | None, where: Where) -> None:
        """Give an axis its unit; a different earlier unit is a ``ShapeError``."""
        root = dim.root
        if root.label is None:
            root.label, root.label_reason = label, reason
            self._learn(root)
        elif root.label != label:
            raise where.error(
                f"axes labelled {root.label!r} and {label!r} do not go together{_in_row(where)}",
                [(repr(root.label), root.label_reason), (repr(label), reason)],
                "axes with different labels never unify; relabel one of them or line the axes up",
            )

    def require(self, dim: Dim, minimum: int) -> None:
        """Ask for at least ``minimum`` cells."""
        root = dim.root
        root.minimum = max(root.minimum, minimum)

    def unify(self, lhs: Dim, rhs: Dim, where: Where) -> None:
        """Make two sizes one."""
        lhs, rhs = lhs.root, rhs.root
        if lhs is rhs:
            return
        if rhs.extent is not None:
            self.set_extent(lhs, rhs.extent, rhs.reason, where)
        if rhs.label is not None:
            self.set_label(lhs, rhs.label, rhs.label_reason, where)
        if (lhs.extent is not None and rhs.extent is None) or (lhs.label is not None and rhs.label is None):
            self._learn(rhs)
        lhs.minimum = max(lhs.minimum, rhs.minimum)
        rhs._link = lhs
        self._join(lhs, rhs)

    def unify_rows(self, lhs: Row, rhs: Row, where: Where) -> None:
        """Make two rows one, axis by axis."""
        lhs, rhs = lhs.root, rhs.root
        if lhs is rhs:
            return
        if lhs.dims is None:
            lhs, rhs = rhs, lhs
        if lhs.dims is not None and rhs.dims is not None:
            if len(lhs.dims) != len(rhs.dims):
                raise where.error(
                    f"rows {lhs} and {rhs} differ in their number of axes{_in_row(where)}",
                    [(str(lhs), lhs.reason), (str(rhs), rhs.reason)],
                    "give both sides the same axes, or reshape one of them",
                )
            for left, right in zip(lhs.dims, rhs.dims, strict=True):
                self.unify(left, right, where)
        elif lhs.dims is not None:
            self._learn(rhs)
        if rhs.place is not None and (lhs.place is None or rhs.place[0] < lhs.place[0]):
            lhs.place = rhs.place
        rhs._link = lhs
        self._join(lhs, rhs)

    def bind(self, row: Row, dims: tuple[Dim, ...], reason: Reason | None, where: Where) -> None:
        """Give a row its axes."""
        self.unify_rows(row, Row(dims, reason or where.reason), where)


def _in_row(where: Where) -> str:
    index = f" at index {where.term!r}" if where.term else ""
    return f"{index} in the {where.row} row" if where.row else index
