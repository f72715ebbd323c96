"""The gradient tensor of a tensor that has one."""

from __future__ import annotations

import stagedtensor as st


def grad_of(tensor: st.Tensor) -> st.Tensor:
    """Return ``tensor.grad``; fails where there is none."""
    assert tensor.grad is not None, f"{tensor.label!r} has no gradient"
    return tensor.grad
