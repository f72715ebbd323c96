"""Device functions that only CUDA has: what the language of a single thread cannot say.

In: names of functions. Out: their text, to stand behind the prelude. On a GPU they are intrinsics or inline PTX; where
the text is compiled beside the emulation header (``ST_EMULATED``) they call its model of the same instruction. They
have no counterpart in C.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from stagedtensor.codegen.prelude.sections import Section, sections_of

_FILES = ("cuda_memory.h", "cuda_mma.h", "cuda_warp.h")


@cache
def _sections() -> dict[str, Section]:
    return {section.name: section for file in _FILES for section in sections_of(file)}


def cuda_names() -> frozenset[str]:
    """Return the name of every function that :func:`cuda_functions` can print."""
    return frozenset(_sections())


def cuda_functions(names: Iterable[str]) -> str:
    """Return the text of ``names``, in alphabetical order, each behind what it needs; "" for none."""
    ordered: dict[str, Section] = {}

    def add(name: str) -> None:
        section = _sections()[name]
        for need in section.needs:
            add(need)
        ordered.setdefault(name, section)

    for name in sorted(names):
        add(name)
    return "".join(f"{section.text}\n\n" for section in ordered.values())
