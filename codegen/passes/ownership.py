"""Which cells of a buffer one iteration of a kernel's parallel loop keeps to.

In: a scheduled kernel whose body is one parallel loop, behind lets at most. Out: how many iterations there are and how many
adjacent cells each owns. Barriers and the jamming of loops ask. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from stagedtensor.codegen.affine import Affine, constant, flat_index
from stagedtensor.codegen.loop_ir import Buffer, Expr, For, Let, Load, Proc, Store, Symbol, Var, walk
from stagedtensor.codegen.pieces import remembered
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
    return _owned(kernel).get(buffer)


@remembered
def _owned(kernel: Proc) -> dict[Buffer, Ownership]:
    """Return the division of every buffer that has one."""
    outer = parallel_loop(kernel)
    count = None if outer is None else constant(outer.iterator.extent)
    if outer is None or count is None:
        return {}
    symbol = outer.iterator.symbol
    bounds = {stmt.iterator.symbol: stmt.iterator.bound for stmt in walk_stmts(outer.body) if isinstance(stmt, For)}
    around = {**bounds, symbol: count}
    cells: dict[Buffer, int | None] = {}
    for buffer, indices in _touched(kernel):
        known = cells.get(buffer, 0)
        if known is None:
            continue
        flat = flat_index(buffer, indices, around)
        step = flat.coefficient(symbol)
        owned = bool(step) and known in (0, step) and _within(flat, symbol, step or 0, bounds)
        cells[buffer] = step if owned else None
    return {buffer: (count, step) for buffer, step in cells.items() if step is not None}


def _within(flat: Affine, symbol: Symbol, step: int, bounds: dict[Symbol, int]) -> bool:
    """Tell whether the rest of the index stays inside one step of the parallel loop."""
    rest = flat.without(symbol)
    greatest = rest.constant
    for atom, factor in rest.terms:
        if not isinstance(atom, Var) or atom.symbol not in bounds or factor < 0:
            return False
        greatest += factor * max(0, bounds[atom.symbol] - 1)
    return rest.constant >= 0 and greatest < step


def _touched(kernel: Proc) -> Iterator[tuple[Buffer, tuple[Expr, ...]]]:
    """Yield every access of a kernel: the buffer and the indices."""
    for stmt in walk_stmts(kernel.body):
        for expr in expressions(stmt):
            for part in walk(expr):
                if isinstance(part, Load):
                    yield part.buffer, part.indices
        if isinstance(stmt, Store):
            yield stmt.buffer, stmt.indices
