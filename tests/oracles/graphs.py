"""Small hand-built graphs for tests of the shape solver and of projection: nodes, scopes and statements, no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stagedtensor.dims import DeclaredAxis, DeclaredRow, DeclaredShape, Size
from stagedtensor.node import Node, Role
from stagedtensor.source import Source
from stagedtensor.specs import ALL_ROWS, CONTRACTION, AxisTerm, Name, RowSpec, ShapeSpec, Spec, pointwise
from stagedtensor.statements import Access, Apply, Expr, Operand, OpRecord, Scope, Statement, WriteOp

Axes = Sequence[Size | tuple[str, Size]] | None


def _row(axes: Axes) -> DeclaredRow:
    if axes is None:
        return DeclaredRow(open=True)
    pairs = [axis if isinstance(axis, tuple) else (None, axis) for axis in axes]
    return DeclaredRow(tuple(DeclaredAxis(size, label) for label, size in pairs))


def line(number_: int) -> Source:
    """A line of an imagined user file, for messages."""
    return Source("model.py", number_)


def data(name: str, batch: Axes = (), input_: Axes = (), output: Axes = (), *, at: int = 0) -> Node:
    """A placeholder; None rows are open."""
    shape = DeclaredShape(_row(batch), _row(input_), _row(output))
    return Node(Role.PLACEHOLDER, name, declared=shape, source=line(at))


def param(name: str, input_: Axes = None, output: Axes = None, *, at: int = 0) -> Node:
    """A parameter: rows left out are inferred, batch axes it has none."""
    shape = DeclaredShape(_row(()), _row(input_), _row(output))
    return Node(Role.PARAM, name, declared=shape, source=line(at))


def number(value: float) -> Node:
    """A literal number."""
    node = Node(Role.LITERAL, str(value), declared=DeclaredShape())
    node.literal = value
    return node


def op(
    kind: str,
    nodes: Sequence[Node],
    spec: Spec,
    *,
    reduction: WriteOp | None = None,
    combine: str = "mul",
    expr: Expr | None = None,
    declared: DeclaredShape | None = None,
    at: int = 0,
    **scope: Any,
) -> Node:
    """Apply an op: a result node with its record and one forward statement."""
    result = Node(Role.OP, f"{kind}_result", declared=declared, source=line(at))
    found = Scope(spec, tuple(nodes), result, result.source, kind, **scope)
    reads = [Access(node, rows) for node, rows in zip(nodes, spec.operands, strict=True)]
    if expr is None:
        expr = reads[0]
        for read in reads[1:]:
            expr = Apply(combine, (expr, read))
    statement = Statement(Access(result, spec.result), expr, found, op=reduction, source=result.source)
    record = OpRecord(kind, tuple(Operand(node) for node in nodes), result, found, (statement,))
    result.record = record
    for node in dict.fromkeys(nodes):
        node.consumers.append(record)
    return result


def point(kind: str, *nodes: Node, at: int = 0) -> Node:
    """A pointwise op."""
    expr = None
    if len(nodes) == 1:
        expr = Apply(kind, (Access(nodes[0], ALL_ROWS),))
    return op(kind, nodes, pointwise(len(nodes)), combine=kind, expr=expr, at=at)


def matmul(lhs: Node, rhs: Node, *, at: int = 0) -> Node:
    """``lhs @ rhs``."""
    return op("matmul", (lhs, rhs), CONTRACTION, reduction="add", at=at)


def assign(target: Node, *nodes: Node, at: int = 0) -> Scope:
    """An assignment of a pointwise expression of ``nodes`` to ``target``."""
    scope = Scope(pointwise(len(nodes)), nodes, target, line(at), "assign", derives=False)
    target.writers.append(scope)
    return scope


def out(*terms: AxisTerm | str, variable: str | None = None) -> ShapeSpec:
    """A spec with an output row only; strings are names."""
    named = tuple(Name(term) if isinstance(term, str) else term for term in terms)
    return ShapeSpec(output=RowSpec(named, variable))


def einsum(operands: Sequence[ShapeSpec], result: ShapeSpec, text: str = "") -> Spec:
    """An explicit spec, which does not broadcast."""
    return Spec(tuple(operands), result, text=text)


def forward(node: Node) -> Statement:
    """The forward statement of an op result."""
    assert node.record is not None
    return node.record.statements[0]


def gradient_of(node: Node) -> Node:
    """A gradient node with the shape of ``node``."""
    if node.gradient is None:
        node.gradient = Node(Role.GRADIENT, f"{node.label}.grad", value=node)
    return node.gradient


def backward(result: Node, operand: int) -> Statement:
    """The gradient statement of one operand of a product: roles swapped in the forward scope."""
    statement = forward(result)
    scope = statement.scope
    expr: Expr = Access(gradient_of(result), scope.spec.result)
    for place, (node, rows) in enumerate(zip(scope.nodes, scope.spec.operands, strict=True)):
        if place != operand:
            expr = Apply("mul", (expr, Access(node, rows)))
    target = Access(gradient_of(scope.nodes[operand]), scope.spec.operands[operand])
    return Statement(target, expr, scope, op="add", reset=True)
