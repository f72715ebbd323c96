"""Predicates over precisions and nodes, combined with ``& | ~``: conditions of ``only_if``, answers to ``except_``.

In: nothing but what a node or a format shows of itself. Out: callables that return bool. It also keeps the list of
known op kinds, so that a misspelt one is answered with the near ones. Nothing here solves anything.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

from .errors import PrecisionError
from .node import Node
from .op_table import OPS
from .precision import Prec
from .source import user_source

Subject = TypeVar("Subject")


class Predicate(Generic[Subject]):
    """A named test, combined with ``&``, ``|`` and ``~``; the other side may be any callable that returns bool.

    >>> from stagedtensor.precision import bf16, i32
    >>> (is_float & ~is_narrow)(bf16), (~is_float)(i32), is_float | is_integer
    (False, True, (is_float | is_integer))
    """

    def __init__(self, test: Callable[[Subject], bool], name: str) -> None:
        self._test = test
        self.name = name

    def __call__(self, subject: Subject) -> bool:
        """Apply the test."""
        return self._test(subject)

    def __and__(self, other: Callable[[Subject], bool]) -> Predicate[Subject]:
        return Predicate(lambda subject: self(subject) and other(subject), f"({self.name} & {name_of(other)})")

    def __or__(self, other: Callable[[Subject], bool]) -> Predicate[Subject]:
        return Predicate(lambda subject: self(subject) or other(subject), f"({self.name} | {name_of(other)})")

    def __rand__(self, other: Callable[[Subject], bool]) -> Predicate[Subject]:
        return Predicate(lambda subject: other(subject) and self(subject), f"({name_of(other)} & {self.name})")

    def __ror__(self, other: Callable[[Subject], bool]) -> Predicate[Subject]:
        return Predicate(lambda subject: other(subject) or self(subject), f"({name_of(other)} | {self.name})")

    def __invert__(self) -> Predicate[Subject]:
        return Predicate(lambda subject: not self(subject), f"~{self.name}")

    def __repr__(self) -> str:
        return self.name


def name_of(test: Callable[..., Any]) -> str:
    """Return what to call a condition in messages: a predicate's or a function's own name."""
    return test.name if isinstance(test, Predicate) else getattr(test, "__name__", type(test).__name__)


# -- conditions on a precision --------------------------------------------------------------------------------------

is_float: Final[Predicate[Prec]] = Predicate(lambda prec: prec.is_float, "is_float")
"""Holds for floating-point formats."""

is_narrow: Final[Predicate[Prec]] = Predicate(lambda prec: prec.is_narrow, "is_narrow")
"""Holds for floats of fewer than 32 bits."""

is_integer: Final[Predicate[Prec]] = Predicate(lambda prec: prec.is_integer, "is_integer")
"""Holds for integers; bool and u4x32 are none."""


# -- op kinds -------------------------------------------------------------------------------------------------------

_OTHER_KINDS: Final = (
    "argmax", "argmin", "cast", "clamp", "concat", "einsum", "gather", "matmul", "max", "min", "nan_to_num",
    "one_hot", "permute", "prod", "reshape", "slice", "sum",
)  # fmt: skip
_kinds: dict[str, None] = dict.fromkeys((*OPS, *_OTHER_KINDS))


def declare_op_kind(name: str) -> None:
    """Add a composite's name to the known op kinds (idempotent)."""
    _kinds.setdefault(name)


def known_op_kinds() -> tuple[str, ...]:
    """Return all op kinds that ``op_kind`` and ``keep_f32`` accept, sorted."""
    return tuple(sorted(_kinds))


def check_op_kinds(names: tuple[Any, ...], what: str) -> None:
    """Raise PrecisionError, listing the known kinds, if ``what`` was given a name that is none of them."""
    for name in names:
        if isinstance(name, str) and name in _kinds:
            continue
        known = known_op_kinds()
        near = difflib.get_close_matches(name, known, n=3) if isinstance(name, str) else []
        hint = f"\n  near matches: {', '.join(near)}" if near else ""
        raise PrecisionError(
            f"{what}: unknown op kind {name!r}\n  {user_source().quoted()}{hint}\n  known kinds: {', '.join(known)}"
        )


def kinds_of(node: Node) -> frozenset[str]:
    """Return the op kinds a node answers to: its own op's and those of the composites that built it.

    A gradient answers to those of its value.
    """
    value = node.shape_node
    kinds = set(node.tags | value.tags)
    record = value.record
    if record is not None:
        kinds.add(record.kind)
        if record.composite is not None and record.kind == "leave":
            kinds.add(record.composite.name)
    return frozenset(kinds)


def op_kind(*names: str) -> Predicate[Node]:
    """Hold for values and gradients of the named ops and composites; PrecisionError for an unknown name."""
    check_op_kinds(names, "op_kind")
    wanted = frozenset(names)
    return Predicate(lambda node: not wanted.isdisjoint(kinds_of(node)), f"op_kind({', '.join(names)})")


def label(pattern: str) -> Predicate[Node]:
    """Hold where the regular expression is found in the label of the node, or of the value of a gradient."""
    try:
        compiled = re.compile(pattern)
    except re.error as fault:
        raise ValueError(f"label: {pattern!r} is no regular expression: {fault}\n  {user_source().quoted()}") from None
    return Predicate(lambda node: compiled.search(node.shape_node.label) is not None, f"label({pattern!r})")


is_grad: Final[Predicate[Node]] = Predicate(lambda node: node.is_gradient, "is_grad")
"""Holds for gradient nodes."""
