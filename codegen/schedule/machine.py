"""What schedules assume about a *named* target: lanes, registers, when a second thread pays.

In: a target's name and vector width. Out: a :class:`Machine` of constants. They belong to the name and are never
probed, so that generated source is reproducible. Knows nothing of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

from stagedtensor.codegen.choices import DEFAULT, Choices
from stagedtensor.precision import Prec


class TargetInfo(Protocol):
    """The part of a CPU target that code generation reads."""

    @property
    def name(self) -> str:
        """The target's name, such as ``avx512``."""

    @property
    def features(self) -> frozenset[str]:
        """Features in the compiler's spelling, such as ``fma``."""

    @property
    def vector_bytes(self) -> int:
        """Width of one vector register in bytes."""


class MatrixUnit(Enum):
    """What multiplies matrices of bf16, by the feature of a target that it comes with; the best first."""

    TILES = "amx_bf16"
    """AMX: tiles of 16 rows of 32 terms times 32 terms of 16 columns."""
    DOTS = "avx512bf16"
    """Sixteen cells at a time, each with the products of two terms added."""


@dataclass(frozen=True)
class Machine:
    """Constants of the cost model.

    ``vector_bytes`` is the width of a register and ``registers`` their number. ``serial_flops`` and ``serial_bytes``
    are the work below which a kernel stays on one thread (a few microseconds). ``split_points`` is the number of reduce
    points from which a reduction with few results is cut into blocks of at least ``block_points``; ``few_results`` is
    what counts as few. A maximum over a buffer of ``noted_cells`` cells is taken where they are written. Narrow
    temporaries of up to ``most_held_cells`` cells are held in f32: 512 KiB, a small part of a core's cache; operands of
    contractions of up to ``most_passing_cells`` where they soon are gone. An operand of up to ``cache_bytes`` bytes
    stays in a core's own cache while others pass by. ``panels``, ``tile_vectors`` and ``tile_rows`` are what
    :class:`~stagedtensor.codegen.choices.Choices` says. ``matrix_unit`` multiplies matrices of bf16, where there is
    one.
    """

    vector_bytes: int
    registers: int
    serial_flops: int = 200_000
    serial_bytes: int = 65_536
    split_points: int = 32_768
    block_points: int = 8_192
    most_blocks: int = 64
    few_results: int = 64
    noted_cells: int = 4_096
    most_held_cells: int = 131_072
    most_passing_cells: int = 1 << 20
    cache_bytes: int = DEFAULT.cache_bytes
    panels: bool = DEFAULT.panels
    tile_vectors: int = DEFAULT.tile_vectors
    tile_rows: int = DEFAULT.tile_rows
    matrix_unit: MatrixUnit | None = None

    def lanes(self, prec: Prec) -> int:
        """Return how many values of ``prec`` one register holds."""
        return max(1, self.vector_bytes // prec.bytes)

    def reduction_lanes(self, prec: Prec) -> int:
        """Return the number of partial states of a row reduction: two registers, to hide the latency of one."""
        return 2 * self.lanes(prec)


_MANY_REGISTERS = ("avx512", "avx512+bf16", "avx512+amx", "aarch64")


def machine(target: TargetInfo, choices: Choices = DEFAULT) -> Machine:
    """Return the constants of ``target``, and of ``choices`` what schedules read."""
    plain = Machine(
        target.vector_bytes,
        32 if target.name in _MANY_REGISTERS else 16,
        cache_bytes=choices.cache_bytes,
        panels=choices.panels,
        tile_vectors=choices.tile_vectors,
        tile_rows=choices.tile_rows,
    )
    return replace(plain, matrix_unit=next((unit for unit in MatrixUnit if unit.value in target.features), None))
