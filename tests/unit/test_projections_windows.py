"""Projection against NumPy: convolutions, gathers, reshapes and extents that are bound when a routine runs."""

from __future__ import annotations

import numpy as np
import pytest

from stagedtensor.dims import DynamicDim
from stagedtensor.shapes import solve_shapes
from stagedtensor.shapes.projections import (
    DimProduct,
    Guard,
    IndexFloorDiv,
    IndexIter,
    IndexMod,
    IndexSum,
    project,
)
from stagedtensor.specs import (
    ALL_ROWS,
    Affine,
    Gathered,
    Name,
    RowSpec,
    ShapeSpec,
    Sliced,
)
from stagedtensor.statements import (
    Access,
    Apply,
    DimValue,
    NumberLiteral,
    Stage,
    Statement,
)
from tests.oracles.graphs import (
    backward,
    data,
    einsum,
    forward,
    gradient_of,
    matmul,
    op,
    out,
    param,
)
from tests.oracles.points import run

from .projecting import Array, check, evaluate, values, vector_jacobian

pytestmark = pytest.mark.usefixtures("session")


# -- convolution --------------------------------------------------------------------------------------------------


def reference_convolution(x: Array, k: Array, out_size: int, stride: int, dilation: int, left: int) -> Array:
    result = np.zeros(out_size)
    for o in range(out_size):
        for place in range(len(k)):
            cell = stride * o + dilation * place - left
            if 0 <= cell < len(x):
                result[o] += x[cell] * k[place]
    return result


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "dilation", "padded"),
    [
        (10, 3, 1, 1, False),
        (11, 3, 2, 2, False),
        (9, 2, 3, 2, False),
        (6, 3, 1, 1, True),
        (6, 4, 1, 1, True),
        (12, 5, 3, 2, True),
        (4, 1, 4, 1, True),
        (6, 2, 3, 1, True),
        (4, 7, 2, 3, True),
    ],
)
def test_convolution_and_its_gradients(size: int, kernel: int, stride: int, dilation: int, padded: bool) -> None:
    x, k = data("x", (), (), [size]), data("k", (), (), [kernel])
    term = Affine(stride, "o", dilation, "k", padded)
    y = op("conv", [x, k], einsum([out(term), out("k")], out("o")), reduction="add")
    cells, weights = values(size), values(kernel, seed=1)
    count = size // stride if padded else (size - 1 - (kernel - 1) * dilation) // stride + 1
    left = max(0, (count - 1) * stride + (kernel - 1) * dilation + 1 - size) // 2 if padded else 0
    check(y, {x: cells, k: weights}, reference_convolution(cells, weights, count, stride, dilation, left))
    (part,) = project(backward(y, 0), solve_shapes([y]))
    assert part.covers_target
    assert not part.scatter
    assert [loop.reduce for loop in part.iterators] == [False, True]


def test_two_dimensional_convolution_with_channels() -> None:
    x, w = data("x", [2], (), [5, 6, 2]), param("w", [3, 2, 2], [3])
    rows = ShapeSpec(
        RowSpec((), "b"), RowSpec(), RowSpec((Affine(1, "oh", 1, "kh"), Affine(2, "ow", 1, "kw", True), Name("ic")))
    )
    weight = ShapeSpec(input=RowSpec((Name("kh"), Name("kw"), Name("ic"))), output=RowSpec((Name("oc"),)))
    result = ShapeSpec(RowSpec((), "b"), RowSpec(), RowSpec((Name("oh"), Name("ow"), Name("oc"))))
    y = op("conv2d", [x, w], einsum([rows, weight], result), reduction="add")
    cells, weights = values(2, 5, 6, 2), values(3, 3, 2, 2, seed=1)
    expected = np.zeros((2, 3, 3, 3))
    for oh in range(3):
        for ow in range(3):
            patch = cells[:, oh : oh + 3, 2 * ow : 2 * ow + 2]
            expected[:, oh, ow] = np.einsum("bhwi,ohwi->bo", patch, weights)
    found = evaluate(y, {x: cells, w: weights})
    np.testing.assert_array_equal(found, expected)
    seed = values(2, 3, 3, 3, seed=2)
    by_cell = np.zeros_like(cells)
    by_weight = np.zeros_like(weights)
    for oh in range(3):
        for ow in range(3):
            window = (slice(None), slice(oh, oh + 3), slice(2 * ow, 2 * ow + 2))
            by_cell[window] += np.einsum("bo,ohwi->bhwi", seed[:, oh, ow], weights)
            by_weight += np.einsum("bo,bhwi->ohwi", seed[:, oh, ow], cells[window])
    np.testing.assert_array_equal(vector_jacobian(y, 0, {x: cells, w: weights}, seed), by_cell)
    np.testing.assert_array_equal(vector_jacobian(y, 1, {x: cells, w: weights}, seed), by_weight)


def test_guards_and_windows_of_a_strided_padded_convolution() -> None:
    x, k = data("x", (), (), [8]), data("k", (), (), [4])
    y = op("conv", [x, k], einsum([out(Affine(2, "o", 1, "k", True)), out("k")], out("o")), reduction="add")
    (part,) = project(forward(y), solve_shapes([y]))
    o, place = (IndexIter(loop) for loop in part.iterators)
    cell = IndexSum(((2, o), (1, place)), -1)
    assert part.guards == (Guard(cell, 0, 8),)
    assert next(iter(part.reads.values())) == (cell,)
    (part,) = project(backward(y, 0), solve_shapes([y]))
    at, place = (IndexIter(loop) for loop in part.iterators)
    start = IndexSum(((1, at), (-1, place)), 1)
    assert part.guards == (Guard(IndexMod(start, 2), 0, 1), Guard(IndexFloorDiv(start, 2), 0, 4))
    assert part.target == (at,)


def test_gradient_that_reads_the_convolved_operand_at_its_own_cell() -> None:
    x = data("x", (), (), [6])
    term = Affine(2, "o", 1, "k")
    y = op("pool", [x], einsum([out(term)], out("o")), reduction="max", sizes={"k": 2})
    scope = forward(y).scope
    hit = Apply("eq", (Access(x, out(term)), Access(y, out("o"))))
    expr = Apply("mul", (Access(gradient_of(y), out("o")), hit))
    statement = Statement(Access(gradient_of(x), out(term)), expr, scope, op="add", reset=True)
    cells = np.array([3.0, 1.0, 2.0, 5.0, 7.0, 4.0])
    arrays = {x: cells, y: np.array([3.0, 5.0, 7.0]), gradient_of(y): np.array([10.0, 20.0, 30.0])}
    np.testing.assert_array_equal(run(statement, solve_shapes([y]), arrays), [10, 0, 0, 20, 30, 0])


# -- gather and reshape -------------------------------------------------------------------------------------------


def test_gather_and_scatter() -> None:
    table, ids = param("table", [3], [5]), data("ids", [4])
    spec = einsum(
        [ShapeSpec(input=RowSpec(variable="d"), output=RowSpec((Gathered(1),))), ShapeSpec(batch=RowSpec((), "b"))],
        ShapeSpec(batch=RowSpec((), "b"), output=RowSpec((), "d")),
    )
    rows = spec.operands[0]
    y = op("gather", [table, ids], spec, expr=Access(table, rows))
    x, which = values(5, 3), np.array([4, 0, 9, -3])
    clamped = np.clip(which, 0, 4)
    np.testing.assert_array_equal(evaluate(y, {table: x, ids: which}), x[clamped])
    scope = forward(y).scope
    statement = Statement(
        Access(gradient_of(table), rows), Access(gradient_of(y), spec.result), scope, op="add", reset=True
    )
    seed = values(4, 3, seed=1)
    expected = np.zeros((5, 3))
    np.add.at(expected, clamped, seed)
    solution = solve_shapes([y])
    np.testing.assert_array_equal(run(statement, solution, {gradient_of(y): seed, ids: which}), expected)
    fill, part = project(statement, solution)
    assert fill.covers_target
    assert part.scatter
    assert not part.covers_target
    assert not part.statement.reset


@pytest.mark.parametrize("split", [(8, 3), (2, 12), (24,), (4, 2, 3), (2, 2, 2, 3)])
def test_reshape_by_names_and_its_gradient(split: tuple[int, ...]) -> None:
    x = data("x", [2], (), [4, 6])
    flat = ShapeSpec(RowSpec((), "b"), RowSpec(), RowSpec((), "v", (), True))
    names = [f"i{place}" for place in range(len(split))]
    result = ShapeSpec(RowSpec((), "b"), RowSpec(), RowSpec(tuple(map(Name, names))))
    y = op("reshape", [x], einsum([flat], result), sizes=dict(zip(names, split, strict=True)))
    cells = values(2, 4, 6)
    check(y, {x: cells}, cells.reshape(2, *split))
    for statement in (forward(y), backward(y, 0)):
        (part,) = project(statement, solve_shapes([y]))
        assert part.covers_target


def test_reshape_keeps_equal_axes_apart() -> None:
    x = data("x", (), (), [5, 6, 7])
    flat = ShapeSpec(output=RowSpec((), "v", (), True))
    y = op("reshape", [x], einsum([flat], out("a", "b", "c", "d")), sizes={"a": 5, "b": 2, "c": 3, "d": 7})
    (part,) = project(forward(y), solve_shapes([y]))
    a, b, c, d = (IndexIter(loop) for loop in part.iterators)
    assert list(part.reads.values()) == [(a, IndexSum(((3, b), (1, c))), d)]


# -- run-time extents ---------------------------------------------------------------------------------------------


def test_run_time_extents() -> None:
    n = DynamicDim("n", 6)
    w, x = param("w", [3], [2]), data("x", [n], (), [3])
    y = matmul(w, x)
    left, right = values(2, 3), values(6, 3, seed=1)
    solution = solve_shapes([y])
    (part,) = project(forward(y), solution)
    assert part.iterators[0].extent == n
    assert part.iterators[0].size == 6
    assert part.covers_target
    found = evaluate(y, {w: left, x: right}, {"n": 4})
    np.testing.assert_array_equal(found[:4], right[:4] @ left.T)
    assert np.isnan(found[4:]).all()
    gradient = run(backward(y, 0), solution, {x: right, gradient_of(y): np.ones((6, 2))}, {"n": 4})
    np.testing.assert_array_equal(gradient, np.tile(right[:4].sum(0), (2, 1)))
    total = op(
        "mean",
        [x],
        einsum([ALL_ROWS], ShapeSpec()),
        reduction="add",
        expr=Apply("div", (Access(x, ALL_ROWS), DimValue(("batch", "output")))),
    )
    (part,) = project(forward(total), solve_shapes([total]))
    assert part.dim_values[DimValue(("batch", "output"))] == DimProduct(3, (n,))
    np.testing.assert_allclose(evaluate(total, {x: right}, {"n": 4}), right[:4].mean())


def test_zeroing_covers_the_whole_target_whatever_the_rows() -> None:
    a = data("a", (), (), [8])
    y = op("slice", [a], einsum([out(Sliced("i", 2, 3))], out("i")))
    statement = Statement(
        Access(gradient_of(a), out(Sliced("i", 2, 3))), NumberLiteral(0.0), forward(y).scope, stage=Stage.ZERO
    )
    (part,) = project(statement, solve_shapes([y]))
    assert part.covers_target
    np.testing.assert_array_equal(run(statement, solve_shapes([y]), {}), np.zeros(8))
