"""Parses model texts into syntax; knows neither what names mean nor what is a tensor.

In: a ``Text``. Out: ``Definitions``. Faults of syntax are ``LanguageError`` with a caret and, for typical mistakes, a
sentence of advice. Nesting is bounded (``MAX_NESTING``), so that no later walk over the syntax can run out of stack.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

import lark

from . import model_ast as ast
from .caret import near
from .grammar import subtree
from .model_text import Comment, Text

if TYPE_CHECKING:
    from .grammar import ParseTree

MAX_NESTING = 100
"""Levels to which expressions nest; a chain of one operator counts a level for each."""
MAX_INTEGER = 2**63 - 1
_KEYWORDS = ("let", "in", "fun", "if", "then", "else", "true", "false", "stage")

_WORDS = {
    "NAME": "a name",
    "NUMBER": "a number",
    "STRING": "a string",
    "_LPAR": "'('",
    "_LSQB": "'['",
    "_LBRACE": "'{'",
    "LABEL": "an argument such as ~hid",
    "_EQUAL": "'='",
    "_IN": "'in'",
    "_ARROW": "'->'",
    "_THEN": "'then'",
    "_ELSE": "'else'",
    "PLUS": "an operator",
    "COMPARE": "a comparison",
    "ASSIGN": "an assignment",
    "_SEMICOLON": "';'",
    "_COMMA": "','",
    "_COLON": "':'",
    "_RPAR": "')'",
    "_RSQB": "']'",
    "_RBATCH": "'|]'",
    "_RBRACE": "'}'",
    "_LOGIC": '~logic:"..."',
    "_LET": "'let'",
    "$END": "end of text",
}


@cache
def _parser() -> lark.Lark:
    grammar = files("stagedtensor.language").joinpath("model.lark").read_text(encoding="utf-8")
    return lark.Lark(grammar, start="start", parser="lalr", propagate_positions=True, maybe_placeholders=False)


def parse_text(text: Text) -> ast.Definitions:
    """Parse a model text.

    >>> parse_text(Text("t", "let twice x = 2. *. x")).items[0].name
    'twice'
    """
    text.check()
    code = text.code
    try:
        tree = _parser().parse(code)
    except lark.UnexpectedCharacters as error:
        at = error.pos_in_stream or 0
        raise _unexpected(text, at, repr(code[at]), error.allowed or set()) from None
    except lark.UnexpectedToken as error:
        if error.token.type == "$END":
            raise _unexpected(text, len(code.rstrip()), "end of text", error.accepts or error.expected) from None
        at = error.pos_in_stream or 0
        raise _unexpected(text, at, repr(str(error.token)), error.accepts or error.expected) from None
    _check_nesting(tree, text)
    _check_names(tree, text)
    return _Builder(text).definitions(tree)


def _check_nesting(tree: ParseTree, text: Text) -> None:
    level = [tree]
    for _ in range(MAX_NESTING + 1):
        if not level:
            return
        level = [child for part in level for child in part.children if isinstance(child, lark.Tree)]
    if level:
        raise text.fault(
            _start(level[0]),
            f"expressions nest more than {MAX_NESTING} deep",
            advice="bind parts of it with let; of a long chain of let or ; make definitions of their own",
        )


def _check_names(tree: ParseTree, text: Text) -> None:
    """Refuse names that are keywords: the parser takes them where no keyword may stand."""
    for token in tree.scan_values(lambda part: isinstance(part, lark.Token) and part.type in ("NAME", "LABEL")):
        name = str(token).removeprefix("~")
        if name in _KEYWORDS:
            raise text.fault(_start(token), f"{name!r} is a keyword of the language", "another name")


def _start(part: ParseTree | lark.Token) -> int:
    if isinstance(part, lark.Token):
        return part.start_pos or 0
    return 0 if part.meta.empty else part.meta.start_pos


# -- faults of syntax -------------------------------------------------------------------------------------------------

_MISTAKES: tuple[tuple[str, str], ...] = (
    (r"\*\.?\*?\.\d|/\.\d|[+\-]\.\d", "write the zero before the point: x *. 0.5"),
    (r"[+\-]\.", "pointwise sum and difference have no dot: a + b, a - b"),
    (r"/(?![./])", "quotients have a dot: x /. y is pointwise, n // m divides sizes"),
    (r"\*\*(?!\.)", "powers have a dot: x **. 2."),
    (r"(?<![A-Za-z])@(?![\^|\-])", "a contraction is written a * b; x @| i reads the leftmost batch axis at i"),
    (r"@\^", 'the greatest over the axes that a spec lacks is x @^ "spec"; pointwise it is maximum a b'),
    (r"\+\+|\+\*", 'an einsum has its spec after the operator: x ++ "spec", a +* "spec" b'),
    (r":=", "an assignment is written '=:'"),
    (r"[+*/\-]=", "the operator stands after '=': '=+' accumulates, '=:+' resets first"),
    (r"\b(lambda|fn|func|function)\b", "a function is written fun x -> ..."),
    (r"\bdef\b", "a definition is written let name parameters = expression"),
    (r"!(?!=)", "a negation is written not (a)"),
    (r"'", 'strings have double quotes: "output"'),
    (r"stage", 'a precision boundary is written stage f16 "label" (expression)'),
)


def _unexpected(text: Text, at: int, got: str, wanted: set[str]) -> Exception:
    found = list(dict.fromkeys(_WORDS[name] for name in _WORDS if name in wanted))
    if len(found) > 6:  # a place where an expression may go on in any way
        found = []
    expected = " or ".join((", ".join(found[:-1]), found[-1])) if len(found) > 1 else "".join(found)
    return text.fault(at, f"unexpected {got}", expected, _advice(text.code, at, wanted))


def _advice(code: str, at: int, wanted: set[str]) -> str:
    if code.startswith("let", at) and wanted >= {"_IN"}:
        return "a let inside an expression ends with 'in'"
    if wanted >= {"_ELSE"} and not code[at:].strip():
        return "every if has an else"
    line = code.rfind("\n", 0, at) + 1
    for pattern, sentence in _MISTAKES:
        for found in re.finditer(pattern, code[line : at + 8]):
            is_word = pattern.startswith(r"\b")  # a wrong word shows where what follows it does not fit
            if line + found.start() - 1 <= at <= line + found.end() or (is_word and line + found.end() <= at):
                return sentence
    word = re.match(r"[^\W\d]\w*", code[at : at + 40])
    if word is not None and "NAME" not in wanted and word.group() not in _KEYWORDS:
        advice = near(word.group(), _KEYWORDS)
        return advice if advice.startswith("did") else ""
    return ""


# -- building ---------------------------------------------------------------------------------------------------------

_PARAMETERS = ("name_pattern", "tuple_pattern", "labelled_parameter", "optional_parameter", "unit_parameter")
_BINARY = ("or", "and", "comparison", "sum", "product", "power", "slice")


class _Builder:
    """Turns parse trees of one text into syntax."""

    def __init__(self, text: Text) -> None:
        self.text = text
        self.rules: Mapping[str, Callable[[ParseTree], ast.Expr]] = {
            **dict.fromkeys(_BINARY, self.binary),
            **dict.fromkeys(("negative", "tight_negative", "negative_argument", "negative_value"), self.negative),
            **dict.fromkeys(("let_body", "let_expression"), self.let),
            **dict.fromkeys(("fun_body", "fun_expression"), self.fun),
            "sequence": self.sequence,
            "if": self.if_,
            "assignment": self.assignment,
            "reduce": lambda t: ast.Reduce(
                str(t.children[1]), self.expr(t, 0), self.quoted(t, 2), at=_start(t.children[1])
            ),
            "einsum": lambda t: ast.Einsum(
                str(t.children[1]), self.expr(t, 0), self.quoted(t, 2), self.expr(t, 3), at=_start(t.children[1])
            ),
            "application": self.application,
            "field": lambda t: ast.Field(self.expr(t, 0), str(t.children[1])[1:], at=_start(t)),
            "number": self.number,
            "string": lambda t: ast.String(self.quoted(t, 0), at=_start(t)),
            "boolean": lambda t: ast.Boolean(str(t.children[0]) == "true", at=_start(t)),
            "name": lambda t: self.name(t),
            "unit": lambda t: ast.Unit(at=_start(t)),
            "group": lambda t: self.expr(t, 0),
            "tuple": lambda t: ast.Tuple_(self.exprs(t), at=_start(t)),
            "list": lambda t: ast.List_(self.exprs(t), at=_start(t)),
            "batch_array": lambda t: ast.BatchArray(self.exprs(t), at=_start(t)),
            "ascription": lambda t: ast.Ascription(self.expr(t, 0), self.name(t.children[1]), at=_start(t)),
            "inline_parameter": self.inline_parameter,
            "stage_boundary": self.stage_boundary,
        }

    # -- texts ------------------------------------------------------------------------------------------------------
    def definitions(self, tree: ParseTree) -> ast.Definitions:
        comments = list(self.text.comments)
        made = []
        for part in map(subtree, tree.children):
            mine = self._comments_before(comments, part.meta.end_pos)
            name, *rest = part.children
            made.append(
                ast.Definition(str(name), self.parameters(rest[:-1]), self.expr(part, -1), mine, at=_start(name))
            )
        return ast.Definitions(tuple(made), tuple(comment.text for comment in comments))

    def _comments_before(self, comments: list[Comment], end: int) -> tuple[str, ...]:
        """Take the comments that start before ``end``, and one on the same line after it."""
        line_end = self.text.content.find("\n", end)
        same_line = self.text.content[end : line_end if line_end >= 0 else None].lstrip()
        if same_line.startswith(("#", "(*")):
            end = line_end if line_end >= 0 else len(self.text.content)
        taken = [comment for comment in comments if comment.at < end]
        del comments[: len(taken)]
        return tuple(comment.text for comment in taken)

    def parameters(self, parts: list[ParseTree | lark.Token]) -> tuple[ast.Parameter, ...]:
        return tuple(self.parameter(part) for part in parts if isinstance(part, lark.Tree))

    def parameter(self, tree: ParseTree) -> ast.Parameter:
        at = _start(tree)
        match tree.data:
            case "labelled_parameter":
                return ast.Labelled(str(tree.children[0])[1:], at=at)
            case "optional_parameter":
                return ast.Optional_(str(tree.children[0]), self.expr(tree, 1), at=at)
            case "unit_parameter":
                return ast.UnitParameter(at=at)
            case _:
                return ast.Positional(self.pattern(tree), at=at)

    def pattern(self, tree: ParseTree) -> ast.Pattern:
        if tree.data == "name_pattern":
            return ast.NamePattern(str(tree.children[0]), at=_start(tree))
        return ast.TuplePattern(tuple(self.pattern(subtree(part)) for part in tree.children), at=_start(tree))

    # -- expressions ------------------------------------------------------------------------------------------------
    def expr(self, tree: ParseTree, child: int) -> ast.Expr:
        part = subtree(tree.children[child])
        return self.rules[part.data](part)

    def exprs(self, tree: ParseTree) -> tuple[ast.Expr, ...]:
        return tuple(self.rules[part.data](part) for part in tree.children if isinstance(part, lark.Tree))

    def name(self, tree: ParseTree | lark.Token) -> ast.Name:
        return ast.Name(str(subtree(tree).children[0]), at=_start(tree))

    def stage_boundary(self, tree: ParseTree) -> ast.Expr:
        prec, weights, rest = None, None, list(tree.children)
        if isinstance(rest[0], lark.Tree):
            prec = self.name(rest.pop(0))
        label = str(rest.pop(0))[1:-1]
        if isinstance(rest[0], lark.Tree) and rest[0].data == "stage_weights":
            given = subtree(rest.pop(0))
            if str(given.children[0]).strip("~:") != "weights":
                raise self.text.fault(
                    _start(given), "a stage has no such setting", "~weights:narrow or ~weights:master"
                )
            weights = self.name(given.children[1])
            if weights.name not in ("narrow", "master"):
                raise self.text.fault(weights.at, f"unknown weights {weights.name!r}", "narrow or master")
        return ast.StageBoundary(prec, label, self.expr(tree, len(tree.children) - 1), weights, at=_start(tree))

    def quoted(self, tree: ParseTree, child: int) -> str:
        return str(tree.children[child])[1:-1]

    def number(self, tree: ParseTree) -> ast.Expr:
        written, at = str(tree.children[0]), _start(tree)
        if written.isdecimal():
            if len(written) > 19 or int(written) > MAX_INTEGER:
                raise self.text.fault(at, "this integer is too large", f"at most {MAX_INTEGER}", "write a float: 1e30")
            return ast.Number(int(written), at=at)
        value = float(written)
        if value == float("inf"):
            raise self.text.fault(at, "this number is too large for any precision", advice="infinity is called inf")
        return ast.Number(value, at=at)

    def negative(self, tree: ParseTree) -> ast.Expr:
        return ast.Negative(self.expr(tree, -1), at=_start(tree))

    def binary(self, tree: ParseTree) -> ast.Expr:
        operator = tree.children[1]
        return ast.Binary(str(operator), self.expr(tree, 0), self.expr(tree, 2), at=_start(operator))

    def application(self, tree: ParseTree) -> ast.Expr:
        arguments = tuple(self.argument(subtree(part)) for part in tree.children[1:])
        return ast.Apply_(self.expr(tree, 0), arguments, at=_start(tree))

    def argument(self, tree: ParseTree) -> ast.Argument:
        at = _start(tree)
        if tree.data == "punned":
            name = str(tree.children[0])[1:]
            return ast.Argument(name, ast.Name(name, at=at), at=at)
        if tree.data == "labelled":
            return ast.Argument(str(tree.children[0])[1:-1], self.expr(tree, 1), at=at)
        return ast.Argument(None, self.rules[tree.data](tree), at=at)

    def let(self, tree: ParseTree) -> ast.Expr:
        binding, body = subtree(tree.children[0]), self.expr(tree, 1)
        first, *rest = binding.children
        pattern = (
            ast.NamePattern(str(first), at=_start(first)) if isinstance(first, lark.Token) else self.pattern(first)
        )
        made = ast.Binding(pattern, self.parameters(rest[:-1]), self.expr(binding, -1), at=_start(binding))
        inner = (body.bindings, body.body) if isinstance(body, ast.Let) else ((), body)
        return ast.Let((made, *inner[0]), inner[1], at=_start(tree))

    def fun(self, tree: ParseTree) -> ast.Expr:
        return ast.Fun(self.parameters(tree.children[:-1]), self.expr(tree, -1), at=_start(tree))

    def if_(self, tree: ParseTree) -> ast.Expr:
        return ast.If(*self.exprs(tree), at=_start(tree))

    def sequence(self, tree: ParseTree) -> ast.Expr:
        items = self.exprs(tree)
        last = items[-1]
        if len(items) == 1:  # a trailing semicolon
            return last
        rest = last.items if isinstance(last, ast.Sequence_) else (last,)
        return ast.Sequence_((items[0], *rest), at=_start(tree))

    def assignment(self, tree: ParseTree) -> ast.Expr:
        target = self.expr(tree, 0)
        at = _start(tree.children[1])
        place = target.value if isinstance(target, ast.Field) and target.name == "grad" else target
        if not isinstance(place, ast.Name | ast.InlineParameter):
            raise self.text.fault(
                at, "only a name or its gradient can be assigned", "name or name.grad before the operator"
            )
        logic = tree.children[3] if len(tree.children) > 3 else None
        index_map = None if logic is None else self.quoted(subtree(logic), 0)
        return ast.Assignment(target, str(tree.children[1]), self.expr(tree, 2), index_map, at=_start(tree))

    def inline_parameter(self, tree: ParseTree) -> ast.Expr:
        name, *parts = tree.children
        made = ast.InlineParameter(str(name), None, None, (), at=_start(tree))
        for part in map(subtree, parts):
            if part.data == "annotation":
                made = replace(made, precision=self.name(part.children[0]))
            elif part.data == "initial":
                made = replace(made, initial=self.expr(part, 0))
            else:
                key = part.children[0]
                field = ast.ParameterField(str(key), self.expr(part, 1), at=_start(key))
                made = replace(made, fields=(*made.fields, field))
        return made
