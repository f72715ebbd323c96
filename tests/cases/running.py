"""Running small programs in tests: feed arrays, compile what is asked for as one routine, read the results.

``both_devices`` parametrises a test over compiled C and the interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import stagedtensor as st

Array = np.ndarray[Any, Any]
both_devices = pytest.mark.parametrize("device", ["cpu", "reference"])
FLOATS = (st.f64, st.f32, st.f16, st.bf16)


class Program:
    """A session and a context; inputs are placeholders that are fed before the run."""

    def __init__(self, ctx: st.Context) -> None:
        self.ctx = ctx
        self.feeds: list[tuple[st.Tensor, Array]] = []

    def input(
        self, values: Any, prec: Any = st.f32, *, batch: int = 0, input: int = 0, requires_grad: bool = False
    ) -> st.Tensor:
        """Return a placeholder of ``prec`` holding ``values``; the first ``batch`` axes are batch, the last ``input``."""
        data = np.asarray(values)
        end = data.ndim - input
        tensor = st.placeholder(
            f"x{len(self.feeds)}",
            batch=list(data.shape[:batch]),
            output=list(data.shape[batch:end]),
            input=list(data.shape[end:]),
            prec=prec,
            requires_grad=requires_grad,
        )
        self.feeds.append((tensor, data))
        return tensor

    def feed(self) -> None:
        for tensor, data in self.feeds:
            self.ctx.set_values(tensor, data)

    def run(self, *tensors: st.Tensor, **options: Any) -> list[Array]:
        """Compile the forward of ``tensors`` as one routine, run it, read them."""
        routine = self.ctx.compile(list(tensors), **options)
        self.feed()
        self.ctx.run(routine)
        return [self.ctx.get_values(tensor) for tensor in tensors]

    def gradients(self, loss: st.Tensor, *inputs: st.Tensor) -> list[Array]:
        """Compile and run ``grad_update(loss)``; return the gradients of ``inputs``."""
        routine = self.ctx.compile(st.grad_update(loss))
        self.feed()
        self.ctx.run(routine)
        found = []
        for tensor in inputs:
            assert tensor.grad is not None
            found.append(self.ctx.get_values(tensor.grad))
        return found


@contextmanager
def program(device: str = "cpu", **session: Any) -> Iterator[Program]:
    """Open a session and a context of their own."""
    with st.Session(**session), st.Context(device) as ctx:
        yield Program(ctx)


def wide(array: Array) -> Any:
    """Return the cells as Python numbers (narrow floats widened exactly)."""
    return (array if array.dtype.kind in "iub" else array.astype(np.float64)).tolist()


def same(found: Array, expected: Any) -> None:
    """Assert equality cell by cell; NaN equals NaN, zeros compare by sign where the expected one is negative."""
    want = np.asarray(expected, dtype=np.float64 if found.dtype.kind not in "iub" else found.dtype)
    got = found.astype(want.dtype)
    assert got.shape == want.shape, f"shape {got.shape}, expected {want.shape}"
    np.testing.assert_array_equal(got, want)
    if want.dtype.kind == "f":
        negative = (want == 0) & np.signbit(want)
        assert np.signbit(got[negative]).all(), f"{got} lost the sign of zero"
