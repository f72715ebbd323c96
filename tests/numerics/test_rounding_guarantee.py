"""A cell is rounded once, as if every node had a buffer of its own format: placement, fusion and vectors never show."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor.precision import Prec
from stagedtensor.runtime.routine import Routine
from tests.oracles.gradients import grad_of

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

N = 517
STEPS = np.arange(N)
LEAVES = (0.125 + (STEPS % 23) * 0.3125, 0.5 + (STEPS % 17) * 0.1875)


def leaves(prec: Prec) -> tuple[Array, Array]:
    a, b = (values.astype(np.float32).astype(prec.numpy_dtype) for values in LEAVES)
    return a, b


def narrow_storage(
    prec: Prec, wide: bool, placement: str = "auto", inspect: Callable[[Routine], None] | None = None
) -> Program:
    """y = ((a*b) + a) * ((a+b) * b); ``wide``: the four intermediates are f32."""
    a, b = (st.placeholder(name, output=[N], prec=prec) for name in "ab")
    product, total = a * b, a + b
    parts = [product, product + a, total, total * b]
    y = parts[1] * parts[3]
    for part in parts:
        st.place(part, placement)
        if wide:
            st.specify(part, st.f32)
    st.specify(y, prec)
    return Program(list(zip((a, b), leaves(prec), strict=True)), [y], inspect=inspect)


def rounded_at_each_step(prec: Prec) -> Array:
    """ml_dtypes rounds after each of the five operations."""
    a, b = leaves(prec)
    result: Array = ((a * b) + a) * ((a + b) * b)
    return result


def rounded_once(prec: Prec) -> Array:
    a, b = (values.astype(np.float32) for values in leaves(prec))
    return (((a * b) + a) * ((a + b) * b)).astype(prec.numpy_dtype)


def error(cells: Array, prec: Prec) -> float:
    a, b = (values.astype(np.float64) for values in leaves(prec))
    exact = ((a * b) + a) * ((a + b) * b)
    if prec is st.bf16:
        assert np.abs(exact).max() == 1157.625
    return float(np.abs(cells.astype(np.float64) - exact).max() / np.abs(exact).max())


@pytest.mark.parametrize("prec", [st.bf16, st.f16], ids=str)
def test_s1_to_s5_narrow_storage(prec: Prec) -> None:
    each, once = rounded_at_each_step(prec), rounded_once(prec)
    assert int(different(each, once).sum()) == (145 if prec is st.bf16 else 81)
    if prec is st.bf16:
        assert round(error(each, prec), 5) == 0.00759
        assert round(error(once, prec), 5) == 0.00205
    for wide, expected in ((False, each), (True, once)):
        for placement in ("auto", "virtual", "materialized"):
            for setting in (REFERENCE, FUSED, UNFUSED):
                (found,) = run(lambda: narrow_storage(prec, wide, placement), setting)
                assert_same_bits(found, expected, f"{prec} wide={wide} {placement} on {setting}")
        for target in runnable_targets():  # plain x86-64 has other vectors and codecs
            (found,) = run(lambda: narrow_storage(prec, wide), Setting(target=target))
            assert_same_bits(found, expected, f"{prec} wide={wide} on {target}")
    (found,) = run(lambda: narrow_storage(prec, False), Setting(numerics=st.Numerics(narrow_compute="native")))
    assert_same_bits(found, each, f"{prec} native")


def test_s6_the_source_rounds_five_times_or_once() -> None:
    seen: dict[bool, str] = {}
    for wide in (False, True):
        (cells,) = run(
            lambda: narrow_storage(st.bf16, wide, inspect=lambda routine: seen.update({wide: kernel_text(routine)}))
        )
        assert cells.size == N
    for wide, roundings in ((False, 5), (True, 1)):
        loop = seen[wide].split("st_first_cells")[0]  # the rest of a loop in vectors says the same of the last cells
        rounded = re.findall(r"\bst_(?:f32_to_bf16|f32_through_bf16|vf32_to_bf16|through_bf16_vf32)\(", loop)
        assert len(rounded) == roundings, seen[wide]
        for argument in arguments(seen[wide], "st_f32_to_bf16"):  # nothing is widened only to be narrowed again
            (*inner,) = arguments(argument, "st_bf16_to_f32")
            assert not inner or argument != f"st_bf16_to_f32({inner[0]})", argument
        for argument in arguments(seen[wide], "st_bf16_to_f32"):
            assert not argument.startswith("st_bf16_to_f32("), argument


def arguments(text: str, function: str) -> list[str]:
    """Return what each call of a function is given."""
    found = []
    for call in re.finditer(rf"{function}\(", text):
        depth, end = 1, call.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        found.append(text[call.end() : end - 1])
    return found


def kernel_text(routine: Routine) -> str:
    (kernel,) = routine.kernels
    return kernel.source


# -- what may and may not be dropped ------------------------------------------------------------------------------


def test_formats_are_kept_where_an_op_keeps_them() -> None:
    """A rounding may be dropped after copy, relu, neg, abs, max, min, where; the cells must not show it."""
    cells = np.concatenate(
        [np.linspace(-70000, 70000, 301), [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-9, 448.0, 464.0, -465.0]]
    )
    cells = cells.astype(np.float32)

    def build() -> Program:
        x = st.placeholder("x", output=[cells.size], prec="f32")
        reads = []
        for prec in ("f16", "bf16", "f8e5m2", "f8e4m3"):
            narrow = x * 1.0
            st.specify(narrow, prec)
            for result in (
                st.relu(narrow),
                -narrow,
                st.abs(narrow),
                st.maximum(narrow, narrow),
                st.where(x > 0.0, narrow, -narrow),
            ):
                st.specify(result, prec)
                wide = result * 1.0
                st.specify(wide, "f32")
                reads += [result, wide]
        return Program([(x, cells)], reads)

    unplaced = assert_same_everywhere(build, (UNFUSED, REFERENCE, FUSED))
    at = 0
    for prec in ("f16", "bf16", "f8e5m2", "f8e4m3"):
        dtype = st.precision(prec).numpy_dtype
        with np.errstate(all="ignore"):
            narrow = cells.astype(dtype).astype(np.float32)
            models = [
                np.where(np.isnan(narrow) | (narrow > 0), narrow, np.float32(0)),
                -narrow,
                np.abs(narrow),
                narrow,
                np.where(cells > 0, narrow, -narrow),
            ]
            for model in models:
                assert_same_bits(unplaced[at], model.astype(dtype), f"{prec} result {at}")
                assert_same_bits(unplaced[at + 1], model.astype(np.float32), f"{prec} widened {at}")
                at += 2


def test_a_virtual_node_with_saturate_clamps_at_its_store() -> None:
    cells = np.array([1e5, -1e5, np.inf, -np.inf, np.nan, 3.0, 70000.0], np.float32)

    def build() -> Program:
        x = st.placeholder("x", output=[cells.size], prec="f32")
        reads = []
        for prec in ("f16", "f8e5m2", "f8e4m3"):
            for saturate in (False, True):
                y = st.cast(x * 4.0, prec, saturate=saturate)
                z = y * 1.0
                st.specify(z, "f32")
                again = st.cast(st.relu(st.cast(x, prec, saturate=saturate)), prec, saturate=not saturate)
                reads += [y, z, again]
        return Program([(x, cells)], reads)

    found = assert_same_everywhere(build, (REFERENCE, FUSED, UNFUSED))
    assert found[0].astype(float).tolist()[:4] == [np.inf, -np.inf, np.inf, -np.inf]
    assert found[3].astype(float).tolist()[:4] == [65504.0, -65504.0, np.inf, -np.inf]
    assert found[15].astype(float)[[0, 1]].tolist() == [448.0, -448.0]
    assert np.isnan(found[15].astype(float)[2:5]).all()


# -- contraction of multiplications and additions -------------------------------------------------------------------


def test_only_fma_and_reductions_contract() -> None:
    rng = np.random.default_rng(5)
    a, b, c = (rng.standard_normal(1003).astype(np.float32) for _ in range(3))

    def build() -> Program:
        x, y, z = (st.placeholder(name, output=[1003], prec="f32") for name in "xyz")
        reads = [x * y + z, z - x * y, st.fma(x, y, z), (x * y) * z + x * x]
        return Program(list(zip((x, y, z), (a, b, c), strict=True)), reads)

    settings = [REFERENCE, FUSED, UNFUSED, *(Setting(target=target) for target in runnable_targets())]
    plain, minus, fused, mixed = assert_same_everywhere(build, settings)
    assert_same_bits(plain, a * b + c, "x*y + z")
    assert_same_bits(minus, c - a * b, "z - x*y")
    assert_same_bits(mixed, (a * b) * c + a * a, "two products")
    exact = a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)
    assert int((fused != plain).sum()) > 100
    assert np.abs(fused - exact).max() < np.abs(plain - exact).max()


def test_a_pointwise_accumulate_rounds_the_product_then_the_sum() -> None:
    rng = np.random.default_rng(6)
    start, moved = rng.standard_normal((2, 771)).astype(np.float32)

    def build(source: str) -> Program:
        p = st.param("p", output=[771], trainable=False)
        m = st.placeholder("m", output=[771], prec="f32")
        lr = st.host_scalar("lr", 0.3)
        return Program([(p, start), (m, moved)], [p], st.computation(source, p=p, m=m, lr=lr))

    rate = np.float32(0.3)
    for source, expected in (
        ("p =- lr *. m", start - rate * moved),
        ("p =+ lr *. m", start + rate * moved),
        ("p =: p - lr *. m", start - rate * moved),
    ):
        (found,) = assert_same_everywhere(partial(build, source))
        assert_same_bits(found, expected, source)


def test_two_assignments_are_two_roundings_and_a_reduction_is_one() -> None:
    def build() -> Program:
        p = st.param("p", output=[4], prec="bf16", trainable=False)
        q = st.param("q", output=[4], prec="bf16", trainable=False)
        ones = st.placeholder("ones", batch=[2], output=[4], prec="bf16")
        one = st.placeholder("one", output=[4], prec="bf16")
        comp = st.computation('p =+ one; p =+ one; q =+ ones ~logic:"b|->o => |->o"', p=p, q=q, ones=ones, one=one)
        return Program([(p, [256.0] * 4), (q, [256.0] * 4), (ones, np.ones((2, 4))), (one, np.ones(4))], [p, q], comp)

    twice, once = assert_same_everywhere(build)
    assert twice.astype(float).tolist() == [256.0] * 4
    assert once.astype(float).tolist() == [258.0] * 4


def test_gradients_of_one_op_round_once_and_accumulate_in_graph_order() -> None:
    """x is used three times in bf16: each use is one rounded contribution, added in the order of the graph."""
    rng = np.random.default_rng(7)
    cells = rng.standard_normal(301).astype(np.float32).astype(st.bf16.numpy_dtype)

    def build(shuffled: bool) -> Program:
        x = st.placeholder("x", output=[301], prec="bf16", requires_grad=True)
        st.specify(x.grad, "bf16")
        uses = [lambda: x * x, lambda: st.tanh(x), lambda: x * 3.0]
        made = {at: uses[at]() for at in ((2, 0, 1) if shuffled else (0, 1, 2))}
        y = made[0] * made[1] + made[2]
        return Program([(x, cells)], [grad_of(x)], st.grad_update(st.sum(y)))

    (first,) = assert_same_everywhere(lambda: build(False))
    (second,) = assert_same_everywhere(lambda: build(True))
    assert_same_bits(first, second, "construction order")
    assert len(np.unique(first.astype(np.float32))) > 50


def test_arithmetic_has_the_same_bits_in_both_compute_modes() -> None:
    rng = np.random.default_rng(8)
    args = [rng.standard_normal(999).astype(np.float32) for _ in range(2)]

    def build() -> Program:
        reads, feeds = [], []
        for prec in ("f16", "bf16"):
            x, y = (st.placeholder(f"{name}{prec}", output=[999], prec=prec) for name in "xy")
            feeds += [(x, args[0]), (y, args[1])]
            reads += [x + y, x - y, x * y, x / y, st.sqrt(st.abs(x))]
        return Program(feeds, reads)

    assert_same_everywhere(build, (FUSED, Setting(numerics=st.Numerics(narrow_compute="native"))))


def test_fast_math_leaves_narrow_nodes_and_special_values_alone() -> None:
    """It may contract f32 arithmetic; it never drops a rounding, flushes subnormals or assumes finite values."""
    fast = Setting(numerics=st.Numerics(fast_math=True))
    for prec in (st.bf16, st.f16):
        (found,) = run(partial(narrow_storage, prec, False), fast)
        assert_same_bits(found, rounded_at_each_step(prec), f"{prec} under fast_math")
    special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, -1e-40, 1e-45, 3e38, 2.0], np.float32)

    def build() -> Program:
        x = st.placeholder("x", output=[special.size], prec="f32")
        reads = [
            x * 1.0,
            x + 0.0,
            x != x,
            st.relu(x),
            st.maximum(x, 0.0),
            st.cast(x, "bf16"),
            st.where(x > 0.0, x, -1.0),
            x * 2.0 - x * 2.0,
        ]
        return Program([(x, special)], reads)

    plain = run(build)
    for at, (found, expected) in enumerate(zip(run(build, fast), plain, strict=True)):
        assert_same_bits(found, expected, f"result {at} under fast_math")
    assert np.isnan(plain[-1][:3]).all()
