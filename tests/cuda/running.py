"""Modules built by hand, scheduled for CUDA, printed, compiled for the host and run there; the text may be edited before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from stagedtensor.codegen import loop_ir as ir
from stagedtensor.codegen.emit.cuda import CudaSource, emit_cuda
from stagedtensor.codegen.schedule.cuda import schedule_cuda
from stagedtensor.numerics import Numerics
from stagedtensor.runtime import emulated
from stagedtensor.runtime.emulated import EmulatedRoutine, WatchedBuffer, load_emulated
from tests.run.blocks import Array, cache

Edit = Callable[[str], str]
SOURCES: dict[str, None] = {}
"""Every text that was compiled for the emulated device in this process."""
_host_source = emulated.host_source


def _recorded(emitted: CudaSource) -> str:
    SOURCES[emitted.text] = None
    return _host_source(emitted)


emulated.host_source = _recorded


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
