"""What the shape solver found: shapes by node, extents by scope, captured sizes, and where they come from.

In: the solver's results. Out: answers to lookups; it changes nothing but its own cache of scopes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from stagedtensor.dims import MEMORY_ORDER, Axis, DynamicDim, RowKind, Shape, Size
from stagedtensor.errors import InternalError, ShapeError
from stagedtensor.node import Node
from stagedtensor.source import Source
from stagedtensor.statements import Scope

from .graph import owner_of_shape
from .rows import Extent


@dataclass(frozen=True)
class ScopeShapes:
    """The solved variables of one scope: extents by name, by row variable (left to right) and by anonymous key."""

    names: dict[str, Extent]
    rows: dict[str, tuple[Extent, ...]]
    anonymous: dict[int, Extent]


class ShapeSolution:
    """The solved shapes of one connected component."""

    def __init__(
        self,
        shapes: dict[Node, Shape],
        captures: dict[int, Extent],
        origins: Callable[[Node], tuple[Source, ...]],
        scopes: dict[Scope, ScopeShapes],
        solve_scope: Callable[[Scope, ShapeSolution], ScopeShapes],
        undetermined: ShapeError | None = None,
    ) -> None:
        self._shapes = shapes
        self._captures = captures
        self._origins = origins
        self._scopes = scopes
        self._solve_scope = solve_scope
        self._undetermined = undetermined
        self._alike: dict[Hashable, ScopeShapes] = {}

    def shape(self, node: Node) -> Shape:
        """Return the shape of a node; a gradient has its value's, an optimizer state its parameter's.

        A terminal outside the solved graph answers too if every axis of it was declared with its size.
        """
        owner = owner_of_shape(node)
        found = self._shapes.get(owner) or declared_shape(owner)
        if found is None:
            if self._undetermined is not None:
                raise self._undetermined
            raise InternalError(f"{node!r} is not in the graph that was solved for shapes")
        return found

    def __contains__(self, node: Node) -> bool:
        return owner_of_shape(node) in self._shapes

    def captures(self) -> dict[int, Extent]:
        """Return every captured size by key."""
        return dict(self._captures)

    def capture(self, key: int) -> Extent:
        """Return the size captured under ``key``."""
        if key not in self._captures:
            raise InternalError(f"captured size {key} is not in the graph that was solved for shapes")
        return self._captures[key]

    def origin(self, node: Node) -> tuple[Source, ...]:
        """Return the user's lines that decided a node's shape, the node's own first."""
        return self._origins(owner_of_shape(node))

    def scope(self, scope: Scope) -> ScopeShapes:
        """Return the extents of a scope's iterators; a scope that no node records is solved on the fly.

        Its nodes must be in the solution, or terminals whose declared shape is complete.
        """
        found = self._scopes.get(scope)
        if found is None:
            found = self._scopes[scope] = self._solved_alike(scope)
        return found

    def _solved_alike(self, scope: Scope) -> ScopeShapes:
        """Solve a scope, once for all of one spec over nodes of the same shapes: the layers of a network have many."""
        result, nodes = scope.result, (*scope.nodes, scope.result)
        declares = scope.derives and result.declared is not None
        if scope.sizes or scope.captures or declares or not all([node in self for node in nodes]):
            return self._solve_scope(scope, self)
        facts = (scope.derives, result.role, result.owner is None, *(node.is_gradient for node in nodes))
        form = (scope.spec, facts, tuple(map(self.shape, nodes)))
        found = self._alike.get(form)
        if found is None:
            found = self._alike[form] = self._solve_scope(scope, self)
        return found


def declared_shape(node: Node) -> Shape | None:
    """Return the shape of a node that is frozen or declared to the last size, else None."""
    if node.settled_shape is not None:
        return node.settled_shape.shape
    if node.declared is None:
        return None
    rows: dict[RowKind, tuple[Axis, ...]] = {}
    for kind in MEMORY_ORDER:
        declared = node.declared.row(kind)
        if declared.open or any(not isinstance(axis.size, (int, DynamicDim)) for axis in declared.axes):
            return None
        rows[kind] = tuple(sized_axis(axis.size, axis.label) for axis in declared.axes)
    return Shape(**rows)


def sized_axis(size: Size, label: str | None) -> Axis:
    """Return the solved axis of a known size."""
    if isinstance(size, DynamicDim):
        return Axis(size.max, label, size)
    if isinstance(size, int):
        return Axis(size, label)
    raise InternalError(f"{size!r} is not a size that is known as declared")
