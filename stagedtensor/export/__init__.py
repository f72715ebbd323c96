"""Export: forward and gradient computations as StableHLO text, for other compilers.

In: tensors and computations of this package. Out: text that parses and runs elsewhere. No other runtime is imported.
"""

from __future__ import annotations

from .stablehlo import Entry, Signature, signature, to_stablehlo

__all__ = ["Entry", "Signature", "signature", "to_stablehlo"]
