"""Every schedule template, compiled and run, against the interpreter of the unscheduled block."""

from __future__ import annotations

import numpy as np
import pytest

from stagedtensor.codegen import loop_ir as ir
from stagedtensor.codegen.passes.hoist import hoist
from stagedtensor.codegen.schedule import schedule
from stagedtensor.numerics import Numerics
from stagedtensor.precision import Prec, bf16, bool_, f8e4m3, f16, f32, f64, i8, i16, i32, i64, u8, u32
from stagedtensor.runtime.target import Target, detect, target
from tests.numerics.running import runnable_targets
from tests.run.blocks import (
    ZERO,
    Array,
    apply,
    at,
    axis,
    contraction,
    load,
    module,
    random_array,
    run_c,
    run_reference,
    same_bits,
    store,
)


def agree(
    whole: ir.Module,
    arrays: dict[ir.Buffer, Array],
    scalars: dict[ir.Symbol, int] | None = None,
    on: Target | None = None,
) -> None:
    """Compiled and interpreted results are the same bits, on one thread and on three."""
    expected = run_reference(whole, arrays, scalars)
    for threads in (1, 3):
        got = run_c(whole, arrays, scalars, threads=threads, target=on)
        for buffer in whole.external:
            assert same_bits(got[buffer], expected[buffer]), (buffer.name, threads)


def close(whole: ir.Module, arrays: dict[ir.Buffer, Array], out: ir.Buffer, magnitude: Array, steps: int) -> None:
    """Within ``2 * steps * unit roundoff * magnitude`` of the interpreter; the same bits for any thread count."""
    expected = run_reference(whole, arrays)[out].astype(np.float64)
    one = run_c(whole, arrays, threads=1)[out]
    assert same_bits(one, run_c(whole, arrays, threads=3)[out])
    assert same_bits(one, run_c(whole, arrays, threads=2)[out])
    bound = 2 * steps * 2.0**-24 * magnitude + 2.0**-149
    assert np.all(np.abs(one.astype(np.float64) - expected) <= bound)


def buffers(prec: Prec, *shapes: tuple[int, ...]) -> list[ir.Buffer]:
    return [ir.Buffer(name, prec, shape) for name, shape in zip("xyzuvw", shapes, strict=False)]


# -- elementwise --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5), (37, 129), (300, 400), (0, 4)])
@pytest.mark.parametrize("prec", [f32, bf16, f16, f8e4m3])
def test_elementwise_gelu_with_bias(shape: tuple[int, ...], prec: Prec) -> None:
    x, bias, y = ir.Buffer("x", prec, shape), ir.Buffer("bias", prec, shape[-1:]), ir.Buffer("y", prec, shape)
    iterators = [axis(name, extent) for name, extent in zip("ij", shape, strict=False)]
    u = apply("add", load(x, *iterators), load(bias, iterators[-1]))
    cubic = apply("mul", apply("mul", u, u), apply("mul", u, ir.Const(float(np.float32(0.044715)), f32)))
    inner = apply("mul", apply("add", u, cubic), ir.Const(float(np.float32(0.79788456)), f32))
    value = apply("mul", u, apply("sigmoid", apply("mul", ir.Const(2.0, f32), inner)))
    whole = module(ir.Block("gelu", tuple(iterators), (store(y, iterators, value),)))
    agree(whole, {x: random_array(x), bias: random_array(bias, 1), y: np.zeros(shape, prec.numpy_dtype)})


@pytest.mark.parametrize("prec", [i8, u8, i16, i32, u32, i64])
def test_elementwise_integers_wrap(prec: Prec) -> None:
    x, y, z = buffers(prec, (300,), (300,), (300,))
    i = axis("i", 300)
    a, b = load(x, i, prec=prec), load(y, i, prec=prec)
    value = apply(
        "sub", apply("mul", apply("mul", a, a, prec=prec), b, prec=prec), apply("neg", b, prec=prec), prec=prec
    )
    value = apply("maximum", value, apply("floordiv", a, b, prec=prec), prec=prec)
    value = apply("add", value, apply("mod", a, b, prec=prec), prec=prec)
    whole = module(ir.Block("z", (i,), (store(z, [i], value),)))
    info = np.iinfo(prec.numpy_dtype)
    generator = np.random.default_rng(3)
    arrays = {
        buffer: generator.integers(info.min, info.max, 300, dtype=prec.numpy_dtype, endpoint=True) for buffer in (x, y)
    }
    agree(whole, {**arrays, z: np.zeros(300, prec.numpy_dtype)})


def test_elementwise_transposes_and_selects() -> None:
    x, flag, y = ir.Buffer("x", f64, (40, 33)), ir.Buffer("flag", bool_, (33,)), ir.Buffer("y", f64, (33, 40))
    i, j = axis("i", 33), axis("j", 40)
    cell = ir.Load(x, at(j, i))
    test = apply("and", ir.Load(flag, at(i)), apply("gt", cell, ir.Const(0.5, f64), prec=f64), prec=f64)
    value = apply("where", test, cell, apply("neg", apply("abs", cell, prec=f64), prec=f64), prec=f64)
    whole = module(ir.Block("y", (i, j), (store(y, [i, j], value),)))
    agree(whole, {x: random_array(x), flag: random_array(flag), y: np.zeros(y.shape)})


def test_in_place_sweep_reads_what_it_stored() -> None:
    """Momentum, parameter and bf16 twin in one sweep: later stores read the cells that earlier ones wrote."""
    n = 5000
    p, m, g, twin = (ir.Buffer(name, f32, (n,)) for name in ("p", "m", "g", "twin"))
    twin = ir.Buffer("twin", bf16, (n,))
    i = axis("i", n)
    velocity = apply("add", apply("mul", ir.Const(0.5, f32), load(m, i)), load(g, i))
    step = apply("sub", load(p, i), apply("mul", ir.Const(0.25, f32), load(m, i)))
    block = ir.Block("sgd", (i,), (store(m, [i], velocity), store(p, [i], step), store(twin, [i], load(p, i))))
    whole = module(block)
    agree(whole, {item: random_array(item, seed) for seed, item in enumerate(whole.external)})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), -0.0, 1e-45, 3.4028234663852886e38, 0.1])
def test_literals_keep_their_bits(value: float) -> None:
    single = float(np.float32(value))
    x, y = ir.Buffer("x", f32, (1,)), ir.Buffer("y", f64, (1,))
    i, j = axis("i", 1), axis("j", 1)
    whole = module(
        ir.Block("x", (i,), (store(x, [i], ir.Const(single, f32)),)),
        ir.Block("y", (j,), (store(y, [j], ir.Const(value, f64)),)),
    )
    got = run_c(whole, {x: np.ones(1, np.float32), y: np.ones(1)})
    assert np.array_equal(got[x], np.array([single], np.float32), equal_nan=True)
    assert np.array_equal(got[y], np.array([value]), equal_nan=True)
    assert np.signbit(got[y][0]) == np.signbit(value)


# -- contractions -------------------------------------------------------------------------------------------------

SIZES = [(32, 128, 64), (130, 70, 65), (13, 100, 9), (17, 16, 1), (9, 10, 33), (8, 1, 40)]


@pytest.mark.parametrize("form", ["NN", "NT", "TN"])
@pytest.mark.parametrize("prec", [f32, bf16, f16, f64, i32])
def test_contraction_tiles_are_the_reference_bit_for_bit(prec: Prec, form: str) -> None:
    """Where no matrix unit has an order of its own."""
    for m, n, k in SIZES if prec in (f32, bf16) else SIZES[1:3]:
        a = ir.Buffer("a", prec, (k, m) if form == "TN" else (m, k))
        b = ir.Buffer("b", prec, (n, k) if form == "NT" else (k, n))
        c = ir.Buffer("c", prec, (m, n))
        arrays = {a: random_array(a, 1), b: random_array(b, 2), c: np.zeros(c.shape, prec.numpy_dtype)}
        whole = module(contraction(a, b, c, (m, n, k), form))
        if n > 1:
            agree(whole, arrays, on=target(runnable_targets()[-1]))
        else:
            size = np.abs(arrays[a].astype(float)).sum() * 2
            close(whole, arrays, c, size, k) if prec is f32 else run_c(whole, arrays)


@pytest.mark.parametrize("name", ["x86-64", "x86-64-v3"])
def test_contraction_is_the_same_on_narrower_targets(name: str) -> None:
    a, b, c = ir.Buffer("a", f32, (30, 40)), ir.Buffer("b", f32, (40, 50)), ir.Buffer("c", f32, (30, 50))
    whole = module(contraction(a, b, c, (30, 50, 40), "NN"))
    arrays = {a: random_array(a, 1), b: random_array(b, 2), c: np.zeros(c.shape, np.float32)}
    assert same_bits(run_c(whole, arrays, target=target(name))[c], run_reference(whole, arrays)[c])


def test_contraction_starts_from_the_old_value_and_rounds_in_the_epilogue() -> None:
    m, n, k = 33, 70, 40
    a, b, c = ir.Buffer("a", bf16, (m, k)), ir.Buffer("b", bf16, (k, n)), ir.Buffer("c", bf16, (m, n))
    block = contraction(a, b, c, (m, n, k), "NN", lambda value, i, j: apply("tanh", value))
    (item,) = block.accumulators
    i, j, _ = block.iterators
    started = ir.Accumulator(item.symbol, load(c, i, j), item.update, "add", ZERO)
    whole = module(ir.Block("c", block.iterators, block.stores, (started,)))
    agree(whole, {buffer: random_array(buffer, seed) for seed, buffer in enumerate((a, b, c))})


def test_batched_contraction() -> None:
    batch, m, n, k = axis("batch", 3), axis("m", 20), axis("n", 24), axis("k", 18, "reduce")
    a, b, c = ir.Buffer("a", f16, (3, 20, 18)), ir.Buffer("b", f16, (3, 24, 18)), ir.Buffer("c", f16, (3, 20, 24))
    acc = ir.Symbol("acc", f32)
    update = ir.Fma(load(a, batch, m, k), load(b, batch, n, k), ir.Var(acc))
    block = ir.Block(
        "scores", (batch, m, n, k), (store(c, (batch, m, n), ir.Var(acc)),),
        (ir.Accumulator(acc, ZERO, update, "add", ZERO),),
    )  # fmt: skip
    whole = module(block)
    agree(whole, {buffer: random_array(buffer, seed) for seed, buffer in enumerate((a, b, c))})


def test_padded_convolution_skips_points_outside() -> None:
    side, channels, filters = 9, 3, 8
    x = ir.Buffer("x", f32, (2, side, side, channels))
    w = ir.Buffer("w", f32, (3, 3, channels, filters))
    y = ir.Buffer("y", f32, (2, side, side, filters))
    b, r, s, o = axis("b", 2), axis("r", side), axis("s", side), axis("o", filters)
    dr, ds, ch = axis("dr", 3, "reduce"), axis("ds", 3, "reduce"), axis("ch", channels, "reduce")

    def shifted(data: ir.BlockIterator, by: ir.BlockIterator) -> ir.Expr:
        return apply("sub", apply("add", *at(data, by), prec=i64), ir.index(1), prec=i64)

    guard: ir.Expr | None = None
    for data, by in ((r, dr), (s, ds)):
        position = shifted(data, by)
        for test in (
            apply("ge", position, ir.index(0), prec=i64),
            apply("lt", position, ir.index(side), prec=i64),
        ):
            guard = test if guard is None else apply("and", guard, test, prec=i64)
    acc = ir.Symbol("acc", f32)
    cell = ir.Load(x, (*at(b), shifted(r, dr), shifted(s, ds), *at(ch)))
    update = ir.Fma(cell, load(w, dr, ds, ch, o), ir.Var(acc))
    block = ir.Block(
        "conv", (b, r, s, o, dr, ds, ch), (store(y, (b, r, s, o), ir.Var(acc)),),
        (ir.Accumulator(acc, ZERO, update, "add", ZERO),), guard=guard,
    )  # fmt: skip
    whole = module(block)
    agree(whole, {buffer: random_array(buffer, seed) for seed, buffer in enumerate((x, w, y))})


# -- reductions ---------------------------------------------------------------------------------------------------


def summed(x: ir.Buffer, y: ir.Buffer, along: int, op: str = "add") -> ir.Block:
    """``y = reduce(x)`` over one axis of a matrix, or over all for a scalar ``y``."""
    kinds: list[ir.IteratorKind] = ["reduce" if not y.shape or axis_ == along else "data" for axis_ in (0, 1)]
    i, j = axis("i", x.shape[0], kinds[0]), axis("j", x.shape[1], kinds[1])
    prec = f32 if x.type.is_narrow else x.type
    acc = ir.Symbol("acc", prec)
    neutral = ir.Const({"add": 0.0, "max": float("-inf"), "mul": 1.0}[op] if prec.is_float else 0, prec)
    combine = {"add": "add", "max": "maximum", "mul": "mul"}[op]
    update = apply(combine, ir.Var(acc), load(x, i, j, prec=prec), prec=prec)
    kept = [item for item in (i, j) if item.kind == "data"]
    ordered = (*kept, *(item for item in (i, j) if item.kind == "reduce"))
    return ir.Block(
        y.name, ordered, (store(y, kept, ir.Var(acc)),), (ir.Accumulator(acc, neutral, update, op, neutral),)
    )


@pytest.mark.parametrize("prec", [f32, bf16, f64])
@pytest.mark.parametrize("shape", [(5, 1), (3, 7), (33, 100), (40, 1000), (2, 0), (0, 5)])
def test_row_sums(shape: tuple[int, int], prec: Prec) -> None:
    x, y = ir.Buffer("x", prec, shape), ir.Buffer("y", f32 if prec is bf16 else prec, shape[:1])
    arrays = {x: random_array(x), y: np.ones(y.shape, y.type.numpy_dtype)}
    close(module(summed(x, y, 1)), arrays, y, np.abs(arrays[x].astype(float)).sum(1), max(1, shape[1]))


@pytest.mark.parametrize("shape", [(1, 5), (7, 3), (100, 33), (2000, 10), (1000, 130), (0, 4)])
def test_column_sums(shape: tuple[int, int]) -> None:
    x, y = ir.Buffer("x", f32, shape), ir.Buffer("y", f32, shape[1:])
    arrays = {x: random_array(x), y: np.ones(y.shape, np.float32)}
    close(module(summed(x, y, 0)), arrays, y, np.abs(arrays[x].astype(float)).sum(0), max(1, shape[0]))


@pytest.mark.parametrize("shape", [(1, 1), (10, 10), (300, 517), (1031, 257)])
def test_full_sum_in_parts(shape: tuple[int, int]) -> None:
    x, y = ir.Buffer("x", f32, shape), ir.Buffer("y", f32, ())
    arrays = {x: random_array(x), y: np.ones((), np.float32)}
    close(module(summed(x, y, 1)), arrays, y, np.abs(arrays[x].astype(float)).sum(), shape[0] * shape[1])


@pytest.mark.parametrize("along", [0, 1])
def test_maximum_is_exact_and_keeps_nan(along: int) -> None:
    x, y = ir.Buffer("x", f32, (70, 90)), ir.Buffer("y", f32, (90,) if along == 0 else (70,))
    values = random_array(x)
    values[3, 5] = np.nan
    values[:, 8] = -np.inf
    agree(module(summed(x, y, along, "max")), {x: values, y: np.zeros(y.shape, np.float32)})


def test_integer_sum_wraps_in_any_order() -> None:
    x, y = ir.Buffer("x", i32, (300, 300)), ir.Buffer("y", i32, ())
    values = np.random.default_rng(0).integers(-(2**31), 2**31, (300, 300)).astype(np.int32)
    agree(module(summed(x, y, 1)), {x: values, y: np.zeros((), np.int32)})


def argmax(x: ir.Buffer, y: ir.Buffer, where: ir.Buffer, whole: bool) -> ir.Block:
    i, j = axis("i", x.shape[0], "reduce" if whole else "data"), axis("j", x.shape[1], "reduce")
    best, position = ir.Symbol("best", f32), ir.Symbol("position", i32)
    cell = load(x, i, j)
    here = ir.Cast(
        apply("add", apply("mul", *at(i), ir.index(x.shape[1]), prec=i64), *at(j), prec=i64) if whole else at(j)[0], i32
    )
    nan_now = apply("ne", cell, cell)
    was_number = apply("eq", ir.Var(best), ir.Var(best))
    better = apply("or", apply("gt", cell, ir.Var(best)), apply("and", nan_now, was_number))
    low = ir.Const(float("-inf"), f32)
    kept = [] if whole else [i]
    return ir.Block(
        "argmax",
        (i, j),
        (store(y, kept, ir.Var(best)), store(where, kept, ir.Var(position))),
        (
            ir.Accumulator(best, low, apply("maximum", ir.Var(best), cell), "max", low),
            ir.Accumulator(
                position, ir.Const(0, i32), apply("where", better, here, ir.Var(position), prec=i32), "",
                ir.Const(0, i32), best,
            ),
        ),
    )  # fmt: skip


@pytest.mark.parametrize("whole", [False, True])
def test_argmax_takes_nan_first_and_the_lower_position_at_ties(whole: bool) -> None:
    rows, length = 260, 331
    shape = () if whole else (rows,)
    x, y, where = ir.Buffer("x", f32, (rows, length)), ir.Buffer("y", f32, shape), ir.Buffer("where", i32, shape)
    values = np.random.default_rng(1).integers(0, 6, (rows, length)).astype(np.float32)
    values[17, 200] = values[17, 45] = values[40, 3] = np.nan
    agree(
        module(argmax(x, y, where, whole)),
        {x: values, y: np.zeros(shape, np.float32), where: np.zeros(shape, np.int32)},
    )


def test_serial_accumulators_stay_serial() -> None:
    x, y = ir.Buffer("x", bf16, (200, 300)), ir.Buffer("y", f32, (200,))
    i, j = axis("i", 200), axis("j", 300, "reduce")
    acc = ir.Symbol("acc", f32)
    rounded = ir.Cast(ir.Cast(apply("add", ir.Var(acc), load(x, i, j)), bf16), f32)
    whole = module(ir.Block("y", (i, j), (store(y, [i], ir.Var(acc)),), (ir.Accumulator(acc, ZERO, rounded),)))
    agree(whole, {x: random_array(x), y: np.zeros(200, np.float32)})


def test_one_reduce_point_without_reduce_iterators() -> None:
    x, y = ir.Buffer("x", f32, (50,)), ir.Buffer("y", f32, (50,))
    i = axis("i", 50)
    acc = ir.Symbol("acc", f32)
    guard = apply("lt", *at(i), ir.index(20), prec=i64)
    item = ir.Accumulator(acc, load(y, i), apply("add", ir.Var(acc), load(x, i)), "add", ZERO)
    whole = module(ir.Block("y", (i,), (store(y, [i], ir.Var(acc)),), (item,), guard=guard))
    agree(whole, {x: random_array(x), y: random_array(y, 1)})


# -- scatter ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 3, 64, 1000])
def test_scatter_adds_in_order(width: int) -> None:
    table, ids, g = (
        ir.Buffer("table", f32, (11, width)),
        ir.Buffer("ids", i32, (400,)),
        ir.Buffer("g", f32, (400, width)),
    )
    t, e = axis("t", 400, "reduce"), axis("e", width)
    row = apply(
        "minimum", apply("maximum", ir.Cast(ir.Load(ids, at(t)), i64), ir.index(0), prec=i64), ir.index(10), prec=i64
    )
    cell = ir.Load(table, (row, *at(e)))
    write = ir.Store(table, (row, *at(e)), apply("add", cell, load(g, t, e)))
    whole = module(ir.Block("table", (t, e), (write,), scatter=True))
    values = np.random.default_rng(2).integers(-2, 14, 400).astype(np.int32)
    agree(whole, {table: random_array(table), ids: values, g: random_array(g, 1)})


# -- extents and routines -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 7, 40])
def test_dynamic_extents_come_from_scalars(count: int) -> None:
    size = ir.Symbol("batch_size", i64)
    extent = ir.Var(size)
    x, w, y = ir.Buffer("x", f32, (40, 30)), ir.Buffer("w", f32, (30, 20)), ir.Buffer("y", f32, (40, 20))
    total = ir.Buffer("total", f32, (20,))

    def batch(kind: ir.IteratorKind) -> ir.BlockIterator:
        return ir.BlockIterator(ir.Symbol("batch", i64), extent, 40, kind)

    i, j, k = batch("data"), axis("j", 20), axis("k", 30, "reduce")
    acc, column = ir.Symbol("acc", f32), ir.Symbol("acc", f32)
    product = ir.Block(
        "y", (i, j, k), (store(y, (i, j), ir.Var(acc)),),
        (ir.Accumulator(acc, ZERO, ir.Fma(load(x, i, k), load(w, k, j), ir.Var(acc)), "add", ZERO),),
    )  # fmt: skip
    r, c = batch("reduce"), axis("c", 20)
    sums = ir.Block(
        "total", (c, r), (store(total, (c,), ir.Var(column)),),
        (ir.Accumulator(column, ZERO, apply("add", ir.Var(column), load(y, r, c)), "add", ZERO),),
    )  # fmt: skip
    whole = module(product, sums, scalars=(size,))
    arrays = {buffer: random_array(buffer, seed) for seed, buffer in enumerate(whole.external)}
    agree(whole, arrays, {size: count})


def test_routine_of_several_kernels_shares_memory_and_waits() -> None:
    n, m, k = 64, 96, 80
    x, w, out = ir.Buffer("x", f32, (n, k)), ir.Buffer("w", f32, (k, m)), ir.Buffer("loss", f32, (m,))
    h, a, b = (ir.Buffer(name, f32, (n, m)) for name in "hab")
    product = contraction(x, w, h, (n, m, k), "NN")
    blocks = [product]
    for source, result, op in ((h, a, "tanh"), (a, b, "exp")):
        i, j = axis("i", n), axis("j", m)
        blocks.append(ir.Block(result.name, (i, j), (store(result, [i, j], apply(op, load(source, i, j))),)))
    blocks.append(summed(b, out, 0))
    whole = module(*blocks, temporaries=(h, a, b))
    arrays = {buffer: random_array(buffer, seed, low=-0.1, high=0.1) for seed, buffer in enumerate(whole.external)}
    agree(whole, arrays)


def test_transposing_copies_go_by_blocks_of_lines() -> None:
    m, n, k = 64, 80, 256
    a, b, c = ir.Buffer("a", f32, (m, k)), ir.Buffer("b", bf16, (n, k)), ir.Buffer("c", f32, (m, n))
    agree(
        module(contraction(a, b, c, (m, n, k), "NT")), {a: random_array(a), b: random_array(b, 1), c: random_array(c)}
    )


@pytest.mark.parametrize("name", ["x86-64", "x86-64-v3", "avx512"])
def test_transposing_copies_turn_squares(name: str) -> None:
    m, n, k = 9, 70, 39  # columns that fill no panel, a reduction that fills no square
    a, b, c = ir.Buffer("a", f16, (m, k)), ir.Buffer("b", f16, (n, k)), ir.Buffer("c", f16, (m, n))
    whole = module(contraction(a, b, c, (m, n, k), "NT"))
    scheduled = schedule(whole, target(name), Numerics())
    assert any("transposing squares" in kernel.path for kernel in scheduled.kernels)
    if not target(name).missing(detect()):
        agree(whole, {a: random_array(a), b: random_array(b, 1), c: random_array(c)}, on=target(name))


def test_invariant_loads_leave_their_loops() -> None:
    """One-cell buffers from under a condition, cells of a row from the loop over its columns; what is written stays."""
    n, m = 5, 70
    x, y = ir.Buffer("x", f32, (n, m)), ir.Buffer("y", f32, (n, m))
    rate, row = ir.Buffer("rate", f32, ()), ir.Buffer("row", f32, (n,))
    i, j = axis("i", n), axis("j", m)
    value = apply("where", load(x, i, j), apply("mul", load(rate), load(x, i, j)), load(row, i))
    whole = module(ir.Block("y", (i, j), (store(y, [i, j], apply("add", value, load(row, i))),)))
    (kernel,) = hoist(schedule(whole, target("avx512"), Numerics())).kernels
    (first, loop) = kernel.body
    assert isinstance(first, ir.Let)
    assert first.value == ir.Load(rate, ())
    assert isinstance(loop, ir.For)
    assert isinstance(loop.body[0], ir.Let)
    assert loop.body[0].value == ir.Load(row, (ir.Var(i.symbol),))
    agree(whole, {buffer: random_array(buffer, seed) for seed, buffer in enumerate((x, y, rate, row))})


def test_small_narrow_temporaries_are_held_in_f32() -> None:
    x, h, y = ir.Buffer("x", f32, (300,)), ir.Buffer("h", f16, (300,)), ir.Buffer("y", f16, (300,))
    i, j = axis("i", 300), axis("j", 300)
    whole = module(
        ir.Block("h", (i,), (store(h, [i], apply("exp", load(x, i))),)),
        ir.Block("y", (j,), (store(y, [j], apply("mul", load(h, j), load(h, j))),)),
        temporaries=(h,),
    )
    (held,) = schedule(whole, target("avx512"), Numerics()).temporaries
    assert held.type is f32
    agree(whole, {x: random_array(x, low=-20.0, high=12.0), y: random_array(y)})


def test_terms_across_memory_need_no_copies() -> None:
    """X^T dY with long sums: blocks of terms, both operands where they are, sums in memory between blocks."""
    lhs, rhs, out = ir.Buffer("x", f32, (384, 72)), ir.Buffer("dy", f32, (384, 80)), ir.Buffer("dw", f32, (72, 80))
    whole = module(contraction(lhs, rhs, out, (72, 80, 384), "TN"))
    (kernel,) = schedule(whole, target("avx512"), Numerics()).kernels
    assert "3 blocks of it" in kernel.path
    agree(whole, {buffer: random_array(buffer, seed) for seed, buffer in enumerate(whole.external)})
