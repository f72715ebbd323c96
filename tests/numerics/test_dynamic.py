"""Extents and positions known only at run time, sizes of zero, slices, and ids out of range."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor import nn
from tests.oracles.gradients import grad_of

from .running import (
    FUSED,
    REFERENCE,
    UNFUSED,
    Array,
    Program,
    Setting,
    assert_same_bits,
    assert_same_everywhere,
    run,
    runnable_targets,
)

DEVICES = ("reference", "cpu")


def draw(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(("prec", "threads"), [("f32", 1), ("bf16", 3)])
def test_one_routine_serves_every_extent(prec: str, threads: int) -> None:
    """Each extent gives the bits of a routine compiled for just that size."""
    largest = 37

    def build(batch: Any) -> tuple[st.Tensor, list[st.Tensor]]:
        x = st.placeholder("x", batch=[batch], output=[21], prec=prec)
        y = st.tanh(x) * 2.0 + 0.25
        return x, [y, st.sum(y, axis="output"), st.mean(y, axis="batch"), st.softmax(x, axis="batch"), st.max(x)]

    extents = (1, 2, 7, 16, 36, 37)
    data = draw(1, largest, 21)
    for device in DEVICES:
        count = threads if device == "cpu" else None
        with st.Session(), st.Context(device, threads=count) as ctx:
            x, reads = build(st.dynamic("n", largest))
            routine = ctx.compile(reads)
            compiled = ctx.stats.compiles + ctx.stats.cache_hits
            results = {}
            for extent in extents:
                ctx.set_values(x, data[:extent])
                ctx.run(routine, n=extent)
                results[extent] = [ctx.get_values(read) for read in reads]
            assert ctx.stats.compiles + ctx.stats.cache_hits == compiled
        for extent in extents:
            fixed = run(partial(fixed_program, build, extent, data), Setting(device, threads=count))
            for at, (found, expected) in enumerate(zip(results[extent], fixed, strict=True)):
                live = found[:extent] if found.shape != expected.shape else found
                # on a GPU the template, and so the order of a sum, depends on whether its length is known
                if at == 0 or (at == 3 and device in ("reference", "cpu")):
                    assert_same_bits(live, expected, f"result {at} at extent {extent} on {device}")
                else:
                    np.testing.assert_allclose(
                        live.astype(np.float64),
                        expected.astype(np.float64),
                        rtol=1e-6 if prec == "f32" else 2.0**-7,
                        atol=1e-7,  # terms of both signs, in another order
                    )


def fixed_program(build: Any, extent: int, data: Array) -> Program:
    x, reads = build(extent)
    return Program([(x, data[:extent])], reads)


def test_the_mean_divides_by_the_current_extent() -> None:
    for device in DEVICES:
        with st.Session(), st.Context(device) as ctx:
            x = st.placeholder("x", batch=[st.dynamic("n", 64)], output=[3], prec="f32")
            m, v = st.mean(x, axis="batch"), st.var(x)
            routine = ctx.compile([m, v])
            for extent in (1, 5, 64):
                data = draw(extent, extent, 3)
                ctx.set_values(x, data)
                ctx.run(routine)
                np.testing.assert_allclose(ctx.get_values(m), data.mean(0), rtol=1e-5, atol=1e-6)
                np.testing.assert_allclose(ctx.get_values(v), data.var(), rtol=1e-5)


def test_gradients_with_a_dynamic_batch() -> None:
    """What lies beyond the extent contributes nothing, also where a larger batch ran before."""
    data, labels = draw(2, 40, 6), np.random.default_rng(3).integers(0, 4, 40)
    for device in DEVICES:
        with st.Session(), st.Context(device) as ctx:
            n = st.dynamic("n", 40)
            x, y = st.placeholder("x", batch=[n], output=[6], prec="f32"), st.placeholder("y", batch=[n], prec="i32")
            w, b = st.param("w", input=[6], output=[4]), st.param("b", output=[4])
            loss = st.cross_entropy(w @ x + b, y)
            routine = ctx.compile(st.grad_update(loss))
            weights = draw(4, 4, 6)
            ctx.set_values(w, weights)
            ctx.set_values(b, np.zeros(4))
            for extent in (40, 9, 1, 40):
                ctx.set_values(x, data[:extent])
                ctx.set_values(y, labels[:extent])
                ctx.run(routine)
                logits = data[:extent].astype(np.float64) @ weights.T.astype(np.float64)
                p = np.exp(logits - logits.max(1, keepdims=True))
                p /= p.sum(1, keepdims=True)
                p[np.arange(extent), labels[:extent]] -= 1.0
                np.testing.assert_allclose(
                    ctx.get_values(grad_of(w)), p.T @ data[:extent] / extent, rtol=2e-5, atol=1e-6
                )
                np.testing.assert_allclose(ctx.get_values(grad_of(b)), p.mean(0), rtol=2e-5, atol=1e-6)


def test_static_indices_pick_one_batch() -> None:
    data = np.rint(draw(5, 9, 4, 17) * 8) / np.float32(8)  # sums are exact

    def build(position: int) -> Program:
        i = st.index("i", 9)
        x = st.placeholder("x", batch=[9, 4], output=[17], prec="f32")
        chosen = x[i]
        return Program([(x, data)], [chosen * 2.0, st.sum(chosen, axis="output")], bindings={"i": position})

    for position in (0, 4, 8):
        doubled, total = assert_same_everywhere(partial(build, position))
        assert_same_bits(doubled, data[position] * np.float32(2), f"batch {position}")
        assert_same_bits(total, data[position].sum(-1), f"sum of batch {position}")


def test_the_gradient_of_a_static_index_fills_one_batch() -> None:
    for device in DEVICES:
        with st.Session(), st.Context(device) as ctx:
            x = st.placeholder("x", batch=[5], output=[3], prec="f32", requires_grad=True)
            loss = st.sum(x[st.index("i", 5)] * 3.0)
            routine = ctx.compile(st.grad_update(loss))
            ctx.set_values(x, np.ones((5, 3)))
            for position in (2, 4):
                ctx.run(routine, i=position)
                expected = np.zeros((5, 3), np.float32)
                expected[position] = 3.0
                assert_same_bits(ctx.get_values(grad_of(x)), expected, f"{device} {position}")


# -- sizes of zero ---------------------------------------------------------------------------------------------------


def test_empty_tensors() -> None:
    """Nothing to compute is no error; an empty sum is 0, an empty product 1; an empty maximum is refused."""

    def build() -> Program:
        x = st.placeholder("x", batch=[0], output=[5], prec="f32")
        y = st.placeholder("y", batch=[3], output=[0], prec="bf16")
        reads = [
            x * 2.0,
            st.sum(x, axis="batch"),
            st.prod(x, axis="batch"),
            st.sum(y),
            st.concat([x, x], axis=("output", 0)),
            st.narrow(y + 1.0, 0, 0),
            st.softmax(x),
        ]
        return Program([(x, np.zeros((0, 5))), (y, np.zeros((3, 0)))], reads)

    doubled, total, product, sum_all, joined, cut, soft = assert_same_everywhere(build)
    assert doubled.shape == soft.shape == (0, 5)
    assert joined.shape == (0, 10)
    assert cut.shape == (3, 0)
    assert total.tolist() == [0.0] * 5
    assert product.tolist() == [1.0] * 5
    assert float(sum_all) == 0.0
    for device in DEVICES:
        with st.Session(), st.Context(device) as ctx:
            y = st.placeholder("y", batch=[3], output=[0], prec="f32")
            with pytest.raises(st.errors.ShapeError, match="axis of size 0"):
                ctx.compile(st.max(y, axis="output"))


def test_contractions_over_nothing_are_zero() -> None:
    def build() -> Program:
        w, x = st.param("w", input=[0], output=[4]), st.placeholder("x", batch=[3], output=[0], prec="f32")
        return Program([(w, np.zeros((4, 0))), (x, np.zeros((3, 0)))], [w @ x])

    (found,) = assert_same_everywhere(build)
    assert_same_bits(found, np.zeros((3, 4), np.float32), "empty contraction")


# -- slices ----------------------------------------------------------------------------------------------------------


def test_slices_against_numpy() -> None:
    data = draw(6, 10, 4, 13)
    cuts = [slice(2, 7), slice(None, None, 3), slice(-4, None), slice(9, 2), slice(0, 100), slice(1, 10, 4)]
    steps = [(0, 13, 1), (3, None, 2), (-5, -1, 1), (12, 13, 1), (5, 2, 1)]

    def build() -> Program:
        x = st.placeholder("x", batch=[10], output=[4, 13], prec="f32")
        reads = [x[cut] + 1.0 for cut in cuts] + [x[3] + 1.0, x[-1] + 1.0]
        reads += [st.narrow(x, start, stop, step=step) + 1.0 for start, stop, step in steps]
        return Program([(x, data)], reads)

    found = assert_same_everywhere(build)
    expected = [data[cut] for cut in cuts] + [data[3], data[-1]] + [data[..., slice(*step)] for step in steps]
    for at, (cells, cut) in enumerate(zip(found, expected, strict=True)):
        assert_same_bits(cells, cut + np.float32(1), f"slice {at}")


# -- ids -------------------------------------------------------------------------------------------------------------

IDS = np.array([[0, 6, 7, 100], [-1, -100, 3, 2**31 - 1], [-(2**31), 5, 5, 5]], np.int64)


@pytest.mark.parametrize("prec", ["i32", "i64", "i8", "u8"])
def test_ids_out_of_range_are_clamped(prec: str) -> None:
    table = draw(7, 7, 5)
    kind = st.precision(prec)
    low, high = (0, 255) if prec == "u8" else (-128, 127) if prec == "i8" else (-(2**31), 2**31 - 1)
    ids = np.clip(IDS, low, high).astype(kind.numpy_dtype)

    def build() -> Program:
        t = st.placeholder("t", input=[5], output=[7], prec="f32")
        i = st.placeholder("i", batch=[3, 4], prec=prec)
        return Program([(t, table), (i, ids)], [st.gather(t, i), st.gather(t * 2.0, i) + 1.0, st.one_hot(i, 7)])

    rows, doubled, hot = assert_same_everywhere(build)
    clamped = np.clip(ids.astype(np.int64), 0, 6)
    assert_same_bits(rows, table[clamped], "gather")
    assert_same_bits(doubled, table[clamped] * np.float32(2) + np.float32(1), "gather of a computed table")
    assert hot.tolist() == (ids[..., None].astype(np.int64) == np.arange(7)).astype(np.float32).tolist()


@pytest.mark.parametrize("prec", ["f32", "bf16"])
def test_scatter_of_gradients(prec: str) -> None:
    """Colliding ids add up wide and round once; out of range they go where they were read from."""
    rng = np.random.default_rng(8)
    ids = rng.integers(-3, 12, 400)
    upstream = (rng.integers(-8, 9, (400, 6)) / 8).astype(np.float32)  # sums are exact

    def build() -> Program:
        table = st.param("table", input=[6], output=[9], prec=prec)
        i = st.placeholder("i", batch=[400], prec="i32")
        g = st.placeholder("g", batch=[400], output=[6], prec=prec)
        loss = st.sum(st.gather(table, i) * g)
        if prec != "f32":
            st.specify(table.grad, prec)
        assert table.grad is not None
        return Program([(table, np.zeros((9, 6))), (i, ids), (g, upstream)], [table.grad], st.grad_update(loss))

    expected = np.zeros((9, 6))
    np.add.at(expected, np.clip(ids, 0, 8), upstream.astype(np.float64))
    assert np.abs(expected).max() > 4
    settings = [
        REFERENCE,
        FUSED,
        UNFUSED,
        Setting(threads=3),
        *(Setting(target=target) for target in runnable_targets()),
    ]
    (found,) = assert_same_everywhere(build, settings)
    assert_same_bits(found, expected.astype(found.dtype), "scatter")


@pytest.mark.parametrize("kind", ["learned", "rotary", "sinusoidal"])
def test_sequences_of_any_length_have_their_positions(kind: str) -> None:
    """One routine for all lengths up to the maximum computes what a routine for that length alone does."""

    def network(ids: st.Tensor) -> st.Tensor:
        if kind != "sinusoidal":
            y: st.Tensor = nn.gpt(11, width=8, layers=1, heads=2, tokens=8, rotary=kind == "rotary")(ids)
            return y
        return nn.sinusoidal_positions(nn.embedding(11, 8)(ids))

    def results(length: int, tokens: Any, before: Sequence[int] = ()) -> list[Any]:
        with st.Session(), st.Context("cpu") as ctx:
            ids = st.placeholder("ids", batch=[2, tokens], prec=st.i32)
            loss = st.mean(network(ids) ** 2)
            step = ctx.compile(st.grad_update(loss), name="step")
            ctx.init_params(loss, seed=1)
            for n in (*before, length):
                ctx.set_values(ids, np.arange(2 * n).reshape(2, n) % 11)
                ctx.run(step)
            return [ctx.get_values(loss), *(ctx.get_values(p.grad) for p in loss.params if p.grad is not None)]

    alone, shared = results(5, 5), results(5, st.dynamic("length", max=8), before=(8, 3))
    for expected, found in zip(alone, shared, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)
