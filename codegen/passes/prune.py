"""Dead stores: what nobody reads before it is overwritten, and nobody outside may see, is not computed.

In: a module, one block per kernel. Out: the module without dead stores, without the lets and accumulators that only
served them, and without kernels that store nothing. External buffers are live at the end, temporaries are not.
"""

from __future__ import annotations

from stagedtensor.codegen import loop_ir as ir
from stagedtensor.codegen.effects import block_of, kernel_of, loads, loads_of, with_kernels
from stagedtensor.codegen.passes.dependence import covers
from stagedtensor.codegen.pieces import replace
from stagedtensor.codegen.rewrite import symbols_of
from stagedtensor.node import Placement


def prune(module: ir.Module) -> ir.Module:
    """Drop what is dead, from the last kernel to the first."""
    asked = (item for item in module.temporaries if item.node is not None)
    live = {*module.external, *(item for item in asked if item.node.placement is Placement.MATERIALIZED)}
    kept: list[ir.Proc] = []
    for kernel in reversed(module.kernels):
        block = _live_part(block_of(kernel), live)
        if block is None:
            continue
        live -= {store.buffer for store in block.stores if covers(block, store.buffer)}
        live |= {load.buffer for load in loads(block)}
        kept.append(kernel if block is block_of(kernel) else kernel_of(block))
    return with_kernels(module, reversed(kept))


def _live_part(block: ir.Block, live: set[ir.Buffer]) -> ir.Block | None:
    wanted = set(live)
    stores: list[ir.Store] = []
    for store in reversed(block.stores):
        if store.buffer in wanted:
            stores.append(store)
            # Later stores of one point see what the ones before wrote.
            wanted |= {load.buffer for expr in (*store.indices, store.value) for load in loads_of(expr)}
    if not stores:
        return None
    if len(stores) == len(block.stores):
        return block
    return without_unused(replace(block, stores=tuple(reversed(stores))))


def without_unused(block: ir.Block) -> ir.Block:
    """Drop the lets and accumulators that nothing kept needs."""
    needed: set[ir.Symbol] = set()

    def need(expr: ir.Expr) -> None:
        needed.update(symbols_of(expr))

    for store in block.stores:
        for expr in (*store.indices, store.value):
            need(expr)
    if block.guard is not None:
        need(block.guard)
    size = -1
    while size != len(needed):  # accumulators may read one another's old states, and lets read accumulators
        size = len(needed)
        for item in block.accumulators:
            if item.symbol in needed:
                need(item.init)
                need(item.update)
                if item.paired_with is not None:
                    needed.add(item.paired_with)
        for let in reversed(block.lets):
            if let.symbol in needed:
                need(let.value)
    return replace(
        block,
        lets=tuple(let for let in block.lets if let.symbol in needed),
        accumulators=tuple(item for item in block.accumulators if item.symbol in needed),
    )
