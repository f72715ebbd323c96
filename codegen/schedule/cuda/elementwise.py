"""CUDA template for blocks without reduction, and for those of one serial reduction per thread: points over the grid.

In: a block. Out: one grid-stride loop over the data points, 64-bit indices, neighbouring threads at neighbouring cells.
Every point is computed by one thread, so no thread depends on another.
"""

from __future__ import annotations

from collections.abc import Sequence

from stagedtensor.codegen.loop_ir import (
    Accumulator,
    Assign,
    Block,
    BlockIterator,
    Declare,
    Expr,
    Let,
    Stmt,
    Symbol,
    Var,
)
from stagedtensor.codegen.rewrite import substitute
from stagedtensor.codegen.schedule.cuda.launch import THREADS, WARP, Launch, blocks_for, flatten, strided
from stagedtensor.codegen.schedule.cuda.vector import grouped
from stagedtensor.codegen.schedule.nest import collapse, fresh, nest, point, stores


def over_points(
    data: Sequence[BlockIterator], body: Sequence[Stmt]
) -> tuple[tuple[Stmt, ...], dict[Symbol, Expr], Launch]:
    """Return the loop over ``data`` around ``body``, which is written in the iterators' own symbols, and its launch."""
    if not data:
        return tuple(body), {}, Launch(1, 1)
    flat = flatten(data, "point")
    inner = substitute(tuple(body), flat.mapping)
    threads = min(THREADS, max(WARP, -(-flat.bound // WARP) * WARP))
    launch = Launch(blocks_for(flat.bound, threads), threads, {flat.symbol: "threads of the grid"})
    return (strided(flat, flat.wrap(inner)),), flat.mapping, launch


def elementwise(block: Block) -> tuple[tuple[Stmt, ...], Launch, str]:
    """Return the statements of a block without accumulators, their launch and a few words."""
    block = collapse(block)
    groups = grouped(block)
    if groups is not None:
        iterators, inner, words = groups
        body, _, launch = over_points(iterators, inner)
        return body, launch, words
    work = point(block, {})
    body, _, launch = over_points(block.iterators, work.wrap(stores(block, work.mapping)))
    return body, launch, "elementwise, one thread per point" if block.iterators else "one point"


def serial(block: Block) -> tuple[tuple[Stmt, ...], Launch, str]:
    """Return a reduction in the block's own order, one thread per data point."""
    block = collapse(block)
    names = {item.symbol: fresh(item.symbol) for item in block.accumulators}
    states: dict[Symbol, Expr] = {old: Var(new) for old, new in names.items()}
    work = point(block, states)
    updates = work.wrap(assignments(block.accumulators, names, work.mapping))
    body: list[Stmt] = [Declare(names[item.symbol], item.init) for item in block.accumulators]
    body += nest(block.reduce, updates, {})
    body += stores(block, states)
    nested, _, launch = over_points(block.data, body)
    return nested, launch, "reduction in order, one thread per result"


def assignments(
    accumulators: Sequence[Accumulator], names: dict[Symbol, Symbol], mapping: dict[Symbol, Expr]
) -> list[Stmt]:
    """New states, all from the old ones."""
    if len(accumulators) == 1:
        (item,) = accumulators
        return [Assign(names[item.symbol], substitute(item.update, mapping))]
    lets = [Let(fresh(item.symbol), substitute(item.update, mapping)) for item in accumulators]
    sets = [Assign(names[item.symbol], Var(let.symbol)) for item, let in zip(accumulators, lets, strict=True)]
    return [*lets, *sets]
