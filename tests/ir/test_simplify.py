"""Simplification, exactness and common subexpressions, expression by expression and block by block."""

from __future__ import annotations

import numpy as np
import pytest

from stagedtensor.codegen import loop_ir as ir
from stagedtensor.codegen.intervals import Interval
from stagedtensor.codegen.passes.cse import cse_block
from stagedtensor.codegen.passes.exact import exact_in
from stagedtensor.codegen.passes.simplify import simplified, simplify_block, simplify_positions
from stagedtensor.codegen.pretty import pretty
from stagedtensor.precision import Prec, bf16, f8e4m3, f16, f32, f64, i8, i32, i64, u8


def load(prec: Prec, name: str = "x") -> ir.Load:
    return ir.Load(ir.Buffer(name, prec, ()), ())


def wide(expr: ir.Expr, prec: Prec = f32) -> ir.Cast:
    return ir.Cast(expr, prec)


@pytest.mark.parametrize(
    ("expr", "prec", "exact"),
    [
        (wide(load(bf16)), bf16, True),
        (wide(load(f16)), bf16, False),
        (wide(load(f8e4m3)), f16, True),
        (wide(load(f16)), f8e4m3, False),
        (ir.Apply("neg", (wide(load(bf16)),), f32), bf16, True),
        (ir.Apply("add", (wide(load(bf16)), wide(load(bf16))), f32), bf16, False),
        (ir.Apply("maximum", (wide(load(bf16)), ir.Const(0.5, f32)), f32), bf16, True),
        (ir.Apply("maximum", (wide(load(bf16)), ir.Const(0.1, f32)), f32), bf16, False),
        (ir.Apply("where", (load(f32), wide(load(bf16)), ir.Const(0.0, f32)), f32), bf16, True),
        (ir.Apply("lt", (load(f32), load(f32)), f32), f8e4m3, True),
        (ir.Cast(wide(load(i8)), f32), bf16, True),
        (wide(load(i32)), f32, True),
        (wide(load(i8)), i8, True),
        (ir.Apply("abs", (wide(load(i8)),), f32), i8, False),
        (ir.Const(float("inf"), f32), f8e4m3, False),
        (ir.Const(-0.0, f32), f16, True),
    ],
)
def test_exact_in(expr: ir.Expr, prec: Prec, exact: bool) -> None:
    assert exact_in(expr, prec) is exact


def test_integers_are_exact_in_floats_of_enough_digits() -> None:
    assert exact_in(load(i8), bf16)
    assert exact_in(load(u8), bf16)
    assert not exact_in(load(i32), f32)
    assert exact_in(load(i32), f64)


def test_conversions_that_change_nothing_go() -> None:
    x = load(bf16)
    assert simplified(ir.Cast(wide(x), bf16)) == x
    assert simplified(wide(ir.Cast(wide(x), bf16))) != x
    rounding = ir.Cast(ir.Apply("add", (load(f32), load(f32)), f32), bf16)
    assert simplified(wide(rounding)) == wide(rounding)
    flushed = ir.Cast(load(f32), f32, flush=True)
    assert simplified(flushed) == flushed


def test_rounding_moves_past_relu_but_not_past_tanh() -> None:
    inner = wide(ir.Cast(load(f32), bf16))
    assert simplified(ir.Cast(ir.Apply("relu", (inner,), f32), bf16)) == ir.Cast(
        ir.Apply("relu", (load_again(inner),), f32), bf16
    )
    kept = ir.Cast(ir.Apply("tanh", (inner,), f32), bf16)
    assert simplified(kept) == kept
    other = ir.Cast(ir.Apply("relu", (inner,), f32), f16)
    assert simplified(other) == other


def load_again(inner: ir.Cast) -> ir.Expr:
    assert isinstance(inner.arg, ir.Cast)
    return inner.arg.arg


@pytest.mark.parametrize(
    ("expr", "result"),
    [
        (
            ir.Apply("div", (ir.Const(1.0, f32), ir.Const(3.0, f32)), f32),
            ir.Const(float(np.float32(1) / np.float32(3)), f32),
        ),
        (ir.Apply("mul", (ir.Const(2**31 - 1, i32), ir.Const(2, i32)), i32), ir.Const(-2, i32)),
        (wide(ir.Const(0.1, f64)), ir.Const(float(np.float32(0.1)), f32)),
        (ir.Cast(ir.Const(-1.5, f32), u8), ir.Const(0, u8)),
        (ir.Apply("sub", (ir.Const(1.0, f32), ir.Const(1.0, f32)), f32), ir.Const(0.0, f32)),
        (ir.Apply("gt", (ir.Const(2.0, f32), ir.Const(1.0, f32)), f32), ir.Const(1.0, f32)),
    ],
)
def test_constants_fold_as_the_routine_would(expr: ir.Expr, result: ir.Expr) -> None:
    assert simplified(expr) == result


def test_functions_of_the_prelude_do_not_fold() -> None:
    kept = ir.Apply("exp", (ir.Const(1.0, f32),), f32)
    assert simplified(kept) == kept


def test_adding_zero_stays_for_floats() -> None:
    x = load(f32)
    kept = ir.Apply("add", (x, ir.Const(0.0, f32)), f32)
    assert simplified(kept) == kept
    assert simplified(ir.Apply("mul", (x, ir.Const(1.0, f32)), f32)) == x
    assert simplified(ir.Apply("sub", (x, ir.Const(-0.0, f32)), f32)) != x


def index_block(index: ir.Expr, *iterators: ir.BlockIterator, guard: ir.Expr | None = None) -> ir.Block:
    target = ir.Buffer("y", f32, (64,))
    return ir.Block("y", iterators, (ir.Store(target, (index,), ir.Const(1.0, f32)),), guard=guard)


def iterator(name: str, extent: int) -> ir.BlockIterator:
    return ir.BlockIterator(ir.Symbol(name, i64), ir.index(extent), extent)


def test_index_algebra_by_ranges() -> None:
    i, j = iterator("i", 8), iterator("j", 4)
    cell_number = ir.Apply("add", (ir.Apply("mul", (ir.Var(i.symbol), ir.index(4)), i64), ir.Var(j.symbol)), i64)

    def reduced(op: str, divisor: int) -> ir.Expr:
        block = simplify_block(index_block(ir.Apply(op, (cell_number, ir.index(divisor)), i64), i, j))
        return block.stores[0].indices[0]

    assert reduced("floordiv", 4) == ir.Var(i.symbol)
    assert reduced("mod", 4) == ir.Var(j.symbol)
    assert pretty(reduced("mod", 32)) == "i * 4 + j"
    assert reduced("floordiv", 32) == ir.index(0)


def evaluate(expr: ir.Expr, values: dict[ir.Symbol, int]) -> int:
    """Compute an index expression in exact integers."""
    if isinstance(expr, ir.Const):
        return int(expr.value)
    if isinstance(expr, ir.Var):
        return values[expr.symbol]
    assert isinstance(expr, ir.Apply)
    left, right = (evaluate(arg, values) for arg in expr.args)
    match expr.op:
        case "add":
            return left + right
        case "sub":
            return left - right
        case "mul":
            return left * right
        case "floordiv":
            return left // right
        case "mod":
            return left % right
        case "minimum":
            return min(left, right)
        case "maximum":
            return max(left, right)
    return int({"lt": left < right, "le": left <= right, "gt": left > right, "ge": left >= right}[expr.op])


def random_index(rng: np.random.Generator, symbols: tuple[ir.Symbol, ...], depth: int) -> ir.Expr:
    if depth == 0 or rng.random() < 0.1:
        return ir.Var(symbols[rng.integers(len(symbols))]) if rng.random() < 0.6 else ir.index(int(rng.integers(-2, 9)))
    op = rng.choice(
        ["add", "sub", "mul", "floordiv", "mod", "minimum", "maximum", "lt", "le", "gt", "ge"],
        p=[0.2, *[0.1] * 6, *[0.05] * 4],
    )
    left = random_index(rng, symbols, depth - 1)
    if op in ("floordiv", "mod"):
        return ir.Apply(str(op), (left, ir.index(int(rng.choice([1, 2, 3, 4, 8])))), i64)
    if op == "mul":
        return ir.Apply("mul", (left, ir.index(int(rng.choice([0, 1, 2, 4])))), i64)
    return ir.Apply(str(op), (left, random_index(rng, symbols, depth - 1)), i64)


def test_simplified_indices_are_the_same_numbers() -> None:
    """Among them min(k, 2) + i // 4 with i below 4, whose sum goes and leaves an op of other operands."""
    symbols = tuple(ir.Symbol(name, i64) for name in "ijk")
    i, k = ir.Var(symbols[0]), ir.Var(symbols[2])
    clamped = ir.Apply("minimum", (ir.Apply("maximum", (k, ir.index(0)), i64), ir.index(2)), i64)
    ranges = {symbols[0]: Interval(0, 3), symbols[1]: Interval(0, 6)}
    rng = np.random.default_rng(0)
    cases: list[ir.Expr] = [ir.Apply("add", (clamped, ir.Apply("floordiv", (i, ir.index(4)), i64)), i64)]
    cases += [random_index(rng, symbols, int(rng.integers(1, 5))) for _ in range(1500)]
    for expr in cases:
        positions = simplify_positions(expr, ranges)
        cell = ir.Load(ir.Buffer("x", f32, (1,)), (expr,))
        read = simplify_positions(cell, ranges)
        assert isinstance(read, ir.Load)
        for values in ((0, 0, 0), (3, 6, -9), (1, 4, 17), (2, 5, 1), (3, 0, 2)):
            held = dict(zip(symbols, values, strict=True))
            want = evaluate(expr, held)
            assert evaluate(positions, held) == want, (pretty(expr), pretty(positions), values)
            assert evaluate(read.indices[0], held) == want, (pretty(expr), pretty(read.indices[0]), values)


def test_guards_that_always_hold_go() -> None:
    i = iterator("i", 8)
    inside = ir.Apply(
        "and",
        (
            ir.Apply("ge", (ir.Var(i.symbol), ir.index(0)), i64),
            ir.Apply("lt", (ir.Var(i.symbol), ir.index(8)), i64),
        ),
        i64,
    )
    assert simplify_block(index_block(ir.Var(i.symbol), i, guard=inside)).guard is None
    tight = ir.Apply("lt", (ir.Var(i.symbol), ir.index(7)), i64)
    assert simplify_block(index_block(ir.Var(i.symbol), i, guard=tight)).guard == tight


def test_cse_names_what_stands_twice() -> None:
    i = iterator("i", 8)
    x, y = ir.Buffer("x", f32, (8,)), ir.Buffer("y", f32, (8,))
    read = ir.Load(x, (ir.Var(i.symbol),))
    total = ir.Apply("add", (read, ir.Const(1.0, f32)), f32)
    block = cse_block(ir.Block("y", (i,), (ir.Store(y, (ir.Var(i.symbol),), ir.Apply("mul", (total, total), f32)),)))
    assert pretty(block).splitlines()[1:] == ["  let v: f32 = x[i] + 1.0", "  y[i] = v * v"]
