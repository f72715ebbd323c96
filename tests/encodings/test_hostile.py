"""Damaged and hostile GGUF files and packed bytes: a sound value or EncodingError, in bounded memory and time."""

from __future__ import annotations

import struct
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as hyp

from stagedtensor.encodings import (
    INPUT_BLOCK_MAJOR,
    PACKED_ENCODINGS,
    Q4_K,
    Q8_0,
    ROW_MAJOR,
    Dense,
    Encoded,
    Encoding,
    TernaryPacked,
    decode_blocks,
    import_i2_s,
    load_gguf,
)
from stagedtensor.errors import EncodingError
from stagedtensor.precision import f32, precision
from tests.encodings.test_encoded import i2_s_bytes
from tests.encodings.test_gguf import DAMAGED, build, entry, info, text

Array = np.ndarray[Any, Any]
WORDS = (0, 1, 2, 3, 8, 9, 31, 32, 33, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1)
"""Values that counts, lengths, offsets and types are overwritten with."""


def rich() -> bytes:
    """A sound file with every kind of field: strings, numbers, arrays, nested arrays, packed, dense and I2_S tensors."""
    strings = struct.pack("<IQ", 8, 3) + text(b"x") + text(b"") + text("wörter".encode())
    nested = struct.pack("<IQ", 9, 2) + (struct.pack("<IQ", 4, 1) + struct.pack("<I", 9)) * 2
    entries = [
        entry(b"general.alignment", 4, struct.pack("<I", 32)), entry(b"general.name", 8, text(b"small")),
        entry(b"tokens", 9, strings), entry(b"scores", 9, struct.pack("<IQ", 6, 2) + bytes(8)),
        entry(b"flags", 9, struct.pack("<IQ", 7, 2) + b"\x00\x01"), entry(b"nested", 9, nested),
        entry(b"count", 10, struct.pack("<Q", 3)), entry(b"on", 7, b"\x01"),
    ]  # fmt: skip
    packed, dense, ternary = bytes(34 * 4), np.arange(8, dtype="<f4").tobytes(), bytes(32)
    infos = [
        info(b"w", (64, 2), 8, 0),
        info(b"norm", (8,), 0, 160),
        info(b"t", (64, 2), 36, 192),
        info(b"t_scale", (1,), 0, 224),
    ]
    return build(infos, packed + bytes(24) + dense + ternary + struct.pack("<f", 1.0), entries)


HEADER = len(rich()) - (160 + 32 + 32 + 4)


def outcome(path: Path, content: bytes, seconds: float = 1.0) -> bool:
    """Load a file; whether it is refused. What is not refused must be whole: every tensor decodes to its shape."""
    path.write_bytes(content)
    started = time.process_time()
    try:
        weights = load_gguf(path, i2_s=64)
    except EncodingError as error:
        message = str(error)
    else:
        message = ""
    assert time.process_time() - started < seconds
    if message:
        assert str(path) in message
        return True
    for value in weights.values():
        assert value.numpy().shape == value.shape
        assert value.nbytes <= len(content)
    return False


# -- files ------------------------------------------------------------------------------------------------------------


def test_gguf_hostile_the_sound_file_loads(tmp_path: Path) -> None:
    assert not outcome(tmp_path / "sound.gguf", rich())
    read = load_gguf(tmp_path / "sound.gguf", i2_s=64)
    assert set(read) == {"w", "norm", "t", "t_scale"}
    assert read.metadata["tokens"] == ["x", "", "wörter"]


@pytest.mark.parametrize("width", [4, 8])
def test_gguf_hostile_words_at_every_offset(width: int, tmp_path: Path) -> None:
    """Each place of the header holds each of the words: counts, lengths, types, extents and offsets among them."""
    content, path = rich(), tmp_path / "word.gguf"
    tried = refused = 0
    for at in range(0, HEADER - width):
        for word in WORDS[at % 3 :: 3]:  # a third at each offset; fields are wider than one byte
            changed = bytearray(content)
            changed[at : at + width] = (word % 2 ** (8 * width)).to_bytes(width, "little")
            tried += 1
            refused += outcome(path, bytes(changed))
    assert tried > 1000
    assert refused > tried // 2


def test_gguf_hostile_cuts_repeats_and_swaps(tmp_path: Path) -> None:
    content, path, rng = rich(), tmp_path / "splice.gguf", np.random.default_rng(1)
    refused = 0
    for round_ in range(400):
        first, second = sorted(int(place) for place in rng.integers(4, len(content), 2))
        piece = content[first:second]
        changed = (
            content[:first] + content[second:],
            content[:second] + piece + content[second:],
            content[:first] + piece[::-1] + content[second:],
            content[:first] + bytes(rng.integers(0, 256, len(piece), dtype=np.uint8)) + content[second:],
        )[round_ % 4]
        refused += outcome(path, changed)
    assert refused > 200


@settings(max_examples=150, deadline=None, database=None, derandomize=True)
@given(hyp.binary(max_size=200), hyp.sampled_from([2, 3]))
def test_gguf_hostile_anything_after_the_magic(
    tmp_path_factory: pytest.TempPathFactory, tail: bytes, version: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "anything.gguf"
    outcome(path, b"GGUF" + struct.pack("<I", version) + tail)
    outcome(path, b"GGUF" + struct.pack("<IQQ", version, 0, 1) + text(b"k") + tail)


@pytest.mark.parametrize("first", range(0, 129, 32))
@pytest.mark.parametrize("second", range(0, 129, 32))
def test_gguf_hostile_tensors_overlap_only_if_they_are_refused(first: int, second: int, tmp_path: Path) -> None:
    """64 bytes each in 160 bytes of data."""
    content = build([info(b"a", (16,), 0, first), info(b"b", (16,), 0, second)], bytes(160))
    apart = abs(first - second) >= 64 and max(first, second) + 64 <= 160
    assert outcome(tmp_path / "overlap.gguf", content) is not apart


def huge() -> Iterator[tuple[str, bytes]]:
    """Files that announce far more than they hold, or hold little in very many pieces."""
    for count in (2**31, 2**40, 2**63, 2**64 - 1):
        yield "tensors", build([], b"", counts=(count, 0))
        yield "entries", build([], b"", counts=(0, count))
        yield "key", build([], b"", [struct.pack("<Q", count) + bytes(60)])
        yield "string", build([], b"", [entry(b"k", 8, struct.pack("<Q", count))])
        for kind in (0, 6, 7, 8, 9, 12):
            yield f"array of {kind}", build([], b"", [entry(b"k", 9, struct.pack("<IQ", kind, count) + bytes(64))])
        yield "extents", build([info(b"a", (count,), 0, 0)], bytes(64))
        yield "offset", build([info(b"a", (4,), 0, count & ~31)], bytes(64))
        yield "two extents", build([info(b"a", (32, count), 8, 0)], bytes(64))
    empty = struct.pack("<IQ", 9, 20000) + struct.pack("<IQ", 0, 0) * 20000
    yield "many empty arrays", build([], b"", [entry(b"k", 9, empty)])
    yield "many empty strings", build([], b"", [entry(b"k", 9, struct.pack("<IQ", 8, 40000) + bytes(8 * 40000))])
    yield "many entries", build([], b"", [entry(b"%d" % at, 0, b"\x00") for at in range(15000)])
    yield "deep", build([], b"", [entry(b"k", 9, struct.pack("<IQ", 9, 1) * 30000 + bytes(12))])
    yield "wide and deep", build([], b"", [entry(b"k", 9, struct.pack("<IQ", 9, 2**20) * 9 + bytes(2**16))])


def test_gguf_hostile_counts_allocate_no_more_than_the_file_is_worth(tmp_path: Path) -> None:
    path = tmp_path / "huge.gguf"
    for name, content in huge():
        outcome(path, content)
        tracemalloc.start()
        try:
            outcome(path, content, seconds=10)  # watching the memory takes longer than reading
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 16 * len(content) + 2**18, f"{name}: {peak} bytes for a file of {len(content)}"


LIMITED = """
import resource, sys
from pathlib import Path
from stagedtensor.encodings import load_gguf
from stagedtensor.errors import EncodingError
import gguf  # what the reader imports is no part of what a file costs
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
refused = 0
for path in sorted(Path(sys.argv[1]).iterdir()):
    try:
        load_gguf(path)
    except EncodingError:
        refused += 1
print(refused)
"""


def test_gguf_hostile_files_under_a_memory_limit(tmp_path: Path) -> None:
    """64 MiB of address space more than the imports take, for every damaged and every huge file."""
    contents = [*(content for content, _ in DAMAGED.values()), *(content for _, content in huge())]
    for at, content in enumerate(contents):
        (tmp_path / f"{at:03}.gguf").write_bytes(content)
    command = [sys.executable, "-c", LIMITED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(contents) - 3  # empty arrays, empty strings and entries are sound, if many


# -- packed bytes -----------------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None, database=None, derandomize=True)
@given(hyp.data())
def test_validation_hostile_bytes_are_refused_or_decode_to_finite_numbers(data: hyp.DataObject) -> None:
    encoding = data.draw(hyp.sampled_from(PACKED_ENCODINGS))
    rows, blocks = data.draw(hyp.integers(1, 3)), data.draw(hyp.integers(1, 3))
    width = data.draw(hyp.integers(1, 9)) if encoding.whole else encoding.elements * blocks
    size = encoding.size(rows * width) + data.draw(hyp.sampled_from([0, 0, 0, 0, -1, 1]))
    seed = data.draw(hyp.integers(0, 2**32 - 1))
    raw = np.random.default_rng(seed).integers(0, 256, max(size, 0), dtype=np.uint8)
    if data.draw(hyp.booleans()):
        raw &= 0x55  # no code is 3, and scales are finite more often
    scale = data.draw(hyp.sampled_from([None, 0.5, -0.0, 3e38, float("inf"), float("nan")]))
    order = data.draw(hyp.sampled_from([ROW_MAJOR, INPUT_BLOCK_MAJOR]))
    try:
        value = Encoded((rows, width), f32, encoding, raw, order, scale=scale)
    except EncodingError:
        return
    decoded = value.numpy()
    assert decoded.shape == (rows, width)
    assert np.isfinite(decoded).all()
    assert value.nbytes == encoding.size(rows * width)


HOSTILE: dict[str, Callable[[], Any]] = {
    "huge shape": lambda: Encoded((2**40, 2**40), f32, Q8_0, bytes(34)),
    "negative extents": lambda: Encoded((-1, -32), f32, Q8_0, bytes(34)),
    "extent of truth": lambda: Encoded((True, 32), f32, Q8_0, bytes(34)),
    "extent of a fraction": lambda: Encoded((1.5, 32), f32, Q8_0, bytes(34)),  # type: ignore[arg-type]
    "shape of text": lambda: Encoded("32", f32, Q8_0, bytes(34)),  # type: ignore[arg-type]
    "no shape": lambda: Encoded(32, f32, Q8_0, bytes(34)),  # type: ignore[arg-type]
    "no data": lambda: Encoded((32,), f32, Q8_0, None),
    "text for data": lambda: Encoded((32,), f32, Q8_0, "x" * 34),
    "a list for data": lambda: Encoded((32,), f32, Q8_0, [0] * 34),
    "objects for data": lambda: Encoded((32,), f32, Q8_0, np.full(34, None)),
    "a view with gaps": lambda: Encoded((32,), f32, Q8_0, memoryview(bytes(136))[::2]),
    "text for a scale": lambda: Encoded((4,), f32, TernaryPacked, bytes(1), scale="one"),  # type: ignore[arg-type]
    "a scale beyond f32": lambda: Encoded((4,), f32, TernaryPacked, bytes(1), scale=1e40),
    "an array for a scale": lambda: Encoded((4,), f32, TernaryPacked, bytes(1), scale=np.ones(2)),  # type: ignore[arg-type]
    "text for an encoding": lambda: Encoded((32,), f32, "Q8_0", bytes(34)),  # type: ignore[arg-type]
    "text for an order": lambda: Encoded((32,), f32, Q8_0, bytes(34), "rows"),  # type: ignore[arg-type]
    "an order of another kind": lambda: Encoded((2, 64), f32, Q8_0, bytes(136)).prepack("rows"),  # type: ignore[arg-type]
    "another encoding to repack to": lambda: Encoded((32,), f32, Q8_0, bytes(34)).repack_to("Q4_0"),  # type: ignore[arg-type]
    "counter state": lambda: Encoded((2,), precision("u4x32"), Dense(8), bytes(16)),
    "a negative count": lambda: decode_blocks(TernaryPacked, bytes(4), count=-1),
    "a huge count": lambda: decode_blocks(TernaryPacked, bytes(4), count=2**62),
    "too few bytes for a scale": lambda: decode_blocks(PACKED_ENCODINGS[10], bytes(3)),
    "other things to decode": lambda: decode_blocks(Q4_K, None),
    "i2_s of a huge shape": lambda: import_i2_s(bytes(32), (2**40, 128), 128, 1.0),
    "i2_s of fractions": lambda: import_i2_s(bytes(32), (1.0, 128), 128, 1.0),  # type: ignore[arg-type]
    "i2_s of negative extents": lambda: import_i2_s(bytes(32), (-1, -128), 128, 1.0),
    "i2_s of no data": lambda: import_i2_s(None, (1, 128), 128, 1.0),
    "i2_s with a scale of text": lambda: import_i2_s(bytes(32), (1, 128), 128, "one"),  # type: ignore[arg-type]
    "i2_s with a scale beyond f32": lambda: import_i2_s(bytes(32), (1, 128), 128, 1e40),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_validation_hostile_arguments_are_refused(case: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(EncodingError):
            HOSTILE[case]()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20


@pytest.mark.parametrize("encoding", [Q4_K, TernaryPacked], ids=str)
def test_validation_of_large_weights_takes_little_memory(encoding: Encoding) -> None:
    """A mapped file is looked at in pieces: 8 MiB of it cost less than 2 MiB."""
    size = 8 * 2**20 // 144 * 144
    width = 4 * size if encoding.whole else size // encoding.nbytes * encoding.elements
    raw = np.frombuffer(bytes(size), np.uint8)
    tracemalloc.start()
    try:
        value = Encoded((1, width), f32, encoding, raw, scale=1.0 if encoding.whole else None)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert np.shares_memory(value.data, raw)
    assert peak < 2**21


def test_i2_s_of_large_weights_is_moved_in_pieces() -> None:
    codes = np.random.default_rng(0).integers(0, 3, 4 * (2**18 + 32 * 5), dtype=np.uint8)
    data = i2_s_bytes(codes, 128)
    value = import_i2_s(data, (1, codes.size), 128, 1.0)
    np.testing.assert_array_equal(value.numpy()[0], codes.astype(np.float32) - 1)
