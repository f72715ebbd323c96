"""The ``cpu`` device: generated C, one shared library and one call per routine, a persistent thread pool."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stagedtensor.codegen.choices import DEFAULT, Choices
from stagedtensor.codegen.fingerprint import fingerprint
from stagedtensor.codegen.solved import SolvedProgram
from stagedtensor.errors import ContextError
from stagedtensor.node import Node
from stagedtensor.numerics import Numerics
from stagedtensor.precision import Prec
from stagedtensor.runtime.code_cache import cached_value
from stagedtensor.runtime.compiler import Compiler, Unit, find_compiler
from stagedtensor.runtime.cpu_code import CpuCode, loads as code_from_text
from stagedtensor.runtime.device import Array, Executable, zeros
from stagedtensor.runtime.draw import DrawLibrary
from stagedtensor.runtime.generator_version import generator_version
from stagedtensor.runtime.kernel_cache import KernelCache, digest
from stagedtensor.runtime.narrowing import NARROWED, Narrowing
from stagedtensor.runtime.shared_library import load_library
from stagedtensor.runtime.target import Target, detect, processor_name, target as target_by_name
from stagedtensor.runtime.thread_pool import ThreadPool, available_cpus
from stagedtensor.runtime.trial import Trials
from stagedtensor.runtime.tune import Tuning, loads as tuning_from_text, search
from stagedtensor.settings import is_integer

_ALIGNMENT = 64
_SERIAL_FLOPS, _SERIAL_BYTES = 16_000_000, 16_000_000
"""Work of a whole routine below which a second thread gains less than its barriers cost."""


_COMMENT = re.compile(r"//[^\n]*(?<!\\)$", re.MULTILINE)
"""Comments say where the user wrote what: a library is the same when lines have moved."""
_FEW_CELLS = 256
"""Cells from which the host rounds them with compiled code."""
_MOST_UNITS = 8
"""Compilers that run side by side at most: each takes some 150 MB."""


class CpuDevice:
    """Compiles C with the machine's compiler; buffers are NumPy memory."""

    backend = "cpu"

    def __init__(
        self, *, cache_dir: str | Path | None = None, threads: int | None = None, target: str | None = None
    ) -> None:
        if cache_dir is not None and (not isinstance(cache_dir, str | Path) or not str(cache_dir)):
            raise TypeError(f"cache_dir is the path of a folder, not {cache_dir!r}")
        self._cache = KernelCache(None if cache_dir is None else Path(cache_dir))
        self._asked = None if target is None else _runnable(target_by_name(target))
        self._threads = threads
        self._pool: ThreadPool | None = None
        self._draw: DrawLibrary | None = None
        self._narrowing: Narrowing | None = None
        self._compiler: Compiler | None = None
        if threads is not None and not is_integer(threads, 1):
            raise ContextError(f"threads is an integer of at least 1, got {threads!r}")

    @property
    def name(self) -> str:
        """The device with its target."""
        return f"cpu ({self.target.name})"

    @property
    def compiler(self) -> Compiler:
        """The C compiler; found when first needed."""
        if self._compiler is None:
            self._compiler = find_compiler()
        return self._compiler

    @property
    def target(self) -> Target:
        """The CPU target that source is generated for."""
        if self._asked is None:
            self._asked = self.compiler.usable(detect())
        return self._asked

    # -- memory ---------------------------------------------------------------------------------------------------
    def allocate(self, prec: Prec, cells: int) -> Array:
        """Return zeroed memory, aligned to a cache line."""
        return aligned(cells * prec.bytes).view(prec.numpy_dtype)

    def upload(self, buffer: Array, cells: Array) -> None:
        """Copy cells in."""
        buffer[...] = cells.reshape(buffer.shape)

    def narrow(self, buffer: Array, cells: Array, prec: Prec, *, saturate: bool) -> bool:
        """Round cells in with compiled code, where there are so many that its call pays."""
        if prec not in NARROWED or cells.size < _FEW_CELLS:
            return False
        if self._narrowing is None:
            self._narrowing = Narrowing(self.compiler, self.target, self._cache)
        self._narrowing(cells, buffer, prec, saturate=saturate)
        return True

    def take(self, buffer: Array, values: object, dims: tuple[int, ...]) -> bool:
        """All arrays are the host's here."""
        return False

    def download(self, buffer: Array) -> Array:
        """Return a copy."""
        return buffer.copy()

    def view(self, buffer: Array) -> Array:
        """Return an array over the same memory."""
        return buffer[...]

    def draw(self, kind: str, cells: int, prec: Prec, key: tuple[int, int], first: float, second: float) -> Array:
        """Draw with the compiled fill kernels."""
        if self._draw is None:
            self._draw = DrawLibrary(self.compiler, self.target, self._cache)
        return self._draw(kind, cells, prec, key, first, second)

    # -- code -----------------------------------------------------------------------------------------------------
    def compile(
        self,
        program: SolvedProgram,
        numerics: Numerics,
        *,
        fusion: bool,
        debug: bool,
        choices: Choices = DEFAULT,
    ) -> Executable:
        """Generate C and compile it, or take both from the cache; load the library."""
        code, nodes = self._code(program, numerics, fusion=fusion, debug=debug, choices=choices.schedule)
        builds, limit = self._cache.counts.builds, _limit(code, choices)
        library = load_library(
            code.text,
            compiler=self.compiler,
            target=self.target,
            cache=self._cache,
            key=(repr(numerics.key()),),
            locate=code.locate,
            split=lambda: _units(code),
            significant=lambda text: _COMMENT.sub("", text),
        )
        return Executable(
            code.text,
            code.kernels,
            tuple(nodes[number] for number in code.external),
            code.scalars,
            self._binder(library, code, limit),
            temporaries=code.temporaries,
            arena_bytes=_arena_bytes(code, limit or self._threads or available_cpus()),
            thread_bytes=code.thread_bytes,
            saved_bytes=code.saved_bytes,
            recomputed_bytes=code.recomputed_bytes,
            from_cache=self._cache.counts.builds == builds,
            types=code.types,
            locate=code.locate,
            limit=limit,
        )

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
        """Compile with the fastest choices for this processor and number of threads; bits do not depend on them."""
        trials = Trials(contents, lambda cells: aligned(cells.nbytes).view(cells.dtype), scalars)

        def build(choices: Choices) -> Executable:
            return self.compile(program, numerics, fusion=fusion, debug=False, choices=choices)

        def find() -> Tuning:
            default = build(DEFAULT)
            one_thread = None if self.pool.threads == 1 else default.limit == 1
            return search(build, _is_known, trials.compare, seconds=seconds, one_thread=one_thread)

        known, version = fingerprint(program), generator_version()
        if known is None or version is None:
            tuning = find()
        else:
            machine = (self.target.name, *sorted(self.target.features), processor_name(), str(self.pool.threads))
            key = digest(
                "tuning",
                version,
                known.content,
                repr(machine),
                self.compiler.identity,
                repr(numerics.key()),
                f"{fusion} {seconds}",
            )
            tuning = cached_value(self._cache, key, find, Tuning.dumps, tuning_from_text)
        executable = build(tuning.chosen)
        executable.tuning = tuning
        return executable

    def _code(
        self, program: SolvedProgram, numerics: Numerics, *, fusion: bool, debug: bool, choices: Choices
    ) -> tuple[CpuCode, Sequence[Node]]:
        """Return the code of a program and the nodes that its numbers stand for."""
        known, version = None if debug else fingerprint(program), generator_version()
        numbers: dict[Node, int] = {} if known is None else {node: number for number, node in enumerate(known.nodes)}

        def generate() -> CpuCode:
            # the compiler of this package: not loaded where the cache knows the program
            from stagedtensor.runtime.cpu_generation import generate_cpu

            return generate_cpu(program, self.target, numerics, numbers, fusion=fusion, check=debug, choices=choices)

        if known is None or version is None:
            code = generate()
        else:
            target = (self.target.name, *sorted(self.target.features), str(self.target.vector_bytes))
            key = digest("program", version, known.content, repr(target), repr(numerics.key()), f"{fusion} {choices}")
            code = cached_value(self._cache, key, generate, CpuCode.dumps, code_from_text)
        return code, tuple(numbers)

    def _binder(
        self, library: ctypes.CDLL, code: CpuCode, limit: int
    ) -> Callable[[Sequence[Any], Array], Callable[[], None]]:
        entry = ctypes.cast(getattr(library, code.entry), ctypes.c_void_p).value

        def bind(buffers: Sequence[Any], scalars: Array) -> Callable[[], None]:
            nbytes = _arena_bytes(code, self.pool.threads if limit == 0 else limit)
            arena = aligned(nbytes)
            addresses = [buffer.ctypes.data for buffer in buffers] + [arena.ctypes.data]
            frame = (ctypes.c_void_p * len(addresses))(*addresses)
            assert entry is not None
            # the launch holds what its raw addresses point into
            bound = self.pool.bind(entry, ctypes.addressof(frame), scalars.ctypes.data, limit)
            launch = _Launch(bound)
            launch.owns = (library, frame, arena, scalars, buffers)
            return launch

        return bind

    @property
    def pool(self) -> ThreadPool:
        """The thread pool, made at the first routine."""
        if self._pool is None:
            self._pool = ThreadPool(self._threads, cache=self._cache, compiler=self.compiler)
        return self._pool

    def sync(self) -> None:
        """Launches return when the work is done."""

    def close(self) -> None:
        """End the threads, and let go of buffers."""
        self._narrowing = None
        if self._pool is not None:
            self._pool.close()
            self._pool = None


class _Launch(functools.partial[None]):
    """A bound call that owns the memory its arguments point into."""

    owns: tuple[Any, ...] = ()


def _limit(code: CpuCode, choices: Choices) -> int:
    """Return how many threads the routine is worth, or shall have; 0 for all."""
    if choices.one_thread is not None:
        return int(choices.one_thread)
    return 1 if code.flops < _SERIAL_FLOPS and code.nbytes < _SERIAL_BYTES else 0


def _arena_bytes(code: CpuCode, threads: int) -> int:
    """Return the bytes of temporaries: what all threads share, and behind it what each has of its own."""
    own = threads * code.thread_bytes
    return -(-code.arena_bytes // _ALIGNMENT) * _ALIGNMENT + own if own else code.arena_bytes


def _is_known(candidate: Executable, others: Sequence[Executable]) -> bool:
    return any(candidate.source == other.source and candidate.limit == other.limit for other in others)


def aligned(nbytes: int) -> Array:
    """Return zeroed bytes aligned to a cache line."""
    raw = zeros(nbytes + _ALIGNMENT, np.dtype(np.uint8))
    offset = -raw.ctypes.data % _ALIGNMENT
    return raw[offset : offset + nbytes]


def _units(code: CpuCode) -> tuple[Unit, ...]:
    from stagedtensor.runtime.cpu_generation import translation_units

    return translation_units(code, min(_MOST_UNITS, available_cpus()))


def _runnable(target: Target) -> Target:
    missing = target.missing(detect())
    if missing:
        raise ContextError(
            f"target {target.name!r} needs {', '.join(missing)}, which this machine lacks (it runs {detect().name!r})"
        )
    return target
