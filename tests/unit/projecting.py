"""How the tests of projection evaluate statements and compare gradients with differences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from stagedtensor.node import Node
from stagedtensor.shapes import solve_shapes
from tests.oracles.graphs import (
    backward,
    forward,
    gradient_of,
)
from tests.oracles.points import run

Array = Any


def values(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(float)


def evaluate(result: Node, arrays: dict[Node, Array], bound: Mapping[str, int] | None = None) -> Array:
    return run(forward(result), solve_shapes([result]), dict(arrays), bound)


def vector_jacobian(result: Node, operand: int, arrays: dict[Node, Array], seed: Array) -> Array:
    statement = backward(result, operand)
    return run(statement, solve_shapes([result]), {**arrays, gradient_of(result): seed})


def numeric_gradient(result: Node, operand: int, arrays: dict[Node, Array], seed: Array) -> Array:
    """Exact for a multilinear op: the change of <seed, result> when one cell grows by 1."""
    node = forward(result).scope.nodes[operand]
    base = np.nansum(evaluate(result, arrays) * seed)
    gradient = np.zeros(arrays[node].shape)
    for cell in np.ndindex(*gradient.shape):
        changed = arrays[node].copy()
        changed[cell] += 1
        gradient[cell] = np.nansum(evaluate(result, {**arrays, node: changed}) * seed) - base
    return gradient


def check(result: Node, arrays: dict[Node, Array], expected: Array) -> None:
    """Compare the forward statement with NumPy and every operand's gradient with differences."""
    found = evaluate(result, arrays)
    np.testing.assert_array_equal(found, expected)
    seed = values(*found.shape, seed=9)
    for operand, node in enumerate(forward(result).scope.nodes):
        if node.label != "ids":
            np.testing.assert_array_equal(
                vector_jacobian(result, operand, arrays, seed), numeric_gradient(result, operand, arrays, seed)
            )
