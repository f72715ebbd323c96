"""Narrow twins that are never stored: each reader narrows the master itself, while it copies it into panels.

In: a module of blocks. Out: the same values, bit for bit. A twin is a temporary whose cells are a wider buffer's, rounded::

    twin[i, k] = bf16(w[i, k])                                ->     (gone)
    y[b, i] = sum over k: f32(twin[i, k]) * x[b, k]                  ... f32(bf16(w[i, k])) * x[b, k]

A contraction that uses every value often copies the operand anyway, so rounding there costs one pass less over memory. A twin
stays where a reader would round its cells many times, and where the master changes before its last reader.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from stagedtensor.codegen.loop_ir import Block, Buffer, Cast, Expr, Load, Module, Origin, Proc, Stmt, Var, children
from stagedtensor.codegen.passes.place import Decision, Mode
from stagedtensor.codegen.pieces import remembered
from stagedtensor.codegen.rewrite import Rewriter, buffers_read, buffers_written
from stagedtensor.codegen.schedule.analysis import contraction, depends, points
from stagedtensor.codegen.schedule.nest import collapse, expressions, loads_in

_USES_THAT_REPAY = 16
"""Uses of each value from which a contraction copies its operand."""
_READS_ALLOWED = 4
"""Reads per cell by blocks that copy nothing."""


@dataclass(frozen=True)
class _Twin:
    """A twin, its master, the rounding in between, and the kernel that makes it."""

    buffer: Buffer
    master: Buffer
    cast: Cast
    maker: Proc
    origins: tuple[Origin, ...]


def narrow_in_place(module: Module) -> Module:
    """Return ``module`` without the twins that their readers can round themselves."""
    kernels = list(module.kernels)
    gone: list[_Twin] = []
    for kernel in module.kernels:
        twin = _twin(kernel, module)
        order = None if twin is None else _with_readers_first(kernels, twin)
        if twin is None or order is None:
            continue
        gone.append(twin)
        work = _Rounding(twin)
        kernels = [work.reader(item) for item in order if item is not kernel]
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


def _twin(kernel: Proc, module: Module) -> _Twin | None:
    if len(kernel.body) != 1 or not isinstance(kernel.body[0], Block):
        return None
    block = kernel.body[0]
    if len(block.stores) != 1 or block.lets or block.guard is not None or block.accumulators or block.scatter:
        return None
    (store,) = block.stores
    value, cell = store.value, tuple(Var(item.symbol) for item in block.iterators)
    if store.buffer not in module.temporaries or store.indices != cell or not store.buffer.type.is_narrow:
        return None
    if not isinstance(value, Cast) or not isinstance(value.arg, Load) or value.arg.indices != cell:
        return None
    master = value.arg.buffer
    if master.type.is_narrow or not master.type.is_float or master.shape != store.buffer.shape:
        return None
    return _Twin(store.buffer, master, value, kernel, tuple(dict.fromkeys((*kernel.origins, *block.origins))))


def _with_readers_first(kernels: list[Proc], twin: _Twin) -> list[Proc] | None:
    """Return the kernels with the twin's readers in front of whatever changes the master; None where it cannot go."""
    start = kernels.index(twin.maker)
    touching = [item for item in kernels if item is not twin.maker and twin.buffer in (*_reads(item), *_writes(item))]
    readers = [item for item in kernels[start + 1 :] if twin.buffer in _reads(item)]
    if not readers or len(touching) != len(readers) or any(twin.buffer in _writes(item) for item in readers):
        return None
    if not all(_may_round(stmt, twin) for item in readers for stmt in item.body):
        return None
    order = list(kernels)
    for reader in readers:
        changing = next((at for at in range(start, len(order)) if twin.master in _writes(order[at])), len(order))
        at = order.index(reader)
        if at < changing:
            continue
        reads, writes = _reads(reader), _writes(reader)
        for between in order[changing:at]:
            if writes & (_reads(between) | _writes(between)) or reads & _writes(between):
                return None
        order.insert(changing, order.pop(at))
    return order


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
            replace(stmt, origins=self._origins(stmt.origins)) if isinstance(stmt, Block) else stmt for stmt in kernel.body
        )
        return self.proc(replace(kernel, body=body, origins=self._origins(kernel.origins)))

    def _origins(self, own: tuple[Origin, ...]) -> tuple[Origin, ...]:
        return tuple(dict.fromkeys((*self.twin.origins, *own)))

    def expr(self, expr: Expr) -> Expr:
        expr = super().expr(expr)
        if isinstance(expr, Load) and expr.buffer is self.twin.buffer:
            return replace(self.twin.cast, arg=Load(self.twin.master, expr.indices))
        return expr
