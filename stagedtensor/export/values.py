"""SSA values of a StableHLO function being built, and the text of its ops.

In: ops with operands and result types. Out: numbered lines; an op that was emitted before is not emitted again, one
whose result nothing uses is left out. Types follow formats: bool is i1, the 8-bit floats are f8E5M2 and f8E4M3FN.
Nothing here knows statements or nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stagedtensor.conversion import convert
from stagedtensor.errors import ExportError
from stagedtensor.precision import Prec, bool_

Array = np.ndarray[Any, Any]

_ELEMENTS = {
    "f64": "f64", "f32": "f32", "f16": "f16", "bf16": "bf16", "f8e5m2": "f8E5M2", "f8e4m3": "f8E4M3FN",
    "i64": "i64", "i32": "i32", "i16": "i16", "i8": "i8", "u64": "ui64", "u32": "ui32", "u16": "ui16", "u8": "ui8",
    "bool": "i1",
}  # fmt: skip


def element(prec: Prec) -> str:
    """Return the element type of a format; raises ExportError for counter state."""
    if prec.name not in _ELEMENTS:
        raise ExportError(f"format {prec} has no StableHLO element type; counter state cannot be exported")
    return _ELEMENTS[prec.name]


def tensor_type(dims: Sequence[int], prec: Prec) -> str:
    """Return a ranked tensor type: ``tensor<2x3xf32>``, ``tensor<f32>`` for one cell."""
    return f"tensor<{''.join(f'{dim}x' for dim in dims)}{element(prec)}>"


def quoted(text: str) -> str:
    """Return a string literal of MLIR, whose only escapes for bytes are two hexadecimal digits."""
    plain = (chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\{byte:02X}" for byte in text.encode())
    return f'"{"".join(plain)}"'


@dataclass(frozen=True, eq=False)
class Value:
    """An SSA value: a number of its own (an argument has a name), its dims and format."""

    number: int
    dims: tuple[int, ...]
    prec: Prec
    argument: str = ""

    @property
    def type(self) -> str:
        """The tensor type."""
        return tensor_type(self.dims, self.prec)


@dataclass(frozen=True, eq=False)
class _Line:
    result: Value
    text: str
    operands: tuple[Value, ...]
    location: str


class Lines:
    """The ops of one function, in order."""

    def __init__(self) -> None:
        self._lines: list[_Line] = []
        self._known: dict[tuple[Any, ...], Value] = {}
        self._arguments = 0

    def argument(self, dims: tuple[int, ...], prec: Prec) -> Value:
        """Add an argument of the function."""
        name = f"%arg{self._arguments}"
        self._arguments += 1
        return Value(-self._arguments, dims, prec, name)

    def add(self, text: str, operands: Sequence[Value], dims: Sequence[int], prec: Prec, location: str = "") -> Value:
        """Add an op. ``text`` has ``{0}``, ``{1}`` where its operands stand; returns its result."""
        key = (text, tuple(operand.number for operand in operands), tuple(dims), prec, location)
        if key not in self._known:
            result = Value(len(self._lines), tuple(dims), prec)
            self._lines.append(_Line(result, text, tuple(operands), location))
            self._known[key] = result
        return self._known[key]

    def text(self, results: Sequence[Value]) -> tuple[list[str], list[str]]:
        """Return the lines that ``results`` need, numbered from %0, and the names of the results."""
        needed = {value.number for value in results}
        kept = []
        for line in reversed(self._lines):
            if line.result.number in needed:
                kept.append(line)
                needed.update(operand.number for operand in line.operands)
        names: dict[int, str] = {}
        printed = []
        for at, line in enumerate(reversed(kept)):
            names[line.result.number] = f"%{at}"
            operands = [operand.argument or names[operand.number] for operand in line.operands]
            where = f" loc({quoted(line.location)})" if line.location else ""
            printed.append(f"%{at} = {_filled(line.text, operands)}{where}")
        return printed, [value.argument or names[value.number] for value in results]

    # -- ops of any use ---------------------------------------------------------------------------------------------
    def constant(self, data: Array, prec: Prec) -> Value:
        """Embed an array (values of ``prec`` already) with its exact bits."""
        text = f"stablehlo.constant dense<{_literal(data, prec)}> : {tensor_type(data.shape, prec)}"
        return self.add(text, (), data.shape, prec)

    def number(self, value: float | int, prec: Prec, dims: Sequence[int] = ()) -> Value:
        """Embed one number, repeated over ``dims``."""
        given = np.asarray(value, np.float64) if isinstance(value, float) else np.asarray(value)
        cell = given.astype(np.bool_) if prec is bool_ else convert(given, prec)
        return self.constant(np.broadcast_to(cell, tuple(dims)), prec)

    def unary(self, op: str, x: Value) -> Value:
        """Add an op whose one operand and result have one type."""
        return self.add(f"stablehlo.{op} {{0}} : {x.type}", (x,), x.dims, x.prec)

    def binary(self, op: str, x: Value, y: Value) -> Value:
        """Add an op whose two operands and result have one type."""
        return self.add(f"stablehlo.{op} {{0}}, {{1}} : {x.type}", (x, y), x.dims, x.prec)

    def compare(self, direction: str, x: Value, y: Value) -> Value:
        """Compare; the result is i1."""
        result = tensor_type(x.dims, bool_)
        return self.add(
            f"stablehlo.compare {direction}, {{0}}, {{1}} : ({x.type}, {y.type}) -> {result}", (x, y), x.dims, bool_
        )

    def select(self, condition: Value, x: Value, y: Value) -> Value:
        """Select by an i1 tensor of the same dims."""
        return self.add(
            f"stablehlo.select {{0}}, {{1}}, {{2}} : {condition.type}, {x.type}", (condition, x, y), x.dims, x.prec
        )

    def convert(self, x: Value, prec: Prec, location: str = "") -> Value:
        """Convert; nothing where the type is the same already."""
        if x.prec is prec:
            return x
        return self.changed("stablehlo.convert {0}", x, x.dims, prec, location)

    def reshape(self, x: Value, dims: Sequence[int]) -> Value:
        """Give the cells other dims, in the same order."""
        return x if x.dims == tuple(dims) else self.changed("stablehlo.reshape {0}", x, dims, x.prec)

    def copied(self, x: Value, dims: Sequence[int]) -> Value:
        """Give the cells other dims in a value that nothing else uses.

        The reference interpreter scatters into the operand itself, which others must not read afterwards.
        """
        if x.dims == tuple(dims):
            x = self.reshape(x, (1, *dims))
        result = Value(len(self._lines), tuple(dims), x.prec)
        text = f"stablehlo.reshape {{0}} : ({x.type}) -> {result.type}"
        self._lines.append(_Line(result, text, (x,), ""))
        return result

    def changed(self, text: str, x: Value, dims: Sequence[int], prec: Prec, location: str = "") -> Value:
        """Add a one-operand op whose result has another type; ``text`` ends before the types."""
        return self.add(f"{text} : ({x.type}) -> {tensor_type(dims, prec)}", (x,), dims, prec, location)

    def broadcast(self, x: Value, axes: Sequence[int], dims: Sequence[int]) -> Value:
        """Repeat over ``dims``; axis i of ``x`` becomes axis ``axes[i]``, in rising or any other order."""
        if x.dims == tuple(dims) and list(axes) == list(range(len(dims))):
            return x
        if len(axes) == len(dims):
            order = sorted(range(len(axes)), key=lambda at: axes[at])
            return self.changed(f"stablehlo.transpose {{0}}, dims = {order}", x, dims, x.prec)
        return self.changed(f"stablehlo.broadcast_in_dim {{0}}, dims = {list(axes)}", x, dims, x.prec)


def _filled(text: str, operands: Sequence[str]) -> str:
    for at, name in enumerate(operands):
        text = text.replace(f"{{{at}}}", name)
    return text


def _literal(data: Array, prec: Prec) -> str:
    """The cells of a constant: a decimal for integers, hexadecimal bits for floats, one value where all are equal."""
    if prec is bool_:
        if data.size and (data.flat[0] == data).all():
            return "true" if data.flat[0] else "false"
        return _nested(data)
    cells = np.ascontiguousarray(data, prec.numpy_dtype)
    raw = cells.tobytes()
    width = prec.bytes
    if data.size and raw == raw[:width] * data.size:
        if not prec.is_float:
            return str(int(cells.flat[0]))
        return f"0x{int.from_bytes(raw[:width], 'little'):0{2 * width}X}"
    return f'"0x{raw.hex().upper()}"' if data.size else ""


def _nested(data: Array) -> str:
    if data.ndim == 0:
        return "true" if data else "false"
    return f"[{', '.join(map(_nested, data))}]"
