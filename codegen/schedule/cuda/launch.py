"""How loops of the loop IR are dealt out to CUDA's grid, blocks and threads.

In: iterators of a block. Out: one flat iterator for them with the statements that recover each, and the launch
dimensions. A loop of kind ``grid`` walks all threads or all blocks of the launch, one of kind ``lane`` the threads of
one block; :class:`Launch` says which. Every such loop strides, so results do not depend on the launch dimensions, and a
grid is never larger than its first dimension allows. Chooses no template.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from stagedtensor.codegen.affine import as_index, constant, floor_divide, modulo
from stagedtensor.codegen.loop_ir import (
    Apply,
    BlockIterator,
    Buffer,
    Const,
    Cost,
    Expr,
    For,
    If,
    Let,
    Stmt,
    Symbol,
    Var,
)
from stagedtensor.codegen.schedule.nest import fresh, index_symbol
from stagedtensor.precision import Prec, i64, u16

WARP = 32
THREADS = 256
"""Threads of a block where nothing asks for another number."""
STATIC_SHARED = 48 * 1024
"""Bytes of shared memory that a kernel may have without asking."""
SHARED_BYTES = 99 * 1024
"""Shared memory that a block of threads may ask for on every GPU from sm_80 on."""
MOST_BLOCKS = 2048
"""Blocks of a launch whose loop strides over the rest: several per multiprocessor of the largest devices."""
MOST_COOPERATIVE = 8 * MOST_BLOCKS
"""The same where each block of threads takes a row or a tile at a time: these differ in length more than points do."""

Dealt: TypeAlias = Literal["threads of the grid", "blocks", "threads of a block"]


@dataclass(frozen=True)
class Launch:
    """Dimensions of one launch. ``dealt`` says for each grid or lane loop what walks it.

    ``cooperative``: threads of a block meet at barriers or shuffles. ``thread`` is the symbol of the thread's number.
    """

    blocks: int
    threads: int
    dealt: dict[Symbol, Dealt] = field(default_factory=dict)
    cooperative: bool = False
    thread: Symbol | None = None
    resident: int = 0
    """Blocks that a multiprocessor must hold at once, 0 where the compiler may choose. With 1 none need spill."""
    offsets: dict[Buffer, int] = field(default_factory=dict)
    """Where shared arrays lie in the block's shared memory; those without a place are the compiler's to put."""

    @property
    def dynamic_bytes(self) -> int:
        """Bytes of shared memory that the launch asks for."""
        return max((start + buffer.nbytes for buffer, start in self.offsets.items()), default=0)

    @property
    def is_warp(self) -> bool:
        """Whether the threads that meet are one warp; as a part of a launch, several then share a block."""
        return self.cooperative and self.threads == WARP

    def __str__(self) -> str:
        return f"{self.blocks} blocks of {self.threads} threads"


@dataclass(frozen=True)
class CudaNest:
    """One launch: its name's ending, statements, dimensions, the choice in words, cost, and scratch it introduces."""

    suffix: str
    body: tuple[Stmt, ...]
    launch: Launch
    path: str
    cost: Cost
    scratch: tuple[Buffer, ...] = ()


@dataclass(frozen=True)
class Flat:
    """Several iterators as one: ``extent`` is a number or, for a lone iterator, its own expression.

    ``lets`` recover the iterators' values, ``mapping`` says which symbol stands for which iterator, ``guard`` (None:
    always) holds where all of them are inside extents that are known at run time only.
    """

    symbol: Symbol
    extent: Expr
    bound: int
    lets: tuple[Let, ...]
    mapping: dict[Symbol, Expr]
    guard: Expr | None

    def wrap(self, body: Sequence[Stmt]) -> tuple[Stmt, ...]:
        """Return ``body`` behind the lets and the guard."""
        inner = tuple(body) if self.guard is None else (If(self.guard, tuple(body)),)
        return (*self.lets, *inner)


def flatten(iterators: Sequence[BlockIterator], hint: str, value: Expr | None = None) -> Flat:
    """Return ``iterators`` as one, row-major; ``value`` is the point's number, by default the new symbol itself."""
    symbol = index_symbol(hint)
    position = Var(symbol) if value is None else value
    total = points_of(iterators)
    if len(iterators) == 1:
        (item,) = iterators
        if value is None:
            named = fresh(item.symbol)
            return Flat(named, item.extent, item.bound, (), {item.symbol: Var(named)}, None)
        return Flat(symbol, item.extent, item.bound, (), {item.symbol: value}, beyond(item, value))
    if total == 0:  # never walked: nothing to recover
        return Flat(symbol, as_index(0), 0, (), {item.symbol: as_index(0) for item in iterators}, None)
    lets: list[Let] = []
    mapping: dict[Symbol, Expr] = {}
    guards: list[Expr] = []
    below = total
    for place, item in enumerate(iterators):
        below //= item.bound
        part = floor_divide(position, below) if below > 1 else position
        if place and item.bound > 1:
            part = modulo(part, item.bound)
        if item.bound == 1:
            part = as_index(0)
        if constant(part) is not None:
            mapping[item.symbol] = part
            continue
        named = fresh(item.symbol)
        lets.append(Let(named, part))
        mapping[item.symbol] = Var(named)
        outside = beyond(item, Var(named))
        if outside is not None:
            guards.append(outside)
    return Flat(symbol, as_index(total), total, tuple(lets), mapping, conjunction(guards))


def beyond(item: BlockIterator, value: Expr) -> Expr | None:
    """Return the test that ``value`` is inside a run-time extent of ``item``; None where the extent is its bound."""
    return None if constant(item.extent) == item.bound else less(value, item.extent)


def less(lhs: Expr, rhs: int | Expr) -> Expr:
    """Return ``lhs < rhs`` of two indices."""
    return Apply("lt", (lhs, as_index(rhs)), i64)


def conjunction(tests: Sequence[Expr | None]) -> Expr | None:
    """Return the ``and`` of those tests that are there."""
    result: Expr | None = None
    for test in tests:
        if test is not None:
            result = test if result is None else Apply("and", (result, test), i64)
    return result


def points_of(iterators: Sequence[BlockIterator]) -> int:
    """Return how many points the iterators walk at most."""
    total = 1
    for item in iterators:
        total *= item.bound
    return total


def blocks_for(work: int, each: int = THREADS) -> int:
    """Return how many blocks walk ``work`` items, ``each`` per block and step."""
    return max(1, min(MOST_BLOCKS, -(-work // each)))


def cooperative_blocks(count: int) -> int:
    """Return how many blocks take ``count`` rows or tiles, one each and step."""
    return max(1, min(MOST_COOPERATIVE, count))


def strided(flat: Flat, body: Sequence[Stmt]) -> For:
    """Return the grid loop over a flat iterator."""
    return For(BlockIterator(flat.symbol, flat.extent, flat.bound), tuple(body), "grid")


def shuffled(value: Expr, lanes: int) -> Expr:
    """Return what ``value`` is in the thread ``lanes`` further on in the same warp."""
    return Apply("shuffle_down", (value, as_index(lanes)), value.type)


def zero(prec: Prec) -> Const:
    """Return the zero of a type; that of a narrow float is its code."""
    if prec.is_narrow:
        return Const(0, u16)
    return Const(0.0 if prec.is_float else 0, prec)
