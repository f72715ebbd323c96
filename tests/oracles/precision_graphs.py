"""A small builder of node graphs for tests of the precision rules, without shapes, statements' trees or autodiff.

Its method names follow the public language, so that a test written on it reads the same on tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from stagedtensor.node import Node, Role, Specified
from stagedtensor.op_table import OPS
from stagedtensor.precision import Prec, i32, precision
from stagedtensor.session import Session
from stagedtensor.source import Source
from stagedtensor.specs import ALL_ROWS, CONTRACTION, Name, RowSpec, ShapeSpec, Spec, pointwise
from stagedtensor.statements import Composite, Operand, OpRecord, Scope, Slot

SUM_ALL = Spec((ShapeSpec(output=RowSpec((Name("i"),))),), ShapeSpec())


def _caller() -> Source:
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return Source(frame.f_code.co_filename, frame.f_lineno)


class Root:
    """What a policy needs of a tensor: its node and the parameters it depends on."""

    def __init__(self, node: Node) -> None:
        self.node = node

    @property
    def params(self) -> tuple[Any, ...]:
        """Parameter nodes upstream, as tensors, in construction order."""
        found: dict[Node, None] = {}
        stack = [self.node]
        while stack:
            node = stack.pop()
            if node not in found:
                found[node] = None
                stack.extend(operand.node for operand in node.record.operands) if node.record else None
        return tuple(Root(node) for node in sorted(found, key=lambda node: node.number) if node.role is Role.PARAM)


class Graph:
    """Builds nodes in a session of its own."""

    def __init__(self, **defaults: Any) -> None:
        self.session = Session(**defaults)
        self._open: Composite | None = None

    # -- terminals --

    def _node(self, role: Role, label: str, **options: Any) -> Node:
        node = Node(role, label, source=_caller(), session=self.session, **options)
        if self._open is not None:
            node.composite = self._open.outermost
            node.tags = frozenset({self._open.name})
        return node

    def gradient_of(self, node: Node) -> None:
        """Give ``node`` a gradient node."""
        node.gradient = self._node(Role.GRADIENT, f"{node.label}.grad", value=node)
        node.gradient.composite, node.gradient.tags = node.composite, node.tags

    def placeholder(self, label: str, prec: Any = None, *, requires_grad: bool = False) -> Node:
        """An open terminal, or one with a precision."""
        node = self._node(Role.PLACEHOLDER, label, top_down=True)
        return self._finish(node, prec, requires_grad)

    def param(self, label: str, prec: Any = None, *, trainable: bool = True) -> Node:
        """A parameter with its gradient."""
        return self._finish(self._node(Role.PARAM, label, top_down=True), prec, trainable)

    def _finish(self, node: Node, prec: Any, gradient: bool) -> Node:
        if prec is not None:
            node.specified = Specified(precision(prec), node.source)
        if gradient:
            self.gradient_of(node)
        return node

    def literal(self, value: Any) -> Node:
        """A Python number or nested list."""
        node = self._node(Role.LITERAL, str(value), top_down=True)
        node.literal = value
        return node

    def array(self, label: str, prec: Any) -> Node:
        """Array data with its own format."""
        node = self._node(Role.CONSTANT, label)
        node.specified = Specified(precision(prec), node.source, "data")
        return node

    def range(self, n: int) -> Node:
        """0 .. n-1 as i32."""
        node = self._node(Role.RANGE, f"range{n}")
        node.specified = Specified(i32, node.source, "range")
        return node

    def sampler(self, label: str) -> Node:
        """Uniform random values."""
        return self._node(Role.SAMPLER, label, top_down=True)

    # -- ops --

    def op(
        self,
        kind: str,
        *operands: Any,
        label: str = "",
        slots: Sequence[Slot] | None = None,
        spec: Spec | None = None,
        top_down: bool = False,
        prec: Prec | None = None,
        by: Any = "cast",
        gradient: bool = True,
        composite: Composite | None = None,
        **attributes: Any,
    ) -> Node:
        """Apply an op; numbers become literals."""
        nodes = tuple(operand if isinstance(operand, Node) else self.literal(operand) for operand in operands)
        row = OPS.get(kind)
        if slots is None:
            predicates = row.predicates if row is not None and row.op_class == "select" else ()
            slots = [Slot.PREDICATE if at in predicates else Slot.DATA for at in range(len(nodes))]
        result = self._node(Role.OP, label or kind, top_down=top_down)
        scope = Scope(spec or pointwise(len(nodes)), nodes, result, result.source, kind)
        result.record = OpRecord(
            kind, tuple(map(Operand, nodes, slots)), result, scope, (), None, attributes, composite
        )
        for node in dict.fromkeys(nodes):
            node.consumers.append(result.record)
        if prec is not None:
            result.specified = Specified(prec, result.source, by)
        differentiable = gradient and (row is None or row.differentiable) and (prec is None or prec.is_float)
        if differentiable and any(
            node.gradient is not None for node, slot in zip(nodes, slots, strict=True) if slot is Slot.DATA
        ):
            self.gradient_of(result)
        return result

    def matmul(self, left: Node, right: Node, label: str = "matmul") -> Node:
        """``left @ right``."""
        return self.op("matmul", left, right, label=label, spec=CONTRACTION, reduction="add", combine="mul")

    def sum(self, x: Node, label: str = "sum", *, kind: str = "sum", reduction: str = "add") -> Node:
        """A reduction of one axis."""
        return self.op(kind, x, label=label, spec=SUM_ALL, reduction=reduction)

    def cast(self, x: Node, prec: Prec, label: str = "cast") -> Node:
        """A cast."""
        return self.op("cast", x, label=label, prec=prec)

    def one_hot(self, ids: Node, label: str = "one_hot") -> Node:
        """One-hot rows: top-down."""
        return self.op("one_hot", ids, slots=[Slot.INDEX], label=label, top_down=True)

    def gather(self, table: Node, ids: Node, label: str = "gather") -> Node:
        """Rows of ``table``."""
        return self.op(
            "gather", table, ids, slots=[Slot.DATA, Slot.INDEX], label=label, spec=Spec((ALL_ROWS, ALL_ROWS), ALL_ROWS)
        )

    def composite(
        self,
        name: str,
        function: Callable[..., Node],
        *operands: Node,
        float_only: bool = False,
        wide_result: bool = False,
        index: Sequence[int] = (),
    ) -> Node:
        """Apply ``function`` to interior aliases of the operands."""
        slots = [Slot.INDEX if at in index else Slot.DATA for at in range(len(operands))]
        group = Composite(
            name,
            _caller(),
            tuple(map(Operand, operands, slots)),
            parent=self._open,
            float_only=float_only,
            wide_result=wide_result,
        )
        outside, self._open = self._open, group
        aliases = tuple(
            self.op("enter", node, slots=[slot], label=f"{node.label}.in", composite=group)
            for node, slot in zip(operands, slots, strict=True)
        )
        inner = function(*aliases)
        self._open = outside
        result = self.op("leave", inner, label=name, composite=group)
        group.aliases, group.inner, group.result = aliases, inner, result
        result.tags |= {name}
        return result

    def softmax(self, x: Node) -> Node:
        """A softmax as the library builds it: maximum, exponential, sum, quotient inside a composite."""

        def inside(x: Node) -> Node:
            top = self.sum(x, "top", kind="max", reduction="max")
            exponential = self.op("exp", self.op("sub", x, top), label="exponential")
            return self.op("div", exponential, self.sum(exponential, "total"), label="quotient")

        return self.composite("softmax", inside, x, float_only=True)
