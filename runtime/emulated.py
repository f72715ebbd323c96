"""The ``cuda-emulated`` device: CUDA source compiled for the host and run there, with every memory access checked.

In: a program. Out: the same source that the ``cuda`` device would compile, executed block by block behind
``emulator/emulator.h``, which watches memory, and ``emulator/instructions.h``, which models what is inline PTX on a
GPU. Every buffer lies between guard zones and has a shadow; an access outside, a read of a cell nobody wrote, a race or
a divergent barrier raises :class:`MemoryCheckError` naming kernel, block, thread and expression. Slow by design; needs
a C++ compiler and no GPU.
"""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from stagedtensor.codegen.emit.cuda import CudaKernel, CudaSource
from stagedtensor.codegen.loop_ir import Buffer
from stagedtensor.codegen.solved import SolvedProgram
from stagedtensor.errors import CompileError, MemoryCheckError
from stagedtensor.numerics import Numerics
from stagedtensor.precision import Prec
from stagedtensor.runtime.compiler import Compiler, compile_shared, find_compiler
from stagedtensor.runtime.cuda_code import cuda_executable
from stagedtensor.runtime.device import Array, Executable, zeros
from stagedtensor.runtime.draw import draw_with_mirror
from stagedtensor.runtime.kernel_cache import KernelCache, digest

_ZONE = 64
_SHADOW = np.dtype((np.void, 32))
_WRITTEN = 24  # the byte of a shadow that tells whether anybody wrote the cell
_FLAGS = (
    *("-x", "c++", "-std=gnu++17", "-O1", "-g1", "-fPIC", "-fsanitize=thread", "-ffp-contract=off", "-fwrapv"),
    *("-fno-strict-aliasing", "-fno-exceptions", "-fno-rtti", "-fno-stack-protector", "-U_FORTIFY_SOURCE"),
    # the sanitizer's own library is what the emulator replaces
    *("-nodefaultlibs", "-fvisibility=hidden", "-Wl,-Bsymbolic"),
)
_LIBRARIES = ("-lm", "-lc", "-lgcc")
_SOURCE_NAME = "kernels.cu"
_KINDS = {
    1: "reads or writes outside the buffer",
    2: "reads a cell that nobody wrote",
    3: "touches a cell that another thread touches without a barrier between",
    4: "leaves threads waiting at a barrier that others never reach",
    5: "moves 16 bytes at once at an address that is no multiple of 16",
    6: "starts more copies than the emulator keeps for a thread",
}


class _Region(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_void_p),
        ("cells", ctypes.c_int64),
        ("name", ctypes.c_char_p),
        ("shadow", ctypes.c_void_p),
        ("cell", ctypes.c_int32),
        ("shared", ctypes.c_int32),
    )


class _Report(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int32),
        ("writes", ctypes.c_int32),
        ("bytes", ctypes.c_int32),
        ("other_writes", ctypes.c_int32),
        ("block", ctypes.c_int32),
        ("thread", ctypes.c_int32),
        ("other_block", ctypes.c_int32),
        ("other_thread", ctypes.c_int32),
        ("cell", ctypes.c_int64),
        ("cells", ctypes.c_int64),
        ("name", ctypes.c_char_p),
        ("code", ctypes.c_int64),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("kernel", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        ("regions", ctypes.c_void_p),
        ("region_count", ctypes.c_int32),
        ("blocks", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("cooperative", ctypes.c_int32),
        ("number", ctypes.c_uint32),
        ("report", _Report),
    )


_LAUNCHES = itertools.count(1)
"""No two launches of a process have one number: shadows outlive them."""


class WatchedBuffer:
    """Cells between guard zones, with their shadow."""

    def __init__(self, cells: int, prec: Prec, *, written: bool) -> None:
        raw = zeros(cells * prec.bytes + 3 * _ZONE, np.dtype(np.uint8))
        start = _ZONE + -raw.ctypes.data % _ZONE
        self.count = cells
        self.prec = prec
        flat = raw[start : start + cells * prec.bytes].view(prec.numpy_dtype)
        self.cells: Array = flat.reshape(cells, 4) if prec.name == "u4x32" else flat
        self.shadow = zeros((cells, _SHADOW.itemsize), np.dtype(np.uint8))
        self.shadow[:, _WRITTEN] = written

    def forget(self) -> None:
        """From here on nobody has written any cell."""
        self.shadow[...] = 0

    def region(self, name: str) -> _Region:
        """Describe the buffer to the emulator."""
        return _Region(self.cells.ctypes.data, self.count, name.encode(), self.shadow.ctypes.data, self.prec.bytes, 0)


class EmulatedDevice:
    """Compiles CUDA source for the host; buffers are watched host memory."""

    name = "cuda-emulated"
    backend = "cuda"

    def __init__(self, *, cache_dir: str | Path | None = None) -> None:
        self._cache = KernelCache(None if cache_dir is None else Path(cache_dir))

    # -- memory ---------------------------------------------------------------------------------------------------
    def allocate(self, prec: Prec, cells: int) -> WatchedBuffer:
        """Return zeroed memory; a context checks by itself that inputs have values."""
        return WatchedBuffer(cells, prec, written=True)

    def upload(self, buffer: WatchedBuffer, cells: Array) -> None:
        """Copy cells in."""
        buffer.cells[...] = cells.reshape(buffer.cells.shape)

    def narrow(self, buffer: WatchedBuffer, cells: Array, prec: Prec, *, saturate: bool) -> bool:
        """Leave rounding to the host."""
        return False

    def take(self, buffer: WatchedBuffer, values: object, dims: tuple[int, ...]) -> bool:
        """All arrays are the host's here."""
        return False

    def download(self, buffer: WatchedBuffer) -> Array:
        """Return a copy."""
        return buffer.cells.copy()

    def view(self, buffer: WatchedBuffer) -> Array:
        """Return an array over the same memory."""
        return buffer.cells[...]

    def draw(self, kind: str, cells: int, prec: Prec, key: tuple[int, int], first: float, second: float) -> Array:
        """Draw with the prelude's NumPy mirror."""
        return draw_with_mirror(kind, cells, prec, key, first, second)

    # -- code -----------------------------------------------------------------------------------------------------
    def compile(self, program: SolvedProgram, numerics: Numerics, *, fusion: bool, debug: bool) -> Executable:
        """Generate CUDA source and compile it for the host, or take the library from the cache."""
        return cuda_executable(
            program,
            numerics,
            self._cache,
            lambda emitted: load_emulated(emitted, self._cache),
            lambda library, emitted, buffers, scalars: EmulatedRoutine(library, emitted, buffers, scalars).run,
            fusion=fusion,
            debug=debug,
        )

    def sync(self) -> None:
        """Launches return when the work is done."""

    def close(self) -> None:
        """Nothing to free."""


class EmulatedRoutine:
    """The kernels of one routine bound to buffers, launched one after another."""

    def __init__(
        self,
        library: ctypes.CDLL,
        emitted: CudaSource,
        buffers: dict[Buffer, WatchedBuffer],
        scalars: Array,
    ) -> None:
        self._emitted = emitted
        self._library = library
        self._buffers = dict(buffers)
        self._scalars = scalars
        self._fresh: dict[int, list[WatchedBuffer]] = {}
        self._add_temporaries()
        self._keep: list[Any] = []
        self._launches = [self._prepared(kernel) for kernel in emitted.kernels]
        self._emulate = library.st_emulate
        self._emulate.argtypes = [ctypes.c_void_p]
        self._emulate.restype = ctypes.c_int

    def _add_temporaries(self) -> None:
        """A watched buffer for each temporary; results in place of an operand share its."""
        for item in sorted(self._emitted.plan.placements, key=lambda item: item.in_place_of is not None):
            leader = item.in_place_of
            if leader is not None:
                self._buffers[item.buffer] = self._buffers[leader]
                continue
            held = WatchedBuffer(item.buffer.size, item.buffer.type, written=False)
            self._buffers[item.buffer] = held
            self._fresh.setdefault(item.first, []).append(held)

    def _prepared(self, kernel: CudaKernel) -> _Launch:
        held = [self._buffers[buffer] for buffer in kernel.buffers]
        regions = [item.region(buffer.name) for item, buffer in zip(held, kernel.buffers, strict=True)]
        addresses = [item.cells.ctypes.data for item in held]
        if kernel.scalars:
            shadow = np.zeros((self._scalars.size, _SHADOW.itemsize), np.uint8)
            shadow[:, _WRITTEN] = 1
            regions.append(_Region(self._scalars.ctypes.data, self._scalars.size, b"scalars", shadow.ctypes.data, 8, 0))
            addresses.append(self._scalars.ctypes.data)
            self._keep.append(shadow)
        values = (ctypes.c_void_p * max(1, len(addresses)))(*addresses)
        pointers = (ctypes.c_void_p * max(1, len(addresses)))(
            *(ctypes.addressof(values) + at * ctypes.sizeof(ctypes.c_void_p) for at in range(len(addresses)))
        )
        table = (_Region * max(1, len(regions)))(*regions)
        self._keep += [values, pointers, table]
        launch = kernel.launch
        entry = ctypes.cast(getattr(self._library, _caller(kernel)), ctypes.c_void_p).value
        return _Launch(
            entry,
            ctypes.addressof(pointers),
            ctypes.addressof(table),
            len(regions),
            launch.blocks,
            launch.threads,
            int(launch.cooperative),
        )

    def run(self) -> None:
        """Launch every kernel in order; MemoryCheckError at the first finding."""
        for place, (kernel, launch) in enumerate(zip(self._emitted.kernels, self._launches, strict=True)):
            for buffer in self._fresh.get(place, ()):
                buffer.forget()
            launch.number = next(_LAUNCHES)
            code = self._emulate(ctypes.addressof(launch))
            if code:
                raise MemoryCheckError(self._message(kernel, launch.report))

    def _message(self, kernel: CudaKernel, report: _Report) -> str:
        does = _KINDS.get(report.kind, "failed: no memory for the stacks of its threads")
        lines = [f"kernel {kernel.name}: thread {report.thread} of block {report.block} {does}"]
        name = (report.name or b"").decode()
        if name:
            verb = "write" if report.writes else "read"
            lines.append(
                f"  {verb} of {report.bytes} bytes at cell {report.cell} of {name}, which has {report.cells} cells"
            )
        if report.kind == 3:
            other = "written" if report.other_writes else "read"
            lines.append(f"  the cell was {other} by thread {report.other_thread} of block {report.other_block}")
        line = _line_of(self._library, report.code)
        text = self._emitted.text.splitlines()
        if 0 < line <= len(text):
            lines.append(f"  generated line {line}: {text[line - 1].strip()}")
        origins = self._emitted.origins(line) or kernel.origins
        lines += [f"  computing {origin.text}  ({origin.source})" for origin in origins]
        return "\n".join(lines)


def _line_of(library: ctypes.CDLL, offset: int) -> int:
    """Return the line of the generated source that holds a code address; 0 where that cannot be found out."""
    tool = shutil.which("addr2line")
    if tool is None or offset <= 0:
        return 0
    found = subprocess.run(
        [tool, "-e", str(library._name), hex(offset - 1)], capture_output=True, text=True, check=False, timeout=30.0
    )
    where, _, line = found.stdout.strip().partition(" ")[0].rpartition(":")
    return int(line) if where.endswith(_SOURCE_NAME) and line.isdigit() else 0


def _caller(kernel: CudaKernel) -> str:
    return f"st_call_{kernel.name}"


def host_source(emitted: CudaSource) -> str:
    """Return the translation unit: the emulation headers, the routine's text unchanged, and a caller per kernel."""
    folder = files("stagedtensor.runtime") / "emulator"
    header = "\n".join((folder / name).read_text(encoding="utf-8") for name in ("emulator.h", "instructions.h"))
    callers = []
    for kernel in {kernel.name: kernel for kernel in emitted.kernels}.values():
        types = [f"{'' if buffer in kernel.writes else 'const '}{buffer.type.c_type} *" for buffer in kernel.buffers]
        types += ["const int64_t *"] * kernel.scalars
        values = ", ".join(f"*({c_type}*)arguments[{at}]" for at, c_type in enumerate(types))
        callers.append(
            f"ST_EXPORT void {_caller(kernel)}(void **arguments) {{ (void)arguments; {kernel.name}({values}); }}\n"
        )
    return f'{header}\n#line 1 "{_SOURCE_NAME}"\n{emitted.text}\n#line 1 "callers"\n{"".join(callers)}'


def load_emulated(emitted: CudaSource, cache: KernelCache) -> ctypes.CDLL:
    """Compile a routine's source for the host, or take it from the cache, and load it."""
    compiler = find_compiler()
    text = host_source(emitted)

    def build(path: Path) -> None:
        _build(text, path, compiler, emitted)

    key = digest("cuda-emulated", compiler.identity, "\n".join((*_FLAGS, *_LIBRARIES)), text)
    return ctypes.CDLL(str(cache.get_or_build(key, build, source=emitted.text, source_suffix=".cu")))


def _build(text: str, path: Path, compiler: Compiler, emitted: CudaSource) -> None:
    try:
        compile_shared(text, path, flags=_FLAGS, compiler=compiler, libraries=_LIBRARIES, locate=emitted.locate)
    except CompileError as error:
        if "cc1plus" in str(error) or "cc1plus" in error.output:
            raise CompileError(
                "cuda-emulated compiles CUDA source as C++, and the C compiler has no C++ part. "
                "Install one: apt-get install g++",
                source=error.source,
                output=error.output,
            ) from error
        raise
