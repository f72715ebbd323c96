"""Where in the user's code something was said: a textual model's line, else the nearest frame outside this package."""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

_PACKAGE = os.path.dirname(os.path.abspath(__file__))
_ROOTS = tuple(
    os.path.realpath(path) + os.sep
    for path in (_PACKAGE, os.path.join(_PACKAGE, "codegen"), os.path.join(_PACKAGE, "runtime"))
)
_inside: dict[str, bool] = {}


@dataclass(frozen=True)
class Source:
    """One line of the user's code, printed as ``file.py:12``."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}"

    @property
    def text(self) -> str:
        """The line itself, stripped; empty where the file cannot be read."""
        return linecache.getline(self.file, self.line).strip()

    def quoted(self) -> str:
        """``at file.py:12: y = w * x``, the form that error messages use."""
        text = self.text
        return f"at {self}: {text}" if text else f"at {self}"


UNKNOWN = Source("<unknown>", 0)
_written: ContextVar[Source | None] = ContextVar("stagedtensor_source", default=None)


@contextmanager
def written_at(source: Source | None) -> Iterator[None]:
    """Take ``source`` for what is built inside (a line of a textual model); None goes back to stack frames."""
    token = _written.set(source)
    try:
        yield
    finally:
        _written.reset(token)


def user_source() -> Source:
    """Return the line of the textual model that is being built, else the nearest frame outside the package.

    Frames of contextlib are passed by as well.
    """
    written = _written.get()
    if written is not None:
        return written
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        inside = _inside.get(name)
        if inside is None:
            real = os.path.realpath(name)
            inside = real.startswith(_ROOTS) or name.endswith(f"{os.sep}contextlib.py")
            _inside[name] = inside
        if not inside:
            return Source(name, frame.f_lineno)
        frame = frame.f_back  # type: ignore[assignment]
    return UNKNOWN
