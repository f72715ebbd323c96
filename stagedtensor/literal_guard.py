"""The constant guard: a literal must be representable in the format that inference gave its node.

In: a precision solution and the nodes of a program. Out: nothing, or ConstantRangeError. Arrays and values written by
the host are data and pass unguarded; numbers inside a statement's tree are evaluated at compute precision and pass too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from .errors import ConstantRangeError
from .node import Node, Role
from .precision import Prec
from .precision_reasons import tree_text
from .precision_solution import PrecisionSolution


def check_literals(solution: PrecisionSolution, nodes: Iterable[Node]) -> None:
    """Raise ConstantRangeError for the first literal of ``nodes`` that its node's format cannot represent.

    Floats: a finite value beyond the greatest finite one, or infinity in a format without it. Integers and bool: any
    value they cannot hold exactly. The message names constant, node, chain of reasons and source line.
    """
    for node in sorted(set(nodes), key=lambda node: (node.source.file, node.source.line, node.number)):
        if node.role is not Role.LITERAL:
            continue
        prec = solution.prec(node)
        for value in _numbers(node.literal):
            fault = _fault(value, prec)
            if fault:
                chain = tree_text(solution.reason(node), solution.declined(node)).replace("\n", "\n  ")
                raise ConstantRangeError(
                    f"constant {value!r} of node {node.label} is {prec}, which {fault}\n  {node.source.quoted()}\n"
                    f"  {chain}\n  specify a wider precision for {node.label}, or cast what it meets"
                )


def _numbers(literal: Any) -> Iterator[int | float]:
    """Yield the numbers of a literal, nested lists flattened, as Python's own."""
    if isinstance(literal, list | tuple):
        for entry in literal:
            yield from _numbers(entry)
    elif isinstance(literal, np.ndarray):
        yield from literal.ravel().tolist()
    elif isinstance(literal, np.generic):
        yield literal.item()
    elif literal is not None:
        yield literal


def _fault(value: float, prec: Prec) -> str:
    """Return what the format cannot do with the value, or nothing."""
    if prec.is_float:
        if isinstance(value, float) and math.isnan(value):
            return ""
        if isinstance(value, float) and math.isinf(value):
            return "" if prec.has_inf else "has no infinity"
        return f"reaches {prec.max_finite:g} only" if abs(value) > prec.max_finite else ""
    if isinstance(value, float) and not value.is_integer():
        return "holds integers only"
    if not prec.min_finite <= value <= prec.max_finite:
        return f"holds {prec.min_finite} to {prec.max_finite} only"
    return ""
