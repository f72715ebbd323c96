"""Classes of values that never change, made and copied millions of times: frozen dataclasses that cost less.

To a type checker :func:`piece` is ``dataclass`` and :func:`replace` is ``dataclasses.replace``, so that assigning to a
field of a frozen class is an error there. At run time nothing looks: a constructor of a frozen dataclass takes three
times as long, and made up a sixth of the time of code generation. :func:`remembered` keeps what a function finds out
about a piece with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

__all__ = ["piece", "remembered", "replace"]

Piece = TypeVar("Piece")
Fact = TypeVar("Fact")
_MISSING: Any = object()


def remembered(function: Callable[[Piece], Fact]) -> Callable[[Piece], Fact]:
    """Keep what ``function`` finds out about a piece of code with the piece: code never changes, and passes ask again.

    The fact must not hold the piece itself, which would then never be freed at once.
    """
    slot = f"fact {function.__name__}"

    @wraps(function)
    def remembering(piece: Piece) -> Fact:
        fact: Fact = getattr(piece, slot, _MISSING)
        if fact is _MISSING:
            fact = function(piece)
            setattr(piece, slot, fact)
        return fact

    return remembering


if TYPE_CHECKING:
    from dataclasses import dataclass as piece, replace
else:

    def piece(*, frozen: bool, eq: bool = True) -> Callable[[type], type]:
        """Make a class a dataclass that is frozen to type checkers. With ``eq`` it has the hash of its fields."""

        def decorated(cls: type) -> type:
            made = dataclass(eq=eq, unsafe_hash=eq)(cls)
            if eq:
                made.__hash__ = remembered(made.__hash__)
            return made

        return decorated

    def replace(piece: Any, **changes: Any) -> Any:
        """Return a copy of ``piece`` with other values of some fields; what is remembered of it stays behind."""
        for name in piece.__match_args__:
            if name not in changes:
                changes[name] = getattr(piece, name)
        return type(piece)(**changes)
