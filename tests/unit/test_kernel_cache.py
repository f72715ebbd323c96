"""The kernel cache: whole entries, damage, strangers, failures, many processes, bounded size."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stagedtensor.errors import CompileError, ContextError
from stagedtensor.runtime.compiler import find_compiler
from stagedtensor.runtime.kernel_cache import KernelCache, default_directory, digest
from stagedtensor.runtime.shared_library import load_library
from stagedtensor.runtime.target import TARGETS


@pytest.fixture
def cache(tmp_path: Path) -> KernelCache:
    return KernelCache(tmp_path / "cache")


def writer(data: bytes) -> Callable[[Path], None]:
    def build(path: Path) -> None:
        path.write_bytes(data)

    return build


def never(path: Path) -> None:
    raise AssertionError("built although the entry was there")


def test_built_once_then_found_with_its_source_beside(cache: KernelCache) -> None:
    key = digest("source", "flags")
    path = cache.get_or_build(key, writer(b"code"), source="int a;\n")
    assert path.read_bytes() == b"code"
    assert path.suffix == ".so"
    assert (path.parent / "source.c").read_text() == "int a;\n"
    assert cache.get_or_build(key, never) == path
    assert (cache.counts.builds, cache.counts.hits) == (1, 1)
    assert cache.directory.stat().st_mode & 0o777 == 0o700


def test_parts_of_a_key_do_not_run_together() -> None:
    assert digest("ab", "c") != digest("a", "bc")
    assert digest("a") != digest("a", "")
    assert digest("a", "b") == digest(b"a", b"b")


def test_making_a_cache_and_asking_it_writes_nothing(cache: KernelCache) -> None:
    assert cache.info().entries == 0
    cache.clear()
    cache.check()
    assert not cache.directory.exists()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    path.write_bytes(b"X" + path.read_bytes()[1:])


def delete(path: Path) -> None:
    path.unlink()


def spoil_manifest(path: Path) -> None:
    (path.parent / "manifest.json").write_text("{")


def point_outside(path: Path) -> None:
    manifest = path.parent / "manifest.json"
    manifest.write_text(manifest.read_text().replace(path.name, f"../{path.name}"))


@pytest.mark.parametrize("damage", [truncate, flip, delete, spoil_manifest, point_outside])
def test_a_damaged_entry_is_built_again(cache: KernelCache, damage: Callable[[Path], None]) -> None:
    key = digest("source")
    damage(cache.get_or_build(key, writer(b"good code")))
    again = KernelCache(cache.directory)
    assert again.get_or_build(key, writer(b"good code")).read_bytes() == b"good code"
    assert (again.counts.damaged, again.counts.builds) == (1, 1)
    assert names(cache) == [key]


def test_a_failing_build_leaves_nothing_and_fails_the_same_again(cache: KernelCache) -> None:
    def build(path: Path) -> None:
        path.write_bytes(b"half")
        raise CompileError("no such thing")

    key = digest("bad")
    for _ in range(2):
        with pytest.raises(CompileError, match="no such thing"):
            cache.get_or_build(key, build)
        assert names(cache) == []
    assert cache.get_or_build(key, writer(b"fixed")).read_bytes() == b"fixed"


def test_a_build_that_writes_no_file_is_an_error(cache: KernelCache) -> None:
    with pytest.raises(FileNotFoundError):
        cache.get_or_build(digest("a"), lambda path: None)
    assert names(cache) == []


def names(cache: KernelCache) -> list[str]:
    return sorted(path.name for path in cache.directory.iterdir())


def test_a_folder_of_someone_else_is_refused(cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.get_or_build(digest("a"), writer(b"code"))
    owner = cache.directory.stat().st_uid
    monkeypatch.setattr("os.getuid", lambda: owner + 1)
    with pytest.raises(ContextError, match=r"(?s)refusing .*cache: it belongs to user .*STAGEDTENSOR_CACHE"):
        cache.get_or_build(digest("a"), never)
    with pytest.raises(ContextError, match="refusing"):
        cache.check()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("what", ["entry", "file"])
def test_an_entry_of_someone_else_is_refused(cache: KernelCache, what: str) -> None:
    path = cache.get_or_build(digest("a"), writer(b"code"))
    os.chown(path if what == "file" else path.parent, 12345, -1)
    with pytest.raises(ContextError, match="belongs to user 12345"):
        cache.get_or_build(digest("a"), never)


def test_a_folder_open_to_others_is_closed(tmp_path: Path) -> None:
    directory = tmp_path / "open"
    directory.mkdir(mode=0o777)
    directory.chmod(0o777)
    KernelCache(directory).get_or_build(digest("a"), writer(b"code"))
    assert directory.stat().st_mode & 0o777 == 0o700


def test_a_file_in_place_of_the_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ContextError, match=r"(?s)cannot use the kernel cache folder.*not a folder.*STAGEDTENSOR_CACHE"):
        KernelCache(tmp_path / "file").get_or_build(digest("a"), never)


def test_the_entries_used_longest_ago_go_first(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path, max_bytes=3500)
    keys = [digest(str(index)) for index in range(4)]
    for age, key in zip((4000, 3000, 2000), keys[:3], strict=True):
        entry = cache.get_or_build(key, writer(b"x" * 900)).parent
        os.utime(entry, (time.time() - age,) * 2)
    assert cache.get_or_build(keys[0], never).exists()  # used again: now the youngest
    cache.get_or_build(keys[3], writer(b"x" * 900))
    assert names(cache) == sorted((keys[0], keys[2], keys[3]))
    assert cache.info().bytes <= 3500


def test_clear_deletes_entries_and_leftovers_only(cache: KernelCache) -> None:
    cache.get_or_build(digest("a"), writer(b"code"))
    (cache.directory / "build-dead").mkdir()
    (cache.directory / "notes.txt").write_text("mine")
    assert cache.clear().entries == 1
    assert names(cache) == ["notes.txt"]
    assert cache.info().entries == 0


def test_where_the_default_folder_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STAGEDTENSOR_CACHE", str(tmp_path / "chosen"))
    assert default_directory() == tmp_path / "chosen"
    monkeypatch.delenv("STAGEDTENSOR_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_directory() == tmp_path / "stagedtensor"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_directory().is_absolute()
    assert default_directory().name == "stagedtensor"


def test_threads_build_one_key_once(cache: KernelCache) -> None:
    def build(path: Path) -> None:
        time.sleep(0.05)
        path.write_bytes(b"code")

    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(cache.get_or_build(digest("a"), build))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(found) == 6
    assert cache.counts.builds == 1
    assert names(cache) == [digest("a")]


def test_without_locks_the_second_builder_takes_what_the_first_made(
    cache: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(handle: int, operation: int) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr("fcntl.flock", no_locks)
    key = digest("a")

    def slow(path: Path) -> None:
        KernelCache(cache.directory).get_or_build(key, writer(b"code"))
        path.write_bytes(b"code")

    assert cache.get_or_build(key, slow).read_bytes() == b"code"
    assert names(cache) == [key]


def _child(directory: str, index: int, results: multiprocessing.queues.Queue[tuple[int, int, int]]) -> None:
    cache = KernelCache(directory)
    values = []
    for which in (index % 2, 1 - index % 2):  # two routines of one name, wanted in different order
        source = f"int train_step(void) {{ return {100 + which}; }}\n"
        library = load_library(source, compiler=find_compiler(), target=TARGETS["generic"], cache=cache)
        values.append(library.train_step() - which)
    results.put((values[0], values[1], cache.counts.builds))


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_processes_with_a_cold_cache_all_get_the_right_code(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    children = [context.Process(target=_child, args=(str(tmp_path), index, results)) for index in range(8)]
    for child in children:
        child.start()
    values = [results.get(timeout=60) for _ in children]
    for child in children:
        child.join(timeout=60)
    assert [value[:2] for value in values] == [(100, 100)] * 8
    assert sum(value[2] for value in values) == 2
    assert len(list(tmp_path.iterdir())) == 2


def test_a_truncated_library_is_rebuilt_and_loads(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    source = "int value(void) { return 5; }\n"

    def load() -> ctypes.CDLL:
        return load_library(source, compiler=find_compiler(), target=TARGETS["generic"], cache=cache)

    path = next(Path(load()._name).parent.glob("*.so"))
    good = path.read_bytes()
    replacement = path.with_suffix(".new")  # the loaded file itself must stay as it is
    replacement.write_bytes(good[: len(good) // 2])
    replacement.rename(path)
    assert load().value() == 5
    assert path.read_bytes() == good


def test_a_user_fault_in_code_fails_twice_the_same(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    messages = []
    for _ in range(2):
        with pytest.raises(CompileError) as caught:
            load_library(
                "int f(void) { return oops; }\n", compiler=find_compiler(), target=TARGETS["generic"], cache=cache
            )
        messages.append([line for line in str(caught.value).splitlines() if "command:" not in line])
    assert messages[0] == messages[1]
    assert list(tmp_path.iterdir()) == []
