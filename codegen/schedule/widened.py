"""Narrow operands of contractions widened once, as whole buffers, for all the kernels that read them.

In: a contraction's operand that is the conversion of a narrow buffer's cell. Out: the block that copies the buffer to f32 in
its own order (unless an earlier kernel's copy still holds the same values), and the load that stands for the operand.
Without it a register tile converts the broadcast operand one value at a time, again for every panel of columns.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from stagedtensor.codegen.affine import as_index
from stagedtensor.codegen.loop_ir import Block, BlockIterator, Buffer, Cast, Expr, Load, Store, Var
from stagedtensor.codegen.schedule.nest import index_symbol, loads_in
from stagedtensor.precision import f32

MOST_IDLE = 24
"""Kernels after which a copy that nobody read is given up: it takes twice the memory of what it is a copy of."""


@dataclass
class WideCopies:
    """The f32 copies that later kernels may read, by the buffer that they are copies of."""

    by_buffer: dict[Buffer, Buffer] = field(default_factory=dict)
    kernels: int = 0
    last_read: dict[Buffer, int] = field(default_factory=dict)

    def next_kernel(self) -> None:
        """Count a kernel, and drop the copies that have waited too long for a reader."""
        self.kernels += 1
        self.forget([item for item in self.by_buffer if self.kernels - self.last_read[item] > MOST_IDLE])

    def forget(self, written: Iterable[Buffer]) -> None:
        """Drop the copies of buffers that have got new values."""
        for buffer in written:
            self.by_buffer.pop(buffer, None)

    def has(self, operand: Expr) -> bool:
        """Tell whether a copy is there already."""
        load = narrow_load(operand)
        return load is not None and load.buffer in self.by_buffer

    def of(self, operand: Expr) -> tuple[Load, Block | None]:
        """Return the operand as a load of the copy, and the block that makes the copy where there is none yet."""
        load = narrow_load(operand)
        assert load is not None
        known = self.by_buffer.get(load.buffer)
        self.last_read[load.buffer] = self.kernels
        if known is not None:
            return Load(known, load.indices), None
        wide = Buffer(f"{load.buffer.name.replace('.', '_')}_wide", f32, load.buffer.shape)
        self.by_buffer[load.buffer] = wide
        axes = tuple(BlockIterator(index_symbol("cell"), as_index(extent), extent) for extent in wide.shape)
        cell = tuple(Var(item.symbol) for item in axes)
        return Load(wide, load.indices), Block(
            wide.name, axes, (Store(wide, cell, Cast(Load(load.buffer, cell), f32)),)
        )


def narrow_load(operand: Expr) -> Load | None:
    """Return the narrow cell that ``operand`` widens, None where it is anything else."""
    if not isinstance(operand, Cast) or operand.type is not f32 or operand.saturate or operand.flush:
        return None
    load = operand.arg
    if not isinstance(load, Load) or not load.buffer.type.is_narrow or load.buffer.space != "global":
        return None
    return None if any(loads_in(index) for index in load.indices) else load
