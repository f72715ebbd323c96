"""The inference goldens on tensors of the public language, with the composites that the library really builds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor.literal_guard import check_literals
from stagedtensor.node import Node
from stagedtensor.precision_solver import solve_precisions


@pytest.fixture(autouse=True)
def _session() -> Iterator[None]:
    with st.Session():
        yield


def precs(*tensors: Any) -> list[str]:
    """The solved precisions by name."""
    return [solve_precisions([tensor.node], debug=True).prec(tensor.node).name for tensor in tensors]


def test_g1_g2_terminals() -> None:
    for by, of_c, of_d in (("d", "bf16", "bf16"), ("c", "bf16", "f32")):
        a, b, c = (st.placeholder(name) for name in "abc")
        total = a + b
        d = total * c
        st.specify(b, st.f16)
        st.specify({"c": c, "d": d}[by], st.bf16)
        assert precs(a, total, c, d) == ["f16", "f16", of_c, of_d]


def test_g3_g4_comparison_and_where() -> None:
    a, x, y = st.placeholder("a", prec="f16"), st.placeholder("x", prec="f16"), st.placeholder("y", prec="bf16")
    m = a < 1.0
    assert precs(m) == ["f16"]
    st.specify(m, st.u8)
    assert precs(m, st.where(m, x, y)) == ["u8", "f32"]


@pytest.mark.parametrize("narrow", [False, True])
def test_g6_g7_one_hot(narrow: bool) -> None:
    ids, table = st.placeholder("ids", batch=[4], prec="i32"), st.param("table", output=[8], input=[16])
    hot = st.one_hot(ids, 16)
    out = table @ hot
    if narrow:
        st.PrecisionPolicy(param="bf16").apply(out)
    wide = "bf16" if narrow else "f32"
    assert precs(hot, table, out, ids, table.grad) == [wide, wide, wide, "i32", "f32"]


def test_g8_g9_integers() -> None:
    w, ids = st.param("w", output=[4]), st.placeholder("ids", output=[4], prec="i32")
    assert precs(w * ids, w) == ["f32", "f32"]
    solution = solve_precisions([(ids * 0.5).node])
    with pytest.raises(st.errors.ConstantRangeError, match=r"constant 0\.5 of node 0\.5 is i32"):
        check_literals(solution, solution.nodes)


def test_g10_g11_fma_and_cast() -> None:
    a, b, c = st.placeholder("a", prec="f8e4m3"), st.placeholder("b", prec="f8e5m2"), st.placeholder("c", prec="bf16")
    w = st.param("w", output=[4])
    assert precs(st.fma(a, b, c), a * b, a * b + c, st.cast(w, "f16"), w) == ["bf16", "f16", "f32", "f16", "f16"]


def test_g12_g16_policies() -> None:
    w1, b1 = st.param("w1", output=[16]), st.param("b1")
    w2, b2, x = st.param("w2", output=[4]), st.param("b2"), st.placeholder("x", batch=[2], output=[8], prec="f32")
    y = w2 @ st.relu(w1 @ x + b1) + b2
    st.PrecisionPolicy(param="bf16", activation="bf16").apply(y, except_=st.label("^b2$"))
    assert precs(w1, b2, y, x) == ["bf16", "f32", "bf16", "f32"]
    assert precs(*(part.grad for part in (w1, b1, w2, b2, y))) == ["f32"] * 5


def interior_precs(result: Any) -> set[str]:
    """Precisions of all nodes inside the composite that ``result`` leaves."""
    record = result.node.record
    assert record is not None
    inside: list[Node] = record.composite.interior
    solution = solve_precisions([result.node], debug=True)
    return {solution.prec(node).name for node in inside if node.role.value in ("op", "gradient")}


@pytest.mark.parametrize(
    "build", [st.softmax, st.log_softmax, st.layer_norm, st.gelu, st.mean], ids=lambda f: f.__name__
)
def test_library_composites_compute_wide(build: Any) -> None:
    x = st.param("x", output=[8])
    y = build(st.cast(x, "bf16"))
    assert precs(y) == ["bf16"]
    assert interior_precs(y) == {"f32"}


def test_uniform_policy_with_kept_kinds() -> None:
    q, k = st.param("q", output=[4], input=[8]), st.placeholder("k", batch=[3], output=[8])
    scores = q @ k
    weights = st.softmax(scores)
    loss = st.cross_entropy(weights + scores, np.array([0, 1, 2]))
    st.PrecisionPolicy.uniform("bf16").apply(loss, keep_f32=st.KEEP_F32)
    assert precs(q, k, scores, weights, weights.grad, scores.grad) == ["bf16", "bf16", "bf16", "f32", "f32", "bf16"]
    assert precs(loss, loss.grad) == ["f32", "f32"]


def test_mean_of_integers_is_a_float_inside() -> None:
    counts = st.mean(st.placeholder("i", output=[5], prec="i32"))
    assert precs(counts) == ["f32"]
    assert interior_precs(counts) == {"f32"}
