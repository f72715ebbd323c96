"""The work of the shape solver grows with the graph: twice the layers, twice the looks at constraints."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

import stagedtensor as st
from stagedtensor.program import solve_program
from stagedtensor.shapes import choices, constraints
from stagedtensor.shapes.solution import ScopeShapes, ShapeSolution
from stagedtensor.shapes.solver import solve_shapes
from stagedtensor.statements import Scope


def hidden_sizes(layers: int) -> st.Tensor:
    h = st.placeholder("x", batch=[8], output=[16])
    for at in range(layers):
        h = h + st.relu(st.param(f"w{at}") @ h + st.param(f"b{at}"))
    return h


def pointwise(layers: int) -> st.Tensor:
    h = st.placeholder("x", batch=[8], output=[16])
    for at in range(layers):
        h = st.relu(h * st.param(f"p{at}") + st.param(f"q{at}"))
    return h


def decided_by_the_end(layers: int) -> st.Tensor:
    h = st.param("start")
    for at in range(layers):
        h = st.param(f"w{at}") * h + st.param(f"v{at}")
    return h + st.constant([1.0, 2.0, 3.0])


@pytest.mark.parametrize("build", [hidden_sizes, pointwise, decided_by_the_end])
def test_the_work_grows_with_the_graph(build: Callable[[int], st.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []

    def counted(function: Callable[..., object]) -> Callable[..., object]:
        def wrapper(*args: object) -> object:
            looks.append(1)
            return function(*args)

        return wrapper

    for kind in (constraints.RowJoin, constraints.RowSplit, constraints.DimJoin):
        monkeypatch.setattr(kind, "advance", counted(kind.advance))
    monkeypatch.setattr(choices, "meet_of_ranks", counted(choices.meet_of_ranks))
    monkeypatch.setattr(choices, "meet_of_sizes", counted(choices.meet_of_sizes))
    counts = []
    for layers in (10, 20, 40, 80):
        with st.Session():
            y = build(layers)
            looks.clear()
            solution = solve_shapes([y.node])
            counts.append(len(looks))
            assert solution.shape(y.node).output[-1].size in (3, 16)
    for fewer, more in pairwise(counts):
        assert more < 2.2 * fewer, counts


def test_the_order_of_construction_does_not_count() -> None:
    """Everything open, joined from both ends: the same shapes whichever half was built first."""
    shapes = []
    for first in (0, 1):
        with st.Session():
            x = st.placeholder("x", batch=[2], output=[5])
            halves: dict[int, tuple[list[st.Tensor], st.Tensor]] = {}
            for half in (first, 1 - first):
                params = [st.param(f"h{half}_{at}") for at in range(6)]
                total = params[0]
                for at, param in enumerate(params[1:]):
                    total = total * param if at % 2 else st.relu(total) + param
                halves[half] = (params, total)
            y = x + halves[0][1] * halves[1][1]
            solution = solve_shapes([y.node])
            shapes.append([str(solution.shape(param.node)) for half in (0, 1) for param in halves[half][0]])
    assert shapes[0] == shapes[1]


def test_equal_shapes_and_extents_are_one_object() -> None:
    """A network has few different ones, and who asks next can tell them apart by identity."""
    x = st.placeholder("x", batch=[8], output=[16])
    first, second = st.relu(x) + 1.0, st.relu(x * 2.0) + 3.0
    total = first * second
    solution = solve_shapes([total.node])
    assert solution.shape(first.node) is solution.shape(second.node) is solution.shape(x.node)
    records = [first.node.record, second.node.record]
    scopes = [solution.scope(record.scope) for record in records if record is not None]
    assert len(scopes) == 2
    assert scopes[0] is scopes[1]


def test_scopes_of_one_form_are_solved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeroing declared parameters of one shape: no record knows these scopes, and they differ in their nodes alone."""
    h = st.placeholder("x", batch=[8], output=[16])
    for at in range(6):
        h = st.param(f"w{at}", input=[16], output=[16]) @ h
    step = st.grad_update(st.sum(h))
    solved = solve_program(step)
    calls: list[Scope] = []
    solve = solved.shapes._solve_scope

    def counted(scope: Scope, solution: ShapeSolution) -> ScopeShapes:
        calls.append(scope)
        return solve(scope, solution)

    monkeypatch.setattr(solved.shapes, "_solve_scope", counted)
    fills = [statement for statement in solved.statements if statement.scope.label == "fill"]
    for statement in fills:
        solved.shapes.scope(statement.scope)
    assert len(fills) > 6
    assert len(calls) < 6
