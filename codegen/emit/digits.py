"""Values that depend on one small digit: of at most four bits, in a register that has sixteen cells.

In: an expression of a loop's iteration. Out: the digit, where the iteration enters by nothing else, so that the values
of all digits are one vector, made once, and each iteration takes its own from it. Same expression, same bits. Prints
nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from stagedtensor.codegen.loop_ir import Apply, Cast, Const, Expr, Load, children, walk, with_children
from stagedtensor.precision import i32, u8, u32

_DIGITS = 16
_LEAST_STEPS = 2
"""Operations from the digit to the value from which a table costs less than they do."""
_STEPS = ("add", "sub", "mul")

Varies = Callable[[Expr], bool]


def power_of_two(expr: Expr) -> int | None:
    """Return the exponent of a constant power of 2."""
    if not isinstance(expr, Const) or int(expr.value) <= 0 or int(expr.value) & (int(expr.value) - 1):
        return None
    return int(expr.value).bit_length() - 1


def possible_bits(expr: Expr) -> int:
    """Return the bits of a u32 that may be set."""
    whole = (1 << 32) - 1
    if isinstance(expr, Cast) and isinstance(expr.arg, Load) and expr.arg.type is u8:
        return 0xFF
    if isinstance(expr, Apply) and expr.type is u32:
        power = power_of_two(expr.args[1]) if len(expr.args) == 2 else None
        bits = possible_bits(expr.args[0])
        if expr.op == "floordiv" and power is not None:
            return bits >> power
        if expr.op == "mod" and power is not None:
            return bits & ((1 << power) - 1)
        if expr.op == "mul" and power is not None:
            return bits << power & whole
        if expr.op == "add" and not bits & possible_bits(expr.args[1]):
            return bits | possible_bits(expr.args[1])
    return whole


def digit_in(expr: Expr, varies: Varies) -> Expr | None:
    """Return the u32 whose last four bits alone decide ``expr`` among the iterations, or None.

    ``varies`` tells whether an expression changes from iteration to iteration.
    """
    found: list[Expr] = []
    steps = _steps(expr, varies, found)
    return found[0] if steps is not None and steps >= _LEAST_STEPS and found else None


def _steps(expr: Expr, varies: Varies, found: list[Expr]) -> int | None:
    """How many operations lead from the digit to ``expr``; None where something else varies."""
    if not varies(expr):
        return 0
    digit = _digit(expr)
    if digit is not None:
        found.append(digit)
        return 0 if digit == found[0] else None
    plain = isinstance(expr, Cast) and not (expr.saturate or expr.flush) and expr.arg.type in (i32, u32)
    if not (plain or (isinstance(expr, Apply) and expr.op in _STEPS)):
        return None
    total = 1
    for part in children(expr):
        steps = _steps(part, varies, found)
        if steps is None:
            return None
        total += steps
    return total


def _digit(expr: Expr) -> Expr | None:
    """The u32, read from memory, of which ``expr`` is the last bits."""
    if expr.type is not u32 or not any(isinstance(part, Load) for part in walk(expr)):
        return None
    if isinstance(expr, Apply) and expr.op == "mod" and (power_of_two(expr.args[1]) or _DIGITS) <= 4:
        return expr.args[0]
    return expr if possible_bits(expr) < _DIGITS else None


def with_digit(expr: Expr, digit: Expr, other: Expr) -> Expr:
    """Return ``expr`` with ``other``, below 16, for the digit."""
    last_four = (
        isinstance(expr, Apply) and expr.op == "mod" and expr.args[0] == digit and power_of_two(expr.args[1]) == 4
    )
    if expr == digit or last_four:
        return other
    return with_children(expr, tuple(with_digit(part, digit, other) for part in children(expr)))
