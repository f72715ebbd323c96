"""Turning modules into what people read: kernel descriptions and memory lines."""

from __future__ import annotations

from dataclasses import replace

from stagedtensor.codegen.emit.c import CSource, used_buffers
from stagedtensor.codegen.emit.cuda import CudaSource
from stagedtensor.codegen.loop_ir import Buffer, Module, Origin, Proc
from stagedtensor.codegen.passes.plan_memory import MemoryPlan
from stagedtensor.codegen.pretty import pretty
from stagedtensor.codegen.rewrite import buffers_read, buffers_written
from stagedtensor.runtime.device import Kernel, MemoryLine


def kernels(module: Module, emitted: CSource | None) -> tuple[Kernel, ...]:
    """Describe the kernels of a module; their text is the emitted C, or the printed IR where there is none."""
    texts = {} if emitted is None else {kernel.proc: kernel.text for kernel in emitted.kernels}
    return tuple(_kernel(proc, texts.get(proc) or pretty(proc)) for proc in module.kernels)


def _kernel(proc: Proc, text: str) -> Kernel:
    shared = set(used_buffers(proc))
    return Kernel(
        name=proc.name,
        expressions=tuple(dict.fromkeys(map(_expression, proc.origins))),
        source=text,
        launch=str(proc.attributes.get("launch", "")),
        reads=tuple(buffer.name for buffer in buffers_read(proc.body) if buffer in shared),
        writes=tuple(buffer.name for buffer in buffers_written(proc.body) if buffer in shared),
        flops=proc.cost.flops,
        nbytes=proc.cost.nbytes,
        path=proc.path,
    )


def _expression(origin: Origin) -> str:
    return f"{origin.text} ({origin.source})"


def _line(buffer: Buffer, live: tuple[int, int] | None, offset: int | None) -> MemoryLine:
    return MemoryLine(buffer.name, str(list(buffer.shape)), str(buffer.type), buffer.nbytes, live, offset)


def cuda_kernels(emitted: CudaSource) -> tuple[Kernel, ...]:
    """Describe the kernels of a routine in CUDA."""
    return tuple(
        replace(
            _kernel(kernel.proc, kernel.text),
            name=kernel.name,
            launch=str(kernel.launch),
            shared_bytes=kernel.shared_bytes,
            threads=kernel.launch.threads,
        )
        for kernel in emitted.kernels
    )


def planned(plan: MemoryPlan) -> tuple[MemoryLine, ...]:
    """Describe the arena of a routine."""
    return tuple(_line(item.buffer, (item.first, item.last), item.offset) for item in plan.placements)


def unplanned(module: Module) -> tuple[MemoryLine, ...]:
    """Describe temporaries that have memory of their own."""
    return tuple(_line(buffer, None, None) for buffer in module.temporaries)


def types(module: Module) -> dict[str, str]:
    """Return the format of every buffer that kernels share, by name."""
    return {buffer.name: buffer.type.name for kernel in module.kernels for buffer in kernel.params}
