"""CUDA schedules: blocks -> kernels with their launch dimensions.

In: a module of kernels whose bodies are blocks. Out: a module of kernels, each one launch; ``attributes["launch"]`` of a
kernel holds its :class:`Launch`. A schedule may change speed and the order of sums, never an accumulator's type nor a
rounding. Prints nothing.
"""

from __future__ import annotations

from dataclasses import replace

from stagedtensor.codegen.loop_ir import Alloc, Block, Buffer, Module, Proc
from stagedtensor.codegen.rewrite import buffers_read, buffers_written, walk_stmts
from stagedtensor.codegen.schedule.analysis import prune
from stagedtensor.codegen.schedule.cuda.choose import plan_block
from stagedtensor.codegen.schedule.cuda.launch import CudaNest, Launch
from stagedtensor.errors import InternalError
from stagedtensor.numerics import Numerics

__all__ = ["Launch", "launch_of", "schedule_cuda"]


def schedule_cuda(module: Module, numerics: Numerics | None = None) -> Module:
    """Return ``module`` with every block turned into one or several kernels; ``numerics`` says which liberties they have."""
    chosen = numerics or Numerics()
    kernels: list[Proc] = []
    scratch: list[Buffer] = []
    for kernel in module.kernels:
        for stmt in kernel.body:
            if not isinstance(stmt, Block):
                raise InternalError(f"kernel {kernel.name} holds {type(stmt).__name__}, which has no CUDA schedule")
            base = kernel.name if len(kernel.body) == 1 else stmt.name
            for nest in plan_block(stmt, chosen):
                kernels.append(_proc(kernel, stmt, base, nest))
                scratch += nest.scratch
    return replace(module, kernels=tuple(kernels), temporaries=(*module.temporaries, *scratch))


def launch_of(proc: Proc) -> Launch:
    """Return the launch dimensions of a scheduled kernel."""
    launch = proc.attributes.get("launch")
    if not isinstance(launch, Launch):
        raise InternalError(f"kernel {proc.name} has no CUDA launch; was it scheduled for another target?")
    return launch


def _proc(kernel: Proc, block: Block, base: str, nest: CudaNest) -> Proc:
    body = prune(nest.body)
    own = {stmt.buffer for stmt in walk_stmts(body) if isinstance(stmt, Alloc)}
    params = dict.fromkeys((*buffers_read(body), *buffers_written(body)))
    return replace(
        kernel,
        name=f"{base}{nest.suffix}",
        params=tuple(buffer for buffer in params if buffer not in own),
        body=body,
        path=nest.path,
        cost=nest.cost,
        origins=block.origins or kernel.origins,
        attributes={**kernel.attributes, "launch": nest.launch},
    )
