"""Index expressions and projected statements: what a statement is once row variables are gone.

Every axis of every access has one expression over iterators: affine with constant coefficients, floor division and
modulo by constants, the value of an index tensor, or a static index. Iterators are objects; their names are hints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from stagedtensor.dims import DynamicDim
from stagedtensor.node import Node
from stagedtensor.statements import Access, DimValue, IterValue, LinearIndex, Statement

Extent: TypeAlias = int | DynamicDim


@dataclass(frozen=True, eq=False)
class ProjectedIterator:
    """A loop over ``range(extent)``. ``reduce``: absent from the target by the spec, extent 1 included."""

    name: str
    extent: Extent
    reduce: bool

    @property
    def size(self) -> int:
        """The greatest extent."""
        return self.extent.max if isinstance(self.extent, DynamicDim) else self.extent


@dataclass(frozen=True)
class IndexConst:
    """A fixed position."""

    value: int


@dataclass(frozen=True)
class IndexIter:
    """The value of an iterator."""

    iterator: ProjectedIterator


@dataclass(frozen=True)
class IndexStatic:
    """The position that the static index ``name`` is bound to when the routine runs, below ``size``."""

    name: str
    size: int


@dataclass(frozen=True)
class IndexSum:
    """``offset`` plus the sum of coefficient times expression."""

    terms: tuple[tuple[int, IndexExpr], ...]
    offset: int = 0


@dataclass(frozen=True)
class IndexFloorDiv:
    """``arg // divisor``, rounding down."""

    arg: IndexExpr
    divisor: int


@dataclass(frozen=True)
class IndexMod:
    """``arg % divisor`` with the sign of the divisor, which is positive."""

    arg: IndexExpr
    divisor: int


@dataclass(frozen=True)
class IndexData:
    """The integer value of ``node`` at ``indices``; code clamps it to ``0 .. size - 1``."""

    node: Node
    indices: tuple[IndexExpr, ...]
    size: int


IndexExpr: TypeAlias = IndexConst | IndexIter | IndexStatic | IndexSum | IndexFloorDiv | IndexMod | IndexData


@dataclass(frozen=True)
class Guard:
    """The point is skipped (contributes nothing) unless ``low <= index < high``."""

    index: IndexExpr
    low: int
    high: Extent


@dataclass(frozen=True)
class DimProduct:
    """A number of cells: a constant times run-time extents."""

    constant: int
    dynamic: tuple[DynamicDim, ...] = ()


@dataclass(frozen=True, eq=False)
class Projected:
    """A statement with plain accesses.

    ``statement`` holds the tree and the write; its tree and ``reset`` are those to use (one block of a concatenation
    keeps only the accesses that are active in it). ``iterators``: data iterators in the target's memory order, then
    reduce iterators in spec order. ``target`` and each of ``reads`` have one expression per memory axis.
    ``covers_target``: every cell of the target is written exactly once. ``scatter``: several points may write one
    cell, so points run in order. ``fill``: a set of neutral elements to cells that the other parts do not write.
    """

    statement: Statement
    iterators: tuple[ProjectedIterator, ...]
    target: tuple[IndexExpr, ...]
    reads: Mapping[Access, tuple[IndexExpr, ...]]
    guards: tuple[Guard, ...]
    dim_values: Mapping[DimValue, DimProduct]
    iter_values: Mapping[IterValue | LinearIndex, IndexExpr]
    covers_target: bool
    scatter: bool = False
    fill: bool = False


def index_sum(terms: list[tuple[int, IndexExpr]], offset: int = 0) -> IndexExpr:
    """Return the sum in its least form: nested sums merged, equal terms collected, zeros dropped."""
    collected: dict[IndexExpr, int] = {}
    for factor, term in terms:
        parts: tuple[tuple[int, IndexExpr], ...] = ((1, term),)
        if isinstance(term, IndexConst):
            parts, offset = (), offset + factor * term.value
        elif isinstance(term, IndexSum):
            parts, offset = term.terms, offset + factor * term.offset
        for inner, part in parts:
            collected[part] = collected.get(part, 0) + factor * inner
    left = tuple((factor, term) for term, factor in collected.items() if factor)
    if not left:
        return IndexConst(offset)
    if len(left) == 1 and left[0][0] == 1 and offset == 0:
        return left[0][1]
    return IndexSum(left, offset)


def floor_div(arg: IndexExpr, divisor: int) -> IndexExpr:
    """Return ``arg // divisor``, folded where it is constant or divides by 1."""
    if divisor == 1:
        return arg
    return IndexConst(arg.value // divisor) if isinstance(arg, IndexConst) else IndexFloorDiv(arg, divisor)


def modulo(arg: IndexExpr, divisor: int) -> IndexExpr:
    """Return ``arg % divisor``, folded where it is constant or modulo 1."""
    if divisor == 1:
        return IndexConst(0)
    return IndexConst(arg.value % divisor) if isinstance(arg, IndexConst) else IndexMod(arg, divisor)


def row_major(indices: list[IndexExpr], sizes: list[int]) -> IndexExpr:
    """Return the cell number of ``indices`` in a block of ``sizes``, last axis fastest."""
    stride, terms = 1, []
    for index, size in zip(reversed(indices), reversed(sizes), strict=True):
        terms.append((stride, index))
        stride *= size
    return index_sum(terms[::-1])


def split_row_major(cell: IndexExpr, sizes: list[int]) -> list[IndexExpr]:
    """Return the indices of cell number ``cell`` in a block of ``sizes``, last axis fastest."""
    indices: list[IndexExpr] = []
    stride = 1
    for place in reversed(range(len(sizes))):
        quotient = floor_div(cell, stride)
        indices.append(quotient if place == 0 else modulo(quotient, sizes[place]))
        if sizes[place] == 1:
            indices[-1] = IndexConst(0)
        stride *= max(1, sizes[place])
    return indices[::-1]


def iterators_of(index: IndexExpr) -> set[ProjectedIterator]:
    """Return the iterators an expression depends on."""
    match index:
        case IndexIter(iterator):
            return {iterator}
        case IndexSum(terms):
            return {found for _, term in terms for found in iterators_of(term)}
        case IndexFloorDiv(arg, _) | IndexMod(arg, _):
            return iterators_of(arg)
        case IndexData(_, indices, _):
            return {found for inner in indices for found in iterators_of(inner)}
        case _:
            return set()


def reads_data(index: IndexExpr) -> bool:
    """Return whether an expression depends on the values of a tensor."""
    match index:
        case IndexData():
            return True
        case IndexSum(terms):
            return any(reads_data(term) for _, term in terms)
        case IndexFloorDiv(arg, _) | IndexMod(arg, _):
            return reads_data(arg)
        case _:
            return False
