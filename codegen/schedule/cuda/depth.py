"""Products with few result tiles and a long depth: cut along the depth, so that more blocks of threads take part.

In: a block that is a product. Out: the product over parts of the depth, whose sums go to scratch memory in the
accumulation format, and the block that adds them up in order; None where that does not pay. The number of parts depends
on the shape alone and there are no atomics: every run gives the same bits.
"""

from __future__ import annotations

from stagedtensor.codegen.loop_ir import Block
from stagedtensor.codegen.schedule.cuda.launch import points_of
from stagedtensor.codegen.schedule.cuda.mma import ENOUGH_TILES
from stagedtensor.codegen.schedule.cuda.operands import Product
from stagedtensor.codegen.schedule.machine import Machine
from stagedtensor.codegen.schedule.split import Split, split

_TILE = 32
"""Rows and columns of the smallest tile."""
_PART = 256
"""Depth that is worth a block of threads and the memory for its sums."""
_WHOLE = 32
"""Depth of one step: parts are multiples of it."""


def deep(block: Block, given: Product) -> Split | None:
    """Cut ``block``, whose product is ``given``, or return None where its tiles keep a large device busy."""
    rows, columns, depth = given.sizes
    results = points_of(given.batch) * rows * columns
    tiles = points_of(given.batch) * -(-rows // _TILE) * -(-columns // _TILE)
    most = min(ENOUGH_TILES // tiles, depth // _PART)
    if most < 2:
        return None
    outer, *inner = (item.bound for item in block.reduce)
    even = (
        parts for parts in range(most, most // 2, -1) if outer % parts == 0 and (inner or outer // parts % _WHOLE == 0)
    )
    each = max(1, depth * results // max(2, next(even, most)))
    return split(
        block, Machine(16, 64, split_points=0, block_points=each, most_blocks=most, few_results=results), _WHOLE
    )
