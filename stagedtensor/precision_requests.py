"""What may be asked of a node's precision: direct specifications and conditional updates.

``specify`` records either on the node itself (direct) or in its session's ordered list (``only_if``); policies append
one :class:`Update` a batch. Every refusal happens before anything is written. Nothing is solved here: conditions are
tested by the solver, except on nodes whose precision is final already.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np

from .errors import PrecisionError
from .node import Node, Settled, Specified, SpecifiedBy
from .precision import Prec, precision, u4x32
from .predicates import name_of
from .source import Source, user_source

Subject = TypeVar("Subject")
RequestClass: TypeAlias = Literal["param", "activation", "grad", "keep_f32", "except_", "only_if"]

_WEAK: frozenset[SpecifiedBy] = frozenset({"loss"})
"""Specifications that yield to one by the user, in either order."""


def yields(node: Node) -> bool:
    """Whether the node's specification gives way to one by the user (a loss's does, until it is settled)."""
    return node.settled is None and node.specified is not None and node.specified.by in _WEAK


@dataclass(frozen=True)
class Request:
    """What one update asks of one node; ``prec`` None is the node's own default."""

    prec: Prec | None
    kind: RequestClass


@dataclass(eq=False)
class Update:
    """One batch of conditional requests; all its tests read the solution before it.

    ``condition`` None marks a policy: it touches float nodes without a Specified precision. Nodes are held weakly.
    """

    source: Source
    targets: Mapping[Node, Request]
    condition: Callable[[Prec], bool] | None = None
    saturate: bool = False
    name: str = "policy"

    @property
    def is_policy(self) -> bool:
        """Whether this is a policy's batch rather than one ``only_if``."""
        return self.condition is None


def add_update(
    node: Node,
    targets: Mapping[Node, Request],
    source: Source,
    *,
    condition: Callable[[Prec], bool] | None = None,
    saturate: bool = False,
    name: str = "policy",
) -> Update:
    """Append an update to the session of ``node``, dropping those whose nodes are all gone."""
    held: weakref.WeakKeyDictionary[Node, Request] = weakref.WeakKeyDictionary(targets)
    update = Update(source, held, condition, saturate, name)
    updates = node.session.updates
    updates[:] = [entry for entry in updates if len(entry.targets)]
    updates.append(update)
    return update


def node_of(t: Any, what: str) -> Node:
    """Return the node of a Node or of anything with ``.node``.

    Raises PrecisionError for None, which is what ``t.grad`` gives where there is no gradient, TypeError for the rest.
    """
    if isinstance(t, Node):
        return t
    if t is None:
        raise PrecisionError(
            f"{what}: expected a tensor or a gradient, got None: this tensor carries no gradient\n"
            f"  {user_source().quoted()}\n  only what leads to a parameter or to requires_grad=True has one"
        )
    node = getattr(t, "node", None)
    if not isinstance(node, Node):
        raise TypeError(f"{what}: expected a tensor or a node, got {type(t).__name__}\n  {user_source().quoted()}")
    return node


def answer(test: Callable[[Subject], object], subject: Subject, what: str, source: Source) -> bool:
    """Apply a user's condition; PrecisionError unless it returns a bool."""
    result = test(subject)
    if isinstance(result, bool | np.bool_):
        return bool(result)
    raise PrecisionError(
        f"{what}: the condition {name_of(test)} must return True or False, it returned {result!r} for {subject}\n"
        f"  {source.quoted()}"
    )


def specify(t: Any, prec: Any, *, only_if: Callable[[Prec], bool] | None = None, saturate: bool = False) -> None:
    """Fix the precision of a value (``t``) or of a gradient (``t.grad``).

    With ``only_if`` the request is kept aside; at each solve it is tested on the precision that the node has without
    it, and holds like a direct one where it is true. ``saturate`` clamps finite overflow at every store to the node.

    Raises PrecisionError where another precision was specified or settled, naming both places; for an integer on a
    tensor that carries a gradient; for ``saturate`` on an integer. TypeError for a condition that is not callable.
    A failed call changes nothing.
    """
    node, wanted, source = node_of(t, "specify"), precision(prec), user_source()
    if not isinstance(saturate, bool):
        raise TypeError(f"saturate is True or False, not {saturate!r}\n  {source.quoted()}")
    if only_if is None:
        specify_node(node, wanted, source=source, saturate=saturate)
        return
    if not callable(only_if):
        raise TypeError(
            f"only_if is a condition on a precision, such as is_float, not {only_if!r}\n  {source.quoted()}"
        )
    _check_format(node, wanted, source, saturate)
    final: Settled | Specified | None = node.settled or (None if yields(node) else node.specified)
    if final is not None:
        if final.prec is not wanted and answer(only_if, final.prec, "specify", source):
            raise conflict(node, wanted, source)
        return
    add_update(
        node, {node: Request(wanted, "only_if")}, source, condition=only_if, saturate=saturate, name=name_of(only_if)
    )


def specify_node(
    node: Node,
    prec: Prec,
    by: SpecifiedBy = "user",
    *,
    source: Source | None = None,
    saturate: bool | None = None,
    unless_specified: bool = False,
) -> bool:
    """Specify a node directly on behalf of ``by``; return whether the node was changed.

    ``unless_specified``: leave a node that is Specified already as it is (losses, masters), though not a settled one.
    ``saturate`` None says nothing about saturation. Raises as :func:`specify` does, before anything is written.
    """
    source = source or user_source()
    known = node.specified
    if node.settled is None and known is not None and (unless_specified or (by in _WEAK and known.by not in _WEAK)):
        return False
    _check_format(node, prec, source, bool(saturate))
    overridden = yields(node) and by not in _WEAK
    fixed: Settled | Specified | None = node.settled or (None if overridden else known)
    if fixed is not None and fixed.prec is not prec:
        raise conflict(node, prec, source)
    for update in () if by in _WEAK or unless_specified else tuple(node.session.updates):
        request: Request | None = update.targets.get(node)
        if request is None or update.condition is None or request.prec is prec or node.settled is not None:
            continue
        if answer(update.condition, prec, "specify", update.source):
            raise PrecisionError(
                f"{node.label}: cannot specify {prec}, {request.prec} is specified already, for this condition holds\n"
                f"  {request.prec} only_if={update.name} {update.source.quoted()}\n  {prec} {source.quoted()}\n"
                "  specify one precision only, or convert with cast(...)"
            )
    if saturate is not None and fixed is not None and bool(node.saturate) != saturate:
        raise PrecisionError(
            f"{node.label}: two different saturate flags for one node\n"
            f"  saturate={bool(node.saturate)} {fixed.source.quoted()}\n  saturate={saturate} {source.quoted()}\n"
            "  saturation belongs to the node: give the same flag in both places"
        )
    changed = False
    if node.settled is None and (known is None or overridden):
        node.specified = Specified(prec, source, by)
        changed = True
    if saturate is not None and bool(node.saturate) != saturate:
        node.saturate = saturate
        changed = True
    return changed


def _check_format(node: Node, prec: Prec, source: Source, saturate: bool) -> None:
    """Refuse formats that the node cannot have whatever else is known of it."""
    if saturate and not prec.is_float:
        raise PrecisionError(
            f"{node.label}: saturate=True means nothing on {prec}, which is not a float\n  {source.quoted()}\n"
            "  integers wrap, and floats saturate when they are cast to integers anyway"
        )
    if not prec.is_float and (node.is_gradient or node.gradient is not None):
        kind = "is a gradient" if node.is_gradient else "carries a gradient"
        advice = "counter state has none" if prec is u4x32 else f"use cast(..., {prec}), which has no gradient"
        raise PrecisionError(
            f"{node.label} {kind}, so it cannot be specified as {prec}\n  {source.quoted()}\n"
            f"  {node.label} was made {node.source.quoted()}\n  {advice}"
        )


def conflict(node: Node, wanted: Prec, source: Source) -> PrecisionError:
    """Build the error for a node that has another precision already, settled or specified."""
    if node.settled is not None:
        settled = node.settled
        return PrecisionError(
            f"{node.label}: cannot specify {wanted}, routine {settled.routine!r} settled it at {settled.prec}\n"
            f"  {settled.prec} {settled.source.quoted()}\n  {wanted} {source.quoted()}\n"
            "  specify before the first compile, or convert with cast(...)"
        )
    known = node.specified
    if known is None:
        return PrecisionError(f"{node.label}: cannot specify {wanted}\n  {source.quoted()}")
    advice = {
        "data": "the array brought its format: convert with cast(...), or at ingestion with constant(array, prec=...)",
        "cast": "a cast has the precision it was given: cast the result again instead",
        "range": "its precision is fixed: convert with cast(...)",
        "region": "the region pinned it: convert with cast(...), or change the region's precision",
    }.get(known.by, "specify one precision only, or convert with cast(...)")
    by = "" if known.by == "user" else f" (by {known.party})"
    return PrecisionError(
        f"{node.label}: cannot specify {wanted}, {known.prec} is specified already{by}\n"
        f"  {known.prec} {known.source.quoted()}\n  {wanted} {source.quoted()}\n  {advice}"
    )
