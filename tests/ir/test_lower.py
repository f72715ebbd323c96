"""Lowering: which blocks, types and roundings a statement becomes, and that the interpreter gives NumPy's values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from stagedtensor.codegen.loop_ir import Block, Module
from stagedtensor.codegen.pretty import pretty
from stagedtensor.errors import ConstantRangeError
from stagedtensor.functions.indexing import concat, gather, one_hot, reshape, transpose
from stagedtensor.functions.pointwise import fma, relu, where
from stagedtensor.functions.reductions import argmax, argmin, max_, mean, prod, sum_
from stagedtensor.node import Node
from stagedtensor.precision import f32
from stagedtensor.session import Session
from stagedtensor.specs import Affine, Name, RowSpec, ShapeSpec, Spec
from stagedtensor.statements import Access, Apply, IterValue, NumberLiteral, Scope, Statement
from stagedtensor.tensor import Tensor, apply_op, apply_pointwise, cast
from stagedtensor.terminals import cell, dynamic, host_scalar, index, param, placeholder, range_
from tests.ir.programs import assign, at, both, forward, gradients, modules, solved

bf16 = ml_dtypes.bfloat16
rng = np.random.default_rng(7)


@pytest.fixture(autouse=True)
def _session() -> Iterator[None]:
    with Session():
        yield


def plain(*roots: Tensor, keep: bool = True, **numerics: Any) -> Module:
    """The unfused module of the forward computation."""
    module, _ = modules(solved(forward(*roots), keep=roots if keep else ()), **numerics)
    return module


def body(module: Module, label: str) -> str:
    """The text of the block that stores ``label``, without its comments."""
    for kernel in module.kernels:
        (block,) = kernel.body
        assert isinstance(block, Block)
        if block.stores[0].buffer.name == label:
            lines = pretty(block).splitlines()[1:]
            return "\n".join(line.strip() for line in lines if not line.strip().startswith("#"))
    raise AssertionError(f"no kernel stores {label}")


def vec(name: str, size: int = 8, prec: Any = None) -> Tensor:
    return placeholder(name, output=[size], prec=prec)


def weights(prec: Any = None) -> tuple[Tensor, Tensor, Tensor]:
    w = param("w", input=[6], output=[4], prec=prec, trainable=False)
    x = placeholder("x", batch=[3], output=[6], prec=prec)
    return w, x, (w @ x).named("y")


# -- types and roundings -------------------------------------------------------------------------------------------


def test_contraction_accumulates_in_f32_and_rounds_once() -> None:
    _, _, y = weights("bf16")
    assert body(plain(y), "y") == (
        "acc acc: f32 = 0.0 combine add neutral 0.0\n"
        "acc <- fma(f32(w[output, contracted]), f32(x[batch, contracted]), acc)\n"
        "y[batch, output] = bf16(acc)"
    )


@pytest.mark.parametrize("prec", ["f64", "i32"])
def test_no_fma_outside_f32(prec: str) -> None:
    _, _, y = weights(prec)
    text = body(plain(y), "y")
    assert "fma" not in text
    assert "acc <- acc + w[output, contracted] * x[batch, contracted]" in text


def test_extent_one_is_still_a_reduction() -> None:
    w = param("w", input=[1], output=[4], prec="bf16", trainable=False)
    x = placeholder("x", batch=[3], output=[1], prec="bf16")
    y = (w @ x).named("y")
    assert body(plain(y), "y") == "y[batch, output] = bf16(fma(f32(w[output, 0]), f32(x[batch, 0]), 0.0))"


def test_pointwise_accumulation_rounds_the_product_first() -> None:
    p, m = param("p", output=[8], trainable=False), param("m", output=[8], trainable=False)
    lr = host_scalar("lr", 0.1)
    step = assign(p, Apply("mul", (at(lr), at(m))), "sub", text="p =- lr * m")
    module, _ = modules(solved([step]))
    assert body(module, "p") == "p[output] = p[output] - lr[] * m[output]"


def test_storage_accumulation_rounds_at_each_step_in_order() -> None:
    _, _, y = weights("bf16")
    text = body(plain(y, accumulate="storage"), "y")
    assert "combine" not in text
    assert "acc <- f32(bf16(fma(f32(w[output, contracted]), f32(x[batch, contracted]), acc)))" in text


def test_a1_matmul_accumulators() -> None:
    a = placeholder("a", input=[64], output=[64], prec="bf16")
    b = placeholder("b", input=[64], output=[64], prec="bf16")
    c = (a @ b).named("c")
    at_ = np.arange(4096).reshape(64, 64)
    left, right = ((at_ % 3) + 1) * 0.375, ((at_ % 5) - 1.5) * 0.625
    program = solved(forward(c), keep=[c])
    (value,) = both(program, {a: left, b: right}, [c])
    np.testing.assert_array_equal(value, (left @ right).astype(np.float32).astype(bf16))
    assert float(value.astype(np.float64).sum()) == 61323.6875
    (narrow,) = both(program, {a: left, b: right}, [c], accumulate="storage")
    assert int((narrow != value).sum()) == 1391


def test_a2_row_sums() -> None:
    x = placeholder("x", output=[4, 6, 6], prec="bf16")
    out = sum_(x, [("output", 1), ("output", 2)])
    i, r, s = np.meshgrid(range(4), range(6), range(6), indexing="ij")
    values = (((36 * i + 6 * r + s) % 13) + 20) / 64
    program = solved(forward(out), keep=[out])
    assert both(program, {x: values}, [out])[0].tolist() == [14.375, 14.5, 14.6875, 14.8125]
    assert both(program, {x: values}, [out], accumulate="storage")[0].tolist() == [14.3125, 14.375, 14.625, 14.6875]


def test_a3_two_assignments_are_two_roundings() -> None:
    c = cell("c", "bf16")
    twice = [assign(c, NumberLiteral(1.0), "add"), assign(c, NumberLiteral(1.0), "add")]
    assert float(both(solved(twice), {c: 256.0}, [c])[0]) == 256.0
    ones = placeholder("ones", output=[2], prec="bf16")
    total = sum_(ones)
    record = total.node.record
    assert record is not None
    once = replace(record.statements[0], reset=False)
    assert float(both(solved([once], keep=[total]), {total: 256.0, ones: [1.0, 1.0]}, [total])[0]) == 258.0


def test_casts_convert_once() -> None:
    x = placeholder("x", output=[1], prec="i64")
    y = cast(x, "bf16")
    program = solved(forward(y), keep=[y])
    assert both(program, {x: np.array([2**40 + 2**32 + 1])}, [y])[0].astype(np.float64)[0] == 2**40 + 2**33
    wide = placeholder("wide", output=[1], prec="f64")
    z = cast(wide, "f8e5m2")
    assert both(solved(forward(z), keep=[z]), {wide: np.array([1.125 + 2.0**-40])}, [z])[0].astype(float)[0] == 1.25


def test_saturating_store() -> None:
    x = vec("x", 3, "f32")
    y = cast(x, "f16", saturate=True)
    (value,) = both(solved(forward(y), keep=[y]), {x: np.array([1e6, -1e6, np.inf])}, [y])
    assert value.astype(float).tolist() == [65504.0, -65504.0, np.inf]


def test_comparison_in_its_operands_join_and_predicate_in_its_own_type() -> None:
    ids, x = placeholder("ids", output=[8], prec="i32"), vec("x", prec="bf16")
    test = apply_pointwise("lt", ids, 3).named("test")
    y = where(test, x, 0.0).named("y")
    module = plain(test, y)
    assert body(module, "test") == "test[output] = ids[output] < 3:i32"
    assert body(module, "y") == "y[output] = bf16(where(test[output], f32(x[output]), 0.0))"


def test_positions_compare_as_i32() -> None:
    rows = ShapeSpec(RowSpec(), RowSpec(), RowSpec((Name("s"), Name("t"))))
    x = placeholder("x", output=[3, 3], prec="f32")
    mask = Apply("le", (IterValue("t"), IterValue("s")))
    y = apply_op("mask", (x,), Spec((rows,), rows), lambda a: Apply("where", (mask, a, NumberLiteral(0.0)))).named("y")
    assert body(plain(y), "y") == "y[s, t] = where(i32(t) <= i32(s), x[s, t], 0.0)"
    values = np.arange(9.0).reshape(3, 3)
    np.testing.assert_array_equal(forward_values([y], {x: values})[0], np.tril(values))


def test_bool_arithmetic_is_u8() -> None:
    a, b = placeholder("a", output=[3], prec="bool"), placeholder("b", output=[3], prec="bool")
    y = sum_(a + b)
    (value,) = both(solved(forward(y), keep=[y]), {a: [1, 1, 0], b: [1, 0, 0]}, [y])
    assert value.dtype == np.int32
    assert int(value) == 3


def test_integers_wrap() -> None:
    a = placeholder("a", output=[2], prec="i32")
    y = (a * a).named("y")
    (value,) = both(solved(forward(y), keep=[y]), {a: [65536, 65537]}, [y])
    assert value.tolist() == [0, 131073]


def test_literal_out_of_range_names_both_lines() -> None:
    x = placeholder("x", output=[2], prec="i32")
    y = x * 0.5
    with pytest.raises(ConstantRangeError, match=r"constant 0\.5 .* i32(.|\n)*test_lower\.py"):
        plain(y)


def test_fma_op() -> None:
    a, b, c = (vec(name, 4, "f32") for name in "abc")
    y = fma(a, b, c).named("y")
    assert body(plain(y), "y") == "y[output] = fma(a[output], b[output], c[output])"


# -- meaning against NumPy -----------------------------------------------------------------------------------------


def forward_values(roots: list[Tensor], values: dict[Tensor, Any], **scalars: int) -> list[np.ndarray[Any, Any]]:
    return both(solved(forward(*roots), keep=roots), values, roots, scalars)


def test_broadcasting_and_reductions() -> None:
    x, y = placeholder("x", batch=[5], output=[3, 4], prec="f64"), placeholder("y", output=[4], prec="f64")
    a, b = rng.standard_normal((5, 3, 4)), rng.standard_normal(4)
    total, highest, product, average = sum_(x + y, "batch"), max_(x, ("output", 0)), prod(x), mean(x)
    got = forward_values([total, highest, product, average], {x: a, y: b})
    np.testing.assert_allclose(got[0], (a + b).sum(0))
    np.testing.assert_array_equal(got[1], a.max(1))
    np.testing.assert_allclose(got[2], a.prod())
    np.testing.assert_allclose(got[3], a.mean())


def test_max_of_integers_starts_at_the_least_one() -> None:
    x = placeholder("x", output=[3], prec="i8")
    highest = max_(x)
    assert int(forward_values([highest], {x: [-128, -100, -127]})[0]) == -100


@pytest.mark.parametrize("kind", ["f32", "bf16", "i32"])
def test_argmax_nan_wins_and_the_lowest_position_at_ties(kind: str) -> None:
    x = placeholder("x", batch=[4], output=[5], prec=kind)
    rows = np.array([[1, 3, 3, 2, 0], [0, 0, 0, 0, 0], [5, 4, 3, 2, 1], [-1, -2, -3, -4, -1]], np.float64)
    if kind != "i32":
        rows[1, 3] = np.nan
        rows[2, 1] = np.inf
        rows[3, 2:] = np.nan
    highest, lowest = argmax(x), argmin(x)
    got = forward_values([highest, lowest], {x: rows})
    assert got[0].dtype == np.int32
    np.testing.assert_array_equal(got[0], np.argmax(rows, 1))
    np.testing.assert_array_equal(got[1], np.argmin(rows, 1))


def test_argmax_of_minus_infinity_is_the_first() -> None:
    x = placeholder("x", batch=[1], output=[3], prec="f32")
    assert forward_values([argmax(x)], {x: np.full((1, 3), -np.inf)})[0].tolist() == [0]


def test_gather_clamps_ids() -> None:
    table = param("table", input=[4], output=[6], prec="bf16", trainable=False)
    ids = placeholder("ids", batch=[5], prec="i32")
    rows = rng.standard_normal((6, 4)).astype(np.float32).astype(bf16)
    (value,) = forward_values([gather(table, ids)], {table: rows, ids: [0, 5, -3, 9, 2]})
    np.testing.assert_array_equal(value, rows[[0, 5, 0, 5, 2]])


def test_one_hot_beyond_the_range_of_short_ids() -> None:
    ids = placeholder("ids", batch=[3], prec="u8")
    y = one_hot(ids, 300)
    (value,) = forward_values([y], {ids: [0, 44, 255]})
    np.testing.assert_array_equal(value.astype(int), np.eye(300, dtype=int)[[0, 44, 255]])


def test_layout_functions() -> None:
    x, y = placeholder("x", output=[4, 6], prec="f32"), placeholder("y", output=[4, 2], prec="f32")
    a, b = rng.standard_normal((4, 6)), rng.standard_normal((4, 2))
    joined, split, turned = concat([x, y]), reshape(x, output=[3, 8]), transpose(x)
    got = forward_values([joined, split, turned], {x: a, y: b})
    np.testing.assert_array_equal(got[0], np.concatenate([a, b], 1).astype(np.float32))
    np.testing.assert_array_equal(got[1], a.reshape(3, 8).astype(np.float32))
    np.testing.assert_array_equal(got[2], a.T.astype(np.float32))


def test_range_is_an_iterator() -> None:
    x = placeholder("x", output=[5], prec="i32")
    y = (range_(5) * x).named("y")
    module = plain(y)
    assert body(module, "y") == "y[output] = i32(output) * x[output]"
    assert {buffer.name for buffer in module.external} == {"x", "y"}


def test_static_index_and_dynamic_extent() -> None:
    x = placeholder("x", batch=[3, dynamic("n", 8)], output=[2], prec="f64")
    part = x[index("i", 3)]
    average = mean(part, "batch").named("average")
    values = rng.standard_normal((3, 8, 2))
    (value,) = forward_values([average], {x: values}, i=2, n=5)
    np.testing.assert_allclose(value, values[2, :5].mean(0))


def convolved(x: Tensor, k: Tensor, padded: bool, stride: int = 1) -> Tensor:
    axis = Affine(stride, "o", 1, "k", padded)
    spec = Spec(
        (
            ShapeSpec(RowSpec(variable="batch"), RowSpec(), RowSpec((axis,))),
            ShapeSpec(RowSpec(), RowSpec(), RowSpec((Name("k"),))),
        ),
        ShapeSpec(RowSpec(variable="batch"), RowSpec(), RowSpec((Name("o"),))),
    )
    return apply_op("einsum", (x, k), spec, lambda a, b: Apply("mul", (a, b)), reduction="add")


@pytest.mark.parametrize("prec", ["f64", "bf16"])
def test_padded_convolution_and_its_gradients(prec: str) -> None:
    x = placeholder("x", batch=[2], output=[6], prec=prec, requires_grad=True)
    k = param("k", output=[3], prec=prec)
    y = convolved(x, k, padded=True)
    y.named("y")
    loss = sum_(y * y).named("loss")
    for node in (x.node, k.node, y.node, loss.node):
        assert node.gradient is not None
        node.gradient.specified = None
    a, b = rng.integers(-4, 5, (2, 6)).astype(float), rng.integers(-4, 5, 3).astype(float)
    wide = np.pad(a, ((0, 0), (1, 1)))
    out = np.stack([np.convolve(row, b[::-1], "valid") for row in wide])
    gradients_of = [node.gradient for node in (x.node, k.node) if node.gradient is not None]
    wanted: list[Tensor | Node] = [y, loss, *gradients_of]
    got = both(solved(gradients(loss), keep=wanted), {x: a, k: b}, wanted)
    np.testing.assert_allclose(got[0].astype(float), out)
    dy = 2 * out
    dk = [float((dy * wide[:, at : at + 6]).sum()) for at in range(3)]
    dx = np.stack([np.convolve(np.pad(row, 1), b, "valid") for row in dy])
    tolerance = 0 if prec == "f64" else 2.0**-7
    np.testing.assert_allclose(got[2].astype(float), dx, rtol=tolerance, atol=0 if prec == "f64" else 1)
    np.testing.assert_allclose(got[3].astype(float), dk, rtol=tolerance, atol=0 if prec == "f64" else 4)


def test_scatter_into_a_narrow_target_rounds_once() -> None:
    table = param("table", input=[1], output=[2], prec="bf16")
    ids = placeholder("ids", batch=[300], prec="i32")
    loss = sum_(gather(table, ids)).named("loss")
    gradient = table.node.gradient
    assert gradient is not None
    gradient.specified = table.node.specified
    program = solved(gradients(loss, 1.0), keep=[gradient])
    # 256 + 1 rounds back to 256 in bf16: single steps would stay there
    got = both(program, {ids: [0] * 300}, [gradient])
    assert got[0].astype(float).reshape(-1).tolist() == [300.0, 0.0]
    module, _ = modules(program)
    blocks = [stmt for kernel in module.kernels for stmt in kernel.body if isinstance(stmt, Block)]
    assert [block.stores[0].buffer.type for block in blocks if block.scatter] == [f32]


def test_a_target_read_elsewhere_goes_through_scratch() -> None:
    x = param("x", output=[4], trainable=False)
    reversed_ = Spec(
        (
            ShapeSpec(RowSpec(), RowSpec(), RowSpec((Name("a"),))),
            ShapeSpec(RowSpec(), RowSpec(), RowSpec((Name("b"),))),
        ),
        ShapeSpec(RowSpec(), RowSpec(), RowSpec((Name("a"),))),
    )
    scope = Scope(reversed_, (x.node, x.node), x.node, x.node.source, "sums", derives=False)
    left, right = (Access(x.node, rows) for rows in reversed_.operands)
    step = Statement(left, Apply("mul", (left, right)), scope, "add", reset=False, text="x =+ x * x[j]")
    (value,) = both(solved([step]), {x: [1.0, 2.0, 3.0, 4.0]}, [x])
    assert value.tolist() == [11.0, 22.0, 33.0, 44.0]


def test_relu_of_an_integer_and_empty_axes() -> None:
    x = placeholder("x", batch=[0], output=[3], prec="f32")
    y = sum_(relu(x), "batch")
    assert forward_values([y], {x: np.zeros((0, 3))})[0].tolist() == [0.0, 0.0, 0.0]


def test_lowering_twice_gives_the_same_text() -> None:
    _, _, y = weights("bf16")
    program = solved(forward(relu(y)))
    assert pretty(modules(program)[1]) == pretty(modules(program)[1])
