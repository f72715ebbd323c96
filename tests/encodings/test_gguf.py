"""GGUF files: what the package writes is read; what is damaged gives EncodingError and nothing else."""

from __future__ import annotations

import struct
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stagedtensor.block_formats import ROW_ENCODINGS
from stagedtensor.encodings import BITNET_B1_58, Q8_0, Dense, Encoded, GGUFWeights, load_gguf, pack
from stagedtensor.errors import EncodingError
from tests.encodings.samples import sample

gguf = pytest.importorskip("gguf")
Array = np.ndarray[Any, Any]
Types = gguf.GGMLQuantizationType


def write(path: Path, tensors: dict[str, Array], types: dict[str, Any] | None = None, **metadata: Any) -> Path:
    writer = gguf.GGUFWriter(str(path), "test")
    for key, value in metadata.items():
        key = key.replace("__", ".")
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        else:
            writer.add_uint32(key, value)
    for name, values in tensors.items():
        writer.add_tensor(name, values, raw_dtype=(types or {}).get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def packed_rows(value: Encoded) -> Array:
    return np.array(value.data).reshape(value.rows, -1)


def test_gguf_every_supported_type_is_read(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    plain = {
        name: rng.integers(-9, 9, (3, 5)).astype(dtype)
        for name, dtype in {"f4": "f4", "f2": "f2", "f8": "f8", "i1": "i1", "i2": "i2", "i4": "i4", "i8": "i8"}.items()
    }
    values = {encoding.name: sample(encoding, 3, 2) for encoding in ROW_ENCODINGS}
    halves = rng.normal(0, 1, (2, 8)).astype(np.float32)
    tensors = {**plain, **{name: packed_rows(value) for name, value in values.items()}}
    tensors["bf16"] = gguf.quantize(halves, Types.BF16)
    types = {**{name: Types[name] for name in values}, "bf16": Types.BF16}
    path = write(tmp_path / "all.gguf", tensors, types, general__name="small", a__list=["x", "yy"], a__flag=True)
    read = load_gguf(path)
    assert set(read) == set(tensors)
    assert read.skipped == {}
    for name, cells in plain.items():
        assert read[name].encoding == Dense(cells.itemsize)
        np.testing.assert_array_equal(read[name].numpy(), cells)
    for name, value in values.items():
        assert read[name].encoding is value.encoding
        assert read[name].shape == value.shape
        np.testing.assert_array_equal(read[name].data, value.data)
        assert not read[name].data.flags.owndata
    assert str(read["bf16"].prec) == "bf16"
    np.testing.assert_array_equal(read["bf16"].numpy().astype(np.float32), gguf.dequantize(tensors["bf16"], Types.BF16))
    assert read.metadata["general.name"] == "small"
    assert read.metadata["a.list"] == ["x", "yy"]
    assert read.metadata["a.flag"] is True


def test_gguf_lists_the_innermost_axis_first_and_every_block_decodes(tmp_path: Path) -> None:
    value = pack(np.random.default_rng(1).normal(0, 1, (3, 64)).astype(np.float32), Q8_0)
    path = write(tmp_path / "rows.gguf", {"w": packed_rows(value)}, {"w": Types.Q8_0})
    read = load_gguf(path)["w"]
    assert read.shape == (3, 64)
    np.testing.assert_array_equal(read.numpy(), gguf.dequantize(packed_rows(value), Types.Q8_0))
    assert read.numpy()[2, 63] != 0


def test_gguf_unsupported_types_are_refused_or_listed(tmp_path: Path) -> None:
    other = np.zeros((2, 84), np.uint8)
    path = write(tmp_path / "q2.gguf", {"odd": other, "fine": np.ones(4, np.float32)}, {"odd": Types.Q2_K})
    with pytest.raises(EncodingError, match=r"q2\.gguf: tensor 'odd' .* type Q2_K is not supported"):
        load_gguf(path)
    read = load_gguf(path, skip_unsupported=True)
    assert list(read) == ["fine"]
    assert read.skipped == {"odd": "Q2_K"}


def test_gguf_package_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(EncodingError, match=r"stagedtensor\[gguf\]"):
        load_gguf(tmp_path / "any.gguf")
    with pytest.raises(EncodingError, match=r"stagedtensor\[gguf\]"):
        pack(np.ones((1, 32), np.float32), Q8_0)
    assert sample(Q8_0, 1, 1).numpy().shape == (1, 32)


# -- files by hand ------------------------------------------------------------------------------------------------


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def entry(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def info(name: bytes, extents: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(extents)}QIQ", len(extents), *extents, kind, offset)


def build(
    infos: list[bytes], data: bytes, entries: list[bytes] | None = None, *, version: int = 3, magic: bytes = b"GGUF",
    counts: tuple[int, int] | None = None, alignment: int = 32,
) -> bytes:  # fmt: skip
    entries = entries or []
    head = magic + struct.pack("<I", version) + struct.pack("<QQ", *(counts or (len(infos), len(entries))))
    head += b"".join(entries) + b"".join(infos)
    return head + bytes(-len(head) % alignment) + data


def load(path: Path, content: bytes, **options: Any) -> GGUFWeights:
    path.write_bytes(content)
    return load_gguf(path, **options)


def two_tensors(first: int = 0, second: int = 32) -> list[bytes]:
    return [info(b"a", (4, 2), 0, first), info(b"b", (8,), 0, second)]


DATA = np.arange(16, dtype="<f4").tobytes()
AXIS_65 = (1,) * 5
DAMAGED: dict[str, tuple[bytes, str]] = {
    "magic": (build(two_tensors(), DATA, magic=b"GGML"), "byte 0: no GGUF"),
    "version": (build(two_tensors(), DATA, version=4), "byte 4: GGUF version 4"),
    "version 1": (build(two_tensors(), DATA, version=1), "byte 4: GGUF version 1"),
    "big-endian": (build(two_tensors(), DATA, version=3 << 24), "big-endian"),
    "tensor count": (build(two_tensors(), DATA, counts=(1 << 60, 0)), "tensors announced"),
    "entry count": (build(two_tensors(), DATA, counts=(2, 1 << 60)), "metadata entries announced"),
    "key length": (build([], b"", [struct.pack("<Q", 1 << 40) + bytes(60)]), "announced"),
    "key not utf-8": (build([], b"", [entry(b"\xff\xfe", 4, bytes(4))]), "not UTF-8"),
    "key twice": (build([], b"", [entry(b"k", 4, bytes(4))] * 2), "'k' appears twice"),
    "value type": (build([], b"", [entry(b"k", 13, bytes(8))]), "value type 13"),
    "bool": (build([], b"", [entry(b"k", 7, b"\x02")]), "neither 0 nor 1"),
    "array length": (build([], b"", [entry(b"k", 9, struct.pack("<IQ", 6, 1 << 62))]), "announced"),
    "string array length": (build([], b"", [entry(b"k", 9, struct.pack("<IQ", 8, 1 << 50))]), "announced"),
    "string in array": (build([], b"", [entry(b"k", 9, struct.pack("<IQQ", 8, 1, 1 << 50))]), "are left"),
    "array type": (build([], b"", [entry(b"k", 9, struct.pack("<IQ", 77, 1) + bytes(12))]), "value type 77"),
    "nesting": (build([], b"", [entry(b"k", 9, struct.pack("<IQ", 9, 1) * 4000 + bytes(12))]), "nests more than"),
    "alignment 0": (build([], b"", [entry(b"general.alignment", 4, bytes(4))]), "power of two"),
    "alignment 48": (build([], b"", [entry(b"general.alignment", 4, struct.pack("<I", 48))]), "power of two"),
    "alignment type": (build([], b"", [entry(b"general.alignment", 8, text(b"32"))]), "power of two"),
    "no axes": (build([info(b"a", (), 0, 0)], DATA), "0 axes"),
    "five axes": (build([info(b"a", AXIS_65, 0, 0)], DATA), "5 axes"),
    "zero extent": (build([info(b"a", (4, 0), 0, 0)], DATA), "must be positive"),
    "product": (build([info(b"a", (1 << 32, 1 << 32), 0, 0)], DATA), "below 2\\*\\*63"),
    "type": (build([info(b"a", (4,), 999, 0)], DATA), "type number 999"),
    "row of blocks": (build([info(b"a", (33,), 8, 0)], bytes(64)), "blocks of 32"),
    "offset": (build([info(b"a", (4,), 0, 8)], DATA), "no multiple of the alignment"),
    "outside": (build([info(b"a", (4, 5), 0, 0)], DATA), "the file has"),
    "far outside": (build([info(b"a", (4,), 0, 1 << 62)], DATA), "the file has"),
    "overlap": (build(two_tensors(0, 0), DATA), "'a' and 'b' overlap|'b' and 'a' overlap"),
    "name twice": (build([info(b"a", (4,), 0, 0), info(b"a", (4,), 0, 32)], DATA), "'a' appears twice"),
    "name not utf-8": (build([info(b"\xc3", (4,), 0, 0)], DATA), "not UTF-8"),
    "scale": (build([info(b"a", (32,), 8, 0)], b"\x00\x7c" + bytes(62)), "tensor 'a' at byte .* infinite or NaN"),
    "empty": (b"", "empty"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_gguf_damaged_each_rule_broken_once(case: str, tmp_path: Path) -> None:
    content, message = DAMAGED[case]
    with pytest.raises(EncodingError, match=f"broken.gguf: .*({message})"):
        load(tmp_path / "broken.gguf", content)


def test_gguf_undamaged_file_loads(tmp_path: Path) -> None:
    read = load(tmp_path / "fine.gguf", build(two_tensors(), DATA))
    np.testing.assert_array_equal(read["a"].numpy(), np.arange(8).reshape(2, 4))
    np.testing.assert_array_equal(read["b"].numpy(), np.arange(8, 16))
    old = load(tmp_path / "old.gguf", build(two_tensors(), DATA, version=2))
    assert set(old) == {"a", "b"}


NUMBERS = {
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    34: "TQ1_0",
    35: "TQ2_0",
}


def test_gguf_type_numbers_are_those_of_the_format(tmp_path: Path) -> None:
    """Written by hand, so that nothing but the number says what the blocks are."""
    by_name = {encoding.name: encoding for encoding in ROW_ENCODINGS}
    assert set(NUMBERS.values()) == by_name.keys()
    for number, name in NUMBERS.items():
        value = sample(by_name[name], 3, 2)
        content = build([info(b"w", (value.shape[1], 3), number, 0)], value.data.tobytes())
        read = load(tmp_path / f"{name}.gguf", content)["w"]
        assert (read.encoding, read.shape) == (value.encoding, value.shape)
        np.testing.assert_array_equal(read.data, value.data)


def test_gguf_metadata_of_every_kind(tmp_path: Path) -> None:
    numbers = struct.pack("<IQ", 5, 3) + struct.pack("<3i", -1, 0, 7)
    nested = struct.pack("<IQ", 9, 2) + (struct.pack("<IQ", 4, 1) + struct.pack("<I", 9)) * 2
    entries = [
        entry(b"u8", 0, b"\xff"), entry(b"f64", 12, struct.pack("<d", 0.1)), entry(b"i64", 11, struct.pack("<q", -5)),
        entry(b"text", 8, text("wörter".encode())), entry(b"raw", 8, text(b"\xff")), entry(b"numbers", 9, numbers),
        entry(b"nested", 9, nested), entry(b"general.alignment", 4, struct.pack("<I", 64)),
    ]  # fmt: skip
    read = load(tmp_path / "meta.gguf", build([info(b"a", (4,), 0, 0)], DATA[:16], entries, alignment=64))
    meta = read.metadata
    assert (meta["u8"], meta["f64"], meta["i64"], meta["text"]) == (255, 0.1, -5, "wörter")
    assert meta["raw"].encode("utf-8", "surrogateescape") == b"\xff"
    np.testing.assert_array_equal(meta["numbers"], [-1, 0, 7])
    assert [list(part) for part in meta["nested"]] == [[9], [9]]
    np.testing.assert_array_equal(read["a"].numpy(), np.arange(4))


def test_gguf_files_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(EncodingError, match="no such file"):
        load_gguf(tmp_path / "missing.gguf")
    with pytest.raises(EncodingError, match="a directory"):
        load_gguf(tmp_path)


def real_header() -> bytes:
    entries = [entry(b"a.list", 9, struct.pack("<IQ", 8, 2) + text(b"x") + text(b"yy")), entry(b"n", 4, bytes(4))]
    return build([info(b"w", (64, 2), 8, 0), info(b"norm", (8,), 0, 160)], bytes(192), entries)


def test_gguf_damaged_every_truncation_is_refused(tmp_path: Path) -> None:
    content = real_header()
    path = tmp_path / "cut.gguf"
    assert len(load(path, content)) == 2
    for size in range(len(content) - 1):
        with pytest.raises(EncodingError, match=r"cut\.gguf"):
            load(path, content[:size])


def test_gguf_damaged_at_random_gives_a_mapping_or_an_encoding_error(tmp_path: Path) -> None:
    content = real_header()
    rng = np.random.default_rng(0)
    path = tmp_path / "damaged.gguf"
    refused = 0
    for _ in range(500):
        changed = bytearray(content)
        for _ in range(int(rng.integers(1, 4))):
            changed[int(rng.integers(0, len(content) - 192))] = int(rng.integers(0, 256))
        started = time.perf_counter()
        try:
            load(path, bytes(changed))
        except EncodingError:
            refused += 1
        assert time.perf_counter() - started < 1
    assert 100 < refused < 500


# -- I2_S ---------------------------------------------------------------------------------------------------------


def test_gguf_i2_s_needs_its_grouping_and_a_scale(tmp_path: Path) -> None:
    codes = bytes([0b01_00_10_01] * 32)
    trailer = struct.pack("<f", 0.25) + bytes(28)
    path = tmp_path / "ternary.gguf"
    with_trailer = build([info(b"w", (64, 2), 36, 0)], codes + trailer)
    with pytest.raises(EncodingError, match=r"tensor 'w' .* grouping; pass i2_s="):
        load(path, with_trailer)
    assert load(path, with_trailer, skip_unsupported=True).skipped == {"w": "I2_S"}
    read = load(path, with_trailer, i2_s=64)["w"]
    assert read.encoding is BITNET_B1_58
    want = np.repeat([0, -1, 1, 0], 16) * 0.25
    np.testing.assert_array_equal(read.numpy(), [want, want])
    scale = info(b"w_scale", (1,), 0, 32)
    companion = build([info(b"w", (64, 2), 36, 0), scale], codes + struct.pack("<f", 4.0))
    assert load(path, companion, i2_s=128)["w"].tensor_scale == 4.0
    with pytest.raises(EncodingError, match="no scale given"):
        load(path, build([info(b"w", (64, 2), 36, 0)], codes), i2_s=64)
