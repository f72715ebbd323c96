"""Costly values that loops over one row share: kept where each is the same function of the position, and only there."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from stagedtensor.codegen import loop_ir as ir
from stagedtensor.codegen.passes.hoist import hoist
from stagedtensor.codegen.passes.jam import jam
from stagedtensor.codegen.rewrite import expressions, walk_stmts
from stagedtensor.codegen.schedule import schedule
from stagedtensor.codegen.schedule.keep_rows import keep_rows
from stagedtensor.codegen.verify import verify
from stagedtensor.numerics import Numerics
from stagedtensor.precision import f32
from stagedtensor.runtime.target import target
from tests.run import blocks
from tests.run.blocks import apply, axis, load, module, random_array, run_c, same_bits, store

ROWS, WIDTH = 120, 150  # enough work for threads; a width that lanes do not divide
Exponent = Callable[[ir.Buffer, ir.BlockIterator, ir.BlockIterator], ir.Expr]


def exponential(x: ir.Buffer, i: ir.BlockIterator, j: ir.BlockIterator) -> ir.Expr:
    return apply("exp", load(x, i, j))


def total(x: ir.Buffer, result: ir.Buffer, value: Exponent = exponential) -> ir.Block:
    """``result[i] = sum over j of value(x, i, j)``."""
    i, j = axis("i", ROWS), axis("j", WIDTH, "reduce")
    acc, zero = ir.Symbol("acc", f32), ir.Const(0.0, f32)
    accumulator = ir.Accumulator(acc, zero, apply("add", ir.Var(acc), value(x, i, j)), "add", zero)
    return ir.Block(result.name, (i, j), (store(result, (i,), ir.Var(acc)),), (accumulator,))


def share(x: ir.Buffer, sums: ir.Buffer, result: ir.Buffer, value: Exponent = exponential) -> ir.Block:
    """``result[i, j] = value(x, i, j) / sums[i]``."""
    i, j = axis("i", ROWS), axis("j", WIDTH)
    quotient = apply("div", value(x, i, j), load(sums, i))
    return ir.Block(result.name, (i, j), (store(result, (i, j), quotient),))


def buffers() -> tuple[ir.Buffer, ir.Buffer, ir.Buffer]:
    matrix = (ROWS, WIDTH)
    return ir.Buffer("x", f32, matrix), ir.Buffer("sums", f32, (ROWS,)), ir.Buffer("y", f32, matrix)


def before(whole: ir.Module) -> ir.Module:
    return jam(hoist(schedule(whole, target("avx512"), Numerics())))


def exponentials(whole: ir.Module) -> int:
    parts = (expr for kernel in whole.kernels for stmt in walk_stmts(kernel.body) for expr in expressions(stmt))
    return sum(isinstance(part, ir.Apply) and part.op == "exp" for expr in parts for part in ir.walk(expr))


def test_a_row_is_exponentiated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x, sums, y = buffers()
    whole = module(total(x, sums), share(x, sums, y), temporaries=(sums,))
    jammed = before(whole)
    kept = keep_rows(jammed)
    verify(kept)
    assert (exponentials(jammed), exponentials(kept)) == (3, 2), "lanes, the rest of the row, and once more before"
    arrays = {buffer: random_array(buffer, seed) for seed, buffer in enumerate(whole.external)}
    got = run_c(whole, arrays, threads=3)[y]
    monkeypatch.setattr(blocks, "keep_rows", lambda module: module)
    assert same_bits(got, run_c(whole, arrays)[y])
    exact = np.exp(arrays[x].astype(np.float64))
    np.testing.assert_allclose(got, exact / exact.sum(axis=1, keepdims=True), rtol=2e-6)


@pytest.mark.parametrize(
    "case", ["other value", "moved", "written between", "only under a condition", "position as value"]
)
def test_what_is_not_the_same_stays(case: str) -> None:
    x, sums, y = buffers()

    def doubled(x: ir.Buffer, i: ir.BlockIterator, j: ir.BlockIterator) -> ir.Expr:
        return apply("exp", apply("add", load(x, i, j), load(x, i, j)))

    def moved(x: ir.Buffer, i: ir.BlockIterator, j: ir.BlockIterator) -> ir.Expr:
        back = ir.Apply("sub", (ir.index(WIDTH - 1), ir.Var(j.symbol)), j.symbol.type)
        return apply("exp", ir.Load(x, (ir.Var(i.symbol), back)))

    def conditional(x: ir.Buffer, i: ir.BlockIterator, j: ir.BlockIterator) -> ir.Expr:
        return apply("where", apply("lt", load(x, i, j), ir.Const(0.5, f32)), exponential(x, i, j), ir.Const(0.0, f32))

    def positional(x: ir.Buffer, i: ir.BlockIterator, j: ir.BlockIterator) -> ir.Expr:
        return apply("exp", apply("add", load(x, i, j), ir.Cast(ir.Var(j.symbol), f32)))

    pairs = {
        "other value": (exponential, doubled),
        "moved": (exponential, moved),
        "written between": (exponential, exponential),
        "only under a condition": (conditional, exponential),
        "position as value": (positional, positional),
    }
    first, second = pairs[case]
    statements = [total(x, sums, first), share(x, sums, y, second)]
    if case == "written between":
        i, j = axis("i", ROWS), axis("j", WIDTH)
        statements.insert(1, ir.Block("x", (i, j), (store(x, (i, j), apply("mul", load(x, i, j), load(sums, i))),)))
    whole = module(*statements, temporaries=(sums,))
    jammed = before(whole)
    assert len(jammed.kernels) == 1
    kept = keep_rows(jammed)
    assert exponentials(kept) == exponentials(jammed)
