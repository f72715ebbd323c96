"""Reading, writing and printing tensors: at any time, without deciding anything, without sharing memory."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import stagedtensor as st

from .running import both_devices, program, same


@both_devices
def test_a_constant_is_readable_at_any_time(device: str) -> None:
    with program(device) as p:
        table = st.constant(np.array([1.5, 2.5], np.float32))
        literal = st.constant([1.0, 2.0])
        same(p.ctx.get_values(table), [1.5, 2.5])
        same(p.ctx.get_values(literal), [1, 2])
        assert repr(table)
        x = p.input([10.0, 20.0])
        y = x * table + literal
        same(p.run(y)[0], [16, 52])
        same(p.ctx.get_values(table), [1.5, 2.5])
        again = y + table
        same(p.run(again)[0], [17.5, 54.5])


@both_devices
def test_a_result_that_was_not_run_says_so(device: str) -> None:
    with program(device) as p:
        x = p.input([1.0, 2.0])
        hidden = (x * 2.0).named("hidden")
        y = hidden + 1.0
        for _ in range(2):
            with pytest.raises(st.errors.ContextError, match="hidden"):
                p.ctx.get_values(hidden)
        routine = p.ctx.compile(y)
        with pytest.raises(st.errors.ContextError, match="run a routine"):
            p.ctx.get_values(y)
        with pytest.raises(st.errors.ContextError, match="x0"):
            p.ctx.run(routine)
        p.feed()
        p.ctx.run(routine)
        same(p.ctx.get_values(y), [3, 5])
        with pytest.raises(st.errors.ContextError, match="keep"):
            p.ctx.get_values(hidden)
        kept = p.ctx.compile(y, keep=[hidden])
        p.ctx.run(kept)
        same(p.ctx.get_values(hidden), [2, 4])


def test_printing_decides_nothing() -> None:
    def train(*, look: bool) -> Any:
        with program() as p:
            x = st.placeholder("x", output=[2])
            w = st.param("w", output=[2], init=0.1)
            y = w * x
            if look:
                for tensor in (x, w, y, y.grad, w.grad):
                    assert repr(tensor)
                    assert tensor is not None
                    assert st.explanation(tensor)
            st.specify(w, st.bf16)
            loss = st.sum(y)
            step = p.ctx.compile(st.grad_update(loss))
            p.ctx.init_params(loss)
            p.ctx.set_values(x, [1.0, 3.0])
            p.ctx.run(step)
            assert w.grad is not None
            return [(str(t.precision), p.ctx.get_values(t).astype(np.float64).tolist()) for t in (loss, w, w.grad)]

    assert train(look=True) == train(look=False)


@both_devices
def test_values_are_copied_in_and_out(device: str) -> None:
    with program(device) as p:
        x = p.input(np.zeros(1000))
        y = x * 2.0
        routine = p.ctx.compile(y)
        buffer = np.zeros(1000, np.float32)
        results = []
        for at in range(50):
            buffer[:] = at
            p.ctx.set_values(x, buffer)
            buffer[:] = -1
            p.ctx.run(routine)
            results.append(p.ctx.get_values(y))
        for at, found in enumerate(results):
            assert (found == 2 * at).all()
        assert (p.ctx.get_values(x) == 49).all()


@both_devices
def test_arrays_of_any_layout_and_dtype_arrive(device: str) -> None:
    grid = np.arange(12.0).reshape(3, 4)
    layouts = [grid, np.asfortranarray(grid), grid.T.copy().T, grid[::-1][::-1], np.repeat(grid, 2, axis=1)[:, ::2]]
    dtypes: list[Any] = [np.float64, np.float32, np.float16, np.int64, np.uint8, ">f4", ml_dtypes.bfloat16]
    with program(device) as p:
        x = p.input(grid)
        y = x + 0.0
        routine = p.ctx.compile(y)
        for values in [*layouts, *(grid.astype(dtype) for dtype in dtypes), grid.tolist()]:
            p.ctx.set_values(x, np.zeros((3, 4)))
            p.ctx.set_values(x, values)
            p.ctx.run(routine)
            same(p.ctx.get_values(y), grid)


def test_values_of_the_wrong_kind_are_refused() -> None:
    with program() as p:
        count, real = p.input([1, 2], st.u8), p.input([1.0, 2.0])
        p.run(count + 1, real + 1.0)
        wrong: list[Any] = [[0.5, 1.0], [300, 1], [-1, 1], [1j, 2], ["a", "b"], [None, 1], np.array([object(), 1])]
        for values in wrong:
            with pytest.raises((st.errors.ContextError, st.errors.PrecisionError)):
                p.ctx.set_values(count, values)
        with pytest.raises((st.errors.ContextError, st.errors.PrecisionError)):
            p.ctx.set_values(real, [1j, 2.0])
        assert p.ctx.get_values(count).tolist() == [1, 2]


@both_devices
def test_scalars_of_any_python_type_reach_the_kernel(device: str) -> None:
    rates: list[Any] = [
        0.5,
        np.float32(0.5),
        np.float64(0.5),
        np.float16(0.5),
        np.array(0.5),
        np.array(0.5, np.float32),
    ]
    with program(device) as p:
        x = p.input([[1.0, 2.0], [10.0, 20.0]], batch=1)
        rate, at = st.host_scalar("rate", 1.0), st.index("at", 2)
        y = x[at] * rate
        routine = p.ctx.compile(y)
        p.feed()
        for value in rates:
            p.ctx.set_values(rate, 0.0)
            p.ctx.set_values(rate, value)
            indices: list[Any] = [1, np.int64(1), np.int32(1)]
            for index in indices:
                p.ctx.run(routine, at=index)
                same(p.ctx.get_values(y), [5, 10])
        for wrong in (2, -1):
            with pytest.raises(st.errors.ContextError, match="at"):
                p.ctx.run(routine, at=wrong)
        with pytest.raises((st.errors.ContextError, TypeError)):
            p.ctx.run(routine, at=0.5)  # type: ignore[arg-type]
        with pytest.raises((st.errors.ContextError, TypeError)):
            p.ctx.run(routine)
