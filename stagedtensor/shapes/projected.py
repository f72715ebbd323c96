"""Projections of all statements of a program: statements of one form over equal shapes are projected once.

In: a ``ShapeSolution``, then statements. Out: what ``projections.project`` gives for each. The layers of a network are
made of statements that differ in their nodes alone: they share iterators and index expressions. Windows, gathers and
concatenations depend on more than their own shapes and are projected each by itself.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from stagedtensor.dims import MEMORY_ORDER
from stagedtensor.specs import Affine, Concat, Gathered, ShapeSpec
from stagedtensor.statements import Access, DimValue, IterValue, LinearIndex, Statement, accesses, walk

from .index import Projected
from .projections import project
from .solution import ShapeSolution


class Projections:
    """Projects the statements of one program, each once."""

    def __init__(self, solution: ShapeSolution) -> None:
        self._solution = solution
        self._parts: dict[Statement, tuple[Projected, ...]] = {}
        self._models: dict[Hashable, Projected] = {}
        self._numbers: dict[Any, int] = {}
        self._seen: dict[int, tuple[Any, int]] = {}
        """Specs and shapes by identity, kept alive, with the number of their value: to hash them each time takes longer."""
        self._plain: dict[int, bool] = {}

    def of(self, statement: Statement) -> tuple[Projected, ...]:
        """Return the parts of ``statement`` in the order they must run."""
        parts = self._parts.get(statement)
        if parts is None:
            parts = self._parts[statement] = self._project(statement)
        return parts

    def _project(self, statement: Statement) -> tuple[Projected, ...]:
        reads = tuple(dict.fromkeys(accesses(statement.expr)))
        form = self._form(statement, reads)
        model = None if form is None else self._models.get(form)
        if model is not None:
            return (_like(model, statement, reads),)
        parts = project(statement, self._solution)
        if form is not None and len(parts) == 1 and parts[0].statement is statement:
            self._models[form] = parts[0]
        return parts

    def _form(self, statement: Statement, reads: tuple[Access, ...]) -> Hashable | None:
        """Return all that the projection depends on; None where that is more than rows and shapes."""
        scope = statement.scope
        rows = [(self._number(access.rows), access) for access in (statement.target, *reads)]
        if not all(self._is_plain(number, access.rows) for number, access in rows):
            return None
        if not all(self._is_plain(self._number(spec), spec) for spec in (*scope.spec.operands, scope.spec.result)):
            return None
        sizes = self._solution.scope(scope)
        values = tuple(part for part in walk(statement.expr) if isinstance(part, DimValue | IterValue | LinearIndex))
        return (
            self._number(scope.spec),
            tuple(sizes.names.items()),
            tuple(sizes.rows.items()),
            tuple(sizes.anonymous.items()),
            tuple((number, self._number(self._solution.shape(access.node))) for number, access in rows),
            values,
            (statement.op, statement.reset, statement.stage),
            scope.derives and statement.target.node is scope.result,
        )

    def _number(self, value: Any) -> int:
        known = self._seen.get(id(value))
        if known is None:
            known = self._seen[id(value)] = (value, self._numbers.setdefault(value, len(self._numbers)))
        return known[1]

    def _is_plain(self, number: int, rows: ShapeSpec) -> bool:
        plain = self._plain.get(number)
        if plain is None:
            terms = (term for kind in MEMORY_ORDER for term in rows.row(kind).terms)
            plain = self._plain[number] = not any(isinstance(term, Affine | Concat | Gathered) for term in terms)
        return plain


def _like(model: Projected, statement: Statement, reads: tuple[Access, ...]) -> Projected:
    return Projected(
        statement,
        model.iterators,
        model.target,
        dict(zip(reads, model.reads.values(), strict=True)),
        model.guards,
        model.dim_values,
        model.iter_values,
        model.covers_target,
        model.scatter,
        model.fill,
    )
