"""Pools, norms and names of parameters where implementations differ: padding, ties, constant channels, single examples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor import nn
from stagedtensor.errors import CheckpointError, ContextError

from .running import both_devices, program, same, wide

LEGS = [("cpu", st.f16), ("cpu", st.bf16), ("reference", st.f32), ("reference", st.f64)]
BELOW = -np.arange(1.0, 17.0, dtype=np.float32).reshape(1, 4, 4, 1)


@pytest.mark.parametrize(("device", "prec"), LEGS)
def test_padding_never_wins_a_maximum(device: str, prec: st.Prec) -> None:
    """Padding with zeros, or with the limits of another format, shows where every cell is negative or infinite."""
    with program(device, default_prec=prec) as p:
        x, lowest = p.input(BELOW, prec, batch=1), p.input(np.full_like(BELOW, -np.inf), prec, batch=1)
        found = p.run(st.max_pool2d(x, 3, stride=2, padding=1), st.max_pool2d(lowest, 3, stride=2, padding=1))
    same(found[0].ravel(), [-1, -2, -5, -6])
    same(found[1].ravel(), [-np.inf] * 4)


@both_devices
def test_a_maximum_sends_its_gradient_to_one_cell_and_keeps_nan(device: str) -> None:
    damaged = BELOW.copy()
    damaged[0, 1, 1, 0] = np.nan
    with program(device) as p:
        flat, bad = p.input(np.zeros_like(BELOW), batch=1, requires_grad=True), p.input(damaged, batch=1)
        (slope,) = p.gradients(st.sum(st.max_pool2d(flat, 2, padding=1)), flat)
        (found,) = p.run(st.max_pool2d(bad, 2))
    assert wide(slope.reshape(4, 4)) == [[1, 1, 0, 1], [1, 1, 0, 1], [0, 0, 0, 0], [1, 1, 0, 1]]
    same(found.ravel(), [np.nan, -3, -9, -11])


@both_devices
@pytest.mark.parametrize("prec", [st.f16, st.bf16], ids=str)
def test_means_over_windows_are_formed_wide(device: str, prec: st.Prec) -> None:
    """Four halves of 60000 add up to infinity; 256 ones and one more are 256 in bf16."""
    with program(device, default_prec=prec) as p:
        large = p.input(np.full((1, 4, 4, 1), 59904.0), prec, batch=1)
        ones = p.input(np.ones((1, 20, 20, 1)), prec, batch=1)
        found = p.run(
            st.avg_pool2d(large, 2), st.global_avg_pool2d(large), st.global_avg_pool2d(ones), st.avg_pool2d(ones, 20)
        )
    assert [set(cells.ravel().astype(float)) for cells in found] == [{59904.0}, {59904.0}, {1.0}, {1.0}]


@pytest.mark.parametrize(("device", "prec"), LEGS)
@pytest.mark.parametrize("shape", [(2, 3), (1, 1)])
def test_norms_of_constants_give_zero_and_finite_gradients(device: str, prec: st.Prec, shape: tuple[int, int]) -> None:
    with program(device, default_prec=prec) as p:
        x = p.input(np.full(shape, 7.0), prec, batch=1, requires_grad=True)
        layers = [st.layer_norm(x), nn.batch_norm()(x), nn.group_norm(1)(x)]
        loss = st.sum(sum(layers[1:], layers[0]))
        p.ctx.init_params(loss)
        (slope,) = p.gradients(loss, x)
        found = p.run(*layers)
    assert [np.abs(cells.astype(float)).max() for cells in found] == [0.0, 0.0, 0.0]
    assert np.abs(slope.astype(float)).max() < 1e-3


@both_devices
def test_channel_norms_of_halves_square_wide(device: str) -> None:
    """300 squared is beyond f16."""
    image = np.array([300.0, 302.0, -300.0, 300.0]).reshape(1, 1, 1, 4)
    examples = np.array([[300.0], [-300.0]])
    with program(device, default_prec=st.f16) as p:
        groups, batch = (
            nn.group_norm(2)(p.input(image, st.f16, batch=1)),
            nn.batch_norm()(p.input(examples, st.f16, batch=1)),
        )
        p.ctx.init_params([groups, batch])
        found = p.run(groups, batch)
    same(found[0].ravel(), [-1, 1, -1, 1])
    same(found[1].ravel(), [1, -1])


# -- names of parameters ------------------------------------------------------------------------------------------


def model(label: str) -> st.Tensor:
    return nn.dense(2, label=label)(st.placeholder("x", batch=[1], output=[3]))


def test_names_do_not_depend_on_what_else_was_built(tmp_path: Path) -> None:
    """Automatic numbers of a process would make the second program's names differ."""
    path = tmp_path / "model.safetensors"
    with st.Session(), st.Context("reference") as ctx:
        first = model("net")
        ctx.init_params(first, seed=1)
        st.save(path, ctx, first)
        saved = [ctx.get_values(p) for p in first.params]
    with st.Session(), st.Context("reference") as ctx:
        model("unrelated"), st.exp(st.param("other", output=[4]))
        again = model("net")
        report = st.load(path, ctx, again)
        assert report.loaded == ("net.dense.w", "net.dense.b")
        for p, cells in zip(again.params, saved, strict=True):
            np.testing.assert_array_equal(ctx.get_values(p), cells)


def test_one_file_loads_under_two_names(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with st.Session(), st.Context("reference") as ctx:
        first = model("net")
        ctx.init_params(first, seed=1)
        st.save(path, ctx, first)
        left, right = model("left"), model("right")
        with pytest.raises(
            CheckpointError, match=r"left\.dense\.w: not in the file(?s:.*)left\.dense\.b: not in the file"
        ):
            st.load(path, ctx, left)
        assert not any(map(ctx.is_initialized, left.params))
        for side, y in (("left", left), ("right", right)):
            st.load(path, ctx, y, names=lambda name, side=side: name.replace(side, "net"))
        for one, other, source in zip(left.params, right.params, first.params, strict=True):
            np.testing.assert_array_equal(ctx.get_values(one), ctx.get_values(source))
            np.testing.assert_array_equal(ctx.get_values(other), ctx.get_values(source))


def test_two_parameters_of_one_name_are_refused(tmp_path: Path) -> None:
    with st.Session(), st.Context("reference") as ctx:
        both = model("net") + model("net")
        for call in (
            lambda: ctx.init_params(both),
            lambda: st.save(tmp_path / "both.safetensors", ctx, both),
            lambda: st.load(tmp_path / "both.safetensors", ctx, both),
        ):
            with pytest.raises((ContextError, CheckpointError), match=r"net\.dense\.w|both\.safetensors"):
                call()
    assert not list(tmp_path.iterdir())
