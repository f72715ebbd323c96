"""``Params``: the tuple that ``loss.params`` gives. It knows nothing of what it holds but identity."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .tensor import Tensor


class Params(tuple["Tensor", ...]):
    """A tuple of parameters whose membership test is identity (``==`` on tensors builds a comparison)."""

    __slots__ = ()

    def __contains__(self, item: object) -> bool:
        return any(entry is item for entry in self)

    def index(self, item: Any, *bounds: Any) -> int:
        """Return the position of ``item`` by identity."""
        for position, entry in enumerate(self):
            if entry is item:
                return position
        raise ValueError(f"{item!r} is not among these parameters")
