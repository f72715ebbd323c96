"""Files of named arrays in the safetensors format, every storage precision kept to the bit.

Writing goes to a temporary file in the same folder, which is synced and renamed: a crash leaves the old file or the new
one. Reading gives arrays over the mapped file. What the arrays mean is not known here.
"""

from __future__ import annotations

import json
import os
import secrets
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from .errors import CheckpointError
from .precision import Prec, precision
from .source import user_source

Array = np.ndarray[Any, Any]

FORMAT_NAMES = {
    "f64": "F64",
    "f32": "F32",
    "f16": "F16",
    "bf16": "BF16",
    "f8e4m3": "F8_E4M3",
    "f8e5m2": "F8_E5M2",
    "i64": "I64",
    "i32": "I32",
    "i16": "I16",
    "i8": "I8",
    "u64": "U64",
    "u32": "U32",
    "u16": "U16",
    "u8": "U8",
    "bool": "BOOL",
}
"""Name of each precision in a safetensors header."""
_PRECISIONS = {name: precision(prec) for prec, name in FORMAT_NAMES.items()}


@dataclass(frozen=True)
class TensorFile:
    """What a file holds: arrays by name, their precisions, and text by key."""

    path: Path
    arrays: Mapping[str, Array]
    precisions: Mapping[str, Prec]
    metadata: Mapping[str, str]
    unreadable: Mapping[str, str] = field(default_factory=dict)
    """What is in the file in a format that is not read, with the reason."""


def write_tensors(path: str | Path, arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> None:
    """Write ``arrays`` by name, replacing the file at once or not at all. Raises CheckpointError."""
    target = Path(os.path.realpath(path))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    cells: list[Array] = []
    offset = 0
    # the widest first, so that every array starts aligned
    for name in sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name)):
        if name in header:
            raise CheckpointError(
                f"{name!r} is the file's own entry, so no parameter can be saved under it ({user_source().quoted()})"
            )
        array = np.asarray(arrays[name], order="C")
        prec = precision(array.dtype)
        if prec.name not in FORMAT_NAMES:
            raise CheckpointError(f"{name!r}: {prec} cannot be saved ({user_source().quoted()})")
        header[name] = {
            "dtype": FORMAT_NAMES[prec.name],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
        cells.append(array)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(struct.pack("<Q", len(text)))
            file.write(text)
            for array in cells:
                file.write(array.reshape(-1).view(np.uint8).data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
        _sync_folder(target.parent)
    except OSError as error:
        raise CheckpointError(f"cannot write {str(path)!r}: {error}\n  {user_source().quoted()}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_tensors(path: str | Path) -> TensorFile:
    """Open a safetensors file. Raises CheckpointError where it is missing, damaged or holds unknown formats."""
    file = Path(path)
    try:
        with safe_open(str(file), framework="np") as opened:  # checks the whole header, and that the file is as long
            metadata = dict(opened.metadata() or {})
        with open(file, "rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header: dict[str, Any] = json.loads(stream.read(length))
        whole = np.memmap(file, np.uint8, "r", offset=0)
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"cannot read {str(path)!r}: {error}\n  {user_source().quoted()}") from error
    header.pop("__metadata__", None)
    arrays, precisions = {}, {}
    for name, entry in header.items():
        prec = _PRECISIONS.get(entry["dtype"])
        if prec is None:
            raise CheckpointError(
                f"{str(path)!r}: {name!r} is stored as {entry['dtype']}, expected one of "
                f"{', '.join(sorted(_PRECISIONS))}\n  {user_source().quoted()}"
            )
        first, last = (8 + length + at for at in entry["data_offsets"])
        arrays[name] = np.asarray(whole[first:last]).view(prec.numpy_dtype).reshape(entry["shape"])
        precisions[name] = prec
    return TensorFile(file, arrays, precisions, metadata)
