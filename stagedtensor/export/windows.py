"""Reads by windows: convolutions and pooling as the StableHLO ops of that name.

In: index expressions ``start + stride * outer + dilation * inner``, where the block sums over ``inner``. Out:
reduce_window or convolution instead of a gather of every cell of every window. What has another form gives None, and
the caller gathers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from stagedtensor.codegen import loop_ir as ir
from stagedtensor.precision import Prec

from .values import Lines, Value, tensor_type

Extents: TypeAlias = Mapping[ir.Symbol, int]
Linear: TypeAlias = tuple[dict[ir.Symbol, int], int]


@dataclass(frozen=True)
class Axis:
    """One axis of a read: ``start + stride * outer + dilation * inner``; a plain axis has no ``inner``."""

    start: int
    outer: ir.Symbol | None
    stride: int = 1
    inner: ir.Symbol | None = None
    dilation: int = 1


def linear(index: ir.Expr) -> Linear | None:
    """Return the factor of each iterator and the constant of a sum of multiples, None for other expressions."""
    match index:
        case ir.Const(value):
            return {}, int(value)
        case ir.Var(symbol):
            return {symbol: 1}, 0
        case ir.Apply("add", (a, b)):
            left, right = linear(a), linear(b)
            if left is None or right is None or left[0].keys() & right[0].keys():
                return None
            return left[0] | right[0], left[1] + right[1]
        case ir.Apply("mul", (a, b)):
            left, right = linear(a), linear(b)
            if left is None or right is None or (left[0] and right[0]):
                return None
            (factors, start), by = (left, right[1]) if left[0] else (right, left[1])
            return {symbol: factor * by for symbol, factor in factors.items()}, start * by
        case _:
            return None


def axes_of(
    indices: Sequence[ir.Expr], sizes: Sequence[int], extents: Extents, reduced: Collection[ir.Symbol]
) -> tuple[Axis, ...] | None:
    """Read the axes of a load that has at least one window and stays inside its buffer, None if it is no such load."""
    found = []
    seen: set[ir.Symbol] = set()
    for index, size in zip(indices, sizes, strict=True):
        form = linear(index)
        if form is None:
            return None
        factors, start = form
        last = start + sum(factor * (extents.get(symbol, 0) - 1) for symbol, factor in factors.items())
        fits = 0 <= start <= last < size and all(
            factor > 0 and extents.get(symbol) for symbol, factor in factors.items()
        )
        if not fits or seen & factors.keys() or len(factors) > 2:
            return None
        seen |= factors.keys()
        inner = [symbol for symbol in factors if symbol in reduced] if len(factors) == 2 else []
        if len(factors) == 2 and len(inner) != 1:
            return None
        outer = next((symbol for symbol in factors if symbol not in inner), None)
        within = inner[0] if inner else None
        stride = factors[outer] if outer is not None else 1
        found.append(Axis(start, outer, stride, within, factors[within] if within is not None else 1))
    return tuple(found) if any(axis.inner is not None for axis in found) else None


def cut(lines: Lines, held: Value, axes: Sequence[Axis], extents: Extents) -> Value:
    """Slice off what the windows leave out, so that they cover the rest exactly; plain axes take their steps."""
    bounds = []
    for axis in axes:
        reach = axis.stride * (_extent(extents, axis.outer) - 1) + axis.dilation * (_extent(extents, axis.inner) - 1)
        bounds.append((axis.start, axis.start + reach + 1, 1 if axis.inner is not None else axis.stride))
    if all(bound == (0, size, 1) for bound, size in zip(bounds, held.dims, strict=True)):
        return held
    text = ", ".join(f"{first}:{last}:{step}" for first, last, step in bounds)
    dims = [-(-(last - first) // step) for first, last, step in bounds]
    return lines.changed(f"stablehlo.slice {{0}} [{text}]", held, dims, held.prec)


def _extent(extents: Extents, symbol: ir.Symbol | None) -> int:
    return 1 if symbol is None else extents[symbol]


def pooled(
    lines: Lines, x: Value, axes: Sequence[Axis], extents: Extents, reducer: str, neutral: Value
) -> tuple[Value, tuple[ir.Symbol, ...]]:
    """Combine the cells of each window; returns the result and the iterator of each of its axes."""
    x = cut(lines, x, axes, extents)
    windows = [_extent(extents, axis.inner) for axis in axes]
    strides = [axis.stride if axis.inner is not None else 1 for axis in axes]
    dims = tuple(_extent(extents, axis.outer) for axis in axes)
    cell = tensor_type((), x.prec)
    text = (
        f'"stablehlo.reduce_window"({{0}}, {{1}}) <{{window_dimensions = array<i64: {_listed(windows)}>, '
        f"window_strides = array<i64: {_listed(strides)}>, "
        f"window_dilations = array<i64: {_listed([axis.dilation for axis in axes])}>}}> ({{ ^bb0(%a: {cell}, %b: {cell}): "
        f"%r = stablehlo.{reducer} %a, %b : {cell} stablehlo.return %r : {cell} }}) : ({x.type}, {neutral.type}) -> "
        f"{tensor_type(dims, x.prec)}"
    )
    result = lines.add(text, (x, neutral), dims, x.prec)
    outer = tuple(axis.outer for axis in axes if axis.outer is not None)
    return lines.reshape(result, [extents[symbol] for symbol in outer]), outer


def convolved(
    lines: Lines,
    x: Value,
    axes: Sequence[Axis],
    kernel: Value,
    kernel_axes: Sequence[ir.Symbol],
    extents: Extents,
    reduced: Collection[ir.Symbol],
    prec: Prec,
) -> tuple[Value, tuple[ir.Symbol, ...]] | None:
    """Sum the products of each window of ``x`` with a kernel, to type ``prec``; None where it is no convolution.

    Features are what both have and the sum runs over; other axes of ``x`` are its batch, those of the kernel the new
    features.
    """
    windows = [axis for axis in axes if axis.inner is not None]
    plain = [axis.outer for axis in axes if axis.inner is None and axis.outer is not None]
    inner = [axis.inner for axis in windows if axis.inner is not None]
    spatial = [axis.outer for axis in windows if axis.outer is not None]
    features = [symbol for symbol in plain if symbol in reduced]
    batch = [symbol for symbol in plain if symbol not in reduced]
    new = [symbol for symbol in kernel_axes if symbol not in reduced]
    shared = {*inner, *features}
    if (
        set(reduced) != shared
        or {symbol for symbol in kernel_axes if symbol in reduced} != shared
        or set(kernel_axes) & {*spatial, *batch}
        or any(symbol in reduced for symbol in spatial)
    ):
        return None
    x = cut(lines, x, axes, extents)
    sizes = dict(
        zip(windows, (size for axis, size in zip(axes, x.dims, strict=True) if axis.inner is not None), strict=True)
    )
    held = [axis for axis in axes if axis.outer is not None]
    x = lines.reshape(
        x, [sizes[axis] if axis in sizes else extents[axis.outer] for axis in held if axis.outer is not None]
    )
    outer = [axis.outer for axis in held]
    order = [*batch, *spatial, *features]
    x = lines.broadcast(
        x,
        [order.index(symbol) for symbol in outer if symbol is not None],
        [sizes[held[outer.index(symbol)]] if symbol in spatial else extents[symbol] for symbol in order],
    )
    count = len(windows)
    x = lines.reshape(
        x, (_product(batch, extents), *x.dims[len(batch) : len(batch) + count], _product(features, extents))
    )
    wanted = [*inner, *features, *new]
    kernel = lines.broadcast(
        kernel, [wanted.index(symbol) for symbol in kernel_axes], [extents[symbol] for symbol in wanted]
    )
    kernel = lines.reshape(
        kernel, (*(extents[symbol] for symbol in inner), _product(features, extents), _product(new, extents))
    )
    dims = (x.dims[0], *(extents[symbol] for symbol in spatial), kernel.dims[-1])
    places = ", ".join(map(str, range(count)))
    text = (
        f"stablehlo.convolution({{0}}, {{1}}) dim_numbers = [b, {places}, f]x[{places}, i, o]->[b, {places}, f], "
        f"window = {{stride = {[axis.stride for axis in windows]}, pad = {[[0, 0]] * count}, lhs_dilate = {[1] * count}, "
        f"rhs_dilate = {[axis.dilation for axis in windows]}}} {{batch_group_count = 1 : i64, feature_group_count = 1 : i64}}"
        f" : ({x.type}, {kernel.type}) -> {tensor_type(dims, prec)}"
    )
    result = lines.add(text, (x, kernel), dims, prec)
    symbols = (*batch, *spatial, *new)
    return lines.reshape(result, [extents[symbol] for symbol in symbols]), symbols


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _product(symbols: Sequence[ir.Symbol], extents: Extents) -> int:
    total = 1
    for symbol in symbols:
        total *= extents[symbol]
    return total
