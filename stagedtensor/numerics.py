"""The numeric choices of one compilation, and the two decisions they settle: compute and accumulate precision.

In: a format (the join of a statement's result and data operands), a :class:`Numerics` and a back end's name. Out: the
format to compute or accumulate in. Emission, scheduling and tests all ask here; no pass may decide for itself.
"""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any, Final, Self

from stagedtensor.precision import Prec, f16, f32
from stagedtensor.source import user_source

NATIVE_NARROW: Final[dict[str, frozenset[Prec]]] = {}
"""Which narrow formats a back end truly computes in by itself; a back end that is not listed has none.

None has any yet: on GPUs, too, narrow operands are widened in registers, which costs nothing where memory is what limits.
"""

_CHOICES: Final[dict[str, tuple[str, ...]]] = {"narrow_compute": ("f32", "native"), "accumulate": ("f32", "storage")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numerics:
    """How narrow formats compute and accumulate, and which liberties a back end may take; constant for a routine.

    ``narrow_compute``: ``"f32"``, or ``"native"`` for f16 and bf16 arithmetic on back ends that have it (none yet).
    ``accumulate``: ``"f32"``, or ``"storage"`` to round to the node's format at every step.
    ``tf32_matmul``: f32 contractions may use tf32 operands. ``f16_native_accumulate``: f16 contractions may accumulate
    in f16 on back ends that can (none yet). ``fp8_fast_accumulate``: fp8 contractions may use the hardware's short
    accumulators. ``fast_math``: f32 arithmetic may be contracted and use approximate division, roots and
    transcendentals.

    Raises TypeError for an unknown field and for a flag that is no bool, ValueError for a value outside its set.

    >>> Numerics(accumulate="storage").accumulate
    'storage'
    """

    narrow_compute: str = "f32"
    accumulate: str = "f32"
    tf32_matmul: bool = False
    f16_native_accumulate: bool = False
    fp8_fast_accumulate: bool = False
    fast_math: bool = False

    def __new__(cls, *args: object, **given: object) -> Self:
        """Check names and values before the generated initialiser, whose frame would hide the user's line."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name, value in given.items():
            if name not in known:
                near = difflib.get_close_matches(name, known, n=2) or known
                raise TypeError(
                    f"Numerics has no field {name!r}; did you mean {', '.join(near)}?\n  {user_source().quoted()}"
                )
            choices = _CHOICES.get(name)
            if choices is None:
                if type(value) is not bool:
                    raise TypeError(f"Numerics.{name} must be True or False, got {value!r}\n  {user_source().quoted()}")
            elif not isinstance(value, str) or value not in choices:
                expected = " or ".join(map(repr, choices))
                raise ValueError(f"Numerics.{name} must be {expected}, got {value!r}\n  {user_source().quoted()}")
        return super().__new__(cls)

    def key(self) -> tuple[tuple[str, Any], ...]:
        """Return every field as (name, value), for cache keys."""
        return tuple((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))


def compute_prec(p: Prec, numerics: Numerics, backend: str) -> Prec:
    """Return the format in which one operation on operands and result of join `p` computes.

    f32 for the narrow floats, `p` for the rest. Under ``narrow_compute="native"`` f16 and bf16 compute as themselves
    on a back end that truly has them.
    """
    if not p.is_narrow:
        return p
    if numerics.narrow_compute == "native" and p in NATIVE_NARROW.get(backend, ()):
        return p
    return f32


def accum_prec(p: Prec, numerics: Numerics, backend: str, *, contraction: bool = False) -> Prec:
    """Return the format in which a reduction, or a `contraction`, over operands and result of join `p` accumulates.

    f32 for the narrow floats, `p` for the rest (integers accumulate modulo 2^bits). Under ``accumulate="storage"``
    always `p`; under ``f16_native_accumulate`` f16 contractions accumulate in f16 where the back end truly has it.
    """
    if not p.is_narrow or numerics.accumulate == "storage":
        return p
    if contraction and p is f16 and numerics.f16_native_accumulate and f16 in NATIVE_NARROW.get(backend, ()):
        return p
    return f32
