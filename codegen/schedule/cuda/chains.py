"""Reductions that follow one another into one cell: each leaves its part in a cell of its own, and one kernel merges
them.

In: the blocks of a module, in order, such as the tests of all gradients for infinities. Out: for the members of each
chain the blocks that stand in their place, and scratch memory. Parts then wait for nothing but their operands. Only
maxima and minima are taken apart so: they are the same in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from stagedtensor.codegen.affine import as_index
from stagedtensor.codegen.loop_ir import Apply, Block, BlockIterator, Buffer, Expr, Let, Load, Store, Var
from stagedtensor.codegen.rewrite import buffers_read, buffers_written
from stagedtensor.codegen.schedule.nest import combined, fresh, index_symbol
from stagedtensor.codegen.schedule.split import Split, combinable
from stagedtensor.precision import i64

_MOST = 128
"""Members of a chain: the merge has a pointer to the part of each."""

Cut = Callable[[Block], Split | None]
Elsewhere = Callable[[int], Buffer | None]


@dataclass
class Chains:
    """``blocks`` of a member's place are scheduled whole instead of it; ``scratch`` is what they write and read."""

    blocks: dict[int, tuple[Block, ...]] = field(default_factory=dict)
    scratch: list[Buffer] = field(default_factory=list)


def chains(blocks: Sequence[Block], cut: Cut, elsewhere: Elsewhere) -> Chains:
    """Find the chains of ``blocks``; ``cut`` splits a reduction that is long enough for several parts.

    ``elsewhere`` tells where the parts of a member are if some other kernel computes them.
    """
    found = Chains()
    for places in _chains(blocks):
        made = [elsewhere(place) for place in places]
        if len(places) > 1 or made[0] is not None:
            _taken_apart(found, places, [blocks[place] for place in places], made, cut)
    return found


def _chains(blocks: Sequence[Block]) -> list[list[int]]:
    """The places of reductions into one cell with nothing between them that touches it."""
    done: list[list[int]] = []
    opened: dict[Buffer, list[int]] = {}
    for place, block in enumerate(blocks):
        cell = _cell(block)
        for buffer in dict.fromkeys((*buffers_read((block,)), *buffers_written((block,)))):
            goes_on = buffer is cell and _goes_on(block, cell)
            if not goes_on and buffer in opened:
                done.append(opened.pop(buffer))
        if cell is not None:
            opened.setdefault(cell, []).append(place)
            if len(block.stores) > 1 or len(opened[cell]) == _MOST:
                done.append(opened.pop(cell))
    return [*done, *opened.values()]


def _cell(block: Block) -> Buffer | None:
    """The one cell that ``block`` reduces into with a maximum or minimum; None where it does something else."""
    if block.data or block.scatter or len(block.accumulators) != 1 or not block.reduce or not combinable(block):
        return None
    (item,) = block.accumulators
    first = block.stores[0]
    alone = isinstance(first.value, Var) and first.value.symbol is item.symbol and first.buffer.size == 1
    return first.buffer if alone and item.combine in ("max", "min") and item.paired_with is None else None


def _goes_on(block: Block, cell: Buffer) -> bool:
    """Whether the reduction starts from what the cell holds, which it reads for nothing else."""
    (item,) = block.accumulators
    if not isinstance(item.init, Load) or item.init.buffer is not cell:
        return False
    inner = replace(block, accumulators=(replace(item, init=item.neutral or item.init),), stores=())
    return cell not in buffers_read((inner,))


def _taken_apart(
    found: Chains, places: Sequence[int], members: Sequence[Block], made: Sequence[Buffer | None], cut: Cut
) -> None:
    parts: list[Buffer] = []
    for place, member, elsewhere in zip(places, members, made, strict=True):
        if elsewhere is not None:
            parts.append(elsewhere)
            found.blocks[place] = ()
            continue
        split = cut(replace(member, stores=member.stores[:1]))
        if split is None:
            (item,) = member.accumulators
            assert item.neutral is not None
            part = Buffer(f"{member.stores[0].buffer.name}_part", item.symbol.type, (1,))
            store = Store(part, (as_index(0),), Var(item.symbol))
            parts.append(part)
            found.blocks[place] = (replace(member, accumulators=(replace(item, init=item.neutral),), stores=(store,)),)
            continue
        parts += split.scratch
        found.blocks[place] = (split.partial, *([] if split.rest is None else [split.rest]))
    found.scratch += parts
    found.blocks[places[-1]] += (_merged(members[0], members[-1], parts),)


def _merged(first: Block, last: Block, parts: Sequence[Buffer]) -> Block:
    """The reduction over all parts, from what the first member started from, with the stores of the last."""
    (item,), (start,) = last.accumulators, first.accumulators
    assert item.neutral is not None
    most = max(part.size for part in parts)
    place = index_symbol("i_part")
    lets: list[Let] = []
    for part in parts:
        cell: Expr = Load(part, (Var(place),))
        if part.size < most:
            cell = Apply(
                "where", (Apply("lt", (Var(place), as_index(part.size)), i64), cell, item.neutral), item.symbol.type
            )
        merged = (
            combined((item,), {item.symbol: Var(lets[-1].symbol)}, {item.symbol: cell})[item.symbol] if lets else cell
        )
        lets.append(Let(fresh(item.symbol), merged))
    update = combined((item,), {item.symbol: Var(item.symbol)}, {item.symbol: Var(lets[-1].symbol)})[item.symbol]
    return replace(
        last,
        name=f"{last.name}_merge",
        iterators=(BlockIterator(place, as_index(most), most, "reduce"),),
        accumulators=(replace(item, init=start.init, update=update),),
        lets=tuple(lets),
        guard=None,
    )


__all__ = ["Chains", "chains"]
