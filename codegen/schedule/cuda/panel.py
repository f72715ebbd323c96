"""Tiles of operands in shared memory: how they lie, how they get there, how fragments are read from them.

In: one operand of a product. Out: the statements that copy a tile and those that read a fragment. Where 16 bytes of
neighbouring cells always lie on one side of the operand's edge and start at a multiple of 16, they are copied by one
asynchronous instruction and lie as in memory; ldmatrix transposes 16-bit cells where the depth is not what is adjacent,
and wider ones are read one by one. Else cells are copied one by one, depth adjacent. Rows are padded so that the cells
which a warp reads together lie in different banks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from stagedtensor.codegen.affine import add, as_index, constant, flat_index, floor_divide, modulo, multiply
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
from stagedtensor.codegen.schedule.analysis import depends
from stagedtensor.codegen.schedule.cuda.formats import Instruction
from stagedtensor.codegen.schedule.cuda.launch import less
from stagedtensor.codegen.schedule.cuda.operands import Side
from stagedtensor.codegen.schedule.nest import index_symbol, loop
from stagedtensor.precision import f32

_GROUP = 8
"""Rows of one matrix; also, in 32-bit cells, the padding that spreads reads down a column over all banks."""


def call(name: str, *arguments: Expr) -> Tile:
    """Return the call of a collective instruction; what it does is said at the function of its name."""
    return Tile(name, 16, 8, 16, (), arguments)


@dataclass(frozen=True, eq=False)
class Panel:
    """``size`` cells along the result by ``depth`` cells of one operand."""

    name: str
    side: Side
    size: int
    depth: int
    instruction: Instruction
    by_cell: bool = False
    """The operand is not in global memory, from where chunks are copied."""

    @cached_property
    def adjacent(self) -> Literal["depth", "along", ""]:
        """Which axis of the operand is copied in chunks; "" where cells go one by one."""
        if self.by_cell:
            return ""
        chunk = self.instruction.chunk
        if _in_chunks(self.side, self.side.depth, self.side.along, chunk):
            return "depth"
        if self.instruction.staged.bytes == 1:
            return ""  # nothing transposes bytes
        return "along" if _in_chunks(self.side, self.side.along, self.side.depth, chunk) else ""

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
            return self.size, self.depth + self.instruction.chunk
        return self.depth, self.size + _GROUP

    @property
    def nbytes(self) -> int:
        """Bytes of one stage."""
        return self._shape[0] * self._shape[1] * self.instruction.staged.bytes

    def buffer(self, stages: int) -> Buffer:
        """Return the array of all stages."""
        return Buffer(self.name, self.side.operand.type, (stages, *self._shape), "shared")

    def _cell(self, tile: Buffer, stage: Expr, along: Expr, deep: Expr) -> Load:
        return Load(tile, (stage, along, deep) if self._depth_last else (stage, deep, along))

    def copy(self, tile: Buffer, stage: Expr, first: Expr, deep: Expr, thread: Symbol, threads: int) -> list[Stmt]:
        """Return the copy of the panel from (``first``, ``deep``) on into ``stage`` of ``tile``; 0 outside."""
        chunk = self.instruction.chunk if self.vector else 1
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
            work.append(call(f"st_copy_async{self._suffix}", target, cell, test))
        else:
            work.append(Store(tile, target.indices, value))
        body: list[Stmt] = [*lets, *work] if total % threads == 0 else [*lets, If(less(Var(named), total), tuple(work))]
        return [loop(step, -(-total // threads), body, "unroll")]

    @property
    def _fast_depth(self) -> bool:
        """Whether neighbouring threads copy neighbouring depths."""
        return self.adjacent == "depth" or (not self.vector and self.side.deep_in_memory)

    @property
    def _suffix(self) -> str:
        return _suffix(self.instruction)

    def fragment(
        self, tile: Buffer, layer: Expr, along: Expr, deep: Expr, lane: Expr, target: Load, *, along_first: bool
    ) -> list[Stmt]:
        """Return the load of four registers from (``along``, ``deep``) of a layer on into ``target``, one of each of
        four matrices.

        ``along_first``: the second matrix lies 8 cells further along and the last two lie deeper, else the other way
        round.
        """
        stage = modulo(layer, tile.shape[0])
        if self._depth_last:
            # a thread names one row of 16 bytes of one matrix
            across, below = _matrix(self.instruction, floor_divide(lane, _GROUP), along_first)
            source = self._cell(tile, stage, add(along, add(across, modulo(lane, _GROUP))), add(deep, below))
            return [call(f"st_ldmatrix_x4{self._suffix}", target, source)]
        if not self._suffix:
            across, below = _matrix(self.instruction, floor_divide(lane, _GROUP), along_first)
            source = self._cell(tile, stage, add(along, across), add(deep, add(below, modulo(lane, _GROUP))))
            return [call("st_ldmatrix_x4_trans", target, source)]
        loads: list[Stmt] = []
        row, column = floor_divide(lane, 4), modulo(lane, 4)
        registers = target.buffer.shape[-1]
        *outer, _ = target.indices
        for number in range(4):
            across, below = _matrix(self.instruction, as_index(number), along_first)
            source = self._cell(tile, stage, add(along, add(across, row)), add(deep, add(below, column)))
            first = add(outer[-1], number // registers)
            loads.append(
                call("st_load_tf32", Load(target.buffer, (*outer[:-1], first, as_index(number % registers))), source)
            )
        return loads


@dataclass(frozen=True, eq=False)
class Resident:
    """A left operand that is in shared memory already, rows by its whole depth; rows start at 16 bytes."""

    cells: Buffer
    depth: int
    instruction: Instruction

    @property
    def nbytes(self) -> int:
        """Bytes of one stage: nothing is copied."""
        return 0

    def buffer(self, stages: int) -> Buffer:
        """Return the array that holds it, whatever the stages."""
        return self.cells

    def copy(self, tile: Buffer, stage: Expr, first: Expr, deep: Expr, thread: Symbol, threads: int) -> list[Stmt]:
        """Return no statement."""
        return []

    def fragment(
        self, tile: Buffer, layer: Expr, along: Expr, deep: Expr, lane: Expr, target: Load, *, along_first: bool
    ) -> list[Stmt]:
        """Return the load of four registers, as that of a panel whose depth is adjacent."""
        across, below = _matrix(self.instruction, floor_divide(lane, _GROUP), along_first)
        deeper = add(multiply(layer, self.depth), add(deep, below))
        source = Load(tile, (add(along, add(across, modulo(lane, _GROUP))), deeper))
        return [call(f"st_ldmatrix_x4{_suffix(self.instruction)}", target, source)]


def _suffix(instruction: Instruction) -> str:
    """Ending of the functions that move cells of other than 16 bits."""
    staged = instruction.staged
    return "_f32" if staged is f32 else "_u8" if staged.bytes == 1 else ""


def _matrix(instruction: Instruction, number: Expr, along_first: bool) -> tuple[Expr, Expr]:
    """Where matrix 0 to 3 starts: cells along and cells deeper."""
    low, high = modulo(number, 2), floor_divide(number, 2)
    across, below = (low, high) if along_first else (high, low)
    return multiply(across, _GROUP), multiply(below, instruction.chunk)


def _in_chunks(side: Side, group: tuple[BlockIterator, ...], others: tuple[BlockIterator, ...], chunk: int) -> bool:
    """Tell whether ``chunk`` neighbouring cells of ``group`` lie side by side, aligned, all inside or all outside."""
    operand = side.operand
    if not isinstance(operand, Load) or not group or operand.buffer.layout.steps:
        return False
    inner = group[-1]
    if inner.bound % chunk or any(constant(item.extent) != item.bound for item in (*group, *others)):
        return False
    if side.guard is not None and depends(side.guard, inner):
        return False
    flat = flat_index(operand.buffer, operand.indices)
    if flat.constant % chunk or flat.coefficient(inner.symbol) != 1:
        return False
    return all(
        isinstance(atom, Var) and (atom.symbol is inner.symbol or factor % chunk == 0) for atom, factor in flat.terms
    )
