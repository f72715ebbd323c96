"""What a spec iterates over: which axes are reduced, which operands belong to which block of a concatenation.

In: parsed specs. Out: specs of the removed axes and lists of operand numbers. Sizes play no part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TypeAlias

from stagedtensor.dims import MEMORY_ORDER, RowKind
from stagedtensor.shapes.equations import term_names
from stagedtensor.specs import Affine, Anonymous, AxisTerm, Concat, Name, RowSpec, ShapeSpec, Spec

Key: TypeAlias = tuple[str, str | int]
"""One thing that is iterated: ("name", name), ("row", variable) or ("any", key of an anonymous axis)."""


def _of_term(term: AxisTerm) -> Iterator[Key]:
    if isinstance(term, Anonymous):
        yield ("any", term.key)
    for name in term_names(term):
        yield ("name", name)


def iterated(rows: ShapeSpec) -> Iterator[tuple[Key, RowKind]]:
    """Yield what a tensor's rows iterate over, in memory order, each with its row; a ``_`` too."""
    for kind in MEMORY_ORDER:
        row = rows.row(kind)
        for term in row.leading:
            yield from ((key, kind) for key in _of_term(term))
        if row.variable is not None:
            yield (("row", row.variable), kind)
        for term in row.trailing:
            yield from ((key, kind) for key in _of_term(term))


@dataclass(frozen=True)
class Removed:
    """What is reduced: keys in order of appearance, each with the row it first stands in."""

    keys: dict[Key, RowKind]

    def __bool__(self) -> bool:
        return bool(self.keys)

    def rows(self) -> ShapeSpec | None:
        """Return the removed axes as the rows of one tensor, None if they have too many row variables for three rows."""
        names: dict[RowKind, list[AxisTerm]] = {kind: [] for kind in MEMORY_ORDER}
        variables: dict[RowKind, str] = {}
        for (what, name), kind in self.keys.items():
            if what == "row":
                free = [kind, *(other for other in MEMORY_ORDER if other != kind)]
                home = next((other for other in free if other not in variables), None)
                if home is None:
                    return None
                variables[home] = str(name)
            else:
                names[kind].append(Name(str(name)))
        return ShapeSpec(
            *(RowSpec((), variables.get(kind), tuple(names[kind])) for kind in ("batch", "input", "output"))
        )


def removed(operands: Sequence[ShapeSpec], result: ShapeSpec) -> Removed:
    """Return what the operands iterate over and the result lacks.

    Of an operand's concatenation only the part that the result names counts; if it names none, every part does. A
    convolved axis of the result has several points in one cell, so its kernel counts as removed.
    """
    kept = {key for key, _ in iterated(result)}
    for kind in MEMORY_ORDER:
        kept -= {("name", term.kernel) for term in result.row(kind).terms if isinstance(term, Affine)}
    found: dict[Key, RowKind] = {}
    for rows in operands:
        skipped = {
            ("name", name)
            for kind in MEMORY_ORDER
            for term in rows.row(kind).terms
            if isinstance(term, Concat) and any(("name", part) in kept for part in term_names(term))
            for name in term_names(term)
        }
        for key, kind in iterated(rows):
            if key not in kept and key not in skipped:
                found.setdefault(key, kind)
    return Removed(found)


def named_anonymous(spec: Spec) -> Spec:
    """Return the spec with a name for each ``_`` of its operands, so that the axis can be referred to."""
    taken = {str(name) for rows in spec.operands for (what, name), _ in iterated(rows) if what == "name"}

    def name(term: AxisTerm) -> AxisTerm:
        if not isinstance(term, Anonymous):
            return term
        choice = f"any{term.key}"
        while choice in taken:
            choice += "_"
        return Name(choice)

    def row(rows: RowSpec) -> RowSpec:
        return replace(rows, leading=tuple(map(name, rows.leading)), trailing=tuple(map(name, rows.trailing)))

    operands = tuple(ShapeSpec(row(rows.batch), row(rows.input), row(rows.output)) for rows in spec.operands)
    return replace(spec, operands=operands)


def concatenations(rows: ShapeSpec) -> tuple[Concat, ...]:
    """Return the concatenated axes of a tensor in memory order."""
    return tuple(term for kind in MEMORY_ORDER for term in rows.row(kind).terms if isinstance(term, Concat))


def blocks(spec: Spec) -> tuple[tuple[int, ...], ...] | None:
    """Return the numbers of the operands in each block of a concatenated result, in spec order.

    An operand is in a block unless it names another part. A block may have no operand: its cells are neutral. None if
    an operand is itself concatenated of the same parts (then one statement serves all blocks).
    """
    terms = concatenations(spec.result)
    joined = {name for term in terms for name in term_names(term)}
    if any(joined & set(term_names(term)) for rows in spec.operands for term in concatenations(rows)):
        return None
    plain = [{name for (what, name), _ in iterated(rows) if what == "name"} for rows in spec.operands]
    found = []
    for chosen in product(*(term.parts for term in terms)):
        here = {part.name for part in chosen if isinstance(part, Name)}
        if len(here) < len(chosen):
            continue  # a part that is a size has no name: a fill
        found.append(tuple(at for at, names in enumerate(plain) if not names & (joined - here)))
    return tuple(found)
