"""Cast twins: which parameters get one, what is pinned, and that a stored twin is always the cast of its master."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

import stagedtensor as st

from .mixed_models import DEVICES, POINT, perceptron, same_bits

on_devices = pytest.mark.parametrize("device", DEVICES)


def weight(name: str = "w", **options: Any) -> st.Tensor:
    return st.param(name, input=[4], output=[3], **options)


def is_twin(t: st.Tensor, prec: str = "bf16") -> bool:
    """Whether ``t`` is a twin at ``prec`` of a parameter, not a cast of a cast."""
    record = t.node.record
    return record is not None and len(t.params) == 1 and st.twin_of(t.params[0]) is t and str(t.precision) == prec


# -- what is made -----------------------------------------------------------------------------------------------------


def test_the_same_call_gives_the_same_twin() -> None:
    with st.Session():
        w = weight()
        assert st.twin_of(w) is None
        twin = st.cast_param(w, "bf16")
        assert st.twin_of(w) is twin
        assert st.cast_param(w, st.bf16, placement="auto") is twin
        other = st.cast_param(w, "f16")
        assert other is not twin
        assert st.twin_of(w) is twin
        assert (str(w.precision), str(twin.precision), str(other.precision)) == ("f32", "bf16", "f16")
        assert w.grad is not None
        assert str(w.grad.precision) == "f32"


def test_masters_are_pinned_against_their_consumers() -> None:
    with st.Session():
        free, pinned, own = weight("free"), weight("pinned"), weight("own", prec="f16")
        for master in (pinned, own):
            st.cast_param(master, "bf16")
        x = st.placeholder("x", output=[4], prec="bf16")
        loss = st.sum((free @ x) + (st.cast_param(pinned, "bf16") @ x) + (st.cast_param(own, "bf16") @ x))
        assert str(free.precision) == "bf16"
        assert str(pinned.precision) == "f32"
        assert str(own.precision) == "f16"
        assert [str(p.grad.precision) for p in (pinned, own) if p.grad is not None] == ["f32", "f32"]
        assert all(p is q for p, q in zip(loss.params, (free, pinned, own), strict=True))
        assert all(p is q for p, q in zip(st.trainable_params(loss), (free, pinned, own), strict=True))


def test_what_needs_no_twin_is_returned_as_it_is() -> None:
    with st.Session():
        frozen = weight("frozen", trainable=False)
        assert st.cast_param(frozen, "bf16") is frozen
        assert frozen.node.specified is None
        half = weight("half", prec="f16")
        assert st.cast_param(half, "f16") is half
        assert half.grad is not None
        assert half.grad.node.specified is not None  # after pinning
        assert str(half.grad.precision) == "f32"
        full = weight("full")
        assert st.cast_param(full, "f32") is full
        assert full.node.specified is not None


def test_twin_gradients_follow_the_policy() -> None:
    with st.Session():
        model = perceptron("f16", activation="f16")
        gradient = model.twin("w1").grad
        assert gradient is not None
        assert str(gradient.precision) == "f32"
    with st.Session():
        model = perceptron("f16", activation="f16", grad="f16")
        gradient, master = model.twin("w1").grad, model.params["w1"].grad
        assert gradient is not None
        assert master is not None
        assert (str(gradient.precision), str(master.precision)) == ("f16", "f32")


@on_devices
@pytest.mark.parametrize("prec", ["bf16", "f16"])
def test_a_twin_has_its_masters_shape(device: str, prec: str) -> None:
    """Batch axes broadcast where the twin is used; they never widen it."""
    with st.Session(), st.Context(device) as ctx:
        with st.master_weights(prec, "materialized"):
            twin = st.param("w", output=[3], init=0.5)
        x = st.placeholder("x", batch=[8], output=[4])
        loss = st.sum(twin @ x)
        (w,) = loss.params
        ctx.init_params(loss)
        ctx.set_values(x, np.tile(0.25 * np.arange(4, dtype=np.float32), (8, 1)))
        ctx.run(ctx.compile(st.sequence(st.grad_update(loss), st.sgd_update(loss, 0.1)), name="step"))
        assert w.shape.dims == twin.shape.dims == (3, 4)
        assert w.grad is not None
        np.testing.assert_allclose(ctx.get_values(w.grad), np.tile(2.0 * np.arange(4), (3, 1)), rtol=1e-6)
        assert read_twin(ctx, twin).shape == ctx.get_values(w).shape == (3, 4)


# -- blocks -------------------------------------------------------------------------------------------------------------


def test_the_block_must_surround_construction() -> None:
    with st.Session():
        outside = weight("outside")
        with st.master_weights("bf16"):
            inside = weight("inside")
            y = outside @ st.placeholder("x", output=[4])
        assert is_twin(inside)
        assert not is_twin(outside)
        assert st.twin_of(outside) is None
        assert all(st.twin_of(p) is None for p in y.params)
        assert not is_twin(weight("after"))
        assert is_twin(st.with_master_weights(lambda: weight("built"), "f16", "virtual"), "f16")
        assert not is_twin(weight("afterwards"))


def test_the_innermost_block_alone_applies() -> None:
    with st.Session(), st.master_weights("bf16", only=lambda p: not p.name.endswith("bias")):
        assert is_twin(weight("a"))
        assert not is_twin(st.param("a_bias", output=[3]))
        with st.master_weights("f16", "materialized"):
            inner = weight("b")
            assert is_twin(inner, "f16")
            assert st.twin_of(inner.params[0]) is inner
            assert len(inner.params[0].node.consumers) == 1
            with st.master_weights(None):
                assert not is_twin(weight("c"))
            assert is_twin(weight("d"), "f16")
        assert is_twin(weight("e"))


def test_the_hook_is_restored_after_an_exception() -> None:
    with st.Session():
        with pytest.raises(RuntimeError, match="broken"), st.master_weights("bf16"):
            raise RuntimeError("broken")
        assert not is_twin(weight())


def test_other_threads_and_tasks_see_nothing() -> None:
    seen: dict[str, bool] = {}

    def in_thread() -> None:
        with st.Session():
            seen["thread"] = is_twin(weight("thread"))

    async def other(entered: asyncio.Event, leave: asyncio.Event) -> None:
        await entered.wait()
        with st.Session():
            seen["task"] = is_twin(weight("task"))
        leave.set()

    async def both() -> None:
        entered, leave = asyncio.Event(), asyncio.Event()
        waiting = asyncio.create_task(other(entered, leave))
        with st.Session(), st.master_weights("bf16"):
            thread = threading.Thread(target=in_thread)
            thread.start()
            thread.join()
            entered.set()
            await leave.wait()
            seen["here"] = is_twin(weight("here"))
        await waiting

    asyncio.run(both())
    assert seen == {"thread": False, "task": False, "here": True}


# -- values -----------------------------------------------------------------------------------------------------------


def read_twin(ctx: st.Context, twin: st.Tensor) -> np.ndarray[Any, Any]:
    values = ctx.get_values(twin)
    (master,) = twin.params
    assert same_bits(values, ctx.get_values(master).astype(values.dtype))
    return values


@on_devices
def test_a_stored_twin_is_the_cast_of_its_masters_present_value(device: str) -> None:
    with st.Session(), st.Context(device) as ctx:
        model = perceptron("f16", "materialized")
        w1, twin = model.params["w1"], model.twin("w1")
        ctx.set_values(model.x, POINT)
        ctx.init_params(model.loss)
        step = ctx.compile(st.sequence(st.grad_update(model.loss), st.sgd_update(model.loss, 0.1)), name="step")
        drawn = read_twin(ctx, twin)  # before any run
        assert drawn.any()
        ctx.run(step)
        assert not same_bits(read_twin(ctx, twin), drawn)
        ctx.set_values(w1, np.full((6, 4), 0.1, np.float32))
        assert same_bits(read_twin(ctx, twin), np.full((6, 4), 0.1, np.float16))
        ctx.view(w1, writable=True)[...] = 0.3
        assert same_bits(read_twin(ctx, twin), np.full((6, 4), 0.3, np.float16))
        ctx.init_params(model.loss, only_missing=False)
        assert same_bits(read_twin(ctx, twin), drawn)


@on_devices
def test_setting_a_master_reaches_the_next_run(device: str) -> None:
    """The forward casts again: a stale copy would keep the old loss."""
    losses = {}
    for placement in ("auto", "virtual", "materialized"):
        with st.Session(), st.Context(device) as ctx:
            model = perceptron("f16", placement)
            ctx.set_values(model.x, POINT)
            ctx.init_params(model.loss)
            forward = ctx.compile(model.loss)
            ctx.run(forward)
            for p in model.params.values():
                ctx.set_values(p, np.full(p.shape.dims, 0.1, np.float32))
            ctx.run(forward)
            losses[placement] = ctx.get_values(model.loss)
    tenth = float(np.float16(0.1))
    hidden = tenth * float(POINT.sum()) + tenth
    assert losses["auto"] == pytest.approx(2 * (6 * tenth * hidden + tenth), rel=1e-6)
    assert same_bits(losses["auto"], losses["virtual"])
    assert same_bits(losses["auto"], losses["materialized"])


@on_devices
def test_twins_cannot_be_set(device: str) -> None:
    with st.Session(), st.Context(device) as ctx:
        for placement in ("virtual", "materialized"):
            model = perceptron("f16", placement)
            twin = model.twin("w1")
            ctx.init_params(model.loss)
            ctx.set_values(model.x, POINT)
            ctx.run(ctx.compile(st.grad_update(model.loss)))
            with pytest.raises(st.errors.ContextError, match=r"w1\.f16"):
                ctx.set_values(twin, np.zeros((6, 4), np.float32))
            gradient = model.y.grad
            assert gradient is not None
            with pytest.raises(st.errors.ContextError, match=r"y\.grad"):
                ctx.set_values(gradient, np.zeros(2, np.float32))


@on_devices
@pytest.mark.parametrize("placement", ["auto", "virtual", "materialized"])
def test_statements_read_the_present_value(device: str, placement: str) -> None:
    """A routine that reads a twin after an update, without a forward, must not see what the last forward stored."""
    with st.Session(), st.Context(device) as ctx:
        w = st.param("w", output=[3], init=0.5)
        twin = st.cast_param(w, "bf16", placement=placement)
        loss = st.sum(twin * st.constant(np.ones(3, np.float32)))
        copy = st.param("copy", output=[3], init=0.0, trainable=False)
        ctx.init_params([loss, copy])
        step = ctx.compile(st.sequence(st.grad_update(loss), st.sgd_update(loss, 0.1)), name="step")
        read = ctx.compile(st.computation("copy =: twin", copy=copy, twin=twin), name="read")
        seen = []
        for _ in range(2):
            ctx.run(step)
            ctx.run(read)
            seen.append(ctx.get_values(copy).astype(np.float64))
            np.testing.assert_allclose(seen[-1], ctx.get_values(w), rtol=2.0**-8)
        np.testing.assert_allclose(seen[0] - seen[1], 0.1, atol=4e-3)
