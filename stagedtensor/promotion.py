"""Helpers about pairs and chains of formats: which join, which convert, whether a chain of converts is possible.

In: formats or anything ``precision`` accepts. Out: formats and truth values, or PrecisionError naming the formats.
Nothing is converted here.
"""

from __future__ import annotations

from collections.abc import Sequence

from .errors import PrecisionError
from .precision import Prec, PrecLike, join, join_requirement, precision, u4x32
from .source import user_source


def promote(*precs: PrecLike) -> Prec:
    """Return the least format for values of all of ``precs``: :func:`stagedtensor.join` under another name.

    >>> promote("f16", "bf16"), promote("i32", "f16"), promote("u64", "i8", "f16")
    (f32, f16, f16)
    """
    return join(*precs)


def is_compatible(a: PrecLike, b: PrecLike) -> bool:
    """Return whether two formats join: all do, but counter state joins only with itself."""
    return not join_requirement(precision(a), precision(b)).conflict


def is_convertible(a: PrecLike, b: PrecLike) -> bool:
    """Return whether a tensor of format ``a`` can be cast to ``b``: all numbers can, counter state only to itself."""
    first, second = precision(a), precision(b)
    return first is second or u4x32 not in (first, second)


def validate_compatible(a: PrecLike, b: PrecLike) -> None:
    """Raise PrecisionError, naming both, where two formats do not join."""
    if not is_compatible(a, b):
        raise PrecisionError(
            f"{precision(a)} and {precision(b)} have no common format ({user_source().quoted()}); counter state is read by "
            "samplers only"
        )


def validate_convertible(a: PrecLike, b: PrecLike) -> None:
    """Raise PrecisionError, naming both, where there is no cast."""
    if not is_convertible(a, b):
        raise PrecisionError(
            f"{precision(a)} cannot be cast to {precision(b)} ({user_source().quoted()}); counter state is not a number"
        )


def is_valid_chain(precs: Sequence[PrecLike]) -> bool:
    """Return whether casts lead through ``precs`` one after the other; an empty chain is none.

    >>> is_valid_chain(["f32", "f16", "i32", "i8"])
    True
    """
    formats = [precision(item) for item in precs]
    return bool(formats) and _first_bad(formats) is None


def validate_chain(precs: Sequence[PrecLike]) -> Sequence[PrecLike]:
    """Return ``precs``; raises PrecisionError with the index of the first pair without a cast, or for an empty chain."""
    formats = [precision(item) for item in precs]
    if not formats:
        raise PrecisionError(f"a chain of casts has at least one format ({user_source().quoted()})")
    bad = _first_bad(formats)
    if bad is not None:
        raise PrecisionError(
            f"chain of casts, pair {bad}: {formats[bad]} cannot be cast to {formats[bad + 1]} ({user_source().quoted()})"
        )
    return precs


def _first_bad(formats: Sequence[Prec]) -> int | None:
    for at in range(len(formats) - 1):
        if not is_convertible(formats[at], formats[at + 1]):
            return at
    return None
