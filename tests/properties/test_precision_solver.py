"""Random graphs of 40 nodes: the solution depends on the graph and on what was specified, never on any order."""

from __future__ import annotations

import random

import pytest

from stagedtensor.errors import PrecisionError
from stagedtensor.node import Node
from stagedtensor.precision import Prec, bf16, bool_, f8e4m3, f8e5m2, f16, f32, f64, i8, i32, i64, u4x32, u8
from stagedtensor.precision_reasons import Reason
from stagedtensor.precision_requests import specify
from stagedtensor.precision_solution import PrecisionSolution
from stagedtensor.precision_solver import solve_precisions
from tests.oracles.precision_fixpoint import Line, carries_gradient, fixpoint
from tests.oracles.precision_graphs import Graph

FLOATS = (f64, f32, f16, bf16, f8e4m3, f8e5m2)
DATA = (*FLOATS, i64, i32, i8, u8, bool_)
ARITY = {"add": 2, "mul": 2, "div": 2, "neg": 1, "exp": 1, "fma": 3, "lt": 2, "eq": 2, "where": 3, "sum": 1, "cast": 1}


def random_program(chance: random.Random, size: int = 40) -> list[Line]:
    """Return lines in one valid order; each op reads earlier lines."""
    lines: list[Line] = []
    for number in range(size):
        name = f"n{number}"
        if number < 8 or chance.random() < 0.2:
            kind = chance.choice(("placeholder", "param", "literal", "array"))
            lines.append(Line(name, kind, prec=chance.choice(DATA) if kind == "array" else None))
            continue
        kind = chance.choice((*ARITY, "one_hot"))
        if kind == "one_hot":
            ids = [line.name for line in lines if line.kind == "placeholder" or line.prec in (i64, i32, i8, u8)]
            if ids:
                lines.append(Line(name, kind, (chance.choice(ids),)))
                continue
            kind = "neg"
        operands = tuple(chance.choice(lines[-14:]).name for _ in range(ARITY[kind]))
        lines.append(Line(name, kind, operands, chance.choice(DATA) if kind == "cast" else None))
    return lines


def random_requests(chance: random.Random, lines: list[Line]) -> dict[str, Prec]:
    """Return specifications that no rule forbids."""
    program = {line.name: line for line in lines}
    indexed = {line.operands[0] for line in lines if line.kind == "one_hot"}
    requests: dict[str, Prec] = {}
    for line in chance.sample(lines, 10):
        graded = carries_gradient(program, line.name)
        if line.prec is None:
            formats = (i32, i64) if line.name in indexed else FLOATS if graded else DATA
            requests[line.name] = chance.choice(formats)
        if graded and chance.random() < 0.5:
            requests[f"{line.name}.grad"] = chance.choice(FLOATS)
    return requests


def shuffled(chance: random.Random, lines: list[Line]) -> list[Line]:
    """Return another valid order of construction."""
    waiting, made, order = list(lines), set[str](), list[Line]()
    while waiting:
        line = chance.choice([line for line in waiting if made.issuperset(line.operands)])
        waiting.remove(line)
        made.add(line.name)
        order.append(line)
    return order


def build(lines: list[Line]) -> dict[str, Node]:
    """Build the graph; gradients appear under ``name.grad``."""
    g = Graph()
    nodes: dict[str, Node] = {}
    for line in lines:
        operands = [nodes[name] for name in line.operands]
        if line.kind == "array":
            node = g.array(line.name, line.prec)
        elif line.kind == "literal":
            node = g.literal(1)
            node.label = line.name
        elif line.kind == "cast":
            assert line.prec is not None
            node = g.cast(operands[0], line.prec, line.name)
        elif line.kind in ("placeholder", "param", "sum", "one_hot"):
            make = getattr(g, line.kind)
            node = make(*operands, label=line.name)
        else:
            node = g.op(line.kind, *operands, label=line.name)
        nodes[line.name] = node
        if node.gradient is not None:
            nodes[f"{line.name}.grad"] = node.gradient
    return nodes


def solve(nodes: dict[str, Node]) -> PrecisionSolution:
    """Solve all components (a random graph may fall apart) in one go."""
    return solve_precisions(list(nodes.values()), debug=True)


def tree(reason: Reason, known: dict[Reason, object]) -> object:
    """Return a reason's tree as a value that ignores the order of causes."""
    if reason not in known:
        causes = frozenset(tree(cause, known) for cause in reason.because)
        known[reason] = (reason.node.label, reason.rule, reason.prec.name, reason.note, reason.extra, causes)
    return known[reason]


@pytest.mark.parametrize("seed", range(40))
def test_solution_is_the_naive_fixpoint(seed: int) -> None:
    chance = random.Random(seed)
    lines = random_program(chance)
    requests = random_requests(chance, lines)
    nodes = build(lines)
    for name, prec in requests.items():
        specify(nodes[name], prec)
    solution = solve(nodes)
    assert {name: solution.prec(node) for name, node in nodes.items()} == fixpoint(lines, requests)


@pytest.mark.parametrize("seed", range(20))
def test_orders_do_not_matter(seed: int) -> None:
    chance = random.Random(1000 + seed)
    lines = random_program(chance)
    requests = list(random_requests(chance, lines).items())
    outcomes = []
    for _ in range(3):
        nodes = build(lines)
        for name, prec in requests:
            specify(nodes[name], prec)
        solution = solve(nodes)
        known: dict[Reason, object] = {}
        outcomes.append(
            {
                name: (
                    solution.prec(node),
                    tree(solution.reason(node), known),
                    frozenset(map(str, solution.declined(node))),
                )
                for name, node in nodes.items()
            }
        )
        lines = shuffled(chance, lines)
        chance.shuffle(requests)
    assert outcomes[0] == outcomes[1] == outcomes[2]


@pytest.mark.parametrize("seed", range(20))
def test_solve_errors_do_not_depend_on_orders(seed: int) -> None:
    chance = random.Random(2000 + seed)
    lines = random_program(chance)
    free = [line.name for line in lines if line.kind == "placeholder"]
    requests = [(name, chance.choice((u4x32, f32))) for name in free]
    messages = set()
    for _ in range(3):
        nodes = build(lines)
        for name, prec in requests:
            specify(nodes[name], prec)
        try:
            solve(nodes)
            messages.add("")
        except PrecisionError as error:
            messages.add(str(error))
        lines = shuffled(chance, lines)
        chance.shuffle(requests)
    assert len(messages) == 1


@pytest.mark.parametrize("seed", range(10))
def test_conflicts_are_found_in_every_order(seed: int) -> None:
    chance = random.Random(3000 + seed)
    lines = random_program(chance)
    names = [line.name for line in lines if line.prec is None and line.kind != "literal"]
    requests = [(name, prec) for name in chance.sample(names, 6) for prec in chance.sample((f16, bf16, f32), 2)]
    for _ in range(3):
        nodes = build(lines)
        refused = set()
        for name, prec in requests:
            before = nodes[name].specified
            try:
                specify(nodes[name], prec)
            except PrecisionError:
                refused.add(name)
                assert nodes[name].specified is before
        assert refused == {name for name, _ in requests}
        chance.shuffle(requests)
