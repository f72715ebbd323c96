"""The precision constraints that a graph states: who contributes to a node and who demands of it.

In: nodes with their op records. Out: one :class:`Derivation` a node, the same whatever was specified: the value and
the gradient of an op result gather from the data operands, terminals listen to their consumers, a composite counts as
one op and its interior follows it. Precisions are concluded by the solver; nothing here is solved or stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from .node import Node, Role
from .op_table import OPS
from .specs import Affine, Anonymous, AxisTerm, Concat, Name, ShapeSpec, Sliced, Spec
from .statements import Composite, Operand, OpRecord, Slot

TOP_DOWN_ROLES = frozenset({Role.PLACEHOLDER, Role.LITERAL, Role.PARAM, Role.SAMPLER})
BARRIER = "stage"
"""Record kind of a boundary convert: no inference flows through it."""


class Flow(Enum):
    """Where a node's precision comes from if nothing is specified."""

    NOWHERE = "nowhere"  # its default
    BOTTOM_UP = "bottom-up"
    TOP_DOWN = "top-down"
    INTERIOR = "interior"  # the composite it is inside of


class Kernel(Enum):
    """How an interior node serves a contraction inside its composite."""

    NONE = "none"
    OPERAND = "operand"
    GRADIENT = "gradient"


class Demand(NamedTuple):
    """A consumer's demand: its own precision, or the join of its contributing operands (comparisons)."""

    consumer: Node
    operands: tuple[Node, ...] | None = None


class Derivation(NamedTuple):
    """The constraints of one node.

    ``operands`` contribute (bottom-up, and inside a composite), ``demands`` are made on it (top-down). ``follows`` is
    an operand whose solved precision an interior alias takes over unchanged.
    """

    flow: Flow
    operands: tuple[Node, ...] = ()
    demands: tuple[Demand, ...] = ()
    kind: str = ""
    float_only: bool = False
    bool_to_byte: bool = False
    widens_integers: bool = False
    is_position: bool = False
    wide: bool = False
    is_index: bool = False
    composite: Composite | None = None
    kernel: Kernel = Kernel.NONE
    follows: Node | None = None


def component(nodes: Iterable[Node]) -> dict[Node, None]:
    """Return the connected component of ``nodes``: op edges both ways, gradients, composites inside and out."""
    found = dict.fromkeys(nodes)
    stack = list(found)
    entered: set[Composite] = set()
    while stack:
        for neighbour in _neighbours(stack.pop(), entered):
            if neighbour not in found:
                found[neighbour] = None
                stack.append(neighbour)
    return found


def _neighbours(node: Node, entered: set[Composite]) -> list[Node]:
    """The members of a composite are told once, to the first that asks; ``entered`` are those that were."""
    near = [record.result for record in node.consumers]
    if node.value is not None:
        near.append(node.value)
    if node.gradient is not None:
        near.append(node.gradient)
    record = node.record
    if record is not None:
        near += [operand.node for operand in record.operands]
    for composite in (node.composite, record.composite if record is not None else None):
        if composite is not None and composite not in entered:
            entered.add(composite)
            near += [operand.node for operand in composite.operands]
            near += composite.aliases
            if composite.result is not None:
                near.append(composite.result)
    return near


def derive(node: Node) -> Derivation:
    """State the constraints of one node."""
    return _derive_gradient(node) if node.value is not None else _derive_value(node)


def is_top_down(value: Node) -> bool:
    """Whether a value listens to its consumers and contributes nothing upward unless specified."""
    return value.top_down or value.role in TOP_DOWN_ROLES


# -- composites -----------------------------------------------------------------------------------------------------


def outer_composite(node: Node) -> Composite | None:
    """Return the finished composite whose interior the node is in, the outermost one."""
    if node.composite is None:
        return None
    outermost = node.composite.outermost
    return outermost if outermost.result is not None else None


def _bordered(record: OpRecord) -> Composite | None:
    """The finished outermost composite that ``record`` is the border of, as seen from outside."""
    if record.composite is None or record.kind not in ("enter", "leave"):
        return None
    composite = record.composite.outermost if record.kind == "enter" else record.composite
    return composite if composite.result is not None else None


def _operands(record: OpRecord) -> tuple[Operand, ...]:
    """The operands an op result gathers from; those of the composite where the record leaves one."""
    composite = _bordered(record) if record.kind == "leave" and outer_composite(record.result) is None else None
    return composite.operands if composite is not None else record.operands


def _data_nodes(record: OpRecord) -> tuple[Node, ...]:
    if record.kind == BARRIER:
        return ()
    return tuple(operand.node for operand in _operands(record) if operand.slot is Slot.DATA)


def _uses(value: Node) -> Iterator[tuple[OpRecord, Slot, Node]]:
    """Yield (record, slot, result) of each use of a value; a composite entered from outside is one use by its result."""
    for record in value.consumers:
        composite = _bordered(record) if record.kind == "enter" and outer_composite(value) is None else None
        operands, result = record.operands, record.result
        if composite is not None and composite.result is not None:
            record_of_result = composite.result.record
            operands, result = composite.operands, composite.result
            record = record_of_result if record_of_result is not None else record
        for slot in dict.fromkeys(operand.slot for operand in operands if operand.node is value):
            yield record, slot, result


def is_index_fed(value: Node) -> bool:
    """Whether the value is used as an index, directly or through the border of a composite."""
    pending, seen = [value], {value}
    while pending:
        current = pending.pop()
        for record in current.consumers:
            for operand in record.operands:
                if operand.node is current and operand.slot is Slot.INDEX:
                    return True
            if record.composite is not None and record.kind == "enter":
                if any(operand.node is current and operand.slot is Slot.INDEX for operand in record.composite.operands):
                    return True
                if record.result not in seen:
                    seen.add(record.result)
                    pending.append(record.result)
    return False


def _feeds_contraction(value: Node) -> bool:
    return any(
        is_contraction(record)
        and any(operand.node is value and operand.slot is Slot.DATA for operand in record.operands)
        for record in value.consumers
    )


# -- records --------------------------------------------------------------------------------------------------------


def is_contraction(record: OpRecord) -> bool:
    """Whether the record sums a product of two or more operands."""
    if record.kind not in ("einsum", "matmul") or sum(op.slot is Slot.DATA for op in record.operands) < 2:
        return False
    attributes = record.attributes
    sums = record.kind == "matmul" or attributes.get("reduction") in ("add", "sum")
    return sums and attributes.get("combine", "mul") == "mul" and reduces(record)


def reduces(record: OpRecord) -> bool:
    """Whether some axis of the operands is absent from the result by the spec."""
    return _sums(record.scope.spec)


@lru_cache(1024)
def _sums(spec: Spec) -> bool:
    result = set(_axes(spec.result))
    return any(axis not in result for operand in spec.operands for axis in _axes(operand))


def _axes(rows: ShapeSpec) -> Iterator[str]:
    for row in (rows.batch, rows.input, rows.output):
        if row.variable is not None:
            yield f"..{row.variable}"
        for term in row.terms:
            yield from _names(term)


def _names(term: AxisTerm) -> Iterator[str]:
    if isinstance(term, Name | Sliced):
        yield term.name
    elif isinstance(term, Affine):
        yield term.over
        yield term.kernel
    elif isinstance(term, Concat):
        yield from (part.name for part in term.parts if isinstance(part, Name))
    elif isinstance(term, Anonymous):
        yield f"_{term.key}"


def _is_comparison(record: OpRecord) -> bool:
    return record.kind in OPS and OPS[record.kind].op_class == "comparison"


def _is_position(record: OpRecord) -> bool:
    return record.kind in ("argmax", "argmin") or record.attributes.get("reduction") in ("argmax", "argmin")


def _widens_integers(record: OpRecord) -> bool:
    """Sums and products of small integers go to i32."""
    if record.kind in ("sum", "prod"):
        return True
    return record.attributes.get("reduction") in ("add", "sum", "mul", "prod") and reduces(record)


def _makes_bytes(record: OpRecord) -> bool:
    """Arithmetic on bools counts, so it needs a byte."""
    if record.kind in OPS:
        return OPS[record.kind].op_class == "arithmetic" and record.kind != "identity"
    return record.kind in ("einsum", "matmul") and len(record.operands) > 1


# -- derivations ----------------------------------------------------------------------------------------------------


def _from_record(value: Node, record: OpRecord, flow: Flow) -> Derivation:
    composite = record.composite if record.kind == "leave" else None
    inside = outer_composite(value)
    row = OPS.get(record.kind)
    float_only = bool(record.attributes.get("float_only")) or (row is not None and row.float_only)
    follows = None
    if inside is not None and record.kind == "enter" and value.composite is not None:
        slots = {operand.slot for operand in inside.operands if operand.node is record.operands[0].node}
        if (slots and Slot.DATA not in slots) or is_index_fed(value):
            follows = record.operands[0].node
    return Derivation(
        flow,
        operands=_data_nodes(record),
        kind=record.kind,
        float_only=float_only or (composite is not None and composite.float_only),
        bool_to_byte=_makes_bytes(record),
        widens_integers=_widens_integers(record),
        is_position=_is_position(record),
        wide=composite is not None and composite.wide_result and inside is None,
        composite=inside,
        kernel=Kernel.OPERAND if inside is not None and _feeds_contraction(value) else Kernel.NONE,
        follows=follows,
    )


def _derive_value(value: Node) -> Derivation:
    inside = outer_composite(value)
    if is_top_down(value):
        # A parameter or placeholder that merely came into being inside a composite is no intermediate of it.
        interior = inside is not None and value.role not in (Role.PARAM, Role.PLACEHOLDER)
        return Derivation(
            Flow.INTERIOR if interior else Flow.TOP_DOWN,
            demands=tuple(_demands(value)),
            kind=value.record.kind if value.record is not None else "",
            is_index=is_index_fed(value),
            composite=inside,
            kernel=Kernel.OPERAND if interior and _feeds_contraction(value) else Kernel.NONE,
        )
    if value.record is None:
        return Derivation(Flow.NOWHERE)
    return _from_record(value, value.record, Flow.INTERIOR if inside is not None else Flow.BOTTOM_UP)


def _demands(value: Node) -> Iterator[Demand]:
    for record, slot, result in _uses(value):
        if slot is not Slot.DATA or record.kind == BARRIER:
            continue
        # What a comparison or a position says of its result says nothing of its operands.
        yield Demand(result, _data_nodes(record) if _is_comparison(record) or _is_position(record) else None)


def _derive_gradient(gradient: Node) -> Derivation:
    value = gradient.value
    assert value is not None
    inside = outer_composite(gradient)
    record = value.record
    if inside is not None and value.role not in (Role.PARAM, Role.PLACEHOLDER):
        contraction = record is not None and is_contraction(record)
        return Derivation(Flow.INTERIOR, composite=inside, kernel=Kernel.GRADIENT if contraction else Kernel.NONE)
    if is_top_down(value):
        gradients = (
            result.gradient
            for use, slot, result in _uses(value)
            if slot is Slot.DATA and use.kind != BARRIER and result.gradient is not None
        )
        return Derivation(Flow.TOP_DOWN, demands=tuple(map(Demand, gradients)))
    if record is None:
        return Derivation(Flow.NOWHERE)
    operands = tuple(node.gradient for node in _data_nodes(record) if node.gradient is not None)
    wide = record.kind == "leave" and record.composite is not None and record.composite.wide_result
    return Derivation(Flow.BOTTOM_UP, operands=operands, kind=record.kind, wide=wide)
