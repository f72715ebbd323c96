"""One statement, with one choice of blocks, over iterators and index expressions.

In: a statement whose shapes are solved. Out: a ``Projected`` part: the iterators of its target and those it reduces
over, and for every access the index expression of every axis, with guards where a window leaves its operand. Which
parts a statement has is decided in ``projections``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from stagedtensor.dims import MEMORY_ORDER, Axis, DynamicDim
from stagedtensor.errors import InternalError
from stagedtensor.node import Node
from stagedtensor.specs import (
    Affine,
    Anonymous,
    AxisTerm,
    Concat,
    Gathered,
    Name,
    Position,
    ShapeSpec,
    Sliced,
    StaticIndex,
)
from stagedtensor.statements import (
    Access,
    DimValue,
    IterValue,
    LinearIndex,
    Statement,
    accesses,
    walk,
)

from .axes import AxisUse, VariableAxis, axis_extent, axis_uses
from .blocks import Choice
from .equations import flat_partner, term_names
from .index import (
    DimProduct,
    Extent,
    Guard,
    IndexConst,
    IndexData,
    IndexExpr,
    IndexIter,
    IndexStatic,
    Projected,
    ProjectedIterator,
    floor_div,
    index_sum,
    iterators_of,
    modulo,
    reads_data,
    row_major,
    split_row_major,
)
from .sizes import padding, slice_bounds
from .solution import ShapeSolution

Key = tuple[str, str | int, int]
"""An iterator of a scope: ("name", name, 0), ("row", variable, place from the right), ("any", key, 0), ("axis", n, 0)."""


def part_sizes(term: Concat, names: Mapping[str, Extent]) -> list[int]:
    """Return the sizes of a concatenation's parts, the greatest where one varies."""
    sizes = [part if isinstance(part, int) else names[part.name] for part in term.parts]
    return [size.max if isinstance(size, DynamicDim) else size for size in sizes]


class Projector:
    """Projects one statement with one choice of blocks."""

    def __init__(self, statement: Statement, solution: ShapeSolution, choice: Choice) -> None:
        self.statement = statement
        self.scope = statement.scope
        self.solution = solution
        self.choice = choice
        self.binding = solution.scope(statement.scope)
        self.forms: dict[str, tuple[Extent, ...]] = dict(self.binding.rows)
        self.reads = list(dict.fromkeys(accesses(statement.expr)))
        self.target_axes = axis_uses(statement.target, solution)
        self.flat_names: dict[str, str] = {}
        self.partners: dict[str, tuple[str, ...]] = {}
        for use in self.target_axes:
            if isinstance(use.source, VariableAxis) and use.source.flat:
                self.forms[use.source.variable] = use.source.sizes
        self.inverted: dict[Affine, Key] = {}
        self.extents: dict[Key, Extent] = {}
        self.iterators: dict[Key, ProjectedIterator] = {}
        self.names: dict[str, IndexExpr] = {}
        self._flat_rows()

    def project(self) -> Projected:
        """Build the part."""
        self._invert_target()
        data = list(dict.fromkeys(key for use in self.target_axes for key in self._target_keys(use)))
        domain = dict.fromkeys(data)
        for access in self.reads:
            domain.update(dict.fromkeys(self._row_keys(access.rows)))
        values = [part for part in walk(self.statement.expr) if isinstance(part, (IterValue, LinearIndex))]
        for value in values:
            rows = value.rows if isinstance(value, LinearIndex) else ShapeSpec()
            domain.update(dict.fromkeys(self._row_keys(rows)))
            if isinstance(value, IterValue):
                domain.update(dict.fromkeys(self._name_keys(value.name)))
        reduce = [key for key in self._spec_order(list(domain)) if key not in data]
        for key in [*data, *reduce]:
            self.iterators[key] = ProjectedIterator(self._hint(key), self._extent(key), key in reduce)
        for term, key in self.inverted.items():
            self.names[term.over] = self._over_of(term, key)
        for variable in dict.fromkeys(self.flat_names.values()):
            keys, split = self._variable_keys(variable), self.binding.rows[variable]
            indices = _resplit([self._at(key) for key in keys], self.forms[variable], split)
            names = [name for name, of in self.flat_names.items() if of == variable]
            self.names.update(zip(names, indices, strict=True))
        target = tuple(self._index(use) for use in self.target_axes)
        guards = tuple(dict.fromkeys(self._guards()))
        reads = {access: tuple(self._index(use) for use in axis_uses(access, self.solution)) for access in self.reads}
        reducing = {self.iterators[key] for key in reduce}
        scatter = any(reads_data(index) or iterators_of(index) & reducing for index in target)
        return Projected(
            self.statement,
            tuple(self.iterators[key] for key in [*data, *reduce]),
            target,
            reads,
            guards,
            {part: self._cells(part) for part in walk(self.statement.expr) if isinstance(part, DimValue)},
            {value: self._value(value) for value in values},
            covers_target=not scatter and self._covers(target, guards, reducing),
            scatter=scatter,
        )

    # -- iterators ------------------------------------------------------------------------------------------------

    def _flat_rows(self) -> None:
        """Where names split a flat row: the target's side has the iterators, the other side follows from them."""
        in_target = {use.source.variable for use in self.target_axes if isinstance(use.source, VariableAxis)}
        for variable in self.forms:
            names = flat_partner(self.scope.spec, variable)
            if names is None:
                continue
            if variable in in_target:
                self.flat_names.update(dict.fromkeys(names, variable))
            else:
                self.partners[variable] = names

    def _invert_target(self) -> None:
        """Walk the cells of a convolved target axis instead of its windows, so that each cell is written once."""
        plain = [
            name for use in self.target_axes if not isinstance(use.source, Affine) for name in self._use_names(use)
        ]
        for place, use in enumerate(self.target_axes):
            term = use.source
            if not isinstance(term, Affine) or term.over in plain or term.over == term.kernel:
                continue
            if any(other.over == term.over or other.kernel == term.over for other in self.inverted):
                continue
            key: Key = ("axis", place, 0)
            self.inverted[term] = key
            self.extents[key] = axis_extent(use.axis)

    def _use_names(self, use: AxisUse) -> tuple[str, ...]:
        return () if isinstance(use.source, VariableAxis) else term_names(use.source)

    def _name_keys(self, name: str) -> list[Key]:
        for term, key in self.inverted.items():
            if term.over == name:
                return [key, *self._name_keys(term.kernel)]
        if name in self.flat_names:
            return self._variable_keys(self.flat_names[name])
        return [("name", name, 0)]

    def _variable_keys(self, variable: str) -> list[Key]:
        if variable in self.partners:
            return [("name", name, 0) for name in self.partners[variable]]
        count = len(self.forms[variable])
        return [("row", variable, place) for place in range(count, 0, -1)]

    def _term_keys(self, term: AxisTerm) -> list[Key]:
        match term:
            case Name(name) | Sliced(name=name):
                return self._name_keys(name)
            case Affine(over=over, kernel=kernel):
                return [*self._name_keys(over), *self._name_keys(kernel)]
            case Concat(parts):
                part = parts[self.choice.get(term, 0)]
                return self._name_keys(part.name) if isinstance(part, Name) and term in self.choice else []
            case Anonymous(key):
                return [("any", key, 0)] if key in self.binding.anonymous else []
            case Gathered():
                return self._row_keys(self._gather_operand(term)[1])
            case _:
                return []

    def _target_keys(self, use: AxisUse) -> list[Key]:
        source = use.source
        if isinstance(source, VariableAxis):
            extent = self.forms[source.variable][-source.place]
            return [] if use.axis.is_one and extent != 1 else [("row", source.variable, source.place)]
        if isinstance(source, Affine):
            return [self.inverted[source]] if source in self.inverted else self._name_keys(source.over)
        return self._term_keys(source)

    def _row_keys(self, rows: ShapeSpec) -> list[Key]:
        """Return every iterator that a tensor's rows name, in memory order."""
        keys: list[Key] = []
        for kind in MEMORY_ORDER:
            row = rows.row(kind)
            for term in row.leading:
                keys += self._term_keys(term)
            if row.variable is not None:
                keys += self._variable_keys(row.variable)
            for term in row.trailing:
                keys += self._term_keys(term)
        return keys

    def _spec_order(self, domain: list[Key]) -> list[Key]:
        spec = self.scope.spec
        order = [key for rows in (*spec.operands, spec.result) for key in self._row_keys(rows)]
        wanted = set(domain)
        return list(dict.fromkeys([*(key for key in order if key in wanted), *domain]))

    def _extent(self, key: Key) -> Extent:
        match key:
            case ("name", str(name), _):
                return self.binding.names[name]
            case ("row", str(variable), place):
                return self.forms[variable][-place]
            case ("any", int(number), _):
                return self.binding.anonymous[number]
            case _:
                return self.extents[key]

    def _hint(self, key: Key) -> str:
        match key:
            case ("row", str(variable), place):
                count = len(self.forms[variable])
                return variable if count == 1 else f"{variable}{count - place}"
            case ("any", number, _):
                return f"any{number}"
            case ("axis", number, _):
                return f"cell{number}"
            case _:
                return str(key[1])

    # -- index expressions ----------------------------------------------------------------------------------------

    def _at(self, key: Key) -> IndexExpr:
        return IndexIter(self.iterators[key])

    def _named(self, name: str) -> IndexExpr:
        return self.names[name] if name in self.names else self._at(("name", name, 0))

    def _index(self, use: AxisUse) -> IndexExpr:
        axis, source = use.axis, use.source
        match source:
            case VariableAxis():
                return self._variable_index(axis, source)
            case Name(name):
                return self._named(name)
            case Position(position):
                return IndexConst(position if position >= 0 else axis.size + position)
            case Anonymous(key):
                return self._at(("any", key, 0)) if key in self.binding.anonymous else IndexConst(0)
            case StaticIndex(name, size):
                return IndexStatic(name, size)
            case Sliced(name=name, step=step):
                start, _ = slice_bounds(source, axis.size)
                return index_sum([(step, self._named(name))], start)
            case Affine():
                if source in self.inverted:
                    return self._at(self.inverted[source])
                return self._affine(source, axis)
            case Concat(parts):
                chosen = self.choice[source]
                part = parts[chosen]
                if isinstance(part, int):
                    raise InternalError(f"{self.scope.label}: a block without a name is read")
                return index_sum([(1, self._named(part.name))], sum(part_sizes(source, self.binding.names)[:chosen]))
            case Gathered():
                node, rows = self._gather_operand(source)
                inner = tuple(self._index(found) for found in axis_uses(Access(node, rows), self.solution))
                return IndexData(node, inner, axis.size)

    def _variable_index(self, axis: Axis, source: VariableAxis) -> IndexExpr:
        form = self.forms[source.variable]
        keys = self._variable_keys(source.variable)
        if source.sizes == form or not (source.flat or self._is_flat_form(source.variable)):
            place = source.place
            return IndexConst(0) if axis.is_one and form[-place] != 1 else self._at(keys[-place])
        split = _resplit([self._at(key) for key in keys], form, source.sizes)
        return split[-source.place]

    def _is_flat_form(self, variable: str) -> bool:
        return self.forms[variable] != self.binding.rows[variable]

    def _affine(self, term: Affine, axis: Axis) -> IndexExpr:
        terms = [(term.stride, self._named(term.over)), (term.dilation, self._named(term.kernel))]
        return index_sum(terms, -self._left(term, axis))

    def _left(self, term: Affine, axis: Axis) -> int:
        names = self.binding.names
        return padding(term, axis.size, _most(names[term.over]), _most(names[term.kernel]))

    def _over_of(self, term: Affine, key: Key) -> IndexExpr:
        return floor_div(self._window_start(term, key), term.stride)

    def _window_start(self, term: Affine, key: Key) -> IndexExpr:
        """Return ``cell + left padding - dilation * kernel``: the first cell of the window, a multiple of the stride."""
        axis = next(use.axis for use in self.target_axes if use.source == term)
        return index_sum([(1, self._at(key)), (-term.dilation, self._named(term.kernel))], self._left(term, axis))

    def _guards(self) -> Iterator[Guard]:
        for term, key in self.inverted.items():
            if term.stride > 1:
                yield Guard(modulo(self._window_start(term, key), term.stride), 0, 1)
            yield Guard(self.names[term.over], 0, self.binding.names[term.over])
        tensors = [
            *zip(self.scope.nodes, self.scope.spec.operands, strict=True),
            (self.scope.result, self.scope.spec.result),
        ]
        for node, rows in tensors:
            if not any(isinstance(term, Affine) for kind in MEMORY_ORDER for term in rows.row(kind).terms):
                continue
            for use in axis_uses(Access(node, rows), self.solution):
                padded = use.source
                if not isinstance(padded, Affine) or not padded.padded or padded in self.inverted:
                    continue
                if all(key in self.iterators for key in self._term_keys(padded)):
                    yield Guard(self._affine(padded, use.axis), 0, axis_extent(use.axis))

    def _gather_operand(self, term: Gathered) -> tuple[Node, ShapeSpec]:
        return self.scope.nodes[term.operand], self.scope.spec.operands[term.operand]

    # -- values and coverage --------------------------------------------------------------------------------------

    def _cells(self, value: DimValue) -> DimProduct:
        constant, dynamic = 1, []
        for name in value.names:
            rows, names = self.binding.rows, self.binding.names
            for extent in rows[name] if name in rows else (names[name],):
                if isinstance(extent, DynamicDim) and not value.greatest:
                    dynamic.append(extent)
                else:
                    constant *= _most(extent)
        return DimProduct(constant, tuple(dynamic))

    def _value(self, value: IterValue | LinearIndex) -> IndexExpr:
        if isinstance(value, IterValue):
            return self._named(value.name)
        indices: list[IndexExpr] = []
        sizes: list[int] = []
        for kind in MEMORY_ORDER:
            row = value.rows.row(kind)
            for part in (row.leading, row.variable, row.trailing):
                if part is None:
                    continue
                if isinstance(part, str):
                    keys = self._variable_keys(part)
                    indices += [self._at(key) for key in keys]
                    sizes += [_most(self._extent(key)) for key in keys]
                    continue
                for name in (name for term in part for name in term_names(term)):
                    indices.append(self._named(name))
                    sizes.append(_most(self.binding.names[name]))
        return row_major(indices, sizes)

    def _covers(
        self, target: tuple[IndexExpr, ...], guards: tuple[Guard, ...], reducing: set[ProjectedIterator]
    ) -> bool:
        if any(not iterators_of(guard.index) & reducing for guard in guards):
            return False
        used: set[ProjectedIterator] = set()
        for use, index in zip(self.target_axes, target, strict=True):
            if isinstance(index, IndexConst):
                if use.axis.size != 1:
                    return False
            elif isinstance(index, IndexIter):
                if index.iterator in used or index.iterator.extent != axis_extent(use.axis):
                    return False
                used.add(index.iterator)
            else:
                return False
        return True


def _resplit(indices: list[IndexExpr], form: tuple[Extent, ...], wanted: tuple[Extent, ...]) -> list[IndexExpr]:
    """Index the cells of a row of extents ``form`` as a row of extents ``wanted``, in row-major order.

    Equal axes at both ends stay as they are; only the middle goes by cell number.
    """
    room = min(len(form), len(wanted))
    lead = 0
    while lead < room and form[lead] == wanted[lead]:
        lead += 1
    tail = 0
    while tail < room - lead and form[-1 - tail] == wanted[-1 - tail]:
        tail += 1
    middle = slice(lead, len(form) - tail)
    cell = row_major(indices[middle], [_most(size) for size in form[middle]])
    inner = split_row_major(cell, [_most(size) for size in wanted[lead : len(wanted) - tail]])
    return [*indices[:lead], *inner, *indices[len(form) - tail :]]


def _most(extent: Extent) -> int:
    return extent.max if isinstance(extent, DynamicDim) else extent
