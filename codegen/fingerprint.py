"""A fingerprint of a solved program: equal fingerprints mean equal generated source.

In: a solved program. Out: a text that holds everything that projection, lowering and the passes read of it, and the
nodes in the order in which the text numbers them. Nothing in it depends on the process: nodes, scopes and packed
weights are numbered by first mention, sources stand as ``file.py:12``. Target, numerics and the version of the code
generator are the caller's to add.

Generic on purpose: every field of every statement, spec and expression is written out, so that a new field cannot be
forgotten. Only for nodes, scopes and packed weights, which know much that no generated code depends on, is there a
list.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from operator import attrgetter
from os.path import basename
from typing import Any

from stagedtensor.block_formats import PACKED_ENCODINGS
from stagedtensor.codegen.solved import SolvedProgram
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
    """``text`` describes a program; ``nodes`` are its nodes, in the order of the numbers that stand for them there."""

    text: str
    nodes: tuple[Node, ...]


def fingerprint(program: SolvedProgram) -> Fingerprint | None:
    """Return the fingerprint of ``program``; None where it holds values that have no text, or knows no extents."""
    if program.extents is None:
        return None
    writer = _Writer(program, program.extents)
    try:
        statements = [*map(writer.text, program.statements), writer.text(program.comments)]
        kept = [writer.text(node) for node in sorted(program.keep, key=lambda node: node.number)]
        lines = [repr(program.name), *statements, *kept, *writer.facts(), *writer.specs]
    except _NoTextError as error:
        logger.info("no fingerprint: %s", error)
        return None
    return Fingerprint("\n".join(lines), tuple(writer.nodes))


class _NoTextError(Exception):
    """A program holds a value of a kind that is not known here."""


class _Writer:
    """Writes values as text; what has identity is numbered by first mention."""

    def __init__(self, program: SolvedProgram, extents: Callable[[Scope], ScopeShapes]) -> None:
        self.nodes: dict[Node, int] = {}
        self._program = program
        self._extents = extents
        self._scopes: dict[Scope, int] = {}
        self._encoded: dict[Encoded, int] = {}
        self._files: dict[str, str] = {}
        self.specs: dict[str, int] = {}
        self._specs: dict[int, str] = {}
        """What stands for the specs seen, by identity: the statements keep them alive."""
        self._writers: dict[type, Callable[[Any], str]] = {
            int: str,
            bool: str,
            float: float.hex,
            str: repr,
            type(None): str,
            tuple: self._tuple,
            list: self._tuple,
            dict: self._mapping,
            Node: self._node,
            Scope: self._scope,
            Source: self._source,
            Prec: lambda prec: prec.name,
            Encoded: self._packed,
            Spec: self._spec,
            ShapeSpec: self._spec,
            RowSpec: self._spec,
        }

    def text(self, value: Any) -> str:
        """Return the text of any value that a program may hold."""
        return self._texts((value,))

    def _texts(self, values: Iterable[Any]) -> str:
        """Return the texts of several values, with commas between them."""
        known = self._writers
        # written out here: this is most of the work, and a call for each value would take longer than the rest
        return ",".join([(known.get(type(value)) or self._new_writer(type(value)))(value) for value in values])

    def _new_writer(self, kind: type) -> Callable[[Any], str]:
        writer = self._writers[kind] = self._writer_of(kind)
        return writer

    def _writer_of(self, kind: type) -> Callable[[Any], str]:
        if issubclass(kind, Enum):
            texts = {member: str(member) for member in kind}
            return texts.__getitem__
        if not is_dataclass(kind):
            raise _NoTextError(f"the program holds a {kind.__name__}")
        names = [field.name for field in fields(kind)]
        if not names:
            return lambda value: f"{kind.__name__}()"
        if len(names) == 1:
            (name,) = names
            return lambda value: f"{kind.__name__}({self.text(getattr(value, name))})"
        values = attrgetter(*names)
        return lambda value: f"{kind.__name__}({self._texts(values(value))})"

    def _tuple(self, values: tuple[Any, ...]) -> str:
        return f"({self._texts(values)})"

    def _mapping(self, values: dict[Any, Any]) -> str:
        return f"{{{','.join(f'{self.text(key)}:{self.text(value)}' for key, value in values.items())}}}"

    def _source(self, source: Source) -> str:
        """What generated comments say of it: the folder is no part of the program."""
        name = self._files.get(source.file)
        if name is None:
            name = self._files[source.file] = basename(source.file)
        return f"{name}:{source.line}"

    def _spec(self, spec: Any) -> str:
        """Most statements share a few specs: a number stands for each, whichever objects say the same."""
        known = self._specs.get(id(spec))
        if known is None:
            parts = ",".join(self.text(getattr(spec, field.name)) for field in fields(spec))
            number = self.specs.setdefault(f"{type(spec).__name__}({parts})", len(self.specs))
            known = self._specs[id(spec)] = f"%{number}"
        return known

    # -- what has identity ----------------------------------------------------------------------------------------
    def _node(self, node: Node) -> str:
        return f"#{self.nodes.setdefault(node, len(self.nodes))}"

    def _scope(self, scope: Scope) -> str:
        number = self._scopes.get(scope)
        if number is not None:
            return f"@{number}"
        self._scopes[scope] = len(self._scopes)
        parts = (scope.spec, scope.nodes, scope.result, scope.source, scope.label, scope.derives, self._extents(scope))
        return f"@{self._scopes[scope]}={self._tuple(parts)}"

    def _packed(self, value: Encoded) -> str:
        """A packed weight without its bytes, which are data. Of an encoding its name is enough where we described it."""
        if not value.encoding.dense and not any(value.encoding is known for known in PACKED_ENCODINGS):
            raise _NoTextError(f"the program holds a weight in an encoding of its own, {value.encoding}")
        number = self._encoded.setdefault(value, len(self._encoded))
        parts = (str(value.encoding), value.shape, value.prec, value.order, value.memory_bytes)
        return f"packed {number}{self._tuple(parts)}"

    def facts(self) -> list[str]:
        """Return a line per node: what generated code may depend on."""
        program, lines = self._program, []
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
            lines.append(self._tuple(parts))
        return lines


def _number(node: Node) -> str:
    """The value of a Python number, which generated code holds; the data of anything else never gets there."""
    data = node.data
    if node.role is not Role.LITERAL or data is None or data.ndim > 0:
        return ""
    return f"{data.dtype}:{data.tobytes().hex()}"
