"""The shape solver on specs: einsum, slices, convolutions, concatenations, gathers and reshapes."""

from __future__ import annotations

import pytest

from stagedtensor.dims import CapturedDim, DeclaredAxis, DeclaredRow, DeclaredShape
from stagedtensor.errors import SpecError
from stagedtensor.node import Node
from stagedtensor.shapes import solve_shapes
from stagedtensor.specs import (
    Affine,
    Anonymous,
    Concat,
    Gathered,
    Name,
    Position,
    RowSpec,
    ShapeSpec,
    Sliced,
    StaticIndex,
)
from tests.oracles.graphs import data, einsum, op, out, param

from .solving import message, shape

pytestmark = pytest.mark.usefixtures("session")


def test_names_bind_and_rows_bind_exactly() -> None:
    a, b = data("a", (), (), [2, 3]), data("b", (), (), [3, 5])
    assert shape(op("einsum", [a, b], einsum([out("i", "j"), out("j", "k")], out("i", "k")), reduction="add")) == "2,5"
    a, b = data("a", (), (), [2, 3]), data("b", (), (), [3, 5])
    bad = op("einsum", [a, b], einsum([out("i", "j"), out("k", "j")], out("i", "k"), "ij;kj=>ik"), at=4)
    assert "sizes 3 and 5 do not fit at index 'j' in the output row" in message(bad)
    mixed = op("einsum", [data("x", [2]), data("y", [1])], einsum([ShapeSpec(RowSpec(variable="v"))] * 2, out()), at=5)
    assert "sizes" in message(mixed)


def test_wrong_number_of_axes_shows_spec_and_row() -> None:
    bad = op("einsum", [data("a", (), (), [2, 3], at=1)], einsum([out("i")], out("i"), "i=>i"), at=2)
    assert message(bad) == (
        "einsum: the output row of 'a' has 2 axes where the spec 'i=>i' has 1\n"
        "  at model.py:2\n"
        "  (2, 3): output row declared for 'a', at model.py:1\n"
        "  hint: name every axis of the row, or let a row variable (...) stand for the rest"
    )


def test_output_index_without_a_size_is_a_spec_error() -> None:
    bad = op("einsum", [data("a", (), (), [2])], einsum([out("i")], out("i", "q"), "i=>iq"), at=2)
    assert "output index 'q' of 'i=>iq' has no size" in message(bad, SpecError)
    good = op("einsum", [data("a", (), (), [2])], einsum([out("i")], out("i", "q")), sizes={"q": 4})
    assert shape(good) == "2,4"


def test_parameters_infer_through_specs() -> None:
    w = param("w", [None, 3], [None])
    op(
        "einsum",
        [w, data("x", [8], (), [5, 3])],
        einsum([ShapeSpec(input=RowSpec((Name("i"), Name("j"))), output=RowSpec((Name("o"),))),
                ShapeSpec(batch=RowSpec((Name("b"),)), output=RowSpec((Name("i"), Name("j"))))],
               ShapeSpec(batch=RowSpec((Name("b"),)), output=RowSpec((Name("o"),)))),
        sizes={"o": 6},
    )  # fmt: skip
    assert shape(w) == "5,3 -> 6"


def test_positions_anonymous_and_static_indices() -> None:
    a = data("a", [4], (), [3, 5])
    first = ShapeSpec(batch=RowSpec((Position(1),)), output=RowSpec((Anonymous(1), Name("j"))))
    assert shape(op("einsum", [a], einsum([first], out(Position(2), Anonymous(9), "j")), reduction="add")) == "3,1,5"
    index = ShapeSpec(batch=RowSpec((StaticIndex("i", 4),)), output=RowSpec(variable="v"))
    assert shape(op("slice", [a], einsum([index], out(variable="v")))) == "3,5"
    outside = ShapeSpec(batch=RowSpec((Position(4),)), output=RowSpec(variable="v"))
    assert "needs at least 5 cells of axis 0 of the batch row, it has 4" in message(
        op("slice", [a], einsum([outside], out(variable="v")))
    )


@pytest.mark.parametrize(
    ("term", "expected"),
    [
        (Sliced("i", 2, 3), "3"),
        (Sliced("i", 2, None), "6"),
        (Sliced("i", 1, None, 3), "3"),
        (Sliced("i", -2, None), "2"),
        (Sliced("i", 7, None, -2), "4"),
        (Sliced("i", 8, None), "0"),
    ],
)
def test_slices(term: Sliced, expected: str) -> None:
    assert shape(op("slice", [data("a", (), (), [8])], einsum([out(term)], out("i")))) == expected


def test_slice_outside_the_axis() -> None:
    bad = op("slice", [data("a", (), (), [8])], einsum([out(Sliced("i", 6, 3))], out("i")))
    assert "the slice of 3 cells from 6 in steps of 1 leaves the axis of size 8" in message(bad)


def _conv(size: int, kernel: int, term: Affine) -> Node:
    return op(
        "conv", [data("x", (), (), [size], at=1), data("k", (), (), [kernel], at=2)],
        einsum([out(term), out("k")], out("o")), reduction="add", at=3,
    )  # fmt: skip


def test_convolution_sizes() -> None:
    assert shape(_conv(10, 3, Affine(1, "o", 1, "k"))) == "8"
    assert shape(_conv(11, 3, Affine(2, "o", 2, "k"))) == "4"
    assert shape(_conv(12, 5, Affine(3, "o", 2, "k", padded=True))) == "4"


def test_inexact_convolution_shows_the_numbers() -> None:
    assert message(_conv(10, 3, Affine(2, "o", 1, "k"))) == (
        "conv: the convolution axis does not fit exactly: axis = 2*(o-1) + 1 + (k-1)*1; "
        "7 is not a multiple of the stride 2, or is negative\n"
        "  at model.py:3\n"
        "  axis = 10: declared for 'x' (output row, axis -1), at model.py:1\n"
        "  o = ?\n"
        "  k = 3: declared for 'k' (output row, axis -1), at model.py:2\n"
        "  hint: narrow the unread rest off the input first, or pad with =+"
    )
    assert "a padded axis of size 10 is not a multiple of the stride 3" in message(
        _conv(10, 3, Affine(3, "o", 1, "k", padded=True))
    )


def test_concatenation_adds_sizes_both_ways() -> None:
    a, b = data("a", (), (), [2]), data("b", (), (), [3])
    both = Concat((Name("i"), Name("j")))
    assert shape(op("concat", [a, b], einsum([out("i"), out("j")], out(both)))) == "5"
    assert shape(op("einsum", [data("c", (), (), [7])], einsum([out(Concat((Name("i"), 3)))], out("i")))) == "4"
    bad = op("einsum", [data("c", (), (), [2])], einsum([out(Concat((Name("i"), 3)))], out("i")))
    assert "the parts ? + 3 do not make up the concatenated axis of size 2" in message(bad)


def test_gather_and_captures() -> None:
    table, ids = param("table", [8], [100]), data("ids", [4])
    spec = einsum(
        [ShapeSpec(input=RowSpec(variable="d"), output=RowSpec((Gathered(1),))), ShapeSpec(batch=RowSpec((), "b"))],
        ShapeSpec(batch=RowSpec((), "b"), output=RowSpec((), "d")),
    )
    assert shape(op("gather", [table, ids], spec)) == "4 | -> 8"
    x = data("x", (), (), [3, 4])
    y = op("einsum", [x], einsum([out("h", variable="r")], out("h")), reduction="add", captures={"h": 70, "r": 71})
    w = param("w", (), (), at=1)
    w.declared = DeclaredShape(
        output=DeclaredRow((DeclaredAxis(CapturedDim("h", 70, y)), DeclaredAxis(CapturedDim("r", 71, y))))
    )
    solution = solve_shapes([w])
    assert str(solution.shape(w)) == "3,4"
    assert solution.capture(70) == 3
    assert solution.capture(71) == 4


def test_reshape_by_declared_row() -> None:
    def reshaped(*sizes: int | None) -> Node:
        axes = DeclaredRow(tuple(DeclaredAxis(size) for size in sizes))
        declared = DeclaredShape(DeclaredRow(open=True), DeclaredRow(open=True), axes)
        rows = ShapeSpec(RowSpec((), "b"), RowSpec(), RowSpec((), "v"))
        flat = ShapeSpec(RowSpec((), "b"), RowSpec(), RowSpec((), "v", (), True))
        return op("reshape", [data("x", [5], (), [4, 6], at=1)], einsum([rows], flat), declared=declared, at=2)

    assert shape(reshaped(3, 8)) == "5 | -> 3,8"
    assert shape(reshaped(2, None, 3)) == "5 | -> 2,4,3"
    assert "cannot reshape the output row (4, 6) (24 cells) to (5, 5) (25 cells)" in message(reshaped(5, 5))


def test_reshape_by_names() -> None:
    flat = ShapeSpec(RowSpec((), "b"), RowSpec(), RowSpec((), "v", (), True))
    split = ShapeSpec(RowSpec((), "b"), RowSpec(), RowSpec((Name("i"), Name("j"))))
    x = data("x", [5], (), [4, 6])
    assert shape(op("reshape", [x], einsum([flat], split), sizes={"i": 3})) == "5 | -> 3,8"
    bad = op("reshape", [x], einsum([flat], split), sizes={"i": 3, "j": 7})
    assert "(21 cells)" in message(bad)
