"""Why a node has its precision: the tree of conclusions, and its text.

A :class:`Reason` is one conclusion of the solver with the reasons it rests on; they form a graph without cycles. A
:class:`Declined` is a request that was not followed. ``tree_text`` prints both; nothing here decides a precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from .node import Node
from .precision import Prec
from .source import Source

Rule: TypeAlias = Literal["R1", "R2", "R3", "R4", "R5", "R6"]

_STATES = {"R1": "Default", "R2": "Inferred", "R3": "Inferred", "R4": "Specified", "R5": "Specified", "R6": "Settled"}
_TITLES = {"R1": "", "R2": " bottom-up", "R3": " top-down", "R4": "", "R5": "", "R6": ""}


@dataclass(frozen=True, eq=False)
class Reason:
    """One conclusion: ``node`` has ``prec`` by ``rule``, said at ``source``, resting on ``because``.

    ``note`` replaces the rule's usual title where there is more to say (who specified it, which composite or policy).
    ``extra`` holds remarks such as an added session default.
    """

    node: Node
    rule: Rule
    prec: Prec
    source: Source
    because: tuple[Reason, ...] = ()
    note: str = ""
    extra: str = ""

    @property
    def state(self) -> str:
        """The node's state: Default, Inferred, Specified or Settled."""
        return _STATES[self.rule]

    @property
    def is_specified(self) -> bool:
        """Whether the node contributes upward even if it is top-down: specified, by hand or by a policy.

        Settling freezes the value, not the role, so a settled node answers as it did before.
        """
        if self.rule == "R6":
            return any(reason.is_specified for reason in self.because)
        return self.rule in ("R4", "R5")

    def __str__(self) -> str:
        title = f" {self.note}" if self.note else _TITLES[self.rule]
        where = f"   {self.source}" if self.rule in ("R4", "R5", "R6") else ""
        extra = f", {self.extra}" if self.extra else ""
        return f"{self.node.label}: {self.prec} {self.state} ({self.rule}{title}{extra}){where}"

    def __repr__(self) -> str:
        return f"<reason {self}>"


@dataclass(frozen=True, eq=False)
class Declined:
    """A request for ``prec`` that was not followed: who asked, at which line, and why not."""

    prec: Prec
    by: str
    source: Source
    why: str

    def __str__(self) -> str:
        return f"declined {self.prec} asked by {self.by} ({self.why})   {self.source}"


def tree_text(reason: Reason, declined: tuple[Declined, ...] = ()) -> str:
    """Return the tree below ``reason`` as indented lines, declined requests first, a repeated part once."""
    lines: list[str] = []
    printed: set[Reason] = set()
    stack: list[tuple[Reason, int]] = [(reason, 0)]
    while stack:
        current, depth = stack.pop()
        indent = "  " * depth + ("because " if depth else "")
        again = current in printed and bool(current.because)
        lines.append(f"{indent}{current}{'   (as above)' if again else ''}")
        if not again:
            printed.add(current)
            stack.extend((cause, depth + 1) for cause in reversed(current.because))
        if not depth:
            lines.extend(f"  {request}" for request in declined)
    return "\n".join(lines)
