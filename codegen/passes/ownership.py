"""Which cells of a buffer one iteration of a kernel's parallel loop keeps to.

In: a scheduled kernel whose body is one parallel loop, behind lets at most. Out: how many iterations there are and how many
adjacent cells each owns. Barriers and the jamming of loops ask. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from stagedtensor.codegen.affine import Affine, constant, flat_index
from stagedtensor.codegen.loop_ir import Buffer, For, Let, Load, Proc, Store, Symbol, Var, walk
from stagedtensor.codegen.rewrite import expressions, walk_stmts

Ownership = tuple[int, int]
"""Iterations, and cells of each."""


def parallel_loop(kernel: Proc) -> For | None:
    """Return the parallel loop that is all of a kernel but for lets, None where there is more or none."""
    loops = [stmt for stmt in kernel.body if not isinstance(stmt, Let)]
    if len(loops) == 1 and isinstance(loops[0], For) and loops[0].kind == "parallel":
        return loops[0]
    return None


def owned_cells(kernel: Proc, buffer: Buffer) -> Ownership | None:
    """Return how the iterations of the kernel's parallel loop divide ``buffer``: iteration i touches only its own cells."""
    outer = parallel_loop(kernel)
    count = None if outer is None else constant(outer.iterator.extent)
    if outer is None or count is None:
        return None
    symbol = outer.iterator.symbol
    bounds = {stmt.iterator.symbol: stmt.iterator.bound for stmt in walk_stmts(outer.body) if isinstance(stmt, For)}
    cells: int | None = None
    for flat in _touched(kernel, buffer, {**bounds, symbol: count}):
        step = flat.coefficient(symbol)
        if not step or (cells is not None and step != cells) or not _within(flat, symbol, step, bounds):
            return None
        cells = step
    return None if cells is None else (count, cells)


def _within(flat: Affine, symbol: Symbol, step: int, bounds: dict[Symbol, int]) -> bool:
    """Tell whether the rest of the index stays inside one step of the parallel loop."""
    rest = flat.without(symbol)
    greatest = rest.constant
    for atom, factor in rest.terms:
        if not isinstance(atom, Var) or atom.symbol not in bounds or factor < 0:
            return False
        greatest += factor * max(0, bounds[atom.symbol] - 1)
    return rest.constant >= 0 and greatest < step


def _touched(kernel: Proc, buffer: Buffer, bounds: dict[Symbol, int]) -> Iterator[Affine]:
    for stmt in walk_stmts(kernel.body):
        for expr in expressions(stmt):
            for part in walk(expr):
                if isinstance(part, Load) and part.buffer is buffer:
                    yield flat_index(buffer, part.indices, bounds)
        if isinstance(stmt, Store) and stmt.buffer is buffer:
            yield flat_index(buffer, stmt.indices, bounds)
