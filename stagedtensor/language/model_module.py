"""Modules of model texts: the definitions of one text as attributes, callable from Python.

In: a path or a text. Out: a ``Module``. Reading one parses it and checks its names; nothing is built, and no Python of
the text's choosing ever runs. Two modules are equal if they were written alike up to layout and comments.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from stagedtensor.errors import LanguageError
from stagedtensor.source import user_source

from . import model_ast as ast
from .caret import near
from .elaborate import Elaborator, Later
from .model_format import format_definitions
from .model_parser import parse_text
from .model_scope import check
from .model_text import MAX_LENGTH, Text
from .model_values import Function, Scope
from .words import words


class Module:
    """The definitions of a model text. ``nets.mlp(hid=64, out=10)()`` configures a block and makes its parameters.

    ``str(module)`` is its text in one layout. ``dir(module)`` lists the definitions.
    """

    def __init__(self, text: Text, syntax: ast.Definitions) -> None:
        self._text = text
        self._syntax = syntax
        self._elaborator = Elaborator(text)
        scope = Scope(words())
        self._values: dict[str, Any] = {}
        for item in syntax.items:
            value = self._defined(item, scope)
            self._values[item.name] = value
            scope = scope.bind({item.name: value})

    def _defined(self, item: ast.Definition, scope: Scope) -> Any:
        if item.parameters:
            return Function(item.name, item.parameters, item.body, scope, self._elaborator)
        values: list[Any] = []

        def evaluate() -> Any:
            if not values:
                values.append(self._elaborator.run(item.body, scope, item.name))
            return values[0]

        return Later(evaluate)

    def __getattr__(self, name: str) -> Any:
        values: dict[str, Any] = self.__dict__.get("_values", {})
        if name not in values:
            advice = "" if name.startswith("__") else f"; {near(name, values)}"
            raise AttributeError(f"{self.__dict__.get('_text', Text('', '')).name} defines no {name!r}{advice}")
        value = values[name]
        return value.evaluate() if isinstance(value, Later) else value

    def __dir__(self) -> list[str]:
        return list(self._values)

    def __eq__(self, other: object) -> bool:
        return self._syntax == other._syntax if isinstance(other, Module) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self._values))

    def __str__(self) -> str:
        return format_definitions(self._syntax)

    def __repr__(self) -> str:
        return f"<model text {self._text.name}: {', '.join(self._values)}>"


def module_of(content: str, name: str) -> Module:
    """Read a text."""
    text = Text(name, content)
    syntax = parse_text(text)
    check(syntax, text, words())
    return Module(text, syntax)


def module_at(path: str | os.PathLike[str]) -> Module:
    """Read a file."""
    return module_of(read(path), os.fspath(path))


def read(path: str | os.PathLike[str]) -> str:
    """Return the text of a file; LanguageError if it is too long or not UTF-8."""
    name = os.fspath(path)
    with Path(path).open("rb") as file:
        data = file.read(4 * MAX_LENGTH + 1)
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        too_long = "; it is too long as well" if len(data) > 4 * MAX_LENGTH else ""
        raise LanguageError(
            f"{name}: byte {error.start} is no UTF-8{too_long}\n  {user_source().quoted()}\n  save the file as UTF-8",
            file=name,
        ) from None


def formatted(module_or_text: Module | str) -> str:
    """Return a module or a text in one layout; of a text only the syntax is checked."""
    if isinstance(module_or_text, Module):
        return str(module_or_text)
    return format_definitions(parse_text(Text("<text>", module_or_text)))
