"""What a context tells about itself: counts of what it did, and the memory that it and its routines hold.

In: the context's counts and lines. Out: values to read and print, and the message where memory does not suffice.
Measures nothing itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from stagedtensor.errors import ContextError
from stagedtensor.runtime.device import MemoryLine

_LARGEST = 5
"""Buffers named where memory runs out."""


@dataclass
class Stats:
    """Counts of what a context did; tests read them to prove that ``set_values`` compiles nothing."""

    compiles: int = 0
    """Programs for which the toolchain ran."""
    cache_hits: int = 0
    """Programs whose binary came from the kernel cache."""
    routine_hits: int = 0
    """Computations that were compiled before in this context."""
    runs: int = 0
    kernel_launches: int = 0
    uploads: int = 0
    uploaded_bytes: int = 0
    downloads: int = 0
    downloaded_bytes: int = 0


@dataclass(frozen=True)
class MemoryReport:
    """Every buffer of a context and its routines; sizes in bytes."""

    stored: tuple[MemoryLine, ...]
    temporaries: Mapping[str, tuple[MemoryLine, ...]]
    stored_bytes: int
    arena_bytes: Mapping[str, int]
    thread_bytes: Mapping[str, int]
    saved_bytes: Mapping[str, int]
    recomputed_bytes: Mapping[str, int]

    @property
    def peak_bytes(self) -> int:
        """Stored buffers and the largest routine arena."""
        return self.stored_bytes + max(self.arena_bytes.values(), default=0)

    def __str__(self) -> str:
        lines = [f"stored between runs: {self.stored_bytes:,} bytes"]
        lines += [f"{line.nbytes:>12,}  {line.node}  {line.precision} {line.shape}" for line in self.stored]
        for name, temporaries in self.temporaries.items():
            lines.append(
                f"while routine {name} runs: an arena of {self.arena_bytes[name]:,} bytes "
                f"(sharing by lifetime saved {self.saved_bytes[name]:,}, computing values again in place of keeping them "
                f"{self.recomputed_bytes[name]:,})"
            )
            if self.thread_bytes[name]:
                lines.append(
                    f"{self.thread_bytes[name]:>12,}  of the arena for each thread: slabs of matrices, panels of operands"
                )
            for line in temporaries:
                place = f"  kernels {line.live[0]} to {line.live[1]}" if line.live is not None else ""
                place += f", at byte {line.offset:,}" if line.offset is not None else ""
                lines.append(f"{line.nbytes:>12,}  {line.node}  {line.precision} {line.shape}{place}")
        return "\n".join((*lines, f"peak: {self.peak_bytes:,} bytes, what is stored and the largest arena"))


def too_little_memory(
    device: str, what: str, nbytes: int, error: MemoryError, parts: Iterable[MemoryLine], held: Iterable[MemoryLine]
) -> ContextError:
    """Return the error that ``what`` of ``nbytes`` bytes does not fit, naming its largest parts and what is held."""
    lines = [f"{device} has too little memory for {what}: it takes {_size(nbytes)} ({error})"]
    for title, group in (("the largest of these", parts), ("the largest buffers that this context holds", held)):
        largest = sorted(group, key=lambda line: line.nbytes, reverse=True)[:_LARGEST]
        if largest:
            lines.append(f"  {title}:")
            lines += [
                f"    {_size(line.nbytes):>14}  {line.node}  {line.precision} {line.shape}".rstrip() for line in largest
            ]
    lines.append("  compute in smaller batches, keep fewer tensors, or close other contexts")
    return ContextError("\n".join(lines))


def _size(nbytes: int) -> str:
    units = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
    power = min((max(nbytes, 1).bit_length() - 1) // 10, len(units) - 1)
    return f"{nbytes / 1024**power:,.{min(power, 1)}f} {units[power]}"
