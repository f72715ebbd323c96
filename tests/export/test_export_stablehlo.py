"""Exported modules: their text, and what they compute in the StableHLO interpreter beside the CPU back end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor.errors import ExportError
from stagedtensor.export.scalar_ops import FORMS, missing_rows
from stagedtensor.op_table import OPS
from tests.boundary.networks import Network
from tests.run.test_gradients import BINARY, UNARY

from .interpreter import InterpreterError, Run, both, interpret

Array = np.ndarray[Any, Any]
FLOATS = (st.f64, st.f32, st.f16, st.bf16, st.f8e5m2, st.f8e4m3)


def distance(found: list[Array], wanted: list[Array]) -> float:
    """Return the greatest difference of a result, relative to its greatest cell."""
    assert len(found) == len(wanted) > 0
    pairs = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in zip(found, wanted, strict=True)]
    return max(float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)) for a, b in pairs)


def roles(run: Run) -> Counter[str]:
    def role(location: str) -> str:
        text = location.removeprefix('loc("')
        return text.split(":")[0] + (" grad" if ":grad" in text else "")

    return Counter(role(location) for _, _, location in run.converts)


# -- text -------------------------------------------------------------------------------------------------------------


def small() -> st.Tensor:
    w = st.param("w", output=[2], input=[3], prec=st.f32)
    x = st.placeholder("x", batch=[4], output=[3], prec=st.f32)
    y: st.Tensor = st.stage("body", prec=st.f16)(st.tanh)(w @ x)
    return y


SMALL = """\
module {
  func.func @main(%arg0: tensor<4x3xf32> {stagedtensor.name = "x"}, %arg1: tensor<2x3xf32> {stagedtensor.name = "w"}) -> \
(tensor<4x2xf32> {stagedtensor.name = "tanh.f32"}) {
    %0 = stablehlo.dot_general %arg1, %arg0, contracting_dims = [1] x [1] : (tensor<2x3xf32>, tensor<4x3xf32>) -> \
tensor<2x4xf32>
    %1 = stablehlo.transpose %0, dims = [1, 0] : (tensor<2x4xf32>) -> tensor<4x2xf32>
    %2 = stablehlo.convert %1 : (tensor<4x2xf32>) -> tensor<4x2xf16> loc("boundary:body:enter")
    %3 = stablehlo.tanh %2 : tensor<4x2xf16>
    %4 = stablehlo.convert %3 : (tensor<4x2xf16>) -> tensor<4x2xf32> loc("boundary:body:exit")
    return %4 : tensor<4x2xf32>
  }
}
"""


def test_golden() -> None:
    assert st.export.to_stablehlo(small()) == st.export.to_stablehlo(small()) == SMALL
    quoted = st.export.to_stablehlo(small(), "a name")
    assert 'func.func @"a name"(' in quoted


@pytest.mark.parametrize("prec", [st.f64, st.f32], ids=str)
def test_constants_keep_their_bits(prec: st.Prec) -> None:
    cells = np.array([np.nan, np.inf, -np.inf, -0.0, 0.1, np.finfo(prec.numpy_dtype).smallest_subnormal], prec.numpy_dtype)
    y = st.where(st.placeholder("x", output=[6], prec=prec) > 0.0, st.constant(cells), -0.0)
    run = interpret(st.export.to_stablehlo(y), [np.array([1, 1, 1, 1, 1, 1], prec.numpy_dtype)])
    np.testing.assert_array_equal(run.results[0].view(np.uint8), cells.view(np.uint8))


def test_same_precision_regions_leave_no_convert() -> None:
    x = st.placeholder("x", output=[3]) + 1.0
    y = st.stage("same", prec=st.f32)(st.tanh)(x)
    assert "convert" not in st.export.to_stablehlo(y)


def test_export_settles_nothing() -> None:
    y = small()
    st.export.to_stablehlo(y)
    assert y.node.settled is None


# -- every op ---------------------------------------------------------------------------------------------------------

SAMPLES: dict[str, tuple[Callable[..., st.Tensor], tuple[Array, ...]]] = {
    **{name: (build, (value,)) for name, (build, value) in UNARY.items()},
    **{name: (build, (left, right)) for name, (build, left, right) in BINARY.items()},
}
GROUPS = [dict(list(SAMPLES.items())[at : at + 12]) for at in range(0, len(SAMPLES), 12)]


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: "-".join(list(group)[:2]))
def test_runs_ops_and_their_gradients(group: dict[str, tuple[Callable[..., st.Tensor], tuple[Array, ...]]]) -> None:
    with st.Session(default_prec=st.f64, default_grad_prec=st.f64):
        losses = []
        for name, (build, values) in group.items():
            params = [
                st.param(f"{name}{at}", output=list(value.shape), init=value, prec=st.f64) for at, value in enumerate(values)
            ]
            y = build(*params)
            weights = np.random.default_rng(7).uniform(0.5, 1.5, y.shape.dims)
            batch, out = len(y.shape.batch), len(y.shape.output)
            factor = st.constant(weights, batch=batch, output=out, input=weights.ndim - batch - out)
            losses.append(st.sum(y * factor).named(f"loss of {name}"))
        step = st.grad_update(losses)
        text, signature = st.export.to_stablehlo(step), st.export.signature(step)
        with st.Context("cpu") as ctx:
            routine = ctx.compile(step)
            for loss in losses:
                ctx.init_params(loss)
            ctx.run(routine)
            params = [param for loss in losses for param in loss.params]
            wanted = [ctx.get_values(loss) for loss in losses]
            wanted += [ctx.get_values(param.grad) for param in params]  # type: ignore[arg-type]
            arguments = [ctx.get_values(param) for param in params]
        assert [entry.name for entry in signature.arguments] == [param.label for param in params]
    found = interpret(text, arguments).results
    for entry, got, want in zip(signature.results, found, wanted, strict=True):
        assert distance([got], [want]) <= 1e-11, entry.name


INDEXED: dict[str, Callable[[st.Tensor], st.Tensor]] = {
    "gather": lambda x: st.gather(
        st.param("table", output=[4], input=[3], init=np.arange(12.0).reshape(4, 3)), st.constant(np.array([2, 0, 2, 9], np.int32))
    ) * st.sum(x),
    "one_hot": lambda x: st.one_hot(st.constant(np.array([1, 3], np.int32)), 4) * 2.0 + st.sum(x),
    "argmax": lambda x: st.cast(st.argmax(x, axis=-1), st.f32) + st.sum(x),
    "pad2d": lambda x: st.pad2d(st.reshape(x, batch=[1], output=[4, 3, 1]), 1),
    "conv2d": lambda x: st.conv2d(
        st.reshape(x, batch=[1], output=[4, 3, 1]), st.param("k", output=[2], input=[2, 2, 1], init=np.ones((2, 2, 2, 1)) / 3.0)
    ),
    "max_pool2d": lambda x: st.max_pool2d(st.reshape(x, batch=[1], output=[4, 3, 1]), 2, stride=1),
    "avg_pool2d": lambda x: st.avg_pool2d(st.reshape(x, batch=[1], output=[4, 3, 1]), 2, stride=1),
    "upsample2d": lambda x: st.upsample2d(st.reshape(x, batch=[1], output=[4, 3, 1]), 2),
    "tril": st.tril,
    "floordiv": lambda x: x // 0.3 + x,
    "sign": lambda x: x * 2.0 + st.sign(x) + st.floor(x) + st.trunc(x) + st.round(x) + st.ceil(x),
}


@pytest.mark.parametrize("name", INDEXED)
def test_runs_ops_with_positions(name: str) -> None:
    value = np.random.default_rng(3).uniform(-1, 1, (4, 3)).astype(np.float32)
    try:
        y = INDEXED[name](st.param("x", output=[4, 3], init=value, prec=st.f32))
        loss = st.sum(y * y)
        _ = loss.shape
    except (st.errors.ShapeError, TypeError) as error:
        pytest.fail(f"the sample does not build: {error}")
    found, wanted, _run = both(st.grad_update(loss), {}, loss)
    assert distance(found, wanted) <= 4e-5


# -- precisions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("src", FLOATS, ids=str)
def test_convert_bits(src: st.Prec) -> None:
    rng = np.random.default_rng(5)
    wide = np.concatenate(
        [
            rng.normal(size=60) * 10.0 ** rng.integers(-8, 8, 60),
            [0.0, -0.0, np.inf, -np.inf, np.nan, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11],
            [65504, 65519, 65520, 70000, 2.0**-24, 2.0**-25, 2.0**-133, 448, 464, 465, 57344, 61440, 2.0**-16, 2.0**-10],
            [1 + 2.0**-8 + 2.0**-40, 1.125 + 2.0**-40, 3.4e38, 3.3895e38],
        ]
    )
    with np.errstate(over="ignore", invalid="ignore"):
        values = wide.astype(np.float32).astype(src.numpy_dtype) if src is not st.f64 else wide
    with np.errstate(over="ignore", invalid="ignore"):
        stored = values.astype(np.float64)
    x = st.placeholder("x", output=[len(stored)], prec=st.f64)
    held = st.cast(x, src)
    # the way through f64 is exact, so what comes back is the conversion's value; widening again keeps it
    outs = [st.cast(st.cast(held, dst), st.f64) for dst in FLOATS if dst is not src]
    root = st.concat([st.reshape(out, output=[1, len(stored)]) for out in outs], axis=0)
    with st.Context("reference") as ctx:
        routine = ctx.compile(root)
        ctx.set_values(x, stored)
        ctx.run(routine)
        wanted = ctx.get_values(root)
    (found,) = interpret(st.export.to_stablehlo(root), [stored]).results
    nan = np.isnan(wanted)
    np.testing.assert_array_equal(np.isnan(found), nan)
    np.testing.assert_array_equal(found[~nan].view(np.uint64), wanted[~nan].view(np.uint64))


def test_float_to_integer_saturates() -> None:
    values = np.array([np.nan, np.inf, -np.inf, 3e9, -3e9, 300.7, -1.7], np.float32)
    x = st.placeholder("x", output=[7], prec=st.f32)
    root = st.concat([st.cast(st.cast(x, prec), st.f64) for prec in (st.i32, st.u8, st.i8, st.i64)], axis=0)
    found, wanted, _ = both(root, {"x": values}, root)
    np.testing.assert_array_equal(found[0], wanted[0])


def test_four_converts_at_the_edges_of_a_network() -> None:
    net = Network(narrow=True, weights="narrow")
    found, wanted, run = both(net.y, {"x": net.data}, net.loss, accum="narrow")
    edges = [("f32", "bf16"), ("bf16", "f32"), ("f32", "f16"), ("f16", "f32")]
    assert [(src, dst) for src, dst, _ in run.converts] == edges
    assert distance(found, wanted) <= 2.0**-5


def test_roles() -> None:
    net = Network(narrow=True)
    found, wanted, run = both(net.y, {"x": net.data}, net.loss)
    assert roles(run) == {"boundary": 4, "twin": 6, "acc": 3, "mix": 3}
    assert distance(found, wanted) <= 2.0**-8
    net = Network(narrow=True)
    found, wanted, run = both(st.grad_update(net.loss), {"x": net.data, "t": net.targets}, net.loss)
    counts = roles(run)
    assert [counts[role] for role in ("boundary", "boundary grad", "twin", "twin grad")] == [4, 3, 6, 6]
    assert all(src != dst for src, dst, _ in run.converts)
    assert distance(found, wanted) <= 4 * 2.0**-8


@pytest.mark.parametrize("prec", [st.bf16, st.f16], ids=str)
def test_accumulation_is_wide(prec: st.Prec) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(8, 256)), rng.normal(size=(256,))
    w = st.param("w", output=[8], input=[256], init=a, prec=prec)
    x = st.placeholder("x", output=[256], prec=prec)
    root = st.cast(w @ x, st.f32)
    found, _wanted, run = both(root, {"x": b.astype(prec.numpy_dtype)}, root)
    exact = a.astype(prec.numpy_dtype).astype(np.float64) @ b.astype(prec.numpy_dtype).astype(np.float64)
    once = exact.astype(np.float32).astype(prec.numpy_dtype).astype(np.float64)
    ulp = 2.0 ** (np.floor(np.log2(np.abs(once))) - prec.mantissa_bits)
    assert (np.abs(found[0] - once) <= ulp).all()
    assert roles(run)["acc"] == 1


# -- parameters and twins ---------------------------------------------------------------------------------------------


def test_params_twins() -> None:
    def model() -> st.Tensor:
        rng = np.random.default_rng(1)
        x = st.placeholder("x", batch=[2], output=[4], prec=st.f32)
        with st.stage("body", prec=st.f16):
            return st.cast(st.param("w", output=[3], input=[4], init=rng.normal(size=(3, 4))) @ x, st.f32)

    x = np.random.default_rng(2).normal(size=(2, 4)).astype(np.float32)
    y = model()
    plain, wanted, run = both(y, {"x": x}, y)
    constants = interpret(st.export.to_stablehlo(model(), params="constants"), [x])
    np.testing.assert_array_equal(constants.results[0], plain[0])
    folded_model = model()
    signature = st.export.signature(folded_model, twins="fold")
    assert [str(entry.precision) for entry in signature.arguments] == ["f32", "f16"]
    folded = interpret(st.export.to_stablehlo(model(), params="constants", twins="fold"), [x])
    np.testing.assert_array_equal(folded.results[0], plain[0])
    assert (roles(run)["twin"], roles(folded)["twin"]) == (1, 0)
    assert distance(plain, wanted) == 0.0
    loss = st.sum(model())
    with pytest.raises(ExportError, match="fold"):
        st.export.to_stablehlo(st.grad_update(loss), twins="fold")


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_strict() -> None:
    x = st.placeholder("x", output=[4])
    with pytest.raises(ExportError, match="random"):
        st.export.to_stablehlo(x + st.uniform(0, 1, output=[4]))
    with pytest.raises(ExportError, match=r"run-time extent|fixed"):
        st.export.to_stablehlo(st.sum(st.placeholder("d", batch=[st.dynamic("n", 8)], output=[2])))
    loss = st.sum(st.param("w", output=[4]) * x)
    with pytest.raises(ExportError, match="w"):
        st.export.to_stablehlo(st.sequence(st.grad_update(loss), st.sgd_update(loss, 0.1)))
    with pytest.raises(ExportError, match="accum_steps"):
        st.export.to_stablehlo(st.grad_update(loss, accum_steps=2))
    with pytest.raises(ExportError, match="counter"):
        st.export.to_stablehlo(st.placeholder("state", output=[4], prec=st.u4x32))
    with pytest.raises(ExportError, match="initializer"):
        st.export.to_stablehlo(loss, params="constants")
    with pytest.raises(ValueError, match="params"):
        st.export.to_stablehlo(loss, params="maybe")  # type: ignore[arg-type]


def test_worker_survives() -> None:
    text = (
        "module {\n  func.func @main(%arg0: tensor<2xf32>) -> tensor<2xf32> {\n"
        '    %0 = stablehlo.custom_call @nothing(%arg0) : (tensor<2xf32>) -> tensor<2xf32>\n'
        "    return %0 : tensor<2xf32>\n  }\n}\n"
    )
    with pytest.raises(InterpreterError, match="ended with"):
        interpret(text, [np.zeros(2, np.float32)])
    again = interpret(text.replace("custom_call @nothing(%arg0) :", "negate %arg0 :").replace(
        "(tensor<2xf32>) -> tensor<2xf32>\n    return", "tensor<2xf32>\n    return"), [np.ones(2, np.float32)])
    np.testing.assert_array_equal(again.results[0], [-1, -1])


def test_encoded() -> None:
    rng = np.random.default_rng(0)
    packed = st.encodings.pack(rng.normal(size=(8, 64)).astype(np.float32), st.encodings.Q8_0)
    x = st.placeholder("x", output=[64], prec=st.f32)
    y = st.constant(packed) @ x
    with pytest.raises(ExportError, match="Q8_0"):
        st.export.to_stablehlo(y)
    found, wanted, _ = both(y, {"x": rng.normal(size=64).astype(np.float32)}, y, encoded="dequantize")
    assert distance(found, wanted) <= 1e-5


def test_every_op_has_a_form() -> None:
    assert missing_rows() == ["random_uniform", "random_normal"]
    assert set(FORMS) <= set(OPS)


@pytest.mark.slow
@pytest.mark.parametrize("prec", [None, st.bf16], ids=str)
def test_runs_a_transformer(prec: st.Prec | None) -> None:
    ids = st.placeholder("ids", batch=[2, 4], prec=st.i32)
    with st.stage("net", prec=prec):
        y = st.nn.gpt(11, width=8, layers=1, heads=2, tokens=4)(ids)
    loss = st.mean(y * y * y)
    values = np.random.default_rng(0).integers(0, 11, (2, 4)).astype(np.int32)
    found, wanted, _ = both(st.grad_update(loss), {"ids": values}, loss)
    assert len(found) == 1 + len(loss.params)
    bound = 4e-5 if prec is None else 4 * 2.0**-5
    for got, want in zip(found, wanted, strict=True):  # the gradient of the keys' bias is 0 but for rounding
        want = np.asarray(want, np.float64)
        assert np.abs(got - want).max() <= bound * max(float(np.abs(want).max()), 1e-6)
