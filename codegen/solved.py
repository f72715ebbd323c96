"""What lowering takes: a program whose shapes, precisions and projections are solved.

In: the ordered statements of one routine and three functions that answer for nodes and statements. This module holds
no solver; the layers above fill it from theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stagedtensor.dims import Shape
from stagedtensor.node import Node, Role
from stagedtensor.precision import Prec
from stagedtensor.shapes.index import Projected
from stagedtensor.shapes.solution import ScopeShapes
from stagedtensor.statements import Scope, Statement

BOUND_ROLES = frozenset(
    (Role.PARAM, Role.STATE, Role.PLACEHOLDER, Role.HOST_SCALAR, Role.CELL, Role.CONSTANT, Role.LITERAL)
)
"""Roles whose nodes live in the context's store (a scalar literal never becomes a buffer)."""


@dataclass(frozen=True)
class SolvedProgram:
    """The statements of one routine, in order, with everything that lowering asks about them.

    ``comments`` gives the name path of the part each statement belongs to ("" for none). ``shape`` and ``prec`` answer
    for every node the statements mention, ``projected`` expands a statement into plain accesses, once per block choice
    of a concatenation. Nodes of ``keep`` are stored and stay visible after a run.
    """

    name: str
    statements: tuple[Statement, ...]
    comments: tuple[str, ...]
    shape: Callable[[Node], Shape]
    prec: Callable[[Node], Prec]
    projected: Callable[[Statement], tuple[Projected, ...]]
    keep: frozenset[Node] = frozenset()
    saturates: Callable[[Node], bool] = lambda node: bool(node.saturate)
    """Whether finite overflow at a store to the node gives the greatest finite value."""
    extents: Callable[[Scope], ScopeShapes] | None = None
    """The solved extents of a scope, which with its spec decide what ``projected`` gives; asked for by fingerprints."""

    def is_external(self, node: Node) -> bool:
        """Whether the host or another routine may see the node's buffer."""
        return node.role in BOUND_ROLES or node.observable or node in self.keep
