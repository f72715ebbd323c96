"""The header of a GGUF file, read within bounds.

In: the bytes of a whole file (memory-mapped) and the table of known tensor types. Out: its metadata and where each
tensor lies. Every count and length is checked against the bytes that are left before anything of that size is made or
walked, so a damaged or hostile header costs no more than its own size. Looks at no tensor's data.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from stagedtensor.block_formats import Bytes
from stagedtensor.errors import EncodingError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MOST_AXES = 4
_MOST_NESTING = 8
_STRING, _ARRAY, _BOOL, _U32 = 8, 9, 7, 4
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "<u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_LEAST_ENTRY, _LEAST_TENSOR = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8


@dataclass(frozen=True)
class TensorType:
    """A tensor type of the format: its name and the elements and bytes of its blocks."""

    name: str
    elements: int
    nbytes: int


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: ``shape`` outermost axis first, bytes at ``start .. stop``; ``gap`` is where the next one may begin."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    start: int
    stop: int
    gap: int


@dataclass(frozen=True)
class Header:
    """What a file says of itself, and its tensors in file order."""

    version: int
    metadata: Mapping[str, Any]
    tensors: tuple[TensorEntry, ...]


@dataclass(frozen=True)
class _RawTensor:
    name: str
    extents: tuple[int, ...]
    type: TensorType
    offset: int
    at: int


def read_header(data: Bytes, types: Mapping[int, TensorType]) -> Header:
    """Read and check a header; raises EncodingError with the byte offset of what is wrong."""
    cursor = _Cursor(data)
    if bytes(cursor.take(4, "the magic")) != _MAGIC:
        raise EncodingError("at byte 0: no GGUF file, it does not begin with GGUF")
    version = cursor.integer("<u4", "the version")
    if version not in _VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        why = "; it is big-endian, which is not read" if swapped in _VERSIONS else ""
        raise EncodingError(f"at byte 4: GGUF version {version} is not one of {_VERSIONS}{why}")
    tensor_count = cursor.count("<u8", _LEAST_TENSOR, "tensors")
    entry_count = cursor.count("<u8", _LEAST_ENTRY, "metadata entries")
    metadata: dict[str, Any] = {}
    alignment = _DEFAULT_ALIGNMENT
    for _ in range(entry_count):
        at = cursor.at
        key = cursor.name("a metadata key")
        if key in metadata:
            raise EncodingError(f"at byte {at}: the metadata key {key!r} appears twice")
        kind = cursor.integer("<u4", f"the type of {key!r}")
        metadata[key] = cursor.value(kind, key, 0)
        if key == "general.alignment":
            alignment = _alignment(kind, metadata[key], at)
    raw = [_tensor(cursor, types) for _ in range(tensor_count)]
    return Header(version, metadata, _placed(raw, -(-cursor.at // alignment) * alignment, alignment, data.size))


def _alignment(kind: int, value: Any, at: int) -> int:
    if kind != _U32 or value < 1 or value & (value - 1):
        raise EncodingError(f"at byte {at}: general.alignment is {value!r}; it must be a u32 and a power of two")
    return int(value)


def _tensor(cursor: _Cursor, types: Mapping[int, TensorType]) -> _RawTensor:
    at = cursor.at
    name = cursor.name("a tensor's name")
    axes = cursor.integer("<u4", f"the number of axes of {name!r}")
    if not 1 <= axes <= _MOST_AXES:
        raise EncodingError(f"at byte {at}: tensor {name!r} has {axes} axes; 1 to {_MOST_AXES} are possible")
    extents = tuple(cursor.integer("<u8", f"an extent of {name!r}") for _ in range(axes))
    size = 1
    for extent in extents:
        size *= extent
    if min(extents) < 1 or size >= 1 << 63:
        raise EncodingError(
            f"at byte {at}: tensor {name!r} has extents {list(extents)}; they must be positive, their product below 2**63"
        )
    number = cursor.integer("<u4", f"the type of {name!r}")
    kind = types.get(number)
    if kind is None:
        raise EncodingError(f"at byte {at}: tensor {name!r} has type number {number}, which is not known")
    if extents[0] % kind.elements:
        raise EncodingError(
            f"at byte {at}: tensor {name!r} has rows of {extents[0]}, no whole number of {kind.name} blocks of {kind.elements}"
        )
    return _RawTensor(name, extents, kind, cursor.integer("<u8", f"the offset of {name!r}"), at)


def _placed(raw: list[_RawTensor], origin: int, alignment: int, end: int) -> tuple[TensorEntry, ...]:
    """Turn offsets into places, checking alignment, bounds, overlap and names."""
    names: set[str] = set()
    stops: dict[str, int] = {}
    for item in raw:
        where = f"at byte {item.at}: tensor {item.name!r}"
        if item.name in names:
            raise EncodingError(f"{where} appears twice")
        names.add(item.name)
        if item.offset % alignment:
            raise EncodingError(f"{where} has offset {item.offset}, no multiple of the alignment {alignment}")
        size = 1
        for extent in item.extents:
            size *= extent
        stops[item.name] = origin + item.offset + size // item.type.elements * item.type.nbytes
        if stops[item.name] > end:
            raise EncodingError(f"{where} ends at byte {stops[item.name]}; the file has {end}")
    in_order = sorted(raw, key=lambda item: item.offset)
    gaps: dict[str, int] = {}
    for item, following in zip(in_order, [*in_order[1:], None], strict=False):
        gaps[item.name] = end if following is None else origin + following.offset
        if stops[item.name] > gaps[item.name]:
            assert following is not None
            raise EncodingError(f"at byte {item.at}: tensors {item.name!r} and {following.name!r} overlap")
    return tuple(
        TensorEntry(item.name, item.extents[::-1], item.type, origin + item.offset, stops[item.name], gaps[item.name])
        for item in raw
    )


class _Cursor:
    """Reads forward and never past the end."""

    def __init__(self, data: Bytes) -> None:
        self.data = data.data
        self.at = 0

    def take(self, nbytes: int, what: str) -> memoryview:
        """Return the next bytes."""
        if nbytes > len(self.data) - self.at:
            left = len(self.data) - self.at
            raise EncodingError(
                f"at byte {self.at}: the file ends within {what} ({nbytes} bytes expected, {left} left)"
            )
        self.at += nbytes
        return self.data[self.at - nbytes : self.at]

    def integer(self, format_: str, what: str) -> int:
        """Return one unsigned integer."""
        raw = self.take(int(format_[-1]), what)
        return int.from_bytes(raw, "little")

    def count(self, format_: str, least: int, what: str) -> int:
        """Return a number of things of at least ``least`` bytes each, refusing more than can follow."""
        at = self.at
        number = self.integer(format_, f"the number of {what}")
        room = (len(self.data) - self.at) // least
        if number > room:
            raise EncodingError(f"at byte {at}: {number} {what} announced; the bytes left hold {room} at most")
        return number

    def name(self, what: str) -> str:
        """Return a string that must be UTF-8."""
        at = self.at
        try:
            return str(self.take(self.count("<u8", 1, f"bytes of {what}"), what), "utf-8")
        except UnicodeDecodeError as error:
            raise EncodingError(f"at byte {at}: {what} is not UTF-8 ({error.reason})") from None

    def text(self, key: str) -> str:
        """Return a string value; tokenizers hold bytes that are not UTF-8, which survive as surrogates."""
        return str(self.take(self.count("<u8", 1, f"bytes of {key!r}"), repr(key)), "utf-8", "surrogateescape")

    def value(self, kind: int, key: str, depth: int) -> Any:
        """Return a metadata value: a number, a bool, a string, an array of numbers or a list of the others."""
        at = self.at
        if kind == _STRING:
            return self.text(key)
        if kind == _ARRAY:
            if depth == _MOST_NESTING:
                raise EncodingError(f"at byte {at}: {key!r} nests more than {_MOST_NESTING} arrays")
            return self._array(key, depth)
        if kind not in _SCALARS:
            raise EncodingError(f"at byte {at}: {key!r} has value type {kind}, which is not known")
        format_ = _SCALARS[kind]
        (value,) = self._numbers(kind, 1, key)
        return bool(value) if kind == _BOOL else float(value) if format_[1] == "f" else int(value)

    def _numbers(self, kind: int, count: int, key: str) -> np.ndarray[Any, Any]:
        at, format_ = self.at, _SCALARS[kind]
        cells = np.frombuffer(self.take(count * int(format_[2]), repr(key)), format_).copy()
        if kind == _BOOL:
            if (cells > 1).any():
                raise EncodingError(f"at byte {at}: {key!r} holds a bool that is neither 0 nor 1")
            return cells.astype(np.bool_)
        return cells

    def _array(self, key: str, depth: int) -> Any:
        kind = self.integer("<u4", f"the element type of {key!r}")
        if kind in _SCALARS:
            return self._numbers(kind, self.count("<u8", int(_SCALARS[kind][2]), f"elements of {key!r}"), key)
        if kind == _STRING:
            return self._strings(key)
        count = self.count("<u8", 12, f"elements of {key!r}")
        return [self.value(kind, key, depth + 1) for _ in range(count)]

    def _strings(self, key: str) -> list[str]:
        """Vocabularies have hundreds of thousands: one loop without a call per string."""
        count = self.count("<u8", 8, f"elements of {key!r}")
        data, at, end = self.data, self.at, len(self.data)
        found = []
        unpack = struct.Struct("<Q").unpack_from
        for _ in range(count):
            if end - at < 8:
                raise EncodingError(f"at byte {at}: the file ends within {key!r}")
            (length,) = unpack(data, at)
            at += 8
            if length > end - at:
                raise EncodingError(f"at byte {at - 8}: a string of {key!r} has {length} bytes; {end - at} are left")
            found.append(str(data[at : at + length], "utf-8", "surrogateescape"))
            at += length
        self.at = at
        return found
