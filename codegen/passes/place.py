"""Placement: may the value that a block computes live without a buffer, and is that worth it?

In: the kernels of a module as blocks, and the position of one that defines a temporary. Out: a ``Decision`` with its
reason: *virtual* (recomputed where it is read), *local* (a scalar of the fused kernel that makes and reads it) or
*buffer*. Legality is a matter of versions: what the value is made of must not have changed at any of its readers.
Nothing is rewritten here; ``inline`` and ``fuse`` act on it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from stagedtensor.codegen import loop_ir as ir
from stagedtensor.codegen.effects import domain, loads, loads_of
from stagedtensor.codegen.passes.dependence import (
    Effects,
    covers,
    effects_of,
    is_contraction,
    is_elementwise,
    same_cell,
)
from stagedtensor.codegen.passes.exact import contains
from stagedtensor.codegen.rewrite import substitute
from stagedtensor.node import Node, Placement
from stagedtensor.op_table import OPS


class Mode(Enum):
    """Where a value lives."""

    VIRTUAL = "virtual"
    LOCAL = "local"
    BUFFER = "buffer"


@dataclass(frozen=True)
class Decision:
    """A mode and why."""

    mode: Mode
    reason: str


@dataclass(frozen=True)
class Item:
    """A kernel under work: its block and effects."""

    block: ir.Block
    effects: Effects

    @staticmethod
    def of(block: ir.Block) -> Item:
        """Summarise a block."""
        return Item(block, effects_of(block))


@dataclass
class Report:
    """Decisions by buffer, the last one of each in force; read by ``explain`` and the kernel tables."""

    decisions: dict[ir.Buffer, Decision] = field(default_factory=dict)

    def note(self, buffer: ir.Buffer, decision: Decision) -> None:
        """Take a decision; a buffer that any version needs is there for all of them to see."""
        known = self.decisions.get(buffer)
        if known is None or decision.mode is Mode.BUFFER or known.mode is not Mode.BUFFER:
            self.decisions[buffer] = decision

    def by_node(self) -> dict[Node, Decision]:
        """Return the decisions of the buffers that hold nodes."""
        return {buffer.node: decision for buffer, decision in self.decisions.items() if buffer.node is not None}


# -- what an expression costs --------------------------------------------------------------------------------------

_HEAVY = frozenset(("div", "sqrt", "recip", "floordiv", "mod", "random_uniform", "random_normal"))
CHEAP_OPS = 6
CHEAP_LOADS = 2
LONG = 64
"""Ops from which an elementwise value is left to fusion: copying it from reader to reader would take quadratic time."""


@dataclass(frozen=True)
class Weight:
    """Ops, slow ops among them, and distinct loads of more than one cell."""

    ops: int
    heavy: int
    loads: int

    @property
    def cheap(self) -> bool:
        """Whether computing it again costs no more than reading it back."""
        return self.heavy == 0 and self.ops <= CHEAP_OPS and self.loads <= CHEAP_LOADS


def weigh(block: ir.Block) -> Weight:
    """Weigh the values that an elementwise block computes at one point."""
    ops = heavy = 0
    cells: dict[ir.Load, None] = {}
    for expr in (*(let.value for let in block.lets), *(store.value for store in block.stores)):
        for part in ir.walk(expr):
            if isinstance(part, ir.Apply | ir.Fma):
                ops += 1
                heavy += isinstance(part, ir.Apply) and (part.op in _HEAVY or OPS[part.op].prelude)
            elif isinstance(part, ir.Load) and part.buffer.size > 1:
                cells.setdefault(part)
    return Weight(ops, heavy, len(cells))


def is_view(block: ir.Block) -> bool:
    """Whether the block only hands on a constant, or another buffer's cells at indices that memory does not decide."""
    if len(block.stores) != 1 or block.accumulators:
        return False
    value = block.stores[0].value
    while isinstance(value, ir.Cast) and contains(value.type, value.arg.type):
        value = value.arg
    if isinstance(value, ir.Const) or (isinstance(value, ir.Cast) and isinstance(value.arg, ir.Const)):
        return True
    return isinstance(value, ir.Load) and not any(True for index in value.indices for _ in loads_of(index))


def point_expressions(block: ir.Block) -> Iterator[ir.Expr]:
    """Yield the lets and updates of a block: what is computed at each reduce point."""
    for let in block.lets:
        yield let.value
    for item in block.accumulators:
        yield item.update


# -- decisions -----------------------------------------------------------------------------------------------------


class Touched:
    """Which kernels may touch a buffer, in order: asking them all for every value would take quadratic time."""

    def __init__(self, items: Sequence[Item]) -> None:
        self._positions: dict[ir.Buffer, list[int]] = {}
        for position, item in enumerate(items):
            self.note(position, item)

    def note(self, position: int, item: Item) -> None:
        """Add what a kernel touches; buffers that it touches no more stay listed."""
        for buffer in item.effects.read_set | item.effects.write_set:
            known = self._positions.setdefault(buffer, [])
            at = bisect_left(known, position)
            if at == len(known) or known[at] != position:
                known.insert(at, position)

    def after(self, position: int, buffer: ir.Buffer) -> list[int]:
        """Return the kernels behind ``position`` that may touch ``buffer``."""
        known = self._positions.get(buffer, [])
        return known[bisect_right(known, position) :]


def decide(
    items: Sequence[Item], position: int, temporaries: frozenset[ir.Buffer], touched: Touched
) -> tuple[Decision, list[int]]:
    """Decide for the value that kernel ``position`` defines; also return the positions of the kernels that read it."""
    block = items[position].block
    target = block.stores[0].buffer
    problem = _not_virtual(block, target, temporaries)
    if problem:
        return Decision(Mode.BUFFER, problem), []
    later = touched.after(position, target)
    uses, problem = _uses(items, position, target, later)
    problem = problem or _overwritten(items, position, target, uses, touched)
    if problem:
        return Decision(Mode.BUFFER, problem), uses
    asked = target.node.placement if isinstance(target.node, Node) else Placement.AUTO
    if asked is Placement.MATERIALIZED:
        return Decision(Mode.BUFFER, "materialized by request"), uses
    if asked is Placement.VIRTUAL:
        return Decision(Mode.VIRTUAL, "virtual by request"), uses
    return _worth(items, position, uses), uses


def _not_virtual(block: ir.Block, target: ir.Buffer, temporaries: frozenset[ir.Buffer]) -> str:
    if target not in temporaries:
        return "visible to the host or to another routine"
    if block.accumulators:
        return "a reduction is computed once"
    if not is_elementwise(block) or len(block.stores) != 1 or not covers(block, target):
        return "written in parts"
    if any(load.buffer is target for load in loads(block)):
        return "accumulated in place"
    return ""


def _uses(items: Sequence[Item], position: int, target: ir.Buffer, candidates: Sequence[int]) -> tuple[list[int], str]:
    """The kernels that read this version: up to the next one that writes the buffer, itself included."""
    uses = []
    for later in candidates:
        effects = items[later].effects
        if target in effects.read_set:
            uses.append(later)
        if target in effects.write_set:
            if not covers(items[later].block, target):
                return uses, "written in parts later"
            break
    return uses, ""


def _overwritten(items: Sequence[Item], position: int, target: ir.Buffer, uses: Sequence[int], touched: Touched) -> str:
    """Whether something the value is made of changes before a reader has read."""
    inputs = items[position].effects.read_set
    if not uses:
        return ""
    for later in sorted({at for buffer in inputs for at in touched.after(position, buffer) if at <= uses[-1]}):
        changed = items[later].effects.write_set & inputs
        if not changed:
            continue
        name = min(buffer.name for buffer in changed)
        if later < uses[-1] or not _reads_own_cell(items[position].block, items[later].block, target, changed):
            return f"{name} changes before its last reader"
    return ""


def _reads_own_cell(definition: ir.Block, reader: ir.Block, target: ir.Buffer, changed: frozenset[ir.Buffer]) -> bool:
    """Whether the reader, which overwrites ``changed`` in place, would read these at the very cells it writes."""
    if reader.scatter:
        return False
    (store,) = definition.stores
    written = {item.buffer: item.indices for item in reader.stores}
    for use in loads(reader):
        if use.buffer is not target:
            continue
        here = substitution(store, use)
        for load in loads(definition):
            if load.buffer in changed:
                indices = tuple(substitute(part, here) for part in load.indices)
                if not same_cell(indices, written[load.buffer]):
                    return False
    return True


def substitution(store: ir.Store, use: ir.Load) -> dict[ir.Symbol, ir.Expr]:
    """Return what the iterators of a covering store are at one use of the cell it writes."""
    return {
        position.symbol: given
        for position, given in zip(store.indices, use.indices, strict=True)
        if isinstance(position, ir.Var)
    }


def _worth(items: Sequence[Item], position: int, uses: Sequence[int]) -> Decision:
    block = items[position].block
    target = block.stores[0].buffer
    if not uses:
        return Decision(Mode.VIRTUAL, "nothing reads it")
    if is_view(block):
        return Decision(Mode.VIRTUAL, "another view of the same cells")
    weight, points = weigh(block), domain(block.data)
    for use in uses:
        reader = items[use].block
        if is_contraction(reader) and _at_points(reader, target):
            return Decision(Mode.BUFFER, f"a contraction ({reader.name}) reads it many times")
        if block.lets and _outside_points(reader, target):
            return Decision(Mode.BUFFER, f"{reader.name} reads it where its parts cannot be named")
        if domain(reader.iterators) > points and not weight.cheap:
            return Decision(Mode.BUFFER, f"{reader.name} would compute it again for every point of a larger domain")
    if weight.ops > LONG and all(is_elementwise(items[use].block) for use in uses):
        return Decision(Mode.BUFFER, "long enough by itself: fusion joins it to its readers in one sweep")
    if len(uses) == 1:
        return Decision(Mode.VIRTUAL, f"a single reader, {items[uses[0]].block.name}")
    if _finishes_reduction(items, position):
        return Decision(Mode.BUFFER, f"{len(uses)} readers, and the reduction it is made of stores it at no cost")
    if weight.cheap:
        return Decision(Mode.VIRTUAL, f"cheap to compute again for {len(uses)} readers")
    return Decision(Mode.BUFFER, f"{len(uses)} readers, and not cheap to compute again")


def _finishes_reduction(items: Sequence[Item], position: int) -> bool:
    """Whether the block is the only reader of a reduction over the same data points: fusion makes it an epilogue."""
    block = items[position].block
    for buffer in items[position].effects.reads:
        if sum(buffer in item.effects.read_set for item in items) != 1:
            continue
        for item in reversed(items[:position]):
            if buffer in item.effects.write_set:
                maker = item.block
                if maker.accumulators and [i.extent for i in maker.data] == [i.extent for i in block.iterators]:
                    return True
                break
    return False


def _at_points(reader: ir.Block, target: ir.Buffer) -> bool:
    """Whether ``target`` is read at the reduce points, not only where the sums start or are stored."""
    return any(load.buffer is target for expr in point_expressions(reader) for load in loads_of(expr))


def _outside_points(reader: ir.Block, target: ir.Buffer) -> bool:
    """Whether ``target`` is read where lets are not in scope."""
    inside = sum(load.buffer is target for expr in point_expressions(reader) for load in loads_of(expr))
    if not reader.reduce:
        inside += sum(load.buffer is target for store in reader.stores for load in loads_of(store.value))
    return inside < sum(load.buffer is target for load in loads(reader))


def record_fused(module: ir.Module, report: Report) -> ir.Module:
    """Note which temporaries the fused kernels no longer store; returns ``module``."""
    stored = frozenset(module.temporaries)
    for buffer, decision in report.decisions.items():
        if decision.mode is Mode.BUFFER and buffer not in stored:
            report.decisions[buffer] = Decision(Mode.LOCAL, "made and read in one kernel")
    return module
