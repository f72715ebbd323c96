"""Kernels that run together on slabs: no score matrix is stored, and no bit differs from kernels one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor.codegen import pipeline
from stagedtensor.codegen.passes.recompute import recompute
from stagedtensor.codegen.schedule import slab
from stagedtensor.runtime import cpu
from stagedtensor.runtime.routine import Routine
from stagedtensor.runtime.target import detect
from tests.oracles.gradients import grad_of

from .running import Array, Program, Setting, assert_same_bits, run, runnable_targets

BATCH, HEADS = 4, 3
LEAST_BYTES = slab.LEAST_BYTES


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of any size are worth a slab; code of the kernel cache was generated with other limits."""
    monkeypatch.setattr(cpu, "generator_version", lambda: None)
    monkeypatch.setattr(slab, "LEAST_BYTES", 1024)


def attention(
    prec: str, queries: int, keys: int, features: int, *, causal: bool = False, masked: bool = False
) -> Program:
    """Attention with its gradients."""
    shapes = {"q": (queries, features), "k": (keys, features), "v": (keys, features + 2)}
    rng = np.random.default_rng(queries + keys)
    feeds: list[tuple[st.Tensor, Array]] = []
    for name, (length, width) in shapes.items():
        tensor = st.placeholder(name, batch=[BATCH, length], output=[HEADS, width], prec=prec, requires_grad=True)
        feeds.append((tensor, rng.standard_normal((BATCH, length, HEADS, width)).astype(np.float32)))
    mask = None
    if masked:
        mask = st.placeholder("mask", batch=[BATCH], output=[1, queries, keys], prec="f32")
        feeds.append((mask, (rng.random((BATCH, 1, queries, keys)) > 0.3).astype(np.float32)))
    q, k, v = (tensor for tensor, _ in feeds[:3])
    loss = st.mean(st.tanh(st.cast(st.attention(q, k, v, causal=causal, mask=mask), "f32")))
    return Program(feeds, [loss, *map(grad_of, (q, k, v))], st.grad_update(loss))


def compare(
    build: Callable[[], Program], monkeypatch: pytest.MonkeyPatch, threads: int = 2, *, no_unit: bool = False
) -> Routine:
    """Require equal bits with slabs and without; return the routine with slabs.

    The target has no AMX tiles, whose order of sums is not that of slabs, and with ``no_unit`` no other unit for
    matrices.
    """
    seen: list[Routine] = []

    def program() -> Program:
        made = build()
        made.inspect = seen.append
        return made

    target = runnable_targets()[-1] if no_unit or detect().has("amx_bf16") else detect().name
    setting = Setting(threads=threads, target=target)
    together = run(program, setting)
    monkeypatch.setattr(slab, "LEAST_BYTES", 1 << 60)
    alone = run(program, setting)
    for at, (found, expected) in enumerate(zip(together, alone, strict=True)):
        assert_same_bits(found, expected, f"result {at}")
    assert not any("slabs" in kernel.path for kernel in seen[1].kernels)
    return seen[0]


def matrices(routine: Routine, shape: Sequence[int]) -> list[str]:
    """Temporaries of a shape."""
    text = str(list(shape))
    return [line.node for line in routine.executable.temporaries if line.shape == text]


CASES: dict[str, dict[str, Any]] = {
    "square": {"queries": 32, "keys": 32, "features": 16},
    "causal": {"queries": 33, "keys": 33, "features": 8, "causal": True},
    "mask": {"queries": 20, "keys": 35, "features": 12, "masked": True},
    "tall": {"queries": 128, "keys": 128, "features": 32, "causal": True},
    "wide": {"queries": 8, "keys": 70, "features": 8},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "prec", ["f32", pytest.param("bf16", marks=pytest.mark.slow), pytest.param("f16", marks=pytest.mark.slow)]
)
def test_slabs_do_not_show(prec: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    routine = compare(partial(attention, prec, **CASES[case]), monkeypatch)
    assert any("slabs" in kernel.path for kernel in routine.kernels), str(routine)


@pytest.mark.parametrize("seed", range(6))
def test_tiles_of_rows_do_not_show(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random shapes, masks and numbers of threads; some leave rows over. Tiles are lower than any that units for
    matrices take.
    """
    rng = np.random.default_rng(seed)
    queries, keys = (int(item) for item in rng.integers(17, 70, 2))
    _tiles(monkeypatch, rows=int(rng.integers(11, 16)))
    build = partial(
        attention,
        ("f32", "bf16", "f16")[seed % 3],
        queries,
        queries if seed % 2 else keys,
        int(rng.integers(1, 5)) * 8,
        causal=bool(seed % 2),
        masked=seed % 4 == 2,
    )
    routine = compare(build, monkeypatch, threads=seed % 3 + 1, no_unit=True)
    assert any("slabs" in kernel.path for kernel in routine.kernels), str(routine)


def _tiles(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Let matrices of any size be cut into tiles of ``rows`` rows."""
    monkeypatch.setattr(slab, "MOST_WHOLE", 0)
    monkeypatch.setattr(slab, "LEAST_ROWS", 8)
    monkeypatch.setattr(slab, "MOST_ROWS", rows)


def test_tiles_pass_the_verifier_and_fit_no_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long sequences: a worker's memory stays at tiles of rows, whatever the length."""
    monkeypatch.setattr(slab, "LEAST_BYTES", LEAST_BYTES)
    with st.Session(), st.Context("cpu", threads=2) as ctx:
        q, k, v = (st.placeholder(name, batch=[1, 2048], output=[4, 32], prec="f32") for name in "qkv")
        routine = ctx.compile(st.attention(q, k, v, causal=True), debug=True)
    assert not matrices(routine, (1, 4, 2048, 2048)), str(routine)
    assert "slabs of 64 rows" in routine.kernels[0].path
    assert routine.executable.thread_bytes < 2 << 20
    assert routine.executable.arena_bytes < 16 << 20


def test_a_matrix_that_others_read_across_rows_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The transposed matrix is read too: rows of one tile would need rows of others."""
    _tiles(monkeypatch, rows=8)

    def build() -> Program:
        x = st.placeholder("x", batch=[16, 24], output=[24], prec="f32")
        scores = st.einsum("b, i | -> c; b, j | -> c => b | i -> j", x, x)
        both = st.exp(scores * 0.01)
        y = st.einsum("b | i -> j; b | j -> i; b, j | -> c => b, i | -> c", both, both, x)
        values = np.random.default_rng(2).standard_normal((16, 24, 24)).astype(np.float32)
        return Program([(x, values)], [y])

    routine = compare(build, monkeypatch)
    assert not any("slabs of" in kernel.path for kernel in routine.kernels)


def test_the_scores_are_never_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the probabilities computed again, neither forward nor backward leaves a matrix of queries and keys."""
    monkeypatch.setattr(pipeline, "recompute", partial(recompute, least_peak=0, scarce=0, least_bytes=1024, large=0))

    def layers() -> Program:
        q, k = (
            st.placeholder(name, batch=[BATCH, 32], output=[HEADS, 16], prec="f32", requires_grad=True) for name in "qk"
        )
        rng = np.random.default_rng(3)
        feeds = [(item, rng.standard_normal((BATCH, 32, HEADS, 16)).astype(np.float32)) for item in (q, k)]
        x = q
        for _ in range(3):
            x = st.attention(x, k, x, causal=True)
        loss = st.mean(st.tanh(x))
        gradients = [*map(grad_of, (q, k))]
        return Program(feeds, [loss, *gradients], st.grad_update(loss))

    routine = compare(layers, monkeypatch)
    stored = matrices(routine, (BATCH, HEADS, 32, 32))
    # the last layer's probabilities are read at once by its gradients: nothing would be saved by another computation
    assert len(stored) <= 1, str(routine)


def test_scores_of_common_sizes_are_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 sequences of 128 tokens, 8 heads: with the limits as they are, each worker holds one head's scores."""
    monkeypatch.setattr(slab, "LEAST_BYTES", LEAST_BYTES)
    with st.Session(), st.Context("cpu") as ctx:
        q, k, v = (st.placeholder(name, batch=[8, 128], output=[8, 32], prec="f32") for name in "qkv")
        routine = ctx.compile(st.attention(q, k, v, causal=True))
    assert not matrices(routine, (8, 8, 128, 128)), str(routine)
    assert routine.executable.arena_bytes < 8 * 8 * 128 * 128 * 4


def _followed(prec: str, length: int) -> Program:
    """Attention whose gradient needs what a later layer makes of the result."""
    made = attention(prec, length, length, 16, causal=True)
    (q, _), (k, _), (v, _) = made.feeds
    w = st.placeholder("w", output=[8], input=[HEADS, 18], prec=prec)
    mixed = st.einsum("... | -> h, d; | h, d -> c => ... | -> c", st.attention(q, k, v), w)
    loss = st.mean(st.tanh(st.cast(mixed, "f32")))
    gradients = [*map(grad_of, (q, k, v))]
    weights = np.random.default_rng(1).standard_normal((8, HEADS, 18)).astype(np.float32)
    return Program([*made.feeds, (w, weights)], [loss, *gradients], st.grad_update(loss))


@pytest.mark.parametrize(
    ("prec", "rows", "length", "no_unit"),
    [("f32", 12, 40, False), ("bf16", 12, 40, True), ("f32", 16, 48, False), ("bf16", 16, 48, False)],
)
def test_probabilities_are_computed_again_for_the_backward_pass(
    prec: str, rows: int, length: int, no_unit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The matrix is made twice, and never lies in memory."""
    monkeypatch.setattr(slab, "LEAST_AGAIN", 1024)
    _tiles(monkeypatch, rows=rows)
    routine = compare(partial(_followed, prec, length), monkeypatch, no_unit=no_unit)
    assert not matrices(routine, (BATCH, HEADS, length, length)), str(routine)
    assert sum("slabs" in kernel.path for kernel in routine.kernels) == 2, str(routine)
    assert any(item.startswith("again: ") for kernel in routine.kernels for item in kernel.expressions)


@pytest.mark.skipif(detect().name != "avx512+bf16", reason="needs dots, and no AMX tiles")
def test_tiles_too_low_for_dots_are_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole matrices take dots, tiles of 10 rows could not: bits stay those of dots, so there are no slabs."""
    monkeypatch.setattr(slab, "LEAST_AGAIN", 1024)
    _tiles(monkeypatch, rows=12)
    routine = compare(partial(_followed, "bf16", 40), monkeypatch)
    assert any("bf16 dots" in kernel.path for kernel in routine.kernels), str(routine)
    assert not any("slabs of" in kernel.path for kernel in routine.kernels), str(routine)


def test_training_on_long_sequences_stores_no_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,024 tokens, forward and backward, with the limits as they are: the arena holds no square of the length."""
    monkeypatch.setattr(slab, "LEAST_BYTES", LEAST_BYTES)
    with st.Session(), st.Context("cpu", threads=2) as ctx:
        x = st.placeholder("x", batch=[1, 1024], output=[64], prec="f32")
        hidden = st.nn.multi_head_attention(64, 8, causal=True)(x)
        loss = st.mean(st.tanh(st.nn.multi_head_attention(64, 8, causal=True)(hidden)))
        routine = ctx.compile(st.grad_update(loss))
        report = ctx.memory_report()
    assert not matrices(routine, (1, 8, 1024, 1024)), str(routine)
    assert report.peak_bytes < 1024 * 1024 * 8
    assert report.thread_bytes[routine.name] < 2 << 20
    assert "of the arena for each thread" in str(report)


def test_what_stands_between_is_moved_or_keeps_kernels_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that every head reads stand between two products: the second cannot join the first."""

    def build() -> Program:
        x = st.placeholder("x", batch=[16, 24], output=[24], prec="f32")
        scores = st.einsum("b, i | -> c; b, j | -> c => b | i -> j", x, x)
        shifted = st.exp(scores * 0.01)
        total = st.sum(shifted, axis=None)
        y = st.einsum("b | i -> j; b, j | -> c => b, i | -> c", shifted / total, x)
        values = np.random.default_rng(2).standard_normal((16, 24, 24)).astype(np.float32)
        return Program([(x, values)], [y, total])

    compare(build, monkeypatch)


def test_threads_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    build = partial(attention, "f32", 24, 24, 8)
    one, three = (run(build, Setting(threads=threads)) for threads in (1, 3))
    for at, (found, expected) in enumerate(zip(three, one, strict=True)):
        assert_same_bits(found, expected, f"result {at}")
