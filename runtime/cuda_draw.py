"""Initial values drawn on a GPU: one small kernel per distribution, with the prelude's generator.

In: a distribution and the number of cells. Out: the CUDA source of the kernel that fills them. Cell i is draw i of the
stream that two key words name, so the bits are those that every other device draws. Loads and launches nothing.
"""

from __future__ import annotations

import numpy as np

from stagedtensor.codegen.emit.cuda import CudaKernel, CudaSource
from stagedtensor.codegen.loop_ir import Buffer, Proc
from stagedtensor.codegen.passes.plan_memory import MemoryPlan
from stagedtensor.codegen.prelude import prelude_source
from stagedtensor.codegen.schedule.cuda.launch import THREADS, Launch, blocks_for
from stagedtensor.precision import f32, u32
from stagedtensor.runtime.device import Array

_KERNEL = """
// {kind} values: range[0] + range[1] * draw; key: two words of the stream, then how many cells, low word first
extern "C" __global__ void __launch_bounds__({threads}) st_fill_{kind}(
    float *__restrict__ cells,
    const uint32_t *__restrict__ key,
    const float *__restrict__ range
) {{
    const int64_t count = (int64_t)((uint64_t)key[3] << 32 | key[2]);
    for (int64_t i = (int64_t)blockIdx.x * {threads} + threadIdx.x; i < count; i += (int64_t)gridDim.x * {threads}) {{
        const float scaled = range[1] * st_random_{kind}_f32(key[0], key[1], (uint64_t)i);
        cells[i] = range[0] + scaled;
    }}
}}
"""


def fill_source(kind: str, count: int) -> CudaSource:
    """Return the kernel that fills ``count`` f32 cells with "uniform" or "normal" values; all arguments are buffers."""
    text = prelude_source([f"st_random_{kind}_f32"], dialect="cuda") + _KERNEL.format(kind=kind, threads=THREADS)
    cells, key, spread = Buffer("cells", f32, (count,)), Buffer("key", u32, (4,)), Buffer("range", f32, (2,))
    buffers = (cells, key, spread)
    name = f"st_fill_{kind}"
    kernel = CudaKernel(
        Proc(name, buffers, ()),
        name,
        text,
        (1, text.count("\n") + 1),
        Launch(blocks_for(count), THREADS),
        buffers,
        frozenset({cells}),
        scalars=False,
        shared_bytes=0,
    )
    return CudaSource(text, (kernel,), buffers, (), 0, MemoryPlan())


def fill_arguments(count: int, key: tuple[int, int], first: float, second: float) -> tuple[Array, Array]:
    """Return the contents of the kernel's ``key`` and ``range``."""
    return (
        np.array([key[0], key[1], count & 0xFFFFFFFF, count >> 32], np.uint32),
        np.array([first, second], np.float32),
    )
