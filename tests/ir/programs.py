"""Solved programs for the tests of lowering and passes, and a way to run them with and without fusion.

``solved`` takes statements and the nodes they belong to; ``both`` interprets the unfused and the fused module on the
same values and returns what the wanted nodes hold after each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from stagedtensor.autodiff.backprop import backward_statements, fill, useful_nodes, zero_statements
from stagedtensor.codegen.interpret import run_module
from stagedtensor.codegen.loop_ir import Buffer, Module
from stagedtensor.codegen.pipeline import blocks
from stagedtensor.codegen.solved import SolvedProgram
from stagedtensor.conversion import convert
from stagedtensor.node import Node, ancestors
from stagedtensor.numerics import Numerics
from stagedtensor.precision_solver import solve_precisions
from stagedtensor.shapes.projections import project
from stagedtensor.shapes.solver import solve_shapes
from stagedtensor.specs import ALL_ROWS, Spec
from stagedtensor.statements import Access, Expr, NumberLiteral, Scope, Stage, Statement, accesses
from stagedtensor.tensor import Tensor

Array = np.ndarray[Any, Any]


def solved(statements: Sequence[Statement], keep: Iterable[Tensor | Node] = (), name: str = "step") -> SolvedProgram:
    """Solve shapes and precisions of everything the statements mention."""
    nodes: dict[Node, None] = {}
    for statement in statements:
        nodes.setdefault(statement.target.node)
        nodes.update(dict.fromkeys(access.node for access in accesses(statement.expr)))
        nodes.update(dict.fromkeys(statement.scope.nodes))
    kept = frozenset(item.node if isinstance(item, Tensor) else item for item in keep)
    shapes, precs = solve_shapes([*nodes, *kept]), solve_precisions([*nodes, *kept])
    return SolvedProgram(
        name,
        tuple(statements),
        ("",) * len(statements),
        shapes.shape,
        precs.prec,
        lambda statement: project(statement, shapes),
        kept,
    )


def forward(*roots: Tensor) -> list[Statement]:
    """The forward statements of roots, operands first."""
    nodes = ancestors([root.node for root in roots])
    return [statement for node in nodes if node.record is not None for statement in node.record.statements]


def gradients(root: Tensor, seed: float = 1.0) -> list[Statement]:
    """Forward, zero, seed and backward of one root."""
    useful = useful_nodes([root.node])
    assert root.node.gradient is not None
    return [
        *forward(root),
        *zero_statements(useful),
        fill(root.node.gradient, NumberLiteral(seed), Stage.SEED, f"{root.label}.grad =: {seed}"),
        *backward_statements([root.node], useful),
    ]


def assign(target: Tensor | Node, expr: Expr, op: Any = None, reset: bool = False, text: str = "") -> Statement:
    """``target =: expr`` or ``target =op: expr``, pointwise."""
    node = target.node if isinstance(target, Tensor) else target
    operands = tuple(dict.fromkeys(access.node for access in accesses(expr)))
    scope = Scope(
        Spec((ALL_ROWS,) * len(operands), ALL_ROWS, broadcast=True), operands, node, node.source, "set", False
    )
    if node not in [scope_.result for scope_ in node.writers]:
        node.writers.append(scope)
    return Statement(
        Access(node, ALL_ROWS), expr, scope, op, reset, Stage.UPDATE, node.source, text or f"{node.label} ="
    )


def at(tensor: Tensor | Node) -> Access:
    """The cell of a tensor at the point."""
    return Access(tensor.node if isinstance(tensor, Tensor) else tensor, ALL_ROWS)


def run(module: Module, values: Mapping[Node, Any], scalars: Mapping[str, int] | None = None) -> dict[Node, Array]:
    """Interpret a module on fresh memory holding ``values`` (constants are there already) and return what is left."""
    arrays: dict[Buffer, Array] = {}
    for buffer in module.external:
        given = values.get(buffer.node)
        if given is None:
            given = buffer.node.data if buffer.node.data is not None else 0.0
        cells = convert(np.asarray(given), buffer.type)
        whole = np.zeros(buffer.shape, buffer.type.numpy_dtype)
        if cells.ndim and cells.shape != buffer.shape:
            whole[tuple(slice(0, size) for size in cells.shape)] = cells
        else:
            whole[...] = cells
        arrays[buffer] = whole
    bound = {symbol: (scalars or {})[symbol.hint] for symbol in module.scalars}
    run_module(module, arrays, bound)
    return {buffer.node: array for buffer, array in arrays.items()}


def modules(program: SolvedProgram, **numerics: Any) -> tuple[Module, Module]:
    """The program without and with fusion, verified after each pass."""
    choices = Numerics(**numerics)
    return (
        blocks(program, choices, fusion=False, check=True),
        blocks(program, choices, fusion=True, check=True),
    )


def both(
    program: SolvedProgram,
    values: Mapping[Any, Any],
    wanted: Sequence[Tensor | Node],
    scalars: Mapping[str, int] | None = None,
    **numerics: Any,
) -> list[Array]:
    """Run with and without fusion, insist on equal bits, return the wanted nodes' values."""
    given = {key.node if isinstance(key, Tensor) else key: value for key, value in values.items()}
    plain, fused = (run(module, given, scalars) for module in modules(program, **numerics))
    results = []
    for item in wanted:
        node = item.node if isinstance(item, Tensor) else item
        same_bits(plain[node], fused[node])
        results.append(fused[node])
    return results


def same_bits(left: Array, right: Array) -> None:
    """Assert equality bit for bit, NaN payloads aside."""
    assert left.dtype == right.dtype
    assert left.shape == right.shape
    code = f"u{left.dtype.itemsize}"
    nan = np.asarray(left != left) & np.asarray(right != right)
    assert bool(np.all(nan | (left.view(code) == right.view(code)))), (left, right)
