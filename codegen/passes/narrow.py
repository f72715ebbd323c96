"""Narrow storage for values that are only ever needed in a narrow format.

In: a module, one block per kernel. Out: the same values, bit for bit (those of a NaN aside), some in fewer bytes. An
f32 temporary is stored in the format to which its readers round it, where all of them do, or where its values are in
that format anyway. Rounding happens once, where the value is made, and the rounded copy is the value itself::

    g[i] = where(c[i], f32(h[i]), 0.0)        ->    g[i] = bf16(where(c[i], f32(h[i]), 0.0))     h is bf16, so is g
    n[i] = bf16(g[i])                               n[i] = g[i]
    s = sum over i: g[i]                            s = sum over i: f32(g[i])

Only whole temporaries with one definition qualify.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from stagedtensor.codegen import loop_ir as ir
from stagedtensor.codegen.effects import block_of, kernel_of, loads, with_kernels
from stagedtensor.codegen.passes.dependence import covers
from stagedtensor.codegen.passes.exact import exact_in
from stagedtensor.codegen.passes.simplify import simplify_block
from stagedtensor.codegen.rewrite import Rewriter
from stagedtensor.node import Node, Placement
from stagedtensor.precision import Prec, f32


def narrow(module: ir.Module) -> ir.Module:
    """Return ``module`` with such temporaries in their narrow formats, ``module`` itself where there are none."""
    if not any(buffer.type.is_narrow for buffer in (*module.temporaries, *module.external)):
        return module
    blocks = [block_of(kernel) for kernel in module.kernels]
    needed = _formats_needed(blocks, module)
    chosen: dict[ir.Buffer, ir.Buffer] = {}
    work = _Narrowing(chosen)
    for block in blocks:
        for store in block.stores:
            formats = needed.get(store.buffer, set())
            narrow_formats = [prec for prec in formats if prec is not None]
            if len(narrow_formats) != 1 or not covers(block, store.buffer):
                continue
            (prec,) = narrow_formats
            if None not in formats or exact_in(work.expr(store.value), prec):
                chosen[store.buffer] = replace(store.buffer, type=prec)
    if not chosen:
        return module
    touched = set(chosen)
    kernels = [
        kernel_of(simplify_block(work.block(block)))
        if touched & {*_written(block), *(load.buffer for load in loads(block))}
        else kernel
        for kernel, block in zip(module.kernels, blocks, strict=True)
    ]
    temporaries = tuple(chosen.get(buffer, buffer) for buffer in module.temporaries)
    return with_kernels(replace(module, temporaries=temporaries), kernels)


def _written(block: ir.Block) -> Iterator[ir.Buffer]:
    return (store.buffer for store in block.stores)


def _formats_needed(blocks: list[ir.Block], module: ir.Module) -> dict[ir.Buffer, set[Prec | None]]:
    """The formats that readers round each f32 temporary to, None for a reader that takes it as it is.

    Those that are left out are written in more than one place, or read before they are written.
    """
    needed: dict[ir.Buffer, set[Prec | None]] = {
        buffer: set() for buffer in module.temporaries if buffer.type is f32 and not _asked_for(buffer)
    }
    written: set[ir.Buffer] = set()
    for block in blocks:
        for load in loads(block):
            if load.buffer not in written:
                needed.pop(load.buffer, None)
        for expr in _expressions(block):
            for buffer, prec in _uses(expr, None):
                if buffer in needed:
                    needed[buffer].add(prec)
        for buffer in _written(block):
            if buffer in written:
                needed.pop(buffer, None)
            written.add(buffer)
    return needed


def _asked_for(buffer: ir.Buffer) -> bool:
    return isinstance(buffer.node, Node) and buffer.node.placement is not Placement.AUTO


def _expressions(block: ir.Block) -> Iterator[ir.Expr]:
    for let in block.lets:
        yield let.value
    if block.guard is not None:
        yield block.guard
    for item in block.accumulators:
        yield from (item.init, item.update)
        if item.neutral is not None:
            yield item.neutral
    for store in block.stores:
        yield from (*store.indices, store.value)


def _uses(expr: ir.Expr, rounding: Prec | None) -> Iterator[tuple[ir.Buffer, Prec | None]]:
    """Yield every buffer that ``expr`` reads, with the format to which the cell is rounded at once."""
    if isinstance(expr, ir.Load):
        yield expr.buffer, rounding
    plain = isinstance(expr, ir.Cast) and expr.type.is_narrow and not (expr.saturate or expr.flush)
    for part in ir.children(expr):
        yield from _uses(part, expr.type if plain and isinstance(part, ir.Load) else None)


class _Narrowing(Rewriter):
    """Stores into the chosen buffers round, reads of them widen."""

    def __init__(self, chosen: dict[ir.Buffer, ir.Buffer]) -> None:
        self.chosen = chosen

    def expr(self, expr: ir.Expr) -> ir.Expr:
        expr = super().expr(expr)
        if isinstance(expr, ir.Load) and expr.buffer in self.chosen:
            return ir.Cast(replace(expr, buffer=self.chosen[expr.buffer]), f32)
        return expr

    def store(self, store: ir.Store) -> ir.Store:
        new = super().store(store)
        buffer = self.chosen.get(store.buffer)
        return new if buffer is None else replace(new, buffer=buffer, value=ir.Cast(new.value, buffer.type))
