"""What ``ctx.compile(debug=True)`` adds: gather ids out of range are reported, not only clamped."""

from __future__ import annotations

import numpy as np
import pytest

import stagedtensor as st


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_ids_out_of_range_are_named(device: str) -> None:
    with st.Session(), st.Context(device) as ctx:
        table = st.param("table", init=np.arange(12.0).reshape(4, 3))
        ids = st.placeholder("ids", batch=[3], prec=st.i32)
        rows = st.gather(table, ids).named("rows")
        ctx.init_params(rows)
        plain, checked = ctx.compile(rows, name="plain"), ctx.compile(rows, name="checked", debug=True)
        ctx.set_values(ids, np.array([0, 9, -2]))
        ctx.run(plain)
        np.testing.assert_array_equal(ctx.get_values(rows), np.array([[0, 1, 2], [9, 10, 11], [0, 1, 2]]))
        with pytest.raises(st.errors.ContextError, match=r"id 9 at position \[1\] of 'ids' is outside 0 .. 3 of 'table' \(2 of 3"):
            ctx.run(checked)
        ctx.set_values(ids, np.array([0, 3, 1]))
        ctx.run(checked)


def test_ids_computed_by_the_routine_are_checked_too() -> None:
    with st.Session(), st.Context("reference") as ctx:
        x = st.placeholder("x", batch=[2], output=[5])
        table = st.param("table", init=np.arange(6.0).reshape(3, 2))
        rows = st.gather(table, st.argmax(x).named("winner"))
        routine = ctx.compile(rows, debug=True)
        ctx.init_params(rows)
        ctx.set_values(x, np.array([[0, 1, 0, 0, 0], [0, 0, 0, 0, 1]], np.float32))
        with pytest.raises(st.errors.ContextError, match="id 4 at position \\[1\\] of 'winner'"):
            ctx.run(routine)
