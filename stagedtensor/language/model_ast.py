"""The syntax of model texts as frozen dataclasses: what the parser makes, the formatter prints, the elaborator reads.

    text       ::= definition*
    definition ::= let NAME parameter* = expr
    parameter  ::= Positional(pattern) | Labelled(~name) | Optional_(?(name = expr)) | UnitParameter
    expr       ::= Number | String | Boolean | Unit | Name | Field | Apply_ | Negative | Binary | Reduce | Einsum
                 | Tuple_ | List_ | BatchArray | InlineParameter | Ascription | StageBoundary
                 | Let | Fun | If | Sequence_ | Assignment

Equality ignores places (``at``, an offset into the text) and comments. Nothing is checked here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import TypeAlias


@dataclass(frozen=True)
class Syntax:
    """Base of all nodes: ``at`` is where the node starts in its text."""

    at: int = field(compare=False, repr=False, kw_only=True, default=0)


# -- parameters and patterns ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NamePattern(Syntax):
    """Binds a name; ``_`` binds nothing."""

    name: str


@dataclass(frozen=True)
class TuplePattern(Syntax):
    """Takes a tuple apart."""

    items: tuple[Pattern, ...]


Pattern: TypeAlias = NamePattern | TuplePattern


@dataclass(frozen=True)
class Positional(Syntax):
    """An argument given by position."""

    pattern: Pattern


@dataclass(frozen=True)
class Labelled(Syntax):
    """``~name``: an argument given by label."""

    name: str


@dataclass(frozen=True)
class Optional_(Syntax):
    """``?(name = default)``."""

    name: str
    default: Expr


@dataclass(frozen=True)
class UnitParameter(Syntax):
    """``()``: the stage at which parameters are made."""


Parameter: TypeAlias = Positional | Labelled | Optional_ | UnitParameter

# -- leaves -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Number(Syntax):
    """A number without a sign."""

    value: int | float


@dataclass(frozen=True)
class String(Syntax):
    """A string: a spec, a name, an axis."""

    value: str


@dataclass(frozen=True)
class Boolean(Syntax):
    """``true`` or ``false``."""

    value: bool


@dataclass(frozen=True)
class Unit(Syntax):
    """``()`` as an argument: apply the stage."""


@dataclass(frozen=True)
class Name(Syntax):
    """A bound name or a function of the language."""

    name: str


# -- compound expressions ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Field(Syntax):
    """``value.name``: a gradient (``p.grad``) or a captured size."""

    value: Expr
    name: str


@dataclass(frozen=True)
class Argument(Syntax):
    """One argument; ``label`` None is by position. ``~hid`` is short for ``~hid:hid``."""

    label: str | None
    value: Expr


@dataclass(frozen=True)
class Apply_(Syntax):
    """Application by juxtaposition."""

    function: Expr
    arguments: tuple[Argument, ...]


@dataclass(frozen=True)
class Negative(Syntax):
    """``-value`` or ``~-value``."""

    value: Expr


@dataclass(frozen=True)
class Binary(Syntax):
    """An infix operator as written; ``at`` is the operator's place."""

    operator: str
    left: Expr
    right: Expr


@dataclass(frozen=True)
class Reduce(Syntax):
    """``value ++ "spec"`` (sum) or ``value @^ "spec"`` (max)."""

    operator: str
    value: Expr
    spec: str


@dataclass(frozen=True)
class Einsum(Syntax):
    """``left +* "spec" right`` (sum of products), ``@^*`` (max of products) or ``@^+`` (max of sums)."""

    operator: str
    left: Expr
    spec: str
    right: Expr


@dataclass(frozen=True)
class Tuple_(Syntax):
    """``(a, b)``: a tuple, or an input axis."""

    items: tuple[Expr, ...]


@dataclass(frozen=True)
class List_(Syntax):
    """``[a; b]``: a list, or an output axis."""

    items: tuple[Expr, ...]


@dataclass(frozen=True)
class BatchArray(Syntax):
    """``[| a; b |]``: a batch axis."""

    items: tuple[Expr, ...]


@dataclass(frozen=True)
class ParameterField(Syntax):
    """``name = value`` inside the braces of a parameter."""

    name: str
    value: Expr


@dataclass(frozen=True)
class InlineParameter(Syntax):
    """``{ name : precision = initial; o = rows }``: a parameter made at the stage around it."""

    name: str
    precision: Name | None
    initial: Expr | None
    fields: tuple[ParameterField, ...]


@dataclass(frozen=True)
class Ascription(Syntax):
    """``(value : precision)``."""

    value: Expr
    precision: Name


@dataclass(frozen=True)
class StageBoundary(Syntax):
    """``stage precision "label" ~weights:narrow value``: a region, of another precision if one is given."""

    precision: Name | None
    label: str
    value: Expr
    weights: Name | None = None


@dataclass(frozen=True)
class Binding(Syntax):
    """``pattern = value`` or ``name parameters = value`` of a let."""

    pattern: Pattern
    parameters: tuple[Parameter, ...]
    value: Expr


@dataclass(frozen=True)
class Let(Syntax):
    """``let b1 in let b2 in ... body``; the body is no Let."""

    bindings: tuple[Binding, ...]
    body: Expr


@dataclass(frozen=True)
class Fun(Syntax):
    """``fun parameters -> body``."""

    parameters: tuple[Parameter, ...]
    body: Expr


@dataclass(frozen=True)
class If(Syntax):
    """``if condition then yes else no`` on configuration."""

    condition: Expr
    yes: Expr
    no: Expr


@dataclass(frozen=True)
class Sequence_(Syntax):
    """Computations in order; the last item is no Sequence_."""

    items: tuple[Expr, ...]


@dataclass(frozen=True)
class Assignment(Syntax):
    """``target operator value ~logic:"map"``; ``at`` is the target's place."""

    target: Expr
    operator: str
    value: Expr
    logic: str | None


Expr: TypeAlias = (
    Number | String | Boolean | Unit | Name | Field | Apply_ | Negative | Binary | Reduce | Einsum | Tuple_ | List_ | BatchArray
    | InlineParameter | Ascription | StageBoundary | Let | Fun | If | Sequence_ | Assignment
)  # fmt: skip

# -- texts ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Definition(Syntax):
    """``let name parameters = body`` of a text, with the comments that stand before or inside it."""

    name: str
    parameters: tuple[Parameter, ...]
    body: Expr
    comments: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Definitions(Syntax):
    """A whole text, with the comments after its last definition."""

    items: tuple[Definition, ...]
    comments: tuple[str, ...] = field(default=(), compare=False)


def children(node: Syntax) -> Iterator[Syntax]:
    """Yield the nodes directly inside ``node``, in the order of the text."""
    for entry in fields(node):
        value = getattr(node, entry.name)
        if isinstance(value, Syntax):
            yield value
        elif isinstance(value, tuple):
            yield from (item for item in value if isinstance(item, Syntax))


def bound_names(pattern: Pattern) -> Iterator[NamePattern]:
    """Yield the names that a pattern binds."""
    if isinstance(pattern, TuplePattern):
        for item in pattern.items:
            yield from bound_names(item)
    elif pattern.name != "_":
        yield pattern


def parameter_names(parameters: tuple[Parameter, ...]) -> Iterator[tuple[str, int]]:
    """Yield (name, place) of what parameters bind."""
    for parameter in parameters:
        match parameter:
            case Positional(pattern):
                yield from ((name.name, name.at) for name in bound_names(pattern))
            case Labelled(name) | Optional_(name):
                yield name, parameter.at
