"""Arrays of the textual language: ``[ ]`` is an output axis, ``( , )`` an input axis, ``[| |]`` a batch axis.

In: nested lists, tuples and batch arrays of numbers or tensors. Out: a constant, or tensors joined along new axes. Axes
of one row stand in the order of nesting, rows in memory order whatever the nesting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from stagedtensor.dims import MEMORY_ORDER, RowKind
from stagedtensor.tensor import Tensor, lift
from stagedtensor.terminals import constant

from .model_values import BatchArray, kind_of
from .words import words

Refuse = Callable[[str, str], Exception]
"""Makes the error for a problem and what was expected."""


def is_array(value: Any) -> bool:
    """Whether a value is written as an array."""
    return isinstance(value, list | tuple)


def row_of(value: Any) -> RowKind:
    """Return the row that an array's outermost axis is in."""
    return "batch" if isinstance(value, BatchArray) else "input" if isinstance(value, tuple) else "output"


def leaves(value: Any) -> list[Any]:
    """Return the leaves of nested arrays in order."""
    return [leaf for item in value for leaf in leaves(item)] if is_array(value) else [value]


def number_array(value: Any, refuse: Refuse) -> tuple[Any, dict[RowKind, int]]:
    """Return nested lists in memory order and the number of axes of each row."""
    rows: list[RowKind] = []
    _measure(value, 0, rows, refuse)
    counts = {kind: rows.count(kind) for kind in MEMORY_ORDER}
    order = sorted(range(len(rows)), key=lambda at: MEMORY_ORDER.index(rows[at]))
    try:
        cells = np.asarray(_plain(value))
    except ValueError:
        raise refuse("the rows of this array have different lengths", "as many items in each") from None
    if cells.ndim != len(rows):
        raise refuse("the rows of this array have different lengths", "as many items in each")
    return np.transpose(cells, order).tolist(), counts


def _measure(value: Any, depth: int, rows: list[RowKind], refuse: Refuse) -> None:
    if not is_array(value):
        if isinstance(value, bool | int | float):
            return
        raise refuse(f"an array holds {kind_of(value)}", "numbers or tensors")
    kind = row_of(value)
    if depth == len(rows):
        rows.append(kind)
    elif rows[depth] != kind:
        raise refuse("brackets of different kinds stand at one level of an array", "one kind of bracket for one axis")
    for item in value:
        _measure(item, depth + 1, rows, refuse)


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if is_array(value) else value


def as_tensor(value: Any, refuse: Refuse) -> Tensor:
    """Return an array as a tensor: a constant of numbers, or its tensors side by side along new axes."""
    found = leaves(value)
    if not any(isinstance(leaf, Tensor) or hasattr(leaf, "__tensor__") for leaf in found):
        cells, counts = number_array(value, refuse)
        return constant(cells, batch=counts["batch"], input=counts["input"], output=counts["output"])
    return _stacked(value, refuse)


_NEW_AXIS = {
    "batch": "..b..|..i..->..o.. => _,..b..|..i..->..o..",
    "input": "..b..|..i..->..o.. => ..b..|_,..i..->..o..",
    "output": "..b..|..i..->..o.. => ..b..|..i..->_,..o..",
}


def _stacked(value: Any, refuse: Refuse) -> Tensor:
    if not is_array(value):
        if isinstance(value, Tensor | bool | int | float) or hasattr(value, "__tensor__"):
            return lift(value)
        raise refuse(f"an array holds {kind_of(value)}", "numbers or tensors")
    if not value:
        raise refuse("an array of tensors has an empty axis", "at least one item")
    row = row_of(value)
    einsum, concat = words()["einsum"], words()["concat"]
    parts = [einsum(_NEW_AXIS[row], _stacked(item, refuse)) for item in value]
    joined: Tensor = concat(parts, axis=(row, 0)) if len(parts) > 1 else parts[0]
    return joined
