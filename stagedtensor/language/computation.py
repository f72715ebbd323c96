"""Computations from statement strings: names bound to tensors, one tree and one rounding per statement.

In: ``"m =: beta *. m + p.grad; p =- lr *. m"`` and what its names mean. Out: a ``Comp``. Operands broadcast to the
target and never widen it; ``~logic`` gives another index map. Assignments join the shape constraints of their target,
never its precision's. Nothing runs here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from stagedtensor.errors import GradientError, SpecError
from stagedtensor.node import Node, Role, refuse_encoded
from stagedtensor.op_table import OPS
from stagedtensor.program import Comp, forward
from stagedtensor.source import Source, user_source
from stagedtensor.specs import CONTRACTION, ShapeSpec, Spec, pointwise
from stagedtensor.statements import Access, Apply, Expr, NumberLiteral, Scope, Stage, Statement, WriteOp
from stagedtensor.tensor import Tensor, lift, tensor_of

from .caret import near, spec_error
from .einsum_parser import parse_spec
from .spec_domain import concatenations, removed
from .statement_parser import WHAT, Assignment, Call, Contraction, Number, Reference, Term, parse_statements

_ALIASES = {
    "power": "pow",
    "select": "where",
    "logical_and": "and",
    "logical_or": "or",
    "logical_not": "not",
}
FUNCTIONS: Mapping[str, tuple[str, int]] = MappingProxyType(
    {
        **{name: (name, row.arity) for name, row in OPS.items() if row.op_class != "random" and name != "identity"},
        **{alias: (op, OPS[op].arity) for alias, op in _ALIASES.items()},
        "clamp": ("clamp", 3),
    }
)
"""Functions of statement strings: name -> (table op, number of arguments). ``clamp(x, low, high)`` is two ops."""

_NOT_ASSIGNABLE = {
    Role.PLACEHOLDER: "data that the host feeds",
    Role.CONSTANT: "a constant",
    Role.LITERAL: "a constant",
    Role.RANGE: "a range",
    Role.SAMPLER: "a random tensor",
    Role.HOST_SCALAR: "a cell that only the host writes",
}


def computation(text: str, /, **names: Any) -> Comp:
    """Build a computation of statements ``target operator expression``, parted by ``;``.

    >>> import stagedtensor as st
    >>> p = st.param("p", output=[8])
    >>> m = st.param("m", output=[8], trainable=False, init=0.0)
    >>> lr = st.host_scalar("lr", 0.1)
    >>> descent = st.computation("m =: beta *. m + p.grad; p =- lr *. m", p=p, m=m, beta=0.9, lr=lr)

    ``=:`` sets; ``=+ =- =* =/ =@^ =@-`` add to, ..., keep the greatest or least of what the target holds; with a ``:``
    after ``=`` they start from their neutral element instead. ``+ - *. /. **. ~-``, comparisons and the functions of
    the op table (``where(c, a, b)``, ``sqrt``, ``maximum``, ``clamp(x, low, high)``, ``and(a, b)``, ...) are pointwise.
    ``c =:+ a * b`` contracts. ``~logic:"ij;jk=>ik"`` after a statement maps the operands, in order of appearance, to
    the target: ``total =+ g *. g ~logic:"...|...->...; ...|...->... =>"``.

    Names are tensors (``p.grad`` is the gradient), captured sizes, or numbers. A statement is evaluated at one compute
    precision and rounded once, at its store; numbers are never rounded to the target's format. A statement may read its
    own target.

    Raises SpecError with a caret for faults of syntax, unknown names and functions, and targets that cannot be
    assigned; GradientError where ``.grad`` does not exist.
    """
    source = user_source()
    assignments = parse_statements(text)
    bound = {name: _bind(name, value, source) for name, value in names.items()}
    statements = [_Builder(text, assignment, bound, source).statement() for assignment in assignments]
    fresh = [tensor for tensor in bound.values() if isinstance(tensor, Tensor) and _is_computed_here(tensor.node)]
    return Comp((*forward(*fresh).parts, *map(_registered, statements)))


def assign(
    target: Tensor | Node,
    op: WriteOp | None,
    build: Callable[..., Expr],
    *operands: Tensor | Node,
    spec: Spec | str | None = None,
    reset: bool = False,
    stage: Stage = Stage.UPDATE,
    text: str = "",
) -> Comp:
    """Build one assignment from Python: ``build`` maps the operands' accesses to the tree.

    ``op`` None sets, otherwise it accumulates, from the op's neutral element if ``reset``. ``spec`` is the index map
    (pointwise by default); the target exists, so it decides its own shape.

    >>> import stagedtensor as st
    >>> p, total = st.param("p", output=[8]), st.param("total", output=[], trainable=False)
    >>> squares = assign(total, "add", lambda g: Apply("mul", (g, g)), p.grad, spec="...|...->... =>")
    """
    source = user_source()
    nodes = tuple(_node(operand) for operand in operands)
    node = _node(target)
    refuse_encoded(node, "there is no assignment to")
    if spec is None:
        spec = pointwise(len(nodes))
    elif isinstance(spec, str):
        spec = parse_spec(spec, len(nodes), result_exists=True)
    accesses = tuple(map(Access, nodes, spec.operands))
    if op is None and removed(spec.operands, spec.result):
        raise SpecError(f"assign: a set of {node.label!r} cannot reduce axes\n  {source.quoted()}\n  give an op")
    scope = _scope(spec, nodes, node, source)
    statement = Statement(
        Access(node, spec.result), build(*accesses), scope, op, op is None or reset, stage, source, text
    )
    return Comp((_registered(statement),))


def _node(thing: Tensor | Node) -> Node:
    return thing if isinstance(thing, Node) else thing.node


def _scope(spec: Spec, nodes: Sequence[Node], target: Node, source: Source) -> Scope:
    """Return the scope of an assignment; the same assignment made again shares the first one's."""
    values = tuple(node.shape_node for node in nodes)
    for known in target.shape_node.writers:
        if isinstance(known, Scope) and known.spec == spec and known.nodes == values:
            return known
    return Scope(spec, values, target.shape_node, source, f"assignment to {target.label}", derives=False)


def _registered(statement: Statement) -> Statement:
    """Make the assignment a shape constraint of its target."""
    writers = statement.target.node.shape_node.writers
    if not any(known is statement.scope for known in writers):
        writers.append(statement.scope)
    return statement


# -- names --------------------------------------------------------------------------------------------------------


def _bind(name: str, value: Any, source: Source) -> Tensor | NumberLiteral:
    """Return what a name stands for: a tensor or a number."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Node):
        return tensor_of(value)
    if isinstance(value, np.bool_ | np.integer | np.floating):
        value = value.item()
    if isinstance(value, bool | int | float):
        return NumberLiteral(value)
    if hasattr(value, "__tensor__"):
        return lift(value)
    if value is None:
        raise GradientError(
            f"computation: {name!r} is None\n  {source.quoted()}\n"
            "  a tensor's grad is None where no parameter (or placeholder with requires_grad=True) leads to it"
        )
    raise SpecError(
        f"computation: {name!r} is {type(value).__name__}\n  {source.quoted()}\n"
        "  expected a tensor or a number; make arrays and lists tensors with st.constant"
    )


def _is_computed_here(node: Node) -> bool:
    """Extents, and cast twins: a twin always reads as the cast of its master's present value."""
    return node.record is not None and (node.record.kind == "extent" or bool(node.record.attributes.get("twin")))


# -- statements ---------------------------------------------------------------------------------------------------


@dataclass
class _Builder:
    """Builds one statement of a text."""

    text: str
    syntax: Assignment
    names: Mapping[str, Tensor | NumberLiteral]
    source: Source
    _rows: Iterator[ShapeSpec] = field(default_factory=lambda: iter(()))

    def statement(self) -> Statement:
        """Return the statement; its scope is not registered yet."""
        syntax = self.syntax
        target = self._target()
        references = [self._reads(term) for term in _references(syntax.expr)]
        nodes = tuple(node for node in references if node is not None)
        spec = self._spec(nodes)
        self._check_write(spec)
        self._rows = iter(spec.operands)
        expr = self._expr(syntax.expr, root=True)
        return Statement(
            Access(target, spec.result),
            expr,
            _scope(spec, nodes, target, self.source),
            syntax.op,
            syntax.reset,
            Stage.UPDATE,
            self.source,
            syntax.text,
        )

    def fault(self, offset: int, problem: str, expected: str = "", advice: str = "") -> SpecError:
        """Build the error for a place in the text."""
        return spec_error(self.text, offset, problem, what=WHAT, expected=expected, advice=advice, source=self.source)

    # -- names ----------------------------------------------------------------------------------------------------
    def _target(self) -> Node:
        reference = self.syntax.target
        value = self._lookup(reference)
        if isinstance(value, NumberLiteral):
            raise self.fault(
                reference.offset,
                f"{reference.name!r} is the number {value.value}",
                "a tensor as target",
                "keep a changing number in a cell: st.param(..., trainable=False)",
            )
        node = self._node(reference, value)
        record = node.record
        refuse_encoded(node, "there is no assignment to")
        what = _NOT_ASSIGNABLE.get(node.role)
        if record is not None and record.kind == "cast" and record.operands[0].node.role is Role.PARAM:
            what = f"a cast of the parameter {record.operands[0].node.label!r}"
        if what is not None:
            raise self.fault(
                reference.offset,
                f"{str(reference)!r} is {what} and cannot be assigned",
                "a parameter, a state, a gradient or a computed tensor as target",
                f"{node.label!r} was made {node.source.quoted()}",
            )
        return node

    def _lookup(self, reference: Reference) -> Tensor | NumberLiteral:
        value = self.names.get(reference.name)
        if value is None:
            raise self.fault(
                reference.offset,
                f"unknown name {reference.name!r}",
                "a name given by keyword",
                near(reference.name, self.names),
            )
        return value

    def _node(self, reference: Reference, value: Tensor) -> Node:
        if not reference.grad:
            return value.node
        gradient = value.node.gradient
        if gradient is None:
            raise GradientError(
                f"{reference}: {value.label!r} has no gradient\n  {self.syntax.text}\n  {self.source.quoted()}\n"
                f"  {value.label!r} was made {value.node.source.quoted()}\n"
                "  only what leads to a trainable parameter (or to a placeholder with requires_grad=True) has one"
            )
        return gradient

    def _reads(self, reference: Reference) -> Node | None:
        """Return the node a name reads, None for a number."""
        value = self._lookup(reference)
        if isinstance(value, Tensor):
            return self._node(reference, value)
        if reference.grad:
            raise GradientError(
                f"{reference}: {reference.name!r} is the number {value.value}, which has no gradient\n"
                f"  {self.syntax.text}\n  {self.source.quoted()}"
            )
        return None

    # -- index maps -----------------------------------------------------------------------------------------------
    def _spec(self, nodes: Sequence[Node]) -> Spec:
        syntax = self.syntax
        if syntax.logic is not None:
            return self._mapped(syntax.logic, len(nodes))
        if not isinstance(syntax.expr, Contraction):
            return pointwise(len(nodes))
        counts = []
        for side in (syntax.expr.left, syntax.expr.right):
            read = [self._reads(reference) for reference in _references(side)]
            counts.append(sum(node is not None for node in read))
            if not counts[-1]:
                raise self.fault(
                    syntax.expr.offset,
                    "'*' contracts two tensors, and one side is a number",
                    "'*.'",
                    "*. is the pointwise product",
                )
        left, right = CONTRACTION.operands
        return Spec((left,) * counts[0] + (right,) * counts[1], CONTRACTION.result, broadcast=True)

    def _mapped(self, logic: str, n_operands: int) -> Spec:
        if n_operands == 0:
            raise self.fault(
                self.syntax.logic_offset, "the expression reads no tensor", "no index map", "a number is set everywhere"
            )
        spec = parse_spec(logic, n_operands, result_exists=True)
        if len(concatenations(spec.result)) and n_operands > 1:
            raise self.fault(
                self.syntax.logic_offset,
                "several operands under a joined axis of the target",
                "one operand beside '^' in the result",
                "write one statement for each part, or join with st.einsum",
            )
        return spec

    def _check_write(self, spec: Spec) -> None:
        syntax = self.syntax
        if syntax.op is not None or not removed(spec.operands, spec.result):
            return
        what = "contracts" if syntax.logic is None else "reduces the indices that the target lacks"
        raise self.fault(
            syntax.operator_offset,
            f"'=:' sets each cell once, but this statement {what}",
            "'=:+' to sum into a fresh target, '=+' to add to it, or another accumulation",
        )

    # -- trees ----------------------------------------------------------------------------------------------------
    def _expr(self, term: Term, *, root: bool = False) -> Expr:
        match term:
            case Number(value, _):
                return NumberLiteral(value)
            case Reference():
                found = self._lookup(term)
                if isinstance(found, NumberLiteral):
                    return found
                return Access(self._node(term, found), next(self._rows))
            case Contraction(left, right, offset):
                if not root and self.syntax.logic is None:
                    raise self.fault(
                        offset,
                        "'*' contracts, so it is the whole right side or nothing",
                        "'*.'",
                        "*. is the pointwise product; contract into a tensor of its own first: t =:+ a * b",
                    )
                return Apply("mul", (self._expr(left), self._expr(right)))
            case Call():
                return self._call(term)

    def _call(self, call: Call) -> Expr:
        known = FUNCTIONS.get(call.function)
        if known is None:
            bound = call.function in self.names
            raise self.fault(
                call.offset,
                f"{call.function!r} is a tensor or number, not a function"
                if bound
                else f"unknown function {call.function!r}",
                "an op between the name and '('" if bound else "a pointwise function of the op table",
                "" if bound else near(call.function, FUNCTIONS),
            )
        op, arity = known
        if len(call.args) != arity:
            raise self.fault(
                call.offset,
                f"{call.function} has {arity} argument{'s' * (arity != 1)}, {len(call.args)} were given",
                f"{call.function}({', '.join('abc'[:arity])})",
            )
        args = tuple(self._expr(arg) for arg in call.args)
        if op == "clamp":
            value, low, high = args
            return Apply("minimum", (Apply("maximum", (value, low)), high))
        return Apply(op, args)


def _references(term: Term) -> Iterator[Reference]:
    """Yield the names of an expression in order of appearance."""
    match term:
        case Reference():
            yield term
        case Contraction(left, right):
            yield from _references(left)
            yield from _references(right)
        case Call(_, args):
            for arg in args:
                yield from _references(arg)
