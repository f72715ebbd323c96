"""Schedules: blocks -> loop nests, chosen by shape and named target from a small set of templates.

In: a module of kernels whose bodies are blocks. Out: a module of kernels whose bodies are loops, with the scratch
buffers that packing and split reductions need among its temporaries. A schedule may change speed and the order of sums,
never an accumulator's type nor a rounding. Prints nothing.
"""

from __future__ import annotations

from dataclasses import replace

from stagedtensor.codegen.choices import DEFAULT, Choices
from stagedtensor.codegen.loop_ir import Alloc, Block, Buffer, Cost, Module, Proc, Stmt
from stagedtensor.codegen.passes.place import Decision, Mode
from stagedtensor.codegen.rewrite import buffers_read, buffers_written, walk_stmts
from stagedtensor.codegen.schedule.analysis import contraction, prune, without_trivial_loops
from stagedtensor.codegen.schedule.choose import plan_block
from stagedtensor.codegen.schedule.congruent import solve_congruences
from stagedtensor.codegen.schedule.held import hold_wide
from stagedtensor.codegen.schedule.machine import Machine, MatrixUnit, TargetInfo, machine
from stagedtensor.codegen.schedule.matrix_tile import on_matrix_unit
from stagedtensor.codegen.schedule.maxima import Taken, taken_where_written
from stagedtensor.codegen.schedule.nest import collapse
from stagedtensor.codegen.schedule.slab import Group, grouped, slabs_of
from stagedtensor.codegen.schedule.together import together
from stagedtensor.codegen.schedule.twins import narrow_in_place
from stagedtensor.codegen.schedule.widened import WideCopies
from stagedtensor.numerics import Numerics

__all__ = ["TargetInfo", "schedule"]

_MOST_STORED_CELLS = 1 << 25
"""Cells of the matrices of a group up to which they are stored where that lets matrix tiles multiply them."""


def schedule(
    module: Module, target: TargetInfo, numerics: Numerics, *, slabs: bool = False, choices: Choices = DEFAULT
) -> Module:
    """Return ``module`` with every block turned into loops for ``target``.

    ``numerics`` is settled already in the types of accumulators and casts; schedules choose none of it. ``slabs`` lets
    kernels run together where that spares large intermediates, unless ``choices`` say otherwise.
    """
    constants = machine(target, choices)
    joins = slabs
    # On matrix tiles slabs are sums in another order.
    slabs = slabs and (choices.slabs or constants.matrix_unit is MatrixUnit.TILES)
    module, parts = _parts(narrow_in_place(solve_congruences(module)), constants, slabs)
    kernels: list[Proc] = []
    scratch: list[Buffer] = []
    local: set[Buffer] = set()
    copies = WideCopies()
    for part in parts:
        if isinstance(part, Group):
            on_tiles = constants.matrix_unit is MatrixUnit.TILES
            # On matrix tiles slabs are f32.
            whole = together(part, replace(constants, matrix_unit=None) if on_tiles else constants)
            if whole is not None:
                kernels.append(whole)
                local.update(part.slabs)
                copies.forget(buffers_written(whole.body))
                continue
        for kernel in part.kernels if isinstance(part, Group) else (part,):
            copies.next_kernel()
            if joins and (taken := _taken(kernel, kernels, constants)) is not None:
                kernels[taken.place] = taken.kernel
                scratch.append(taken.parts)
                kernel = replace(kernel, body=(taken.merge,))
            for proc, buffers in _scheduled(kernel, constants, copies):
                kernels.append(proc)
                scratch += buffers
    stored = tuple(buffer for buffer in module.temporaries if buffer not in local)
    spared = Decision(Mode.LOCAL, "one slab of it at a time, in the kernel that makes and reads it")
    placements = {**module.placements, **{buffer.node: spared for buffer in local if buffer.node is not None}}
    return replace(module, kernels=tuple(kernels), temporaries=(*stored, *scratch), placements=placements)


def _parts(module: Module, constants: Machine, slabs: bool) -> tuple[Module, tuple[Proc | Group, ...]]:
    """Hold narrow values wide that stay in the cache, and gather what runs together."""
    parts = _gathered(module, constants) if slabs else module.kernels
    held = hold_wide(module, constants, slabs_of(parts))
    return held, parts if held is module else _gathered(held, constants) if slabs else held.kernels


def _gathered(module: Module, constants: Machine) -> tuple[Proc | Group, ...]:
    """Return the groups of kernels and the others; what matrix tiles compute faster one by one stays apart unless large."""
    parts: list[Proc | Group] = []
    for part in grouped(module):
        if isinstance(part, Group) and constants.matrix_unit is MatrixUnit.TILES and _for_matrix_tiles(part):
            parts += part.kernels
        else:
            parts.append(part)
    return tuple(parts)


def _for_matrix_tiles(group: Group) -> bool:
    if sum(slab.size for slab in group.slabs) > _MOST_STORED_CELLS:
        return False
    found = [contraction(collapse(block)) for block in group.blocks if block.accumulators and not block.scatter]
    return any(item is not None and on_matrix_unit(item, MatrixUnit.TILES) for item in found)


def _taken(kernel: Proc, before: list[Proc], constants: Machine) -> Taken | None:
    block = kernel.body[0] if len(kernel.body) == 1 else None
    return taken_where_written(block, before, constants) if isinstance(block, Block) else None


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
