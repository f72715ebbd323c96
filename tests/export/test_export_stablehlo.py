"""Exported modules: their text, and what they compute in the StableHLO interpreter beside the CPU back end."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor.errors import ExportError
from stagedtensor.export.scalar_ops import FORMS, missing_rows
from stagedtensor.op_table import OPS
from stagedtensor.public_ops import PUBLIC_OPS, sample
from tests.boundary.networks import Network
from tests.oracles.rounding import cells_of, edge_codes

from .interpreter import InterpreterError, Run, both, interpret
from .iree import execute

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


@pytest.mark.parametrize("prec", [st.f64, st.f32, st.f16, st.bf16], ids=str)
def test_constants_keep_their_bits(prec: st.Prec) -> None:
    with np.errstate(under="ignore"):
        cells = np.array([np.nan, np.inf, -np.inf, -0.0, 0.1, 1e-40, 2.0**-24, 2.0**-133]).astype(prec.numpy_dtype)
    x = st.placeholder("x", output=[8], prec=prec)
    y = st.cast(st.where(x > 0.0, st.constant(cells), -0.0), st.f64)
    text = st.export.to_stablehlo(y)
    assert f'dense<"0x{cells.tobytes().hex().upper()}"> : tensor<8x{prec}>' in text
    (found,) = interpret(text, [np.ones(8, prec.numpy_dtype)]).results
    wanted = cells.astype(np.float64)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))
    np.testing.assert_array_equal(found[1:].view(np.uint64), wanted[1:].view(np.uint64))


@pytest.mark.parametrize(
    ("prec", "nan", "lowest"),
    [(st.f16, "0x7E00", "0xFC00"), (st.bf16, "0x7FC0", "0xFF80"), (st.f32, "0x7FC00000", "0xFF800000"),
     (st.f64, "0x7FF8000000000000", "0xFFF0000000000000")],
    ids=str,
)  # fmt: skip
def test_constants_have_as_many_digits_as_their_format(prec: st.Prec, nan: str, lowest: str) -> None:
    x = st.placeholder("x", output=[4], prec=prec)
    assert f"dense<{nan}> : tensor<{prec}>" in st.export.to_stablehlo(st.where(x > 0.0, x, float("nan")))
    assert f"dense<{lowest}> : tensor<{prec}>" in st.export.to_stablehlo(st.max(x), accum="narrow")


def test_same_precision_regions_leave_no_convert() -> None:
    x = st.placeholder("x", output=[3]) + 1.0
    y = st.stage("same", prec=st.f32)(st.tanh)(x)
    assert "convert" not in st.export.to_stablehlo(y)


def test_export_settles_nothing() -> None:
    y = small()
    st.export.to_stablehlo(y)
    assert y.node.settled is None


# -- precisions -------------------------------------------------------------------------------------------------------


def decisive_cells(src: st.Prec) -> Array:
    """Cells of a format: those where rounding to a narrower one is decided (ties, subnormals, overflow), specials, any."""
    rng = np.random.default_rng(5)
    if src.bits == 8:
        return cells_of(np.arange(256, dtype=np.uint64), src.numpy_dtype)
    codes = [rng.integers(0, 1 << min(src.bits, 63), 1500, dtype=np.uint64)]
    for dst in FLOATS:
        if dst.bits < src.bits and dst.bits <= 16:
            edges = edge_codes(src, dst)
            codes.append(edges if edges.size < 4000 else rng.choice(edges, 1500))
    with np.errstate(over="ignore"):
        stated = np.array(
            [0.0, -0.0, 1 + 2.0**-8 + 2.0**-40, 65519.99, 70000, 464, 465, 61439, 61440, np.inf, -np.inf, np.nan]
        )
        cells = [cells_of(np.concatenate(codes), src.numpy_dtype), stated.astype(src.numpy_dtype)]
        if src is st.f64:
            low = rng.normal(size=500).astype(np.float32)
            middle = (low.astype(np.float64) + np.nextafter(low, np.float32(np.inf)).astype(np.float64)) / 2
            cells += [middle, np.nextafter(middle, np.inf), np.nextafter(middle, -np.inf)]
        return np.concatenate(cells)


@pytest.mark.parametrize("src", FLOATS, ids=str)
def test_convert_bits(src: st.Prec) -> None:
    with np.errstate(invalid="ignore"):
        stored = decisive_cells(src).astype(np.float64)
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


def within_an_ulp(found: Array, exact: Array, prec: st.Prec) -> None:
    """Of the f64 result that was rounded once."""
    once = exact.astype(np.float32).astype(prec.numpy_dtype).astype(np.float64)
    ulp = 2.0 ** (np.floor(np.log2(np.abs(once))) - prec.mantissa_bits)
    assert (np.abs(found - once) <= ulp).all()


@pytest.mark.parametrize("prec", [st.bf16, st.f16], ids=str)
def test_accum_of_a_product(prec: st.Prec) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=size).astype(prec.numpy_dtype) for size in ((8, 256), (256,)))
    w = st.param("w", output=[8], input=[256], init=a, prec=prec)
    x = st.placeholder("x", output=[256], prec=prec)
    root = st.cast(w @ x, st.f32)
    found, _wanted, run = both(root, {"x": b}, root)
    within_an_ulp(found[0], a.astype(np.float64) @ b.astype(np.float64), prec)
    assert roles(run)["acc"] == 1


@pytest.mark.parametrize("prec", [st.bf16, st.f16], ids=str)
def test_accum_of_a_convolution(prec: st.Prec) -> None:
    rng = np.random.default_rng(1)
    image, kernel = (rng.normal(size=size).astype(prec.numpy_dtype) for size in ((6, 5, 16), (3, 4, 4, 16)))
    x = st.placeholder("x", output=[6, 5, 16], prec=prec)
    w = st.param("w", output=[3], input=[4, 4, 16], init=kernel, prec=prec)
    root = st.cast(st.conv2d(x, w), st.f32)
    found, _wanted, run = both(root, {"x": image}, root)
    windows = np.lib.stride_tricks.sliding_window_view(image.astype(np.float64), (4, 4), (0, 1))
    within_an_ulp(found[0], np.einsum("hwcij,oijc->hwo", windows, kernel.astype(np.float64)), prec)
    assert roles(run)["acc"] == 3, "image and kernel are widened, the result is rounded"
    assert "stablehlo.convolution" in st.export.to_stablehlo(root)


@pytest.mark.parametrize("prec", [st.bf16, st.f16], ids=str)
def test_accum_of_a_long_product_of_ones_counts_them(prec: st.Prec) -> None:
    """512 ones are 512: a sum at the width of bf16 stops at 256."""
    w = st.param("w", output=[2], input=[512], init=np.ones((2, 512)), prec=prec)
    root = st.cast(w @ st.placeholder("x", output=[512], prec=prec), st.f32)
    text = st.export.to_stablehlo(root)
    assert f"(tensor<2x512x{prec}>, tensor<512x{prec}>) -> tensor<2xf32>" in text
    found, _, _ = both(root, {"x": np.ones(512, prec.numpy_dtype)}, root)
    np.testing.assert_array_equal(found[0], [512, 512])


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
    for refused, options in (
        (loss, {"params": "constants"}),
        (st.grad_update(loss), {"twins": "fold"}),
        (st.grad_update(loss, accum_steps=2), {}),
        (st.placeholder("z", batch=[4], output=[2])[st.index("at", 4)], {}),
        (st.sum(st.placeholder("d", batch=[st.dynamic("n", 8)], output=[2])), {}),
        (loss.params, {}),
    ):
        with pytest.raises((ExportError, TypeError), match=r"\n  at test_export_stablehlo\.py:\d+: "):
            st.export.to_stablehlo(refused, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="params"):
        st.export.to_stablehlo(loss, params="maybe")  # type: ignore[arg-type]


def test_worker_survives() -> None:
    text = (
        "module {\n  func.func @main(%arg0: tensor<2xf32>) -> tensor<2xf32> {\n"
        "    %0 = stablehlo.custom_call @nothing(%arg0) : (tensor<2xf32>) -> tensor<2xf32>\n"
        "    return %0 : tensor<2xf32>\n  }\n}\n"
    )
    with pytest.raises(InterpreterError, match="ended with"):
        interpret(text, [np.zeros(2, np.float32)])
    again = interpret(
        text.replace("custom_call @nothing(%arg0) :", "negate %arg0 :").replace(
            "(tensor<2xf32>) -> tensor<2xf32>\n    return", "tensor<2xf32>\n    return"
        ),
        [np.ones(2, np.float32)],
    )
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


@pytest.mark.iree
def test_iree() -> None:
    net = Network(narrow=True)
    found, wanted, _ = both(net.y, {"x": net.data}, net.loss, execute)
    assert distance(found, wanted) <= 2.0**-8
    net = Network(narrow=True)
    found, wanted, _ = both(st.grad_update(net.loss), {"x": net.data, "t": net.targets}, net.loss, execute)
    assert len(found) == 11
    assert distance(found, wanted) <= 4 * 2.0**-8


@pytest.mark.iree
@pytest.mark.parametrize("name", PUBLIC_OPS)
def test_iree_runs_every_op(name: str) -> None:
    built = sample(PUBLIC_OPS[name])
    result = st.cast(built.result, st.f32)
    loss = st.sum(result * result)
    root = result if built.op.non_differentiable else st.grad_update(loss)
    found, wanted, _ = both(root, {}, loss, execute)
    for got, want in zip(found, wanted, strict=True):
        assert np.abs(got - want).max() <= 4e-5 * max(float(np.abs(want).max()), 1e-3)
