"""Scatters along affine axes as reductions: each cell of the target gathers the points that would have written it.

In: a projected accumulation whose target is indexed ``stride * o + dilation * k + offset`` (the gradient of a
convolution or a window). Out: the same sums over the target's own cells, ``o`` solved for and guarded, or None where
the target's indices have another form (gathered ones stay scatters). Points of one cell are added in the order of the
axes that remain, with or without fusion::

    dx[o + k] += dy[o] * w[k]   over o < 4, k < 3
    dx[t] += dy[t - k] * w[k]   over t < 6, k < 3 where 0 <= t - k < 4
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from stagedtensor.shapes.index import (
    Guard,
    IndexConst,
    IndexData,
    IndexExpr,
    IndexFloorDiv,
    IndexIter,
    IndexMod,
    IndexSum,
    Projected,
    ProjectedIterator,
    floor_div,
    index_sum,
    iterators_of,
    modulo,
)

Solution = Mapping[ProjectedIterator, IndexExpr]


def pulled(projected: Projected, shape: tuple[int, ...]) -> Projected | None:
    """Return a scatter into a target of ``shape`` as a reduction, None where it has to stay one."""
    if not projected.scatter or projected.statement.op in (None, "argmax", "argmin"):
        return None
    solution: dict[ProjectedIterator, IndexExpr] = {}
    cells: list[ProjectedIterator] = []
    target: list[IndexExpr] = []
    guards: list[Guard] = []
    for axis, (index, size) in enumerate(zip(projected.target, shape, strict=True)):
        others = [other for at, other in enumerate(projected.target) if at != axis]
        if isinstance(index, IndexConst):
            target.append(index)
            continue
        if isinstance(index, IndexIter) and not _used(index.iterator, others):
            cells.append(replace(index.iterator, reduce=False))
            solution[index.iterator] = IndexIter(cells[-1])
            target.append(IndexIter(cells[-1]))
            continue
        terms = _affine(index)
        if terms is None or any(_used(iterator, others) for _, iterator in terms):
            return None
        assert isinstance(index, IndexSum)
        cells.append(ProjectedIterator(f"cell{axis}", size, reduce=False))
        target.append(IndexIter(cells[-1]))
        # The longest axis is solved for: the fewest points are tried in vain.
        step, solved = max(terms, key=lambda term: term[1].size)
        rest = [(-factor, IndexIter(iterator)) for factor, iterator in terms if iterator is not solved]
        distance = index_sum([(1, IndexIter(cells[-1])), *rest], -index.offset)
        solution[solved] = floor_div(distance, step)
        guards.append(Guard(solution[solved], 0, solved.extent))
        if step > 1:
            guards.append(Guard(modulo(distance, step), 0, 1))
    return _rebuilt(projected, shape, solution, cells, target, guards)


def _rebuilt(
    projected: Projected,
    shape: tuple[int, ...],
    solution: dict[ProjectedIterator, IndexExpr],
    cells: list[ProjectedIterator],
    target: list[IndexExpr],
    guards: list[Guard],
) -> Projected:
    left = [replace(item, reduce=True) for item in projected.iterators if item not in solution]
    renamed: dict[ProjectedIterator, IndexExpr] = {
        item: IndexIter(new)
        for item, new in zip((item for item in projected.iterators if item not in solution), left, strict=True)
    }
    whole: Solution = renamed | {item: substituted(index, renamed) for item, index in solution.items()}
    inside = {index: size for index, size in zip(projected.target, shape, strict=True)}
    kept = tuple(
        Guard(substituted(item.index, whole), item.low, item.high)
        for item in projected.guards
        # Every cell of the target is inside the target.
        if not (
            item.index in inside and item.low <= 0 and isinstance(item.high, int) and item.high >= inside[item.index]
        )
    )
    return replace(
        projected,
        iterators=(*cells, *left),
        target=tuple(target),
        reads={access: tuple(substituted(index, whole) for index in read) for access, read in projected.reads.items()},
        guards=(*kept, *(Guard(substituted(item.index, renamed), item.low, item.high) for item in guards)),
        iter_values={value: substituted(index, whole) for value, index in projected.iter_values.items()},
        covers_target=True,
        scatter=False,
    )


def _affine(index: IndexExpr) -> list[tuple[int, ProjectedIterator]] | None:
    """The terms of a sum of several iterators with positive steps."""
    if not isinstance(index, IndexSum) or len(index.terms) < 2:
        return None
    terms = []
    for factor, part in index.terms:
        if not isinstance(part, IndexIter) or factor < 1:
            return None
        terms.append((factor, part.iterator))
    return terms


def _used(iterator: ProjectedIterator, indices: list[IndexExpr]) -> bool:
    return any(iterator in iterators_of(index) for index in indices)


def substituted(index: IndexExpr, values: Solution) -> IndexExpr:
    """Return an index with iterators replaced."""
    match index:
        case IndexIter(iterator):
            return values.get(iterator, index)
        case IndexSum(terms, offset):
            return index_sum([(factor, substituted(part, values)) for factor, part in terms], offset)
        case IndexFloorDiv(arg, divisor):
            return floor_div(substituted(arg, values), divisor)
        case IndexMod(arg, divisor):
            return modulo(substituted(arg, values), divisor)
        case IndexData(node, indices, size):
            return IndexData(node, tuple(substituted(part, values) for part in indices), size)
        case _:
            return index
