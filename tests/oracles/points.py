"""Evaluates projected statements point by point, in f64: slow, literal, and independent of code generation."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np

from stagedtensor.dims import DynamicDim
from stagedtensor.node import Node
from stagedtensor.shapes.projections import (
    IndexConst,
    IndexData,
    IndexExpr,
    IndexFloorDiv,
    IndexIter,
    IndexMod,
    IndexStatic,
    IndexSum,
    Projected,
    project,
)
from stagedtensor.shapes.solution import ShapeSolution
from stagedtensor.statements import Access, Apply, DimValue, Expr, IterValue, LinearIndex, NumberLiteral, Statement

Arrays = dict[Node, Any]

OPS: Mapping[str, Any] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "max": max,
    "min": min,
    "eq": lambda a, b: float(a == b),
    "relu": lambda a: max(a, 0.0),
}
NEUTRAL = {"add": 0.0, "mul": 1.0, "max": -np.inf, "min": np.inf}


class Evaluator:
    """Runs projected statements over NumPy arrays of allocated sizes."""

    def __init__(self, arrays: Arrays, bound: Mapping[str, int] | None = None) -> None:
        self.arrays = arrays
        self.bound = bound or {}
        """Static indices and run-time extents by name."""

    def extent(self, extent: int | DynamicDim) -> int:
        """The extent of this run."""
        return self.bound[extent.name] if isinstance(extent, DynamicDim) else extent

    def index(self, index: IndexExpr, point: Mapping[Any, int]) -> int:
        """The value of an index expression at a point."""
        match index:
            case IndexConst(value):
                return value
            case IndexIter(iterator):
                return point[iterator]
            case IndexStatic(name, _):
                return self.bound[name]
            case IndexSum(terms, offset):
                return sum(factor * self.index(term, point) for factor, term in terms) + offset
            case IndexFloorDiv(arg, divisor):
                return self.index(arg, point) // divisor
            case IndexMod(arg, divisor):
                return self.index(arg, point) % divisor
            case IndexData(node, indices, size):
                found = self.arrays[node][tuple(self.index(inner, point) for inner in indices)]
                return min(max(int(found), 0), size - 1)
        raise AssertionError(f"an unknown index {index}")

    def value(self, expr: Expr, part: Projected, point: Mapping[Any, int]) -> float:
        """The value of a tree at a point."""
        match expr:
            case Access():
                place = tuple(self.index(index, point) for index in part.reads[expr])
                assert all(index >= 0 for index in place), "a guard let an index below zero pass"
                return float(self.arrays[expr.node][place])
            case NumberLiteral(value):
                return float(value)
            case DimValue():
                cells = part.dim_values[expr]
                return float(cells.constant * np.prod([self.extent(dim) for dim in cells.dynamic], dtype=int))
            case IterValue() | LinearIndex():
                return float(self.index(part.iter_values[expr], point))
            case Apply(op, args):
                return float(OPS[op](*(self.value(arg, part, point) for arg in args)))
        raise AssertionError(f"an unknown expression {expr}")

    def run(self, part: Projected) -> None:
        """Run one part: set or accumulate at every point, reduce iterators innermost."""
        target = self.arrays[part.statement.target.node]
        data = [iterator for iterator in part.iterators if not iterator.reduce]
        reduce = [iterator for iterator in part.iterators if iterator.reduce]
        assert list(part.iterators) == data + reduce
        op = part.statement.op
        assert op is not None or not reduce, "a set must not reduce"
        touched: set[tuple[int, ...]] = set()
        for outer in product(*(range(self.extent(iterator.extent)) for iterator in data)):
            for inner in product(*(range(self.extent(iterator.extent)) for iterator in reduce)) if reduce else [()]:
                point = dict(zip(data + reduce, outer + inner, strict=True))
                holds = all(
                    guard.low <= self.index(guard.index, point) < self.extent(guard.high) for guard in part.guards
                )
                place = tuple(self.index(index, point) for index in part.target)
                if op is not None and place not in touched and part.statement.reset:
                    target[place] = NEUTRAL[op]
                touched.add(place)
                if holds:
                    new = self.value(part.statement.expr, part, point)
                    target[place] = new if op is None else OPS[op](float(target[place]), new)
            if reduce and op is not None and part.statement.reset and not part.scatter:
                empty = any(self.extent(iterator.extent) == 0 for iterator in reduce)
                if empty:
                    target[tuple(self.index(index, dict(zip(data, outer, strict=True))) for index in part.target)] = (
                        NEUTRAL[op]
                    )
        if part.covers_target and not self.bound:
            assert len(touched) == target.size or any(self.extent(loop.extent) == 0 for loop in reduce)


def run(
    statement: Statement, solution: ShapeSolution, arrays: Arrays, bound: Mapping[str, int] | None = None
) -> np.ndarray[Any, Any]:
    """Run a statement; the target starts as NaN unless ``arrays`` holds it. Return the target's array."""
    target = statement.target.node
    if target not in arrays:
        arrays[target] = np.full(solution.shape(target).dims, np.nan)
    evaluator = Evaluator(arrays, bound)
    for part in project(statement, solution):
        evaluator.run(part)
    result: np.ndarray[Any, Any] = arrays[target]
    return result
