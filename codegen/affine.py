"""Index arithmetic: i64 expressions as sums of terms, and logical indices as one flat cell number.

In: index expressions of the loop IR. Out: an :class:`Affine` (atoms with integer coefficients and a constant), folded
so that ``(t // 8) * 8 + t % 8`` is ``t`` again. Schedules ask it for strides, emission prints it. Knows no schedule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from stagedtensor.codegen.loop_ir import (
    Apply,
    Buffer,
    Const,
    Expr,
    Load,
    Store,
    Symbol,
    Var,
    index,
    walk,
)
from stagedtensor.codegen.pieces import piece, remembered
from stagedtensor.codegen.rewrite import symbols_of
from stagedtensor.precision import i64

# -- building -----------------------------------------------------------------------------------------------------


def constant(expr: Expr) -> int | None:
    """Return the value of an index constant, None for anything else."""
    return int(expr.value) if isinstance(expr, Const) else None


def as_index(value: int | Expr) -> Expr:
    """Return ``value`` as an index expression."""
    return index(value) if isinstance(value, int) else value


def add(lhs: int | Expr, rhs: int | Expr) -> Expr:
    """Return ``lhs + rhs``, folded where a side is constant."""
    lhs, rhs = as_index(lhs), as_index(rhs)
    left, right = constant(lhs), constant(rhs)
    if left is not None and right is not None:
        return index(left + right)
    if left == 0:
        return rhs
    if right == 0:
        return lhs
    return Apply("add", (lhs, rhs), i64)


def subtract(lhs: int | Expr, rhs: int | Expr) -> Expr:
    """Return ``lhs - rhs``, folded where both are constant or nothing is taken away."""
    lhs, rhs = as_index(lhs), as_index(rhs)
    left, right = constant(lhs), constant(rhs)
    if left is not None and right is not None:
        return index(left - right)
    if right == 0:
        return lhs
    return Apply("sub", (lhs, rhs), i64)


def multiply(lhs: int | Expr, rhs: int | Expr) -> Expr:
    """Return ``lhs * rhs``, folded where a side is constant."""
    lhs, rhs = as_index(lhs), as_index(rhs)
    left, right = constant(lhs), constant(rhs)
    if left is not None and right is not None:
        return index(left * right)
    if left == 0 or right == 0:
        return index(0)
    if left == 1:
        return rhs
    if right == 1:
        return lhs
    return Apply("mul", (lhs, rhs), i64)


def floor_divide(lhs: int | Expr, divisor: int) -> Expr:
    """Return ``lhs // divisor`` for a positive divisor."""
    lhs = as_index(lhs)
    value = constant(lhs)
    if value is not None:
        return index(value // divisor)
    return lhs if divisor == 1 else Apply("floordiv", (lhs, index(divisor)), i64)


def modulo(lhs: int | Expr, divisor: int) -> Expr:
    """Return ``lhs % divisor`` for a positive divisor."""
    lhs = as_index(lhs)
    value = constant(lhs)
    if value is not None:
        return index(value % divisor)
    return index(0) if divisor == 1 else Apply("mod", (lhs, index(divisor)), i64)


def minimum(lhs: int | Expr, rhs: int | Expr) -> Expr:
    """Return the lesser index."""
    lhs, rhs = as_index(lhs), as_index(rhs)
    left, right = constant(lhs), constant(rhs)
    if left is not None and right is not None:
        return index(min(left, right))
    return Apply("minimum", (lhs, rhs), i64)


def maximum(lhs: int | Expr, rhs: int | Expr) -> Expr:
    """Return the greater index."""
    lhs, rhs = as_index(lhs), as_index(rhs)
    left, right = constant(lhs), constant(rhs)
    if left is not None and right is not None:
        return index(max(left, right))
    return Apply("maximum", (lhs, rhs), i64)


# -- sums of terms ------------------------------------------------------------------------------------------------


@piece(frozen=True)
class Affine:
    """``constant + sum(coefficient * atom)``; an atom is a variable or an index expression that is no sum.

    Terms are in order of first appearance and have no zero coefficient.
    """

    terms: tuple[tuple[Expr, int], ...] = ()
    constant: int = 0

    def coefficient(self, symbol: Symbol) -> int | None:
        """Return how far one step of ``symbol`` goes; None where the symbol also stands inside another atom."""
        found = 0
        for atom, factor in self.terms:
            if isinstance(atom, Var):
                if atom.symbol is symbol:
                    found = factor
            elif symbol in symbols_of(atom):
                return None
        return found

    def depends_on(self, symbol: Symbol) -> bool:
        """Tell whether ``symbol`` occurs in any atom."""
        return any(symbol in symbols_of(atom) for atom, _ in self.terms)

    def without(self, symbol: Symbol) -> Affine:
        """Return the sum without the term of ``symbol`` itself."""
        kept = tuple(term for term in self.terms if not (isinstance(term[0], Var) and term[0].symbol is symbol))
        return Affine(kept, self.constant)

    def same_as(self, other: Affine) -> bool:
        """Tell whether both are the same sum, whatever the order of terms."""
        return self.constant == other.constant and dict(self.terms) == dict(other.terms)


Bounds: TypeAlias = Mapping[Symbol, int]
"""Variables known to run over ``0 .. bound-1``: what remains below a divisor drops out of the quotient."""


def _sum(parts: Iterable[tuple[Affine, int]]) -> Affine:
    terms: dict[Expr, int] = {}
    total = 0
    for part, factor in parts:
        total += part.constant * factor
        for atom, coefficient in part.terms:
            terms[atom] = terms.get(atom, 0) + coefficient * factor
    return _recombine(Affine(tuple((atom, factor) for atom, factor in terms.items() if factor), total))


def affine(expr: Expr, bounds: Bounds | None = None) -> Affine:
    """Return an index expression as a sum of terms."""
    if isinstance(expr, Const):
        return Affine((), int(expr.value))
    if isinstance(expr, Apply):
        return _affine(expr, bounds) if bounds and _divides(expr) else _affine_anywhere(expr)
    return Affine(((expr, 1),))


@remembered
def _divides(expr: Expr) -> bool:
    """Whether an expression has a quotient or remainder: what becomes of these may depend on bounds, of nothing else."""
    return any(isinstance(part, Apply) and part.op in ("floordiv", "mod") for part in walk(expr))


@remembered
def _affine_anywhere(expr: Expr) -> Affine:
    return _affine(expr, None)


def _affine(expr: Expr, bounds: Bounds | None) -> Affine:
    if isinstance(expr, Apply):
        if expr.op in ("add", "sub"):
            sign = 1 if expr.op == "add" else -1
            return _sum(((affine(expr.args[0], bounds), 1), (affine(expr.args[1], bounds), sign)))
        if expr.op == "neg":
            return _sum(((affine(expr.args[0], bounds), -1),))
        if expr.op == "mul":
            lhs, rhs = affine(expr.args[0], bounds), affine(expr.args[1], bounds)
            if not lhs.terms:
                return _sum(((rhs, lhs.constant),))
            if not rhs.terms:
                return _sum(((lhs, rhs.constant),))
        if expr.op in ("floordiv", "mod"):
            return _divided(expr, bounds or {})
    return Affine(((expr, 1),))


def _divided(expr: Apply, bounds: Bounds) -> Affine:
    divisor = constant(expr.args[1])
    if divisor is None or divisor <= 0:
        return Affine(((expr, 1),))
    inner = affine(expr.args[0], bounds)
    if not inner.terms:
        return Affine((), inner.constant // divisor if expr.op == "floordiv" else inner.constant % divisor)
    # What the divisor divides leaves the quotient whole and the remainder untouched.
    whole = Affine(tuple(term for term in inner.terms if term[1] % divisor == 0))
    rest = Affine(tuple(term for term in inner.terms if term[1] % divisor), inner.constant)
    if (not rest.terms and rest.constant % divisor == 0) or _stays_below(rest, divisor, bounds):
        if expr.op == "mod":
            return rest if rest.terms else Affine((), rest.constant % divisor)
        quotient = tuple((atom, factor // divisor) for atom, factor in whole.terms)
        return Affine(quotient, rest.constant // divisor if not rest.terms else 0)
    if expr.op == "floordiv" and isinstance(expr.args[0], Apply) and expr.args[0].op == "floordiv":
        first = constant(expr.args[0].args[1])
        if first is not None and first > 0:
            return affine(floor_divide(expr.args[0].args[0], first * divisor), bounds)
    if whole.terms and bounds:
        left = _divided(Apply(expr.op, (to_expr(rest), index(divisor)), i64), bounds)
        if expr.op == "mod":
            return left
        taken_out = Affine(tuple((atom, factor // divisor) for atom, factor in whole.terms))
        return _sum(((taken_out, 1), (left, 1)))
    return Affine(((Apply(expr.op, (to_expr(inner), index(divisor)), i64), 1),))


def _stays_below(value: Affine, limit: int, bounds: Bounds) -> bool:
    """Tell whether the sum lies in ``0 .. limit-1`` wherever its variables stay in their bounds."""
    greatest = value.constant
    if greatest < 0:
        return False
    for atom, factor in value.terms:
        most = _greatest(atom, bounds)
        if most is None or factor < 0:
            return False
        greatest += factor * most
    return greatest < limit


def _greatest(atom: Expr, bounds: Bounds) -> int | None:
    """The greatest value of a loop variable, or of a quotient of one; None where it is unknown or may be negative."""
    if isinstance(atom, Var) and atom.symbol in bounds:
        return max(0, bounds[atom.symbol] - 1)
    if isinstance(atom, Apply) and atom.op == "floordiv":
        most, divisor = _greatest(atom.args[0], bounds), constant(atom.args[1])
        return None if most is None or not divisor or divisor < 0 else most // divisor
    return None


def _recombine(value: Affine) -> Affine:
    """Fold ``c*d*(x // d) + c*(x % d)`` to ``c*x`` wherever it occurs."""
    if not any(isinstance(atom, Apply) and atom.op == "mod" for atom, _ in value.terms):
        return value
    terms = dict(value.terms)
    changed = True
    total = value.constant
    while changed:
        changed = False
        for atom, factor in terms.items():
            if not (isinstance(atom, Apply) and atom.op == "mod"):
                continue
            divided, divisor = atom.args[0], constant(atom.args[1])
            if divisor is None:
                continue
            quotient = affine(floor_divide(divided, divisor))
            if len(quotient.terms) != 1 or quotient.constant or quotient.terms[0][1] != 1:
                continue
            partner = quotient.terms[0][0]
            if terms.get(partner) != factor * divisor:
                continue
            terms.pop(atom)
            terms.pop(partner)
            inner = affine(divided)
            total += inner.constant * factor
            for part, coefficient in inner.terms:
                terms[part] = terms.get(part, 0) + coefficient * factor
            changed = True
            break
    return Affine(tuple((atom, factor) for atom, factor in terms.items() if factor), total)


def to_expr(value: Affine) -> Expr:
    """Return the sum as an index expression."""
    total: Expr = index(0)
    for atom, factor in value.terms:
        if factor < 0 and constant(total) is None:
            total = subtract(total, multiply(atom, -factor))
        else:
            total = add(total, multiply(atom, factor))
    if value.constant < 0 and constant(total) is None:
        return subtract(total, -value.constant)
    return add(total, value.constant)


# -- cells --------------------------------------------------------------------------------------------------------


def flat_index(buffer: Buffer, indices: Sequence[Expr], bounds: Bounds | None = None) -> Affine:
    """Return the cell number in memory of the cell at logical ``indices``."""
    parts: list[tuple[Affine, int]] = []
    stride = 1
    shape = buffer.layout.physical_shape(buffer.shape)
    physical = buffer.layout.memory_indices(
        tuple(indices), lambda value, by: (floor_divide(value, by), modulo(value, by))
    )
    for value, extent in zip(reversed(physical), reversed(shape), strict=True):
        # An axis of one cell has one index, whatever expression finds it.
        parts.append((Affine() if extent == 1 else affine(value, bounds), stride))
        stride *= extent
    return _sum(reversed(parts))


def cell_of(access: Load | Store, bounds: Bounds | None = None) -> Affine:
    """Return the cell number in memory of the cell that is read or written; found out once where bounds do not matter."""
    if bounds and (access.buffer.layout.steps or any(isinstance(at, Apply) and _divides(at) for at in access.indices)):
        return flat_index(access.buffer, access.indices, bounds)
    return _cell_anywhere(access)


@remembered
def _cell_anywhere(access: Load | Store) -> Affine:
    return flat_index(access.buffer, access.indices)
