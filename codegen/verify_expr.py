"""Rules for the expressions of the loop IR, and what the rules of statements share: scopes and the table of rules.

In: an expression and the scope it stands in. Out: nothing, or a :class:`BrokenRuleError` that names the rule;
``verify`` turns it into an error that shows the code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import NoReturn

from stagedtensor.codegen.intervals import Interval, facts_of, interval, merge_facts
from stagedtensor.codegen.loop_ir import Apply, Buffer, Cast, Const, Expr, Fma, Load, Store, Symbol, Var, walk
from stagedtensor.conversion import representable
from stagedtensor.op_table import OPS
from stagedtensor.precision import Prec, bool_, f32, f64, i64, u4x32, u32, u64

RULES: dict[str, str] = {
    # expressions
    "const-fits": "a literal is a value of its type",
    "narrow-const": "narrow floats come from Load and Cast only, so a literal has a compute type",
    "narrow-arithmetic": "Apply and Fma take no narrow floats (outside native mode)",
    "op-known": "an op is a row of the op table and has its arity",
    "op-types": "the arguments of an op have its type, predicates aside",
    "fma-float": "Fma works on three f32 or three f64 values",
    "cast-legal": "a Cast changes a number; saturate and flush are for float targets",
    "in-scope": "a symbol is read only where it is bound",
    "buffer-in-scope": "a buffer is a parameter of the proc or allocated around its use",
    "index-type": "an index has type i64",
    "index-rank": "a buffer takes one index an axis",
    "index-bounds": "no index is provably out of bounds",
    # statements
    "store-type": "a stored value has the buffer's type",
    "store-flags": "the Cast that stores has the buffer's saturate and flush flags",
    "bound-once": "a symbol or scratch buffer is bound once in a proc",
    "iterator-type": "an iterator is an i64 symbol with an extent of literals and scalar parameters",
    "iterator-bound": "an iterator's bound is its extent's maximum",
    "loop-kind": "loops run over data iterators; lane and unroll loops have constant extents",
    "let-type": "a symbol has the type of the value it is given",
    "narrow-state": "accumulators and variables are not narrow",
    "assign-declared": "only a declared variable is assigned to",
    "parallel-assign": "iterations that may run at once do not assign to a variable from outside",
    "barrier-uniform": "a Barrier is reached by all threads or by none",
    "call-matches": "a Call passes buffers and scalars as its proc declares them",
    # blocks
    "init-domain": "an accumulator's init reads data iterators only",
    "store-domain": "a block's stores read data iterators and accumulators only, unless it scatters",
    "combine-known": "combine is add, mul, max, min or empty, with a literal neutral element",
    "pair-matches": "paired_with names a max or min accumulator of the same block",
    "scatter-plain": "a scatter block has no accumulators",
    "reduce-states": "a block with reduce iterators has accumulators, unless it scatters",
    "store-covers": "each data iterator selects the cell that is stored, unless the block scatters",
    "reads-own-cell": "a block reads a buffer that it stores to only at the stored cell, unless it scatters",
    # procs and modules
    "buffer-shape": "a buffer's shape, flags and layout fit together",
    "parameters": "parameters are distinct, and scalars are i64",
    "module-closed": "kernels use the module's buffers and scalars only",
}


class BrokenRuleError(Exception):
    """A rule and what broke it."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(message)
        self.rule = rule


def fail(rule: str, message: str) -> NoReturn:
    """Raise BrokenRuleError for a rule of the table."""
    assert rule in RULES, rule
    raise BrokenRuleError(rule, message)


@dataclass
class Scope:
    """What holds at one place of a proc. Inner scopes are changed copies; they never change the outer one's view."""

    native: frozenset[Prec]
    buffers: dict[Buffer, None] = field(default_factory=dict)
    symbols: dict[Symbol, None] = field(default_factory=dict)
    scalars: frozenset[Symbol] = frozenset()
    variables: dict[Symbol, bool] = field(default_factory=dict)
    """Declared variables, and whether they may be assigned to here."""
    values: dict[Symbol, Expr] = field(default_factory=dict)
    """What lets stand for."""
    hidden: dict[Symbol, str] = field(default_factory=dict)
    """Symbols that exist nearby but must not be read here, with the rule that says so."""
    ranges: dict[Symbol, Interval] = field(default_factory=dict)
    facts: dict[Expr, Interval] = field(default_factory=dict)
    varying: dict[Symbol, None] = field(default_factory=dict)
    """Symbols whose values differ between threads."""
    certain: bool = True
    """Whether the code runs at every point of the iterators around it."""
    reachable: bool = True
    divergent: bool = False

    def inner(self) -> Scope:
        """Return a scope for code inside this one."""
        return replace(
            self,
            buffers=dict(self.buffers),
            symbols=dict(self.symbols),
            variables=dict(self.variables),
            values=dict(self.values),
            hidden=dict(self.hidden),
            ranges=dict(self.ranges),
            varying=dict(self.varying),
        )

    def where(self, condition: Expr) -> Scope:
        """Return the scope of code that runs where ``condition`` holds."""
        scope = self.inner()
        scope.certain = False
        scope.facts = merge_facts(self.facts, facts_of(condition))
        return scope

    def varies(self, expr: Expr) -> bool:
        """Whether threads may see different values of ``expr``."""
        return any(
            isinstance(part, Load) or (isinstance(part, Var) and part.symbol in self.varying) for part in walk(expr)
        )


def check_expr(expr: Expr, scope: Scope) -> None:
    """Check an expression and all its parts."""
    match expr:
        case Const():
            check_const(expr, scope)
        case Var():
            check_variable(expr, scope)
        case Load():
            check_access(expr.buffer, expr.indices, scope)
        case Cast():
            check_expr(expr.arg, scope)
            check_cast(expr)
        case Fma():
            for part in (expr.a, expr.b, expr.c):
                check_expr(part, scope)
            check_fma(expr, scope)
        case Apply():
            _check_parts(expr, scope)
            check_op(expr)
            check_narrow_arithmetic(expr, scope)
            check_op_types(expr)
        case _:
            fail("op-known", f"{expr!r} is no expression")


def _check_parts(expr: Apply, scope: Scope) -> None:
    if expr.op == "where" and len(expr.args) == 3:
        condition, then, orelse = expr.args
        check_expr(condition, scope)
        check_expr(then, scope.where(condition))
        check_expr(orelse, scope.where(Const(1, i64)))  # nothing is derived from a negated condition
    else:
        for part in expr.args:
            check_expr(part, scope)


def check_const(expr: Const, scope: Scope) -> None:
    """Rules narrow-const and const-fits."""
    if expr.type.is_narrow and expr.type not in scope.native:
        fail("narrow-const", f"the literal {expr.value} has the narrow type {expr.type}")
    if expr.type is u4x32 or not (math.isinf(expr.value) or representable(expr.value, expr.type)):
        fail("const-fits", f"{expr.value!r} is no value of {expr.type}")
    if math.isinf(expr.value) and not expr.type.is_float:
        fail("const-fits", f"{expr.value!r} is no value of {expr.type}")


def check_variable(expr: Var, scope: Scope) -> None:
    """Rule in-scope, or the rule that hides the symbol here."""
    symbol = expr.symbol
    if symbol in scope.symbols:
        return
    if symbol in scope.hidden:
        rule = scope.hidden[symbol]
        fail(rule, f"{symbol} is read here, but {RULES[rule]}")
    fail("in-scope", f"{symbol} is not bound here")


def check_access(buffer: Buffer, indices: tuple[Expr, ...], scope: Scope) -> None:
    """Rules buffer-in-scope, index-rank, index-type and index-bounds."""
    if buffer not in scope.buffers:
        fail("buffer-in-scope", f"{buffer} is neither a parameter nor allocated here")
    if len(indices) != len(buffer.shape):
        fail("index-rank", f"{buffer} of shape {buffer.shape} takes {len(buffer.shape)} indices, got {len(indices)}")
    for index in indices:
        check_expr(index, scope)
        if index.type is not i64:
            fail("index-type", f"an index of {buffer} has type {index.type}")
    extents = buffer.layout.addressable(buffer.shape)
    for axis, (index, extent) in enumerate(zip(indices, extents, strict=True)):
        check_bounds(buffer, axis, interval(index, scope.ranges, scope.facts), extent, scope)


def check_bounds(buffer: Buffer, axis: int, values: Interval, extent: int, scope: Scope) -> None:
    """Rule index-bounds: an index always outside, or one that reaches outside on a path that certainly runs."""
    if not scope.reachable or values.is_empty or values.within(0, extent - 1):
        return
    always_outside = values.high < 0 or values.low >= extent
    if always_outside or (scope.certain and values.exact):
        fail("index-bounds", f"index {values.low}..{values.high} on axis {axis} of {buffer}, whose extent is {extent}")


def check_cast(expr: Cast) -> None:
    """Rule cast-legal."""
    if u4x32 in (expr.arg.type, expr.type):
        fail("cast-legal", f"counter state is not converted ({expr.arg.type} to {expr.type})")
    if (expr.saturate or expr.flush) and not expr.type.is_float:
        fail("cast-legal", f"saturate and flush are for floats, not for {expr.type}")


def check_fma(expr: Fma, scope: Scope) -> None:
    """Rules narrow-arithmetic and fma-float."""
    types = [part.type for part in (expr.a, expr.b, expr.c)]
    for type_ in types:
        if type_.is_narrow and type_ not in scope.native:
            fail("narrow-arithmetic", f"Fma on {type_}")
    if len(set(types)) != 1 or (types[0] not in (f32, f64) and types[0] not in scope.native):
        fail("fma-float", f"Fma on {', '.join(map(repr, types))}")


def check_op(expr: Apply) -> None:
    """Rule op-known."""
    row = OPS.get(expr.op)
    if row is None:
        fail("op-known", f"the op table has no {expr.op!r}")
    if len(expr.args) != row.arity:
        fail("op-known", f"{expr.op} takes {row.arity} arguments, got {len(expr.args)}")


def check_narrow_arithmetic(expr: Apply, scope: Scope) -> None:
    """Rule narrow-arithmetic."""
    for type_ in (expr.type, *(part.type for part in expr.args)):
        if type_.is_narrow and type_ not in scope.native:
            fail("narrow-arithmetic", f"{expr.op} on {type_}")


def check_op_types(expr: Apply) -> None:
    """Rule op-types."""
    row = OPS[expr.op]
    types = [part.type for part in expr.args]
    if row.op_class == "random":
        if types != [u32, u32, u64] or expr.type not in (f32, f64):
            fail("op-types", f"{expr.op} takes u32, u32, u64 and gives f32 or f64, got {types} and {expr.type}")
        return
    if expr.type is u4x32 or u4x32 in types:
        fail("op-types", f"{expr.op} on counter state")
    if (row.float_only or expr.op == "nonfinite") and not expr.type.is_float:
        fail("op-types", f"{expr.op} on {expr.type}; it is for floats")
    if expr.type is bool_ and row.op_class == "arithmetic" and expr.op not in ("identity", "maximum", "minimum"):
        fail("op-types", f"{expr.op} on bool; arithmetic on bools is done on u8")
    for position, type_ in enumerate(types):
        if type_ is not expr.type and position not in row.predicates:
            fail("op-types", f"argument {position} of {expr.op} of type {expr.type} has type {type_}")


def check_store(store: Store, scope: Scope) -> None:
    """Rules of accesses, and store-type and store-flags."""
    check_access(store.buffer, store.indices, scope)
    check_expr(store.value, scope)
    if store.value.type is not store.buffer.type:
        fail("store-type", f"{store.value.type} is stored to {store.buffer} of type {store.buffer.type}")
    check_store_flags(store, scope)


def check_store_flags(store: Store, scope: Scope) -> None:
    """Rule store-flags: the last conversion before the store is the buffer's own; without one there is nothing to flush."""
    buffer, value = store.buffer, store.value
    while isinstance(value, Var) and value.symbol in scope.values:
        value = scope.values[value.symbol]
    match value:
        case Cast():
            if (value.saturate, value.flush) != (buffer.saturate, buffer.flush_subnormal):
                fail(
                    "store-flags",
                    f"a Cast with saturate={value.saturate}, flush={value.flush} is stored to {buffer}, "
                    f"which has saturate={buffer.saturate}, flush_subnormal={buffer.flush_subnormal}",
                )
            return
        case Load():
            flushed = value.buffer.flush_subnormal
        case Const():
            flushed = not 0 < abs(value.value) < buffer.type.min_normal
        case _:
            flushed = False
    if buffer.flush_subnormal and not flushed:
        fail("store-flags", f"{buffer} flushes subnormals, but the stored value passes no Cast with flush=True")
