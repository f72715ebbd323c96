"""The version of the code generator: a digest of the package's own files, for keys of what it generated.

A release number would not do: in a checkout the generator changes between two commits of one number. Files that were
written after this module was loaded may not be the ones that run, and then there is no version. Reads files once per
process.
"""

from __future__ import annotations

import functools
import logging
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from stagedtensor.runtime.kernel_cache import digest

logger = logging.getLogger(__name__)

_PACKAGE = Path(__file__).absolute().parent.parent
_LOADED = time.time()
_FOLDERS = ("", "shapes", "codegen", "runtime")
"""What takes part in generating code for a solved program; the language only makes programs, which keys hold whole."""
_ENDINGS = (".py", ".h", ".cuh", ".c")


@functools.cache
def generator_version() -> str | None:
    """Return a digest of the generator's files, NumPy's and Python's version; None where files have changed since."""
    return version_of(_files(), loaded=_LOADED)


def version_of(files: Iterator[Path], *, loaded: float) -> str | None:
    """Return a digest of names and contents; None where a file was written after ``loaded`` (seconds since the epoch)."""
    parts: list[str | bytes] = [platform.python_version(), np.__version__]
    try:
        for path in files:
            if path.stat().st_mtime > loaded:
                logger.info("%s was written since it was loaded: generated code is not cached", path)
                return None
            parts += (path.name, path.read_bytes())
    except OSError as error:  # a package inside an archive
        logger.info("no version of the code generator: %s", error)
        return None
    return digest(*parts)


def _files() -> Iterator[Path]:
    for folder in _FOLDERS:
        top = _PACKAGE / folder
        if not top.is_dir() and folder:  # not installed, but a bare checkout whose links are missing
            top = _PACKAGE.parent / folder
        for path, folders, names in os.walk(top):
            folders[:] = sorted(name for name in folders if folder and name != "__pycache__")
            yield from (Path(path, name) for name in sorted(names) if name.endswith(_ENDINGS))
