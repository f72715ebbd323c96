"""What a block's accesses look like to a schedule: strides, operands of a contraction, work.

In: a block. Out: strides per iterator, the two operands of a multiply-add, cost. Decides nothing.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

from stagedtensor.codegen.affine import cell_of, constant
from stagedtensor.codegen.effects import is_deep
from stagedtensor.codegen.loop_ir import (
    Apply,
    Block,
    BlockIterator,
    Cost,
    Expr,
    Fma,
    For,
    Let,
    Load,
    Stmt,
    Symbol,
    Var,
    index,
    walk,
)
from stagedtensor.codegen.rewrite import expressions as parts_of, map_stmts, substitute, symbols_of, walk_stmts
from stagedtensor.codegen.schedule.nest import expressions, inline_lets, loads_in, rename

_PLACES_BYTES, _WAYS = 1 << 12, 8  # of first caches of 32 KiB; larger ones have more ways
# Operations per call of the prelude's functions, roughly: their polynomials' lengths.
_HEAVY = {
    "exp": 15, "exp2": 15, "log": 20, "log2": 20, "tanh": 25, "sigmoid": 20, "erf": 30, "erfc": 50, "sin": 40, "cos": 40, "pow": 60,
    "div": 4, "sqrt": 4, "rsqrt": 8, "recip": 4, "mod": 8, "floordiv": 8, "random_uniform": 100, "random_normal": 160,
}  # fmt: skip


def flops_per_point(*exprs: Expr) -> int:
    """Return the operations of evaluating ``exprs`` once; index arithmetic is free."""
    count = 0
    for expr in exprs:
        for part in walk(expr):
            if isinstance(part, Fma):
                count += 2
            elif isinstance(part, Apply) and part.type.name != "i64":
                count += _HEAVY.get(part.op, 1)
    return count


def points(iterators: tuple[BlockIterator, ...]) -> int:
    """Return how many points the iterators walk at most."""
    total = 1
    for item in iterators:
        total *= item.bound
    return total


def cost_of(block: Block) -> Cost:
    """Return operations and least bytes of a block: every cell it may touch once, at its own width."""
    every, once = points(block.iterators), points(block.data)
    per_step = [let.value for let in block.lets] + [item.update for item in block.accumulators]
    if block.scatter or not block.reduce:
        per_step += [store.value for store in block.stores]
        flops = every * flops_per_point(*per_step)
    else:
        flops = every * flops_per_point(*per_step) + once * flops_per_point(*(store.value for store in block.stores))
    touched: dict[object, int] = {}
    for load in loads_in(*expressions(block)):
        touched[load.buffer] = min(load.buffer.nbytes, every * load.buffer.type.bytes)
    writes: dict[object, int] = {}
    for store in block.stores:
        writes[store.buffer] = min(store.buffer.nbytes, every * store.buffer.type.bytes)
    return Cost(flops, sum(touched.values()) + sum(writes.values()))


def stride(load: Load, symbol: Symbol) -> int | None:
    """Return how many cells one step of ``symbol`` moves a load; None where that is not constant."""
    return cell_of(load).coefficient(symbol)


@dataclass(frozen=True)
class Contraction:
    """One accumulator ``acc + lhs * rhs`` with the lets written out; ``block`` is the block without lets."""

    block: Block
    lhs: Expr
    rhs: Expr


def contraction(block: Block) -> Contraction | None:
    """Recognise a multiply-add reduction whose operands depend on different data iterators."""
    if len(block.accumulators) != 1 or block.scatter or not block.reduce:
        return None
    (item,) = block.accumulators
    update = inline_lets(block, item.update)
    operands = _operands(update, item.symbol)
    if operands is None:
        return None
    plain = replace(block, lets=(), accumulators=(replace(item, update=update),))
    if block.guard is not None:
        plain = replace(plain, guard=inline_lets(block, block.guard))
    return Contraction(plain, *operands)


def _operands(update: Expr, accumulator: Symbol) -> tuple[Expr, Expr] | None:
    state = Var(accumulator)
    product: Expr | None = None
    if isinstance(update, Fma) and update.c == state:
        return update.a, update.b
    if isinstance(update, Apply) and update.op in ("add", "sub") and update.args[0] == state:
        product = update.args[1]
    if isinstance(product, Apply) and product.op == "mul":
        return product.args[0], product.args[1]
    return None


def displace_each_other(rows: int, nbytes: int) -> bool:
    """Tell whether cells ``nbytes`` apart, one of each of ``rows`` rows, do not fit into the first cache together.

    Lines whose addresses differ by a multiple of 4 KiB share a place there, which holds 8 of them.
    """
    return rows > _WAYS * (_PLACES_BYTES // math.gcd(nbytes, _PLACES_BYTES))


def depends(expr: Expr, iterator: BlockIterator) -> bool:
    """Tell whether ``expr`` reads the iterator."""
    return iterator.symbol in symbols_of(expr)


def reads_every_cell(operand: Expr, block: Block) -> bool:
    """Tell whether ``operand`` is there at every point: a guard that skips points is no reason for it."""
    bounds = {Var(item.symbol): item.bound for item in block.iterators if constant(item.extent) == item.bound}
    return all(
        constant(part) == 0 or (isinstance(part, Var) and bounds.get(part, extent + 1) <= extent)
        for load in loads_in(operand)
        for part, extent in zip(load.indices, load.buffer.shape, strict=True)
    )


def without_single_lets(block: Block) -> Block:
    """Write out lets that are read once, unless they nest deep: templates then see the whole expression."""
    uses: dict[Symbol, int] = {}
    for expr in expressions(block):
        for part in walk(expr):
            if isinstance(part, Var):
                uses[part.symbol] = uses.get(part.symbol, 0) + 1
    values: dict[Symbol, Expr] = {}
    kept: list[Let] = []
    # a load in a let comes before the stores; written out in a store it would come after those before
    overwritten = {store.buffer for store in block.stores[:-1]}
    for let in block.lets:
        value = substitute(let.value, values)
        if (
            uses.get(let.symbol, 0) <= 1
            and not is_deep(value)
            and not overwritten & {load.buffer for load in loads_in(value)}
        ):
            values[let.symbol] = value
        else:
            kept.append(Let(let.symbol, value))
    if not values:
        return block
    return replace(rename(replace(block, lets=()), values), lets=tuple(kept))


def prune(body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    """Drop lets that nothing reads."""
    while True:
        read = {symbol for stmt in walk_stmts(body) for expr in parts_of(stmt) for symbol in symbols_of(expr)}
        bound = {stmt.symbol for stmt in walk_stmts(body) if isinstance(stmt, Let)}
        if bound <= read:
            return body
        body = map_stmts(body, functools.partial(_unless_dead, bound - read))


def without_trivial_loops(body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    """Write out loops of one iteration and drop those of none; a loop over threads stays, for it is what splits work."""
    return map_stmts(body, _written_out)


def _written_out(stmt: Stmt) -> Stmt | tuple[Stmt, ...]:
    if not isinstance(stmt, For) or stmt.kind == "parallel":
        return stmt
    extent = constant(stmt.iterator.extent)
    if extent == 0:
        return ()
    return substitute(stmt.body, {stmt.iterator.symbol: index(0)}) if extent == 1 else stmt


def _unless_dead(dead: set[Symbol], stmt: Stmt) -> Stmt | tuple[Stmt, ...]:
    return () if isinstance(stmt, Let) and stmt.symbol in dead else stmt
