"""Modules built by hand, scheduled for CUDA, printed, compiled for the host and run there; the text may be edited
before.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from stagedtensor.codegen import loop_ir as ir
from stagedtensor.codegen.emit.cuda import CudaSource, emit_cuda
from stagedtensor.codegen.schedule.cuda import schedule_cuda
from stagedtensor.errors import CompileError
from stagedtensor.numerics import Numerics
from stagedtensor.runtime import emulated
from stagedtensor.runtime.emulated import EmulatedRoutine, WatchedBuffer, load_emulated
from stagedtensor.runtime.nvrtc import compile_cuda
from stagedtensor.runtime.thread_pool import available_cpus
from tests.run.blocks import Array, cache

Edit = Callable[[str], str]
SOURCES: dict[str, None] = {}
"""Every text that was compiled for the emulated device in this process."""
_host_source = emulated.host_source


def _recorded(emitted: CudaSource) -> str:
    SOURCES[emitted.text] = None
    return _host_source(emitted)


emulated.host_source = _recorded


def complaints(sources: Iterable[str], archs: Iterable[str], *, most_spilled: int = 0) -> list[str]:
    """Compile each source for each architecture; return errors, warnings and spills of more than so many bytes a
    thread.
    """

    def of(job: tuple[str, str]) -> list[str]:
        try:
            binary = compile_cuda(*job)
        except CompileError as error:
            return [f"{job[1]}: {error}"]
        warnings = [item for item in binary.warnings if "spilled" not in item]
        spills = [item for item in binary.resources if item.spill_bytes > most_spilled]
        return [f"{job[1]}: {item}" for item in (*warnings, *spills)]

    with ThreadPoolExecutor(available_cpus()) as pool:  # the compiler does not hold the interpreter's lock
        found = pool.map(of, itertools.product(list(sources), list(archs)))
        return list(itertools.chain.from_iterable(found))


def emitted(whole: ir.Module, numerics: Numerics | None = None) -> CudaSource:
    """Schedule and print a module."""
    return emit_cuda(schedule_cuda(whole, numerics))


def run_emulated(
    whole: ir.Module,
    arrays: Mapping[ir.Buffer, Array],
    scalars: Mapping[ir.Symbol, int] | None = None,
    *,
    edit: Edit | None = None,
    numerics: Numerics | None = None,
) -> dict[ir.Buffer, Array]:
    """Run the module on copies of ``arrays`` and return the copies; ``edit`` changes the text that is compiled."""
    source = emitted(whole, numerics)
    if edit is not None:
        text = edit(source.text)
        assert text != source.text, "the edit changed nothing"
        source = replace(source, text=text)
    held = {buffer: WatchedBuffer(buffer.size, buffer.type, written=True) for buffer in source.buffers}
    for buffer, watched in held.items():
        watched.cells[...] = arrays[buffer].reshape(-1)
    values = np.array([(scalars or {})[symbol] for symbol in source.scalars] or [0], np.int64)
    library = load_emulated(source, cache())
    if edit is not None:
        SOURCES.pop(source.text, None)  # a planted fault is nobody's source
    EmulatedRoutine(library, source, held, values).run()
    results: dict[ir.Buffer, Any] = {
        buffer: watched.cells.reshape(arrays[buffer].shape).copy() for buffer, watched in held.items()
    }
    return results
