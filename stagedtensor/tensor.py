"""``Tensor`` and op application: builds nodes, records and statements; runs nothing.

A tensor is a value node, perhaps with a gradient node. ``apply_op`` is the single place where an op result comes into
being. The hook stacks (parameter hooks of ``master_weights``, open composites, block names) are context variables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from html import escape
from typing import TYPE_CHECKING, Any, TypeAlias

from .construction import (
    _composite as _composite,
    _without_gradient,
    add_gradient as add_gradient,
    adopt as adopt,
    new_node as new_node,
    no_gradient as no_gradient,
)
from .conversion import ingest
from .dims import DeclaredAxis, DeclaredRow, DeclaredShape, Index, Shape
from .encoded import Encoded
from .errors import PrecisionError, ShapeError, StagedTensorError
from .node import Node, Placement, Role, Specified, ancestors, refuse_encoded
from .op_table import OPS
from .operators import Operators, TensorLike as TensorLike
from .params import Params
from .precision import Prec, precision, u4x32
from .precision_rules import BARRIER
from .precision_solver import solve_precisions
from .regions import open_region
from .session import open_session
from .settings import is_integer
from .shapes.solver import solve_shapes
from .source import Source, user_source
from .specs import (
    CONTRACTION,
    AxisTerm,
    Name,
    Position,
    RowSpec,
    Sliced,
    Spec,
    StaticIndex,
    pointwise,
    with_row,
)
from .statement_text import op_text
from .statements import Access, Apply, Composite, Expr, Operand, OpRecord, Scope, Slot, Statement, WriteOp

ParameterHook: TypeAlias = Callable[["Tensor"], "Tensor"]

_parameter_hook: ContextVar[ParameterHook | None] = ContextVar("stagedtensor_parameter_hook", default=None)


_BORDERS = {"enter": "argument of a composite", "leave": "composite"}
"""How the two ends of a composite show."""


class Tensor(Operators):
    """A value node with its gradient node, if any. Built by functions of this package, never directly.

    Looking at it (``shape``, ``precision``, ``repr``) solves on a throw-away copy and changes nothing.
    """

    __slots__ = ("__weakref__", "node")

    def __init__(self, node: Node) -> None:
        self.node = node
        if node.tensor is None:
            node.tensor = self

    # -- facts ----------------------------------------------------------------------------------------------------
    @property
    def name(self) -> str:
        """The label: a parameter's path, a placeholder's name, or what an op called its result."""
        return self.node.label

    @property
    def label(self) -> str:
        """The name shown in errors and generated source; may be assigned."""
        return self.node.label

    @label.setter
    def label(self, text: str) -> None:
        self.named(text)

    def named(self, text: str) -> Tensor:
        """Give the tensor a label and return it."""
        if not isinstance(text, str) or not text:
            raise TypeError(f"a label is a non-empty string, not {text!r}")
        self.node.label = text
        if self.node.gradient is not None:
            self.node.gradient.label = f"{text}.grad"
        return self

    @property
    def grad(self) -> Tensor | None:
        """The gradient as a tensor of its own, or None where nothing leads to a parameter."""
        refuse_encoded(self.node, "there is no gradient of")
        gradient = self.node.gradient
        return None if gradient is None else tensor_of(gradient)

    @property
    def params(self) -> Params:
        """The trainable and frozen parameters this tensor depends on, in construction order."""
        found = [node for node in ancestors([self.node]) if node.role is Role.PARAM]
        return Params(tensor_of(node) for node in sorted(found, key=lambda node: node.number))

    @property
    def shape(self) -> Shape:
        """The shape as everything built so far determines it, printed as ``32 | 784 -> 10``."""
        return solve_shapes([self.node], partial=True).shape(self.node)

    @property
    def precision(self) -> Prec:
        """The storage precision as everything built so far determines it."""
        return solve_precisions([self.node]).prec(self.node)

    def cast(self, prec: Any, *, saturate: bool = False) -> Tensor:
        """Convert to ``prec``; see :func:`cast`."""
        return cast(self, prec, saturate=saturate)

    def __repr__(self) -> str:
        return f"<tensor {self.label}: {self._facts()}>"

    def _facts(self) -> str:
        parts = []
        for fact in ("shape", "precision"):
            try:
                parts.append(str(getattr(self, fact)))
            except StagedTensorError as error:  # an unfinished graph still prints
                parts.append(f"{fact} not settled ({type(error).__name__})")
        record = self.node.record
        kind = self.node.role.value if record is None else _BORDERS.get(record.kind, record.kind)
        return ", ".join((*parts, kind, *(["has gradient"] if self.node.gradient is not None else [])))

    def _repr_html_(self) -> str:
        return f"<code>{escape(repr(self))}</code>"

    # -- what the operators come down to ----------------------------------------------------------------------------
    def _pointwise(self, op: str, *values: TensorLike) -> Tensor:
        return apply_pointwise(op, *values)

    def _contracted(self, left: TensorLike, right: TensorLike) -> Tensor:
        return matmul(left, right)

    def _at(self, key: Any) -> Tensor:
        return index_batch(self, key)

    def __pos__(self) -> Tensor:
        return self

    def __copy__(self) -> Tensor:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            f"tensor {self.label!r} is a node of a program and cannot be copied or pickled apart from it; "
            "st.save keeps values, and building the model again gives the same program"
        )

    if not TYPE_CHECKING:  # a type checker shall still know every attribute

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(
                f"tensor {self.node.label!r} has no attribute {name!r}; functions are called as st.sum(t), facts are t.shape, "
                "t.precision and t.grad, values come from ctx.get_values(t) after a run",
                name=name,
                obj=self,
            )


def tensor_of(node: Node) -> Tensor:
    """Return the canonical tensor over ``node``."""
    existing: Tensor | None = node.tensor
    return existing if existing is not None else Tensor(node)


# -- lifting ------------------------------------------------------------------------------------------------------


def lift(value: TensorLike, *, label: str | None = None) -> Tensor:
    """Return ``value`` as a tensor: numbers and nested lists become literals, arrays constants of their own format."""
    if isinstance(value, Tensor):
        return value
    if hasattr(value, "__tensor__"):  # captured sizes
        lifted: Tensor = value.__tensor__()
        return lifted
    if isinstance(value, Encoded):
        return encoded_constant(value, label)
    if isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value):
        raise TypeError(
            f"a {type(value).__name__} of tensors is no tensor; join them with st.concat([a, b], axis=...) "
            f"({user_source().quoted()})"
        )
    data, prec = ingest(value)
    axes = tuple(DeclaredAxis(size) for size in data.shape)
    role = Role.LITERAL if prec is None else Role.CONSTANT
    node = new_node(
        role,
        label or _literal_label(value),
        declared=DeclaredShape(output=DeclaredRow(axes)),
        top_down=role is Role.LITERAL,
    )
    node.data = data.copy()
    if prec is None:
        node.literal = value
        adopt(node)
    else:
        node.specified = Specified(prec, node.source, "data")
    return Tensor(node)


def encoded_constant(value: Encoded, label: str | None = None) -> Tensor:
    """Return an encoded weight as a constant: its last axis is the input row, the others are the output row.

    A vector is one output axis. Packed bytes stay packed: whatever reads the tensor decodes what it reads, and in a
    precision region rounds it once.
    """
    axes = tuple(DeclaredAxis(size) for size in value.shape)
    output, input_ = (axes[:-1], axes[-1:]) if len(axes) > 1 else (axes, ())
    node = new_node(
        Role.CONSTANT,
        label or "encoded",
        declared=DeclaredShape(DeclaredRow(), DeclaredRow(input_), DeclaredRow(output)),
    )
    region = open_region()
    if value.encoding.dense:
        node.data = value.numpy()
    else:
        node.encoded = value
    if value.encoding.dense or region is None:
        node.specified = Specified(value.prec, node.source, "data")
    else:
        # decoded values are rounded at the read, once: no convert makes a copy of the whole weight
        node.specified = Specified(region.prec, node.source, "region")
    return Tensor(node)


def _literal_label(value: Any) -> str:
    return f"{value}" if isinstance(value, int | float) else "constant"


def read_here(tensor: Tensor) -> Tensor:
    """Return the tensor as an op built now reads it: converted where it was made in another precision region."""
    here, made = open_region(), tensor.node.region
    if here is made or tensor.node.value is not None:
        return tensor
    if tensor.node.encoded is not None:
        return encoded_constant(tensor.node.encoded, tensor.node.label)
    region = here or made
    assert region is not None
    carried: Tensor = region.carry(tensor, here)
    return carried


def _reads_across(kind: str, tensor: Tensor, slot: Slot) -> bool:
    """Whether an operand crosses: data does; boundaries and the casts that make twins read what lies beyond."""
    if kind == "cast" and tensor.node.role is Role.PARAM:
        return False
    return slot is Slot.DATA and kind != BARRIER


# -- op application -----------------------------------------------------------------------------------------------

TreeBuilder: TypeAlias = Callable[..., Expr]


def apply_op(
    kind: str,
    operands: Sequence[Tensor],
    spec: Spec,
    tree: TreeBuilder,
    *,
    reduction: WriteOp | None = None,
    slots: Sequence[Slot] | None = None,
    rule: str | None = "tree",
    attributes: Mapping[str, Any] | None = None,
    sizes: Mapping[str, Any] | None = None,
    captures: Mapping[str, int] | None = None,
    label: str | None = None,
    text: str = "",
    prec: Prec | None = None,
    composite: Composite | None = None,
    top_down: bool = False,
    source: Source | None = None,
) -> Tensor:
    """Build one op result: its node, gradient node, scope, forward statement and record.

    ``tree`` maps the operands' accesses to the statement's expression. ``rule`` names the gradient rule; None makes
    the op non-differentiable. ``prec`` fixes the result's precision (casts, argmax).
    """
    slots = tuple(slots) if slots is not None else (Slot.DATA,) * len(operands)
    operands = [
        read_here(operand) if _reads_across(kind, operand, slot) else operand
        for operand, slot in zip(operands, slots, strict=True)
    ]
    nodes = tuple(operand.node for operand in operands)
    if kind in ("permute", "reshape"):
        refuse_encoded(nodes[0], f"{kind} of")
    source = source or user_source()
    # outside any session block, what is built on a graph joins that graph's session
    home = open_session() or (nodes[0].session if nodes else None)
    result = new_node(Role.OP, label or kind, source=source, top_down=top_down, session=home)
    scope = Scope(spec, nodes, result, source, kind, sizes=dict(sizes or {}), captures=dict(captures or {}))
    reads = tuple(Access(node, rows) for node, rows in zip(nodes, spec.operands, strict=True))
    statement = Statement(
        Access(result, spec.result),
        tree(*reads),
        scope,
        op=reduction,
        source=source,
        text=text or op_text(kind, nodes),
    )
    record = OpRecord(
        kind,
        tuple(map(Operand, nodes, slots)),
        result,
        scope,
        (statement,),
        rule,
        dict(attributes or {}),
        composite,
    )
    result.record = record
    for node in dict.fromkeys(nodes):
        node.consumers.append(record)
    if prec is not None:
        result.specified = Specified(prec, source, "cast" if kind == "cast" else "range")
    carries = rule is not None and any(
        node.gradient is not None for node, slot in zip(nodes, slots, strict=True) if slot is Slot.DATA
    )
    if carries and not _without_gradient.get() and (prec is None or prec.is_float):
        add_gradient(result)
    adopt(result)
    return Tensor(result)


def apply_pointwise(op: str, *values: TensorLike, label: str | None = None) -> Tensor:
    """Apply a row of the op table pointwise with broadcasting."""
    row = OPS[op]
    operands = tuple(lift(value) for value in values)
    slots = tuple(Slot.PREDICATE if at in row.predicates else Slot.DATA for at in range(len(operands)))
    return apply_op(
        op,
        operands,
        pointwise(len(operands)),
        lambda *reads: Apply(op, reads),
        slots=slots if row.op_class == "select" else None,
        rule="tree" if row.differentiable else None,
        attributes={"float_only": True} if row.float_only else None,
        label=label,
    )


def matmul(left: TensorLike, right: TensorLike) -> Tensor:
    """Contract the input row of ``left`` with the output row of ``right``; batch rows broadcast."""
    return apply_op(
        "matmul",
        (lift(left), lift(right)),
        CONTRACTION,
        lambda a, b: Apply("mul", (a, b)),
        reduction="add",
        attributes={"reduction": "add", "combine": "mul"},
    )


def cast(x: TensorLike, prec: Any, *, saturate: bool = False) -> Tensor:
    """Convert ``x`` to ``prec``: one rounding forward; the gradient converts back at its store.

    Returns ``x`` itself if its precision is already fixed at ``prec``. A cast from or to an integer has no gradient.
    """
    tensor, target = lift(x), precision(prec)
    if not isinstance(saturate, bool):
        raise TypeError(f"saturate is True or False, not {saturate!r}")
    node = tensor.node
    fixed = node.settled.prec if node.settled else node.specified.prec if node.specified else None
    if fixed is target and not saturate:
        return tensor
    if target is u4x32 or fixed is u4x32:
        raise PrecisionError(
            f"u4x32 is counter state and cannot be cast (tensor {tensor.label!r}, {user_source().quoted()})"
        )
    if saturate and not target.is_float:
        raise PrecisionError(
            f"saturate=True means nothing on the integer format {target} (tensor {tensor.label!r}, "
            f"{user_source().quoted()}); integers wrap, floats saturate when cast to integers anyway"
        )
    result = apply_op(
        "cast",
        (tensor,),
        pointwise(1),
        lambda a: a,
        rule="tree" if target.is_float and (fixed is None or fixed.is_float) else None,
        prec=target,
        label=f"{tensor.label}.{target}",
    )
    if saturate:
        result.node.saturate = True
    return result


def index_batch(x: Tensor, key: Any) -> Tensor:
    """``x[i]`` removes the leftmost batch axis at a static index or an int; ``x[a:b]`` narrows it."""
    kept: tuple[AxisTerm, ...] = ()
    if isinstance(key, Index):
        term: AxisTerm = StaticIndex(key.name, key.size)
        text = key.name
    elif is_integer(key):
        term, text = Position(int(key)), str(key)
    elif isinstance(key, slice):
        term, text = _batch_slice(x, key)
        kept = (Name("kept"),)
    else:
        raise TypeError(
            f"{x.label!r}: expected x[i] with an int or st.index, or x[a:b], got {type(key).__name__} "
            f"({user_source().quoted()}); for other axes see st.narrow and st.gather"
        )
    return apply_op(
        "slice",
        (x,),
        Spec((with_row("batch", RowSpec((term,), "batch")),), with_row("batch", RowSpec(kept, "batch"))),
        lambda a: a,
        label=x.label,
        text=f"{x.label}[{text}]",
    )


def _batch_slice(x: Tensor, key: slice) -> tuple[Sliced, str]:
    shape = x.shape
    if not shape.batch:
        raise ShapeError(
            f"{x.label!r} of shape {shape} has no batch axis to slice ({user_source().quoted()}); "
            "for other axes see st.narrow"
        )
    step = 1 if key.step is None else key.step
    if not is_integer(step, 1):
        raise ShapeError(f"slice: expected a step of at least 1, got {step!r} ({user_source().quoted()})")
    first, last, step = slice(key.start, key.stop, step).indices(shape.batch[0].size)
    return Sliced("kept", first, max(0, -(-(last - first) // step)), step), f"{first}:{last}"


def place(t: Tensor, placement: Placement | str) -> Tensor:
    """Ask that ``t`` be ``"virtual"`` (no buffer, recomputed at each read), ``"materialized"``, or ``"auto"``.

    Values never depend on it.
    """
    try:
        t.node.placement = Placement(placement)
    except ValueError:
        choices = ", ".join(repr(item.value) for item in Placement)
        raise ValueError(f"unknown placement {placement!r}; expected one of {choices}") from None
    return t
