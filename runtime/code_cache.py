"""Generated code in the kernel cache, under a key of the program instead of its text.

In: a key and a function that generates code. Out: the code, from the cache where it is there whole. With the text at hand
the library is found as ever, under the key of its text.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from stagedtensor.runtime.cpu_code import CpuCode, loads
from stagedtensor.runtime.kernel_cache import KernelCache

logger = logging.getLogger(__name__)


def cached_code(cache: KernelCache, key: str, generate: Callable[[], CpuCode]) -> CpuCode:
    """Return the code of ``key``; ``generate`` makes it where the cache lacks it or holds what cannot be read."""
    made: list[CpuCode] = []

    def build(path: Path) -> None:
        made.append(generate())
        path.write_text(made[0].dumps(), encoding="utf-8")

    path = cache.get_or_build(key, build, suffix=".json")
    if made:
        return made[0]
    try:
        return loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:  # cleared meanwhile, or not ours
        logger.info("generating the code of %s anew: %s", key, error)
        return generate()
