"""Computations: binding names, trees, index maps, shapes, errors, and what they compute on the reference device."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor.errors import GradientError, PrecisionError, ShapeError, SpecError
from stagedtensor.language.computation import FUNCTIONS, assign
from stagedtensor.node import Role
from stagedtensor.op_table import OPS
from stagedtensor.program import Comp, as_computation, solve_program
from stagedtensor.specs import CONTRACTION
from stagedtensor.statements import Access, Apply, NumberLiteral, Stage, Statement
from stagedtensor.tensor import Tensor
from stagedtensor.terminals import cell, state

pytestmark = pytest.mark.usefixtures("session")

Array = np.ndarray[Any, Any]


def store(name: str, values: Any, **options: Any) -> Tensor:
    """A frozen parameter that holds ``values``."""
    return st.param(name, init=np.asarray(values, np.float32), trainable=False, **options)


def only(comp: Comp) -> Statement:
    ((statement, _),) = comp.statements()
    return statement


def run(comp: Comp, *tensors: Tensor, device: str = "reference") -> list[Array]:
    with st.Context(device) as ctx:
        routine = ctx.compile(comp, keep=tensors)
        ctx.init_params([node.tensor for node in comp.nodes() if node.role is Role.PARAM])
        ctx.run(routine)
        return [ctx.get_values(tensor) for tensor in tensors]


# -- trees --------------------------------------------------------------------------------------------------------


def test_one_statement_is_one_tree() -> None:
    p, m = st.param("p", output=[3]), st.param("m", output=[3], trainable=False)
    gradient = p.grad
    assert gradient is not None
    statement = only(st.computation("m =: beta *. m + p.grad", p=p, m=m, beta=0.9))
    rows = statement.target.rows
    assert statement.expr == Apply(
        "add",
        (Apply("mul", (NumberLiteral(0.9), Access(m.node, rows))), Access(gradient.node, rows)),
    )
    assert (statement.op, statement.reset, statement.stage) == (None, True, Stage.UPDATE)
    assert statement.text == "m =: beta *. m + p.grad"
    assert statement.source is not None
    assert statement.source.text.startswith("statement = only(st.computation(")


def test_numbers_are_literals_of_the_tree_not_nodes() -> None:
    p = st.param("p", output=[3])
    values = {"a": 2, "b": np.float32(0.5), "c": True, "d": np.int64(3)}
    statement = only(st.computation("p =: a + b + c + d", p=p, **values))
    assert not statement.reads()
    assert "2 + 0.5 + True + 3" in repr(Comp((statement,)))


def test_gradients_may_be_bound_and_assigned() -> None:
    p = st.param("p", output=[3])
    gradient = p.grad
    assert gradient is not None
    statement = only(st.computation("g =* scale", g=gradient, scale=2.0))
    assert statement.target.node is gradient.node
    assert only(st.computation("p.grad =* 2", p=p)).target.node is statement.target.node


def test_contraction_is_the_matrix_product() -> None:
    y, a, b = (st.param(name, trainable=False) for name in "yab")
    statement = only(st.computation("y =:+ a * b", y=y, a=a, b=b))
    assert statement.scope.spec.operands == CONTRACTION.operands
    assert (statement.op, statement.reset) == ("add", True)


def test_every_table_op_is_a_function() -> None:
    p = st.param("p", output=[3])
    tested = 0
    for name, (op, arity) in FUNCTIONS.items():
        statement = only(st.computation(f"p =: {name}({', '.join(['p'] * arity)})", p=p))
        assert isinstance(statement.expr, Apply)
        assert statement.expr.op == ("minimum" if op == "clamp" else op)
        tested += 1
    assert tested >= len([op for op in OPS.values() if op.op_class not in ("random",)])


def test_repr_reads_as_written() -> None:
    p, m, x = st.param("p", output=[3], input=[2]), st.param("m", trainable=False), st.placeholder("x", output=[2])
    y = p @ x
    step = st.sequence(
        st.forward(y),
        st.comment("momentum", st.computation("m =: 0.9 *. m + p.grad", p=p, m=m)),
        assign(cell("total"), "add", lambda g: Apply("mul", (g, g)), m, spec="...|...->... =>"),
    )
    assert repr(step).splitlines()[1:] == [
        "  matmul =:+ p * x",
        "  # momentum",
        "  m =: 0.9 *. m + p.grad",
        "  #",
        '  total =+ m *. m  ~logic:"...|...->...; ...|...->... =>"',
    ]


# -- programs -----------------------------------------------------------------------------------------------------


def test_sequence_keeps_order_labels_and_attributes() -> None:
    p = st.param("p", output=[3])
    first, second = st.computation("p =* 2", p=p), st.computation("p =+ 1", p=p)
    marked = Comp(first.parts, "scale", attributes={"twice": True})
    joined = st.comment("all of it", st.sequence(st.comment("a", marked), second))
    assert [path for _, path in joined.statements()] == [("all of it", "a"), ("all of it",)]
    assert joined.attributes == {"twice": True}
    assert joined.name == "scale_computation"
    assert st.sequence(first) is first


def test_the_same_statements_have_the_same_key() -> None:
    p, m = st.param("p", output=[3]), st.param("m", output=[3], trainable=False)

    def key(text: str, **numbers: float) -> Any:
        return st.computation(text, p=p, m=m, **numbers).key()

    assert key("p =- 0.5 *. m") == key("p =- lr *. m", lr=0.5)
    assert hash(key("p =- m")) == hash(key("p =- m"))
    different = ["p =- m", "p =+ m", "p =:- m", "p =- m *. 0.0", "p =- m *. -0.0", "p =- m *. 0", "m =- m", "p =- p"]
    assert len({key(text) for text in different}) == len(different)
    assert key("p =: x", x=math.nan) == key("p =: x", x=math.nan)


def test_forward_lists_shared_ancestors_once() -> None:
    x = st.placeholder("x", output=[3])
    a = (x * 2.0).named("a")
    b, c = (a + 1.0).named("b"), (a - 1.0).named("c")
    comp = st.forward(b, c)
    assert [statement.target.node.label for statement, _ in comp.statements()] == ["a", "b", "c"]
    assert as_computation([b, c])[1] == (b.node, c.node)
    assert as_computation(b)[0].key() == st.forward(b).key()
    assert as_computation(comp) == (comp, ())


def test_wrong_arguments_of_builders() -> None:
    x = st.placeholder("x", output=[3])
    with pytest.raises(TypeError, match=r"sequence: expected a computation, got Tensor .*st\.forward"):
        st.sequence(x)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="non-empty text"):
        st.comment(" ", st.forward(x))
    with pytest.raises(TypeError, match="forward: expected tensors, got int"):
        st.forward(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"got list .*st\.sequence"):
        as_computation([st.forward(x)])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="got int"):
        as_computation(3)  # type: ignore[arg-type]


def test_solving_settles_nothing_until_asked() -> None:
    p = st.param("p")
    m = state(p, "momentum", st.f32)
    comp = st.computation("m =: beta *. m + p.grad; p =- m", p=p, m=m, beta=0.5)
    loss = st.sum(p * st.placeholder("x", output=[4]))
    solved = solve_program(comp, "update", keep=[loss])
    assert (str(solved.shape(m.node)), solved.prec(p.node)) == ("4", st.f32)
    assert loss.node in solved.nodes
    assert loss.node in solved.keep
    assert p.node.settled is None
    assert p.node.settled_shape is None
    solved.settle()
    assert p.node.settled is not None
    assert p.node.settled.routine == "update"
    assert p.node.settled_shape is not None
    assert str(p.node.settled_shape.shape) == "4"


def test_solving_checks_literals() -> None:
    x = st.placeholder("x", output=[2], prec=st.f16)
    with pytest.raises(PrecisionError, match="70000"):
        solve_program(x * 70000.0)


# -- shapes -------------------------------------------------------------------------------------------------------


def test_an_open_operand_takes_the_shape_of_the_target_but_never_gives_it() -> None:
    p, q = st.param("p", output=[2, 3]), st.param("q", trainable=False)
    assert str(solve_program(st.computation("p =: 2 *. q", p=p, q=q)).shape(q.node)) == "2,3"
    other = st.param("other", trainable=False)
    with pytest.raises(ShapeError, match="nothing determines the output row of parameter 'other'"):
        solve_program(st.computation("other =: 2 *. p", p=p, other=other))


def test_operands_never_widen_the_target() -> None:
    p, x = st.param("p", output=[3]), st.placeholder("x", batch=[5], output=[3])
    with pytest.raises(ShapeError) as caught:
        solve_program(st.computation("p =- x", p=p, x=x))
    assert "assignment to p" in str(caught.value)


def test_the_same_assignment_again_is_no_new_constraint() -> None:
    p, m = st.param("p", output=[3]), st.param("m", output=[3], trainable=False)
    first = only(st.computation("p =- m", p=p, m=m))
    again = only(st.computation("p =- m", p=p, m=m))
    assert first.scope is again.scope
    assert len(p.node.writers) == 1


def test_a_failed_text_adds_no_constraint() -> None:
    p, m = st.param("p", output=[3]), st.param("m", output=[3], trainable=False)
    with pytest.raises(SpecError):
        st.computation("p =- m; p =- q", p=p, m=m)
    assert not p.node.writers


# -- errors -------------------------------------------------------------------------------------------------------

FAULTS = [
    ("pp =: 1", 0, ["unknown name 'pp'", "did you mean 'p'?"]),
    ("p =: q", 5, ["unknown name 'q'", "known here: "]),
    ("p =: expp(p)", 5, ["unknown function 'expp'", "did you mean 'exp'"]),
    ("p =: p(1)", 5, ["'p' is a tensor or number, not a function"]),
    ("p =: exp(p, p)", 5, ["exp has 1 argument, 2 were given"]),
    ("p =: where(p, p)", 5, ["where has 3 arguments, 2 were given", "where(a, b, c)"]),
    ("p =:+ p *. (p * x)", 14, ["the whole right side or nothing", "'*.'"]),
    ("y =: p * x", 2, ["'=:' sets each cell once", "contracts", "'=:+'"]),
    ("y =:+ 2 * x", 8, ["one side is a number"]),
    ("beta =: 1", 0, ["'beta' is the number 2"]),
    ("x =: 1", 0, ["'x' is data that the host feeds and cannot be assigned"]),
    ("lr =: 1", 0, ["only the host writes"]),
    ("c =: 1", 0, ["'c' is a constant"]),
    ("twin =: p", 0, ["a cast of the parameter 'p'"]),
    ("p =: p ~logic:'ij=>i'", 2, ["'=:' sets each cell once", "reduces the indices"]),
    ("p =: 1 ~logic:'i=>i'", 15, ["reads no tensor"]),
]


@pytest.mark.parametrize(("text", "column", "words"), FAULTS, ids=[fault[0] for fault in FAULTS])
def test_faults_point_at_the_place(text: str, column: int, words: list[str]) -> None:
    p, x = st.param("p", output=[3], input=[2]), st.placeholder("x", batch=[4], output=[2])
    names = {
        "p": p,
        "x": x,
        "y": p @ x,
        "beta": 2,
        "lr": st.host_scalar("lr", 0.1),
        "c": st.constant([1.0, 2.0, 3.0]),
        "twin": st.cast(p, st.bf16),
    }
    with pytest.raises(SpecError) as caught:
        st.computation(text, **names)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("statement: ")
    assert lines[1] == f"  {text}"
    assert lines[2] == f"  {' ' * column}^"
    assert "at test_computation.py:" in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_missing_gradients() -> None:
    x, frozen = st.placeholder("x", output=[2]), st.param("w", output=[2], trainable=False)
    for text in ("w =: x.grad", "x.grad =: 0"):
        with pytest.raises(GradientError, match=r"x\.grad: 'x' has no gradient"):
            st.computation(text, w=frozen, x=x)
    with pytest.raises(GradientError, match="'g' is None"):
        st.computation("w =: g", w=frozen, g=frozen.grad)
    with pytest.raises(GradientError, match="is the number 2"):
        st.computation("w =: a.grad", w=frozen, a=2)


def test_names_are_tensors_or_numbers() -> None:
    p = st.param("p", output=[2])
    with pytest.raises(SpecError, match=r"'a' is list\n.*\n.*st\.constant"):
        st.computation("p =: a", p=p, a=[1.0, 2.0])


def test_faulty_index_maps_show_the_map() -> None:
    p = st.param("p", output=[3, 3])
    with pytest.raises(SpecError, match="the spec has 1 operand, 2 tensors were given"):
        st.computation("p =+ p *. p ~logic:'ij=>i'", p=p)
    with pytest.raises(SpecError, match="several operands under a joined axis"):
        st.computation("p =: p + p ~logic:'a,c; b,c=>a^b,c'", p=p)


def test_assign_refuses_a_reducing_set() -> None:
    p = st.param("p", output=[3])
    with pytest.raises(SpecError, match="cannot reduce axes"):
        assign(cell("t"), None, lambda a: a, p, spec="i=>")


# -- values -------------------------------------------------------------------------------------------------------

P, M = np.array([1.0, -2.0, 3.5], np.float32), np.array([0.25, 0.5, -4.0], np.float32)

VALUES = [
    ("p =: p - m", P - M),
    ("p =+ m", P + M),
    ("p =- 2 *. m", P - 2 * M),
    ("p =* m", P * M),
    ("p =/ m", P / M),
    ("p =@^ m", np.maximum(P, M)),
    ("p =@- m", np.minimum(P, M)),
    ("p =:+ m", M),
    ("p =:- m", -M),
    ("p =:/ m", 1 / M),
    ("p =: where(p < m, p, 10)", np.where(P < M, P, 10)),
    ("p =: clamp(p, -1, 2)", np.clip(P, -1, 2)),
    ("p =: p **. 2 - ~-m", P**2 + M),
    ("p =: sqrt(abs(p)) /. 2", np.sqrt(np.abs(P)) / 2),
    ("p =: and(p > 0, not(m > 0))", np.array([0.0, 0.0, 1.0])),
    ("p =* p; p =+ p", 2 * P * P),
    ("p =: 7", np.full(3, 7.0)),
    ("p =:+ m *. p ~logic:'i; j => i'", M * P.sum()),
    ("p =@^ m ~logic:'i => j'", np.maximum(P, M.max())),
]


@pytest.mark.parametrize(("text", "expected"), VALUES, ids=[case[0] for case in VALUES])
def test_values(text: str, expected: Array) -> None:
    p, m = store("p", P), store("m", M)
    (found,) = run(st.computation(text, p=p, m=m), p)
    np.testing.assert_allclose(found, expected, rtol=2e-6)


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_contractions_and_index_maps(device: str) -> None:
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((3, 4)).astype(np.float32), rng.standard_normal((4, 2)).astype(np.float32)
    c, start = store("c", np.ones((3, 2))), store("s", np.full((3,), 2.0))
    names = {"a": store("a", a), "b": store("b", b), "c": c, "s": start}
    (found,) = run(st.computation("c =:+ a * b", **names), c, device=device)
    np.testing.assert_allclose(found, a @ b, rtol=1e-5)
    names["b"] = store("bt", b, output=2, input=0)
    names["a"] = store("at", a, output=2, input=0)
    names["c"] = c = store("ct", np.ones((3, 2)), output=2, input=0)
    text = "c =+ a *. b ~logic:'ij;jk=>ik'; s =- c ~logic:'ik=>i'"
    found, summed = run(st.computation(text, **names), c, start, device=device)
    np.testing.assert_allclose(found, 1 + a @ b, rtol=1e-5)
    np.testing.assert_allclose(summed, 2 - (1 + a @ b).sum(1), rtol=1e-5)


def test_one_rounding_at_the_store_and_unrounded_numbers() -> None:
    # in bf16, 1 + 2**-9 rounds to 1: the sum below is only right if nothing but the store rounds
    p = st.param("p", init=np.ones(2, np.float32), trainable=False, prec=st.bf16)
    (found,) = run(st.computation("p =: (p + tiny - 1) *. 1024", p=p, tiny=2.0**-9), p)
    np.testing.assert_array_equal(found.astype(np.float32), np.full(2, 2.0))


def test_captured_sizes_are_numbers() -> None:
    x = store("x", np.arange(6).reshape(2, 3), output=2, input=0)
    y, dims = st.einsum("ij=>i", x, capture=["j"])
    m = store("m", np.zeros(2))
    comp = st.sequence(st.forward(y), st.computation("m =: y /. n", m=m, y=y, n=dims.j))
    with st.Context("reference") as ctx:
        routine = ctx.compile(comp)
        ctx.init_params([x, m])
        ctx.run(routine)
        np.testing.assert_allclose(ctx.get_values(m), [1.0, 4.0])
