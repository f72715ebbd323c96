"""The numeric matrix on the emulated device: ops, conversions, reductions and random programs give the reference's
bits.
"""

from __future__ import annotations

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor.op_table import OPS
from stagedtensor.precision import precision
from tests.numerics.operands import operands
from tests.numerics.running import REFERENCE, Setting, assert_same_bits
from tests.numerics.test_ops import FLOATS, NAMES, close_or_same, outcomes

EMULATED = Setting("cuda-emulated")


@pytest.mark.parametrize("name", [*FLOATS, "i64", "i32", "u8"])
def test_every_op(name: str) -> None:
    prec = precision(name)
    args = [cells[::5] for cells in operands(prec, 3, seed=1)]
    expected, found = outcomes(prec, args, REFERENCE), outcomes(prec, args, EMULATED)
    assert len(found) == len(NAMES)
    assert all(OPS[op].arity for op in found)
    for op in NAMES:
        close_or_same(op, prec, found[op], expected[op], f"{op} of {name}")


@pytest.mark.parametrize("name", ["f32", "f64", "i32"])
def test_every_conversion(name: str) -> None:
    with st.Session():
        source = precision(name)
    cells = operands(source, 1, seed=3)[0][::3]
    results = {}
    for device in ("reference", "cuda-emulated"):
        with st.Session(), st.Context(device) as ctx:
            x = st.placeholder("x", output=[cells.size], prec=source)
            casts = [
                st.cast(x, target) for target in (st.f64, st.f32, st.f16, st.bf16, st.f8e5m2, st.f8e4m3, st.i32, st.i8)
            ]
            ctx.set_values(x, cells)
            ctx.run(ctx.compile(casts))
            results[device] = [ctx.get_values(cast) for cast in casts]
    for found, expected in zip(results["cuda-emulated"], results["reference"], strict=True):
        assert_same_bits(found, expected, f"{name} to {found.dtype}")
    assert np.asarray(results["reference"][0]).size == cells.size
