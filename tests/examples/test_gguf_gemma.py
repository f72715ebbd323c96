"""The Gemma example on a small made-up file: packed weights against decoded ones."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from stagedtensor.encodings import Dense, load_gguf

gguf = pytest.importorskip("gguf")
EXAMPLE = Path(__file__).parents[2] / "examples" / "gguf_gemma.py"
DIM, HEADS, WIDTH, HIDDEN, WORDS = 64, 2, 32, 96, 40


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gguf_gemma", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def small_model(path: Path) -> None:
    """Write one layer of the architecture with random weights in three encodings."""
    rng = np.random.default_rng(0)
    types = gguf.GGMLQuantizationType
    writer = gguf.GGUFWriter(str(path), "gemma3")
    writer.add_embedding_length(DIM)
    writer.add_block_count(1)
    writer.add_head_count(HEADS)
    writer.add_key_length(WIDTH)
    writer.add_token_list(
        ["<bos>", "The", "▁capital", "▁of", "▁France", "▁is", *(f"word{at}" for at in range(WORDS - 6))]
    )
    matrices = {
        "token_embd": (WORDS, DIM, types.Q8_0),
        "blk.0.attn_q": (HEADS * WIDTH, DIM, types.Q5_0),
        "blk.0.attn_k": (WIDTH, DIM, types.Q5_0),
        "blk.0.attn_v": (WIDTH, DIM, types.Q8_0),
        "blk.0.attn_output": (DIM, HEADS * WIDTH, types.Q4_0),
        "blk.0.ffn_gate": (HIDDEN, DIM, types.Q5_0),
        "blk.0.ffn_up": (HIDDEN, DIM, types.Q5_0),
        "blk.0.ffn_down": (DIM, HIDDEN, types.Q8_0),
    }
    for name, (rows, columns, kind) in matrices.items():
        values = rng.normal(0, columns**-0.5, (rows, columns)).astype(np.float32)
        writer.add_tensor(f"{name}.weight", gguf.quantize(values, kind), raw_dtype=kind)
    gains = {
        "attn_norm": DIM,
        "attn_q_norm": WIDTH,
        "attn_k_norm": WIDTH,
        "post_attention_norm": DIM,
        "ffn_norm": DIM,
        "post_ffw_norm": DIM,
    }
    for name, size in gains.items():
        writer.add_tensor(f"blk.0.{name}.weight", rng.uniform(0.5, 1.5, size).astype(np.float32))
    writer.add_tensor("output_norm.weight", np.ones(DIM, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.slow
def test_packed_weights_give_the_logits_of_decoded_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "small.gguf"
    small_model(path)
    gemma = example()
    gemma.main(["--file", str(path), "--quick"])
    assert "next: " in capsys.readouterr().out
    file: Any = load_gguf(path)
    facts, ids = gemma.facts_of(file, 6), range(6)
    packed, ctx = gemma.logits_of(file.__getitem__, facts, 1, ids)
    dense = {name: value.repack_to(Dense(4)) for name, value in file.items()}
    decoded, _ = gemma.logits_of(dense.__getitem__, facts, 1, ids)
    np.testing.assert_allclose(packed, decoded, rtol=0, atol=1e-5 * np.abs(decoded).max())
    assert {line.precision for line in ctx.memory_report().stored} >= {"u8"}
