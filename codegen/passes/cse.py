"""Common subexpressions of one block: computed once, named by a let.

In: blocks. Out: blocks in which every value that stands twice at one point is a let. A load counts as a value, and
never moves past a store to its buffer: a load in a let that such a store precedes stays a let. Values that depend on
accumulators, indices that memory does not decide, and scatter blocks stay as they are::

    y[i] <- (x[i] + 1.0) * (x[i] + 1.0)   ->   let v = x[i] + 1.0; y[i] <- v * v
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias

from stagedtensor.codegen import loop_ir as ir
from stagedtensor.codegen.effects import is_deep, loads_of, map_blocks
from stagedtensor.op_table import OPS

Key: TypeAlias = tuple[object, ...]


def cse(module: ir.Module) -> ir.Module:
    """Share common subexpressions within every block of the module."""
    return map_blocks(module, cse_block)


def cse_block(block: ir.Block) -> ir.Block:
    """Share common subexpressions within one block."""
    if block.scatter or (block.accumulators and not block.reduce) or _reads_back(block):
        return block
    table = _Table({item.symbol for item in block.accumulators})
    for let in block.lets:
        table.define(let.symbol, let.value)
    updates = [table.root(item.update) for item in block.accumulators]
    # With reduce iterators the lets belong to the reduce points; the stores do not see them.
    stores_are_points = not block.reduce
    stores = [table.root(store.value) for store in block.stores] if stores_are_points else []
    overwritten: set[ir.Buffer] = set()
    for store, number in zip(block.stores, stores, strict=False):
        table.pin_loads(number, overwritten)
        overwritten.add(store.buffer)
    table.rebuild_deep()
    accumulators = tuple(
        replace(item, update=table.rebuilt(number)) for item, number in zip(block.accumulators, updates, strict=True)
    )
    values: Iterable[ir.Expr] = (
        [table.rebuilt(number) for number in stores] if stores_are_points else [store.value for store in block.stores]
    )
    return replace(
        block,
        accumulators=accumulators,
        stores=tuple(replace(store, value=value) for store, value in zip(block.stores, values, strict=True)),
        lets=tuple(table.lets),
    )


def _reads_back(block: ir.Block) -> bool:
    """Whether a store reads, itself and not by a let, what an earlier store of the point wrote."""
    written: set[ir.Buffer] = set()
    for store in block.stores:
        if any(load.buffer in written for expr in (*store.indices, store.value) for load in loads_of(expr)):
            return True
        written.add(store.buffer)
    return False


@dataclass
class _Value:
    """One distinct value: its expression with numbered parts."""

    expr: ir.Expr
    parts: tuple[int, ...]
    carries: bool
    """Depends on an accumulator."""
    loads: bool
    hint: str
    uses: int = 0
    """How often it is used as a value (not merely to index memory)."""
    index_uses: int = 0
    pinned: bool = False
    """A load that must happen before the stores."""
    name: ir.Var | None = None


class _Table:
    """Numbers the values of a block, counts their uses, and rebuilds expressions with lets."""

    def __init__(self, carried: set[ir.Symbol]) -> None:
        self.carried = carried
        self.values: list[_Value] = []
        self.numbers: dict[Key, int] = {}
        self.named: dict[ir.Symbol, int] = {}
        self.lets: list[ir.Let] = []
        self.deep: dict[int, None] = {}

    def define(self, symbol: ir.Symbol, value: ir.Expr) -> None:
        """Note an existing let; its value counts only where it is used."""
        number = self._number(value)
        self.named[symbol] = number
        if is_deep(value):
            self.deep[number] = None
        if self.values[number].hint == "v":
            self.values[number].hint = symbol.hint

    def root(self, expr: ir.Expr) -> int:
        """Number an expression of the block and count it as used once."""
        number = self._number(expr)
        self._count(number, False)
        return number

    def _number(self, expr: ir.Expr) -> int:
        if isinstance(expr, ir.Var) and expr.symbol in self.named:
            return self.named[expr.symbol]
        parts = tuple(self._number(part) for part in ir.children(expr))
        key = _key(expr, parts)
        if key in self.numbers:
            return self.numbers[key]
        children = [self.values[part] for part in parts]
        carries = any(child.carries for child in children) or (isinstance(expr, ir.Var) and expr.symbol in self.carried)
        loads = isinstance(expr, ir.Load) or any(child.loads for child in children)
        self.values.append(_Value(expr, parts, carries, loads, _hint(expr)))
        self.numbers[key] = len(self.values) - 1
        return len(self.values) - 1

    def _count(self, number: int, indexing: bool) -> None:
        pending = [(number, indexing)]
        while pending:
            number, indexing = pending.pop()
            value = self.values[number]
            first = value.uses + value.index_uses == 0
            if indexing:
                value.index_uses += 1
            else:
                value.uses += 1
            if first:
                inside = indexing or isinstance(value.expr, ir.Load)
                pending.extend((part, inside) for part in value.parts)

    def pin_loads(self, number: int, overwritten: set[ir.Buffer]) -> None:
        """Keep the loads of ``overwritten`` that a value is made of in lets, which come before all stores."""
        pending, seen = [number] if overwritten else [], set[int]()
        while pending:
            number = pending.pop()
            if number in seen:
                continue
            seen.add(number)
            value = self.values[number]
            value.pinned = value.pinned or (isinstance(value.expr, ir.Load) and value.expr.buffer in overwritten)
            pending.extend(value.parts)

    def rebuild_deep(self) -> None:
        """Rebuild the lets that keep expressions from nesting too deep, those before first."""
        for number in self.deep:
            if self.values[number].uses:
                self.rebuilt(number)

    def _is_shared(self, number: int) -> bool:
        value = self.values[number]
        if number in self.deep or value.pinned:
            return True
        if value.carries or isinstance(value.expr, ir.Const | ir.Var):
            return False
        if isinstance(value.expr, ir.Cast) and isinstance(value.expr.arg, ir.Const):
            return False
        if not value.loads and value.uses == 0:
            return False
        return value.uses + value.index_uses > 1

    def rebuilt(self, number: int) -> ir.Expr:
        """Return the expression of a value, naming what is shared on the way."""
        value = self.values[number]
        if value.name is not None:
            return value.name
        parts = tuple(self.rebuilt(part) for part in value.parts)
        expr = ir.with_children(value.expr, parts)
        if not self._is_shared(number):
            return expr
        symbol = ir.Symbol(value.hint, expr.type)
        self.lets.append(ir.Let(symbol, expr))
        value.name = ir.Var(symbol)
        return value.name


def _key(expr: ir.Expr, parts: tuple[int, ...]) -> Key:
    match expr:
        case ir.Const(value, prec):
            return "const", repr(value), prec
        case ir.Var(symbol):
            return "var", symbol
        case ir.Load(buffer):
            return "load", buffer, *parts
        case ir.Cast(_, prec, saturate, flush):
            return "cast", prec, saturate, flush, *parts
        case ir.Apply(op, _, prec):
            return "apply", op, prec, *parts
        case ir.Fma():
            return "fma", *parts


def _hint(expr: ir.Expr) -> str:
    match expr:
        case ir.Load(buffer):
            return buffer.name
        case ir.Cast(arg):
            return _hint(arg)
        case ir.Apply(op) if OPS[op].op_class == "comparison":
            return "test"
        case _:
            return "v"
