"""What ``ctx.compile(debug=True)`` adds: gather ids out of range are reported, not only clamped."""

from __future__ import annotations

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor.errors import ContextError


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
        with pytest.raises(
            st.errors.ContextError, match=r"id 9 at position \[1\] of 'ids' is outside 0 .. 3 of 'table' \(2 of 3"
        ):
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


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("computed", [False, True])
def test_labels_out_of_range_are_named(device: str, computed: bool) -> None:
    with st.Session(), st.Context(device) as ctx:
        logits = st.placeholder("logits", batch=[3], output=[4], requires_grad=True)
        labels = st.placeholder("labels", batch=[3], prec=st.i16)
        loss = st.cross_entropy(logits, labels + 1 if computed else labels)
        routine = ctx.compile(st.grad_update(loss), debug=True)
        ctx.set_values(logits, np.zeros((3, 4)))
        ctx.set_values(labels, np.array([0, 1, 2]))
        ctx.run(routine)
        ctx.set_values(labels, np.array([0, 4, -5]))
        with pytest.raises(
            ContextError, match=r"id [45] at position \[1\] of '(labels|add)' is outside 0 .. 3 of the classes of"
        ) as info:
            ctx.run(routine)
        assert "st.cross_entropy(logits" in str(info.value)
        assert "2 of 3" in str(info.value)


def test_labels_that_do_not_count_may_be_anything() -> None:
    with st.Session(), st.Context("reference") as ctx:
        logits = st.placeholder("logits", batch=[2, 3], output=[4])
        labels = st.placeholder("labels", batch=[2, 3], prec=st.i64)
        mask = st.placeholder("mask", batch=[3])
        ignoring = ctx.compile(st.cross_entropy(logits, labels, ignore_index=-100), debug=True)
        masking = ctx.compile(st.cross_entropy(logits, labels, mask=mask), debug=True)
        constant = ctx.compile(st.cross_entropy(logits, labels, mask=st.constant([1.0, 0.0, 1.0], batch=1)), debug=True)
        ctx.set_values(logits, np.zeros((2, 3, 4)))
        ctx.set_values(labels, np.array([[0, -100, 2], [3, -100, 1]]))
        ctx.set_values(mask, np.array([1, 0, 1]))
        for routine in (ignoring, masking, constant):
            ctx.run(routine)
        ctx.set_values(labels, np.array([[0, -100, 2], [7, -100, 1]]))
        for routine in (ignoring, masking, constant):
            with pytest.raises(ContextError, match=r"id 7 at position \[1, 0\] of 'labels' (?s:.*)1 of 6"):
                ctx.run(routine)
