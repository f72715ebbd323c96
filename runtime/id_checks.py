"""Range checks of ids and class labels for routines compiled with ``debug=True``.

Generated code clamps them, so that no routine ever reads foreign memory; a debug routine also says which one was out of
range. Labels that ``ignore_index`` or a mask leaves out may be anything.
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
from stagedtensor.specs import Gathered, Name, ShapeSpec
from stagedtensor.statements import LABELS, Access, OpRecord, Statement, accesses


@dataclass(frozen=True)
class Lookup:
    """Integer ids that index ``size`` cells: rows of a table, or classes of logits."""

    ids: Node
    size: int
    of: str
    """What they index, for the message."""
    source: Source
    ignored: int | None = None
    """The label that stands for none."""
    mask: Node | None = None
    """0 where a label does not count."""

    @property
    def nodes(self) -> tuple[Node, ...]:
        """What has to be readable after a run."""
        return (self.ids,) if self.mask is None else (self.ids, self.mask)


def lookups(statements: Sequence[Statement], shape: Callable[[Node], Shape]) -> tuple[Lookup, ...]:
    """Return every gather and every choice of a label in a program, each once."""
    found: dict[tuple[Node, Node], Lookup] = {}
    for statement in statements:
        record = statement.scope.result.record
        if record is not None and LABELS in record.attributes:
            logits, ids = (operand.node for operand in record.operands[:2])
            found.setdefault((ids, logits), _labels(record, shape(logits)))
        for access in (statement.target, *accesses(statement.expr)):
            for ids, size in _indexed(statement, access, shape(access.node)):
                of = f"{access.node.label!r}"
                found.setdefault((ids, access.node), Lookup(ids, size, of, statement.scope.source))
    return tuple(found.values())


def _indexed(statement: Statement, access: Access, shape: Shape) -> Iterator[tuple[Node, int]]:
    for term, size in _terms(access.rows, shape):
        if isinstance(term, Gathered):
            yield statement.scope.nodes[term.operand], size


def _terms(rows: ShapeSpec, shape: Shape) -> Iterator[tuple[object, int]]:
    """Yield the terms that name one axis, with the axis' size."""
    for kind in MEMORY_ORDER:
        row = rows.row(kind)
        for position, term in (
            *enumerate(row.leading),
            *((at - len(row.trailing), t) for at, t in enumerate(row.trailing)),
        ):
            yield term, shape.row(kind)[position].size


def _labels(record: OpRecord, shape: Shape) -> Lookup:
    axis, ignored, mask = record.attributes[LABELS]
    size = next(size for term, size in _terms(record.scope.spec.operands[0], shape) if term == Name(axis))
    logits, ids = record.operands[0].node, record.operands[1].node
    return Lookup(ids, size, f"the classes of {logits.label!r}", record.scope.source, ignored, mask)


def check(items: Sequence[Lookup], read: Callable[[Node], Array], shape: Callable[[Node], Shape]) -> None:
    """Raise ContextError for the first id out of range, with its value, position and the line that looks it up."""
    for item in items:
        ids = read(item.ids)
        wrong = (ids < 0) | (ids >= item.size)
        if item.ignored is not None:
            wrong &= ids != item.ignored
        if item.mask is not None and wrong.any():
            wrong, counts, ids = np.broadcast_arrays(
                *_aligned([(wrong, shape(item.ids)), (read(item.mask) != 0, shape(item.mask)), (ids, shape(item.ids))])
            )
            wrong = wrong & counts
        places = np.argwhere(wrong)
        if len(places):
            at = tuple(int(index) for index in places[0])
            raise ContextError(
                f"id {int(ids[at])} at position {list(at)} of {item.ids.label!r} is outside 0 .. {item.size - 1} of "
                f"{item.of} ({len(places)} of {ids.size} ids are)\n  {item.source.quoted()}\n"
                "  it was clamped; correct the ids"
            )


def _aligned(cells: Sequence[tuple[Array, Shape]]) -> list[Array]:
    """Give arrays the same number of axes in each row, as broadcasting sees them."""
    ranks = {kind: max(len(shape.row(kind)) for _, shape in cells) for kind in MEMORY_ORDER}
    aligned = []
    for array, shape in cells:
        sizes, at = [], 0
        for kind in MEMORY_ORDER:
            count = len(shape.row(kind))
            sizes += [1] * (ranks[kind] - count) + list(array.shape[at : at + count])
            at += count
        aligned.append(array.reshape(sizes))
    return aligned
