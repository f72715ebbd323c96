"""C for any target, whatever this machine is: printed, not compiled."""

from __future__ import annotations

from collections.abc import Collection

import stagedtensor as st
from stagedtensor.node import Node
from stagedtensor.program import solve_program
from stagedtensor.runtime import linking
from stagedtensor.runtime.cpu_code import CpuCode
from stagedtensor.runtime.cpu_generation import generate_cpu
from stagedtensor.runtime.target import Target


def text_for(comp: st.Comp, target: Target, keep: Collection[st.Tensor] = ()) -> tuple[CpuCode, list[Node]]:
    """Return the text of ``comp`` for ``target``, whose user reads ``keep``, and the nodes of its frame."""
    kept = frozenset(tensor.node for tensor in keep)
    numbers: dict[Node, int] = {}
    program = linking.for_codegen(solve_program(comp, "step", keep=kept), kept)
    generated = generate_cpu(program, target, st.Numerics(), numbers, fusion=True, check=False)
    nodes = list(numbers)
    return generated, [nodes[number] for number in generated.external]
