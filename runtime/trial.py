"""Timed runs of a routine on copies of what it reads: the values of a context, and its counters, stay as they are.

In: executables, and what each node holds. Out: seconds per run of two executables in alternation. Inputs that have no
values yet get plausible ones. The copies are made once per search and filled again before every sample.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from stagedtensor.conversion import convert
from stagedtensor.dims import Shape
from stagedtensor.node import Node, Role
from stagedtensor.precision import Prec
from stagedtensor.runtime.device import Array, Executable
from stagedtensor.runtime.store import Store

_SAMPLE_SECONDS = 1e-3
_MOST_RUNS, _LEAST_PAIRS, _MOST_PAIRS = 200, 5, 25
_PAIRS_SECONDS = 1.0
_SPREAD = 0.1


def seconds_of(executable: Executable, launch: Callable[[], None], runs: int) -> float:
    """Return the seconds of one run: the mean of ``runs`` in a row. Tests put a stand-in here."""
    started = time.perf_counter()
    for _ in range(runs):
        launch()
    return (time.perf_counter() - started) / runs


def contents(store: Store, node: Node, shape: Shape, prec: Prec) -> Array:
    """Return what ``node`` holds in a trial, flat: its values where it has any, else made-up ones."""
    held = store.stored.get(node)
    if held is not None and (store.is_initialized(node) or node.encoded is not None):
        cells = np.asarray(store.device.download(held.buffer))
        return cells.reshape(-1)
    if node.encoded is not None:
        return np.asarray(node.encoded.memory).reshape(-1)
    full = np.zeros(shape.dims, prec.numpy_dtype)
    if store.is_initialized(node):
        cells = store.preview(node, shape, prec)
        full[tuple(slice(0, size) for size in cells.shape)] = cells
    elif prec.is_float and node.role in (Role.PARAM, Role.PLACEHOLDER):
        some = _SPREAD * np.random.default_rng(0).standard_normal(4096)
        full[...] = convert(np.resize(some, shape.dims), prec)
    return full.reshape(-1)


@dataclass
class Trials:
    """Alternating runs on scratch memory. ``contents`` gives a node's cells, ``allocate`` memory, ``scalars`` bindings."""

    contents: Callable[[Node], Array]
    allocate: Callable[[Array], Array]
    scalars: Callable[[Executable], Array]
    _cells: dict[Node, tuple[Array, Array]] = field(default_factory=dict)
    _launches: dict[int, tuple[Executable, Callable[[], None]]] = field(default_factory=dict)

    def compare(self, default: Executable, candidate: Executable, seconds: float) -> list[tuple[float, float]]:
        """Return pairs of seconds per run, as many as fit into ``seconds``; none where that is fewer than five."""
        started = time.perf_counter()
        pair = (default, candidate)
        for executable in pair:
            self._sample(executable, 1)  # pages of the arena, caches
        first = [self._sample(executable, 1) for executable in pair]
        runs = max(1, min(_MOST_RUNS, round(_SAMPLE_SECONDS / max(min(first), 1e-7))))
        spent = time.perf_counter() - started
        each = max(spent / 2, sum(first) * (1 + runs))
        count = min(_MOST_PAIRS, int((seconds - spent) / each), max(_LEAST_PAIRS, int(_PAIRS_SECONDS / each)))
        if count < _LEAST_PAIRS:
            return []
        pairs = []
        for at in range(count):
            # who comes first changes, so that neither always finds the other's cache
            order = pair if at % 2 == 0 else pair[::-1]
            taken = {id(executable): self._sample(executable, runs) for executable in order}
            pairs.append((taken[id(default)], taken[id(candidate)]))
        return pairs

    def _sample(self, executable: Executable, runs: int) -> float:
        launch = self._launch(executable)
        for node in executable.external:
            source, copy = self._cells[node]
            np.copyto(copy, source)
        launch()
        return seconds_of(executable, launch, runs)

    def _launch(self, executable: Executable) -> Callable[[], None]:
        known = self._launches.get(id(executable))
        if known is None:
            buffers = []
            for node in executable.external:
                if node not in self._cells:
                    source = self.contents(node)
                    self._cells[node] = (source, self.allocate(source))
                buffers.append(self._cells[node][1])
            known = (executable, executable.bind(buffers, self.scalars(executable)))
            self._launches[id(executable)] = known
        return known[1]
