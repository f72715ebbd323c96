"""Kernels that do not depend on one another go into one launch: each takes a range of its blocks.

In: scheduled kernels in order. Out: fewer; ``attributes["parts"]`` of a merged one holds the kernels that it is made
of, each with its own launch inside. A kernel runs as soon as what it reads is there, or, where it would only hold
memory, as late as its readers allow. Nothing is computed differently; every part keeps its own order of sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stagedtensor.codegen.loop_ir import (
    Alloc,
    Apply,
    BlockIterator,
    Buffer,
    Cost,
    For,
    If,
    Module,
    Proc,
    Symbol,
    Var,
    index,
)
from stagedtensor.codegen.rewrite import buffers_read, buffers_written, walk_stmts
from stagedtensor.codegen.schedule.cuda.launch import STATIC_SHARED, THREADS, WARP, Launch, blocks_for
from stagedtensor.codegen.schedule.nest import index_symbol
from stagedtensor.errors import InternalError
from stagedtensor.precision import i64

_POINTERS = 400
"""Arguments of a launch: 4 KiB hold 512 pointers."""
_SMALL_BYTES = 8 << 20
_SMALL_FLOPS = 1 << 28
"""Work of a few microseconds, which may run in a launch that is shaped for something else."""
_FEW_THREADS = 96 * 1024
"""Threads of a launch that a large device holds all at once, with 64 registers each."""


def parts_of(kernel: Proc) -> tuple[Proc, ...]:
    """Return the kernels that a launch is made of; a kernel by itself is one part."""
    parts = kernel.attributes.get("parts", ())
    return tuple(parts) or (kernel,)


def side_by_side(module: Module) -> Module:
    """Return ``module`` with independent kernels in common launches."""
    kernels = [_Kernel(proc, proc_launch(proc)) for proc in module.kernels]
    levels = _levels(kernels, set(module.temporaries))
    merged: list[Proc] = []
    for level in sorted(set(levels)):
        groups: list[_Group] = []
        for kernel, own in zip(kernels, levels, strict=True):
            if own == level and not any(group.take(kernel) for group in groups):
                groups.append(_Group([kernel]))
        merged += [group.proc() for group in groups]
    return replace(module, kernels=tuple(merged))


def proc_launch(proc: Proc) -> Launch:
    """Return the launch of a scheduled kernel."""
    launch = proc.attributes.get("launch")
    if not isinstance(launch, Launch):
        raise InternalError(f"kernel {proc.name} has no CUDA launch")
    return launch


class _Kernel:
    """One kernel, and what it touches."""

    def __init__(self, proc: Proc, launch: Launch) -> None:
        self.proc = proc
        self.launch = launch
        own = {stmt.buffer for stmt in walk_stmts(proc.body) if isinstance(stmt, Alloc)}
        self.reads = [buffer for buffer in buffers_read(proc.body) if buffer not in own]
        self.writes = [buffer for buffer in buffers_written(proc.body) if buffer not in own]
        shared = sum(
            -(-buffer.nbytes // 16) * 16 for buffer in own if buffer.space == "shared" and buffer not in launch.offsets
        )
        self.shared = shared
        self.needs_threads = launch.cooperative and not (launch.is_warp and not shared and not launch.offsets)
        """Whether a block must have the launch's number of threads: not where warps work by themselves."""

    @property
    def small(self) -> bool:
        """Whether it takes a few microseconds at most."""
        return self.proc.cost.nbytes <= _SMALL_BYTES and self.proc.cost.flops <= _SMALL_FLOPS


def _levels(kernels: Sequence[_Kernel], temporaries: set[Buffer]) -> list[int]:
    """Return the number of each kernel's launch, from 0; kernels of one number touch nothing that another writes."""
    before = _dependences(kernels)
    levels: list[int] = []
    for place in range(len(kernels)):
        levels.append(1 + max((levels[other] for other in before[place]), default=-1))
    last_read = {buffer: place for place, kernel in enumerate(kernels) for buffer in kernel.reads}
    soonest_after: dict[int, int] = {}
    for place in reversed(range(len(kernels))):
        kernel = kernels[place]
        held = sum(buffer.nbytes for buffer in kernel.writes if buffer in temporaries)
        freed = sum(buffer.nbytes for buffer in kernel.reads if buffer in temporaries and last_read[buffer] == place)
        if held > freed and place in soonest_after:
            levels[place] = soonest_after[place] - 1
        for other in before[place]:
            soonest_after[other] = min(soonest_after.get(other, levels[place]), levels[place])
    return levels


def _dependences(kernels: Sequence[_Kernel]) -> list[set[int]]:
    """The earlier kernels that each one must follow: writers of what it touches, readers of what it writes."""
    writer: dict[Buffer, int] = {}
    readers: dict[Buffer, set[int]] = {}
    found: list[set[int]] = []
    for place, kernel in enumerate(kernels):
        before = {writer[buffer] for buffer in (*kernel.reads, *kernel.writes) if buffer in writer}
        for buffer in kernel.writes:
            before |= readers.pop(buffer, set())
        for buffer in kernel.writes:
            writer[buffer] = place
        for buffer in kernel.reads:
            readers.setdefault(buffer, set()).add(place)
        found.append(before - {place})
    return found


@dataclass
class _Group:
    """Kernels of one launch."""

    members: list[_Kernel]

    @property
    def threads(self) -> int:
        """Threads of a block: as many as a template needs where they meet, else the usual number."""
        return next((item.launch.threads for item in self.members if item.needs_threads), THREADS)

    def take(self, kernel: _Kernel) -> bool:
        """Add ``kernel`` where it fits."""
        together = [*self.members, kernel]
        fixed = {item.launch.threads for item in together if item.needs_threads}
        if len(fixed) > 1 or len({item.launch.resident for item in together if not item.small}) > 1:
            return False
        pointers = {buffer for item in together for buffer in (*item.reads, *item.writes)}
        if len(pointers) > _POINTERS or _shared_bytes(together) > STATIC_SHARED:
            return False
        self.members.append(kernel)
        return True

    def proc(self) -> Proc:
        """Return the kernel of the launch."""
        if len(self.members) == 1:
            return self.members[0].proc
        parts = tuple(_fitted(item, self.threads) for item in self.members)
        procs = [item.proc for item in self.members]
        launches = [proc_launch(part) for part in parts]
        warps = self.threads // WARP
        blocks = sum(-(-item.blocks // warps) if item.is_warp else item.blocks for item in launches)
        launch = Launch(
            blocks,
            self.threads,
            {},
            cooperative=any(item.cooperative for item in launches),
            # the compiler does not know how few blocks there are: left to itself, it spills registers to hold more of
            # them
            resident=max(item.resident for item in launches) or int(blocks * self.threads <= _FEW_THREADS),
            offsets={buffer: start for item in launches for buffer, start in item.offsets.items()},
        )
        return Proc(
            f"{procs[0].name}_and_{len(parts) - 1}_more",
            tuple(dict.fromkeys(buffer for part in parts for buffer in part.params)),
            tuple(stmt for part in parts for stmt in part.body),
            tuple(dict.fromkeys(symbol for part in parts for symbol in part.scalars)),
            tuple(dict.fromkeys(origin for part in parts for origin in part.origins)),
            f"{len(parts)} side by side: " + "; ".join(dict.fromkeys(part.path for part in parts)),
            Cost(
                sum(part.cost.flops for part in parts),
                sum(part.cost.nbytes for part in parts),
                max(part.cost.live_bytes for part in parts),
            ),
            {"launch": launch, "parts": parts},
        )


def _shared_bytes(kernels: Sequence[_Kernel]) -> int:
    """Shared memory of a launch; a lone kernel that asks for more than usual brings no others along."""
    return sum(item.shared for item in kernels) + max(item.launch.dynamic_bytes for item in kernels)


def _fitted(kernel: _Kernel, threads: int) -> Proc:
    """Return the kernel with ``threads`` threads in a block, which only those may choose whose threads do not meet."""
    launch, proc = kernel.launch, kernel.proc
    if launch.is_warp and "blocks" not in launch.dealt.values():  # one result: the other warps of the block have none
        only = BlockIterator(index_symbol("only"), index(1), 1)
        launch = replace(launch, dealt={**launch.dealt, only.symbol: "blocks"})
        return replace(proc, body=(For(only, proc.body, "grid"),), attributes={**proc.attributes, "launch": launch})
    if launch.cooperative or launch.threads == threads:
        return proc
    if not launch.dealt:  # one point, one thread
        thread = Symbol("thread", i64)
        body = (If(Apply("eq", (Var(thread), index(0)), i64), proc.body),)
        return replace(proc, body=body, attributes={**proc.attributes, "launch": Launch(1, threads, {}, thread=thread)})
    blocks = blocks_for(launch.blocks * launch.threads, threads)
    return replace(proc, attributes={**proc.attributes, "launch": replace(launch, blocks=blocks, threads=threads)})


__all__ = ["parts_of", "proc_launch", "side_by_side"]
