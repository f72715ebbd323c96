"""``einsum``: index specs applied to tensors, with sums, products, maxima and concatenations.

In: a spec string and tensors. Out: one op of the graph; with ``capture`` also symbolic sizes. Syntax is
``language.einsum_parser``, sizes are the shape solver's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, overload

from stagedtensor.dims import CapturedDim, DynamicDim
from stagedtensor.errors import SpecError
from stagedtensor.language.caret import near
from stagedtensor.language.einsum_parser import parse_spec
from stagedtensor.language.spec_domain import Removed, blocks, concatenations, iterated, named_anonymous, removed
from stagedtensor.node import Node
from stagedtensor.op_table import REDUCTIONS
from stagedtensor.operators import Arithmetic
from stagedtensor.settings import is_integer
from stagedtensor.source import user_source
from stagedtensor.specs import Concat, Name, ShapeSpec, Spec
from stagedtensor.statements import (
    Access,
    Apply,
    DimValue,
    Expr,
    LinearIndex,
    NumberLiteral,
    OpRecord,
    Slot,
    Statement,
    WriteOp,
)
from stagedtensor.tensor import Tensor, TensorLike, apply_op, apply_pointwise, lift, tensor_of

ReduceName: TypeAlias = Literal["sum", "max", "min", "prod"]
CombineName: TypeAlias = Literal["mul", "add"]
Sizes: TypeAlias = Mapping[str, int | DynamicDim | CapturedDim]

_REDUCTIONS: dict[str, WriteOp] = {"sum": "add", "max": "max", "min": "min", "prod": "mul"}
_RULES = {"add": "tree", "max": "extremum", "min": "extremum", "mul": "prod"}


@dataclass(frozen=True)
class CapturedExtent(CapturedDim, Arithmetic):
    """A captured size: an axis size in declarations (``output=[dims.h]``) and a number in ``1.0 / dims.h``.

    As a number it is a tensor of one cell whose value is the extent (the current one where it is dynamic); like a
    Python number it takes its precision from what it meets.
    """

    def __tensor__(self) -> Tensor:
        """Return the extent as a tensor of one cell."""
        node = self.anchor
        assert isinstance(node, Node)
        record = node.record
        assert record is not None
        return apply_op(
            "extent",
            [tensor_of(operand.node) for operand in record.operands],
            replace(record.scope.spec, result=ShapeSpec()),
            lambda *_: DimValue((self.name,)),
            slots=(Slot.PREDICATE,) * len(record.operands),
            rule=None,
            sizes=record.scope.sizes,
            label=self.name,
            top_down=True,
            text=f"size({self.name})",
        )

    def _pointwise(self, op: str, *values: TensorLike) -> Tensor:
        return apply_pointwise(op, *values)


class CapturedDims(Mapping[str, CapturedExtent]):
    """The sizes that one einsum captured, by name: ``dims["h"]`` or ``dims.h``."""

    def __init__(self, sizes: Mapping[str, CapturedExtent]) -> None:
        self._sizes = dict(sizes)

    def __getitem__(self, name: str) -> CapturedExtent:
        return self._sizes[name]

    def __getattr__(self, name: str) -> CapturedExtent:
        if name.startswith("_") or name not in self._sizes:
            raise AttributeError(f"no size {name!r} was captured; {near(name, self._sizes)}")
        return self._sizes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def __repr__(self) -> str:
        return f"captured sizes {', '.join(self._sizes)}"


@overload
def einsum(
    spec: str,
    *tensors: TensorLike,
    reduce: ReduceName = "sum",
    combine: CombineName = "mul",
    capture: tuple[()] = (),
    sizes: Sizes | None = None,
) -> Tensor: ...


@overload
def einsum(
    spec: str,
    *tensors: TensorLike,
    reduce: ReduceName = "sum",
    combine: CombineName = "mul",
    capture: list[str] | tuple[str, ...],
    sizes: Sizes | None = None,
) -> tuple[Tensor, CapturedDims]: ...


def einsum(
    spec: str,
    *tensors: TensorLike,
    reduce: ReduceName = "sum",
    combine: CombineName = "mul",
    capture: Sequence[str] = (),
    sizes: Sizes | None = None,
) -> Tensor | tuple[Tensor, CapturedDims]:
    """Combine tensors cell by cell as ``spec`` says and reduce over the indices its result lacks.

    Shapes are ``batch | input -> output``, parted by ``;``, the result after ``=>``; NumPy's own specs work on tensors
    with output rows only.

    >>> import stagedtensor as st
    >>> x, w = st.placeholder("x", batch=[8], output=[3, 4]), st.param("w", output=[4, 5])
    >>> print(st.einsum("b|ij;jk => b|ik", x, w).shape)
    8 | -> 3,5
    >>> everything = st.einsum("...|... => 0", x)                      # into one cell
    >>> maxima = st.einsum("...|ij => ...|i", x, reduce="max")
    >>> pairs = st.einsum("b|i,2*o+k; k => b|i,o", x, st.param("k", output=[2]))   # windows of 2, every second
    >>> print(st.einsum("b|i,a; b|i,c => b|i,a^c", x, x).shape)        # joined along the last axis
    8 | -> 3,8
    >>> gram = st.einsum("ij,ik->jk", w, w)                            # NumPy's form
    >>> y, dims = st.einsum("b|ij => b|i", x, capture=["j"])
    >>> mean = y / dims.j

    ``combine="add"`` adds operands instead of multiplying them. ``capture`` names indices or row variables whose sizes
    are returned as well: ``(tensor, dims)``. ``sizes`` fixes sizes by name. Raises SpecError with a caret.
    """
    if reduce not in _REDUCTIONS:
        raise ValueError(
            f"einsum: reduce is one of {', '.join(_REDUCTIONS)}, not {reduce!r} ({user_source().quoted()})"
        )
    if combine not in ("mul", "add"):
        raise ValueError(f'einsum: combine is "mul" or "add", not {combine!r} ({user_source().quoted()})')
    if isinstance(capture, str) or not all(isinstance(name, str) for name in capture):
        raise TypeError(f'einsum: capture is a list of names such as ["h"], not {capture!r} ({user_source().quoted()})')
    if not tensors:
        raise TypeError(f"einsum: expected at least one tensor after the spec ({user_source().quoted()})")
    fixed = dict(sizes or {})
    parsed = parse_spec(spec, len(tensors), sized=tuple(fixed))
    _check_names(parsed, fixed, capture)
    result = _build(parsed, [lift(value) for value in tensors], _REDUCTIONS[reduce], combine, fixed, tuple(capture))
    if not capture:
        return result
    record = _record(result)
    captures = record.scope.captures
    return result, CapturedDims({name: CapturedExtent(name, key, result.node) for name, key in captures.items()})


def _check_names(spec: Spec, sizes: dict[str, Any], capture: Sequence[str]) -> None:
    keys = [key for rows in (*spec.operands, spec.result) for key, _ in iterated(rows)]
    names = {str(name): None for what, name in keys if what == "name"}
    variables = {str(name): None for what, name in keys if what == "row"}
    for name, size in sizes.items():
        if not isinstance(name, str):
            raise TypeError(f"einsum: sizes= is a dict by index name, not by {name!r} ({user_source().quoted()})")
        if name not in names:
            raise SpecError(
                f"einsum: sizes= names {name!r}, which is no index of {spec.text!r}\n  {user_source().quoted()}\n"
                f"  {near(name, names)}"
            )
        if isinstance(size, DynamicDim | CapturedDim):
            continue
        if not is_integer(size, 0):
            raise SpecError(
                f"einsum: sizes={{{name!r}: {size!r}}} is no size\n  {user_source().quoted()}\n"
                "  expected an integer >= 0, st.dynamic or a captured size"
            )
        sizes[name] = int(size)
    for name in capture:
        if name not in names and name not in variables:
            raise SpecError(
                f"einsum: capture= names {name!r}, which is no index of {spec.text!r}\n  {user_source().quoted()}\n"
                f"  {near(name, {**names, **variables})}"
            )


def _record(result: Tensor) -> OpRecord:
    record = result.node.record
    assert record is not None
    return record


# -- building -----------------------------------------------------------------------------------------------------


def _build(
    spec: Spec,
    operands: list[Tensor],
    reduction: WriteOp,
    combine: str,
    sizes: Mapping[str, Any],
    capture: tuple[str, ...],
) -> Tensor:
    if reduction != "add":
        spec = named_anonymous(spec)
    spec = _sized_parts(spec, sizes)
    gone = removed(spec.operands, spec.result)
    parts = blocks(spec) if concatenations(spec.result) else None
    attributes: dict[str, Any] = {"reduction": reduction, "combine": combine, "spec": spec.text}
    rule = "tree"
    if gone and reduction != "add":
        rule = _RULES[reduction]
        attributes["removed"] = _removed_rows(gone, spec, reduction)
        if parts is not None and len(parts) > 1:
            raise SpecError(
                f"einsum: reduce= other than sum cannot join blocks that are reduced: {spec.text!r}\n"
                f"  {user_source().quoted()}\n  reduce the parts first, then join them"
            )
    everything = tuple(range(len(operands)))

    def tree(*reads: Access) -> Expr:
        return _tree(spec, everything, combine, reads)

    session = operands[0].node.session
    result = apply_op(
        "einsum",
        operands,
        spec,
        tree,
        reduction=_write(spec, everything, reduction),
        rule=rule,
        attributes=attributes,
        sizes=sizes,
        captures={name: session.next_number() for name in dict.fromkeys(capture)},
        text=f'einsum("{spec.text}", {", ".join(operand.label for operand in operands)})',
    )
    if parts is not None:
        _split(_record(result), spec, parts, reduction, combine)
    return result


def _removed_rows(gone: Removed, spec: Spec, reduction: str) -> ShapeSpec:
    rows = gone.rows()
    if rows is None:
        raise SpecError(
            f"einsum: reduce={reduction!r} over more than three row variables: {spec.text!r}\n"
            f"  {user_source().quoted()}\n  reduce in two steps"
        )
    return rows


def _sized_parts(spec: Spec, sizes: Mapping[str, Any]) -> Spec:
    """Make a part of a joined axis that no operand has, but ``sizes`` gives, a plain size: its cells are neutral."""
    known = {name for rows in spec.operands for (what, name), _ in iterated(rows) if what == "name"}

    def part(item: Name | int) -> Name | int:
        size = sizes.get(item.name) if isinstance(item, Name) and item.name not in known else None
        return size if isinstance(size, int) else item

    def row(rows: Any) -> Any:
        def term(item: Any) -> Any:
            return Concat(tuple(map(part, item.parts))) if isinstance(item, Concat) else item

        return replace(rows, leading=tuple(map(term, rows.leading)), trailing=tuple(map(term, rows.trailing)))

    if not concatenations(spec.result):
        return spec
    rows = spec.result
    return replace(spec, result=ShapeSpec(row(rows.batch), row(rows.input), row(rows.output)))


def _write(spec: Spec, chosen: Sequence[int], reduction: WriteOp) -> WriteOp | None:
    """A set where every cell has one point; else an accumulation, also where cells are left to the neutral element."""
    leftover = any(isinstance(part, int) for term in concatenations(spec.result) for part in term.parts)
    if removed([spec.operands[at] for at in chosen], spec.result) or (leftover and reduction != "add"):
        return reduction
    return None


def _tree(spec: Spec, chosen: Sequence[int], combine: str, reads: Sequence[Access]) -> Expr:
    expr: Expr = reads[chosen[0]]
    for at in chosen[1:]:
        expr = Apply(combine, (expr, reads[at]))
    if combine == "mul" or len(chosen) < 2:
        return expr
    gone = removed([spec.operands[at] for at in chosen], spec.result)
    rows = gone.rows()
    common = [{key for key, _ in iterated(spec.operands[at])} for at in chosen]
    if rows is None or all(set(gone.keys) <= keys for keys in common):
        return expr
    # The derivative of a sum of operands mentions none of them; this names every reduced index, so that the points
    # of the domain that an operand does not index itself are counted in its gradient too.
    inside = Apply("ge", (LinearIndex(rows), NumberLiteral(0)))
    return Apply("where", (inside, expr, NumberLiteral(0.0)))


def _split(record: OpRecord, spec: Spec, parts: Sequence[Sequence[int]], reduction: WriteOp, combine: str) -> None:
    """Give each block of a concatenated result a statement of its own."""
    (first,) = record.statements
    reads = [Access(operand.node, rows) for operand, rows in zip(record.operands, spec.operands, strict=True)]
    made: list[Statement] = []
    if not all(parts):
        neutral = NumberLiteral(REDUCTIONS[reduction].neutral)
        made.append(replace(first, expr=neutral, op=reduction, text=f"{first.text}: cells of no operand"))
    for chosen in filter(None, parts):
        expr, op = _tree(spec, chosen, combine, reads), _write(spec, chosen, reduction)
        labels = ", ".join(record.operands[at].node.label for at in chosen)
        made.append(replace(first, expr=expr, op=op, text=f"{first.text}: {labels}"))
    record.statements = tuple(made)
