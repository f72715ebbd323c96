"""Functions on matrix tiles (AMX), to stand behind the prelude: instructions where the target has them, else plain C.

In: names of functions. Out: their text, and what they call of the prelude proper. Both forms give the same bits, so that the
text of a kernel can be executed anywhere. Chooses nothing itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from stagedtensor.codegen.prelude.sections import Section, sections_of

BEGIN, END = "st_tiles_begin", "st_tiles_end"
"""What stands around the body of a kernel that uses tiles."""


@cache
def _sections() -> dict[str, Section]:
    return {section.name: section for section in sections_of("tiles.h")}


@cache
def tile_names() -> frozenset[str]:
    """Return the name of every function that :func:`tile_functions` can print."""
    return frozenset(_sections())


def needs_of_tiles(names: Iterable[str]) -> set[str]:
    """Return what the functions ``names`` call of the prelude proper; others than those on tiles call nothing here."""
    sections = (_sections()[name] for name in names if name in tile_names())
    return {needed for section in sections for needed in section.needs} - tile_names()


def tile_functions(names: Iterable[str]) -> str:
    """Return the text of ``names``, and in front of it what all of them need; "" for none."""
    wanted = set(names)
    if wanted:
        wanted.add("st_tiles")
    return "".join(f"{section.text}\n\n" for name, section in _sections().items() if name in wanted)
