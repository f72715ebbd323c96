"""Facts about a solved program that a context needs: inputs, outputs, consumed gradients, indices, dynamic extents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from stagedtensor.codegen.solved import SolvedProgram
from stagedtensor.errors import ContextError
from stagedtensor.initializers import DEFAULT
from stagedtensor.node import HasNode, Node, Role
from stagedtensor.program import Comp, Solved
from stagedtensor.runtime.routine import NodePrecision
from stagedtensor.runtime.store import BACKED_BY_DATA, ZERO_AT_ALLOCATION, describe
from stagedtensor.source import user_source
from stagedtensor.statements import Stage, accesses


@dataclass(frozen=True)
class Facts:
    """What a routine reads before it writes (``inputs``), what it writes, and its run-time arguments.

    ``always_ready`` inputs have data or start at zero. ``consumes`` are gradients that an update unscales,
    ``produces`` those that this routine computes anew.
    """

    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    always_ready: frozenset[Node]
    consumes: frozenset[Node]
    produces: frozenset[Node]
    indices: Mapping[str, int]
    extents: Mapping[str, int]


def inspect(solved: Solved, comp: Comp) -> Facts:
    """Collect the facts of one program."""
    inputs: dict[Node, None] = {}
    written: dict[Node, None] = {}
    # of the computation, not of the solved program: a narrow gradient is consumed too, though it keeps its scaled value
    consumes = {statement.target.node for statement, _ in comp.statements() if statement.unless_narrow}
    produces: set[Node] = set()
    indices: dict[str, int] = {}
    mentioned: dict[Node, None] = {}
    for statement in solved.statements:
        for node in statement.reads():
            mentioned.setdefault(node)
            if node not in written:
                inputs.setdefault(node)
        target = statement.target.node
        mentioned.setdefault(target)
        written.setdefault(target)
        # an update's own rescaling of a gradient in place is no new gradient
        in_place = statement.stage is Stage.UPDATE and target in statement.reads()
        if target.is_gradient and not (statement.unless_narrow or in_place):
            produces.add(target)
        for access in (statement.target, *accesses(statement.expr)):
            for term in access.rows.static:
                indices[term.name] = term.size
    # nodes share their shapes
    shapes = {id(shape): shape for shape in map(solved.shape, mentioned)}
    extents = {
        axis.dynamic.name: axis.dynamic.max
        for shape in shapes.values()
        for _, _, axis in shape.axes()
        if axis.dynamic is not None
    }
    ready = frozenset(node for node in inputs if node.role in BACKED_BY_DATA | ZERO_AT_ALLOCATION)
    return Facts(tuple(inputs), tuple(written), ready, frozenset(consumes), frozenset(produces), indices, extents)


def check_inputs(facts: Facts, borrowed: frozenset[Node], kept: frozenset[Node]) -> None:
    """Refuse computations that read what nobody computes or keeps, and keeping what they do not compute."""
    absent = sorted(
        (node for node in kept - borrowed if node.role in (Role.OP, Role.SAMPLER) and node not in facts.outputs),
        key=lambda node: node.number,
    )
    if absent:
        labels = "\n".join(f"  {describe(node)}" for node in absent)
        raise ContextError(
            f"keep= names values that this computation does not compute:\n{labels}\n  {user_source().quoted()}\n"
            "  compute them here too, with st.sequence(st.forward(...), ...), or leave them out"
        )
    lost = [
        node
        for node in facts.inputs
        if node.role in (Role.OP, Role.SAMPLER) and not node.observable and node not in borrowed
    ]
    if lost:
        labels = "\n".join(f"  {describe(node)}" for node in lost)
        names = ", ".join(node.label for node in lost)
        raise ContextError(
            f"this computation reads values that it does not compute and that no routine keeps:\n{labels}\n"
            f"  {user_source().quoted()}\n"
            f"  compute them here with st.sequence(st.forward({names}), ...), or compile the routine that computes them "
            f"with keep=[{names}] first"
        )


def for_codegen(solved: Solved, keep: frozenset[Node]) -> SolvedProgram:
    """Return what code generation takes."""
    return SolvedProgram(
        solved.name,
        solved.statements,
        solved.comments,
        solved.shape,
        solved.prec,
        solved.projected,
        keep,
        solved.saturates,
        solved.shapes.scope,
    )


def precisions(solved: Solved) -> dict[str, NodePrecision]:
    """Return each node's settled precision with its reason, by label, in construction order.

    Labels that repeat are numbered: ``dense.w`` is the parameter, ``dense.w_2`` what a composite reads it as.
    """
    table: dict[str, NodePrecision] = {}
    counts: dict[str, int] = {}
    for node in sorted(solved.nodes, key=lambda node: node.number):
        label, count = node.label, counts.get(node.label, 1)
        while label in table:
            count += 1
            label = f"{node.label}_{count}"
        counts[node.label] = count
        table[label] = NodePrecision(label, str(solved.prec(node)), str(solved.reason(node)))
    return table


def parameters(roots: HasNode | Comp | Iterable[HasNode | Comp]) -> list[Node]:
    """Return the parameters of tensors and computations, in construction order."""
    found: dict[Node, None] = {}
    several = isinstance(roots, Iterable) and not isinstance(roots, HasNode | Comp)
    for root in cast("Iterable[Any]", roots) if several else [roots]:
        if not isinstance(root, HasNode | Comp):
            raise TypeError(f"expected tensors or computations, got {type(root).__name__} ({user_source().quoted()})")
        if isinstance(root, Comp):
            found.update(dict.fromkeys(node for node in root.nodes() if node.role is Role.PARAM))
        else:
            found.update(dict.fromkeys(param.node for param in _params(root)))
    return sorted(found, key=lambda node: node.number)


def _params(root: HasNode) -> tuple[Any, ...]:
    if root.node.role is Role.PARAM:
        return (root,)
    return tuple(root.params)


def check_names(params: Iterable[Node]) -> None:
    """Refuse two parameters of one name in one computation."""
    seen: dict[str, Node] = {}
    for node in params:
        other = seen.setdefault(node.label, node)
        if other is not node:
            raise ContextError(
                f"two parameters are called {node.label!r}; names key random streams and checkpoints\n"
                f"  {other.source.quoted()}\n  {node.source.quoted()}\n  give one of them another name "
                f'(a block takes it as label: nn.dense(64, label="first"))'
            )


def has_explicit_init(node: Node) -> bool:
    """Whether the user chose the initialiser (the default one gives 0 where there is no input row)."""
    return node.init is not DEFAULT


def master_of(node: Node) -> Node | None:
    """Return the parameter that ``node`` is a cast twin of, if it is one."""
    record = node.record
    if record is None or record.kind != "cast" or not record.operands:
        return None
    master = record.operands[0].node
    return master if master.role is Role.PARAM else None


def is_twin(node: Node) -> bool:
    """Whether ``node`` is a cast of a parameter."""
    return master_of(node) is not None


def largest(facts: Facts, scalars: Sequence[str]) -> np.ndarray[Any, Any]:
    """Return scalar arguments for a trial run: every dynamic extent at its maximum, static indices at 0."""
    values = [facts.extents.get(name, 0) for name in scalars]
    return np.array(values or [0], np.int64)
