"""A group of kernels as one: a parallel loop over the outer points, inside it the nests of its blocks on local slabs.

In: a :class:`~stagedtensor.codegen.schedule.slab.Group`. Out: one kernel::

    parallel for point of the outer axes:
        slab[q][k]                          one worker's
        the nest of each block, in order, as it would be by itself: same tiles, same order of sums, so same bits

Panels of packed operands are local too. Narrow operands of contractions are widened into local copies, a point at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from stagedtensor.codegen.affine import as_index, floor_divide, modulo
from stagedtensor.codegen.loop_ir import (
    Alloc,
    Block,
    BlockIterator,
    Buffer,
    Cast,
    Cost,
    Expr,
    For,
    Layout,
    Let,
    Load,
    Proc,
    Reorder,
    Stmt,
    Store,
    Symbol,
    Var,
)
from stagedtensor.codegen.passes.dependence import is_contraction
from stagedtensor.codegen.passes.hoist import hoisted
from stagedtensor.codegen.rewrite import Rewriter, buffers_read, buffers_written, map_expr, substitute, walk_stmts
from stagedtensor.codegen.schedule.analysis import cost_of, points, prune, without_trivial_loops
from stagedtensor.codegen.schedule.choose import Nest, plan_block
from stagedtensor.codegen.schedule.machine import Machine
from stagedtensor.codegen.schedule.nest import index_symbol
from stagedtensor.codegen.schedule.slab import Group
from stagedtensor.codegen.schedule.widened import narrow_load, with_cell
from stagedtensor.precision import Prec, f32

_NEVER = 1 << 62


def together(group: Group, machine: Machine) -> Proc | None:
    """Return the kernel of ``group``, None where a block would be computed in another order than by itself."""
    work = _Together(group, replace(machine, serial_flops=_NEVER, serial_bytes=_NEVER))
    body: list[Stmt] = []
    paths: list[str] = []
    for block, whole in work.blocks():
        nests = plan_block(block, work.machine)
        if whole is not None and whole.accumulators and _order(nests) != _order(plan_block(whole, machine)):
            return None
        body += work.local(nests)
        paths.append(_plain(nests[-1].path))
    costs = [cost_of(block) for block in group.blocks]
    cost = Cost(sum(item.flops for item in costs), sum(item.nbytes for item in costs) - _spared(group))
    parallel = cost.flops > machine.serial_flops or cost.nbytes > machine.serial_bytes
    statements = prune(without_trivial_loops(work.loop(body, parallel=parallel)))
    own = {stmt.buffer for stmt in walk_stmts(statements) if isinstance(stmt, Alloc)}
    params = dict.fromkeys((*buffers_read(statements), *buffers_written(statements)))
    count = points(tuple(BlockIterator(index_symbol(""), as_index(item), item) for item in group.extents))
    path = f"slabs, {count} points: {'; '.join(dict.fromkeys(paths))}"
    last = group.kernels[-1]
    return replace(
        last,
        params=tuple(buffer for buffer in params if buffer not in own),
        scalars=tuple(dict.fromkeys(symbol for kernel in group.kernels for symbol in kernel.scalars)),
        body=statements,
        origins=tuple(dict.fromkeys(item for kernel in group.kernels for item in kernel.origins)),
        path=f"{path}, {'static partition over threads' if parallel else 'one thread'}",
        cost=cost,
    )


def _plain(path: str) -> str:
    return path.removesuffix(", one thread")


def _spared(group: Group) -> int:
    """Bytes that the slabs do not move: each was written once and read by every block that reads it."""
    moved = 0
    for slab in group.slabs:
        uses = sum(slab in buffers_read(block) for block in group.blocks)
        moved += slab.nbytes * (1 + uses)
    return moved


@dataclass
class _Together:
    group: Group
    machine: Machine
    allocations: list[Alloc] = field(default_factory=list)
    locals: dict[Buffer, Buffer] = field(default_factory=dict)
    """What the nests are planned with, and the local array in its place."""

    def __post_init__(self) -> None:
        inner = len(self.group.extents)
        self.outer = tuple(Symbol(symbol.hint, symbol.type) for symbol in self.group.outer[0])
        self.slabs = {slab: self._planned(slab.name, slab.type, slab.shape[inner:]) for slab in self.group.slabs}
        self.wide: dict[tuple[Buffer, Prec, tuple[int, ...]], Buffer] = {}

    def _planned(self, name: str, prec: Prec, shape: tuple[int, ...]) -> Buffer:
        """A buffer of one point; schedules see it as any other."""
        return self._allocated(Buffer(name, prec, shape))

    def _allocated(self, planned: Buffer) -> Buffer:
        """Bring ``planned`` into being as a local array, all cells in a row; returns it."""
        in_a_row = planned.layout if planned.layout.steps else Layout((Reorder(tuple(range(len(planned.shape)))),))
        self.locals[planned] = replace(planned, space="local", layout=in_a_row)
        self.allocations.append(Alloc(self.locals[planned]))
        return planned

    def blocks(self) -> Iterator[tuple[Block, Block | None]]:
        """The blocks of one point with what they are parts of, each behind those that widen its operands."""
        for block, symbols in zip(self.group.blocks, self.group.outer, strict=True):
            at = {symbol: Var(new) for symbol, new in zip(symbols, self.outer, strict=True)}
            kept = tuple(item for item in block.iterators if item.symbol not in at)
            inner = substitute(replace(block, iterators=kept), at)
            inner = _Local(self.slabs, len(self.outer)).block(inner)
            if is_contraction(inner):
                widening: list[Block] = []
                widened = partial(self._widened, widening)
                inner = replace(
                    inner,
                    accumulators=tuple(
                        replace(item, update=map_expr(item.update, widened)) for item in inner.accumulators
                    ),
                )
                yield from ((item, None) for item in widening)
            yield inner, block

    def _widened(self, widening: list[Block], expr: Expr) -> Expr:
        load = narrow_load(expr)
        if load is None or load.buffer in self.slabs:
            return expr
        symbols = [part.symbol if isinstance(part, Var) else None for part in load.indices]
        outer = tuple(place for place, symbol in enumerate(symbols) if symbol in self.outer)
        if len(outer) != len(self.outer):
            return expr
        inner = [place for place in range(len(symbols)) if place not in outer]
        assert isinstance(expr, Cast)
        key = (load.buffer, expr.arg.type, outer)
        if key not in self.wide:
            shape = tuple(load.buffer.shape[place] for place in inner)
            name = f"{load.buffer.name.replace('.', '_')}_wide"
            self.wide[key] = self._planned(name, f32, shape)
            axes = tuple(BlockIterator(index_symbol("cell"), as_index(extent), extent) for extent in shape)
            cells = iter(axes)
            at = tuple(
                load.indices[place] if place in outer else Var(next(cells).symbol) for place in range(len(symbols))
            )
            value = with_cell(expr, at)
            cell = tuple(Var(item.symbol) for item in axes)
            widening.append(Block(name, axes, (Store(self.wide[key], cell, value),)))
        return Load(self.wide[key], tuple(load.indices[place] for place in inner))

    def local(self, nests: Iterable[Nest]) -> tuple[Stmt, ...]:
        """The statements of nests, their scratch local."""
        body: list[Stmt] = []
        for nest in nests:
            for buffer in nest.scratch:
                self._allocated(buffer)
            # here, where only what this nest writes can change: a later nest may write what this one reads
            body += hoisted(Proc(nest.suffix, (), without_trivial_loops(nest.body))).body
        return substitute(tuple(body), {}, self.locals)

    def loop(self, body: Iterable[Stmt], *, parallel: bool) -> tuple[Stmt, ...]:
        """The loop over the outer points."""
        total = 1
        for extent in self.group.extents:
            total *= extent
        hint = "_".join(dict.fromkeys(symbol.hint.removeprefix("i_") for symbol in self.outer))
        point = index_symbol(hint)
        lets: list[Stmt] = []
        rest: Expr = Var(point)
        below = total
        for symbol, extent in zip(self.outer, self.group.extents, strict=True):
            below //= extent
            here = floor_divide(rest, below) if below > 1 else rest
            lets.append(Let(symbol, modulo(here, extent) if below * extent < total else here))
        iterator = BlockIterator(point, as_index(total), total)
        return (For(iterator, (*lets, *self.allocations, *body), "parallel" if parallel else "serial"),)


def _order(nests: Sequence[Nest]) -> tuple[str, ...]:
    """The parts of paths that say in which order sums are taken."""
    parts = [part for nest in nests for part in nest.path.split(", ")]
    return tuple(part for part in parts if part.endswith((" lanes", " parts", " in order")) or "parts in order" in part)


class _Local(Rewriter):
    """Accesses of slabs lose the outer axes."""

    def __init__(self, slabs: dict[Buffer, Buffer], outer: int) -> None:
        self._slabs = slabs
        self._outer = outer

    def expr(self, expr: Expr) -> Expr:
        if isinstance(expr, Load) and expr.buffer in self._slabs:
            return Load(self._slabs[expr.buffer], self.exprs(expr.indices[self._outer :]))
        return super().expr(expr)

    def store(self, store: Store) -> Store:
        if store.buffer in self._slabs:
            indices = self.exprs(store.indices[self._outer :])
            return Store(self._slabs[store.buffer], indices, self.expr(store.value))
        return super().store(store)
