"""The context's store: which nodes have buffers or pending host values, and the conversions into them.

Values set before a routine settles a node are kept exactly as given (``pending``) and converted when the node's
precision is known. Refusals raise ContextError before anything is written.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from stagedtensor.conversion import all_in_range, convert, ingest
from stagedtensor.dims import Axis, Shape
from stagedtensor.encoded import Encoded
from stagedtensor.errors import ContextError, PrecisionError
from stagedtensor.node import Node, Role
from stagedtensor.precision import Prec, bool_, f32, i32, precision, u8
from stagedtensor.runtime.device import Array, Device, MemoryLine
from stagedtensor.runtime.reports import too_little_memory
from stagedtensor.source import user_source

_F32 = np.dtype(np.float32)
_F32_MAX, _I32_LIMIT = f32.max_finite, 1 << 31
ZERO_AT_ALLOCATION = frozenset((Role.CELL, Role.STATE))
_SET_BY_THE_HOST = frozenset((Role.CELL, Role.STATE, Role.HOST_SCALAR, Role.PLACEHOLDER))
BACKED_BY_DATA = frozenset((Role.CONSTANT, Role.LITERAL, Role.HOST_SCALAR, Role.RANGE))


@dataclass
class Stored:
    """A node's device buffer.

    ``cell`` is a 0-d view of a scalar that the host sees and may set, for fast reads and writes; ``may_be_set``: it was found
    that the host may set the node.
    """

    buffer: Any
    shape: Shape
    prec: Prec
    cell: Array | None = None
    may_be_set: bool = False

    def takes(self, value: object) -> bool:
        """Tell whether NumPy stores ``value``, a Python number, in a cell here as the rules of conversion do."""
        if type(value) is float:
            return self.prec is f32 and -_F32_MAX <= value <= _F32_MAX
        return type(value) is int and self.prec is i32 and -_I32_LIMIT <= value < _I32_LIMIT

    @cached_property
    def dims(self) -> tuple[int, ...]:
        """Allocated sizes in memory order."""
        return self.shape.dims

    @cached_property
    def dynamic(self) -> bool:
        """Whether any extent is dynamic."""
        return any(axis.dynamic is not None for _, _, axis in self.shape.axes())


def describe(node: Node) -> str:
    """Name a node with its source, for messages."""
    return f"{node.role.value} {node.label!r} ({node.source})"


class Store:
    """Buffers and pending values of one context."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.stored: dict[Node, Stored] = {}
        self.pending: dict[Node, Array] = {}
        self.initialized: set[Node] = set()
        self.extents: dict[str, int] = {}
        """The dynamic extents of the data set last, by name."""
        self.rows: dict[Node, dict[str, int]] = {}
        """The dynamic extents that a node's present values have."""
        self.arenas: dict[str, int] = {}
        """Bytes of temporaries of each routine, by its name."""
        self.uploads = 0
        self.uploaded_bytes = 0
        self.downloads = 0
        self.downloaded_bytes = 0

    def is_initialized(self, node: Node) -> bool:
        """Whether the node has values to read."""
        return node in self.initialized or node in self.pending or node.role in BACKED_BY_DATA | ZERO_AT_ALLOCATION

    # -- allocation -----------------------------------------------------------------------------------------------
    def ensure(self, node: Node, shape: Shape, prec: Prec) -> Stored:
        """Return the node's buffer, allocating it and moving pending or initial values in."""
        held = self.stored.get(node)
        if held is not None:
            return held
        if node.encoded is not None:
            return self._encoded(node, node.encoded)
        # narrow first: a conversion that fails must leave the store as it was
        cells = self._initial(node, shape, prec)
        buffer = self._allocate(node, shape.dims, prec)
        flat = self.device.view(buffer) if shape.dims == () and node.role in _SET_BY_THE_HOST else None
        held = Stored(buffer, shape, prec, flat.reshape(()) if isinstance(flat, np.ndarray) else None)
        self.stored[node] = held
        if cells is not None:
            if held.dynamic and node not in self.rows:
                self.bind_extents(node, cells, shape)
            self._upload(held, self.padded(cells, held))
            self.initialized.add(node)
        elif node.role in ZERO_AT_ALLOCATION:
            self.initialized.add(node)
        self.pending.pop(node, None)
        return held

    def _initial(self, node: Node, shape: Shape, prec: Prec) -> Array | None:
        initial = self.pending.get(node)
        if initial is None and node.role in BACKED_BY_DATA:
            initial = node.data if node.role is not Role.RANGE else np.arange(shape.size)
        return None if initial is None else self.converted(node, initial, prec, shape)

    def preview(self, node: Node, shape: Shape, prec: Prec) -> Array:
        """Return what a node without a buffer would hold at this shape and precision; allocates nothing here."""
        cells = self._initial(node, shape, prec)
        return np.zeros(shape.dims, prec.numpy_dtype) if cells is None else cells.copy()

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Undo every allocation of the block where it raises, so that no buffer outlives a compile that failed."""
        before = (dict(self.stored), dict(self.pending), set(self.initialized))
        try:
            yield
        except BaseException:
            self.stored, self.pending, self.initialized = before
            raise

    def _allocate(self, node: Node, dims: tuple[int, ...], prec: Prec) -> Any:
        cells = math.prod(dims)
        try:
            return self.device.allocate(prec, cells)
        except MemoryError as error:
            raise self.shortage(
                f"{describe(node)} of shape {list(dims)} in {prec}", cells * prec.bytes, error
            ) from None

    def shortage(self, what: str, nbytes: int, error: MemoryError, parts: Iterable[MemoryLine] = ()) -> ContextError:
        """Return the error for ``what``, which there is no memory for: its largest ``parts`` and what is held."""
        arenas = [MemoryLine(f"temporaries of routine {name!r}", "", "", size) for name, size in self.arenas.items()]
        return too_little_memory(self.device.name, what, nbytes, error, parts, [*self.lines(), *arenas])

    def lines(self) -> tuple[MemoryLine, ...]:
        """Describe every buffer."""
        return tuple(
            MemoryLine(node.label, str(held.shape), str(held.prec), held.shape.size * held.prec.bytes)
            for node, held in {id(held): (node, held) for node, held in self.stored.items()}.values()
        )

    def _encoded(self, node: Node, value: Encoded) -> Stored:
        """Packed bytes as they are; kernels decode what they read."""
        shared = next((held for other, held in self.stored.items() if other.encoded is value), None)
        if shared is not None:  # another node reads the same weight at another precision
            self.stored[node] = shared
            return shared
        cells = value.memory
        held = Stored(self._allocate(node, cells.shape, u8), Shape(output=(Axis(cells.size),)), u8)
        self.stored[node] = held
        self._upload(held, cells)
        self.initialized.add(node)
        return held

    def _upload(self, held: Stored, cells: Array) -> None:
        self.device.upload(held.buffer, cells.reshape(-1))
        self.uploads += 1
        self.uploaded_bytes += cells.nbytes

    @staticmethod
    def padded(cells: Array, held: Stored) -> Array:
        """Extend leading cells of a dynamic extent to the allocated size."""
        dims = held.dims
        if cells.shape == dims:
            return cells
        full = np.zeros(dims, cells.dtype)
        full[tuple(slice(0, size) for size in cells.shape)] = cells
        return full

    # -- conversion -----------------------------------------------------------------------------------------------
    def check_kind(self, node: Node, value: Any, prec: Prec) -> Array:
        """Return ``value`` as an array, refusing what can never be stored at ``prec``."""
        try:
            data = ingest(value).array
        except PrecisionError as error:
            raise ContextError(f"set_values: {describe(node)} cannot take these values: {error}") from None
        own = precision(data.dtype)
        if own.is_float and not prec.is_float and prec is not bool_:
            raise ContextError(
                f"set_values: {describe(node)} holds {prec}; float values ({own}) do not go into an integer node\n"
                f"  {user_source().quoted()}\n  convert them first, e.g. values.astype(np.{prec.numpy_dtype})"
            )
        if not own.is_float and not prec.is_float and prec is not bool_ and not all_in_range(data, prec):
            raise ContextError(
                f"set_values: {describe(node)} holds {prec}, but the values reach from {data.min()} to {data.max()} "
                f"(allowed {prec.min_finite} to {prec.max_finite})\n  {user_source().quoted()}"
            )
        return data

    def converted(self, node: Node, value: Array, prec: Prec, shape: Shape) -> Array:
        """Convert values once to ``prec`` by the rules of the conversion page."""
        self.check_shape(node, value, shape)
        return convert(value, prec, saturate=bool(node.saturate))

    def check_shape(self, node: Node, value: Array, shape: Shape) -> None:
        """Refuse a wrong shape; leading extents below a dynamic maximum are right."""
        axes = [axis for _, _, axis in shape.axes()]
        fits = value.ndim == len(axes) and all(
            given == axis.size or (axis.dynamic is not None and 1 <= given <= axis.size)
            for given, axis in zip(value.shape, axes, strict=False)
        )
        if not fits:
            ranges = {axis.dynamic.name: axis.size for axis in axes if axis.dynamic is not None}
            advice = "".join(f"\n  {name} may be 1 to {size} in a run" for name, size in ranges.items())
            raise ContextError(
                f"set_values: {describe(node)} has shape {shape} (array shape {shape.dims}), got an array of shape "
                f"{value.shape}\n  {user_source().quoted()}{advice}"
            )

    def bind_extents(self, node: Node, value: Array, shape: Shape) -> None:
        """Remember the current extents of dynamic axes from an array that was set."""
        axes = zip(value.shape, shape.axes(), strict=True)
        given = {axis.dynamic.name: int(size) for size, (_, _, axis) in axes if axis.dynamic is not None}
        if given:
            self.rows[node] = given
            self.extents.update(given)

    def require_extents(self, nodes: Iterable[Node], extents: Mapping[str, int]) -> None:
        """Refuse a run over ``extents`` whose inputs hold another number of rows."""
        for node in nodes:
            for name, given in self.rows.get(node, {}).items():
                if extents.get(name, given) != given:
                    raise ContextError(
                        f"dynamic extent {name!r} is {extents[name]} in this run, but {describe(node)} holds {given} rows\n"
                        f"  {user_source().quoted()}\n  set the inputs of one run to one extent, or compute it again"
                    )

    def note_extents(self, nodes: Iterable[Node], extents: Mapping[str, int]) -> None:
        """Remember the extents that a run computed ``nodes`` for."""
        for node in nodes:
            held = self.stored[node]
            if held.dynamic:
                names = [axis.dynamic.name for _, _, axis in held.shape.axes() if axis.dynamic is not None]
                self.rows[node] = {name: extents[name] for name in names if name in extents}

    # -- access ---------------------------------------------------------------------------------------------------
    def write(self, node: Node, value: Any) -> None:
        """Convert and copy host values into the node's buffer."""
        held = self.stored[node]
        if (
            isinstance(value, np.ndarray)
            and value.dtype == held.prec.numpy_dtype
            and value.shape == held.dims
            and not held.dynamic
        ):
            # already what the buffer holds: one copy
            self._upload(held, np.ascontiguousarray(value))
            self.initialized.add(node)
            return
        if (
            type(value) is np.ndarray
            and held.prec.is_narrow
            and value.dtype == _F32
            and value.shape == held.dims
            and not held.dynamic
            and value.flags.c_contiguous
            and self.device.narrow(held.buffer, value, held.prec, saturate=bool(node.saturate))
        ):
            # rounded where it is copied
            self.uploads += 1
            self.uploaded_bytes += value.size * held.prec.bytes
            self.initialized.add(node)
            return
        if not held.dynamic and self.device.take(held.buffer, value, held.dims):
            self.initialized.add(node)
            return
        data = self.check_kind(node, value, held.prec)
        cells = self.converted(node, data, held.prec, held.shape)
        self._upload(held, self.padded(cells, held))
        self.bind_extents(node, cells, held.shape)
        self.initialized.add(node)

    def read(self, node: Node) -> Array:
        """Return a fresh host array of the node's values (the current extent of dynamic axes)."""
        held = self.stored[node]
        cells = self.device.download(held.buffer).reshape(held.dims)
        self.downloads += 1
        self.downloaded_bytes += cells.nbytes
        extents = self.rows.get(node, self.extents)
        current = tuple(
            slice(0, extents.get(axis.dynamic.name, axis.size)) if axis.dynamic else slice(None)
            for _, _, axis in held.shape.axes()
        )
        return np.array(cells[current], order="C", copy=True)

    def clear(self) -> None:
        """Drop every buffer."""
        self.stored.clear()
        self.pending.clear()
        self.rows.clear()
        self.initialized.clear()
        self.arenas.clear()
