"""The open precision region: what building ops asks of it.

``boundary`` implements regions; the functions that make nodes know this protocol only: which region is open, how a
tensor is read across an edge, and what a region says of a node made inside. The open region is a context variable,
invisible to other threads and tasks.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Protocol

from .precision import Prec


class Region(Protocol):
    """The part of a model built under one ``stage`` that names a precision."""

    @property
    def name(self) -> str:
        """The name that ``stage`` was given."""

    @property
    def prec(self) -> Prec:
        """The precision of activations made inside."""

    @property
    def parent(self) -> Region | None:
        """The region around, None at the top."""

    def carry(self, tensor: Any, reader: Region | None) -> Any:
        """Return ``tensor`` as ``reader`` (None: the top) reads it; this region is the reader or the maker."""

    def adopt(self, node: Any) -> None:
        """Specify the precision of a node that was made inside, unless it has its own or is an integer."""


_region: ContextVar[Region | None] = ContextVar("stagedtensor_region", default=None)


def open_region() -> Region | None:
    """Return the innermost open region, None at the top."""
    return _region.get()
