"""Pieces that every schedule template is made of: loops, fresh copies of a block's work, collapsed iterators.

In: a Block and a choice of index expressions for its iterators. Out: statements. Every copy has its own symbols, so a
main loop and its tail never bind the same one. Takes no decision.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from stagedtensor.codegen.affine import (
    Affine,
    as_index,
    cell_of,
    constant,
    floor_divide,
    modulo,
)
from stagedtensor.codegen.loop_ir import (
    Accumulator,
    Apply,
    Block,
    BlockIterator,
    Buffer,
    Expr,
    For,
    If,
    Let,
    Load,
    LoopKind,
    Stmt,
    Store,
    Symbol,
    Var,
    children,
    walk,
)
from stagedtensor.codegen.pieces import remembered, replace
from stagedtensor.codegen.rewrite import substitute, symbols_of
from stagedtensor.precision import i64


def fresh(symbol: Symbol) -> Symbol:
    """Return a new symbol of the same hint and type."""
    return Symbol(symbol.hint, symbol.type)


def index_symbol(hint: str) -> Symbol:
    """Return a new index variable."""
    return Symbol(hint, i64)


def loop(symbol: Symbol, extent: int | Expr, body: Sequence[Stmt], kind: LoopKind = "serial", bound: int = 0) -> For:
    """Return a loop of ``symbol`` over ``0 .. extent-1``; ``bound`` is the maximum of a symbolic extent."""
    expr = as_index(extent)
    value = constant(expr)
    return For(BlockIterator(symbol, expr, bound if value is None else value), tuple(body), kind)


def nest(
    iterators: Iterable[BlockIterator], body: Sequence[Stmt], kinds: Mapping[Symbol, LoopKind]
) -> tuple[Stmt, ...]:
    """Return ``body`` inside one loop per iterator, the first outermost."""
    inner = tuple(body)
    for item in reversed(tuple(iterators)):
        inner = (For(replace(item, kind="data"), inner, kinds.get(item.symbol, "serial")),)
    return inner


@dataclass(frozen=True)
class Point:
    """The work of one point: conditions that must hold, lets, and the substitution under which it was made."""

    lets: tuple[Let, ...]
    guard: Expr | None
    mapping: dict[Symbol, Expr]

    def wrap(self, body: Sequence[Stmt]) -> tuple[Stmt, ...]:
        """Return ``body`` behind the lets and the guard; a skipped point evaluates only what the guard itself reads."""
        if self.guard is None:
            return (*self.lets, *body)
        needed = set(symbols_of(self.guard))
        early: list[Let] = []
        for let in reversed(self.lets):
            if let.symbol in needed:
                early.insert(0, let)
                needed.update(symbols_of(let.value))
        late = tuple(let for let in self.lets if let not in early)
        return (*early, If(self.guard, (*late, *body)))


def point(block: Block, mapping: Mapping[Symbol, Expr]) -> Point:
    """Return a fresh copy of the lets and the guard of ``block`` under ``mapping``."""
    extended = dict(mapping)
    lets: list[Let] = []
    for let in block.lets:
        symbol = fresh(let.symbol)
        lets.append(Let(symbol, substitute(let.value, extended)))
        extended[let.symbol] = Var(symbol)
    guard = None if block.guard is None else substitute(block.guard, extended)
    return Point(tuple(lets), guard, extended)


def stores(block: Block, mapping: Mapping[Symbol, Expr]) -> tuple[Store, ...]:
    """Return the stores of ``block`` under ``mapping``."""
    return tuple(
        Store(
            store.buffer,
            tuple(substitute(part, mapping) for part in store.indices),
            substitute(store.value, mapping),
        )
        for store in block.stores
    )


def expressions(block: Block) -> tuple[Expr, ...]:
    """Return every expression of a block's work, the stores' indices included."""
    found: list[Expr] = [let.value for let in block.lets]
    if block.guard is not None:
        found.append(block.guard)
    for accumulator in block.accumulators:
        found += (accumulator.init, accumulator.update)
    for store in block.stores:
        found += (*store.indices, store.value)
    return tuple(found)


def loads_in(*exprs: Expr) -> tuple[Load, ...]:
    """Return the loads of ``exprs`` in order, those of index expressions included."""
    return tuple(part for expr in exprs for part in walk(expr) if isinstance(part, Load))


def inline_lets(block: Block, expr: Expr) -> Expr:
    """Return ``expr`` with the block's lets written out: what it really depends on."""
    values: dict[Symbol, Expr] = {}
    for let in block.lets:
        values[let.symbol] = substitute(let.value, values)
    return substitute(expr, values)


@remembered
def accesses(block: Block) -> tuple[tuple[Buffer, Affine], ...]:
    """Return every cell a block reads or writes, as buffer and flat index."""
    found = [(load.buffer, cell_of(load)) for load in loads_in(*expressions(block))]
    found += [(store.buffer, cell_of(store)) for store in block.stores]
    return tuple(found)


_UNEVEN = 9 / 8


def to_threads(iterators: Sequence[BlockIterator]) -> BlockIterator:
    """Return the iterator whose steps are dealt out to threads: the first long enough, and even enough for two of them."""
    for item in iterators:
        if item.bound >= 4 and -(-item.bound // 2) * 2 <= _UNEVEN * item.bound:
            return item
    return max(iterators, key=lambda item: item.bound)


# -- collapsing ---------------------------------------------------------------------------------------------------


def collapse(block: Block) -> Block:
    """Merge neighbouring iterators of one kind that every access walks as one.

    ``i`` over 32 and ``j`` over 10, both read as ``10*i + j`` everywhere, become one iterator over 320.
    """
    current = block
    position = 0
    while position + 1 < len(current.iterators):
        outer, inner = current.iterators[position : position + 2]
        merged = _merge(current, outer, inner)
        if merged is None:
            position += 1
        else:
            current = merged
            position = max(0, position - 1)
    return current


def _merge(block: Block, outer: BlockIterator, inner: BlockIterator) -> Block | None:
    extent = constant(inner.extent)
    outer_extent = constant(outer.extent)
    if outer.kind != inner.kind or extent is None or outer_extent is None or extent < 1 or outer_extent < 1:
        return None
    if extent == 1 and _unused(block, inner):
        return replace(block, iterators=tuple(item for item in block.iterators if item is not inner))
    if outer_extent == 1 and _unused(block, outer):
        return replace(block, iterators=tuple(item for item in block.iterators if item is not outer))
    for _, flat in accesses(block):
        step = flat.coefficient(inner.symbol)
        outer_step = flat.coefficient(outer.symbol)
        if step is None or outer_step is None or outer_step != step * extent:
            return None
    if not _only_in_indices(block, (outer.symbol, inner.symbol)):
        return None
    hint = f"{outer.symbol.hint}_{inner.symbol.hint.removeprefix('i_')}"
    symbol = index_symbol(hint)
    total = outer_extent * extent
    mapping: dict[Symbol, Expr] = {
        outer.symbol: floor_divide(Var(symbol), extent),
        inner.symbol: modulo(Var(symbol), extent),
    }
    joint = BlockIterator(symbol, as_index(total), total, outer.kind)
    iterators = tuple(joint if item is outer else item for item in block.iterators if item is not inner)
    return replace(rename(block, mapping), iterators=iterators)


def rename(block: Block, mapping: Mapping[Symbol, Expr]) -> Block:
    """Return ``block`` with symbols replaced everywhere but in its iterator list."""
    return replace(
        block,
        lets=tuple(Let(let.symbol, substitute(let.value, mapping)) for let in block.lets),
        guard=None if block.guard is None else substitute(block.guard, mapping),
        accumulators=tuple(
            replace(
                item,
                init=substitute(item.init, mapping),
                update=substitute(item.update, mapping),
                neutral=None if item.neutral is None else substitute(item.neutral, mapping),
            )
            for item in block.accumulators
        ),
        stores=stores(block, mapping),
    )


def _unused(block: Block, iterator: BlockIterator) -> bool:
    return not any(iterator.symbol in symbols_of(expr) for expr in expressions(block))


def _only_in_indices(block: Block, symbols: tuple[Symbol, ...]) -> bool:
    """Tell whether ``symbols`` stand nowhere but in index sums, where collapsing folds away again."""

    def visit(expr: Expr) -> bool:
        if isinstance(expr, Var):
            return expr.symbol not in symbols
        if isinstance(expr, Load):
            # The strides of the access were checked; what an index loads is looked at by itself.
            return all(visit(part) for part in expr.indices if not _plain(part))
        parts = children(expr)
        return all(visit(part) for part in parts)

    values = [*(let.value for let in block.lets), *(store.value for store in block.stores)]
    values += [part for item in block.accumulators for part in (item.init, item.update)]
    if block.guard is not None:
        values.append(block.guard)
    return all(visit(expr) for expr in values)


def _plain(expr: Expr) -> bool:
    return not any(isinstance(part, Load) for part in walk(expr))


# -- partial states -----------------------------------------------------------------------------------------------


def _greater(op: str, lhs: Expr, rhs: Expr) -> Expr:
    return Apply("gt" if op == "maximum" else "lt", (lhs, rhs), lhs.type)


COMBINE = {"add": "add", "sub": "add", "mul": "mul", "div": "mul", "max": "maximum", "min": "minimum", "or": "or"}
"""The scalar op that merges two partial states of a write op: differences add up, quotients multiply."""


def combined(
    accumulators: Sequence[Accumulator], lhs: Mapping[Symbol, Expr], rhs: Mapping[Symbol, Expr]
) -> dict[Symbol, Expr]:
    """Return the merged state of each accumulator, ``lhs`` being the part that comes first.

    A paired accumulator takes the position of the value that wins: the greater (or lesser), NaN before all, the lower
    position at ties.
    """
    by_symbol = {item.symbol: item for item in accumulators}
    merged: dict[Symbol, Expr] = {}
    for item in accumulators:
        symbol = item.symbol
        if item.paired_with is None:
            op = COMBINE.get(item.combine, item.combine)
            merged[symbol] = Apply(op, (lhs[symbol], rhs[symbol]), symbol.type)
            continue
        op = COMBINE.get(by_symbol[item.paired_with].combine, "maximum")
        merged[symbol] = _winner(op, lhs, rhs, item.paired_with, symbol)
    return merged


def _winner(op: str, lhs: Mapping[Symbol, Expr], rhs: Mapping[Symbol, Expr], value: Symbol, position: Symbol) -> Expr:
    left, right, prec = lhs[value], rhs[value], value.type

    def logic(name: str, *args: Expr) -> Expr:
        return Apply(name, args, prec)

    takes = _greater(op, right, left)
    ties = logic("eq", left, right)
    if prec.is_float:
        left_nan, right_nan = logic("ne", left, left), logic("ne", right, right)
        takes = logic("or", takes, logic("and", right_nan, logic("not", left_nan)))
        ties = logic("or", ties, logic("and", left_nan, right_nan))
    lower = Apply("lt", (rhs[position], lhs[position]), position.type)
    takes = logic("or", takes, logic("and", ties, lower))
    return Apply("where", (takes, rhs[position], lhs[position]), position.type)
