"""The constraints that wait, and those among them that have something new to look at.

In: constraints. Out: what follows of necessity, propagated until nothing changes. A constraint is looked at again when
a variable that it mentions has changed, not otherwise, so that the work grows with the graph and not with its square.
``stirred`` collects the variables whose uses may suggest something else than before. Chooses nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from .constraints import Constraint
from .rows import Dim, Row, Unknowns

Order: TypeAlias = tuple[int, ...]
"""The place of a constraint among all: what replaces one stands in its place."""


class WorkList:
    """Constraints with their order; ``unknowns`` says which of them to look at again."""

    def __init__(self, unknowns: Unknowns) -> None:
        self.unknowns = unknowns
        self.waiting: dict[Constraint, Order] = {}
        self.stirred: dict[Row | Dim, None] = {}
        self._pending: dict[Constraint, None] = {}
        self._watching: set[Constraint] = set()
        """Those that were looked at and are noted with their variables."""
        self._count = 0

    def add(self, constraints: Iterable[Constraint]) -> None:
        """Take new constraints, behind those that are there."""
        for constraint in constraints:
            self._take(constraint, (self._count,))
            self._count += 1

    def _take(self, constraint: Constraint, order: Order) -> None:
        self.waiting[constraint] = order
        self._pending[constraint] = None

    def propagate(self) -> None:
        """Advance every constraint that has something to look at, first come, first served."""
        unknowns = self.unknowns
        self._wake()
        while self._pending:
            constraint = next(iter(self._pending))
            del self._pending[constraint]
            order = self.waiting.get(constraint)
            if order is None:
                continue
            replaced = constraint.advance(unknowns)
            if replaced is None:
                self._watching.add(constraint)
                for variable in constraint.mentions():
                    root = variable.root
                    self.stirred[root] = None
                    root.watchers[constraint] = None
            else:
                del self.waiting[constraint]
                for place, new in enumerate(replaced):
                    self._take(new, (*order, place))
                if constraint in self._watching:
                    self._watching.remove(constraint)
                    for variable in constraint.mentions():
                        root = variable.root
                        self.stirred[root] = None
                        root.watchers.pop(constraint, None)
            self._wake()

    def _wake(self) -> None:
        unknowns = self.unknowns
        if unknowns.woken:
            self._pending.update(unknowns.woken)
            unknowns.woken = {}
        if unknowns.changed:
            self.stirred.update(unknowns.changed)
            unknowns.changed = {}

    def watchers(self, variable: Row | Dim) -> list[Constraint]:
        """Return the constraints that wait for a variable, in their order."""
        found = [constraint for constraint in variable.root.watchers if constraint in self.waiting]
        return sorted(found, key=self.waiting.__getitem__)

    def ordered(self) -> list[Constraint]:
        """Return all constraints that wait, in their order."""
        return sorted(self.waiting, key=self.waiting.__getitem__)
