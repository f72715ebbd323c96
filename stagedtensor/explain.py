"""Explanations of precisions for people: ``why`` as a tree, ``explanation`` as text, ``explain`` on the screen.

Each solves on a throw-away copy: looking at a node settles and stores nothing.
"""

from __future__ import annotations

from typing import Any

from .precision_reasons import Reason, tree_text
from .precision_requests import node_of
from .precision_solution import PrecisionSolution
from .precision_solver import solve_precisions


def why(t: Any) -> Reason:
    """Return the tree of reasons for the precision of a tensor, a gradient or a node, as things stand."""
    node = node_of(t, "why")
    return solve_precisions([node]).reason(node)


def explanation(t: Any, solution: PrecisionSolution | None = None) -> str:
    """Return the tree of reasons as text, with the requests that were declined; for an open terminal c read by d::

    c: bf16 Inferred (R3 top-down)
      because d: bf16 Specified (R4)   model.py:14
    """
    node = node_of(t, "explain")
    solution = solution if solution is not None else solve_precisions([node])
    return tree_text(solution.reason(node), solution.declined(node))


def explain(t: Any) -> None:
    """Print why a tensor has its precision, in words; see :func:`explanation`."""
    print(explanation(t))
