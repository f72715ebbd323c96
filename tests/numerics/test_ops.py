"""Every op of the table in every format: the same bits on every device, fused or not, and the right values."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor.op_table import OPS
from stagedtensor.precision import Prec, precision
from stagedtensor.runtime.target import detect
from stagedtensor.tensor import apply_pointwise

from .expected import (
    APPROXIMATE,
    INTEGER,
    compute_dtype,
    float_bounds,
    fma_cells,
    integer_cells,
    quotient_bounds,
    remainder_cells,
    stored,
)
from .operands import CELLS, operands, special_cells
from .running import (
    FUSED,
    REFERENCE,
    UNFUSED,
    Array,
    Program,
    Setting,
    assert_same_bits,
    assert_same_everywhere,
    different,
    run,
    runnable_targets,
)

FLOATS = ("f64", "f32", "f16", "bf16", "f8e5m2", "f8e4m3")
INTEGERS = ("i64", "i32", "i16", "i8", "u64", "u32", "u16", "u8")
FRACTIONS: dict[str, Callable[..., tuple[Array, Array]]] = {
    "fma": lambda *args: (fma_cells(*args),) * 2,
    "mod": lambda *args: (remainder_cells(*args),) * 2,
    "floordiv": quotient_bounds,
}
NAMES = tuple(name for name, op in OPS.items() if op.op_class != "random")


def table_program(prec: Prec, args: list[Array], names: tuple[str, ...] = NAMES) -> Program:
    xs = [st.placeholder(name, output=[args[0].size], prec=prec) for name in "abc"]
    results = [apply_pointwise(name, *xs[: OPS[name].arity]) for name in names]
    return Program(list(zip(xs, args, strict=True)), results)


def outcomes(prec: Prec, args: list[Array], setting: Setting) -> dict[str, Array]:
    return dict(zip(NAMES, run(lambda: table_program(prec, args), setting), strict=True))


def close_or_same(name: str, prec: Prec, found: Array, expected: Array, what: str) -> None:
    """f64 transcendentals come from libm and may differ by 2 ulp; everything else is bitwise."""
    if found.dtype == np.float64 and name in APPROXIMATE:
        here, there = (np.where(np.isnan(side), 1.0, side) for side in (found, expected))
        np.testing.assert_array_max_ulp(here, there, maxulp=2)
        np.testing.assert_array_equal(np.isnan(found), np.isnan(expected), err_msg=what)
    else:
        assert_same_bits(found, expected, what)


@pytest.mark.parametrize("name", FLOATS)
def test_float_ops(name: str) -> None:
    prec = precision(name)
    args = operands(prec, 3, seed=1)
    expected = outcomes(prec, args, REFERENCE)
    for op in NAMES:
        used = args[: OPS[op].arity]
        if op in FRACTIONS:  # slow, so a sample
            used = [arg[::7] for arg in used]
            check_between(op, prec, used, expected[op][::7], *FRACTIONS[op](prec, *used))
        else:
            check_between(op, prec, used, expected[op], *float_bounds(op, prec, used))
    for setting in (FUSED, UNFUSED) if name in ("f32", "bf16") else (FUSED,):
        found = outcomes(prec, args, setting)
        for op in NAMES:
            close_or_same(op, prec, found[op], expected[op], f"{op} {name} on {setting}")


def check_between(op: str, prec: Prec, args: list[Array], found: Array, low: Array, high: Array) -> None:
    if not different(low, high).any():
        assert_same_bits(found, low, f"{op} {prec}", args)
        return
    with np.errstate(invalid="ignore"):  # signalling NaN
        at, least, greatest = (side.astype(np.float64) for side in (found, low, high))
    # an end that rounds to NaN is f8e4m3's overflow
    inside = (at >= least) & (at <= greatest) | (np.isnan(at) & (np.isnan(least) | np.isnan(greatest)))
    if not inside.all():
        worst = np.flatnonzero(~inside)[:4]
        raise AssertionError(
            f"{op} {prec}: {int((~inside).sum())} cells outside 2 ulp, first {[arg[worst].tolist() for arg in args]} -> "
            f"{found[worst].tolist()}, expected {low[worst].tolist()} .. {high[worst].tolist()}"
        )


QUICK = ("i64", "i32", "u8")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in INTEGERS]
)
def test_integer_ops(name: str) -> None:
    prec = precision(name)
    args = operands(prec, 3, seed=2, cells=701)
    expected = outcomes(prec, args, REFERENCE)
    for op in NAMES:
        used = args[: OPS[op].arity]
        if op in INTEGER:
            assert_same_bits(expected[op], integer_cells(op, prec, used), f"{op} {name}", used)
        else:  # float-only: the session default joins
            assert expected[op].dtype == np.float32, op
            wide = [convert_to_f32(arg) for arg in used]
            low, high = float_bounds(op, st.f32, wide)
            check_between(op, st.f32, wide, expected[op], low, high)
    found = outcomes(prec, args, FUSED)
    for op in NAMES:
        assert_same_bits(found[op], expected[op], f"{op} {name} on {FUSED}", args[: OPS[op].arity])


def convert_to_f32(cells: Array) -> Array:
    return cells.astype(np.float32)  # NumPy rounds integers to f32 once


def test_bool_ops_compute_as_bytes() -> None:
    cells = np.array([0, 1, 1, 0, 1, 0, 0, 1], np.bool_)
    args = [cells, cells[::-1].copy(), np.roll(cells, 3)]
    names = ("add", "mul", "maximum", "minimum", "and", "or", "not", "lt", "eq", "where")
    results = assert_same_everywhere(lambda: table_program(precision("bool"), args, names), names=names)
    for op, cell in zip(names, results, strict=True):
        expected = [INTEGER[op](*map(int, row)) for row in zip(*args[: OPS[op].arity], strict=True)]
        assert cell.astype(int).tolist() == expected, op


@pytest.mark.parametrize("name", ["f32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_every_target_gives_the_same_bits(name: str) -> None:
    prec = precision(name)
    args = operands(prec, 3, seed=3)
    expected = outcomes(prec, args, REFERENCE)
    targets = [target for target in runnable_targets() if target != detect().name]  # the machine's own is tested above
    for target in targets:
        found = outcomes(prec, args, Setting(target=target))
        for op in NAMES:
            assert_same_bits(found[op], expected[op], f"{op} {name} on {target}", args[: OPS[op].arity])


@pytest.mark.parametrize("name", ["f8e5m2", "f8e4m3", "f16", "bf16"])
def test_unary_ops_on_every_code_of_a_narrow_format(name: str) -> None:
    prec = precision(name)
    codes = np.arange(1 << prec.bits).astype(f"u{prec.bytes}").view(prec.numpy_dtype)
    names = tuple(op for op in NAMES if OPS[op].arity == 1)

    def build() -> Program:
        x = st.placeholder("x", output=[codes.size], prec=prec)
        return Program([(x, codes)], [apply_pointwise(op, x) for op in names])

    results = assert_same_everywhere(build, (REFERENCE, FUSED), names)
    for op, cells in zip(names, results, strict=True):
        check_between(op, prec, [codes], cells, *float_bounds(op, prec, [codes]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["f64", "f8e5m2", "f8e4m3", "f16", "i64", "i32", "i16", "i8", "u64", "u32", "u16", "u8"]
)
def test_the_other_formats_unfused(name: str) -> None:
    prec = precision(name)
    args = operands(prec, 3, seed=5)
    expected = outcomes(prec, args, REFERENCE)
    found = outcomes(prec, args, UNFUSED)
    for op in NAMES:
        close_or_same(op, prec, found[op], expected[op], f"{op} {name} unfused")


MIXED = (
    ("f8e4m3", "f8e5m2"),
    ("f16", "bf16"),
    ("bf16", "f32"),
    ("f32", "f64"),
    ("i8", "u8"),
    ("u16", "f16"),
    ("u64", "i8"),
)


def test_mixed_operands_widen_exactly_and_compute_at_their_join() -> None:
    names = ("add", "mul", "sub", "maximum", "lt")

    def build() -> Program:
        feeds, reads = [], []
        for left, right in MIXED:
            cells = [operands(precision(name), 1, seed=4)[0] for name in (left, right)]
            pair = [st.placeholder(f"{name}_{left}_{right}", output=[CELLS], prec=name) for name in (left, right)]
            feeds += list(zip(pair, cells, strict=True))
            reads += [apply_pointwise(op, *pair) for op in names]
        return Program(feeds, reads)

    results = iter(assert_same_everywhere(build))
    for left, right in MIXED:
        cells = [operands(precision(name), 1, seed=4)[0] for name in (left, right)]
        wanted = st.join(precision(left), precision(right))
        for op in names:
            found = next(results)
            comparison = op == "lt"
            assert found.dtype == wanted.numpy_dtype, (left, right, op)
            if wanted.is_float:
                dtype = compute_dtype(wanted)
                wide = [cell.astype(dtype) for cell in cells]
                with np.errstate(all="ignore"):
                    low, _ = float_bounds(op, precision(dtype), wide)
                assert_same_bits(found, stored(low, wanted), f"{op} {left} {right}", cells)
            else:
                wrapped = [cell.astype(wanted.numpy_dtype) for cell in cells]
                assert_same_bits(found, integer_cells(op, wanted, wrapped), f"{op} {left} {right}", cells)
            assert not comparison or set(found.astype(np.float64).tolist()) <= {0.0, 1.0}


def test_samplers_draw_the_same_bits_everywhere() -> None:
    def build() -> Program:
        reads = [
            st.uniform(-1.0, 3.0, name="u", seed=3, output=[1001]),
            st.normal(0.5, 2.0, name="n", seed=3, output=[1001]),
            st.uniform(0.0, 1.0, name="h", seed=4, output=[1001], prec="bf16"),
            st.normal(0.0, 1.0, name="k", seed=4, output=[1001], prec="f16"),
        ]
        return Program([], reads)

    uniform, normal, *_ = assert_same_everywhere(build)
    assert uniform.min() >= -1.0
    assert uniform.max() < 3.0
    assert abs(uniform.mean() - 1.0) < 0.15
    assert abs(normal.mean() - 0.5) < 0.3
    assert abs(normal.std() - 2.0) < 0.2


def test_the_expectations_know_every_op() -> None:
    assert special_cells(st.f16).size > 20
    assert set(NAMES) - set(INTEGER) == {name for name, op in OPS.items() if op.float_only}
