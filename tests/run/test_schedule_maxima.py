"""Maxima of a whole buffer that the kernel takes which writes it: same bits, no pass over the buffer, and where that is
not done.
"""

from __future__ import annotations

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor.codegen import loop_ir as ir
from stagedtensor.codegen.rewrite import buffers_read
from stagedtensor.codegen.schedule import schedule
from stagedtensor.numerics import Numerics
from stagedtensor.precision import f32
from stagedtensor.runtime.target import detect
from tests.run.blocks import (
    apply,
    axis,
    contraction,
    load,
    module,
    random_array,
    run_c,
    run_reference,
    same_bits,
    store,
)

ROWS, COLUMNS, TERMS = 250, 200, 24  # neither is a whole number of tiles
A, B = ir.Buffer("a", f32, (TERMS, ROWS)), ir.Buffer("b", f32, (TERMS, COLUMNS))
G = ir.Buffer("g", f32, (ROWS, COLUMNS))
SCALE, FLAG = ir.Buffer("scale", f32, (1,)), ir.Buffer("flag", f32, (1,))
CELL = (ir.index(0),)


def product() -> ir.Block:
    return contraction(A, B, G, (ROWS, COLUMNS, TERMS), "TN")


def flag(of: ir.Buffer = G, test: str = "nonfinite") -> ir.Block:
    """flag = max(flag, test(g * scale)) over all cells of g."""
    i, k = (axis(name, extent, "reduce") for name, extent in zip("ik", of.shape, strict=True))
    acc, least = ir.Symbol("acc", f32), ir.Const(float("-inf"), f32)
    value = apply(test, apply("mul", load(of, i, k), ir.Load(SCALE, CELL)))
    item = ir.Accumulator(acc, ir.Load(FLAG, CELL), apply("maximum", ir.Var(acc), value), "max", least)
    return ir.Block("flag", (i, k), (ir.Store(FLAG, CELL, ir.Var(acc)),), (item,))


def readers_of_all_cells(scheduled: ir.Module, of: ir.Buffer = G) -> list[str]:
    return [kernel.name for kernel in scheduled.kernels if of in buffers_read(kernel.body)]


@pytest.mark.parametrize("bad", [None, (0, 0), (ROWS - 1, COLUMNS - 1), (17, 130)])
@pytest.mark.parametrize("before", [0.0, float("inf")])
def test_the_kernel_that_writes_takes_the_maximum(bad: tuple[int, int] | None, before: float) -> None:
    whole = module(product(), flag())
    scheduled = schedule(whole, detect(), Numerics(), slabs=True)
    assert readers_of_all_cells(scheduled) == []
    arrays = {buffer: random_array(buffer, seed) for seed, buffer in enumerate(whole.external)}
    arrays[FLAG] = np.full(1, before, np.float32)
    if bad is not None:
        # one product of two large numbers overflows, in one cell
        arrays[A][3], arrays[B][3] = 0.0, 0.0
        arrays[A][3, bad[0]], arrays[B][3, bad[1]] = 1e30, 1e30
    expected = run_reference(whole, arrays)
    assert expected[FLAG][0] == (before if bad is None else np.inf)
    for threads in (1, 2, 3):
        got = run_c(scheduled, arrays, threads=threads)
        assert same_bits(got[FLAG], expected[FLAG])
        np.testing.assert_allclose(got[G], expected[G], rtol=1e-5, atol=1e-5)


def test_other_maxima_are_taken_too() -> None:
    whole = module(product(), flag(test="abs"))
    scheduled = schedule(whole, detect(), Numerics(), slabs=True)
    assert readers_of_all_cells(scheduled) == []
    arrays = {buffer: random_array(buffer, seed) for seed, buffer in enumerate(whole.external)}
    arrays[FLAG] = np.zeros(1, np.float32)
    got = run_c(scheduled, arrays, threads=2)
    assert got[FLAG][0] == np.abs(got[G] * arrays[SCALE]).max()


@pytest.mark.parametrize(("rows", "passes"), [(80, 0), (30, 1)])
def test_so_few_cells_that_a_pass_costs_nothing_are_passed_over(rows: int, passes: int) -> None:
    a, b, g = ir.Buffer("a", f32, (64, rows)), ir.Buffer("b", f32, (64, 64)), ir.Buffer("g", f32, (rows, 64))
    whole = module(contraction(a, b, g, (rows, 64, 64), "TN"), flag(g))
    scheduled = schedule(whole, detect(), Numerics(), slabs=True)
    assert len(readers_of_all_cells(scheduled, g)) == passes
    arrays = {buffer: random_array(buffer, seed) for seed, buffer in enumerate(whole.external)}
    arrays[FLAG] = np.zeros(1, np.float32)
    arrays[a][3, rows - 1] = arrays[b][3, 63] = 1e30
    assert run_reference(whole, arrays)[FLAG][0] == run_c(scheduled, arrays, threads=2)[FLAG][0] == np.inf


def test_what_else_is_read_must_not_change_in_between() -> None:
    change = ir.Block("change", (), (ir.Store(SCALE, CELL, apply("mul", ir.Load(SCALE, CELL), ir.Const(0.5, f32))),))
    scheduled = schedule(module(product(), change, flag()), detect(), Numerics(), slabs=True)
    assert len(readers_of_all_cells(scheduled)) == 1


def test_a_later_version_of_the_buffer_is_the_one_that_counts() -> None:
    i, k = axis("i", ROWS), axis("k", COLUMNS)
    halved = ir.Block("halved", (i, k), (store(G, (i, k), apply("mul", load(G, i, k), ir.Const(0.5, f32))),))
    scheduled = schedule(module(product(), halved, flag()), detect(), Numerics(), slabs=True)
    assert len(readers_of_all_cells(scheduled)) == 2  # what halves it, and the flag


@pytest.mark.parametrize("threads", [1, 2])
def test_one_overflow_in_a_large_gradient_skips_the_step(threads: int) -> None:
    x = st.placeholder("x", batch=[32], output=[200], prec="f32")
    labels = st.placeholder("labels", batch=[32], prec="i32")
    with st.master_weights("f16"):
        hidden = st.relu(st.param("w1", output=[250]) @ x + st.param("b1", init=0.0))
        loss = st.cross_entropy(st.param("w2", output=[10]) @ hidden, labels)
    st.PrecisionPolicy(activation="f16", grad="f16").apply(loss)
    scaler = st.LossScaler(init_scale=2.0**15)
    window, update = st.gated_scaled_update(scaler, loss, 0.01)
    ctx = st.Context("cpu", threads=threads)
    ctx.init_params(loss, seed=1)
    routine = ctx.compile(update, name="gated")
    assert "maxima for grad_flag on the way" in routine.source
    rng = np.random.default_rng(2)
    values = rng.normal(size=(32, 200)).astype(np.float32) * 0.1
    ctx.set_values(labels, np.arange(32) % 10)
    skipped = []
    for step, large in enumerate((0.0, 60000.0, 0.0)):
        values[5:7, 199] = large  # the two look alike and differ in their labels: one is wrong
        ctx.set_values(x, values)
        st.gated_step(ctx, scaler=scaler, routine=routine, window_checksum=window, check_interval=1, step=step)
        skipped.append(scaler.skipped_steps)
    assert skipped == [0, 1, 1]
    ctx.close()
