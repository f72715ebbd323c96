"""Nodes: one value or gradient buffer's identity, with what the user said of it.

A tensor has a value node and perhaps a gradient node. A node knows its role, where it was written, the rows declared
for it, what was asked of its precision and placement, the record of the op that computes it and the ops that read it.
Solved facts (shape, precision) live in solutions, except ``settled``, which a successful compile freezes. The last
solution is kept until something is built or said that it depends on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np

from .dims import DeclaredShape, Shape
from .encoded import Encoded
from .errors import EncodingError
from .precision import Prec
from .regions import Region, open_region
from .session import Session, current_session
from .source import Source, user_source

if TYPE_CHECKING:
    from .statements import Composite, OpRecord


class Role(Enum):
    """What kind of thing a node is."""

    PLACEHOLDER = "placeholder"  # data the host feeds
    PARAM = "param"  # trained (or frozen) state with an initialiser
    CONSTANT = "constant"  # array data, baked into the context, never into the source
    LITERAL = "literal"  # a Python number or a nested list of them: Default precision, guarded range
    HOST_SCALAR = "host_scalar"  # one cell the host overwrites
    RANGE = "range"  # 0 .. n-1
    SAMPLER = "sampler"  # counter-based random values
    STATE = "state"  # optimizer state: materialised, saved by (parameter name, kind)
    CELL = "cell"  # device-resident accumulator cell, zero at allocation (windows, counters, loss sums)
    OP = "op"  # result of an op record
    GRADIENT = "gradient"  # gradient of another node


class Placement(Enum):
    """Where a node's values live; AUTO leaves it to the compiler."""

    AUTO = "auto"
    VIRTUAL = "virtual"
    MATERIALIZED = "materialized"


SpecifiedBy: TypeAlias = Literal["user", "data", "cast", "range", "loss", "master", "twin", "cell", "region"]


@dataclass(frozen=True)
class Specified:
    """A direct specification of a node's precision."""

    prec: Prec
    source: Source
    by: SpecifiedBy = "user"
    name: str = ""
    """For a region: its name."""

    @property
    def party(self) -> str:
        """Who specified it, in words."""
        return f"region {self.name}" if self.name else self.by


class Settled(NamedTuple):
    """A precision frozen by a routine that compiled."""

    prec: Prec
    routine: str
    source: Source
    reason: Any = None


class SettledShape(NamedTuple):
    """A shape frozen by a routine that compiled."""

    shape: Shape
    routine: str
    source: Source


class Node:
    """One value or gradient buffer's identity.

    Mutable facts are only what the user may still say (precision, placement, labels) and what compiling freezes.
    """

    __slots__ = (
        "__weakref__", "answers", "composite", "consumers", "data", "declared", "default_prec", "encoded", "flush_subnormal", "gradient",
        "init", "label", "literal", "number", "observable", "owner", "placement", "record", "region", "role",
        "saturate",
        "session", "settled", "settled_shape", "source", "specified", "state_kind", "states", "tags", "tensor", "top_down",
        "trainable", "value", "writers",
    )  # fmt: skip

    def __init__(
        self,
        role: Role,
        label: str,
        *,
        declared: DeclaredShape | None = None,
        value: Node | None = None,
        source: Source | None = None,
        session: Session | None = None,
        top_down: bool = False,
    ) -> None:
        self.session = session or current_session()
        self.number = self.session.next_number()
        self.role = role
        self.label = label
        self.source = source or user_source()
        self.declared = declared
        self.value = value
        """For a gradient: the value node it belongs to (same shape)."""
        self.gradient: Node | None = None
        self.record: OpRecord | None = None
        self.region: Region | None = open_region()
        """The precision region it was made in."""
        self.consumers: list[OpRecord] = []
        self.writers: list[Any] = []
        """Shape scopes of assignments (statement strings) that write this node: constraints, not definitions."""
        self.data: np.ndarray[Any, Any] | None = None
        self.encoded: Encoded | None = None
        """For a constant weight in a packed encoding: its bytes, in place of ``data``."""
        self.literal: Any = None
        self.init: Any = None
        self.trainable = role is Role.PARAM
        self.owner: Node | None = None
        """For optimizer state: the parameter it belongs to; ``state_kind`` says which state."""
        self.state_kind = ""
        self.states: dict[str, Node] = {}
        """For a parameter: its optimizer state by kind. Held here, so that it lives as long as the parameter."""
        self.top_down = top_down
        self.default_prec: Prec = self.session.default_grad_prec if value is not None else self.session.default_prec
        self.specified: Specified | None = None
        self.settled: Settled | None = None
        self.settled_shape: SettledShape | None = None
        self.saturate: bool | None = None
        self.flush_subnormal = False
        self.placement = Placement.AUTO
        self.observable = False
        """The host or another routine may look at it: it keeps a buffer in the context's store."""
        self.composite: Composite | None = None
        """The outermost composite whose interior this node is in."""
        self.tensor: Any = None
        """The canonical tensor over this node, so that ``loss.params`` gives back the user's own objects."""
        self.answers: dict[str, Any] = {}
        """For the oldest node of a component: what its solvers found last, by solver, with all that they looked at."""
        self.tags: frozenset[str] = frozenset()
        """Names of the composites (innermost and outer) that built it, for ``keep_f32`` and ``op_kind``."""

    @property
    def is_gradient(self) -> bool:
        """Whether this is a gradient node."""
        return self.value is not None

    @property
    def shape_node(self) -> Node:
        """The value node that decides this node's shape."""
        return self if self.value is None else self.value.shape_node

    def __repr__(self) -> str:
        return f"<node {self.label}>"


@runtime_checkable
class HasNode(Protocol):
    """What codegen and runtime accept instead of a Tensor."""

    @property
    def node(self) -> Node:
        """The value node."""

    @property
    def params(self) -> tuple[Any, ...]:
        """The parameters it depends on, in construction order."""


def refuse_encoded(node: Node, what: str) -> None:
    """Raise EncodingError if ``node`` is a packed weight, which is read as it is and never trained."""
    if node.encoded is not None:
        raise EncodingError(
            f"{what} the encoded weight {node.label!r} ({node.encoded.encoding}, {list(node.encoded.shape)}): packed weights "
            f"are fixed\n  {node.source.quoted()}\n  {user_source().quoted()}\n  multiply with it as it is "
            "(weight @ x, st.matmul_nt(x, weight)), or make a dense copy with encoded.repack_to(st.encodings.Dense(4))"
        )


def ancestors(roots: Sequence[Node], *, until: Iterable[Node] = ()) -> list[Node]:
    """Return the nodes that ``roots`` are computed from (roots included), depth-first post-order by operand slot.

    Nodes in ``until`` are left out, with what only they are computed from.
    """
    order: list[Node] = []
    seen: set[Node] = set(until)
    stack: list[tuple[Node, bool]] = [(root, False) for root in reversed(roots)]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
            continue
        if node in seen:
            continue
        seen.add(node)
        stack.append((node, True))
        if node.record is not None:
            stack.extend(
                (operand.node, False) for operand in reversed(node.record.operands) if operand.node not in seen
            )
    return order
