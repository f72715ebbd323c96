"""Reduce iterators that a guard keeps to every s-th value run over these values alone.

In: a block, such as the input gradient of a pool or of a convolution with a stride, which asks every point of the
window::

    for k < 3: if (i - k) mod 2 == 0: acc += y[(i - k) // 2]      ->      for t < 2: k = i mod 2 + 2 t: acc += y[i // 2 - t]

Out: the same sums in the same order. An iterator of one value is written out; a block whose reduce iterators are all
gone computes its values at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from stagedtensor.codegen.affine import (
    Affine,
    add,
    affine,
    as_index,
    constant,
    floor_divide,
    modulo,
    multiply,
    subtract,
    to_expr,
)
from stagedtensor.codegen.intervals import Interval, interval
from stagedtensor.codegen.loop_ir import Apply, Block, BlockIterator, Expr, Let, Module, Proc, Symbol, Var, index
from stagedtensor.codegen.rewrite import Rewriter, substitute
from stagedtensor.codegen.schedule.analysis import without_single_lets
from stagedtensor.codegen.schedule.guards import conjunction, conjuncts
from stagedtensor.codegen.schedule.nest import index_symbol, rename
from stagedtensor.precision import i64


@dataclass(frozen=True)
class _Congruence:
    """``guard`` says that ``inner = rest + sign * iterator`` is a multiple of ``step``."""

    guard: Expr
    inner: Affine
    rest: Expr
    sign: int
    step: int
    iterator: BlockIterator


def solve_congruences(module: Module) -> Module:
    """Return ``module`` with the guards of its blocks solved."""
    return replace(module, kernels=tuple(_kernel(kernel) for kernel in module.kernels))


def _kernel(kernel: Proc) -> Proc:
    body = tuple(solved(stmt) if isinstance(stmt, Block) and stmt.guard is not None else stmt for stmt in kernel.body)
    return kernel if body == kernel.body else replace(kernel, body=body)


def solved(block: Block) -> Block:
    """Return ``block`` without guards that say which values of a reduce iterator count, where these are every s-th."""
    if block.scatter or not block.accumulators:
        return block
    current = block
    while (found := _find(current)) is not None:
        current = _without(current, found)
    if current is block:
        return block
    ranges = {item.symbol: Interval(0, item.bound - 1) for item in current.iterators}
    kept = [part for part in conjuncts(current.guard) if not _always(part, ranges)]
    return _at_once(replace(current, guard=conjunction(kept)))


def _find(block: Block) -> _Congruence | None:
    for guard in conjuncts(block.guard):
        if not isinstance(guard, Apply) or guard.op not in ("lt", "eq") or guard.args[0].type is not i64:
            continue
        remainder, limit = guard.args
        if (
            constant(limit) != (1 if guard.op == "lt" else 0)
            or not isinstance(remainder, Apply)
            or remainder.op != "mod"
        ):
            continue
        step, inner = constant(remainder.args[1]), affine(remainder.args[0])
        moving = [item for item in block.reduce if inner.depends_on(item.symbol)]
        if step is None or step < 2 or len(moving) != 1 or constant(moving[0].extent) is None:
            continue
        sign = inner.coefficient(moving[0].symbol)
        if sign in (1, -1):
            rest = to_expr(inner.without(moving[0].symbol))
            return _Congruence(guard, inner, rest, sign, step, moving[0])
    return None


def _without(block: Block, found: _Congruence) -> Block:
    item, step = found.iterator, found.step
    within = found.rest if found.sign == -1 else to_expr(affine(subtract(0, found.rest)))
    first, count = modulo(within, step), -(-item.bound // step)
    turn = BlockIterator(index_symbol(item.symbol.hint), as_index(count), count, "reduce")
    turns: Expr = Var(turn.symbol) if count > 1 else index(0)
    # within = first + step * (within // step), so that inner is a multiple of step: this one
    multiple = subtract(floor_divide(within, step), turns)
    if found.sign == 1:
        multiple = subtract(0, multiple)
    value = add(first, multiply(turns, step))
    parts = [part for part in conjuncts(block.guard) if part is not found.guard]
    if count * step > item.bound:
        parts.append(Apply("lt", (Var(item.symbol), index(item.bound)), i64))
    plain = _Quotient(found.inner, step, to_expr(affine(multiple))).block(replace(block, guard=conjunction(parts)))
    iterators = tuple(turn if given.symbol is item.symbol else given for given in plain.iterators)
    if count == 1:
        iterators = tuple(given for given in iterators if given is not turn)
    return replace(rename(plain, {item.symbol: value}), iterators=iterators)


class _Quotient(Rewriter):
    """Replaces ``inner // step``."""

    def __init__(self, inner: Affine, step: int, by: Expr) -> None:
        self.inner, self.step, self.by = inner, step, by

    def expr(self, expr: Expr) -> Expr:
        if (
            isinstance(expr, Apply)
            and expr.op == "floordiv"
            and constant(expr.args[1]) == self.step
            and affine(expr.args[0]).same_as(self.inner)
        ):
            return self.by
        return super().expr(expr)


def _always(guard: Expr, ranges: dict[Symbol, Interval]) -> bool:
    if not isinstance(guard, Apply) or guard.op not in ("lt", "le", "gt", "ge") or guard.args[0].type is not i64:
        return False
    lhs, rhs = guard.args
    lesser, greater = (lhs, rhs) if guard.op in ("lt", "le") else (rhs, lhs)
    space = to_expr(affine(subtract(greater, lesser)))
    return interval(space, ranges).low >= (1 if guard.op in ("lt", "gt") else 0)


def _at_once(block: Block) -> Block:
    """Write out the one step of sums over a single point."""
    if block.reduce or block.guard is not None:
        return block
    initial = {item.symbol: item.init for item in block.accumulators}
    results = tuple(Let(item.symbol, substitute(item.update, initial)) for item in block.accumulators)
    return without_single_lets(replace(block, accumulators=(), lets=(*block.lets, *results)))
