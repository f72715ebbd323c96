"""Expressions of the loop IR as NumPy functions of a frame: the values of symbols and the cells of buffers.

In: an expression. Out: a function of a :class:`Frame` and a mask, which works alike on scalars and on whole grids:
symbols may be bound to arrays that broadcast against each other. Where the mask is False, loads may be out of bounds
and values are arbitrary; elsewhere a load or store out of bounds is an InternalError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from stagedtensor.codegen.interpret_ops import Array, cast, constant, fma, operation
from stagedtensor.codegen.loop_ir import Apply, Buffer, Cast, Const, Expr, Fma, Load, Symbol, Var, walk
from stagedtensor.errors import InternalError

Mask: TypeAlias = Array | None


class Frame:
    """What code can see while it runs: values of symbols, and buffers as flat arrays of cells in memory order."""

    __slots__ = ("memory", "values")

    def __init__(self, values: dict[Symbol, Array], memory: dict[Buffer, Array]) -> None:
        self.values = values
        self.memory = memory

    def cells(self, buffer: Buffer) -> Array:
        """Return the flat array of a buffer."""
        try:
            return self.memory[buffer]
        except KeyError:
            raise InternalError(f"interpreter: {buffer} is not bound to memory") from None

    def inner(self) -> Frame:
        """Return a frame that sees the same memory and its own copy of the values."""
        return Frame(dict(self.values), self.memory)


Evaluate: TypeAlias = Callable[[Frame, Mask], Array]


class Compiler:
    """Turns expressions into functions, each expression object once."""

    def __init__(self) -> None:
        self._done: dict[int, tuple[Expr, Evaluate]] = {}

    def __call__(self, expr: Expr) -> Evaluate:
        """Return the function that evaluates ``expr``."""
        found = self._done.get(id(expr))
        if found is None:
            # The expression is kept with its function: its id must not be given to another object.
            found = self._done[id(expr)] = (expr, self._compile(expr))
        return found[1]

    def _compile(self, expr: Expr) -> Evaluate:
        match expr:
            case Const():
                value = constant(expr)
                return lambda frame, mask: value
            case Var():
                return _variable(expr.symbol)
            case Load():
                return _load(expr.buffer, [self(part) for part in expr.indices])
            case Cast():
                return _cast(expr, self(expr.arg))
            case Fma():
                a, b, c, type_ = self(expr.a), self(expr.b), self(expr.c), expr.type
                return lambda frame, mask: fma(a(frame, mask), b(frame, mask), c(frame, mask), type_)
            case Apply():
                return self._apply(expr)

    def _apply(self, expr: Apply) -> Evaluate:
        function = operation(expr.op, expr.type)
        parts = [self(part) for part in expr.args]
        if expr.op == "where":
            loads = any(isinstance(part, Load) for branch in expr.args[1:] for part in walk(branch))
            return _where(function, parts, loads)
        if len(parts) == 1:
            (only,) = parts
            return lambda frame, mask: function(only(frame, mask))
        if len(parts) == 2:
            left, right = parts
            return lambda frame, mask: function(left(frame, mask), right(frame, mask))
        return lambda frame, mask: function(*[part(frame, mask) for part in parts])


def _variable(symbol: Symbol) -> Evaluate:
    def variable(frame: Frame, mask: Mask) -> Array:
        try:
            return frame.values[symbol]
        except KeyError:
            raise InternalError(f"interpreter: {symbol} has no value here") from None

    return variable


def _cast(expr: Cast, arg: Evaluate) -> Evaluate:
    source, target, saturate, flush = expr.arg.type, expr.type, expr.saturate, expr.flush
    return lambda frame, mask: cast(arg(frame, mask), source, target, saturate=saturate, flush=flush)


def _where(function: Callable[..., Array], parts: Sequence[Evaluate], loads: bool) -> Evaluate:
    condition, then, orelse = parts

    def where(frame: Frame, mask: Mask) -> Array:
        chosen = np.asarray(condition(frame, mask))
        if chosen.ndim == 0:
            return (then if chosen else orelse)(frame, mask)
        if not loads:
            return function(chosen, then(frame, mask), orelse(frame, mask))
        # A branch may load out of bounds where it is not taken.
        taken = chosen != 0
        left = then(frame, taken if mask is None else mask & taken)
        right = orelse(frame, ~taken if mask is None else mask & ~taken)
        return function(chosen, left, right)

    return where


def _load(buffer: Buffer, indices: Sequence[Evaluate]) -> Evaluate:
    locate = locator(buffer, "load from")
    empty = buffer.size == 0

    def load(frame: Frame, mask: Mask) -> Array:
        where = [part(frame, mask) for part in indices]
        offset = locate(where, mask)
        cells = frame.cells(buffer)
        if empty:  # everything is masked, or locate would have raised
            return np.zeros(np.shape(offset), cells.dtype)
        return np.asarray(cells[offset])

    return load


def locator(buffer: Buffer, verb: str) -> Callable[[Sequence[Array], Mask], Array]:
    """Return the function from logical indices and a mask to cell numbers in memory.

    Out of bounds where the mask holds: InternalError; elsewhere some cell of the buffer. ``verb`` is for the message.
    """
    extents = buffer.layout.addressable(buffer.shape)
    layout = buffer.layout
    shape = layout.physical_shape(buffer.shape)
    strides = [int(np.prod(shape[axis + 1 :], dtype=np.int64)) for axis in range(len(shape))]

    def locate(indices: Sequence[Array], mask: Mask) -> Array:
        inside = [
            _bounded(index, extent, mask, buffer, axis, verb)
            for axis, (index, extent) in enumerate(zip(indices, extents, strict=True))
        ]
        axes = layout.memory_indices(tuple(inside), _quotient) if layout.steps else inside
        offset = np.asarray(0, np.int64)
        for index, stride in zip(axes, strides, strict=True):
            offset = offset + (index if stride == 1 else index * stride)
        return offset

    return locate


def _quotient(index: Array, factor: int) -> tuple[Array, Array]:
    return index // factor, index % factor


def _bounded(index: Array, extent: int, mask: Mask, buffer: Buffer, axis: int, verb: str) -> Array:
    index = np.asarray(index)
    if index.size == 0:
        return index
    if index.ndim == 0:
        low = high = int(index)
    else:
        low, high = int(index.min()), int(index.max())
    if low >= 0 and high < extent:
        return index
    outside = (index < 0) | (index >= extent)
    wrong = outside if mask is None else outside & mask
    if wrong.any():
        culprit = int(np.broadcast_to(index, wrong.shape)[wrong].reshape(-1)[0])
        raise InternalError(
            f"interpreter: {verb} {buffer} of shape {buffer.shape}: index {culprit} on axis {axis} is outside 0..{extent - 1}"
        )
    return np.asarray(np.clip(index, 0, max(extent - 1, 0)))
