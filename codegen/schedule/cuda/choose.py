"""Which CUDA template a block gets, and why: shapes and strides only, so that the source depends on nothing else.

In: one block. Out: its launches in order. Nothing here measures.
"""

from __future__ import annotations

from dataclasses import replace

from stagedtensor.codegen.affine import flat_index
from stagedtensor.codegen.loop_ir import Block, BlockIterator
from stagedtensor.codegen.schedule.analysis import contraction, cost_of, stride, without_single_lets
from stagedtensor.codegen.schedule.cuda.depth import deep
from stagedtensor.codegen.schedule.cuda.elementwise import elementwise, serial
from stagedtensor.codegen.schedule.cuda.formats import for_tensor_cores
from stagedtensor.codegen.schedule.cuda.launch import CudaNest, points_of
from stagedtensor.codegen.schedule.cuda.mma import mma, mma_shape
from stagedtensor.codegen.schedule.cuda.notes import Note
from stagedtensor.codegen.schedule.cuda.operands import LEAST_SIDE, Product, collapsed, product, tiles
from stagedtensor.codegen.schedule.cuda.rows import rows
from stagedtensor.codegen.schedule.cuda.scatter import scatter
from stagedtensor.codegen.schedule.cuda.tile import tile, tile_shape
from stagedtensor.codegen.schedule.machine import Machine
from stagedtensor.codegen.schedule.nest import collapse, expressions, loads_in
from stagedtensor.codegen.schedule.split import Split, combinable, split
from stagedtensor.numerics import Numerics

_SPLIT = Machine(
    vector_bytes=16, registers=64, split_points=16_384, block_points=4_096, most_blocks=256, few_results=128
)
"""When a reduction with few results is cut in two passes: blocks enough for a device, each with work for its threads.
"""
_FEW_RESULTS = 4096
_SHORT = 32


def plan_block(block: Block, numerics: Numerics, wanted: Note | None = None) -> tuple[CudaNest, ...]:
    """Return the launches that compute ``block``; ``wanted`` is to be noted by a product with :func:`result_tiles`."""
    block = without_single_lets(block)
    cost = cost_of(block)
    if block.scatter:
        body, launch, path = scatter(block)
        return (CudaNest("", body, launch, path, cost),)
    if not block.accumulators:
        body, launch, path = elementwise(block)
        return (CudaNest("", body, launch, path, cost),)
    found = contraction(block)
    if found is None:
        return _reduction(block)
    given = product(collapsed(found))
    if given is None or min(given.sizes) < LEAST_SIDE:
        why = "no matrix product" if given is None else f"fewer than {LEAST_SIDE} rows, columns or points of depth"
        return tuple(replace(nest, path=f"{nest.path}; no mma: {why}") for nest in _reduction(block))
    return _product(block, replace(given, note=wanted), numerics)


def result_tiles(block: Block, numerics: Numerics) -> int | None:
    """Return into how many tiles the results of ``block`` are cut; None for no product, or one in several passes."""
    block = without_single_lets(block)
    found = contraction(block)
    given = None if found is None else product(collapsed(found))
    if given is None or min(given.sizes) < LEAST_SIDE or deep(block, given) is not None:
        return None
    chosen = for_tensor_cores(given, numerics)
    shape = tile_shape(given) if isinstance(chosen, str) else mma_shape(chosen[0])
    return tiles(given, shape.rows, shape.columns).count


def _product(block: Block, given: Product, numerics: Numerics) -> tuple[CudaNest, ...]:
    chosen = for_tensor_cores(given, numerics)
    cut = deep(block, given)
    if cut is None:
        body, launch, path = tile(given, chosen) if isinstance(chosen, str) else mma(*chosen)
        return (CudaNest("", body, launch, path, cost_of(block)),)
    parts = [*plan_block(cut.partial, numerics), *(() if cut.rest is None else plan_block(cut.rest, numerics))]
    names = ("_parts", "_rest")
    nests = [replace(nest, suffix=f"{name}{nest.suffix}") for name, nest in zip(names, parts, strict=False)]
    words = f"{nests[0].path}, depth in {cut.parts} parts for want of tiles"
    return (replace(nests[0], scratch=cut.scratch, path=words), *nests[1:], _suffixed(cut.merge, "_merge"))


def several_parts(block: Block) -> Split | None:
    """Return a reduction in two passes, where it has few results and is long enough for that."""
    return split(block, _SPLIT, 32)


def _reduction(block: Block) -> tuple[CudaNest, ...]:
    cut = several_parts(block)
    if cut is None:
        return (whole(block),)
    nests = [_suffixed(cut.partial, "_parts")]
    nests[0] = replace(nests[0], scratch=cut.scratch, path=f"{nests[0].path}, {cut.parts} parts")
    if cut.rest is not None:
        nests.append(_suffixed(cut.rest, "_rest"))
    nests.append(_suffixed(cut.merge, "_merge"))
    return tuple(nests)


def by_rows(block: Block) -> bool:
    """Tell whether ``block`` gets the template of rows, whole: no product with tiles, not cut in two passes."""
    block = without_single_lets(block)
    found = contraction(block)
    if found is not None:
        given = product(collapsed(found))
        if given is not None and min(given.sizes) >= LEAST_SIDE:
            return False
    return not block.scatter and several_parts(block) is None and _along_rows(block, few=False)


def _along_rows(block: Block, *, few: bool = True) -> bool:
    """Tell whether threads share each result: they read along memory, or there are ``few`` results."""
    flat = collapse(block)
    long = points_of(flat.reduce) >= _SHORT
    if not combinable(block) or not flat.reduce or not long or not all(item.bound for item in flat.iterators):
        return False
    along_memory = _follows(flat, flat.reduce[-1]) and not (flat.data and _stored_along(flat))
    return along_memory or (few and points_of(flat.data) < _FEW_RESULTS)


def _suffixed(block: Block, suffix: str) -> CudaNest:
    return replace(whole(block), suffix=suffix)


def whole(block: Block) -> CudaNest:
    """Return the launch of a reduction that is not cut."""
    cost = cost_of(block)
    body, launch, path = rows(block) if _along_rows(block) else serial(block)
    return CudaNest("", body, launch, path, cost)


def _follows(block: Block, iterator: BlockIterator) -> bool:
    """Tell whether some operand's neighbouring cells follow ``iterator``."""
    return any(stride(load, iterator.symbol) == 1 for load in loads_in(*expressions(block)))


def _stored_along(block: Block) -> bool:
    """Tell whether both results and operands follow the last data iterator, as in a sum down columns."""
    last = block.data[-1].symbol
    stored = all(flat_index(item.buffer, item.indices).coefficient(last) == 1 for item in block.stores)
    loads = [stride(load, last) for load in loads_in(*expressions(block))]
    return stored and all(step in (0, 1) for step in loads) and 1 in loads
