"""Precision policies: one precision for all parameters, one for all activations, one for all gradients.

In: a root tensor and the choices. Out: one batch of conditional updates in the root's session, for the nodes reachable
then; nodes built later are not covered. Specified nodes, integers and the interiors of composites are passed by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal

from .errors import PrecisionError
from .node import HasNode, Node, Role
from .precision import Prec, f32, precision
from .precision_reasons import Reason
from .precision_requests import Request, RequestClass, add_update, answer, conflict, node_of
from .precision_rules import outer_composite
from .predicates import check_op_kinds, kinds_of
from .source import Source, user_source

KEEP_F32: Final = ("softmax", "layer_norm", "cross_entropy")
"""Op kinds whose results are best kept at f32."""


@dataclass(frozen=True)
class PrecisionPolicy:
    """Precisions of the three classes of nodes; None leaves a class to inference.

    ``param``: values of the parameters. ``activation``: every other value outside the interior of a composite.
    ``grad``: every gradient outside the interior of a composite. Raises PrecisionError for a format that is no float,
    ValueError if all three are None.
    """

    param: Prec | None = None
    activation: Prec | None = None
    grad: Prec | None = None

    FIELDS: ClassVar[tuple[Literal["param", "activation", "grad"], ...]] = ("param", "activation", "grad")

    def __init__(self, param: Any = None, activation: Any = None, grad: Any = None) -> None:
        given = {"param": param, "activation": activation, "grad": grad}
        if all(value is None for value in given.values()):
            raise ValueError(
                f"PrecisionPolicy: give at least one of param, activation, grad\n  {user_source().quoted()}"
            )
        for field, value in given.items():
            prec = None if value is None else precision(value)
            if prec is not None and not prec.is_float:
                raise PrecisionError(
                    f"PrecisionPolicy: {field}={prec} is no float precision; policies touch float nodes only\n"
                    f"  {user_source().quoted()}\n  use cast(..., {prec}) on single tensors"
                )
            object.__setattr__(self, field, prec)

    @classmethod
    def uniform(cls, prec: Any) -> PrecisionPolicy:
        """Return the policy with one precision for all three classes."""
        return cls(prec, prec, prec)

    def __str__(self) -> str:
        given = ((field, getattr(self, field)) for field in self.FIELDS)
        return f"policy({', '.join(f'{field}={prec}' for field, prec in given if prec is not None)})"

    def apply(
        self, root: HasNode, *, except_: Callable[[Node], bool] | None = None, keep_f32: Iterable[str] = ()
    ) -> None:
        """Register the policy for the nodes reachable from ``root``.

        Nodes for which ``except_`` holds (values and gradients alike) are pinned at their session default. ``keep_f32``
        names op kinds whose results and gradients are pinned at f32. Precedence: Specified, ``keep_f32``, ``except_``,
        class. An earlier policy's nodes keep theirs.

        Raises TypeError for a root that is no tensor, PrecisionError for an unknown op kind, an ``except_`` that does
        not return bool, and a settled node that would have to change. A failed call registers nothing.
        """
        source = user_source()
        node = _root_node(root)
        kept = frozenset(_kinds(keep_f32))
        if except_ is not None and not callable(except_):
            raise TypeError(
                f"except_ is a predicate on nodes, such as label('norm'), not {except_!r}\n  {source.quoted()}"
            )
        targets: dict[Node, Request] = {}
        params = _param_nodes(root)
        for reached in _reachable(node, params):
            request = self._request(reached, params, except_, kept, source)
            if request is not None:
                _refuse_settled(reached, request, source)
                targets[reached] = request
        add_update(node, targets, source, name=str(self))

    def _request(
        self,
        node: Node,
        params: dict[Node, None],
        except_: Callable[[Node], bool] | None,
        kept: frozenset[str],
        source: Source,
    ) -> Request | None:
        kind: RequestClass = "grad" if node.is_gradient else "param" if node in params else "activation"
        if not kept.isdisjoint(kinds_of(node)):
            return Request(f32, "keep_f32")
        if except_ is not None and answer(except_, node, "except_", source):
            return Request(None, "except_")
        prec: Prec | None = getattr(self, kind)
        return None if prec is None else Request(prec, kind)


def _root_node(root: Any) -> Node:
    if root is None or isinstance(root, Node) or not hasattr(root, "params"):
        raise TypeError(
            f"PrecisionPolicy.apply: expected a tensor, got {type(root).__name__}\n  {user_source().quoted()}"
        )
    return node_of(root, "PrecisionPolicy.apply")


def _kinds(keep_f32: Iterable[str]) -> tuple[str, ...]:
    names = (keep_f32,) if isinstance(keep_f32, str) else tuple(keep_f32)
    check_op_kinds(names, "keep_f32")
    return names


def _param_nodes(root: HasNode) -> dict[Node, None]:
    return dict.fromkeys(param if isinstance(param, Node) else param.node for param in root.params)


def _reachable(root: Node, params: dict[Node, None]) -> Iterator[Node]:
    """Yield values and gradients that ``root`` is computed from, without interiors and results that are wide anyway."""
    seen = {root: None, **params}
    stack = list(seen)
    while stack:
        node = stack.pop()
        if node.role is Role.PARAM:
            params.setdefault(node)
        if outer_composite(node) is None and not _is_wide(node):
            yield node
            if node.gradient is not None:
                yield node.gradient
        operands = [] if node.record is None else [operand.node for operand in node.record.operands]
        if node.record is not None and node.record.composite is not None:
            operands.extend(operand.node for operand in node.record.composite.operands)
        for operand in operands:
            if operand not in seen:
                seen[operand] = None
                stack.append(operand)


def _is_wide(node: Node) -> bool:
    """Whether the node is a loss's result: f32 or wider by construction, whatever its operands are."""
    record = node.record
    return (
        record is not None and record.kind == "leave" and record.composite is not None and record.composite.wide_result
    )


def _refuse_settled(node: Node, request: Request, source: Source) -> None:
    settled = node.settled
    if settled is None or not settled.prec.is_float or node.specified is not None:
        return
    if isinstance(settled.reason, Reason) and settled.reason.is_specified:
        return
    wanted = request.prec if request.prec is not None else node.default_prec
    if settled.prec is not wanted:
        raise conflict(node, wanted, source)
