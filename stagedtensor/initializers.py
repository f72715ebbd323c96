"""Initialisers: descriptions of how a parameter's first values are drawn. They draw nothing themselves.

Streams are counter based (threefry) and keyed by seed and the parameter's name, so they depend neither on construction
order nor on what else a program holds. ``fan_in`` is the product of the input row, ``fan_out`` of the output row.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any, Literal

from .dims import Shape
from .errors import ShapeError


@dataclass(frozen=True)
class Initializer:
    """Values ``low + (high - low) * u`` (uniform) or ``mean + std * n`` (normal); or one constant.

    ``scale`` says what ``low``/``high``/``std`` are multiplied by: nothing, or a function of the fans.
    """

    kind: Literal["constant", "uniform", "normal"]
    first: float
    """The constant, the low end, or the mean."""
    second: float = 0.0
    """The high end, or the standard deviation."""
    fan: Literal["", "lecun", "kaiming", "xavier"] = ""

    def parameters(self, shape: Shape, name: str) -> tuple[float, float]:
        """Return (low, high) or (mean, standard deviation) for a parameter of ``shape``."""
        if not self.fan:
            return self.first, self.second
        fan_in = math.prod(axis.size for axis in shape.input)
        fan_out = math.prod(axis.size for axis in shape.output)
        if not shape.input:
            raise ShapeError(
                f"parameter {name!r} has no input row, so {self.fan} has no fan to scale by; give init= a number or "
                "st.uniform(low, high)"
            )
        total = {"lecun": fan_in, "kaiming": fan_in / 2, "xavier": (fan_in + fan_out) / 2}[self.fan]
        factor = 1.0 / math.sqrt(max(total, 1e-300))
        if self.kind == "normal":
            return self.first, self.second * factor
        return self.first * factor, self.second * factor


def constant_init(value: float) -> Initializer:
    """Fill with one value."""
    return Initializer("constant", float(value))


DEFAULT = Initializer("uniform", -1.0, 1.0, "lecun")
"""Uniform between plus and minus 1/sqrt(fan_in)."""


def stream_key(seed: int, name: str) -> tuple[int, int]:
    """Return the two 32-bit key words of the stream ``name`` under ``seed``.

    >>> stream_key(0, "w") == stream_key(0, "w"), stream_key(0, "w") == stream_key(1, "w")
    (True, False)
    """
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def as_initializer(init: Any) -> Initializer | None:
    """Return the initializer that a number or an initializer stands for; None for anything else."""
    if isinstance(init, Initializer):
        return init
    if isinstance(init, bool | int | float):
        return constant_init(init)
    return None
