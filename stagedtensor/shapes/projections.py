"""Projection: a statement over rows becomes statements over iterators, once shapes are solved.

In: a ``Statement`` and a ``ShapeSolution``. Out: ``Projected`` parts in the order they must run: one for most
statements, one per block of a concatenation, a fill for cells of a result that no part writes. Row variables expand
right-aligned to one iterator per axis; an axis of size 1 under a longer iterator is read at 0, and written it makes
that iterator a reduction. Knows nothing of precision; simplification is left to later passes.
"""

from __future__ import annotations

from dataclasses import replace

from stagedtensor.errors import InternalError
from stagedtensor.op_table import REDUCTIONS
from stagedtensor.specs import Concat
from stagedtensor.statements import Access, NumberLiteral, Stage, Statement, walk

from .axes import axis_extent, axis_uses
from .blocks import Choice, choices_of, concats_of, inactive_names, plain_names, prune
from .index import (
    DimProduct,
    Guard,
    IndexConst,
    IndexData,
    IndexExpr,
    IndexFloorDiv,
    IndexIter,
    IndexMod,
    IndexStatic,
    IndexSum,
    Projected,
    ProjectedIterator,
    index_sum,
)
from .projector import Projector, part_sizes
from .solution import ShapeSolution

__all__ = [
    "DimProduct",
    "Guard",
    "IndexConst",
    "IndexData",
    "IndexExpr",
    "IndexFloorDiv",
    "IndexIter",
    "IndexMod",
    "IndexStatic",
    "IndexSum",
    "Projected",
    "ProjectedIterator",
    "project",
]


def project(statement: Statement, solution: ShapeSolution) -> tuple[Projected, ...]:
    """Return the parts of ``statement`` in the order they must run.

    Cells of a reset or derived target that no part writes get the neutral element of the write by a part of its own.
    """
    if statement.stage is Stage.ZERO and not any(isinstance(part, Access) for part in walk(statement.expr)):
        return (_fill_all(statement, solution),)
    parts: list[Projected] = []
    written: set[tuple[int, ...]] = set()
    in_target = concats_of(statement.target.rows)
    for choice in choices_of(statement):
        block = tuple(choice[term] for term in in_target)
        if any(isinstance(term.parts[choice[term]], int) for term in in_target):
            if _defines(statement):
                parts.append(_fill_block(statement, solution, choice))
            continue
        inactive = inactive_names(choice)
        expr = prune(statement.expr, choice, inactive)
        if expr is None or inactive & plain_names(statement.target.rows):
            continue
        part = statement if expr is statement.expr else replace(statement, expr=expr)
        if block in written and part.op is not None:
            part = replace(part, reset=False)
        elif block in written:
            raise InternalError(f"{statement.scope.label}: two parts of a concatenation set the same cells")
        written.add(block)
        parts.append(Projector(part, solution, choice).project())
    incomplete = [part for part in parts if not part.fill and not part.covers_target]
    if incomplete and not in_target and _defines(statement):
        fill = _fill_all(statement, solution)
        parts = [fill, *(_without_reset(part) if part.scatter else part for part in parts)]
    return tuple(parts)


def _defines(statement: Statement) -> bool:
    """Return whether the statement says what every cell of its target is."""
    if statement.op is not None:
        return statement.reset
    return statement.scope.derives and statement.target.node is statement.scope.result


def _without_reset(part: Projected) -> Projected:
    if part.statement.op is None or not part.statement.reset:
        return part
    return replace(part, statement=replace(part.statement, reset=False))


# -- fills --------------------------------------------------------------------------------------------------------


def _neutral_set(statement: Statement) -> Statement:
    if statement.stage is Stage.ZERO and statement.op is None:
        return statement
    neutral = 0.0 if statement.op is None else REDUCTIONS[statement.op].neutral
    return replace(statement, expr=NumberLiteral(neutral), op=None)


def _fill_all(statement: Statement, solution: ShapeSolution) -> Projected:
    """Set every cell of the target."""
    axes = [axis for _, _, axis in solution.shape(statement.target.node).axes()]
    loops = tuple(ProjectedIterator(f"cell{place}", axis_extent(axis), False) for place, axis in enumerate(axes))
    index = tuple(IndexIter(loop) for loop in loops)
    return Projected(_neutral_set(statement), loops, index, {}, (), {}, {}, covers_target=True, fill=True)


def _fill_block(statement: Statement, solution: ShapeSolution, choice: Choice) -> Projected:
    """Set the cells of a block of a concatenated target that has a size and no name."""
    binding = solution.scope(statement.scope)
    loops: list[ProjectedIterator] = []
    index: list[IndexExpr] = []
    for place, use in enumerate(axis_uses(statement.target, solution)):
        extent, offset = axis_extent(use.axis), 0
        if isinstance(use.source, Concat):
            sizes = part_sizes(use.source, binding.names)
            extent, offset = sizes[choice[use.source]], sum(sizes[: choice[use.source]])
        loops.append(ProjectedIterator(f"cell{place}", extent, False))
        index.append(index_sum([(1, IndexIter(loops[-1]))], offset))
    neutral = _neutral_set(statement)
    return Projected(neutral, tuple(loops), tuple(index), {}, (), {}, {}, covers_target=False, fill=True)
