"""Promotion and policies: integers with narrow floats, integer inputs under a policy, positions."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

import stagedtensor as st

from .running import both_devices, program, same


@both_devices
def test_integers_join_floats_and_each_other(device: str) -> None:
    table = [
        (st.i32, 257, st.bf16, 0, st.bf16, 256),  # the float wins, whatever it loses: a cast keeps the integer
        (st.u8, 200, st.i8, 100, st.i16, 300),
        (st.i64, 5, st.f16, 2, st.f16, 7),
        (st.bool, 1, st.bf16, 2, st.bf16, 3),
        (st.u8, 255, st.u32, 1, st.u32, 256),
        (st.u32, 2**32 - 1, st.i32, 1, st.i64, 2**32),
        (st.u16, 65535, st.i8, 1, st.i32, 65536),
        (st.f16, 1, st.bf16, 2.0**-10, st.f32, 1 + 2.0**-10),
        (st.f8e4m3, 1, st.f8e5m2, 2, st.f16, 3),
        (st.f8e4m3, 1, st.bf16, 2, st.bf16, 3),
        (st.bool, 1, st.bool, 1, st.u8, 2),
    ]
    with program(device) as p:
        results = []
        for left, a, right, b, expected, _ in table:
            x, y = p.input([a], left), p.input([b], right)
            assert (x + y).precision is expected, (left, right)
            assert (y + x).precision is expected, (right, left)
            assert st.join(left, right) is st.join(right, left)
            results += [x + y, y + x]
        for at, found in enumerate(p.run(*results)):
            assert found.astype(np.float64).tolist() == [table[at // 2][5]], table[at // 2]


def test_an_integer_kept_by_a_cast_is_exact() -> None:
    with program() as p:
        x, y = p.input([257], st.i32), p.input([0.0], st.bf16)
        total = st.cast(x, st.f32) + y
        assert total.precision is st.f32
        same(p.run(total)[0], [257])


def test_joining_three_formats_does_not_depend_on_order() -> None:
    formats = (st.f8e4m3, st.f8e5m2, st.bf16, st.f16, st.i32)
    for chosen in itertools.combinations(formats, 3):
        assert len({st.join(*order) for order in itertools.permutations(chosen)}) == 1
    assert st.join(st.f8e4m3, st.f8e5m2, st.bf16) is st.bf16


@both_devices
@pytest.mark.parametrize("prec", [st.f16, st.bf16])
def test_ids_stay_exact_under_a_policy(device: str, prec: st.Prec) -> None:
    vocabulary, wanted = 40002, [2049, 40001, 257, 4097]
    with program(device) as p:
        ids = p.input(wanted, st.i32, batch=1)
        numbers = np.arange(vocabulary) % 251 - 125.0  # exact in both formats
        table = st.param("table", output=[vocabulary], input=[1], init=numbers.reshape(-1, 1))
        rows = st.gather(table, ids)
        st.PrecisionPolicy(param=prec, activation=prec).apply(rows)
        p.ctx.init_params(rows)
        (found,) = p.run(rows)
        assert ids.precision is st.i32
        assert rows.precision is prec
        same(found, [[numbers[at]] for at in wanted])
        assert p.ctx.get_values(ids).tolist() == wanted


@both_devices
@pytest.mark.parametrize("prec", [st.f16, st.bf16])
def test_one_hot_of_large_ids_under_a_policy(device: str, prec: st.Prec) -> None:
    size, wanted = 4100, [2049, 4099, 257, 258]
    with program(device) as p:
        ids = p.input(wanted, st.i32, batch=1)
        hot = st.one_hot(ids, size)
        position = st.argmax(hot)
        selected = st.argmax(st.where(hot, 1.0, 0.0))
        count = st.sum(hot, axis="output")
        st.PrecisionPolicy(activation=prec).apply(count)
        found, again, ones = p.run(position, selected, count)
        assert found.tolist() == again.tolist() == wanted
        same(ones, [1, 1, 1, 1])
        assert hot.precision is prec


@both_devices
@pytest.mark.parametrize("prec", [st.f16, st.bf16])
def test_a_comparison_of_positions_with_ids_is_exact(device: str, prec: st.Prec) -> None:
    size = 4100
    with program(device) as p:
        one_id = p.input([4099], st.i32)
        hits = st.range(size) == one_id
        picked = st.sum(st.where(hits, st.constant(np.arange(size) % 7.0, prec=prec), 0.0))
        st.PrecisionPolicy(activation=prec).apply(picked)
        found, total = p.run(picked, st.sum(hits))
        same(found, 4099 % 7)
        assert total.item() == 1
        assert hits.precision is st.i32


@both_devices
def test_positions_are_not_narrowed_by_their_users(device: str) -> None:
    with program(device) as p:
        positions = st.range(512)
        narrow = p.input([1.0], st.bf16)
        phase = st.cast(positions, st.f32) * 1.0
        used = st.cast(st.cos(phase), st.bf16) * narrow
        assert positions.precision is st.i32
        read, cosine = p.run(positions * 1, used)
        assert len(set(read.tolist())) == 512
        expected = np.cos(np.arange(512.0)).astype(np.float32).astype(st.bf16.numpy_dtype)
        same(cosine, expected.astype(np.float64))
        same(
            p.run(st.cast(st.cos(st.cast(st.range(15963), st.f32)), st.f64))[0][-1:],
            [float(np.float32(math.cos(15962)))],
        )


@both_devices
def test_a_product_of_positions_and_a_narrow_scale_is_declared_narrow(device: str) -> None:
    """An explicit product with a bf16 tensor is bf16: what keeps the phase exact is a cast, and explain says so."""
    with program(device) as p:
        scale = p.input([1.0], st.bf16)
        product = st.range(512) * scale
        assert product.precision is st.bf16
        kept = st.cast(st.range(512), st.f32) * scale
        assert kept.precision is st.f32
        (found,) = p.run(kept)
        assert len(set(found.tolist())) == 512
