"""Export: forward and gradient computations as StableHLO text, for other compilers.

In: tensors and computations of this package. Out: text that parses and runs elsewhere. No other runtime is imported,
and the compiler of this package only when something is exported: ``import stagedtensor`` stays quick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .stablehlo import Entry, Signature, signature, to_stablehlo

__all__ = ["Entry", "Signature", "signature", "to_stablehlo"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import stablehlo

    return getattr(stablehlo, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
