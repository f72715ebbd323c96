"""Arithmetic between sizes: slices, convolutions, concatenations, reshapes.

Each constraint infers whatever one size follows from the others and checks the rest, with the numbers in its message.
A run-time extent passes only where the axis is taken whole (unit stride and dilation, no concatenation).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stagedtensor.dims import DynamicDim
from stagedtensor.specs import Affine, Sliced

from .constraints import Constraint, Plain
from .rows import Dim, Extent, Row, Unknowns, Where


def padding(term: Affine, extent: int, over: int, kernel: int) -> int:
    """Return the cells of padding on the left of an axis of ``extent`` cells (0 for a valid convolution).

    The total is ``max(0, (over - 1) * stride + (kernel - 1) * dilation + 1 - extent)``, its floor half on the left.
    """
    if not term.padded:
        return 0
    return max(0, (over - 1) * term.stride + (kernel - 1) * term.dilation + 1 - extent) // 2


def slice_bounds(term: Sliced, extent: int) -> tuple[int, int]:
    """Return (start, cell count) of a slice on an axis of ``extent`` cells; a negative start counts from the end."""
    start = term.start + extent if term.start < 0 else term.start
    if term.size is not None:
        return start, term.size
    room = extent - start if term.step > 0 else start + 1
    return start, max(0, -(-room // abs(term.step)))


@dataclass(eq=False)
class AffineSize(Plain):
    """``axis = stride * (over - 1) + 1 + (kernel - 1) * dilation``, or ``stride * over`` when padded."""

    axis: Dim
    over: Dim
    kernel: Dim
    term: Affine
    where: Where

    def mentions(self) -> Iterator[Row | Dim]:
        """Yield the three sizes."""
        yield from (self.axis, self.over, self.kernel)

    def advance(self, unknowns: Unknowns) -> Sequence[Constraint] | None:
        """Solve for the one unknown size, or check."""
        axis, over, kernel = (dim.root for dim in (self.axis, self.over, self.kernel))
        if isinstance(axis.extent, DynamicDim) or isinstance(over.extent, DynamicDim):
            self._run_time(unknowns)
            return ()
        if isinstance(kernel.extent, DynamicDim):
            raise self._dynamic(kernel.extent)
        if self.term.padded:
            return self._padded(unknowns, axis.extent, over.extent)
        return self._valid(unknowns, axis.extent, over.extent, kernel.extent)

    def _valid(
        self, unknowns: Unknowns, axis: int | None, over: int | None, kernel: int | None
    ) -> Sequence[Constraint] | None:
        stride, dilation = self.term.stride, self.term.dilation
        if over is not None and kernel is not None:
            expected = stride * (over - 1) + 1 + (kernel - 1) * dilation
            if over < 1 or kernel < 1:
                raise self._inexact(axis, over, kernel, "both iterators must have at least one cell")
            if axis is not None and axis != expected:
                raise self._inexact(axis, over, kernel, f"it must be {expected}")
            unknowns.set_extent(self.axis, expected, None, self.where)
            return ()
        if axis is None:
            return None
        if kernel is not None:
            span, step, free, name = axis - 1 - (kernel - 1) * dilation, stride, self.over, "stride"
        elif over is not None:
            span, step, free, name = axis - 1 - stride * (over - 1), dilation, self.kernel, "dilation"
        else:
            return None
        if span < 0 or span % step:
            raise self._inexact(axis, over, kernel, f"{span} is not a multiple of the {name} {step}, or is negative")
        unknowns.set_extent(free, span // step + 1, None, self.where)
        return ()

    def _padded(self, unknowns: Unknowns, axis: int | None, over: int | None) -> Sequence[Constraint] | None:
        stride = self.term.stride
        if over is not None:
            unknowns.set_extent(self.axis, stride * over, self.over.root.reason, self.where)
            return ()
        if axis is None:
            return None
        if axis % stride:
            raise self.where.error(
                f"a padded axis of size {axis} is not a multiple of the stride {stride}",
                [(str(axis), self.axis.root.reason)],
                "narrow or pad the input first, or use a valid convolution (<+)",
            )
        unknowns.set_extent(self.over, axis // stride, self.axis.root.reason, self.where)
        return ()

    def _run_time(self, unknowns: Unknowns) -> None:
        whole = self.term.stride == 1 and (self.term.padded or self.kernel.root.extent == 1)
        if not whole:
            raise self._dynamic(self.axis.root.extent or self.over.root.extent)
        unknowns.unify(self.axis, self.over, self.where)

    def _dynamic(self, extent: Extent | None) -> Exception:
        return self.where.error(
            f"the run-time extent {extent} cannot be an axis of a convolution",
            [],
            "only a padded convolution of stride 1 keeps a run-time extent; give the axis a fixed size",
        )

    def _inexact(self, axis: int | None, over: int | None, kernel: int | None, problem: str) -> Exception:
        term = self.term
        sizes = [
            (f"{name} = {'?' if size is None else size}", dim.root.reason)
            for name, size, dim in (
                ("axis", axis, self.axis),
                (term.over, over, self.over),
                (term.kernel, kernel, self.kernel),
            )
        ]
        return self.where.error(
            f"the convolution axis does not fit exactly: axis = {term.stride}*({term.over}-1) + 1 + "
            f"({term.kernel}-1)*{term.dilation}; {problem}",
            sizes,
            "narrow the unread rest off the input first, or pad with =+",
        )


@dataclass(eq=False)
class SliceSize(Plain):
    """The cells of ``start + step * name`` on an axis; the name's size follows from the axis when left open."""

    axis: Dim
    name: Dim
    term: Sliced
    where: Where

    def mentions(self) -> Iterator[Row | Dim]:
        """Yield both sizes."""
        yield from (self.axis, self.name)

    def advance(self, unknowns: Unknowns) -> Sequence[Constraint] | None:
        """Infer the number of cells; check that they are inside the axis."""
        extent, term = self.axis.root.extent, self.term
        if term.size is not None:
            unknowns.set_extent(self.name, term.size, None, self.where)
            if term.start >= 0:
                unknowns.require(self.axis, max(term.start, term.start + term.step * (term.size - 1)) + bool(term.size))
        if isinstance(extent, DynamicDim):
            if (term.start, term.size, term.step) != (0, None, 1):
                raise self.where.error(
                    f"the run-time extent {extent} can only be taken whole, not sliced",
                    [],
                    "give the axis a fixed size, or slice before the extent becomes a run-time one",
                )
            unknowns.unify(self.axis, self.name, self.where)
            return ()
        if extent is None:
            return None
        start, count = slice_bounds(term, extent)
        last = start + term.step * (count - 1)
        if count and not (0 <= start < extent and 0 <= last < extent):
            raise self.where.error(
                f"the slice of {count} cells from {start} in steps of {term.step} leaves the axis of size {extent}",
                [(str(extent), self.axis.root.reason)],
                "choose a start, size and step inside the axis",
            )
        unknowns.set_extent(self.name, count, None, self.where)
        return ()


@dataclass(eq=False)
class SumSize(Plain):
    """A concatenated axis: the sum of its parts."""

    axis: Dim
    parts: tuple[Dim, ...]
    where: Where

    def mentions(self) -> Iterator[Row | Dim]:
        """Yield the whole and its parts."""
        yield from (self.axis, *self.parts)

    def advance(self, unknowns: Unknowns) -> Sequence[Constraint] | None:
        """Infer the one unknown of axis and parts, or check the sum."""
        extents = [part.root.extent for part in self.parts]
        total = self.axis.root.extent
        for extent in [*extents, total]:
            if isinstance(extent, DynamicDim):
                raise self.where.error(
                    f"the run-time extent {extent} cannot be part of a concatenation",
                    [],
                    "concatenate along an axis of fixed size",
                )
        known = sum(extent for extent in extents if isinstance(extent, int))
        missing = [part for part in self.parts if part.root.extent is None]
        if not missing:
            if total is not None and total != known:
                raise self._wrong(total, extents)
            unknowns.set_extent(self.axis, known, None, self.where)
            return ()
        if total is None or len(missing) > 1:
            return None
        if not isinstance(total, int) or total < known:
            raise self._wrong(total, extents)
        unknowns.set_extent(missing[0], total - known, None, self.where)
        return ()

    def _wrong(self, total: Extent, extents: Sequence[Extent | None]) -> Exception:
        parts = " + ".join("?" if extent is None else str(extent) for extent in extents)
        return self.where.error(
            f"the parts {parts} do not make up the concatenated axis of size {total}",
            [(str(total), self.axis.root.reason)] + [(str(part), part.root.reason) for part in self.parts],
            "the sizes of the parts must add up to the size of the axis",
        )


@dataclass(eq=False)
class SameProduct(Plain):
    """Two rows with the same number of cells (reshape). One unknown size of either side may be inferred."""

    flat: Row
    row: Row
    where: Where

    def mentions(self) -> Iterator[Row | Dim]:
        """Yield both rows and the axes they have."""
        for row in (self.flat, self.row):
            yield row
            yield from row.root.dims or ()

    def advance(self, unknowns: Unknowns) -> Sequence[Constraint] | None:
        """Infer the one unknown size, or compare; run-time extents must lead both rows alike."""
        flat, row = self.flat.root, self.row.root
        if flat.dims is None or row.dims is None:
            return None
        left, right = list(flat.dims), list(row.dims)
        while left and right and _same(left[0], right[0]):
            left, right = left[1:], right[1:]
        unknown = [dim.root for dim in left + right if dim.root.extent is None]
        run_time = [dim for dim in left + right if isinstance(dim.root.extent, DynamicDim)]
        if run_time:
            raise self.where.error(
                f"the run-time extent {run_time[0]} cannot be split or merged",
                [(str(flat), flat.reason), (str(row), row.reason)],
                "keep axes of run-time extent as they are at the left end of both rows",
            )
        if len(unknown) > 1:
            return None
        sizes = [_product(left), _product(right)]
        if unknown:
            here = any(dim.root is unknown[0] for dim in left)
            total, known = (sizes[1], sizes[0]) if here else (sizes[0], sizes[1])
            if known and total % known == 0:
                unknowns.set_extent(unknown[0], total // known, None, self.where)
                return ()
        elif sizes[0] == sizes[1]:
            return ()
        raise self.where.error(
            f"cannot reshape the {self.where.row} row {row} ({sizes[1]} cells) to {flat} ({sizes[0]} cells)",
            [(str(row), row.reason), (str(flat), flat.reason)],
            "both rows must have the same number of cells; at most one size can be left open",
        )


def _same(left: Dim, right: Dim) -> bool:
    return left.root is right.root or (left.root.extent is not None and left.root.extent == right.root.extent)


def _product(dims: Sequence[Dim]) -> int:
    total = 1
    for dim in dims:
        extent = dim.root.extent
        total *= extent if isinstance(extent, int) else 1
    return total


@dataclass(eq=False)
class CellCount(Plain):
    """A captured row: ``dim`` is the number of its cells."""

    row: Row
    dim: Dim
    where: Where

    def mentions(self) -> Iterator[Row | Dim]:
        """Yield the row, the axes it has, and the size."""
        yield self.row
        yield from (self.dim, *(self.row.root.dims or ()))

    def advance(self, unknowns: Unknowns) -> Sequence[Constraint] | None:
        """Wait for every size of the row."""
        dims = self.row.root.dims
        if dims is None or any(dim.root.extent is None for dim in dims):
            return None
        extents = [dim.root.extent for dim in dims]
        run_time = [extent for extent in extents if isinstance(extent, DynamicDim)]
        if run_time and len(extents) > 1:
            raise self.where.error(
                f"a row with the run-time extent {run_time[0]} and other axes cannot be captured as one size",
                [],
                "capture its axes one by one",
            )
        count: Extent = run_time[0] if run_time else _product(dims)
        unknowns.set_extent(self.dim, count, None, self.where)
        return ()
