"""From one scope to constraints: the axis terms of a spec against the rows of its nodes.

In: a ``Scope`` and the row variables of its nodes. Out: constraints, and the scope's own variables (``ScopeVariables``:
named sizes, row variables, anonymous axes), which projection reads once they are solved.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stagedtensor.dims import MEMORY_ORDER, CapturedDim, DynamicDim, RowKind
from stagedtensor.errors import SpecError
from stagedtensor.node import Node, Role
from stagedtensor.specs import Affine, Anonymous, AxisTerm, Concat, Name, Position, RowSpec, Sliced, Spec, StaticIndex
from stagedtensor.statements import Scope

from .constraints import Constraint, RowFits, RowJoin, RowSplit
from .rows import Dim, Reason, Row, Unknowns, Where
from .sizes import AffineSize, CellCount, SameProduct, SliceSize, SumSize

RowOf = Callable[[Node, RowKind], Row]


@dataclass
class ScopeVariables:
    """The variables of one scope: sizes by name, rows by variable, sizes of summed anonymous axes by key."""

    names: dict[str, Dim] = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)
    anonymous: dict[int, Dim] = field(default_factory=dict)


def term_names(term: AxisTerm) -> tuple[str, ...]:
    """Return the iterator names a term mentions, in order."""
    match term:
        case Name(name) | Sliced(name=name):
            return (name,)
        case Affine(over=over, kernel=kernel):
            return (over, kernel)
        case Concat(parts):
            return tuple(part.name for part in parts if isinstance(part, Name))
        case _:
            return ()


class ScopeEquations:
    """Builds the constraints of one scope."""

    def __init__(
        self,
        scope: Scope,
        row_of: RowOf,
        neutral: Callable[[Node], bool],
        captured: Callable[[int], Dim],
        unknowns: Unknowns,
    ) -> None:
        self.scope = scope
        self.variables = ScopeVariables()
        self.constraints: list[Constraint] = []
        self._row_of = row_of
        self._neutral = neutral
        self._captured = captured
        self._unknowns = unknowns
        self._operand_rows: dict[str, list[tuple[Row, Node, RowKind]]] = {}
        self._result_rows: dict[str, list[tuple[Row, RowKind]]] = {}
        self._flat: list[tuple[Row, str, RowKind]] = []
        self._places: dict[str, Where] = {}

    def build(self) -> ScopeVariables:
        """Build all constraints; a result name without a size is a ``SpecError``."""
        scope, spec = self.scope, self.scope.spec
        for name, size in scope.sizes.items():
            self._fix(self._name(name), size)
        exact = _exact_variables(spec.operands) | _exact_variables((spec.result,))
        for node, shape in zip(scope.nodes, spec.operands, strict=True):
            for kind in MEMORY_ORDER:
                self._row(node, kind, shape.row(kind), exact, is_result=False)
        self._check_result_names()
        for kind in MEMORY_ORDER:
            self._row(scope.result, kind, spec.result.row(kind), exact, is_result=True)
        self._relate_variables()
        for name, key in scope.captures.items():
            where = self._where()
            if name in self.variables.rows:
                self.constraints.append(CellCount(self.variables.rows[name], self._captured(key), where))
            else:
                self._unknowns.unify(self._name(name), self._captured(key), where)
        return self.variables

    # -- terms ----------------------------------------------------------------------------------------------------

    def _where(self, kind: RowKind | str = "") -> Where:
        where = self._places.get(kind)
        if where is None:
            where = self._places[kind] = self._place(kind)
        return where

    def _place(self, kind: RowKind | str) -> Where:
        label, border = self.scope.label, self.scope.result.composite
        if border is not None and border.name != label:
            label = f"{border.name} ({label})"  # users called the composite, not what it is made of
        return Where(label, self.scope.source, kind)

    def _name(self, name: str) -> Dim:
        return self.variables.names.setdefault(name, Dim())

    def _fix(self, dim: Dim, size: Any) -> None:
        where = self._where()
        if isinstance(size, CapturedDim):
            self._unknowns.unify(dim, self._captured(size.key), where)
        elif isinstance(size, (int, DynamicDim)):
            reason = Reason(f"fixed by sizes= of {self.scope.label}", self.scope.source)
            self._unknowns.set_extent(dim, size, reason, where)

    def _term(self, term: AxisTerm, kind: RowKind, is_result: bool) -> Dim:
        where, unknowns = self._where(kind), self._unknowns
        axis = Dim()
        match term:
            case Name(name):
                return self._name(name)
            case Position(position):
                least = position + 1 if position >= 0 else -position
                unknowns.require(axis, least)
                if is_result and self.scope.derives:
                    unknowns.set_extent(axis, least, None, where)
            case Anonymous(key):
                if is_result:
                    unknowns.set_extent(axis, 1, None, where)
                else:
                    axis = self.variables.anonymous.setdefault(key, axis)
            case StaticIndex(size=size):
                unknowns.require(axis, size)
            case Sliced(name=name):
                self.constraints.append(SliceSize(axis, self._name(name), term, where))
            case Affine(over=over, kernel=kernel):
                self.constraints.append(AffineSize(axis, self._name(over), self._name(kernel), term, where))
            case Concat(parts):
                dims = []
                for part in parts:
                    dim = self._name(part.name) if isinstance(part, Name) else Dim()
                    if isinstance(part, int):
                        unknowns.set_extent(dim, part, None, where)
                    dims.append(dim)
                self.constraints.append(SumSize(axis, tuple(dims), where))
            case _:  # gathered: the table's axis has whatever size the table gives it
                pass
        return axis

    def _check_result_names(self) -> None:
        scope = self.scope
        if not scope.derives:
            return
        declared = scope.result.declared
        variables = {shape.row(kind).variable for shape in scope.spec.operands for kind in MEMORY_ORDER}
        if not any(scope.spec.result.row(kind).terms for kind in MEMORY_ORDER):
            return
        inferred = {name for entry in variables if entry for name in flat_partner(scope.spec, entry) or ()}
        for kind in MEMORY_ORDER:
            if declared is not None and not declared.row(kind).open:
                continue
            for term in scope.spec.result.row(kind).terms:
                for name in term_names(term):
                    if name not in self.variables.names and name not in inferred:
                        raise SpecError(
                            f"{scope.label}: output index {name!r} of {scope.spec.text or 'the spec'!r} has no size\n"
                            f"  {scope.source.quoted()}\n"
                            f"  expected every output index to be an index of an operand\n"
                            f'  hint: name it in an operand, or give its size with sizes={{"{name}": ...}}'
                        )

    # -- rows -----------------------------------------------------------------------------------------------------

    def _row(self, node: Node, kind: RowKind, spec: RowSpec, exact: set[str], *, is_result: bool) -> None:
        where, row = self._where(kind), self._row_of(node, kind)
        leading = tuple(self._term(term, kind, is_result) for term in spec.leading)
        trailing = tuple(self._term(term, kind, is_result) for term in spec.trailing)
        if spec.variable is None:
            dims = leading + trailing
            found = row.root.dims
            if found is not None and len(found) != len(dims):
                count = f"{len(found)} {'axis' if len(found) == 1 else 'axes'}"
                raise where.error(
                    f"the {kind} row of {node.label!r} has {count} where the spec"
                    f"{f' {self.scope.spec.text!r}' if self.scope.spec.text else ''} has {len(dims)}",
                    [(str(row), row.root.reason)],
                    "name every axis of the row, or let a row variable (...) stand for the rest" + self._letters(),
                )
            if found is None:
                self._unknowns.bind(row, dims, None, where)
                return
            for term, dim, axis in zip(spec.leading + spec.trailing, dims, found, strict=True):
                self._unknowns.unify(dim, axis, replace(where, index=", ".join(term_names(term))))
            return
        middle = row
        if leading or trailing:
            middle = Row()
            self.constraints.append(RowSplit(row, leading, middle, trailing, repr(node.label), where))
        if spec.flatten and (spec.variable in exact or flat_partner(self.scope.spec, spec.variable) is not None):
            self._flat.append((middle, spec.variable, kind))
        elif is_result:
            self._result_rows.setdefault(spec.variable, []).append((middle, kind))
            exact.add(spec.variable)
        else:
            self._operand_rows.setdefault(spec.variable, []).append((middle, node, kind))
            exact.add(spec.variable)

    def _letters(self) -> str:
        """Return a hint where a spec may have been meant to have names of several letters."""
        text = self.scope.spec.text
        word = next((word for word in re.findall(r"[A-Za-z]{2,}", re.sub(r"\.\.\w+\.\.", "", text))), None)
        if "=>" not in text or word is None or any(mark in text for mark in ",*+^"):
            return ""
        return f"; in a spec without any of , * + ^ each letter is an axis: {word!r} is {', '.join(word)}"

    def _relate_variables(self) -> None:
        for variable in dict.fromkeys([*self._operand_rows, *self._result_rows]):
            operands = self._operand_rows.get(variable, [])
            results = self._result_rows.get(variable, [])
            kind = (results or [(Row(), operands[0][2] if operands else "output")])[0][1]
            where = self._where(kind if results else " and ".join(dict.fromkeys(kind for _, _, kind in operands)))
            whole = results[0][0] if results else Row()
            for other, _ in results[1:]:
                self._unknowns.unify_rows(whole, other, where)
            self.variables.rows[variable] = whole
            if not self.scope.spec.broadcast:
                for row, _, _ in operands:
                    self._unknowns.unify_rows(whole, row, where)
            elif results and not self.scope.derives:
                # optimizer state has its parameter's shape; only cells and state without an owner take one from use
                target = self.scope.result
                opens = target.role in (Role.CELL, Role.STATE) and target.owner is None and not target.is_gradient
                self.constraints.extend(RowFits(row, whole, where, opens) for row, _, _ in operands)
            elif operands:
                rows = tuple(row for row, _, _ in operands)
                flags = tuple(self._neutral(node) for _, node, _ in operands)
                silent = tuple(node.is_gradient for _, node, _ in operands)
                self.constraints.append(RowJoin(rows, flags, whole, where, silent=silent))
        for row, variable, kind in self._flat:
            partner = flat_partner(self.scope.spec, variable)
            if partner is None:
                whole = self.variables.rows[variable]
            else:
                whole = Row(tuple(self._name(name) for name in partner), self._where(kind).reason)
                self.variables.rows[variable] = whole
            self.constraints.append(SameProduct(row, whole, self._where(kind)))


def flat_partner(spec: Spec, variable: str) -> tuple[str, ...] | None:
    """Return the names that split the cells of a flat row whose variable stands nowhere else.

    They are the names of the same row of the result (or, for a flat result, of the first operand). None where the
    variable itself stands for the other split.
    """
    if variable in _exact_variables((*spec.operands, spec.result)):
        return None
    pairs = [(shape, spec.result) for shape in spec.operands] + [(spec.result, shape) for shape in spec.operands[:1]]
    for kind in MEMORY_ORDER:
        for shape, other in pairs:
            terms = other.row(kind).terms
            if shape.row(kind).variable == variable and other.row(kind).variable is None:
                return tuple(name for term in terms for name in term_names(term))
    return None


def _exact_variables(shapes: Sequence[Any]) -> set[str]:
    rows = [shape.row(kind) for shape in shapes for kind in MEMORY_ORDER]
    return {row.variable for row in rows if row.variable is not None and not row.flatten}
