"""The prelude's functions on sixteen cells at once, bit for bit, for targets with AVX-512; loads and stores of those.

In: names of functions. Out: their text and what they depend on, to stand behind the prelude. They exist because
compilers do not find the instructions by themselves: half precision conversions, scaling by a power of 2, bytes widened
in one step.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from stagedtensor.codegen.prelude.sections import Section, sections_of

FEATURE = "avx512f"
"""The target feature that all of them need."""
CELLS = 16
"""How many cells of 32 bits a vector has."""
PUTS = frozenset({"st_put_vf32", "st_put_vu16"})
"""Stores past the cache."""
PUTS_END = "st_puts_end"
"""What must stand between them and other threads' reads."""


@cache
def _sections() -> dict[str, Section]:
    return {section.name: section for section in sections_of("vectors.h")}


@cache
def vector_names() -> frozenset[str]:
    """Return the name of every function that :func:`vector_functions` can print."""
    return frozenset(_sections())


def vector_functions(names: Iterable[str]) -> str:
    """Return the text of ``names`` and what they need, dependencies first; "" for none."""
    ordered: dict[str, Section] = {}

    def add(name: str) -> None:
        section = _sections()[name]
        for needed in section.needs:
            add(needed)
        ordered.setdefault(name, section)

    for name in sorted(set(names)):
        add(name)
    return "".join(f"{section.text}\n\n" for section in ordered.values())
