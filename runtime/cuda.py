"""The ``cuda`` device: generated CUDA, one module per routine, replayed as one graph on a stream of its own.

In: a program. Out: kernels compiled by NVRTC when the routine is compiled (or taken from the kernel cache) and loaded
through CuPy. Buffers are CuPy arrays on its memory pool; bf16 and fp8 cells, which CuPy does not know, are held as
their bits. The first run launches kernel by kernel, the second is captured, every later one is one graph launch:
buffers never move, so values may be set between replays. Raises ContextError where CuPy, the driver or the device is
missing.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from stagedtensor.codegen.emit.cuda import CudaSource
from stagedtensor.codegen.loop_ir import Buffer
from stagedtensor.codegen.schedule.cuda import SHARED_BYTES
from stagedtensor.codegen.solved import SolvedProgram
from stagedtensor.errors import ContextError
from stagedtensor.numerics import Numerics
from stagedtensor.precision import Prec, f32, f64
from stagedtensor.runtime.cuda_code import cuda_executable
from stagedtensor.runtime.cuda_draw import fill_arguments, fill_source
from stagedtensor.runtime.device import Array, Executable
from stagedtensor.runtime.draw import draw_with_mirror
from stagedtensor.runtime.kernel_cache import KernelCache, digest
from stagedtensor.runtime.nvrtc import FAST_OPTIONS, INSTALL, OPTIONS, compile_cuda

_OLDEST = (8, 0)
"""Compute capability that kernels need: asynchronous copies, and the matrix instructions of bf16."""


def gpu_count() -> int:
    """Return how many GPUs the driver shows; 0 without one. Only the driver is asked, so that is quick."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def is_available() -> bool:
    """Tell whether CuPy is installed and the driver shows a GPU; imports nothing."""
    return importlib.util.find_spec("cupy") is not None and gpu_count() > 0


def _cupy() -> Any:
    if importlib.util.find_spec("cupy") is None:
        raise ContextError(f"device 'cuda' needs the package CuPy, which is not installed;\n  {INSTALL}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CuPy warns where it finds no CUDA folder; none is needed
            return importlib.import_module("cupy")
    except Exception as error:  # whatever a broken installation raises
        raise ContextError(f"device 'cuda': CuPy does not import: {error};\n  {INSTALL}") from error


def bits_dtype(prec: Prec) -> np.dtype[Any]:
    """Return the dtype in which a CuPy array holds cells of ``prec``: its own, or unsigned integers of its width."""
    own = np.dtype(prec.numpy_dtype)
    return own if own.kind in "biuf" and own.isbuiltin == 1 else np.dtype(f"u{own.itemsize}")


def _facts(values: Any, prec: Prec) -> dict[str, Any] | None:
    """Return what an array on a GPU says of itself, None where it is none or not surely in the format ``prec``."""
    if (prec.bits == 8 and prec.is_float) or not hasattr(type(values), "__cuda_array_interface__"):
        return None  # the interface has one word for all 8-bit floats
    try:
        facts: dict[str, Any] = values.__cuda_array_interface__
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None  # torch's on the host, or of a format that it has no word for
    return facts if np.dtype(facts["typestr"]) == np.dtype(prec.numpy_dtype.str) else None


class CudaBuffer:
    """Cells on the device: ``array`` is a flat CuPy array of their bits."""

    def __init__(self, array: Any, prec: Prec) -> None:
        self.array = array
        self.prec = prec


class CudaDevice:
    """One GPU, through CuPy."""

    backend = "cuda"

    def __init__(self, index: int = 0, *, cache_dir: str | Path | None = None) -> None:
        self.cupy = _cupy()
        count = self._count()
        if index >= count:
            raise ContextError(
                f"device 'cuda:{index}' does not exist: this machine has {count} GPU{'s' * (count != 1)}"
            )
        self.index = index
        self._device = self.cupy.cuda.Device(index)
        with self._device:
            properties = self.cupy.cuda.runtime.getDeviceProperties(index)
            self._shared_bytes = int(properties.get("sharedMemPerBlockOptin", SHARED_BYTES))
            self.arch = f"sm_{properties['major']}{properties['minor']}"
            label = properties["name"]
            self.name = f"cuda:{index} ({label.decode() if isinstance(label, bytes) else label}, {self.arch})"
            if (properties["major"], properties["minor"]) < _OLDEST:
                raise ContextError(f"{self.name} is too old: kernels are for sm_80 (Ampere) and later;\n  use 'cpu'")
            self.stream = self.cupy.cuda.Stream(non_blocking=True)
        self._cache = KernelCache(None if cache_dir is None else Path(cache_dir))

    def _count(self) -> int:
        try:
            return int(self.cupy.cuda.runtime.getDeviceCount())
        except Exception as error:  # CuPy's own class, which exists only once it is imported
            raise ContextError(
                f"device 'cuda' needs a GPU with NVIDIA's driver, and there is none here ({error}).\n"
                "  use 'cpu', or 'cuda-emulated' to run the same kernels on the host"
            ) from error

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        """Make device and stream current, and those of the caller again afterwards."""
        with self._device, self.stream:
            yield

    # -- memory ---------------------------------------------------------------------------------------------------
    def allocate(self, prec: Prec, cells: int) -> CudaBuffer:
        """Return zeroed memory of CuPy's pool; CuPy's MemoryError where there is too little."""
        shape: tuple[int, ...] = (cells, 4) if prec.name == "u4x32" else (cells,)
        return CudaBuffer(self.zeros(shape, np.dtype(np.uint32) if prec.name == "u4x32" else bits_dtype(prec)), prec)

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Return a zeroed CuPy array."""
        with self._current():
            return self.cupy.zeros(shape, dtype)

    def upload(self, buffer: CudaBuffer, cells: Array) -> None:
        """Copy cells in; the caller's memory is free again on return."""
        flat = np.ascontiguousarray(cells).reshape(-1).view(buffer.array.dtype).reshape(buffer.array.shape)
        with self._current():
            buffer.array.set(flat, stream=self.stream)
            self.stream.synchronize()

    def narrow(self, buffer: CudaBuffer, cells: Array, prec: Prec, *, saturate: bool) -> bool:
        """Leave rounding to the host."""
        return False

    def take(self, buffer: CudaBuffer, values: object, dims: tuple[int, ...]) -> bool:
        """Copy an array with ``__cuda_array_interface__`` from device to device; its memory is free again on return."""
        facts = _facts(values, buffer.prec)
        if facts is None:
            return False
        written = self.cupy.cuda.get_current_stream().record()  # by whatever the caller enqueued
        with self._current():
            given = self.cupy.asarray(
                SimpleNamespace(__cuda_array_interface__={**facts, "typestr": buffer.array.dtype.str})
            )
            if given.shape != dims or given.device.id != self.index:
                return False
            self.stream.wait_event(written)
            buffer.array[...] = given.reshape(-1)
            self.stream.synchronize()
        return True

    def download(self, buffer: CudaBuffer) -> Array:
        """Wait and return a copy."""
        with self._current():
            host = self.cupy.asnumpy(buffer.array, stream=self.stream)
            self.stream.synchronize()
        cells: Array = host if buffer.prec.name == "u4x32" else host.view(buffer.prec.numpy_dtype)
        return cells

    def view(self, buffer: CudaBuffer) -> Any:
        """Return the CuPy array of the cells (of their bits for bf16 and fp8), which exports DLPack."""
        return buffer.array[...]

    def draw(self, kind: str, cells: int, prec: Prec, key: tuple[int, int], first: float, second: float) -> Array:
        """Draw on the device; f64, whose logarithms are the device's own, with the prelude's NumPy mirror."""
        if prec is f64 or cells == 0:
            return draw_with_mirror(kind, cells, prec, key, first, second)
        source = fill_source(kind, cells)
        (function,) = self._load(source, Numerics())
        (kernel,) = source.kernels
        filled = self.allocate(f32, cells)
        given = [self.allocate(buffer.type, buffer.size) for buffer in kernel.buffers[1:]]
        for buffer, values in zip(given, fill_arguments(cells, key, first, second), strict=True):
            self.upload(buffer, values)
        with self._current():
            function((kernel.launch.blocks,), (kernel.launch.threads,), (filled.array, *(item.array for item in given)))
        return self.download(filled)

    # -- code -----------------------------------------------------------------------------------------------------
    def compile(self, program: SolvedProgram, numerics: Numerics, *, fusion: bool, debug: bool) -> Executable:
        """Generate CUDA source, compile it for this device or take the binary from the cache, load it."""
        return cuda_executable(
            program,
            numerics,
            self._cache,
            lambda emitted: self._load(emitted, numerics),
            self._start,
            fusion=fusion,
            debug=debug,
            shared_bytes=self._shared_bytes,
        )

    def _start(
        self, functions: list[Any], emitted: CudaSource, buffers: dict[Buffer, Any], scalars: Array
    ) -> Callable[[], None]:
        arrays = {buffer: given.array for buffer, given in buffers.items()}
        return CudaRoutine(self, functions, emitted, arrays, scalars).run

    def _load(self, emitted: CudaSource, numerics: Numerics) -> list[Any]:
        options = FAST_OPTIONS if numerics.fast_math else OPTIONS

        def build(path: Path) -> None:
            binary = compile_cuda(emitted.text, self.arch, fast_math=numerics.fast_math, locate=emitted.locate)
            path.write_bytes(binary.data)

        key = digest(
            "cuda", ".".join(map(str, self.cupy.cuda.nvrtc.getVersion())), self.arch, "\n".join(options), emitted.text
        )
        path = self._cache.get_or_build(key, build, source=emitted.text, suffix=".cubin", source_suffix=".cu")
        with self._device:
            loaded = self.cupy.RawModule(path=str(path))
            return [loaded.get_function(kernel.name) for kernel in emitted.kernels]

    def sync(self) -> None:
        """Wait for everything enqueued on this context's stream."""
        with self._current():
            self.stream.synchronize()

    def close(self) -> None:
        """Wait; the memory goes back to the pool when the last view of it is gone."""
        self.sync()


class CudaRoutine:
    """The kernels of one routine bound to arrays; ``run`` launches, captures, then replays."""

    def __init__(
        self, device: CudaDevice, functions: list[Any], emitted: CudaSource, arrays: dict[Buffer, Any], scalars: Array
    ) -> None:
        self._device = device
        self._host_scalars = scalars
        self._sent: Array | None = None
        self._scalars = device.zeros((max(1, scalars.size),), np.dtype(np.int64))
        self._arena = device.zeros((max(1, emitted.arena_bytes),), np.dtype(np.uint8))
        self._launches: list[tuple[Any, tuple[int], tuple[int], tuple[Any, ...], int]] = []
        for function, kernel in zip(functions, emitted.kernels, strict=True):
            arguments = [
                arrays[buffer] if buffer in arrays else self._temporary(emitted, buffer) for buffer in kernel.buffers
            ]
            if kernel.scalars:
                arguments.append(self._scalars)
            launch = kernel.launch
            if launch.dynamic_bytes:
                with device._current():
                    function.max_dynamic_shared_size_bytes = launch.dynamic_bytes
            self._launches.append(
                (function, (launch.blocks,), (launch.threads,), tuple(arguments), launch.dynamic_bytes)
            )
        self._runs = 0
        self._graph: Any = None

    def _temporary(self, emitted: CudaSource, buffer: Buffer) -> Any:
        start = emitted.plan.offsets[buffer]
        return self._arena[start : start + max(1, buffer.nbytes)]

    def run(self) -> None:
        """Enqueue the routine: the graph once there is one."""
        device = self._device
        with device._current():
            if self._sent is None or not np.array_equal(self._sent, self._host_scalars):
                self._sent = self._host_scalars.copy()
                self._scalars.set(self._sent, stream=device.stream)
            if self._graph is None and self._runs == 1 and self._launches:
                # kernels are loaded at their first launch, which a capture does not allow
                device.stream.begin_capture()
                complete = False
                try:
                    self._enqueue()
                    complete = True
                finally:
                    graph = device.stream.end_capture()
                    self._graph = graph if complete else None  # interrupted: the next run captures again
            if self._graph is not None:
                self._graph.launch(device.stream)
            else:
                self._enqueue()
        self._runs += 1

    def _enqueue(self) -> None:
        for function, blocks, threads, arguments, shared in self._launches:
            function(blocks, threads, arguments, shared_mem=shared)
