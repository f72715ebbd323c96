"""A solved program becomes C for a CPU target: code generation, emission and the table of kernels in one call.

In: a solved program, a target, numerics. Out: a :class:`~stagedtensor.runtime.cpu_code.CpuCode`. Loading this module
loads the compiler of the package, which a routine from the kernel cache does without.
"""

from __future__ import annotations

from stagedtensor.codegen.choices import DEFAULT, Choices
from stagedtensor.codegen.emit.c import CSource, emit_module
from stagedtensor.codegen.emit.units import units
from stagedtensor.codegen.pipeline import generate
from stagedtensor.codegen.solved import SolvedProgram
from stagedtensor.node import Node
from stagedtensor.numerics import Numerics
from stagedtensor.runtime import reading
from stagedtensor.runtime.compiler import Unit
from stagedtensor.runtime.cpu_code import CpuCode, Function
from stagedtensor.runtime.target import Target
from stagedtensor.runtime.thread_pool import POOL_HEADER


def generate_cpu(
    program: SolvedProgram,
    target: Target,
    numerics: Numerics,
    numbers: dict[Node, int],
    *,
    fusion: bool,
    check: bool,
    choices: Choices = DEFAULT,
) -> CpuCode:
    """Generate the source of ``program``.

    ``numbers`` says which number stands for a node in the result; nodes that have none are given the next.
    """
    module = generate(program, target, numerics, fusion=fusion, check=check, choices=choices)
    emitted = emit_module(module, target, header=POOL_HEADER)
    return CpuCode(
        text=emitted.text,
        entry=emitted.entry,
        external=tuple(numbers.setdefault(buffer.node, len(numbers)) for buffer in emitted.buffers),
        scalars=tuple(symbol.hint for symbol in emitted.scalars),
        kernels=reading.kernels(module, emitted),
        functions=_functions(emitted),
        temporaries=reading.planned(emitted.plan),
        types=reading.types(module),
        arena_bytes=emitted.arena_bytes,
        thread_bytes=emitted.thread_bytes,
        saved_bytes=emitted.plan.saved,
        recomputed_bytes=module.recomputed,
        flops=sum(kernel.cost.flops for kernel in module.kernels),
        nbytes=sum(kernel.cost.nbytes for kernel in module.kernels),
    )


def _functions(emitted: CSource) -> tuple[Function, ...]:
    """Kernels that differ in names alone share a function, which stands once."""
    lines = sorted({kernel.lines for kernel in emitted.kernels})
    return tuple(Function(first, last, emitted.locate(first)) for first, last in lines)


def translation_units(code: CpuCode, wanted: int) -> tuple[Unit, ...]:
    """Return the source in at most ``wanted`` parts and the routine, to be compiled side by side; none where it is short."""
    found = units(code.text, [(item.first, item.last) for item in code.functions], wanted, file="routine.c")
    if found is None:
        return ()
    # The routine calls and computes nothing. The optimiser takes long for so many calls, and would gain nothing.
    return (*map(Unit, found.kernels), Unit(found.routine, ("-O0",)))
