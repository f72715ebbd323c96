"""Prints model syntax as text: parsing what it prints gives the same syntax back.

In: ``Definitions``. Out: text in one layout, with as few parentheses as the grammar allows. Comments of a definition
are printed before it. Neither names nor values are looked at.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import model_ast as ast

WIDTH = 100
"""Definitions and functions longer than this are broken after ``=`` and ``->``."""

# How tightly an expression binds: where a tighter one is needed it gets parentheses.
_BODY, _BRANCH, _ASSIGNMENT, _OR, _AND, _COMPARISON, _SUM, _PRODUCT, _UNARY, _POWER, _PREFIX, _APPLY, _ATOM = range(13)
_LEVELS = {"||": _OR, "&&": _AND, "+": _SUM, "-": _SUM, "@|": _SUM, "**.": _POWER} | dict.fromkeys(
    ("*", "*.", "/.", "//", "%"), _PRODUCT
)


def level_of(operator: str) -> int:
    """Return how tightly an infix operator binds."""
    return _LEVELS.get(operator, _COMPARISON)


def format_definitions(syntax: ast.Definitions) -> str:
    """Return the text of definitions; empty for none."""
    parts = ["\n".join((*item.comments, _definition(item))) for item in syntax.items]
    parts += ["\n".join(syntax.comments)] if syntax.comments else []
    return "".join(f"{part}\n" for part in "\n\n".join(parts).split("\n")) if parts else ""


def _definition(item: ast.Definition) -> str:
    return _bound(f"let {item.name}", item.parameters, item.body, "")


def _bound(head: str, parameters: Sequence[ast.Parameter], value: ast.Expr, indent: str) -> str:
    head = f"{head}{_parameters(parameters)} ="
    return f"{head}{_after(value, indent, len(head))}"


def _after(body: ast.Expr, indent: str, used: int) -> str:
    """Return a body on the same line if it fits there, else indented below."""
    line = _expr(body, _BODY, indent)
    if "\n" not in line and len(indent) + used + 1 + len(line) <= WIDTH and not isinstance(body, ast.Let):
        return f" {line}"
    deeper = f"{indent}  "
    return f"\n{deeper}{_expr(body, _BODY, deeper)}"


def _parameters(parameters: Sequence[ast.Parameter]) -> str:
    return "".join(f" {_parameter(parameter)}" for parameter in parameters)


def _parameter(parameter: ast.Parameter) -> str:
    match parameter:
        case ast.Positional(pattern):
            return _pattern(pattern)
        case ast.Labelled(name):
            return f"~{name}"
        case ast.Optional_(name, default):
            return f"?({name} = {_expr(default, _ASSIGNMENT, '')})"
        case ast.UnitParameter():
            return "()"


def _pattern(pattern: ast.Pattern) -> str:
    if isinstance(pattern, ast.NamePattern):
        return pattern.name
    return f"({', '.join(map(_pattern, pattern.items))})"


def _expr(node: ast.Expr, level: int, indent: str) -> str:
    """Return ``node`` where at least ``level`` is needed; lines after its first begin with ``indent``."""
    own, text = _written(node, indent)
    if own >= level:
        return text
    return f"({_written(node, f'{indent}  ')[1]})" if "\n" in text else f"({text})"


def _written(node: ast.Expr, indent: str) -> tuple[int, str]:
    """Return how tightly a node binds, and its text."""
    match node:
        case ast.Number(value):
            return _ATOM, number_text(value)
        case ast.String(value):
            return _ATOM, f'"{value}"'
        case ast.Boolean(value):
            return _ATOM, "true" if value else "false"
        case ast.Unit():
            return _ATOM, "()"
        case ast.Name(name):
            return _ATOM, name
        case ast.Field(value, name):
            return _ATOM, f"{_expr(value, _ATOM, indent)}.{name}"
        case ast.Apply_(function, arguments):
            given = (_argument(argument, indent) for argument in arguments)
            return _APPLY, " ".join((_expr(function, _ATOM, indent), *given))
        case ast.Negative(value):
            return _UNARY, f"-{_expr(value, _UNARY, indent)}"
        case ast.Binary(operator, left, right):
            own = level_of(operator)
            tight, tighter = {_POWER: (_PREFIX, _UNARY), _COMPARISON: (_SUM, _SUM)}.get(own, (own, own + 1))
            return own, f"{_expr(left, tight, indent)} {operator} {_expr(right, tighter, indent)}"
        case ast.Reduce(operator, value, spec):
            return _SUM, f'{_expr(value, _SUM, indent)} {operator} "{spec}"'
        case ast.Einsum(operator, left, spec, right):
            return _SUM, f'{_expr(left, _SUM, indent)} {operator} "{spec}" {_expr(right, _PRODUCT, indent)}'
        case ast.Tuple_(items):
            return _ATOM, f"({_items(items, ', ', indent)})"
        case ast.List_(items):
            return _ATOM, f"[{_items(items, '; ', indent)}]"
        case ast.BatchArray(items):
            return _ATOM, f"[| {_items(items, '; ', indent)} |]" if items else "[| |]"
        case ast.InlineParameter():
            return _ATOM, _inline_parameter(node, indent)
        case ast.Ascription(value, precision):
            return _ATOM, f"({_expr(value, _BODY, indent)} : {precision.name})"
        case ast.StageBoundary(prec, label, value, weights):
            head = f"stage {prec.name}" if prec is not None else "stage"
            setting = f" ~weights:{weights.name}" if weights is not None else ""
            return _APPLY, f'{head} "{label}"{setting} {_expr(value, _ATOM, indent)}'
        case ast.Let():
            return _BODY, _let(node, indent)
        case ast.Fun(parameters, body):
            head = f"fun{_parameters(parameters)} ->"
            return _BODY, f"{head}{_after(body, indent, len(head))}"
        case ast.If(condition, yes, no):
            branches = f"then {_expr(yes, _BRANCH, indent)} else {_expr(no, _BRANCH, indent)}"
            return _BRANCH, f"if {_expr(condition, _OR, indent)} {branches}"
        case ast.Sequence_(items):
            *first, last = items
            written = [_expr(item, _BRANCH, indent) for item in first]
            return _BODY, f";\n{indent}".join((*written, _expr(last, _BODY, indent)))
        case ast.Assignment(target, operator, value, logic):
            index_map = "" if logic is None else f' ~logic:"{logic}"'
            return _ASSIGNMENT, f"{_expr(target, _ATOM, indent)} {operator} {_expr(value, _OR, indent)}{index_map}"


def number_text(value: int | float) -> str:
    """Return a number as the language writes it: a float has a point or an exponent."""
    return repr(value)


def _items(items: Sequence[ast.Expr], separator: str, indent: str) -> str:
    return separator.join(_expr(item, _ASSIGNMENT, indent) for item in items)


def _argument(argument: ast.Argument, indent: str) -> str:
    if argument.label is None:
        return _expr(argument.value, _ATOM, indent)
    if argument.value == ast.Name(argument.label):
        return f"~{argument.label}"
    return f"~{argument.label}:{_expr(argument.value, _ATOM, indent)}"


def _inline_parameter(node: ast.InlineParameter, indent: str) -> str:
    head = node.name
    head += f" : {node.precision.name}" if node.precision is not None else ""
    head += f" = {_expr(node.initial, _ASSIGNMENT, indent)}" if node.initial is not None else ""
    fields = (f"{field.name} = {_expr(field.value, _ASSIGNMENT, indent)}" for field in node.fields)
    return f"{{ {'; '.join((head, *fields))} }}"


def _let(node: ast.Let, indent: str) -> str:
    lines = [
        f"{_bound(f'let {_pattern(item.pattern)}', item.parameters, item.value, indent)} in" for item in node.bindings
    ]
    return f"\n{indent}".join((*lines, _expr(node.body, _BODY, indent)))
