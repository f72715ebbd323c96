"""Blocks of the loop IR as tensor ops: whole iteration spaces at once.

In: the blocks that lowering made of a program's statements, one by one. Out: a value per buffer. An expression becomes
a value over the iterators that it depends on; reads at plain positions are slices and transposes, others gathers; a sum
of products is a dot_general, other accumulators are reductions, stores at computed positions are scatters. Accumulation
stays as wide as the block says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from stagedtensor.codegen import loop_ir as ir
from stagedtensor.errors import ExportError
from stagedtensor.op_table import OPS
from stagedtensor.precision import Prec, bool_, f32, i32, i64

from .block_forms import NARROW, REDUCERS, Sum, added_by, affine, is_neutral, narrow_op, neutral_number
from .casts import converted, number_of
from .scalar_ops import FORMS
from .values import Lines, Value, tensor_type
from .windows import Axis, axes_of, convolved, pooled

Axes: TypeAlias = tuple[ir.Symbol, ...]


@dataclass(frozen=True)
class Over:
    """A value and the iterator of each of its axes."""

    value: Value
    axes: Axes


class BlockValues:
    """Builds the ops of blocks; ``buffers`` holds the value that each buffer has now.

    ``narrow``: sums that end in a narrow buffer have its type, and whoever runs the module rounds partial sums or not.
    """

    def __init__(self, lines: Lines, buffers: dict[ir.Buffer, Value], *, narrow: bool = False) -> None:
        self.lines = lines
        self._narrow = narrow
        self.buffers = buffers
        self._extents: dict[ir.Symbol, int] = {}
        self._order: dict[ir.Symbol, int] = {}
        self._states: dict[ir.Symbol, Over] = {}
        self._label = ""
        self._role = ("mix", "mix")

    def run(self, block: ir.Block, label: str, load_role: str, store_role: str) -> None:
        """Add the ops of a block. ``label`` names the tensor in errors, the roles mark converts at reads and stores."""
        self._label, self._role = label, (load_role, store_role)
        for iterator in block.iterators:
            if not isinstance(iterator.extent, ir.Const):
                raise ExportError(f"{label}: a run-time extent cannot be exported; export the model with fixed sizes")
        self._extents = {iterator.symbol: iterator.bound for iterator in block.iterators}
        self._order = {symbol: at for at, symbol in enumerate(self._extents)}
        self._states = {}
        guard = None if block.guard is None else self._truth(block.guard)
        data = tuple(item.symbol for item in block.iterators if item.kind == "data")
        if block.scatter:
            self._scatter_points(block, guard)
            return
        if len(block.accumulators) == 2 and block.accumulators[0].paired_with is not None:
            self._position(block, data)
        else:
            for accumulator in block.accumulators:
                self._states[accumulator.symbol] = self._accumulate(accumulator, block, data, guard)
        for store in block.stores:
            self._store(store, data, None if block.accumulators else guard)

    # -- axes ---------------------------------------------------------------------------------------------------------
    def _union(self, *parts: Over) -> Axes:
        found = {axis for part in parts for axis in part.axes}
        return tuple(sorted(found, key=lambda axis: self._order[axis]))

    def _dims(self, axes: Axes) -> tuple[int, ...]:
        return tuple(self._extents[axis] for axis in axes)

    def _over(self, part: Over, axes: Axes) -> Value:
        """Spread a value over ``axes``."""
        return self.lines.broadcast(part.value, [axes.index(axis) for axis in part.axes], self._dims(axes))

    def _spread(self, *parts: Over) -> tuple[Axes, list[Value]]:
        axes = self._union(*parts)
        return axes, [self._over(part, axes) for part in parts]

    # -- expressions --------------------------------------------------------------------------------------------------
    def _value(self, expr: ir.Expr) -> Over:
        """Evaluate to a value of the expression's own type (a comparison inside gives i1 to who asks for a truth)."""
        found = self._evaluate(expr)
        if found.value.prec is bool_ and expr.type is not bool_:
            return Over(self.lines.convert(found.value, expr.type, f"mix:{self._label}:-"), found.axes)
        return found

    def _truth(self, expr: ir.Expr) -> Over:
        """Evaluate to i1: whether the value is not zero."""
        found = self._evaluate(expr)
        if found.value.prec is bool_:
            return found
        zero = self.lines.number(0.0 if found.value.prec.is_float else 0, found.value.prec, found.value.dims)
        return Over(self.lines.compare("NE", found.value, zero), found.axes)

    def _evaluate(self, expr: ir.Expr) -> Over:
        match expr:
            case ir.Const(value, prec):
                return Over(self.lines.number(float(value) if prec.is_float else int(value), prec), ())
            case ir.Var(symbol):
                return self._variable(symbol)
            case ir.Load():
                return self._load(expr)
            case ir.Cast():
                return self._cast(expr)
            case ir.Fma(a, b, c):
                return self._apply(ir.Apply("add", (ir.Apply("mul", (a, b), expr.type), c), expr.type))
            case ir.Apply():
                return self._apply(expr)
        raise ExportError(f"{self._label}: no StableHLO form for {expr!r}")

    def _variable(self, symbol: ir.Symbol) -> Over:
        if symbol in self._states:
            return self._states[symbol]
        if symbol not in self._extents:
            raise ExportError(
                f"{self._label}: {symbol.hint!r} is bound when a routine runs (a static index or a run-time extent); "
                "export a model whose positions and sizes are fixed"
            )
        dims = (self._extents[symbol],)
        text = f"stablehlo.iota dim = 0 : {tensor_type(dims, i64)}"
        return Over(self.lines.add(text, (), dims, i64), (symbol,))

    def _apply(self, expr: ir.Apply, prec: Prec | None = None) -> Over:
        """Apply a scalar op, at ``prec`` if given instead of the expression's type."""
        row = OPS[expr.op]
        form = FORMS.get(expr.op)
        if form is None:
            raise ExportError(
                f"{self._label}: op {expr.op!r} has no StableHLO form; counter-based random numbers are this package's "
                "own, so feed the values as an argument instead"
            )
        logic = row.op_class == "logic" and expr.op != "nonfinite"
        parts = [
            self._truth(arg)
            if logic or at in row.predicates
            else self._value(arg)
            if prec is None
            else self._as(arg, prec)
            for at, arg in enumerate(expr.args)
        ]
        if row.op_class == "select" and parts[1].value.prec is bool_ is not parts[2].value.prec:
            raise ExportError(f"{self._label}: a select between a truth value and a number")
        axes, values = self._spread(*parts)
        return Over(form(self.lines, *values), axes)

    def _as(self, expr: ir.Expr, prec: Prec) -> Over:
        """Return an operand of a narrow op in its format."""
        if isinstance(expr, ir.Cast):
            return self._value(expr.arg)
        assert isinstance(expr, ir.Const)
        return Over(self.lines.number(float(expr.value), prec), ())

    def _cast(self, expr: ir.Cast) -> Over:
        if isinstance(expr.arg, ir.Cast) and expr.arg.arg.type is expr.type and expr.type in NARROW:
            return self._value(expr.arg.arg)  # widening is exact
        narrow = narrow_op(expr)
        if narrow is not None:
            return self._apply(narrow, expr.type)
        number = number_of(expr)
        if number is not None:
            return Over(self.lines.number(number, expr.type), ())
        found = self._evaluate(expr.arg)
        outward = isinstance(expr.arg, ir.Apply | ir.Var | ir.Fma) or expr.type.bits < found.value.prec.bits
        role = self._role[1 if outward else 0]
        where = role if ":" in role else f"{role}:{self._label}:-"
        return Over(converted(self.lines, found.value, expr.type, where, saturate=expr.saturate), found.axes)

    # -- reads --------------------------------------------------------------------------------------------------------
    def _load(self, load: ir.Load) -> Over:
        held = self.buffers.get(load.buffer)
        if held is None:
            raise ExportError(
                f"{self._label}: operand {load.buffer.name!r} has no value; nothing in this computation writes it"
            )
        plain = self._sliced(held, load.indices)
        return plain if plain is not None else self._gathered(held, load.indices)

    def _sliced(self, held: Value, indices: Sequence[ir.Expr]) -> Over | None:
        """Read at ``start + step * iterator`` and at fixed positions, each iterator on one axis."""
        axes: list[ir.Symbol] = []
        cuts: list[tuple[int, int, int]] = []
        for index, size in zip(indices, held.dims, strict=True):
            symbol, step, start = affine(index)
            if step == 0 and symbol is None:
                cut = (start, start + 1, 1)
            elif (
                symbol is None or step < 1 or symbol in axes or symbol not in self._extents or not self._extents[symbol]
            ):
                return None
            else:
                axes.append(symbol)
                cut = (start, start + step * (self._extents[symbol] - 1) + 1, step)
            if cut[0] < 0 or cut[1] > size:
                return None
            cuts.append(cut)
        value = held
        if any(cut != (0, size, 1) for cut, size in zip(cuts, held.dims, strict=True)):
            text = ", ".join(f"{first}:{last}:{step}" for first, last, step in cuts)
            dims = [-(-(last - first) // step) for first, last, step in cuts]
            value = self.lines.changed(f"stablehlo.slice {{0}} [{text}]", held, dims, held.prec)
        return self._ordered(self.lines.reshape(value, self._dims(tuple(axes))), tuple(axes))

    def _gathered(self, held: Value, indices: Sequence[ir.Expr]) -> Over:
        """Read at computed positions, clamped into the buffer (guards leave out what is clamped)."""
        cell, axes = self._cell_number(indices, held.dims, clamp=True)
        flat = self.lines.reshape(held, (_product(held.dims),))
        cell = self.lines.convert(cell, _position_type(_product(held.dims)), f"mix:{self._label}:-")
        positions = self.lines.reshape(cell, (_product(cell.dims), 1))
        dims = (positions.dims[0],)
        text = (
            '"stablehlo.gather"({0}, {1}) <{dimension_numbers = #stablehlo.gather<collapsed_slice_dims = [0], '
            "start_index_map = [0], index_vector_dim = 1>, slice_sizes = array<i64: 1>, indices_are_sorted = false}>"
            f" : ({flat.type}, {positions.type}) -> {tensor_type(dims, held.prec)}"
        )
        return Over(
            self.lines.reshape(self.lines.add(text, (flat, positions), dims, held.prec), self._dims(axes)), axes
        )

    def _cell_number(self, indices: Sequence[ir.Expr], dims: tuple[int, ...], *, clamp: bool) -> tuple[Value, Axes]:
        """Return the row-major number of the cell at ``indices``, and the axes it depends on."""
        lines = self.lines
        parts = [self._value(index) for index in indices]
        axes, values = self._spread(*parts) if parts else ((), [])
        space = self._dims(axes)
        total = lines.number(0, i64, space)
        for value, size in zip(values, dims, strict=True):
            if clamp:
                value = lines.binary("maximum", value, lines.number(0, i64, space))
                value = lines.binary("minimum", value, lines.number(max(size - 1, 0), i64, space))
            total = lines.binary("add", lines.binary("multiply", total, lines.number(size, i64, space)), value)
        return total, axes

    # -- accumulators -------------------------------------------------------------------------------------------------
    def _accumulate(self, state: ir.Accumulator, block: ir.Block, data: Axes, guard: Over | None) -> Over:
        added = added_by(state)
        if added is None:
            raise ExportError(f"{self._label}: an accumulation of this form has no StableHLO form")
        reduced = tuple(item.symbol for item in block.iterators if item.kind == "reduce")
        prec = self._sum_type(state, block)
        total = None
        if guard is None:
            total = self._convolution(added, reduced, prec) or self._contraction(added, data, reduced, prec)
            total = total or self._pooling(added, reduced, prec)
        if total is None:
            total = self._reduction(added.op, self._at(added.point, prec), data, reduced, guard, prec)
        if added.inverse:
            total = Over(FORMS[added.inverse](self.lines, total.value), total.axes)
        if isinstance(state.init, ir.Const) and is_neutral(state.init, added.op):
            return total
        axes, (start, sum_) = self._spread(self._at(state.init, prec), total)
        return Over(self.lines.binary(REDUCERS[added.op], start, sum_), axes)

    def _sum_type(self, state: ir.Accumulator, block: ir.Block) -> Prec:
        """The type of a sum: the accumulator's, or with narrow sums that of the buffer it ends in."""
        target = block.stores[0].buffer.type
        return target if self._narrow and target in NARROW else state.symbol.type

    def _at(self, expr: ir.Expr, prec: Prec) -> Over:
        """Evaluate for a sum of type ``prec``."""
        if expr.type is prec:
            return self._value(expr)
        return self._value(ir.Cast(expr, prec))

    def _reduction(self, op: str, point: Over, data: Axes, reduced: Axes, guard: Over | None, prec: Prec) -> Over:
        lines = self.lines
        used = tuple(axis for axis in data if axis in point.axes or (guard is not None and axis in guard.axes))
        axes = tuple(sorted((*used, *reduced), key=lambda axis: self._order[axis]))
        value = self._over(point, axes)
        neutral = neutral_number(op, prec)
        if guard is not None:
            value = lines.select(self._over(guard, axes), value, lines.number(neutral, prec, self._dims(axes)))
        if not reduced:
            return Over(value, axes)
        places = [at for at, axis in enumerate(axes) if axis in reduced]
        init = lines.number(neutral, prec)
        dims = self._dims(used)
        text = (
            f"stablehlo.reduce({{0}} init: {{1}}) applies stablehlo.{REDUCERS[op]} across dimensions = {places}"
            f" : ({value.type}, {init.type}) -> {tensor_type(dims, prec)}"
        )
        return Over(lines.add(text, (value, init), dims, prec), used)

    def _contraction(self, added: Sum, data: Axes, reduced: Axes, prec: Prec) -> Over | None:
        """A sum of products of two operands as a dot_general with a result of the accumulation's type."""
        point = added.point
        if isinstance(point, ir.Cast) and isinstance(point.arg, ir.Apply):
            return None
        if added.op != "add" or not reduced or not isinstance(point, ir.Apply) or point.op != "mul":
            return None
        left, right = (self._factor(arg) for arg in point.args)
        if left.value.prec is not right.value.prec:
            left, right = (self._value(arg) for arg in point.args)
        both = [axis for axis in left.axes if axis in right.axes]
        if any((axis in left.axes) != (axis in right.axes) for axis in reduced) or not all(
            axis in both for axis in reduced
        ):
            return None
        batch = [axis for axis in both if axis not in reduced]
        free = [[axis for axis in part.axes if axis not in both] for part in (left, right)]
        axes = (*batch, *free[0], *free[1])
        contracted = [axis for axis in both if axis in reduced]

        def places(part: Over, wanted: Sequence[ir.Symbol]) -> str:
            return str([part.axes.index(axis) for axis in wanted])

        batching = f"batching_dims = {places(left, batch)} x {places(right, batch)}, " if batch else ""
        text = (
            f"stablehlo.dot_general {{0}}, {{1}}, {batching}"
            f"contracting_dims = {places(left, contracted)} x {places(right, contracted)}"
            f" : ({left.value.type}, {right.value.type}) -> {tensor_type(self._dims(axes), prec)}"
        )
        return self._ordered(self.lines.add(text, (left.value, right.value), self._dims(axes), prec), axes)

    def _windows(self, expr: ir.Expr, reduced: Axes, prec: Prec) -> tuple[Value, tuple[Axis, ...]] | None:
        """The operand of a read by windows, widened for the sum, and the axes of the read."""
        load = expr.arg if isinstance(expr, ir.Cast) and not (expr.saturate or expr.flush) else expr
        if not isinstance(load, ir.Load) or load.buffer not in self.buffers or not prec.is_float:
            return None
        held = self.buffers[load.buffer]
        axes = axes_of(load.indices, held.dims, self._extents, reduced)
        if axes is None or not held.prec.is_float or expr.type.bits < held.prec.bits:
            return None
        return self.lines.convert(held, prec, f"acc:{self._label}:-"), axes

    def _pooling(self, added: Sum, reduced: Axes, prec: Prec) -> Over | None:
        """A reduction of the cells of windows as a reduce_window."""
        read = self._windows(added.point, reduced, prec)
        if read is None or {axis.inner for axis in read[1]} - {None} != set(reduced):
            return None
        neutral = self.lines.number(neutral_number(added.op, prec), prec)
        return self._ordered(*pooled(self.lines, *read, self._extents, REDUCERS[added.op], neutral))

    def _convolution(self, added: Sum, reduced: Axes, prec: Prec) -> Over | None:
        """A sum of products of windows with a kernel as a convolution."""
        point = added.point
        if added.op != "add" or not isinstance(point, ir.Apply) or point.op != "mul":
            return None
        for read, kernel in (point.args, point.args[::-1]):
            windows = self._windows(read, reduced, prec)
            if windows is None or self._windows(kernel, reduced, prec) is not None:
                continue
            factor = self._factor(kernel)
            value = self.lines.convert(factor.value, prec, f"acc:{self._label}:-")
            found = convolved(self.lines, *windows, value, factor.axes, self._extents, reduced, prec)
            if found is not None:
                return self._ordered(*found)
        return None

    def _ordered(self, value: Value, axes: Axes) -> Over:
        """Put the axes of a value into the order of the block's iterators."""
        ordered = tuple(sorted(axes, key=lambda axis: self._order[axis]))
        return Over(self._over(Over(value, axes), ordered), ordered)

    def _factor(self, expr: ir.Expr) -> Over:
        """An operand of a product: one of a narrow format stays as it is, since the product is exact in f32."""
        if isinstance(expr, ir.Cast) and expr.arg.type in NARROW and isinstance(expr.arg, ir.Load) and expr.type is f32:
            return self._value(expr.arg)
        return self._value(expr)

    def _position(self, block: ir.Block, data: Axes) -> None:
        """argmax and argmin: the extremum, then the least position that holds it; NaN wins."""
        lines = self.lines
        position, best = block.accumulators
        added = added_by(best)
        assert added is not None
        reduced = tuple(item.symbol for item in block.iterators if item.kind == "reduce")
        axes = (*data, *reduced)
        value = Over(self._over(self._value(added.point), axes), axes)
        total = self._reduction(added.op, value, data, reduced, None, best.symbol.type)
        extremum = self._over(total, axes)
        is_best = lines.compare("EQ", value.value, extremum)
        if best.symbol.type.is_float:
            is_best = lines.binary("or", is_best, lines.compare("NE", value.value, value.value))
        number, number_axes = self._cell_number([ir.Var(axis) for axis in reduced], self._dims(reduced), clamp=False)
        count = _product(self._dims(reduced))
        here = lines.convert(self._over(Over(number, number_axes), axes), i32)
        candidates = lines.select(is_best, here, lines.number(count, i32, self._dims(axes)))
        first = self._reduction("minimum", Over(candidates, axes), data, reduced, None, i32)
        self._states[position.symbol] = first
        self._states[best.symbol] = total

    # -- stores -------------------------------------------------------------------------------------------------------
    def _store(self, store: ir.Store, data: Axes, guard: Over | None) -> None:
        value = self._value(store.value)
        shape = store.buffer.shape
        plain = [affine(index) for index in store.indices]
        named = [symbol for symbol, step, start in plain if symbol is not None]
        covers = len(set(named)) == len(named) and all(
            (start == 0 and step == 1 and symbol in self._extents and self._extents[symbol] == size)
            if symbol is not None
            else (step == 0 and start == 0 and size == 1)
            for (symbol, step, start), size in zip(plain, shape, strict=True)
        )
        if not covers and guard is None and self._store_box(store, plain, value):
            return
        if not covers or not set(value.axes) <= set(named):
            self._scatter(store.buffer, store.indices, value, guard, data, "")
            return
        axes = tuple(named)
        result = self._over(value, axes)
        if guard is not None:
            old = self.lines.reshape(self._held(store.buffer), self._dims(axes))
            result = self.lines.select(self._over(guard, axes), result, old)
        self.buffers[store.buffer] = self.lines.reshape(result, shape)

    def _store_box(self, store: ir.Store, plain: Sequence[tuple[ir.Symbol | None, int, int]], value: Over) -> bool:
        """Store to a box of cells, step 1 along each axis, as an update of a slice; whether the store is one."""
        named = tuple(symbol for symbol, _, _ in plain if symbol is not None)
        box = [1 if symbol is None else self._extents.get(symbol, 0) for symbol, _, _ in plain]
        inside = all(
            step == (0 if symbol is None else 1) and extent > 0 and 0 <= start <= size - extent
            for (symbol, step, start), extent, size in zip(plain, box, store.buffer.shape, strict=True)
        )
        if not inside or len(set(named)) != len(named) or not set(value.axes) <= set(named):
            return False
        lines, held = self.lines, self._held(store.buffer)
        update = lines.reshape(self._over(value, named), box)
        starts = [lines.number(start, i32) for _, _, start in plain]
        text = "stablehlo.dynamic_update_slice " + ", ".join(f"{{{at}}}" for at in range(2 + len(starts)))
        types = ", ".join(operand.type for operand in (held, update, *starts))
        self.buffers[store.buffer] = lines.add(
            f"{text} : ({types}) -> {held.type}", (held, update, *starts), held.dims, held.prec
        )
        return True

    def _held(self, buffer: ir.Buffer) -> Value:
        if buffer not in self.buffers:
            self.buffers[buffer] = self.lines.number(0.0 if buffer.type.is_float else 0, buffer.type, buffer.shape)
        return self.buffers[buffer]

    def _scatter_points(self, block: ir.Block, guard: Over | None) -> None:
        """Points that may meet in one cell: accumulated by the op, or the last one set."""
        (store,) = block.stores
        state = ir.Accumulator(ir.Symbol("cell", store.buffer.type), ir.Const(0, i32), store.value)
        added = added_by(state, store)
        axes = tuple(self._extents)
        if added is None:
            self._scatter(store.buffer, store.indices, self._value(store.value), guard, axes, "")
            return
        point = self._value(added.point)
        if added.inverse:
            point = Over(FORMS[added.inverse](self.lines, point.value), point.axes)
        self._scatter(store.buffer, store.indices, point, guard, axes, REDUCERS[added.op])

    def _scatter(
        self, buffer: ir.Buffer, indices: Sequence[ir.Expr], value: Over, guard: Over | None, axes: Axes, op: str
    ) -> None:
        """Write at computed positions; points that the guard leaves out go beyond the end, where nothing is written."""
        lines = self.lines
        held = self._held(buffer)
        count = _product(held.dims)
        number, number_axes = self._cell_number(indices, held.dims, clamp=False)
        space = self._dims(axes)
        cells = self._over(Over(number, number_axes), axes)
        if guard is not None:
            cells = lines.select(self._over(guard, axes), cells, lines.number(count, i64, space))
        points = _product(space)
        flat = lines.copied(held, (count,))
        positions = lines.reshape(lines.convert(cells, _position_type(count), f"mix:{self._label}:-"), (points, 1))
        updates = lines.reshape(self._over(value, axes), (points,))
        cell = tensor_type((), held.prec)
        body = f"%r = stablehlo.{op} %a, %b : {cell} stablehlo.return %r" if op else "stablehlo.return %b"
        text = (
            '"stablehlo.scatter"({0}, {1}, {2}) <{scatter_dimension_numbers = #stablehlo.scatter<inserted_window_dims = '
            "[0], scatter_dims_to_operand_dims = [0], index_vector_dim = 1>, indices_are_sorted = false, unique_indices = "
            f"false}}> ({{ ^bb0(%a: {cell}, %b: {cell}): {body} : {cell} }}) : ({flat.type}, {positions.type}, "
            f"{updates.type}) -> {flat.type}"
        )
        result = lines.add(text, (flat, positions, updates), flat.dims, held.prec)
        self.buffers[buffer] = lines.reshape(result, held.dims)


def _product(dims: Sequence[int]) -> int:
    return int(np.prod(dims, dtype=np.int64))


def _position_type(cells: int) -> Prec:
    """The type of positions in so many cells; compilers are at home with 32 bits."""
    return i32 if cells < 2**31 else i64
