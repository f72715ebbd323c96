"""The reference interpreter against NumPy and exact arithmetic: ops, memory, scheduled statements."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from stagedtensor.codegen.interpret import run_module, run_proc
from stagedtensor.codegen.interpret_memory import from_memory, to_memory
from stagedtensor.codegen.interpret_ops import fma, operation
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
    For,
    If,
    Layout,
    Load,
    Module,
    Pad,
    Proc,
    Reorder,
    Scan,
    Split,
    Stmt,
    Store,
    Symbol,
    Tile,
    Var,
    index,
)
from stagedtensor.codegen.verify import verify
from stagedtensor.errors import InternalError
from stagedtensor.op_table import OPS
from stagedtensor.precision import Prec, bf16, bool_, f16, f32, f64, i8, i32, i64, u8, u32, u64
from tests.oracles.rounding import round_exact

from .interpreting import ZERO, Array, at, iterator, matmul, op, random, run

# -- arithmetic ---------------------------------------------------------------------------------------------------


def exact_fma(a: float, b: float, c: float) -> np.float32:
    code = round_exact(Fraction(a) * Fraction(b) + Fraction(c), "f32")
    return np.uint32(code).view(np.float32)


def test_fma_rounds_once() -> None:
    generator = np.random.default_rng(1)
    a, b, c = generator.normal(size=(3, 300)).astype(np.float32)
    # Products in the middle of two f32 values: a tiny addend decides, which a sum rounded to f64 has forgotten.
    a[:100] = b[:100] = 1 + 2.0**-12
    c[:100] = 2.0**-70 * generator.choice([-1, 1], 100)
    expected = np.array([exact_fma(*map(float, triple)) for triple in zip(a, b, c, strict=True)])
    scalars = [fma(np.asarray(x), np.asarray(y), np.asarray(z), f32) for x, y, z in zip(a, b, c, strict=True)]
    np.testing.assert_array_equal(fma(a, b, c, f32), expected)
    np.testing.assert_array_equal(scalars, expected)
    twice = (a.astype(np.float64) * b + c).astype(np.float32)
    assert (expected != twice).sum() >= 30


def test_matmul_is_a_chain_of_fmas_in_order_of_k() -> None:
    a, b, c = random((3, 7)), random((7, 2), 1), np.empty((3, 2), np.float32)
    run(matmul(3, 2, 7), a, b, c)
    for i in range(3):
        for j in range(2):
            acc = np.float32(0)
            for k in range(7):
                acc = exact_fma(float(a[i, k]), float(b[k, j]), float(acc))
            assert c[i, j] == acc


def test_narrow_matmul_rounds_at_the_store_only() -> None:
    i, k, j = np.arange(64)[:, None], np.arange(64), np.arange(64)
    a = ((((64 * i + k) % 3) + 1) * 0.375).astype(ml_dtypes.bfloat16)
    b = ((((64 * k[:, None] + j) % 5) - 1.5) * 0.625).astype(ml_dtypes.bfloat16)
    c = np.empty((64, 64), ml_dtypes.bfloat16)
    run(matmul(64, 64, 64, bf16), a, b, c)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_array_equal(c, exact.astype(np.float32).astype(ml_dtypes.bfloat16))
    assert c.astype(np.float64).sum() == 61323.6875


#: On positive numbers, away from poles.
ORACLES: dict[str, Callable[..., Array]] = {
    "floordiv": np.floor_divide,
    "mod": np.mod,
    "pow": np.power,
    "fma": lambda a, b, c: a * b + c,
    "sigmoid": lambda a: 1 / (1 + np.exp(-a)),
    "rsqrt": lambda a: 1 / np.sqrt(a),
    "recip": np.reciprocal,
    "round": np.rint,
    "relu": lambda a: np.maximum(a, 0),
    "identity": lambda a: a,
    "nonfinite": lambda a: np.asarray(np.where(np.isfinite(a), 0.0, np.inf)),
    "where": lambda c, a, b: np.asarray(np.where(c, a, b)),
    "div": np.divide,
    "neg": np.negative,
    "erf": OPS["erf"].numpy,
    "erfc": OPS["erfc"].numpy,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "and": np.logical_and,
    "or": np.logical_or,
    "not": np.logical_not,
    "sub": np.subtract,
    "mul": np.multiply,
}


@pytest.mark.parametrize("type_", [f32, f64], ids=str)
@pytest.mark.parametrize("name", [name for name, row in OPS.items() if row.op_class != "random"])
def test_every_float_op(name: str, type_: Prec) -> None:
    count = 64
    args = [np.random.default_rng(n).uniform(0.3, 4, count).astype(type_.numpy_dtype) for n in range(OPS[name].arity)]
    args[0][:8] = args[-1][:8]  # some ties
    buffers = [Buffer(f"x{n}", type_, (count,)) for n in range(len(args))]
    out, i = Buffer("out", type_, (count,)), iterator("i", count)
    value = Apply(name, tuple(Load(buffer, at(i)) for buffer in buffers), type_)
    result = np.empty(count, type_.numpy_dtype)
    run(Proc("p", (*buffers, out), (Block("b", (i,), (Store(out, at(i), value),)),)), *args, result)
    oracle = ORACLES.get(name) or getattr(np, name)
    expected = oracle(*(arg.astype(np.float64) for arg in args)).astype(type_.numpy_dtype)
    np.testing.assert_array_max_ulp(result, expected, maxulp=2)


@pytest.mark.parametrize(
    ("name", "type_", "args", "expected"),
    [
        ("add", u8, (200, 100), 44),
        ("mul", i8, (100, 3), 44),
        ("neg", u32, (1,), 2**32 - 1),
        ("abs", i8, (-128,), -128),
        ("floordiv", i32, (-7, 2), -4),
        ("floordiv", i32, (7, 0), 0),
        ("floordiv", i64, (-(2**63), -1), -(2**63)),
        ("mod", i32, (-7, 3), 2),
        ("mod", i32, (7, 0), 0),
        ("pow", i32, (3, 4), 81),
        ("floor", i64, (2**62 + 1,), 2**62 + 1),
        ("maximum", i64, (2**62 + 1, 2**62), 2**62 + 1),
        ("lt", i64, (2**62, 2**62 + 1), 1),
        ("and", bool_, (True, False), False),
        ("where", i32, (0, 1, 2), 2),
        ("fma", i32, (2**20, 2**20, 5), 5),
        ("maximum", f32, (float("nan"), 1.0), float("nan")),
        ("minimum", f32, (1.0, float("nan")), float("nan")),
        ("relu", f32, (float("nan"),), float("nan")),
        ("nonfinite", f32, (float("nan"),), float("inf")),
        ("nonfinite", f32, (3e38,), 0.0),
        ("div", f32, (1.0, 0.0), float("inf")),
        ("round", f32, (2.5,), 2.0),
    ],
)
def test_scalar_cases(name: str, type_: Prec, args: tuple[Any, ...], expected: Any) -> None:
    cells = [np.array([arg], type_.numpy_dtype) for arg in args]
    buffers = [Buffer(f"x{n}", type_, (1,)) for n in range(len(args))]
    out = Buffer("out", type_, (1,))
    value = Apply(name, tuple(Load(buffer, (index(0),)) for buffer in buffers), type_)
    i = iterator("i", 1)
    both: list[Stmt] = [Store(out, (index(0),), value), Block("b", (i,), (Store(out, at(i), value),))]
    for stmt in both:
        result = np.zeros(1, type_.numpy_dtype)
        run(Proc("p", (*buffers, out), (stmt,)), *cells, result)
        np.testing.assert_array_equal(result, np.array([expected], type_.numpy_dtype))


def test_random_ops_are_uniform_and_normal_and_keyed() -> None:
    n = 20000
    i, out = iterator("i", n), Buffer("out", f32, (2, n))

    def draw(name: str, key: int) -> Array:
        value = Apply(name, (Const(key, u32), Const(7, u32), Cast(Var(i.symbol), u64)), f32)
        result = np.empty((2, n), np.float32)
        block = Block("b", (i,), (Store(out, (index(0), Var(i.symbol)), value),))
        run(Proc("p", (out,), (block,)), result)
        return np.array(result[0])

    uniform, normal = draw("random_uniform", 3), draw("random_normal", 3)
    assert uniform.min() >= 0
    assert uniform.max() < 1
    assert abs(uniform.mean() - 0.5) < 0.01
    assert abs(normal.mean()) < 0.03
    assert abs(normal.std() - 1) < 0.03
    np.testing.assert_array_equal(uniform, draw("random_uniform", 3))
    assert (uniform != draw("random_uniform", 4)).mean() > 0.99


def test_casts_saturate_and_flush() -> None:
    x, i = Buffer("x", f32, (4,)), iterator("i", 4)
    y = Buffer("y", f16, (4,), saturate=True, flush_subnormal=True)
    store = Store(y, at(i), Cast(Load(x, at(i)), f16, saturate=True, flush=True))
    values, result = np.array([1e6, -1e6, 1e-6, np.inf], np.float32), np.empty(4, np.float16)
    run(Proc("p", (x, y), (Block("b", (i,), (store,)),)), values, result)
    np.testing.assert_array_equal(result, np.array([65504, -65504, 0, np.inf], np.float16))


# -- memory -------------------------------------------------------------------------------------------------------

LAYOUTS = [
    Layout(),
    Layout((Reorder((1, 0)),)),
    Layout((Split(1, 4),)),
    Layout((Pad(0, 4, 2.0), Split(0, 4), Reorder((0, 2, 1)))),
    Layout((Split(0, 2), Split(2, 3), Reorder((2, 0, 3, 1)), Pad(3, 8, -1.0))),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=range(len(LAYOUTS)))
def test_layouts_change_memory_and_not_meaning(layout: Layout) -> None:
    buffer, plain = Buffer("x", f32, (5, 7), layout=layout), Buffer("y", f32, (5, 7))
    logical = random((5, 7))
    memory = to_memory(logical, buffer)
    assert memory.shape == layout.physical_shape((5, 7))
    np.testing.assert_array_equal(from_memory(memory, buffer), logical)
    i, j, doubled = iterator("i", 5), iterator("j", 7), np.empty((5, 7), np.float32)
    double = Block("y", (i, j), (Store(plain, at(i, j), op("add", Load(buffer, at(i, j)), Load(buffer, at(i, j)))),))
    run(Proc("p", (buffer, plain), (double,)), memory, doubled)
    np.testing.assert_array_equal(doubled, 2 * logical)
    a, b = iterator("i", 5), iterator("j", 7)
    back = Block("x", (a, b), (Store(buffer, at(a, b), Load(plain, at(a, b))),))
    run(Proc("p", (buffer, plain), (back,)), memory, doubled)
    np.testing.assert_array_equal(memory, to_memory(2 * logical, buffer))


def test_pads_hold_their_fill() -> None:
    buffer = Buffer("x", f32, (3,), layout=Layout((Pad(0, 4, 7.0),)))
    y = Buffer("y", f32, (4,))
    scratch = Buffer("s", f32, (3,), "local", buffer.layout)
    i, result = iterator("i", 4), np.zeros(4, np.float32)
    run(Proc("p", (y,), (Alloc(scratch), Block("y", (i,), (Store(y, at(i), Load(scratch, at(i))),)))), result)
    np.testing.assert_array_equal(result, [np.nan, np.nan, np.nan, 7])
    np.testing.assert_array_equal(to_memory(np.ones(3, np.float32), buffer), [1, 1, 1, 7])


def test_module_runs_kernels_in_order_on_fresh_temporaries() -> None:
    x, t, y = (Buffer(name, f32, (4,)) for name in "xty")
    i, j, k = (iterator("i", 4) for _ in range(3))
    early = Proc("early", (t, y), (Block("y", (i,), (Store(y, at(i), Load(t, at(i))),)),))
    first = Proc("first", (x, t), (Block("t", (j,), (Store(t, at(j), op("neg", Load(x, at(j)))),)),))
    late = Proc("late", (t, y), (Block("y", (k,), (Store(y, at(k), op("exp", Load(t, at(k)))),)),))
    values, result = random((4,)), np.zeros(4, np.float32)
    for kernels, expected in (((early,), [np.nan] * 4), ((first, late), np.exp(-values))):
        module = Module("m", kernels, (x, y), (t,))
        verify(module)
        run_module(module, {x: values, y: result})
        np.testing.assert_allclose(result, expected, rtol=1e-6)


def test_unfit_memory_is_refused() -> None:
    x = Buffer("x", f32, (4,))
    proc = Proc("p", (x,), (), (n := Symbol("n", i64),))
    for wrong in (np.zeros(4), np.zeros(5, np.float32), np.zeros(8, np.float32)[::2]):
        with pytest.raises(InternalError, match="memory of @x must be 4 contiguous cells of float32"):
            run_proc(proc, {x: wrong}, {n: 1})
    with pytest.raises(InternalError, match="p needs memory for @x"):
        run_proc(proc, {}, {n: 1})
    with pytest.raises(InternalError, match=r"p needs values for \[%n\]"):
        run_proc(proc, {x: np.zeros(4, np.float32)})


# -- scheduled statements -----------------------------------------------------------------------------------------


def test_lanes_tiles_barriers_and_tails() -> None:
    """A sum in 4 lanes with a tail, as a schedule would write it."""
    x, y, lanes, total = (
        Buffer("x", f32, (10,)),
        Buffer("y", f32, ()),
        Buffer("lanes", f32, (4,), "register"),
        Symbol("t", f32),
    )
    clear, step, lane, last = iterator("c", 4), iterator("s", 3), iterator("l", 4), iterator("m", 4)
    position = op("add", op("mul", *at(step), index(4)), *at(lane))
    add = Store(lanes, at(lane), op("add", Load(lanes, at(lane)), Load(x, (position,))))
    body = (
        Alloc(lanes),
        For(clear, (Store(lanes, at(clear), ZERO),), "lane"),
        Tile("sum", 1, 1, 4, (For(step, (For(lane, (If(op("lt", position, index(10)), (add,)),), "lane"),)),)),
        Barrier(),
        Declare(total, ZERO),
        For(last, (Assign(total, op("add", Var(total), Load(lanes, at(last)))),), "lane"),
        Store(y, (), Var(total)),
    )
    result = np.empty((), np.float32)
    run(Proc("p", (x, y), body), np.arange(10, dtype=np.float32), result)
    assert result == 45


@pytest.mark.parametrize("reverse", [False, True])
def test_scan_carries_all_states_at_once(reverse: bool) -> None:
    """Fibonacci numbers times x: both states look at the old ones."""
    x, y, i = Buffer("x", f32, (6,)), Buffer("y", f32, (6,)), iterator("i", 6)
    one, two = Symbol("one", f32), Symbol("two", f32)
    carried = (
        Accumulator(one, Const(1.0, f32), op("mul", Var(two), Load(x, at(i)))),
        Accumulator(two, Const(1.0, f32), op("add", Var(one), Var(two))),
    )
    values, result = random((6,)), np.empty(6, np.float32)
    run(Proc("p", (x, y), (Scan(i, carried, (Store(y, at(i), Var(two)),), reverse),)), values, result)
    a = b = np.float32(1)
    for k in reversed(range(6)) if reverse else range(6):
        a, b = b * values[k], a + b
        assert result[k] == b


def test_calls_bind_buffers_and_scalars() -> None:
    param, count = Buffer("param", f32, (4,)), Symbol("count", i64)
    i = BlockIterator(Symbol("i", i64), Var(count), 4)
    fill = Proc("fill", (param,), (For(i, (Store(param, at(i), Const(1.0, f32)),)),), (count,))
    x, y, n = Buffer("x", f32, (4,)), Buffer("y", f32, (4,)), Symbol("n", i64)
    body = (Call(fill, (x,), (Var(n),)), Call(fill, (y,), (op("add", Var(n), index(1)),)))
    first, second = np.zeros(4, np.float32), np.zeros(4, np.float32)
    run(Proc("p", (x, y), body, (n,)), first, second, scalars=(2,))
    np.testing.assert_array_equal(first, [1, 1, 0, 0])
    np.testing.assert_array_equal(second, [1, 1, 1, 0])


def test_block_inside_loops_sees_their_symbols() -> None:
    x, y = Buffer("x", f32, (3, 4)), Buffer("y", f32, (3,))
    row, k, acc = iterator("row", 3), iterator("k", 4, "reduce"), Symbol("acc", f32)
    state = Accumulator(acc, ZERO, op("add", Var(acc), Load(x, at(row, k))), "add", ZERO)
    block = Block("y", (k,), (Store(y, at(row), Var(acc)),), (state,))
    values, result = np.arange(12, dtype=np.float32).reshape(3, 4), np.empty(3, np.float32)
    run(Proc("p", (x, y), (For(row, (block,), "parallel"),)), values, result)
    np.testing.assert_array_equal(result, values.sum(axis=1))


def test_every_op_has_a_meaning_for_its_types() -> None:
    for name, row in OPS.items():
        for type_ in (
            (f32, f64) if row.float_only or row.op_class == "random" or name == "nonfinite" else (f32, f64, i32, u8)
        ):
            assert callable(operation(name, type_))
