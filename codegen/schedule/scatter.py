"""Template for blocks whose stores hit cells that data or reduce iterators choose: points in order.

In: a scatter block. Out: its loops. An iterator that by itself is one axis of every store owns the cells of its index,
so it may go outermost, to the threads, or innermost, to vectors; all other iterators keep their order, which fixes the
order of sums in each cell.
"""

from __future__ import annotations

from collections.abc import Sequence

from stagedtensor.codegen.affine import constant, flat_index
from stagedtensor.codegen.loop_ir import Block, BlockIterator, LoopKind, Stmt, Symbol, Var
from stagedtensor.codegen.rewrite import symbols_of
from stagedtensor.codegen.schedule.nest import expressions, loads_in, nest, point, stores


def scatter(block: Block, *, parallel: bool) -> tuple[tuple[Stmt, ...], str]:
    """Return the statements of ``block`` and a few words on the choice."""
    work = point(block, {})
    body = work.wrap(stores(block, work.mapping))
    independent = [item for item in block.iterators if owns_cells(block, item)]
    kinds: dict[Symbol, LoopKind] = {}
    order: list[BlockIterator] = [item for item in block.iterators if item not in independent]
    inner = [item for item in independent if _is_unit(block, item)]
    outer = [item for item in independent if item not in inner]
    for item in inner:
        kinds[item.symbol] = "vector"
    if parallel and outer:
        kinds[outer[0].symbol] = "parallel"
    elif parallel and inner and (constant(inner[0].extent) or 0) >= 64:
        # Each thread walks all points for its own part of the row.
        kinds[inner[0].symbol] = "parallel"
        outer, inner = inner[:1], inner[1:]
    iterators: Sequence[BlockIterator] = [*outer, *order, *inner]
    owned = ", ".join(item.symbol.hint for item in independent) or "none"
    return nest(iterators, body, kinds), f"scatter, points in order, independent axes: {owned}"


def owns_cells(block: Block, iterator: BlockIterator) -> bool:
    """Tell whether different values of the iterator always store to different cells, and read only their own."""
    axes: set[tuple[int, int]] = set()
    for place, store in enumerate(block.stores):
        found = [axis for axis, part in enumerate(store.indices) if iterator.symbol in symbols_of(part)]
        if len(found) != 1:
            return False
        part = store.indices[found[0]]
        if not (isinstance(part, Var) and part.symbol is iterator.symbol):
            return False
        axes.add((place, found[0]))
    return _reads_own(block, iterator, dict(axes))


def _reads_own(block: Block, iterator: BlockIterator, axis_of: dict[int, int]) -> bool:
    """What the block reads of its targets must be at the iterator's own index too."""
    targets = {store.buffer: axis_of[place] for place, store in enumerate(block.stores)}
    for load in loads_in(*expressions(block)):
        axis = targets.get(load.buffer)
        if axis is None:
            continue
        part = load.indices[axis]
        if not (isinstance(part, Var) and part.symbol is iterator.symbol):
            return False
    return True


def _is_unit(block: Block, iterator: BlockIterator) -> bool:
    return all(flat_index(store.buffer, store.indices).coefficient(iterator.symbol) == 1 for store in block.stores)
