"""StableHLO text of a forward or gradient computation.

In: a tensor, or the computation of ``grad_update``. Out: the text of a module with one function, which runs under any
StableHLO compiler; or the records of its arguments and results. The graph is solved on a throw-away copy under default
Numerics: nothing settles. What cannot be expressed raises ExportError; there is no partial module.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from stagedtensor.codegen import loop_ir as ir
from stagedtensor.codegen.lower import lower
from stagedtensor.codegen.passes.normalise_zeroing import normalise_zeroing
from stagedtensor.codegen.rewrite import buffers_read, buffers_written
from stagedtensor.codegen.solved import SolvedProgram
from stagedtensor.conversion import convert
from stagedtensor.errors import ExportError
from stagedtensor.node import Node, Role
from stagedtensor.numerics import Numerics
from stagedtensor.precision import Prec
from stagedtensor.precision_rules import BARRIER, is_contraction
from stagedtensor.program import Comp, Solved, around, solve_program
from stagedtensor.source import user_source
from stagedtensor.statements import OpRecord, Stage
from stagedtensor.tensor import Tensor

from .block_values import BlockValues
from .values import Lines, Value, quoted

Parameters: TypeAlias = Literal["arguments", "constants"]
Twins: TypeAlias = Literal["convert", "fold"]
Accumulation: TypeAlias = Literal["wide", "narrow"]
Encodings: TypeAlias = Literal["error", "dequantize"]

_ARGUMENTS = (Role.PLACEHOLDER, Role.HOST_SCALAR)


@dataclass(frozen=True)
class Entry:
    """One argument or result: its label, its dims in memory order (batch, output, input), its precision."""

    name: str
    shape: tuple[int, ...]
    precision: Prec


@dataclass(frozen=True)
class Signature:
    """What an exported function takes and returns, in order."""

    arguments: tuple[Entry, ...]
    results: tuple[Entry, ...]


def to_stablehlo(
    root: Tensor | Comp,
    name: str = "main",
    *,
    params: Parameters = "arguments",
    twins: Twins = "convert",
    accum: Accumulation = "wide",
    encoded: Encodings = "error",
) -> str:
    """Return the StableHLO module of a tensor's forward graph, or of ``grad_update(loss)``: the loss, then gradients.

    Arguments are placeholders and host scalars in order of first use, then parameters in creation order;
    ``params="constants"`` embeds parameters, whose values must be arrays given as ``init``. ``twins="fold"`` (forward
    graphs only) makes twins the arguments, at their own precision. ``encoded="dequantize"`` embeds packed weights as
    f32 constants. Sums are as wide as in this package: f32 for narrow operands, one rounding per stored result. With
    ``accum="narrow"`` they have the type of their result, and so has the interior of library functions: fewer converts,
    but whoever runs the module may round partial sums.

    >>> import stagedtensor as st
    >>> x = st.placeholder("x", output=[3], prec="f32")
    >>> print(st.export.to_stablehlo(st.exp(x)))
    module {
      func.func @main(%arg0: tensor<3xf32> {stagedtensor.name = "x"}) -> (tensor<3xf32> {stagedtensor.name = "exp"}) {
        %0 = stablehlo.exponential %arg0 : tensor<3xf32>
        return %0 : tensor<3xf32>
      }
    }
    <BLANKLINE>

    Raises ExportError for optimizer steps, ``accum_steps``, random draws, run-time extents and static indices, packed
    weights and formats without a StableHLO type; ValueError for an unknown option.
    """
    return _Function(root, params, twins, accum, encoded).text(name)


def signature(
    root: Tensor | Comp,
    *,
    params: Parameters = "arguments",
    twins: Twins = "convert",
    accum: Accumulation = "wide",
    encoded: Encodings = "error",
) -> Signature:
    """Return the arguments and results of what :func:`to_stablehlo` gives for the same options."""
    function = _Function(root, params, twins, accum, encoded)
    function.build()
    return Signature(
        tuple(_entry(buffer) for buffer, _ in function.arguments),
        tuple(_entry(buffer) for buffer, _ in function.results),
    )


def _entry(buffer: ir.Buffer) -> Entry:
    return Entry(buffer.name, buffer.shape, buffer.type)


def _choose(value: str, name: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        listed = " or ".join(map(repr, choices))
        raise ValueError(f"to_stablehlo: {name} is {listed}, not {value!r} ({user_source().quoted()})")


class _Function:
    """One function being built."""

    def __init__(
        self, root: Tensor | Comp, params: Parameters, twins: Twins, accum: Accumulation, encoded: Encodings
    ) -> None:
        _choose(params, "params", ("arguments", "constants"))
        _choose(twins, "twins", ("convert", "fold"))
        _choose(accum, "accum", ("wide", "narrow"))
        _choose(encoded, "encoded", ("error", "dequantize"))
        self.params, self.twins, self.accum, self.encoded = params, twins, accum, encoded
        if isinstance(root, Tensor):
            self.wanted = [root.node]
        elif isinstance(root, Comp):
            self.wanted = _results_of(root)
            if twins == "fold":
                raise ExportError(
                    'twins="fold" is for forward graphs: a gradient module trains the masters; leave twins="convert"\n'
                    f"  {user_source().quoted()}"
                )
        else:
            raise TypeError(
                f"to_stablehlo takes a tensor or a computation, not {type(root).__name__}\n  {user_source().quoted()}"
            )
        self.solved = solve_program(root, keep=self.wanted)
        self.lines = Lines()
        self.arguments: list[tuple[ir.Buffer, Value]] = []
        self.results: list[tuple[ir.Buffer, Value]] = []

    def build(self) -> None:
        """Add arguments and ops."""
        folded = self._folded() if self.twins == "fold" else frozenset()
        module = lower(
            normalise_zeroing(_program(self.solved, folded, self._decoded(), narrow=self.accum == "narrow")),
            Numerics(),
            "cpu",
        )
        held: dict[ir.Buffer, Value] = {}
        for buffer in self._inputs(module):
            value = self._embedded(buffer)
            if value is None:
                value = self.lines.argument(buffer.shape, buffer.type)
                self.arguments.append((buffer, value))
            held[buffer] = value
        builder = BlockValues(self.lines, held, narrow=self.accum == "narrow")
        for kernel in module.kernels:
            for block in kernel.body:
                assert isinstance(block, ir.Block)
                label = block.stores[0].buffer.name
                try:
                    builder.run(block, label, *_roles(block, label))
                except ExportError as error:
                    node = block.stores[0].buffer.node
                    if node is None:
                        raise
                    raise ExportError(f"{error}\n  {node.source.quoted()}") from None
        stored = {buffer.node: buffer for buffer in (*module.external, *module.temporaries) if buffer.node is not None}
        for node in self.wanted:
            self.results.append((stored[node], held[stored[node]]))

    def text(self, name: str) -> str:
        """Return the module."""
        self.build()
        lines, returned = self.lines.text([value for _, value in self.results])
        arguments = ", ".join(f"{value.argument}: {value.type}{_named(buffer)}" for buffer, value in self.arguments)
        types = [value.type for _, value in self.results]
        results = ", ".join(f"{value.type}{_named(buffer)}" for buffer, value in self.results)
        symbol = name if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_$.]*", name) else quoted(name)
        body = "".join(f"    {line}\n" for line in lines)
        return (
            f"module {{\n  func.func @{symbol}({arguments}) -> ({results}) {{\n{body}"
            f"    return {', '.join(returned)} : {', '.join(types)}\n  }}\n}}\n"
        )

    # -- inputs -------------------------------------------------------------------------------------------------------
    def _inputs(self, module: ir.Module) -> list[ir.Buffer]:
        """Buffers that are read before anything writes them: data in order of first use, then parameters."""
        written: set[ir.Buffer] = set()
        found: dict[ir.Buffer, None] = {}
        for kernel in module.kernels:
            for buffer in buffers_read(kernel.body):
                if buffer not in written:
                    found.setdefault(buffer)
            written.update(buffers_written(kernel.body))
        for node in self.wanted:  # a terminal that is the result itself
            for buffer in module.external:
                if buffer.node is node and buffer not in written:
                    found.setdefault(buffer)
        inputs = [buffer for buffer in found if self._is_input(buffer)]
        is_weight = {buffer: buffer.node.role is Role.PARAM or _twin_of(buffer.node) is not None for buffer in inputs}
        weights = sorted((buffer for buffer in inputs if is_weight[buffer]), key=_creation)
        return [*(buffer for buffer in inputs if not is_weight[buffer]), *weights]

    def _is_input(self, buffer: ir.Buffer) -> bool:
        node = buffer.node
        if node is None or (node.is_gradient and node.role is Role.GRADIENT):
            return False
        if node.role in (Role.STATE, Role.CELL):
            raise ExportError(
                f"{node.label}: optimizer state and accumulator cells live between runs; export the forward graph or "
                f"the computation of grad_update alone\n  {node.source.quoted()}"
            )
        return not (node.role is Role.OP and _twin_of(node) is None)

    def _embedded(self, buffer: ir.Buffer) -> Value | None:
        """A constant for what is data of the model, None for an argument."""
        node = buffer.node
        if node.role in _ARGUMENTS:
            return None
        weight = _twin_of(node) or node
        if weight.role is Role.PARAM:
            if self.params == "arguments":
                return None
            if weight.data is None:
                raise ExportError(
                    f'{weight.label}: params="constants" embeds arrays given as init=, and this parameter has an '
                    f"initializer; export it as an argument\n  {weight.source.quoted()}"
                )
            stored = convert(weight.data, self.solved.prec(weight))
            return self.lines.constant(convert(stored, buffer.type).reshape(buffer.shape), buffer.type)
        if node.data is None:
            raise ExportError(f"{node.label}: a {node.role.value} has no value to embed")
        return self.lines.constant(convert(np.asarray(node.data), buffer.type).reshape(buffer.shape), buffer.type)

    def _decoded(self) -> dict[Node, Node]:
        """Constants in the place of packed weights, with the exact f32 numbers that these decode to."""
        found: dict[Node, Node] = {}
        for node in self.solved.nodes:
            if node.encoded is None:
                continue
            if self.encoded == "error":
                raise ExportError(
                    f"{node.label}: a weight in the encoding {node.encoded.encoding} has no StableHLO type; pass "
                    f'encoded="dequantize" to embed it as f32\n  {node.source.quoted()}'
                )
            plain = Node(Role.CONSTANT, node.label, declared=node.declared, source=node.source, session=node.session)
            plain.data = node.encoded.numpy()
            plain.specified = node.specified
            found[node] = plain
        return found

    def _folded(self) -> frozenset[Node]:
        return frozenset(node for node in self.solved.nodes if _twin_of(node) is not None)


def _program(
    solved: Solved, folded: frozenset[Node], decoded: Mapping[Node, Node], *, narrow: bool = False
) -> SolvedProgram:
    """Return what lowering takes, without the statements of folded twins and with packed weights as they decode.

    ``narrow``: the interior of library functions has the precision of their result.
    """
    packed = {plain: node for node, plain in decoded.items()}

    def prec(node: Node) -> Prec:
        own = solved.prec(packed.get(node, node))
        result = node.composite.outermost.result if narrow and node.composite is not None else None
        if result is None or not own.is_float:
            return own
        outside = solved.prec(result if not node.is_gradient or result.gradient is None else result.gradient)
        return outside if outside.is_narrow else own

    kept = [
        (around(statement, decoded), comment)
        for statement, comment in zip(solved.statements, solved.comments, strict=True)
        if statement.target.node not in folded
    ]
    return SolvedProgram(
        solved.name,
        tuple(statement for statement, _ in kept),
        tuple(comment for _, comment in kept),
        lambda node: solved.shape(packed.get(node, node)),
        prec,
        solved.projected,
        solved.keep | folded,
        solved.saturates,
    )


def _results_of(comp: Comp) -> list[Node]:
    """Return the losses and the gradients of the trained parameters of a gradient computation."""
    statements = [statement for statement, _ in comp.statements()]
    if comp.attributes.get("accum_steps") is not None:
        raise ExportError(
            "accum_steps: gradients that accumulate over runs are state, which a function has not; export grad_update "
            f"without accum_steps\n  {user_source().quoted()}"
        )
    for statement in statements:
        target = statement.target.node
        if statement.stage in (Stage.UPDATE, Stage.INIT) or target.role in (Role.PARAM, Role.STATE, Role.CELL):
            raise ExportError(
                f"{target.label}: an assignment to a {target.role.value} cannot be exported; export the forward graph or "
                f"the computation of grad_update alone\n  {statement.scope.source.quoted()}"
            )
    seeds = [statement.target.node.value for statement in statements if statement.stage is Stage.SEED]
    losses = [node for node in seeds if node is not None]
    if not losses:
        raise ExportError(
            f"{comp.name}: only tensors and the computation of grad_update can be exported\n  {user_source().quoted()}"
        )
    gradients = {statement.target.node for statement in statements if statement.target.node.is_gradient}
    trained = sorted(
        (gradient for gradient in gradients if gradient.value is not None and gradient.value.role is Role.PARAM),
        key=lambda gradient: gradient.shape_node.number,
    )
    return [*losses, *trained]


def _twin_of(node: Node) -> Node | None:
    """Return the master that a node is the twin of."""
    record = node.record
    return record.operands[0].node if record is not None and record.attributes.get("twin") else None


def _creation(buffer: ir.Buffer) -> int:
    node: Node = buffer.node
    number: int = (_twin_of(node) or node).number
    return number


def _named(buffer: ir.Buffer) -> str:
    return f" {{stagedtensor.name = {quoted(buffer.name)}}}"


# -- roles of converts ------------------------------------------------------------------------------------------------


def _roles(block: ir.Block, label: str) -> tuple[str, str]:
    """Return the roles of converts at reads and at stores of a block."""
    target = block.stores[0].buffer.node
    if target is None:
        return "acc", "acc"
    for record, suffix in _converts_here(block, target):
        role = _role_of(record, label) + suffix
        return role, role
    record = target.shape_node.record
    composite = target.composite
    if composite is None and record is not None and record.kind == "leave":
        composite = record.composite
    if composite is not None:
        contracts = any(
            node.record is not None and is_contraction(node.record) for node in composite.outermost.interior
        )
        return ("mix", "acc") if contracts else ("stat", "stat")
    reduces = any(item.kind == "reduce" for item in block.iterators)
    return "mix", "acc" if reduces else "mix"


def _converts_here(block: ir.Block, target: Node) -> Iterable[tuple[OpRecord, str]]:
    """The convert that a block is the forward or the backward statement of."""
    if target.record is not None and target.record.kind in (BARRIER, "cast"):
        yield target.record, ""
    if target.is_gradient:
        for buffer in buffers_read((block,)):
            value = buffer.node.value if buffer.node is not None else None
            record = value.record if value is not None else None
            if record is not None and record.kind in (BARRIER, "cast") and record.operands[0].node is target.value:
                yield record, ":grad"


def _role_of(record: OpRecord, label: str) -> str:
    if record.kind == BARRIER:
        return f"boundary:{record.attributes['region'].name}:{record.attributes['side']}"
    if record.attributes.get("twin"):
        return f"twin:{record.operands[0].node.label}:-"
    return f"user:{label}:-"
