"""The scaler on a device, the finiteness flag of large gradients, and gates that hold every bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor.optim import states_of

from .mixed_models import DEVICES, Array, Perceptron, all_same_bits, perceptron, read, same_bits, start
from .test_mixed_precision_optimizers import P0, Line

on_devices = pytest.mark.parametrize("device", DEVICES)


# -- scale and reciprocal on the device ------------------------------------------------------------------------------


@on_devices
def test_the_floor_keeps_masters_finite(device: str) -> None:
    with st.Session(), st.Context(device) as ctx:
        line, scaler = Line(ctx), st.LossScaler()
        flag, gradients = st.scaled_grad_update(scaler, line.loss)
        grad_routine = ctx.compile(gradients, name="gradients")
        update_routine = ctx.compile(st.scaled_sgd_update(scaler, line.loss, 0.1), name="update")

        def step() -> bool:
            return st.scaled_step(
                ctx, scaler=scaler, grad_routine=grad_routine, update_routine=update_routine, checksum=flag
            )

        ctx.set_values(line.c, np.full(3, np.nan, np.float32))
        for at in range(144):
            assert not step()
            assert scaler.scale_value() == max(65536.0 * 0.5 ** (at + 1), 2.0**-14)
        assert (scaler.skipped_steps, scaler.floor_hits) == (144, 114)
        assert read(ctx, scaler.unscale) == 2.0**14
        assert same_bits(line.values(), np.array(P0, np.float32))
        ctx.set_values(line.c, np.full(3, 0.01, np.float32))
        assert step()
        np.testing.assert_allclose(line.values(), np.array(P0) - 0.001, rtol=1e-6)


@on_devices
def test_the_ceiling_keeps_the_reciprocal_normal(device: str) -> None:
    with st.Session(), st.Context(device) as ctx:
        scaler = st.LossScaler(2.0**125, growth_interval=1)
        product = (scaler.scale * scaler.unscale).named("product")
        routine = ctx.compile(product)
        for _ in range(3):
            scaler.update(ctx, True)
            assert scaler.scale_value() == 2.0**126
            assert read(ctx, scaler.scale) == 2.0**126
            assert read(ctx, scaler.unscale) == 2.0**-126 > 0
            ctx.run(routine)
            assert read(ctx, product) == 1.0


@on_devices
def test_set_scale_compiles_nothing_and_seeds_the_next_step(device: str) -> None:
    with st.Session(), st.Context(device) as ctx:
        line, scaler = Line(ctx), st.LossScaler(8.0)
        assert line.loss.grad is not None
        _, gradients = st.scaled_grad_update(scaler, line.loss)
        routine = ctx.compile(gradients, keep=[line.loss.grad])
        ctx.run(routine)
        assert read(ctx, line.loss.grad) == 8.0
        compiles = ctx.stats.compiles
        scaler.set_scale(ctx, 2.0**20)
        ctx.run(routine)
        assert ctx.stats.compiles == compiles
        assert read(ctx, line.loss.grad) == read(ctx, scaler.scale) == 2.0**20
        assert read(ctx, line.loss) == pytest.approx(np.dot(P0, [0.5, -1.5, 2.0]))  # the loss stays unscaled


@on_devices
def test_the_scale_stays_f32_under_any_policy(device: str) -> None:
    with st.Session(), st.Context(device) as ctx:
        model, scaler = perceptron("f16", activation="f16", grad="f16"), st.LossScaler(2.0**15)
        start(ctx, model)
        flag, gradients = st.scaled_grad_update(scaler, model.loss)
        ctx.run(ctx.compile(gradients))
        scaler.set_scale(ctx, 2.0**20)
        assert [str(t.precision) for t in (scaler.scale, scaler.unscale, flag)] == ["f32"] * 3
        assert read(ctx, scaler.scale) == 2.0**20


@on_devices
def test_resuming_gives_the_uninterrupted_scales(device: str) -> None:
    verdicts = [True, True, False, True, True, True, True, False, False, True, True, True]

    def train(scaler: st.LossScaler, ctx: st.Context, some: list[bool]) -> list[tuple[float, float, int, int, int]]:
        made = []
        for finite in some:
            scaler.update(ctx, finite)
            counters = (scaler.good_steps, scaler.steps, scaler.skipped_steps)
            made.append((read(ctx, scaler.scale), read(ctx, scaler.unscale), *counters))
        return made

    with st.Session():
        with st.Context(device) as ctx:
            first = st.LossScaler(1024.0, growth_interval=2, min_scale=0.5)
            train(first, ctx, verdicts[:5])
            saved = first.state_dict()
            expected = train(first, ctx, verdicts[5:])
        with st.Context(device) as ctx:
            resumed = st.LossScaler()
            resumed.load_state_dict(ctx, saved)
            assert resumed.state_dict() == saved
            assert train(resumed, ctx, verdicts[5:]) == expected
    assert len({scale for scale, *_ in expected}) > 2


# -- the flag ---------------------------------------------------------------------------------------------------------


class Flag:
    """The finiteness of a gradient whose cells are set by hand."""

    def __init__(self, ctx: st.Context, cells: int, prec: Any, scale: float = 1.0) -> None:
        self.ctx = ctx
        p = st.param("p", output=[cells], prec=prec, init=0.0)
        loss = st.sum(p * st.placeholder("c", output=[cells], prec=prec))
        assert p.grad is not None
        st.specify(p.grad, prec)
        self.gradient = p.grad
        unscale = st.host_scalar("unscale", 1.0 / scale)
        self.flag, test = st.grad_checksum(loss, grad_unscale=unscale)
        self.plain, plain_test = st.grad_checksum(loss)
        self.routine = ctx.compile(st.sequence(test, plain_test), name="checksum")

    def of(self, cells: Array) -> float:
        self.ctx.set_values(self.gradient, cells)
        self.ctx.run(self.routine)
        flags = read(self.ctx, self.flag), read(self.ctx, self.plain)
        assert flags[0] == flags[1]
        assert not np.signbit(flags[0])
        return flags[0]


def test_a_million_large_cells_are_finite() -> None:
    cells = np.full(10**6, 3e38, np.float32)
    with np.errstate(over="ignore"):
        assert np.isinf(cells.sum())
    with st.Session(), st.Context("cpu") as ctx:
        assert Flag(ctx, cells.size, "f32").of(cells) == 0.0


@pytest.mark.parametrize("fast_math", [False, True])
@pytest.mark.parametrize("prec", ["f64", "f32", "f16", "bf16", "f8e5m2", "f8e4m3"])
def test_one_bad_cell_in_a_million(prec: str, fast_math: bool) -> None:
    n = 10**6 + 1
    with st.Session(), st.Context("cpu", numerics=st.Numerics(fast_math=fast_math)) as ctx:
        check_bad_cells(Flag(ctx, n, prec), n, st.precision(prec))


@on_devices
@pytest.mark.parametrize("prec", ["f64", "f32", "f16", "bf16", "f8e5m2", "f8e4m3"])
def test_one_bad_cell_in_a_few(device: str, prec: str) -> None:
    with st.Session(), st.Context(device) as ctx:
        check_bad_cells(Flag(ctx, 37, prec), 37, st.precision(prec))


def check_bad_cells(flag: Flag, n: int, prec: st.Prec) -> None:
    clean = np.full(n, prec.max_finite, np.float64).astype(prec.numpy_dtype)
    assert flag.of(clean) == 0.0
    has_inf = prec is not st.f8e4m3
    for bad in ([np.nan], *(([np.inf], [-np.inf], [np.inf, -np.inf]) if has_inf else ())):
        for at in (0, n // 2, n - len(bad)):
            cells = clean.copy()
            cells[at : at + len(bad)] = bad
            assert flag.of(cells) == np.inf, (bad, at)
    assert flag.of(clean) == 0.0


@on_devices
def test_a_small_scale_smuggles_nothing_past_the_gate(device: str) -> None:
    """1e35 is finite, 1e35 * 2^14 is not; what counts is what the optimizer reads."""
    with st.Session(), st.Context(device) as ctx:
        line, scaler = Line(ctx), st.LossScaler(2.0**-14)
        window, update = st.gated_apply_update(scaler, line.loss, 0.1, momentum=0.9)
        routine = ctx.compile(update, name="apply")
        assert line.p.grad is not None
        for gradient, held in ((1e35, True), (2.0**-14, False)):
            ctx.set_values(line.p.grad, np.array([2.0**-14, 2.0**-14, gradient], np.float32))
            ctx.run(routine)
            assert (read(ctx, window) == np.inf) is held
            ctx.set_values(window, 0.0)
            assert same_bits(line.values(), np.array(P0, np.float32)) is held


# -- gates ----------------------------------------------------------------------------------------------------------


@on_devices
def test_a_closed_gate_holds_every_bit(device: str) -> None:
    with st.Session(), st.Context(device) as ctx:
        line, scaler = Line(ctx), st.LossScaler(4.0)
        window, step = st.gated_scaled_update(scaler, line.loss, 0.1, momentum=0.9, weight_decay=0.1, max_norm=100.0)
        routine = ctx.compile(step, name="gated")

        def run(at: int) -> bool:
            return st.gated_step(ctx, scaler=scaler, routine=routine, window_checksum=window, check_interval=1, step=at)

        assert run(0)
        before = line.everything()
        momentum = ctx.get_values(states_of(line.p)["momentum"])
        assert momentum.all()
        for at, bad in enumerate((np.inf, -np.inf, np.nan), start=1):
            ctx.set_values(line.c, np.array([0.5, bad, 2.0], np.float32))
            assert not run(at)
            assert all_same_bits(line.everything(), before)
        ctx.set_values(line.c, np.array([0.5, -1.5, 2.0], np.float32))
        assert run(4)
        assert not any(same_bits(now, then) for now, then in zip(line.everything(), before, strict=True))
        assert (scaler.skipped_steps, scaler.scale_value()) == (3, 0.5)


@on_devices
def test_gating_without_scaling(device: str) -> None:
    """A bf16 or f32 run that survives a bad batch: held, counted, the scale stays 1."""
    with st.Session(), st.Context(device) as ctx:
        line, scaler = Line(ctx), st.LossScaler(1.0, min_scale=1.0, max_scale=1.0)
        window, step = st.gated_scaled_update(scaler, line.loss, 0.1)
        routine = ctx.compile(step, name="gated")
        for at, factor in enumerate((1.0, np.inf, 1.0, 1.0)):
            ctx.set_values(line.c, np.array([0.5, -1.5, 2.0], np.float32) * np.float32(factor))
            st.gated_step(ctx, scaler=scaler, routine=routine, window_checksum=window, check_interval=2, step=at)
        np.testing.assert_allclose(line.values(), np.array(P0) - 0.3 * np.array([0.5, -1.5, 2.0]), rtol=1e-6)
        assert (scaler.skipped_steps, scaler.floor_hits, scaler.scale_value(), scaler.steps) == (1, 1, 1.0, 4)


@on_devices
def test_windows_count_steps_not_samples(device: str) -> None:
    """A loop that starts again at step 0 over an unsampled rest credits all its runs."""
    with st.Session(), st.Context(device) as ctx:
        line, scaler = Line(ctx), st.LossScaler(8.0, growth_interval=100)
        window, step = st.gated_scaled_update(scaler, line.loss, 0.1)
        routine = ctx.compile(step, name="gated")
        for _ in range(2):
            for at in range(5):
                assert st.gated_step(
                    ctx, scaler=scaler, routine=routine, window_checksum=window, check_interval=3, step=at
                )
        assert (scaler.steps, scaler.good_steps) == (8, 8)  # 3, then the rest of 2 and 3 more
        assert read(ctx, scaler.windows[0].runs) == 2


@on_devices
def test_power_of_two_scales_change_no_bit(device: str) -> None:
    def train(ctx: st.Context, model: Perceptron, routine: st.Routine, seen: tuple[st.Tensor, ...]) -> list[Array]:
        start(ctx, model)
        for p in model.params.values():
            ctx.set_values(states_of(p)["momentum"], np.zeros(p.shape.dims, np.float32))
        made = []
        for _ in range(20):
            ctx.run(routine)
            made += [ctx.get_values(t) for t in seen]
        return [*made, *model.values(ctx)]

    with st.Session(), st.Context(device) as ctx:
        model, scaler = perceptron(), st.LossScaler(1.0)
        flag, gradients = st.scaled_grad_update(scaler, model.loss)
        clip = st.clip_by_global_norm(model.loss, 0.5, grad_unscale=scaler.unscale)
        update = st.scaled_sgd_update(
            scaler, model.loss, 0.05, momentum=0.9, weight_decay=0.1, grad_scale=clip.grad_scale
        )
        routine = ctx.compile(st.sequence(gradients, clip.comp, update), name="step")
        results = []
        for scale in (1.0, 2.0**10):
            scaler.set_scale(ctx, scale)
            results.append(train(ctx, model, routine, (clip.grad_norm, clip.grad_scale, model.loss)))
        assert all_same_bits(*results)
        assert read(ctx, clip.grad_scale) < 1 < 2 * read(ctx, clip.grad_norm)
        assert read(ctx, flag) == 0.0


@on_devices
def test_a_static_scale_changes_no_bit_and_survives_overflow(device: str) -> None:
    results = []
    for scale in (None, 128.0):
        with st.Session(), st.Context(device) as ctx:
            model = perceptron()
            start(ctx, model)
            if scale is None:
                comp = st.sequence(st.grad_update(model.loss), st.sgd_update(model.loss, 0.05, momentum=0.9))
            else:
                comp = st.static_scaled_update(model.loss, 0.05, scale=scale, momentum=0.9)
            step = ctx.compile(comp, name="step")
            for _ in range(5):
                ctx.run(step)
            results.append(model.values(ctx))
            ctx.set_values(model.x, np.full(4, np.inf, np.float32))
            ctx.run(step)
            if scale is not None:
                (held,) = (node for node in step.stored_nodes if node.label == "static_scale")
                assert held.tensor is not None
                assert read(ctx, held.tensor) == 128.0
    assert all_same_bits(*results)
