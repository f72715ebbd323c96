"""The shape solver: unification over rows and sizes, then the rules for what use must decide.

In: nodes of a graph. Out: a ``ShapeSolution`` with the shape of every node of their connected component, or a
``ShapeError`` with both sides. Necessary consequences are propagated to a fixed point first; then, in rounds that do
not depend on construction order, what is open takes the meet of what its uses suggest: terminals before results, rows
before sizes. The work grows with the graph: each round looks at what the last one changed. A parameter left
undetermined is an error, anything else is empty or 1. Nothing is settled on nodes; the last solution of a component is
kept with it, and holds until something is built from it or settled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from stagedtensor.dims import MEMORY_ORDER, PRINT_ORDER, CapturedDim, DynamicDim, RowKind, Shape, Size
from stagedtensor.errors import InternalError, ShapeError, SpecError
from stagedtensor.node import Node, Role
from stagedtensor.source import Source
from stagedtensor.specs import pointwise
from stagedtensor.statements import Scope

from .choices import Choices, Clash
from .constraints import DimUse, RowSplit, RowUse
from .equations import ScopeEquations, ScopeVariables
from .graph import Component, component, owner_of_shape
from .readout import ReadOut, origin
from .rows import Dim, Reason, Row, Unknowns, Where
from .solution import ScopeShapes, ShapeSolution
from .worklist import WorkList

__all__ = ["ScopeShapes", "ShapeSolution", "solve_shapes"]


def solve_shapes(nodes: Iterable[Node], *, partial: bool = False) -> ShapeSolution:
    """Solve the connected component of ``nodes``.

    With ``partial``, a parameter that nothing determines (yet) is an error only for those who ask for a shape that
    depends on it, which is how a graph under construction is looked at. Raises ``ShapeError`` where sizes, labels or
    numbers of axes conflict and where nothing determines a parameter, ``SpecError`` for an output index without a size.
    """
    wanted = tuple(nodes)
    graph = component(wanted)
    known = graph.nodes[0].answers if graph.nodes else {}
    facts = (graph, tuple(node.settled_shape for node in graph.nodes))
    if (last := known.get("shapes")) is not None and last[0] == facts:
        solution: ShapeSolution = last[1]
        return solution
    solver = _Solver(graph, partial=partial)
    try:
        solver.build()
        solver.solve()
    except ShapeError as error:
        if _is_of_another_use(wanted):
            raise ShapeError(f"{error}\n  {_ANOTHER_USE}") from error
        raise
    solution = solver.solution()
    if solver.undetermined is None:
        known["shapes"] = (facts, solution)
    return solution


_ANOTHER_USE = (
    "note: this is no part of what was asked for, but it was built from the same tensors and takes part in inference "
    "for ever; to be rid of it, build these tensors anew"
)


def _is_of_another_use(wanted: Sequence[Node]) -> bool:
    """Whether ``wanted`` and what they are computed from have shapes without anything else built from it."""
    alone = _Solver(component(wanted, uses=False), partial=True)
    try:
        alone.build()
        alone.solve()
    except (ShapeError, SpecError):
        return False
    return alone.undetermined is None


def _solve_scope(scope: Scope, solution: ShapeSolution) -> ScopeShapes:
    """Solve one more scope over nodes whose shapes are known."""
    solver = _Solver(Component((), (), frozenset()))
    for node in dict.fromkeys(owner_of_shape(node) for node in (*scope.nodes, scope.result)):
        if node in solution:
            solver.fix(node, solution.shape(node), Reason(f"shape of {node.label!r}", node.source))
        else:
            solver.declare(node)
    for key, extent in solution.captures().items():
        solver.captured(key).extent = extent
    solver.add_scope(scope)
    solver.solve()
    return solver.scope_shapes(scope)


class _Solver:
    """One solve: the rows of every node, the constraints that wait, what can be chosen next, the captured sizes."""

    def __init__(self, graph: Component, *, partial: bool = False) -> None:
        self.graph = graph
        self.partial = partial
        self.undetermined: ShapeError | None = None
        self.unknowns = Unknowns()
        self.rows: dict[Node, dict[RowKind, Row]] = {}
        self.work = WorkList(self.unknowns)
        self.choices = Choices(self.work)
        self.captures: dict[int, Dim] = {}
        self.variables: dict[Scope, ScopeVariables] = {}

    # -- building -------------------------------------------------------------------------------------------------

    def build(self) -> None:
        """Declare all nodes and add all scopes."""
        for node in self.graph.nodes:
            self.declare(node)
        for scope in self.graph.scopes:
            self.add_scope(scope)

    def declare(self, node: Node) -> None:
        """Take over what is known of a node: its frozen shape, or what the user declared."""
        if node.settled_shape is not None:
            frozen = node.settled_shape
            reason = Reason(f"settled for {node.label!r} by routine {frozen.routine!r}", frozen.source)
            self.fix(node, frozen.shape, reason)
            return
        other = _same_shape(node)
        if other is not None and other in self.rows:
            self.rows[node] = self.rows[other]
            return
        rows = self.rows[node] = {kind: Row() for kind in MEMORY_ORDER}
        for kind, row in rows.items():
            row.place = (node.number, Where(node.label, node.source, kind))
        if node.declared is None:
            return
        for kind in MEMORY_ORDER:
            declared = node.declared.row(kind)
            dims = []
            for place, axis in enumerate(declared.axes):
                reason = Reason(
                    f"declared for {node.label!r} ({kind} row, axis {place - len(declared.axes)})", node.source
                )
                dim = self._sized(axis.size, reason)
                if axis.label is not None:
                    self.unknowns.set_label(dim, axis.label, reason, Where(node.label, node.source, kind))
                dims.append(dim)
            row, where = self.rows[node][kind], Where(node.label, node.source, kind)
            if not declared.open:
                self.unknowns.bind(
                    row, tuple(dims), Reason(f"{kind} row declared for {node.label!r}", node.source), where
                )
            elif dims:
                self.work.add([RowSplit(row, (), Row(), tuple(dims), repr(node.label), where)])

    def fix(self, node: Node, shape: Shape, reason: Reason) -> None:
        """Give a node a complete shape."""
        where = Where(node.label, node.source)
        self.rows[node] = {}
        for kind in MEMORY_ORDER:
            dims = []
            for axis in shape.row(kind):
                dim = self._sized(axis.dynamic or axis.size, reason)
                if axis.label is not None:
                    self.unknowns.set_label(dim, axis.label, reason, where)
                dims.append(dim)
            self.rows[node][kind] = Row(tuple(dims), reason)

    def _sized(self, size: Size, reason: Reason) -> Dim:
        if isinstance(size, CapturedDim):
            return self.captured(size.key)
        dim = Dim()
        if size is not None:
            self.unknowns.set_extent(dim, size, reason, Where("", reason.source))
        return dim

    def captured(self, key: int) -> Dim:
        """Return the variable of a captured size."""
        return self.captures.setdefault(key, Dim())

    def rows_of(self, node: Node) -> dict[RowKind, Row]:
        """Return the variables of a node's rows."""
        return self.rows[owner_of_shape(node)]

    def add_scope(self, scope: Scope) -> None:
        """Add the constraints of a scope; there are none where one node has the rows of another."""
        if _is_plain(scope) and self.rows_of(scope.result) is (rows := self.rows_of(scope.nodes[0])):
            self.variables[scope] = ScopeVariables(rows=dict[str, Row](rows.items()))
            return
        neutral = self.graph.neutral
        equations = ScopeEquations(scope, self.rows_of, neutral.__contains__, self.captured, self.unknowns)
        self.variables[scope] = equations.build()
        self.work.add(equations.constraints)

    # -- solving --------------------------------------------------------------------------------------------------

    def solve(self) -> None:
        """Propagate and decide until nothing is unknown."""
        self._propagate()
        while self._decide_rows() or self._default_rows():
            self._propagate()
        while self._decide_dims() or self._default_dims():
            self._propagate()
        self._check_minimums()

    def _propagate(self) -> None:
        self.work.propagate()
        self.choices.refresh()

    def _results(self) -> set[Row | Dim]:
        return {result for constraint in self.work.waiting for result in constraint.results()}

    def _decide_rows(self) -> bool:
        """Give open rows the number of axes that their uses suggest; say whether any was given."""
        chosen = self.choices.rows.first()
        if chosen:
            return self._give_axes(chosen)
        # Nothing but empty rows and sizes of 1 is left to go by; plain numbers do not count even then.
        uses: dict[Row, list[RowUse]] = {}
        for constraint in self.work.ordered():
            for use in constraint.uses():
                if isinstance(use, RowUse):
                    uses.setdefault(use.row.root, []).append(use)
        weak = {row: min(ranks) for row, found in uses.items() if (ranks := _weak_ranks(found))}
        return self._give_axes(dict.fromkeys(self._idle_inputs(), 0) | weak)

    def _give_axes(self, chosen: dict[Row, int]) -> bool:
        for row, rank in chosen.items():
            root = row.root
            if root.dims is None:
                where = root.place[1] if root.place is not None else self._anywhere()
                reason = Reason(f"{where.row} row of {where.label}", where.source)
                self.unknowns.bind(row, tuple(Dim() for _ in range(rank)), reason, where)
        return bool(chosen)

    def _default_rows(self) -> bool:
        """Empty what nothing determines; an open row of a parameter is an error."""
        for node, kind, row in self._unknown_of_parameters():
            return self._give_up(self._undetermined(node, kind, row))
        owned = [row.root for rows in self.rows.values() for row in rows.values()]
        variables = [row.root for found in self.variables.values() for row in found.rows.values()]
        unknown = [row for row in dict.fromkeys(owned + variables) if row.dims is None]
        results = self._results()
        empties = [row for row in unknown if row not in results] or unknown
        return self._give_axes(dict.fromkeys(empties, 0))

    def _unknown_of_parameters(self) -> list[tuple[Node, RowKind, Row]]:
        found = [
            (node, kind, row.root)
            for node, rows in self.rows.items()
            if node.role is Role.PARAM
            for kind, row in rows.items()
            if row.root.dims is None
        ]
        return sorted(found, key=lambda entry: entry[0].number)

    def _idle_inputs(self) -> list[Row]:
        """Return open input rows of parameters that wait for no parameter's output row: they are empty.

        One that does wait (a contraction over a hidden size) is left to whatever determines that output row.
        """
        params = self._unknown_of_parameters()
        blocked = self._linked({row for _, kind, row in params if kind == "output"})
        return [row for _, kind, row in params if kind != "output" and row not in blocked]

    def _linked(self, rows: set[Row]) -> set[Row]:
        """Return the unknown rows that hang together with any of ``rows`` through constraints still waiting."""
        groups: dict[Row, list[set[Row]]] = {}
        for constraint in self.work.waiting:
            group = {use.row.root for use in constraint.uses() if isinstance(use, RowUse)}
            group |= {row for row in constraint.results() if isinstance(row, Row)}
            if isinstance(constraint, RowSplit):
                group.add(constraint.row.root)
            for row in group:
                groups.setdefault(row, []).append(group)
        linked, fresh = set(rows), list(rows)
        while fresh:
            wider = {row for group in groups.pop(fresh.pop(), ()) for row in group} - linked
            linked |= wider
            fresh += wider
        return linked

    def _decide_dims(self) -> bool:
        """Give open sizes what their uses suggest; say whether any was given."""
        chosen = self.choices.dims.first()
        if not chosen:
            # Only sizes of 1 are left to go by.
            for constraint in self.work.ordered():
                for use in constraint.uses():
                    if isinstance(use, DimUse) and use.weak:
                        chosen[use.dim.root] = use
        for dim, agreed in chosen.items():
            if isinstance(agreed, Clash):
                raise self._disagreement(dim, agreed)
        for dim, agreed in chosen.items():
            if isinstance(agreed, DimUse):
                if agreed.extent is not None:
                    self.unknowns.set_extent(dim, agreed.extent, agreed.reason, agreed.where)
                if agreed.label is not None and dim.root.label is None:
                    self.unknowns.set_label(dim, agreed.label, agreed.reason, agreed.where)
        return bool(chosen)

    def _disagreement(self, dim: Dim, clash: Clash) -> ShapeError:
        first, other = clash.first, clash.other
        return first.where.error(
            f"{self._name_of(dim)} would have size {first.extent} here and size {other.extent} in {other.where.label}",
            [
                (str(first.extent), first.reason),
                (str(other.extent), other.reason),
                (f"in {other.where.label}", Reason("used", other.where.source)),
            ],
            "the uses of an open axis must agree; declare its size, or use two parameters",
        )

    def _default_dims(self) -> bool:
        unknown: dict[Dim, tuple[Node, RowKind, int]] = {}
        for node, rows in self.rows.items():
            for kind in PRINT_ORDER:
                dims = rows[kind].root.dims or ()
                for place, dim in enumerate(dims):
                    if dim.root.extent is None:
                        if node.role is Role.PARAM:
                            return self._give_up(self._undetermined(node, kind, rows[kind], place - len(dims)))
                        unknown.setdefault(dim.root, (node, kind, place))
        for variables in self.variables.values():
            others = [*variables.names.values(), *variables.anonymous.values()]
            others += [dim for row in variables.rows.values() for dim in row.root.dims or ()]
            for dim in others:
                if dim.root.extent is None:
                    unknown.setdefault(dim.root, (next(iter(self.rows)), "output", 0))
        results = self._results()
        chosen = [dim for dim in unknown if dim not in results] or list(unknown)
        for dim in chosen:
            if dim.root.extent is None:
                node, kind, _ = unknown[dim]
                where = Where(node.label, node.source, kind)
                self.unknowns.set_extent(dim, max(1, dim.root.minimum), Reason("not determined", node.source), where)
        return bool(chosen)

    def _give_up(self, error: ShapeError) -> bool:
        if not self.partial:
            raise error
        self.undetermined = self.undetermined or error
        return False

    def _check_minimums(self) -> None:
        for node, rows in self.rows.items():
            for kind, row in rows.items():
                for place, dim in enumerate(row.root.dims or ()):
                    root = dim.root
                    size = root.extent.max if isinstance(root.extent, DynamicDim) else root.extent
                    if size is not None and size < root.minimum:
                        where = Where(node.label, node.source, kind)
                        raise where.error(
                            f"an index needs at least {root.minimum} cells of axis {place} of the {kind} row, "
                            f"it has {size}",
                            [(str(size), root.reason)],
                            "use a smaller position or index, or a larger axis",
                        )

    # -- messages -------------------------------------------------------------------------------------------------

    def _anywhere(self) -> Where:
        node = next(iter(self.rows))
        return Where(node.label, node.source)

    def _name_of(self, dim: Dim) -> str:
        for node, rows in self.rows.items():
            for kind, row in rows.items():
                for place, other in enumerate(row.root.dims or ()):
                    if other.root is dim.root:
                        what = "parameter " if node.role is Role.PARAM else ""
                        return f"{what}{node.label!r} ({kind} row, axis {place - len(row.root.dims or ())})"
        return "an axis"

    def _undetermined(self, node: Node, kind: RowKind, row: Row, place: int | None = None) -> ShapeError:
        what = f"the {kind} row" if place is None else f"axis {place} of the {kind} row"
        lines = [f"nothing determines {what} of parameter {node.label!r}", f"  {node.source.quoted()}"]
        for record in sorted(node.consumers, key=lambda record: record.result.number)[:3]:
            lines.append(f"  used by {record.scope.label} {record.scope.source.quoted()}")
        others = [
            other.label
            for other, rows in self.rows.items()
            if other is not node and other.role is Role.PARAM and any(found.root is row.root for found in rows.values())
        ]
        if others:
            lines.append(f"  it has the same axes as {', '.join(map(repr, others))}")
        lines.append(f'  hint: give it a size, for example st.param("{node.label}", {kind}=[...])')
        return ShapeError("\n".join(lines))

    # -- reading out ----------------------------------------------------------------------------------------------

    def scope_shapes(self, scope: Scope) -> ScopeShapes:
        """Read the solved variables of a scope."""
        found = ReadOut().scope(self.variables[scope])
        if found is None:
            raise InternalError("a size is still unknown after the shape solver finished")
        return found

    def solution(self) -> ShapeSolution:
        """Read everything out that is known."""
        read = ReadOut()
        shapes = {node: shape for node, rows in self.rows.items() if (shape := read.shape(rows)) is not None}
        captures = {key: extent for key, dim in self.captures.items() if (extent := dim.root.extent) is not None}
        scopes = {
            scope: extents
            for scope, variables in self.variables.items()
            if (extents := read.scope(variables)) is not None
        }
        origins = partial(_origin, self.rows)
        return ShapeSolution(shapes, captures, origins, scopes, _solve_scope, self.undetermined)


def _same_shape(node: Node) -> Node | None:
    """Return the node whose rows are those of ``node``, whatever they are: the one operand of a pointwise op."""
    record = node.record
    if record is None or node.declared is not None:
        return None
    scope = record.scope
    return owner_of_shape(scope.nodes[0]) if _is_plain(scope) and scope.derives and scope.result is node else None


_ALONE = pointwise(1)


def _is_plain(scope: Scope) -> bool:
    """Whether a scope says only that a row broadcasts to another."""
    return scope.spec is _ALONE and not scope.sizes and not scope.captures


def _origin(rows: Mapping[Node, Mapping[RowKind, Row]], node: Node) -> tuple[Source, ...]:
    return origin(node, rows[node])


def _weak_ranks(uses: Sequence[RowUse]) -> list[int]:
    return [use.rank for use in uses if use.rank is not None and use.weak and not use.neutral]
