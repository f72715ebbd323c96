"""Solutions are kept until something is built or said that they depend on: looking costs a walk over the graph, no
solve.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor import precision_solver
from stagedtensor.precision_rules import derive
from stagedtensor.shapes import solver


@pytest.fixture
def solves(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The solves since it was cleared."""
    seen: list[str] = []

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            return function(*args, **kwargs)

        return wrapper

    monkeypatch.setattr(solver._Solver, "build", counted("shapes", solver._Solver.build))
    monkeypatch.setattr(precision_solver, "derive", counted("precisions", derive))
    return seen


def test_shapes_and_values_of_all_parameters_take_one_solve(solves: list[str]) -> None:
    with st.Session(), st.Context("reference") as ctx:
        y = st.nn.mlp([8] * 10)(st.placeholder("x", batch=[2], output=[8]))
        str(y.shape), str(y.precision)
        solves.clear()
        shapes = [p.shape.dims for p in y.params]
        for p, dims in zip(y.params, shapes, strict=True):
            assert p.precision is st.f32
            ctx.set_values(p, np.zeros(dims, np.float32))
        assert not solves


def test_a_use_decides_what_was_open() -> None:
    with st.Session():
        x = st.placeholder("x", output=[None])
        y = st.relu(x)
        before = str(y.shape)
        z = st.einsum("i;i=>", y, st.constant([1.0, 2.0, 3.0]))
        assert [before, *(str(t.shape) for t in (x, y, z))] == ["1", "3", "3", "()"]


def test_an_open_parameter_gets_its_rows_from_a_later_use() -> None:
    with st.Session():
        w = st.param("w", output=[4])
        before = str(w.shape)
        y = w @ st.placeholder("x", output=[3])
        assert [before, str(w.shape), str(y.shape)] == ["4", "3 -> 4", "4"]


def test_a_clash_stays_an_error() -> None:
    with st.Session():
        x = st.placeholder("x", output=[3])
        assert str(x.shape) == "3"
        y = x + st.placeholder("z", output=[4])
        for _ in range(2):
            with pytest.raises(st.errors.ShapeError):
                str(y.shape)


def test_what_is_said_of_precisions_counts_at_once() -> None:
    with st.Session(), st.Context("reference") as ctx:
        x = st.placeholder("x", output=[3], prec="f32")
        y = st.tanh(x)
        z = y * 2.0
        assert z.precision is st.f32
        st.PrecisionPolicy(activation=st.bf16).apply(z)
        assert [t.precision for t in (y, z)] == [st.bf16, st.bf16]
        st.specify(y, st.f16)
        assert [t.precision for t in (x, y, z)] == [st.f32, st.f16, st.bf16]
        ctx.compile(z)
        assert [t.precision for t in (x, y, z)] == [st.f32, st.f16, st.bf16]


def test_a_condition_is_asked_at_every_look() -> None:
    with st.Session():
        y = st.tanh(st.placeholder("x", output=[3], prec="f32"))
        wanted = [False]
        st.specify(y, st.bf16, only_if=lambda prec: wanted[0])
        assert y.precision is st.f32
        wanted[0] = True
        assert y.precision is st.bf16
