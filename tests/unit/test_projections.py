"""Projection against NumPy: every kind of access, forward and with the roles swapped as gradients swap them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from stagedtensor.shapes import solve_shapes
from stagedtensor.shapes.projections import (
    DimProduct,
    IndexConst,
    IndexIter,
    project,
)
from stagedtensor.specs import (
    ALL_ROWS,
    Anonymous,
    Concat,
    Name,
    Position,
    RowSpec,
    ShapeSpec,
    Sliced,
    Spec,
    StaticIndex,
)
from stagedtensor.statements import (
    Access,
    Apply,
    DimValue,
    IterValue,
    LinearIndex,
    NumberLiteral,
    Scope,
    Statement,
)
from tests.oracles.graphs import (
    assign,
    backward,
    data,
    einsum,
    forward,
    gradient_of,
    matmul,
    op,
    out,
    param,
    point,
)
from tests.oracles.points import run

from .projecting import check, evaluate, values, vector_jacobian

pytestmark = pytest.mark.usefixtures("session")


# -- pointwise and contraction ------------------------------------------------------------------------------------


def test_pointwise_broadcast() -> None:
    a, b = data("a", [2, 1], (), [4]), data("b", [3], (), [5, 1])
    y = point("mul", a, b)
    x, z = values(2, 1, 4), values(3, 5, 1, seed=1)
    check(y, {a: x, b: z}, x[:, :, None, :] * z[None])


def test_contraction_with_batch_and_output_rows() -> None:
    w, x = param("w", [3, 2], [4]), data("x", [2, 1], (), [3, 2])
    left, right = values(4, 3, 2), values(2, 1, 3, 2, seed=1)
    check(matmul(w, x), {w: left, x: right}, np.einsum("oij,abij->abo", left, right))


def test_contraction_of_broadcast_inner_axes() -> None:
    w, x = param("w", [1], [4]), data("x", [2], (), [3])
    left, right = values(4, 1), values(2, 3, seed=1)
    check(matmul(w, x), {w: left, x: right}, np.einsum("oi,bk->bo", left, right))


def test_iterators_come_in_memory_order_with_reductions_marked() -> None:
    w, x = param("w", [1], [4]), data("x", [2], (), [1])
    y = matmul(w, x)
    (part,) = project(forward(y), solve_shapes([y]))
    assert [(loop.name, loop.extent, loop.reduce) for loop in part.iterators] == [
        ("batch", 2, False),
        ("output", 4, False),
        ("contracted", 1, True),
    ]
    assert part.covers_target
    assert not part.scatter
    batch, output, inner = (IndexIter(loop) for loop in part.iterators)
    assert part.target == (batch, output)
    assert list(part.reads.values()) == [(output, inner), (batch, inner)]


def test_gradient_of_a_broadcast_operand_reduces() -> None:
    x, b = data("x", [2], (), [3, 4]), param("b", (), [1, 4])
    y = point("add", x, b)
    scope = forward(y).scope
    statement = Statement(
        Access(gradient_of(b), ALL_ROWS), Access(gradient_of(y), ALL_ROWS), scope, op="add", reset=True
    )
    solution = solve_shapes([y])
    (part,) = project(statement, solution)
    assert [(loop.extent, loop.reduce) for loop in part.iterators] == [(4, False), (2, True), (3, True)]
    assert part.target[0] == IndexConst(0)
    assert part.covers_target
    seed = values(2, 3, 4)
    np.testing.assert_array_equal(run(statement, solution, {gradient_of(y): seed}), seed.sum((0, 1))[None])


def test_zero_sizes() -> None:
    w, x = param("w", [0], [2]), data("x", [3], (), [0])
    check(matmul(w, x), {w: np.zeros((2, 0)), x: np.zeros((3, 0))}, np.zeros((3, 2)))
    y = point("add", data("a", [0], (), [2]), data("b", (), (), [2]))
    assert evaluate(y, dict(zip(forward(y).scope.nodes, (np.zeros((0, 2)), values(2)), strict=True))).shape == (0, 2)


def test_assignment_broadcasts_to_its_target() -> None:
    target, a = data("t", [2], (), [3]), data("a", (), (), [3])
    scope = assign(target, target, a)
    expr = Apply("mul", (Access(target, ALL_ROWS), Access(a, ALL_ROWS)))
    statement = Statement(Access(target, ALL_ROWS), expr, scope)
    x, z = values(2, 3), values(3, seed=1)
    np.testing.assert_array_equal(run(statement, solve_shapes([target]), {target: x.copy(), a: z}), x * z)


def test_a_tree_of_literals_runs_over_the_target() -> None:
    b, x = param("b"), data("x", [5], (), [3])
    y = point("add", x, b)
    scope = forward(y).scope
    statement = Statement(Access(gradient_of(b), ALL_ROWS), NumberLiteral(0.0), scope)
    (part,) = project(statement, solve_shapes([y]))
    assert [(loop.extent, loop.reduce) for loop in part.iterators] == [(3, False)]
    assert part.covers_target
    fill = Scope(Spec((), ALL_ROWS), (), y, y.source, "fill", derives=False)
    seeded = Statement(Access(gradient_of(y), ALL_ROWS), NumberLiteral(1.0), fill)
    np.testing.assert_array_equal(run(seeded, solve_shapes([y]), {}), np.ones((5, 3)))


# -- einsum -------------------------------------------------------------------------------------------------------


def test_names_across_rows() -> None:
    a = data("a", [2], [3], [4])
    rows = ShapeSpec(RowSpec((Name("b"),)), RowSpec((Name("i"),)), RowSpec((Name("o"),)))
    back = ShapeSpec(RowSpec((Name("o"),)), RowSpec((Name("b"),)), RowSpec((Name("i"),)))
    x = values(2, 4, 3)
    check(op("einsum", [a], einsum([rows], back)), {a: x}, x.transpose(1, 2, 0))


def test_diagonals_of_operand_and_result() -> None:
    a = data("a", (), (), [3, 3])
    x = values(3, 3)
    check(op("einsum", [a], einsum([out("i", "i")], out("i"))), {a: x}, np.diag(x))
    v = data("v", (), (), [3])
    z = values(3)
    check(op("einsum", [v], einsum([out("i")], out("i", "i"))), {v: z}, np.diag(z))


def test_a_row_variable_between_names() -> None:
    a, b = data("a", (), (), [2, 3, 4, 5]), data("b", (), (), [5, 2])
    left = ShapeSpec(output=RowSpec((Name("i"),), "v", (Name("k"),)))
    result = ShapeSpec(output=RowSpec((), "v", (Name("i"),)))
    x, z = values(2, 3, 4, 5), values(5, 2, seed=1)
    check(op("einsum", [a, b], einsum([left, out("k", "i")], result), reduction="add"), {a: x, b: z},
          np.einsum("ipqk,ki->pqi", x, z))  # fmt: skip


def test_anonymous_axes_and_positions() -> None:
    a = data("a", (), (), [2, 3, 4])
    x = values(2, 3, 4)
    summed = op("einsum", [a], einsum([out(Anonymous(1), "j", Position(-1))], out("j", Anonymous(2))), reduction="add")
    check(summed, {a: x}, x[:, :, -1].sum(0)[:, None])
    placed = op("einsum", [a], einsum([out("i", Anonymous(1), Anonymous(3))], out("i", Position(2))), reduction="add")
    check(placed, {a: x}, np.stack([0 * x[:, 0, 0], 0 * x[:, 0, 0], x.sum((1, 2))], axis=1))


def test_max_reduction_and_neutral_of_unwritten_cells() -> None:
    a = data("a", (), (), [2, 3])
    x = values(2, 3)
    y = op("einsum", [a], einsum([out("i", "j")], out("i", Position(1))), reduction="max")
    np.testing.assert_array_equal(evaluate(y, {a: x}), np.stack([np.full(2, -np.inf), x.max(1)], axis=1))


@pytest.mark.parametrize(
    ("term", "expected"),
    [
        (Sliced("i", 2, 3), slice(2, 5)),
        (Sliced("i", 1, None, 3), slice(1, None, 3)),
        (Sliced("i", -2, None), slice(-2, None)),
        (Sliced("i", 7, None, -2), slice(7, None, -2)),
    ],
)
def test_slices(term: Sliced, expected: slice) -> None:
    a = data("a", (), (), [8, 2])
    x = values(8, 2)
    check(op("slice", [a], einsum([out(term, "j")], out("i", "j"))), {a: x}, x[expected])


def test_assignment_to_a_slice_leaves_the_rest() -> None:
    target, a = data("t", (), (), [5]), data("a", (), (), [2])
    scope = Scope(einsum([out("i")], out(Sliced("i", 1, 2))), (a,), target, target.source, "assign", derives=False)
    target.writers.append(scope)
    set_ = Statement(Access(target, scope.spec.result), Access(a, out("i")), scope)
    x, z = values(5), values(2, seed=1)
    found = run(set_, solve_shapes([target]), {target: x.copy(), a: z})
    np.testing.assert_array_equal(found, np.concatenate([x[:1], z, x[3:]]))
    reset = replace(set_, op="add", reset=True)
    found = run(reset, solve_shapes([target]), {target: x.copy(), a: z})
    np.testing.assert_array_equal(found, np.concatenate([[0], z, [0, 0]]))
    kept = replace(set_, op="add", reset=False)
    found = run(kept, solve_shapes([target]), {target: x.copy(), a: z})
    np.testing.assert_array_equal(found, x + np.concatenate([[0], z, [0, 0]]))


def test_static_index() -> None:
    a = data("a", [4], (), [3])
    rows = ShapeSpec(batch=RowSpec((StaticIndex("i", 4),), "b"), output=RowSpec((), "o"))
    y = op("slice", [a], einsum([rows], ShapeSpec(batch=RowSpec((), "b"), output=RowSpec((), "o"))))
    x = values(4, 3)
    np.testing.assert_array_equal(evaluate(y, {a: x}, {"i": 2}), x[2])
    (fill, part) = project(backward(y, 0), solve_shapes([y]))
    assert fill.fill
    assert not part.covers_target


def test_sum_of_operands_and_iterator_values() -> None:
    a, b = data("a", (), (), [3]), data("b", (), (), [4])
    expr = Apply("add", (Apply("add", (Access(a, out("i")), Access(b, out("j")))), IterValue("j")))
    y = op("einsum", [a, b], einsum([out("i"), out("j")], out("i")), reduction="add", expr=expr)
    x, z = values(3), values(4, seed=1)
    np.testing.assert_array_equal(evaluate(y, {a: x, b: z}), (x[:, None] + z + np.arange(4)).sum(1))
    y = op("einsum", [a], einsum([out("i")], out("i", "c")), expr=Apply("eq", (IterValue("c"), Access(a, out("i")))),
           sizes={"c": 5})  # fmt: skip
    np.testing.assert_array_equal(evaluate(y, {a: np.array([0, 4, 7])}), np.eye(9)[[0, 4, 7], :5])


def test_linear_index_and_number_of_cells() -> None:
    a = data("a", [2], (), [3, 4])
    rows = ShapeSpec(RowSpec((), "b"), RowSpec(), RowSpec((), "v"))
    count = DimValue(("v", "b"))
    expr = Apply("add", (Access(a, rows), Apply("mul", (LinearIndex(rows), count))))
    y = op("einsum", [a], einsum([rows], rows), expr=expr)
    x = values(2, 3, 4)
    np.testing.assert_array_equal(evaluate(y, {a: x}), x + 24 * np.arange(24).reshape(2, 3, 4))
    (part,) = project(forward(y), solve_shapes([y]))
    assert part.dim_values[count] == DimProduct(24)


# -- concatenation ------------------------------------------------------------------------------------------------


def _concat(names: str = "ij") -> tuple[Concat, list[ShapeSpec]]:
    return Concat(tuple(Name(name) for name in names)), [out(name, "k") for name in names]


def test_concatenation_by_blocks() -> None:
    a, b = data("a", (), (), [2, 3]), data("b", (), (), [4, 3])
    term, rows = _concat()
    y = op("concat", [a, b], einsum(rows, out(term, "k")))
    x, z = values(2, 3), values(4, 3, seed=1)
    np.testing.assert_array_equal(evaluate(y, {a: x, b: z}), np.concatenate([x, z]))
    parts = project(forward(y), solve_shapes([y]))
    assert [list(part.reads) for part in parts] == [[Access(a, rows[0])], [Access(b, rows[1])]]
    seed = values(6, 3, seed=2)
    for place, expected in ((0, seed[:2]), (1, seed[2:])):
        np.testing.assert_array_equal(vector_jacobian(y, place, {a: x, b: z}, seed), expected)


def test_concatenation_by_one_statement_each() -> None:
    a, b = data("a", (), (), [2, 3]), data("b", (), (), [4, 3])
    term, rows = _concat()
    y = op("concat", [a, b], einsum(rows, out(term, "k")))
    first = forward(y)
    arrays = {a: values(2, 3), b: values(4, 3, seed=1), y: np.full((6, 3), np.nan)}
    for node, spec in ((a, rows[0]), (b, rows[1])):
        run(replace(first, expr=Access(node, spec)), solve_shapes([y]), arrays)
    np.testing.assert_array_equal(arrays[y], np.concatenate([arrays[a], arrays[b]]))


def test_prefix_suffix_and_sum_of_a_concatenated_axis() -> None:
    a = data("a", (), (), [7])
    x = values(7)
    check(op("einsum", [a], einsum([out(Concat((Name("i"), 3)))], out("i"))), {a: x}, x[:4])
    check(op("einsum", [a], einsum([out(Concat((3, Name("i"))))], out("i"))), {a: x}, x[3:])
    both = op("einsum", [a], einsum([out(Concat((Name("i"), Name("j"))))], out()), reduction="add", sizes={"i": 3})
    check(both, {a: x}, x.sum())
    assert [part.statement.reset for part in project(forward(both), solve_shapes([both]))] == [True, False]


@pytest.mark.parametrize(("reduction", "neutral"), [(None, 0.0), ("add", 0.0), ("max", -np.inf), ("mul", 1.0)])
def test_cells_beside_a_named_block_get_the_neutral(reduction: Any, neutral: float) -> None:
    a = data("a", (), (), [2])
    y = op("einsum", [a], einsum([out("i")], out(Concat((Name("i"), 3)))), reduction=reduction)
    x = values(2)
    np.testing.assert_array_equal(evaluate(y, {a: x}), np.concatenate([x, np.full(3, neutral)]))
    last = project(forward(y), solve_shapes([y]))[-1]
    assert last.fill
    assert last.statement.expr == NumberLiteral(neutral)
