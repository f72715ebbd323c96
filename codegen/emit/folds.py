"""Partial results in the cells of a vector, merged halves onto halves without leaving the register.

In: one step of such a merge: a loop over the lower half of the cells that are left, or the store of the last one. Out:
what prints it as one line; None for anything else. Only greatest and least values: cell by cell, each of these would be
a branch that goes either way as often.
"""

from __future__ import annotations

from stagedtensor.codegen.affine import add, affine, constant
from stagedtensor.codegen.loop_ir import Apply, Buffer, Expr, For, Load, Stmt, Store, Var, index
from stagedtensor.codegen.prelude.vectors import CELLS
from stagedtensor.precision import f32

_FUNCTIONS = {"maximum": "st_fold_max_vf32", "minimum": "st_fold_min_vf32"}


def fold(stmt: Stmt) -> tuple[str, Buffer, int] | None:
    """Return function, states and ``count`` of ``states[i] = maximum(states[i], states[i + count])`` for ``i < count``."""
    count, inner = 1, stmt
    lane: Expr = index(0)
    if isinstance(stmt, For):
        count = constant(stmt.iterator.extent) or 0
        lane = Var(stmt.iterator.symbol)
        if stmt.kind != "lane" or len(stmt.body) != 1:
            return None
        (inner,) = stmt.body
    if count not in (1, 2, 4, 8) or not isinstance(inner, Store) or not isinstance(inner.value, Apply):
        return None
    states, value = inner.buffer, inner.value
    if states.space != "register" or states.type is not f32 or len(states.shape) != 1 or states.shape[0] < CELLS:
        return None
    if value.op not in _FUNCTIONS or inner.indices != (lane,):
        return None
    low, high = value.args
    if not _is_cell(low, states, lane) or not _is_cell(high, states, add(lane, count)):
        return None
    return _FUNCTIONS[value.op], states, count


def _is_cell(expr: Expr, states: Buffer, place: Expr) -> bool:
    return isinstance(expr, Load) and expr.buffer is states and affine(expr.indices[0]).same_as(affine(place))
