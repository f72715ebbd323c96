"""Where a routine's threads must wait for one another.

In: a scheduled module and its memory plan. Out: for each kernel, whether a barrier stands in front of it. Two kernels
need one between them if they touch the same bytes, one of them writing, unless both are thread 0's or each thread
touches only bytes that its own part of the earlier kernel touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stagedtensor.codegen.emit.body import holds_parallel_loop, partition_grain
from stagedtensor.codegen.loop_ir import Buffer, Module, Proc
from stagedtensor.codegen.passes.ownership import owned_cells, parallel_loop
from stagedtensor.codegen.passes.plan_memory import MemoryPlan
from stagedtensor.codegen.rewrite import buffers_read, buffers_written


def is_parallel(proc: Proc) -> bool:
    """Tell whether a proc has a parallel loop; one without runs on thread 0 alone."""
    return any(map(holds_parallel_loop, proc.body))


Owner = tuple[int, int, int] | None
"""Partition by which a thread owns cells: iterations, grain and cells per iteration. None: cells of no one thread."""


@dataclass(frozen=True)
class _Access:
    buffer: Buffer
    start: int | None
    """Offset in the arena; None for a buffer of its own."""
    end: int
    """Offset behind its last byte, where it has a start."""
    writes: bool
    parallel: bool
    owner: Owner


def barriers_before(module: Module, plan: MemoryPlan) -> tuple[bool, ...]:
    """Return for each kernel of ``module`` whether all threads must meet before it."""
    pending: list[_Access] = []
    waits: list[bool] = []
    for kernel in module.kernels:
        new = list(_accesses(kernel, plan))
        wait = any(_conflict(old, access) for old in pending for access in new)
        waits.append(wait)
        pending = new if wait else pending + new
    return tuple(waits)


def _conflict(old: _Access, new: _Access) -> bool:
    if not (old.writes or new.writes) or not _overlap(old, new):
        return False
    if not old.parallel and not new.parallel:
        return False
    same_cells = old.buffer is new.buffer or (old.start is not None and old.start == new.start)
    owned = old.owner is not None and old.owner == new.owner and old.buffer.type.bytes == new.buffer.type.bytes
    return not (same_cells and owned)


def _overlap(old: _Access, new: _Access) -> bool:
    if old.buffer is new.buffer:
        return True
    if old.start is None or new.start is None:
        return False
    return old.start < new.end and new.start < old.end


def _accesses(kernel: Proc, plan: MemoryPlan) -> Iterator[_Access]:
    parallel = is_parallel(kernel)
    written = set(buffers_written(kernel.body))
    for buffer in dict.fromkeys((*buffers_read(kernel.body), *buffers_written(kernel.body))):
        if buffer.space != "global":
            continue
        owner = _owner(kernel, buffer) if parallel else None
        start = plan.offsets.get(buffer)
        yield _Access(buffer, start, (start or 0) + buffer.nbytes, buffer in written, parallel, owner)


def _owner(kernel: Proc, buffer: Buffer) -> Owner:
    """Find the partition by which each thread keeps to its own cells of ``buffer``, if there is one."""
    owned, loop = owned_cells(kernel, buffer), parallel_loop(kernel)
    if owned is None or loop is None:
        return None
    count, cells = owned
    return count, partition_grain(loop), cells
