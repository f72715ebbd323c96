"""From one scope to constraints: the axis terms of a spec against the rows of its nodes.

In: a ``Scope`` and the row variables of its nodes. Out: constraints, and the scope's own variables (``ScopeVariables``:
named sizes, row variables, anonymous axes), which projection reads once they are solved.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from stagedtensor.dims import MEMORY_ORDER, CapturedDim, DynamicDim, RowKind
from stagedtensor.errors import SpecError
from stagedtensor.node import Node, Role
from stagedtensor.specs import Affine, Anonymous, AxisTerm, Concat, Name, Position, RowSpec, Sliced, Spec, StaticIndex
from stagedtensor.statements import Scope

from .constraints import Constraint, RowFits, RowJoin, RowSplit
from .rows import Dim, Reason, Row, Unknowns, Where
from .sizes import AffineSize, CellCount, SameProduct, SliceSize, SumSize

RowsOf = Callable[[Node], Mapping[RowKind, Row]]
_RESULT = -1
"""The place of a scope's result among its tensors."""


@dataclass(frozen=True, eq=False)
class RowPlan:
    """One row of one tensor of a spec: ``tensor`` is the number of an operand, or -1 for the result.

    ``has_terms``: it is more than a row variable.
    """

    tensor: int
    kind: RowKind
    spec: RowSpec
    has_terms: bool


@dataclass(frozen=True, eq=False)
class VariablePlan:
    """One row variable of a spec, and the rows whose middle (or whole) it is. ``place`` says which rows in messages."""

    variable: str
    operands: tuple[RowPlan, ...]
    results: tuple[RowPlan, ...]
    place: str


@dataclass(frozen=True, eq=False)
class SpecPlan:
    """What equations of a spec can know before they see a node.

    ``terms`` are the rows with axis terms, ``variables`` the row variables, ``flat`` the rows that hold the cells of a
    variable split another way, each with the names that split them if those stand elsewhere.
    """

    terms: tuple[RowPlan, ...]
    variables: tuple[VariablePlan, ...]
    flat: tuple[tuple[RowPlan, str, tuple[str, ...] | None], ...]


@lru_cache(1024)
def plan(spec: Spec) -> SpecPlan:
    """Return the plan of a spec: a program has few specs, each in many scopes."""
    rows = [
        RowPlan(at, kind, row, bool(row.terms) or row.variable is None)
        for at, shape in (*enumerate(spec.operands), (_RESULT, spec.result))
        for kind in MEMORY_ORDER
        for row in (shape.row(kind),)
    ]
    exact = _exact_variables((*spec.operands, spec.result))
    operands: dict[str, list[RowPlan]] = {}
    results: dict[str, list[RowPlan]] = {}
    flat = []
    for row in rows:
        variable = row.spec.variable
        if variable is None:
            continue
        names = flat_partner(spec, variable)
        if row.spec.flatten and (variable in exact or names is not None):
            flat.append((row, variable, names))
        else:
            (results if row.tensor == _RESULT else operands).setdefault(variable, []).append(row)
            exact.add(variable)
    variables = []
    for variable in dict.fromkeys([*operands, *results]):
        mine, given = operands.get(variable, []), results.get(variable, [])
        place = given[0].kind if given else " and ".join(dict.fromkeys(row.kind for row in mine))
        variables.append(VariablePlan(variable, tuple(mine), tuple(given), place))
    return SpecPlan(tuple(row for row in rows if row.has_terms), tuple(variables), tuple(flat))


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
        rows_of: RowsOf,
        neutral: Callable[[Node], bool],
        captured: Callable[[int], Dim],
        unknowns: Unknowns,
    ) -> None:
        self.scope = scope
        self.variables = ScopeVariables()
        self.constraints: list[Constraint] = []
        self._rows = [rows_of(node) for node in (*scope.nodes, scope.result)]
        self._neutral = neutral
        self._captured = captured
        self._unknowns = unknowns
        self._plan = plan(scope.spec)
        self._middles: dict[RowPlan, Row] = {}
        """Of rows with terms around a row variable: what the variable stands for."""
        self._places: dict[str, Where] = {}

    def build(self) -> ScopeVariables:
        """Build all constraints; a result name without a size is a ``SpecError``."""
        scope = self.scope
        for name, size in scope.sizes.items():
            self._fix(self._name(name), size)
        for row in self._plan.terms:
            if row.tensor != _RESULT:
                self._row_of_terms(row)
        self._check_result_names()
        for row in self._plan.terms:
            if row.tensor == _RESULT:
                self._row_of_terms(row)
        for variable in self._plan.variables:
            self._relate(variable)
        self._relate_flat()
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

    def _node(self, row: RowPlan) -> Node:
        return self.scope.result if row.tensor == _RESULT else self.scope.nodes[row.tensor]

    def _middle(self, row: RowPlan) -> Row:
        """Return what a row's variable stands for: the whole row where there is nothing else."""
        return self._middles[row] if row.has_terms else self._rows[row.tensor][row.kind]

    def _row_of_terms(self, plan: RowPlan) -> None:
        kind, spec, is_result = plan.kind, plan.spec, plan.tensor == _RESULT
        node, row, where = self._node(plan), self._rows[plan.tensor][kind], self._where(kind)
        leading = tuple([self._term(term, kind, is_result) for term in spec.leading])
        trailing = tuple([self._term(term, kind, is_result) for term in spec.trailing])
        if spec.variable is not None:
            middle = self._middles[plan] = Row()
            self.constraints.append(RowSplit(row, leading, middle, trailing, repr(node.label), where))
            return
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
            self._unknowns.unify(dim, axis, where._replace(term=", ".join(term_names(term))))

    def _letters(self) -> str:
        """Return a hint where a spec may have been meant to have names of several letters."""
        text = self.scope.spec.text
        word = next((word for word in re.findall(r"[A-Za-z]{2,}", re.sub(r"\.\.\w+\.\.", "", text))), None)
        if "=>" not in text or word is None or any(mark in text for mark in ",*+^"):
            return ""
        return f"; in a spec without any of , * + ^ each letter is an axis: {word!r} is {', '.join(word)}"

    def _relate(self, plan: VariablePlan) -> None:
        scope, where = self.scope, self._where(plan.place)
        operands = [self._middle(row) for row in plan.operands]
        results = [self._middle(row) for row in plan.results]
        whole = results[0] if results else Row()
        for other in results[1:]:
            self._unknowns.unify_rows(whole, other, where)
        self.variables.rows[plan.variable] = whole
        if not scope.spec.broadcast or (results and scope.derives and _are_one(operands)):
            for row in operands:
                self._unknowns.unify_rows(whole, row, where)
        elif results and not scope.derives:
            # optimizer state has its parameter's shape; only cells and state without an owner take one from use
            target = scope.result
            opens = target.role in (Role.CELL, Role.STATE) and target.owner is None and not target.is_gradient
            fitted = [row for row in operands if row.root is not whole.root]
            self.constraints.extend([RowFits(row, whole, where, opens) for row in fitted])
        elif operands:
            nodes = [self._node(row) for row in plan.operands]
            flags = tuple([self._neutral(node) for node in nodes])
            silent = tuple([node.is_gradient for node in nodes])
            self.constraints.append(RowJoin(tuple(operands), flags, whole, where, silent=silent))

    def _relate_flat(self) -> None:
        for row, variable, partner in self._plan.flat:
            where = self._where(row.kind)
            if partner is None:
                whole = self.variables.rows[variable]
            else:
                whole = Row(tuple([self._name(name) for name in partner]), where.reason)
                self.variables.rows[variable] = whole
            self.constraints.append(SameProduct(self._middle(row), whole, where))


def _are_one(rows: Sequence[Row]) -> bool:
    """Whether there is one row only, which then is what it broadcasts to."""
    return all(row.root is rows[0].root for row in rows)


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
