"""Network N: dense layers of f32, bf16 and f16 parts one after the other, with its data."""

from __future__ import annotations

from typing import Any

import numpy as np

import stagedtensor as st

WIDTHS = ((8, 6), (8, 8), (8, 8), (8, 8), (2, 8))


class Network:
    """The network, its loss, its placeholders and the weights for a seed."""

    def __init__(self, *, narrow: bool, weights: Any = "master", seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.data = rng.normal(size=(16, 6)).astype(np.float32)
        teacher = rng.normal(size=(6, 2)) / np.sqrt(6)
        self.targets = np.tanh(self.data @ teacher).astype(np.float32)
        self.weights = [(rng.normal(size=size) / np.sqrt(size[1])).astype(np.float32) for size in WIDTHS]
        self.x = st.placeholder("x", batch=[16], output=[6])
        self.t = st.placeholder("t", batch=[16], output=[2])
        h = st.tanh(st.nn.dense(8, prec=st.bf16 if narrow else None, weights=weights, label="first")(self.x))
        h = st.tanh(st.nn.dense(8, label="second")(h))
        body = st.stage("body", prec=st.f16 if narrow else None, weights=weights)
        with body:
            h = st.tanh(st.nn.dense(8, label="third")(h))
            h = st.nn.dense(8, label="fourth")(h)
        self.y = st.nn.dense(2, label="last")(h)
        self.loss = st.mean((self.y - self.t) ** 2)

    def fill(self, ctx: st.Context) -> None:
        """Set data and weights; biases start at 0."""
        ctx.init_params(self.loss)
        for matrix, value in zip(self.matrices, self.weights, strict=True):
            ctx.set_values(matrix, value)
        ctx.set_values(self.x, self.data)
        ctx.set_values(self.t, self.targets)

    @property
    def params(self) -> list[st.Tensor]:
        """The parameters, in construction order."""
        return list(self.loss.params)

    @property
    def matrices(self) -> list[st.Tensor]:
        """The weight matrices, in construction order."""
        return [param for param in self.params if param.shape.input]
