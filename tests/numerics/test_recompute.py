"""Values computed again in place of being kept: less memory, the same bits, on every device."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor.benchmarks.ours import model
from stagedtensor.benchmarks.workloads import WORKLOADS
from stagedtensor.codegen import pipeline
from stagedtensor.codegen.passes.plan_memory import plan_memory
from stagedtensor.codegen.passes.recompute import recompute
from stagedtensor.program import solve_program
from stagedtensor.runtime import cpu, linking
from stagedtensor.runtime.target import TARGETS

from .running import FUSED, UNFUSED, Array, Program, Setting, assert_same_bits, run

BATCH, SEQ, HEADS, FEATURES, HIDDEN = 3, 24, 2, 8, 40


def transformer(prec: str) -> Program:
    """Attention and gelu, twice; what is read are the loss and the gradients of all parameters."""
    tokens = st.placeholder("tokens", batch=[BATCH, SEQ], output=[HEADS, FEATURES], prec=prec)
    x = tokens
    with st.master_weights(None if prec == "f32" else prec):
        for at in range(2):
            q = st.param(f"q{at}", output=[HEADS, FEATURES], input=[HEADS, FEATURES]) @ x
            x = x + st.attention(q, x, x, causal=True)
            hidden = st.gelu(st.param(f"up{at}", output=[HIDDEN], input=[HEADS, FEATURES]) @ x)
            x = x + st.param(f"down{at}", output=[HEADS, FEATURES], input=[HIDDEN]) @ hidden
    loss = st.mean(x * x).named("loss")
    if prec != "f32":
        st.PrecisionPolicy(activation=prec, grad=prec).apply(loss)
    rng = np.random.default_rng(1)
    feeds: list[tuple[st.Tensor, Array]] = [
        (tokens, rng.standard_normal((BATCH, SEQ, HEADS, FEATURES)).astype(np.float32))
    ]
    for param in loss.params:
        feeds.append((param, (rng.standard_normal(param.shape.dims) / 6).astype(np.float32)))
    gradients = [grad for param in loss.params if (grad := param.grad) is not None]
    return Program(feeds, [loss, *gradients], st.grad_update(loss))


@pytest.fixture(autouse=True)
def _generated_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code of the kernel cache was generated with other passes."""
    monkeypatch.setattr(cpu, "generator_version", lambda: None)


@pytest.fixture
def scarce(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory counts from the first byte on."""
    monkeypatch.setattr(pipeline, "recompute", partial(recompute, least_peak=0, scarce=0, least_bytes=1024, large=0))


@pytest.mark.parametrize("prec", ["f32", "bf16"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda-emulated", marks=pytest.mark.slow)])
def test_recomputation_changes_no_bit(prec: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[list[Array]] = []
    bytes_saved = []
    setting = Setting(device)

    def build() -> Program:
        program = transformer(prec)
        program.inspect = lambda routine: bytes_saved.append(routine.executable.recomputed_bytes)
        return program

    for step in (lambda module, **_: module, partial(recompute, least_peak=0, scarce=0, least_bytes=1024, large=0)):
        monkeypatch.setattr(pipeline, "recompute", step)
        found.append(run(build, setting))
    assert bytes_saved[0] == 0 < bytes_saved[1]
    for at, (kept, again) in enumerate(zip(*found, strict=True)):
        assert_same_bits(again, kept, f"{prec} result {at} on {device}")


@pytest.mark.usefixtures("scarce")
def test_recomputation_keeps_the_bits_of_plain_statements() -> None:
    for at, (fused, plain) in enumerate(
        zip(run(lambda: transformer("f32"), FUSED), run(lambda: transformer("f32"), UNFUSED), strict=True)
    ):
        assert_same_bits(fused, plain, f"result {at}")


@pytest.mark.usefixtures("scarce")
def test_the_memory_report_says_what_recomputation_saved() -> None:
    with st.Session(), st.Context("cpu") as ctx:
        program = transformer("f32")
        assert program.comp is not None
        ctx.compile(program.comp, name="step")
        report = ctx.memory_report()
        saved = report.recomputed_bytes["step"]
        assert saved > 2 * BATCH * SEQ * HIDDEN * 4, "gelu's interiors of one block at least"
        assert f"computing values again in place of keeping them {saved:,}" in str(report)
        names = [line.node for line in report.temporaries["step"]]
        assert any(name.endswith(".again") for name in names)


@pytest.mark.parametrize("target", ["avx512", "avx512+amx"])
def test_a_narrow_gpt_takes_at_most_six_tenths_of_the_memory(target: str) -> None:
    """Temporaries of a training step in bf16, beside those in f32; what is stored wide inside composites counts."""
    peaks: dict[str, int] = {}
    for prec in ("f32", "bf16"):
        with st.Session():
            _, _, loss = model(WORKLOADS["gpt2_mini"], prec)
            step = st.sequence(st.grad_update(loss), st.sgd_update(loss, 0.1, momentum=0.9))
            program = linking.for_codegen(solve_program(step, "step"), frozenset())
        peaks[prec] = plan_memory(pipeline.generate(program, TARGETS[target], st.Numerics())).peak
    assert peaks["bf16"] <= 0.6 * peaks["f32"]
