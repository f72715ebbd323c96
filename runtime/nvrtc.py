"""Compiles CUDA source to PTX or to a binary for a named GPU; needs CuPy and NVRTC, but neither a driver nor a GPU.

In: the text of a routine and an architecture such as ``sm_90``. Out: :class:`CudaBinary`: the bytes, what the compiler
said, and the registers, shared memory and spills of each kernel. Raises CompileError with the install line where a
package is missing, with the user's line where the source does not compile. Loads nothing onto a device.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from stagedtensor.errors import CompileError

_ANY_OPTIONS = ("--std=c++17", "--diag-suppress=39", "--ptxas-options=-v")
"""39: division by zero, which every type defines here, so that a program may say it."""
OPTIONS = (*_ANY_OPTIONS, "--fmad=false", "--ptxas-options=-warn-spills")
"""Contraction is off: a*b+c rounds twice unless the program says fma, the same as on every other device."""
FAST_OPTIONS = (*_ANY_OPTIONS, "--use_fast_math")
INSTALL = (
    'install it: pip install "stagedtensor[cuda13]" (or [cuda12] for drivers before 580); without a driver also '
    "pip install nvidia-cuda-nvrtc nvidia-cuda-runtime"
)

_WARNING = re.compile(r"\bwarning\s*[:#]")

Kind = Literal["ptx", "cubin"]
_ARCHITECTURE = re.compile(r"sm_(\d{2,3})[af]?")
_REGISTERS = 65_536
_LIMITS = {
    80: (64, 32, 164),
    86: (48, 16, 100),
    87: (48, 16, 164),
    89: (48, 24, 100),
    90: (64, 32, 228),
    100: (64, 32, 228),
    103: (64, 32, 228),
    120: (48, 24, 100),
}
"""Warps, blocks and KiB of shared memory that one multiprocessor holds, by architecture."""
_RESERVED_SHARED = 1024


@dataclass(frozen=True)
class KernelResources:
    """What one kernel takes: registers of a thread, bytes of shared memory of a block, bytes spilled by a thread."""

    name: str
    registers: int
    shared_bytes: int
    spill_bytes: int

    def occupancy(self, threads: int, arch: str = "sm_90") -> float:
        """Estimate which part of a multiprocessor's warps can be resident with blocks of ``threads`` threads."""
        warps = -(-threads // 32)
        by_registers = _REGISTERS // max(1, -(-self.registers // 8) * 8 * 32 * warps)
        most_warps, most_blocks, kibibytes = _LIMITS.get(int(check_architecture(arch)), _LIMITS[80])
        by_shared = kibibytes * 1024 // (self.shared_bytes + _RESERVED_SHARED)
        blocks = min(most_blocks, by_registers, by_shared, most_warps // warps)
        return blocks * warps / most_warps


@dataclass(frozen=True)
class CudaBinary:
    """What the compiler made for one architecture."""

    arch: str
    data: bytes
    log: str
    resources: tuple[KernelResources, ...]

    @property
    def warnings(self) -> tuple[str, ...]:
        """The lines of the log that warn."""
        return tuple(line for line in self.log.splitlines() if _WARNING.search(line))


def compile_cuda(
    source: str,
    arch: str = "sm_90",
    kind: Kind = "cubin",
    *,
    fast_math: bool = False,
    locate: Callable[[int], str | None] | None = None,
) -> CudaBinary:
    """Compile CUDA source for ``arch``; ``locate`` maps a line of the text to the user's line, for errors."""
    number = check_architecture(arch)
    compiler = _compiler()
    target = f"--gpu-architecture={arch}" if kind == "cubin" else f"--gpu-architecture=compute_{number}"
    options = (*(FAST_OPTIONS if fast_math else OPTIONS), target)
    if kind == "ptx":
        options = tuple(option for option in options if "ptxas" not in option)
    log = io.StringIO()
    try:
        program = compiler._NVRTCProgram(source, "kernels.cu", method=kind)
        data, _ = program.compile(options, log)
    except compiler.CompileException as error:
        if "--gpu-architecture" in str(error):
            raise CompileError(_unknown(arch), source=source, output=str(error)) from None
        raise CompileError(_failure(str(error), source, locate), source=source, output=str(error)) from None
    except Exception as error:  # the library is loaded at the first call, and fails in its own ways
        raise CompileError(f"NVRTC, the CUDA compiler, does not work here: {error}\n  {INSTALL}") from error
    text = log.getvalue().replace("\0", "")
    blob = data.encode() if isinstance(data, str) else bytes(data)
    return CudaBinary(arch, blob.rstrip(b"\0") if kind == "ptx" else blob, text, _resources(text))


def check_architecture(arch: str) -> str:
    """Return the number of an architecture, ``"90"`` of ``"sm_90"``; CompileError where it is none."""
    found = _ARCHITECTURE.fullmatch(arch) if isinstance(arch, str) else None
    if found is None:
        raise CompileError(f"expected a GPU architecture such as 'sm_80', 'sm_90' or 'sm_100', got {arch!r}")
    return found.group(1)


def _compiler() -> Any:
    if importlib.util.find_spec("cupy") is None:
        raise CompileError(f"compiling CUDA source needs the package CuPy, which is not installed;\n  {INSTALL}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CuPy warns where it finds no CUDA folder; none is needed
            return importlib.import_module("cupy.cuda.compiler")
    except Exception as error:
        raise CompileError(f"CuPy does not import: {error};\n  {INSTALL}") from error


def _unknown(arch: str) -> str:
    version = ".".join(map(str, importlib.import_module("cupy").cuda.nvrtc.getVersion()))
    return (
        f"NVRTC {version}, the CUDA compiler, does not know the GPU architecture {arch!r}: "
        f"it is newer than the compiler, or too old for it;\n  {INSTALL}"
    )


def _failure(message: str, source: str, locate: Callable[[int], str | None] | None) -> str:
    found = re.search(r"kernels\.cu\((\d+)\)", message)
    lines = [f"the generated CUDA source does not compile:\n{message.strip()}"]
    if found:
        line = int(found.group(1))
        text = source.splitlines()
        if 0 < line <= len(text):
            lines.append(f"  generated line {line}: {text[line - 1].strip()}")
        where = locate(line) if locate is not None else None
        if where:
            lines.append(f"  computing {where}")
    return "\n".join(lines)


_ENTRY = re.compile(r"Compiling entry function '(?P<name>\w+)'")
_SPILLS = re.compile(r"(?P<stores>\d+) bytes spill stores")
_USED = re.compile(r"Used (?P<registers>\d+) registers")
_SMEM = re.compile(r"(?P<bytes>\d+) bytes smem")


def _resources(log: str) -> tuple[KernelResources, ...]:
    found: list[KernelResources] = []
    name, spills = "", 0
    for line in log.splitlines():
        entry, spilled, used = _ENTRY.search(line), _SPILLS.search(line), _USED.search(line)
        if entry:
            name, spills = entry["name"], 0
        if spilled:
            spills = int(spilled["stores"])
        if used and name:
            shared = _SMEM.search(line)
            found.append(KernelResources(name, int(used["registers"]), int(shared["bytes"]) if shared else 0, spills))
            name = ""
    return tuple(found)
