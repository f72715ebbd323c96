"""Every op has its row in every table, or is declared not to need one."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor.autodiff.rules import DERIVATIVES, missing_rows
from stagedtensor.codegen.emit.c_like import C_OPS
from stagedtensor.codegen.prelude.mirror import MIRROR
from stagedtensor.language.computation import FUNCTIONS
from stagedtensor.op_table import OPS, REDUCTIONS


def test_every_op_has_a_derivative_or_is_declared_not_differentiable() -> None:
    assert missing_rows() == []
    assert set(DERIVATIVES) <= set(OPS)
    for name, row in DERIVATIVES.items():
        assert OPS[name].differentiable, name
        assert len(row.rules) == OPS[name].arity, name


def test_the_op_table_is_keyed_by_name() -> None:
    assert all(name == op.name for name, op in OPS.items())
    assert all(name == reduction.name for name, reduction in REDUCTIONS.items())
    assert all(reduction.combine in OPS for reduction in REDUCTIONS.values())


@pytest.mark.parametrize("name", sorted(OPS))
def test_the_numpy_meaning_takes_the_declared_number_of_operands(name: str) -> None:
    op = OPS[name]
    if op.op_class == "random":
        with pytest.raises(TypeError, match="prelude"):
            op.numpy(*[np.array([1, 2], np.uint32)] * op.arity)
        return
    operand = np.array([0.25, 0.5, 1.0])
    assert np.shape(op.numpy(*[operand] * op.arity)) == operand.shape


def test_neutral_elements_are_neutral() -> None:
    cells = np.array([-2.5, 0.5, 3.0])
    for reduction in REDUCTIONS.values():
        combined = OPS[reduction.combine].numpy(cells, np.full_like(cells, reduction.neutral))
        np.testing.assert_array_equal(combined, cells, err_msg=reduction.name)


def test_every_op_has_c_text_and_a_mirror() -> None:
    assert set(OPS) == C_OPS
    without_mirror = [
        name
        for name, op in OPS.items()
        if op.prelude and op.op_class != "random" and f"st_{_stem(name)}_f32" not in MIRROR
    ]
    assert without_mirror == []


def _stem(name: str) -> str:
    return {"mod": "floormod"}.get(name, name)


def test_every_op_can_be_written_in_a_statement() -> None:
    """Random numbers are terminals; the identity is the bare operand."""
    reachable = {op for op, _ in FUNCTIONS.values()}
    assert set(OPS) - reachable == {"identity", "random_uniform", "random_normal"}
    assert all(OPS[op].arity == arity for op, arity in FUNCTIONS.values() if op in OPS)


def test_public_functions_of_the_op_table_are_exported() -> None:
    """A module of functions has no public function that the user cannot reach, except the building blocks it names."""
    folder = Path(st.__file__).parent / "functions"
    module = ast.parse((folder / "pointwise.py").read_text(encoding="utf-8"))
    defined = {
        item.name.rstrip("_")
        for item in module.body
        if isinstance(item, ast.FunctionDef) and not item.name.startswith("_")
    }
    assert defined <= set(st.__all__)
