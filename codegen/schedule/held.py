"""Small narrow temporaries held in f32: rounded to their format as ever, but stored and read without conversions.

In: a module of blocks. Out: the same values, bit for bit (those of a NaN aside). A narrow format saves memory traffic,
which a buffer that stays in the cache does not have, and costs a conversion at every read::

    h[i] = bf16(v)             ->    h[i] = f32(bf16(v))          h becomes an f32 buffer
    ... f32(h[i]) ...                ... h[i] ...

Only temporaries of the routine qualify whose every read is a conversion; what a context can see keeps its format, and
so does what a matrix unit multiplies. Operands of other contractions, which are widened anyway, may be larger where
they do not live long.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from stagedtensor.codegen.loop_ir import (
    Block,
    Buffer,
    Cast,
    Expr,
    Load,
    Module,
    Proc,
    Store,
    children,
)
from stagedtensor.codegen.passes.dependence import is_contraction
from stagedtensor.codegen.passes.exact import exact_in
from stagedtensor.codegen.rewrite import Rewriter, buffers_read, buffers_written, expressions, walk_stmts
from stagedtensor.codegen.schedule.analysis import contraction
from stagedtensor.codegen.schedule.machine import Machine, MatrixUnit
from stagedtensor.codegen.schedule.matrix_tile import on_matrix_unit
from stagedtensor.codegen.schedule.nest import collapse, inline_lets, loads_in
from stagedtensor.precision import f32


def hold_wide(module: Module, machine: Machine, local: frozenset[Buffer] = frozenset()) -> Module:
    """Return ``module`` with its small narrow temporaries in f32, and those that are to be ``local``."""
    narrow = [buffer for buffer in module.temporaries if buffer.type.is_narrow and buffer.type.is_float]
    passing = _passing_operands(module)
    candidates = {
        buffer
        for buffer in narrow
        if buffer in local
        or buffer.size <= (machine.most_passing_cells if buffer in passing else machine.most_held_cells)
    }
    for kernel in module.kernels:
        candidates.difference_update(_read_as_they_are(kernel))
        if machine.matrix_unit is not None:
            wide_slabs = local if machine.matrix_unit is MatrixUnit.TILES else frozenset[Buffer]()
            candidates.difference_update(_multiplied_narrow(kernel, machine.matrix_unit, wide_slabs))
    if not candidates:
        return module
    wide = {buffer: replace(buffer, type=f32) for buffer in candidates}
    work = _HoldWide(wide)
    return replace(
        module,
        kernels=tuple(work.proc(kernel) for kernel in module.kernels),
        temporaries=tuple(wide.get(buffer, buffer) for buffer in module.temporaries),
    )


_SHORT_LIFE = 8


def _passing_operands(module: Module) -> set[Buffer]:
    """Temporaries that a contraction reads, which would widen all of them, and that few kernels later nobody needs."""
    first: dict[Buffer, int] = {}
    last: dict[Buffer, int] = {}
    operands: set[Buffer] = set()
    for at, kernel in enumerate(module.kernels):
        for buffer in (*buffers_read(kernel.body), *buffers_written(kernel.body)):
            first.setdefault(buffer, at)
            last[buffer] = at
        for stmt in kernel.body:
            if isinstance(stmt, Block) and is_contraction(stmt):
                operands.update(
                    load.buffer for item in stmt.accumulators for load in loads_in(inline_lets(stmt, item.update))
                )
    return {buffer for buffer in operands if last[buffer] - first[buffer] <= _SHORT_LIFE}


def _read_as_they_are(kernel: Proc) -> Iterator[Buffer]:
    """Yield the buffers with a read that is no conversion, and all of a kernel that is not made of blocks."""
    for stmt in walk_stmts(kernel.body):
        if not isinstance(stmt, Block):
            yield from kernel.params
            return
        for expr in expressions(stmt):
            yield from _bare(expr)


def _multiplied_narrow(kernel: Proc, unit: MatrixUnit, wide_slabs: frozenset[Buffer]) -> Iterator[Buffer]:
    """Yield the operands of contractions that ``unit`` computes: none of those on ``wide_slabs``, which are f32."""
    for stmt in kernel.body:
        if (
            not isinstance(stmt, Block)
            or not is_contraction(stmt)
            or wide_slabs.intersection((*buffers_read(stmt), *buffers_written(stmt)))
        ):
            continue
        found = contraction(collapse(stmt))
        if found is not None and on_matrix_unit(found, unit):
            yield from (load.buffer for load in loads_in(found.lhs, found.rhs))


def _bare(expr: Expr) -> Iterator[Buffer]:
    if isinstance(expr, Load):
        yield expr.buffer
    for part in children(expr):
        if isinstance(expr, Cast) and isinstance(part, Load):
            for index in part.indices:
                yield from _bare(index)
        else:
            yield from _bare(part)


class _HoldWide(Rewriter):
    def __init__(self, wide: dict[Buffer, Buffer]) -> None:
        self.wide = wide

    def buffer(self, buffer: Buffer) -> Buffer:
        return self.wide.get(buffer, buffer)

    def expr(self, expr: Expr) -> Expr:
        expr = super().expr(expr)
        if isinstance(expr, Cast) and expr.type is f32 and isinstance(expr.arg, Load) and expr.arg.type is f32:
            return expr.arg
        return expr

    def store(self, store: Store) -> Store:
        new = super().store(store)
        if store.buffer not in self.wide:
            return new
        value = new.value
        # Asked of what it was before: a buffer that is held wide no longer says which values it has.
        exact = isinstance(store.value, Cast) and not store.value.flush and exact_in(store.value.arg, store.value.type)
        if exact and isinstance(value, Cast) and value.arg.type is f32:
            return replace(new, value=value.arg)
        return replace(new, value=Cast(value, f32))
