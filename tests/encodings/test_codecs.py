"""Decoders against the gguf package and scalar decoders, the layouts of public bug reports, the quantizers' rules."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import pytest

from stagedtensor.block_formats import ROW_ENCODINGS
from stagedtensor.encodings import (
    BITNET_B1_58,
    PACKED_ENCODINGS,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_0,
    Q5_1,
    Q6_K,
    Q8_0,
    TQ1_0,
    TQ2_0,
    Dense,
    Encoding,
    TernaryPacked,
    decode_blocks,
    pack,
)
from stagedtensor.errors import EncodingError
from tests.encodings.samples import sample

gguf = pytest.importorskip("gguf")
Array = np.ndarray[Any, Any]
QUANTIZED = (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, TQ1_0, TQ2_0)


def same_bits(got: Array, want: Array) -> None:
    """NaN matches NaN, everything else bit for bit."""
    got, want = np.asarray(got, np.float32).reshape(-1), np.asarray(want, np.float32).reshape(-1)
    numbers = ~np.isnan(want)
    assert np.isnan(got[~numbers]).all()
    np.testing.assert_array_equal(got[numbers].view(np.uint32), want[numbers].view(np.uint32))


def reference(encoding: Encoding, blocks: Array) -> Array:
    with np.errstate(all="ignore"):
        decoded: Array = gguf.dequantize(blocks, gguf.GGMLQuantizationType[encoding.name])
    return decoded


def random_blocks(encoding: Encoding, count: int, seed: int) -> Array:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, encoding.nbytes), dtype=np.uint8)


@pytest.mark.parametrize("encoding", ROW_ENCODINGS, ids=str)
def test_decode_of_random_bytes_has_the_bits_of_the_package(encoding: Encoding) -> None:
    blocks = random_blocks(encoding, 700, 1)
    for at, scale in enumerate((-1.5, -0.0, 0.0, 2.0**-24, -(2.0**-17), 65504.0)):
        for offset in encoding.scales:
            blocks[at, offset : offset + 2] = np.array([scale], "<f2").view(np.uint8)
    same_bits(decode_blocks(encoding, blocks.tobytes()), reference(encoding, blocks))


@pytest.mark.parametrize("encoding", ROW_ENCODINGS, ids=str)
def test_decode_every_block_of_every_row(encoding: Encoding) -> None:
    """Three rows of 512 elements, a scale of its own in each block."""
    value = sample(encoding, 3, 512 // encoding.elements)
    decoded = value.numpy()
    assert decoded.shape == (3, 512)
    same_bits(decoded, reference(encoding, value.data.reshape(3, -1)))
    assert np.abs(decoded[2, 512 - encoding.elements :]).max() > 0


def test_decode_block_sizes_are_those_of_the_package() -> None:
    for encoding in ROW_ENCODINGS:
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[encoding.name]] == (encoding.elements, encoding.nbytes)


def test_decode_keeps_the_sign_of_a_negative_scale_times_zero() -> None:
    block = struct.pack("<e", -2.0) + bytes([0x88] * 16)
    assert np.signbit(decode_blocks(Q4_0, block)).all()


def test_decode_q5_codes_in_order_give_values_in_order() -> None:
    nibbles = bytes((j & 15) | (((j + 16) & 15) << 4) for j in range(16))
    high = sum(1 << j for j in range(16, 32)).to_bytes(4, "little")
    signed = struct.pack("<e", 1.0) + high + nibbles
    np.testing.assert_array_equal(decode_blocks(Q5_0, signed), np.arange(-16, 16))
    offset = struct.pack("<ee", 0.5, -3.0) + high + nibbles
    np.testing.assert_array_equal(decode_blocks(Q5_1, offset), np.arange(-3.0, 13.0, 0.5))


def test_decode_k_scales_above_15_and_signed_scales() -> None:
    scales, minima = [17, 63, 20, 31, 40, 58, 33, 49], [16, 1, 62, 30, 44, 21, 50, 63]
    packed = bytearray(12)
    for j in range(4):
        packed[j] = scales[j] | (scales[j + 4] >> 4) << 6
        packed[j + 4] = minima[j] | (minima[j + 4] >> 4) << 6
        packed[j + 8] = (scales[j + 4] & 15) | (minima[j + 4] & 15) << 4
    block = struct.pack("<ee", 0.25, 0.5) + bytes(packed) + bytes([0x53] * 128)
    want = [0.25 * scales[e // 32] * (5 if e // 32 % 2 else 3) - 0.5 * minima[e // 32] for e in range(256)]
    np.testing.assert_array_equal(decode_blocks(Q4_K, block), want)
    signed = [(-4) ** (1 + at % 3) for at in range(16)]
    six = bytes(192) + struct.pack("16b", *signed) + struct.pack("<e", 0.5)
    np.testing.assert_array_equal(decode_blocks(Q6_K, six), [-16.0 * signed[e // 16] for e in range(256)])


def test_decode_ternary_bits_are_strided() -> None:
    block = bytes([0b10010010]) + bytes(63) + struct.pack("<e", 2.0)
    got = decode_blocks(TQ2_0, block)
    assert [got[0], got[32], got[64], got[96]] == [2.0, -2.0, 0.0, 2.0]
    assert (np.delete(got, [0, 32, 64, 96]) == -2.0).all()


@pytest.mark.parametrize("count", [4, 5, 7, 515])
def test_decode_whole_tensor_codes_against_a_scalar_decoder(count: int) -> None:
    rng = np.random.default_rng(count)
    codes, scale = rng.integers(0, 256, -(-count // 4), dtype=np.uint8), np.float32(-0.3)
    want = [np.float32((int(codes[i // 4]) >> 2 * (i % 4) & 3) - 1) * scale for i in range(count)]
    same_bits(decode_blocks(TernaryPacked, codes.tobytes(), count=count, scale=float(scale)), np.array(want))
    same_bits(decode_blocks(BITNET_B1_58, codes.tobytes() + scale.tobytes(), count=count), np.array(want))


def test_decode_long_whole_tensors_in_pieces() -> None:
    count = (1 << 17) + 3
    codes = np.random.default_rng(0).integers(0, 256, -(-count // 4), dtype=np.uint8)
    want = ((codes[:, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3).reshape(-1)[:count].astype(np.float32) - 1) * 0.5
    np.testing.assert_array_equal(decode_blocks(TernaryPacked, codes.tobytes(), count=count, scale=0.5), want)


def test_decode_refuses_bytes_that_are_no_blocks() -> None:
    with pytest.raises(EncodingError, match="no whole number of blocks of 18"):
        decode_blocks(Q4_0, bytes(19))
    with pytest.raises(EncodingError, match="do not hold 9 elements"):
        decode_blocks(TernaryPacked, bytes(2), count=9)
    with pytest.raises(EncodingError, match="packed encoding"):
        decode_blocks(Dense(4), bytes(8))


# -- quantizers ---------------------------------------------------------------------------------------------------


def matrix(seed: int, rows: int = 3, width: int = 768) -> Array:
    rng = np.random.default_rng(seed)
    values = rng.normal(0, 1, (rows, width)).astype(np.float32)
    values[0, :32] = 0
    return values


def half_away(value: float) -> int:
    return int(math.copysign(math.floor(abs(value) + 0.5), value))


def codes_by_hand(encoding: Encoding, block: Array) -> list[int]:
    """The rounding rules, one element at a time in f32."""
    one, x0 = np.float32(1), block[int(np.argmax(np.abs(block)))]
    if encoding in (Q4_0, Q5_0):
        top = 8 if encoding is Q4_0 else 16
        d = x0 / np.float32(-top)
        inverse = np.float32(0) if d == 0 else one / d
        return [min(2 * top - 1, max(0, int(x * inverse + np.float32(top + 0.5)))) for x in block]
    if encoding in (Q4_1, Q5_1):
        top = 15 if encoding is Q4_1 else 31
        d = (block.max() - block.min()) / np.float32(top)
        inverse = np.float32(0) if d == 0 else one / d
        return [min(top, max(0, int((x - block.min()) * inverse + np.float32(0.5)))) for x in block]
    d = np.abs(block).max() / np.float32(127) if encoding is Q8_0 else np.abs(block).max()
    inverse = np.float32(0) if d == 0 else one / d
    return [half_away(float(x * inverse)) for x in block]


def unpacked_codes(encoding: Encoding, block: bytes) -> list[int]:
    """The codes of a block: decoded with scale 1 and no offset."""
    unit = bytearray(block)
    for offset in encoding.scales:
        unit[offset : offset + 2] = struct.pack("<e", 1.0 if offset == encoding.scales[0] else 0.0)
    shift = {Q4_0: 8, Q5_0: 16}.get(encoding, 0)
    return [int(value) + shift for value in decode_blocks(encoding, bytes(unit))]


@pytest.mark.parametrize("encoding", QUANTIZED, ids=str)
def test_pack_follows_its_rounding_rule(encoding: Encoding) -> None:
    values = matrix(2)
    packed = pack(values, encoding)
    blocks, raw = values.reshape(-1, encoding.elements), packed.data.reshape(-1, encoding.nbytes)
    for at in (0, 1, 2, len(blocks) - 1):
        assert unpacked_codes(encoding, raw[at].tobytes()) == codes_by_hand(encoding, blocks[at]), f"block {at}"


@pytest.mark.parametrize("encoding", QUANTIZED, ids=str)
def test_pack_twice_gives_the_same_bytes(encoding: Encoding) -> None:
    values = matrix(3)
    values[0, :32] = 1  # a block of zeros has a scale of -0.0 at first, then of +0.0
    once = pack(values, encoding)
    np.testing.assert_array_equal(pack(once.numpy(), encoding).data, once.data)


BOUNDS = {Q4_0: 1.004, Q5_0: 1.008, Q8_0: 0.57, TQ1_0: 0.501, TQ2_0: 0.501, Q4_1: 0.508, Q5_1: 0.516}


@pytest.mark.parametrize("encoding", QUANTIZED, ids=str)
def test_pack_errors_stay_within_their_bounds(encoding: Encoding) -> None:
    values = matrix(4)
    packed = pack(values, encoding)
    raw = packed.data.reshape(-1, encoding.nbytes)
    scales = [raw[:, at : at + 2].copy().view("<f2").astype(np.float64) for at in encoding.scales]
    error = np.abs(values - packed.numpy()).reshape(-1, encoding.elements).astype(np.float64)
    allowed = BOUNDS[encoding] * np.abs(scales[0])
    if len(scales) == 2:
        allowed = allowed + 2.0**-11 * np.abs(scales[1])
    assert (error <= allowed).all()
    assert error.max() > 0


@pytest.mark.parametrize("encoding", [BITNET_B1_58, TernaryPacked], ids=str)
def test_pack_absmean_rounds_half_to_even(encoding: Encoding) -> None:
    # mean magnitude 1: 0.5 is a tie and goes to 0, 1.5 is above 1 and stays there
    values = np.array([[0.5, -0.5, 1.5, -1.5, 1.0]], np.float32)
    packed = pack(values, encoding)
    assert packed.tensor_scale == 1
    np.testing.assert_array_equal(packed.numpy(), [[0, 0, 1, -1, 1]])
    np.testing.assert_array_equal(packed.codes, [0b00100101, 0b00000010])
    zeros = pack(np.zeros((1, 3), np.float32), encoding)
    np.testing.assert_array_equal(zeros.codes, [0b00010101])
    np.testing.assert_array_equal(zeros.numpy(), np.zeros((1, 3)))


@pytest.mark.parametrize("encoding", [item for item in PACKED_ENCODINGS if item.quantizer], ids=str)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_pack_refuses_values_that_are_not_finite(encoding: Encoding, value: float) -> None:
    values = matrix(5)
    values[1, 300] = value
    with pytest.raises(EncodingError, match=r"cell \[1, 300\]"):
        pack(values, encoding)


@pytest.mark.parametrize("encoding", QUANTIZED, ids=str)
def test_pack_refuses_scales_beyond_a_half(encoding: Encoding) -> None:
    values = matrix(6)
    values[2, 256:300] = 3e38
    values[2, 300] = -3e38
    with pytest.raises(EncodingError, match="too large for its half-precision scale"):
        pack(values, encoding)


@pytest.mark.parametrize("encoding", [Q4_K, Q6_K], ids=str)
def test_pack_without_a_quantizer_says_so(encoding: Encoding) -> None:
    with pytest.raises(EncodingError, match="no quantizer"):
        pack(matrix(7), encoding)


def test_pack_refuses_other_arrays() -> None:
    with pytest.raises(EncodingError, match="rows of 33"):
        pack(np.zeros((2, 33), np.float32), Q8_0)
    with pytest.raises(EncodingError, match="expected floats, got i32"):
        pack(np.zeros((2, 32), np.int32), Q8_0)
    with pytest.raises(EncodingError, match="single number"):
        pack(np.float32(1), Q8_0)
