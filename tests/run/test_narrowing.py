"""Arrays of f32 that are set into narrow nodes: compiled code rounds each cell as the host's conversion does."""

from __future__ import annotations

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor.conversion import convert
from stagedtensor.errors import ContextError
from stagedtensor.precision import precision


def _every_upper_half() -> np.ndarray:
    """Each pattern of a float's upper half, with lower halves around ties, and an odd number of cells."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    lows = (0x0000, 0x1000, 0x1001, 0x0FFF, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
    return np.concatenate([*(upper | np.uint32(low) for low in lows), np.zeros(3, np.uint32)]).view(np.float32)


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("name", ["bf16", "f16"])
def test_compiled_rounding_is_the_conversion(name: str, saturate: bool) -> None:
    values = _every_upper_half()
    x = st.placeholder("x", output=[values.size])
    st.specify(x, name, saturate=saturate)
    ctx = st.Context("cpu", threads=1)
    ctx.compile(st.relu(x))
    ctx.set_values(x, values)
    found, expected = ctx.get_values(x), convert(values, precision(name), saturate=saturate)
    nan = np.isnan(values)
    assert np.isnan(found[nan].astype(np.float32)).all()
    np.testing.assert_array_equal(found[~nan].view(np.uint16), expected[~nan].view(np.uint16))
    ctx.close()


def test_what_is_not_one_piece_of_floats_goes_the_usual_way() -> None:
    x = st.placeholder("x", output=[32, 32], prec="bf16")
    ctx = st.Context("cpu", threads=1)
    ctx.compile(st.relu(x))
    values = np.random.default_rng(0).normal(size=(32, 32)).astype(np.float32)
    expected = convert(values, precision("bf16"))
    kept = values.copy()
    kept.flags.writeable = False
    for given in (
        values,
        kept,
        values.T.copy().T,
        values.astype(np.float64),
        np.ma.masked_array(values),
        values.tolist(),
    ):
        ctx.set_values(x, np.zeros_like(values))
        ctx.set_values(x, given)
        np.testing.assert_array_equal(ctx.get_values(x).view(np.uint16), expected.view(np.uint16))
    with pytest.raises(ContextError, match="shape"):
        ctx.set_values(x, values[:16])
    ctx.close()
