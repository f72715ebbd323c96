"""The words of model texts: functions, precisions and constants that a text may use without defining them.

Higher layers declare them by ``declare``; the elaborator looks them up. A word that is a function is called with the
values of its arguments, so only functions that neither read nor write anything outside the graph belong here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_words: dict[str, Any] = {}


def declare(words: Mapping[str, Any]) -> None:
    """Add words. A name that is there already must mean the same."""
    for name, meaning in words.items():
        if _words.setdefault(name, meaning) is not meaning:
            raise ValueError(f"the word {name!r} is {_words[name]!r} already, not {meaning!r}")


def words() -> Mapping[str, Any]:
    """Return all words."""
    return MappingProxyType(_words)
