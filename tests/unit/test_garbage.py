"""The search for cycles pauses while something is compiled, and comes back as it was."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from stagedtensor.runtime.garbage import search_paused


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.enable()
    yield
    (gc.enable if enabled else gc.disable)()


def test_it_pauses_and_comes_back_after_an_error_too() -> None:
    with search_paused():
        assert not gc.isenabled()
        with search_paused():
            assert not gc.isenabled()
        assert not gc.isenabled(), "the outer one goes on"
    assert gc.isenabled()
    with pytest.raises(ValueError, match="unlucky"), search_paused():
        raise ValueError("unlucky")
    assert gc.isenabled()


def test_what_the_user_disabled_stays_disabled() -> None:
    gc.disable()
    with search_paused():
        pass
    assert not gc.isenabled()


def test_the_last_of_several_threads_ends_the_pause() -> None:
    inside, done = threading.Event(), threading.Event()

    def other() -> None:
        with search_paused():
            inside.set()
            assert done.wait(10)

    thread = threading.Thread(target=other)
    with search_paused():
        thread.start()
        assert inside.wait(10)
    assert not gc.isenabled()
    done.set()
    thread.join(10)
    assert gc.isenabled()
