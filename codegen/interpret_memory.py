"""Host memory of loop-IR buffers: logical arrays to and from memory order, and fresh memory.

In: NumPy arrays of a buffer's ``numpy_dtype`` (u4x32: uint32 with a last axis of 4). Out: arrays in memory order,
shaped as ``layout.physical_shape`` says, and back. Scratch memory starts as NaN or the greatest integer, never as
zeros, so that code which reads before it writes is caught by its results.
"""

from __future__ import annotations

import numpy as np

from stagedtensor.codegen.interpret_expr import locator
from stagedtensor.codegen.interpret_ops import Array
from stagedtensor.codegen.loop_ir import Buffer, Layout, Pad, Reorder, Split
from stagedtensor.errors import InternalError
from stagedtensor.precision import u4x32

_COUNTER = np.dtype("V16")  # one u4x32 cell as one element


def to_memory(array: Array, buffer: Buffer) -> Array:
    """Return the contents of ``buffer`` in memory order, pads filled; a copy. ``array`` has the logical shape."""
    for step in buffer.layout.steps:
        array = _apply_step(array, step)
    return np.array(array, order="C")


def _apply_step(array: Array, step: Split | Reorder | Pad) -> Array:
    if isinstance(step, Reorder):
        return array.transpose(step.order)
    grown = Layout((step,)).physical_shape(array.shape)
    axis = step.axis
    extent = grown[axis] * step.factor if isinstance(step, Split) else grown[axis]
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, extent - array.shape[axis])
    fill = step.fill if isinstance(step, Pad) else 0
    return np.pad(array, widths, constant_values=array.dtype.type(fill)).reshape(grown)


def from_memory(memory: Array, buffer: Buffer) -> Array:
    """Return the logical array whose cells lie in ``memory``; a copy."""
    grid = np.meshgrid(*(np.arange(size) for size in buffer.shape), indexing="ij", sparse=True)
    offsets = np.broadcast_to(locator(buffer, "read")(grid, None), buffer.shape)
    return np.asarray(np.asarray(memory).reshape(-1)[offsets])


def flat_cells(array: Array, buffer: Buffer) -> Array:
    """Return a flat view of a buffer's memory with one element a cell; InternalError where it does not fit."""
    expected = buffer.type.numpy_dtype
    cells = 4 * buffer.size if buffer.type is u4x32 else buffer.size
    if array.dtype != expected or array.size != cells or not array.flags.c_contiguous:
        raise InternalError(
            f"interpreter: memory of {buffer} must be {cells} contiguous cells of {expected}, "
            f"got {array.dtype}{list(array.shape)}{'' if array.flags.c_contiguous else ' not contiguous'}"
        )
    flat = array.reshape(-1)
    return flat.view(_COUNTER) if buffer.type is u4x32 else flat


def fresh_memory(buffer: Buffer) -> Array:
    """Return memory nothing was written to: NaN (floats) or the greatest value (integers) in cells, its pads filled."""
    dtype = buffer.type.numpy_dtype
    if buffer.type is u4x32:
        return np.full((buffer.size, 4), np.iinfo(dtype).max, dtype)
    garbage = float("nan") if buffer.type.is_float else buffer.type.max_finite
    return to_memory(np.full(buffer.shape, dtype.type(garbage), dtype), buffer)
