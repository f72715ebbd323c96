"""Range checks of gather ids for routines compiled with ``debug=True``.

Generated code clamps ids, so that no routine ever reads foreign memory; a debug routine also says which id was out of range.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from stagedtensor.dims import MEMORY_ORDER, Shape
from stagedtensor.errors import ContextError
from stagedtensor.node import Node
from stagedtensor.runtime.device import Array
from stagedtensor.source import Source
from stagedtensor.specs import Gathered
from stagedtensor.statements import Access, Statement, accesses


@dataclass(frozen=True)
class Gather:
    """Integer ids that index an axis of ``size`` cells of ``table``."""

    ids: Node
    table: Node
    size: int
    source: Source


def gathers(statements: Sequence[Statement], shape: Callable[[Node], Shape]) -> tuple[Gather, ...]:
    """Return every gather of a program, each once."""
    found: dict[tuple[Node, Node], Gather] = {}
    for statement in statements:
        for access in (statement.target, *accesses(statement.expr)):
            for ids, size in _indexed(statement, access, shape(access.node)):
                found.setdefault((ids, access.node), Gather(ids, access.node, size, statement.scope.source))
    return tuple(found.values())


def _indexed(statement: Statement, access: Access, shape: Shape) -> Iterator[tuple[Node, int]]:
    for kind in MEMORY_ORDER:
        row = access.rows.row(kind)
        for position, term in (*enumerate(row.leading), *((at - len(row.trailing), t) for at, t in enumerate(row.trailing))):
            if isinstance(term, Gathered):
                yield statement.scope.nodes[term.operand], shape.row(kind)[position].size


def check(items: Sequence[Gather], read: Callable[[Node], Array]) -> None:
    """Raise ContextError for the first id out of range, with its value, position and the gather's line."""
    for item in items:
        ids = read(item.ids)
        wrong = np.argwhere((ids < 0) | (ids >= item.size))
        if len(wrong):
            at = tuple(int(index) for index in wrong[0])
            raise ContextError(
                f"id {int(ids[at])} at position {list(at)} of {item.ids.label!r} is outside 0 .. {item.size - 1} of "
                f"{item.table.label!r} ({len(wrong)} of {ids.size} ids are)\n  {item.source.quoted()}\n"
                "  it was clamped; correct the ids"
            )
