"""Functions on units that multiply matrices of bf16, to stand behind the prelude: instructions where the target has
them, else plain C.

In: names of functions. Out: their text, and what they call of the prelude proper. Both forms give the same bits, so
that the text of a kernel can be executed anywhere. Chooses nothing itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from stagedtensor.codegen.prelude.sections import Section, sections_of

BEGIN, END = "st_tiles_begin", "st_tiles_end"
"""What stands around the body of a kernel that uses AMX tiles."""


@cache
def _sections() -> dict[str, Section]:
    return {section.name: section for section in sections_of("matrix_units.h")}


@cache
def unit_names() -> frozenset[str]:
    """Return the name of every function that :func:`unit_functions` can print."""
    return frozenset(_sections())


def needs_of_units(names: Iterable[str]) -> set[str]:
    """Return what the functions ``names`` call of the prelude proper; those not on matrix units call nothing here."""
    return {needed for name in _with_needs(names) for needed in _sections()[name].needs} - unit_names()


def unit_functions(names: Iterable[str]) -> str:
    """Return the text of ``names`` and of what they need of these functions; "" for none."""
    wanted = _with_needs(names)
    return "".join(f"{section.text}\n\n" for name, section in _sections().items() if name in wanted)


def _with_needs(names: Iterable[str]) -> set[str]:
    found: set[str] = set()
    todo = list(names)
    while todo:
        name = todo.pop()
        if name in _sections() and name not in found:
            found.add(name)
            todo += _sections()[name].needs
    return found
