"""Shape inference and projection: from declared rows and index specs to solved shapes and plain accesses.

``solve_shapes`` finds the shape of every node; ``projections.project`` turns a statement into iterators and index
expressions once shapes are known. Nothing here knows precisions or generates code.
"""

from __future__ import annotations

from .solution import ScopeShapes, ShapeSolution
from .solver import solve_shapes

__all__ = ["ScopeShapes", "ShapeSolution", "solve_shapes"]
