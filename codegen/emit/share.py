"""Kernels that differ in names alone share one function: the layers of a network are many such kernels.

In: printed functions with the names they gave. Out: for each, the first one whose text is the same but for those names.
Parameters correspond by position. Comments and line breaks do not count.
"""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import dataclass, field

_COMMENT = re.compile(r"//[^\n]*")
_IDENTIFIER = re.compile(r"\b[A-Za-z_]\w*")
_SPACE = re.compile(r"\s+")


@dataclass
class Shared:
    """The functions printed so far, by what they do."""

    _names: dict[str, str] = field(default_factory=dict)

    def find(self, text: str, name: str, given: Set[str]) -> str | None:
        """Return the name of a function like this one, None if this is the first of its kind (then it is kept).

        ``given`` are the names that may differ: every use of one stands for the same thing in the whole text.
        """
        return None if (first := self._names.setdefault(_key(text, name, given), name)) == name else first


def _key(text: str, name: str, given: Set[str]) -> str:
    numbers: dict[str, int] = {}

    def numbered(match: re.Match[str]) -> str:
        word = match.group()
        if word not in given:
            # the spaces go, so that a word keeps its ends
            return f"<{word}>"
        return f"@{numbers.setdefault(word, len(numbers))}"

    # a parameter may be called like its function, whose name stands once, in front of the first parenthesis
    before, _, after = _COMMENT.sub("", text).partition(f"{name}(")
    return _SPACE.sub("", f"{before}({_IDENTIFIER.sub(numbered, after)}")
