"""As much of CuPy as the ``cuda`` device calls, in host memory: kernels run in the emulator, streams and graphs keep
order.

It checks what can be checked without a GPU: which arrays a launch gets, what is captured and replayed, which stream is
current. It follows CuPy's documented signatures.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from stagedtensor.codegen.emit.cuda import CudaKernel, CudaSource
from stagedtensor.codegen.passes.plan_memory import MemoryPlan
from stagedtensor.runtime.emulated import EmulatedRoutine, WatchedBuffer, load_emulated
from tests.run.blocks import cache


class OutOfMemoryError(MemoryError):
    """As CuPy's."""


class Array(np.ndarray[Any, Any]):
    """A device array."""

    device: Any = SimpleNamespace(id=0)

    def set(self, values: np.ndarray[Any, Any], stream: Any = None) -> None:
        assert isinstance(values, np.ndarray)
        assert values.dtype == self.dtype
        assert stream is Stream.current
        self[...] = values.reshape(self.shape)


class Outside:
    """An array of another library, on the device; reading it on the host is counted."""

    def __init__(self, cells: np.ndarray[Any, Any], gpu: int = 0) -> None:
        self.cells = cells
        self.gpu = gpu
        self.read = 0

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        cells = self.cells
        data = (cells.ctypes.data, False)
        return {
            "shape": cells.shape,
            "typestr": cells.dtype.str,
            "strides": cells.strides,
            "data": data,
            "version": 3,
            "gpu": self.gpu,
        }

    def get(self) -> np.ndarray[Any, Any]:
        self.read += 1
        return self.cells


class Graph:
    """A captured sequence of launches."""

    def __init__(self, work: list[Callable[[], None]]) -> None:
        self.work = work
        self.launches = 0

    def launch(self, stream: Any = None) -> None:
        assert stream is Stream.current
        self.launches += 1
        for item in self.work:
            item()


class Stream:
    """A stream that runs at once, or records while it captures."""

    current: Stream | None = None

    def __init__(self, non_blocking: bool = False) -> None:
        assert non_blocking
        self.recorded: list[Callable[[], None]] | None = None
        self.captures = 0
        self.graphs: list[Graph] = []
        self.waited: Event | None = None
        self._outer: list[Stream | None] = []

    def __enter__(self) -> Stream:
        self._outer.append(Stream.current)
        Stream.current = self
        return self

    def __exit__(self, *exc: object) -> None:
        Stream.current = self._outer.pop()

    def begin_capture(self) -> None:
        self.recorded = []
        self.captures += 1

    def end_capture(self) -> Graph:
        assert self.recorded is not None
        graph = Graph(self.recorded)
        self.recorded = None
        self.graphs.append(graph)
        return graph

    def record(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        assert event.at is not None, "nothing was recorded"
        self.waited = event

    def synchronize(self) -> None:
        assert self.recorded is None, "a capture does not allow waiting"


class Event:
    """A moment of a stream."""

    def __init__(self) -> None:
        self.at: float | None = None

    def record(self, stream: Any = None) -> None:
        assert isinstance(stream, Stream)
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        assert self.at is not None, "nothing was recorded"


def elapsed(first: Event, last: Event) -> float:
    """Milliseconds between two events."""
    assert first.at is not None
    assert last.at is not None
    return (last.at - first.at) * 1e3


class Device:
    """A device that is current while entered."""

    def __init__(self, index: int) -> None:
        self.index = index

    def use(self) -> None:
        """Make it current for good."""

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


class Function:
    """One kernel, called as CuPy's raw kernels are."""

    def __init__(self, library: Any, emitted: CudaSource, kernel: CudaKernel) -> None:
        self.library, self.kernel = library, kernel
        self.emitted = replace(emitted, kernels=(kernel,), plan=MemoryPlan())
        self.calls = 0
        self.max_dynamic_shared_size_bytes = 48 * 1024

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], arguments: tuple[Any, ...], *, shared_mem: int = 0
    ) -> None:
        stream = Stream.current
        assert stream is not None, "launched on nobody's stream"
        assert grid == (self.kernel.launch.blocks,)
        assert block == (self.kernel.launch.threads,)
        assert shared_mem == self.kernel.launch.dynamic_bytes
        assert shared_mem <= self.max_dynamic_shared_size_bytes
        assert all(isinstance(item, Array) for item in arguments)
        if stream.recorded is not None:
            stream.recorded.append(lambda: self.run(arguments))
        else:
            self.run(arguments)

    def run(self, arguments: tuple[Any, ...]) -> None:
        self.calls += 1
        held = {}
        for buffer, array in zip(self.kernel.buffers, arguments, strict=False):
            watched = WatchedBuffer(buffer.size, buffer.type, written=True)
            watched.cells[...] = array.view(np.ndarray).view(watched.cells.dtype).reshape(watched.cells.shape)
            held[buffer] = watched
        scalars = np.array(arguments[-1]) if self.kernel.scalars else np.zeros(1, np.int64)
        EmulatedRoutine(self.library, self.emitted, held, scalars).run()
        for buffer, array in zip(self.kernel.buffers, arguments, strict=False):
            array.view(np.ndarray)[...] = held[buffer].cells.view(array.dtype).reshape(array.shape)


def load(_device: Any, emitted: CudaSource, _numerics: Any) -> list[Function]:
    """Stands for the device's own loading of a binary."""
    library = load_emulated(emitted, cache())
    return [Function(library, emitted, kernel) for kernel in emitted.kernels]


def module(*, gpus: int = 1, memory: int = 1 << 40) -> Any:
    """Return the module object; ``memory`` bytes can be allocated."""
    left = [memory]

    def zeros(shape: Any, dtype: Any) -> Array:
        array = np.zeros(shape, dtype).view(Array)
        left[0] -= array.nbytes
        if left[0] < 0:
            raise OutOfMemoryError("out of memory")
        assert Stream.current is not None
        return array

    def asnumpy(array: Array, stream: Any = None) -> np.ndarray[Any, Any]:
        assert stream is Stream.current
        return np.array(array)

    def asarray(values: Any) -> Array:
        """The memory that ``values`` speaks of, on the GPU that real addresses would tell."""
        assert Stream.current is not None
        facts = dict(values.__cuda_array_interface__)
        gpu = facts.pop("gpu")
        array = np.asarray(SimpleNamespace(__array_interface__=facts)).view(Array)
        array.device = SimpleNamespace(id=gpu)
        return array

    callers = Stream(non_blocking=True)
    runtime = SimpleNamespace(
        getDeviceCount=lambda: gpus,
        getDeviceProperties=lambda index: {
            "name": b"Pretended GPU",
            "major": 9,
            "minor": 0,
            "sharedMemPerBlockOptin": 227 << 10,
        },
    )
    cuda = SimpleNamespace(
        Device=Device,
        Stream=Stream,
        Event=Event,
        get_elapsed_time=elapsed,
        get_current_stream=lambda: Stream.current or callers,
        runtime=runtime,
        memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
        nvrtc=SimpleNamespace(getVersion=lambda: (13, 0)),
    )
    return SimpleNamespace(zeros=zeros, asnumpy=asnumpy, asarray=asarray, cuda=cuda)
