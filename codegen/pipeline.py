"""THE list of passes: from a solved program to scheduled kernels.

In: a solved program, a target, numerics. Out: a module whose kernels are loop nests, ready for emission. With
``fusion=False`` every node keeps its buffer and every statement its kernel: the oracle of the other passes. ``check``
verifies after each pass. Emission (``codegen.emit``) is not part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from stagedtensor.codegen.choices import DEFAULT, Choices
from stagedtensor.codegen.effects import named
from stagedtensor.codegen.loop_ir import Buffer, Module
from stagedtensor.codegen.lower import lower
from stagedtensor.codegen.passes.cse import cse
from stagedtensor.codegen.passes.fuse import fuse
from stagedtensor.codegen.passes.hoist import hoist
from stagedtensor.codegen.passes.inline import inline
from stagedtensor.codegen.passes.jam import jam
from stagedtensor.codegen.passes.narrow import narrow
from stagedtensor.codegen.passes.normalise_zeroing import normalise_zeroing
from stagedtensor.codegen.passes.place import Report, record_fused
from stagedtensor.codegen.passes.prune import prune
from stagedtensor.codegen.passes.recompute import recompute
from stagedtensor.codegen.passes.simplify import simplify
from stagedtensor.codegen.schedule import schedule, slab
from stagedtensor.codegen.schedule.cuda import SHARED_BYTES, schedule_cuda, side_by_side
from stagedtensor.codegen.schedule.keep_rows import keep_rows
from stagedtensor.codegen.schedule.machine import TargetInfo
from stagedtensor.codegen.solved import SolvedProgram
from stagedtensor.codegen.verify import verify
from stagedtensor.numerics import Numerics

Pass: TypeAlias = Callable[[Module], Module]

UNFUSED: tuple[tuple[str, Pass], ...] = (
    ("simplify", simplify),
    ("cse", cse),
)
"""What every program goes through; no placement, no fusion."""


def fused(report: Report, needless: Callable[[Buffer], bool] | None = None) -> tuple[tuple[str, Pass], ...]:
    """Return the passes with fusion; ``report`` takes the placement of every temporary.

    ``needless`` tells the matrices that the schedule keeps out of memory where their readers stand together.
    """
    return (
        ("simplify", simplify),
        ("prune", prune),
        ("inline", lambda module: inline(module, report)),
        ("narrow", lambda module: _changed(narrow, module, report)),
        ("recompute", lambda module: _changed(partial(recompute, needless=needless), module, report)),
        ("fuse", fuse),
        ("prune fused", lambda module: record_fused(prune(module), report)),
        ("cse", cse),
        ("name", named),
    )


def _changed(step: Pass, module: Module, report: Report) -> Module:
    """Run ``step``; values that need no buffer then go to their readers."""
    new = step(module)
    return new if new is module else inline(new, report)


def blocks(
    program: SolvedProgram, numerics: Numerics, backend: str = "cpu", *, fusion: bool = True, check: bool = False
) -> Module:
    """Lower ``program`` and run the passes before scheduling: one block per kernel, ``placements`` filled."""
    module = lower(normalise_zeroing(program), numerics, backend)
    if check:
        verify(module)
    report = Report()
    needless = slab.worth_again if backend not in ("cuda", "reference") else None
    for _, step in fused(report, needless) if fusion else UNFUSED:
        module = step(module)
        if check:
            verify(module)
    return replace(module, placements=report.by_node())


def generate(
    program: SolvedProgram,
    target: TargetInfo | str,
    numerics: Numerics,
    *,
    fusion: bool = True,
    check: bool = False,
    choices: Choices = DEFAULT,
) -> Module:
    """Compile ``program`` into scheduled kernels for ``target``; a bare name (``"reference"``) stands for no schedule."""
    if isinstance(target, str):
        return blocks(program, numerics, target, fusion=fusion, check=check)
    module = blocks(program, numerics, target.name, fusion=fusion, check=check)
    module = hoist(schedule(module, target, numerics, slabs=fusion, choices=choices))
    if fusion:
        module = keep_rows(jam(module))
    if check:
        verify(module)
    return module


def generate_cuda(
    program: SolvedProgram,
    numerics: Numerics,
    *,
    fusion: bool = True,
    check: bool = False,
    shared_bytes: int = SHARED_BYTES,
) -> Module:
    """Compile ``program`` into CUDA kernels, each with its launch.

    ``shared_bytes`` is the shared memory that a block of threads may ask for; by default, what every GPU has.
    """
    module = blocks(program, numerics, "cuda", fusion=fusion, check=check)
    module = schedule_cuda(module, numerics, fusion=fusion, shared_bytes=shared_bytes)
    return side_by_side(module) if fusion else module
