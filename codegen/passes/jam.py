"""Neighbouring kernels that walk the same rows, jammed into one: a row stays in the cache from pass to pass.

In: scheduled kernels. Out: fewer, each with one parallel loop whose body is the bodies of several::

    parallel for row: max[row] = ...           ->    parallel for row:
    parallel for row: sum[row] = ... max[row]            max[row] = ...
                                                         sum[row] = ... max[row]

Two are jammed where both loops have the same extent and every buffer that both touch and one writes is divided among
the iterations in the same way, so that none reads what another writes. Flat loops (nothing inside to run per row) and
register tiles stay apart. Statements keep their order; nothing is computed differently.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from stagedtensor.codegen.affine import constant
from stagedtensor.codegen.loop_ir import (
    Alloc,
    Buffer,
    Call,
    Cost,
    For,
    LoopKind,
    Module,
    Proc,
    Stmt,
    Symbol,
    Tile,
    Var,
    index,
)
from stagedtensor.codegen.passes.ownership import owned_cells, parallel_loop
from stagedtensor.codegen.rewrite import buffers_read, buffers_written, fresh_copy, substitute, walk_stmts

_STATIC = ", static partition over threads"


def jam(module: Module) -> Module:
    """Return ``module`` with neighbouring row kernels in one."""
    done: list[Proc] = []
    for kernel in module.kernels:
        if done and _may_jam(done[-1], kernel):
            done[-1] = _jammed(done[-1], kernel)
        else:
            done.append(kernel)
    return replace(module, kernels=tuple(done))


def jam_loops(bodies: Iterable[tuple[Stmt, ...]], fixed: Iterable[Symbol]) -> list[tuple[Stmt, ...]]:
    """Do the same for serial loops that follow one another in one kernel, the body of each behind lets at most.

    ``fixed`` are symbols that have one value for all of them; cells at different values of these are divided as well.
    """
    zeros = {symbol: index(0) for symbol in fixed}
    done: list[tuple[Proc, Proc]] = []
    for body in bodies:
        kernel = Proc("", (), tuple(_with_kind(stmt, "serial", "parallel") for stmt in body))
        alike = replace(kernel, body=substitute(kernel.body, zeros))
        if done and _may_jam(done[-1][1], alike):
            kernel, alike = _jammed(done[-1][0], kernel), _jammed(done[-1][1], alike)
            done.pop()
        done.append((kernel, alike))
    return [tuple(_with_kind(stmt, "parallel", "serial") for stmt in kernel.body) for kernel, _ in done]


def _with_kind(stmt: Stmt, old: LoopKind, new: LoopKind) -> Stmt:
    return replace(stmt, kind=new) if isinstance(stmt, For) and stmt.kind == old else stmt


def _may_jam(first: Proc, second: Proc) -> bool:
    loops = _row_loop(first), _row_loop(second)
    if loops[0] is None or loops[1] is None:
        return False
    extents = [constant(loop.iterator.extent) for loop in loops if loop is not None]
    if extents[0] is None or extents[0] != extents[1]:
        return False
    written = {*buffers_written(first.body), *buffers_written(second.body)}
    common = [buffer for buffer in _touched(first) if buffer in set(_touched(second))]
    owned = [buffer for buffer in common if _divided_alike(first, second, buffer)]
    return bool(owned) and all(buffer in owned for buffer in common if buffer in written)


def _row_loop(kernel: Proc) -> For | None:
    loop = parallel_loop(kernel)
    if loop is None:
        return None
    inside = tuple(walk_stmts(loop.body))
    if not any(isinstance(stmt, For) for stmt in inside) or any(isinstance(stmt, Call | Tile) for stmt in inside):
        return None
    tiles = any(isinstance(stmt, Alloc) and len(stmt.buffer.shape) > 1 for stmt in inside)
    return None if tiles else loop


def _touched(kernel: Proc) -> tuple[Buffer, ...]:
    own = {stmt.buffer for stmt in walk_stmts(kernel.body) if isinstance(stmt, Alloc)}
    touched = dict.fromkeys((*buffers_read(kernel.body), *buffers_written(kernel.body)))
    return tuple(buffer for buffer in touched if buffer not in own)


def _divided_alike(first: Proc, second: Proc, buffer: Buffer) -> bool:
    cells = owned_cells(first, buffer)
    return cells is not None and cells == owned_cells(second, buffer)


def _jammed(first: Proc, second: Proc) -> Proc:
    *lets, outer = first.body
    *more, inner = fresh_copy(second.body)
    assert isinstance(outer, For)
    assert isinstance(inner, For)
    body = substitute(inner.body, {inner.iterator.symbol: Var(outer.iterator.symbol)})
    loop = replace(outer, body=(*outer.body, *body))
    cost = Cost(
        first.cost.flops + second.cost.flops,
        first.cost.nbytes + second.cost.nbytes,
        max(first.cost.live_bytes, second.cost.live_bytes),
    )
    before, after = (path.removesuffix(_STATIC) for path in (first.path, second.path))
    path = f"{before}; in the same rows: {after}"
    if first.path.endswith(_STATIC) or second.path.endswith(_STATIC):
        path += _STATIC
    return replace(
        second,
        params=tuple(dict.fromkeys((*first.params, *second.params))),
        scalars=tuple(dict.fromkeys((*first.scalars, *second.scalars))),
        body=(*lets, *more, loop),
        origins=tuple(dict.fromkeys((*first.origins, *second.origins))),
        path=path,
        cost=cost,
    )
