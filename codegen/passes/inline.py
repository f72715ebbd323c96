"""Inlining: values that need no buffer are computed where they are read, with the rounding of their format kept.

In: a module, one block per kernel. Out: the module without the kernels of virtual values. A read ``t[i]`` becomes the
stored value ``bf16(...)`` itself, so the rounding is that of a buffer::

    t[i] <- bf16(a[i] + 1.0)
    y[j, k] <- f32(t[k]) * b[j, k]   ->   y[j, k] <- f32(bf16(a[k] + 1.0)) * b[j, k]

A value read several times at one point is named by a let there, and so is one of many nested parts. ``place`` says
which values are virtual.
"""

from __future__ import annotations

from stagedtensor.codegen import loop_ir as ir
from stagedtensor.codegen.effects import block_of, is_deep, kernel_of, loads_of, with_kernels
from stagedtensor.codegen.passes.place import (
    Item,
    Mode,
    Report,
    Touched,
    decide,
    is_view,
    point_expressions,
    substitution,
)
from stagedtensor.codegen.passes.simplify import simplify_block
from stagedtensor.codegen.pieces import replace
from stagedtensor.codegen.rewrite import Rewriter, substitute


def inline(module: ir.Module, report: Report | None = None) -> ir.Module:
    """Inline every virtual value of the module; ``report`` takes the decisions.

    Views go first: who reads a copy is then a reader of what was copied, and counts where that is placed.
    """
    temporaries = frozenset(module.temporaries)
    items = [Item.of(block_of(kernel)) for kernel in module.kernels]
    touched = Touched(items)
    removed: set[int] = set()
    for views in (True, False):
        for position in range(len(items)):
            if position in removed or (views and not is_view(items[position].block)):
                continue
            target = items[position].block.stores[0].buffer
            decision, uses = decide(items, position, temporaries, touched)
            if decision.mode is Mode.VIRTUAL:
                for use in uses:
                    items[use] = Item.of(simplify_block(with_value(items[use].block, items[position].block)))
                    touched.note(use, items[use])
                removed.add(position)
                items[position] = Item.of(replace(items[position].block, stores=(), lets=()))
            if report is not None and target in temporaries:
                report.note(target, decision)
    kept = (kernel_of(item.block) for position, item in enumerate(items) if position not in removed)
    return with_kernels(module, kept)


def with_value(reader: ir.Block, definition: ir.Block) -> ir.Block:
    """Return ``reader`` with its reads of the buffer that ``definition`` writes replaced by the value written."""
    return _Inliner(reader, definition).result()


class _Inliner(Rewriter):
    """Rewrites the parts of a reader. Lets are in scope where a point is computed, not in starts, guards and indices."""

    def __init__(self, reader: ir.Block, definition: ir.Block) -> None:
        self.reader = reader
        self.definition = definition
        self.written = definition.stores[0]
        self.lets: list[ir.Let] = []
        self.values: dict[ir.Load, ir.Expr] = {}
        self.repeated: frozenset[ir.Load] = frozenset()
        self.in_point = False
        self.is_deep = is_deep(self.written.value)

    def result(self) -> ir.Block:
        reader = self.reader
        # Where there are reduce iterators, lets belong to the reduce points and stores do not see them.
        stores_are_points = not reader.reduce
        self.repeated = self._repeated(stores_are_points)
        self.in_point = True
        lets = tuple(self.let(item) for item in reader.lets)
        updates = tuple(self.expr(item.update) for item in reader.accumulators)
        self.in_point = stores_are_points
        stores = tuple(self.store(item) for item in reader.stores)
        self.in_point = False
        accumulators = tuple(
            replace(item, init=self.expr(item.init), update=update)
            for item, update in zip(reader.accumulators, updates, strict=True)
        )
        return replace(
            reader,
            lets=(*self.lets, *lets),
            accumulators=accumulators,
            stores=stores,
            guard=None if reader.guard is None else self.expr(reader.guard),
            origins=tuple(dict.fromkeys((*self.definition.origins, *reader.origins))),
        )

    def _repeated(self, stores_are_points: bool) -> frozenset[ir.Load]:
        """The reads that stand more than once in the scope of lets, if there is something to compute."""
        if not any(isinstance(part, ir.Apply | ir.Fma) for part in ir.walk(self.written.value)):
            return frozenset()
        exprs = [*point_expressions(self.reader)]
        if stores_are_points:
            exprs += [store.value for store in self.reader.stores]
        counts: dict[ir.Load, int] = {}
        for expr in exprs:
            for load in loads_of(expr):
                if load.buffer is self.written.buffer:
                    counts[load] = counts.get(load, 0) + 1
        return frozenset(load for load, count in counts.items() if count > 1)

    def store(self, store: ir.Store) -> ir.Store:
        value = self.expr(store.value)
        kept, self.in_point = self.in_point, False
        indices = self.exprs(store.indices)
        self.in_point = kept
        return ir.Store(store.buffer, indices, value)

    def expr(self, expr: ir.Expr) -> ir.Expr:
        if not isinstance(expr, ir.Load) or expr.buffer is not self.written.buffer:
            return super().expr(expr)
        if not self.in_point:
            return self._value(expr, named=False)
        if expr not in self.values:
            value = self._value(expr, named=True)
            if expr in self.repeated or self.is_deep:
                symbol = ir.Symbol(expr.buffer.name, expr.buffer.type)
                self.lets.append(ir.Let(symbol, value))
                value = ir.Var(symbol)
            self.values[expr] = value
        return self.values[expr]

    def _value(self, use: ir.Load, named: bool) -> ir.Expr:
        """The value at one use; the definition's own lets come along, or are expanded where there is no place for them."""
        here = substitution(self.written, ir.Load(use.buffer, self.exprs(use.indices)))
        for let in self.definition.lets:
            value = substitute(let.value, here)
            if named:
                symbol = ir.Symbol(let.symbol.hint, let.symbol.type)
                self.lets.append(ir.Let(symbol, value))
                value = ir.Var(symbol)
            here[let.symbol] = value
        return substitute(self.written.value, here)
