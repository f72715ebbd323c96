"""What optimizers read and write never shapes a parameter whose rows the model left open."""

from __future__ import annotations

import stagedtensor as st


def test_updates_clipping_and_gates_leave_open_rows_to_the_model() -> None:
    with st.Session():
        x = st.placeholder("x", batch=[8], output=[4])
        w1, b1 = st.param("w1"), st.param("b1", output=[6], init=0.0)
        w2, b2 = st.param("w2"), st.param("b2", output=[2], init=0.0)
        loss = st.mean(st.relu(w1 @ x + b1) * 1.0)
        y = w2 @ st.relu(w1 @ x + b1) + b2
        loss = loss + st.mean(y * y)
        unscale, gate = st.host_scalar("unscale", 0.5), st.host_scalar("gate", 1.0)
        assert w1.grad is not None
        assert str((w1.grad * unscale).shape) == "4 -> 6"
        st.clip_by_global_norm(loss, 1.0, grad_unscale=unscale)
        st.sgd_update(loss, 0.1, momentum=0.9, grad_unscale=unscale, update_gate=gate)
        st.adamw_update(loss, 0.1, grad_unscale=unscale, update_gate=gate)
        assert [str(param.shape) for param in (w1, b1, w2, b2)] == ["4 -> 6", "6", "6 -> 2", "2"]
