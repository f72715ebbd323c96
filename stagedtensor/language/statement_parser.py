"""Parses statement strings into a small tree with places; knows names and operators, not tensors.

In: ``"m =: beta *. m + p.grad; p =- lr *. m"``. Out: one ``Assignment`` per statement. Faults of syntax are
``SpecError`` with a caret. Names are bound, functions looked up and shapes mapped in ``computation``.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

from stagedtensor.statement_text import WRITE_SYMBOLS
from stagedtensor.statements import WriteOp

from .caret import spec_error
from .grammar import advice_on, is_token, offset_of, parse, subtree

if TYPE_CHECKING:
    from lark import Token

    from .grammar import ParseTree

WHAT = "statement"


@dataclass(frozen=True)
class Number:
    """A number as written."""

    value: int | float
    offset: int


@dataclass(frozen=True)
class Reference:
    """A bound name, or the gradient of one."""

    name: str
    grad: bool
    offset: int

    def __str__(self) -> str:
        return f"{self.name}.grad" if self.grad else self.name


@dataclass(frozen=True)
class Call:
    """A function, or an operator by the name of its table op; ``infix`` is the operator as written."""

    function: str
    args: tuple[Term, ...]
    offset: int
    infix: str = ""


@dataclass(frozen=True)
class Contraction:
    """``a * b``: input row of a with output row of b (or a product under an index map)."""

    left: Term
    right: Term
    offset: int


Term: TypeAlias = Number | Reference | Call | Contraction


@dataclass(frozen=True)
class Assignment:
    """One statement. ``op`` None sets; ``reset`` starts from the op's neutral element. ``text`` is the statement."""

    target: Reference
    op: WriteOp | None
    reset: bool
    expr: Term
    logic: str | None
    text: str
    offset: int
    operator_offset: int
    logic_offset: int = 0


_WRITES: dict[str, WriteOp] = {symbol: op for op, symbol in WRITE_SYMBOLS.items()}
_BINARY = {"+": "add", "+.": "add", "-": "sub", "-.": "sub", "*.": "mul", "/.": "div", "**.": "pow"}
_COMPARISONS = {"<": "lt", "<=": "le", ">": "gt", ">=": "ge", "==": "eq", "!=": "ne"}
_DOTLESS = {"/": "/.", "**": "**."}

_WORDS = {
    "NAME": "a name",
    "NUMBER": "a number",
    "LPAR": "'('",
    "ASSIGN": "'=:', '=+', '=-', '=*', '=/', '=@^' or '=@-' (a ':' after '=' resets first)",
    "GRAD": "'.grad'",
    "PLUS": "'+'",
    "MINUS": "'-'",
    "TIMES": "'*.'",
    "OVER": "'/.'",
    "POWER": "'**.'",
    "STAR": "'*'",
    "COMPARE": "a comparison",
    "RPAR": "')'",
    "COMMA": "','",
    "COLON": "':'",
    "STRING": 'an index map such as "ij;jk=>ik"',
    "SEMICOLON": "';'",
    "$END": "end of text",
}


def parse_statements(text: str) -> tuple[Assignment, ...]:
    """Parse a statement string.

    >>> parse_statements("p =- lr *. m")[0].op
    'sub'

    Raises SpecError with a caret for faults of syntax and for an empty text.
    """
    if not isinstance(text, str):
        raise TypeError(f'a computation is a string such as "p =- lr *. g", not {text!r}')
    return _parse_cached(text)


_DEEPEST = 150
"""Levels of an expression, so that no pass over it runs out of Python's stack."""


@lru_cache(maxsize=256)
def _parse_cached(text: str) -> tuple[Assignment, ...]:
    tree = parse("statement", "start", text, what=WHAT, words=_WORDS, advice=_ADVICE)
    made = tuple(_assignment(subtree(part), text) for part in tree.children if not is_token(part))
    if not made:
        raise spec_error(text, 0, "no statement", what=WHAT, expected="target, operator, expression", advice=_FORM)
    return made


def _assignment(tree: ParseTree, text: str) -> Assignment:
    reference, operator, expr, *logic = tree.children
    symbol = str(operator)[1:]
    reset = symbol.startswith(":")
    op = _WRITES[symbol.removeprefix(":")] if symbol != ":" else None
    map_text, map_offset = None, 0
    if logic:
        (token,) = subtree(logic[0]).children
        map_text, map_offset = str(token)[1:-1], offset_of(token) + 1
    end = tree.meta.end_pos
    return Assignment(
        _reference(subtree(reference)),
        op,
        reset or op is None,
        _term(subtree(expr), text),
        map_text,
        " ".join(re.sub(r"#[^\n]*", "", text[offset_of(tree) : end]).split()),
        offset_of(tree),
        offset_of(operator),
        map_offset,
    )


def _reference(tree: ParseTree) -> Reference:
    return Reference(str(tree.children[0]), len(tree.children) > 1, offset_of(tree))


def _term(tree: ParseTree, text: str, depth: int = 0) -> Term:
    parts = tree.children
    if depth > _DEEPEST:
        raise spec_error(
            text,
            offset_of(tree),
            f"an expression of more than {_DEEPEST} levels",
            what=WHAT,
            expected="fewer levels",
            advice="write the parts as statements of their own, or build them as tensors",
        )
    match tree.data:
        case "number":
            return _number(str(parts[0]), offset_of(tree), text)
        case "reference":
            return _reference(tree)
        case "call":
            name = parts[0]
            args = tuple(_term(subtree(part), text, depth + 1) for part in parts[1:])
            return Call(str(name), args, offset_of(name))
        case "negative" | "tight_negative":
            return Call("neg", (_term(subtree(parts[-1]), text, depth + 1),), offset_of(tree), infix="-")
        case _:
            left, operator, right = parts
            lhs, rhs = (_term(subtree(part), text, depth + 1) for part in (left, right))
            return _infix(lhs, operator, rhs, text)  # type: ignore[arg-type]


def _number(written: str, at: int, text: str) -> Number:
    value = int(written) if written.isdecimal() else float(written)
    if isinstance(value, float) and math.isinf(value):
        raise spec_error(
            text,
            at,
            f"the number {written} is beyond every format",
            what=WHAT,
            expected="at most 1.797e308",
            advice="an infinity is bound by name: big=float('inf')",
        )
    return Number(value, at)


def _infix(left: Term, operator: Token, right: Term, text: str) -> Term:
    symbol, at = str(operator), offset_of(operator)
    if symbol in _DOTLESS:
        raise spec_error(
            text,
            at,
            f"unexpected {symbol!r}",
            what=WHAT,
            expected=repr(_DOTLESS[symbol]),
            advice="pointwise products, quotients and powers have a dot: *. /. **.",
        )
    if symbol == "*":
        return Contraction(left, right, at)
    return Call({**_BINARY, **_COMPARISONS}[symbol], (left, right), at, infix=symbol)


# -- typical mistakes ---------------------------------------------------------------------------------------------

_FORM = "a statement is: target operator expression, e.g. p =- lr *. m"
_MISTAKES: tuple[tuple[str, str], ...] = (
    (r"[+*/]=|-=", "the operator stands after '=': '=+' accumulates, '=:+' resets first"),
    (r":=", "a set is written '=:'"),
    (r"(?<![=!<>:])=(?![=:+\-*/@])", "a set is written '=:'"),
    (r"\b(and|or|not)\b", "and, or and not are functions: and(a, b)"),
    (r"[<>]=?[^;<>]*[<>]", "comparisons do not chain: and(a < b, b < c)"),
    (r"@(?!\^|-)", "the greatest value is kept with '=@^', the least with '=@-'; a contraction is a * b"),
    (r"~(?!logic|-)", 'an index map is written ~logic:"ij;jk=>ik", a minus sign ~-'),
    (r"\.\s*(?!grad\b)[A-Za-z_]\w*", "of a name only its gradient can be taken: p.grad"),
    (r"\[", 'indices are written as an index map: ~logic:"ij;jk=>ik"'),
)
_ADVICE = advice_on(_MISTAKES, _FORM)
