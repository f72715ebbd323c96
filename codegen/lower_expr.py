"""Statement trees -> typed loop-IR expressions.

In: a tree of table ops over accesses with its projection. Out: an expression of one compute type, its leaves
``Cast(Load, compute)``. Predicates, gather indices and the operands of nested comparisons keep types of their own.
Which types those are is decided by ``stagedtensor.numerics``; nothing is simplified here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from stagedtensor import statements as tree
from stagedtensor.codegen import loop_ir as ir
from stagedtensor.codegen.decode import decoded
from stagedtensor.codegen.solved import SolvedProgram
from stagedtensor.conversion import convert, representable
from stagedtensor.dims import DynamicDim
from stagedtensor.errors import ConstantRangeError, InternalError
from stagedtensor.node import Node, Role
from stagedtensor.numerics import Numerics, compute_prec
from stagedtensor.op_table import OPS
from stagedtensor.precision import Prec, bool_, f32, f64, i32, i64, join, precision, u8, u32, u64
from stagedtensor.shapes import index as proj


def is_scalar_literal(node: Node) -> bool:
    """Whether the node is a Python number: it becomes a constant in the code, never a buffer."""
    return node.role is Role.LITERAL and node.data is not None and node.data.ndim == 0


def constant(value: float | int, prec: Prec, source: Prec | None = None) -> ir.Const:
    """Return ``value`` rounded to ``prec`` by the conversion rules (``source``: the format it is given in)."""
    given = np.asarray(value, dtype=source.numpy_dtype if source else None)
    if given.dtype == np.bool_ and source is None:
        given = given.astype(np.int64)
    cell = convert(given, prec)
    number = cell.astype(np.float64).item() if prec.is_float else int(cell.item())
    return ir.Const(number, prec)


def rounded(value: float | int, prec: Prec, source: Prec) -> ir.Expr:
    """Return ``value`` rounded to ``prec``; narrow formats have no constants, so theirs are conversions of f32 ones."""
    number = constant(value, prec, source)
    return ir.Cast(ir.Const(number.value, f32), prec) if prec.is_narrow else number


def cast(expr: ir.Expr, prec: Prec) -> ir.Expr:
    """Convert to ``prec`` unless the type is that already."""
    return expr if expr.type is prec else ir.Cast(expr, prec)


def arithmetic(prec: Prec) -> Prec:
    """Bools compute as u8."""
    return u8 if prec is bool_ else prec


def value_precs(expr: tree.Expr, prec_of: Callable[[Node], Prec]) -> tuple[Prec, ...]:
    """Return the precisions of the data operands of a tree: predicates, indices and plain numbers contribute none."""
    match expr:
        case tree.Access(node):
            return (prec_of(node),)
        case tree.Apply(op, args):
            row = OPS[op]
            if row.op_class == "random":
                return ()
            found: list[Prec] = []
            for at, arg in enumerate(args):
                if at not in row.predicates:
                    found.extend(value_precs(arg, prec_of))
            return tuple(found)
        case _:
            return ()


class Scalars:
    """The i64 parameters of a routine, by name, in order of appearance."""

    def __init__(self) -> None:
        self.symbols: dict[str, ir.Symbol] = {}

    def symbol(self, name: str) -> ir.Symbol:
        """Return the one symbol of a static index or dynamic extent."""
        return self.symbols.setdefault(name, ir.Symbol(name, i64))

    def extent(self, size: int | DynamicDim) -> ir.Expr:
        """Return an extent as an expression."""
        return ir.index(size) if isinstance(size, int) else ir.Var(self.symbol(size.name))


@dataclass(frozen=True)
class ExprLowering:
    """Lowers the trees and indices of one projected statement."""

    program: SolvedProgram
    projected: proj.Projected
    iterators: Mapping[proj.ProjectedIterator, ir.Symbol]
    scalars: Scalars
    buffer: Callable[[Node], ir.Buffer]
    view: Callable[[Node, Prec], ir.Buffer]
    numerics: Numerics
    backend: str

    # -- types ----------------------------------------------------------------------------------------------------
    def compute(self, *precs: Prec) -> Prec:
        """Return the format in which data of these formats compute."""
        return compute_prec(arithmetic(join(*precs)), self.numerics, self.backend)

    def own_type(self, expr: tree.Expr, fallback: Prec) -> Prec:
        """Return the compute type of a tree by its own operands alone."""
        precs = value_precs(expr, self.program.prec)
        return self.compute(*precs) if precs else fallback

    # -- indices --------------------------------------------------------------------------------------------------
    def index(self, expr: proj.IndexExpr) -> ir.Expr:
        """Lower an index; a gathered one is clamped into its axis."""
        match expr:
            case proj.IndexConst(value):
                return ir.index(value)
            case proj.IndexIter(iterator):
                return ir.Var(self.iterators[iterator])
            case proj.IndexStatic(name):
                return ir.Var(self.scalars.symbol(name))  # its range is checked when it is bound
            case proj.IndexSum(terms, offset):
                return self._sum(terms, offset)
            case proj.IndexFloorDiv(arg, divisor):
                return ir.Apply("floordiv", (self.index(arg), ir.index(divisor)), i64)
            case proj.IndexMod(arg, divisor):
                return ir.Apply("mod", (self.index(arg), ir.index(divisor)), i64)
            case proj.IndexData(node, indices, size):
                position = self._load(node, indices)
                if position.type is u64:  # its upper half would turn negative in i64
                    position = ir.Apply("minimum", (position, ir.Const(max(size - 1, 0), u64)), u64)
                return self._clamped(cast(position, i64), size)
        raise InternalError(f"no lowering for index {expr!r}")

    def _clamped(self, position: ir.Expr, size: int) -> ir.Expr:
        below = ir.Apply("maximum", (position, ir.index(0)), i64)
        return ir.Apply("minimum", (below, ir.index(max(size - 1, 0))), i64)

    def _sum(self, terms: tuple[tuple[int, proj.IndexExpr], ...], offset: int) -> ir.Expr:
        total: ir.Expr | None = None
        for factor, part in terms:
            term = self.index(part)
            if factor == -1 and total is not None:
                total = ir.Apply("sub", (total, term), i64)
                continue
            if factor != 1:
                term = ir.Apply("mul", (term, ir.index(factor)), i64)
            total = term if total is None else ir.Apply("add", (total, term), i64)
        if total is None:
            return ir.index(offset)
        if offset:
            op = "add" if offset > 0 else "sub"
            return ir.Apply(op, (total, ir.index(abs(offset))), i64)
        return total

    def guard(self) -> ir.Expr | None:
        """Return the conjunction of the guards, or None."""
        conditions: list[ir.Expr] = []
        for item in self.projected.guards:
            position = self.index(item.index)
            conditions.append(ir.Apply("ge", (position, ir.index(item.low)), i64))
            conditions.append(ir.Apply("lt", (position, self.scalars.extent(item.high)), i64))
        if not conditions:
            return None
        result = conditions[0]
        for condition in conditions[1:]:
            result = ir.Apply("and", (result, condition), i64)
        return result

    # -- values ---------------------------------------------------------------------------------------------------
    def lower(self, expr: tree.Expr, prec: Prec) -> ir.Expr:
        """Lower a tree to a value of compute type ``prec``."""
        match expr:
            case tree.NumberLiteral(value):
                return constant(value, prec)
            case tree.FiniteLimit(highest, node):
                held = self.program.prec(node or self.projected.statement.target.node)
                return constant(held.max_finite if highest else held.min_finite, prec, held)
            case tree.Access():
                return cast(self.stored(expr), prec)
            case tree.DimValue():
                return cast(self._extent_product(expr), prec)
            case tree.IterValue() | tree.LinearIndex():
                return cast(self.index(self.projected.iter_values[expr]), prec)
            case tree.Apply():
                return self._apply(expr, prec)
        raise InternalError(f"no lowering for {expr!r}")

    def stored(self, access: tree.Access) -> ir.Expr:
        """Lower an access to the stored value, in the node's own format."""
        node = access.node
        prec = self.program.prec(node)
        if is_scalar_literal(node):
            return self._literal(node, prec)
        indices = self.projected.reads[access]
        if node.role is Role.RANGE:
            return cast(self.index(indices[-1]), prec)
        return self._load(node, indices)

    def _load(self, node: Node, indices: tuple[proj.IndexExpr, ...]) -> ir.Expr:
        if is_scalar_literal(node):
            return self._literal(node, self.program.prec(node))
        if node.role is Role.RANGE:
            return cast(self.index(indices[-1]), self.program.prec(node))
        cell = tuple(self.index(item) for item in indices)
        if node.encoded is not None:
            value = decoded(node.encoded, lambda prec: self.view(node, prec), cell)
            return cast(value, self.program.prec(node))
        return ir.Load(self.buffer(node), cell)

    def _literal(self, node: Node, prec: Prec) -> ir.Expr:
        assert node.data is not None
        value: Any = node.data.item()
        if not representable(value, prec):
            where = self.projected.statement.source or self.projected.statement.scope.source
            raise ConstantRangeError(
                f"constant {value!r} ({node.label}) cannot be represented in the {prec} node it became\n"
                f"  {node.source.quoted()}\n  used {where.quoted()}\n"
                f"  {prec} holds {prec.min_finite} .. {prec.max_finite}"
                f"{'' if prec.is_float else ', integers only'}; specify or cast one of the operands to a wider format"
            )
        return rounded(value, prec, precision(node.data.dtype))

    def _extent_product(self, expr: tree.DimValue) -> ir.Expr:
        product = self.projected.dim_values[expr]
        total: ir.Expr = ir.index(product.constant)
        for extent in product.dynamic:
            total = ir.Apply("mul", (total, self.scalars.extent(extent)), i64)
        return total

    def predicate(self, expr: tree.Expr) -> ir.Expr:
        """Lower a tree that is tested against zero, in its own type."""
        match expr:
            case tree.Access():
                value = self.stored(expr)
                return cast(value, f32) if value.type.is_narrow else value
            case tree.NumberLiteral(value):
                return constant(value, i64 if isinstance(value, int) else f64)
            case tree.Apply(op) if OPS[op].op_class == "comparison":
                return self._comparison(expr, f32)
            case _:
                return self.lower(expr, self.own_type(expr, i64))

    def _comparison(self, expr: tree.Apply, context: Prec) -> ir.Expr:
        own = self._comparison_type(expr, context)
        return ir.Apply(expr.op, tuple(self.lower(arg, own) for arg in expr.args), own)

    def _apply(self, expr: tree.Apply, prec: Prec) -> ir.Expr:
        row, args = OPS[expr.op], expr.args
        if row.op_class == "comparison":
            return cast(self._comparison(expr, prec), prec)
        if row.op_class == "random":
            key0, key1, counter = args
            own = f64 if prec is f64 else f32
            return cast(
                ir.Apply(row.name, (self.lower(key0, u32), self.lower(key1, u32), self.lower(counter, u64)), own), prec
            )
        if row.name == "identity":
            return self.lower(args[0], prec)
        if row.name == "nonfinite":
            own = self.own_type(expr, prec)
            own = own if own.is_float else prec if prec.is_float else f32
            return cast(ir.Apply(row.name, (self.lower(args[0], own),), own), prec)
        values = tuple(
            self.predicate(arg) if at in row.predicates else self.lower(arg, prec) for at, arg in enumerate(args)
        )
        if row.name == "fma":
            a, b, c = values
            if prec in (f32, f64):
                return ir.Fma(a, b, c)
            return ir.Apply("add", (ir.Apply("mul", (a, b), prec), c), prec)
        return ir.Apply(row.name, values, prec)

    def _comparison_type(self, expr: tree.Apply, context: Prec) -> Prec:
        precs = value_precs(expr, self.program.prec)
        if precs:
            own = self.compute(*precs)
            positions = any(
                isinstance(part, tree.IterValue | tree.LinearIndex | tree.DimValue) for part in tree.walk(expr)
            )
            # A position may exceed what short integers hold: class 300 is not class 44 of u8.
            return i32 if positions and not own.is_float and own.bits < 32 else own
        leaves = [part for part in tree.walk(expr) if not isinstance(part, tree.Apply)]
        if all(isinstance(part, tree.IterValue) or _is_integer(part, 31) for part in leaves):
            return i32  # positions along one axis each, as in a causal mask: half the width of i64
        whole = all(
            isinstance(part, tree.IterValue | tree.LinearIndex | tree.DimValue) or _is_integer(part, 63)
            for part in leaves
        )
        return i64 if whole else context


def _is_integer(expr: tree.Expr, bits: int) -> bool:
    """Whether a tree is a whole number of at most ``bits`` bits and a sign."""
    return isinstance(expr, tree.NumberLiteral) and not isinstance(expr.value, float) and abs(expr.value) < 1 << bits
