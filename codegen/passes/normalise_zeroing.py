"""Zeroing as semantics: a gradient that is filled with zero and then accumulated starts at its first contribution.

In: a solved program. Out: one without zero fills that a covering first accumulation makes needless: a pointwise one
becomes a set (which keeps -0, where 0 + -0 would give +0), a reduction starts from zero by itself. Fills before
scatters, slices, diagonals and concatenations stay, and so does zeroing that somebody may see. This runs before
lowering, with and without fusion, so that no placement can show in the result.
"""

from __future__ import annotations

from dataclasses import replace

from stagedtensor.codegen.solved import SolvedProgram
from stagedtensor.node import Node
from stagedtensor.shapes.index import Projected
from stagedtensor.statements import NumberLiteral, Statement


def normalise_zeroing(program: SolvedProgram) -> SolvedProgram:
    """Return ``program`` with needless zero fills gone and the accumulations after them starting afresh."""
    pending: dict[Node, int] = {}
    dropped: set[int] = set()
    statements = list(program.statements)
    for position, statement in enumerate(program.statements):
        for node in statement.reads():
            if node is not statement.target.node:
                pending.pop(node, None)
        target = statement.target.node
        fill = pending.pop(target, None)
        if fill is not None:
            started = _started(program, statement)
            if started is not None:
                statements[position] = started
                dropped.add(fill)
        if _is_zero_fill(program, statement):
            pending[target] = position
    # What is filled and never touched again is seen only if the node is.
    dropped.update(position for node, position in pending.items() if not program.is_external(node))
    kept = [position for position in range(len(statements)) if position not in dropped]
    return replace(
        program,
        statements=tuple(statements[position] for position in kept),
        comments=tuple(program.comments[position] for position in kept),
    )


def _is_zero_fill(program: SolvedProgram, statement: Statement) -> bool:
    expr = statement.expr
    if statement.op is not None or not isinstance(expr, NumberLiteral) or expr.value != 0:
        return False
    return _covers(program.projected(statement))


def _covers(projected: tuple[Projected, ...]) -> bool:
    """Whether the statement writes each cell of its target once, whatever its guards say."""
    if len(projected) != 1 or projected[0].scatter or not projected[0].covers_target:
        return False
    return not projected[0].guards or any(item.reduce for item in projected[0].iterators)


def _started(program: SolvedProgram, statement: Statement) -> Statement | None:
    """The statement as it reads after a zero fill of its target, or None where the fill must stay."""
    if any(node is statement.target.node for node in _operands(statement)):
        return None
    projected = program.projected(statement)
    if not _covers(projected):
        return None
    if statement.op is None or statement.reset:
        return statement
    if statement.op == "add" and not any(item.reduce for item in projected[0].iterators):
        return replace(statement, op=None)
    return replace(statement, reset=True) if statement.op in ("add", "sub") else None


def _operands(statement: Statement) -> tuple[Node, ...]:
    """The nodes read by the tree and its indices, the running target left out."""
    return replace(statement, op=None).reads()
