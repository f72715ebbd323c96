"""The table of a routine's kernels: what ``print(routine)`` shows.

In: kernels, and the width of the terminal if there is one. Out: text. Without a width there is one line per kernel with
every cell whole, for files and ``grep``; with one, each kernel is a paragraph that fits.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence

from stagedtensor.runtime.device import Kernel

_PADDED = 40
"""Columns are aligned up to this width; a longer cell pushes its line on."""
_LEAST = 30


def terminal_width() -> int | None:
    """Return the columns of the terminal that prints go to, None where they go to a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout is not None and sys.stdout.isatty() else None


def kernel_table(title: str, kernels: Sequence[Kernel], width: int | None = None) -> str:
    """Return ``title`` and, per kernel, its name, work, reads, writes, the path chosen and the expressions it computes."""
    lines = _lines(kernels) if width is None else _paragraphs(kernels, max(width, _LEAST))
    return "\n".join((title, *lines))


def _lines(kernels: Sequence[Kernel]) -> Iterator[str]:
    rows = [("kernel", "flops", "bytes", "reads", "writes", "path", "expressions")]
    for kernel in kernels:
        reads, writes = " ".join(kernel.reads), " ".join(kernel.writes)
        expressions = "; ".join(kernel.expressions)
        rows.append((kernel.name, str(kernel.flops), str(kernel.nbytes), reads, writes, kernel.path, expressions))
    widths = [min(_PADDED, max(len(row[at]) for row in rows)) for at in range(len(rows[0]) - 1)]
    for row in rows:
        yield "  ".join([*(cell.ljust(size) for cell, size in zip(row, widths, strict=False)), row[-1]]).rstrip()


def _paragraphs(kernels: Sequence[Kernel], width: int) -> Iterator[str]:
    for kernel in kernels:
        work = f"{kernel.flops:,} flops, {kernel.nbytes:,} bytes"
        yield from textwrap.wrap(f"{kernel.name}  {work}", width, subsequent_indent="    ")
        for what, text in (
            ("path", kernel.path),
            ("reads", " ".join(kernel.reads)),
            ("writes", " ".join(kernel.writes)),
            ("computes", "; ".join(kernel.expressions)),
        ):
            if text:
                yield from textwrap.wrap(
                    f"{what:8} {text}", width, initial_indent="  ", subsequent_indent=" " * 11, break_on_hyphens=False
                )
