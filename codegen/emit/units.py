"""One C source as several translation units, to be compiled side by side.

In: the text of a routine, the lines of its kernels, and how many units are wanted. Out: :class:`Units`, each with the
head, some of the kernels and declarations of the others; the routine itself, which only calls, is a unit of its own.
``#line`` directives say where everything stands in the whole source, so that a compiler speaks of that. Kernels are
functions that are never inlined: the bits of a result do not depend on the number of units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stagedtensor.codegen.emit.c import KERNEL

_ALONE = "#define ST_KERNEL static __attribute__((noinline))\n"
_AMONG_UNITS = '#define ST_KERNEL __attribute__((noinline, visibility("hidden")))\n'
_LEAST = 12_000
"""Letters of kernels, or of the routine, below which a unit of their own costs more than it saves."""


@dataclass(frozen=True)
class Units:
    """Translation units that link into one library: those with ``kernels``, and the one with the ``routine``."""

    kernels: tuple[str, ...]
    routine: str


def units(text: str, functions: Sequence[tuple[int, int]], wanted: int, *, file: str) -> Units | None:
    """Split ``text``, whose kernels take the lines ``functions`` (first, last; from 1), into at most ``wanted`` parts.

    The lengths of their kernels are about equal. ``file`` is what compilers shall call the whole source. None where one
    unit is better.
    """
    lines = text.split("\n")
    kernels = ["\n".join(lines[first - 1 : last]) + "\n" for first, last in functions]
    if not kernels or _ALONE not in text:
        return None
    end = functions[-1][1]
    routine = "\n".join(lines[end:])
    count = max(1, min(wanted, len(kernels), sum(map(len, kernels)) // _LEAST))
    if count == 1 and len(routine) < _LEAST:
        return None
    head = "\n".join(lines[: functions[0][0] - 1]) + "\n"
    head = head.replace(_ALONE, _AMONG_UNITS) + "".join(map(_declaration, kernels))
    parts: list[list[int]] = [[] for _ in range(count)]
    lengths = [0] * count
    for at in sorted(range(len(kernels)), key=lambda at: (-len(kernels[at]), at)):
        least = lengths.index(min(lengths))
        parts[least].append(at)
        lengths[least] += len(kernels[at])
    return Units(
        tuple(head + "".join(_placed(kernels[at], functions[at][0], file) for at in sorted(part)) for part in parts),
        head + _placed(routine, end + 1, file),
    )


def _placed(text: str, line: int, file: str) -> str:
    return f'#line {line} "{file}"\n{text}'


def _declaration(kernel: str) -> str:
    start = kernel.index(KERNEL)
    return kernel[start : kernel.index("{", start)].rstrip() + ";\n"
