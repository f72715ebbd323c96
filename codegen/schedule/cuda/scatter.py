"""CUDA template for blocks whose stores hit cells that data or reduce iterators choose: no atomics, points in order.

In: a scatter block. Out: its loops. Iterators that by themselves are one axis of every store own the cells of their
index: threads share those out, and each walks all other iterators in their order, which fixes the order of sums in each
cell.
"""

from __future__ import annotations

from stagedtensor.codegen.loop_ir import Block, Stmt
from stagedtensor.codegen.schedule.cuda.elementwise import over_points
from stagedtensor.codegen.schedule.cuda.launch import Launch
from stagedtensor.codegen.schedule.nest import nest, point, stores
from stagedtensor.codegen.schedule.scatter import owns_cells


def scatter(block: Block) -> tuple[tuple[Stmt, ...], Launch, str]:
    """Return the statements of ``block``, their launch and a few words on the choice."""
    work = point(block, {})
    body = work.wrap(stores(block, work.mapping))
    independent = [item for item in block.iterators if owns_cells(block, item)]
    ordered = [item for item in block.iterators if item not in independent]
    nested, _, launch = over_points(independent, nest(ordered, body, {}))
    owned = ", ".join(item.symbol.hint for item in independent) or "none"
    return nested, launch, f"scatter, points in order, one thread per cell of independent axes: {owned}"
