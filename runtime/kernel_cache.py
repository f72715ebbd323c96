"""On-disk cache of built code, one private folder of entries addressed by digest.

In: a key (digest of source, compiler identity, flags, target, numerics) and a function that builds a file. Out: the
path of the built file, checked to be whole. Safe for many processes and threads at once; what is damaged is rebuilt;
what is not the user's own is refused, because it is code. Does not know compilers, loads nothing, and writes nothing
before the first build.

An entry is a folder ``<key>`` holding the built file, its source text and ``manifest.json`` (length and SHA-256). It is
made under a temporary name and renamed, so it appears whole or not at all. The built file is named by its content: a
path that some process has loaded is never written again with something else.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from stagedtensor.errors import ContextError

logger = logging.getLogger(__name__)

DEFAULT_MAX_BYTES = 1 << 30
_ENTRY = re.compile(r"[0-9a-f]{64}")
_TEMPORARY = ("build-", "trash-")
_MANIFEST = "manifest.json"
_ABANDONED_SECONDS = 3600.0  # a temporary folder this old belongs to a process that died
_GRACE_SECONDS = 60.0  # an entry used this recently may be on its way into a process


@dataclass(frozen=True)
class CacheInfo:
    """What the cache holds: its folder, the number of entries, their bytes, and the limit in bytes."""

    directory: Path
    entries: int
    bytes: int
    max_bytes: int


@dataclass
class CacheCounts:
    """What one cache object did: entries found whole, builds, and damaged entries thrown away."""

    hits: int = 0
    builds: int = 0
    damaged: int = 0


def default_directory() -> Path:
    """Return $STAGEDTENSOR_CACHE, else the folder ``stagedtensor`` in the user's cache directory."""
    chosen = os.environ.get("STAGEDTENSOR_CACHE", "")
    if chosen:
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    if base and os.path.isabs(base):
        return Path(base) / "stagedtensor"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "stagedtensor"


def digest(*parts: str | bytes) -> str:
    """Return the key of ``parts``: 64 hexadecimal digits; where one part ends and the next begins counts."""
    total = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8") if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "little"))
        total.update(data)
    return total.hexdigest()


class KernelCache:
    """A cache in ``directory`` (None: :func:`default_directory`) that keeps at most about ``max_bytes`` bytes."""

    def __init__(self, directory: Path | str | None = None, *, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        """Note the folder; nothing is read or written yet."""
        self.directory = Path(directory).expanduser().absolute() if directory is not None else default_directory()
        self.max_bytes = max_bytes
        self.counts = CacheCounts()

    def get_or_build(
        self,
        key: str,
        build: Callable[[Path], None],
        *,
        source: str = "",
        suffix: str = ".so",
        source_suffix: str = ".c",
    ) -> Path:
        """Return the path of the file of ``key``, calling ``build(path)`` to write it where it is not there whole.

        ``key`` comes from :func:`digest`; ``source`` is kept beside the file. An exception of ``build`` passes
        through and leaves nothing. Raises ContextError where the folder or the entry is not the user's own.
        """
        if not _ENTRY.fullmatch(key):
            raise ValueError(f"a cache key is what digest() returned, got {key!r}")
        self._prepare()
        found = self._lookup(key)
        if found is None:
            with self._locked(key):
                found = self._lookup(key)  # another process may have built it meanwhile
                if found is None:
                    found = self._build(key, build, source, suffix, source_suffix)
                    self._evict(keep=key)
                    return found
        self.counts.hits += 1
        return found

    def info(self) -> CacheInfo:
        """Return what is in the cache now; reads only."""
        sizes = [_size(entry) for entry in self._entries()]
        return CacheInfo(self.directory, len(sizes), sum(sizes), self.max_bytes)

    def clear(self) -> CacheInfo:
        """Delete every entry and return what was there; loaded code keeps working."""
        self.check()
        before = self.info()
        for entry in self._entries():
            self._discard(entry)
        self._sweep(older_than=0.0)
        return before

    def check(self) -> None:
        """Raise ContextError where the folder exists and is not the user's own or not writable; writes nothing."""
        try:
            status = self.directory.stat()
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._unwritable(error) from error
        self._require_usable(status)

    # -- building ------------------------------------------------------------------------------------------------

    def _build(self, key: str, build: Callable[[Path], None], source: str, suffix: str, source_suffix: str) -> Path:
        scratch = Path(tempfile.mkdtemp(prefix="build-", dir=self.directory))  # mode 0700
        try:
            built = scratch / f"built{suffix}"
            build(built)
            data = built.read_bytes()
            content = hashlib.sha256(data).hexdigest()
            name = f"{content[:32]}{suffix}"
            built.rename(scratch / name)
            if source:
                (scratch / f"source{source_suffix}").write_text(source, encoding="utf-8")
            manifest = {"file": name, "bytes": len(data), "sha256": content}
            (scratch / _MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
            entry = self.directory / key
            try:
                scratch.rename(entry)
            except OSError:
                # Where the file system has no locks another process may have come first.
                if self._lookup(key) is None:
                    raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        self.counts.builds += 1
        found = self._lookup(key)
        if found is None:
            raise ContextError(f"the kernel cache entry {entry} was damaged while it was written; is the disk full?")
        return found

    def _lookup(self, key: str) -> Path | None:
        """Return the entry's file where it is whole; throw the entry away where it is not."""
        entry = self.directory / key
        try:
            status = entry.lstat()
        except FileNotFoundError:
            return None
        _require_own(entry, status)
        path = _verified(entry)
        if path is None:
            if not entry.exists():
                return None  # another process is replacing it
            logger.warning("the kernel cache entry %s is damaged; building it again", entry)
            self.counts.damaged += 1
            self._discard(entry)
            return None
        with contextlib.suppress(OSError):
            os.utime(entry)  # the time of last use, for eviction
        return path

    # -- room ----------------------------------------------------------------------------------------------------

    def _entries(self) -> list[Path]:
        try:
            return sorted(path for path in self.directory.iterdir() if _ENTRY.fullmatch(path.name))
        except FileNotFoundError:
            return []

    def _evict(self, keep: str) -> None:
        """Delete the entries used longest ago until the rest fits."""
        self._sweep(older_than=_ABANDONED_SECONDS)
        used = []
        for entry in self._entries():
            with contextlib.suppress(OSError):
                used.append((entry.stat().st_mtime, entry, _size(entry)))
        total = sum(size for _, _, size in used)
        for last_use, entry, size in sorted(used):
            if total <= self.max_bytes or time.time() - last_use < _GRACE_SECONDS:
                break
            if entry.name != keep:
                logger.info("evicting %s from the kernel cache", entry.name)
                self._discard(entry)
                total -= size

    def _discard(self, entry: Path) -> None:
        """Take an entry away in one step, then delete it: no process sees half of it."""
        trash = Path(tempfile.mkdtemp(prefix="trash-", dir=self.directory))
        with contextlib.suppress(OSError):
            entry.rename(trash / entry.name)
        shutil.rmtree(trash, ignore_errors=True)

    def _sweep(self, older_than: float) -> None:
        try:
            leftovers = [path for path in self.directory.iterdir() if path.name.startswith(_TEMPORARY)]
        except FileNotFoundError:
            return
        for path in leftovers:
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime >= older_than:
                    shutil.rmtree(path, ignore_errors=True)

    # -- the folder ----------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        try:
            status = self.directory.stat()
        except FileNotFoundError:
            try:
                self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                status = self.directory.stat()
            except OSError as error:
                raise self._unwritable(error) from error
        except OSError as error:
            raise self._unwritable(error) from error
        self._require_usable(status)
        mode = stat.S_IMODE(status.st_mode)
        if mode & stat.S_ISVTX:
            # a folder for everybody's temporary files: taking it away from them would break the machine
            raise self._unwritable(PermissionError("it is shared by everybody; name a folder inside it"))
        if mode & 0o022:
            self.directory.chmod(0o700)  # others could put code there

    def _require_usable(self, status: os.stat_result) -> None:
        _require_own(self.directory, status)
        if not stat.S_ISDIR(status.st_mode):
            raise self._unwritable(NotADirectoryError("not a folder"))
        if not os.access(self.directory, os.W_OK | os.X_OK):
            raise self._unwritable(PermissionError("not writable"))

    def _unwritable(self, error: OSError) -> ContextError:
        return ContextError(
            f"cannot use the kernel cache folder {self.directory}: {error}.\n"
            "Set STAGEDTENSOR_CACHE, or Context(cache_dir=...), to a folder that you can write."
        )

    @contextlib.contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        """Hold the lock of ``key`` among all processes and threads; the kernel frees it when its holder dies."""
        path = self.directory / f"{key}.lock"
        while True:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX)
            except OSError:
                break  # no locks on this file system: renaming still keeps entries whole, work may be done twice
            # The last holder deletes the file: what was locked must still be what the name stands for.
            try:
                if os.path.samestat(os.fstat(handle), path.stat()):
                    break
            except FileNotFoundError:
                pass
            os.close(handle)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                path.unlink()
            os.close(handle)


def _verified(entry: Path) -> Path | None:
    """Return the built file of ``entry`` where manifest, length and digest agree; ContextError where it is foreign."""
    try:
        manifest = json.loads((entry / _MANIFEST).read_text(encoding="utf-8"))
        name, length, expected = manifest["file"], manifest["bytes"], manifest["sha256"]
        if not isinstance(name, str) or os.path.basename(name) != name:
            return None
        path = entry / name
        status = path.lstat()
        _require_own(path, status)
        if not stat.S_ISREG(status.st_mode) or status.st_size != length:
            return None
        return path if hashlib.sha256(path.read_bytes()).hexdigest() == expected else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _require_own(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.getuid():
        raise ContextError(
            f"refusing {path}: it belongs to user {status.st_uid}, not to you (user {os.getuid()}), "
            "and a kernel cache holds code that would run as you.\n"
            "Set STAGEDTENSOR_CACHE, or Context(cache_dir=...), to a folder of your own."
        )


def _size(entry: Path) -> int:
    total = 0
    with contextlib.suppress(OSError):
        for path in entry.iterdir():
            total += path.stat().st_size
    return total
