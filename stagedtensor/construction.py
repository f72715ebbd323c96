"""Making nodes: what every new node gets from where it is made.

In: a role and a label. Out: a node inside the open composite and precision region, perhaps with a gradient node. The
open composite, and whether gradients are wanted, are context variables. No ops are applied here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from .node import Node, Role
from .statements import Composite

_composite: ContextVar[Composite | None] = ContextVar("stagedtensor_composite", default=None)
_without_gradient: ContextVar[bool] = ContextVar("stagedtensor_without_gradient", default=False)


def new_node(role: Role, label: str, **options: Any) -> Node:
    """Create a node inside the open composite, if any."""
    node = Node(role, label, **options)
    composite = _composite.get()
    if composite is not None:
        node.composite = composite.outermost
        composite.outermost.interior.append(node)
        names = []
        part: Composite | None = composite
        while part is not None:
            names.append(part.name)
            part = part.parent
        node.tags = frozenset(names)
    return node


def adopt(node: Node) -> None:
    """Let the region that a new node was made in fix its precision; the interior of a composite follows its result."""
    if node.region is not None and _composite.get() is None:
        node.region.adopt(node)


def add_gradient(node: Node) -> None:
    """Give ``node`` a gradient node."""
    gradient = new_node(Role.GRADIENT, f"{node.label}.grad", value=node, source=node.source, session=node.session)
    gradient.composite, gradient.tags = node.composite, node.tags
    node.gradient = gradient


@contextmanager
def no_gradient() -> Iterator[None]:
    """Build ops whose results carry no gradient."""
    token = _without_gradient.set(True)
    try:
        yield
    finally:
        _without_gradient.reset(token)
