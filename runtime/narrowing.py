"""Host values rounded while they are copied into a narrow buffer: one library per target, kept in the kernel cache.

In: f32 cells as one piece of memory, a buffer of bf16 or f16. Out: each cell rounded once, as the prelude and the
host's own conversion do (of a NaN only that it is one). NumPy's casts of half precision take several times as long, and
Python's way around them longer than a small batch is worth.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from stagedtensor.codegen.prelude import prelude_source
from stagedtensor.codegen.prelude.vectors import CELLS, FEATURE, vector_functions
from stagedtensor.precision import Prec, bf16, f16
from stagedtensor.runtime.compiler import Compiler
from stagedtensor.runtime.device import Array
from stagedtensor.runtime.kernel_cache import KernelCache
from stagedtensor.runtime.shared_library import load_library
from stagedtensor.runtime.target import Target

NARROWED: tuple[Prec, ...] = (bf16, f16)
"""The formats that f32 cells are rounded to here."""

_FUNCTION = """
/* n cells, each rounded once */
void st_cells_f32_to_{name}(uint16_t *restrict to, const float *restrict from, int64_t n) {{
    int64_t i = 0;
{vectors}    for (; i < n; i++) to[i] = st_f32_to_{name}(from[i]);
}}
"""
_VECTORS = """\
    for (; i + {cells} <= n; i += {cells}) st_store_vu16(to + i, st_vf32_to_{name}(st_load_vf32(from + i)));
"""


def narrowing_source(features: frozenset[str]) -> str:
    """Return the C text of the functions."""
    in_vectors = FEATURE in features
    names = [f"{prec}{ending}" for prec in NARROWED for ending in ("", "_sat")]
    text = prelude_source([f"st_f32_to_{name}" for name in names], features=features)
    if in_vectors:
        text += vector_functions(["st_load_vf32", "st_store_vu16", *(f"st_vf32_to_{prec}" for prec in NARROWED)])
    for name in names:
        loop = _VECTORS.format(name=name, cells=CELLS) if in_vectors and not name.endswith("_sat") else ""
        text += _FUNCTION.format(name=name, vectors=loop)
    return text


class Narrowing:
    """The compiled functions of one target; built at the first use."""

    def __init__(self, compiler: Compiler, target: Target, cache: KernelCache) -> None:
        library = load_library(narrowing_source(target.features), compiler=compiler, target=target, cache=cache)
        self._functions: dict[tuple[str, bool], Callable[..., Any]] = {}
        for prec in NARROWED:
            for saturate in (False, True):
                function = getattr(library, f"st_cells_f32_to_{prec}{'_sat' if saturate else ''}")
                function.restype, function.argtypes = None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
                self._functions[prec.name, saturate] = function
        self._targets: dict[int, tuple[Array, int]] = {}
        """The buffers that were filled, and their addresses, which NumPy takes a microsecond to tell."""

    def __call__(self, cells: Array, buffer: Array, prec: Prec, *, saturate: bool) -> None:
        """Round contiguous f32 ``cells`` into ``buffer``, of as many cells in ``prec``; ``saturate`` as in conversions."""
        target = self._targets.get(id(buffer))
        if target is None:
            target = self._targets[id(buffer)] = buffer, buffer.ctypes.data
        first = ctypes.addressof(ctypes.c_char.from_buffer(cells.data)) if cells.flags.writeable else cells.ctypes.data
        self._functions[prec.name, saturate](target[1], first, cells.size)
