"""Shapes: nothing becomes 1 in silence, scalars are treated alike, looking changes nothing, empty tensors work."""

from __future__ import annotations

import numpy as np
import pytest

import stagedtensor as st

from .running import both_devices, program, same


def test_a_size_that_nothing_determines_is_an_error_naming_the_parameter() -> None:
    with program() as p:
        x = p.input(np.ones((2, 3)), batch=1)
        first, second = st.param("first"), st.param("second")
        y = second @ st.relu(first @ x)
        with pytest.raises(st.errors.ShapeError) as caught:
            p.ctx.compile(y)
        message = str(caught.value)
        assert "'first'" in message or "'second'" in message
        assert "output=[" in message
        assert "test_shapes_cases.py" in message


@both_devices
def test_equal_scalars_are_treated_alike(device: str) -> None:
    with program(device) as p:
        x = p.input([[1.0, 2.0], [3.0, 4.0]], batch=1)
        literal, computed, constant = x * 2, x * (st.constant(1) + 1), x * st.constant(2)
        assert str(literal.shape) == str(computed.shape) == str(constant.shape)
        for found in p.run(literal, computed, constant, 2 * x, x + x):
            same(found, [[2, 4], [6, 8]])


def test_a_contraction_treats_equal_scalars_alike() -> None:
    with program() as p:
        x = p.input([1.0, 2.0])
        outcomes = []
        for scalar in (st.constant(2), st.constant(1) + 1, 2):
            try:
                outcomes.append((str((scalar @ x).shape), p.run(scalar @ x)[0].tolist()))
            except st.errors.ShapeError as error:
                outcomes.append(("ShapeError", [len(str(error)) > 0]))
        assert outcomes[0] == outcomes[1] == outcomes[2]


def test_looking_at_a_shape_changes_nothing() -> None:
    def build(*, look: bool) -> tuple[list[str], float]:
        with program() as p:
            x = p.input(np.ones((5, 3)), batch=1)
            w, b = st.param("w", init=2.0), st.param("b", init=1.0)
            hidden = w @ x + b
            if look:  # too early: nothing says yet how wide it is
                assert "shape not settled" in repr(hidden)
                with pytest.raises(st.errors.ShapeError, match="'w'"):
                    print(hidden.shape)
            gain = st.param("gain", output=[4], init=0.5)
            total = st.sum(hidden * gain)
            if look:
                assert str(hidden.shape) == "5 | -> 4"
                assert repr(total)
            p.ctx.init_params(total)
            value = p.run(total)[0].item()
            return [str(tensor.shape) for tensor in (x, w, b, hidden, gain, total)], value

    shapes, value = build(look=False)
    assert shapes == ["5 | -> 3", "3 -> 4", "4", "5 | -> 4", "4", "()"]
    assert value == 5 * 4 * 0.5 * 7
    assert build(look=True) == (shapes, value)


@both_devices
def test_a_batch_of_one_stays_a_batch(device: str) -> None:
    with program(device) as p:
        x = p.input([[1.0, 2.0, 3.0]], batch=1)
        w = st.param("w", output=[2], init=1.0)
        y = w @ x
        p.ctx.init_params(y)
        softmax, total, product, labels = (
            st.softmax(x),
            st.sum(x, axis="batch"),
            y,
            st.cross_entropy(x, p.input([2], st.i32, batch=1), reduction="none"),
        )
        found = p.run(softmax, total, product, labels)
        assert [cells.shape for cells in found] == [(1, 3), (3,), (1, 2), (1,)]
        same(found[1], [1, 2, 3])
        same(found[2], [[6, 6]])
        one_cell = p.input([[7.0]], batch=1)
        assert p.run(one_cell * 2.0)[0].shape == (1, 1)


def test_data_of_another_shape_is_refused_before_anything_is_written() -> None:
    with program() as p:
        x = p.input([1.0, 2.0, 3.0])
        y = x * 1.0
        p.run(y)
        for wrong in ([1.0, 2.0], [[1.0, 2.0, 3.0]], 1.0, np.ones((3, 1))):
            with pytest.raises(st.errors.ContextError, match="x0"):
                p.ctx.set_values(x, wrong)
        same(p.ctx.get_values(x), [1, 2, 3])


# -- empty tensors ------------------------------------------------------------------------------------------------


@both_devices
def test_empty_tensors(device: str) -> None:
    with program(device) as p:
        empty, rows = p.input(np.zeros(0)), p.input(np.zeros((3, 0)))
        left, right = p.input(np.zeros((2, 0))), p.input(np.zeros((0, 3)))
        added, doubled, total, by_row, by_column, product, count = p.run(
            empty + 1.0,
            rows * 2.0,
            st.sum(empty),
            st.sum(rows, axis=1),
            st.sum(rows, axis=0),
            st.einsum("ij,jk->ik", left, right),
            st.prod(empty),
        )
        assert added.shape == (0,)
        assert doubled.shape == (3, 0)
        same(total, 0)
        same(by_row, [0, 0, 0])
        assert by_column.shape == (0,)
        same(product, np.zeros((2, 3)))
        same(count, 1)
        assert p.ctx.get_values(empty).shape == (0,)
        p.ctx.set_values(empty, np.zeros(0))


@both_devices
def test_an_extremum_of_nothing_is_an_error(device: str) -> None:
    with program(device) as p:
        empty, rows, columns = p.input(np.zeros(0)), p.input(np.zeros((3, 0))), p.input(np.zeros((0, 3)))
        for build in (
            lambda: st.max(empty),
            lambda: st.min(empty),
            lambda: st.argmax(empty),
            lambda: st.max(rows, axis=1),
            lambda: st.einsum("ij->i", rows, reduce="max"),
        ):
            with pytest.raises(st.errors.ShapeError, match=r"(?s)axis of size 0.*test_shapes_cases\.py"):
                p.run(build())
        nothing, softmax = p.run(st.max(columns, axis=1), st.softmax(rows))
        assert (nothing.shape, softmax.shape) == ((0,), (3, 0))
