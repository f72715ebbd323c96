"""Each rule of the verifier: code that keeps it, and code that breaks it and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from stagedtensor.codegen.intervals import Interval, facts_of, interval
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
    Const,
    Declare,
    Expr,
    Fma,
    For,
    If,
    Layout,
    Let,
    Load,
    LoopKind,
    Module,
    Pad,
    Proc,
    Reorder,
    Scan,
    Split,
    Stmt,
    Store,
    Symbol,
    Var,
    index,
)
from stagedtensor.codegen.verify import verify
from stagedtensor.codegen.verify_expr import RULES
from stagedtensor.errors import InternalError
from stagedtensor.precision import Prec, bf16, bool_, f16, f32, i32, i64, u32

from .interpreting import iterator

X = Buffer("x", f32, (10,))
Y = Buffer("y", f32, (10,))
HALF = Buffer("half", bf16, (10,))
IDS = Buffer("ids", i32, (10,))
COUNT = Symbol("n", i64)
ONE = Const(1.0, f32)
ZERO = Const(0.0, f32)


def op(name: str, *args: Expr, type_: Prec | None = None) -> Apply:
    return Apply(name, args, type_ or args[-1].type)


def at(item: BlockIterator, shift: int = 0) -> Expr:
    return op("add", Var(item.symbol), index(shift)) if shift else Var(item.symbol)


def proc(*body: Stmt) -> Proc:
    return Proc("p", (X, Y, HALF), body, (COUNT,))


def stores(value: Expr, buffer: Buffer = Y) -> Proc:
    return proc(Store(buffer, (index(0),), value))


def loop(body: Callable[[BlockIterator], Stmt], extent: int = 10, kind: LoopKind = "serial") -> For:
    item = iterator("i", extent)
    return For(item, (body(item),), kind)


def block(
    *,
    guard: Callable[[BlockIterator, BlockIterator], Expr] | None = None,
    init: Callable[[BlockIterator, BlockIterator], Expr] = lambda i, k: ZERO,
    update: Callable[[BlockIterator, BlockIterator, Expr], Expr] = lambda i, k, acc: op("add", acc, Load(X, (at(k),))),
    store: Callable[[BlockIterator, BlockIterator, Expr], Store] = lambda i, k, acc: Store(Y, (at(i),), acc),
    acc_type: Prec = f32,
    combine: str = "add",
    neutral: Expr | None = ZERO,
    paired_with: Symbol | None = None,
) -> Block:
    """A sum over x for each cell of y, with parts to exchange."""
    i, k, acc = iterator("i", 10), iterator("k", 10, "reduce"), Symbol("acc", acc_type)
    state = Accumulator(acc, init(i, k), update(i, k, Var(acc)), combine, neutral, paired_with)
    return Block("sum", (i, k), (store(i, k, Var(acc)),), (state,), (), None if guard is None else guard(i, k))


def scatter(*, accumulators: tuple[Accumulator, ...] = (), is_scatter: bool = True) -> Proc:
    k = iterator("k", 10, "reduce")
    cell = (Cast(Load(IDS, (at(k),)), i64),)
    store = Store(Y, cell, op("add", Load(Y, cell), ONE))
    return Proc("p", (X, Y, IDS), (Block("scatter", (k,), (store,), accumulators, scatter=is_scatter),))


def callee(**changes: Any) -> Proc:
    param, count = Buffer("param", f32, (10,)), Symbol("m", i64)
    return replace(Proc("inner", (param,), (Store(param, (index(0),), ONE),), (count,)), **changes)


def variable(use: Callable[[Symbol], tuple[Stmt, ...]], type_: Prec = f32) -> Proc:
    symbol = Symbol("v", type_)
    return proc(Declare(symbol, Const(0.0, f32)), *use(symbol))


TWICE = iterator("i", 10)
FLAGGED = replace(HALF, name="flagged", saturate=True, flush_subnormal=True)
OUTSIDE = Symbol("outside", f32)


def half_one(i: BlockIterator, k: BlockIterator) -> Expr:
    return Cast(ONE, bf16)


BROKEN: list[tuple[str, Proc | Module]] = [
    ("const-fits", stores(Cast(Const(2**40, i32), f32))),
    ("const-fits", stores(Cast(Const(float("inf"), i32), f32))),
    ("narrow-const", stores(Cast(Const(1.0, f16), f32))),
    ("narrow-arithmetic", stores(Cast(op("add", Load(HALF, (index(0),)), Load(HALF, (index(0),))), f32))),
    ("narrow-arithmetic", stores(op("where", Load(HALF, (index(0),)), ONE, ZERO))),
    ("narrow-arithmetic", stores(Cast(op("identity", Load(HALF, (index(0),))), f32))),
    ("op-known", stores(op("gelu", ONE))),
    ("op-known", stores(op("add", ONE))),
    ("op-types", stores(op("add", Const(1, i32), ONE))),
    ("op-types", stores(Cast(op("exp", Const(1, i32), type_=i32), f32))),
    ("op-types", stores(op("random_uniform", Const(1, u32), Const(2, u32), Const(3, i64), type_=f32))),
    ("op-types", stores(Cast(op("add", Const(1, bool_), Const(1, bool_)), f32))),
    ("fma-float", stores(Fma(ONE, Const(1, i32), ONE))),
    ("cast-legal", stores(Cast(Cast(ONE, i32, saturate=True), f32))),
    ("in-scope", stores(Var(OUTSIDE))),
    ("in-scope", proc(loop(lambda i: Let(OUTSIDE, ONE)), Store(Y, (index(0),), Var(OUTSIDE)))),
    ("buffer-in-scope", stores(Load(Buffer("z", f32, (10,)), (index(0),)))),
    ("index-type", stores(Load(X, (Const(0, i32),)))),
    ("index-rank", stores(Load(X, (index(0), index(0))))),
    ("index-bounds", stores(Load(X, (index(10),)))),
    ("index-bounds", proc(loop(lambda i: Store(Y, (at(i),), Load(X, (at(i, 1),)))))),
    ("index-bounds", proc(loop(lambda i: Store(Y, (at(i, -1),), ONE)))),
    ("index-bounds", proc(loop(lambda i: If(op("ge", at(i), index(5)), (Store(Y, (at(i, 5),), ONE),))))),
    ("store-type", stores(Cast(ONE, bf16))),
    ("store-flags", Proc("p", (FLAGGED,), (Store(FLAGGED, (index(0),), Cast(ONE, bf16, saturate=True)),))),
    ("store-flags", stores(Cast(ONE, bf16, flush=True), HALF)),
    ("bound-once", proc(For(TWICE, ()), For(TWICE, ()))),
    ("bound-once", proc(Alloc(X))),
    ("iterator-type", proc(For(BlockIterator(Symbol("i", i32), index(3), 3), ()))),
    ("iterator-type", proc(loop(lambda i: For(BlockIterator(Symbol("j", i64), at(i), 10), ())))),
    ("iterator-type", proc(For(BlockIterator(Symbol("i", i64), Cast(Load(X, (index(0),)), i64), 3), ()))),
    ("iterator-bound", proc(For(BlockIterator(Symbol("i", i64), index(3), 4), ()))),
    ("loop-kind", proc(For(iterator("k", 3, "reduce"), ()))),
    ("loop-kind", proc(For(BlockIterator(Symbol("i", i64), Var(COUNT), 8), (), "lane"))),
    ("let-type", proc(Let(Symbol("v", i32), ONE))),
    ("let-type", variable(lambda v: (Assign(v, Const(1, i32)),))),
    ("narrow-state", proc(Declare(Symbol("v", bf16), Load(HALF, (index(0),))))),
    (
        "narrow-state",
        proc(block(acc_type=bf16, init=half_one, update=lambda i, k, acc: half_one(i, k), combine="", neutral=None)),
    ),
    ("assign-declared", proc(loop(lambda i: Assign(i.symbol, index(0))))),
    ("parallel-assign", variable(lambda v: (loop(lambda i: Assign(v, ONE), kind="parallel"),))),
    ("barrier-uniform", proc(loop(lambda i: If(op("lt", at(i), index(3)), (Barrier(),)), kind="grid"))),
    ("barrier-uniform", proc(If(Load(X, (index(0),)), (Barrier(),)))),
    ("barrier-uniform", proc(loop(lambda i: Barrier(), kind="parallel"))),
    ("call-matches", proc(Call(callee(), (HALF,), (index(1),)))),
    ("call-matches", proc(Call(callee(), (X,), ()))),
    ("call-matches", proc(Call(callee(), (X,), (Const(1, i32),)))),
    ("init-domain", proc(block(init=lambda i, k: Load(X, (at(k),))))),
    ("store-domain", proc(block(store=lambda i, k, acc: Store(Y, (at(i),), Cast(at(k), f32))))),
    ("combine-known", proc(block(combine="maximum"))),
    ("combine-known", proc(block(neutral=None))),
    ("pair-matches", proc(block(paired_with=OUTSIDE))),
    ("scatter-plain", scatter(accumulators=(Accumulator(Symbol("acc", f32), ZERO, ZERO),))),
    ("reduce-states", scatter(is_scatter=False)),
    ("store-covers", proc(block(store=lambda i, k, acc: Store(Y, (index(0),), acc)))),
    ("reads-own-cell", proc(block(update=lambda i, k, acc: op("add", acc, Load(Y, (at(k),)))))),
    ("buffer-shape", Proc("p", (Buffer("b", f32, (-1,)),), ())),
    ("buffer-shape", Proc("p", (Buffer("b", i32, (1,), saturate=True),), ())),
    ("buffer-shape", Proc("p", (Buffer("b", f32, (4, 4), layout=Layout((Reorder((0, 0)),))),), ())),
    ("parameters", Proc("p", (X, X), ())),
    ("parameters", Proc("p", (), (), (OUTSIDE,))),
    ("parameters", Module("m", (), (X,), (X,))),
    ("module-closed", Module("m", (Proc("p", (X, Y), ()),), (X,), ())),
    ("module-closed", Module("m", (Proc("p", (X,), (), (COUNT,)),), (X,), ())),
]


@pytest.mark.parametrize(("rule", "code"), BROKEN, ids=[f"{rule}-{n}" for n, (rule, _) in enumerate(BROKEN)])
def test_broken_rule_is_named(rule: str, code: Proc | Module) -> None:
    with pytest.raises(InternalError, match=rf"^loop IR \w+ breaks rule {rule}: "):
        verify(code)


def test_every_rule_is_broken_above() -> None:
    assert {rule for rule, _ in BROKEN} == set(RULES)


def let_then_store() -> Proc:
    value = Symbol("v", bf16)
    return Proc(
        "p",
        (X, FLAGGED),
        (
            Let(value, Cast(Load(X, (index(0),)), bf16, saturate=True, flush=True)),
            Store(FLAGGED, (index(1),), Var(value)),
        ),
    )


def padded_window(i: BlockIterator, k: BlockIterator) -> Expr:
    position = op("sub", op("add", at(i), at(k)), index(1))
    return op("and", op("ge", position, index(0)), op("lt", position, index(10)))


def dynamic() -> Proc:
    item = BlockIterator(Symbol("i", i64), op("floordiv", Var(COUNT), index(2)), 10)
    return proc(For(item, (Store(Y, (at(item),), ONE),), "parallel"))


def lanes() -> Proc:
    states, total = Buffer("lanes", f32, (4,), space="register"), Symbol("total", f32)
    one, two = iterator("lane", 4), iterator("lane", 4)
    return proc(
        Alloc(states),
        For(one, (Store(states, (at(one),), ZERO),), "lane"),
        Declare(total, ZERO),
        For(two, (Assign(total, op("add", Var(total), Load(states, (at(two),)))),), "lane"),
        Barrier(),
        Store(Y, (index(0),), Var(total)),
    )


def scanned() -> Proc:
    item, state = iterator("i", 10), Symbol("run", f32)
    carried = Accumulator(state, ZERO, op("add", Var(state), Load(X, (at(item),))))
    return proc(Scan(item, (carried,), (Store(Y, (at(item),), Var(state)),)))


SOUND: dict[str, Proc | Module] = {
    "sum": proc(block()),
    "old value": proc(block(init=lambda i, k: Load(Y, (at(i),)))),
    "guarded window": proc(
        block(
            guard=padded_window,
            update=lambda i, k, acc: op("add", acc, Load(X, (op("sub", op("add", at(i), at(k)), index(1)),))),
        )
    ),
    "scatter": scatter(),
    "flags through a let": let_then_store(),
    "symbolic extent": dynamic(),
    "lanes": lanes(),
    "scan": scanned(),
    "where protects a load": proc(
        loop(lambda i: Store(Y, (at(i),), op("where", op("lt", at(i), index(9)), Load(X, (at(i, 1),)), ZERO)))
    ),
    "nothing runs": proc(loop(lambda i: Store(Y, (at(i, 20),), ONE), extent=0)),
    "uniform barrier": proc(If(Var(COUNT), (Barrier(),))),
    "call": proc(Call(callee(), (X,), (Var(COUNT),)), Call(callee(), (Y,), (index(1),))),
    "pads may be read": Proc(
        "p",
        (padded := Buffer("padded", f32, (10,), layout=Layout((Pad(0, 8), Split(0, 4)))),),
        (Let(Symbol("v", f32), Load(padded, (index(15),))),),
    ),
    "module": Module("m", (Proc("k", (X,), (), (COUNT,)),), (X,), (Y,), (COUNT,)),
}


@pytest.mark.parametrize("code", SOUND.values(), ids=SOUND)
def test_sound_code_passes(code: Proc | Module) -> None:
    verify(code)


def test_native_formats_compute() -> None:
    value = op("add", Load(HALF, (index(0),)), Load(HALF, (index(1),)))
    verify(stores(value, HALF), native=frozenset((bf16,)))


def test_message_shows_statement_and_code() -> None:
    with pytest.raises(InternalError) as caught:
        verify(proc(Let(Symbol("a", f32), ONE), loop(lambda i: Store(Y, (at(i, 3),), ONE))))
    assert str(caught.value) == (
        "loop IR p breaks rule index-bounds: index 3..12 on axis 0 of @y, whose extent is 10\n"
        "at:\n"
        "  y[i + 3] = 1.0\n"
        "in:\n"
        "  proc p(x: f32[10], y: f32[10], half: bf16[10]; n):\n"
        "    let a: f32 = 1.0\n"
        "    for i < 10:\n"
        "      y[i + 3] = 1.0"
    )


def test_broken_callee_is_found() -> None:
    inner = callee(body=(Store(X, (index(0),), ONE),))
    with pytest.raises(InternalError, match=r"in proc inner, called through p"):
        verify(proc(Call(inner, (X,), (index(1),))))


# -- intervals ----------------------------------------------------------------------------------------------------

ROW, COLUMN = Symbol("i", i64), Symbol("j", i64)
RANGES = {ROW: Interval(0, 9, exact=True), COLUMN: Interval(0, 3, exact=True)}


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        (op("add", op("mul", Var(ROW), index(4)), Var(COLUMN)), Interval(0, 39, exact=True)),
        (op("sub", Var(ROW), Var(ROW)), Interval(-9, 9)),
        (op("floordiv", Var(ROW), index(4)), Interval(0, 2, exact=True)),
        (op("mod", Var(ROW), index(4)), Interval(0, 3)),
        (op("mod", Var(COLUMN), index(4)), Interval(0, 3, exact=True)),
        (op("mul", Var(ROW), index(-2)), Interval(-18, 0, exact=True)),
        (op("minimum", op("maximum", Cast(Load(IDS, (index(0),)), i64), index(0)), index(7)), Interval(0, 7)),
        (op("lt", Var(ROW), index(4)), Interval(0, 1)),
        (op("where", Var(ROW), index(3), Var(COLUMN)), Interval(0, 3)),
        (op("mul", Var(COUNT), index(0)), Interval(0, 0)),
    ],
)
def test_interval(expr: Expr, expected: Interval) -> None:
    assert interval(expr, RANGES) == expected


def test_facts_narrow_what_they_speak_of() -> None:
    shifted = op("sub", Var(ROW), index(2))
    facts = facts_of(op("and", op("ge", shifted, index(0)), op("gt", index(5), shifted)))
    assert interval(shifted, RANGES, facts) == Interval(0, 4)
    assert interval(op("mul", shifted, index(3)), RANGES, facts) == Interval(0, 12)
    assert interval(shifted, RANGES, facts_of(op("lt", shifted, index(-2)))).is_empty
