"""The printed form of every kind of code, and that it depends on the code alone."""

from __future__ import annotations

from textwrap import dedent

import pytest

from stagedtensor.codegen.loop_ir import (
    Accumulator,
    Alloc,
    Apply,
    Assign,
    Barrier,
    Block,
    BlockIterator,
    Buffer,
    Call,
    Cast,
    Comment,
    Const,
    Cost,
    Declare,
    Expr,
    Fma,
    For,
    If,
    Layout,
    Let,
    Load,
    Module,
    Origin,
    Pad,
    Proc,
    Reorder,
    Scan,
    Split,
    Store,
    Symbol,
    Tile,
    Var,
    index,
)
from stagedtensor.codegen.pretty import pretty
from stagedtensor.precision import bf16, bool_, f32, f64, i32, i64

from .interpreting import iterator

A, B, C = (Var(Symbol(hint, f32)) for hint in "abc")


def op(name: str, *args: Expr) -> Apply:
    return Apply(name, args, args[-1].type)


def matmul() -> Proc:
    a, b = Buffer("a", bf16, (4, 8)), Buffer("b", bf16, (8, 3))
    out = Buffer("c", bf16, (4, 3), saturate=True)
    i, j, k, acc = iterator("i", 4), iterator("j", 3), iterator("k", 8, "reduce"), Symbol("acc", f32)
    cells = (Var(i.symbol), Var(j.symbol))
    update = Fma(
        Cast(Load(a, (Var(i.symbol), Var(k.symbol))), f32),
        Cast(Load(b, (Var(k.symbol), Var(j.symbol))), f32),
        Var(acc),
    )
    state = Accumulator(acc, Const(0.0, f32), update, "add", Const(0.0, f32))
    block = Block(
        "c",
        (i, j, k),
        (Store(out, cells, Cast(Var(acc), bf16, saturate=True)),),
        (state,),
        guard=op("lt", Var(k.symbol), Var(i.symbol)),
        origins=(Origin("c := a * b", "model.py:3"),),
        cost=Cost(192, 136, 0),
    )
    return Proc("c", (a, b, out), (block,), path="plain")


@pytest.mark.parametrize(
    ("expr", "text"),
    [
        (op("mul", op("add", A, B), C), "(a + b) * c"),
        (op("add", op("mul", A, B), C), "a * b + c"),
        (op("sub", A, op("sub", B, C)), "a - (b - c)"),
        (op("sub", op("sub", A, B), C), "a - b - c"),
        (op("neg", op("add", A, B)), "-(a + b)"),
        (op("pow", op("neg", A), B), "(-a) ** b"),
        (op("neg", op("pow", A, B)), "-a ** b"),
        (op("and", op("lt", A, B), op("ge", B, C)), "and(a < b, b >= c)"),
        (op("where", op("eq", A, B), A, op("exp", C)), "where(a == b, a, exp(c))"),
        (op("mul", A, Const(-1.0, f32)), "a * -1.0"),
        (op("pow", Const(-1.0, f32), A), "(-1.0) ** a"),
        (Fma(A, B, C), "fma(a, b, c)"),
        (op("fma", A, B, C), "op.fma(a, b, c)"),
        (Cast(A, bf16, saturate=True, flush=True), "bf16.sat.flush(a)"),
        (Const(0.1, f32), "0.1"),
        (Const(0.1, f64), "0.1:f64"),
        (Const(float("-inf"), f32), "-inf"),
        (Const(3, i32), "3:i32"),
        (Const(3, i64), "3"),
        (Const(1, bool_), "true"),
    ],
)
def test_expression(expr: Expr, text: str) -> None:
    assert pretty(expr) == text


def test_block() -> None:
    assert pretty(matmul()) == dedent("""\
        proc c(a: bf16[4,8], b: bf16[8,3], c: bf16[4,3] saturate):
          # path: plain
          block c over i < 4, j < 3, reduce k < 8:
            # c := a * b at model.py:3
            # cost: 192 flops, 136 bytes, 0 live
            where k < i
            acc acc: f32 = 0.0 combine add neutral 0.0
              acc <- fma(f32(a[i, k]), f32(b[k, j]), acc)
            c[i, j] = bf16.sat(acc)""")


def test_text_does_not_depend_on_what_was_built_before() -> None:
    first = pretty(matmul())
    Symbol("acc", f32)
    assert pretty(matmul()) == first


def test_statements() -> None:
    x = Buffer("x", f32, (8,))
    tile = Buffer("x", f32, (3, 4), "local", Layout((Pad(0, 4, 1.0), Split(0, 2), Reorder((1, 0, 2)))))
    n, total, item, one = Symbol("n", i64), Symbol("i", f32), iterator("i", 8), iterator("i", 8)
    dynamic = BlockIterator(Symbol("j", i64), Var(n), 16)
    run = Symbol("run", f32)
    here = (Var(item.symbol),)
    inner = Proc("inner", (x,), (), (n,))
    body = (
        Comment("everything once"),
        Alloc(tile),
        Declare(total, Const(0.0, f32)),
        For(item, (Assign(total, op("add", Var(total), Load(x, here))),), "lane"),
        For(dynamic, (), "parallel"),
        If(op("lt", Var(n), index(3)), (Barrier(),), (Let(Symbol("v", f32), Var(total)),)),
        Scan(
            one,
            (Accumulator(run, Const(0.0, f32), Load(x, (Var(one.symbol),))),),
            (Store(x, (index(0),), Var(run)),),
            True,
        ),
        Tile("dot", 1, 2, 3, (), (x, Var(n))),
        Call(inner, (x,), (Var(n),)),
    )
    assert pretty(Proc("all", (x,), body, (n,))) == dedent("""\
        proc all(x: f32[8]; n):
          # everything once
          alloc x_1: f32[3,4] pad(0, 4, 1.0) split(0, 2) reorder(1, 0, 2) local
          var i: f32 = 0.0
          for i_1 < 8 lane:
            i <- i + x[i_1]
          for j < n (<= 16) parallel:
            pass
          if n < 3:
            barrier
          else:
            let v: f32 = i
          scan i_2 < 8 reverse:
            carry run: f32 = 0.0
              run <- x[i_2]
            x[0] = run
          tile dot 1x2x3(x, n):
            pass
          call inner(x; n)""")


def test_module_prints_called_procs_once() -> None:
    x, y = Buffer("x", f32, (8,)), Buffer("x", f32, (8,))
    n = Symbol("n", i64)
    item = iterator("i", 8)
    helper = Proc("helper", (Buffer("p", f32, (8,)),), ())
    kernels = (
        Proc("first", (x,), (Call(helper, (x,)),)),
        Proc("second", (y,), (For(item, (Store(y, (Var(item.symbol),), Const(1.0, f32)),)), Call(helper, (y,)))),
    )
    assert pretty(Module("step", kernels, (x,), (y,), (n,))) == dedent("""\
        module step(n)
          external x: f32[8]
          temporary x_1: f32[8]

        proc helper(p: f32[8]):
          pass

        proc first(x: f32[8]):
          call helper(x)

        proc second(x_1: f32[8]):
          for i < 8:
            x_1[i] = 1.0
          call helper(x_1)""")
