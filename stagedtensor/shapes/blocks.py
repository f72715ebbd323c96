"""Blocks of concatenated axes: which are taken together, and what of a tree is active in a choice of them.

In: a statement and the ``Concat`` terms of its accesses. Out: the consistent choices of one block per concatenation,
in spec order, and trees without the accesses of other blocks. It knows no sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from stagedtensor.dims import MEMORY_ORDER
from stagedtensor.specs import Concat, Name, ShapeSpec
from stagedtensor.statements import Access, Apply, Expr, IterValue, Statement, accesses

from .equations import term_names

Choice = dict[Concat, int]
"""The block taken of each concatenation."""


def concats_of(rows: ShapeSpec) -> tuple[Concat, ...]:
    """Return the different concatenations among a tensor's terms, in memory order."""
    terms = (term for kind in MEMORY_ORDER for term in rows.row(kind).terms)
    return tuple(dict.fromkeys(term for term in terms if isinstance(term, Concat)))


def choices_of(statement: Statement) -> Iterator[Choice]:
    """Yield the consistent choices of one block per concatenation, in spec order."""
    tensors = [statement.target, *accesses(statement.expr)]
    terms = tuple(dict.fromkeys(term for access in tensors for term in concats_of(access.rows)))
    active = plain_names(statement.target.rows)
    if isinstance(statement.expr, Access):
        active |= plain_names(statement.expr.rows)
    for places in product(*(_places(term, active) for term in terms)):
        choice = dict(zip(terms, places, strict=True))
        chosen = {part.name for term, place in choice.items() if isinstance(part := term.parts[place], Name)}
        if not chosen & inactive_names(choice):
            yield choice


def _places(term: Concat, active: set[str]) -> list[int]:
    """Return the blocks to try: the ones of names that must be active, where there are any, and those without a name.

    Joining many tensors has one statement for each, and a statement has no use for the blocks of the others.
    """
    every = range(len(term.parts))
    named = [place for place in every if isinstance(part := term.parts[place], Name) and part.name in active]
    return [place for place in every if isinstance(term.parts[place], int) or place in named] if named else list(every)


def inactive_names(choice: Choice) -> set[str]:
    """Return the names of the blocks that are not taken."""
    return {
        part.name
        for term, chosen in choice.items()
        for place, part in enumerate(term.parts)
        if place != chosen and isinstance(part, Name)
    }


def plain_names(rows: ShapeSpec) -> set[str]:
    """Return the names of a tensor's terms outside concatenations."""
    terms = [term for kind in MEMORY_ORDER for term in rows.row(kind).terms]
    return {name for term in terms if not isinstance(term, Concat) for name in term_names(term)}


def prune(expr: Expr, choice: Choice, inactive: set[str]) -> Expr | None:
    """Drop what is not in the chosen blocks; None if nothing is left."""
    match expr:
        case Access(rows=rows):
            unnamed = any(isinstance(term.parts[choice[term]], int) for term in concats_of(rows))
            return None if unnamed or inactive & plain_names(rows) else expr
        case IterValue(name):
            return None if name in inactive else expr
        case Apply(op, args):
            pruned = [prune(arg, choice, inactive) for arg in args]
            left = [arg for arg in pruned if arg is not None]
            if len(left) == len(args):
                same = all(new is old for new, old in zip(left, args, strict=True))
                return expr if same else Apply(op, tuple(left))
            alone = len(args) == 2 and len(left) == 1 and any(True for _ in accesses(left[0]))
            return left[0] if alone else None
        case _:
            return expr
