"""Dynamic loss scaling beside torch's: one model, data, start and injected overflows; the same scales and skipped
steps.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

import stagedtensor as st

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.peers

STEPS, BATCH, RATE = 300, 16, 0.02
INIT, GROWTH, BACKOFF, INTERVAL = 2.0**8, 2.0, 0.5, 10
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Problem:
    """Batches, weights, and the steps whose batch is blown up."""

    x: Array
    y: Array
    weights: tuple[Array, ...]
    blown_up: frozenset[int]


@lru_cache
def problem() -> Problem:
    rng = np.random.default_rng(5)
    x = rng.uniform(-1, 1, (STEPS, BATCH, 8)).astype(np.float32)
    y = np.tanh(x @ rng.normal(0, 0.5, (8, 2))).astype(np.float32)
    blown_up = frozenset(int(step) for step in np.flatnonzero(rng.uniform(size=STEPS) < 0.07))
    for step in blown_up:
        x[step] *= 1e30 if step % 2 else np.inf
    weights = tuple(
        rng.uniform(-bound, bound, shape).astype(np.float32)
        for shape, bound in (((16, 8), 0.35), ((16,), 0.1), ((2, 16), 0.25), ((2,), 0.1))
    )
    return Problem(x, y, weights, blown_up)


@dataclass
class History:
    """What a run did: the scale after each step, which updates ran, the loss of each, and the final parameters."""

    scales: list[float]
    ran: list[bool]
    losses: list[float]
    weights: list[Array]


@lru_cache
def torch_run(prec: str, optimizer: str) -> History:
    data = problem()
    w1, b1, w2, b2 = (torch.nn.Parameter(torch.from_numpy(w.copy())) for w in data.weights)
    params = [w1, b1, w2, b2]
    if optimizer == "sgd":
        update = torch.optim.SGD(params, lr=RATE, momentum=0.9, weight_decay=0.01)
    else:
        update = torch.optim.AdamW(params, lr=RATE, weight_decay=0.01)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=INIT, growth_factor=GROWTH, backoff_factor=BACKOFF, growth_interval=INTERVAL
    )
    narrow = {"f32": None, "bf16": torch.bfloat16, "f16": torch.float16}[prec]
    history = History([], [], [], [])
    for step in range(STEPS):
        x, y = torch.from_numpy(data.x[step]), torch.from_numpy(data.y[step])
        with torch.autocast("cpu", dtype=narrow) if narrow is not None else nullcontext():
            hidden = torch.relu(torch.nn.functional.linear(x, w1, b1))
            found = torch.nn.functional.linear(hidden, w2, b2)
            loss = torch.nn.functional.mse_loss(found.float(), y)
        update.zero_grad()
        before = w1.detach().clone()
        scaler.scale(loss).backward()
        scaler.step(update)
        scaler.update()
        history.ran.append(not torch.equal(before, w1.detach()))
        history.scales.append(float(scaler.get_scale()))
        history.losses.append(float(loss.detach()))
    history.weights = [p.detach().numpy() for p in params]
    return history


def own_run(prec: str, optimizer: str, gated: bool) -> History:
    data = problem()
    with st.Session(), st.Context("cpu") as ctx:
        with st.master_weights(None if prec == "f32" else prec):
            w1 = st.param("w1", input=[8], output=[16])
            b1 = st.param("b1", output=[16])
            w2 = st.param("w2", input=[16], output=[2])
            b2 = st.param("b2", output=[2])
        x = st.placeholder("x", batch=[BATCH], output=[8])
        y = st.placeholder("y", batch=[BATCH], output=[2], prec="f32")
        loss = st.mse(w2 @ st.relu(w1 @ x + b1) + b2, y)
        if prec != "f32":
            st.PrecisionPolicy(activation=prec, grad=prec).apply(loss)
        for p, values in zip(loss.params, data.weights, strict=True):
            ctx.set_values(p, values)
        scaler = st.LossScaler(INIT, GROWTH, BACKOFF, INTERVAL)
        options: dict[str, Any] = {"weight_decay": 0.01}
        if optimizer == "sgd":
            options |= {"momentum": 0.9}
        update = st.sgd_update if optimizer == "sgd" else st.adamw_update
        if gated:
            window, comp = st.gated_scaled_update(scaler, loss, RATE, update=update, **options)
            routine = ctx.compile(comp, name="step")
        else:
            flag, comp = st.scaled_grad_update(scaler, loss)
            gradients = ctx.compile(comp, name="gradients")
            applied = ctx.compile(update(loss, RATE, grad_unscale=scaler.unscale, **options), name="update")
        history = History([], [], [], [])
        for step in range(STEPS):
            ctx.set_values(x, data.x[step])
            ctx.set_values(y, data.y[step])
            before = ctx.get_values(loss.params[0])
            if gated:
                finite = st.gated_step(
                    ctx, scaler=scaler, routine=routine, window_checksum=window, check_interval=1, step=step
                )
            else:
                finite = st.scaled_step(
                    ctx, scaler=scaler, grad_routine=gradients, update_routine=applied, checksum=flag
                )
            moved = before.tobytes() != ctx.get_values(loss.params[0]).tobytes()
            assert moved == finite
            history.ran.append(finite)
            history.scales.append(scaler.scale_value())
            history.losses.append(float(ctx.get_values(loss)))
        history.weights = [ctx.get_values(p) for p in loss.params]
        assert scaler.skipped_steps == len(data.blown_up)
        return history


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    ("prec", "loss_tolerance", "weight_tolerance"), [("f32", 1e-6, 5e-5), ("bf16", 5e-3, 0.1), ("f16", 1e-3, 0.03)]
)
def test_scales_skips_and_losses_are_torchs(
    prec: str, loss_tolerance: float, weight_tolerance: float, optimizer: str, gated: bool
) -> None:
    expected, found = torch_run(prec, optimizer), own_run(prec, optimizer, gated)
    assert found.ran == expected.ran == [step not in problem().blown_up for step in range(STEPS)]
    assert found.scales == expected.scales
    assert len(set(found.scales)) > 3
    for step in range(STEPS):
        if step not in problem().blown_up:
            assert found.losses[step] == pytest.approx(expected.losses[step], abs=loss_tolerance)
    for mine, theirs in zip(found.weights, expected.weights, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=weight_tolerance)
    ran = [loss for step, loss in enumerate(found.losses) if step not in problem().blown_up]
    assert np.mean(ran[-20:]) < 0.2 * np.mean(ran[:5])
