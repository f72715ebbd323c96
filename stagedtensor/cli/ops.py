"""``ops``: the operation table and the reductions, as a terminal table."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stagedtensor.op_table import OPS, REDUCTIONS


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``ops``: none."""


def run(arguments: argparse.Namespace) -> int:
    """Print every scalar operation and every reduction."""
    console = Console(highlight=False)
    operations = Table(title="Scalar operations")
    for column in ("name", "infix", "operands", "class", "gradient", "result"):
        operations.add_column(column)
    for op in OPS.values():
        gradient = "yes" if op.differentiable else "none"
        result = "float" if op.float_only else "the operand's format" if op.keeps_format else "join of the operands"
        operations.add_row(op.name, Text(op.symbol), str(op.arity), op.op_class, gradient, result)
    console.print(operations)
    reductions = Table(title="Reductions")
    for column in ("name", "combines with", "starts from"):
        reductions.add_column(column)
    for reduction in REDUCTIONS.values():
        reductions.add_row(reduction.name, reduction.combine, f"{reduction.neutral:g}")
    console.print(reductions)
    return 0
