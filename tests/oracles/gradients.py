"""Gradients of tensors that have one, and losses that tell the cells of a result apart."""

from __future__ import annotations

import numpy as np

import stagedtensor as st
from stagedtensor.public_ops import Sample


def grad_of(tensor: st.Tensor) -> st.Tensor:
    """Return ``tensor.grad``; fails where there is none."""
    assert tensor.grad is not None, f"{tensor.label!r} has no gradient"
    return tensor.grad


def weighted(built: Sample) -> st.Tensor:
    """A loss with another upstream gradient for each cell of the result."""
    shape = built.result.shape
    weights = np.random.default_rng(7).uniform(0.5, 1.5, shape.dims)
    factor = st.constant(weights, batch=len(shape.batch), output=len(shape.output), input=len(shape.input))
    return st.sum(built.result * factor)
