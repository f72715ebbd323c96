"""The status of every public op: which back ends, gradient rules, exports and encodings it has.

In: the rows of ``public_ops``. Out: the matrix, as Markdown or JSON, and what is wrong with the tables behind it. A
cell is found by building the op's sample and generating code, gradients or a module for it; no compiler is started and
nothing is run, which is for tests to do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import vocabulary
from .autodiff.backprop import trained
from .autodiff.rules import DERIVATIVES
from .autodiff.structural import STRUCTURAL
from .block_formats import PACKED_ENCODINGS, Encoding, TernaryPacked
from .codegen.pipeline import blocks
from .encoded import Encoded
from .errors import StagedTensorError
from .export import to_stablehlo
from .functions.reductions import sum_
from .node import ancestors
from .numerics import Numerics
from .op_table import OPS
from .precision import f32, i32
from .program import solve_program
from .public_ops import BLOCKS, PUBLIC_OPS, SPELLED, PublicOp, Sample, sample
from .runtime.inspection import generated
from .runtime.linking import for_codegen
from .session import Session
from .statements import Apply, OpRecord, walk
from .terminals import constant
from .train import grad_update

COLUMNS = ("op", "forward C", "forward CUDA", "Backward", "StableHLO", "fused encodings")
_YES, _NO, _NONE = "yes", "no", "n/a"
_CPU = "x86-64"
_ROWS, _BLOCKS = 8, 3
"""Rows of an encoded sample, and blocks of each row."""


@dataclass(frozen=True)
class Status:
    """One row of the matrix.

    ``encodings`` are the packed ones that the op decodes as it reads, None where it reads none. ``kind`` is
    ``composite`` for an op made of others that rounds once; ``arity`` counts operands.
    """

    name: str
    kind: str
    arity: int
    c: bool
    cuda: bool
    backward: bool
    stablehlo: bool
    encodings: tuple[str, ...] | None
    non_differentiable: str = ""

    def cells(self) -> tuple[str, ...]:
        """Return the row as the page shows it."""
        backward = _NONE if self.non_differentiable and not self.backward else _yes(self.backward)
        encodings = _NONE if self.encodings is None else str(len(self.encodings))
        return self.name, _yes(self.c), _yes(self.cuda), backward, _yes(self.stablehlo), encodings


def _yes(found: bool) -> str:
    return _YES if found else _NO


def status(rows: Mapping[str, PublicOp] = PUBLIC_OPS) -> list[Status]:
    """Return the matrix: one entry per row."""
    with Session():
        return [_status(row) for row in rows.values()]


def _status(row: PublicOp) -> Status:
    built = sample(row)
    record = built.result.node.record
    return Status(
        row.name,
        "composite" if record is not None and record.composite is not None else "primitive",
        len(row.operands),
        _works(lambda: generated(built.result, "cpu", target=_CPU)),
        _works(lambda: generated(built.result, "cuda")),
        _works(lambda: solve_program(grad_update(sum_(built.result)))),
        _works(lambda: to_stablehlo(built.result)),
        None if row.weight is None else tuple(str(item) for item in PACKED_ENCODINGS if _reads_fused(row, item)),
        row.non_differentiable,
    )


def _works(attempt: Callable[[], Any]) -> bool:
    """Whether an attempt succeeds; what the package refuses is a no, everything else is a fault and is raised."""
    try:
        attempt()
    except StagedTensorError:
        return False
    return True


def _reads_fused(row: PublicOp, encoding: Encoding) -> bool:
    """Whether the op is computed from packed bytes on both back ends, with no buffer as large as the decoded matrix.

    Fusion decides that; scheduling, which takes longer, adds no such buffer.
    """
    assert row.weight is not None
    width = 256 * _BLOCKS
    scale = 1.0 if encoding is TernaryPacked else None
    weight = Encoded((_ROWS, width), f32, encoding, bytes(encoding.size(_ROWS * width)), scale=scale)
    x, ids = constant(np.zeros(width, np.float32)), constant(np.arange(2), prec=i32)
    try:
        result = row.weight(constant(weight), x, ids)
        program = for_codegen(solve_program(result), frozenset((result.node,)))
        modules = [blocks(program, Numerics(), backend) for backend in ("cpu", "cuda")]
    except StagedTensorError:
        return False
    buffers = (buffer for module in modules for buffer in (*module.external, *module.temporaries))
    return all(buffer.type is not f32 or buffer.size < weight.size for buffer in buffers)


# -- checks of the tables ---------------------------------------------------------------------------------------------


def problems(rows: Mapping[str, PublicOp] = PUBLIC_OPS) -> list[str]:
    """Return what is wrong with the tables of ops, rules and samples; nothing where they are complete."""
    with Session():
        samples = [sample(row) for row in rows.values() if row.operands]
        return [
            *_without_a_sample(rows, samples),
            *(text for built in samples for text in _gradient_problems(built)),
            *_rule_problems(samples),
        ]


def _without_a_sample(rows: Mapping[str, PublicOp], samples: Iterable[Sample]) -> Iterator[str]:
    functions = {
        name
        for name, word in vocabulary.language.words.words().items()
        if getattr(word, "__module__", "").startswith(("stagedtensor.functions.", "stagedtensor.losses"))
    }
    for name in sorted(functions - BLOCKS.keys()):
        if SPELLED.get(name, name) not in rows:
            yield f"{name}: a public function without a row in public_ops"
    for row in rows.values():
        if not row.operands:
            yield f"{row.name}: a row without operands has no sample"
    seen = {op for built in samples for record in _records(built) for op in _scalar_ops(record)}
    for name, op in OPS.items():
        if name not in seen and op.op_class != "random" and name not in _INTERNAL:
            yield f"{name}: a scalar op that no sample computes"


_INTERNAL = {
    "nonfinite": "the finiteness test that gradient updates emit",
    "identity": "the bare operand of a statement",
}


def _gradient_problems(built: Sample) -> Iterator[str]:
    reason, name = built.op.non_differentiable, built.op.name
    reaches = bool(trained([sum_(built.result).node]))
    if reason and reaches:
        yield f"{name}: has gradients, and yet a reason for having none ({reason})"
    if not reason and not reaches:
        yield f"{name}: has neither a gradient nor a reason for having none"


def _rule_problems(samples: Iterable[Sample]) -> Iterator[str]:
    for name, op in OPS.items():
        if op.differentiable == (name not in DERIVATIVES):
            which = "neither a derivative nor a reason" if op.differentiable else "both a derivative and a reason"
            yield f"{name}: the scalar op has {which} for having none"
    differentiated = [record for built in samples for record in _records(built) if record.rule is not None]
    rules = {record.rule for record in differentiated if record.rule is not None}
    yield from (f"{rule}: a gradient rule that no op is dispatched to" for rule in STRUCTURAL.keys() - rules)
    yield from (f"{rule}: a gradient rule that does not exist" for rule in rules - STRUCTURAL.keys())
    reached = {op for record in differentiated for op in _scalar_ops(record)}
    for name in DERIVATIVES.keys() - reached - _INTERNAL.keys():
        yield f"{name}: a derivative that no op is dispatched to"


def _records(built: Sample) -> Iterator[OpRecord]:
    for node in ancestors([built.result.node]):
        if node.record is not None:
            yield node.record


def _scalar_ops(record: OpRecord) -> Iterator[str]:
    for statement in record.statements:
        for part in walk(statement.expr):
            if isinstance(part, Apply):
                yield part.op


# -- the page ---------------------------------------------------------------------------------------------------------


def as_json(matrix: Iterable[Status]) -> str:
    """Return the matrix as JSON: a list of objects, one per op."""
    entries = [
        {
            "op": row.name,
            "kind": row.kind,
            "arity": row.arity,
            **dict(zip(COLUMNS[1:], row.cells()[1:], strict=True)),
            "encodings": list(row.encodings or ()),
            "non_differentiable": row.non_differentiable,
        }
        for row in matrix
    ]
    return json.dumps(entries, indent=1) + "\n"


def as_markdown(matrix: Iterable[Status]) -> str:
    """Return the page: the matrix with its totals, then why ops have no gradient."""
    rows = list(matrix)
    total = len(PACKED_ENCODINGS)
    table = [row.cells() for row in rows]
    table.append(
        ("done / applicable", *(_total([cells[at] for cells in table], total) for at in range(1, len(COLUMNS))))
    )
    reasons = [(row.name, row.non_differentiable) for row in rows if row.non_differentiable]
    blocks_ = [(name, made_of) for name, made_of in BLOCKS.items()]
    return (
        "<!-- Generated by `python -m stagedtensor ops --write docs/ops-status.md`; edit public_ops.py instead. -->\n"
        "# Status of the ops\n\n"
        "Every cell is found by generating code, gradients or a module for a sample of the op; tests compile and run the\n"
        "samples and compare gradients with central differences. Fused encodings: how many of the "
        f"{total} packed encodings the\nop decodes as it reads, without a decoded copy of the weight.\n\n"
        + _table(COLUMNS, table)
        + "\n## Without a gradient\n\n"
        + _table(("op", "why"), reasons)
        + "\n## Made of the ops above\n\nThese functions have no row of their own.\n\n"
        + _table(("function", "made of"), blocks_)
    )


def _total(cells: Iterable[str], encodings: int) -> str:
    applicable = [cell for cell in cells if cell != _NONE]
    if all(cell.isdigit() for cell in applicable):
        return f"{sum(map(int, applicable))} / {encodings * len(applicable)}"
    return f"{applicable.count(_YES)} / {len(applicable)}"


def _table(header: tuple[str, ...], body: Iterable[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *body]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)
