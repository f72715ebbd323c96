"""The connected component of some nodes: everything whose shape may bear on theirs.

In: nodes. Out: all nodes and all scopes reached through records, consumers, assignments, gradients, optimizer state,
composite borders and captured sizes, in construction order. Nodes share a shape with their ``owner_of_shape``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from stagedtensor.dims import CapturedDim
from stagedtensor.node import Node, Role
from stagedtensor.statements import Composite, Scope


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
    """Collect the connected component of ``nodes``; without ``uses`` only what they are computed from.

    Writes of one target that read the same nodes stay in the order in which they were made.
    """
    seen = set(nodes)
    waiting = list(seen)
    scopes: dict[Scope, None] = {}
    entered: set[Composite] = set()
    owners: set[Node] = set()
    while waiting:
        node = waiting.pop()
        owner = owner_of_shape(node)
        owners.add(owner)
        near = [owner]
        for scope in _scopes(node, uses):
            if scope not in scopes:
                scopes[scope] = None
                near += scope.nodes
                near.append(scope.result)
                near += _anchors(scope.sizes.values())
        near += _neighbours(node, uses, entered)
        for other in near:
            if other not in seen:
                seen.add(other)
                waiting.append(other)
    ordered = sorted(
        scopes, key=lambda scope: (scope.result.number, [node.number for node in scope.nodes], scope.label)
    )
    numbered = sorted(owners, key=attrgetter("number"))
    return Component(tuple(numbered), tuple(ordered), _plain_numbers(numbered))


def _scopes(node: Node, uses: bool) -> list[Scope]:
    found = [node.record.scope] if node.record is not None else []
    if uses:
        found += [record.scope for record in node.consumers]
        found += [writer for writer in node.writers if isinstance(writer, Scope)]
    return found


def _neighbours(node: Node, uses: bool, entered: set[Composite]) -> list[Node]:
    """Of a record its result is enough, whose operands follow; the members of a composite are told once."""
    near = [other for other in (node.value, node.gradient if uses else None, node.owner) if other is not None]
    if node.record is not None:
        near += [operand.node for operand in node.record.operands]
        near.append(node.record.result)
    if uses:
        near += [record.result for record in node.consumers]
    border = node.composite
    if border is not None and border not in entered:
        entered.add(border)
        near += [operand.node for operand in border.operands]
        near += border.aliases
        near += [end for end in (border.inner, border.result) if end is not None]
    if node.declared is not None:
        rows = (node.declared.batch, node.declared.input, node.declared.output)
        near += _anchors(axis.size for row in rows for axis in row.axes)
    return near


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
