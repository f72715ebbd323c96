"""Regions: what crosses, what is pinned, what is inferred on either side, and how weights are kept."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor.errors import ConstantRangeError, LanguageError, PrecisionError
from tests.oracles.gradients import grad_of

from .networks import Network


def crossings(root: st.Tensor) -> list[str]:
    return [f"{item.src}->{item.dst} {item.side}" for item in st.boundaries(root)]


def x_of(*shape: int, prec: Any = None) -> st.Tensor:
    return st.placeholder("x", batch=[3], output=list(shape), prec=prec)


# -- forms ------------------------------------------------------------------------------------------------------------


def test_forms_agree() -> None:
    def in_context(x: st.Tensor) -> st.Tensor:
        with st.stage("body", prec=st.f16):
            layer = st.nn.dense(4)
            return layer(x)

    forms: dict[str, Callable[[st.Tensor], st.Tensor]] = {
        "context": in_context,
        "block": lambda x: st.stage("body", prec=st.f16)(lambda: st.nn.dense(4))()(x),
        "built layer": lambda x: st.stage("body", prec=st.f16)(st.nn.dense(4))(x),
        "prec=": lambda x: st.nn.dense(4, prec=st.f16)(x),
        "text": lambda x: st.language.parse(
            'let net () = let layer = nn.dense 4 () in fun x -> stage f16 "body" (layer x)'
        ).net()(x),
    }
    dumps = {name: st.dump(st.mean(st.tanh(build(x_of(6))))) for name, build in forms.items()}
    assert len(set(dumps.values())) == 1, dumps
    assert " enter" in dumps["context"]


def test_a_text_keeps_its_own_weights_narrow() -> None:
    net = st.language.parse('let net () x = stage f16 "body" ~weights:narrow (tanh ({ w; o = [4] } * x))').net()
    loss = st.sum(net(x_of(6)))
    (w,) = loss.params
    assert w.precision is st.f16
    assert [item.role for item in st.converts(loss)] == ["boundary", "boundary"]


def test_a_text_with_a_bad_precision() -> None:
    with pytest.raises(PrecisionError, match="f17"):
        st.language.parse('let net x = stage f17 "body" (x)').net(x_of(6))
    with pytest.raises(LanguageError, match="unknown weights"):
        st.language.parse('let net x = stage f16 "body" ~weights:thin (x)')


@pytest.mark.parametrize("prec", ["i32", st.bool, "f17"])
def test_float_only(prec: Any) -> None:
    made: list[st.Tensor] = []

    def layer(x: st.Tensor) -> st.Tensor:
        made.append(st.param("w", output=[4]))
        return made[0] @ x

    with pytest.raises(PrecisionError):
        st.stage("body", prec=prec)(layer)(x_of(6))
    with pytest.raises(PrecisionError), st.stage("body", prec=prec):
        layer(x_of(6))
    with pytest.raises(PrecisionError):
        st.nn.dense(4, prec=prec)
    assert made == []


@pytest.mark.parametrize("bad", [{"name": ""}, {"name": "a", "weights": "thin"}])
def test_bad_arguments(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="stage"):
        st.stage(**bad)


@pytest.mark.parametrize("report", [st.boundaries, st.converts, st.dump])
def test_reports_of_what_is_no_tensor(report: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=f"{report.__name__}: expected a tensor or a node, got int"):
        report(3)
    with pytest.raises(PrecisionError, match=f"{report.__name__}: expected a tensor"):
        report(x_of(6).grad)


# -- crossing ---------------------------------------------------------------------------------------------------------

OF_N = ["f32->bf16 enter", "bf16->f32 exit", "f32->f16 enter", "f16->f32 exit"]


def test_one_pair() -> None:
    assert crossings(Network(narrow=True).loss) == OF_N
    assert crossings(Network(narrow=False).loss) == []


def test_one_pair_with_three_readers_on_each_side() -> None:
    x = x_of(6)
    with st.stage("body", prec=st.f16):
        y = st.exp(x) + st.tanh(x) * x
    loss = st.sum(y * 2.0) + st.sum(y + 1.0) + st.mean(y)
    assert crossings(loss) == ["f32->f16 enter", "f16->f32 exit"]


def test_same_precision() -> None:
    x = x_of(6, prec=st.f32)
    with st.stage("same", prec=st.f32):
        y = st.tanh(x) * 2.0
    loss = st.sum(y)
    assert st.converts(loss) == []
    assert "stage" not in st.dump(loss)
    undecided = x_of(6) + 1.0
    with st.stage("same", prec=st.f32):
        z = st.tanh(undecided)
    assert st.converts(st.sum(z)) == []


def test_a_boundary_returns_what_is_at_its_target() -> None:
    x = x_of(6, prec=st.f16)
    with st.stage("body", prec=st.f16):
        region = st.tanh(x).node.region
    assert region is not None
    assert st.PrecisionBoundary(st.f16, region, "enter")(x) is x
    integers = st.constant(np.arange(4, dtype=np.int32))
    assert st.PrecisionBoundary(st.f16, region, "enter")(integers) is integers


def test_a_boundary_that_the_solve_finds_equal_is_no_statement() -> None:
    w = st.param("w", output=[4], input=[6])

    def loss(prec: Any) -> st.Tensor:
        h = w @ x_of(6)
        with st.stage("same", prec=prec):
            h = st.tanh(h)
        return st.sum(h * h)

    same, plain, narrow = (st.grad_update(loss(prec)) for prec in (st.f32, None, st.f16))
    counts = [len(st.program.solve_program(comp).statements) for comp in (same, plain, narrow)]
    assert counts[0] == counts[1]
    assert counts[2] == counts[1] + 6  # a convert, a zero and a way back for each of two boundaries


def test_nesting() -> None:
    x, ids = x_of(6), st.constant(np.array([0, 1], np.int32))
    with st.stage("outer", prec=st.bf16):
        with st.stage("inner", prec=st.f16):
            y = st.exp(x)
            assert st.gather(y, ids).node.record.operands[1].node is ids.node  # type: ignore[union-attr]
        z = y * 2.0
    assert crossings(st.sum(z)) == ["f32->bf16 enter", "bf16->f16 enter", "f16->bf16 exit", "bf16->f32 exit"]


def test_siblings_meet_in_their_common_precision() -> None:
    first = st.stage("first", prec=st.f16)(st.tanh)(x_of(6))
    second = st.stage("second", prec=st.f16)(st.exp)(first)
    assert crossings(st.sum(second)) == ["f32->f16 enter", "f16->f32 exit"] * 2


def test_integers_stay_integers_inside() -> None:
    ids = st.constant(np.array([3, 1], np.int32))
    with st.stage("body", prec=st.f16):
        other = ids // 2 + 1
    assert other.precision is st.i32
    assert st.converts(other) == []


# -- inference --------------------------------------------------------------------------------------------------------


def test_barrier() -> None:
    a, b = st.placeholder("a", output=[4]), st.placeholder("b", output=[4], prec=st.bf16)
    c = a * b
    with st.stage("body", prec=st.f16):
        d = c + 1.0
        e = d * b
    f = e + st.placeholder("g", output=[4])
    assert [str(t.precision) for t in (a, c, d, e, f)] == ["bf16", "bf16", "f16", "f16", "f32"]
    assert "R4 region body" in st.explanation(e)


def test_idempotent() -> None:
    net = Network(narrow=True)
    first = st.dump(net.loss)
    assert st.dump(net.loss) == first
    st.PrecisionPolicy.uniform(st.bf16).apply(net.loss)
    once = st.dump(net.loss)
    assert crossings(net.loss) == ["bf16->f32 exit", "bf16->f16 enter", "f16->f32 exit"]
    st.PrecisionPolicy.uniform(st.bf16).apply(net.loss)
    assert st.dump(net.loss) == once != first
    assert [line for line in once.splitlines() if " r1 f16" in line] == [
        line for line in first.splitlines() if " r1 f16" in line
    ]


def test_compiling_changes_no_precision() -> None:
    net = Network(narrow=True)
    comp = st.grad_update(net.loss)
    before = st.dump(net.loss)
    with st.Context("reference") as ctx:
        ctx.compile(comp)
    after = st.dump(net.loss)
    states = ("Specified", "Inferred", "Default", "Settled")
    plain = [" ".join(word for word in text.split() if word not in states) for text in (before, after)]
    assert plain[0] == plain[1]


def test_explicit_precision() -> None:
    with st.stage("body", prec=st.f16):
        kept = st.constant(np.ones(4, np.float32))
        product = st.tanh(kept)
        factor = st.constant(3.0)
    assert [str(t.precision) for t in (kept, product, factor)] == ["f32", "f16", "f16"]
    with pytest.raises(PrecisionError, match="region body"):
        st.specify(product, st.f32)


def test_literals_are_guarded_at_the_precision_of_the_region() -> None:
    with st.stage("body", prec=st.f16):
        y = x_of(6, prec=st.f16) * 70000.0
    with st.Context("reference") as ctx, pytest.raises(ConstantRangeError, match="70000"):
        ctx.compile(st.sum(y))


# -- scope ------------------------------------------------------------------------------------------------------------


def test_scope() -> None:
    with pytest.raises(RuntimeError, match="body"), st.stage("body", prec=st.f16):
        raise RuntimeError("body")
    assert st.tanh(x_of(6)).precision is st.f32

    spent = st.stage("body", prec=st.f16)
    with spent:
        seen: list[Any] = []
        thread = threading.Thread(target=lambda: seen.append(st.tanh(x_of(6)).precision))
        thread.start()
        thread.join()
    assert seen == [st.f32]
    with pytest.raises(PrecisionError, match="entered before"), spent:
        pass


def test_a_layer_applied_twice_has_parameters_once_and_boundaries_twice() -> None:
    layer = st.stage("body", prec=st.f16)(lambda: st.nn.dense(4))()
    loss = st.sum(layer(x_of(6)) + layer(x_of(6)))
    assert len(loss.params) == 2
    assert crossings(loss) == ["f32->f16 enter", "f16->f32 exit"] * 2
    assert [item.role for item in st.converts(loss)].count("twin") == 2


# -- parameters -------------------------------------------------------------------------------------------------------


def test_weights() -> None:
    def loss(weights: Any) -> st.Tensor:
        with st.stage("body", prec=st.f16, weights=weights):
            y = st.param("w", output=[4], input=[6]) @ x_of(6)
        return st.sum(y)

    master, narrow = loss("master"), loss("narrow")
    (wide,), (stored,) = master.params, narrow.params
    assert (wide.precision, stored.precision) == (st.f32, st.f16)
    assert grad_of(wide).precision is st.f32
    assert grad_of(stored).precision is st.f16
    twin = st.twin_of(wide)
    assert twin is not None
    assert twin.precision is grad_of(twin).precision is st.f16
    assert str(twin.shape) == str(wide.shape)
    assert st.twin_of(stored) is None
    assert (wide.label, stored.label) == ("body.w", "body.w")


def test_the_innermost_region_decides_over_master_weights() -> None:
    x = x_of(6)
    with st.master_weights("bf16"), st.stage("body", prec=st.f16):
        y = st.param("w", output=[4], input=[6]) @ x
    loss = st.sum(y)
    assert [f"{item.role} {item.dst}" for item in st.converts(loss)] == ["twin f16", "boundary f16", "boundary f32"]


def test_a_parameter_from_outside_is_read_through_one_twin() -> None:
    w = st.param("w", output=[4])
    with st.stage("body", prec=st.f16):
        y = st.tanh(w) * w
    loss = st.sum(y)
    assert [item.role for item in st.converts(loss)] == ["twin", "boundary"]


def test_a_frozen_parameter_and_one_of_its_own_precision() -> None:
    frozen = st.param("frozen", output=[4], trainable=False)
    with st.stage("body", prec=st.f16):
        own = st.param("own", output=[4], prec=st.f16)
        y = own * frozen
    assert [item.role for item in st.converts(st.sum(y))] == ["twin", "boundary"]
    assert own.precision is st.f16


# -- inside -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [st.layer_norm, st.rms_norm])
@pytest.mark.parametrize(("prec", "count", "bound"), [(st.f16, 64, 2.0**-8), (st.bf16, 1024, 2.0**-5)])
def test_statistics(norm: Callable[[st.Tensor], st.Tensor], prec: st.Prec, count: int, bound: float) -> None:
    rng = np.random.default_rng(0)
    values = (300.0 + rng.uniform(-1, 1, size=(2, count))).astype(np.float32)
    x = st.placeholder("x", batch=[2], output=[count], prec=st.f32)
    y = st.stage("body", prec=prec)(norm)(x)
    assert crossings(st.sum(y)) == [f"f32->{prec} enter", f"{prec}->f32 exit"]
    with st.Context("reference") as ctx:
        routine = ctx.compile(y)
        ctx.set_values(x, values)
        ctx.run(routine)
        found = ctx.get_values(y)
    exact = values.astype(prec.numpy_dtype).astype(np.float64)
    if norm is st.layer_norm:
        exact = exact - exact.mean(-1, keepdims=True)
    exact /= np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-5)
    assert np.abs(found - exact).max() <= bound * np.abs(exact).max()


@pytest.mark.parametrize("placement", ["materialized", "virtual"])
def test_grad_rounds(placement: str) -> None:
    w = st.param("w", output=[4], init=1.0)
    with st.stage("body", prec=st.f16):
        y = st.place(w * 1.0, placement)
        z = st.place(y * 1.0, placement)
    loss = st.sum(z * 70000.0)
    step = st.grad_update(loss)
    with st.Context("cpu") as ctx:
        routine = ctx.compile(step)
        ctx.init_params(loss)
        ctx.run(routine)
        assert np.isposinf(ctx.get_values(grad_of(w))).all()
