"""Loads that no iteration changes, moved in front of their loops.

In: scheduled kernels. Out: the same with a let per such load. A C compiler could do it only where it can prove that no
store hits the cell and that the load cannot fail; a load it leaves under a condition keeps the whole loop from
vectorising::

    for i: y[i] = where(g[i], rate[0] * x[i], x[i])    ->    rate = rate[0]
                                                             for i: y[i] = where(g[i], rate * x[i], x[i])

A load moves if its kernel never writes the buffer and if it is sure to be valid: its indices are constants, or it
stands under no condition in a loop that runs at least once. Conversions of such a load move along. Computes nothing
anew.
"""

from __future__ import annotations

from collections.abc import Iterable

from stagedtensor.codegen.affine import constant
from stagedtensor.codegen.loop_ir import (
    Alloc,
    Apply,
    Assign,
    Buffer,
    Cast,
    Declare,
    Expr,
    For,
    If,
    Let,
    Load,
    Module,
    Proc,
    Stmt,
    Store,
    Symbol,
    Var,
    children,
    walk,
    with_children,
)
from stagedtensor.codegen.pieces import replace
from stagedtensor.codegen.rewrite import bound_symbols, buffers_written, map_stmts, substitute, symbols_of, walk_stmts


def hoist(module: Module) -> Module:
    """Return ``module`` with the loop-invariant loads of every kernel in front of their loops."""
    return replace(module, kernels=tuple(hoisted(kernel) for kernel in module.kernels))


def hoisted(kernel: Proc) -> Proc:
    """Return one kernel with its loop-invariant loads in front of their loops."""
    fixed = {stmt.buffer for stmt in walk_stmts(kernel.body) if isinstance(stmt, Alloc)}
    fixed.update(buffers_written(kernel.body))

    def visit(stmt: Stmt) -> Stmt | tuple[Stmt, ...]:
        if not isinstance(stmt, For) or (stmt.kind == "parallel" and not _leads(kernel, stmt)):
            return stmt
        work = _Loop(stmt, fixed)
        body = work.statements(stmt.body, sure=(constant(stmt.iterator.extent) or 0) >= 1)
        body = substitute(body, work.renamed) if work.renamed else body
        return (*work.lets.values(), replace(stmt, body=body)) if work.lets else stmt

    return replace(kernel, body=map_stmts(kernel.body, visit))


def _leads(kernel: Proc, loop: For) -> bool:
    """Tell whether every thread comes to the loop first: a let in front of it is then every thread's own."""
    first = next((stmt for stmt in kernel.body if not isinstance(stmt, Let)), None)
    return isinstance(first, For) and first.iterator.symbol is loop.iterator.symbol


class _Loop:
    """What leaves one loop; ``lets`` by the expression they name."""

    def __init__(self, loop: For, fixed: Iterable[Buffer]) -> None:
        self.inside: set[Symbol] = {loop.iterator.symbol, *bound_symbols(loop.body)}
        self.fixed = set(fixed)
        self.lets: dict[Expr, Let] = {}
        self.renamed: dict[Symbol, Expr] = {}

    def statements(self, body: tuple[Stmt, ...], *, sure: bool) -> tuple[Stmt, ...]:
        """Rewrite statements; ``sure`` where they are executed whenever the loop is reached."""
        done: list[Stmt] = []
        for stmt in body:
            match stmt:
                case Let(symbol, value):
                    value = self.expr(value, sure)
                    if isinstance(value, Var) and value.symbol not in self.inside:
                        self.renamed[symbol] = value  # only another name for what has left
                        self.inside.discard(symbol)
                    else:
                        done.append(Let(symbol, value))
                case Declare(symbol, init):
                    done.append(Declare(symbol, self.expr(init, sure)))
                case Assign(symbol, value):
                    done.append(Assign(symbol, self.expr(value, sure)))
                case Store(buffer, indices, value):
                    done.append(Store(buffer, indices, self.expr(value, sure)))
                case If(condition, then, orelse):
                    condition = self.expr(condition, sure)
                    done.append(If(condition, self.statements(then, sure=False), self.statements(orelse, sure=False)))
                case _:
                    done.append(stmt)
        return tuple(done)

    def expr(self, expr: Expr, sure: bool) -> Expr:
        """Rewrite an expression."""
        if isinstance(expr, Load | Cast) and self._may_leave(expr, sure):
            let = self.lets.get(expr)
            if let is None:
                (load,) = (part for part in walk(expr) if isinstance(part, Load))
                let = self.lets[expr] = Let(Symbol(load.buffer.name, expr.type), expr)
            return Var(let.symbol)
        if isinstance(expr, Load) or not children(expr):
            return expr
        if isinstance(expr, Apply) and expr.op == "where":
            test, *branches = expr.args
            return replace(expr, args=(self.expr(test, sure), *(self.expr(part, False) for part in branches)))
        return with_children(expr, tuple(self.expr(part, sure) for part in children(expr)))

    def _may_leave(self, expr: Expr, sure: bool) -> bool:
        while isinstance(expr, Cast):
            expr = expr.arg
        if not isinstance(expr, Load) or expr.buffer in self.fixed:
            return False
        if any(isinstance(part, Load) for index in expr.indices for part in walk(index)):
            return False
        if any(symbol in self.inside for index in expr.indices for symbol in symbols_of(index)):
            return False
        places = [constant(index) for index in expr.indices]
        inside = all(
            place is not None and 0 <= place < extent for place, extent in zip(places, expr.buffer.shape, strict=True)
        )
        return sure or inside
