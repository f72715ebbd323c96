"""Schedules: blocks -> loop nests, chosen by shape and named target from a small set of templates.

In: a module of kernels whose bodies are blocks. Out: a module of kernels whose bodies are loops, with the scratch buffers
that packing and split reductions need among its temporaries. A schedule may change speed and the order of sums, never an
accumulator's type nor a rounding. Prints nothing.
"""

from __future__ import annotations

from dataclasses import replace

from stagedtensor.codegen.choices import DEFAULT, Choices
from stagedtensor.codegen.loop_ir import Alloc, Block, Buffer, Cost, Module, Proc, Stmt
from stagedtensor.codegen.passes.place import Decision, Mode
from stagedtensor.codegen.rewrite import buffers_read, buffers_written, walk_stmts
from stagedtensor.codegen.schedule.analysis import prune, without_trivial_loops
from stagedtensor.codegen.schedule.choose import plan_block
from stagedtensor.codegen.schedule.congruent import solve_congruences
from stagedtensor.codegen.schedule.held import hold_wide
from stagedtensor.codegen.schedule.machine import Machine, TargetInfo, machine
from stagedtensor.codegen.schedule.slab import Group, grouped, slabs_of
from stagedtensor.codegen.schedule.together import together
from stagedtensor.codegen.schedule.twins import narrow_in_place
from stagedtensor.codegen.schedule.widened import WideCopies
from stagedtensor.numerics import Numerics

__all__ = ["TargetInfo", "schedule"]


def schedule(
    module: Module, target: TargetInfo, numerics: Numerics, *, slabs: bool = False, choices: Choices = DEFAULT
) -> Module:
    """Return ``module`` with every block turned into loops for ``target``.

    ``numerics`` is settled already in the types of accumulators and casts; schedules choose none of it. ``slabs`` lets
    kernels run together where that spares large intermediates, unless ``choices`` say otherwise.
    """
    constants, slabs = machine(target, choices), slabs and choices.slabs
    module, parts = _parts(narrow_in_place(solve_congruences(module)), constants, slabs)
    kernels: list[Proc] = []
    scratch: list[Buffer] = []
    local: set[Buffer] = set()
    copies = WideCopies()
    for part in parts:
        if isinstance(part, Group):
            whole = together(part, constants)
            if whole is not None:
                kernels.append(whole)
                local.update(part.slabs)
                copies.forget(buffers_written(whole.body))
                continue
        for kernel in part.kernels if isinstance(part, Group) else (part,):
            copies.next_kernel()
            for proc, buffers in _scheduled(kernel, constants, copies):
                kernels.append(proc)
                scratch += buffers
    stored = tuple(buffer for buffer in module.temporaries if buffer not in local)
    spared = Decision(Mode.LOCAL, "one slab of it at a time, in the kernel that makes and reads it")
    placements = {**module.placements, **{buffer.node: spared for buffer in local if buffer.node is not None}}
    return replace(module, kernels=tuple(kernels), temporaries=(*stored, *scratch), placements=placements)


def _parts(module: Module, constants: Machine, slabs: bool) -> tuple[Module, tuple[Proc | Group, ...]]:
    """Hold narrow values wide that stay in the cache, and gather what runs together."""
    parts = grouped(module) if slabs else module.kernels
    held = hold_wide(module, constants, slabs_of(parts))
    return held, parts if held is module else grouped(held) if slabs else held.kernels


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
