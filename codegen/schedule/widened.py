"""Narrow operands of contractions widened once, as whole buffers, for all the kernels that read them.

In: a contraction's operand that is the conversion of a narrow buffer's cell. Out: the block that copies the buffer to
f32 in its own order (unless an earlier kernel's copy still holds the same values), and the load that stands for the
operand. Without it a register tile converts the broadcast operand one value at a time, again for every panel of
columns.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from stagedtensor.codegen.affine import as_index
from stagedtensor.codegen.loop_ir import Block, BlockIterator, Buffer, Cast, Expr, Load, Store, Var
from stagedtensor.codegen.schedule.nest import index_symbol, loads_in
from stagedtensor.precision import Prec, f32

Copied: TypeAlias = tuple[Buffer, Prec]
"""What a copy holds: the cells of a buffer, in or through a narrow format."""

MOST_IDLE = 24
"""Kernels after which a copy that nobody read is given up: it takes twice the memory of what it is a copy of."""


@dataclass
class WideCopies:
    """The f32 copies that later kernels may read, by the buffer and format that they are copies of."""

    by_buffer: dict[Copied, Buffer] = field(default_factory=dict)
    kernels: int = 0
    last_read: dict[Copied, int] = field(default_factory=dict)

    def next_kernel(self) -> None:
        """Count a kernel, and drop the copies that have waited too long for a reader."""
        self.kernels += 1
        for item in [item for item in self.by_buffer if self.kernels - self.last_read[item] > MOST_IDLE]:
            del self.by_buffer[item]

    def forget(self, written: Iterable[Buffer]) -> None:
        """Drop the copies of buffers that have got new values."""
        changed = set(written)
        for item in [item for item in self.by_buffer if item[0] in changed]:
            del self.by_buffer[item]

    def has(self, operand: Expr) -> bool:
        """Tell whether a copy is there already."""
        load = narrow_load(operand)
        return load is not None and _key(operand, load) in self.by_buffer

    def of(self, operand: Expr) -> tuple[Load, Block | None]:
        """Return the operand as a load of the copy, and the block that makes the copy where there is none yet."""
        load = narrow_load(operand)
        assert load is not None
        key = _key(operand, load)
        known = self.by_buffer.get(key)
        self.last_read[key] = self.kernels
        if known is not None:
            return Load(known, load.indices), None
        format_read = f"_{key[1]}" if rounds(operand) else ""
        wide = Buffer(f"{load.buffer.name.replace('.', '_')}{format_read}_wide", f32, load.buffer.shape)
        self.by_buffer[key] = wide
        axes = tuple(BlockIterator(index_symbol("cell"), as_index(extent), extent) for extent in wide.shape)
        cell = tuple(Var(item.symbol) for item in axes)
        return Load(wide, load.indices), Block(wide.name, axes, (Store(wide, cell, with_cell(operand, cell)),))


def _key(operand: Expr, load: Load) -> Copied:
    return load.buffer, operand.arg.type if isinstance(operand, Cast) else load.type


def rounds(operand: Expr) -> bool:
    """Tell whether ``operand`` is an f32 cell taken through a narrow format."""
    return isinstance(operand, Cast) and isinstance(operand.arg, Cast)


def with_cell(operand: Expr, cell: tuple[Expr, ...]) -> Expr:
    """Return the conversion ``operand`` of another cell of its buffer."""
    if isinstance(operand, Load):
        return Load(operand.buffer, cell)
    assert isinstance(operand, Cast)
    return replace(operand, arg=with_cell(operand.arg, cell))


def narrow_load(operand: Expr) -> Load | None:
    """Return the cell that ``operand`` widens from a narrow format, or takes through one; None where it does neither."""
    if not isinstance(operand, Cast) or operand.type is not f32 or operand.saturate or operand.flush:
        return None
    load = operand.arg
    if isinstance(load, Cast) and load.type.is_narrow and isinstance(load.arg, Load) and load.arg.type is f32:
        load = load.arg
    elif not isinstance(load, Load) or not load.buffer.type.is_narrow:
        return None
    return None if load.buffer.space != "global" or any(loads_in(index) for index in load.indices) else load
