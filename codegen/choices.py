"""What may be chosen about the schedule of a routine without changing a bit of its results.

In: nothing, or a choice by name. Out: :class:`Choices`, part of the key of everything that is generated with them. The
order of sums, accumulators and roundings are none of these: lanes, parts and blocks of reductions depend on shape and
target alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Choices:
    """Settings of the cost model that move work about; the defaults are what a compile without tuning takes.

    ``slabs``: kernels around a large matrix run together, one slab of it at a time. ``panels``: an operand that could
    be read where it lies may be copied into panels. ``tile_vectors`` and ``tile_rows``: the widest and highest register
    tile. ``cache_bytes``: what is taken to stay in a core's cache. ``one_thread``: run on the calling thread alone;
    None: by size.
    """

    slabs: bool = True
    panels: bool = True
    tile_vectors: int = 6
    tile_rows: int = 8
    cache_bytes: int = 1 << 20
    one_thread: bool | None = None

    @property
    def schedule(self) -> Choices:
        """The part that generated source depends on."""
        return replace(self, one_thread=None)

    def dumps(self) -> dict[str, Any]:
        """Return the choices as a dictionary of plain values, for :meth:`loads`."""
        return asdict(self)

    @staticmethod
    def loads(raw: Mapping[str, Any]) -> Choices:
        """Return what :meth:`dumps` gave; TypeError or ValueError for anything else."""
        found = Choices(**raw)
        kinds = {"slabs": bool, "panels": bool, "tile_vectors": int, "tile_rows": int, "cache_bytes": int}
        if any(type(getattr(found, name)) is not kind for name, kind in kinds.items()):
            raise ValueError(f"no choices: {raw!r}")
        if found.one_thread not in (None, True, False) or found.tile_vectors < 1 or found.tile_rows < 1:
            raise ValueError(f"no choices: {raw!r}")
        return found


DEFAULT = Choices()
"""The cost model's own choices."""
