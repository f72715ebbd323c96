"""Schedules: blocks -> loop nests, chosen by shape and named target from a small set of templates.

In: a module of kernels whose bodies are blocks. Out: a module of kernels whose bodies are loops, with the scratch buffers
that packing and split reductions need among its temporaries. A schedule may change speed and the order of sums, never an
accumulator's type nor a rounding. Prints nothing.
"""

from __future__ import annotations

from dataclasses import replace

from stagedtensor.codegen.loop_ir import Alloc, Block, Buffer, Cost, Module, Proc, Stmt
from stagedtensor.codegen.rewrite import buffers_read, buffers_written, walk_stmts
from stagedtensor.codegen.schedule.analysis import prune, without_trivial_loops
from stagedtensor.codegen.schedule.choose import plan_block
from stagedtensor.codegen.schedule.congruent import solve_congruences
from stagedtensor.codegen.schedule.held import hold_wide
from stagedtensor.codegen.schedule.machine import Machine, TargetInfo, machine
from stagedtensor.codegen.schedule.twins import narrow_in_place
from stagedtensor.codegen.schedule.widened import WideCopies
from stagedtensor.numerics import Numerics

__all__ = ["TargetInfo", "schedule"]


def schedule(module: Module, target: TargetInfo, numerics: Numerics) -> Module:
    """Return ``module`` with every block turned into loops for ``target``.

    ``numerics`` is settled already in the types of accumulators and casts; schedules choose none of it.
    """
    constants = machine(target)
    module = hold_wide(narrow_in_place(solve_congruences(module)), constants)
    kernels: list[Proc] = []
    scratch: list[Buffer] = []
    copies = WideCopies()
    for kernel in module.kernels:
        copies.next_kernel()
        for proc, buffers in _scheduled(kernel, constants, copies):
            kernels.append(proc)
            scratch += buffers
    return replace(module, kernels=tuple(kernels), temporaries=(*module.temporaries, *scratch))


def _scheduled(kernel: Proc, constants: Machine, copies: WideCopies) -> list[tuple[Proc, tuple[Buffer, ...]]]:
    blocks = [stmt for stmt in kernel.body if isinstance(stmt, Block)]
    if not blocks:
        copies.forget(buffers_written(kernel.body))
        return [(kernel, ())]
    done: list[tuple[Proc, tuple[Buffer, ...]]] = []
    for stmt in kernel.body:
        if not isinstance(stmt, Block):
            done.append((_proc(kernel, kernel.name, (stmt,), kernel.path, kernel.cost), ()))
            copies.forget(buffers_written(stmt))
            continue
        base = kernel.name if len(blocks) == 1 else stmt.name
        for nest in plan_block(stmt, constants, copies):
            proc = _proc(kernel, f"{base}{nest.suffix}", nest.body, nest.path, nest.cost)
            if stmt.origins:
                proc = replace(proc, origins=stmt.origins)
            done.append((proc, nest.scratch))
        copies.forget(buffers_written(stmt))
    return done


def _proc(kernel: Proc, name: str, body: tuple[Stmt, ...], path: str, cost: Cost) -> Proc:
    body = prune(without_trivial_loops(body))
    own = {stmt.buffer for stmt in walk_stmts(body) if isinstance(stmt, Alloc)}
    params = dict.fromkeys((*buffers_read(body), *buffers_written(body)))
    return replace(
        kernel,
        name=name,
        params=tuple(buffer for buffer in params if buffer not in own),
        body=body,
        path=path,
        cost=cost,
    )
