"""Precision inference: the rules, the goldens of the language, composites, settling, slots, the constant guard."""

from __future__ import annotations

import math

import pytest

from stagedtensor.errors import ConstantRangeError, InternalError, PrecisionError
from stagedtensor.explain import explain, explanation, why
from stagedtensor.literal_guard import check_literals
from stagedtensor.node import Node, Role, Specified
from stagedtensor.policy import PrecisionPolicy
from stagedtensor.precision import (
    Prec,
    bf16,
    bool_,
    f8e4m3,
    f8e5m2,
    f16,
    f32,
    f64,
    i8,
    i16,
    i32,
    i64,
    u4x32,
    u8,
    u16,
    u64,
)  # fmt: skip
from stagedtensor.precision_requests import specify, specify_node
from stagedtensor.precision_solution import settle
from stagedtensor.precision_solver import solve_precisions
from stagedtensor.predicates import is_float, label
from stagedtensor.specs import Name, RowSpec, ShapeSpec, Spec
from stagedtensor.statements import Slot
from tests.oracles.precision_graphs import Graph, Root


def prec(node: Node | None) -> Prec:
    """The solved precision of a node, fixpoint checked."""
    assert node is not None
    return solve_precisions([node], debug=True).prec(node)


def grad(node: Node) -> Prec:
    """The solved precision of a node's gradient."""
    return prec(node.gradient)


# -- the goldens ----------------------------------------------------------------------------------------------------


def sum_times(g: Graph) -> tuple[Node, Node, Node, Node, Node]:
    """d = (a + b) * c on open terminals."""
    a, b, c = g.placeholder("a"), g.placeholder("b"), g.placeholder("c")
    total = g.op("add", a, b, label="total")
    return a, b, c, total, g.op("mul", total, c, label="d")


def test_g1_specified_result_reaches_open_terminals_only() -> None:
    a, b, c, total, d = sum_times(Graph())
    specify(b, "f16")
    specify(d, bf16)
    assert [prec(node) for node in (a, b, total, c, d)] == [f16, f16, f16, bf16, bf16]


def test_g2_join_of_both_narrow_formats_is_f32() -> None:
    a, b, c, total, d = sum_times(Graph())
    specify(b, f16)
    specify(c, bf16)
    assert [prec(node) for node in (a, total, c, d)] == [f16, f16, bf16, f32]


@pytest.mark.parametrize("result", [None, u8])
def test_g3_comparison_demands_the_join_of_its_operands(result: Prec | None) -> None:
    g = Graph()
    a, b = g.placeholder("a"), g.literal(1)
    m = g.op("lt", a, b, label="m")
    specify(a, f16)
    if result is not None:
        specify(m, result)
    assert (prec(m), prec(b)) == (result or f16, f16)


@pytest.mark.parametrize(("result", "expected"), [(None, f32), (f32, f32), (bf16, bf16)])
def test_g4_where_takes_its_precision_from_the_branches(result: Prec | None, expected: Prec) -> None:
    g = Graph()
    m, x, y = g.placeholder("m"), g.placeholder("x"), g.placeholder("y")
    out = g.op("where", m, x, y)
    for node, wanted in ((m, u8), (x, f16), (y, bf16)):
        specify(node, wanted)
    if result is not None:
        specify(out, result)
    assert (prec(out), prec(m)) == (expected, u8)


def test_g5_parameter_joins_its_consumers() -> None:
    g = Graph()
    w = g.param("w")
    first = g.op("mul", w, g.placeholder("x", f16), label="first")
    second = g.op("mul", w, g.placeholder("y", bf16), label="second")
    assert prec(w) is f32
    reason = why(w)
    assert reason.rule == "R3"
    assert [cause.node for cause in reason.because] == [first, second]


@pytest.mark.parametrize("by_comparison", [False, True])
@pytest.mark.parametrize("narrow", [False, True])
def test_g6_g7_one_hot_lookup(by_comparison: bool, narrow: bool) -> None:
    g = Graph()
    ids = g.placeholder("ids", i32)
    table = g.param("table")
    hot = g.op("eq", g.range(8), ids, label="hot") if by_comparison else g.one_hot(ids)
    out = g.matmul(table, hot)
    if narrow:
        PrecisionPolicy(param=bf16).apply(Root(out))
    expected = bf16 if narrow else f32
    assert prec(hot) is (i32 if by_comparison else expected)
    assert (prec(table), prec(out), prec(ids), grad(table)) == (expected, expected, i32, f32)


def test_g8_integer_meets_parameter() -> None:
    g = Graph()
    w, ids = g.param("w"), g.placeholder("ids", i32)
    result = g.op("mul", w, ids)
    assert (prec(result), prec(w)) == (f32, f32)


def test_g9_fraction_in_an_integer_node() -> None:
    g = Graph()
    half = g.literal(0.5)
    result = g.op("mul", g.placeholder("ids", i32), half)
    solution = solve_precisions([result])
    assert solution.prec(half) is i32
    with pytest.raises(
        ConstantRangeError, match=r"constant 0\.5 of node 0\.5 is i32, which holds integers only"
    ) as error:
        check_literals(solution, solution.nodes)
    text = str(error.value)
    assert f"test_precision_solver.py:{half.source.line}: half = g.literal(0.5)" in text
    assert "because mul: i32 Inferred (R2 bottom-up)" in text


def test_g10_fma_joins_all_at_once() -> None:
    g = Graph()
    a, b, c = g.placeholder("a", f8e4m3), g.placeholder("b", f8e5m2), g.placeholder("c", bf16)
    product = g.op("mul", a, b)
    assert (prec(g.op("fma", a, b, c)), prec(product), prec(g.op("add", product, c))) == (bf16, f16, f32)


@pytest.mark.parametrize("given", [None, f32])
def test_g11_cast_demands_like_any_consumer(given: Prec | None) -> None:
    g = Graph()
    w = g.param("w")
    g.cast(w, f16)
    if given is not None:
        specify(w, given)
    assert prec(w) is (given or f16)


def test_g12_activations_leave_gradients() -> None:
    g = Graph()
    w1, w2, x = g.param("w1"), g.param("w2"), g.placeholder("x")
    hidden = g.op("relu", g.matmul(w1, x))
    y = g.matmul(w2, hidden)
    PrecisionPolicy(activation=bf16).apply(Root(y))
    assert {prec(node) for node in (hidden, y, x)} == {bf16}
    assert {grad(node) for node in (w1, w2, hidden, y)} == {f32}


@pytest.mark.parametrize("integer", [False, True])
def test_g13_condition_is_tested_at_the_solve(integer: bool) -> None:
    g = Graph()
    a, b = g.placeholder("a"), g.placeholder("b")
    x = g.op("add", a, b)
    specify(x, bf16, only_if=is_float)
    if integer:
        specify(a, i32)
    assert prec(x) is (i32 if integer else bf16)


def test_g14_looking_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    a, b, c, total, d = sum_times(Graph())
    specify(b, f16)
    specify(d, bf16)
    for node in (a, b, c, total, d):
        explain(node)
    assert "c: bf16 Inferred (R3 top-down)\n  because d: bf16 Specified (R4)   test_precision_solver.py:" in (
        capsys.readouterr().out
    )
    specify(a, f64)
    assert (prec(a), prec(total)) == (f64, f64)


def test_g15_conflict_quotes_both_lines() -> None:
    *_, d = sum_times(Graph())
    specify(d, f16)
    first = d.specified
    with pytest.raises(PrecisionError, match="d: cannot specify bf16, f16 is specified already") as error:
        specify(d, bf16)
    assert "specify(d, f16)" in str(error.value)
    assert "specify(d, bf16)" in str(error.value)
    assert d.specified is first
    assert d.settled is None
    assert prec(d) is f16


def test_g16_two_layers_under_a_policy() -> None:
    g = Graph()
    w1, b1, w2, b2, x = g.param("w1"), g.param("b1"), g.param("w2"), g.param("b2"), g.placeholder("x", f32)
    y = g.op("add", g.matmul(w2, g.op("relu", g.op("add", g.matmul(w1, x), b1))), b2, label="y")
    PrecisionPolicy(param=bf16, activation=bf16).apply(Root(y), except_=label("^b2$"))
    assert [prec(node) for node in (w1, b2, y, x)] == [bf16, f32, bf16, f32]
    assert grad(w1) is f32


# -- single rules ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "right", "kind", "expected"),
    [
        (u8, i8, "add", i16), (u8, i8, "div", f32), (bool_, bool_, "add", u8), (bool_, bool_, "lt", bool_),
        (bool_, bool_, "maximum", u8), (u8, u8, "floordiv", u8), (i64, f16, "mul", f16), (u16, i8, "mod", i32),
    ],
)  # fmt: skip
def test_joins_of_ops(left: Prec, right: Prec, kind: str, expected: Prec) -> None:
    g = Graph()
    assert prec(g.op(kind, g.array("l", left), g.array("r", right))) is expected


def test_lossy_join_is_explained() -> None:
    g = Graph()
    assert "u64 with a signed integer: lossy" in explanation(g.op("add", g.array("l", u64), g.array("r", i8)))


@pytest.mark.parametrize(
    ("kind", "reduction", "given", "expected"),
    [
        ("sum", "add", bool_, i32), ("sum", "add", u8, i32), ("sum", "add", i64, i64), ("sum", "add", bf16, bf16),
        ("einsum", "mul", i16, i32), ("max", "max", u8, u8), ("argmax", "argmax", bf16, i32),
    ],
)  # fmt: skip
def test_reductions(kind: str, reduction: str, given: Prec, expected: Prec) -> None:
    g = Graph()
    assert prec(g.sum(g.array("x", given), kind=kind, reduction=reduction)) is expected


def test_specified_sum_and_permutation_keep_small_integers() -> None:
    g = Graph()
    total = g.sum(g.array("x", u8))
    specify(total, u8)
    i, j = Name("i"), Name("j")
    swap = Spec((ShapeSpec(output=RowSpec((i, j))),), ShapeSpec(output=RowSpec((j, i))))
    assert prec(total) is u8
    assert prec(g.op("einsum", g.array("m", u8), spec=swap, reduction="add")) is u8


def test_integer_demand_on_a_parameter_is_declined() -> None:
    g = Graph()
    w = g.param("w")
    total = g.op("floor", w, label="whole")
    specify_node(g.cast(total, f32), f32)
    g.cast(w, i32, label="steps")
    solution = solve_precisions([w], debug=True)
    assert solution.prec(w) is f32
    assert [(entry.prec, entry.by) for entry in solution.declined(w)] == [(i32, "steps")]
    assert "declined i32 asked by steps (it carries a gradient)" in explanation(w)


def test_gradient_of_f64_value_is_f64() -> None:
    g = Graph()
    w = g.param("w", f64)
    y = g.op("exp", w)
    assert (prec(y), grad(w), grad(y)) == (f64, f64, f64)
    g = Graph(default_prec=f64)
    w, v = g.param("w"), g.param("v", f32)
    assert (prec(w), grad(w), grad(v)) == (f64, f64, f32)


def test_result_gradient_joins_operand_gradients() -> None:
    g = Graph()
    a, b = g.param("a"), g.param("b")
    y = g.op("mul", a, b)
    z = g.op("exp", y)
    specify(a.gradient, bf16)
    assert (grad(y), grad(z), grad(b)) == (bf16, bf16, bf16)


def test_predicate_slots_neither_contribute_nor_demand() -> None:
    g = Graph()
    m, x = g.placeholder("m"), g.placeholder("x", bf16)
    assert prec(g.op("where", m, x, 0.0)) is bf16
    assert prec(m) is f32


def test_top_down_op_listens_and_feeds_nothing() -> None:
    g = Graph()
    w = g.param("w")
    scaled = g.op("relu", w, top_down=True)
    y = g.op("mul", scaled, g.array("x", bf16))
    assert (prec(y), prec(scaled), prec(w)) == (bf16, bf16, bf16)


def test_boundary_convert_is_a_barrier() -> None:
    g = Graph()
    x, w = g.placeholder("x"), g.param("w", f32)
    inside = g.op("stage", x, prec=f16, by="region")
    y = g.op("mul", inside, w)
    assert (prec(x), prec(inside), prec(y)) == (f32, f16, f32)
    assert why(inside).note == "region"


def test_index_slots() -> None:
    g = Graph()
    ids, table = g.placeholder("ids"), g.param("table", bf16)
    rows = g.gather(table, ids)
    assert (prec(ids), prec(rows)) == (i32, bf16)
    assert "(R3 index slot)" in explanation(ids)
    g.op("mul", ids, g.array("x", f16), label="scaled")
    solution = solve_precisions([ids])
    assert (solution.prec(ids), [entry.by for entry in solution.declined(ids)]) == (i32, ["scaled"])


def test_float_index_is_an_error() -> None:
    g = Graph()
    ids = g.placeholder("ids", f32)
    rows = g.gather(g.param("table"), ids, label="rows")
    with pytest.raises(
        PrecisionError, match=r"gather rows: expected an integer in operand ids, got f32\n  at test_precision_solver"
    ):
        solve_precisions([rows])


@pytest.mark.parametrize("kind", ["add", "neg", "cast", "lt"])
def test_counter_state_is_no_number(kind: str) -> None:
    g = Graph()
    key = g.placeholder("key", u4x32)
    operands = (key,) if kind in ("neg", "cast") else (key, g.array("x", f32))
    y = g.op(kind, *operands, prec=f32 if kind == "cast" else None)
    with pytest.raises(PrecisionError, match="counter state"):
        solve_precisions([y])


def test_sampler_reads_counter_state_only() -> None:
    g = Graph()
    good = g.op("draw", g.placeholder("key", u4x32), slots=[Slot.RNG], top_down=True)
    assert prec(good) is f32
    bad = g.op("draw", g.placeholder("key", f32), slots=[Slot.RNG], top_down=True)
    with pytest.raises(PrecisionError, match="expected u4x32 in operand key, got f32"):
        solve_precisions([bad])


def test_node_outside_the_component() -> None:
    solution = solve_precisions([Graph().literal(1)])
    with pytest.raises(InternalError, match="not connected"):
        solution.prec(Graph().literal(2))


# -- settling -------------------------------------------------------------------------------------------------------


def test_settling_freezes_the_value_not_the_role() -> None:
    g = Graph()
    w = g.param("w")
    y = g.op("mul", w, g.array("x", f16), label="y")
    solution = solve_precisions([y])
    settle(solution, [w, y], "step")
    later = g.op("mul", w, g.array("z", bf16), label="later")
    again = solve_precisions([w], debug=True)
    assert (again.prec(w), again.prec(later)) == (f16, bf16)
    assert [(entry.prec, entry.by) for entry in again.declined(w)] == [(bf16, "later")]
    assert (
        explanation(w).splitlines()[0].startswith("w: f16 Settled (R6 by routine 'step')   test_precision_solver.py:")
    )
    assert "declined bf16 asked by later (routine 'step' settled it)" in explanation(w)


def test_settling_a_solved_graph_changes_nothing() -> None:
    g = Graph()
    x, w = g.placeholder("x", bf16), g.param("w")
    y = g.op("mul", x, w)
    PrecisionPolicy(grad=f16).apply(Root(y))
    before = solve_precisions([y])
    settle(before, before.nodes, "first")
    after = solve_precisions([y], debug=True)
    settle(after, after.nodes, "second")
    assert [after.prec(node) for node in after.nodes] == [before.prec(node) for node in before.nodes]
    assert {node.settled.routine for node in after.nodes if node.settled} == {"first"}
    assert not any(after.declined(node) for node in after.nodes)
    assert prec(g.op("exp", y)) is bf16


def test_settled_policy_node_still_contributes() -> None:
    g = Graph()
    w = g.param("w")
    y = g.op("exp", w)
    PrecisionPolicy(param=bf16).apply(Root(y))
    solution = solve_precisions([y])
    settle(solution, solution.nodes, "step")
    assert prec(g.op("exp", w)) is bf16
    assert why(w).is_specified
    assert not why(w.gradient).is_specified


def test_specify_on_a_settled_node() -> None:
    g = Graph()
    y = g.op("exp", g.array("x", f16), label="y")
    settle(solve_precisions([y]), [y], "train_step")
    specify(y, f16)
    with pytest.raises(PrecisionError, match="y: cannot specify bf16, routine 'train_step' settled it at f16"):
        specify(y, bf16)
    specify(y, bf16, only_if=lambda old: old is f32)
    with pytest.raises(PrecisionError, match="routine 'train_step' settled it at f16"):
        specify(y, bf16, only_if=is_float)
    assert y.specified is None
    assert not g.session.updates


# -- the constant guard ---------------------------------------------------------------------------------------------


def guarded(value: object, format_: Prec) -> None:
    """Check one literal read by an op of a given precision."""
    g = Graph()
    result = g.op("add", g.array("x", format_), g.literal(value))
    solution = solve_precisions([result])
    check_literals(solution, solution.nodes)


@pytest.mark.parametrize(
    ("value", "format_"),
    [
        (65504, f16), (-65504.0, f16), (math.inf, f16), (math.nan, f8e4m3), (448, f8e4m3), (3.38e38, bf16), (255, u8),
        (-128, i8), (2.0, u8), ([[0, 1], [2, 3]], u8), (True, bool_), (2**63 - 1, i64), (0.1, f16),
    ],
)  # fmt: skip
def test_representable_literals(value: object, format_: Prec) -> None:
    guarded(value, format_)


@pytest.mark.parametrize(
    ("value", "format_", "said"),
    [
        (65505, f16, "reaches 65504 only"), (-1e5, f16, "reaches 65504 only"), (math.inf, f8e4m3, "has no infinity"),
        (449, f8e4m3, "reaches 448 only"), (1e39, f32, "only"), (2**2000, f64, "only"), (256, u8, "holds 0 to 255 only"),
        (-1, u8, "holds 0 to 255 only"), (math.nan, i32, "holds integers only"), (math.inf, i32, "holds integers only"),
        ([[0, 1], [2, 300]], u8, "constant 300 of node"),
    ],
)  # fmt: skip
def test_literals_out_of_range(value: object, format_: Prec, said: str) -> None:
    with pytest.raises(ConstantRangeError, match=said):
        guarded(value, format_)


def test_arrays_are_data() -> None:
    g = Graph()
    x = g.array("big", f32)
    specify_node(g.op("neg", x), f16)
    solution = solve_precisions([x])
    check_literals(solution, solution.nodes)


def test_long_chains_need_no_recursion() -> None:
    g = Graph()
    first = node = g.placeholder("x")
    for _ in range(3000):
        node = g.op("neg", node)
    specify(first, bf16)
    assert prec(node) is bf16
    assert explanation(node).count("\n") == 3000


def test_roles_without_a_record_have_their_default() -> None:
    g = Graph()
    cell = Node(Role.CELL, "cell", session=g.session)
    assert prec(cell) is f32
    cell.specified = Specified(f64, cell.source, "cell")
    assert why(cell).note == "cell"
