"""Assignments of model texts: written out as a statement string, so that both surfaces make the same call.

In: assignment syntax and the scope around it. Out: the computation of ``computation(text, **names)``. Only names,
numbers, operators and the pointwise functions of statements can stand in an assignment; nothing else is computed by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stagedtensor.errors import LanguageError, SpecError
from stagedtensor.program import Comp
from stagedtensor.source import written_at

from . import model_ast as ast
from .computation import FUNCTIONS, computation
from .model_format import level_of
from .model_values import Machine, Scope, kind_of
from .words import words

_CLOSED = 99
_OPERATORS = ("+", "-", "*", "*.", "/.", "**.", "<", "<=", ">", ">=", "==", "!=")
_FUNCTION_OF = {"&&": "and", "||": "or", "//": "floordiv", "%": "mod"}
_ONLY = "names, numbers, + - * *. /. **., comparisons and pointwise functions"


def computation_of(machine: Machine, statements: Sequence[ast.Assignment], scope: Scope) -> Comp:
    """Build the computation of assignments that follow each other."""
    writer = _Writer(machine, scope)
    text = "; ".join(writer.statement(statement) for statement in statements)
    at = statements[0].at
    try:
        with written_at(machine.text.source(at)):
            return computation(text, **writer.bound)
    except SpecError as error:
        problem, *rest = str(error).split("\n")
        advice = "\n  ".join(line.strip() for line in rest[3:] if not line.strip().startswith("at "))
        raise machine.text.fault(at, problem, advice=advice) from None


class _Writer:
    """Writes assignments as statements and collects what their names mean."""

    def __init__(self, machine: Machine, scope: Scope) -> None:
        self.machine = machine
        self.scope = scope
        self.bound: dict[str, Any] = {}

    def statement(self, node: ast.Assignment) -> str:
        logic = "" if node.logic is None else f' ~logic:"{node.logic}"'
        return f"{self.term(node.target)[0]} {node.operator} {self.term(node.value)[0]}{logic}"

    def term(self, node: ast.Expr) -> tuple[str, int]:
        """Return an expression's text and how tightly it binds."""
        match node:
            case ast.Number(value):
                return repr(value), _CLOSED
            case ast.Boolean(value):
                return str(int(value)), _CLOSED
            case ast.Name(name):
                return self._name(name, self.machine.evaluate(node, self.scope), node), _CLOSED
            case ast.Field(ast.Name(name) | ast.InlineParameter(name) as inner, "grad"):
                return f"{self._name(name, self.machine.evaluate(inner, self.scope), inner)}.grad", _CLOSED
            case ast.InlineParameter(name):
                return self._name(name, self.machine.evaluate(node, self.scope), node), _CLOSED
            case ast.Negative(value):
                return f"~-{self._inside(value, _CLOSED)}", _CLOSED
            case ast.If(condition, yes, no):
                chosen = self.machine.evaluate(condition, self.scope)
                if not isinstance(chosen, bool):
                    raise self._refused(node, f"a choice by {kind_of(chosen)}")
                return self.term(yes if chosen else no)
            case ast.Binary(operator, left, right) if operator in _OPERATORS:
                own = level_of(operator)
                first, second = (_CLOSED, own + 1) if operator == "**." else (own, own + 1)
                first = first + 1 if operator in _OPERATORS[6:] else first
                return f"{self._inside(left, first)} {operator} {self._inside(right, second)}", own
            case ast.Binary(operator, left, right) if operator in _FUNCTION_OF:
                return f"{_FUNCTION_OF[operator]}({self.term(left)[0]}, {self.term(right)[0]})", _CLOSED
            case ast.Apply_(ast.Name(name), arguments) if self._is_function(name):
                values = [argument.value for argument in arguments if argument.label is None]
                if len(values) < len(arguments):
                    raise self._refused(node, f"{name} with a labelled argument")
                if len(values) == 1 and isinstance(values[0], ast.Tuple_):
                    values = list(values[0].items)
                return f"{name}({', '.join(self.term(value)[0] for value in values)})", _CLOSED
        raise self._refused(node, "this expression")

    def _inside(self, node: ast.Expr, level: int) -> str:
        text, own = self.term(node)
        return text if own >= level else f"({text})"

    def _is_function(self, name: str) -> bool:
        """Whether a name is a function of statements, and not bound to something of the text."""
        meaning = self.scope.names.get(name)
        return name in FUNCTIONS and (meaning is None or words().get(name) is meaning)

    def _name(self, name: str, value: Any, node: ast.Expr) -> str:
        """Bind a name; one that means two things (a parameter in braces beside a name) gets a number."""
        choice, count = name, 0
        while choice in self.bound and self.bound[choice] is not value:
            count += 1
            choice = f"{name}_{count}"
        if callable(value) and not hasattr(value, "node"):
            raise self._refused(node, kind_of(value))
        self.bound[choice] = value
        return choice

    def _refused(self, node: ast.Expr, what: str) -> LanguageError:
        return self.machine.text.fault(
            node.at,
            f"{what} stands in an assignment",
            _ONLY,
            "bind it before: let y = ... in, and compute it with forward y",
        )
