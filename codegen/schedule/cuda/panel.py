"""Tiles of 16-bit operands in shared memory: how they lie, how they get there, how fragments are read from them.

In: one operand of a product. Out: the statements that copy a tile and those that read a fragment. Where eight neighbouring
cells always lie on one side of the operand's edge and start at a multiple of 16 bytes, they are copied by one asynchronous
instruction and lie as in memory; ldmatrix transposes where the depth is not what is adjacent. Else cells are copied one by
one, depth adjacent. Rows are padded by 16 bytes, which puts eight rows of a matrix into different banks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from stagedtensor.codegen.affine import add, constant, flat_index, floor_divide, modulo, multiply
from stagedtensor.codegen.loop_ir import (
    Apply,
    BlockIterator,
    Buffer,
    Expr,
    If,
    Let,
    Load,
    Stmt,
    Store,
    Symbol,
    Tile,
    Var,
)
from stagedtensor.codegen.schedule.cuda.launch import less
from stagedtensor.codegen.schedule.cuda.operands import Side
from stagedtensor.codegen.schedule.nest import index_symbol, loop
from stagedtensor.precision import Prec

_CHUNK = 8
"""Cells of 16 bytes."""
_PADDING = 8


def instruction(name: str, *arguments: Expr) -> Tile:
    """Return the call of a collective instruction; what it does is said at the function of its name."""
    return Tile(name, 16, 8, 16, (), arguments)


@dataclass(frozen=True, eq=False)
class Panel:
    """``size`` cells along the result by ``depth`` cells of one operand."""

    name: str
    side: Side
    size: int
    depth: int
    prec: Prec

    @cached_property
    def adjacent(self) -> Literal["depth", "along", ""]:
        """Which axis of the operand is copied in chunks; "" where cells go one by one."""
        if _in_chunks(self.side, self.side.depth, self.side.along):
            return "depth"
        return "along" if _in_chunks(self.side, self.side.along, self.side.depth) else ""

    @property
    def vector(self) -> bool:
        """Whether the operand is copied in chunks."""
        return self.adjacent != ""

    @property
    def _depth_last(self) -> bool:
        return self.adjacent != "along"

    @property
    def _shape(self) -> tuple[int, int]:
        if self._depth_last:
            return self.size, self.depth + _PADDING
        return self.depth, self.size + _PADDING

    @property
    def nbytes(self) -> int:
        """Bytes of one stage."""
        return self._shape[0] * self._shape[1] * 2

    def buffer(self, stages: int) -> Buffer:
        """Return the array of all stages."""
        return Buffer(self.name, self.prec, (stages, *self._shape), "shared")

    def _cell(self, tile: Buffer, stage: Expr, along: Expr, deep: Expr) -> Load:
        return Load(tile, (stage, along, deep) if self._depth_last else (stage, deep, along))

    def copy(self, tile: Buffer, stage: Expr, first: Expr, deep: Expr, thread: Symbol, threads: int) -> Stmt:
        """Return the copy of the panel from (``first``, ``deep``) on into ``stage`` of ``tile``; outside cells are 0."""
        chunk = _CHUNK if self.vector else 1
        fast = (self.depth if self._fast_depth else self.size) // chunk
        total = self.size * self.depth // chunk
        step, named, place, layer = (index_symbol(hint) for hint in ("step", "cell", "place", "layer"))
        slow_part, fast_part = floor_divide(Var(named), fast), multiply(modulo(Var(named), fast), chunk)
        lets = [Let(named, add(multiply(Var(step), threads), Var(thread)))]
        split = (
            [Let(place, slow_part), Let(layer, fast_part)]
            if self._fast_depth
            else [Let(layer, slow_part), Let(place, fast_part)]
        )
        needed, value = self.side.at(add(first, Var(place)), add(deep, Var(layer)))
        assert isinstance(value, Apply)
        test, cell, _ = value.args
        target = self._cell(tile, stage, Var(place), Var(layer))
        work: list[Stmt] = [*split, *needed]
        if self.vector:
            work.append(instruction("st_copy_async", target, cell, test))
        else:
            work.append(Store(tile, target.indices, value))
        body: list[Stmt] = [*lets, *work] if total % threads == 0 else [*lets, If(less(Var(named), total), tuple(work))]
        return loop(step, -(-total // threads), body, "unroll")

    @property
    def _fast_depth(self) -> bool:
        """Whether neighbouring threads copy neighbouring depths."""
        return self.adjacent == "depth" or (not self.vector and self.side.deep_in_memory)

    def fragment(
        self, tile: Buffer, stage: Expr, along: Expr, deep: Expr, low: Expr, across: Expr, below: Expr, target: Load
    ) -> Tile:
        """Return the load of four 8 x 8 matrices at (``along``, ``deep``) into ``target``.

        A thread names row ``low`` of the matrix that lies ``across`` cells along and ``below`` cells deeper.
        """
        if self._depth_last:
            source = self._cell(tile, stage, add(along, add(across, low)), add(deep, below))
            return instruction("st_ldmatrix_x4", target, source)
        source = self._cell(tile, stage, add(along, across), add(deep, add(below, low)))
        return instruction("st_ldmatrix_x4_trans", target, source)


def _in_chunks(side: Side, group: tuple[BlockIterator, ...], others: tuple[BlockIterator, ...]) -> bool:
    """Tell whether eight neighbouring cells of ``group`` lie side by side, aligned, all inside or all outside."""
    operand = side.operand
    if not isinstance(operand, Load) or not group or operand.type.bytes != 2 or operand.buffer.layout.steps:
        return False
    inner = group[-1]
    if inner.bound % _CHUNK or any(constant(item.extent) != item.bound for item in (*group, *others)):
        return False
    flat = flat_index(operand.buffer, operand.indices)
    if flat.constant % _CHUNK or flat.coefficient(inner.symbol) != 1:
        return False
    return all(
        isinstance(atom, Var) and (atom.symbol is inner.symbol or factor % _CHUNK == 0) for atom, factor in flat.terms
    )
