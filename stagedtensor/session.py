"""Sessions: the arena of everything built by the user, with its precision defaults.

A session numbers its nodes and keeps the ordered list of conditional precision updates. Graphs hang together through
``Node.record`` and ``Node.consumers``, so a session keeps no node alive. It solves nothing.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from .precision import Prec, f32, precision


class Session:
    """Holds every node built while it is current; use as a context manager.

    ``default_prec`` and ``default_grad_prec`` are captured by nodes at construction. A default session always exists.
    """

    def __init__(self, *, default_prec: Any = f32, default_grad_prec: Any = f32) -> None:
        self.default_prec: Prec = precision(default_prec)
        self.default_grad_prec: Prec = precision(default_grad_prec)
        self._count = 0
        self.updates: list[Any] = []
        """Conditional precision updates (``policy.Update``) in the order they were made."""
        self._tokens: list[Any] = []

    def next_number(self) -> int:
        """Return a fresh number; numbers grow in construction order."""
        self._count += 1
        return self._count

    def __enter__(self) -> Session:
        self._tokens.append(_current.set(self))
        return self

    def __exit__(self, *exc: object) -> None:
        _current.reset(self._tokens.pop())


_default = Session()
_current: ContextVar[Session | None] = ContextVar("stagedtensor_session", default=None)


def current_session() -> Session:
    """Return the innermost open session, else the process-wide default one."""
    return _current.get() or _default


def open_session() -> Session | None:
    """Return the innermost open session, None where only the process-wide default one is there."""
    return _current.get()
