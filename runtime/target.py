"""Named CPU targets: what the code generator may assume and what the C compiler is told.

In: the machine (``/proc/cpuinfo``, ``platform.machine()``) or a name the user gave. Out: a :class:`Target` with its
features, vector width and explicit compiler flags. A name means the same flags on every machine, so generated source
and code are reproducible; ``-march=native`` is never used. Does not run a compiler.
"""

from __future__ import annotations

import ctypes
import difflib
import functools
import platform
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from stagedtensor.errors import ContextError

_V3 = ("avx", "avx2", "fma", "f16c", "bmi", "bmi2", "lzcnt", "movbe", "popcnt")
_AVX512 = ("avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl")
_BF16 = ("avx512bf16",)
_AMX = ("amx_tile", "amx_bf16")

# The kernel's spelling in /proc/cpuinfo where it differs from the compiler's.
_CPUINFO_NAMES = {"bmi1": "bmi", "abm": "lzcnt", "avx512_bf16": "avx512bf16"}

# Linux, arch_prctl(2): tile registers are off until the process asks for them.
_SYS_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18


@dataclass(frozen=True)
class Target:
    """One named CPU target.

    ``features`` are compiler spellings (``fma``, ``avx2``, ``f16c``, ``avx512f``, ``avx512bf16``, ``amx_bf16``,
    ``neon``); ``vector_bytes`` is the width of one vector register; ``flags`` are for gcc and clang.
    """

    name: str
    features: frozenset[str]
    vector_bytes: int
    flags: tuple[str, ...]

    def has(self, feature: str) -> bool:
        """Tell whether generated code may use ``feature``."""
        return feature in self.features

    def missing(self, machine: Target) -> tuple[str, ...]:
        """Return the features that this target needs and ``machine`` lacks, sorted; empty where its code runs."""
        return tuple(sorted(self.features - machine.features))


def _x86(name: str, features: Iterable[str], vector_bytes: int, *extra: str) -> Target:
    features = tuple(features)
    machine_flags = tuple(f"-m{feature.replace('_', '-')}" for feature in features)
    return Target(name, frozenset(("sse2", *features)), vector_bytes, ("-march=x86-64", *machine_flags, *extra))


_WIDE = "-mprefer-vector-width=512"  # both compilers would otherwise vectorise with half the register

TARGETS: dict[str, Target] = {
    entry.name: entry
    for entry in (
        Target("generic", frozenset(), 16, ()),
        _x86("x86-64", (), 16),
        _x86("x86-64-v3", _V3, 32),
        _x86("avx512", (*_V3, *_AVX512), 64, _WIDE),
        _x86("avx512+bf16", (*_V3, *_AVX512, *_BF16), 64, _WIDE),
        _x86("avx512+amx", (*_V3, *_AVX512, *_BF16, *_AMX), 64, _WIDE),
        Target("aarch64", frozenset(("neon", "fma")), 16, ("-march=armv8-a",)),
    )
}

_X86_BEST_FIRST = ("avx512+amx", "avx512+bf16", "avx512", "x86-64-v3")
_WITH_FAST_DOTS = "AuthenticAMD"
"""Whose dot of bf16 pairs takes as long as one multiply-add of f32; Intel's takes four times as long (measured)."""


def target(name: str) -> Target:
    """Return the target called ``name``; ContextError with the nearest names otherwise."""
    if not isinstance(name, str):
        raise TypeError(f"target is the name of a CPU target, one of {', '.join(TARGETS)}, not {name!r}")
    found = TARGETS.get(name)
    if found is not None:
        return found
    near = difflib.get_close_matches(name.lower().replace("_", "-"), TARGETS, n=2, cutoff=0.5)
    hint = f"; did you mean {' or '.join(repr(other) for other in near)}?" if near else ""
    raise ContextError(f"unknown CPU target {name!r}{hint} Known targets: {', '.join(TARGETS)}.")


def detect() -> Target:
    """Return the best named target that this machine runs; probed once per process."""
    return _detect()


@functools.lru_cache(maxsize=1)
def _detect() -> Target:
    machine = platform.machine().lower()
    if machine in ("aarch64", "arm64"):
        return TARGETS["aarch64"]
    if machine not in ("x86_64", "amd64"):
        return TARGETS["generic"]
    cpuinfo = _read_cpuinfo()
    best = choose(cpu_features(cpuinfo), fast_dots=_WITH_FAST_DOTS in cpuinfo)
    if best.has("amx_bf16") and not request_tile_permission():
        return TARGETS["avx512"]
    return best


def choose(features: frozenset[str], *, fast_dots: bool = False) -> Target:
    """Return the best x86 target whose features are all among ``features`` (compiler spellings).

    Dots of bf16 pairs count only where they are ``fast_dots``.
    """
    for name in _X86_BEST_FIRST:
        if TARGETS[name].features <= features and (fast_dots or name != "avx512+bf16"):
            return TARGETS[name]
    return TARGETS["x86-64"]


def cpu_features(cpuinfo: str) -> frozenset[str]:
    """Return the features that the text of ``/proc/cpuinfo`` lists for every processor, in compiler spellings."""
    common: frozenset[str] | None = None
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() != "flags":
            continue
        # Cores may differ, and a thread may run on any: only what all have counts.
        found = frozenset(_CPUINFO_NAMES.get(flag, flag) for flag in value.split())
        common = found if common is None else common & found
    return common or frozenset()


def request_tile_permission() -> bool:
    """Ask Linux for the AMX tile registers, for the whole process; True where they may be used."""
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return False
    libc = ctypes.CDLL(None)
    code = ctypes.c_long(_SYS_ARCH_PRCTL)
    return bool(libc.syscall(code, ctypes.c_long(_ARCH_REQ_XCOMP_PERM), ctypes.c_long(_XFEATURE_XTILEDATA)) == 0)


def processor_name() -> str:
    """Return the processor's model name, or the machine's architecture where the system does not tell."""
    for line in _read_cpuinfo().splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model"):
            return value.strip()
    return platform.machine() or "unknown"


def _read_cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""  # not Linux: the plain target of the architecture is right, only slower
