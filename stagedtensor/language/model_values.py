"""Values of the textual language beside tensors and Python's own: functions, stages, batch arrays, ``()``.

In: syntax and the scope around it. A ``Function`` is what ``let f x = ...`` and ``fun`` make; Python calls it like a
function. How it is applied is ``elaborate_calls``; the ``Machine`` of its text evaluates the body.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from stagedtensor.blocks import Frame, at_most
from stagedtensor.errors import LanguageError
from stagedtensor.source import user_source

from . import model_ast as ast
from .model_text import Text

MAX_STEPS = 200_000
"""Expressions that one call from Python may evaluate."""
MAX_BLOCKS = 10_000
"""Blocks that one call from Python may make, those inside blocks of Python included."""
MAX_CELLS = 200_000
"""Items that a list, tuple or array may hold, those of lists inside it included."""


class Nothing(Enum):
    """The value of ``()``."""

    UNIT = "()"


UNIT = Nothing.UNIT


class BatchArray(tuple[Any, ...]):
    """The value of ``[| a; b |]``."""

    __slots__ = ()


@dataclass(eq=False)
class Stage:
    """One application of ``()``: the parameters that it made, by the place of their braces in the syntax."""

    name: str
    frame: Frame
    open: bool = True
    made: dict[int, Any] = field(default_factory=dict)
    names: dict[str, ast.InlineParameter] = field(default_factory=dict)


@dataclass(frozen=True)
class Scope:
    """Names and what they mean, and the stage around."""

    names: Mapping[str, Any]
    stage: Stage | None = None

    def bind(self, names: Mapping[str, Any]) -> Scope:
        """Return the scope with more names."""
        return Scope({**self.names, **names}, self.stage) if names else self


@dataclass(frozen=True)
class Given:
    """One argument's value and place (None: given from Python)."""

    label: str | None
    value: Any
    at: int | None = None


class Machine(Protocol):
    """What evaluates the expressions of one text."""

    @property
    def text(self) -> Text:
        """The text."""

    def evaluate(self, node: ast.Expr, scope: Scope, label: str | None = None) -> Any:
        """Return the value of an expression; ``label`` names the block that it makes, if it makes one."""

    def make_parameters(self, body: ast.Expr, scope: Scope, hidden: frozenset[str]) -> None:
        """Make the parameters in a function's body; ``hidden`` are names that its application will bind."""

    def call(self, function: Function, given: list[Given], label: str | None) -> Any:
        """Apply a function to arguments that come from Python."""


@dataclass(frozen=True, eq=False)
class Function:
    """A function or block of a text. Call it with tensors and configuration; without arguments it applies ``()``.

    A block is called with its configuration first, then without arguments (``label=`` names it), then with tensors.
    """

    name: str
    parameters: tuple[ast.Parameter, ...]
    body: ast.Expr
    scope: Scope
    machine: Machine
    given: tuple[Given, ...] = ()

    @property
    def stage_at(self) -> int | None:
        """The position of ``()`` among the parameters, None for a plain function."""
        for at, parameter in enumerate(self.parameters):
            if isinstance(parameter, ast.UnitParameter):
                return at
        return None

    @property
    def segment(self) -> tuple[ast.Parameter, ...]:
        """The parameters that are bound next: those before ``()``, or all."""
        return self.parameters[: self.stage_at]

    def __call__(self, *args: Any, label: str | None = None, **kwargs: Any) -> Any:
        """Apply the function to values from Python; labelled arguments are keywords."""
        given = [Given(None, value) for value in args] + [Given(name, value) for name, value in kwargs.items()]
        return self.machine.call(self, given, label)

    def __repr__(self) -> str:
        what = "function" if self.stage_at is None else "block"
        return f"<{what} {self.name} of {self.machine.text.name}>"


def fault(machine: Machine, at: int | None, problem: str, expected: str = "", advice: str = "") -> LanguageError:
    """Build the error for a place in the text, or in the Python code that called into it."""
    if at is not None:
        return machine.text.fault(at, problem, expected, advice)
    lines = [f"{machine.text.name}: {problem}", f"  {user_source().quoted()}"]
    lines += [f"  expected {expected}"] if expected else []
    return LanguageError("\n".join((*lines, *([f"  {advice}"] if advice else []))), file=machine.text.name)


# -- bounds -----------------------------------------------------------------------------------------------------------


@dataclass
class _Budget:
    """What one call from Python has left, and the sizes of the lists it has seen (kept alive, so that ids stay theirs)."""

    steps: int = MAX_STEPS
    sizes: dict[int, tuple[Any, int]] = field(default_factory=dict)


_budget: ContextVar[_Budget | None] = ContextVar("stagedtensor_budget", default=None)


@contextmanager
def bounded() -> Iterator[bool]:
    """Bound the work of what runs inside; yield whether this is the outermost call."""
    if _budget.get() is not None:
        yield False
        return
    token = _budget.set(_Budget())
    try:
        with at_most(MAX_BLOCKS):
            yield True
    finally:
        _budget.reset(token)


def step(machine: Machine, at: int) -> None:
    """Count one step; raise LanguageError when there are too many."""
    budget = _budget.get()
    if budget is None:
        return
    budget.steps -= 1
    if budget.steps < 0:
        raise machine.text.fault(
            at,
            f"more than {MAX_STEPS} steps",
            advice="the definitions apply each other too often; the language has no loops",
        )


def sized(machine: Machine, value: Any, at: int) -> Any:
    """Return a list, tuple or array that was just made; raise LanguageError if it holds too much.

    Lists share what they hold, so that a few definitions can write down more cells than a computer has bytes.
    """
    budget = _budget.get() or _Budget()
    if _cells(value, budget.sizes) > MAX_CELLS:
        raise machine.text.fault(
            at,
            f"more than {MAX_CELLS} items, those of lists inside lists included",
            "a smaller list; arrays come from Python",
        )
    return value


def _cells(value: Any, known: dict[int, tuple[Any, int]]) -> int:
    if not isinstance(value, list | tuple):
        return 1
    found = known.get(id(value))
    if found is None:
        found = known[id(value)] = (value, 1 + sum(_cells(item, known) for item in value))
    return found[1]


def kind_of(value: Any) -> str:
    """Name the kind of a value for messages."""
    match value:
        case bool():
            return "a truth value"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "a list"
        case BatchArray():
            return "a batch array"
        case tuple():
            return "a tuple"
        case Nothing():
            return "()"
        case None:
            return "none"
        case Function():
            return f"the {'function' if value.stage_at is None else 'block'} {value.name!r}"
    if callable(value):
        return f"the function {getattr(value, '__name__', 'of Python')!r}"
    return {"Tensor": "a tensor", "Prec": "a precision", "Comp": "a computation"}.get(
        type(value).__name__, f"a value of type {type(value).__name__}"
    )
