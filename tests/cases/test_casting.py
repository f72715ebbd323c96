"""Casting and rounding: one rounding to nearest even, defined overflow, defined float-to-integer conversion."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import stagedtensor as st

from .running import FLOATS, both_devices, program, same, wide

NAN, INF = float("nan"), float("inf")


@both_devices
def test_transcendentals_of_bf16_compute_wide_and_round_once(device: str) -> None:
    with program(device) as p:
        x = p.input([12.0], st.bf16)
        found = p.run(st.exp(x), st.log(x), st.cos(x))
        assert [wide(cell)[0] for cell in found] == [162816.0, 2.484375, 0.84375]


@both_devices
def test_bf16_conversion_rounds_to_nearest_even(device: str) -> None:
    source = [70000.0, 257.0, 258.0, 259.0, 261.0, 263.0, 0.2691408770292272]
    with program(device) as p:
        x, big = p.input(source), p.input([10603200512.0], st.bf16)
        rounded, root = p.run(st.cast(x, st.bf16), st.sqrt(big))
        same(rounded, [70144, 256, 258, 260, 260, 264, 0.26953125])
        same(root, [102912])


def test_host_ingestion_rounds_as_the_device_does() -> None:
    with program() as p:
        x = p.input([1 + 2**-8 + 2**-40, 70000.0], st.bf16)
        (found,) = p.run(x + 0.0)
        same(found, [1 + 2**-7, 70144])
        same(p.ctx.get_values(x), [1 + 2**-7, 70144])
        same(p.ctx.get_values(st.constant(np.array([65520.0, 65519.99]), prec=st.f16)), [INF, 65504])


@both_devices
def test_a_cast_to_f16_overflows_even_when_read_back_wide(device: str) -> None:
    with program(device) as p:
        x = p.input([65504.0, 65519.99, 65520.0, 65536.0, -1e6])
        half = st.cast(x, st.f16)
        narrow, back = p.run(half, st.cast(half, st.f32))
        for found in (narrow, back):
            same(found, [65504, 65504, INF, INF, -INF])
    with program(device) as p:  # the cast is fused away here: it must still round
        x = p.input([65504.0, 65519.99, 65520.0, 65536.0, -1e6])
        (back,) = p.run(st.cast(st.cast(x, st.f16), st.f32))
        same(back, [65504, 65504, INF, INF, -INF])


@both_devices
@pytest.mark.parametrize("fusion", [True, False])
def test_a_comparison_reads_the_rounded_value(device: str, fusion: bool) -> None:
    with program(device) as p:
        x = p.input(np.arange(1.0, 1.75, 0.1), st.bf16)
        s = x / 3.0
        top = st.max(s)
        count = st.sum(st.cast(s == top, st.i32))
        ratio = st.sum(st.where(s == top, 1.0 / st.cast(count, st.f32), 0.0))
        found, share = p.run(count, ratio, fusion=fusion)
        assert found.item() == 1
        assert share.item() == 1.0


@both_devices
def test_float_to_integer_truncates_saturates_and_sends_nan_to_zero(device: str) -> None:
    source = [NAN, INF, -INF, 3e9, -1.0, 510.0, 300.7]
    expected = {
        st.i32: [0, 2**31 - 1, -(2**31), 2**31 - 1, -1, 510, 300],
        st.i64: [0, 2**63 - 1, -(2**63), 3000000000, -1, 510, 300],
        st.u8: [0, 255, 0, 255, 0, 255, 255],
        st.i8: [0, 127, -128, 127, -1, 127, 127],
        st.u32: [0, 2**32 - 1, 0, 3000000000, 0, 510, 300],
        st.i16: [0, 32767, -32768, 32767, -1, 510, 300],
        st.u16: [0, 65535, 0, 65535, 0, 510, 300],
        st.u64: [0, 2**64 - 1, 0, 3000000000, 0, 510, 300],
        st.bool: [1, 1, 1, 1, 1, 1, 1],
    }
    with program(device) as p:
        x = p.input(source)
        for found, (prec, want) in zip(p.run(*(st.cast(x, prec) for prec in expected)), expected.items(), strict=True):
            assert found.astype(object).tolist() == want, prec
        # the host follows the same rule where it converts data
        for prec, want in expected.items():
            held = p.ctx.get_values(st.constant(np.array(source, np.float32), prec=prec))
            assert held.astype(object).tolist() == want, prec


@both_devices
def test_infinite_halves_saturate_in_small_integers(device: str) -> None:
    with program(device) as p:
        x = p.input([INF, -INF, NAN, -1.7], st.f16)
        signed, unsigned = p.run(st.cast(x, st.i8), st.cast(x, st.u8))
        assert signed.tolist() == [127, -128, 0, -1]
        assert unsigned.tolist() == [255, 0, 0, 0]


@both_devices
def test_a_literal_converts_to_an_integer_as_data_does(device: str) -> None:
    with program(device) as p:
        casts = [st.cast(st.constant(value, prec=st.f32), st.u8) for value in (300.7, -1.0, NAN)]
        assert [found.item() for found in p.run(*casts)] == [255, 0, 0]


@both_devices
def test_fp8_overflow_rules(device: str) -> None:
    with program(device) as p:
        to_e4m3 = p.input([448.0, 464.0, 465.0, INF, NAN, -INF])
        to_e5m2 = p.input([57344.0, 61439.0, 61440.0, INF, -INF, NAN])
        plain4, plain5, kept4, kept5 = p.run(
            st.cast(to_e4m3, st.f8e4m3),
            st.cast(to_e5m2, st.f8e5m2),
            st.cast(to_e4m3, st.f8e4m3, saturate=True),
            st.cast(to_e5m2, st.f8e5m2, saturate=True),
        )
        same(plain4, [448, 448, NAN, NAN, NAN, NAN])
        same(plain5, [57344, 57344, INF, INF, -INF, NAN])
        same(kept4, [448, 448, 448, NAN, NAN, NAN])
        same(kept5, [57344, 57344, 57344, INF, -INF, NAN])


@both_devices
def test_half_codes_decode_exactly(device: str) -> None:
    codes = np.array([0x0001, 0x03FF, 0x0400, 0x3C00, 0x7BFF, 0x7C00, 0xFC00, 0x7E00, 0x8000], np.uint16)
    with program(device) as p:
        x = p.input(codes.view(np.float16), st.f16)
        (found,) = p.run(st.cast(x, st.f32))
        smallest, below, least = 2.0**-24, 1023 * 2.0**-24, 2.0**-14
        same(found, [smallest, below, least, 1, 65504, INF, -INF, NAN, -0.0])


def test_all_narrow_codes_decode_as_their_libraries_do() -> None:
    every = np.arange(65536, dtype=np.uint16)
    small = np.arange(256, dtype=np.uint8)
    sources = {
        st.f16: every.view(np.float16),
        st.bf16: every.view(ml_dtypes.bfloat16),
        st.f8e4m3: small.view(ml_dtypes.float8_e4m3fn),
        st.f8e5m2: small.view(ml_dtypes.float8_e5m2),
    }
    with program() as p:
        inputs = {prec: p.input(data, prec) for prec, data in sources.items()}
        found = p.run(*(st.cast(x, st.f32) for x in inputs.values()))
        for cells, data in zip(found, sources.values(), strict=True):
            np.testing.assert_array_equal(cells, data.astype(np.float32))


@both_devices
def test_conversion_from_wide_sources_rounds_once(device: str) -> None:
    with program(device) as p:
        f64 = p.input([1 + 2**-8 + 2**-40], st.f64)
        e5m2, e4m3 = p.input([1.125 + 2**-40], st.f64), p.input([1.0625 + 2**-40], st.f64)
        i64 = p.input([2**40 + 2**32 + 1], st.i64)
        found = p.run(st.cast(f64, st.bf16), st.cast(e5m2, st.f8e5m2), st.cast(e4m3, st.f8e4m3), st.cast(i64, st.bf16))
        assert [wide(cell)[0] for cell in found] == [1 + 2**-7, 1.25, 1.125, 2**40 + 2**33]


@both_devices
def test_nan_keeps_being_nan_in_every_float_format(device: str) -> None:
    patterns = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7FC00000], np.uint32).view(np.float32)
    with program(device) as p:
        x = p.input(patterns)
        for found in p.run(*(st.cast(x, prec) for prec in (*FLOATS, st.f8e4m3, st.f8e5m2))):
            assert np.isnan(found).all(), found.dtype
