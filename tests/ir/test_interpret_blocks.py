"""Blocks and scatters in the reference interpreter, against NumPy and against the loops that they stand for."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from stagedtensor.codegen.interpret import run_proc
from stagedtensor.codegen.loop_ir import (
    Accumulator,
    Apply,
    Assign,
    Block,
    BlockIterator,
    Buffer,
    Cast,
    Const,
    Declare,
    Expr,
    Fma,
    For,
    If,
    Let,
    Load,
    Proc,
    Stmt,
    Store,
    Symbol,
    Var,
    index,
)
from stagedtensor.codegen.rewrite import fresh_copy, substitute
from stagedtensor.errors import InternalError
from stagedtensor.precision import bf16, f32, i32, i64

from .interpreting import ZERO, at, iterator, matmul, op, random, run


def written_out(block: Block) -> tuple[Stmt, ...]:
    """The loops that a block (of one accumulator at least, no scatter) stands for, one scalar at a time."""
    names = {item.symbol: Symbol(item.symbol.hint, item.symbol.type) for item in block.accumulators}
    states = {old: Var(new) for old, new in names.items()}
    updates = [Let(Symbol("new", item.symbol.type), substitute(item.update, states)) for item in block.accumulators]
    assigns = [
        Assign(names[item.symbol], Var(let.symbol)) for item, let in zip(block.accumulators, updates, strict=True)
    ]
    lets = tuple(substitute(let, states) for let in block.lets)
    point: tuple[Stmt, ...] = (*lets, *updates, *assigns)
    if block.guard is not None:
        point = (If(block.guard, point),)
    for item in reversed(block.reduce):
        point = (For(BlockIterator(item.symbol, item.extent, item.bound), point),)
    declares = [Declare(names[item.symbol], item.init) for item in block.accumulators]
    body: tuple[Stmt, ...] = (*declares, *point, *(substitute(store, states) for store in block.stores))
    for item in reversed(block.data):
        body = (For(item, body),)
    return fresh_copy(body)


# -- blocks -------------------------------------------------------------------------------------------------------


def window(n: int, k: int) -> Proc:
    """y[i] = 1 + sum over k of x[i + k - 1] * w[k], where the index is inside."""
    x, w, y = Buffer("x", f32, (n,)), Buffer("w", f32, (k,)), Buffer("y", f32, (n,))
    i, r, acc = iterator("i", n), iterator("k", k, "reduce"), Symbol("acc", f32)
    position = op("sub", op("add", *at(i), *at(r)), index(1))
    guard = op("and", op("ge", position, index(0)), op("lt", position, index(n)))
    update = Fma(Load(x, (position,)), Load(w, at(r)), Var(acc))
    state = Accumulator(acc, Const(1.0, f32), update, "add", ZERO)
    return Proc("window", (x, w, y), (Block("y", (i, r), (Store(y, at(i), Var(acc)),), (state,), guard=guard),))


def argmax(rows: int, n: int) -> Proc:
    """Position of the greatest value of each row: NaN wins, the lowest position at ties."""
    x, y, z = Buffer("x", f32, (rows, n)), Buffer("y", i32, (rows,)), Buffer("z", f32, (rows,))
    i, k = iterator("i", rows), iterator("k", n, "reduce")
    value, best, position = Symbol("value", f32), Symbol("best", f32), Symbol("position", i32)
    is_nan = op("and", op("ne", Var(value), Var(value)), op("eq", Var(best), Var(best)))
    wins = op("or", op("gt", Var(value), Var(best)), is_nan)
    low = Const(float("-inf"), f32)
    states = (
        Accumulator(best, low, op("maximum", Var(best), Var(value)), "max", low),
        Accumulator(
            position,
            Const(0, i32),
            Apply("where", (wins, Cast(Var(k.symbol), i32), Var(position)), i32),
            paired_with=best,
        ),
    )
    stores = (Store(y, at(i), Var(position)), Store(z, at(i), Var(best)))
    return Proc("argmax", (x, y, z), (Block("y", (i, k), stores, states, (Let(value, Load(x, at(i, k))),)),))


def test_guarded_window() -> None:
    x, w, y = random((9,)), random((3,), 1), np.empty(9, np.float32)
    run(window(9, 3), x, w, y)
    padded = np.pad(x.astype(np.float64), 1)
    np.testing.assert_allclose(y, 1 + sum(padded[k : k + 9] * w[k] for k in range(3)), rtol=1e-5)


def test_argmax_reads_the_old_maximum() -> None:
    x = np.array([[1, 3, 3, 2], [2, np.nan, 5, np.nan], [-np.inf] * 4, [0, 0, 1, 1]], np.float32)
    y, z = np.empty(4, np.int32), np.empty(4, np.float32)
    run(argmax(4, 4), x, y, z)
    np.testing.assert_array_equal(y, np.argmax(x, axis=1))
    np.testing.assert_array_equal(z, np.max(x, axis=1))


WRITTEN_OUT = {
    "matmul": matmul(4, 3, 17),
    "bf16 matmul": matmul(5, 2, 6, bf16),
    "window": window(9, 3),
    "argmax": argmax(5, 7),
    "nothing to sum": matmul(3, 3, 0),
    "one long sum": matmul(1, 1, 300),
}


@pytest.mark.parametrize("proc", WRITTEN_OUT.values(), ids=WRITTEN_OUT)
def test_block_equals_its_loops_bit_for_bit(proc: Proc) -> None:
    (block,) = proc.body
    assert isinstance(block, Block)
    loops = Proc("loops", proc.params, written_out(block))
    first = [random(buffer.shape, n).astype(buffer.type.numpy_dtype) for n, buffer in enumerate(proc.params)]
    second = [array.copy() for array in first]
    run(proc, *first)
    run(loops, *second)
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


def test_reduction_longer_than_what_is_computed_ahead() -> None:
    n = 70000
    x, y, k, acc = Buffer("x", f32, (n,)), Buffer("y", f32, ()), iterator("k", n, "reduce"), Symbol("acc", f32)
    state = Accumulator(acc, ZERO, op("add", Var(acc), Load(x, at(k))), "add", ZERO)
    values, result = random((n,)), np.empty((), np.float32)
    run(Proc("p", (x, y), (Block("y", (k,), (Store(y, (), Var(acc)),), (state,)),)), values, result)
    assert result == np.add.accumulate(values)[-1]


def test_accumulation_continues_from_the_old_value_of_a_guarded_point() -> None:
    y, i, acc = Buffer("y", f32, (4,)), iterator("i", 4), Symbol("acc", f32)
    state = Accumulator(acc, Load(y, at(i)), op("add", Var(acc), Const(10.0, f32)))
    block = Block("y", (i,), (Store(y, at(i), Var(acc)),), (state,), guard=op("ge", *at(i), index(2)))
    values = np.arange(4, dtype=np.float32)
    run(Proc("p", (y,), (block,)), values)
    np.testing.assert_array_equal(values, [0, 1, 12, 13])


def test_guard_without_accumulators_skips_stores() -> None:
    x, y, i = Buffer("x", f32, (3,)), Buffer("y", f32, (6,)), iterator("i", 6)
    shifted = op("sub", *at(i), index(2))
    guard = op("and", op("ge", shifted, index(0)), op("lt", shifted, index(3)))
    block = Block("y", (i,), (Store(y, at(i), Load(x, (shifted,))),), guard=guard)
    values = np.full(6, -1, np.float32)
    run(Proc("p", (x, y), (block,)), np.arange(3, dtype=np.float32), values)
    np.testing.assert_array_equal(values, [-1, -1, 0, 1, 2, -1])


def test_later_store_reads_what_the_earlier_one_rounded() -> None:
    p, twin, i = Buffer("p", bf16, (1,)), Buffer("twin", f32, (1,)), iterator("i", 1)
    stores = (
        Store(p, at(i), Cast(Const(1 + 2.0**-9, f32), bf16)),
        Store(twin, at(i), Cast(Load(p, at(i)), f32)),
    )
    narrow, wide = np.zeros(1, ml_dtypes.bfloat16), np.zeros(1, np.float32)
    run(Proc("p", (p, twin), (Block("b", (i,), stores),)), narrow, wide)
    assert wide[0] == 1


def test_where_protects_a_load_and_nothing_else_does() -> None:
    x, y, i = Buffer("x", f32, (3,)), Buffer("y", f32, (5,)), iterator("i", 5)
    inside = op("lt", *at(i), index(3))
    values, result = np.arange(3, dtype=np.float32), np.empty(5, np.float32)
    chosen = op("where", inside, Load(x, at(i)), Const(9.0, f32))
    run(Proc("p", (x, y), (Block("y", (i,), (Store(y, at(i), chosen),)),)), values, result)
    np.testing.assert_array_equal(result, [0, 1, 2, 9, 9])
    bare = Proc("p", (x, y), (Block("y", (i,), (Store(y, at(i), Load(x, at(i))),)),))
    with pytest.raises(InternalError, match=r"load from @x of shape \(3,\): index 3 on axis 0 is outside 0\.\.2"):
        run_proc(bare, {x: values, y: result})


def test_dynamic_extents_and_empty_domains() -> None:
    x, y, n = Buffer("x", f32, (8,)), Buffer("y", f32, ()), Symbol("n", i64)
    k, acc = BlockIterator(Symbol("k", i64), Var(n), 8, "reduce"), Symbol("acc", f32)
    state = Accumulator(acc, ZERO, op("add", Var(acc), Load(x, at(k))), "add", ZERO)
    proc = Proc("p", (x, y), (Block("y", (k,), (Store(y, (), Var(acc)),), (state,)),), (n,))
    for count in (8, 3, 0):
        result = np.full((), np.nan, np.float32)
        run(proc, np.arange(8, dtype=np.float32), result, scalars=(count,))
        assert result == sum(range(count))


# -- scatter ------------------------------------------------------------------------------------------------------


def scatter(update: Callable[[Expr, Expr], Expr], *, second: bool = False) -> Proc:
    """y[ids[k]] = update(y[ids[k]], x[k]) at every k, in order; with ``second``, z[k] = y[ids[k]] afterwards."""
    x, ids = Buffer("x", f32, (40,)), Buffer("ids", i32, (40,))
    y, z, k = Buffer("y", f32, (5,)), Buffer("z", f32, (40,)), iterator("k", 40, "reduce")
    cell = (Cast(Load(ids, at(k)), i64),)
    stores = [Store(y, cell, update(Load(y, cell), Load(x, at(k)))), Store(z, at(k), Load(y, cell))]
    guard = op("ne", *at(k), index(7))
    block = Block("y", (k,), tuple(stores if second else stores[:1]), guard=guard, scatter=True)
    return Proc("scatter", (x, ids, y, z), (block,))


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize(
    "update",
    [
        lambda old, value: op("add", old, value),
        lambda old, value: Fma(value, value, old),
        lambda old, value: op("sub", op("mul", old, Const(0.5, f32)), value),
        lambda old, value: value,
    ],
    ids=["add", "fma", "decay", "set"],
)
def test_scatter_takes_points_in_order(update: Callable[[Expr, Expr], Expr], second: bool) -> None:
    proc = scatter(update, second=second)
    x, ids = random((40,)), np.random.default_rng(3).integers(0, 5, 40).astype(np.int32)
    y, z = random((5,), 2), np.zeros(40, np.float32)
    expected, seen = y.copy(), np.zeros(40, np.float32)
    old, value = Symbol("old", f32), Symbol("value", f32)
    step = Proc(
        "step",
        (cell := Buffer("cell", f32, (3,)),),
        (
            Let(old, Load(cell, (index(0),))),
            Let(value, Load(cell, (index(1),))),
            Store(cell, (index(2),), update(Var(old), Var(value))),
        ),
    )
    for k in range(40):
        if k != 7:
            cells = np.array([expected[ids[k]], x[k], 0], np.float32)
            run(step, cells)
            expected[ids[k]] = seen[k] = cells[2]
    run(proc, x, ids, y, z)
    np.testing.assert_array_equal(y, expected)
    if second:
        np.testing.assert_array_equal(z, seen)


def test_scatter_of_rows_matches_numpy() -> None:
    x, ids, y = Buffer("x", f32, (30, 4)), Buffer("ids", i64, (30,)), Buffer("y", f32, (6, 4))
    j, k = iterator("j", 4), iterator("k", 30, "reduce")
    cell = (Load(ids, at(k)), *at(j))
    block = Block("y", (j, k), (Store(y, cell, op("add", Load(y, cell), Load(x, at(k, j)))),), scatter=True)
    rows, values, result = np.arange(30) % 6, random((30, 4)), np.zeros((6, 4), np.float32)
    run(Proc("p", (x, ids, y), (block,)), values, rows, result)
    expected = np.zeros((6, 4), np.float32)
    np.add.at(expected, rows, values)
    np.testing.assert_array_equal(result, expected)
