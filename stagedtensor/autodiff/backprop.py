"""The reverse walk: from roots to backward statements.

The order is the reverse of a depth-first post-order from the roots by operand slot, never by node numbers, so gradient
accumulation order is a property of the graph alone. Only what leads to a wanted gradient is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stagedtensor.errors import GradientError
from stagedtensor.node import Node, Role, ancestors
from stagedtensor.source import user_source
from stagedtensor.specs import ALL_ROWS, FILL
from stagedtensor.statements import Access, Expr, NumberLiteral, Scope, Slot, Stage, Statement
from stagedtensor.tensor import Tensor

from .structural import STRUCTURAL


def useful_nodes(roots: Sequence[Node], wanted: Iterable[Node] | None = None) -> list[Node]:
    """Return the nodes whose gradient is needed, in depth-first post-order.

    ``wanted`` are terminals; None wants every terminal that carries a gradient. What the roots reach only through ops
    without a gradient (behind ``stop_gradient``, as an index) needs none.
    """
    targets = None if wanted is None else set(wanted)
    order = ancestors(roots)
    useful: dict[Node, None] = {}
    for node in order:
        if node.gradient is None:
            continue
        if node.record is None:
            if targets is None or node in targets:
                useful[node] = None
        elif node.record.rule is not None and any(
            operand.slot is Slot.DATA and operand.node in useful for operand in node.record.operands
        ):
            useful[node] = None
    reached = set(roots)
    for node in reversed(order):
        if node in reached and node.record is not None and node.record.rule is not None:
            reached.update(operand.node for operand in node.record.operands if operand.slot is Slot.DATA)
    return [node for node in useful if node in reached]


def trained(roots: Sequence[Node]) -> list[Node]:
    """Return the parameters whose gradient a backward pass from ``roots`` writes, in construction order."""
    found = [node for node in useful_nodes(roots) if node.role is Role.PARAM]
    return sorted(found, key=lambda node: node.number)


def backward_statements(roots: Sequence[Node], useful: Sequence[Node]) -> list[Statement]:
    """Return the statements that propagate the roots' gradients to the useful nodes."""
    members = set(useful)
    made: list[Statement] = []
    for node in reversed(ancestors(roots)):
        record = node.record
        if node in members and record is not None and record.rule is not None:
            made.extend(STRUCTURAL[record.rule](record, members))
    return made


def fill(target: Node, value: Expr, stage: Stage, text: str) -> Statement:
    """``target =: value`` over all cells."""
    scope = Scope(FILL, (), target.shape_node, user_source(), "fill", derives=False)
    return Statement(Access(target, ALL_ROWS), value, scope, stage=stage, source=scope.source, text=text)


def zero_statements(nodes: Iterable[Node]) -> list[Statement]:
    """Zero the gradients of value ``nodes``."""
    made = []
    for node in nodes:
        assert node.gradient is not None
        made.append(fill(node.gradient, NumberLiteral(0.0), Stage.ZERO, f"{node.gradient.label} =: 0"))
    return made


def gradient_of(root: Tensor, what: str) -> Node:
    """Return the gradient node of ``root`` or say that it trains nothing."""
    if root.node.gradient is None:
        raise GradientError(
            f"{what}: {root.label!r} has no gradient: no trainable parameter (or placeholder with requires_grad=True) "
            f"leads to it, so the loss trains no parameters\n  {root.node.source.quoted()}\n  {user_source().quoted()}"
        )
    return root.node.gradient
