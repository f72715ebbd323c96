"""Infix operators of the textual language on configuration values and on tensors.

In: an operator as written and two values. Out: a number, a truth value, or a tensor built by the same call as in
Python. ``*`` contracts tensors and multiplies numbers; integers stay in 64 bits.
"""

from __future__ import annotations

import operator as python
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from stagedtensor.tensor import Tensor, apply_pointwise

from .model_parser import MAX_INTEGER
from .model_values import UNIT, kind_of

_ON_NUMBERS: Mapping[str, Callable[[Any, Any], Any]] = MappingProxyType(
    {
        "+": python.add, "-": python.sub, "*": python.mul, "*.": python.mul, "/.": python.truediv, "//": python.floordiv,
        "%": python.mod, "**.": python.pow, "<": python.lt, "<=": python.le, ">": python.gt, ">=": python.ge,
        "==": python.eq, "!=": python.ne,
    }
)  # fmt: skip
_ON_TENSORS: Mapping[str, Callable[[Any, Any], Any]] = MappingProxyType(
    {
        **{symbol: apply for symbol, apply in _ON_NUMBERS.items() if symbol != "*"},
        "*": python.matmul,
        "&&": lambda left, right: apply_pointwise("and", left, right),
        "||": lambda left, right: apply_pointwise("or", left, right),
    }
)


class OperatorError(Exception):
    """An operator does not fit its operands: (problem, expected, advice)."""


def is_number(value: Any) -> bool:
    """Whether a value is a number or truth value of configuration."""
    return isinstance(value, bool | int | float)


def on_numbers(symbol: str, left: Any, right: Any) -> Any:
    """Apply an operator to configuration values."""
    try:
        if symbol == "**." and isinstance(left, int) and isinstance(right, int) and right > 64 and abs(left) > 1:
            raise OverflowError
        return checked(_ON_NUMBERS[symbol](left, right))
    except ZeroDivisionError:
        raise OperatorError("a division by zero", "another divisor", "") from None
    except OverflowError:
        raise OperatorError("the result is too large", f"at most {MAX_INTEGER}, or a float", "") from None


def checked(value: Any) -> Any:
    """Return a number if it is one that configuration may hold."""
    if isinstance(value, complex):
        raise OperatorError("a power of a negative number is not real", "a base >= 0", "")
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        raise OverflowError
    return value


def on_values(symbol: str, left: Any, right: Any) -> bool:
    """Compare strings, precisions, lists and other configuration."""
    if symbol not in ("==", "!="):
        raise OperatorError(f"{symbol!r} has {kind_of(left)} and {kind_of(right)}", "numbers or tensors", "")
    return bool(left == right) is (symbol == "==")


def on_tensors(symbol: str, left: Any, right: Any) -> Tensor:
    """Apply an operator where one side at least is a tensor."""
    if symbol == "*" and (is_number(left) or is_number(right)):
        raise OperatorError(
            "'*' contracts two tensors, and one side is a number", "'*.'", "*. is the pointwise product"
        )
    for value in (left, right):
        if isinstance(value, str) or value is None or callable(value) or value is UNIT:
            advice = "an argument with a minus is written f ~-x" if symbol == "-" and value is left else ""
            raise OperatorError(f"{symbol!r} has {kind_of(value)}", "tensors or numbers", advice)
    result = _ON_TENSORS[symbol](left, right)
    if not isinstance(result, Tensor):
        raise OperatorError(
            f"{symbol!r} does not apply to {kind_of(left)} and {kind_of(right)}", "tensors or numbers", ""
        )
    return result
