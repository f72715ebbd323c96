"""Products on tensor cores that skip points outside an operand.

A skipped point is staged as a zero, and adds nothing as long as the other operand is finite there. So the template
notes, as it loads fragments of the other operand, whether any cell is infinite or NaN. A tile that met one is computed
again, result by result, with the skipped points left out.

In: the product and what the template has. Out: the statements that note, and those that compute a tile again.
"""

from __future__ import annotations

from dataclasses import dataclass

from stagedtensor.codegen.affine import add, as_index, floor_divide, modulo, multiply
from stagedtensor.codegen.loop_ir import (
    Apply,
    Assign,
    Buffer,
    Cast,
    Const,
    Declare,
    Expr,
    Fma,
    If,
    Let,
    Load,
    Stmt,
    Store,
    Symbol,
    Var,
)
from stagedtensor.codegen.rewrite import substitute
from stagedtensor.codegen.schedule.cuda.formats import Instruction
from stagedtensor.codegen.schedule.cuda.launch import conjunction, flatten, less
from stagedtensor.codegen.schedule.cuda.operands import Product, Tiles, initial, result_stores
from stagedtensor.codegen.schedule.cuda.panel import call
from stagedtensor.codegen.schedule.nest import index_symbol, loop
from stagedtensor.precision import f32, u32


@dataclass(frozen=True)
class Watch:
    """A register that tells whether the operand which is never skipped has had a cell that is not finite."""

    given: Product
    instruction: Instruction
    seen: Buffer

    def clear(self) -> Stmt:
        """Nothing was seen."""
        return Store(self.seen, (as_index(0),), Const(0, u32))

    def note(self, side: str, fragment: Load) -> list[Stmt]:
        """Look at the four registers just loaded, if they are those of the operand to watch."""
        if side == self.given.guarded:
            return []
        return [call(f"st_note_not_finite_{self.instruction.name}", Load(self.seen, (as_index(0),)), fragment)]

    def instead(self, across: Tiles, shape: tuple[int, int], threads: int, thread: Symbol, results: Stmt) -> list[Stmt]:
        """Return ``results``, or the tile anew where any thread of the block saw such a cell."""
        flag = Load(self.seen, (as_index(0),))
        anew = _one_by_one(self.given, across, shape, threads, thread)
        return [call("st_any_in_block", flag), If(Apply("eq", (flag, Const(0, u32)), u32), (results,), (anew,))]


def watch(given: Product, instruction: Instruction) -> Watch | None:
    """Return the watch of a product that skips points; None for one that does not."""
    return None if given.guard is None else Watch(given, instruction, Buffer("not_finite", u32, (1,), "register"))


def _one_by_one(given: Product, across: Tiles, shape: tuple[int, int], threads: int, thread: Symbol) -> Stmt:
    """Every result of a tile by itself, in the order of the depth."""
    step, cell, row, column, deep = (index_symbol(hint) for hint in ("step", "cell", "row", "column", "deep"))
    rows, columns, depth = given.sizes
    down, beside = flatten(given.rows, "row", Var(row)), flatten(given.columns, "column", Var(column))
    below = flatten(given.depth, "deep", Var(deep))
    mapping = {**across.batch, **down.mapping, **beside.mapping, **below.mapping}
    total = Symbol(given.accumulator.symbol.hint, f32)
    assert given.guard is not None
    counts = conjunction([below.guard, substitute(given.guard, mapping)])
    assert counts is not None
    left, right = (_wide(substitute(operand, mapping)) for operand in (given.left, given.right))
    step_of_sum = Assign(total, Fma(left, right, Var(total)))
    if given.sign != "fma":
        step_of_sum = Assign(total, Apply(given.sign, (Var(total), Apply("mul", (left, right), f32)), f32))
    lets, start = initial(given, across, Var(row), Var(column))
    work: list[Stmt] = [
        *down.lets,
        *beside.lets,
        *lets,
        Declare(total, start),
        loop(deep, depth, [*below.lets, If(counts, (step_of_sum,))]),
        *result_stores(given, across, Var(row), Var(column), Var(total)),
    ]
    inside = conjunction([less(Var(row), rows), less(Var(column), columns), down.guard, beside.guard])
    assert inside is not None
    body: list[Stmt] = [
        Let(cell, add(multiply(Var(step), threads), Var(thread))),
        Let(row, add(across.row, floor_divide(Var(cell), shape[1]))),
        Let(column, add(across.column, modulo(Var(cell), shape[1]))),
        If(inside, tuple(work)),
    ]
    return loop(step, shape[0] * shape[1] // threads, body)


def _wide(value: Expr) -> Expr:
    return value if value.type is f32 else Cast(value, f32)


__all__ = ["Watch", "watch"]
