"""Recomputation: a large value that would wait for a late reader is computed again in front of it.

In: a module, one block per kernel, values without buffers inlined. Out: the module with copies of some definitions,
each in front of the first reader behind the moment at which most bytes are alive, and ``recomputed`` counted up by the
bytes that no longer are::

    h = x @ w; e = erfc(h); y = h * e; ... 200 kernels ...; g = f(e)
    h = x @ w; e = erfc(h); y = h * e; ... 200 kernels ...; e.again = erfc(h); g = f(e.again)

A copy reads what is alive at its place anyway, or small, or a copy itself; the expressions are the same, so are the
bits. Worth it, up to a cost per byte, are pointwise values and products of two activations. Of products with weights,
only wide sums of narrow operands are (what a narrow ``dense`` hands to its activation takes twice the bytes of its
result), and only a few. Matrices that need no memory where all their readers stand together (attention's probabilities)
are computed again for readers that stand apart. So that one sweep can serve a copy and the gradient that reads the same
values, the product that the sweep waits for goes before the one that reads the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from stagedtensor.codegen import loop_ir as ir
from stagedtensor.codegen.effects import block_of, distinct_names, domain, kernel_of, loads, with_kernels
from stagedtensor.codegen.passes.dependence import conflict, covers, is_contraction, is_elementwise
from stagedtensor.codegen.passes.place import Item, weigh
from stagedtensor.codegen.pieces import replace
from stagedtensor.codegen.rewrite import fresh_copy, substitute, symbols_of

LEAST_PEAK = 4 << 20
"""Bytes alive at once from which memory is worth a little work: what is less stays in the caches."""
SCARCE = 32 << 20
"""Bytes alive at once from which memory is worth more than a little."""
LARGE = 2 << 20
"""Bytes of a buffer from which more than a little work is spent: a smaller one is read back from a core's own cache."""
LEAST_BYTES = 128 << 10
"""Bytes of a buffer that is worth a kernel."""
LITTLE_WORK = 5
"""Plain operations per byte saved, a slow one counted as ``_SLOW``, that cost no more than reading the value."""
MOST_WORK = 40
"""As many as are ever spent: a few slow functions, or a product over some ten terms with them."""
_SLOW = 24
_TILED = 8
"""Multiply-adds of a register tile in the time of one plain operation."""
MOST_PRODUCTS = 1 / 16
"""The part of all work in products that products with weights, computed again, may add."""
_SMALL = 16
"""How many times smaller than the value an operand must be to be kept for it."""
_DEEPEST = 4


def recompute(
    module: ir.Module,
    *,
    least_peak: int = LEAST_PEAK,
    scarce: int = SCARCE,
    least_bytes: int = LEAST_BYTES,
    large: int = LARGE,
    needless: Callable[[ir.Buffer], bool] | None = None,
) -> ir.Module:
    """Return ``module`` with values computed again where that lowers the greatest number of bytes alive at once.

    For little work down to ``least_peak`` bytes, buffers from ``least_bytes`` on; for more work down to ``scarce``,
    buffers of more than ``large`` bytes. ``needless`` tells matrices that need no memory where their readers stand
    together. Returns ``module`` itself where nothing is worth it.
    """
    work = _Work([Item.of(block_of(kernel)) for kernel in module.kernels], module.temporaries)
    before = work.look().peak
    if before > least_peak:
        work.order_products()
    apart = () if needless is None else tuple(filter(needless, module.temporaries))
    while (choice := work.apart(work.look(), apart)) is not None:
        work.apply(choice)
    while (now := work.look()).peak > least_peak:
        choice = work.choice(now, least_bytes, large if now.peak > scarce else now.peak)
        if choice is None:
            break
        work.apply(choice)
    if len(work.items) == len(module.kernels):
        return module
    saved = before - work.look().peak
    module = replace(module, temporaries=tuple(work.temporaries), recomputed=module.recomputed + max(0, saved))
    return with_kernels(module, distinct_names(kernel_of(item.block) for item in work.items))


@dataclass(frozen=True)
class _State:
    """Where temporaries are touched, where buffers are written, and the kernel at which most bytes are alive."""

    touched: dict[ir.Buffer, list[int]]
    written: dict[ir.Buffer, list[int]]
    peak: int
    place: int


@dataclass(frozen=True)
class _Choice:
    """Copies of the kernels at ``chain`` (in order) go in front of kernel ``place``; readers from there on read them."""

    chain: tuple[int, ...]
    place: int
    work: int
    nbytes: int

    @property
    def rank(self) -> tuple[float, int, int]:
        """The least work per byte first, then the most bytes, then the first in the program."""
        return self.work / self.nbytes, -self.nbytes, self.chain[-1]


class _Work:
    """The kernels under work."""

    def __init__(self, items: list[Item], temporaries: Iterable[ir.Buffer]) -> None:
        self.items = items
        self.temporaries = {buffer: buffer.nbytes for buffer in temporaries}
        """With their bytes."""
        self._costs: dict[ir.Buffer, int | None] = {}
        self._touches = [self._touched(item) for item in items]
        products = sum(_work(item.block) for item in items if is_contraction(item.block))
        self._allowed = int(products * MOST_PRODUCTS)
        """Work that products with weights may still take."""

    def _touched(self, item: Item) -> tuple[ir.Buffer, ...]:
        return tuple(buffer for buffer in item.effects.read_set | item.effects.write_set if buffer in self.temporaries)

    def look(self) -> _State:
        """Follow the temporaries through the kernels."""
        touched: dict[ir.Buffer, list[int]] = {}
        written: dict[ir.Buffer, list[int]] = {}
        for place, (item, buffers) in enumerate(zip(self.items, self._touches, strict=True)):
            for buffer in buffers:
                touched.setdefault(buffer, []).append(place)
            for buffer in item.effects.writes:
                written.setdefault(buffer, []).append(place)
        changes = [0] * (len(self.items) + 1)
        for buffer, nbytes in self.temporaries.items():
            if places := touched.get(buffer):
                changes[places[0]] += nbytes
                changes[places[-1] + 1] -= nbytes
        alive = peak = at = 0
        for place, change in enumerate(changes):
            alive += change
            if alive > peak:
                peak, at = alive, place
        return _State(touched, written, peak, at)

    def order_products(self) -> None:
        """Put first, of two products of one operand, the one whose result the next sweep reads.

        Only where the sweep reads what the other product's operand is made of: a copy of that operand then joins it.
        """
        state = self.look()
        for place in range(len(self.items) - 2):
            first, second, sweep = self.items[place : place + 3]
            if not (is_contraction(first.block) and is_contraction(second.block) and is_elementwise(sweep.block)):
                continue
            if not first.effects.read_set & second.effects.read_set or conflict(first.effects, second.effects):
                continue
            if conflict(first.effects, sweep.effects) or not second.effects.write_set & sweep.effects.read_set:
                continue
            makers = [self.items[at].effects for buffer in first.effects.reads for at in state.written.get(buffer, ())]
            if any(maker.read_set & sweep.effects.read_set & self.temporaries.keys() for maker in makers):
                self.items[place : place + 2] = second, first
                self._touches[place : place + 2] = self._touches[place + 1], self._touches[place]

    def choice(self, state: _State, least_bytes: int, large: int) -> _Choice | None:
        """Return the cheapest way to have fewer bytes alive at the worst moment; more work for buffers over ``large``."""
        found: list[_Choice] = []
        for buffer, nbytes in self.temporaries.items():
            places = state.touched.get(buffer, [])
            if nbytes < least_bytes or not places or not places[0] < state.place < places[-1]:
                continue
            if state.place in places:
                continue
            late = next(place for place in places if place > state.place)
            chain = self._chain(state, buffer, late, 0)
            if chain is None:
                continue
            work = sum(chain.values())
            most = (MOST_WORK if nbytes > large else LITTLE_WORK) * nbytes
            if work <= most and self._weights(chain) <= self._allowed:
                found.append(_Choice(tuple(sorted(chain)), late, work, nbytes))
        return min(found, key=lambda choice: choice.rank, default=None)

    def apart(self, state: _State, matrices: Sequence[ir.Buffer]) -> _Choice | None:
        """Return how to compute matrices again for readers that cannot stand beside their makers.

        Others must run in between. The first of such readers is served first: what is made for it serves those behind
        it.
        """
        found: list[_Choice] = []
        for matrix in matrices:
            places = state.touched.get(matrix, [])
            if len(places) < 2 or state.written.get(matrix) != places[:1]:
                continue
            late = self._first_apart(places, matrix)
            chain = None if late is None else self._chain(state, matrix, late, 0, frozenset(matrices))
            if late is None or chain is None or not any(self.items[place].block.accumulators for place in chain):
                continue
            work, nbytes = sum(chain.values()), sum(self._matrix_bytes(place, matrix) for place in chain)
            if work <= MOST_WORK * nbytes and not self._weights(chain):
                found.append(_Choice(tuple(sorted(chain)), late, work, nbytes))
        return min(found, key=lambda choice: (choice.place, -choice.chain[-1]), default=None)

    def _matrix_bytes(self, place: int, matrix: ir.Buffer) -> int:
        """The bytes of what a kernel makes of the shape of ``matrix``."""
        return sum(buffer.nbytes for buffer in self.items[place].effects.writes if buffer.shape == matrix.shape)

    def _first_apart(self, places: Sequence[int], matrix: ir.Buffer) -> int | None:
        """The first reader of ``matrix`` that needs what others made of it: kernels that do not walk its rows."""
        made: set[ir.Buffer] = set()
        by_others: set[ir.Buffer] = set()
        for place in range(places[0], places[-1] + 1):
            effects = self.items[place].effects
            needs = not effects.read_set.isdisjoint(by_others)
            if needs and place in places:
                return place
            walks = any(buffer.shape == matrix.shape for buffer in effects.read_set | effects.write_set)
            walks = walks or all(buffer.shape == matrix.shape[:-1] for buffer in effects.write_set)
            if needs or (not walks and not effects.read_set.isdisjoint(made)):
                by_others |= effects.write_set
            elif walks:
                made |= effects.write_set
        return None

    def _cost(self, item: Item, buffer: ir.Buffer) -> int | None:
        """The work of computing ``buffer`` by its maker again, None where that computes anything else."""
        if buffer not in self._costs:
            self._costs[buffer] = _work(item.block) if _repeatable(item.block, buffer) else None
        return self._costs[buffer]

    def _chain(
        self, state: _State, buffer: ir.Buffer, late: int, depth: int, given_up: frozenset[ir.Buffer] = frozenset()
    ) -> dict[int, int] | None:
        """The kernels to run again in front of ``late`` for the value of ``buffer``, with their work, or None.

        What is ``given_up`` is made again even if it is alive there.
        """
        written = state.written[buffer]
        if len(written) != 1 or depth > _DEEPEST:
            return None
        (maker,) = written
        item = self.items[maker]
        work = self._cost(item, buffer)
        if work is None or (_is_twin(item.block) and buffer not in given_up):
            return None
        chain = {maker: work}
        for operand in item.effects.reads:
            if any(maker < place < late for place in state.written.get(operand, ())):
                return None
            if operand not in self.temporaries or self.temporaries[operand] * _SMALL <= self.temporaries[buffer]:
                continue
            if state.touched[operand][-1] >= late and operand not in given_up:
                continue
            more = self._chain(state, operand, late, depth + 1, given_up)
            if more is None:
                return None
            chain |= more
        return chain

    def _weights(self, chain: Iterable[int]) -> int:
        """The work of the products with weights at these places."""
        blocks = (self.items[place].block for place in chain)
        return sum(_work(block) for block in blocks if is_contraction(block) and _has_weights(block))

    def apply(self, choice: _Choice) -> None:
        """Put in the copies and let the late readers read them."""
        self._allowed -= self._weights(choice.chain)
        makers = [self.items[place].block for place in choice.chain]
        again = {maker.stores[0].buffer: _again(maker.stores[0].buffer) for maker in makers}
        self.temporaries.update({buffer: buffer.nbytes for buffer in again.values()})
        for place in range(choice.place, len(self.items)):
            if not again.keys().isdisjoint(self._touches[place]):
                self.items[place] = Item.of(substitute(self.items[place].block, {}, again))
                self._touches[place] = self._touched(self.items[place])
        made = [Item.of(substitute(_copy(maker), {}, again)) for maker in makers]
        self.items[choice.place : choice.place] = made
        self._touches[choice.place : choice.place] = [self._touched(item) for item in made]


def _again(buffer: ir.Buffer) -> ir.Buffer:
    return replace(buffer, name=f"{buffer.name.removesuffix('.again')}.again", node=None)


def _copy(block: ir.Block) -> ir.Block:
    copied = fresh_copy(block)
    return replace(
        copied, late=True, origins=tuple(replace(item, text=_once_more(item.text)) for item in block.origins)
    )


def _once_more(text: str) -> str:
    return text if text.startswith("again: ") else f"again: {text}"


def _repeatable(block: ir.Block, buffer: ir.Buffer) -> bool:
    """Whether a block computes ``buffer``, all of it and nothing else, from other buffers."""
    if len(block.stores) != 1 or not covers(block, buffer) or any(load.buffer is buffer for load in loads(block)):
        return False
    if is_elementwise(block):
        return True
    return is_contraction(block) and block.guard is None and (_is_outer(block, buffer) or _sums_wide(block, buffer))


def _is_twin(block: ir.Block) -> bool:
    """Whether a block only rounds a buffer's cells: readers can do so themselves, and would have to wait for a copy."""
    value = block.stores[0].value
    return isinstance(value, ir.Cast) and isinstance(value.arg, ir.Load) and not block.accumulators


def _is_outer(block: ir.Block, buffer: ir.Buffer) -> bool:
    """Whether a product is one of two activations, and no smaller than both."""
    operands = {load.buffer for load in loads(block)}
    return buffer.nbytes >= sum(operand.nbytes for operand in operands) and not _has_weights(block)


def _has_weights(block: ir.Block) -> bool:
    """Whether no data axis is one of all operands of a product: then it is not one of two activations."""
    operands = [set(symbols_of(load)) for item in block.accumulators for load in _loads_of(item.update)]
    common = set.intersection(*operands) if len(operands) >= 2 else set()
    return not any(item.bound > 1 and item.symbol in common for item in block.data)


def _sums_wide(block: ir.Block, buffer: ir.Buffer) -> bool:
    """Whether a product of narrow operands is kept in a wide format, and larger than both."""
    operands = {load.buffer for item in block.accumulators for load in _loads_of(item.update)}
    narrow = all(operand.type.is_narrow for operand in operands)
    return narrow and not buffer.type.is_narrow and buffer.nbytes > sum(operand.nbytes for operand in operands)


def _loads_of(expr: ir.Expr) -> Sequence[ir.Load]:
    return [part for part in ir.walk(expr) if isinstance(part, ir.Load)]


def _work(block: ir.Block) -> int:
    """Plain operations of a block, roughly."""
    if block.accumulators:
        return domain(block.iterators) * 2 * len(block.accumulators) // _TILED
    weight = weigh(block)
    return domain(block.iterators) * (weight.ops - weight.heavy + weight.loads + _SLOW * weight.heavy)
