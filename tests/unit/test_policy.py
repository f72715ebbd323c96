"""Direct and conditional specifications, policies, predicates, and what they say when they refuse."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest

from stagedtensor.errors import PrecisionError
from stagedtensor.explain import explanation, why
from stagedtensor.node import Node, Specified
from stagedtensor.policy import KEEP_F32, PrecisionPolicy
from stagedtensor.precision import Prec, bf16, f16, f32, f64, i32, u4x32
from stagedtensor.precision_requests import specify, specify_node
from stagedtensor.precision_solution import settle
from stagedtensor.precision_solver import solve_precisions
from stagedtensor.predicates import (
    Predicate,
    declare_op_kind,
    is_float,
    is_grad,
    is_integer,
    is_narrow,
    kinds_of,
    known_op_kinds,
    label,
    op_kind,
)  # fmt: skip
from tests.oracles.precision_graphs import Graph, Root


def prec(node: Node | None) -> Prec:
    """The solved precision of a node."""
    assert node is not None
    return solve_precisions([node], debug=True).prec(node)


def state_of(g: Graph, *nodes: Node) -> list[Any]:
    """Everything a failed call must leave alone."""
    return [list(g.session.updates), *((node.specified, node.settled, node.saturate) for node in nodes)]


# -- specify --------------------------------------------------------------------------------------------------------


def refuse_conflict(g: Graph, x: Node) -> None:
    specify(x, f16)


def refuse_data(g: Graph, x: Node) -> None:
    specify(g.array("a", f32), f16)


def refuse_integer(g: Graph, x: Node) -> None:
    specify(g.param("w"), i32)


def refuse_integer_gradient(g: Graph, x: Node) -> None:
    specify(g.param("w").gradient, i32)


def refuse_saturating_integer(g: Graph, x: Node) -> None:
    specify(g.placeholder("ids"), i32, saturate=True)


def refuse_flags(g: Graph, x: Node) -> None:
    specify(x, bf16, saturate=True)


def refuse_true_condition(g: Graph, x: Node) -> None:
    specify(x, f16, only_if=is_float)


def refuse_odd_answer(g: Graph, x: Node) -> None:
    specify(x, f16, only_if=lambda old: 1)  # type: ignore[arg-type,return-value]


def refuse_no_gradient(g: Graph, x: Node) -> None:
    specify(g.array("a", f32).gradient, f16)


def refuse_counter_on_parameter(g: Graph, x: Node) -> None:
    specify(g.param("w"), u4x32)


@pytest.mark.parametrize(
    ("attempt", "said"),
    [
        (
            refuse_conflict,
            r"x: cannot specify f16, bf16 is specified already\n  bf16 at test_policy\.py:\d+: .*\n  f16 at",
        ),
        (
            refuse_data,
            r"a: cannot specify f16, f32 is specified already \(by data\)(.|\n)*constant\(array, prec=\.\.\.\)",
        ),
        (refuse_integer, r"w carries a gradient, so it cannot be specified as i32(.|\n)*use cast\(\.\.\., i32\)"),
        (refuse_integer_gradient, r"w\.grad is a gradient, so it cannot be specified as i32"),
        (refuse_saturating_integer, "ids: saturate=True means nothing on i32, which is not a float"),
        (refuse_flags, "x: two different saturate flags for one node\n  saturate=False at test_policy"),
        (refuse_true_condition, "x: cannot specify f16, bf16 is specified already"),
        (refuse_odd_answer, "the condition <lambda> must return True or False, it returned 1 for bf16"),
        (refuse_no_gradient, "specify: expected a tensor or a gradient, got None: this tensor carries no gradient"),
        (refuse_counter_on_parameter, "w carries a gradient, so it cannot be specified as u4x32"),
    ],
)
def test_refused_specifications_change_nothing(attempt: Callable[[Graph, Node], None], said: str) -> None:
    g = Graph()
    x = g.placeholder("x")
    specify(x, bf16)
    before = state_of(g, x)
    with pytest.raises(PrecisionError, match=said):
        attempt(g, x)
    assert state_of(g, x) == before


def test_types_of_arguments() -> None:
    g = Graph()
    x = g.placeholder("x")
    with pytest.raises(TypeError, match="only_if is a condition on a precision"):
        specify(x, f16, only_if=True)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="saturate is True or False, not 1"):
        specify(x, f16, saturate=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="specify: expected a tensor or a node, got float"):
        specify(1.0, f16)
    with pytest.raises(PrecisionError, match="unknown precision 'fp4'"):
        specify(x, "fp4")
    assert state_of(g, x) == [[], (None, None, None)]


def test_repeating_is_no_change() -> None:
    x = Graph().placeholder("x")
    specify(x, "bf16", saturate=True)
    first = x.specified
    specify(x, bf16, saturate=True)
    specify(x, bf16, only_if=is_float)
    specify(x, f16, only_if=is_integer)
    assert x.specified is first
    assert x.saturate is True
    assert solve_precisions([x]).saturates(x)
    assert not x.session.updates


def test_condition_reads_the_solution_without_it() -> None:
    g = Graph()
    x = g.placeholder("x")
    y = g.op("exp", x, label="y")
    z = g.op("exp", y, label="z")
    specify(y, bf16, only_if=lambda old: old is f16)
    specify(z, f16, only_if=lambda old: old is bf16, saturate=True)
    assert (prec(y), prec(z)) == (f32, f32)
    specify(x, f16)
    solution = solve_precisions([x], debug=True)
    assert [solution.prec(node) for node in (x, y, z)] == [f16, bf16, f16]
    assert solution.saturates(z)
    assert not solution.saturates(y)
    assert "z: f16 Specified (R5 only_if <lambda>)   test_policy.py:" in explanation(z)


def test_conditional_node_is_specified_in_every_respect() -> None:
    g = Graph()
    x, w = g.placeholder("x"), g.array("w", f32)
    specify(x, bf16, only_if=is_float)
    wide = g.op("add", x, w)
    narrow = g.op("exp", x)
    assert (prec(x), prec(wide), prec(narrow)) == (bf16, f32, bf16)


def test_conditions_in_conflict() -> None:
    g = Graph()
    x = g.placeholder("x")
    specify(x, bf16, only_if=is_float)
    with pytest.raises(
        PrecisionError, match=r"x: cannot specify f16, bf16 is specified already, for this condition holds"
    ):
        specify(x, f16)
    assert x.specified is None
    specify(x, f16, only_if=is_float)
    with pytest.raises(PrecisionError, match="x: two conditions hold that specify different precisions"):
        solve_precisions([x])


def test_condition_that_answers_oddly() -> None:
    x = Graph().placeholder("x")
    specify(x, bf16, only_if=lambda old: "yes")  # type: ignore[arg-type,return-value]
    with pytest.raises(PrecisionError, match="must return True or False, it returned 'yes' for f32"):
        solve_precisions([x])


def test_direct_specification_before_or_after_a_false_condition() -> None:
    for first in (True, False):
        x = Graph().placeholder("x")
        if first:
            specify(x, i32)
        specify(x, bf16, only_if=is_float)
        if not first:
            specify(x, i32)
        assert prec(x) is i32


def test_loss_yields_to_the_user_in_either_order() -> None:
    for first in (True, False):
        x = Graph().placeholder("x")
        if first:
            specify(x, f16)
        assert specify_node(x, f32, "loss") is not first
        if not first:
            specify(x, f16)
        assert why(x).prec is f16
    x = Graph().placeholder("x")
    specify_node(x, f32, "loss")
    specify(x, f16, only_if=is_float)
    assert prec(x) is f16


def test_loss_on_a_settled_node() -> None:
    g = Graph()
    x = g.op("exp", g.array("a", f16), label="loss")
    settle(solve_precisions([x]), [x], "eval")
    with pytest.raises(PrecisionError, match="loss: cannot specify f32, routine 'eval' settled it at f16"):
        specify_node(x, f32, "loss")


def test_masters_keep_what_they_have() -> None:
    g = Graph()
    w, v = g.param("w", f16), g.param("v")
    assert not specify_node(w, f32, "master", unless_specified=True)
    assert specify_node(v, f32, "master", unless_specified=True)
    assert (prec(w), prec(v)) == (f16, f32)


# -- policies -------------------------------------------------------------------------------------------------------


def test_classes() -> None:
    g = Graph()
    w, frozen, x, ids = g.param("w"), g.param("frozen", trainable=False), g.placeholder("x"), g.placeholder("ids", i32)
    data, half = g.array("data", f32), g.literal(0.5)
    rows = g.gather(w, ids)
    y = g.op("add", g.op("mul", g.op("mul", rows, x), frozen), g.op("mul", data, half))
    PrecisionPolicy(param=f16, activation=bf16, grad=f64).apply(Root(y))
    assert [prec(node) for node in (w, frozen, x, rows, y, half)] == [f16, f16, bf16, bf16, bf16, bf16]
    assert [prec(node) for node in (ids, data)] == [i32, f32]
    assert [prec(node.gradient) for node in (w, rows, y)] == [f64, f64, f64]
    assert explanation(w).startswith("w: f16 Specified (R5 policy(param=f16, activation=bf16, grad=f64))")


def test_later_nodes_are_not_covered() -> None:
    g = Graph()
    x = g.placeholder("x")
    y = g.op("exp", x)
    PrecisionPolicy(activation=bf16).apply(Root(y))
    later = g.op("add", y, g.placeholder("z", f32))
    assert (prec(y), prec(later)) == (bf16, f32)


def test_first_policy_wins_and_repeating_is_idempotent() -> None:
    g = Graph()
    y = g.op("exp", g.placeholder("x"), label="y")
    first = PrecisionPolicy(activation=bf16)
    first.apply(Root(y))
    text = explanation(y)
    first.apply(Root(y))
    assert explanation(y) == text
    PrecisionPolicy(activation=f16).apply(Root(y))
    assert prec(y) is bf16
    assert "declined f16 asked by policy(activation=f16) (the node is Specified at bf16 already)" in explanation(y)


def test_direct_call_wins_over_a_policy_in_either_order() -> None:
    for first in (True, False):
        g = Graph()
        y = g.op("exp", g.placeholder("x"))
        if first:
            specify(y, f16)
        PrecisionPolicy(activation=bf16).apply(Root(y))
        if not first:
            specify(y, f16)
        assert prec(y) is f16


def test_condition_sees_the_policy_before_it() -> None:
    g = Graph()
    y = g.op("exp", g.placeholder("x"))
    PrecisionPolicy(activation=bf16).apply(Root(y))
    specify(y, f32, only_if=is_narrow)
    assert prec(y) is f32


def test_exceptions_are_pinned_not_skipped() -> None:
    g = Graph(default_prec=f64)
    x, w = g.placeholder("x"), g.param("w")
    hidden = g.matmul(w, x, "hidden")
    y = g.op("exp", hidden, label="y")
    PrecisionPolicy.uniform(bf16).apply(Root(y), except_=label("^hidden$") & ~is_grad)
    assert [prec(node) for node in (x, w, hidden, y)] == [bf16, bf16, f64, bf16]
    assert prec(hidden.gradient) is bf16


def test_exceptions_apply_where_the_class_is_left_open() -> None:
    g = Graph()
    hidden = g.matmul(g.param("w"), g.placeholder("x"), "hidden")
    PrecisionPolicy(param=bf16).apply(Root(hidden), except_=label("hidden"))
    assert prec(hidden) is f32


def test_precedence_of_keep_except_and_class() -> None:
    g = Graph(default_prec=f64)
    x = g.placeholder("x")
    y = g.softmax(x)
    z = g.op("exp", y)
    PrecisionPolicy.uniform(bf16).apply(Root(z), except_=op_kind("softmax", "exp"), keep_f32=KEEP_F32)
    assert (prec(x), prec(y), prec(z)) == (bf16, f32, f64)


def test_settled_nodes_refuse_a_policy() -> None:
    g = Graph()
    y = g.op("exp", g.placeholder("x"), label="y")
    z = g.op("exp", y)
    settle(solve_precisions([y]), [y], "eval")
    with pytest.raises(PrecisionError, match="y: cannot specify bf16, routine 'eval' settled it at f32"):
        PrecisionPolicy(activation=bf16).apply(Root(z))
    assert not g.session.updates
    PrecisionPolicy(activation=bf16).apply(Root(z), except_=label("^y$"))
    assert (prec(y), prec(z)) == (f32, bf16)


def test_policy_passes_regions_by() -> None:
    g = Graph()
    y = g.op("exp", g.placeholder("x"))
    y.specified = Specified(f16, y.source, "region")
    PrecisionPolicy(activation=bf16).apply(Root(y))
    assert prec(y) is f16


def test_bad_policies() -> None:
    g = Graph()
    x = g.placeholder("x")
    with pytest.raises(ValueError, match="give at least one of param, activation, grad"):
        PrecisionPolicy()
    with pytest.raises(PrecisionError, match="PrecisionPolicy: activation=i32 is no float precision"):
        PrecisionPolicy(activation=i32)
    policy = PrecisionPolicy.uniform("bf16")
    for wrong in (None, 3.0, x):
        with pytest.raises(TypeError, match=r"PrecisionPolicy.apply: expected a tensor, got"):
            policy.apply(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="except_ is a predicate on nodes"):
        policy.apply(Root(x), except_=3)  # type: ignore[arg-type]
    with pytest.raises(
        PrecisionError, match="except_: the condition <lambda> must return True or False, it returned None"
    ):
        policy.apply(Root(x), except_=lambda node: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(PrecisionError, match=r"keep_f32: unknown op kind 'sofmax'(.|\n)*near matches: softmax"):
        policy.apply(Root(x), keep_f32=("sofmax",))
    assert not g.session.updates
    assert policy == PrecisionPolicy(bf16, bf16, bf16)


def test_updates_die_with_their_nodes() -> None:
    g = Graph()
    specify(g.placeholder("x"), bf16, only_if=is_float)
    assert len(g.session.updates) == 1
    gc.collect()
    kept = g.placeholder("y")
    specify(kept, bf16, only_if=is_float)
    assert len(g.session.updates) == 1


# -- predicates -----------------------------------------------------------------------------------------------------


def test_predicates_combine() -> None:
    g = Graph()
    y = g.softmax(g.param("layers.0.norm"))
    assert op_kind("softmax")(y)
    assert op_kind("softmax")(y.gradient)  # type: ignore[arg-type]
    assert not (op_kind("softmax") & ~is_grad)(y.gradient)  # type: ignore[arg-type]
    assert (label("norm") | op_kind("exp"))(y.record.operands[0].node) is False  # type: ignore[union-attr]
    assert repr(~is_float | is_narrow) == "(~is_float | is_narrow)"
    either: Predicate[Prec] = is_integer | (lambda old: old is f64)
    assert (either(f64), either(i32), either(f32)) == (True, True, False)
    assert "softmax" in kinds_of(y)
    assert "leave" in kinds_of(y)


def test_op_kinds_are_checked() -> None:
    with pytest.raises(
        PrecisionError, match=r"op_kind: unknown op kind 'layernorm'(.|\n)*layer_norm(.|\n)*known kinds:"
    ):
        op_kind("layernorm")
    declare_op_kind("my_block")
    assert op_kind("my_block").name == "op_kind(my_block)"
    assert "my_block" in known_op_kinds()
    with pytest.raises(ValueError, match=r"label: '\(' is no regular expression"):
        label("(")
