"""What the uses of unknown rows and sizes suggest, kept up to date as constraints advance.

In: variables that were stirred. Out: those that can be chosen next: terminals before results, complete agreement before
partial. Chooses nothing itself; a row is chosen by its number of axes, a size by the use all agree on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from .constraints import DimUse, RowUse
from .rows import Dim, Row
from .worklist import WorkList

Variable = TypeVar("Variable", Row, Dim)
Value = TypeVar("Value")
Use = TypeVar("Use", RowUse, DimUse)


class Stages(Generic[Variable, Value]):
    """Variables that can be chosen, in the four stages of choosing."""

    def __init__(self) -> None:
        self._stages: tuple[dict[Variable, Value], ...] = ({}, {}, {}, {})
        self._stage: dict[Variable, int] = {}

    def drop(self, variable: Variable) -> None:
        """Forget a variable."""
        stage = self._stage.pop(variable, None)
        if stage is not None:
            del self._stages[stage][variable]

    def put(self, variable: Variable, value: Value, *, is_result: bool, complete: bool) -> None:
        """Note what a variable would be: agreed by all its uses (``complete``) or by those that say anything."""
        self.drop(variable)
        stage = 2 * (not complete) + is_result
        self._stage[variable] = stage
        self._stages[stage][variable] = value

    def first(self) -> dict[Variable, Value]:
        """Return what the first stage that has anything holds."""
        return dict(next(filter(None, self._stages), {}))


@dataclass(frozen=True)
class Clash:
    """Two uses of a size that do not agree."""

    first: DimUse
    other: DimUse


class Choices:
    """The rows and sizes that can be chosen next."""

    def __init__(self, work: WorkList) -> None:
        self.rows: Stages[Row, int] = Stages()
        self.dims: Stages[Dim, DimUse | Clash] = Stages()
        self._work = work

    def refresh(self) -> None:
        """Look again at what was stirred."""
        stirred, self._work.stirred = self._work.stirred, {}
        for variable in stirred:
            if isinstance(variable, Row):
                self.rows.drop(variable)
                if variable.root is variable and variable.dims is None:
                    self._note(self.rows, variable, self._uses_of_row(variable), meet_of_ranks)
            else:
                self.dims.drop(variable)
                if variable.root is variable and variable.extent is None:
                    self._note(self.dims, variable, self._uses_of_dim(variable), meet_of_sizes)

    def _uses_of_row(self, row: Row) -> list[RowUse]:
        uses = (use for constraint in self._work.watchers(row) for use in constraint.uses())
        return [use for use in uses if isinstance(use, RowUse) and use.row.root is row]

    def _uses_of_dim(self, dim: Dim) -> list[DimUse]:
        uses = (use for constraint in self._work.watchers(dim) for use in constraint.uses())
        return [use for use in uses if isinstance(use, DimUse) and use.dim.root is dim]

    def _note(
        self,
        stages: Stages[Variable, Value],
        variable: Variable,
        uses: Sequence[Use],
        meet: Callable[[Sequence[Use], bool], Value | None],
    ) -> None:
        """Put what all ``uses`` of a variable agree on, else what those do that say anything."""
        for complete in (True, False) if uses else ():
            agreed = meet(uses, complete)
            if agreed is not None:
                watchers = self._work.watchers(variable)
                is_result = any(variable is result for constraint in watchers for result in constraint.results())
                stages.put(variable, agreed, is_result=is_result, complete=complete)
                return


def meet_of_ranks(uses: Sequence[RowUse], complete: bool) -> int | None:
    """Return the number of axes that uses of a row suggest; with ``complete`` only where every use suggests one."""
    covers = [use for use in uses if use.covers]
    relevant = covers or uses
    if complete and any(use.rank is None for use in relevant):
        return None
    ranks = [use.rank for use in relevant if use.rank is not None and (use.covers or not use.weak)]
    if not ranks:
        return None
    return max(ranks) if covers else min(ranks)


def meet_of_sizes(uses: Sequence[DimUse], complete: bool) -> DimUse | Clash | None:
    """Return the use whose size all uses of a size agree on (1 agrees with anything), or two that do not."""
    covers = [use for use in uses if use.covers]
    relevant = covers or uses
    if complete and any(use.extent is None for use in relevant):
        return None
    strong = [use for use in relevant if use.extent is not None and not use.weak]
    for use in strong[1:]:
        if use.extent != strong[0].extent:
            return Clash(strong[0], use)
    return strong[0] if strong else None
