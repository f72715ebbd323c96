"""Mappers, substitution, fresh copies and what they must keep."""

from __future__ import annotations

import pytest

from stagedtensor.codegen.loop_ir import (
    Accumulator,
    Alloc,
    Apply,
    Assign,
    Block,
    BlockIterator,
    Buffer,
    Call,
    Const,
    Declare,
    Expr,
    For,
    If,
    IteratorKind,
    Let,
    Load,
    Proc,
    Scan,
    Stmt,
    Store,
    Symbol,
    Tile,
    Var,
    index,
)
from stagedtensor.codegen.pretty import pretty
from stagedtensor.codegen.rewrite import (
    Rewriter,
    bound_symbols,
    buffers_read,
    buffers_written,
    free_symbols,
    fresh_copy,
    map_expr,
    map_stmts,
    substitute,
)
from stagedtensor.codegen.verify import verify
from stagedtensor.errors import InternalError
from stagedtensor.precision import f32, i64

X, Y = Buffer("x", f32, (8,)), Buffer("y", f32, (8,))
N = Symbol("n", i64)
ZERO = Const(0.0, f32)


def iterator(hint: str, kind: IteratorKind = "data") -> BlockIterator:
    return BlockIterator(Symbol(hint, i64), index(8), 8, kind)


def everything() -> tuple[Stmt, ...]:
    """A body with every kind of binder."""
    scratch = Buffer("scratch", f32, (8,), "local")
    i, k, lane, step, acc, run = (
        iterator("i"),
        iterator("k", "reduce"),
        iterator("lane"),
        iterator("s"),
        Symbol("acc", f32),
        Symbol("run", f32),
    )
    twice, total, inner = Symbol("twice", f32), Symbol("total", f32), Buffer("inner", f32, (8,))
    value = Load(X, (Var(k.symbol),))
    block = Block(
        "b",
        (i, k),
        (Store(scratch, (Var(i.symbol),), Var(acc)),),
        (Accumulator(acc, ZERO, Apply("add", (Var(acc), Var(twice)), f32), "add", ZERO),),
        (Let(twice, Apply("add", (value, value), f32)),),
        guard=Apply("lt", (Var(k.symbol), Var(N)), i64),
    )
    carried = Accumulator(run, ZERO, Load(scratch, (Var(step.symbol),)))
    return (
        Alloc(scratch),
        block,
        Declare(total, ZERO),
        For(lane, (If(Var(N), (Assign(total, Load(scratch, (Var(lane.symbol),))),)),)),
        Tile("t", 1, 1, 1, (Store(Y, (index(0),), Var(total)),), (Var(N),)),
        Scan(step, (carried,), (Store(Y, (Var(step.symbol),), Var(run)),)),
        Call(Proc("callee", (inner,), (Store(inner, (index(0),), ZERO),)), (Y,)),
    )


def test_fresh_copy_binds_everything_anew_and_reads_the_same() -> None:
    body = everything()
    copy = fresh_copy(body)
    assert set(bound_symbols(copy)).isdisjoint(bound_symbols(body))
    assert len(bound_symbols(copy)) == len(bound_symbols(body)) == 8
    assert pretty(copy) == pretty(body)
    assert free_symbols(copy) == free_symbols(body) == (N,)
    verify(Proc("p", (X, Y), (*body, *copy), (N,)))  # both in one proc: nothing is bound twice


def test_identity_rewriters_change_nothing() -> None:
    body = everything()
    assert Rewriter().body(body) == body
    assert map_expr(body, lambda expr: expr) == body
    assert map_stmts(body, lambda stmt: stmt) == body


def test_substitute_replaces_free_symbols_and_buffers_everywhere() -> None:
    other = Buffer("other", f32, (8,))
    changed = substitute(everything(), {N: index(3)}, {X: other, Y: X})
    assert free_symbols(changed) == ()
    assert other in buffers_read(changed)
    assert X not in buffers_read(changed)
    assert X in buffers_written(changed)
    assert Y not in buffers_written(changed)


def test_substituted_values_are_not_substituted_again() -> None:
    a, b = Symbol("a", f32), Symbol("b", f32)
    swapped = substitute(Apply("sub", (Var(a), Var(b)), f32), {a: Var(b), b: Var(a)})
    assert swapped == Apply("sub", (Var(b), Var(a)), f32)


def test_a_bound_symbol_takes_only_another_symbol() -> None:
    i = iterator("i")
    loop = For(i, (Store(X, (Var(i.symbol),), ZERO),))
    with pytest.raises(InternalError, match="where it is bound"):
        substitute(loop, {i.symbol: index(1)})
    j = Symbol("j", i64)
    assert pretty(substitute(loop, {i.symbol: Var(j)})) == "for j < 8:\n  x[j] = 0.0"


def test_maps_go_from_the_inside_out() -> None:
    i = iterator("i")
    loop = For(i, (Store(X, (Var(i.symbol),), Apply("add", (ZERO, ZERO), f32)),))

    def fold(expr: Expr) -> Expr:
        return ZERO if isinstance(expr, Apply) and expr.args == (ZERO, ZERO) else expr

    nested = Apply("add", (Apply("add", (ZERO, ZERO), f32), ZERO), f32)
    folded = map_expr(nested, fold)
    assert folded == ZERO
    assert pretty(map_expr(loop, fold)) == "for i < 8:\n  x[i] = 0.0"
    dropped = map_stmts((loop, loop), lambda stmt: () if isinstance(stmt, Store) else stmt)
    assert pretty(dropped) == "for i < 8:\n  pass\nfor i < 8:\n  pass"
    doubled = map_stmts((loop,), lambda stmt: (stmt, stmt) if isinstance(stmt, Store) else stmt)
    assert pretty(doubled).count("x[i]") == 2


def test_effects_reach_through_blocks_and_calls() -> None:
    body = everything()
    assert [buffer.name for buffer in buffers_read(body)] == ["x", "scratch"]
    assert [buffer.name for buffer in buffers_written(body)] == ["scratch", "y"]


def test_literals_are_equal_by_their_bits() -> None:
    assert Const(0.0, f32) != Const(-0.0, f32)
    assert Const(float("nan"), f32) == Const(float("nan"), f32)
    assert Const(1, f32) == Const(1.0, f32)
    assert Const(1, i64) != Const(1.0, f32)
    assert len({Const(2, i64), index(2), Const(0.0, f32), Const(-0.0, f32)}) == 3
