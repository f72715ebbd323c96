"""Projected statements -> a module of kernels with one block each.

In: a solved program. Out: buffers for every node it mentions and, statement by statement, blocks whose accumulators
hold the running sums and whose stores hold the one storage rounding. Nothing is placed, inlined, fused or simplified:
each node has a buffer, which makes the result the oracle for everything that follows.

``y = w @ x`` becomes::

    block y (i: data 8, j: reduce 16)
      acc: f32 = 0; acc <- fma(f32(w[i, j]), f32(x[j]), acc)
      y[i] <- bf16(acc)
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from stagedtensor import statements as tree
from stagedtensor.codegen import loop_ir as ir
from stagedtensor.codegen.effects import distinct_names, kernel_name, kernel_of, loads
from stagedtensor.codegen.lower_expr import ExprLowering, Scalars, arithmetic, cast, constant, value_precs
from stagedtensor.codegen.pull import pulled
from stagedtensor.codegen.rewrite import fresh_copy
from stagedtensor.codegen.solved import SolvedProgram
from stagedtensor.encoded import Encoded
from stagedtensor.errors import InternalError, ShapeError
from stagedtensor.node import Node
from stagedtensor.numerics import Numerics, accum_prec, compute_prec
from stagedtensor.op_table import OPS, REDUCTIONS
from stagedtensor.precision import Prec, f32, i32, i64, join
from stagedtensor.shapes.index import IndexIter, Projected, ProjectedIterator, iterators_of

COMBINE = {
    "add": "add",
    "sub": "add",
    "mul": "mul",
    "div": "",
    "max": "max",
    "min": "min",
    "argmax": "max",
    "argmin": "min",
}
"""How partial states of a write op merge; "" keeps the serial order."""


def lower(program: SolvedProgram, numerics: Numerics, backend: str) -> ir.Module:
    """Lower every statement of ``program`` into kernels of one block each."""
    storage = _Storage(program)
    scalars = Scalars()
    kernels: list[ir.Proc] = []
    for statement, comment in zip(program.statements, program.comments, strict=True):
        for projected in program.projected(statement):
            projected = pulled(projected, program.shape(statement.target.node).dims) or projected
            lowering = _StatementLowering(program, projected, comment, storage, scalars, numerics, backend)
            kernels.extend(kernel_of(block) for block in lowering.blocks())
    for node in sorted(program.keep, key=lambda node: node.number):
        if node.encoded is None:  # packed bytes have views only
            storage.of(node)
    return ir.Module(
        program.name,
        distinct_names(kernels),
        (*storage.external.values(), *storage.views.values()),
        tuple(storage.temporaries),
        tuple(scalars.symbols.values()),
    )


class _Storage:
    """The buffers of nodes, in order of first mention."""

    def __init__(self, program: SolvedProgram) -> None:
        self.program = program
        self.external: dict[Node, ir.Buffer] = {}
        self.views: dict[tuple[Encoded, Prec], ir.Buffer] = {}
        self.internal: dict[Node, ir.Buffer] = {}
        self.temporaries: list[ir.Buffer] = []

    def of(self, node: Node) -> ir.Buffer:
        """Return the buffer of a node."""
        found = self.external.get(node) or self.internal.get(node)
        if found is not None:
            return found
        buffer = ir.Buffer(
            node.label,
            self.program.prec(node),
            self.program.shape(node).dims,
            node=node,
            saturate=self.program.saturates(node),
            flush_subnormal=node.flush_subnormal,
        )
        if self.program.is_external(node):
            self.external[node] = buffer
        else:
            self.internal[node] = buffer
            self.temporaries.append(buffer)
        return buffer

    def view(self, node: Node, prec: Prec) -> ir.Buffer:
        """Return the bytes of an encoded node as cells of ``prec``; all views of a weight are bound to one memory."""
        assert node.encoded is not None
        cells = node.encoded.memory_bytes // prec.bytes
        buffer = ir.Buffer(f"{node.label}_{prec}", prec, (cells,), node=node)
        return self.views.setdefault((node.encoded, prec), buffer)

    def scratch(self, target: ir.Buffer, prec: Prec) -> ir.Buffer:
        """Return a new temporary of ``target``'s shape in another format."""
        buffer = ir.Buffer(f"{target.name}_{prec}", prec, target.shape)
        self.temporaries.append(buffer)
        return buffer


def stored(value: ir.Expr, buffer: ir.Buffer) -> ir.Expr:
    """Return the conversion of a value that a store to ``buffer`` makes."""
    if value.type is buffer.type and not buffer.flush_subnormal and not buffer.saturate:
        return value
    return ir.Cast(value, buffer.type, buffer.saturate, buffer.flush_subnormal)


@dataclass
class _StatementLowering:
    """Lowers one projected statement."""

    program: SolvedProgram
    projected: Projected
    comment: str
    storage: _Storage
    scalars: Scalars
    numerics: Numerics
    backend: str
    exprs: ExprLowering = field(init=False)
    iterators: dict[ProjectedIterator, ir.BlockIterator] = field(init=False)

    def __post_init__(self) -> None:
        self.statement = self.projected.statement
        symbols = {item: ir.Symbol(item.name, i64) for item in self.projected.iterators}
        self.exprs = ExprLowering(
            self.program,
            self.projected,
            symbols,
            self.scalars,
            self.storage.of,
            self.storage.view,
            self.numerics,
            self.backend,
        )
        self.iterators = {
            item: ir.BlockIterator(
                symbols[item],
                self.scalars.extent(item.extent),
                item.extent if isinstance(item.extent, int) else item.extent.max,
                "reduce" if item.reduce else "data",
            )
            for item in self.projected.iterators
        }
        self.target = self.storage.of(self.statement.target.node)
        self.indices = tuple(self.exprs.index(item) for item in self.projected.target)
        self.guard = self.exprs.guard()

    # -- the forms of a statement ---------------------------------------------------------------------------------
    def blocks(self) -> list[ir.Block]:
        """Return the blocks of the statement, in order."""
        statement = self.statement
        self._refuse_extremum_of_nothing()
        if self.projected.scatter:
            return self._scatter()
        if statement.op is None:
            block = self._set()
        elif statement.op in ("argmax", "argmin"):
            block = self._paired(statement.op)
        elif self._reduces() or self.guard is not None:
            block = self._reduction(statement.op)
        else:
            block = self._pointwise(statement.op)
        return self._apart_from_reads(block)

    def _refuse_extremum_of_nothing(self) -> None:
        """A maximum over no cells is no number; inside a composite (softmax) such a row has no cells to give it to."""
        statement = self.statement
        if statement.op not in ("max", "min", "argmax", "argmin") or statement.stage is not tree.Stage.FORWARD:
            return
        extents = {
            kind: [item.extent for item in self.projected.iterators if item.reduce is kind] for kind in (True, False)
        }
        if 0 in extents[True] and 0 not in extents[False] and statement.scope.result.composite is None:
            raise ShapeError(
                f"{statement.scope.label} over an axis of size 0 has no value, for {statement.target.node.label!r}\n"
                f"  {statement.scope.source.quoted()}\n  give the axis at least one cell, or handle the empty case apart"
            )

    def _apart_from_reads(self, block: ir.Block) -> list[ir.Block]:
        """Where the target is also read at other cells, compute into a scratch buffer first and copy afterwards."""
        elsewhere = any(load.buffer is self.target and load.indices != self.indices for load in loads(block))
        if not elsewhere:
            return [block]
        cells = self.storage.scratch(self.target, self.target.type)
        (store,) = block.stores
        copied = replace(
            self._block((ir.Store(self.target, self.indices, ir.Load(cells, self.indices)),), iterators=block.data),
            guard=None if block.accumulators else self.guard,
        )
        return [replace(block, stores=(replace(store, buffer=cells),)), fresh_copy(copied)]

    def _reduces(self) -> bool:
        return any(item.reduce for item in self.projected.iterators)

    def _set(self) -> ir.Block:
        for item in self.projected.iterators:
            if item.reduce and item.extent != 1:
                raise InternalError(f"{self.statement.text}: a set reduces axis {item.name} of extent {item.extent}")
        value = self._converted(self.statement.expr)
        return self._block((ir.Store(self.target, self.indices, value),), iterators=self._as_data())

    def _pointwise(self, op: str) -> ir.Block:
        """Accumulate without a reduction: the value is rounded, then combined, then stored."""
        prec = self._compute()
        value = self._combined(op, self._start(op, prec), self.exprs.lower(self.statement.expr, prec))
        return self._block((ir.Store(self.target, self.indices, stored(value, self.target)),))

    def _reduction(self, op: str) -> ir.Block:
        prec = self._accumulate()
        accumulator = ir.Symbol("acc", prec)
        update = self._step(op, ir.Var(accumulator), prec)
        combine = COMBINE[op]
        if self._rounds_each_step():
            update, combine = cast(ir.Cast(update, self.target.type), prec), ""
        state = ir.Accumulator(
            accumulator,
            self._start(op, prec),
            update,
            combine,
            _neutral(combine, prec) if combine else None,
        )
        store = ir.Store(self.target, self.indices, stored(ir.Var(accumulator), self.target))
        return self._block((store,), (state,))

    def _paired(self, op: str) -> ir.Block:
        """The position of the greatest (least) value: NaN wins, then the lowest position."""
        if not self.statement.reset:
            raise InternalError(f"{self.statement.text}: {op} cannot continue from an earlier position")
        prec = self._operand_type()
        value = self.exprs.lower(self.statement.expr, prec)
        best, position = ir.Symbol("best", prec), ir.Symbol("position", i32)
        held = ir.Var(best)
        wins: ir.Expr = ir.Apply("gt" if op == "argmax" else "lt", (value, held), prec)
        if prec.is_float:
            is_nan = ir.Apply("ne", (value, value), prec)
            had_number = ir.Apply("eq", (held, held), prec)
            wins = ir.Apply("or", (wins, ir.Apply("and", (is_nan, had_number), prec)), prec)
        combine, here = COMBINE[op], ir.Cast(self._reduce_position(), i32)
        states = (
            ir.Accumulator(
                position,
                ir.Const(0, i32),
                ir.Apply("where", (wins, here, ir.Var(position)), i32),
                combine,
                ir.Const(0, i32),
                paired_with=best,
            ),
            ir.Accumulator(
                best,
                _neutral(combine, prec),
                ir.Apply(REDUCTIONS[op].combine, (held, value), prec),
                combine,
                _neutral(combine, prec),
            ),
        )
        store = ir.Store(self.target, self.indices, stored(ir.Var(position), self.target))
        return self._block((store,), states)

    def _scatter(self) -> list[ir.Block]:
        """Points of one cell come apart: accumulate in memory, point by point, and round once at the end."""
        statement, target = self.statement, self.target
        if statement.op is None:
            value = self._converted(statement.expr)
            return [
                self._block((ir.Store(target, self.indices, value),), iterators=self._scatter_order(), scatter=True)
            ]
        if statement.op in ("argmax", "argmin"):
            raise InternalError(f"{statement.text}: {statement.op} cannot write to gathered positions")
        prec = self._accumulate()
        through_scratch = target.type is not prec or target.flush_subnormal
        cells = self.storage.scratch(target, prec) if through_scratch else target
        blocks = []
        if statement.reset or through_scratch:
            blocks.append(self._whole(cells, None if statement.reset else target, statement.op, f"{target.name}.start"))
        value = self._step(statement.op, ir.Load(cells, self.indices), prec)
        if self._rounds_each_step():
            value = cast(ir.Cast(value, target.type), prec)
        store = ir.Store(cells, self.indices, value)
        blocks.append(self._block((store,), iterators=self._scatter_order(), scatter=True))
        if through_scratch:
            blocks.append(self._whole(target, cells, statement.op, f"{target.name}.round"))
        return blocks

    # -- pieces ---------------------------------------------------------------------------------------------------
    def _converted(self, expr: tree.Expr) -> ir.Expr:
        """The stored value of a set. A plain copy converts once, from format to format."""
        while isinstance(expr, tree.Apply) and expr.op == "identity":
            (expr,) = expr.args
        if isinstance(expr, tree.Access):
            return stored(self.exprs.stored(expr), self.target)
        return stored(self.exprs.lower(expr, self._compute()), self.target)

    def _step(self, op: str, state: ir.Expr, prec: Prec) -> ir.Expr:
        """Combine a running state with the value of one point; a product is fused into its sum (f32 only)."""
        expr, compute = self.statement.expr, self._compute()
        product = isinstance(expr, tree.Apply) and expr.op == "mul"
        if product and prec is compute is f32 and op in ("add", "sub") and (self._reduces() or self.projected.scatter):
            left, right = (self.exprs.lower(arg, compute) for arg in expr.args)  # type: ignore[union-attr]
            if op == "sub":
                left = ir.Apply("neg", (left,), compute)
            return ir.Fma(left, right, state)
        return self._combined(op, state, cast(self.exprs.lower(expr, compute), prec))

    def _combined(self, op: str, state: ir.Expr, value: ir.Expr) -> ir.Expr:
        return ir.Apply(REDUCTIONS[op].combine, (state, value), state.type)

    def _start(self, op: str, prec: Prec) -> ir.Expr:
        """The state before the first point: the neutral element, or what the target holds."""
        if self.statement.reset:
            return _neutral(op, prec)
        return cast(ir.Load(self.target, self.indices), prec)

    def _rounds_each_step(self) -> bool:
        return self.numerics.accumulate == "storage" and self.target.type.is_narrow

    def _precs(self) -> tuple[Prec, ...]:
        expr = self.statement.expr
        operands = value_precs(expr, self.program.prec)
        compares = isinstance(expr, tree.Apply) and OPS[expr.op].op_class == "comparison"
        return operands if operands and compares and self.statement.op is None else (*operands, self.target.type)

    def _compute(self) -> Prec:
        return compute_prec(arithmetic(join(*self._precs())), self.numerics, self.backend)

    def _operand_type(self) -> Prec:
        return self.exprs.own_type(self.statement.expr, f32)

    def _accumulate(self) -> Prec:
        expr = self.statement.expr
        contraction = isinstance(expr, tree.Apply) and expr.op == "mul"
        prec = arithmetic(join(*self._precs()))
        if self._rounds_each_step():  # the state is f32 that is rounded to the target's format at each step
            return compute_prec(prec, self.numerics, self.backend)
        return accum_prec(prec, self.numerics, self.backend, contraction=contraction)

    def _reduce_position(self) -> ir.Expr:
        """The row-major position over the reduce iterators."""
        position: ir.Expr | None = None
        for item, iterator in self.iterators.items():
            if item.reduce:
                here = ir.Var(iterator.symbol)
                position = (
                    here
                    if position is None
                    else ir.Apply("add", (ir.Apply("mul", (position, iterator.extent), i64), here), i64)
                )
        return position or ir.index(0)

    def _whole(self, target: ir.Buffer, source: ir.Buffer | None, op: str, name: str) -> ir.Block:
        """Fill all of ``target`` with the neutral element of ``op`` or with the converted cells of ``source``."""
        iterators = tuple(
            ir.BlockIterator(ir.Symbol(f"c{axis}", i64), ir.index(size), size) for axis, size in enumerate(target.shape)
        )
        cell = tuple(ir.Var(item.symbol) for item in iterators)
        value = _neutral(op, target.type) if source is None else stored(ir.Load(source, cell), target)
        return ir.Block(kernel_name([name]), iterators, (ir.Store(target, cell, value),), origins=(self._origin(),))

    # -- iterators ------------------------------------------------------------------------------------------------
    def _as_data(self) -> tuple[ir.BlockIterator, ...]:
        """All iterators as data: for sets, whose reduce iterators have extent 1."""
        return tuple(ir.BlockIterator(item.symbol, item.extent, item.bound) for item in self.iterators.values())

    def _scatter_order(self) -> tuple[ir.BlockIterator, ...]:
        """Iterators that own an axis of the target are data, outermost; the points of one cell follow in order."""
        uses: dict[ProjectedIterator, int] = {}
        owned: set[ProjectedIterator] = set()
        for index in self.projected.target:
            for item in iterators_of(index):
                uses[item] = uses.get(item, 0) + 1
            if isinstance(index, IndexIter):
                owned.add(index.iterator)
        ordered: dict[str, list[ir.BlockIterator]] = {"data": [], "reduce": []}
        for item, iterator in self.iterators.items():
            kind: ir.IteratorKind = "data" if item in owned and uses[item] == 1 else "reduce"
            ordered[kind].append(ir.BlockIterator(iterator.symbol, iterator.extent, iterator.bound, kind))
        return (*ordered["data"], *ordered["reduce"])

    def _block(
        self,
        stores: tuple[ir.Store, ...],
        accumulators: tuple[ir.Accumulator, ...] = (),
        iterators: tuple[ir.BlockIterator, ...] | None = None,
        scatter: bool = False,
    ) -> ir.Block:
        composite = self.statement.target.node.composite
        return ir.Block(
            kernel_name([self.target.name]),
            tuple(self.iterators.values()) if iterators is None else iterators,
            stores,
            accumulators,
            guard=self.guard,
            scatter=scatter,
            origins=(self._origin(),),
            composite=composite.name if composite is not None else "",
        )

    def _origin(self) -> ir.Origin:
        statement = self.statement
        return ir.Origin(statement.text, str(statement.source or statement.scope.source), self.comment)


def _neutral(op: str, prec: Prec) -> ir.Const:
    """The neutral element of a write op; integers have the ends of their range for max and min."""
    value = REDUCTIONS[op].neutral
    if value in (float("inf"), float("-inf")) and not (prec.is_float and prec.has_inf):
        return ir.Const(prec.max_finite if value > 0 else prec.min_finite, prec)
    return constant(value if prec.is_float else int(value), prec)
