"""Generated source: literals, names, selects, integer arithmetic and accumulations survive being printed as C."""

from __future__ import annotations

import numpy as np
import pytest

import stagedtensor as st

from .running import FLOATS, both_devices, program, same

NAN, INF = float("nan"), float("inf")

RESERVED = (
    # C and C++ keywords
    "asm", "double", "new", "int", "static", "restrict", "register", "class", "template", "auto", "inline", "default",
    # functions, macros and types of headers
    "max", "min", "exp", "sinf", "fma", "isnan", "NAN", "INFINITY", "NULL", "errno", "main", "int32_t", "bool", "true", "I",
    # half and CUDA names
    "half", "__half", "threadIdx", "blockDim", "__global__", "_Float16", "__bf16", "warpSize", "float4", "__syncthreads",
    # names of this project's prelude, and names that are no identifiers
    "st_exp", "exp_f32", "acc", "i", "i0", "scalars", "buffers", "n", "x.grad", "two words", "7th", "größe", "a-b", "%d",
    "/* comment */", "// line", "\"quoted\"", "back\\slash", "line\nbreak", "??/", "_", "__",
)  # fmt: skip


@both_devices
def test_tensors_may_have_any_name(device: str) -> None:
    with program(device) as p:
        inputs = [st.placeholder(name, output=[2], prec=st.f32) for name in RESERVED]
        total = inputs[0]
        for at, tensor in enumerate(inputs[1:], 2):
            total = (total + tensor * float(at)).named(RESERVED[at % len(RESERVED)])
        weight = st.param("double", output=[2], init=2.0)
        loss = st.sum(total * weight).named("return")
        routine = p.ctx.compile(st.grad_update(loss), keep=[total])
        p.ctx.init_params(loss)
        for tensor in inputs:
            p.ctx.set_values(tensor, [1.0, 2.0])
        p.ctx.run(routine)
        count = len(inputs)
        expected = count * (count + 1) / 2
        same(p.ctx.get_values(total), [expected, 2 * expected])
        same(p.ctx.get_values(loss), 6 * expected)
        assert weight.grad is not None
        same(p.ctx.get_values(weight.grad), [expected, 2 * expected])


def test_routines_may_have_any_name() -> None:
    with program() as p:
        x = p.input([1.0, 2.0])
        for at, name in enumerate(RESERVED):
            if at % 4 == 0:
                y = (x * 2.0 + float(at)).named(name)
                routine = p.ctx.compile(y, name=name)
                p.feed()
                p.ctx.run(routine)
                same(p.ctx.get_values(y), [2.0 + at, 4.0 + at])


def test_static_indices_and_extents_may_have_any_name() -> None:
    with program() as p:
        for name in ("int", "max", "threadIdx", "scalars"):
            at = st.index(name, 3)
            x = p.input([[1.0], [2.0], [4.0]], batch=1)
            y = x[at] * 2.0
            routine = p.ctx.compile(y)
            p.feed()
            p.ctx.run(routine, **{name: 2})
            same(p.ctx.get_values(y), [8.0])


@both_devices
def test_non_finite_literals_in_every_format(device: str) -> None:
    with program(device) as p:
        results, expected = [], []
        for prec in (*FLOATS, st.f8e5m2):
            x = p.input([-1.0, 2.0, 0.0], prec)
            results += [st.where(x > 0.0, x, NAN), st.where(x > 0.0, x, INF), st.where(x < 0.0, x, -INF), st.max(x)]
            expected += [[NAN, 2, NAN], [INF, 2, INF], [-1, -INF, -INF], 2]
            results += [st.constant(-0.0, prec=prec) * st.where(x == 0.0, 1.0, 1.0), st.min(x), x * 0.0 + NAN]
            expected += [[-0.0] * 3, -1, [NAN] * 3]
        for found, want in zip(p.run(*results), expected, strict=True):
            same(found, want)


@both_devices
def test_constant_arithmetic_that_is_not_finite(device: str) -> None:
    with program(device) as p:
        one, zero = st.constant(1.0), st.constant(0.0)
        x = p.input([1.0])
        found = p.run(x + one / zero, x - one / zero, x + zero / zero, x + st.log(zero), x * (one / (-zero)))
        for cells, want in zip(found, [[INF], [-INF], [NAN], [-INF], [-INF]], strict=True):
            same(cells, want)


@both_devices
def test_literals_keep_every_bit(device: str) -> None:
    values = [0.1, 1e-40, 3.4028234663852886e38, 1.1754943508222875e-38, 16777217.0, -0.0, 2.0**-149, 1 / 3]
    doubles = [0.1, 5e-324, 1.7976931348623157e308, 1 + 2**-52, 2.2250738585072014e-308]
    with program(device) as p:
        x, wide_x = p.input([1.0]), p.input([1.0], st.f64)
        found = p.run(*(x * value for value in values), *(wide_x * value for value in doubles))
        for cells, value in zip(found, values, strict=False):
            same(cells, [float(np.float32(value))])
        for cells, value in zip(found[len(values) :], doubles, strict=True):
            same(cells, [value])


@both_devices
@pytest.mark.parametrize("prec", FLOATS)
def test_both_arms_of_a_select_have_the_format_of_the_node(device: str, prec: st.Prec) -> None:
    with program(device) as p:
        x, other = p.input([-1.5, 0.0, 2.5], prec), p.input([7.0, 8.0, 9.0])
        masked, flipped, half_relu, mixed = p.run(
            st.where(x > 0.0, x, 0.0), st.where(x > 0.0, 0.0, x), st.relu(x), st.where(x > 0.0, x, other)
        )
        same(masked, [0, 0, 2.5])
        same(flipped, [-1.5, 0, 0])
        same(half_relu, [0, 0, 2.5])
        same(mixed, [7, 8, 2.5])
        assert masked.dtype == prec.numpy_dtype


# -- integers -----------------------------------------------------------------------------------------------------


@both_devices
def test_integer_arithmetic_never_passes_through_floats(device: str) -> None:
    with program(device) as p:
        a, two = p.input([94906267], st.i64), p.input([2], st.i64)
        big, top = p.input([9007199254740993], st.i64), p.input([2**31 - 1], st.i32)
        exact = p.input([2**62 + 1, -(2**63), 2**63 - 1], st.i64)
        unsigned = p.input([2**64 - 1, 2**63 + 1], st.u64)
        product, fused, quotient, wrapped, times, kept, kept_unsigned, total, power = p.run(
            a * a + two,
            st.fma(a, a, two),
            big // 1,
            top + 1,
            top * top,
            exact + 0,
            unsigned * 1,
            st.sum(st.einsum("i,i->i", a, a)) + 2,
            p.input([3], st.i64) ** 39,
        )
        assert product.tolist() == fused.tolist() == [9007199515875291]
        assert quotient.tolist() == [9007199254740993]
        assert wrapped.tolist() == [-(2**31)]
        assert times.tolist() == [1]
        assert kept.tolist() == [2**62 + 1, -(2**63), 2**63 - 1]
        assert kept_unsigned.tolist() == [2**64 - 1, 2**63 + 1]
        assert total.item() == 9007199515875291
        assert power.tolist() == [3**39]
        assert p.ctx.get_values(exact).tolist() == [2**62 + 1, -(2**63), 2**63 - 1]


@both_devices
def test_integer_literals_keep_every_bit(device: str) -> None:
    with program(device) as p:
        zero, unsigned_zero = p.input([0], st.i64), p.input([0], st.u64)
        values = [2**62 + 1, -(2**63), 2**63 - 1, 9007199254740993, -(2**31), 2**31]
        found = p.run(*(zero + value for value in values), unsigned_zero + (2**64 - 1))
        assert [cell.item() for cell in found] == [*values, 2**64 - 1]


@both_devices
def test_floor_division_and_modulo_follow_python(device: str) -> None:
    pairs = [(-7, 2), (7, -2), (-7, -2), (-1, 3), (7, 2), (0, 5), (6, 3), (-6, 3), (120, -27), (-128, -1)]
    with program(device) as p:
        results, expected = [], []
        for prec in (st.i8, st.i16, st.i32, st.i64):
            a, b = p.input([left for left, _ in pairs], prec), p.input([right for _, right in pairs], prec)
            results += [a // b, a % b]
            wrap = (lambda q: (q + 128) % 256 - 128) if prec is st.i8 else (lambda q: q)
            expected += [[wrap(left // right) for left, right in pairs], [left % right for left, right in pairs]]
        x = p.input([-7, 7, -1], st.i32)
        results += [x // 2, x % 2, x // -2, x % -2]
        expected += [[q // 2 for q in (-7, 7, -1)], [q % 2 for q in (-7, 7, -1)]]
        expected += [[q // -2 for q in (-7, 7, -1)], [q % -2 for q in (-7, 7, -1)]]
        for found, want in zip(p.run(*results), expected, strict=True):
            assert found.tolist() == want


@both_devices
def test_floor_division_of_constants_and_floats(device: str) -> None:
    with program(device) as p:
        zero = p.input([0], st.i32)
        minus_seven = st.constant(-7)
        f = p.input([-7.0, 7.0, -0.5])
        folded, rest, floats, float_rest = p.run(zero + minus_seven // 2, zero + minus_seven % 2, f // 2.0, f % 2.0)
        assert (folded.tolist(), rest.tolist()) == ([-4], [1])
        same(floats, [-4, 3, -1])
        same(float_rest, [1, 1, 1.5])


@both_devices
def test_integer_division_by_zero_and_overflow_do_not_trap(device: str) -> None:
    with program(device) as p:
        a, zero, least = p.input([7, -7], st.i32), p.input([0, 0], st.i32), p.input([-(2**31)], st.i32)
        minus = p.input([-1], st.i32)
        quotient, rest, wrapped, left = p.run(a // zero, a % zero, least // minus, least % minus)
        assert quotient.tolist() == [0, 0]
        assert rest.tolist() == [0, 0]
        assert wrapped.tolist() == [-(2**31)]
        assert left.tolist() == [0]


# -- accumulations ------------------------------------------------------------------------------------------------


@both_devices
@pytest.mark.parametrize("fusion", [True, False])
def test_an_inlined_accumulation_runs_all_its_rounds(device: str, fusion: bool) -> None:
    with program(device) as p:
        x = p.input([1.0, 1.0, 1.0, 1.0])
        total = st.einsum("i => 0", x)
        downstream = total * 1.0
        spread = st.einsum("i;t=>t", x, st.constant([1.0, 1.0]))
        routine = p.ctx.compile([downstream, spread], fusion=fusion)
        p.feed()
        for _ in range(3):
            p.ctx.run(routine)
            assert np.ravel(p.ctx.get_values(downstream)).tolist() == [4.0]
            same(p.ctx.get_values(spread), [4, 4])
    with program(device) as p:  # the same number where the sum is stored
        x = p.input([1.0, 1.0, 1.0, 1.0])
        total = st.einsum("i => 0", x)
        downstream = total * 1.0
        routine = p.ctx.compile([downstream, total], fusion=fusion)
        p.feed()
        p.ctx.run(routine)
        assert np.ravel(p.ctx.get_values(total)).tolist() == np.ravel(p.ctx.get_values(downstream)).tolist() == [4.0]


@both_devices
def test_statements_that_repeat_accumulate_every_time(device: str) -> None:
    with program(device) as p:
        x = p.input([3.0, 5.0])
        count = st.loss_accumulator("count")
        twice = st.computation('c =+ x ~logic:"i=>"; c =+ 1', c=count, x=x)
        reset = st.computation('c =:+ x ~logic:"i=>"', c=count, x=x)
        add, again = p.ctx.compile(twice), p.ctx.compile(reset)
        p.feed()
        p.ctx.run(add)
        same(p.ctx.get_values(count), 9)
        p.ctx.run(add)
        same(p.ctx.get_values(count), 18)
        for _ in range(2):
            p.ctx.run(again)
            same(p.ctx.get_values(count), 8)


def test_the_source_is_the_same_text_every_time() -> None:
    def text() -> str:
        with program() as p:
            x = p.input([1.0, 2.0, 3.0])
            return p.ctx.compile(st.softmax(x * 2.0)).source

    first = text()
    with st.Session():  # unrelated tensors in between
        for at in range(5):
            st.placeholder(f"other{at}", output=[at + 1])
    assert text() == first


def test_lanes_of_two_sums_have_names_of_their_own() -> None:
    """A row as long as a few lanes: the sums over it and what merges them stand in one scope of the source."""
    logits, labels = np.random.default_rng(0).normal(size=(16, 4)), np.arange(16) % 4
    losses = []
    for device in ("cpu", "reference"):
        with program(device) as p:
            loss = st.cross_entropy(p.input(logits, batch=1, requires_grad=True), p.input(labels, st.i32, batch=1))
            p.ctx.compile(st.grad_update(loss))
            losses.append(p.run(loss)[0])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)  # the reference adds in another order
