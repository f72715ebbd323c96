"""Constraints between rows and between sizes: splitting a row, and NumPy broadcasting of rows and sizes.

Each constraint's ``advance`` propagates what follows of necessity and returns the constraints that replace it, or None
while it still waits. ``uses`` says, for what is still unknown, which value this use would suggest; choosing among
suggestions is the solver's part. A size of 1 and an empty row suggest nothing while anything else does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from .rows import BROADCAST_HINT, Dim, Extent, Reason, Row, Unknowns, Where, distinct, distinct_dims


class RowUse(NamedTuple):
    """One use of an unknown row: the number of axes it suggests, None while that is not known.

    ``weak``: it suggests only axes of size 1 or none. ``neutral``: and only because the others are plain numbers.
    ``covers``: the row is written, so it must hold at least this.
    """

    row: Row
    rank: int | None
    weak: bool = False
    neutral: bool = False
    covers: bool = False


class DimUse(NamedTuple):
    """One use of an unknown size: the size (and unit) it suggests, None while that is not known."""

    dim: Dim
    extent: Extent | None
    reason: Reason | None
    where: Where
    label: str | None = None
    covers: bool = False

    @property
    def weak(self) -> bool:
        """Whether the suggestion is a size of 1, which fits anything."""
        return self.extent == 1


class Constraint(Protocol):
    """What the solver works on."""

    def mentions(self) -> Iterator[Row | Dim]:
        """Yield every variable that ``advance`` and ``uses`` look at, as far as they are known."""

    def advance(self, unknowns: Unknowns) -> Sequence[Constraint] | None:
        """Propagate; return replacements when finished, None to be called again."""

    def uses(self) -> Iterator[RowUse | DimUse]:
        """Yield suggestions for what is unknown."""

    def results(self) -> Iterator[Row | Dim]:
        """Yield what this constraint computes from other unknowns (chosen only after those)."""


def _waiting(constraints: Iterable[Constraint], unknowns: Unknowns) -> list[Constraint]:
    """Advance constraints between sizes; return those that wait for more: most have nothing to wait for."""
    return [constraint for constraint in constraints if constraint.advance(unknowns) is None]


class Plain:
    """A constraint that suggests nothing."""

    def uses(self) -> Iterator[RowUse | DimUse]:
        """Yield nothing."""
        return iter(())

    def results(self) -> Iterator[Row | Dim]:
        """Yield nothing."""
        return iter(())


@dataclass(eq=False)
class RowSplit(Plain):
    """``row = leading ++ middle ++ trailing``."""

    row: Row
    leading: tuple[Dim, ...]
    middle: Row
    trailing: tuple[Dim, ...]
    owner: str
    where: Where

    def mentions(self) -> Iterator[Row | Dim]:
        """Yield both rows."""
        yield self.row
        yield self.middle

    def advance(self, unknowns: Unknowns) -> Sequence[Constraint] | None:
        """Split a known row, or assemble a known middle."""
        row, middle = self.row.root, self.middle.root
        before, after = len(self.leading), len(self.trailing)
        if row.dims is not None:
            if len(row.dims) < before + after:
                raise self.where.error(
                    f"the {self.where.row} row of {self.owner} has {len(row.dims)} axes, "
                    f"at least {before + after} {'is' if before + after == 1 else 'are'} needed",
                    [(str(row), row.reason)],
                    "add the missing axes or name fewer in the spec",
                )
            end = len(row.dims) - after
            for term, dim in zip(self.leading + self.trailing, row.dims[:before] + row.dims[end:], strict=True):
                unknowns.unify(dim, term, self.where)
            unknowns.bind(middle, row.dims[before:end], row.reason, self.where)
            return ()
        if middle.dims is not None:
            unknowns.bind(row, self.leading + middle.dims + self.trailing, middle.reason, self.where)
            return ()
        return None

    def results(self) -> Iterator[Row | Dim]:
        """The middle is a part of the row: never chosen on its own before the row."""
        yield self.middle.root


@dataclass(eq=False)
class RowJoin:
    """``result`` is the broadcast of the operands' rows.

    ``neutral[i]``: operand i is a plain number. ``silent[i]``: operand i is a gradient, whose readers (clipping,
    optimizers) say nothing of its parameter's shape.
    """

    operands: tuple[Row, ...]
    neutral: tuple[bool, ...]
    result: Row
    where: Where
    passed: Row | None = None
    silent: tuple[bool, ...] = ()

    def mentions(self) -> Iterator[Row | Dim]:
        """Yield all rows; axes of size 1 suggest less than others, so the axes of known operands too."""
        yield from self.operands
        yield self.result
        for row in self.operands:
            yield from row.root.dims or ()

    def advance(self, unknowns: Unknowns) -> Sequence[Constraint] | None:
        """Infer numbers of axes; hand over to one ``DimJoin`` per axis when all are known."""
        if self.passed is not None:
            return None if self.passed.root.dims is None else ()
        rows = distinct(self.operands)
        result = self.result.root
        unknown = [row for row in rows if row.dims is None]
        ranks = [len(row.dims) for row in rows if row.dims is not None]
        longest = max(ranks, default=0)
        if len(rows) == 1 or (len(unknown) == 1 and longest == 0):
            self.passed = unknown[0] if unknown else rows[0]
            unknowns.unify_rows(result, self.passed, self.where)
            return None if self.passed.root.dims is None else ()
        if result.dims is not None and (longest > len(result.dims) or (not unknown and longest < len(result.dims))):
            raise self._widened(result, rows)
        if not unknown:
            if result.dims is None:
                unknowns.bind(result, tuple(Dim() for _ in range(longest)), None, self.where)
            return _waiting(self._axes(rows, result.root), unknowns)
        if result.dims is not None and len(unknown) == 1 and longest < len(result.dims):
            unknowns.bind(unknown[0], tuple(Dim() for _ in result.dims), result.reason, self.where)
        return None

    def _axes(self, rows: list[Row], result: Row) -> Iterator[Constraint]:
        for place in range(1, len(result.dims or ()) + 1):
            dims = tuple([row.dims[-place] for row in rows if row.dims is not None and len(row.dims) >= place])
            yield DimJoin(dims, (result.dims or ())[-place], self.where)

    def _widened(self, result: Row, rows: list[Row]) -> Exception:
        return self.where.error(
            f"the {self.where.row} row of the result is {result} elsewhere, its operands give another number of axes",
            [(str(row), row.reason) for row in [result, *rows]],
            "a result has exactly the axes of its operands; a later use broadcasts it but never widens it",
        )

    def uses(self) -> Iterator[RowUse | DimUse]:
        """An unknown operand takes the join of the others, or else what the result is used as."""
        gradients = {row.root for row, flag in zip(self.operands, self.silent, strict=False) if flag}
        gradients -= {row.root for row, flag in zip(self.operands, self.silent, strict=False) if not flag}
        if self.passed is not None:
            passed = self.passed.root
            if passed in gradients:
                return
            empty = [flag for row, flag in zip(self.operands, self.neutral, strict=True) if row.root is not passed]
            if passed.dims is None and empty:
                yield RowUse(passed, 0, weak=True, neutral=all(empty))
            return
        pairs = [(row.root, flag) for row, flag in zip(self.operands, self.neutral, strict=True)]
        result = self.result.root
        for row in distinct([row for row, _ in pairs]):
            if row.dims is not None or row in gradients:
                continue
            others = [pair for pair in pairs if pair[0] is not row]
            known = [other.dims for other, _ in others if other.dims is not None]
            if len(known) == len(others):
                weak = all(dim.root.extent == 1 for dims in known for dim in dims)
                yield RowUse(row, max(map(len, known)), weak=weak, neutral=all(plain for _, plain in others))
            else:
                yield RowUse(row, None if result.dims is None else len(result.dims))

    def results(self) -> Iterator[Row | Dim]:
        """The broadcast result, unless it simply is one of the operands."""
        if self.passed is None:
            yield self.result.root


@dataclass(eq=False)
class RowFits(Plain):
    """An assignment: the operand's row broadcasts to the target's and never widens it.

    ``opens``: the target is a cell or state, whose open rows its assignments may determine.
    """

    operand: Row
    target: Row
    where: Where
    opens: bool = True

    def mentions(self) -> Iterator[Row | Dim]:
        """Yield both rows."""
        yield self.operand
        yield self.target

    def advance(self, unknowns: Unknowns) -> Sequence[Constraint] | None:
        """Wait for both rows, then hand over to one ``DimFits`` per axis of the operand."""
        operand, target = self.operand.root, self.target.root
        if operand is target:
            return ()
        if operand.dims is None or target.dims is None:
            return None
        if len(operand.dims) > len(target.dims):
            raise self.where.error(
                f"the {self.where.row} row {operand} does not fit into the assigned {target}",
                [(str(operand), operand.reason), (str(target), target.reason)],
                "an assignment never widens its target; reduce the operand or declare the target with these axes",
            )
        pairs = zip(reversed(operand.dims), reversed(target.dims), strict=False)
        return _waiting((DimFits(small, large, self.where, self.opens) for small, large in pairs), unknowns)

    def uses(self) -> Iterator[RowUse | DimUse]:
        """An unknown operand takes the target's row; an open target must hold its operands."""
        operand, target = self.operand.root, self.target.root
        if operand is target:
            return
        if operand.dims is None:
            yield RowUse(operand, None if target.dims is None else len(target.dims))
        if target.dims is None and self.opens:
            yield RowUse(target, None if operand.dims is None else len(operand.dims), covers=True)


@dataclass(eq=False)
class DimJoin:
    """``result`` is the broadcast of the operands' sizes: equal, or 1."""

    operands: tuple[Dim, ...]
    result: Dim
    where: Where
    passed: Dim | None = None

    def mentions(self) -> Iterator[Row | Dim]:
        """Yield all sizes."""
        yield from self.operands
        yield self.result

    def advance(self, unknowns: Unknowns) -> Sequence[Constraint] | None:
        """Infer sizes from each other; units go along."""
        for dim in self.operands:
            root = dim.root
            if root.label is not None:
                unknowns.set_label(self.result, root.label, root.label_reason, self.where)
        if self.passed is not None:
            return None if self.passed.root.extent is None else ()
        dims = distinct_dims(self.operands)
        unknown = [dim for dim in dims if dim.extent is None]
        wide = [dim for dim in dims if dim.extent is not None and dim.extent != 1]
        if len(dims) == 1 or (len(unknown) == 1 and not wide):
            self.passed = unknown[0] if unknown else dims[0]
            unknowns.unify(self.result, self.passed, self.where)
            return None if self.passed.root.extent is None else ()
        for dim in wide[1:]:
            if dim.extent != wide[0].extent:
                raise self.where.error(
                    f"sizes {wide[0].extent} and {dim.extent} do not broadcast in the {self.where.row} row",
                    [(str(side.extent), side.reason) for side in (wide[0], dim)],
                    BROADCAST_HINT,
                )
        if wide:
            unknowns.copy_extent(self.result, wide[0], self.where, BROADCAST_HINT)
        elif not unknown:
            unknowns.set_extent(self.result, 1, dims[0].reason, self.where, BROADCAST_HINT)
        elif self.result.root.extent == 1:
            for dim in unknown:
                unknowns.set_extent(dim, 1, self.result.root.reason, self.where, BROADCAST_HINT)
        return None if any(dim.extent is None for dim in distinct_dims(self.operands)) else ()

    def uses(self) -> Iterator[RowUse | DimUse]:
        """An unknown operand takes the join of the others, or else what the result is used as."""
        if self.passed is not None:
            ones = [dim.root for dim in self.operands if dim.root is not self.passed.root]
            if self.passed.root.extent is None and ones:
                yield DimUse(self.passed.root, 1, ones[0].reason, self.where)
            return
        dims, result = distinct_dims(self.operands), self.result.root
        for dim in dims:
            if dim.extent is not None:
                continue
            others = [other for other in dims if other is not dim]
            if all(other.extent is not None for other in others):
                found = next((other for other in others if other.extent != 1), others[0])
            else:
                found = result
            yield DimUse(dim, found.extent, found.reason, self.where, label=result.label)

    def results(self) -> Iterator[Row | Dim]:
        """The broadcast result, unless it simply is one of the operands."""
        if self.passed is None:
            yield self.result.root


@dataclass(eq=False)
class DimFits(Plain):
    """The operand's size is 1 or the target's."""

    operand: Dim
    target: Dim
    where: Where
    opens: bool = True

    def mentions(self) -> Iterator[Row | Dim]:
        """Yield both sizes."""
        yield self.operand
        yield self.target

    def advance(self, unknowns: Unknowns) -> Sequence[Constraint] | None:
        """Infer the target from a size other than 1, the operand from a target of 1."""
        operand, target = self.operand.root, self.target.root
        for one, other in ((operand, target), (target, operand)):
            if one.label is not None and other.label is not None:
                unknowns.set_label(other, one.label, one.label_reason, self.where)
        hint = "an assignment never widens its target; reduce the operand or declare the target with this size"
        if operand.extent is not None and operand.extent != 1:
            unknowns.set_extent(target, operand.extent, operand.reason, self.where, hint)
            return ()
        if target.extent == 1:
            unknowns.set_extent(operand, 1, target.reason, self.where, hint)
            return ()
        return None if operand.extent is None or target.extent is None else ()

    def uses(self) -> Iterator[RowUse | DimUse]:
        """An unknown operand takes the target's size; an open target must hold its operands."""
        operand, target = self.operand.root, self.target.root
        if operand.extent is None:
            yield DimUse(operand, target.extent, target.reason, self.where, label=target.label)
        if target.extent is None and self.opens:
            yield DimUse(target, operand.extent, operand.reason, self.where, label=operand.label, covers=True)
