"""No search for reference cycles while a routine is compiled.

In: nothing. Out: a context manager. Compiling makes hundreds of thousands of objects that stay, and hardly a cycle: the
search, which looks at all of them again and again, took up to a third of the time. What is unreachable without it is
freed as ever; threads that compile at once wait for none.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_pauses = 0
_was_enabled = False


@contextmanager
def search_paused() -> Iterator[None]:
    """Pause the search until the last of those who asked is done; it comes back as it was."""
    global _pauses, _was_enabled
    with _lock:
        if _pauses == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if _pauses == 0 and _was_enabled:
                gc.enable()
