"""Generated C for processors that this machine is not: every target's text compiles, and aarch64 gives the bits of
x86-64.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor import nn
from stagedtensor.runtime.target import TARGETS

from . import aarch64
from .texts import text_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="needs the package ziglang"),
]


def training(prec: str) -> tuple[st.Tensor, st.Comp, st.Tensor]:
    x = st.placeholder("x", batch=[2, 24], output=[32])
    with st.master_weights(prec):
        hidden = nn.layer_norm()(st.gelu(st.param("w1", output=[32]) @ x + st.param("b1", init=0.0)))
        mixed = nn.multi_head_attention(32, 2, causal=True)(hidden)
        loss = st.mean(mixed * mixed)
    if prec != "f32":
        st.PrecisionPolicy(activation=prec, grad=prec).apply(loss)
    return loss, st.sequence(st.grad_update(loss), st.sgd_update(loss, 0.05, momentum=0.9)), x


@pytest.mark.parametrize("prec", ["f32", "bf16", "f16"])
@pytest.mark.parametrize(
    ("target", "triple", "flags"),
    [
        ("generic", "riscv64-linux-musl", ()),
        ("aarch64", "aarch64-linux-gnu", ()),
        ("x86-64-v3", "x86_64-linux-gnu", ("-march=x86_64_v3",)),
        ("avx512", "x86_64-linux-gnu", ("-march=x86_64_v4",)),
        ("avx512+bf16", "x86_64-linux-gnu", ("-march=znver4",)),
        ("avx512+amx", "x86_64-linux-gnu", ("-march=sapphirerapids",)),
    ],
)
def test_every_targets_text_compiles(
    target: str, triple: str, flags: tuple[str, ...], prec: str, tmp_path: Path
) -> None:
    with st.Session():
        _, comp, _ = training(prec)
        text = text_for(comp, TARGETS[target])[0].text
    made = aarch64.compiled(text, tmp_path, *flags, target=triple)
    assert made.stat().st_size > 0
    assert ("st_tile_multiply_bf16" in text) == (target == "avx512+amx" and prec == "bf16")
    assert ("st_dot_bf16" in text) == (target == "avx512+bf16" and prec == "bf16")


@pytest.mark.skipif(importlib.util.find_spec("unicorn") is None, reason="needs the package unicorn")
@pytest.mark.parametrize("prec", ["f32", "bf16", "f16"])
def test_aarch64_gives_the_bits_of_x86_64(prec: str, tmp_path: Path) -> None:
    """Both have vectors of 16 bytes, hence the same order of sums."""
    with st.Session(), st.Context("cpu", target="x86-64", cache_dir=tmp_path) as ctx:
        loss, comp, x = training(prec)
        ctx.init_params(loss, seed=3)
        ctx.set_values(x, np.random.default_rng(0).standard_normal((2, 24, 32)))
        routine = ctx.compile(comp, name="step")
        generated, nodes = text_for(comp, TARGETS["aarch64"])
        held = ctx._store.stored
        frame = [held[node].buffer.tobytes() for node in nodes]
        arena = bytes(generated.arena_bytes + generated.thread_bytes + 128)
        after = aarch64.run(generated.text, generated.entry, [*frame, arena], tmp_path)
        ctx.run(routine)
        changed = 0
        for node, before, found in zip(nodes, frame, after, strict=False):
            expected = held[node].buffer.tobytes()
            assert found == expected, node.label
            changed += found != before
        assert changed >= 2 * len(list(loss.params))
