"""The shape solver: what is inferred, that order does not matter, and what the errors say."""

from __future__ import annotations

from itertools import permutations

import pytest

from stagedtensor.dims import DeclaredRow, DeclaredShape, DynamicDim
from stagedtensor.errors import ShapeError
from stagedtensor.node import Node, Role, SettledShape
from stagedtensor.shapes import solve_shapes
from stagedtensor.specs import (
    Affine,
    Concat,
    Name,
    Sliced,
    pointwise,
)
from stagedtensor.statements import Composite, Operand, OpRecord, Scope
from tests.oracles.graphs import assign, data, einsum, gradient_of, line, matmul, number, op, out, param, point

from .solving import message, shape

pytestmark = pytest.mark.usefixtures("session")


# -- broadcasting -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ([3, 4], [4], [3, 4]),
        ([3, 1], [1, 4], [3, 4]),
        ([], [2], [2]),
        ([1], [5], [5]),
        ([0], [1], [0]),
        ([0, 3], [3], [0, 3]),
        ([1], [1], [1]),
    ],
)
def test_pointwise_broadcasts_right_aligned(left: list[int], right: list[int], expected: list[int]) -> None:
    for one, other in ((left, right), (right, left)):
        result = point("add", data("a", one, (), one), data("b", other, (), other))
        found = solve_shapes([result]).shape(result)
        assert [axis.size for axis in found.output] == expected
        assert [axis.size for axis in found.batch] == expected


def test_rows_broadcast_apart() -> None:
    result = point("add", data("a", [2], (), [4]), data("b", (), (), [3, 4]))
    assert shape(result) == "2 | -> 3,4"


def test_contraction_joins_batch_and_carries_outer_rows() -> None:
    w, x = param("w", [784], [10]), data("x", [32, 1], (), [784])
    assert shape(matmul(w, x)) == "32,1 | -> 10"
    pair = matmul(param("a", [4], [5]), param("b", [3], [4]))
    assert shape(pair) == "3 -> 5"


def test_zero_sizes_are_legal_and_contract() -> None:
    assert shape(matmul(param("a", [0], [2]), param("b", [3], [0]))) == "3 -> 2"


# -- parameters ---------------------------------------------------------------------------------------------------


def test_layer_takes_rows_from_data_and_bias() -> None:
    w, b = param("w"), param("b", output=[64])
    y = point("relu", point("add", matmul(w, data("x", [32], (), [784])), b))
    solution = solve_shapes([y])
    assert [str(solution.shape(node)) for node in (w, b, y)] == ["784 -> 64", "64", "32 | -> 64"]


def test_hidden_size_flows_backwards_through_pointwise_chains() -> None:
    w1, b1, w2 = param("w1"), param("b1"), param("w2", [64], [10])
    hidden = point("relu", point("mul", point("add", matmul(w1, data("x", [32], (), [784])), b1), number(0.5)))
    matmul(w2, hidden)
    solution = solve_shapes([w1])
    assert [str(solution.shape(node)) for node in (w1, b1)] == ["784 -> 64", "64"]


def test_open_sizes_of_declared_rows_are_inferred() -> None:
    w, x = param("w", [None], [10]), data("x", [None], (), [None])
    y = matmul(w, point("add", x, data("z", [32], (), [784])))
    solution = solve_shapes([y])
    assert [str(solution.shape(node)) for node in (w, x, y)] == ["784 -> 10", "32 | -> 784", "32 | -> 10"]


def test_no_batch_axis_reaches_a_parameter_or_its_twin() -> None:
    b = param("b")
    twin = op("cast", [b], pointwise(1))
    y = point("add", data("x", [32], (), [10]), twin)
    solution = solve_shapes([y])
    assert [str(solution.shape(node)) for node in (b, twin, y)] == ["10", "10", "32 | -> 10"]


def test_several_uses_meet() -> None:
    b = param("b")
    point("add", data("x", [8], (), [10, 64]), b)
    point("add", b, data("y", [8], (), [64]))
    assert shape(b) == "64"


def test_sizes_of_one_demand_nothing_while_others_do() -> None:
    w, gate = param("w"), data("gate", [8], (), [1])
    matmul(param("w2", [64], [10]), point("mul", gate, matmul(w, data("x", [8], (), [5]))))
    assert shape(w) == "5 -> 64"
    alone = param("alone")
    point("mul", gate, alone)
    assert shape(alone) == "1"


def test_scalar_data_makes_a_scalar_parameter_and_a_number_does_not() -> None:
    w = param("w")
    point("mul", w, data("x", [8]))
    assert shape(w) == "()"
    v = param("v", at=7)
    point("sub", v, point("add", number(1), number(1), at=8), at=9)
    assert message(v) == (
        "nothing determines the output row of parameter 'v'\n"
        "  at model.py:7\n"
        "  used by sub at model.py:9\n"
        '  hint: give it a size, for example st.param("v", output=[...])'
    )


def test_undetermined_hidden_size_is_an_error_that_names_the_sharers() -> None:
    w1, w2 = param("w1", at=1), param("w2", output=[10], at=2)
    y = matmul(w2, point("relu", matmul(w1, data("x", [4], (), [7]), at=3), at=4), at=5)
    assert message(y) == (
        "nothing determines the output row of parameter 'w1'\n"
        "  at model.py:1\n"
        "  used by matmul at model.py:3\n"
        '  hint: give it a size, for example st.param("w1", output=[...])'
    )


def test_partial_solution_raises_only_for_what_is_undetermined() -> None:
    w, x = param("w"), data("x", [4], (), [7])
    y = matmul(w, x)
    solution = solve_shapes([y], partial=True)
    assert str(solution.shape(x)) == "4 | -> 7"
    with pytest.raises(ShapeError, match="parameter 'w'"):
        solution.shape(y)


def test_closed_input_row_of_a_bias_used_alone() -> None:
    b = param("b", output=[3])
    assert shape(op("sum", [b], einsum([out("i")], out()), reduction="add")) == "()"
    assert shape(b) == "3"


def test_gradients_states_and_composites_follow_their_owner() -> None:
    w = param("w")
    border = Composite("gelu", line(1), operands=(Operand(w),))
    inner = op("enter", [w], pointwise(1))
    inner.composite = border
    border.aliases = (inner,)
    y = point("add", inner, data("x", [4], (), [7]))
    moment = Node(Role.STATE, "m", source=line(2))
    moment.owner = w
    scope = assign(moment, moment, gradient_of(w))
    assert scope in moment.writers
    solution = solve_shapes([moment])
    for node in (w, inner, moment, gradient_of(w)):
        assert str(solution.shape(node)) == "7"
    assert str(solution.shape(gradient_of(y))) == "4 | -> 7"


def test_frozen_shapes_bind_later_graphs() -> None:
    w = param("w")
    first = point("add", w, data("x", [4], (), [7]))
    w.settled_shape = SettledShape(solve_shapes([first]).shape(w), "step", line(9))
    y = point("add", w, data("z", [4], (), [8], at=3), at=4)
    text = message(y)
    assert "7: settled for 'w' by routine 'step', at model.py:9" in text
    assert "8: declared for 'z' (output row, axis -1), at model.py:3" in text


# -- order --------------------------------------------------------------------------------------------------------


def test_asking_early_or_in_another_order_changes_nothing() -> None:
    w1, b1, x = param("w1"), param("b1"), data("x", [2], (), [5])
    hidden = point("relu", point("add", matmul(w1, x), b1))
    with pytest.raises(ShapeError):
        solve_shapes([hidden])
    y = matmul(param("w2", [6], [3]), hidden)
    expected = ["5 -> 6", "6", "2 | -> 6", "2 | -> 3"]
    for order in permutations([w1, b1, hidden, y]):
        solution = solve_shapes(order)
        assert [str(solution.shape(node)) for node in (w1, b1, hidden, y)] == expected
    assert w1.settled_shape is None


def test_result_does_not_depend_on_construction_order() -> None:
    def build(bias_first: bool) -> list[str]:
        nodes: dict[str, Node] = {}
        for name in ("b", "w") if bias_first else ("w", "b"):
            nodes[name] = param(name)
        x, z = data("x", [2], (), [5]), data("z", [2], (), [3, 4])
        if bias_first:
            point("add", nodes["b"], z)
        wx = matmul(nodes["w"], x)
        if not bias_first:
            point("add", z, nodes["b"])
        y = point("add", nodes["b"], wx) if bias_first else point("add", wx, nodes["b"])
        solution = solve_shapes([y])
        return [str(solution.shape(node)) for node in (nodes["w"], nodes["b"], y)]

    assert build(True) == build(False) == ["5 -> 3,4", "3,4", "2 | -> 3,4"]


def test_deep_chains_do_not_recurse() -> None:
    node = data("x", [2], (), [3])
    for _ in range(1500):
        node = point("relu", node)
    assert shape(node) == "2 | -> 3"


def test_origin_names_the_lines_that_decided() -> None:
    b = param("b", at=1)
    y = point("add", data("x", [4], (), [7], at=2), b, at=3)
    origins = solve_shapes([y]).origin(b)
    assert origins[0] == line(1)
    assert line(2) in origins


# -- errors -------------------------------------------------------------------------------------------------------


def test_sizes_that_do_not_broadcast_name_both_sides() -> None:
    y = point("add", data("x", [2], (), [10], at=1), data("z", [2], (), [11], at=2), at=3)
    assert message(y) == (
        "add: sizes 10 and 11 do not broadcast in the output row\n"
        "  at model.py:3\n"
        "  10: declared for 'x' (output row, axis -1), at model.py:1\n"
        "  11: declared for 'z' (output row, axis -1), at model.py:2\n"
        "  hint: sizes must be equal or 1, aligned at the right end of each row; reshape or permute one side, or "
        "correct its size"
    )


def test_uses_without_a_meet_name_both_uses() -> None:
    b = param("b", at=1)
    point("add", data("x", (), (), [10], at=2), b, at=3)
    point("mul", data("z", (), (), [11], at=4), b, at=5)
    text = message(b)
    assert text.startswith("add: parameter 'b' (output row, axis -1) would have size 10 here and size 11 in mul\n")
    for part in ("at model.py:2", "at model.py:3", "at model.py:4", "at model.py:5", "hint:"):
        assert part in text


def test_zero_does_not_broadcast_with_more_than_one() -> None:
    assert "sizes 0 and 2 do not broadcast" in message(point("add", data("a", [0]), data("b", [2])))


def test_labels_never_unify() -> None:
    y = point("add", data("x", (), (), [("rgb", 3)], at=1), data("z", (), (), [("xyz", 3)], at=2), at=3)
    text = message(y)
    assert "axes labelled 'rgb' and 'xyz' do not go together in the output row" in text
    assert "at model.py:1" in text
    assert "at model.py:2" in text


def test_labels_travel_to_results_and_open_parameters() -> None:
    b = param("b")
    y = point("add", data("x", [2], (), [("rgb", 3)]), b)
    solution = solve_shapes([y])
    assert solution.shape(y).output[0].label == "rgb"
    assert solution.shape(b).output[0].label == "rgb"


# -- assignments --------------------------------------------------------------------------------------------------


def test_assignment_broadcasts_to_its_target_and_never_widens_it() -> None:
    target = data("t", [2], (), [3])
    assign(target, data("a", (), (), [3]), number(2))
    assert shape(target) == "2 | -> 3"
    narrow = data("n", (), (), [1], at=1)
    assign(narrow, data("a", (), (), [3], at=2), at=3)
    text = message(narrow)
    assert "an assignment never widens its target" in text
    assert "3: declared for 'a' (output row, axis -1), at model.py:2" in text
    flat = data("f", at=1)
    assign(flat, data("a", (), (), [3], at=2), at=3)
    assert "the output row (3) does not fit into the assigned ()" in message(flat)


def test_updates_do_not_shape_an_open_parameter() -> None:
    b, rate = param("b"), data("rate")
    assign(b, rate, gradient_of(b))
    point("add", data("x", [4], (), [7]), b)
    assert shape(b) == "7"


def test_assignment_determines_open_cells() -> None:
    cell = Node(
        Role.CELL, "c", declared=DeclaredShape(DeclaredRow(open=True), DeclaredRow(open=True), DeclaredRow(open=True))
    )
    assign(cell, data("a", [1], (), [3]), data("b", [4], (), []))
    assert shape(cell) == "4 | -> 3"


# -- run-time extents ---------------------------------------------------------------------------------------------


def test_writes_of_the_same_nodes_count_in_the_order_in_which_they_were_made() -> None:
    """Where no two of them agree, the second is the one that is wrong, wherever in memory their objects lie."""
    texts, elsewhere = set[str](), list[object]()
    for at in range(16):
        x, p = data("x", (), (), [3, 4]), param("p")
        for kept in (["i"], ["j"], ["i", "j"], ["j", "i"]):
            spec = einsum([out("i", "j")], out(*kept))
            p.writers.append(Scope(spec, (x,), p, line(1), "assign", derives=False))
            elsewhere += [object() for _ in range(at)]
        texts.add(message(p))
    assert len(texts) == 1
    assert "sizes 4 and 3 do not fit at index 'j' in the output row" in texts.pop()


def test_run_time_extents_pass_through_and_never_fit_numbers() -> None:
    n = DynamicDim("n", 256)
    x = data("x", [n], (), [8], at=1)
    y = point("add", matmul(param("w", [8], [3]), x), data("ones", [1], (), [3]))
    found = solve_shapes([y]).shape(y)
    assert str(found) == "n<=256 | -> 3"
    assert found.dims == (256, 3)
    bad = point("add", x, data("z", [256], (), [8], at=2), at=3)
    assert "sizes n<=256 and 256 do not broadcast in the batch row" in message(bad)


def test_run_time_extents_are_not_convolved_sliced_or_concatenated() -> None:
    n = DynamicDim("n", 16)

    def k() -> Node:
        return data("k", (), (), [3])

    same = op("conv", [data("x", (), (), [n]), k()], einsum([out(Affine(1, "o", 1, "k", True)), out("k")], out("o")))
    assert shape(same) == "n<=16"
    valid = op("conv", [data("x", (), (), [n]), k()], einsum([out(Affine(1, "o", 1, "k")), out("k")], out("o")))
    assert "the run-time extent n<=16 cannot be an axis of a convolution" in message(valid)
    sliced = op("slice", [data("x", (), (), [n])], einsum([out(Sliced("i", 0, 2))], out("i")))
    assert "can only be taken whole" in message(sliced)
    both = einsum([out("i"), out("j")], out(Concat((Name("i"), Name("j")))))
    assert "cannot be part of a concatenation" in message(op("concat", [data("x", (), (), [n]), k()], both))


def test_records_at_a_border_keep_the_masters_shape() -> None:
    w = param("w")
    twins = [op(kind, [w], pointwise(1)) for kind in ("cast", "enter", "identity", "leave")]
    point("mul", twins[0], data("x", [9], [2], [3]))
    assert isinstance(twins[0].record, OpRecord)
    assert {shape(node) for node in (w, *twins)} == {"2 -> 3"}
