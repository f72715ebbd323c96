"""Which cells of a buffer one iteration of a kernel's parallel loop keeps to.

In: a scheduled kernel whose body is one parallel loop, behind lets at most. Out: how many iterations there are and how
many adjacent cells each owns. Barriers and the jamming of loops ask. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from stagedtensor.codegen.affine import Affine, cell_of, constant
from stagedtensor.codegen.effects import loads_of
from stagedtensor.codegen.loop_ir import Buffer, For, Let, Load, Proc, Stmt, Store, Symbol, Var
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
    """Return how iterations of the kernel's parallel loop divide ``buffer``: each touches cells of its own only."""
    outer = parallel_loop(kernel)
    if outer is None or any(load.buffer is buffer for load in _loads(kernel.body, but=outer)):
        return None
    return _owned(outer).get(buffer)


@remembered
def _owned(outer: For) -> dict[Buffer, Ownership]:
    """Return the division of every buffer that has one."""
    count = constant(outer.iterator.extent)
    if count is None:
        return {}
    symbol = outer.iterator.symbol
    bounds = {stmt.iterator.symbol: stmt.iterator.bound for stmt in walk_stmts(outer.body) if isinstance(stmt, For)}
    around = {**bounds, symbol: count}
    cells: dict[Buffer, int | None] = {}
    for access in _touched(outer):
        known = cells.get(access.buffer, 0)
        if known is None:
            continue
        flat = cell_of(access, around)
        step = flat.coefficient(symbol)
        owned = bool(step) and known in (0, step) and _within(flat, symbol, step or 0, bounds)
        cells[access.buffer] = step if owned else None
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


def _touched(outer: For) -> Iterator[Load | Store]:
    """Yield every access of a loop."""
    for stmt in walk_stmts((outer,)):
        for expr in expressions(stmt):
            yield from loads_of(expr)
        if isinstance(stmt, Store):
            yield stmt


def _loads(body: tuple[Stmt, ...], *, but: For) -> Iterator[Load]:
    """Yield the loads of the lets around the parallel loop."""
    for stmt in body:
        if stmt is not but:
            for expr in expressions(stmt):
                yield from loads_of(expr)
