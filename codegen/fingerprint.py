"""A fingerprint of a solved program: equal fingerprints mean equal generated source.

In: a solved program. Out: bytes that hold everything that projection, lowering and the passes read of it, and the
nodes in the order in which they number them. Nothing in it depends on the process: nodes, scopes and packed
weights are numbered by first mention, sources stand as ``file.py:12``. Target, numerics and the version of the code
generator are the caller's to add.

Generic on purpose: every field of every statement, spec and expression is written out, so that a new field cannot be
forgotten. Only for nodes, scopes and packed weights, which know much that no generated code depends on, is there a
list.
"""

from __future__ import annotations

import logging
import marshal
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from os.path import basename
from typing import Any

from stagedtensor.block_formats import PACKED_ENCODINGS
from stagedtensor.codegen.solved import SolvedProgram
from stagedtensor.dims import Shape
from stagedtensor.encoded import Encoded
from stagedtensor.node import Node, Role
from stagedtensor.precision import Prec
from stagedtensor.shapes.solution import ScopeShapes
from stagedtensor.source import Source
from stagedtensor.specs import RowSpec, ShapeSpec, Spec
from stagedtensor.statements import Scope

logger = logging.getLogger(__name__)

NODE_FACTS = frozenset(
    (
        "composite",
        "data",
        "encoded",
        "flush_subnormal",
        "label",
        "number",
        "observable",
        "placement",
        "role",
        "saturate",
        "source",
    )
)
"""What projection, lowering and the passes may read of a node, with its solved shape and precision."""
SCOPE_FACTS = frozenset(("derives", "label", "nodes", "result", "source", "spec"))
"""What they may read of a scope, with the solved extents of its iterators."""


@dataclass(frozen=True)
class Fingerprint:
    """``content`` describes a program; ``nodes`` are its nodes, in the order of the numbers that stand for them there."""

    content: bytes
    nodes: tuple[Node, ...]


def fingerprint(program: SolvedProgram) -> Fingerprint | None:
    """Return the fingerprint of ``program``; None where it holds values of an unknown kind, or knows no extents."""
    if program.extents is None:
        return None
    writer = _Writer(program, program.extents)
    try:
        kept = sorted(program.keep, key=lambda node: node.number)
        told = (program.name, program.statements, program.comments, kept)
        whole = (writer.trees(told), writer.facts(), *writer.shared)
    except _UnknownKindError as error:
        logger.info("no fingerprint: %s", error)
        return None
    return Fingerprint(_written(whole), tuple(writer.nodes))


class _UnknownKindError(Exception):
    """A program holds a value of a kind that is not known here."""


class _Writer:
    """Makes trees of plain values, which are written as bytes at once; what has identity is numbered by first mention.

    A list in such a tree is a sequence of the program, a tuple is anything else and begins with what it is.
    """

    def __init__(self, program: SolvedProgram, extents: Callable[[Scope], ScopeShapes]) -> None:
        self.nodes: dict[Node, tuple[str, int]] = {}
        self.shared: dict[bytes, int] = {}
        """What numbers stand for."""
        self._program = program
        self._extents = extents
        self._scopes: dict[Scope, tuple[str, int]] = {}
        self._encoded: dict[Encoded, int] = {}
        self._seen: dict[int, tuple[Any, tuple[str, int]]] = {}
        """The values with a number that were met, by identity, and kept alive."""
        self._specs: dict[Any, tuple[str, int]] = {}
        self._writers: dict[type, Callable[[Any], Any] | None] = {
            int: None,
            bool: None,
            float: None,
            str: None,
            type(None): None,
            tuple: self.trees,
            list: self.trees,
            dict: self._mapping,
            Node: self._node,
            Scope: self._scope,
            Source: self._source,
            Prec: lambda prec: prec.name,
            Encoded: self._packed,
            Spec: self._spec,
            ShapeSpec: self._spec,
            RowSpec: self._spec,
            Shape: self._shared,
            ScopeShapes: self._shared,
        }
        """By type: what makes a tree of a value, None for a value that is one."""

    def trees(self, values: Iterable[Any]) -> list[Any]:
        """Return the trees of several values, of any kind that a program may hold."""
        known, new = self._writers.get, self._first
        return [value if (write := known(type(value), new)) is None else write(value) for value in values]

    def _first(self, value: Any) -> Any:
        writer = self._writers[type(value)] = self._writer_of(type(value))
        return writer(value)

    def _writer_of(self, kind: type) -> Callable[[Any], Any]:
        if issubclass(kind, Enum):
            texts = {member: str(member) for member in kind}
            return texts.__getitem__
        if not is_dataclass(kind):
            raise _UnknownKindError(f"the program holds a {kind.__name__}")
        # a function of its own for each class, as dataclasses have: most of the work is here
        names = [field.name for field in fields(kind)]
        lines = ["def write(value):"]
        parts = [f"part_{at}" for at in range(len(names))]
        for name, part in zip(names, parts, strict=True):
            lines += [f"    {part} = value.{name}", f"    how = known(type({part}), new)"]
            lines += [f"    if how is not None: {part} = how({part})"]
        lines.append(f"    return ({', '.join([repr(kind.__name__), *parts])},)")
        scope: dict[str, Any] = {"known": self._writers.get, "new": self._first}
        exec("\n".join(lines), scope)
        writer: Callable[[Any], Any] = scope["write"]
        return writer

    def _fields(self, value: Any) -> tuple[Any, ...]:
        names = [field.name for field in fields(value)]
        return (type(value).__name__, *self.trees([getattr(value, name) for name in names]))

    def _mapping(self, values: dict[Any, Any]) -> tuple[Any, ...]:
        return ("dict", *self.trees(values), *self.trees(values.values()))

    @staticmethod
    def _source(source: Source) -> tuple[str, str, int]:
        """What generated comments say of it: the folder is no part of the program."""
        return "line", _file_name(source.file), source.line

    def _shared(self, value: Any) -> tuple[str, int]:
        """A number stands for a spec, a shape or extents, whichever objects say the same: a program has a few only."""
        known = self._seen.get(id(value))
        if known is None:
            number = self.shared.setdefault(_written(self._fields(value)), len(self.shared))
            known = self._seen[id(value)] = (value, ("shared", number))
        return known[1]

    def _spec(self, spec: Any) -> tuple[str, int]:
        """Many objects are one spec, of names and integers, and know their hash."""
        known = self._specs.get(spec)
        if known is None:
            known = self._specs[spec] = self._shared(spec)
        return known

    # -- what has identity ----------------------------------------------------------------------------------------
    def _node(self, node: Node) -> tuple[str, int]:
        known = self.nodes.get(node)
        if known is None:
            known = self.nodes[node] = ("node", len(self.nodes))
        return known

    def _scope(self, scope: Scope) -> tuple[Any, ...]:
        known = self._scopes.get(scope)
        if known is not None:
            return known
        known = self._scopes[scope] = ("scope", len(self._scopes))
        parts = (scope.spec, scope.nodes, scope.result, scope.source, scope.label, scope.derives, self._extents(scope))
        return (*known, *self.trees(parts))

    def _packed(self, value: Encoded) -> tuple[Any, ...]:
        """A packed weight without its bytes, which are data. Of an encoding its name is enough where we described it."""
        if not value.encoding.dense and not any(value.encoding is known for known in PACKED_ENCODINGS):
            raise _UnknownKindError(f"the program holds a weight in an encoding of its own, {value.encoding}")
        number = self._encoded.setdefault(value, len(self._encoded))
        parts = (str(value.encoding), value.shape, value.prec, value.order, value.memory_bytes)
        return ("packed", number, *self.trees(parts))

    def facts(self) -> list[list[Any]]:
        """Return a list per node: what generated code may depend on."""
        program, trees = self._program, []
        for node in self.nodes:
            composite = node.composite
            parts = (
                node.role,
                node.label,
                node.source,
                _number(node),
                node.encoded,
                node.flush_subnormal,
                node.placement,
                program.is_external(node),
                program.saturates(node),
                composite.name if composite is not None else None,
                program.shape(node),
                program.prec(node),
            )
            trees.append(self.trees(parts))
        return trees


def _written(tree: Any) -> bytes:
    """Return plain values as bytes; this version of the format knows no identity, so that equal ones are written alike."""
    return marshal.dumps(tree, 2)


_file_name = cache(basename)


def _number(node: Node) -> str:
    """The value of a Python number, which generated code holds; the data of anything else never gets there."""
    data = node.data
    if node.role is not Role.LITERAL or data is None or data.ndim > 0:
        return ""
    return f"{data.dtype}:{data.tobytes().hex()}"
