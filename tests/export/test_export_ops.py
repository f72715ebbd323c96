"""The sample of every op, exported and run in the StableHLO interpreter beside the CPU back end: results and gradients.

A module per op. Ops that round once, and those that move data, have the same bits in every float format.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor.public_ops import PUBLIC_OPS, Sample, sample
from tests.oracles.gradients import grad_of, weighted

from .interpreter import both, interpret_all

Array = np.ndarray[Any, Any]

EXACT = set(
    """
    add sub mul div neg abs maximum minimum clamp where sqrt relu max min sign floor ceil round trunc
    transpose permute reshape flatten squeeze unsqueeze narrow concat split pad2d tril gather index_select unfold
    upsample2d max_pool2d lt le gt ge eq ne logical_and logical_or logical_not argmax argmin one_hot stop_gradient cast
    nan_to_num positions
    """.split()  # noqa: SIM905
)
"""One rounding, or none: bit for bit in every format. The others: see the bounds."""
BOUNDS = {st.f32: 1e-5, st.f64: 1e-12}
NAMES = list(PUBLIC_OPS)
WITH_GRADIENT = [name for name in NAMES if not PUBLIC_OPS[name].non_differentiable]


def by_group(names: list[str]) -> pytest.MarkDecorator:
    groups = [names[at : at + 25] for at in range(0, len(names), 25)]
    return pytest.mark.parametrize("names", groups, ids=lambda group: f"{group[0]}-{group[-1]}")


def readable(result: st.Tensor) -> st.Tensor:
    """A result that the interpreter's caller can read: it has no arrays of bf16."""
    return st.cast(result, st.f64)


def relative(found: Array, wanted: Array) -> float:
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    assert found.shape == wanted.shape
    return float(np.abs(found - wanted).max() / max(np.abs(wanted).max(), 1e-30))


@by_group(NAMES)
@pytest.mark.parametrize("prec", [st.f32, st.f64, st.f16, st.bf16], ids=str)
def test_runs_every_op(names: list[str], prec: st.Prec) -> None:
    names = [name for name in names if name in EXACT or prec in BOUNDS]
    with st.Session(default_prec=prec), st.Context("cpu") as ctx:
        samples = [sample(PUBLIC_OPS[name], prec) for name in names]
        results = [readable(built.result) for built in samples]
        modules = [exported(result, built) for built, result in zip(samples, results, strict=True)]
        routine = ctx.compile(results)
        for result in results:
            ctx.init_params(result)
        ctx.run(routine)
        wanted = [ctx.get_values(result) for result in results]
    assert not any(word in text for text, _ in modules for word in ("custom_call", "chlo", "//"))
    for name, run, want in zip(names, interpret_all(modules), wanted, strict=True):
        (found,) = run.results
        if name in EXACT:
            np.testing.assert_array_equal(found.view(np.uint64), want.view(np.uint64), err_msg=name)
        else:
            assert relative(found, want) <= BOUNDS[prec], name


def exported(root: st.Tensor | st.Comp, built: Sample) -> tuple[str, list[Array]]:
    """The module of a sample and the values of those of its parameters that it reads."""
    values = {tensor.label: value for tensor, value in zip(built.operands, built.values, strict=True)}
    return st.export.to_stablehlo(root), [values[entry.name] for entry in st.export.signature(root).arguments]


@by_group(WITH_GRADIENT)
@pytest.mark.parametrize("prec", [st.f32, st.f64], ids=str)
def test_runs_gradients(names: list[str], prec: st.Prec) -> None:
    names = [name for name in names if name != "cast" or prec is st.f32]
    with st.Session(default_prec=prec, default_grad_prec=prec), st.Context("cpu") as ctx:
        samples = [sample(PUBLIC_OPS[name], prec) for name in names]
        losses = [weighted(built) for built in samples]
        steps = [st.grad_update(loss) for loss in losses]
        modules = [exported(step, built) for step, built in zip(steps, samples, strict=True)]
        routine = ctx.compile(st.grad_update(losses))
        for loss in losses:
            ctx.init_params(loss)
        ctx.run(routine)
        wanted = [
            [ctx.get_values(loss), *(ctx.get_values(grad_of(param)) for param in st.trainable_params(loss))]
            for loss in losses
        ]
    for name, run, wants in zip(names, interpret_all(modules), wanted, strict=True):
        assert len(run.results) == len(wants) > 1
        for found, want in zip(run.results, wants, strict=True):
            assert relative(found, want) <= 4 * BOUNDS[prec], name


SETTINGS: dict[str, Callable[[st.Tensor], st.Tensor]] = {
    "ids out of range": lambda x: st.gather(
        st.param("table", output=[4], input=[3], init=np.arange(12.0).reshape(4, 3)), st.constant(np.array([2, 0, 2, 9], np.int32))
    ) * st.sum(x),
    "one_hot": lambda x: st.one_hot(st.constant(np.array([1, 3], np.int32)), 4) * 2.0 + st.sum(x),
    "argmax": lambda x: st.cast(st.argmax(x, axis=-1), st.f32) + st.sum(x),
    "conv2d": lambda x: st.conv2d(
        st.reshape(x, batch=[1], output=[4, 3, 1]), st.param("k", output=[2], input=[2, 2, 1], init=np.ones((2, 2, 2, 1)) / 3.0),
        stride=(2, 1), padding=1, dilation=(1, 2),
    ),
    "conv2d of groups": lambda x: st.conv2d(
        st.reshape(x, output=[2, 3, 2]), st.param("k", output=[4], input=[2, 2, 1], init=np.ones((4, 2, 2, 1)) / 3.0), groups=2
    ),
    "conv_transpose1d": lambda x: st.conv_transpose1d(
        st.reshape(x, output=[6, 2]), st.param("k", output=[2], input=[3, 2], init=np.ones((2, 3, 2)) / 3.0), stride=2
    ),
    "max_pool2d": lambda x: st.max_pool2d(st.reshape(x, batch=[1], output=[4, 3, 1]), 2, stride=1, padding=1),
    "avg_pool2d": lambda x: st.avg_pool2d(st.reshape(x, batch=[1], output=[4, 3, 1]), 2, padding=1),
    "max with ties": lambda x: st.max(st.round(x * 2.0)) * st.max(st.abs(x)),
    "sums of sums": lambda x: x * st.sum(x, axis=1, keepdims=True) + st.sum(x, axis=0) * st.sum(x, axis=0),
    "product with a zero": lambda x: st.prod(st.relu(x + 0.5), axis=-1),
    "softmax over the first axis": lambda x: st.softmax(x, axis=0),
    "tanh form of gelu": lambda x: st.gelu(x, approximate="tanh"),
    "powers": lambda x: x**2 + x**3.0 + 2.0**x,
    "steps": lambda x: x // 0.3 + x * 2.0 + st.sign(x) + st.floor(x) + st.trunc(x) + st.round(x) + st.ceil(x),
    "steps of a slice": lambda x: st.narrow(x, 0, 4, step=2) * st.narrow(x, 1, 3),
    "masked mean": lambda x: st.cross_entropy(
        x, st.constant(np.array([2, -1, 0, 1], np.int32)), ignore_index=-1, label_smoothing=0.1
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_runs_settings_of_ops(name: str) -> None:
    value = np.random.default_rng(3).uniform(-1, 1, (4, 3)).astype(np.float32)
    y = SETTINGS[name](st.param("x", output=[4, 3], init=value, prec=st.f32))
    loss = st.sum(y * y)
    found, wanted, _run = both(st.grad_update(loss), {}, loss)
    for got, want in zip(found, wanted, strict=True):
        assert relative(got, want) <= 4e-5


@pytest.mark.parametrize(
    ("name", "form"),
    [("conv1d", "convolution"), ("conv2d", "convolution"), ("conv3d", "convolution"), ("max_pool2d", "reduce_window"),
     ("avg_pool2d", "reduce_window"), ("matmul", "dot_general"), ("pad2d", "dynamic_update_slice"), ("split", "slice")],
)  # fmt: skip
def test_windows_products_and_boxes_have_ops_of_their_own(name: str, form: str) -> None:
    text = st.export.to_stablehlo(sample(PUBLIC_OPS[name]).result)
    assert f"stablehlo.{form}" in text
    assert "gather" not in text
    assert "scatter" not in text
