"""What the two devices that run CUDA source have in common: a program becomes source, and source a routine that binds.

In: a program, how a device loads source, and how it binds what it loaded to buffers. Out: an :class:`Executable`. Runs
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from stagedtensor.codegen.emit.cuda import CudaSource, emit_cuda
from stagedtensor.codegen.loop_ir import Buffer
from stagedtensor.codegen.pipeline import generate_cuda
from stagedtensor.codegen.schedule.cuda import SHARED_BYTES
from stagedtensor.codegen.solved import SolvedProgram
from stagedtensor.numerics import Numerics
from stagedtensor.runtime import reading
from stagedtensor.runtime.device import Array, Executable
from stagedtensor.runtime.kernel_cache import KernelCache

Loaded = TypeVar("Loaded")
Start = Callable[[Loaded, CudaSource, dict[Buffer, Any], Array], Callable[[], None]]
"""From what was loaded, the source, the device buffer of each buffer and the scalars: what launches the routine."""


def cuda_executable(
    program: SolvedProgram,
    numerics: Numerics,
    cache: KernelCache,
    load: Callable[[CudaSource], Loaded],
    start: Start[Loaded],
    *,
    fusion: bool,
    debug: bool,
    shared_bytes: int = SHARED_BYTES,
) -> Executable:
    """Generate CUDA source for ``program`` and load it; ``cache`` tells whether that compiled anything."""
    module = generate_cuda(program, numerics, fusion=fusion, check=debug, shared_bytes=shared_bytes)
    emitted = emit_cuda(module)
    builds = cache.counts.builds
    loaded = load(emitted)

    def bind(buffers: Sequence[Any], scalars: Array) -> Callable[[], None]:
        return start(loaded, emitted, dict(zip(emitted.buffers, buffers, strict=True)), scalars)

    return Executable(
        emitted.text,
        reading.cuda_kernels(emitted),
        tuple(buffer.node for buffer in emitted.buffers),
        tuple(symbol.hint for symbol in emitted.scalars),
        bind,
        temporaries=reading.planned(emitted.plan),
        arena_bytes=emitted.arena_bytes,
        saved_bytes=emitted.plan.saved,
        recomputed_bytes=module.recomputed,
        from_cache=cache.counts.builds == builds,
        types=reading.types(module),
        language="cuda",
        locate=emitted.locate,
    )
