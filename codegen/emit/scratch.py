"""Where large local arrays of kernels lie: in memory that each thread owns, beside the arena, and not on its stack.

In: kernels. Out: an offset for each of their local arrays from ``LEAST_BYTES`` on, and the bytes that a thread needs.
The arrays of one kernel lie side by side; kernels follow one another in a thread, so they share the bytes. Smaller
arrays stay where the compiler puts them.
"""

from __future__ import annotations

from collections.abc import Iterable

from stagedtensor.codegen.loop_ir import Alloc, Buffer, Proc
from stagedtensor.codegen.rewrite import walk_stmts

LEAST_BYTES = 8 << 10
"""Bytes of a local array from which it is no longer on the stack, whose size is not ours to choose."""
ALIGNMENT = 64
_PAGE = 4096


def scratch_of(proc: Proc) -> dict[Buffer, int]:
    """Return the large local arrays of ``proc``, in order of appearance, with their offsets in a thread's own memory."""
    offsets: dict[Buffer, int] = {}
    end = 0
    for stmt in walk_stmts(proc.body):
        if isinstance(stmt, Alloc) and _in_a_row(stmt.buffer) and stmt.buffer.nbytes >= LEAST_BYTES:
            offsets[stmt.buffer] = end
            end += -(-stmt.buffer.nbytes // ALIGNMENT) * ALIGNMENT
    return offsets


def _in_a_row(buffer: Buffer) -> bool:
    """Whether a local array is one row of cells, which a pointer reaches like an array."""
    return buffer.space == "local" and (len(buffer.shape) == 1 or bool(buffer.layout.steps))


def bytes_of_a_thread(kernels: Iterable[Proc]) -> int:
    """Return the bytes of a thread's own memory: what the kernel needs that needs most, in whole pages."""
    most = 0
    for kernel in kernels:
        offsets = scratch_of(kernel)
        most = max((most, *(offset + buffer.nbytes for buffer, offset in offsets.items())))
    return -(-most // _PAGE) * _PAGE
