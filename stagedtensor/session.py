"""Sessions: the arena of everything built by the user, with its precision defaults.

A session numbers its nodes, keeps its op records in construction order and the ordered list of conditional precision
updates. It solves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from .precision import Prec, f32, precision

if TYPE_CHECKING:
    from .node import Node
    from .statements import OpRecord


class Session:
    """Holds every node built while it is current; use as a context manager.

    ``default_prec`` and ``default_grad_prec`` are captured by nodes at construction. A default session always exists.
    """

    def __init__(self, *, default_prec: Any = f32, default_grad_prec: Any = f32) -> None:
        self.default_prec: Prec = precision(default_prec)
        self.default_grad_prec: Prec = precision(default_grad_prec)
        self.nodes: list[Node] = []
        self.records: list[OpRecord] = []
        self.updates: list[Any] = []
        """Conditional precision updates (``policy.Update``) in the order they were made."""
        self._tokens: list[Any] = []
        self._label_counts: dict[str, int] = {}

    def add(self, node: Node) -> int:
        """Register ``node`` and return its number within the session."""
        self.nodes.append(node)
        return len(self.nodes) - 1

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


@contextmanager
def session_of(session: Session) -> Iterator[Session]:
    """Make ``session`` current for a block (nodes added to an existing graph join its session)."""
    token = _current.set(session)
    try:
        yield session
    finally:
        _current.reset(token)
