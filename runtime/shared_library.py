"""C text to a loaded library: compiler, target and cache put together.

In: C source (one text or several translation units) for a target. Out: a ``ctypes.CDLL``, built or taken from the
cache. Loads into this process, so the target must be one that the machine runs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path

from stagedtensor.errors import CompileError
from stagedtensor.runtime.compiler import Compiler, Locate, Unit, compile_shared
from stagedtensor.runtime.kernel_cache import KernelCache, digest
from stagedtensor.runtime.target import Target


def build_library(
    source: str | Sequence[str],
    *,
    compiler: Compiler,
    target: Target,
    cache: KernelCache,
    extra_flags: Sequence[str] = (),
    libraries: Sequence[str] = ("-lm",),
    key: Sequence[str] = (),
    locate: Locate | None = None,
    split: Callable[[], Sequence[Unit]] = tuple,
    significant: Callable[[str], str] = str,
) -> Path:
    """Return the path of the library of ``source``, compiled where the cache lacks it.

    ``key`` are further texts the result depends on (numerics). ``split`` gives translation units to compile in place of
    the one text, none where that is better; the library does the same. ``significant`` returns what of a source has a
    bearing on what it does. Raises CompileError and ContextError.
    """
    units = [source] if isinstance(source, str) else list(source)
    flags = compiler.flags(target, extra_flags)

    def build(path: Path) -> None:
        compile_shared(units, path, flags=flags, compiler=compiler, locate=locate, libraries=libraries, split=split())

    texts = map(significant, units)
    name = digest(compiler.identity, "\n".join((*flags, *libraries)), target.name, "\n".join(key), *texts)
    return cache.get_or_build(name, build, source="\n".join(units))


def load_library(
    source: str | Sequence[str],
    *,
    compiler: Compiler,
    target: Target,
    cache: KernelCache,
    extra_flags: Sequence[str] = (),
    libraries: Sequence[str] = ("-lm",),
    key: Sequence[str] = (),
    locate: Locate | None = None,
    split: Callable[[], Sequence[Unit]] = tuple,
    significant: Callable[[str], str] = str,
) -> ctypes.CDLL:
    """Build ``source`` as :func:`build_library` does and load it into this process."""
    failure: OSError | None = None
    for _ in range(2):  # another process may clear the cache between finding and loading
        path = build_library(
            source,
            compiler=compiler,
            target=target,
            cache=cache,
            extra_flags=extra_flags,
            libraries=libraries,
            key=key,
            locate=locate,
            split=split,
            significant=significant,
        )
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:
            failure = error
            if path.exists():
                break
    raise CompileError(
        f"the compiled library does not load: {failure}.\n"
        "Is the cache on a file system mounted noexec? Set STAGEDTENSOR_CACHE to another folder."
    ) from failure
