"""Reductions with few results and many points: cut into blocks whose partial states meet in block order.

In: a block with combinable accumulators. Out: two blocks: one computes the states of P parts into scratch buffers, one
merges them and stores. P depends on the shape alone, so threads may take parts in any number and the sums stay the
same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from stagedtensor.codegen.affine import add, as_index, constant, multiply
from stagedtensor.codegen.loop_ir import Accumulator, Block, BlockIterator, Buffer, Expr, Load, Store, Symbol, Var
from stagedtensor.codegen.rewrite import substitute
from stagedtensor.codegen.schedule.analysis import points
from stagedtensor.codegen.schedule.machine import Machine
from stagedtensor.codegen.schedule.nest import collapse, combined, fresh, index_symbol, rename


@dataclass(frozen=True)
class Split:
    """The parts of equal length, what is left over (one more part, on its own), the merge, and the scratch between."""

    partial: Block
    rest: Block | None
    merge: Block
    scratch: tuple[Buffer, ...]
    parts: int


def combinable(block: Block) -> bool:
    """Tell whether every accumulator of ``block`` may be split into partial states."""
    return all(
        item.neutral is not None and (item.combine != "" or item.paired_with is not None) for item in block.accumulators
    )


def split(block: Block, machine: Machine, lanes: int) -> Split | None:
    """Cut the outermost reduce iterator of ``block``, or return None where that does not pay."""
    block = collapse(block)
    if not block.reduce or block.scatter or not combinable(block):
        return None
    results = points(block.data)
    total = points(block.reduce) * max(1, results)
    if total < machine.split_points or results > machine.few_results:
        return None
    outer = block.reduce[0]
    extent = constant(outer.extent)
    if extent is None or extent < 2:
        return None
    wanted = min(machine.most_blocks, max(2, total // machine.block_points), extent)
    length = extent // wanted
    if len(block.reduce) == 1 and length > lanes:
        length = length // lanes * lanes  # whole lanes in every part but the last
    return _split(block, outer, length, extent // length, extent % length)


def _split(block: Block, outer: BlockIterator, length: int, parts: int, rest: int) -> Split:
    states = parts + (rest > 0)
    shape = (states, *(item.bound for item in block.data))
    scratch = {
        item.symbol: Buffer(f"{_label(block)}_{item.symbol.hint}_parts", item.symbol.type, shape)
        for item in block.accumulators
    }
    part = BlockIterator(index_symbol("i_part"), as_index(parts), parts)
    partial = _part(block, outer, scratch, (part,), Var(part.symbol), length, multiply(Var(part.symbol), length))
    left = _part(block, outer, scratch, (), as_index(parts), rest, as_index(parts * length)) if rest else None
    return Split(partial, left, merge(block, scratch, states), tuple(scratch.values()), states)


def _part(
    block: Block,
    outer: BlockIterator,
    scratch: dict[Symbol, Buffer],
    leading: tuple[BlockIterator, ...],
    place: Expr,
    length: int,
    start: Expr,
) -> Block:
    """The block over ``length`` steps of ``outer`` from ``start``, storing its states at ``place`` of the scratch."""
    within = BlockIterator(index_symbol(outer.symbol.hint), as_index(length), length, "reduce")
    data = {item.symbol: index_symbol(item.symbol.hint) for item in block.data}
    inner = {item.symbol: index_symbol(item.symbol.hint) for item in block.reduce[1:]}
    mapping: dict[Symbol, Expr] = {old: Var(new) for old, new in (*data.items(), *inner.items())}
    mapping[outer.symbol] = add(start, Var(within.symbol))
    states = {item.symbol: fresh(item.symbol) for item in block.accumulators}
    mapping.update({old: Var(new) for old, new in states.items()})
    cell = (place, *(Var(data[item.symbol]) for item in block.data))
    return replace(
        rename(replace(block, stores=()), mapping),
        name=f"{block.name}_parts",
        iterators=(
            *leading,
            *(replace(item, symbol=data[item.symbol]) for item in block.data),
            within,
            *(replace(item, symbol=inner[item.symbol]) for item in block.reduce[1:]),
        ),
        accumulators=tuple(_from_neutral(item, states, mapping) for item in block.accumulators),
        stores=tuple(Store(scratch[item.symbol], cell, Var(states[item.symbol])) for item in block.accumulators),
    )


def _label(block: Block) -> str:
    return (block.stores[0].buffer.name if block.stores else block.name).replace(".", "_")


def _from_neutral(item: Accumulator, states: dict[Symbol, Symbol], mapping: dict[Symbol, Expr]) -> Accumulator:
    assert item.neutral is not None
    return replace(
        item,
        symbol=states[item.symbol],
        init=item.neutral,
        update=substitute(item.update, mapping),
        paired_with=None if item.paired_with is None else states[item.paired_with],
    )


def merge(block: Block, scratch: dict[Symbol, Buffer], parts: int) -> Block:
    """Return the block that starts from ``block``'s initial states, merges ``parts`` states in order, and stores."""
    part = index_symbol("i_part")
    cell = (Var(part), *(Var(item.symbol) for item in block.data))
    mine: dict[Symbol, Expr] = {item.symbol: Var(item.symbol) for item in block.accumulators}
    other: dict[Symbol, Expr] = {symbol: Load(buffer, cell) for symbol, buffer in scratch.items()}
    merged = combined(block.accumulators, mine, other)
    return replace(
        block,
        iterators=(*block.data, BlockIterator(part, as_index(parts), parts, "reduce")),
        # Parts merge in their order: a merged state must not be cut again.
        accumulators=tuple(replace(item, update=merged[item.symbol], combine="") for item in block.accumulators),
        lets=(),
        guard=None,
    )
