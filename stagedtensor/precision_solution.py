"""What the precision solver answers, and how a successful compile freezes it.

In: reasons, refusals and saturation of the nodes of a component. Out: answers to lookups; only ``settle`` changes
nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .errors import InternalError
from .node import Node, Settled
from .precision import Prec
from .precision_reasons import Declined, Reason
from .source import user_source


class PrecisionSolution:
    """The precisions of one connected component, with reasons; a value that nothing else refers to."""

    def __init__(
        self,
        reasons: Mapping[Node, Reason],
        declined: Mapping[Node, tuple[Declined, ...]],
        saturated: frozenset[Node],
    ) -> None:
        self._reasons = reasons
        self._declined = declined
        self._saturated = saturated

    def __contains__(self, node: object) -> bool:
        return node in self._reasons

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes of the component, in construction order."""
        return tuple(sorted(self._reasons, key=lambda node: node.number))

    def reason(self, node: Node) -> Reason:
        """Return why ``node`` has its precision."""
        reason = self._reasons.get(node)
        if reason is None:
            raise InternalError(f"{node!r} is not connected to the nodes this precision solution was asked for")
        return reason

    def prec(self, node: Node) -> Prec:
        """Return the solved precision, which is also the storage precision."""
        return self.reason(node).prec

    def declined(self, node: Node) -> tuple[Declined, ...]:
        """Return the requests that were not followed."""
        return self._declined.get(node, ())

    def saturates(self, node: Node) -> bool:
        """Return whether stores to ``node`` clamp finite overflow (an update may have asked for it)."""
        return bool(node.saturate) or node in self._saturated


def settle(solution: PrecisionSolution, nodes: Iterable[Node], routine: str) -> None:
    """Freeze the precisions of ``nodes`` on behalf of ``routine``, which compiled; settled nodes stay as they are."""
    source = user_source()
    pending = list(dict.fromkeys(nodes))
    for node in pending:
        if node.settled is not None and node.settled.prec is not solution.prec(node):
            raise InternalError(f"{node.label} is settled at {node.settled.prec}, solved as {solution.prec(node)}")
        solution.reason(node)
    for node in pending:
        if node.settled is None:
            reason = solution.reason(node)
            node.saturate = solution.saturates(node) or node.saturate
            node.settled = Settled(reason.prec, routine, source, reason)
