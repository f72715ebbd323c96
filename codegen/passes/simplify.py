"""Simplification of blocks: constants, conversions that change nothing, index algebra, iterators of extent 1.

In: blocks. Out: equal blocks, bit for bit. Constants fold with the conversion rules and the op table's own meaning,
never those of functions the prelude defines. Iterators of extent 1 go, though a reduction over one stays the
reduction it was (its fma remains); a reduction with no iterator left becomes a plain store::

    f32(bf16(f32(x[i])))          ->  f32(x[i])          where x is bf16
    y[i // 4, (i % 8) % 4]        ->  y[i // 4, i % 4]
    acc = 0; acc <- fma(a[0], b[i], acc); y[i] <- acc    ->  y[i] <- fma(a[0], b[i], 0)
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from stagedtensor.codegen import loop_ir as ir
from stagedtensor.codegen.affine import Affine, affine, to_expr
from stagedtensor.codegen.effects import map_blocks
from stagedtensor.codegen.intervals import Interval, interval
from stagedtensor.codegen.lower_expr import constant
from stagedtensor.codegen.passes.exact import contains, exact_in
from stagedtensor.codegen.pieces import replace
from stagedtensor.codegen.rewrite import Rewriter, same_where_equal, substitute
from stagedtensor.op_table import OPS
from stagedtensor.precision import Prec, bool_, i64, u4x32


def simplify(module: ir.Module) -> ir.Module:
    """Simplify every block of the module."""
    return map_blocks(module, simplify_block)


def simplify_block(block: ir.Block) -> ir.Block:
    """Simplify one block."""
    block = _without_unit_iterators(block)
    block = _Simplifier({item.symbol: Interval(0, max(item.bound - 1, 0)) for item in block.iterators}).block(block)
    if isinstance(block.guard, ir.Const) and block.guard.value:
        block = replace(block, guard=None)
    if block.accumulators and not block.reduce and block.guard is None and not block.lets:
        block = _without_accumulators(block)
    return block


def _without_unit_iterators(block: ir.Block) -> ir.Block:
    unit = {item.symbol: ir.index(0) for item in block.iterators if item.extent == ir.index(1)}
    if not unit:
        return block
    kept = tuple(item for item in block.iterators if item.symbol not in unit)
    return substitute(replace(block, iterators=kept), unit)


def _without_accumulators(block: ir.Block) -> ir.Block:
    """One reduce point: each store reads the states after that point."""
    before = {item.symbol: item.init for item in block.accumulators}
    after = {item.symbol: substitute(item.update, before) for item in block.accumulators}
    stores = tuple(substitute(store, after) for store in block.stores)
    return replace(block, accumulators=(), stores=stores)


class _Simplifier(Rewriter):
    """Rebuilds expressions innermost first; ``indices`` holds while inside an index or a guard."""

    def __init__(self, ranges: Mapping[ir.Symbol, Interval]) -> None:
        self.ranges = ranges

    def block(self, block: ir.Block) -> ir.Block:
        guard = block.guard
        if guard is None:
            return super().block(block)
        rebuilt = super().block(replace(block, guard=None))
        return replace(rebuilt, guard=self.index(guard))

    def store(self, store: ir.Store) -> ir.Store:
        value, flags = self.expr(store.value), (store.buffer.saturate, store.buffer.flush_subnormal)
        if isinstance(value, ir.Cast) and (value.saturate, value.flush) != flags:
            value = ir.Cast(value, value.type, *flags)  # another node's conversion: this store still makes its own
        indices = self._indices(store.indices)
        return store if value is store.value and indices is store.indices else ir.Store(store.buffer, indices, value)

    def _indices(self, indices: tuple[ir.Expr, ...]) -> tuple[ir.Expr, ...]:
        return same_where_equal(indices, [self.index(item) for item in indices])

    def expr(self, expr: ir.Expr) -> ir.Expr:
        if isinstance(expr, ir.Load):
            indices = self._indices(expr.indices)
            return expr if indices is expr.indices else ir.Load(expr.buffer, indices)
        return simplified(super().expr(expr))

    def index(self, expr: ir.Expr) -> ir.Expr:
        """Simplify an expression that only indexes memory or guards it."""
        expr = self._by_range(self.expr(expr))
        if isinstance(expr, ir.Const | ir.Var):
            return expr
        if isinstance(expr, ir.Apply) and expr.op in ("add", "sub", "mul", "floordiv", "mod"):
            folded = self._by_range(to_expr(affine(expr)))
            return expr if folded == expr else folded
        return expr

    def _by_range(self, expr: ir.Expr) -> ir.Expr:
        """Settle what the ranges of the iterators decide."""
        if not isinstance(expr, ir.Apply) or len(expr.args) != 2:
            return expr
        args = tuple(self._by_range(arg) for arg in expr.args)
        if args != expr.args:
            expr = simplified(replace(expr, args=args))
            if not isinstance(expr, ir.Apply) or len(expr.args) != 2:
                return expr
            args = expr.args  # of another op, maybe: min(i, 2) + 0 has become min(i, 2)
        left, right = (interval(arg, self.ranges) for arg in args)
        match expr.op:
            case "and" if ir.index(1) in args:
                return args[0] if args[1] == ir.index(1) else args[1]
            case "lt" | "le" | "gt" | "ge":
                known = _decided(expr.op, left, right)
                return expr if known is None else ir.index(int(known))
            case "floordiv" | "mod" if isinstance(args[1], ir.Const) and args[1].value > 0:
                return self._divided(expr, int(args[1].value), left)
            case "minimum" | "maximum":
                first = _decided("le" if expr.op == "minimum" else "ge", left, right)
                last = _decided("ge" if expr.op == "minimum" else "le", left, right)
                return args[0] if first else args[1] if last else expr
        return expr

    def _divided(self, expr: ir.Apply, step: int, values: Interval) -> ir.Expr:
        """(8 * i + j + 16) // 8 is i + 2 and (8 * i + j + 16) % 8 is j where j is below 8."""
        if values.within(0, step - 1):
            return ir.index(0) if expr.op == "floordiv" else expr.args[0]
        total = affine(expr.args[0])
        whole = tuple(term for term in total.terms if term[1] % step == 0)
        left_over = total.constant % step
        moved = total.constant - left_over
        rest = to_expr(Affine(tuple(term for term in total.terms if term[1] % step), left_over))
        if not (whole or moved) or not interval(rest, self.ranges).within(0, step - 1):
            return expr
        if expr.op == "mod":
            return rest
        return to_expr(Affine(tuple((atom, factor // step) for atom, factor in whole), moved // step))


def _decided(op: str, left: Interval, right: Interval) -> bool | None:
    """What a comparison of indices always gives, None where it depends."""
    if left.is_empty or right.is_empty:
        return None
    match op:
        case "lt":
            return True if left.high < right.low else False if left.low >= right.high else None
        case "gt":
            return _decided("lt", right, left)
        case "ge":
            less = _decided("lt", left, right)
            return None if less is None else not less
        case _:
            return _decided("ge", right, left)


def simplified(expr: ir.Expr) -> ir.Expr:
    """Simplify an expression whose parts are simple already."""
    match expr:
        case ir.Cast():
            return _cast(expr)
        case ir.Apply(op, args):
            if op == "where" and isinstance(args[0], ir.Const):
                return args[1] if args[0].value != 0 else args[2]
            if all(isinstance(arg, ir.Const) for arg in args):
                return _folded(expr)
            return _identities(expr)
        case _:
            return expr


def _cast(expr: ir.Cast) -> ir.Expr:
    arg = expr.arg
    if arg.type is expr.type and not expr.flush and not expr.saturate:
        return arg
    plain = not (expr.type.is_narrow or expr.flush or expr.saturate or expr.type in (bool_, u4x32))
    if isinstance(arg, ir.Const) and plain:
        return constant(arg.value, expr.type, arg.type)
    if isinstance(arg, ir.Cast) and not arg.flush and exact_in(arg.arg, arg.type):
        return _cast(replace(expr, arg=arg.arg))
    return _moved_inwards(expr)


def _moved_inwards(expr: ir.Cast) -> ir.Expr:
    """bf16(relu(f32(bf16(x)))) is bf16(relu(x)): rounding keeps order and sign, and relu, neg, abs and where theirs."""
    outer = expr.arg
    if not (isinstance(outer, ir.Apply) and outer.op in ("relu", "neg", "abs", "where") and expr.type.is_float):
        return expr
    if outer.op == "relu" and not expr.type.has_inf:
        return expr  # -1000 overflows to NaN in f8e4m3, which relu keeps; relu(-1000) is 0
    values = tuple(
        _unrounded(arg, expr) if at not in OPS[outer.op].predicates else arg for at, arg in enumerate(outer.args)
    )
    return expr if values == outer.args else replace(expr, arg=replace(outer, args=values))


def _unrounded(wide: ir.Expr, like: ir.Cast) -> ir.Expr:
    """x where ``wide`` is x rounded just as ``like`` rounds and widened again."""
    if isinstance(wide, ir.Cast) and isinstance(wide.arg, ir.Cast) and not wide.flush:
        narrow = wide.arg
        same = (narrow.type, narrow.saturate, narrow.flush) == (like.type, like.saturate, like.flush)
        if same and narrow.arg.type is wide.type and contains(wide.type, narrow.type):
            return narrow.arg
    return wide


def _identities(expr: ir.Apply) -> ir.Expr:
    """x * 1, x / 1 and x - 0 are x in every format; x + 0 in integers only, for -0 + 0 is +0."""
    args = expr.args
    if len(args) != 2:
        return expr
    left, right = args
    if expr.op == "mul" and left == ir.Const(1, expr.type):
        return right
    if expr.op in ("mul", "div", "floordiv") and right == ir.Const(1, expr.type):
        return left if expr.op != "floordiv" or not expr.type.is_float else expr
    if expr.op == "sub" and right == ir.Const(0, expr.type) and not _is_negative_zero(right):
        return left
    if expr.op == "add" and not expr.type.is_float:
        if right == ir.Const(0, expr.type):
            return left
        if left == ir.Const(0, expr.type):
            return right
    return expr


def _is_negative_zero(expr: ir.Expr) -> bool:
    return isinstance(expr, ir.Const) and expr.type.is_float and bool(np.signbit(expr.value))


def _folded(expr: ir.Apply) -> ir.Expr:
    """Compute an op on constants as the routine would; what the prelude defines is left to the routine."""
    row = OPS[expr.op]
    prec = expr.type
    if row.prelude or row.op_class == "random" or prec.is_narrow or prec in (bool_, u4x32):
        return expr
    if prec.is_float and expr.op in ("floordiv", "mod"):
        return expr  # the prelude's, too, where they are not exact
    values = [_cell(arg, arg.type if at in row.predicates else prec) for at, arg in enumerate(expr.args)]
    with np.errstate(all="ignore"):
        result = np.asarray(row.numpy(*values)).astype(prec.numpy_dtype)
    return constant(result.reshape(()).item(), prec, prec)


def _cell(expr: ir.Expr, prec: Prec) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    assert isinstance(expr, ir.Const)
    return np.asarray([expr.value]).astype(prec.numpy_dtype)


def simplify_positions(expr: ir.Expr, ranges: Mapping[ir.Symbol, Interval]) -> ir.Expr:
    """Simplify a value whose choices depend on positions: what the ranges of the symbols settle goes."""
    return _PositionSimplifier(ranges).expr(expr)


class _PositionSimplifier(_Simplifier):
    """Treats i64 arithmetic and comparisons outside of indices as indices, too."""

    def expr(self, expr: ir.Expr) -> ir.Expr:
        if isinstance(expr, ir.Apply) and expr.type is i64:
            return self._by_range(self._positions(expr))
        return super().expr(expr)

    def index(self, expr: ir.Expr) -> ir.Expr:
        return self._by_range(self._positions(expr))

    def _positions(self, expr: ir.Expr) -> ir.Expr:
        if not isinstance(expr, ir.Apply) or expr.type is not i64:
            return super().expr(expr)
        rebuilt = simplified(replace(expr, args=tuple(map(self.index, expr.args))))
        if isinstance(rebuilt, ir.Apply) and rebuilt.op in ("add", "sub", "mul", "floordiv", "mod"):
            return to_expr(affine(rebuilt))
        return rebuilt
