"""Gradients of windows as reductions over the target's cells, against a scatter written out in NumPy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from stagedtensor.codegen.effects import block_of
from stagedtensor.functions.reductions import sum_
from stagedtensor.session import Session
from stagedtensor.specs import Affine, Name, RowSpec, ShapeSpec, Spec
from stagedtensor.statements import Apply
from stagedtensor.tensor import Tensor, apply_op
from stagedtensor.terminals import param, placeholder
from tests.ir.programs import both, gradients, modules, solved


@pytest.fixture(autouse=True)
def _session() -> Iterator[None]:
    with Session():
        yield


def convolved(x: Tensor, k: Tensor, strides: tuple[int, int], dilations: tuple[int, int], padded: bool) -> Tensor:
    """``..b..|->h,w,c; kh,kw,c->o => ..b..|->oh,ow,o`` with strides, dilations and padding."""
    axes = tuple(
        Affine(stride, f"o{name}", dilation, f"k{name}", padded)
        for name, stride, dilation in zip("hw", strides, dilations, strict=True)
    )
    kernel = ShapeSpec(RowSpec(), RowSpec((Name("kh"), Name("kw"), Name("c"))), RowSpec((Name("o"),)))
    image = ShapeSpec(RowSpec(variable="b"), RowSpec(), RowSpec((*axes, Name("c"))))
    result = ShapeSpec(RowSpec(variable="b"), RowSpec(), RowSpec((Name("oh"), Name("ow"), Name("o"))))
    spec = Spec((image, kernel), result)
    return apply_op("einsum", (x, k), spec, lambda a, b: Apply("mul", (a, b)), reduction="add")


@pytest.mark.parametrize(
    ("strides", "dilations", "padded", "size"),
    [
        ((1, 1), (1, 1), False, (6, 5)),
        ((2, 1), (1, 2), False, (7, 6)),
        ((2, 3), (1, 1), True, (6, 6)),
        ((1, 1), (1, 1), True, (4, 5)),
    ],
)
def test_convolution_gradient_gathers(
    strides: tuple[int, int], dilations: tuple[int, int], padded: bool, size: tuple[int, int]
) -> None:
    kernel = (3, 2)
    x = placeholder("x", batch=[2], output=[*size, 2], prec="f64", requires_grad=True)
    k = param("k", input=[*kernel, 2], output=[3], prec="f64")
    loss = sum_(convolved(x, k, strides, dilations, padded)).named("loss")
    gradient = x.node.gradient
    assert gradient is not None
    weights = np.random.default_rng(3).integers(-3, 4, (3, *kernel, 2)).astype(float)
    program = solved(gradients(loss), keep=[gradient])
    (value,) = both(program, {x: np.zeros((2, *size, 2)), k: weights}, [gradient])
    assert not any(block_of(kernel_).scatter for kernel_ in modules(program)[0].kernels)

    spans = [(kernel[at] - 1) * dilations[at] + 1 for at in range(2)]
    counts = [size[at] // strides[at] if padded else (size[at] - spans[at]) // strides[at] + 1 for at in range(2)]
    left = [max(0, (counts[at] - 1) * strides[at] + spans[at] - size[at]) // 2 if padded else 0 for at in range(2)]
    expected = np.zeros((2, *size, 2))
    for oh, ow, kh, kw in np.ndindex(counts[0], counts[1], *kernel):
        row, column = oh * strides[0] + kh * dilations[0] - left[0], ow * strides[1] + kw * dilations[1] - left[1]
        if 0 <= row < size[0] and 0 <= column < size[1]:
            expected[:, row, column, :] += weights[:, kh, kw, :].sum(0)
    np.testing.assert_array_equal(value, expected)
