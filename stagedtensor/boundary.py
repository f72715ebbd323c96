"""Precision regions: ``stage`` keeps a part of a model in another precision and converts what crosses its edge.

In: a name, a float precision, what to do with weights; then blocks to wrap, or a ``with`` body. Out: ops, parameters
and literals made inside are specified at the region's precision; a float tensor read across an edge is converted once
per (region, tensor, side) by an op of kind ``stage``, through which no precision is inferred. A pending boundary whose
two sides solve equal is dropped when a program is solved. ``boundary_report`` looks at what was built.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from contextvars import Token
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from .blocks import applied_model, entered
from .cast_twins import cast_param
from .errors import PrecisionError
from .node import Node, Role, Specified
from .op_table import OPS
from .precision import Prec, PrecLike, f32, join, precision
from .precision_rules import BARRIER
from .predicates import declare_op_kind
from .regions import Region, _region, open_region
from .session import current_session
from .source import Source, user_source
from .specs import pointwise
from .statements import OpRecord, Slot
from .tensor import Tensor, _composite, _parameter_hook, apply_op, cast, read_here, tensor_of

Side: TypeAlias = Literal["enter", "exit"]
Weights: TypeAlias = Literal["master", "narrow"]

declare_op_kind(BARRIER)


# -- what is converted ------------------------------------------------------------------------------------------------


def _fixed(node: Node) -> Prec | None:
    """The precision that nothing built later can change, if there is one."""
    known = node.settled or node.specified
    return known.prec if known is not None else None


def is_integer(node: Node) -> bool:
    """Whether a value will be an integer whatever else is built: by its own format, or as an op on such operands."""
    known: dict[Node, bool] = {}
    stack = [node]
    while stack:
        current = stack[-1]
        if current in known:
            stack.pop()
            continue
        fixed, record = _fixed(current), current.record
        if fixed is not None or current.gradient is not None or current.value is not None or record is None:
            known[current] = fixed is not None and not fixed.is_float
            continue
        operands = _contributors(record)
        missing = [operand for operand in operands if operand not in known]
        if missing:
            stack.extend(missing)
        else:
            known[current] = _gives_integer(record, [known[operand] for operand in operands])
    return known[node]


def _contributors(record: OpRecord) -> list[Node]:
    """Data operands that say something: a literal whole number takes the format of what it meets."""
    data = [operand.node for operand in record.operands if operand.slot is Slot.DATA]
    return [node for node in data if not (node.role is Role.LITERAL and not _is_fraction(node))]


def _gives_integer(record: OpRecord, operands: list[bool]) -> bool:
    if record.kind in ("argmax", "argmin") or record.attributes.get("reduction") in ("argmax", "argmin"):
        return True
    row = OPS.get(record.kind)
    composite = record.composite if record.kind == "leave" else None
    float_only = (row is not None and row.float_only) or (composite is not None and composite.float_only)
    if float_only or record.attributes.get("float_only"):
        return False
    return bool(operands) and all(operands)


def _is_fraction(node: Node) -> bool:
    return node.data is not None and node.data.dtype.kind == "f"


class PrecisionBoundary:
    """The crossing of one edge: ``boundary(tensor)`` is the tensor at ``target``.

    A tensor that is Specified or Settled at ``target`` is returned itself, an integer too. ``region`` is the one being
    entered or left. Each tensor is converted once per region and side.
    """

    def __init__(self, target: PrecLike, region: Region, side: Side) -> None:
        self.target = precision(target)
        self.region = region
        self.side: Side = side

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` on the other side of the edge."""
        if _fixed(tensor.node) is self.target or is_integer(tensor.node):
            return tensor
        made = self.region.crossings if isinstance(self.region, OpenRegion) else {}
        key = tensor.node, self.side
        if key not in made:
            made[key] = self._convert(tensor)
        return made[key]

    def _convert(self, tensor: Tensor) -> Tensor:
        """Build the convert in the region that it leads into, outside every composite."""
        inward = self.region if self.side == "enter" else self.region.parent
        region_token, composite_token = _region.set(inward), _composite.set(None)
        try:
            result = apply_op(
                BARRIER,
                (tensor,),
                pointwise(1),
                lambda a: a,
                attributes={"region": self.region, "side": self.side},
                label=f"{tensor.label}.{self.target}",
                text=tensor.label,
            )
        finally:
            _composite.reset(composite_token)
            _region.reset(region_token)
        result.node.specified = Specified(self.target, result.node.source, "region", self.region.name)
        return result


@dataclass(eq=False)
class OpenRegion:
    """One use of a stage: what is made while it is open belongs to it."""

    name: str
    prec: Prec
    parent: Region | None
    source: Source
    outside: Prec = f32
    """The precision around: the parent's, or the session default."""
    weights: Weights = "master"
    crossings: dict[tuple[Node, Side], Tensor] = field(default_factory=dict)

    def carry(self, tensor: Tensor, reader: Region | None) -> Tensor:
        """Take ``tensor`` over every edge between its maker and ``reader``, outwards first.

        A parameter and a twin cross as a twin of the master at the reader's precision, without a boundary.
        """
        node = tensor.node
        if reader is not None:
            master = _master(node)
            if master is not None:
                return twin_at(master, reader.prec)
        around = _chain(reader)
        current = node.region
        while current is not None and current not in around:
            tensor = PrecisionBoundary(_around(current), current, "exit")(tensor)
            current = current.parent
        for region in reversed(around[: around.index(current)] if current is not None else around):
            tensor = PrecisionBoundary(region.prec, region, "enter")(tensor)
        return tensor

    def adopt(self, node: Node) -> None:
        """Pin a value made inside, and its gradient, at the region's precision.

        What has a precision of its own keeps it; integers and losses (f32 or wider by construction) are passed by, and
        so is a master, which its twin stands for.
        """
        if node.specified is not None or (node.record is not None and node.record.kind == BARRIER):
            self._adopt_gradient(node)
            return
        if node.role is Role.PARAM and node.trainable and self.weights == "master" and self.prec.is_narrow:
            return
        if node.role is Role.LITERAL:
            if not _is_fraction(node):
                return
        elif node.role not in (Role.OP, Role.PLACEHOLDER, Role.PARAM):
            return
        record = node.record
        if record is not None and record.composite is not None and record.composite.wide_result:
            return
        if is_integer(node):
            return
        node.specified = Specified(self.prec, node.source, "region", self.name)
        self._adopt_gradient(node)

    def _adopt_gradient(self, node: Node) -> None:
        """Pin the gradient of an activation or a twin."""
        gradient, record = node.gradient, node.record
        if gradient is None or gradient.specified is not None:
            return
        if record is not None and record.kind == "cast" and node.specified and node.specified.prec is not self.prec:
            return
        if record is not None or (node.specified is not None and node.specified.by == "region"):
            gradient.specified = Specified(self.prec, node.source, "region", self.name)

    def parameter(self, p: Tensor) -> Tensor:
        """Return what the region reads instead of a parameter made inside: a twin where formats differ."""
        return p if _fixed(p.node) is self.prec else twin_at(p, self.prec)


def _chain(region: Region | None) -> list[Region]:
    """The region and those around it, innermost first."""
    chain = []
    while region is not None:
        chain.append(region)
        region = region.parent
    return chain


def _master(node: Node) -> Tensor | None:
    """Return the parameter that a node is or is the twin of."""
    if node.role is Role.PARAM:
        return tensor_of(node)
    if node.record is not None and node.record.attributes.get("twin"):
        return tensor_of(node.record.operands[0].node)
    return None


def _around(region: Region) -> Prec:
    return region.outside if isinstance(region, OpenRegion) else f32


def twin_at(p: Tensor, prec: Prec) -> Tensor:
    """Return the reading of a parameter at ``prec``: itself where it is stored so, else its twin, which is made once."""
    node = p.node
    if _fixed(node) is prec:
        return p
    token = _composite.set(None)
    try:
        if node.gradient is not None:
            return cast_param(p, prec, master_prec=join(prec, f32))
        for record in node.consumers:
            known = record.result.specified
            if record.attributes.get("twin") and known is not None and known.prec is prec:
                return tensor_of(record.result)
        if _fixed(node) is None:
            node.specified = Specified(node.default_prec, node.source, "master")
        twin = cast(p, prec)
        if twin is not p and twin.node.record is not None:
            twin.node.record.attributes["twin"] = True
        return twin
    finally:
        _composite.reset(token)


# -- stages -----------------------------------------------------------------------------------------------------------


class Stage(AbstractContextManager["Stage"]):
    """A named part of a model, perhaps of another precision; see :func:`stage`."""

    def __init__(self, name: str, prec: Prec | None, weights: Weights, source: Source, *, labels: bool = True) -> None:
        self.name = name
        self.prec = prec
        self.weights: Weights = weights
        self._source = source
        self._labels = labels
        self._inside: ExitStack | None = None
        self._spent = False

    def _open(self) -> ExitStack:
        """Open a region of this stage; closing the stack restores what was open before."""
        stack = ExitStack()
        stack.enter_context(entered(self.name) if self._labels and applied_model() is None else nullcontext())
        if self.prec is not None:
            parent = open_region()
            outside = current_session().default_prec if parent is None else parent.prec
            region = OpenRegion(self.name, self.prec, parent, self._source, outside, self.weights)
            region_token: Token[Region | None] = _region.set(region)
            stack.callback(_region.reset, region_token)
            stack.callback(_parameter_hook.reset, _parameter_hook.set(region.parameter))
        return stack

    def __enter__(self) -> Stage:
        if self._spent:
            raise PrecisionError(
                f"stage {self.name!r} was entered before, and one stage is one region\n  made {self._source.quoted()}\n"
                f"  {user_source().quoted()}\n  make another with st.stage({self.name!r}, ...)"
            )
        self._spent = True
        self._inside = self._open()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._inside is not None:
            self._inside.close()

    def __call__(self, *blocks: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``blocks``, applied in order, as one block whose tensors cross into the region and out of it.

        A callable result (a layer that a block made) is wrapped alike. Each application is a region of its own.
        """
        if not blocks or not all(map(callable, blocks)):
            raise TypeError(
                f"stage {self.name!r} wraps blocks or built layers, not {blocks!r} ({self._source.quoted()})"
            )
        return functools.partial(self._apply, blocks)

    def _apply(self, blocks: tuple[Callable[..., Any], ...], /, *args: Any, **kwargs: Any) -> Any:
        with self._open():
            first, *others = blocks
            value = first(*_each(read_here, args), **_each(read_here, kwargs))
            for block in others:
                value = block(value)
        return self.leave(value)

    def leave(self, value: Any) -> Any:
        """Return a result as what is around the region reads it: tensors cross, callables are wrapped."""
        if callable(value) and not isinstance(value, Tensor):
            return self(value)
        return _each(read_here, value)

    def __repr__(self) -> str:
        return f"<stage {self.name}{f' {self.prec}' if self.prec is not None else ''}>"


def _each(change: Callable[[Any], Any], value: Any) -> Any:
    """Apply ``change`` to the tensors of nested tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple | list) and type(value) in (tuple, list):
        return type(value)(_each(change, item) for item in value)
    if isinstance(value, dict):
        return {key: _each(change, item) for key, item in value.items()}
    return value


def stage(name: str, prec: PrecLike | None = None, weights: Weights = "master", *, labels: bool = True) -> Stage:
    """Name a part of a model and, with ``prec``, keep it in another float precision.

    Use it as a combinator, ``st.stage("body", prec="f16")(layer)(x)``, or around code, ``with st.stage(...):``. Inside,
    activations and their gradients are specified at ``prec``; a float tensor that crosses the edge is converted once.
    ``weights="master"``: parameters made inside stay f32 and are read through twins; ``"narrow"``: they are stored at
    ``prec``. In f32 and f64 both mean the latter. ``labels``: whether ``name`` is part of the paths of these
    parameters.

    >>> import stagedtensor as st
    >>> x = st.placeholder("x", output=[4])
    >>> y = st.stage("body", prec="f16")(st.tanh)(x)
    >>> [str(crossing) for crossing in st.boundaries(st.sum(y))]
    ['body enter f32 -> f16', 'body exit f16 -> f32']

    Raises ValueError for an empty name or unknown ``weights``, PrecisionError for a ``prec`` that is no float or for a
    stage entered twice.
    """
    source = user_source()
    if not isinstance(name, str) or not name:
        raise ValueError(f"stage: name is a non-empty string, not {name!r} ({source.quoted()})")
    if weights not in ("master", "narrow"):
        raise ValueError(f"stage {name!r}: weights is 'master' or 'narrow', not {weights!r} ({source.quoted()})")
    wanted = None if prec is None else precision(prec)
    if wanted is not None and not wanted.is_float:
        raise PrecisionError(
            f"stage {name!r}: {wanted} is no float precision ({source.quoted()}); an integer region would cut every "
            "gradient: cast the tensors that should be integers"
        )
    return Stage(name, wanted, weights, source, labels=labels)
