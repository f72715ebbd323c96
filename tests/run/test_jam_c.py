"""Row kernels jammed into one: which are, which must not be, what happens to memory; compiled against the interpreter."""

from __future__ import annotations

from stagedtensor.codegen import loop_ir as ir
from stagedtensor.codegen.passes.hoist import hoist
from stagedtensor.codegen.passes.jam import jam
from stagedtensor.codegen.passes.plan_memory import plan_memory
from stagedtensor.codegen.schedule import schedule
from stagedtensor.codegen.verify import verify
from stagedtensor.numerics import Numerics
from stagedtensor.precision import f32
from stagedtensor.runtime.target import target
from tests.run.blocks import apply, axis, load, module, random_array, run_c, run_reference, same_bits, store

ROWS, WIDTH = 130, 200


def greatest(x: ir.Buffer, result: ir.Buffer, *, along_rows: bool = False) -> ir.Block:
    """``result[i] = max over j of x[i, j]``, or of x[j, i]."""
    count, length = (x.shape[1], x.shape[0]) if along_rows else x.shape
    i, j = axis("i", count), axis("j", length, "reduce")
    acc = ir.Symbol("acc", f32)
    least = ir.Const(float("-inf"), f32)
    value = load(x, j, i) if along_rows else load(x, i, j)
    update = apply("maximum", ir.Var(acc), value)
    accumulator = ir.Accumulator(acc, least, update, "max", least)
    return ir.Block(result.name, (i, j), (store(result, (i,), ir.Var(acc)),), (accumulator,))


def centred(x: ir.Buffer, top: ir.Buffer, result: ir.Buffer) -> ir.Block:
    """``result[i, j] = x[i, j] - top[i]``."""
    i, j = axis("i", x.shape[0]), axis("j", x.shape[1])
    return ir.Block(result.name, (i, j), (store(result, (i, j), apply("sub", load(x, i, j), load(top, i))),))


def jammed(whole: ir.Module) -> ir.Module:
    result = jam(hoist(schedule(whole, target("avx512"), Numerics())))
    verify(result)
    return result


def agrees(whole: ir.Module) -> None:
    arrays = {buffer: random_array(buffer, seed) for seed, buffer in enumerate(whole.external)}
    expected = run_reference(whole, arrays)
    for threads in (1, 3):
        got = run_c(whole, arrays, threads=threads)
        assert all(same_bits(got[buffer], expected[buffer]) for buffer in whole.external), threads


def test_passes_over_the_same_rows_become_one_kernel() -> None:
    x, y = (ir.Buffer(name, f32, (ROWS, WIDTH)) for name in "xy")
    top, low = (ir.Buffer(name, f32, (ROWS,)) for name in ("top", "low"))
    z = ir.Buffer("z", f32, (ROWS, WIDTH))
    whole = module(
        greatest(x, top), centred(x, top, y), greatest(y, low), centred(y, low, z), temporaries=(top, low, y)
    )
    (kernel,) = jammed(whole).kernels
    assert kernel.path.count("in the same rows") == 3
    agrees(whole)


def test_what_another_row_writes_keeps_kernels_apart() -> None:
    x, y = (ir.Buffer(name, f32, (ROWS, ROWS)) for name in "xy")
    top, low = (ir.Buffer(name, f32, (ROWS,)) for name in ("top", "low"))
    whole = module(greatest(x, top), centred(x, top, y), greatest(y, low, along_rows=True), temporaries=(top, y))
    assert len(jammed(whole).kernels) == 2
    agrees(whole)


def test_other_extents_keep_kernels_apart() -> None:
    x, y = ir.Buffer("x", f32, (ROWS, WIDTH)), ir.Buffer("y", f32, (WIDTH, ROWS))
    tops = [ir.Buffer("a", f32, (ROWS,)), ir.Buffer("b", f32, (WIDTH,))]
    assert len(jammed(module(greatest(x, tops[0]), greatest(y, tops[1]))).kernels) == 2


def flat(op: str, x: ir.Buffer, result: ir.Buffer) -> ir.Block:
    """``result = op(x)``, cell by cell."""
    i, j = axis("i", x.shape[0]), axis("j", x.shape[1])
    return ir.Block(result.name, (i, j), (store(result, (i, j), apply(op, load(x, i, j))),))


def test_a_jammed_result_takes_the_place_of_rows_that_are_done_with() -> None:
    x, y, z, out = (ir.Buffer(name, f32, (ROWS, WIDTH)) for name in ("x", "y", "z", "out"))
    low = ir.Buffer("low", f32, (ROWS,))
    whole = module(
        flat("abs", x, y), greatest(y, low), centred(y, low, z), flat("neg", z, out), temporaries=(y, z, low)
    )
    scheduled = jammed(whole)
    plan = plan_memory(scheduled)
    assert [kernel.name for kernel in scheduled.kernels] == ["y", "z", "out"]
    assert plan.offsets[y] == plan.offsets[z]
    agrees(whole)


def test_rows_that_are_read_again_keep_their_place() -> None:
    x, y, z, out = (ir.Buffer(name, f32, (ROWS, WIDTH)) for name in ("x", "y", "z", "out"))
    low, top = (ir.Buffer(name, f32, (ROWS,)) for name in ("low", "top"))
    whole = module(
        flat("abs", x, y),
        greatest(y, low),
        centred(y, low, z),
        greatest(y, top),
        flat("neg", z, out),
        temporaries=(y, z, low),
    )
    scheduled = jammed(whole)
    plan = plan_memory(scheduled)
    assert len(scheduled.kernels) == 3
    assert plan.offsets[y] != plan.offsets[z]
    agrees(whole)
