"""Narrow twins that are never stored: each reader narrows the master itself, while it copies it into panels.

In: a module of blocks. Out: the same values, bit for bit. A twin is a temporary whose cells are a wider buffer's,
rounded::

    twin[i, k] = bf16(w[i, k])                                ->     (gone)
    y[b, i] = sum over k: f32(twin[i, k]) * x[b, k]                  ... f32(bf16(w[i, k])) * x[b, k]

A contraction that uses every value often copies the operand anyway, so rounding there costs one pass less over memory.
The same goes for a twin that is stored beside its master, where contractions alone read it and soon::

    g[b, i] = v; twin[b, i] = bf16(v)                         ->     g[b, i] = v
    dw[i, k] = sum over b: f32(twin[b, i]) * x[b, k]                 ... f32(bf16(g[b, i])) * x[b, k]

A twin stays where a reader would round its cells many times, and where the master changes before its last reader.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from stagedtensor.codegen.loop_ir import (
    Block,
    Buffer,
    Cast,
    Expr,
    Load,
    Module,
    Origin,
    Proc,
    Stmt,
    Store,
    Var,
    children,
)
from stagedtensor.codegen.passes.place import Decision, Mode
from stagedtensor.codegen.pieces import remembered
from stagedtensor.codegen.rewrite import Rewriter, buffers_read, buffers_written
from stagedtensor.codegen.schedule.analysis import contraction, depends, points
from stagedtensor.codegen.schedule.nest import collapse, expressions, loads_in

_USES_THAT_REPAY = 16
"""Uses of each value from which a contraction copies its operand."""
_READS_ALLOWED = 4
"""Reads per cell by blocks that copy nothing."""
_SOON = 8
"""Kernels within which a twin beside its master is read for the last time: the larger master waits for it."""


@dataclass(frozen=True)
class _Twin:
    """A twin, its master, the rounding in between, and whether one kernel makes both."""

    buffer: Buffer
    master: Buffer
    cast: Cast
    beside: bool
    origins: tuple[Origin, ...]


def narrow_in_place(module: Module) -> Module:
    """Return ``module`` without the twins that their readers can round themselves."""
    kernels = list(module.kernels)
    gone: list[_Twin] = []
    for twin in [twin for kernel in module.kernels for twin in _twins(kernel, module)]:
        maker = next(item for item in kernels if twin.buffer in _writes(item))
        order = _with_readers_first(kernels, twin, maker)
        if order is None:
            continue
        gone.append(twin)
        work = _Rounding(twin)
        left = [_without(item, twin.buffer) if item is maker else work.reader(item) for item in order]
        kernels = [item for item in left if item.body]
    if not gone:
        return module
    reason = Decision(Mode.VIRTUAL, "narrowed by its readers while they copy it")
    nodes = {twin.buffer.node: reason for twin in gone if twin.buffer.node in module.placements}
    lost = {twin.buffer for twin in gone}
    return replace(
        module,
        kernels=tuple(kernels),
        temporaries=tuple(buffer for buffer in module.temporaries if buffer not in lost),
        placements={**module.placements, **nodes},
    )


def _twins(kernel: Proc, module: Module) -> Iterator[_Twin]:
    """The twins that a kernel makes: its only result, copied from the master, or results beside the master."""
    if len(kernel.body) != 1 or not isinstance(kernel.body[0], Block):
        return
    block = kernel.body[0]
    if block.guard is not None or block.scatter:
        return
    cell = tuple(Var(item.symbol) for item in block.data)
    origins = tuple(dict.fromkeys((*kernel.origins, *block.origins)))
    for store in block.stores:
        value, twin = store.value, store.buffer
        if (
            not isinstance(value, Cast)
            or store.indices != cell
            or not twin.type.is_narrow
            or twin not in module.temporaries
        ):
            continue
        beside = len(block.stores) > 1
        master = _beside(block, store, value) if beside else _copied(block, value, cell)
        if master is None or master.type is not value.arg.type or master.shape != twin.shape:
            continue
        if master.type.is_float and not master.type.is_narrow:
            yield _Twin(twin, master, replace(value, arg=Load(master, cell)), beside, () if beside else origins)


def _copied(block: Block, value: Cast, cell: tuple[Var, ...]) -> Buffer | None:
    """The buffer whose cells a block does nothing but round."""
    plain = not block.lets and not block.accumulators
    return value.arg.buffer if plain and isinstance(value.arg, Load) and value.arg.indices == cell else None


def _beside(block: Block, store: Store, value: Cast) -> Buffer | None:
    """The buffer that gets, at the same cell, what ``store`` rounds."""
    return next(
        (item.buffer for item in block.stores if item.indices == store.indices and item.value == value.arg), None
    )


def _with_readers_first(kernels: list[Proc], twin: _Twin, maker: Proc) -> list[Proc] | None:
    """Return the kernels with the twin's readers in front of whatever changes the master; None where it cannot go."""
    start = kernels.index(maker)
    touching = [item for item in kernels if item is not maker and twin.buffer in (*_reads(item), *_writes(item))]
    readers = [item for item in kernels[start + 1 :] if twin.buffer in _reads(item)]
    if not readers or len(touching) != len(readers) or any(twin.buffer in _writes(item) for item in readers):
        return None
    if not all(_may_round(stmt, twin) for item in readers for stmt in item.body):
        return None
    if twin.beside and (kernels.index(readers[-1]) - start > _SOON or not all(_is_product(item) for item in readers)):
        return None
    order = list(kernels)
    for reader in readers:
        changing = next((at for at in range(start + 1, len(order)) if twin.master in _writes(order[at])), len(order))
        at = order.index(reader)
        if at < changing:
            continue
        reads, writes = _reads(reader), _writes(reader)
        for between in order[changing:at]:
            if writes & (_reads(between) | _writes(between)) or reads & _writes(between):
                return None
        order.insert(changing, order.pop(at))
    return order


def _is_product(kernel: Proc) -> bool:
    return all(isinstance(stmt, Block) and contraction(collapse(stmt)) is not None for stmt in kernel.body)


def _without(kernel: Proc, buffer: Buffer) -> Proc:
    """Return a kernel that stores ``buffer`` no more, without a body where it stores nothing else."""
    (block,) = kernel.body
    assert isinstance(block, Block)
    stores = tuple(store for store in block.stores if store.buffer is not buffer)
    return replace(kernel, body=(replace(block, stores=stores),) if stores else ())


@remembered
def _reads(kernel: Proc) -> frozenset[Buffer]:
    return frozenset(buffers_read(kernel.body))


@remembered
def _writes(kernel: Proc) -> frozenset[Buffer]:
    return frozenset(buffers_written(kernel.body))


def _may_round(stmt: Stmt, twin: _Twin) -> bool:
    """Whether a statement reads widened cells only, and each not too often; one that does not read the twin may."""
    if not isinstance(stmt, Block):
        return False
    if twin.buffer not in buffers_read(stmt):
        return True
    if any(_bare(expr, twin.buffer) for expr in expressions(stmt)):
        return False
    found = contraction(collapse(stmt))
    if found is None:
        return points(stmt.iterators) <= _READS_ALLOWED * twin.buffer.size
    sides = [side for side in (found.lhs, found.rhs) if any(load.buffer is twin.buffer for load in loads_in(side))]
    if len(sides) != 1 or found.block.guard is not None:
        return False
    others = tuple(item for item in found.block.data if not depends(sides[0], item))
    plain = isinstance(sides[0], Cast) and isinstance(sides[0].arg, Load)
    stored = any(load.buffer is twin.buffer for store in stmt.stores for load in loads_in(store.value))
    return plain and not stored and points(others) >= _USES_THAT_REPAY


def _bare(expr: Expr, buffer: Buffer) -> bool:
    """Whether a cell of ``buffer`` is read without a conversion around it."""
    if isinstance(expr, Load) and expr.buffer is buffer:
        return True
    inner = children(expr)
    if isinstance(expr, Cast) and isinstance(expr.arg, Load) and expr.arg.buffer is buffer:
        inner = expr.arg.indices
    return any(_bare(part, buffer) for part in inner)


class _Rounding(Rewriter):
    """Reads of one twin become reads of its master, rounded."""

    def __init__(self, twin: _Twin) -> None:
        self.twin = twin

    def reader(self, kernel: Proc) -> Proc:
        """Return a kernel that reads the twin no more; what it computes then includes the twin."""
        if self.twin.buffer not in buffers_read(kernel.body):
            return kernel
        body = tuple(
            replace(stmt, origins=self._origins(stmt.origins)) if isinstance(stmt, Block) else stmt
            for stmt in kernel.body
        )
        return self.proc(replace(kernel, body=body, origins=self._origins(kernel.origins)))

    def _origins(self, own: tuple[Origin, ...]) -> tuple[Origin, ...]:
        return tuple(dict.fromkeys((*self.twin.origins, *own)))

    def expr(self, expr: Expr) -> Expr:
        expr = super().expr(expr)
        if isinstance(expr, Load) and expr.buffer is self.twin.buffer:
            return replace(self.twin.cast, arg=Load(self.twin.master, expr.indices))
        return expr
