"""The ``Encoded`` value: validation, orders, repacking, I2_S."""

from __future__ import annotations

import copy
import pickle
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from stagedtensor.block_formats import ROW_ENCODINGS
from stagedtensor.encodings import (
    BITNET_B1_58,
    INPUT_BLOCK_MAJOR,
    PACKED_ENCODINGS,
    Q4_0,
    Q4_K,
    Q6_K,
    Q8_0,
    ROW_MAJOR,
    TQ2_0,
    Dense,
    Encoded,
    Encoding,
    TernaryPacked,
    decode_blocks,
    import_i2_s,
    pack,
)
from stagedtensor.errors import EncodingError
from stagedtensor.precision import bf16, f16, f32, f64, i8
from tests.encodings.samples import sample

Array = np.ndarray[Any, Any]


# -- validation ---------------------------------------------------------------------------------------------------


def test_validation_keeps_bytes_read_only_and_copies_only_what_others_may_write() -> None:
    raw = np.zeros(34, np.uint8)
    value = Encoded((32,), f32, Q8_0, raw)
    raw[2] = 5
    assert not value.data.flags.writeable
    assert value.numpy()[0] == 0
    frozen = np.frombuffer(bytes(34), np.uint8)
    assert np.shares_memory(Encoded((1, 32), f32, Q8_0, frozen).data, frozen)


BROKEN: dict[str, tuple[Callable[[], Any], str]] = {
    "byte count": (lambda: Encoded((2, 32), f32, Q8_0, bytes(67)), r"takes 68 bytes, got 67"),
    "whole byte count": (lambda: Encoded((5,), f32, BITNET_B1_58, bytes(5)), r"takes 6 bytes, got 5"),
    "rows of blocks": (lambda: Encoded((2, 128), f32, Q4_K, bytes(144)), r"blocks of 256 elements; rows of 128"),
    "extent": (lambda: Encoded((0, 32), f32, Q8_0, b""), r"extents of at least 1"),
    "no axis": (lambda: Encoded((), f32, Q8_0, b""), r"at least one axis"),
    "element type": (lambda: Encoded((32,), f32, Q8_0, np.zeros(34, np.int8)), r"uint8"),
    "precision of packed": (lambda: Encoded((32,), f16, Q8_0, bytes(34)), r"logically f32, not f16"),
    "precision of dense": (lambda: Encoded((2,), f16, Dense(4), bytes(8)), r"elements of 4 bytes, f16 has 2"),
    "dense width": (lambda: Dense(3), r"1, 2, 4 or 8"),
    "order of whole": (
        lambda: Encoded((4,), f32, TernaryPacked, bytes(1), INPUT_BLOCK_MAJOR, scale=1.0), r"one order, ROW_MAJOR"
    ),
    "scale missing": (lambda: Encoded((4,), f32, TernaryPacked, bytes(1)), r"TernaryPacked, which needs it"),
    "scale too many": (lambda: Encoded((32,), f32, Q8_0, bytes(34), scale=1.0), r"belongs to TernaryPacked"),
    "tensor scale": (lambda: Encoded((4,), f32, TernaryPacked, bytes(1), scale=float("nan")), r"scale is nan"),
    "tensor scale in bytes": (
        lambda: Encoded((4,), f32, BITNET_B1_58, bytes(1) + struct.pack("<f", float("inf"))), r"scale is inf"
    ),
    "code 3": (lambda: Encoded((8,), f32, TernaryPacked, bytes([0, 0x30]), scale=1.0), r"byte 1 .* code 3"),
    "code 3 in the middle": (lambda: Encoded((8,), f32, TernaryPacked, bytes([0x0C, 0]), scale=1.0), r"byte 0 .* code 3"),
    "code 3 in a block": (
        lambda: Encoded((2, 256), f32, TQ2_0, bytes(66) + bytes(63) + b"\xc0" + bytes(2)), r"row 1, block 0 .* code 3"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_validation_refuses_each_broken_rule(case: str) -> None:
    make, message = BROKEN[case]
    with pytest.raises(EncodingError, match=message):
        make()


@pytest.mark.parametrize("encoding", [Q8_0, TernaryPacked, BITNET_B1_58, Dense(4)], ids=str)
def test_validation_holds_for_good_and_for_copies(encoding: Encoding) -> None:
    value = sample(encoding, 2, 1)
    for field in ("shape", "encoding", "data", "scale"):
        with pytest.raises(EncodingError, match=f"its {field} cannot be set"):
            setattr(value, field, getattr(value, field))
    for twin in (copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert twin.encoding == value.encoding
        assert twin.encoding is value.encoding or encoding.dense
        np.testing.assert_array_equal(twin.numpy(), value.numpy())


def test_decode_blocks_refuses_counts_and_names() -> None:
    assert decode_blocks(Q8_0, bytes(68), count=64).size == 64
    for count in (-1, 32, 65):
        with pytest.raises(EncodingError, match=f"68 bytes hold 64 elements in whole blocks, not {count}"):
            decode_blocks(Q8_0, bytes(68), count=count)
    name: Any = "Q8_0"
    with pytest.raises(EncodingError, match="expected an encoding"):
        decode_blocks(name, bytes(34))


def test_validation_ignores_code_3_in_the_padding() -> None:
    value = Encoded((5,), f32, TernaryPacked, bytes([0b01010101, 0b11111101]), scale=2.0)
    np.testing.assert_array_equal(value.numpy(), np.zeros(5))


@pytest.mark.parametrize("encoding", ROW_ENCODINGS, ids=str)
@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E01])
def test_validation_names_the_block_of_a_scale_that_is_not_finite(encoding: Encoding, bits: int) -> None:
    for offset in encoding.scales:
        data = np.zeros((2, 3, encoding.nbytes), np.uint8)
        data[1, 2, offset : offset + 2] = np.array([bits], "<u2").view(np.uint8)
        with pytest.raises(EncodingError, match=r"block 5 \(row 1, block 2 of it\)"):
            Encoded((2, 3 * encoding.elements), f32, encoding, data.tobytes())
        turned = data.swapaxes(0, 1).tobytes()
        with pytest.raises(EncodingError, match=r"block 5 \(row 1, block 2 of it\)"):
            Encoded((2, 3 * encoding.elements), f32, encoding, turned, INPUT_BLOCK_MAJOR)


# -- orders -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ROW_ENCODINGS, ids=str)
def test_orders_are_one_matrix(encoding: Encoding) -> None:
    value = sample(encoding, 2, 3)
    assert value.prepack(ROW_MAJOR) is value
    turned = value.prepack(INPUT_BLOCK_MAJOR)
    assert turned.data.tobytes() != value.data.tobytes()
    size = encoding.nbytes
    np.testing.assert_array_equal(turned.data[2 * size : 3 * size], value.data[size : 2 * size])
    np.testing.assert_array_equal(turned.numpy().view(np.uint32), value.numpy().view(np.uint32))
    np.testing.assert_array_equal(turned.prepack(ROW_MAJOR).data, value.data)


@pytest.mark.parametrize("encoding", [BITNET_B1_58, TernaryPacked, Dense(4)], ids=str)
def test_orders_of_whole_tensors_and_dense_ones_are_one(encoding: Encoding) -> None:
    with pytest.raises(EncodingError, match="one order"):
        sample(encoding, 2, 3).prepack(INPUT_BLOCK_MAJOR)


def test_validation_folds_leading_axes_into_rows() -> None:
    flat = sample(Q8_0, 6, 2)
    value = Encoded((2, 3, 64), f32, Q8_0, flat.data)
    assert (value.rows, value.row_blocks, value.size) == (6, 2, 384)
    np.testing.assert_array_equal(value.numpy(), flat.numpy().reshape(2, 3, 64))


# -- repacking ----------------------------------------------------------------------------------------------------

TARGETS = (*PACKED_ENCODINGS, Dense(4), Dense(2), Dense(8))


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("source", [*PACKED_ENCODINGS, Dense(4)], ids=str)
def test_repack_of_every_pair_is_done_kept_or_refused(source: Encoding, target: Encoding) -> None:
    value = sample(source, 2, 3)
    width = value.shape[-1]
    if source == target:
        assert value.repack_to(target) is value
        return
    ternary = {BITNET_B1_58, TernaryPacked}
    if {source, target} <= ternary:
        moved = value.repack_to(target)
        np.testing.assert_array_equal(moved.codes, value.codes)
        assert moved.tensor_scale == value.tensor_scale
        return
    if target.dense:
        if target.nbytes == 4:
            dense = value.repack_to(target)
            np.testing.assert_array_equal(dense.numpy().view(np.uint32), value.numpy().view(np.uint32))
            return
        with pytest.raises(EncodingError, match="needs prec="):
            value.repack_to(target)
        wide = value.numpy().astype(np.float64)
        if target.nbytes == 8:
            np.testing.assert_array_equal(value.repack_to(target, prec=f64).numpy(), wide)
        else:
            with np.errstate(over="ignore"):
                np.testing.assert_array_equal(value.repack_to(target, prec=f16).numpy(), wide.astype(np.float16))
                narrow = value.repack_to(target, prec=bf16).numpy()
            np.testing.assert_array_equal(narrow, value.numpy().astype(bf16.numpy_dtype))
        return
    if not source.dense:
        with pytest.raises(EncodingError, match="lossy=True"):
            value.repack_to(target)
    if not target.quantizer:
        with pytest.raises(EncodingError, match="no quantizer"):
            value.repack_to(target, lossy=True)
    elif width % target.elements:
        with pytest.raises(EncodingError, match=f"rows of {width}"):
            value.repack_to(target, lossy=True)
    else:
        pytest.importorskip("gguf")
        packed = value.repack_to(target, lossy=True)
        np.testing.assert_array_equal(packed.data, pack(value.numpy(), target).data)


def test_repack_refuses_wrong_formats() -> None:
    value = sample(Q8_0, 2, 2)
    with pytest.raises(EncodingError, match="no float format of 2 bytes"):
        value.repack_to(Dense(2), prec=f32)
    with pytest.raises(EncodingError, match="no float format of 1 bytes"):
        value.repack_to(Dense(1), prec=i8)
    with pytest.raises(EncodingError, match="belongs to dense"):
        value.repack_to(Q4_0, prec=f32, lossy=True)


def test_repack_dense_keeps_any_precision() -> None:
    values = np.arange(6, dtype=np.int8).reshape(2, 3)
    value = pack(values, Dense(1))
    assert value.prec is i8
    np.testing.assert_array_equal(value.numpy(), values)
    halves = pack(np.array([1 + 2.0**-12, 70000.0]), Dense(2), prec=f16)
    np.testing.assert_array_equal(halves.numpy(), [1, np.inf])


def test_repack_of_both_orders_is_alike() -> None:
    value = sample(Q6_K, 2, 3)
    turned = value.prepack(INPUT_BLOCK_MAJOR)
    np.testing.assert_array_equal(turned.repack_to(Dense(4)).data, value.repack_to(Dense(4)).data)


# -- I2_S ---------------------------------------------------------------------------------------------------------


def i2_s_bytes(codes: Array, group: int | str) -> bytes:
    """Lay codes out by the definition, element by element."""
    data = bytearray(codes.size // 4)
    for j, code in enumerate(codes):
        if isinstance(group, str):
            data[j // 4] |= int(code) << 2 * (j % 4)
        else:
            quarter = group // 4
            data[(j // group) * quarter + j % group % quarter] |= int(code) << 6 - 2 * (j % group // quarter)
    return bytes(data)


@pytest.mark.parametrize("group", [128, 64, "sequential"])
def test_i2_s_groupings_give_one_matrix(group: Any) -> None:
    codes = np.random.default_rng(8).integers(0, 3, 2 * 256)
    value = import_i2_s(i2_s_bytes(codes, group), (2, 256), group, scale=0.5)
    assert value.encoding is BITNET_B1_58
    np.testing.assert_array_equal(value.numpy(), (codes.reshape(2, 256) - 1) * 0.5)


def test_i2_s_takes_the_scale_of_the_trailer() -> None:
    data = i2_s_bytes(np.ones(128, int), 128) + struct.pack("<f", 3.0) + bytes(28)
    assert import_i2_s(data, (1, 128), 128).tensor_scale == 3.0
    assert import_i2_s(data, (1, 128), 128, scale=2.0).tensor_scale == 2.0


@pytest.mark.parametrize(
    ("data", "shape", "group", "scale", "message"),
    [
        (bytes(32), (1, 128), 128, None, "no scale given"),
        (bytes([0xFF]) + bytes(31), (1, 128), 128, 1.0, "code 3"),
        (bytes(32), (1, 126), "sequential", 1.0, "no whole number of groups of 4"),
        (bytes(48), (1, 192), 128, 1.0, "no whole number of groups of 128"),
        (bytes(31), (1, 128), 64, 1.0, "takes 32 code bytes"),
        (bytes(32), (1, 128), 32, 1.0, "grouping 64, 128"),
        (bytes(32), (1, 128), 64, float("inf"), "must be finite"),
    ],
)
def test_i2_s_refuses_each_broken_rule(
    data: bytes, shape: tuple[int, ...], group: Any, scale: float | None, message: str
) -> None:
    with pytest.raises(EncodingError, match=message):
        import_i2_s(data, shape, group, scale)
