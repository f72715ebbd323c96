"""Programs: trees of statements with named parts, and what solving them once gives.

In: statements of tensors, strings and gradient rules. Out: ``Comp``, which routines are compiled from, and ``Solved``,
a computation with the shape, precision and projection of everything it mentions. ``settle`` freezes these after a
successful compile; nothing else here changes a node. No code is generated here.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeAlias, TypeGuard

from .dims import Shape
from .errors import PrecisionError
from .literal_guard import check_literals
from .node import HasNode, Node, SettledShape, ancestors
from .precision import Prec, u4x32
from .precision_reasons import Reason
from .precision_rules import BARRIER
from .precision_solution import PrecisionSolution, settle
from .precision_solver import solve_precisions
from .shapes.graph import owner_of_shape
from .shapes.index import Projected
from .shapes.projected import Projections
from .shapes.solution import ShapeSolution
from .shapes.solver import solve_shapes
from .source import user_source
from .statement_text import distinct_names, statement_text
from .statements import Access, Apply, Expr, NumberLiteral, Stage, Statement

Path: TypeAlias = tuple[str, ...]
"""The labels of the named parts around a statement, outermost first."""

_NO_ATTRIBUTES: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, eq=False, repr=False)
class Comp:
    """A computation: statements and parts in the order they run. Immutable; nothing runs until it is compiled.

    ``label`` names the part in comments of the generated source, ``name`` is the routine's name unless ``compile`` is
    given another. ``attributes`` are facts that step functions read off the routine (those of parts are merged upward
    by ``sequence`` and ``comment``, the last one winning).
    """

    parts: tuple[Statement | Comp, ...] = ()
    name: str = "computation"
    label: str = ""
    attributes: Mapping[str, Any] = field(default_factory=lambda: _NO_ATTRIBUTES)

    def statements(self) -> tuple[tuple[Statement, Path], ...]:
        """Return each statement with the labels of the parts it is in."""
        return self._statements

    @cached_property
    def _statements(self) -> tuple[tuple[Statement, Path], ...]:
        found: list[tuple[Statement, Path]] = []
        self._collect((), found)
        return tuple(found)

    def _collect(self, path: Path, found: list[tuple[Statement, Path]]) -> None:
        if self.label:
            path = (*path, self.label)
        for part in self.parts:
            if isinstance(part, Comp):
                part._collect(path, found)
            else:
                found.append((part, path))

    def nodes(self) -> tuple[Node, ...]:
        """Return the nodes that statements write or read, in order of first mention."""
        found: dict[Node, None] = {}
        for statement, _ in self.statements():
            found.setdefault(statement.target.node)
            for node in statement.reads():
                found.setdefault(node)
        return tuple(found)

    def key(self) -> ComputationKey:
        """Return what makes two computations the same: the same statements over the same nodes, in order."""
        return ComputationKey(self)

    def __len__(self) -> int:
        return len(self.statements())

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        lines = [f"computation {self.name}:" if self.name != "computation" else "computation:"]
        names = distinct_names(
            node for statement, _ in self.statements() for node in (*statement.reads(), statement.target.node)
        )
        shown: Path = ()
        for statement, path in self.statements():
            if path != shown:
                lines.append(f"  # {' / '.join(path)}" if path else "  #")
                shown = path
            lines.append(f"  {statement_text(statement, names.__getitem__)}")
        return "\n".join(lines)


class ComputationKey:
    """Two computations' keys are equal where they have the same statements over the same nodes, in order.

    The hash looks at the nodes that are written alone: most computations are compared with none.
    """

    def __init__(self, comp: Comp) -> None:
        self._comp = comp
        self._hash = hash(tuple([statement.target.node for statement, _ in comp.statements()]))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ComputationKey) and (self._comp is other._comp or self._whole == other._whole)

    @cached_property
    def _whole(self) -> tuple[Any, ...]:
        return tuple((path, *_statement_key(statement)) for statement, path in self._comp.statements())


def _statement_key(statement: Statement) -> tuple[Any, ...]:
    scope, target = statement.scope, statement.target
    return (
        target.node,
        target.rows,
        _expr_key(statement.expr),
        statement.op,
        statement.reset,
        statement.stage,
        (scope.spec.operands, scope.spec.result, scope.spec.broadcast, scope.nodes, scope.result),
        tuple(sorted(scope.sizes.items(), key=lambda item: item[0])),
    )


def _expr_key(expr: Expr) -> Any:
    """A hashable twin of a tree that tells -0.0 from 0.0 and 1 from 1.0 and equates NaN with itself."""
    match expr:
        case Apply(op, args):
            return (op, *map(_expr_key, args))
        case NumberLiteral(value):
            return ("literal", type(value).__name__, repr(value))
        case _:
            return expr


# -- building -----------------------------------------------------------------------------------------------------


def sequence(*comps: Comp) -> Comp:
    """Join computations: each runs after the one before it.

    >>> import stagedtensor as st
    >>> loss = st.sum(st.param("w", output=[4]) ** 2)
    >>> step = st.sequence(st.grad_update(loss), st.sgd_update(loss, 0.1))
    """
    for comp in comps:
        _check(comp, "sequence")
    if len(comps) == 1:
        return comps[0]
    names = list(dict.fromkeys(comp.name for comp in comps))
    return Comp(comps, "_".join(names) if 0 < len(names) <= 3 else "sequence", attributes=_merged(comps))


def comment(text: str, comp: Comp) -> Comp:
    """Name a part; the name appears in the generated source above its kernels.

    >>> import stagedtensor as st
    >>> decay = st.comment("decay", st.computation("p =* 0.99", p=st.param("p", output=[8])))
    """
    if not isinstance(text, str) or not text.strip():
        raise TypeError(f"comment: expected a non-empty text, got {text!r} ({user_source().quoted()})")
    _check(comp, "comment")
    return Comp((comp,), comp.name, " ".join(text.split()), comp.attributes)


def _check(comp: Any, what: str) -> None:
    if isinstance(comp, Comp):
        return
    advice = "; use st.forward(tensor) for a tensor's forward computation" if _has_node(comp) else ""
    raise TypeError(f"{what}: expected a computation, got {type(comp).__name__} ({user_source().quoted()}){advice}")


def _has_node(thing: Any) -> TypeGuard[HasNode]:
    """``isinstance`` of the protocol would compute every property it has."""
    return isinstance(getattr(thing, "node", None), Node)


def _merged(comps: Sequence[Comp]) -> Mapping[str, Any]:
    attributes: dict[str, Any] = {}
    for comp in comps:
        attributes.update(comp.attributes)
    return MappingProxyType(attributes)


def forward(*tensors: HasNode) -> Comp:
    """Return the statements that compute ``tensors`` from terminals: depth-first post-order by operand slot.

    What several tensors share is computed once. Terminals contribute nothing.
    """
    roots = []
    for tensor in tensors:
        if not _has_node(tensor):
            raise TypeError(f"forward: expected tensors, got {type(tensor).__name__} ({user_source().quoted()})")
        roots.append(tensor.node)
    made = [statement for node in ancestors(roots) if node.record is not None for statement in node.record.statements]
    return Comp(tuple(made), "forward")


def forward_of(tensors: Iterable[HasNode], *, stage: Stage, until: Iterable[Node] = ()) -> Comp:
    """Return the forward statements of auxiliary tensors as part of another stage.

    Nodes in ``until`` (and what they are computed from) are read as they stand.
    """
    made = [
        replace(statement, stage=stage)
        for node in ancestors([tensor.node for tensor in tensors], until=until)
        if node.record is not None
        for statement in node.record.statements
    ]
    return Comp(tuple(made), stage.value)


def as_computation(comp: Comp | HasNode | Iterable[HasNode]) -> tuple[Comp, tuple[Node, ...]]:
    """Return a computation and the nodes its caller wants to keep: a tensor, or several, mean their forward."""
    if isinstance(comp, Comp):
        return comp, ()
    if _has_node(comp):
        return forward(comp), (comp.node,)
    if isinstance(comp, list | tuple) and comp and all(map(_has_node, comp)):
        return forward(*comp), tuple(item.node for item in comp)
    advice = ""
    if isinstance(comp, list | tuple) and any(isinstance(item, Comp) for item in comp):
        advice = "; join computations with st.sequence(a, b, ...)"
    raise TypeError(
        f"expected a computation, a tensor or a list of tensors, got {type(comp).__name__} "
        f"({user_source().quoted()}){advice}"
    )


# -- solving ------------------------------------------------------------------------------------------------------


def shapes_and_precisions(nodes: Iterable[Node]) -> tuple[ShapeSolution, PrecisionSolution]:
    """Solve the connected component of ``nodes``; nothing is settled on them."""
    wanted = tuple(nodes)
    return solve_shapes(wanted), solve_precisions(wanted)


@dataclass(frozen=True, eq=False)
class Solved:
    """A computation with everything that lowering and a context ask about it.

    ``comments`` gives the path of the part each statement is in ("" for none), ``nodes`` what the statements mention
    and what is kept.
    """

    name: str
    statements: tuple[Statement, ...]
    comments: tuple[str, ...]
    nodes: tuple[Node, ...]
    keep: frozenset[Node]
    shapes: ShapeSolution
    precisions: PrecisionSolution

    def shape(self, node: Node) -> Shape:
        """Return the shape of a node."""
        return self.shapes.shape(node)

    def prec(self, node: Node) -> Prec:
        """Return the storage precision of a node."""
        return self.precisions.prec(node)

    def saturates(self, node: Node) -> bool:
        """Whether finite overflow at a store to a node gives the greatest finite value."""
        return self.precisions.saturates(node)

    def reason(self, node: Node) -> Reason:
        """Return why a node has its precision."""
        return self.precisions.reason(node)

    def projected(self, statement: Statement) -> tuple[Projected, ...]:
        """Return the statement over iterators: one part, or one per block of a concatenation, and fills."""
        return self._projections.of(statement)

    @cached_property
    def _projections(self) -> Projections:
        return Projections(self.shapes)

    def settle(self, routine: str | None = None) -> None:
        """Freeze shapes and precisions of the nodes on behalf of a routine that compiled; settled ones stay."""
        name, source = routine or self.name, user_source()
        frozen = [(node, SettledShape(self.shape(node), name, source)) for node in self.nodes]
        settle(self.precisions, self.nodes, name)
        for node, shape in frozen:
            for owner in (node, owner_of_shape(node)):
                if owner.settled_shape is None:
                    owner.settled_shape = shape


def solve_program(
    comp: Comp | HasNode | Iterable[HasNode], name: str | None = None, keep: Iterable[Node | HasNode] = ()
) -> Solved:
    """Solve shapes and precisions of ``comp`` and check its literals; settles nothing.

    A tensor, or several, mean their forward computation with these tensors kept. Raises ShapeError, PrecisionError,
    ConstantRangeError.
    """
    computation, wanted = as_computation(comp)
    kept = dict.fromkeys((*wanted, *(item if isinstance(item, Node) else item.node for item in keep)))
    pairs = list(computation.statements())
    nodes = tuple(dict.fromkeys((*computation.nodes(), *sorted(kept, key=lambda node: node.number))))
    scoped = dict.fromkeys(node for statement, _ in pairs for node in (*statement.scope.nodes, statement.scope.result))
    shapes, precisions = shapes_and_precisions(dict.fromkeys((*nodes, *scoped)))
    check_literals(precisions, nodes)
    if any([precisions.prec(node) is u4x32 for node in nodes]):
        _refuse_counter_state([statement for statement, _ in pairs], precisions)
    pairs = [
        (statement, path)
        for statement, path in pairs
        if not (statement.unless_narrow and precisions.prec(statement.target.node).is_narrow)
    ]
    bypassed = equal_boundaries(nodes, precisions, kept)
    if bypassed:
        pairs = [
            (around(statement, bypassed), path) for statement, path in pairs if statement.scope.result not in bypassed
        ]
        nodes = tuple(node for node in nodes if node not in bypassed)
    return Solved(
        name or computation.name,
        tuple(statement for statement, _ in pairs),
        tuple(" / ".join(path) for _, path in pairs),
        nodes,
        frozenset(kept),
        shapes,
        precisions,
    )


def _refuse_counter_state(statements: Iterable[Statement], precisions: PrecisionSolution) -> None:
    """Raise PrecisionError where an op reads the state of the random generator, even to move it only."""
    for statement in statements:
        for node in statement.reads():
            if precisions.prec(node) is u4x32:
                raise PrecisionError(
                    f"{node.label!r} is u4x32, counter state, which no operation reads\n  {node.source.quoted()}\n"
                    f"  {statement.scope.source.quoted()}\n  declare it with a format of numbers, e.g. prec=st.u32"
                )


# -- boundaries that convert nothing ------------------------------------------------------------------------------


def equal_boundaries(
    nodes: Iterable[Node], precisions: PrecisionSolution, kept: Container[Node] = ()
) -> dict[Node, Node]:
    """Return, for boundary converts whose sides solved equal, what their readers read instead: values and gradients.

    What the caller keeps or a host may read stays a node of its own.
    """
    found: dict[Node, Node] = {}
    for node in nodes:
        record = node.record
        if record is None or record.kind != BARRIER or node in kept or node.observable:
            continue
        source, gradient = record.operands[0].node, node.gradient
        if precisions.prec(source) is not precisions.prec(node):
            continue
        if gradient is not None and (source.gradient is None or gradient.observable or gradient in kept):
            continue
        found[node] = source
        if gradient is not None and source.gradient is not None:
            found[gradient] = source.gradient
    for node, source in found.items():
        while source in found:
            source = found[source]
        found[node] = source
    return found


def around(statement: Statement, bypassed: Mapping[Node, Node]) -> Statement:
    """Return the statement over what lies beyond the boundaries that are bypassed."""
    target = statement.target
    if target.node in bypassed:
        target = replace(target, node=bypassed[target.node])
    expr = _around(statement.expr, bypassed)
    if target is statement.target and expr is statement.expr:
        return statement
    return replace(statement, target=target, expr=expr)


def _around(expr: Expr, bypassed: Mapping[Node, Node]) -> Expr:
    match expr:
        case Access(node) if node in bypassed:
            return replace(expr, node=bypassed[node])
        case Apply(op, args):
            changed = tuple(_around(arg, bypassed) for arg in args)
            return Apply(op, changed) if any(new is not old for new, old in zip(changed, args, strict=True)) else expr
        case _:
            return expr
