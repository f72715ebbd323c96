"""Every CUDA template, executed on the host, against the interpreter of the unscheduled block."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import numpy as np
import pytest

from stagedtensor.codegen import loop_ir as ir
from stagedtensor.precision import Prec, bf16, f8e4m3, f16, f32, f64, i32, i64
from stagedtensor.runtime.nvrtc import compile_cuda
from tests.cuda.running import emitted, run_emulated
from tests.run.blocks import (
    Array,
    apply,
    at,
    axis,
    contraction,
    load,
    module,
    random_array,
    run_reference,
    same_bits,
    store,
)

ZERO = ir.Const(0.0, f32)


def agree(whole: ir.Module, arrays: dict[ir.Buffer, Array], scalars: dict[ir.Symbol, int] | None = None) -> None:
    expected = run_reference(whole, arrays, scalars)
    got = run_emulated(whole, arrays, scalars)
    for buffer in whole.external:
        assert same_bits(got[buffer], expected[buffer]), buffer.name


def close(whole: ir.Module, arrays: dict[ir.Buffer, Array], out: ir.Buffer, magnitude: Array, steps: int) -> None:
    """Within ``2 * steps * unit roundoff * magnitude`` of the interpreter, and the same bits twice."""
    expected = run_reference(whole, arrays)[out].astype(np.float64)
    one, two = (run_emulated(whole, arrays)[out] for _ in range(2))
    assert same_bits(one, two)
    bound = 2 * steps * 2.0**-24 * magnitude + 2.0**-149
    assert np.all(np.abs(one.astype(np.float64) - expected) <= bound)


def path(whole: ir.Module) -> str:
    return " | ".join(kernel.proc.path for kernel in emitted(whole).kernels)


@pytest.mark.parametrize(
    ("shape", "prec"),
    [((1,), f32), ((7,), f32), ((3, 5), f32), ((0, 4), f32), *(((37, 129), prec) for prec in (f32, bf16, f16, f8e4m3))],
)
def test_elementwise_with_broadcast(shape: tuple[int, ...], prec: Prec) -> None:
    x, bias, y = ir.Buffer("x", prec, shape), ir.Buffer("bias", prec, shape[-1:]), ir.Buffer("y", prec, shape)
    iterators = [axis(name, extent) for name, extent in zip("ij", shape, strict=False)]
    u = apply("add", load(x, *iterators), load(bias, iterators[-1]))
    value = apply("mul", u, apply("sigmoid", u))
    whole = module(ir.Block("silu", tuple(iterators), (store(y, iterators, value),)))
    agree(whole, {x: random_array(x), bias: random_array(bias, 1), y: np.zeros(shape, prec.numpy_dtype)})


def test_run_time_extents_reach_the_kernel() -> None:
    count = ir.Symbol("rows", i64)
    x, y = ir.Buffer("x", f32, (8, 6)), ir.Buffer("y", f32, (8, 6))
    i = ir.BlockIterator(ir.Symbol("i", i64), ir.Var(count), 8)
    j = axis("j", 6)
    whole = module(
        ir.Block("twice", (i, j), (store(y, [i, j], apply("add", load(x, i, j), load(x, i, j))),)), scalars=[count]
    )
    agree(whole, {x: random_array(x), y: np.ones((8, 6), np.float32)}, {count: 5})
    assert "const int64_t rows = scalars[0];" in emitted(whole).text


def row_sum(
    x: ir.Buffer, y: ir.Buffer, data: list[ir.BlockIterator], reduce: list[ir.BlockIterator], combine: str = "add"
) -> ir.Module:
    acc = ir.Symbol("acc", f32)
    op = {"add": "add", "max": "maximum"}[combine]
    start = ir.Const(0.0 if combine == "add" else float("-inf"), f32)
    item = ir.Accumulator(acc, start, apply(op, ir.Var(acc), load(x, *data, *reduce)), combine, start)
    return module(ir.Block("rows", (*data, *reduce), (store(y, data, ir.Var(acc)),), (item,)))


@pytest.mark.parametrize("size", [1, 31, 33, 500, 3000])
def test_row_sums(size: int) -> None:
    x, y = ir.Buffer("x", f32, (5, size)), ir.Buffer("y", f32, (5,))
    whole = row_sum(x, y, [axis("i", 5)], [axis("k", size, "reduce")])
    arrays = {x: random_array(x), y: np.zeros(5, np.float32)}
    close(whole, arrays, y, np.abs(arrays[x]).sum(1, dtype=np.float64), size)


@pytest.mark.parametrize("size", [1, 40, 700])
def test_row_maxima_are_exact(size: int) -> None:
    x, y = ir.Buffer("x", f32, (5, size)), ir.Buffer("y", f32, (5,))
    whole = row_sum(x, y, [axis("i", 5)], [axis("k", size, "reduce")], "max")
    values = random_array(x)
    values[2, size // 2] = np.nan
    agree(whole, {x: values, y: np.zeros(5, np.float32)})


@pytest.mark.parametrize("size", [40, 700])
def test_a_result_takes_the_place_of_a_cell_that_its_whole_row_reads(size: int) -> None:
    x, y = ir.Buffer("x", f32, (5, size)), ir.Buffer("y", f32, (5,))
    i, k = axis("i", 5), axis("k", size, "reduce")
    acc, start = ir.Symbol("acc", f32), ir.Const(float("-inf"), f32)
    update = apply("maximum", ir.Var(acc), apply("mul", load(x, i, k), load(y, i)))
    item = ir.Accumulator(acc, start, update, "max", start)
    whole = module(ir.Block("rows", (i, k), (store(y, [i], ir.Var(acc)),), (item,)))
    assert "threads per result" in path(whole)
    agree(whole, {x: random_array(x), y: random_array(y, 1)})


@pytest.mark.parametrize("size", [40, 700])
def test_a_row_starts_from_an_old_value_once(size: int) -> None:
    x, y = ir.Buffer("x", f32, (5, size)), ir.Buffer("y", f32, (5,))
    i, k = axis("i", 5), axis("k", size, "reduce")
    acc = ir.Symbol("acc", f32)
    item = ir.Accumulator(acc, load(y, i), apply("add", ir.Var(acc), load(x, i, k)), "add", ZERO)
    whole = module(ir.Block("rows", (i, k), (store(y, [i], ir.Var(acc)),), (item,)))
    assert "threads per result" in path(whole)
    arrays = {x: random_array(x), y: np.full(5, 1000.0, np.float32)}
    close(whole, arrays, y, 1000 + np.abs(arrays[x]).sum(1, dtype=np.float64), size)


def test_full_reduction_takes_two_passes() -> None:
    x, y = ir.Buffer("x", f32, (300, 101)), ir.Buffer("y", f32, ())
    whole = row_sum(x, y, [], [axis("i", 300, "reduce"), axis("k", 101, "reduce")])
    assert "parts" in path(whole)
    arrays = {x: random_array(x), y: np.zeros((), np.float32)}
    close(whole, arrays, y, np.abs(arrays[x]).sum(dtype=np.float64), 300 * 101)
    assert "atomic" not in emitted(whole).text


@pytest.mark.parametrize(
    ("shape", "a_axes", "b_axes"),
    [
        ((8, 8, 8), "ik", "kj"),
        ((130, 9, 17), "ik", "kj"),
        *(((70, 33, 45), a_axes, b_axes) for a_axes in ("ik", "ki") for b_axes in ("kj", "jk")),
    ],
)
def test_contraction_tiles(shape: tuple[int, int, int], a_axes: str, b_axes: str) -> None:
    m, n, k = shape
    sizes = {"i": m, "j": n, "k": k}
    a = ir.Buffer("a", f32, tuple(sizes[name] for name in a_axes))
    b = ir.Buffer("b", f32, tuple(sizes[name] for name in b_axes))
    c = ir.Buffer("c", f32, (m, n))
    its = {name: axis(name, size, "reduce" if name == "k" else "data") for name, size in sizes.items()}
    acc = ir.Symbol("acc", f32)
    update = ir.Fma(load(a, *(its[name] for name in a_axes)), load(b, *(its[name] for name in b_axes)), ir.Var(acc))
    item = ir.Accumulator(acc, ZERO, update, "add", ZERO)
    whole = module(
        ir.Block("product", (its["i"], its["j"], its["k"]), (store(c, [its["i"], its["j"]], ir.Var(acc)),), (item,))
    )
    assert "shared memory" in path(whole)
    # depth is walked in order: the sums are those of the interpreter, bit for bit
    agree(whole, {a: random_array(a), b: random_array(b, 1), c: np.zeros((m, n), np.float32)})


@pytest.mark.parametrize("prec", [f64, i32])
def test_contraction_of_other_types(prec: Prec) -> None:
    a, b, c = ir.Buffer("a", prec, (20, 19)), ir.Buffer("b", prec, (19, 18)), ir.Buffer("c", prec, (20, 18))
    i, j, k = axis("i", 20), axis("j", 18), axis("k", 19, "reduce")
    acc, zero = ir.Symbol("acc", prec), ir.Const(0, prec)
    product = apply("mul", load(a, i, k, prec=prec), load(b, k, j, prec=prec), prec=prec)
    item = ir.Accumulator(acc, zero, apply("add", ir.Var(acc), product, prec=prec), "add", zero)
    whole = module(ir.Block("product", (i, j, k), (ir.Store(c, at(i, j), ir.Var(acc)),), (item,)))
    generator = np.random.default_rng(5)
    arrays = {buffer: generator.integers(-9, 9, buffer.shape).astype(prec.numpy_dtype) for buffer in (a, b, c)}
    agree(whole, arrays)


def test_scatter_adds_in_order_without_atomics() -> None:
    ids, x, y = ir.Buffer("ids", i32, (40,)), ir.Buffer("x", f32, (40, 6)), ir.Buffer("y", f32, (5, 6))
    i, j = axis("i", 40, "reduce"), axis("j", 6)
    row = ir.Cast(ir.Load(ids, at(i)), i64)
    value = apply("add", ir.Load(y, (row, *at(j))), load(x, i, j))
    whole = module(ir.Block("scatter", (i, j), (ir.Store(y, (row, *at(j)), value),), scatter=True))
    generator = np.random.default_rng(2)
    arrays = {ids: generator.integers(0, 5, 40).astype(np.int32), x: random_array(x), y: np.zeros((5, 6), np.float32)}
    agree(whole, arrays)
    assert "atomic" not in emitted(whole).text


def test_elementwise_kernel_is_readable(golden: Callable[[str], None]) -> None:
    x, bias, y = ir.Buffer("x", bf16, (64, 100)), ir.Buffer("bias", f32, (100,)), ir.Buffer("y", bf16, (64, 100))
    i, j = axis("row", 64), axis("column", 100)
    value = apply("relu", apply("add", load(x, i, j), load(bias, j)))
    whole = module(ir.Block("hidden", (i, j), (store(y, [i, j], value),)))
    golden(emitted(whole).kernels[0].text)


def test_row_kernel_is_readable(golden: Callable[[str], None]) -> None:
    x, y = ir.Buffer("x", f32, (5, 1000)), ir.Buffer("y", f32, (5,))
    golden(emitted(row_sum(x, y, [axis("i", 5)], [axis("k", 1000, "reduce")])).kernels[0].text)


def test_contraction_kernel_is_readable(golden: Callable[[str], None]) -> None:
    a, b, c = ir.Buffer("a", f32, (100, 70)), ir.Buffer("b", f32, (70, 90)), ir.Buffer("c", f32, (100, 90))
    golden(emitted(module(contraction(a, b, c, (100, 90, 70), "NN"))).kernels[0].text)


@pytest.mark.parametrize(("prec", "shape"), [(f32, (64, 256)), (bf16, (64, 264)), (f16, (1 << 14,))])
def test_long_sweeps_move_16_bytes_at_a_time(prec: Prec, shape: tuple[int, ...]) -> None:
    x, state, rate = ir.Buffer("x", prec, shape), ir.Buffer("state", f32, shape), ir.Buffer("rate", f32, (1,))
    y = ir.Buffer("y", prec, shape)
    iterators = [axis(name, extent) for name, extent in zip("ij", shape, strict=False)]
    zero = ir.Const(0, i64)
    step = apply("mul", ir.Load(rate, (zero,)), load(x, *iterators))
    update = ir.Store(state, at(*iterators), apply("sub", load(state, *iterators), step))
    after = store(y, iterators, apply("exp", load(state, *iterators)))  # sees the new state
    whole = module(ir.Block("sweep", tuple(iterators), (update, after)))
    assert "16-byte accesses" in path(whole)
    agree(
        whole,
        {
            x: random_array(x),
            state: random_array(state, 1),
            rate: np.array([0.25], np.float32),
            y: np.zeros(shape, prec.numpy_dtype),
        },
    )


def test_loads_that_only_a_condition_keeps_inside_stay_behind_it() -> None:
    half = 1 << 13
    a, b, y = ir.Buffer("a", f32, (half,)), ir.Buffer("b", f32, (half,)), ir.Buffer("y", f32, (2 * half,))
    i = axis("i", 2 * half)
    first = apply("lt", ir.Var(i.symbol), ir.index(half), prec=i64)
    other = ir.Load(b, (apply("sub", ir.Var(i.symbol), ir.index(half), prec=i64),))
    value = apply("where", ir.Cast(first, f32), ir.Load(a, at(i)), other)
    whole = module(ir.Block("both", (i,), (ir.Store(y, at(i), value),)))
    assert "16-byte" not in path(whole)
    agree(whole, {a: random_array(a), b: random_array(b, 1), y: np.zeros(2 * half, np.float32)})


def test_cells_that_start_between_multiples_of_16_bytes_go_one_by_one() -> None:
    count = 1 << 14
    x, y = ir.Buffer("x", f32, (count + 4,)), ir.Buffer("y", f32, (count,))
    i = axis("i", count)
    later = ir.Load(x, (apply("add", ir.Var(i.symbol), ir.index(1), prec=i64),))
    whole = module(ir.Block("later", (i,), (store(y, [i], apply("neg", later)),)))
    assert "16-byte" not in path(whole)
    agree(whole, {x: random_array(x), y: np.zeros(count, np.float32)})


@pytest.mark.parametrize(("streams", "grouped"), [(12, True), (13, False)])
def test_a_thread_holds_groups_of_a_dozen_buffers_at_most(streams: int, grouped: bool) -> None:
    i = axis("i", 1 << 14)
    *given, y = (ir.Buffer(f"x{number}", f32, (1 << 14,)) for number in range(streams))
    value = load(given[0], i)
    for buffer in given[1:]:
        value = apply("add", value, load(buffer, i))
    assert ("16-byte" in path(module(ir.Block("sum", (i,), (store(y, [i], value),))))) == grouped


@pytest.mark.parametrize(("prec", "rows", "tile"), [(f32, 1024, 128), (f32, 1023, 64), (f64, 1024, 64), (f32, 32, 32)])
def test_large_products_take_large_tiles(prec: Prec, rows: int, tile: int) -> None:
    a, b, c = ir.Buffer("a", prec, (rows, 64)), ir.Buffer("b", prec, (64, 1024)), ir.Buffer("c", prec, (rows, 1024))
    i, j, k = axis("i", rows), axis("j", 1024), axis("k", 64, "reduce")
    acc, zero = ir.Symbol("acc", prec), ir.Const(0.0, prec)
    update = ir.Fma(load(a, i, k, prec=prec), load(b, k, j, prec=prec), ir.Var(acc))
    item = ir.Accumulator(acc, zero, update, "add", zero)
    whole = module(ir.Block("product", (i, j, k), (ir.Store(c, at(i, j), ir.Var(acc)),), (item,)))
    assert f"tiles of {tile} x {max(tile, 64)} x 16" in path(whole)


def test_cells_at_two_places_of_one_buffer_are_not_taken_for_one() -> None:
    count = 1 << 14
    x, y = ir.Buffer("x", f32, (2, count)), ir.Buffer("y", f32, (count,))
    i = axis("i", count)
    first, second = (ir.Load(x, (ir.index(row), *at(i))) for row in (0, 1))
    whole = module(ir.Block("both", (i,), (store(y, [i], apply("sub", first, second)),)))
    assert "16-byte" not in path(whole)
    agree(whole, {x: random_array(x), y: np.zeros(count, np.float32)})


def test_cells_beyond_a_run_time_extent_are_left_alone() -> None:
    count = ir.Symbol("count", i64)
    x, y = ir.Buffer("x", f32, (1 << 14,)), ir.Buffer("y", f32, (1 << 14,))
    i = ir.BlockIterator(ir.Symbol("i", i64), ir.Var(count), 1 << 14)
    whole = module(ir.Block("twice", (i,), (store(y, [i], apply("add", load(x, i), load(x, i))),)), scalars=[count])
    assert "16-byte" not in path(whole)
    agree(whole, {x: random_array(x), y: np.ones(1 << 14, np.float32)}, {count: 5001})


@pytest.mark.parametrize("name", ["max", "norm", "sincos", "threadIdx", "st_exp_f32", "half"])
def test_kernels_and_buffers_may_be_called_anything(name: str) -> None:
    x, y = ir.Buffer(name, f32, (40,)), ir.Buffer("float", f32, (40,))
    i = axis("__global__", 40)
    whole = module(ir.Block(name, (i,), (store(y, [i], apply("exp", load(x, i))),)))
    agree(whole, {x: random_array(x), y: np.zeros(40, np.float32)})
    if importlib.util.find_spec("cupy") is not None:
        assert compile_cuda(emitted(whole).text).warnings == ()


@pytest.mark.parametrize("swapped", [False, True])
def test_points_outside_an_operand_multiply_nothing(swapped: bool) -> None:
    """A padded convolution as a product: skipped points contribute nothing, even beside an infinite weight."""
    size, channels, width = 24, 5, 10
    x, w = ir.Buffer("x", f32, (size, channels)), ir.Buffer("w", f32, (3, channels, width))
    y = ir.Buffer("y", f32, (width, size) if swapped else (size, width))
    i, o = axis("i", size), axis("o", width)
    k, c = axis("k", 3, "reduce"), axis("c", channels, "reduce")
    place = apply("sub", apply("add", ir.Var(i.symbol), ir.Var(k.symbol), prec=i64), ir.index(1), prec=i64)
    inside = apply(
        "and", apply("ge", place, ir.index(0), prec=i64), apply("lt", place, ir.index(size), prec=i64), prec=i64
    )
    acc = ir.Symbol("acc", f32)
    update = ir.Fma(ir.Load(x, (place, *at(c))), load(w, k, c, o), ir.Var(acc))
    item = ir.Accumulator(acc, ZERO, update, "add", ZERO)
    data = (o, i) if swapped else (i, o)
    block = ir.Block("conv", (*data, k, c), (store(y, data, ir.Var(acc)),), (item,), guard=inside)
    whole = module(block)
    assert "points outside an operand skipped" in path(whole)
    arrays = {x: random_array(x), w: random_array(w, 1), y: np.zeros(y.shape, np.float32)}
    arrays[w][0, 0, 3] = np.inf
    agree(whole, arrays)
    row = run_reference(whole, arrays)[y].reshape(y.shape)
    assert np.isfinite(row[3, 0] if swapped else row[0, 3])
