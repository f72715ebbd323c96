"""Arrays of bf16 and fp8 from other libraries: the DLPack formats that NumPy's own reader does not know.

In: an object with ``__dlpack__`` in host memory, such as a torch tensor. Out: a NumPy copy in the format of
``ml_dtypes``. Raises BufferError for formats that this package does not have and for memory of another device. Keeps
nothing of the object.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np

from stagedtensor.precision import Prec, bf16, f8e4m3, f8e5m2

_HOST = 1
_FORMATS: dict[tuple[int, int], Prec] = {(4, 16): bf16, (10, 8): f8e4m3, (12, 8): f8e5m2}
"""Code and bits of a type in DLPack 1.1."""


class _Tensor(ctypes.Structure):
    """``DLTensor`` of ``dlpack.h``, at the start of what a capsule points to."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


def narrow_from_dlpack(data: Any) -> np.ndarray[Any, Any]:
    """Return a copy of an array of narrow floats; the capsule stays unread, so its own destructor frees the memory."""
    capsule = data.__dlpack__()
    tensor = _Tensor.from_address(_address(capsule))
    prec = _FORMATS.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if prec is None or tensor.device_type != _HOST:
        raise BufferError(
            f"no array in host memory of a format known here (DLPack type {tensor.code}, {tensor.bits} bits)"
        )
    shape = tuple(tensor.shape[: tensor.ndim])
    if math.prod(shape) == 0:
        return np.zeros(shape, prec.numpy_dtype)
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else _row_major(shape)
    reach = sum((size - 1) * step for size, step in zip(shape, strides, strict=True)) + 1  # strides are not negative
    memory = (ctypes.c_uint8 * (reach * prec.bytes)).from_address(tensor.data + tensor.byte_offset)
    codes = np.frombuffer(memory, prec.storage_dtype)
    steps = tuple(step * prec.bytes for step in strides)
    return np.lib.stride_tricks.as_strided(codes, shape, steps).copy().view(prec.numpy_dtype)


def _address(capsule: object) -> int:
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    return int(pointer(capsule, b"dltensor"))


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))
