"""Where a step's time goes: seconds in each kernel of a routine, by clocks that are put between the calls.

The routine's C text is compiled a second time with a clock behind every line of its last function. Thread 0 reads it: a
kernel's share is thread 0's part of it, and what it waits for the others stands in a line of its own.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from stagedtensor.runtime import cpu

_CALL = re.compile(r"^    (?:if \(tid == 0\) )?(?P<name>\w+)\(.*\);(?:  //.*)?$")
_WAIT = "st_barrier_wait"
WAITING = "waiting for other threads"
_CLOCK = """
#include <time.h>
double st_profile[%d];
static inline double st_profile_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}
static inline double st_profile_count(int counter, double last) {
    const double now = st_profile_now();
    st_profile[counter] += now - last;
    return now;
}
"""


def with_clocks(source: str) -> tuple[str, list[str]]:
    """Return the text with clocks in its last function, and what each counter counts."""
    lines = source.splitlines()
    last = max(at for at, line in enumerate(lines) if line.startswith("void ") and line.endswith("{"))
    names: list[str] = []
    body = []
    for line in lines[last + 1 :]:
        body.append(line)
        found = _CALL.match(line)
        if found is None:
            continue
        name = WAITING if found["name"] == _WAIT else found["name"]
        if name not in names:
            names.append(name)
        body.append(f"    if (tid == 0) st_profile_last = st_profile_count({names.index(name)}, st_profile_last);")
    body.insert(0, "    double st_profile_last = st_profile_now();")
    head = [_CLOCK % len(names), lines[last]]
    return "\n".join([*lines[:last], *head, *body]) + "\n", names


@contextmanager
def profiled() -> Iterator[Callable[[], list[tuple[str, float]]]]:
    """Compile the routines of this block with clocks; the function it gives returns the seconds since its last call.

    They are of the routine that was compiled last.
    """
    plain: Callable[..., ctypes.CDLL] = vars(cpu)["load_library"]
    held: list[tuple[ctypes.CDLL, list[str]]] = []

    def load(source: str, **options: Any) -> ctypes.CDLL:
        options.pop("split", None)  # would compile the text without clocks
        text, names = with_clocks(source)
        library = plain(text, **options)
        held.append((library, names))
        return library

    def read() -> list[tuple[str, float]]:
        library, names = held[-1]
        counters = (ctypes.c_double * len(names)).in_dll(library, "st_profile")
        found = list(zip(names, list(counters), strict=True))
        ctypes.memset(counters, 0, ctypes.sizeof(counters))
        return found

    with mock.patch.object(cpu, "load_library", load):
        yield read
