"""Statements of one form are projected once, and to what each would have been by itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

import stagedtensor as st
from stagedtensor.program import solve_program
from stagedtensor.shapes.index import Projected, ProjectedIterator
from stagedtensor.shapes.projected import Projections
from stagedtensor.shapes.projections import project


@pytest.fixture(autouse=True)
def _session() -> Iterator[None]:
    with st.Session():
        yield


def written(part: Projected) -> Any:
    """Return everything about a projection, iterators by number."""
    numbers = {item: place for place, item in enumerate(part.iterators)}

    def plain(value: Any) -> Any:
        if isinstance(value, ProjectedIterator):
            return (numbers[value], value.name, value.extent, value.reduce)
        if isinstance(value, tuple | list):
            return tuple(map(plain, value))
        if isinstance(value, dict):
            return tuple((plain(key), plain(item)) for key, item in value.items())
        if is_dataclass(value) and type(value).__module__.endswith("shapes.index"):
            return (type(value).__name__, *(plain(getattr(value, field.name)) for field in fields(value)))
        return value

    return tuple(plain(getattr(part, field.name)) for field in fields(part) if field.name != "statement")


def network(*, widths: list[int], norm: bool) -> st.Comp:
    x = st.placeholder("x", batch=[3], output=[widths[0]])
    h = x
    for at, width in enumerate(widths):
        h = st.relu(st.param(f"w{at}", output=[width]) @ h + st.param(f"b{at}", init=0.0))
        if norm:
            h = st.softmax(st.layer_norm(h))
    loss = st.sum(h * h)
    return st.sequence(st.grad_update(loss), st.sgd_update(loss, st.host_scalar("rate", 0.1)))


@pytest.mark.parametrize(
    "comp",
    [
        lambda: network(widths=[8, 8, 8, 8], norm=True),
        lambda: network(widths=[8, 6, 8, 6, 1, 1], norm=False),
    ],
)
def test_the_same_as_by_itself(comp: Any) -> None:
    solved = solve_program(comp(), "step")
    projections = Projections(solved.shapes)
    shared = 0
    iterators: set[ProjectedIterator] = set()
    for statement in solved.statements:
        parts = projections.of(statement)
        assert parts is projections.of(statement)
        alone = project(statement, solved.shapes)
        assert [written(part) for part in parts] == [written(part) for part in alone]
        assert [part.statement for part in parts] == [part.statement for part in alone] or len(parts) == len(alone) > 0
        shared += any(item in iterators for part in parts for item in part.iterators)
        iterators.update(item for part in parts for item in part.iterators)
    assert shared > len(solved.statements) // 4, "layers have statements of one form"
