"""Fusion: kernels whose points belong together become one.

In: a module, one block per kernel. Out: fewer kernels; nothing is stored less (``prune`` does that afterwards). Three
forms, each only where every dependence joins equal points, and where the later block may hop up to the earlier one:

- *sweeps*: elementwise blocks of one domain that share a buffer. A read of what the earlier one wrote becomes a let;
- *epilogues*: an elementwise block over the data points of a reduction joins its stores, after the sum is rounded;
- *siblings*: reductions of one domain that read the same buffer run their accumulators side by side (not contractions).

What ``recompute`` put in front of late readers joins nothing further up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from stagedtensor.codegen import loop_ir as ir
from stagedtensor.codegen.effects import block_of, kernel_of, loads_of, with_kernels
from stagedtensor.codegen.passes.dependence import conflict, is_contraction, is_elementwise, same_cell
from stagedtensor.codegen.passes.place import Item, weigh
from stagedtensor.codegen.passes.simplify import simplify_block
from stagedtensor.codegen.pieces import replace
from stagedtensor.codegen.rewrite import Rewriter, fresh_copy, substitute
from stagedtensor.op_table import OPS

MAX_BUFFERS = 20
"""Buffers of one kernel: more streams than this cost more than a sweep saves."""
SMALL_VALUE = 4
"""Nodes of a stored value that an epilogue may repeat instead of reading the cell back."""
MAX_SPELT = 60
"""Nodes of a let that an epilogue may spell out in its stores."""
REACH = 64
"""How many kernels a block may hop over."""

Readers: TypeAlias = dict[ir.Buffer, list[Item]]


def fuse(module: ir.Module) -> ir.Module:
    """Fuse the kernels of the module greedily, each with the latest earlier one that takes it."""
    groups: list[Item] = []
    items = [Item.of(block_of(kernel)) for kernel in module.kernels]
    readers = _readers(module, items)
    for item in items:
        _add(groups, item, readers)
    return with_kernels(module, (kernel_of(item.block) for item in groups))


def _add(groups: list[Item], item: Item, readers: Readers) -> None:
    """Merge ``item`` into a group: up to its place, or, held back by something between, the group down to its end."""
    held_back = False
    for position in range(len(groups) - 1, max(-1, len(groups) - 1 - REACH), -1):
        group = groups[position]
        if item.block.late and not group.block.late:
            break  # a copy that is to be made here: up there is what it is a copy of
        sinks = held_back and not any(conflict(group.effects, later.effects) for later in groups[position + 1 :])
        if not held_back or sinks:
            merged = _merged(group, item, readers)
            if merged is not None:
                if held_back:
                    del groups[position]
                    groups.append(Item.of(merged))
                else:
                    groups[position] = Item.of(merged)
                return
        held_back = held_back or conflict(group.effects, item.effects)
    groups.append(item)


def _readers(module: ir.Module, items: list[Item]) -> Readers:
    """The kernels that read each temporary; external buffers are left out."""
    found: Readers = {buffer: [] for buffer in module.temporaries}
    for item in items:
        for buffer in item.effects.reads:
            if buffer in found:
                found[buffer].append(item)
    return found


# -- which and whether ---------------------------------------------------------------------------------------------


def _merged(first: Item, second: Item, readers: Readers) -> ir.Block | None:
    """Return both blocks as one, or None where they do not go together."""
    a, b = first.block, second.block
    if a.scatter or b.scatter or b.guard is not None:
        return None
    buffers = first.effects.read_set | first.effects.write_set | second.effects.read_set | second.effects.write_set
    if len(buffers) > MAX_BUFFERS:
        return None
    if is_elementwise(b):
        if not _same_extents(a.data, b.iterators):
            return None
        if is_elementwise(a):
            return _sweep(first, second) if _shares_cells(first, second) else None
        if not first.effects.write_set & second.effects.read_set or _belongs_to_a_sweep(first, second, readers):
            return None
        if b.late and is_contraction(a) and _calls(b):
            return None  # by itself it runs in vectors, whatever stands between
        return _epilogue(first, second, readers)
    if a.accumulators and a.guard is None and not first.effects.write_set & second.effects.read_set:
        return _siblings(first, second)
    return None


def _belongs_to_a_sweep(first: Item, second: Item, readers: Readers) -> bool:
    """Whether the later block computes something cheap for elementwise readers from cells that stay in memory anyway.

    In the reduction's stores it would need a buffer of its own; in the sweep of its readers it needs none.
    """
    (target, *others) = second.effects.writes
    own = readers.get(target)
    read = first.effects.write_set & second.effects.read_set
    if others or not own or target in read or not weigh(second.block).cheap:
        return False
    stays = all(len(readers.get(buffer, ())) != 1 for buffer in read)
    return stays and all(
        is_elementwise(item.block) and _same_extents(item.block.iterators, second.block.iterators) for item in own
    )


def _calls(block: ir.Block) -> bool:
    """Whether a block calls functions of the prelude, such as exp."""
    values = (*(let.value for let in block.lets), *(store.value for store in block.stores))
    return any(isinstance(part, ir.Apply) and OPS[part.op].prelude for value in values for part in ir.walk(value))


def _same_extents(left: tuple[ir.BlockIterator, ...], right: tuple[ir.BlockIterator, ...]) -> bool:
    return len(left) == len(right) and all(
        a.extent == b.extent and a.bound == b.bound and a.kind == b.kind for a, b in zip(left, right, strict=True)
    )


def _shares_cells(first: Item, second: Item) -> bool:
    """Whether both touch a buffer of more than one cell."""
    left = first.effects.read_set | first.effects.write_set
    right = second.effects.read_set | second.effects.write_set
    return any(buffer.size > 1 for buffer in left & right) or all(
        buffer.size <= 1 for buffer in first.effects.write_set | second.effects.write_set
    )


def _renamed(block: ir.Block, iterators: tuple[ir.BlockIterator, ...], to: tuple[ir.BlockIterator, ...]) -> ir.Block:
    """Copy ``block`` with fresh symbols, running over the iterators ``to`` in place of ``iterators``."""
    copied = fresh_copy(replace(block, iterators=()))
    renaming = {item.symbol: ir.Var(given.symbol) for item, given in zip(iterators, to, strict=True)}
    return substitute(copied, renaming)


def _points_meet(first: ir.Block, second: ir.Block) -> bool:
    """Whether all dependences between the blocks (over the same iterators) join equal points."""
    written_first = {store.buffer: store.indices for store in first.stores}
    written_second = {store.buffer: store.indices for store in second.stores}
    for block, written in ((second, written_first), (first, written_second)):
        for expr in _all_expressions(block):
            for load in loads_of(expr):
                if load.buffer in written and not same_cell(load.indices, written[load.buffer]):
                    return False
    return all(
        same_cell(indices, written_second[buffer])
        for buffer, indices in written_first.items()
        if buffer in written_second
    )


def _all_expressions(block: ir.Block) -> list[ir.Expr]:
    found: list[ir.Expr] = [let.value for let in block.lets]
    for item in block.accumulators:
        found += [item.init, item.update]
    for store in block.stores:
        found += [*store.indices, store.value]
    return found


# -- how -----------------------------------------------------------------------------------------------------------


def _joined(first: ir.Block, second: ir.Block, **parts: tuple[object, ...]) -> ir.Block:
    return replace(
        first,
        origins=tuple(dict.fromkeys((*first.origins, *second.origins))),
        composite=first.composite if first.composite == second.composite else "",
        **parts,  # type: ignore[arg-type]
    )


def _sweep(first: Item, second: Item) -> ir.Block | None:
    a = first.block
    b = _renamed(second.block, second.block.iterators, a.iterators)
    if not _points_meet(a, b):
        return None
    passed_on = first.effects.write_set & second.effects.read_set
    lets, stores, values = list(a.lets), [], {}
    for store in a.stores:
        value = store.value
        if store.buffer in passed_on:
            if not isinstance(value, ir.Var):
                symbol = ir.Symbol(store.buffer.name, store.buffer.type)
                lets.append(ir.Let(symbol, value))
                value = ir.Var(symbol)
            values[store.buffer] = value  # of several stores to one cell, the last
        stores.append(replace(store, value=value))
    follow = _Replace(values).block(b)
    rewritten = {store.buffer for store in follow.stores}
    # A cell that the later block writes again needs the earlier value in a let only.
    stores = [store for store in stores if store.buffer not in rewritten]
    return simplify_block(_joined(a, b, lets=(*lets, *follow.lets), stores=(*stores, *follow.stores)))


def _epilogue(first: Item, second: Item, readers: Readers) -> ir.Block | None:
    a = first.block
    b = _renamed(second.block, second.block.iterators, a.data)
    if len(b.stores) != 1 or not _points_meet(a, b):
        return None
    counts: dict[ir.Buffer, int] = {}
    for expr in _all_expressions(b):
        for load in loads_of(expr):
            counts[load.buffer] = counts.get(load.buffer, 0) + 1
    values: dict[ir.Buffer, ir.Expr] = {}
    for store in a.stores:
        if any(load.buffer in first.effects.write_set for load in loads_of(store.value)):
            continue  # the cells it is made of change before the later store would read them
        small = sum(1 for _ in ir.walk(store.value)) <= SMALL_VALUE
        only_here = len(readers.get(store.buffer, ())) == 1 and counts.get(store.buffer) == 1
        if small or only_here:
            values[store.buffer] = store.value
    b = _Replace(values).block(b)
    named: dict[ir.Symbol, ir.Expr] = {}
    for let in b.lets:  # lets belong to the reduce points: the stores spell them out
        named[let.symbol] = substitute(let.value, named)
        if sum(1 for _ in ir.walk(named[let.symbol])) > MAX_SPELT:
            return None
    (last,) = (substitute(store, named) for store in b.stores)
    # A cell that is written again, and not read in between, is stored once.
    replaced = last.buffer in values and not any(load.buffer is last.buffer for load in loads_of(last.value))
    stores = tuple(store for store in a.stores if not (replaced and store.buffer is last.buffer))
    return simplify_block(_joined(a, b, stores=(*stores, last)))


def _siblings(first: Item, second: Item) -> ir.Block | None:
    a, b = first.block, second.block
    if (
        is_contraction(a)
        or is_contraction(b)
        or not _same_extents(a.data, b.data)
        or not _same_extents(a.reduce, b.reduce)
    ):
        return None
    shared = first.effects.read_set & second.effects.read_set
    if not any(buffer.size > 1 for buffer in shared) or first.effects.write_set & second.effects.write_set:
        return None
    b = _renamed(b, (*b.data, *b.reduce), (*a.data, *a.reduce))
    if not _points_meet(a, b):
        return None
    return _joined(
        a, b, lets=(*a.lets, *b.lets), accumulators=(*a.accumulators, *b.accumulators), stores=(*a.stores, *b.stores)
    )


class _Replace(Rewriter):
    """Replaces loads of buffers by values (all of them at the one cell of the point)."""

    def __init__(self, values: Mapping[ir.Buffer, ir.Expr]) -> None:
        self.values = values

    def expr(self, expr: ir.Expr) -> ir.Expr:
        if isinstance(expr, ir.Load) and expr.buffer in self.values:
            return self.values[expr.buffer]
        return super().expr(expr)
