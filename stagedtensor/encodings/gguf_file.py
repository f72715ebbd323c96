"""Weights of a GGUF file, memory-mapped.

In: a path. Out: a mapping from tensor names to :class:`Encoded` values over the mapped bytes, with the file's metadata.
Names, numbers and block sizes of tensor types come from the ``gguf`` package (the ``gguf`` extra). A file that is
damaged anywhere gives EncodingError and no tensor.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from stagedtensor.block_formats import ROW_ENCODINGS, Bytes, Dense, Encoding
from stagedtensor.block_packing import gguf_package
from stagedtensor.encoded import Encoded
from stagedtensor.encodings.gguf_header import Header, TensorEntry, TensorType, read_header
from stagedtensor.encodings.i2_s import TRAILER_BYTES, Grouping, import_i2_s
from stagedtensor.errors import EncodingError
from stagedtensor.precision import Prec, bf16, f16, f32, f64, i8, i16, i32, i64

_I2_S = 36
_PACKED: Mapping[str, Encoding] = {encoding.name: encoding for encoding in ROW_ENCODINGS}
_DENSE: Mapping[str, Prec] = {
    "F32": f32, "F16": f16, "BF16": bf16, "F64": f64, "I8": i8, "I16": i16, "I32": i32, "I64": i64,
}  # fmt: skip


class GGUFWeights(Mapping[str, Encoded]):
    """The tensors of a GGUF file by name, in file order.

    ``metadata`` maps keys to numbers, bools, strings, arrays and lists. ``skipped`` maps the names of tensors that were
    left out to their types.
    """

    def __init__(self, tensors: Mapping[str, Encoded], metadata: Mapping[str, Any], skipped: Mapping[str, str]) -> None:
        self._tensors = dict(tensors)
        self.metadata = dict(metadata)
        self.skipped = dict(skipped)

    def __getitem__(self, name: str) -> Encoded:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        nbytes = sum(value.nbytes for value in self._tensors.values())
        return f"<GGUF weights: {len(self)} tensors, {nbytes} bytes, {len(self.skipped)} skipped>"


def load_gguf(
    path: str | os.PathLike[str], *, i2_s: Grouping | None = None, skip_unsupported: bool = False
) -> GGUFWeights:
    """Map the weights of a GGUF file (version 2 or 3, little-endian); their bytes are not copied.

    Files list the innermost extent first: ``(in, out)`` becomes shape ``(out, in)``. Plain types give ``Dense`` values,
    block types their encoding. I2_S is read where ``i2_s`` names its grouping. Another type raises EncodingError, or is
    listed in ``skipped``. Raises EncodingError for whatever is wrong with the file.
    """
    types = _types()
    try:
        data = _mapped(path)
        return _weights(data, read_header(data, types), i2_s, skip_unsupported)
    except EncodingError as error:
        raise EncodingError(f"{os.fspath(path)}: {error}") from None
    except OSError as error:
        raise EncodingError(f"{os.fspath(path)}: cannot be read ({error})") from None


def _types() -> dict[int, TensorType]:
    gguf = gguf_package("reading GGUF files")
    types = {int(kind): TensorType(kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType}
    types[_I2_S] = TensorType("I2_S", 4, 1)
    return types


def _mapped(path: str | os.PathLike[str]) -> Bytes:
    if not os.path.exists(path):
        raise EncodingError("there is no such file")
    if not os.path.isfile(path):
        raise EncodingError("this is a directory or a device, not a file")
    if os.path.getsize(path) == 0:
        raise EncodingError("the file is empty")
    return np.memmap(path, np.uint8, mode="r").view(np.ndarray)


def _weights(data: Bytes, header: Header, i2_s: Grouping | None, skip_unsupported: bool) -> GGUFWeights:
    tensors: dict[str, Encoded] = {}
    skipped: dict[str, str] = {}
    by_name = {entry.name: entry for entry in header.tensors}
    for entry in header.tensors:
        name = entry.type.name
        try:
            if name in _DENSE:
                tensors[entry.name] = _encoded(data, entry, _DENSE[name], Dense(entry.type.nbytes))
            elif name in _PACKED:
                tensors[entry.name] = _encoded(data, entry, f32, _PACKED[name])
            elif name == "I2_S" and i2_s is not None:
                tensors[entry.name] = _from_i2_s(data, entry, by_name.get(f"{entry.name}_scale"), i2_s)
            elif skip_unsupported:
                skipped[entry.name] = name
            else:
                raise EncodingError(_unsupported(name))
        except EncodingError as error:
            raise EncodingError(f"tensor {entry.name!r} at byte {entry.start}: {error}") from None
    return GGUFWeights(tensors, header.metadata, skipped)


def _encoded(data: Bytes, entry: TensorEntry, prec: Prec, encoding: Encoding) -> Encoded:
    return Encoded(entry.shape, prec, encoding, data[entry.start : entry.stop])


def _unsupported(name: str) -> str:
    if name == "I2_S":
        return "its bytes do not tell their grouping; pass i2_s=128, i2_s=64 or i2_s='sequential'"
    return f"type {name} is not supported ({', '.join((*_DENSE, *_PACKED))} are); pass skip_unsupported=True to leave it out"


def _from_i2_s(data: Bytes, entry: TensorEntry, companion: TensorEntry | None, grouping: Grouping) -> Encoded:
    """The scale is a tensor of its own, or the first f32 of a trailer that lies between the codes and the next tensor."""
    codes = data[entry.start : entry.stop]
    if companion is not None:
        if companion.type.name != "F32" or companion.stop - companion.start != 4:
            raise EncodingError(f"its scale {companion.name!r} is no single f32")
        scale = float(np.frombuffer(data[companion.start : companion.stop].tobytes(), "<f4")[0])
        return import_i2_s(codes, entry.shape, grouping, scale)
    if entry.stop + TRAILER_BYTES <= entry.gap:
        codes = data[entry.start : entry.stop + TRAILER_BYTES]
    return import_i2_s(codes, entry.shape, grouping)
