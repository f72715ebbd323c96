"""Template for blocks without reduction: one flat loop where every access allows it, else a nest in memory order.

In: a block with data iterators only. Out: its loops. The innermost loop is for the compiler's vectoriser, the outermost
is dealt out to threads where the work is worth it. Every point is computed alone, so any order gives the same bits.
"""

from __future__ import annotations

from stagedtensor.codegen.loop_ir import Block, LoopKind, Stmt, Symbol
from stagedtensor.codegen.schedule.nest import collapse, nest, point, stores


def elementwise(block: Block, *, parallel: bool, keep_nest: bool = False) -> tuple[tuple[Stmt, ...], str]:
    """Return the statements of ``block`` and a few words on the choice; ``keep_nest`` merges no loops."""
    block = block if keep_nest else collapse(block)
    work = point(block, {})
    body = work.wrap(stores(block, work.mapping))
    if not block.iterators:
        return body, "one point"
    kinds: dict[Symbol, LoopKind] = {item.symbol: "serial" for item in block.iterators}
    kinds[block.iterators[-1].symbol] = "vector"
    iterators = list(block.iterators)
    if parallel:
        # The first loop long enough to be cut; it goes outermost, the others keep memory order.
        outer = next((item for item in iterators if item.bound >= 4), max(iterators, key=lambda item: item.bound))
        iterators.remove(outer)
        iterators.insert(0, outer)
        kinds[outer.symbol] = "parallel"
    shape = "flat" if len(iterators) == 1 else f"nest of {len(iterators)}"
    return nest(iterators, body, kinds), f"elementwise, {shape} loop" if shape == "flat" else f"elementwise, {shape}"
