"""What the shape solver answers on a node: its shape as text, or its error."""

from __future__ import annotations

import pytest

from stagedtensor.errors import ShapeError
from stagedtensor.node import Node
from stagedtensor.shapes import solve_shapes


def shape(node: Node) -> str:
    return str(solve_shapes([node]).shape(node))


def message(node: Node, error: type[Exception] = ShapeError) -> str:
    with pytest.raises(error) as caught:
        solve_shapes([node])
    return str(caught.value)
