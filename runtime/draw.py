"""Initial values drawn by compiled code: one small library per target for all shapes, kept in the kernel cache.

Streams are threefry counters: cell i of a parameter is draw i of the stream that seed and name give, so values depend
on nothing else. Everything is drawn in f32 (f64 for f64) and converted once when the node's precision is known.
"""

from __future__ import annotations

import ctypes

import numpy as np

from stagedtensor.codegen.prelude import prelude_source
from stagedtensor.codegen.prelude.mirror import MIRROR
from stagedtensor.precision import Prec, f64
from stagedtensor.runtime.compiler import Compiler
from stagedtensor.runtime.device import Array
from stagedtensor.runtime.kernel_cache import KernelCache
from stagedtensor.runtime.shared_library import load_library
from stagedtensor.runtime.target import Target

_KERNEL = """
/* {kind} values: first + second * draw */
void st_fill_{kind}_{prec}({type} *restrict cells, int64_t n, uint32_t key0, uint32_t key1, {type} first, {type} second) {{
    for (int64_t i = 0; i < n; i++) {{
        {type} scaled = second * st_random_{kind}_{prec}(key0, key1, (uint64_t)i);
        cells[i] = first + scaled;
    }}
}}
"""
_KINDS = ("uniform", "normal")
_TYPES = {"f32": ("float", ctypes.c_float), "f64": ("double", ctypes.c_double)}


def draw_source(features: frozenset[str]) -> str:
    """Return the C text of the fill kernels."""
    names = [f"st_random_{kind}_{prec}" for kind in _KINDS for prec in _TYPES]
    body = "".join(
        _KERNEL.format(kind=kind, prec=prec, type=c_type) for kind in _KINDS for prec, (c_type, _) in _TYPES.items()
    )
    return prelude_source(names, features=features) + body


class DrawLibrary:
    """The compiled fill kernels of one target; built at the first draw."""

    def __init__(self, compiler: Compiler, target: Target, cache: KernelCache) -> None:
        self._options = (compiler, target, cache)
        self._library: ctypes.CDLL | None = None

    def __call__(self, kind: str, cells: int, prec: Prec, key: tuple[int, int], first: float, second: float) -> Array:
        """Draw ``cells`` values as flat f32 (f64 for f64): first + second * (uniform [0, 1) or standard normal)."""
        name = "f64" if prec is f64 else "f32"
        c_type = _TYPES[name][1]
        if self._library is None:
            compiler, target, cache = self._options
            self._library = load_library(draw_source(target.features), compiler=compiler, target=target, cache=cache)
        function = getattr(self._library, f"st_fill_{kind}_{name}")
        function.restype = None
        function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32, ctypes.c_uint32, c_type, c_type]
        out = np.empty(cells, np.float64 if name == "f64" else np.float32)
        function(out.ctypes.data, cells, *key, first, second)
        return out


def draw_with_mirror(kind: str, cells: int, prec: Prec, key: tuple[int, int], first: float, second: float) -> Array:
    """The same draws without a compiler."""
    name, dtype = ("f64", np.float64) if prec is f64 else ("f32", np.float32)
    counters = np.arange(cells, dtype=np.uint64)
    drawn = MIRROR[f"st_random_{kind}_{name}"](np.uint32(key[0]), np.uint32(key[1]), counters)
    scaled = np.multiply(dtype(second), drawn, dtype=dtype)
    return np.add(dtype(first), scaled, dtype=dtype)
