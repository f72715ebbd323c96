"""The protocol that every back end implements, and what compiling for one gives.

Buffers are opaque to everything above: a device allocates, uploads and downloads them in a node's own NumPy dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np

from stagedtensor.node import Node
from stagedtensor.numerics import Numerics
from stagedtensor.precision import Prec

if TYPE_CHECKING:  # the protocol speaks of them; only a device loads them
    from stagedtensor.codegen.solved import SolvedProgram
    from stagedtensor.runtime.tune import Tuning

Array = np.ndarray[Any, Any]


def zeros(shape: int | tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return zeroed host memory; MemoryError where there is too little, or where no index reaches that far."""
    try:
        return np.zeros(shape, dtype)
    except ValueError as error:  # NumPy's word for sizes above every index
        raise MemoryError(str(error)) from None


@dataclass(frozen=True)
class Kernel:
    """One kernel of a routine, for reading.

    ``expressions`` are the DSL expressions with ``file:line``; ``launch`` the launch dimensions or loop partition;
    ``reads`` and ``writes`` name buffers; ``path`` says which code path was chosen and why.
    """

    name: str
    expressions: tuple[str, ...]
    source: str
    launch: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    flops: int
    nbytes: int
    path: str
    shared_bytes: int = 0
    threads: int = 0
    """Threads of one block on a GPU; 0 elsewhere."""


@dataclass(frozen=True)
class MemoryLine:
    """One buffer in a memory report: ``live`` is the first and last kernel that use it (the whole routine if external)."""

    node: str
    shape: str
    precision: str
    nbytes: int
    live: tuple[int, int] | None = None
    offset: int | None = None


@dataclass
class Executable:
    """What a device makes of a program: text, kernels and a way to bind it to buffers.

    The buffers of the nodes ``external`` and ``scalars`` (dynamic extents, static indices) are to be bound in this
    order. ``bind`` takes the device buffers and the int64 scalars and returns the launch.
    """

    source: str
    kernels: tuple[Kernel, ...]
    external: tuple[Node, ...]
    scalars: tuple[str, ...]
    bind: Callable[[Sequence[Any], Array], Callable[[], None]]
    temporaries: tuple[MemoryLine, ...] = ()
    arena_bytes: int = 0
    thread_bytes: int = 0
    """Bytes of the arena that each thread has of its own, for slabs and panels."""
    saved_bytes: int = 0
    recomputed_bytes: int = 0
    """Bytes fewer alive at once, because values are computed again in front of late readers."""
    from_cache: bool = False
    types: Mapping[str, str] = field(default_factory=dict)
    """The formats of the kernels' buffers, by name."""
    language: Literal["c", "cuda", "ir"] = "c"
    """What ``source`` is written in."""
    locate: Callable[[int], str | None] | None = None
    """Maps a line of the source (from 1) to the user's line."""
    limit: int = 0
    """Threads that a run takes at most; 0: all that there are."""
    tuning: Tuning | None = None
    """What a search among schedules found, where there was one."""


class Device(Protocol):
    """A back end."""

    backend: str
    """What ``numerics.compute_prec`` calls it."""

    @property
    def name(self) -> str:
        """The device as messages call it."""

    def allocate(self, prec: Prec, cells: int) -> Any:
        """Return zeroed memory for ``cells`` cells; MemoryError where there is too little, as from ``Executable.bind``."""

    def upload(self, buffer: Any, cells: Array) -> None:
        """Copy host cells (flat, the precision's numpy dtype) into a buffer."""

    def narrow(self, buffer: Any, cells: Array, prec: Prec, *, saturate: bool) -> bool:
        """Round f32 host cells (one piece of memory) into a buffer of ``prec``; False, and nothing done, where it can't."""

    def take(self, buffer: Any, values: object, dims: tuple[int, ...]) -> bool:
        """Copy an array of ``dims`` that lies on the device, in the buffer's format; False, and nothing done, for others."""

    def download(self, buffer: Any) -> Array:
        """Wait and return a fresh flat host copy, in the precision's numpy dtype."""

    def view(self, buffer: Any) -> Any:
        """Return a flat zero-copy array over the buffer."""

    def draw(self, kind: str, cells: int, prec: Prec, key: tuple[int, int], first: float, second: float) -> Array:
        """Draw initial values on the device (f32 or f64) and return them on the host side of the store."""

    def compile(self, program: SolvedProgram, numerics: Numerics, *, fusion: bool, debug: bool) -> Executable:
        """Generate and compile a program."""

    def sync(self) -> None:
        """Wait for everything enqueued."""

    def close(self) -> None:
        """Free what the device holds."""


@runtime_checkable
class Tuned(Protocol):
    """A back end with schedules to choose from."""

    def tune(
        self,
        program: SolvedProgram,
        numerics: Numerics,
        contents: Callable[[Node], Array],
        scalars: Callable[[Executable], Array],
        *,
        fusion: bool,
        seconds: float,
    ) -> Executable:
        """Compile with the fastest choices that a search of at most about ``seconds`` finds, or that one found before.

        ``contents`` gives the cells of a node, flat, for trial runs on copies; ``scalars`` what is bound in them.
        """
