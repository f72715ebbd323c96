"""The ``cuda`` device without a GPU: what is missing is said, and its driving of CuPy against a stand-in."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor.runtime import cuda, cuda_draw
from stagedtensor.runtime.nvrtc import compile_cuda
from tests.cuda import fake_cupy
from tests.cuda.test_training import train


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = fake_cupy.module()
    monkeypatch.setattr(cuda, "_cupy", lambda: module)
    monkeypatch.setattr(cuda.CudaDevice, "_load", fake_cupy.load)
    return module


def test_without_cupy_the_install_line_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(st.errors.ContextError, match=r'pip install "stagedtensor\[cuda13\]"'):
        st.Context("cuda")


@pytest.mark.skipif(cuda.gpu_count() > 0, reason="there is a GPU")
@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")
def test_without_a_driver_the_other_devices_are_named() -> None:
    with pytest.raises(st.errors.ContextError, match="cuda-emulated"):
        st.Context("cuda")


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch, pretended: Any) -> None:
    with pytest.raises(st.errors.ContextError, match=r"cuda:2.*has 1 GPU$"):
        st.Context("cuda:2")


def test_steps_are_launched_then_captured_then_replayed(pretended: Any) -> None:
    losses, parameters, _ = train("cuda", steps=4)
    expected_losses, expected, _ = train("cuda-emulated", steps=4)
    assert losses == expected_losses
    for found, wanted in zip(parameters, expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_values_set_between_replays_reach_the_graph(pretended: Any) -> None:
    with st.Session(), st.Context("cuda") as ctx:
        x, rate = st.placeholder("x", output=[40]), st.host_scalar("rate", 2.0)
        y = (x * rate).named("y")
        routine = ctx.compile(y)
        device = ctx._device
        assert isinstance(device, cuda.CudaDevice)
        for at in range(5):
            ctx.set_values(x, np.full(40, at, np.float32))
            ctx.set_values(rate, 3.0 + at)
            ctx.run(routine)
            np.testing.assert_array_equal(ctx.get_values(y), np.full(40, at * (3.0 + at), np.float32))
        stream: Any = device.stream
        assert stream.captures == 1
        assert stream.graphs[0].launches == 4  # every run but the first
        assert fake_cupy.Stream.current is None


def test_launches_ask_for_their_shared_memory(pretended: Any) -> None:
    """The stand-in refuses a launch that was not allowed what it asks for."""
    rng = np.random.default_rng(0)
    queries, keys = (rng.standard_normal((1, length, 2, 16)).astype(np.float16) for length in (17, 576))
    with st.Session(), st.Context("cuda") as ctx:
        q = st.placeholder("q", batch=[1, 17], output=[2, 16], prec="f16")
        k = st.placeholder("k", batch=[1, 576], output=[2, 16], prec="f16")
        y = st.attention(q, k, k)
        routine = ctx.compile(y)
        (kernel,) = routine.kernels
        assert kernel.shared_bytes > 48 << 10
        ctx.set_values(q, queries)
        ctx.set_values(k, keys)
        ctx.run(routine)
        found = ctx.get_values(y).astype(np.float32)[0, :, 1]
    scores = queries[0, :, 1].astype(np.float64) @ keys[0, :, 1].astype(np.float64).T / 4
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    expected = weights / weights.sum(axis=1, keepdims=True) @ keys[0, :, 1].astype(np.float64)
    np.testing.assert_allclose(found, expected, atol=4e-3)


def test_tiles_grow_with_the_shared_memory_of_the_device(pretended: Any) -> None:
    heights = []
    for properties in ({}, {"sharedMemPerBlockOptin": 227 << 10}):
        plain = {"name": b"Pretended GPU", "major": 9, "minor": 0, **properties}
        pretended.cuda.runtime.getDeviceProperties = lambda index, plain=plain: plain
        with st.Session(), st.Context("cuda") as ctx:
            q = st.placeholder("q", batch=[48, 33], output=[2, 16], prec="f16")
            k = st.placeholder("k", batch=[48, 576], output=[2, 16], prec="f16")
            (kernel,) = ctx.compile(st.attention(q, k, k)).kernels
        heights.append(int(kernel.path.split()[2]))
    assert heights[0] < heights[1], heights


def test_device_arrays_go_in_without_the_host(pretended: Any) -> None:
    with st.Session(), st.Context("cuda") as ctx:
        x = st.placeholder("x", batch=[4], output=[3])
        y = x * 2.0
        ctx.run(_filled(ctx, ctx.compile(y), x))
        device: Any = ctx._device
        uploads, values = ctx.stats.uploads, np.arange(12, dtype=np.float32).reshape(4, 3)
        given = fake_cupy.Outside(values)
        ctx.set_values(x, given)
        np.testing.assert_array_equal(ctx.get_values(x), values)
        assert given.read == 0
        assert ctx.stats.uploads == uploads
        assert device.stream.waited is not None  # for what the caller's stream still does to the array
        # Another format: converted by the rule, through the host.
        wide = fake_cupy.Outside(values.astype(np.float64) / 3)
        ctx.set_values(x, wide)
        np.testing.assert_array_equal(ctx.get_values(x), (values.astype(np.float64) / 3).astype(np.float32))
        assert wide.read == 1
        across = fake_cupy.Outside(values, gpu=1)  # another GPU's memory is not written into a launch on this one
        ctx.set_values(x, across)
        np.testing.assert_array_equal(ctx.get_values(x), values)
        assert across.read == 1
        with pytest.raises(st.errors.ContextError, match="x"):
            ctx.set_values(x, fake_cupy.Outside(values.T))


@pytest.mark.parametrize("prec", ["bf16", "f16", "i8", "bool"])
def test_device_arrays_of_any_strides_go_in_by_their_bits(pretended: Any, prec: str) -> None:
    with st.Session(), st.Context("cuda") as ctx:
        x = st.placeholder("x", batch=[4], output=[3], prec=prec)
        ctx.run(_filled(ctx, ctx.compile(st.cast(x, "f32") * 2.0), x))
        values = np.arange(-6, 6).reshape(4, 3).astype(st.precision(prec).numpy_dtype)
        for cells in (values, values[::-1], np.asfortranarray(values)):
            given = fake_cupy.Outside(cells)
            ctx.set_values(x, given)
            np.testing.assert_array_equal(ctx.get_values(x), cells)
            assert given.read == 0


def test_8_bit_floats_of_the_device_go_through_the_host(pretended: Any) -> None:
    """The interface calls both formats by one word."""
    with st.Session(), st.Context("cuda") as ctx:
        x = st.placeholder("x", batch=[4], output=[3], prec="f8e4m3")
        ctx.run(_filled(ctx, ctx.compile(st.cast(x, "f32") * 2.0), x))
        given = fake_cupy.Outside(np.full((4, 3), 3.0, st.precision("f8e5m2").numpy_dtype))
        ctx.set_values(x, given)
        assert ctx.get_values(x).astype(np.float32).tolist() == [[3.0] * 3] * 4
        assert given.read == 1


def _filled(ctx: st.Context, routine: st.Routine, x: st.Tensor) -> st.Routine:
    ctx.set_values(x, np.ones((4, 3), np.int8))
    return routine


def test_run_time_extents_are_sent_outside_the_graph(pretended: Any) -> None:
    with st.Session(), st.Context("cuda") as ctx:
        x = st.placeholder("x", batch=[st.dynamic("rows", max=8)], output=[6])
        total = st.sum(x * x)
        routine = ctx.compile(total)
        for rows in (8, 3, 5, 8):
            ctx.set_values(x, np.ones((rows, 6), np.float32))
            ctx.run(routine)
            assert float(ctx.get_values(total)) == 6.0 * rows


@pytest.mark.parametrize("prec", ["f16", "bf16", "f8e4m3", "i8", "f64"])
def test_cells_of_every_format_go_there_and_back(pretended: Any, prec: str) -> None:
    with st.Session(), st.Context("cuda") as ctx:
        x = st.placeholder("x", output=[5], prec=prec)
        ctx.set_values(x, np.array([0, 1, -2, 3, 4], np.float64 if st.precision(prec).is_float else np.int8))
        got = ctx.get_values(x)
        assert got.dtype == st.precision(prec).numpy_dtype
        assert got.astype(np.float64).tolist() == [0, 1, -2, 3, 4]


@pytest.mark.parametrize("memory", [4_000, 6_000])
def test_out_of_memory_names_the_largest_buffers(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In 4,000 bytes not even the inputs fit, in 6,000 not the temporaries."""
    module = fake_cupy.module(memory=memory)
    monkeypatch.setattr(cuda, "_cupy", lambda: module)
    monkeypatch.setattr(cuda.CudaDevice, "_load", fake_cupy.load)
    with st.Session(), st.Context("cuda") as ctx:
        x, y = st.placeholder("x", output=[100]), st.placeholder("y", output=[1000])
        weights = st.softmax(y * 2.0).named("weights")
        with pytest.raises(st.errors.ContextError) as caught:
            ctx.compile([st.sum(x + 1.0), st.sum(weights * weights)], name="both", fusion=False)
        assert not ctx.memory_report().stored, "a compile that failed keeps no memory"
    first, *others = str(caught.value).splitlines()
    named = [line.split()[2] for line in others if "f32" in line]
    assert first.startswith("cuda:0 (Pretended GPU, sm_90) has too little memory for ")
    if memory == 4_000:
        assert "placeholder 'y' (test_cuda_device.py:" in first
        assert first.endswith("of shape [1000] in f32: it takes 3.9 KiB (out of memory)")
        assert named[0] == "x"
    else:
        assert "the temporaries of routine 'both': it takes " in first
        assert "weights" in named[:5]
        assert named[5:7] == ["y", "x"]


def test_out_of_memory_of_initial_values_names_the_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    module = fake_cupy.module(memory=1000)
    monkeypatch.setattr(cuda, "_cupy", lambda: module)
    monkeypatch.setattr(cuda.CudaDevice, "_load", fake_cupy.load)
    with st.Session(), st.Context("cuda") as ctx:
        w = st.param("w", output=[1000], init=st.normal(1.0))
        with pytest.raises(st.errors.ContextError, match=r"initial values of param 'w'.*takes 3.9 KiB"):
            ctx.init_params(w)


def test_a_capture_that_was_interrupted_is_made_again(pretended: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with st.Session(), st.Context("cuda") as ctx:
        x = st.placeholder("x", output=[40])
        y, z = x * 2.0, st.sum(x)
        routine = ctx.compile([y, z], fusion=False)
        called = fake_cupy.Function.__call__
        launches = 0

        def interrupted(*arguments: Any, **named: Any) -> None:
            nonlocal launches
            launches += 1
            if launches == len(routine.kernels) + 2:
                raise KeyboardInterrupt
            called(*arguments, **named)

        monkeypatch.setattr(fake_cupy.Function, "__call__", interrupted)
        for at in range(4):
            ctx.set_values(x, np.full(40, at, np.float32))
            if at == 1:
                with pytest.raises(KeyboardInterrupt):
                    ctx.run(routine)
                continue
            ctx.run(routine)
            np.testing.assert_array_equal(ctx.get_values(y), np.full(40, 2 * at, np.float32))
            assert float(ctx.get_values(z)) == 40.0 * at


def test_a_gpu_that_is_too_old_is_named(pretended: Any) -> None:
    pretended.cuda.runtime.getDeviceProperties = lambda index: {"name": b"Older GPU", "major": 7, "minor": 5}
    with pytest.raises(st.errors.ContextError, match=r"Older GPU, sm_75\) is too old"):
        st.Context("cuda")


def test_layers_of_one_shape_share_their_kernels(pretended: Any) -> None:
    found = {}
    for device in ("reference", "cuda"):
        with st.Session(), st.Context(device) as ctx:
            h = x = st.placeholder("x", batch=[8], output=[16])
            for at in range(3):
                h = st.tanh(st.param(f"w{at}", output=[16]) @ h).named(f"h{at}")
            ctx.init_params(h, seed=0)
            routine = ctx.compile(h)
            ctx.set_values(x, np.random.default_rng(0).standard_normal((8, 16)))
            ctx.run(routine)
            found[device] = ctx.get_values(h)
    np.testing.assert_allclose(found["cuda"], found["reference"], rtol=1e-6, atol=1e-6)
    assert [kernel.name for kernel in routine.kernels] == ["h0", "h1", "h1"]
    assert ["w1" in kernel.reads for kernel in routine.kernels] == [False, True, False]
    assert ["w2" in kernel.reads for kernel in routine.kernels] == [False, False, True]
    assert routine.source.count("__global__") == 2


@pytest.mark.parametrize("init", ["normal", "uniform"])
def test_initial_values_are_drawn_by_a_kernel_with_the_bits_of_the_cpu(
    pretended: Any, init: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = {}
    launched: list[str] = []

    def load(device: Any, emitted: Any, numerics: Any) -> Any:
        launched.append(emitted.kernels[0].name)
        return fake_cupy.load(device, emitted, numerics)

    monkeypatch.setattr(cuda.CudaDevice, "_load", load)
    for device in ("cpu", "cuda"):
        with st.Session(), st.Context(device) as ctx:
            initial = st.normal(0.5) if init == "normal" else st.uniform(-2.0, 3.0)
            w, half = (
                st.param(name, output=[700], init=initial, prec=prec) for name, prec in (("w", "f32"), ("h", "bf16"))
            )
            ctx.init_params(st.sum(w) + st.sum(half), seed=7)
            drawn[device] = [ctx.get_values(t) for t in (w, half)]
    assert launched == [f"st_fill_{init}"] * 2
    for found, expected in zip(drawn["cuda"], drawn["cpu"], strict=True):
        np.testing.assert_array_equal(found, expected)
    assert np.unique(drawn["cuda"][0]).size > 650
    if importlib.util.find_spec("cupy") is not None:
        assert compile_cuda(cuda_draw.fill_source(init, 700).text, "sm_90").warnings == ()
