"""Narrow twins that their readers round themselves: same bits, fewer passes over memory, and where a twin must stay."""

from __future__ import annotations

import pytest

from stagedtensor.codegen import loop_ir as ir
from stagedtensor.codegen.schedule import schedule
from stagedtensor.codegen.schedule.held import hold_wide
from stagedtensor.codegen.schedule.machine import Machine
from stagedtensor.codegen.schedule.twins import narrow_in_place
from stagedtensor.numerics import Numerics
from stagedtensor.precision import Prec, bf16, f16, f32
from stagedtensor.runtime.target import target
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

W, X, Y = ir.Buffer("w", f32, (48, 80)), ir.Buffer("x", f32, (64, 80)), ir.Buffer("y", f32, (64, 48))
DX = ir.Buffer("dx", f32, (64, 80))


def cast_of(twin: ir.Buffer) -> ir.Block:
    i, k = axis("i", 48), axis("k", 80)
    return ir.Block(
        twin.name, (i, k), (store(twin, (i, k), load(W, i, k)),), origins=(ir.Origin("cast(w)", "model.py:1"),)
    )


def step() -> ir.Block:
    """The master changes in place."""
    i, k = axis("i", 48), axis("k", 80)
    return ir.Block("step", (i, k), (store(W, (i, k), apply("mul", load(W, i, k), ir.Const(0.5, f32))),))


def agree(whole: ir.Module) -> None:
    arrays = {buffer: random_array(buffer, seed) for seed, buffer in enumerate(whole.external)}
    expected = run_reference(whole, arrays)
    for threads in (1, 3):
        got = run_c(whole, arrays, threads=threads)
        for buffer in whole.external:
            assert same_bits(got[buffer], expected[buffer]), (buffer.name, threads)


def names(whole: ir.Module) -> list[str]:
    return [kernel.name for kernel in whole.kernels]


@pytest.mark.parametrize("prec", [bf16, f16])
def test_forward_and_backward_round_the_master(prec: Prec) -> None:
    twin = ir.Buffer("twin", prec, (48, 80))
    forward = contraction(X, twin, Y, (64, 48, 80), "NT")
    backward = contraction(Y, twin, DX, (64, 80, 48), "NN")
    whole = module(cast_of(twin), forward, backward, step(), temporaries=(twin,))
    changed = narrow_in_place(whole)
    assert names(changed) == ["y", "dx", "step"]
    assert changed.temporaries == ()
    assert next(origin.text for origin in changed.kernels[0].body[0].origins) == "cast(w)"  # type: ignore[union-attr]
    assert not any(kernel.name.startswith("twin") for kernel in schedule(whole, target("avx512"), Numerics()).kernels)
    agree(whole)


def test_a_reader_behind_the_masters_change_comes_first() -> None:
    twin = ir.Buffer("twin", bf16, (48, 80))
    backward = contraction(Y, twin, DX, (64, 80, 48), "NN")
    whole = module(cast_of(twin), step(), backward, temporaries=(twin,))
    assert names(narrow_in_place(whole)) == ["dx", "step"]
    agree(whole)


def test_a_reader_that_must_stay_behind_keeps_the_twin() -> None:
    """The reader's other operand is made from the changed master."""
    twin = ir.Buffer("twin", bf16, (48, 80))
    i, b = axis("i", 48), axis("b", 64)
    other = ir.Block("y", (b, i), (store(Y, (b, i), ir.Load(W, (ir.Var(i.symbol), ir.index(0)))),))
    backward = contraction(Y, twin, DX, (64, 80, 48), "NN")
    whole = module(cast_of(twin), step(), other, backward, temporaries=(twin,))
    assert narrow_in_place(whole) is whole
    agree(whole)


def test_few_uses_keep_the_twin() -> None:
    """Four rows would round every cell four times over and copy nothing."""
    twin = ir.Buffer("twin", bf16, (48, 80))
    few, out = ir.Buffer("few", f32, (4, 48)), ir.Buffer("out", f32, (4, 80))
    whole = module(cast_of(twin), contraction(few, twin, out, (4, 80, 48), "NN"), temporaries=(twin,))
    assert narrow_in_place(whole) is whole
    agree(whole)


def test_a_twin_that_the_context_sees_stays() -> None:
    twin = ir.Buffer("twin", bf16, (48, 80))
    whole = module(cast_of(twin), contraction(X, twin, Y, (64, 48, 80), "NT"))
    assert narrow_in_place(whole) is whole
    agree(whole)


def chain(between: int) -> tuple[ir.Module, ir.Buffer]:
    """A narrow temporary too large to be held for its size alone, a contraction of it ``between`` kernels later."""
    rows = 2 * 4096
    source, narrow = ir.Buffer("source", f32, (rows, 32)), ir.Buffer("narrow", bf16, (rows, 32))
    weights, out = ir.Buffer("weights", f32, (32, 16)), ir.Buffer("out", f32, (rows, 16))
    i, k = axis("i", rows), axis("k", 32)
    blocks = [ir.Block("narrow", (i, k), (store(narrow, (i, k), load(source, i, k)),))]
    for at in range(between):
        counter, c = ir.Buffer(f"counter{at}", f32, (3,)), axis("c", 3)
        blocks.append(ir.Block(counter.name, (c,), (store(counter, (c,), ir.Const(float(at), f32)),)))
    blocks.append(contraction(narrow, weights, out, (rows, 16, 32), "NN"))
    return module(*blocks, temporaries=(narrow,)), narrow


def test_operands_that_soon_are_gone_are_held_in_f32() -> None:
    constants = Machine(64, 32, most_held_cells=1000)
    short, narrow = chain(1)
    (held,) = hold_wide(short, constants).temporaries
    assert (held.name, held.type) == (narrow.name, f32)
    long, narrow = chain(20)
    assert hold_wide(long, constants).temporaries == (narrow,)
    few = Machine(64, 32, most_held_cells=1000, most_passing_cells=1000)
    short, narrow = chain(1)
    assert hold_wide(short, few).temporaries == (narrow,)
    agree(short)


def beside_its_master(readers: int = 2) -> ir.Module:
    """One sweep stores a value and its rounding; products read the rounding, a sweep at the end the value."""
    g, twin = ir.Buffer("g", f32, (48, 80)), ir.Buffer("twin", bf16, (48, 80))
    i, k, m, n = axis("i", 48), axis("k", 80), axis("m", 48), axis("n", 80)
    value = ir.Symbol("value", f32)
    sweep = ir.Block(
        "sweep",
        (i, k),
        (store(g, (i, k), ir.Var(value)), store(twin, (i, k), ir.Var(value))),
        lets=(ir.Let(value, apply("mul", load(W, i, k), load(W, i, k))),),
    )
    results = [ir.Buffer(f"y{at}", f32, (64, 48)) for at in range(readers)]
    products = [contraction(X, twin, result, (64, 48, 80), "NT") for result in results]
    last = ir.Block("last", (m, n), (store(ir.Buffer("end", f32, (48, 80)), (m, n), load(g, m, n)),))
    return module(sweep, *products, last, temporaries=(g, twin))


def test_a_twin_beside_its_master_is_rounded_by_the_products_that_soon_read_it() -> None:
    whole = beside_its_master()
    changed = narrow_in_place(whole)
    assert names(changed) == ["sweep", "y0", "y1", "last"]
    assert [buffer.name for buffer in changed.temporaries] == ["g"]
    (block,) = changed.kernels[0].body
    assert isinstance(block, ir.Block)
    assert [item.buffer.name for item in block.stores] == ["g"]
    agree(whole)


def test_a_twin_that_is_read_late_stays_beside_its_master() -> None:
    whole = beside_its_master(readers=9)
    assert narrow_in_place(whole) is whole
