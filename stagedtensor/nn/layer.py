"""What blocks share: the types of layers and activations, and the checks of their settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from stagedtensor.errors import ShapeError
from stagedtensor.source import user_source
from stagedtensor.tensor import Tensor

Layer: TypeAlias = Callable[..., Tensor]
"""A function of tensors with its parameters inside."""

Activation: TypeAlias = Callable[[Tensor], Tensor] | None
"""Applied to a layer's result inside its one rounding; None: none."""


def whole(value: Any, what: str, least: int = 1) -> int:
    """Return a setting that is a whole number of at least ``least``; raises ShapeError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ShapeError(f"{what}: expected an integer of at least {least}, got {value!r} ({user_source().quoted()})")
    return value


def activated(y: Tensor, activation: Activation) -> Tensor:
    """Apply the activation, if any."""
    return y if activation is None else activation(y)
