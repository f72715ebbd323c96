"""The arms of the benchmarks compute the same: trajectories of small workloads in torch, JAX and here."""

from __future__ import annotations

import numpy as np
import pytest

from stagedtensor.benchmarks import jax_arm, kernels, ours, torch_arm
from stagedtensor.benchmarks.arm import Arm
from stagedtensor.benchmarks.workloads import Convolutions, Gpt, Mlp, Workload, start

pytestmark = pytest.mark.peers

WORKLOADS = (
    Mlp("mlp", (12, 16, 5), 8),
    Convolutions("conv", (13, 13, 2), (3, 4), (6, 5), batch=4, kernel=3),
    Gpt("gpt", 2, 16, 2, 6, 11, 3),
)
TOLERANCE = {"f32": 1e-5, "bf16": 2e-2, "f16": 2e-3}


def losses(arm: Arm, steps: int = 6) -> list[float]:
    found = [float(arm.read(arm.step(at))) for at in range(steps)]
    arm.close()
    return found


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_torch_and_jax_train_the_same(workload: Workload, precision: str) -> None:
    pytest.importorskip("torch")
    begin = start(workload)
    expected = losses(torch_arm.eager_arm(workload, "f32", begin, threads=1))
    assert abs(expected[-1] - expected[0]) > 1e-3
    mine = losses(ours.train_arm(workload, precision, begin, threads=1, cached=False))
    theirs = losses(torch_arm.eager_arm(workload, precision, begin, threads=1))
    np.testing.assert_allclose(mine, expected, rtol=TOLERANCE[precision])
    np.testing.assert_allclose(theirs, expected, rtol=TOLERANCE[precision])
    pytest.importorskip("jax")
    others = losses(jax_arm.train_arm(workload, precision, begin, cached=False))
    np.testing.assert_allclose(others, expected, rtol=TOLERANCE[precision])


@pytest.mark.parametrize("kind", ["gemm", "elementwise", "rows"])
@pytest.mark.parametrize("form", ["nn", "nt", "tn"])
def test_kernels_agree(kind: str, form: str) -> None:
    if form != "nn" and kind != "gemm":
        return
    pytest.importorskip("torch")
    kernel = kernels.Kernel(kind, (4096,) if kind == "elementwise" else (32, 32), form)
    operands = kernels.rounded(kernel.operands(), "bf16")
    at, exact = kernel.expected(operands)
    for name in ("ours", "torch"):
        arm = kernels.build(name, kernel, "bf16", operands, 1)
        found = np.asarray(arm.read(arm.step(0)))[at].astype(np.float64)
        arm.close()
        assert np.abs(found - exact).max() <= kernels.GATES["bf16"] * np.abs(exact).max(), name
