"""``st.load`` of GGUF files by a map of names: layout, packed weights, what is not there or not supported, damage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor import nn
from stagedtensor.encodings import Q8_0, load_gguf, pack
from stagedtensor.errors import CheckpointError

gguf = pytest.importorskip("gguf")
Types = gguf.GGMLQuantizationType
RNG = np.random.default_rng(0)
WEIGHT = RNG.normal(0, 1, (3, 32)).astype(np.float32)
BIAS = RNG.normal(0, 1, 3).astype(np.float16)


def write(path: Path) -> Path:
    writer = gguf.GGUFWriter(str(path), "test")
    writer.add_tensor("ffn.weight", np.array(pack(WEIGHT, Q8_0).data).reshape(3, -1), raw_dtype=Types.Q8_0)
    writer.add_tensor("ffn.bias", BIAS)
    writer.add_tensor("odd.weight", np.zeros((3, 66), np.uint8), raw_dtype=Types.IQ2_XXS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def layer() -> st.Tensor:
    return nn.dense(3)(st.placeholder("x", batch=[2], output=[32]))


def test_packed_and_plain_weights_load_by_a_map_of_names(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf")
    with st.Session(), st.Context("reference") as ctx:
        y = layer()
        report = st.load(path, ctx, y, names={"dense.w": "ffn.weight", "dense.b": "ffn.bias"})
        values = dict(zip((p.name for p in y.params), map(ctx.get_values, y.params), strict=True))
    np.testing.assert_array_equal(values["dense.w"], load_gguf(path, skip_unsupported=True)["ffn.weight"].numpy())
    np.testing.assert_array_equal(values["dense.b"], BIAS.astype(np.float32))
    assert np.abs(values["dense.w"] - WEIGHT).max() < 0.02
    assert (report.loaded, report.converted, report.step) == (("dense.w", "dense.b"), ("dense.b",), None)
    assert report.extra == ()


def test_a_function_brings_an_array_into_this_layout(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf")

    def heads(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return array.reshape(3, 1, 32)

    with st.Session(), st.Context("reference") as ctx:
        y = nn.dense([3, 1], bias=False)(st.placeholder("x", batch=[2], output=[32]))
        st.load(path, ctx, y, names={"dense.w": ("ffn.weight", heads)})
        assert ctx.get_values(y.params[0]).shape == (3, 1, 32)


def test_what_is_missing_or_not_supported_is_said_at_once(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf")
    with st.Session(), st.Context("reference") as ctx:
        y = layer()
        with pytest.raises(
            CheckpointError, match=r"(?s)dense.b \(as gone\): not in the file.*dense.w: the file has IQ2_XXS"
        ):
            st.load(path, ctx, y, names={"dense.w": "odd.weight", "dense.b": "gone"})
        assert not any(map(ctx.is_initialized, y.params))


def test_a_damaged_file_is_a_checkpoint_error(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf")
    whole = path.read_bytes()
    path.write_bytes(whole[:60])
    with (
        st.Session(),
        st.Context("reference") as ctx,
        pytest.raises(CheckpointError, match=r"model.gguf: (?s:.*)at test_checkpoint_gguf"),
    ):
        st.load(path, ctx, layer(), names={"dense.w": "ffn.weight"})
