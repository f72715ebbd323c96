"""The thread pool: right at any number of threads, through fork, asleep when idle."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stagedtensor.errors import ContextError
from stagedtensor.runtime.compiler import find_compiler, identify
from stagedtensor.runtime.kernel_cache import KernelCache
from stagedtensor.runtime.shared_library import load_library
from stagedtensor.runtime.target import detect
from stagedtensor.runtime.thread_pool import POOL_HEADER, ThreadPool, available_cpus

ENTRIES = (
    POOL_HEADER
    + r"""
#include <stddef.h>

/* Each thread says that it was here and how many there are. */
void attend(void **frame, int64_t *scalars, int tid, int nt, st_barrier *barrier) {
    (void)barrier;
    int64_t *seen = frame[0];
    seen[tid] += 1;
    if (tid == 0) scalars[0] = nt;
}

/* Rounds of "sum what all wrote in the round before": wrong at once if a barrier lets anyone through early. */
void relay(void **frame, int64_t *scalars, int tid, int nt, st_barrier *barrier) {
    volatile int64_t *even = frame[0], *odd = frame[1];
    for (int64_t round = 0; round < scalars[0]; round++) {
        volatile int64_t *from = round % 2 ? odd : even, *to = round % 2 ? even : odd;
        int64_t sum = 0;
        for (int other = 0; other < nt; other++) sum += from[other];
        to[tid] = (sum + tid) & 0xffff;
        st_barrier_wait(barrier, tid);
    }
}

/* One thread comes 20 ms late to the barrier, longer than anyone polls. */
#include <time.h>
void late(void **frame, int64_t *scalars, int tid, int nt, st_barrier *barrier) {
    volatile int64_t *seen = frame[0];
    if (tid == nt - 1) {
        struct timespec pause = {0, 20000000};
        nanosleep(&pause, NULL);
        seen[nt] = 1;
    }
    st_barrier_wait(barrier, tid);
    seen[tid] = seen[nt];
    (void)scalars;
}

/* The least normal number halved: 0 where subnormals are flushed. */
void halve(void **frame, int64_t *scalars, int tid, int nt, st_barrier *barrier) {
    volatile float *value = frame[0];
    value[tid] = value[tid] * 0.5f;
    (void)scalars; (void)nt; (void)barrier;
}

void flush_subnormals(int on) {
#if defined(__x86_64__)
    __builtin_ia32_ldmxcsr(on ? 0x9fc0u : 0x1f80u);
#else
    (void)on;
#endif
}
"""
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> KernelCache:
    return KernelCache(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(scope="module")
def entries(cache: KernelCache) -> ctypes.CDLL:
    return load_library(ENTRIES, compiler=find_compiler(), target=detect(), cache=cache)


def address(library: ctypes.CDLL, name: str) -> int:
    value = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    assert value is not None
    return value


@pytest.fixture(params=[(1, ()), (2, ()), (5, ()), (5, ("-DST_NO_FUTEX",))], ids=["1", "2", "5", "5-condition"])
def pool(request: pytest.FixtureRequest, cache: KernelCache) -> Iterator[ThreadPool]:
    threads, options = request.param
    made = ThreadPool(threads, target=detect(), cache=cache, compiler=identify((*find_compiler().command, *options)))
    yield made
    made.close()


class Frame:
    """Arrays of 64-bit integers as an entry gets them."""

    def __init__(self, *arrays: int) -> None:
        self.arrays = [(ctypes.c_int64 * length)() for length in arrays]
        self.pointers = (ctypes.c_void_p * len(arrays))(*map(ctypes.addressof, self.arrays))
        self.scalars = (ctypes.c_int64 * 4)()
        self.frame, self.at_scalars = ctypes.addressof(self.pointers), ctypes.addressof(self.scalars)


def relay_in_python(threads: int, rounds: int) -> list[int]:
    values = [0] * threads
    for _ in range(rounds):
        total = sum(values)
        values = [(total + tid) & 0xFFFF for tid in range(threads)]
    return values


def test_every_thread_runs_in_each_of_1000_regions(pool: ThreadPool, entries: ctypes.CDLL) -> None:
    frame = Frame(64)
    run = pool.bind(address(entries, "attend"), frame.frame, frame.at_scalars)
    for _ in range(1000):
        run()
    assert frame.scalars[0] == pool.threads
    assert list(frame.arrays[0]) == [1000] * pool.threads + [0] * (64 - pool.threads)


def test_barriers_hold_everyone_back(pool: ThreadPool, entries: ctypes.CDLL) -> None:
    frame = Frame(8, 8)
    frame.scalars[0] = rounds = 300
    for _ in range(5):
        ctypes.memset(ctypes.addressof(frame.arrays[0]), 0, 64)
        pool.run(address(entries, "relay"), frame.frame, frame.at_scalars)
        assert list(frame.arrays[0])[: pool.threads] == relay_in_python(pool.threads, rounds)


def test_a_limit_uses_fewer_threads(pool: ThreadPool, entries: ctypes.CDLL) -> None:
    for limit in (1, 2, 3, 9):
        frame = Frame(64)
        pool.run(address(entries, "attend"), frame.frame, frame.at_scalars, limit)
        used = min(limit, pool.threads)
        assert frame.scalars[0] == used
        assert list(frame.arrays[0])[:6] == [1] * used + [0] * (6 - used)


def test_threads_that_wait_long_sleep_and_wake(pool: ThreadPool, entries: ctypes.CDLL) -> None:
    frame = Frame(64)
    pool.run(address(entries, "late"), frame.frame, frame.at_scalars)
    assert list(frame.arrays[0])[: pool.threads] == [1] * pool.threads
    time.sleep(0.02)  # the workers sleep now and must wake
    pool.run(address(entries, "late"), frame.frame, frame.at_scalars)
    assert list(frame.arrays[0])[: pool.threads] == [1] * pool.threads


def test_an_idle_pool_uses_no_processor_time(pool: ThreadPool, entries: ctypes.CDLL) -> None:
    frame = Frame(64)
    pool.run(address(entries, "attend"), frame.frame, frame.at_scalars)
    time.sleep(0.02)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.03


def test_waiting_for_one_thread_does_not_burn_the_others(cache: KernelCache, entries: ctypes.CDLL) -> None:
    pool = ThreadPool(5, target=detect(), cache=cache)
    frame = Frame(64)
    pool.run(address(entries, "late"), frame.frame, frame.at_scalars)
    before = time.process_time()
    for _ in range(5):
        pool.run(address(entries, "late"), frame.frame, frame.at_scalars)  # 4 threads wait for 100 ms altogether
    assert time.process_time() - before < 0.05
    pool.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_child_after_fork_has_its_own_threads(pool: ThreadPool, entries: ctypes.CDLL) -> None:
    frame = Frame(8, 8)
    frame.scalars[0] = 50
    relay = address(entries, "relay")
    pool.run(relay, frame.frame, frame.at_scalars)
    expected = relay_in_python(pool.threads, 50)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(20)  # a hang ends the child, not the test run
            ctypes.memset(ctypes.addressof(frame.arrays[0]), 0, 64)
            pool.run(relay, frame.frame, frame.at_scalars)
            grandchild = os.fork()
            if grandchild == 0:
                pool.run(relay, frame.frame, frame.at_scalars)
                os._exit(0)
            right = list(frame.arrays[0])[: pool.threads] == expected
            right = right and os.waitpid(grandchild, 0)[1] == 0
            pool.close()
            status = 0 if right else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    ctypes.memset(ctypes.addressof(frame.arrays[0]), 0, 64)
    pool.run(relay, frame.frame, frame.at_scalars)
    assert list(frame.arrays[0])[: pool.threads] == expected


def test_regions_from_two_host_threads_follow_one_another(pool: ThreadPool, entries: ctypes.CDLL) -> None:
    frames = [Frame(8, 8), Frame(8, 8)]

    def drive(frame: Frame) -> None:
        frame.scalars[0] = 20
        for _ in range(50):
            ctypes.memset(ctypes.addressof(frame.arrays[0]), 0, 64)
            pool.run(address(entries, "relay"), frame.frame, frame.at_scalars)

    hosts = [threading.Thread(target=drive, args=(frame,)) for frame in frames]
    for host in hosts:
        host.start()
    for host in hosts:
        host.join()
    for frame in frames:
        assert list(frame.arrays[0])[: pool.threads] == relay_in_python(pool.threads, 20)


@pytest.mark.skipif(detect().name in ("aarch64", "generic"), reason="the switch used here is of x86")
def test_flush_to_zero_of_the_caller_stays_outside(pool: ThreadPool, entries: ctypes.CDLL) -> None:
    values = (ctypes.c_float * 8)(*[2.0**-126] * 8)
    outside = (ctypes.c_float * 1)(2.0**-126)
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(values))
    outside_pointers = (ctypes.c_void_p * 1)(ctypes.addressof(outside))
    entries.flush_subnormals(1)
    try:
        pool.run(address(entries, "halve"), ctypes.addressof(pointers), None)
        entries.halve(outside_pointers, None, 0, 1, None)
    finally:
        entries.flush_subnormals(0)
    assert list(values)[: pool.threads] == [2.0**-127] * pool.threads
    assert outside[0] == 0.0  # the caller's own choice is back after the region


def test_threads_end_with_the_pool(cache: KernelCache, entries: ctypes.CDLL) -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/task"))

    frame = Frame(64)
    before = count()
    pool = ThreadPool(4, target=detect(), cache=cache)
    assert count() == before  # started by the first region only
    pool.run(address(entries, "attend"), frame.frame, frame.at_scalars)
    assert count() == before + 3
    pool.close()
    pool.close()
    assert count() == before
    with pytest.raises(ContextError, match="closed"):
        pool.run(address(entries, "attend"), frame.frame, frame.at_scalars)


def test_a_pool_that_is_dropped_ends_its_threads(cache: KernelCache, entries: ctypes.CDLL) -> None:
    before = len(os.listdir("/proc/self/task"))
    frame = Frame(64)
    pool = ThreadPool(3, target=detect(), cache=cache)
    pool.run(address(entries, "attend"), frame.frame, frame.at_scalars)
    del pool
    assert len(os.listdir("/proc/self/task")) == before


def test_one_thread_starts_none(cache: KernelCache, entries: ctypes.CDLL) -> None:
    before = len(os.listdir("/proc/self/task"))
    frame = Frame(64)
    pool = ThreadPool(1, target=detect(), cache=cache)
    pool.run(address(entries, "attend"), frame.frame, frame.at_scalars)
    assert len(os.listdir("/proc/self/task")) == before
    pool.close()


@pytest.mark.parametrize("threads", [0, -1, 2.0, True, 100000])
def test_a_senseless_number_of_threads_is_refused(cache: KernelCache, threads: int) -> None:
    with pytest.raises(ContextError, match="threads must be an integer from 1 to 1024"):
        ThreadPool(threads, cache=cache)


def test_the_default_is_the_processors_of_this_process(cache: KernelCache) -> None:
    pool = ThreadPool(None, cache=cache)
    assert pool.threads == available_cpus() <= len(os.sched_getaffinity(0))
    pool.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_threads_refused_by_the_system_are_done_without(cache: KernelCache, entries: ctypes.CDLL) -> None:
    frame = Frame(64)
    pool = ThreadPool(20, target=detect(), cache=cache)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(20)
            # No address space for twenty stacks of 8 MiB: some threads cannot start.
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + (20 << 20), resource.RLIM_INFINITY))
            pool.run(address(entries, "attend"), frame.frame, frame.at_scalars)
            threads = frame.scalars[0]
            right = 1 <= threads < 20 and list(frame.arrays[0])[:20] == [1] * threads + [0] * (20 - threads)
            status = 0 if right else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    pool.close()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="needs the package ziglang")
def test_the_pool_built_by_another_compiler(tmp_path: Path) -> None:
    zig, cache = identify((sys.executable, "-m", "ziglang", "cc")), KernelCache(tmp_path)
    library = load_library(ENTRIES, compiler=zig, target=detect(), cache=cache)
    pool = ThreadPool(3, target=detect(), cache=cache, compiler=zig)
    frame = Frame(8, 8)
    frame.scalars[0] = 300
    pool.run(address(library, "relay"), frame.frame, frame.at_scalars)
    assert list(frame.arrays[0])[:3] == relay_in_python(3, 300)
    pool.close()
