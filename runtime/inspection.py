"""Generated source for a device that need not be there: what ``inspect`` prints.

In: a computation and the name of a device (``cpu`` or ``cuda``) or of a CPU target. Out: :class:`Generated`, the text
that the device would be given, with its kernels. Solves shapes and precisions and settles nothing; compiles and runs
nothing, so neither a compiler nor a GPU is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from stagedtensor.codegen.emit.c import emit_module
from stagedtensor.codegen.emit.cuda import emit_cuda
from stagedtensor.codegen.pipeline import generate, generate_cuda
from stagedtensor.errors import ContextError
from stagedtensor.node import HasNode
from stagedtensor.numerics import Numerics
from stagedtensor.program import Comp, as_computation, solve_program
from stagedtensor.runtime import linking, reading
from stagedtensor.runtime.device import Kernel
from stagedtensor.runtime.target import detect, target as target_by_name
from stagedtensor.runtime.thread_pool import POOL_HEADER


@dataclass(frozen=True)
class Generated:
    """A computation's source, its kernels in launch order, and a map from source lines to the user's."""

    source: str
    kernels: tuple[Kernel, ...]
    device: str
    locate: Callable[[int], str | None]


def generated(
    comp: Comp | HasNode | Iterable[HasNode],
    device: str = "cpu",
    *,
    name: str | None = None,
    target: str | None = None,
    numerics: Numerics | None = None,
) -> Generated:
    """Generate source for ``comp``; ``target`` names the CPU target, by default this machine's. ContextError otherwise."""
    computation, wanted = as_computation(comp)
    kept = frozenset(wanted)
    solved = solve_program(computation, name or computation.name, keep=kept)
    program = linking.for_codegen(solved, kept)
    chosen = numerics or Numerics()
    if device == "cuda":
        emitted = emit_cuda(generate_cuda(program, chosen))
        return Generated(emitted.text, reading.cuda_kernels(emitted), "cuda", emitted.locate)
    if device != "cpu":
        raise ContextError(f"source is generated for 'cpu' and for 'cuda', not for {device!r}")
    cpu = detect() if target is None else target_by_name(target)
    module = generate(program, cpu, chosen)
    text = emit_module(module, cpu, header=POOL_HEADER)
    return Generated(text.text, reading.kernels(module, text), f"cpu ({cpu.name})", text.locate)
