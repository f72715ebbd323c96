"""The small models that mixed-precision tests train, and short ways to compile and run their steps."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

import stagedtensor as st

Array = np.ndarray[Any, Any]
DEVICES = ("cpu", "reference")
POINT = np.array([0.5, -0.3, 0.9, 0.1], np.float32)


@dataclass
class Perceptron:
    """loss = sum(w2 @ relu(w1 @ x + b1) + b2) without a batch axis: 4 inputs, 6 hidden, 2 outputs."""

    x: st.Tensor
    y: st.Tensor
    loss: st.Tensor
    params: dict[str, st.Tensor] = field(default_factory=dict)

    def twin(self, name: str) -> st.Tensor:
        found = st.twin_of(self.params[name])
        assert found is not None
        return found

    def values(self, ctx: st.Context) -> list[Array]:
        return [ctx.get_values(p) for p in self.params.values()]


def perceptron(twins: Any = None, placement: str = "auto", activation: Any = None, grad: Any = None) -> Perceptron:
    """Build the model, with twins at ``twins`` and a policy, in the current session."""
    with st.master_weights(twins, placement) if twins is not None else nullcontext():
        w1 = st.param("w1", input=[4], output=[6], init=st.uniform(-0.25, 0.25))
        b1 = st.param("b1", output=[6], init=0.0)
        w2 = st.param("w2", input=[6], output=[2], init=st.uniform(-0.25, 0.25))
        b2 = st.param("b2", output=[2], init=0.0)
    x = st.placeholder("x", output=[4])
    y = (w2 @ st.relu(w1 @ x + b1) + b2).named("y")
    loss = st.sum(y).named("loss")
    if activation is not None or grad is not None:
        st.PrecisionPolicy(activation=activation, grad=grad).apply(loss)
    return Perceptron(x, y, loss, {p.name: p for p in loss.params})


@lru_cache
def draw() -> dict[str, Array]:
    """One draw of w1 and w2, which every leg starts from."""
    with st.Session(), st.Context("reference") as ctx:
        model = perceptron()
        ctx.init_params(model.loss)
        return {name: ctx.get_values(p) for name, p in model.params.items()}


def start(ctx: st.Context, model: Perceptron) -> None:
    """Set the input and the common initial parameters."""
    ctx.set_values(model.x, POINT)
    for name, p in model.params.items():
        ctx.set_values(p, draw()[name])


def read(ctx: st.Context, t: st.Tensor) -> float:
    """Read one cell."""
    return float(ctx.get_values(t))


def same_bits(left: Array, right: Array) -> bool:
    """Whether two arrays have the same bits (NaN included, -0 is not 0)."""
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


def all_same_bits(left: Sequence[Array], right: Sequence[Array]) -> bool:
    """Whether two lists of arrays have the same bits."""
    return len(left) == len(right) and all(map(same_bits, left, right))
