"""Which template a block gets, and what it looks like: printed loops, verified, interpreted against the block."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from stagedtensor.codegen import loop_ir as ir
from stagedtensor.codegen.affine import affine, flat_index, floor_divide, modulo, to_expr
from stagedtensor.codegen.interpret import run_module
from stagedtensor.codegen.pretty import pretty
from stagedtensor.codegen.schedule import schedule
from stagedtensor.codegen.schedule.choose import tile_shape
from stagedtensor.codegen.schedule.machine import machine
from stagedtensor.codegen.verify import verify
from stagedtensor.numerics import Numerics
from stagedtensor.precision import bf16, f32, i64
from stagedtensor.runtime.target import TARGETS, target
from tests.run.blocks import ZERO, apply, axis, contraction, load, module, random_array, same_bits, store
from tests.run.test_schedule_c import summed

AVX512 = target("avx512")


def scheduled(*blocks: ir.Block, name: str = "avx512") -> ir.Module:
    whole = schedule(module(*blocks), target(name), Numerics())
    verify(whole)
    return whole


def paths(whole: ir.Module) -> list[str]:
    return [kernel.path for kernel in whole.kernels]


def test_flat_loop_where_all_accesses_are_adjacent(golden: Callable[[str], None]) -> None:
    x, y = ir.Buffer("x", bf16, (4, 5, 6)), ir.Buffer("y", bf16, (4, 5, 6))
    i, j, k = axis("i", 4), axis("j", 5), axis("k", 6)
    whole = scheduled(ir.Block("y", (i, j, k), (store(y, (i, j, k), apply("tanh", load(x, i, j, k))),)))
    assert paths(whole) == ["elementwise, flat loop, one thread"]
    golden(pretty(whole.kernels[0]))


def test_broadcast_keeps_a_nest() -> None:
    x, bias, y = ir.Buffer("x", f32, (400, 600)), ir.Buffer("bias", f32, (600,)), ir.Buffer("y", f32, (400, 600))
    i, j = axis("i", 400), axis("j", 600)
    whole = scheduled(ir.Block("y", (i, j), (store(y, (i, j), apply("add", load(x, i, j), load(bias, j))),)))
    (kernel,) = whole.kernels
    (outer,) = kernel.body
    assert isinstance(outer, ir.For)
    assert outer.kind == "parallel"
    assert outer.iterator.symbol is i.symbol
    (inner,) = outer.body
    assert isinstance(inner, ir.For)
    assert inner.kind == "vector"


def test_contraction_tile(golden: Callable[[str], None]) -> None:
    a, b, c = ir.Buffer("a", bf16, (20, 7)), ir.Buffer("b", bf16, (7, 64)), ir.Buffer("c", bf16, (20, 64))
    whole = scheduled(contraction(a, b, c, (20, 64, 7), "NN"))
    golden("\n".join(pretty(kernel) for kernel in whole.kernels))


def test_row_reduction_lanes(golden: Callable[[str], None]) -> None:
    x, y = ir.Buffer("x", f32, (4, 37)), ir.Buffer("y", f32, (4,))
    whole = scheduled(summed(x, y, 1), name="x86-64")
    golden(pretty(whole.kernels[0]))


def test_full_reduction_is_cut_by_shape_alone() -> None:
    x, y = ir.Buffer("x", f32, (1024, 1000)), ir.Buffer("y", f32, ())
    first, second = scheduled(summed(x, y, 1)).kernels
    assert first.name == "y_parts"
    assert "64 parts" in first.path
    assert second.path.startswith("merges 64 parts in order")


def test_partial_states_keep_the_accumulators_type() -> None:
    x, y = ir.Buffer("x", bf16, (1024, 1000)), ir.Buffer("y", bf16, ())
    whole = scheduled(summed(x, y, 1))
    assert [buffer.type for buffer in whole.temporaries] == [f32]


def test_serial_accumulator_gets_no_lanes() -> None:
    x, y = ir.Buffer("x", f32, (4, 64)), ir.Buffer("y", f32, (4,))
    block = summed(x, y, 1)
    (item,) = block.accumulators
    alone = ir.Accumulator(item.symbol, item.init, item.update)
    whole = scheduled(ir.Block("y", block.iterators, block.stores, (alone,)))
    assert paths(whole) == ["reduction in order, one thread"]


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_every_tile_fits_the_registers(name: str) -> None:
    constants = machine(target(name))
    for height in (1, 2, 5, 6, 7, 13, 32, 1000):
        for width in (1, 3, 10, 16, 48, 65, 1000):
            for padded in (False, True):
                shape = tile_shape(constants, 4, height, width, padded=padded)
                vectors = -(-shape.columns * 4 // constants.vector_bytes)
                assert shape.rows <= height
                assert padded or shape.columns <= width
                assert vectors * (shape.rows + 1) < constants.registers


@pytest.mark.parametrize("form", ["NN", "NT", "TN"])
@pytest.mark.parametrize("name", ["x86-64", "avx512"])
def test_scheduled_contraction_means_the_same(form: str, name: str) -> None:
    m, n, k = 9, 18, 5
    a = ir.Buffer("a", f32, (k, m) if form == "TN" else (m, k))
    b = ir.Buffer("b", f32, (n, k) if form == "NT" else (k, n))
    c = ir.Buffer("c", f32, (m, n))
    whole = module(contraction(a, b, c, (m, n, k), form))
    arrays = {a: random_array(a, 1), b: random_array(b, 2), c: np.zeros((m, n), np.float32)}
    again = {key: value.copy() for key, value in arrays.items()}
    run_module(whole, arrays)
    run_module(schedule(whole, target(name), Numerics()), again)
    assert same_bits(arrays[c], again[c])


def test_work_below_the_threshold_stays_on_one_thread() -> None:
    small, large = (ir.Buffer("x", f32, (size,)) for size in (1000, 100_000))
    found = []
    for buffer in (small, large):
        i = axis("i", buffer.shape[0])
        found += paths(scheduled(ir.Block("x", (i,), (store(buffer, [i], apply("exp", load(buffer, i))),))))
    assert found == [
        "elementwise, flat loop, one thread",
        "elementwise, flat loop, static partition over threads",
    ]


def test_costs_are_filled_in() -> None:
    a, b, c = ir.Buffer("a", f32, (8, 8)), ir.Buffer("b", f32, (8, 16)), ir.Buffer("c", f32, (8, 16))
    kernel = scheduled(contraction(a, b, c, (8, 16, 8), "NN")).kernels[-1]
    assert kernel.cost.flops == 2 * 8 * 16 * 8
    assert kernel.cost.nbytes == 4 * (64 + 128 + 128)


def test_quotient_and_remainder_fold() -> None:
    t, j = ir.Symbol("t", i64), ir.Symbol("j", i64)
    buffer = ir.Buffer("x", f32, (4, 5, 6))
    indices = (floor_divide(ir.Var(t), 30), modulo(floor_divide(ir.Var(t), 6), 5), modulo(ir.Var(t), 6))
    assert flat_index(buffer, indices).terms == ((ir.Var(t), 1),)
    value = ir.Apply("add", (ir.Apply("mul", (ir.Var(t), ir.index(8)), i64), ir.Var(j)), i64)
    assert to_expr(affine(floor_divide(value, 8), {j: 8})) == ir.Var(t)
    assert to_expr(affine(modulo(value, 8), {j: 8})) == ir.Var(j)
    assert affine(floor_divide(value, 8), {j: 9}).terms == ((ir.Var(t), 1), (floor_divide(ir.Var(j), 8), 1))
    assert affine(floor_divide(value, 8)).terms == ((floor_divide(value, 8), 1),)
    # a view of [.., 4, 16] cells behind a tile of 64
    tile = ir.Apply("add", (ir.Apply("mul", (ir.Var(t), ir.index(64)), i64), ir.Var(j)), i64)
    split = (floor_divide(tile, 64), modulo(floor_divide(tile, 16), 4), modulo(tile, 16))
    view = ir.Buffer("view", f32, (9, 4, 16))
    assert flat_index(view, split, {t: 9, j: 64}).same_as(affine(tile))


def test_zero_extent_reduction_gives_the_initial_state() -> None:
    x, y = ir.Buffer("x", f32, (3, 0)), ir.Buffer("y", f32, (3,))
    whole = scheduled(summed(x, y, 1))
    arrays = {x: np.zeros((3, 0), np.float32), y: np.ones(3, np.float32)}
    run_module(whole, arrays)
    assert arrays[y].tolist() == [ZERO.value] * 3
