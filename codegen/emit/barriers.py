"""Where a routine's threads must wait for one another.

In: a scheduled module and its memory plan. Out: for each kernel, whether a barrier stands in front of it. Two kernels
need one between them if they touch the same bytes, one of them writing, unless both are thread 0's or each thread
touches only bytes that its own part of the earlier kernel touched.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort_right
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
    pending = _Pending()
    waits: list[bool] = []
    for kernel in module.kernels:
        new = list(_accesses(kernel, plan))
        wait = any(_conflict(old, access) for access in new for old in pending.touching(access))
        waits.append(wait)
        if wait:
            pending = _Pending()
        for access in new:
            pending.add(access)
    return tuple(waits)


class _Pending:
    """The accesses since the last barrier, found by what they touch: there may be thousands, few of the same bytes."""

    def __init__(self) -> None:
        self._of_buffers: dict[Buffer, dict[tuple[bool, bool, Owner], _Access]] = {}
        self._in_arena: list[_Access] = []
        """In the order of their starts."""
        self._longest = 0

    def add(self, access: _Access) -> None:
        """Take an access, if there is none like it."""
        alike = self._of_buffers.setdefault(access.buffer, {})
        kind = (access.writes, access.parallel, access.owner)
        if kind in alike:
            return
        alike[kind] = access
        if access.start is not None:
            insort_right(self._in_arena, access, key=_start)
            self._longest = max(self._longest, access.end - access.start)

    def touching(self, new: _Access) -> Iterator[_Access]:
        """Yield the accesses to bytes that ``new`` touches."""
        yield from self._of_buffers.get(new.buffer, {}).values()
        if new.start is None:
            return
        first = bisect_right(self._in_arena, new.start - self._longest, key=_start)
        last = bisect_left(self._in_arena, new.end, key=_start)
        for old in self._in_arena[first:last]:
            if old.buffer is not new.buffer and old.end > new.start:
                yield old


def _start(access: _Access) -> int:
    return access.start or 0


def _conflict(old: _Access, new: _Access) -> bool:
    """Whether threads must meet between two accesses to the same bytes."""
    if not (old.writes or new.writes):
        return False
    if not old.parallel and not new.parallel:
        return False
    same_cells = old.buffer is new.buffer or (old.start is not None and old.start == new.start)
    owned = old.owner is not None and old.owner == new.owner and old.buffer.type.bytes == new.buffer.type.bytes
    return not (same_cells and owned)


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
