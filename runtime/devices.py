"""Which device a name means, and what is missing where it cannot be opened.

A device's modules, and with them the compiler of this package, are loaded when the first device of its kind is opened:
``import stagedtensor`` stays quick.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from stagedtensor.errors import ContextError
from stagedtensor.runtime.device import Device

NAMES = ("auto", "cpu", "cuda", "cuda:1", "cuda-emulated", "reference")


def open_device(
    name: str, *, cache_dir: str | Path | None = None, threads: int | None = None, target: str | None = None
) -> Device:
    """Open a device by name. ``auto`` is the first GPU where CuPy and a driver show one, else the CPU."""
    if not isinstance(name, str):
        raise TypeError(f"a device is a name such as 'cpu', not {name!r}")
    if name == "auto":
        name = "cuda" if _has_gpu() else "cpu"
    if name == "cpu":
        from stagedtensor.runtime.cpu import CpuDevice

        return CpuDevice(cache_dir=cache_dir, threads=threads, target=target)
    if name == "reference":
        from stagedtensor.runtime.reference import ReferenceDevice

        return ReferenceDevice()
    if name == "cuda-emulated":
        from stagedtensor.runtime.emulated import EmulatedDevice

        return EmulatedDevice(cache_dir=cache_dir)
    if re.fullmatch(r"cuda(:\d+)?", name):
        from stagedtensor.runtime.cuda import CudaDevice

        return CudaDevice(int(name.partition(":")[2] or 0), cache_dir=cache_dir)
    raise ContextError(f"unknown device {name!r}; expected one of {', '.join(map(repr, NAMES))}")


def _has_gpu() -> bool:
    if importlib.util.find_spec("cupy") is None:
        return False
    from stagedtensor.runtime.cuda import is_available

    return is_available()
