"""The connected component of some nodes: everything whose shape may bear on theirs.

In: nodes. Out: all nodes and all scopes reached through records, consumers, assignments, gradients, optimizer state,
composite borders and captured sizes, in construction order. Nodes share a shape with their ``owner_of_shape``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from stagedtensor.dims import CapturedDim
from stagedtensor.node import Node, Role
from stagedtensor.statements import Scope


def owner_of_shape(node: Node) -> Node:
    """Return the node that decides a node's shape: the value of a gradient, the parameter of an optimizer state."""
    node = node.shape_node
    while node.role is Role.STATE and node.owner is not None and node.declared is None:
        node = node.owner.shape_node
    return node


@dataclass(frozen=True)
class Component:
    """Shape-owning nodes in construction order, and the scopes that relate them."""

    nodes: tuple[Node, ...]
    scopes: tuple[Scope, ...]
    neutral: frozenset[Node]
    """Plain numbers and what is computed of them alone: broadcasting with one says nothing of the other side."""


def component(nodes: Iterable[Node], *, uses: bool = True) -> Component:
    """Collect the connected component of ``nodes``; without ``uses`` only what they are computed from."""
    seen: dict[Node, None] = {}
    scopes: dict[Scope, None] = {}
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen[node] = None
        for scope in _scopes(node, uses):
            if scope not in scopes:
                scopes[scope] = None
                waiting += [*scope.nodes, scope.result, *_anchors(scope.sizes.values())]
        waiting += _neighbours(node, uses)
    owners = sorted({owner_of_shape(node) for node in seen}, key=lambda node: node.number)
    ordered = sorted(
        scopes, key=lambda scope: (scope.result.number, [node.number for node in scope.nodes], scope.label)
    )
    return Component(tuple(owners), tuple(ordered), _plain_numbers(owners))


def _scopes(node: Node, uses: bool) -> Iterator[Scope]:
    if node.record is not None:
        yield node.record.scope
    if not uses:
        return
    for record in node.consumers:
        yield record.scope
    for writer in node.writers:
        if isinstance(writer, Scope):
            yield writer


def _neighbours(node: Node, uses: bool) -> Iterator[Node]:
    yield owner_of_shape(node)
    for other in (node.value, node.gradient if uses else None, node.owner):
        if other is not None:
            yield other
    if node.record is not None:
        yield from (operand.node for operand in node.record.operands)
        yield node.record.result
    for record in node.consumers if uses else ():
        yield record.result
        yield from (operand.node for operand in record.operands)
    border = node.composite
    if border is not None:
        yield from (operand.node for operand in border.operands)
        yield from border.aliases
        yield from (end for end in (border.inner, border.result) if end is not None)
    if node.declared is not None:
        rows = (node.declared.batch, node.declared.input, node.declared.output)
        yield from _anchors(axis.size for row in rows for axis in row.axes)


def _anchors(sizes: Iterable[Any]) -> Iterator[Node]:
    for size in sizes:
        if isinstance(size, CapturedDim) and isinstance(size.anchor, Node):
            yield size.anchor


def _plain_numbers(nodes: Iterable[Node]) -> frozenset[Node]:
    plain: set[Node] = set()
    for node in nodes:  # in construction order, so operands come before results
        if node.role in (Role.LITERAL, Role.HOST_SCALAR):
            declared = node.declared
            if declared is None or not (declared.batch.axes or declared.input.axes or declared.output.axes):
                plain.add(node)
            continue
        operands = node.record.operands if node.record is not None and node.role is Role.OP else ()
        if operands and all(operand.node in plain for operand in operands):
            plain.add(node)
    return frozenset(plain)
