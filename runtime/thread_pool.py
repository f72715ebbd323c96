"""Persistent SPMD thread pool: one C call runs a routine's entry on all threads.

In: the number of threads and the address of a compiled entry
``void f(void** frame, int64_t* scalars, int tid, int nt, st_barrier* barrier)``. The pool itself is C
(``pool/pool.c``), built once per target through the kernel cache. ``POOL_HEADER`` is the text that generated code needs
in front: the barrier, inline, so that routines link to nothing. Threads start at the first region that needs them.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.resources
import os
import weakref
from collections.abc import Callable
from pathlib import Path

from stagedtensor.errors import ContextError
from stagedtensor.runtime.compiler import Compiler, find_compiler
from stagedtensor.runtime.kernel_cache import KernelCache
from stagedtensor.runtime.shared_library import load_library
from stagedtensor.runtime.target import TARGETS, Target
from stagedtensor.settings import is_integer

_FOLDER = importlib.resources.files("stagedtensor.runtime") / "pool"
POOL_HEADER: str = (_FOLDER / "pool.h").read_text(encoding="utf-8")
"""C text declaring ``st_barrier``, ``st_entry`` and the inline ``st_barrier_wait(barrier, tid)``."""

MAX_THREADS = 1024

_RUN_TYPE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)


def available_cpus() -> int:
    """Return how many threads may run at once: affinity and the container's quota, at least 1."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cpus, _quota()))


def _quota() -> int:
    """Return the processors that the control group grants, rounded up; a large number where it sets no limit."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return -(-int(limit) // int(period))
    except (OSError, ValueError):
        return MAX_THREADS


class ThreadPool:
    """A pool of ``threads`` threads, the caller included (None: all processors).

    ``run_address`` is the C function ``st_routine_run(pool, entry, frame, scalars, limit)`` and ``handle`` the pool to
    pass to it. A pool of 1 has no threads and calls the entry directly. Survives ``fork``.
    """

    def __init__(
        self,
        threads: int | None,
        *,
        target: Target | None = None,
        cache: KernelCache | None = None,
        compiler: Compiler | None = None,
    ) -> None:
        """Load the C pool, building it where the cache lacks it; no thread starts yet."""
        cpus = available_cpus()
        threads = cpus if threads is None else threads
        if not is_integer(threads, 1) or threads > MAX_THREADS:
            raise ContextError(f"threads must be an integer from 1 to {MAX_THREADS}, got {threads!r}")
        self.threads = int(threads)
        self._library = _load(compiler or find_compiler(), target or TARGETS["generic"], cache or KernelCache())
        create = self._library.st_pool_create
        create.restype, create.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_int)
        handle = create(self.threads, cpus)
        if handle is None:
            raise ContextError(f"no memory for a pool of {threads} threads")
        self.handle: int = handle
        self.run_address: int = _address(self._library, "st_routine_run")
        self._run = _RUN_TYPE(self.run_address)
        self._finalizer = weakref.finalize(self, _destroy, self._library, handle)
        self._finalizer.atexit = False  # a thread asleep in the kernel ends with the process

    def run(self, entry: int, frame: int | None, scalars: int | None, limit: int = 0) -> None:
        """Run the function at address ``entry`` on at most ``limit`` threads (0: all); return when all are done.

        ``frame`` and ``scalars`` are addresses handed to the entry as they are. Releases the GIL.
        """
        if not self._finalizer.alive:
            raise ContextError("the thread pool is closed")
        self._run(self.handle, entry, frame, scalars, limit)

    def bind(self, entry: int, frame: int | None, scalars: int | None, limit: int = 0) -> Callable[[], None]:
        """Return a function without arguments that does this :meth:`run`; the fast path, unchecked after close."""
        arguments = (
            ctypes.c_void_p(self.handle),
            ctypes.c_void_p(entry),
            ctypes.c_void_p(frame),
            ctypes.c_void_p(scalars),
            ctypes.c_int(limit),
        )
        return functools.partial(self._run, *arguments)

    def close(self) -> None:
        """End the threads and free the pool; closing twice is allowed."""
        self._finalizer()


def _address(library: ctypes.CDLL, name: str) -> int:
    address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    assert address is not None  # a symbol that was found has an address
    return address


def _load(compiler: Compiler, target: Target, cache: KernelCache) -> ctypes.CDLL:
    source = POOL_HEADER + (_FOLDER / "pool.c").read_text(encoding="utf-8")
    flags = ("-pthread",)
    return load_library(source, compiler=compiler, target=target, cache=cache, extra_flags=flags, libraries=flags)


def _destroy(library: ctypes.CDLL, handle: int) -> None:
    destroy = library.st_pool_destroy
    destroy.restype, destroy.argtypes = None, (ctypes.c_void_p,)
    destroy(handle)
