"""One, two and three threads give the same bits, on shapes large enough that they share the work."""

from __future__ import annotations

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor.runtime.routine import Routine
from tests.oracles.gradients import grad_of

from .running import Array, Program, Setting, assert_same_bits, run

THREADS = (1, 2, 3)


def draw(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def is_parallel(routine: Routine) -> None:
    heavy = [kernel.path for kernel in routine.kernels if kernel.flops > 4_000_000]
    assert len(heavy) >= 4
    assert all("static partition" in path for path in heavy), str(routine)


def forward() -> Program:
    """Contractions, reductions of rows, columns and everything, composites, argmax, pointwise; f32 and bf16."""
    a, b = st.placeholder("a", output=[301, 517], prec="f32"), st.placeholder("b", output=[517, 263], prec="f32")
    x = st.placeholder("x", batch=[771], output=[1031], prec="f32")
    h = st.placeholder("h", batch=[771], output=[1031], prec="bf16")
    w = st.param("w", input=[1031], output=[65], prec="bf16")
    reads = [
        st.einsum("ij;jk=>ik", a, b),
        w @ h,
        st.sum(x),
        st.sum(x, axis="output"),
        st.sum(x, axis="batch"),
        st.max(x, axis="batch"),
        st.argmax(x),
        st.softmax(x),
        st.softmax(h),
        st.layer_norm(h),
        st.logsumexp(x, axis="batch"),
        st.norm(x),
        st.tanh(x) * st.gelu(x),
    ]
    feeds = [
        (a, draw(1, 301, 517)),
        (b, draw(2, 517, 263)),
        (x, draw(3, 771, 1031)),
        (h, draw(4, 771, 1031)),
        (w, draw(5, 65, 1031)),
    ]
    return Program(feeds, reads, inspect=is_parallel)


def backward(prec: str) -> Program:
    """A step whose gradients are contractions, a scatter with many collisions, and sums over the batch."""
    ids = st.placeholder("ids", batch=[3000], prec="i32")
    labels = st.placeholder("labels", batch=[3000], prec="i32")
    table = st.param("table", output=[97], input=[128])
    w1, b1 = st.param("w1", input=[128], output=[160]), st.param("b1", output=[160])
    w2, gain = st.param("w2", input=[160], output=[33]), st.param("gain", output=[160], init=1.0)
    hidden = st.layer_norm(st.relu(w1 @ st.gather(table, ids) + b1), gain)
    loss = st.cross_entropy(w2 @ hidden, labels)
    if prec != "f32":
        st.PrecisionPolicy(activation=prec).apply(loss)
    params = [table, w1, b1, w2, gain]
    rng = np.random.default_rng(6)
    feeds: list[tuple[st.Tensor, Array]] = [(ids, rng.integers(0, 97, 3000)), (labels, rng.integers(0, 33, 3000))]
    feeds += [
        (p, 0.2 * draw(10 + at, *shape))
        for at, (p, shape) in enumerate(zip(params, [(97, 128), (160, 128), (160,), (33, 160), (160,)], strict=True))
    ]
    return Program(feeds, [loss, *map(grad_of, params)], st.grad_update(loss))


def test_forward() -> None:
    first = run(forward, Setting(threads=1))
    exact = draw(1, 301, 517).astype(np.float64) @ draw(2, 517, 263).astype(np.float64)
    bound = np.abs(draw(1, 301, 517)).astype(np.float64) @ np.abs(draw(2, 517, 263)).astype(np.float64)
    assert (np.abs(first[0] - exact) <= 517 * 2.0**-24 * bound).all()
    total = draw(3, 771, 1031).astype(np.float64)
    assert abs(float(first[2]) - total.sum()) <= total.size * 2.0**-24 * np.abs(total).sum()
    for threads in THREADS[1:]:
        for at, (found, expected) in enumerate(zip(run(forward, Setting(threads=threads)), first, strict=True)):
            assert_same_bits(found, expected, f"result {at} on {threads} threads")


@pytest.mark.parametrize("prec", ["bf16", pytest.param("f32", marks=pytest.mark.slow)])
def test_backward(prec: str) -> None:
    first = run(lambda: backward(prec), Setting(threads=1))
    assert all(np.abs(cells.astype(np.float64)).max() > 0 for cells in first)
    for threads in THREADS[1:]:
        for at, (found, expected) in enumerate(
            zip(run(lambda: backward(prec), Setting(threads=threads)), first, strict=True)
        ):
            assert_same_bits(found, expected, f"result {at} on {threads} threads")


def test_repeated_runs_give_the_same_bits() -> None:
    with st.Session(), st.Context("cpu", threads=3) as ctx:
        program = backward("f32")
        for tensor, values in program.feeds:
            ctx.set_values(tensor, values)
        assert program.comp is not None
        routine = ctx.compile(program.comp, keep=program.reads)
        seen = []
        for _ in range(5):
            ctx.run(routine)
            seen.append([ctx.get_values(tensor) for tensor in program.reads])
    for cells in seen[1:]:
        for found, expected in zip(cells, seen[0], strict=True):
            assert_same_bits(found, expected, "another run")
