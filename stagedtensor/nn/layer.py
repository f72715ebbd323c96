"""What blocks share: the types of layers and activations, and the checks of their settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from stagedtensor.errors import ShapeError
from stagedtensor.settings import is_integer
from stagedtensor.source import user_source
from stagedtensor.tensor import Tensor

Layer: TypeAlias = Callable[..., Tensor]
"""A function of tensors with its parameters inside."""

Activation: TypeAlias = Callable[[Tensor], Tensor] | None
"""Applied to a layer's result inside its one rounding; None: none."""


def whole(value: Any, what: str, least: int = 1) -> int:
    """Return a setting that is a whole number of at least ``least``; raises ShapeError, TypeError for a tensor."""
    if isinstance(value, Tensor):  # the block that was called says what to do
        raise TypeError(f"{what}: expected an integer of at least {least}, got {value!r}")
    if not is_integer(value, least):
        raise ShapeError(f"{what}: expected an integer of at least {least}, got {value!r} ({user_source().quoted()})")
    return int(value)


def row_of_sizes(value: Any, what: str) -> list[int]:
    """Return a setting that is a size or a list of sizes; raises ShapeError."""
    return [whole(size, what) for size in (value if isinstance(value, list | tuple) else [value])]


def function_of_tensor(activation: Any, what: str) -> Activation:
    """Return an activation; raises TypeError where it is none."""
    if activation is not None and not callable(activation):
        raise TypeError(
            f"{what}: activation is a function of a tensor such as st.relu, not {activation!r} ({user_source().quoted()})"
        )
    chosen: Activation = activation
    return chosen


def activated(y: Tensor, activation: Activation) -> Tensor:
    """Apply the activation, if any."""
    return y if activation is None else activation(y)
