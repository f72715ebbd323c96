"""Checks the names and stages of model syntax before anything is built.

In: ``Definitions`` and the names that are known outside. Out: nothing, or a ``LanguageError``: unbound and repeated
names, ``()`` where no stage can be, parameters outside any stage, unknown fields. Values are not looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from . import model_ast as ast
from .caret import near
from .computation import FUNCTIONS
from .model_text import Text

PARAMETER_FIELDS = {"o": "output", "output": "output", "i": "input", "input": "input", "trainable": "trainable"}
"""Fields of an inline parameter, and the argument of ``param`` that each gives."""

_RESERVED = ("label",)
_STAGE_ADVICE = "parameters are made at (): write let name () = ... around it, or let name () x = ..."


def check(syntax: ast.Definitions, text: Text, known: Iterable[str]) -> None:
    """Check a whole text against the names ``known`` outside."""
    names = frozenset(known)
    seen: dict[str, ast.Definition] = {}
    for item in syntax.items:
        if item.name in seen:
            raise text.fault(
                item.at,
                f"{item.name!r} is defined twice",
                advice=f"the first one is at line {text.line(seen[item.name].at)}; give one another name",
            )
        if item.name == "_":
            raise text.fault(item.at, "a definition needs a name")
        if item.name == "rec" and item.parameters:
            raise text.fault(item.at, "definitions are not recursive: a definition sees those before it")
        _Checker(text, item.name).function(item.parameters, item.body, names, staged=False)
        seen[item.name] = item
        names |= {item.name}


class _Checker:
    """Walks one definition. ``names`` are those in scope, ``staged`` whether a stage is around."""

    def __init__(self, text: Text, definition: str) -> None:
        self.text = text
        self.definition = definition

    def function(
        self, parameters: Sequence[ast.Parameter], body: ast.Expr, names: frozenset[str], *, staged: bool
    ) -> None:
        self._parameters(parameters)
        own = any(isinstance(parameter, ast.UnitParameter) for parameter in parameters)
        before = staged and not own
        for parameter in parameters:
            if isinstance(parameter, ast.Optional_):
                self.expr(parameter.default, names, staged=before)
            names |= {name for name, _ in ast.parameter_names((parameter,))}
        self.expr(body, names, staged=staged or own)

    def _parameters(self, parameters: Sequence[ast.Parameter]) -> None:
        seen: set[str] = set()
        for name, at in ast.parameter_names(tuple(parameters)):
            if name in seen:
                raise self.text.fault(at, f"{name!r} is a parameter of this function twice")
            seen.add(name)
        for parameter in parameters:
            if isinstance(parameter, ast.Labelled | ast.Optional_) and parameter.name in _RESERVED:
                raise self.text.fault(
                    parameter.at, f"{parameter.name!r} is the argument that names a block", "another name"
                )
        stages = [parameter for parameter in parameters if isinstance(parameter, ast.UnitParameter)]
        if len(stages) > 1:
            raise self.text.fault(stages[1].at, "a second ()", "one stage for each definition")
        positional = any(isinstance(parameter, ast.Positional) for parameter in parameters)
        required = positional or any(isinstance(parameter, ast.Labelled) for parameter in parameters)
        if parameters and not required and not stages:
            raise self.text.fault(
                parameters[0].at,
                "a function of optional arguments alone is never complete",
                "() or another parameter after them",
            )

    def expr(self, node: ast.Expr, names: frozenset[str], *, staged: bool) -> None:
        match node:
            case ast.Name(name):
                self._bound(node, name, names)
            case ast.Let(bindings, body):
                for binding in bindings:
                    self.function(binding.parameters, binding.value, names, staged=staged)
                    self._pattern(binding.pattern)
                    names |= {item.name for item in ast.bound_names(binding.pattern)}
                self.expr(body, names, staged=staged)
            case ast.Fun(parameters, body):
                for parameter in parameters:
                    if isinstance(parameter, ast.UnitParameter):
                        raise self.text.fault(
                            parameter.at,
                            "a function without a name has no stage",
                            advice="write let name () = ... in name",
                        )
                self.function(parameters, body, names, staged=staged)
            case ast.InlineParameter():
                self._inline_parameter(node, names, staged)
            case ast.StageBoundary(_, label, value):
                if not label:
                    raise self.text.fault(node.at, "a stage without a name", 'stage f16 "body" (expression)')
                self.expr(value, names, staged=staged)
            case ast.Assignment(target, _, value):
                self.expr(target, names, staged=staged)
                self.expr(value, names | frozenset(FUNCTIONS), staged=staged)
            case _:
                for child in ast.children(node):
                    inner = child.value if isinstance(child, ast.Argument) else child
                    self.expr(inner, names, staged=staged)  # type: ignore[arg-type]

    def _pattern(self, pattern: ast.Pattern) -> None:
        seen: set[str] = set()
        for item in ast.bound_names(pattern):
            if item.name in seen:
                raise self.text.fault(item.at, f"{item.name!r} is bound twice here")
            seen.add(item.name)

    def _bound(self, node: ast.Name, name: str, names: frozenset[str]) -> None:
        if name in names:
            return
        if name == "_":
            raise self.text.fault(node.at, "_ binds nothing, so it has no value")
        advice = near(name, names)
        if name == self.definition:
            advice = "definitions are not recursive: a definition sees those before it"
        elif not advice.startswith("did"):
            advice = "it is no parameter, no definition before this one and no function of the language"
        raise self.text.fault(node.at, f"unbound name {name!r}", advice=advice)

    def _inline_parameter(self, node: ast.InlineParameter, names: frozenset[str], staged: bool) -> None:
        if not staged:
            raise self.text.fault(node.at, f"the parameter {node.name!r} is in no stage", advice=_STAGE_ADVICE)
        seen: set[str] = set()
        for field in node.fields:
            meaning = PARAMETER_FIELDS.get(field.name)
            if meaning is None:
                raise self.text.fault(
                    field.at,
                    f"a parameter has no field {field.name!r}",
                    ", ".join(PARAMETER_FIELDS),
                    near(field.name, PARAMETER_FIELDS),
                )
            if meaning in seen:
                raise self.text.fault(field.at, f"the field {field.name!r} is given twice")
            seen.add(meaning)
        for child in ast.children(node):
            inner = child.value if isinstance(child, ast.ParameterField) else child
            self.expr(inner, names, staged=False)  # type: ignore[arg-type]
