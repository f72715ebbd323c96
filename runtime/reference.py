"""The ``reference`` device: a NumPy interpreter of the unscheduled loop IR, no compiler. The oracle of the test suite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from stagedtensor.codegen.interpret import run_module
from stagedtensor.codegen.pipeline import generate
from stagedtensor.codegen.pretty import pretty
from stagedtensor.codegen.solved import SolvedProgram
from stagedtensor.numerics import Numerics
from stagedtensor.precision import Prec
from stagedtensor.runtime import reading
from stagedtensor.runtime.device import Array, Executable, zeros
from stagedtensor.runtime.draw import draw_with_mirror


class ReferenceDevice:
    """Interprets every statement on its own: no fusion, no schedules, reductions in serial order."""

    name = "reference"
    backend = "reference"

    def allocate(self, prec: Prec, cells: int) -> Array:
        """Return a zeroed flat array."""
        return zeros((cells, 4) if prec.name == "u4x32" else cells, prec.numpy_dtype)

    def upload(self, buffer: Array, cells: Array) -> None:
        """Copy cells in."""
        buffer[...] = cells.reshape(buffer.shape)

    def narrow(self, buffer: Array, cells: Array, prec: Prec, *, saturate: bool) -> bool:
        """Leave rounding to the host."""
        return False

    def take(self, buffer: Array, values: object, dims: tuple[int, ...]) -> bool:
        """All arrays are the host's here."""
        return False

    def download(self, buffer: Array) -> Array:
        """Return a copy."""
        return buffer.copy()

    def view(self, buffer: Array) -> Array:
        """Return the array itself."""
        return buffer[...]

    def draw(self, kind: str, cells: int, prec: Prec, key: tuple[int, int], first: float, second: float) -> Array:
        """Draw with the prelude's NumPy mirror."""
        return draw_with_mirror(kind, cells, prec, key, first, second)

    def compile(self, program: SolvedProgram, numerics: Numerics, *, fusion: bool, debug: bool) -> Executable:
        """Lower the program; its text is the loop IR."""
        module = generate(program, "reference", numerics, fusion=False, check=debug)
        symbols = module.scalars

        def bind(buffers: Sequence[Any], scalars: Array) -> Callable[[], None]:
            # encoded weights are one array of bytes, seen in several formats
            arrays = {
                buffer: array if array.dtype == buffer.type.numpy_dtype else array.view(buffer.type.numpy_dtype)
                for buffer, array in zip(module.external, buffers, strict=True)
            }

            def launch() -> None:
                run_module(
                    module, arrays, {symbol: int(value) for symbol, value in zip(symbols, scalars, strict=False)}
                )

            return launch

        return Executable(
            pretty(module),
            reading.kernels(module, None),
            tuple(buffer.node for buffer in module.external),
            tuple(symbol.hint for symbol in symbols),
            bind,
            temporaries=reading.unplanned(module),
            arena_bytes=sum(buffer.nbytes for buffer in module.temporaries),
            types=reading.types(module),
            language="ir",
        )

    def sync(self) -> None:
        """Nothing runs behind the caller's back."""

    def close(self) -> None:
        """Nothing to free."""
