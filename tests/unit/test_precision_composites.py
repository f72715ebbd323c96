"""Composites in precision inference: one op outside, compute precision inside, what feeds a contraction, kept kinds."""

from __future__ import annotations

import pytest

from stagedtensor.explain import explanation
from stagedtensor.node import Node
from stagedtensor.policy import PrecisionPolicy
from stagedtensor.precision import Prec, bf16, f8e4m3, f16, f32, f64, i32
from stagedtensor.precision_requests import specify
from stagedtensor.precision_solver import solve_precisions
from tests.oracles.precision_graphs import Graph, Root


def prec(node: Node | None) -> Prec:
    """The solved precision of a node, fixpoint checked."""
    assert node is not None
    return solve_precisions([node], debug=True).prec(node)


def grad(node: Node) -> Prec:
    """The solved precision of a node's gradient."""
    return prec(node.gradient)


def interior(result: Node) -> dict[str, Node]:
    """The interior values of a composite by label."""
    found: dict[str, Node] = {}
    stack = [result]
    while stack:
        node = stack.pop()
        if node.record is not None and node.label not in found:
            for operand in node.record.operands:
                if operand.node.composite is not None:
                    stack.append(operand.node)
        if node.composite is not None:
            found[node.label] = node
    return found


@pytest.mark.parametrize(("given", "inside"), [(bf16, f32), (f16, f32), (f8e4m3, f32), (f32, f32), (f64, f64)])
def test_composite_computes_wide_and_rounds_once(given: Prec, inside: Prec) -> None:
    g = Graph()
    x = g.placeholder("x", given, requires_grad=True)
    y = g.softmax(x)
    nodes = interior(y)
    assert set(nodes) == {"x.in", "top", "sub", "exponential", "total", "quotient"}
    assert {prec(node) for node in nodes.values()} == {inside}
    assert {grad(node) for node in nodes.values()} == {inside}
    assert (prec(y), grad(y), grad(x)) == (given, f64 if given is f64 else f32, f64 if given is f64 else f32)
    assert "inside composite softmax" in explanation(nodes["total"])


def test_composite_demands_and_gathers_as_one_op() -> None:
    g = Graph()
    x = g.placeholder("x")
    y = g.softmax(x)
    specify(y, bf16)
    assert (prec(x), prec(interior(y)["x.in"])) == (bf16, f32)
    counts = g.softmax(g.placeholder("counts", i32))
    assert prec(counts) is f32
    assert {prec(node) for node in interior(counts).values()} == {f32}


def test_wide_result() -> None:
    g = Graph()
    logits, labels = g.placeholder("logits", bf16, requires_grad=True), g.placeholder("labels")

    def inside(logits: Node, labels: Node) -> Node:
        return g.sum(g.gather(logits, labels))

    loss = g.composite("cross_entropy", inside, logits, labels, float_only=True, wide_result=True, index=[1])
    PrecisionPolicy.uniform(f16).apply(Root(loss))
    assert (prec(loss), grad(loss), prec(labels), prec(interior(loss)["labels.in"])) == (f32, f32, i32, i32)
    assert (prec(logits), grad(logits), prec(interior(loss)["logits.in"])) == (bf16, f16, f32)
    assert "(R2 bottom-up, a loss is f32 or wider)" in explanation(loss)


@pytest.mark.parametrize(
    ("result", "gradient", "operand", "feed"),
    [(bf16, f32, bf16, bf16), (f16, f32, f16, f32), (f16, f16, f16, f16), (f32, f32, f32, f32)],
)
def test_contractions_inside_read_the_result_precision(result: Prec, gradient: Prec, operand: Prec, feed: Prec) -> None:
    g = Graph()
    w, b, x = g.param("w", f32), g.param("b", f32), g.placeholder("x", f32)

    def inside(w: Node, x: Node, b: Node) -> Node:
        return g.op("relu", g.op("add", g.matmul(w, x, "product"), b, label="preactivation"), label="activation")

    y = g.composite("dense", inside, w, x, b)
    specify(y, result)
    specify(y.gradient, gradient)
    nodes = interior(y)
    assert {prec(nodes["w.in"]), prec(nodes["x.in"])} == {operand}
    assert {prec(nodes[name]) for name in ("b.in", "product", "preactivation", "activation")} == {f32}
    assert grad(nodes["product"]) is feed
    assert {grad(nodes[name]) for name in ("w.in", "b.in", "preactivation", "activation")} == {f32}


def test_a_product_without_a_sum_is_no_contraction() -> None:
    g = Graph()
    x = g.placeholder("x", bf16)

    def inside(x: Node) -> Node:
        return g.op("einsum", g.op("exp", x, label="factor"), x, label="product", reduction="add", combine="mul")

    nodes = interior(g.composite("scaled", inside, x))
    assert {prec(node) for node in nodes.values()} == {f32}


def test_nested_composites_follow_the_outermost() -> None:
    g = Graph()
    q = g.placeholder("q", bf16)

    def inside(q: Node) -> Node:
        probabilities = g.softmax(g.matmul(q, q, "scores"))
        return g.matmul(probabilities, q, "out")

    y = g.composite("attention", inside, q)
    nodes = interior(y)
    assert prec(nodes["softmax"]) is bf16
    assert prec(nodes["quotient"]) is f32
    assert "inside composite attention" in explanation(nodes["quotient"])


def test_integers_that_a_composite_makes_stay_integers() -> None:
    g = Graph()
    x = g.placeholder("x", bf16)

    def inside(x: Node) -> Node:
        at = g.op("add", g.range(4), 1, label="at")
        return g.op("where", g.op("lt", at, g.range(4), label="mask"), x, 0.0, label="masked")

    nodes = interior(g.composite("causal", inside, x))
    assert (prec(nodes["at"]), prec(nodes["1"]), prec(nodes["mask"])) == (i32, i32, i32)
    assert (prec(nodes["0.0"]), prec(nodes["masked"])) == (f32, f32)


def test_keep_f32_pins_the_composite_between_narrow_contractions() -> None:
    g = Graph()
    q, k, v = g.param("q"), g.param("k"), g.param("v")
    scores = g.matmul(q, k, "scores")
    probabilities = g.softmax(scores)
    out = g.matmul(v, probabilities, "out")
    PrecisionPolicy.uniform(bf16).apply(Root(out), keep_f32=("softmax",))
    nodes = interior(probabilities)
    assert {prec(node) for node in (*nodes.values(), probabilities)} == {f32}
    assert {prec(node) for node in (scores, out, q, k, v)} == {bf16}
    assert (grad(probabilities), grad(scores), grad(q)) == (f32, bf16, bf16)
