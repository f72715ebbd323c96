"""Packing: an operand of a contraction copied into panels in the order in which a register tile reads it.

In: the operand, the tiled iterator and the tile's size. Out: a scratch buffer in panel layout, the block that fills it,
and the load that stands for the operand. The copy also widens, transposes and applies what the operand's expression
holds, once per value and not once per use.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from stagedtensor.codegen.affine import add, as_index, constant, minimum, multiply
from stagedtensor.codegen.loop_ir import (
    Block,
    BlockIterator,
    Buffer,
    Cast,
    Expr,
    Layout,
    Load,
    Reorder,
    Split,
    Store,
    Symbol,
    Var,
)
from stagedtensor.codegen.rewrite import substitute, symbols_of
from stagedtensor.codegen.schedule.analysis import depends, stride
from stagedtensor.codegen.schedule.nest import index_symbol, loads_in
from stagedtensor.codegen.schedule.transpose import Transposing


@dataclass(frozen=True)
class Packed:
    """The panels, the block that writes them, the same as a transposing copy if it is one, and the operand's new form."""

    buffer: Buffer
    block: Block
    turned: Transposing | None
    operand: Load


def panel_axes(block: Block, operand: Expr, tiled: BlockIterator) -> tuple[BlockIterator, ...] | None:
    """Return the iterators of the panels besides the tiled one: data first, then reduce; None if one has no fixed size."""
    axes = [item for item in block.iterators if item is not tiled and depends(operand, item)]
    if constant(tiled.extent) is None:
        return None
    return (*(item for item in axes if item.kind == "data"), *(item for item in axes if item.kind == "reduce"))


def pack(block: Block, operand: Expr, tiled: BlockIterator, size: int, axes: tuple[BlockIterator, ...]) -> Packed:
    """Return ``operand`` packed in panels of ``size`` values of ``tiled``.

    Logically the scratch is ``[*axes, tiled]``; in memory ``[*data axes, tiled // size, *reduce axes, tiled % size]``.
    """
    extents = [item.bound for item in axes]
    extent = int(constant(tiled.extent) or 0)
    data = sum(item.kind == "data" for item in axes)
    rank = len(axes)
    order = (*range(data), rank, *range(data, rank), rank + 1)
    layout = Layout((Split(rank, size), Reorder(order)))
    label = loads_in(operand)[0].buffer.name if loads_in(operand) else "operand"
    buffer = Buffer(f"{label.replace('.', '_')}_panels", operand.type, (*extents, extent), layout=layout)
    fresh_axes = {item.symbol: index_symbol(item.symbol.hint) for item in axes}
    panel, within = index_symbol("i_panel"), index_symbol(tiled.symbol.hint)
    panels = -(-extent // size)
    position = add(multiply(Var(panel), size), Var(within))
    # Beyond the end a panel repeats the last value: any number will do there, but one must be there.
    source = minimum(position, extent - 1) if extent % size else position
    mapping: dict[Symbol, Expr] = {old: Var(new) for old, new in fresh_axes.items()}
    mapping[tiled.symbol] = source
    iterators = [replace(item, symbol=fresh_axes[item.symbol], kind="data") for item in axes]
    iterators[data:data] = [BlockIterator(panel, as_index(panels), panels)]
    last = axes[-1] if axes else None
    if last is not None and last.kind == "reduce" and size < _NARROW_PANEL and _in_blocks(last):
        # Narrow panels take part of each line: a block of lines stays in the cache while all panels take their parts.
        outer, inner = index_symbol(f"{last.symbol.hint}_block"), fresh_axes[last.symbol]
        iterators[-1:] = [_fixed(inner, _LINES)]
        iterators[data:data] = [_fixed(outer, last.bound // _LINES)]
        mapping[last.symbol] = add(multiply(Var(outer), _LINES), Var(inner))
    iterators.append(_fixed(within, size))
    cell = (*(mapping[item.symbol] for item in axes), position)
    filling = Block(
        name=buffer.name,
        iterators=tuple(iterators),
        stores=(Store(buffer, cell, substitute(operand, mapping)),),
        origins=block.origins,
        composite=block.composite,
    )
    turned = _turned(buffer, operand, tiled, axes, panels * size)
    return Packed(buffer, filling, turned, Load(buffer, (*(Var(item.symbol) for item in axes), Var(tiled.symbol))))


def relaid(block: Block, operand: Expr, tiled: BlockIterator) -> Packed | None:
    """Return a copy of the one buffer that ``operand`` loads, as f32, with the axis that ``tiled`` walks innermost.

    Panels of an operand that is read through windows would hold each cell once per window; this copy keeps the buffer's
    own axes. None where ``operand`` is no load that ``tiled`` moves along one axis by one.
    """
    loads = loads_in(operand)
    if (
        len(loads) != 1
        or not isinstance(operand, Load | Cast)
        or (isinstance(operand, Cast) and operand.arg is not loads[0])
    ):
        return None
    (load,) = loads
    along = [at for at, part in enumerate(load.indices) if tiled.symbol in symbols_of(part)]
    if len(along) != 1 or load.indices[along[0]] != Var(tiled.symbol) or load.buffer.shape[along[0]] != tiled.bound:
        return None
    axes = [BlockIterator(index_symbol("i_cell"), as_index(extent), extent, "reduce") for extent in load.buffer.shape]
    cell: Expr = Load(load.buffer, tuple(Var(item.symbol) for item in axes))
    if isinstance(operand, Cast):
        cell = replace(operand, arg=cell)
    others = [at for at in range(len(axes)) if at != along[0]]
    packed = pack(block, cell, axes[along[0]], tiled.bound, tuple(axes[at] for at in others))
    return replace(packed, operand=Load(packed.buffer, (*(load.indices[at] for at in others), Var(tiled.symbol))))


_NARROW_PANEL = 16
_LINES = 16


def _in_blocks(iterator: BlockIterator) -> bool:
    extent = constant(iterator.extent)
    return extent is not None and extent >= 4 * _LINES and extent % _LINES == 0


def _turned(
    buffer: Buffer, operand: Expr, tiled: BlockIterator, axes: tuple[BlockIterator, ...], rows: int
) -> Transposing | None:
    """The pack as a transposing copy, where the operand lies along its last reduce axis and not along the tiled one."""
    last = axes[-1] if axes else None
    loads = loads_in(operand)
    if last is None or last.kind != "reduce" or constant(last.extent) is None:
        return None
    steps = [stride(load, last.symbol) for load in loads]
    if not any(stride(load, tiled.symbol) not in (0, 1) for load in loads) or any(step not in (0, 1) for step in steps):
        return None
    outer = {item.symbol: index_symbol(item.symbol.hint) for item in axes[:-1]}
    extent = tiled.bound

    def cell(column: Expr, row: Expr) -> tuple[Expr, ...]:
        return (*(Var(symbol) for symbol in outer.values()), column, row)

    def value(column: Expr, row: Expr) -> Expr:
        mapping: dict[Symbol, Expr] = {old: Var(new) for old, new in outer.items()}
        mapping[last.symbol] = column
        mapping[tiled.symbol] = minimum(row, extent - 1) if rows != extent else row
        return substitute(operand, mapping)

    kept = tuple(replace(item, symbol=outer[item.symbol], kind="data") for item in axes[:-1])
    return Transposing(buffer, kept, rows, last.bound, cell, value)


def _fixed(symbol: Symbol, extent: int) -> BlockIterator:
    return BlockIterator(symbol, as_index(extent), extent)
