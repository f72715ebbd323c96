"""``Routine``: one compiled computation, its source and kernels, bound to a context's buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stagedtensor.errors import ContextError
from stagedtensor.node import Node
from stagedtensor.numerics import Numerics
from stagedtensor.runtime.device import Executable, Kernel
from stagedtensor.runtime.kernel_table import kernel_table, terminal_width
from stagedtensor.runtime.nvrtc import CudaBinary, KernelResources, Kind, compile_cuda
from stagedtensor.runtime.tune import Tuning
from stagedtensor.settings import is_integer

if TYPE_CHECKING:
    from stagedtensor.runtime.context import Context


@dataclass(frozen=True)
class NodePrecision:
    """One node's settled precision with the reason."""

    node: str
    precision: str
    reason: str

    def __str__(self) -> str:
        return self.reason


@dataclass(eq=False)
class Routine:
    """A compiled computation. Run it with ``ctx.run(routine)`` or ``routine()``.

    ``source`` is the full generated text, ``kernels`` the kernels with the expressions they compute; ``print(routine)``
    shows them, a paragraph each on a terminal, elsewhere one line each. ``precisions`` gives each node's settled
    precision with its reason.
    """

    name: str
    context: Context
    executable: Executable
    numerics: Numerics
    inputs: tuple[Node, ...]
    """Nodes that must have values before a run."""
    outputs: tuple[Node, ...]
    """Stored nodes that a run writes."""
    consumes: frozenset[Node]
    produces: frozenset[Node]
    indices: Mapping[str, int]
    extents: Mapping[str, int]
    precisions: Mapping[str, NodePrecision]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    compile_seconds: float = 0.0
    scalars: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros(1, np.int64))
    launch: Callable[[], None] = field(default=lambda: None)
    checked: bool = False
    """Every input was seen initialised (inputs never become uninitialised again)."""
    simple: bool = False
    """No bindings, no gradients to watch: the short way through ``run``."""

    @property
    def source(self) -> str:
        """The full generated source."""
        return self.executable.source

    @property
    def tuning(self) -> Tuning | None:
        """What the search of ``ctx.compile(..., tune=True)`` found and measured; None without one."""
        return self.executable.tuning

    @cached_property
    def stored_nodes(self) -> frozenset[Node]:
        """The nodes whose stored buffers a run reads or writes."""
        return frozenset(self.executable.external)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels in launch order."""
        return self.executable.kernels

    def __call__(self, **bindings: int) -> None:
        """Run on the routine's context."""
        self.context.run(self, **bindings)

    def bind(self, bindings: Mapping[str, int], current: Mapping[str, int]) -> dict[str, int]:
        """Write static indices and dynamic extents into the scalar arguments; return the extents."""
        known = {**self.indices, **self.extents}
        unknown = sorted(set(bindings) - set(known))
        if unknown:
            raise ContextError(
                f"routine {self.name!r} has no index or extent {', '.join(map(repr, unknown))}; it takes "
                f"{', '.join(sorted(known)) or 'none'}"
            )
        values = []
        for name in self.executable.scalars:
            if name in self.indices:
                values.append(self._index(name, bindings))
            else:
                values.append(self._extent(name, bindings, current))
        self.scalars[: len(values)] = values
        return {name: self._extent(name, bindings, current) for name in self.extents}

    def _index(self, name: str, bindings: Mapping[str, int]) -> int:
        if name not in bindings:
            raise ContextError(f"routine {self.name!r} reads the static index {name!r}: pass ctx.run(..., {name}=0)")
        value, size = _integer(bindings[name], name), self.indices[name]
        if not 0 <= value < size:
            raise ContextError(f"static index {name!r} runs over 0 .. {size - 1}, got {value}")
        return value

    def _extent(self, name: str, bindings: Mapping[str, int], current: Mapping[str, int]) -> int:
        largest = self.extents[name]
        value = _integer(bindings.get(name, current.get(name, largest)), name)
        if not 1 <= value <= largest:
            raise ContextError(f"dynamic extent {name!r} runs over 1 .. {largest}, got {value}")
        if name in current and name in bindings and value != current[name]:
            raise ContextError(
                f"dynamic extent {name!r}: run was given {value}, but set_values left {current[name]} rows of data"
            )
        return value

    def ptx(self, arch: str = "sm_90") -> str:
        """Return the PTX of a CUDA routine for the virtual architecture of ``arch``; needs CuPy, no GPU."""
        return self._compiled(arch, "ptx").data.decode()

    def cubin(self, arch: str = "sm_90") -> bytes:
        """Return the binary of a CUDA routine for ``arch``; needs CuPy, no GPU."""
        return self._compiled(arch, "cubin").data

    def resources(self, arch: str = "sm_90") -> tuple[KernelResources, ...]:
        """Return registers, shared memory and spills of each kernel of a CUDA routine on ``arch``; needs CuPy, no GPU."""
        # The compiler sees no shared memory that a launch asks for.
        asked = {kernel.name: kernel.shared_bytes for kernel in self.kernels}
        return tuple(
            replace(item, shared_bytes=max(item.shared_bytes, asked.get(item.name, 0)))
            for item in self._compiled(arch, "cubin").resources
        )

    def _compiled(self, arch: str, kind: Kind) -> CudaBinary:
        if self.executable.language != "cuda":
            raise ContextError(
                f"routine {self.name!r} was compiled for {self.context.device_name}, so it has no CUDA source; compile it "
                "in st.Context('cuda-emulated'), which needs no GPU, or in st.Context('cuda')"
            )
        return compile_cuda(self.source, arch, kind, fast_math=self.numerics.fast_math, locate=self.executable.locate)

    def save(self, directory: str | Path) -> None:
        """Write the generated source and the kernel table into ``directory``."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        ending = {"c": "c", "cuda": "cu", "ir": "ir"}[self.executable.language]
        (folder / f"{self.name}.{ending}").write_text(self.source, encoding="utf-8")
        (folder / f"{self.name}.txt").write_text(self._table() + "\n", encoding="utf-8")

    def __str__(self) -> str:
        return self._table(terminal_width())

    def _table(self, width: int | None = None) -> str:
        tuned = "" if self.tuning is None else f", tuned: {self.tuning.name}"
        return kernel_table(f"routine {self.name} on {self.context.device_name}{tuned}", self.kernels, width)

    def __repr__(self) -> str:
        count = len(self.kernels)
        return f"<routine {self.name}: {count} kernel{'s' * (count != 1)} on {self.context.device_name}>"


def _integer(value: Any, name: str) -> int:
    if not is_integer(value):
        raise ContextError(f"{name!r} is bound to an integer, got {value!r}")
    return int(value)
