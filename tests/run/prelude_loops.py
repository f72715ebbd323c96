"""Compiles prelude functions into loops over arrays and calls them through ctypes; for the tests of the prelude only.

In: function names, target features, compiler flags. Out: :class:`Loops`, which applies a function to numpy arrays.
Cells of narrow formats and bool pass as raw codes.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stagedtensor.codegen.prelude import prelude_source
from stagedtensor.precision import precision

Array = np.ndarray[Any, np.dtype[Any]]

FLAGS = (
    "-std=gnu11",
    "-shared",
    "-fPIC",
    "-ffp-contract=off",
    "-fwrapv",
    "-fno-math-errno",
    "-fno-trapping-math",
)
_SIGNATURE = re.compile(r"^ST_FN (\w+) (st_\w+)\(([^)]*)\) \{", re.MULTILINE)
_DTYPES: dict[str, np.dtype[Any]] = {
    "double": np.dtype(np.float64),
    "float": np.dtype(np.float32),
    **{f"{sign}int{bits}_t": np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)},
}


@dataclass(frozen=True)
class Signature:
    """C types of the result and of the parameters."""

    result: str
    parameters: tuple[str, ...]


def signatures(source: str) -> dict[str, Signature]:
    """Return the signature of every function that the prelude text defines."""
    found = {}
    for result, name, parameters in _SIGNATURE.findall(source):
        found[name] = Signature(result, tuple(parameter.split()[0] for parameter in parameters.split(",")))
    return found


def compiler() -> str | None:
    """Return the C compiler of the machine, or None."""
    return shutil.which("gcc") or shutil.which("cc")


def loop_text(name: str, signature: Signature) -> str:
    """Return a C function that applies `name` to arrays."""
    arrays = [f"const {kind} *restrict x{index}" for index, kind in enumerate(signature.parameters)]
    operands = ", ".join(f"x{index}[i]" for index in range(len(signature.parameters)))
    return (
        f"void loop_{name}(int64_t n, {signature.result} *restrict y, {', '.join(arrays)}) {{\n"
        f"    for (int64_t i = 0; i < n; ++i) y[i] = {name}({operands});\n}}\n"
    )


class Loops:
    """A shared library with one loop a function."""

    def __init__(
        self,
        folder: Path,
        names: Iterable[str],
        features: frozenset[str],
        flags: tuple[str, ...],
        optimise: str = "-O2",
    ) -> None:
        prelude = prelude_source(names, features=features)
        defined = signatures(prelude)
        self.signatures = {name: defined[name] for name in names}
        text = "\n".join([prelude, *(loop_text(name, signature) for name, signature in self.signatures.items())])
        source, library = folder / "loops.c", folder / "loops.so"
        source.write_text(text)
        gcc = compiler()
        assert gcc is not None
        command = [gcc, *FLAGS, optimise, *flags, "-Wall", "-Wextra", "-Werror", str(source), "-o", str(library), "-lm"]
        subprocess.run(command, check=True, timeout=300)
        self._library = ctypes.CDLL(str(library))

    def __call__(self, name: str, *operands: Array) -> Array:
        """Apply the function; operands must have the parameters' dtypes (or the same width) and one common length."""
        signature = self.signatures[name]
        size = operands[0].size
        result: Array = np.empty(size, _DTYPES[signature.result])
        pointers = []
        kept = []
        for operand, kind in zip(operands, signature.parameters, strict=True):
            cells = np.ascontiguousarray(operand)
            assert cells.dtype.itemsize == _DTYPES[kind].itemsize, (name, cells.dtype, kind)
            assert cells.size == size, name
            kept.append(cells)
            pointers.append(ctypes.c_void_p(cells.ctypes.data))
        loop = getattr(self._library, f"loop_{name}")
        loop.restype = None
        loop(ctypes.c_int64(size), ctypes.c_void_p(result.ctypes.data), *pointers)
        return result


def raw(array: Array) -> Array:
    """View cells as unsigned integers of their width."""
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}").reshape(-1)


def nan_cells(array: Array) -> Array:
    """Tell which cells are NaN; none for integers."""
    if not precision(array.dtype).is_float:
        return np.zeros(array.shape, np.bool_)
    with np.errstate(invalid="ignore"):  # a signalling NaN is no fault here
        return np.isnan(array.astype(np.float64))


def differing(left: Array, right: Array) -> Array:
    """Indices where two arrays of one dtype differ in bits, all NaN counting as equal."""
    assert left.dtype.itemsize == right.dtype.itemsize
    left = left.view(right.dtype)
    both_nan = nan_cells(left) & nan_cells(right)
    return np.flatnonzero((raw(left) != raw(right)) & ~both_nan)
