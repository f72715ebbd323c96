"""Contractions over windows, compiled and run, against the interpreter: guards cut from loops, sums kept in memory,
copies.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable

import numpy as np
import pytest

from stagedtensor.codegen import loop_ir as ir
from stagedtensor.codegen.choices import Choices
from stagedtensor.codegen.emit.c import emit_module
from stagedtensor.codegen.schedule import choose, schedule
from stagedtensor.codegen.schedule.machine import Machine, TargetInfo, machine
from stagedtensor.numerics import Numerics
from stagedtensor.precision import Prec, bf16, f32, f64, i64
from stagedtensor.runtime.target import target
from tests.run.blocks import Array, apply, at, axis, module, random_array, run_c, run_reference, same_bits, store

Small = Callable[[int], None]


@pytest.fixture
def small_cache(monkeypatch: pytest.MonkeyPatch) -> Small:
    """Sets the caches that schedules assume, so that small operands are too large for them."""
    package = sys.modules["stagedtensor.codegen.schedule"]
    known = package.machine

    def give(nbytes: int) -> None:
        monkeypatch.setattr(choose, "_FIRST_CACHE", nbytes)

        def smaller(target: TargetInfo, choices: Choices) -> Machine:
            constants: Machine = known(target, choices)
            return dataclasses.replace(constants, cache_bytes=nbytes, serial_flops=1000)

        monkeypatch.setattr(package, "machine", smaller)

    return give


def at_cpu(whole: ir.Module, arrays: dict[ir.Buffer, Array]) -> None:
    """Compiled and interpreted results are the same bits for any number of threads."""
    expected = run_reference(whole, arrays)
    for threads in (1, 2, 3):
        got = run_c(whole, arrays, threads=threads)
        for buffer in whole.external:
            assert same_bits(got[buffer], expected[buffer]), (buffer.name, threads)


def text_of(whole: ir.Module) -> str:
    avx512 = target("avx512")
    return emit_module(schedule(whole, avx512, Numerics()), avx512).text


def inner(*symbols: ir.Symbol) -> ir.Expr:
    total: ir.Expr = ir.Var(symbols[0])
    for symbol in symbols[1:]:
        total = apply("add", total, ir.Var(symbol), prec=i64)
    return total


def input_gradient(batch: int, size: int, kernel: int, channels: int, out: int, prec: Prec) -> ir.Module:
    """``dx[b, h, w, c] = sum over o, kh, kw of dy[b, h - kh, w - kw, o] * weights[o, kh, kw, c]`` where dy has the
    cell.
    """
    small = size - kernel + 1
    wide = f64 if prec is f64 else f32
    dy, weights = (
        ir.Buffer("dy", prec, (batch, small, small, out)),
        ir.Buffer("weights", prec, (out, kernel, kernel, channels)),
    )
    dx = ir.Buffer("dx", prec, (batch, size, size, channels))
    b, h, w, c = axis("b", batch), axis("h", size), axis("w", size), axis("c", channels)
    o, kh, kw = axis("o", out, "reduce"), axis("kh", kernel, "reduce"), axis("kw", kernel, "reduce")
    rows, columns = (apply("sub", *at(a, k), prec=i64) for a, k in ((h, kh), (w, kw)))
    guard: ir.Expr | None = None
    for position in (rows, columns):
        for test in (apply("ge", position, ir.index(0), prec=i64), apply("lt", position, ir.index(small), prec=i64)):
            guard = test if guard is None else apply("and", guard, test, prec=i64)
    cells: list[ir.Expr] = [ir.Load(dy, (*at(b), rows, columns, *at(o))), ir.Load(weights, at(o, kh, kw, c))]
    cells = [cell if cell.type is wide else ir.Cast(cell, wide) for cell in cells]
    acc, zero = ir.Symbol("acc", wide), ir.Const(0.0, wide)
    block = ir.Block(
        "dx", (b, h, w, c, o, kh, kw), (store(dx, (b, h, w, c), ir.Var(acc)),),
        (ir.Accumulator(acc, zero, ir.Fma(cells[0], cells[1], ir.Var(acc)), "add", zero),), guard=guard,
    )  # fmt: skip
    return module(block)


def weight_gradient(batch: int, size: int, kernel: int, channels: int, out: int) -> ir.Module:
    """``dw[o, kh, kw, c] = sum over b, h, w of dy[b, h, w, o] * x[b, h + kh, w + kw, c]``, then a step of momentum."""
    small = size - kernel + 1
    dy, x = ir.Buffer("dy", f32, (batch, small, small, out)), ir.Buffer("x", f32, (batch, size, size, channels))
    dw, momentum = (ir.Buffer(name, f32, (out, kernel, kernel, channels)) for name in ("dw", "momentum"))
    o, kh, kw, c = axis("o", out), axis("kh", kernel), axis("kw", kernel), axis("c", channels)
    b, h, w = axis("b", batch, "reduce"), axis("h", small, "reduce"), axis("w", small, "reduce")
    acc, zero = ir.Symbol("acc", f32), ir.Const(0.0, f32)
    pixel = ir.Load(x, (*at(b), inner(h.symbol, kh.symbol), inner(w.symbol, kw.symbol), *at(c)))
    update = ir.Fma(ir.Load(dy, at(b, h, w, o)), pixel, ir.Var(acc))
    data = (o, kh, kw, c)
    kept = apply("add", apply("mul", ir.Const(0.5, f32), ir.Load(momentum, at(*data))), ir.Var(acc))
    block = ir.Block(
        "dw", (*data, b, h, w), (store(dw, data, ir.Var(acc)), store(momentum, data, kept)),
        (ir.Accumulator(acc, zero, update, "add", zero),),
    )  # fmt: skip
    return module(block)


@pytest.mark.parametrize("prec", [f32, f64, bf16])
@pytest.mark.parametrize("sizes", [(13, 7, 3, 8, 5), (16, 7, 3, 6, 5), (9, 6, 5, 32, 4), (3, 5, 5, 1, 2)])
def test_input_gradient_skips_cells_outside(sizes: tuple[int, int, int, int, int], prec: Prec) -> None:
    whole = input_gradient(*sizes, prec)
    at_cpu(whole, {buffer: random_array(buffer, seed) for seed, buffer in enumerate(whole.external)})


def test_guards_become_the_ends_of_loops() -> None:
    text = text_of(input_gradient(13, 7, 3, 8, 5, f32))
    assert "const int64_t first_kh = st_max_i64(0, i_h - 4);" in text
    assert "const int64_t kh_count = st_min_i64(3, i_h + 1) - first_kh;" in text
    assert "if (" not in text.split("// schedule")[1]


def test_a_copy_brings_far_rows_together(small_cache: Small) -> None:
    whole = input_gradient(16, 6, 3, 16, 8, f32)
    assert "dy_panels" not in text_of(whole)
    small_cache(512)
    assert "dy_panels : f32[4,4,8,16]" in text_of(whole)
    at_cpu(whole, {buffer: random_array(buffer, seed) for seed, buffer in enumerate(whole.external)})


def test_rows_that_displace_each_other_are_brought_together() -> None:
    whole = input_gradient(26, 12, 5, 8, 16, f32)  # rows 4 KiB apart, each small enough
    assert "dy_panels : f32[8,8,16,26]" in text_of(whole)
    at_cpu(whole, {buffer: random_array(buffer, seed) for seed, buffer in enumerate(whole.external)})
    assert "dy_panels" not in text_of(input_gradient(26, 12, 5, 8, 17, f32))


def test_copies_whose_last_tile_starts_early_are_multiplied_by_tiles() -> None:
    whole = input_gradient(29, 12, 5, 8, 16, f32)
    text = text_of(whole).split("dy_panels : f32[8,8,16,29]")[-1]
    assert "first_row = st_min_i64(" in text
    assert "_in_3(" in text
    at_cpu(whole, {buffer: random_array(buffer, seed) for seed, buffer in enumerate(whole.external)})


@pytest.mark.parametrize(("channels", "columns"), [(1, 8), (8, 8), (9, 16)])
def test_few_columns_take_half_a_vector(channels: int, columns: int) -> None:
    shape = choose.tile_shape(machine(target("avx512")), 4, 64, channels, padded=True)
    assert shape.columns == columns


@pytest.mark.parametrize("sizes", [(6, 18, 3, 4, 24), (4, 20, 5, 1, 8), (8, 17, 2, 3, 5)])
def test_sums_of_blocks_stay_in_order(sizes: tuple[int, int, int, int, int], small_cache: Small) -> None:
    whole = weight_gradient(*sizes)
    dy, x = whole.external[:2]
    small_cache((dy.nbytes + x.nbytes) * 3 // 4)
    assert "blocks of it" in text_of(whole)
    arrays = {buffer: random_array(buffer, seed) for seed, buffer in enumerate(whole.external)}
    at_cpu(whole, arrays)


def test_results_may_lie_across_the_vector() -> None:
    """A kernel of one channel is 5 wide; the 8 output channels fill more lanes, and the long sums pay for it."""
    whole = weight_gradient(4, 20, 5, 1, 8)
    assert "register tile 5x8" in text_of(whole)
    at_cpu(whole, {buffer: random_array(buffer, seed) for seed, buffer in enumerate(whole.external)})


def test_infinities_outside_do_not_reach_the_result() -> None:
    whole = input_gradient(9, 6, 3, 16, 4, f32)
    arrays = {buffer: random_array(buffer, seed) for seed, buffer in enumerate(whole.external)}
    weights = next(buffer for buffer in whole.external if buffer.name == "weights")
    arrays[weights][:, 2, 2, :] = np.inf
    got = run_c(whole, arrays, threads=1)
    dx = next(buffer for buffer in whole.external if buffer.name == "dx")
    assert np.isfinite(got[dx][:, 0, 0, :]).all()
    at_cpu(whole, arrays)


def test_weights_are_padded_to_whole_vectors_behind_a_guard() -> None:
    """The guard skips cells of ``dy``; the weights are there at every point, so that panels of them may be made."""
    assert "weights_panels : f32[5,3,3,6]" in text_of(input_gradient(16, 7, 3, 6, 5, f32))
