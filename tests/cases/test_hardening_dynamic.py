"""Dynamic extents at their edges: a maximum of 1, inputs that disagree, values that outlive the data they came from."""

from __future__ import annotations

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor.errors import ContextError

from .running import both_devices


@both_devices
def test_an_extent_up_to_one(device: str) -> None:
    with st.Session(), st.Context(device) as ctx:
        x = st.placeholder("x", batch=[st.dynamic("n", max=1)], output=[2], requires_grad=True)
        loss = st.mean((x * 3.0) ** 2)
        routine = ctx.compile(st.grad_update(loss))
        ctx.set_values(x, [[1.0, 2.0]])
        ctx.run(routine)
        assert ctx.get_values(loss) == 22.5
        assert x.grad is not None
        assert ctx.get_values(x.grad).tolist() == [[9.0, 18.0]]


def test_inputs_of_one_run_agree_on_their_extent() -> None:
    with st.Session(), st.Context("cpu") as ctx:
        n = st.dynamic("n", max=8)
        x, y = (st.placeholder(name, batch=[n], output=[2]) for name in "xy")
        total = st.sum(x * y)
        routine = ctx.compile(total)
        ctx.set_values(x, np.ones((4, 2)))
        ctx.set_values(y, np.ones((3, 2)))
        with pytest.raises(ContextError, match=r"'n' is 3 in this run, but placeholder 'x' .* holds 4 rows"):
            ctx.run(routine)
        ctx.set_values(x, np.ones((3, 2)))
        ctx.run(routine)
        assert ctx.get_values(total) == 6.0


def test_a_result_keeps_the_extent_it_was_computed_for() -> None:
    with st.Session(), st.Context("cpu") as ctx:
        x = st.placeholder("x", batch=[st.dynamic("n", max=8)], output=[2])
        doubled = x * 2.0
        routine = ctx.compile(doubled)
        ctx.set_values(x, np.ones((4, 2)))
        ctx.run(routine)
        ctx.set_values(x, np.ones((3, 2)))
        assert ctx.get_values(doubled).tolist() == [[2.0, 2.0]] * 4
        ctx.run(routine)
        assert ctx.get_values(doubled).tolist() == [[2.0, 2.0]] * 3
