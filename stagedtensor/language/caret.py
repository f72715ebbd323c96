"""Errors that point into a text: the line, a caret under the column, what was expected, the user's line.

In: a text and an offset into it. Out: a ``SpecError`` to raise. Parses nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from stagedtensor.errors import SpecError
from stagedtensor.source import Source, user_source


def pointed(text: str, offset: int) -> str:
    """Return the line of ``text`` that holds ``offset`` and, below it, a caret under that column."""
    offset = max(0, min(offset, len(text)))
    start = text.rfind("\n", 0, offset) + 1
    end = text.find("\n", offset)
    line = text[start:] if end < 0 else text[start:end]
    shown = line.replace("\t", " ")
    return f"  {shown}\n  {' ' * (offset - start)}^"


def spec_error(
    text: str,
    offset: int,
    problem: str,
    *,
    what: str,
    expected: str = "",
    advice: str = "",
    source: Source | None = None,
) -> SpecError:
    """Build the error for a fault at ``offset`` of ``text``, which is a ``what`` ("einsum spec", "statement")."""
    lines = [f"{what}: {problem}", pointed(text, offset)]
    if expected:
        lines.append(f"  expected {expected}")
    lines.append(f"  {(source or user_source()).quoted()}")
    if advice:
        lines.append(f"  {advice}")
    return SpecError("\n".join(lines))


def near(name: str, known: Iterable[str]) -> str:
    """Return ``did you mean 'beta'?`` for names close to ``name``, else the list of known names, else nothing."""
    choices = list(dict.fromkeys(known))
    close = difflib.get_close_matches(name, choices, n=3)
    if close:
        return f"did you mean {' or '.join(map(repr, close))}?"
    return f"known here: {', '.join(sorted(choices))}" if choices else ""
