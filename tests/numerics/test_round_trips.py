"""A wide value that passes through a narrower node and back is rounded there, however few cells there are."""

from __future__ import annotations

import numpy as np
import pytest

import stagedtensor as st


@pytest.mark.parametrize("cells", [1, 2, 3, 4, 6, 7, 17])
@pytest.mark.parametrize("middle", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("fusion", [True, False])
def test_f64_through_a_narrower_node(cells: int, middle: str, fusion: bool) -> None:
    values = 1.0 + np.arange(cells) + 1e-10
    with st.Session(default_prec=st.f64), st.Context("cpu") as ctx:
        x = st.placeholder("x", output=[cells], prec=st.f64)
        y = st.cast(st.cast(x, middle), st.f64)
        routine = ctx.compile(y, fusion=fusion)
        ctx.set_values(x, values)
        ctx.run(routine)
        expected = values.astype(st.precision(middle).numpy_dtype).astype(np.float64)
        np.testing.assert_array_equal(ctx.get_values(y), expected)
        assert (expected != values).all()
