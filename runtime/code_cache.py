"""What was found out about a program, in the kernel cache: generated code, the winner of a search.

In: a key and a function that makes a value, with its form as text. Out: the value, from the cache where it is there
whole. With the text of generated code at hand the library is found as ever, under the key of its text.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from stagedtensor.runtime.kernel_cache import KernelCache

logger = logging.getLogger(__name__)

Value = TypeVar("Value")


def cached_value(
    cache: KernelCache,
    key: str,
    make: Callable[[], Value],
    dumps: Callable[[Value], str],
    loads: Callable[[str], Value],
) -> Value:
    """Return the value of ``key``; ``make`` makes it where the cache lacks it or holds what ``loads`` cannot read."""
    made: list[Value] = []

    def build(path: Path) -> None:
        made.append(make())
        path.write_text(dumps(made[0]), encoding="utf-8")

    path = cache.get_or_build(key, build, suffix=".json")
    if made:
        return made[0]
    try:
        return loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:  # cleared meanwhile, or not ours
        logger.info("making what belongs to %s anew: %s", key, error)
        return make()
