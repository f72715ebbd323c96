"""Statements over nodes: ``target[...] (set | accumulate) tree of table ops over accesses``, and the records of ops.

A statement's tree is evaluated at one compute precision with one rounding at the store. Its accesses share a *scope*:
the index spec that relates their axes, which is also the shape constraint the op contributes. Forward, backward and
update statements of one op share one scope. Nothing here is typed or sized; the solvers and ``project`` do that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, Literal, TypeAlias

from .node import Node
from .source import Source
from .specs import ShapeSpec, Spec


@dataclass(eq=False)
class Scope:
    """One spec applied to nodes: a shape constraint and the name space of the iterators of its statements.

    ``nodes`` are the operand value nodes in spec order; ``result`` is the node of the spec's result. Where
    ``derives`` the result's shape is what the spec gives; otherwise (an assignment) the result exists already and the
    operands must broadcast to it. ``sizes`` fixes named sizes; ``captures`` maps names to solver keys.
    """

    spec: Spec
    nodes: tuple[Node, ...]
    result: Node
    source: Source
    label: str
    derives: bool = True
    sizes: dict[str, Any] = field(default_factory=dict)
    captures: dict[str, int] = field(default_factory=dict)


# -- expression trees ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Access:
    """The value of ``node`` at the indices that ``rows`` gives in the statement's scope."""

    node: Node
    rows: ShapeSpec


@dataclass(frozen=True)
class NumberLiteral:
    """A Python number, evaluated at the statement's compute precision. Not range-guarded (a literal *node* is)."""

    value: float | int | bool


@dataclass(frozen=True)
class DimValue:
    """The product of the extents of iterators: a name or a row variable each (``mean``'s 1/n, captures).

    With ``greatest`` a dynamic extent counts with its maximum, as it does in ``LinearIndex``.
    """

    names: tuple[str, ...]
    greatest: bool = False


@dataclass(frozen=True)
class IterValue:
    """The value of the iterator called ``name`` as an integer."""

    name: str


@dataclass(frozen=True)
class LinearIndex:
    """The row-major index over the axes of ``rows`` (names and expanded row variables, in memory order).

    With ``of_target`` it is the cell number of the statement's target (what counter-based samplers count by).
    """

    rows: ShapeSpec


@dataclass(frozen=True)
class FiniteLimit:
    """The greatest or least finite value of a storage format: that of ``node``, or of the statement's target."""

    highest: bool
    node: Node | None = None


@dataclass(frozen=True)
class Apply:
    """A table op over subtrees."""

    op: str
    args: tuple[Expr, ...]

    @cached_property
    def accesses(self) -> tuple[Access, ...]:
        """The accesses below, from left to right: asked for in every step on the way to code."""
        return tuple(found for arg in self.args for found in accesses(arg))


Expr: TypeAlias = Access | NumberLiteral | DimValue | IterValue | LinearIndex | FiniteLimit | Apply


def walk(expr: Expr) -> Iterator[Expr]:
    """Yield ``expr`` and every subtree, parents first."""
    yield expr
    if isinstance(expr, Apply):
        for arg in expr.args:
            yield from walk(arg)


def accesses(expr: Expr) -> tuple[Access, ...]:
    """Return the accesses of a tree from left to right."""
    if isinstance(expr, Apply):
        return expr.accesses
    return (expr,) if isinstance(expr, Access) else ()


# -- statements ---------------------------------------------------------------------------------------------------

WriteOp: TypeAlias = Literal["add", "sub", "mul", "div", "max", "min", "argmax", "argmin"]


class Stage(Enum):
    """The part of a computation a statement belongs to."""

    FORWARD = "forward"
    ZERO = "zero"
    SEED = "seed"
    BACKWARD = "backward"
    UPDATE = "update"
    INIT = "init"


@dataclass(frozen=True, eq=False)
class Statement:
    """``target <- write(op) expr``.

    ``op`` None sets. Otherwise it accumulates with that op, starting from the op's neutral element if ``reset``,
    else from the target's old value. Axes of the scope that the target lacks (by the spec, extent 1 included) are
    reduced; a set must not have any.
    """

    target: Access
    expr: Expr
    scope: Scope
    op: WriteOp | None = None
    reset: bool = True
    stage: Stage = Stage.FORWARD
    source: Source | None = None
    text: str = ""
    """The expression as a user would write it, for comments in generated source."""
    unless_narrow: bool = False
    """Left out where the target settled narrow (unscaling a gradient in place would lose what the scale protects)."""

    def reads(self) -> tuple[Node, ...]:
        """Nodes whose values this statement reads, the target included where it accumulates."""
        return self._reads

    @cached_property
    def _reads(self) -> tuple[Node, ...]:
        found = accesses(self.expr)
        seen = dict.fromkeys([access.node for access in found])
        if self.target.rows.gathered or any([access.rows.gathered for access in found]):
            seen.update(dict.fromkeys(self.index_nodes()))
        if self.op is not None and not self.reset:
            seen.setdefault(self.target.node)
        return tuple(seen)

    def index_nodes(self) -> Iterator[Node]:
        """Nodes read to form indices (gather ids)."""
        for access in (self.target, *accesses(self.expr)):
            for term in access.rows.gathered:
                yield self.scope.nodes[term.operand]


# -- op records ---------------------------------------------------------------------------------------------------


class Slot(Enum):
    """What an operand is to its op, for the precision rules."""

    DATA = "data"
    INDEX = "index"
    PREDICATE = "predicate"
    RNG = "rng"


@dataclass(frozen=True)
class Operand:
    """One operand of a record."""

    node: Node
    slot: Slot = Slot.DATA


LABELS = "labels"
"""Attribute of an op that picks a cell by a class label: (name of the class axis, label to ignore, mask node)."""


@dataclass(eq=False)
class OpRecord:
    """How one op result is computed: the solvers, autodiff and lowering all read this.

    ``kind`` names a row of the op table (``add``, ``einsum``, ``sum``, ``cast``, ``gather``, ...), ``enter`` /
    ``leave`` at a composite's border, or ``stage`` for a boundary convert. ``statements`` are the forward statements.
    ``rule`` names the gradient rule; ``attributes`` holds what a rule or an exporter needs beyond the statements.
    """

    kind: str
    operands: tuple[Operand, ...]
    result: Node
    scope: Scope
    statements: tuple[Statement, ...]
    rule: str | None = None
    attributes: dict[str, Any] = field(default_factory=dict)
    composite: Composite | None = None
    """For ``enter`` and ``leave``: the composite whose border this is."""

    @property
    def source(self) -> Source:
        """Where the user applied the op."""
        return self.result.source


@dataclass(eq=False)
class Composite:
    """A library function of several nodes that rounds once (forward) and once per argument gradient (backward).

    ``operands`` are the outer argument nodes, ``aliases`` their interior twins (kept at compute precision),
    ``inner`` the interior result, ``result`` the outer one. ``parent`` is the enclosing composite, whose compute
    precision the interior follows.
    """

    name: str
    source: Source
    operands: tuple[Operand, ...] = ()
    aliases: tuple[Node, ...] = ()
    inner: Node | None = None
    result: Node | None = None
    parent: Composite | None = None
    float_only: bool = False
    wide_result: bool = False
    """Losses: the result is f32 or wider by construction."""
    interior: list[Node] = field(default_factory=list)

    @property
    def outermost(self) -> Composite:
        """The composite that decides the interior's precision."""
        return self if self.parent is None else self.parent.outermost
