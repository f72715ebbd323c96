"""What code generation gives for a routine on the CPU, as a value that a file can hold.

In: C source with its kernel table and memory plan, or a text that :meth:`CpuCode.dumps` wrote. Out: :class:`CpuCode`.
Nodes stand there as numbers, those of the program's fingerprint, so that the same program in another process can take
it for its own. Generates nothing, compiles nothing, reads no file.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stagedtensor.runtime.device import Kernel, MemoryLine


@dataclass(frozen=True)
class Function:
    """One function of the source: its lines (first and last, from 1), the user's line and the expression behind it."""

    first: int
    last: int
    origin: str | None


@dataclass(frozen=True)
class CpuCode:
    """The C source of a routine, what it computes and how to call it.

    ``external`` are the numbers of the nodes whose buffers the frame holds, in order. ``functions`` are those of the
    kernels, in the order of the text; ``types`` maps the buffers of kernels to their formats. ``arena_bytes`` are
    shared by all threads, behind them each has ``thread_bytes`` of its own. ``flops`` and ``nbytes`` are the work of
    one run.
    """

    text: str
    entry: str
    external: tuple[int, ...]
    scalars: tuple[str, ...]
    kernels: tuple[Kernel, ...]
    functions: tuple[Function, ...]
    temporaries: tuple[MemoryLine, ...]
    types: Mapping[str, str]
    arena_bytes: int
    thread_bytes: int
    saved_bytes: int
    recomputed_bytes: int
    flops: int
    nbytes: int

    def locate(self, line: int) -> str | None:
        """Return the user's line and the expression behind line ``line`` (from 1) of the text, None outside kernels."""
        at = bisect_right(self.functions, line, key=lambda function: function.first) - 1
        return self.functions[at].origin if at >= 0 and line <= self.functions[at].last else None

    def dumps(self) -> str:
        """Return all of it as one text. Kernels' sources are parts of the whole source and stand there only."""
        places = {source: at for at, source in enumerate(_sources(self.text, self.functions))}
        raw = asdict(self)
        for kernel in raw["kernels"]:
            kernel["source"] = places[kernel["source"]]
        return json.dumps(raw, separators=(",", ":"))


def loads(text: str) -> CpuCode:
    """Return what :meth:`CpuCode.dumps` wrote; ValueError, KeyError, TypeError or IndexError for anything else."""
    raw: dict[str, Any] = json.loads(text)
    functions = tuple(Function(**item) for item in raw["functions"])
    sources = _sources(raw["text"], functions)
    values = {
        "external": tuple(raw["external"]),
        "scalars": tuple(raw["scalars"]),
        "kernels": tuple(_kernel(item, sources) for item in raw["kernels"]),
        "functions": functions,
        "temporaries": tuple(_line(item) for item in raw["temporaries"]),
    }
    return CpuCode(**raw | values)


def _sources(text: str, functions: Iterable[Function]) -> list[str]:
    lines = text.split("\n")
    return ["\n".join(lines[item.first - 1 : item.last]) + "\n" for item in functions]


def _kernel(raw: dict[str, Any], sources: Sequence[str]) -> Kernel:
    values = {name: tuple(raw[name]) for name in ("expressions", "reads", "writes")}
    return Kernel(**raw | values | {"source": sources[raw["source"]]})


def _line(raw: dict[str, Any]) -> MemoryLine:
    live = raw["live"]
    return MemoryLine(**raw | {"live": None if live is None else (live[0], live[1])})
