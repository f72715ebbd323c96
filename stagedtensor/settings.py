"""What counts as a number where users give one: Python's and NumPy's integers and floats, but no truth value.

In: any object. Out: whether it is such a number. What a wrong one means, and the error, is the caller's.
"""

from __future__ import annotations

from typing import TypeGuard

import numpy as np

_INTEGERS = (int, np.integer)
_NUMBERS = (int, float, np.integer, np.floating)


def is_integer(value: object, least: int | None = None) -> TypeGuard[int]:
    """Whether ``value`` is an integer, and no smaller than ``least``; callers that keep it keep ``int(value)``."""
    if isinstance(value, bool) or not isinstance(value, _INTEGERS):
        return False
    return least is None or bool(value >= least)


def is_number(value: object) -> TypeGuard[float]:
    """Whether ``value`` is an integer or a float, perhaps inf or NaN; callers that keep it keep ``float(value)``."""
    return isinstance(value, _NUMBERS) and not isinstance(value, bool)
