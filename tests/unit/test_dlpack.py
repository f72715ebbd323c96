"""Arrays of narrow floats from libraries whose formats NumPy cannot read."""

from __future__ import annotations

import importlib.util
import weakref
from typing import Any

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor import dlpack
from stagedtensor.conversion import ingest
from stagedtensor.errors import PrecisionError
from stagedtensor.precision import Prec, bf16, f8e4m3, f8e5m2, f32

CODES = {bf16: 4, f8e4m3: 10, f8e5m2: 12}


class Foreign:
    """An array of another library: its capsule is NumPy's with another type, or on another device."""

    def __init__(self, cells: np.ndarray[Any, Any], code: int, *, device: int = 1) -> None:
        self.cells = cells.view(np.dtype(f"u{cells.itemsize}"))
        self.code = code
        self.device = device

    def __dlpack__(self) -> Any:
        capsule = self.cells.__dlpack__()
        tensor = dlpack._Tensor.from_address(dlpack._address(capsule))
        tensor.code, tensor.device_type = self.code, self.device
        return capsule


@pytest.mark.parametrize("prec", CODES, ids=str)
def test_cells_of_any_strides_come_with_their_bits(prec: Prec) -> None:
    cells = np.linspace(-3, 3, 24).reshape(2, 3, 4).astype(prec.numpy_dtype)
    for given in (cells, cells[:, ::2, 1:3], cells.transpose(2, 0, 1), cells[:0], cells[1, 2, 3]):
        found = ingest(Foreign(np.asarray(given), CODES[prec]))
        assert found.prec is prec
        np.testing.assert_array_equal(found.array, given)
        assert not np.shares_memory(found.array, cells)


def test_capsules_give_their_memory_back() -> None:
    cells = np.ones(8, bf16.numpy_dtype).view(np.uint16)
    given = Foreign(cells, CODES[bf16])
    given.cells = cells.view()
    last = weakref.ref(given.cells)
    ingest(given)
    del given
    assert last() is None


def test_other_formats_and_devices_are_refused_with_the_reason() -> None:
    for code, device in ((17, 1), (CODES[bf16], 2)):
        with pytest.raises(
            PrecisionError, match=r"own conversion failed: no array in host memory of a format known here"
        ):
            ingest(Foreign(np.ones(3, bf16.numpy_dtype), code, device=device))


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
@pytest.mark.peers
@pytest.mark.parametrize(
    ("prec", "name"), [(bf16, "bfloat16"), (f8e4m3, "float8_e4m3fn"), (f8e5m2, "float8_e5m2")], ids=str
)
def test_tensors_of_torch(prec: Prec, name: str) -> None:
    import torch

    cells = torch.arange(-6, 6, dtype=torch.float32).reshape(3, 4).to(getattr(torch, name))
    with st.Session(), st.Context("reference") as ctx:
        same, wide = st.placeholder("same", output=[4, 3], prec=prec), st.placeholder("wide", output=[4, 3], prec=f32)
        for t in (same, wide):
            ctx.set_values(t, cells.T)
            assert ctx.get_values(t).astype(np.float32).tolist() == cells.float().T.tolist()
