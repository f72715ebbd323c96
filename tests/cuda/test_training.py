"""Training steps on the emulated device beside the interpreter and compiled C."""

from __future__ import annotations

import numpy as np
import pytest

import stagedtensor as st
from tests.numerics.running import Array


def train(device: str, steps: int = 3) -> tuple[list[float], list[Array], list[str]]:
    """An MLP with cross-entropy and SGD: losses, parameters, and the paths of the kernels."""
    with st.Session(), st.Context(device) as ctx:
        x, y = st.placeholder("x", batch=[33], output=[70]), st.placeholder("y", batch=[33], prec=st.i32)
        w1, b1 = st.param("w1", output=[64], input=[70]), st.param("b1", output=[64])
        w2, b2 = st.param("w2", output=[10], input=[64]), st.param("b2", output=[10])
        loss = st.mean(st.cross_entropy(w2 @ st.relu(w1 @ x + b1) + b2, y))
        ctx.init_params(loss, seed=0)
        step = ctx.compile(st.sequence(st.grad_update(loss), st.sgd_update(loss, 0.1)))
        rng = np.random.default_rng(0)
        ctx.set_values(x, rng.normal(size=(33, 70)).astype(np.float32))
        ctx.set_values(y, rng.integers(0, 10, 33))
        losses = []
        for _ in range(steps):
            ctx.run(step)
            losses.append(float(ctx.get_values(loss)))
        return losses, [ctx.get_values(w) for w in (w1, b1, w2, b2)], [kernel.path for kernel in step.kernels]


@pytest.mark.parametrize("other", ["reference", "cpu"])
def test_mlp_step_is_that_of_the_other_devices(other: str) -> None:
    losses, parameters, paths = train("cuda-emulated")
    expected_losses, expected, _ = train(other)
    assert losses == pytest.approx(expected_losses, rel=2e-6)
    assert losses[-1] < losses[0]
    for found, wanted in zip(parameters, expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-7)
    assert sum("shared memory" in path for path in paths) >= 4


def test_auto_stays_on_the_cpu_without_a_gpu() -> None:
    with st.Context("auto") as ctx:
        assert "emulated" not in ctx.device_name
