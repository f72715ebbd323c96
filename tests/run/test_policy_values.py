"""What a policy costs in values: a narrow forward stays near the f32 one, which itself is no constant."""

from __future__ import annotations

from typing import Any

import numpy as np

import stagedtensor as st


def forward(narrow: bool) -> tuple[list[str], np.ndarray[Any, Any], float]:
    """Return (precisions of w1, b2, y, w1.grad and x), y and the loss of a two-layer network."""
    with st.Session(), st.Context("cpu") as ctx:
        x = st.placeholder("x", batch=[16], output=[4], prec=st.f32)
        w1, b1 = st.param("w1"), st.param("b1", output=[8], init=0.0)
        w2, b2 = st.param("w2"), st.param("b2", output=[3], init=0.0)
        y = (w2 @ st.relu(w1 @ x + b1) + b2).named("y")
        loss = st.mean(y * y)
        if narrow:
            policy = st.PrecisionPolicy(param=st.bf16, activation=st.bf16)
            policy.apply(loss, except_=lambda node: node.label == "b2")
        step = ctx.compile(st.grad_update(loss), keep=[y])
        ctx.init_params(loss, seed=1)
        ctx.set_values(x, np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32))
        ctx.run(step)
        assert w1.grad is not None
        precisions = [str(t.precision) for t in (w1, b2, y, w1.grad, x)]
        return precisions, ctx.get_values(y).astype(np.float64), float(ctx.get_values(loss))


def test_a_bf16_policy_with_one_exception_stays_near_f32() -> None:
    precisions, narrow, narrow_loss = forward(narrow=True)
    assert precisions == ["bf16", "f32", "bf16", "f32", "f32"]
    wide_precisions, wide, wide_loss = forward(narrow=False)
    assert wide_precisions == ["f32"] * 5
    assert np.abs(narrow - wide).max() < 0.05
    assert abs(narrow_loss - wide_loss) < 0.05
    assert wide.max() - wide.min() > 0.05
    assert (narrow != wide).any()
