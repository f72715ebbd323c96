"""Block-encoded weights: values, packing, I2_S and GGUF import.

In: arrays, packed bytes, GGUF files. Out: :class:`Encoded` values, to be decoded (``numpy``), repacked or put into a
graph with ``st.constant``. The ``gguf`` package is imported by ``load_gguf`` and the row quantizers only.
"""

from __future__ import annotations

from stagedtensor.block_formats import (
    BITNET_B1_58 as BITNET_B1_58,
    PACKED_ENCODINGS as PACKED_ENCODINGS,
    Q4_0 as Q4_0,
    Q4_1 as Q4_1,
    Q4_K as Q4_K,
    Q5_0 as Q5_0,
    Q5_1 as Q5_1,
    Q5_K as Q5_K,
    Q6_K as Q6_K,
    Q8_0 as Q8_0,
    TQ1_0 as TQ1_0,
    TQ2_0 as TQ2_0,
    Dense as Dense,
    Encoding as Encoding,
    TernaryPacked as TernaryPacked,
    decode_blocks as decode_blocks,
)
from stagedtensor.encoded import (
    INPUT_BLOCK_MAJOR as INPUT_BLOCK_MAJOR,
    ROW_MAJOR as ROW_MAJOR,
    Encoded as Encoded,
    Order as Order,
    pack as pack,
)
from stagedtensor.encodings.gguf_file import GGUFWeights as GGUFWeights, load_gguf as load_gguf
from stagedtensor.encodings.i2_s import import_i2_s as import_i2_s

__all__ = [
    "BITNET_B1_58",
    "INPUT_BLOCK_MAJOR",
    "PACKED_ENCODINGS",
    "Q4_0",
    "Q4_1",
    "Q4_K",
    "Q5_0",
    "Q5_1",
    "Q5_K",
    "Q6_K",
    "Q8_0",
    "ROW_MAJOR",
    "TQ1_0",
    "TQ2_0",
    "Dense",
    "Encoded",
    "Encoding",
    "GGUFWeights",
    "Order",
    "TernaryPacked",
    "decode_blocks",
    "import_i2_s",
    "load_gguf",
    "pack",
]
