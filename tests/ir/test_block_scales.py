"""Scales of encoded blocks side by side: runs of lets that read successive bytes, and what stays one by one."""

from __future__ import annotations

from typing import Any

import numpy as np

from stagedtensor.codegen import loop_ir as ir
from stagedtensor.codegen.affine import add, multiply
from stagedtensor.codegen.interpret import run_module
from stagedtensor.codegen.loop_ir import Apply, Buffer, Cast, Const, Expr, For, Let, Load, Store, Symbol, Var
from stagedtensor.codegen.schedule.block_scales import side_by_side
from stagedtensor.codegen.schedule.nest import index_symbol, loop
from stagedtensor.precision import f32, i32, u8, u32

BLOCKS, NBYTES = 3, 20
CELLS = Buffer("bytes", u8, (BLOCKS * NBYTES,))


def byte(block: Symbol, offset: int) -> Expr:
    return Cast(Load(CELLS, (add(multiply(Var(block), NBYTES), offset),)), u32)


def scale(block: Symbol, offset: int, divisor: int = 64) -> Expr:
    """The low bits of a byte times the block's first byte."""
    low = Apply("mod", (byte(block, offset), Const(divisor, u32)), u32)
    return Apply("mul", (Cast(Cast(byte(block, 0), i32), f32), Cast(Cast(low, i32), f32)), f32)


def lets(values: list[Expr]) -> list[Let]:
    return [Let(Symbol("step", f32), value) for value in values]


def test_interleaved_runs_are_sorted_out_and_have_the_same_values() -> None:
    block = index_symbol("i_block")
    places = [offset for pair in zip(range(4, 9), range(12, 17), strict=True) for offset in pair]
    given = lets([scale(block, offset) for offset in places])
    found = side_by_side(given, block, BLOCKS)
    assert set(found.values) == {let.symbol for let in given}
    lanes = [stmt for stmt in _loops(found.filling) if stmt.kind == "lane"]
    assert [stmt.iterator.bound for stmt in lanes] == [5, 5]

    out = Buffer("out", f32, (BLOCKS, len(given)))
    ahead = [Store(out, (Var(block), ir.index(at)), found.values[let.symbol]) for at, let in enumerate(given)]
    one_by_one = [Store(out, (Var(block), ir.index(at)), let.value) for at, let in enumerate(given)]
    cells = np.random.default_rng(0).integers(0, 256, CELLS.size).astype(np.uint8)
    results = []
    for body in ((*found.filling, loop(block, BLOCKS, ahead)), (loop(block, BLOCKS, one_by_one),)):
        arrays: dict[Buffer, Any] = {CELLS: cells.copy(), out: np.zeros(out.shape, np.float32)}
        proc = ir.Proc("scales", (CELLS, out), body)
        run_module(ir.Module("scales", (proc,), (CELLS, out), ()), arrays)
        results.append(arrays[out])
    np.testing.assert_array_equal(results[0], results[1])
    assert np.count_nonzero(results[0]) > len(given)


def test_runs_that_follow_each_other_are_one_and_what_no_lane_changes_is_named_once() -> None:
    block = index_symbol("i_block")

    def times(first: int, offset: int) -> Expr:
        return Apply("mul", (Cast(Cast(byte(block, first), i32), f32), Cast(Cast(byte(block, offset), i32), f32)), f32)

    given = lets([times(int(offset >= 8), offset) for offset in range(4, 12)])
    found = side_by_side(given, block, BLOCKS)
    loops = _loops(found.filling)
    assert [stmt.iterator.bound for stmt in loops if stmt.kind == "lane"] == [8]
    assert sum(isinstance(stmt, Let) for stmt in loops[0].body) == 2
    cells = np.arange(CELLS.size).astype(np.uint8)
    out = Buffer("out", f32, (BLOCKS, len(given)))
    ahead = [Store(out, (Var(block), ir.index(at)), found.values[let.symbol]) for at, let in enumerate(given)]
    arrays: dict[Buffer, Any] = {CELLS: cells, out: np.zeros(out.shape, np.float32)}
    proc = ir.Proc("scales", (CELLS, out), (*found.filling, loop(block, BLOCKS, ahead)))
    run_module(ir.Module("scales", (proc,), (CELLS, out), ()), arrays)
    rows = cells.reshape(BLOCKS, NBYTES).astype(np.float32)
    np.testing.assert_array_equal(arrays[out], rows[:, 4:12] * np.repeat(rows[:, :2], 4, axis=1))


def test_short_runs_gaps_and_other_expressions_stay() -> None:
    block = index_symbol("i_block")
    assert side_by_side(lets([scale(block, offset) for offset in (4, 5, 6)]), block, BLOCKS).values == {}
    assert side_by_side(lets([scale(block, offset) for offset in (4, 5, 7, 8)]), block, BLOCKS).values == {}
    different = [scale(block, 4 + at, divisor) for at, divisor in enumerate((64, 64, 32, 32))]
    assert side_by_side(lets(different), block, BLOCKS).values == {}


def _loops(body: tuple[ir.Stmt, ...]) -> list[For]:
    found: list[For] = []
    for stmt in body:
        if isinstance(stmt, For):
            found += [stmt, *_loops(stmt.body)]
    return found
