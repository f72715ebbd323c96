"""Values that are only needed in a narrow format, or are in it anyway, are stored in it; no bit changes."""

from __future__ import annotations

import pytest

from stagedtensor.codegen import loop_ir as ir
from stagedtensor.codegen.passes.narrow import narrow
from stagedtensor.codegen.rewrite import buffers_written
from stagedtensor.codegen.verify import verify
from stagedtensor.precision import Prec, bf16, f16, f32
from tests.run.blocks import apply, at, axis, load, module, random_array, run_reference, same_bits, store

COUNT = 40


@pytest.fixture
def points() -> ir.BlockIterator:
    return axis("i", COUNT)


def buffer(name: str, prec: Prec = f32) -> ir.Buffer:
    return ir.Buffer(name, prec, (COUNT,))


def rounded(value: ir.Expr, prec: Prec) -> ir.Expr:
    """``value`` taken through a format, as f32."""
    return ir.Cast(ir.Cast(value, prec), f32)


def block(target: ir.Buffer, i: ir.BlockIterator, value: ir.Expr) -> ir.Block:
    return ir.Block(target.name, (i,), (store(target, (i,), value),))


def formats(whole: ir.Module) -> dict[str, Prec]:
    return {made.name: made.type for kernel in whole.kernels for made in buffers_written(kernel.body)}


def same_results(whole: ir.Module, results: tuple[ir.Buffer, ...]) -> None:
    """Assert that the pass changes no bit of what can be seen."""
    given = {item: random_array(item, 3) for item in whole.external}
    before, after = run_reference(whole, given), run_reference(narrow(whole), given)
    for item in results:
        assert same_bits(before[item], after[item])


def test_a_value_that_all_readers_round_is_rounded_once(points: ir.BlockIterator) -> None:
    x, value, y, z = buffer("x"), buffer("value"), buffer("y", bf16), buffer("z")
    whole = module(
        block(value, points, apply("mul", load(x, points), load(x, points))),
        block(y, points, ir.Load(value, at(points))),
        block(z, points, apply("exp", rounded(ir.Load(value, at(points)), bf16))),
        temporaries=(value,),
    )
    result = narrow(whole)
    verify(result)
    assert formats(result)["value"] is bf16
    same_results(whole, (y, z))


@pytest.mark.parametrize("other", ["as it is", "another format"])
def test_a_value_that_one_reader_needs_whole_stays(points: ir.BlockIterator, other: str) -> None:
    x, value, y, z = buffer("x"), buffer("value"), buffer("y", bf16), buffer("z")
    cell = ir.Load(value, at(points))
    whole = module(
        block(value, points, apply("mul", load(x, points), load(x, points))),
        block(y, points, cell),
        block(z, points, cell if other == "as it is" else rounded(cell, f16)),
        temporaries=(value,),
    )
    assert formats(narrow(whole))["value"] is f32


def test_a_value_of_the_format_is_stored_in_it_whoever_reads_it(points: ir.BlockIterator) -> None:
    h, gate, g, copy, y = buffer("h", bf16), buffer("gate"), buffer("g"), buffer("copy", bf16), buffer("y")
    held = apply("where", load(gate, points), ir.Cast(ir.Load(h, at(points)), f32), ir.Const(0.0, f32))
    whole = module(
        block(g, points, held),
        block(copy, points, ir.Load(g, at(points))),
        block(y, points, apply("exp", ir.Load(g, at(points)))),
        temporaries=(g,),
    )
    result = narrow(whole)
    verify(result)
    assert formats(result)["g"] is bf16
    # the copy is the value itself
    (made,) = (kernel.body[0] for kernel in result.kernels if kernel.name == "copy")
    assert isinstance(made, ir.Block)
    assert isinstance(made.stores[0].value, ir.Load)
    same_results(whole, (copy, y))


def test_sums_in_place_and_values_of_earlier_runs_stay(points: ir.BlockIterator) -> None:
    x, twice, y = buffer("x"), buffer("twice"), buffer("y", bf16)
    cell = ir.Load(twice, at(points))
    whole = module(
        block(twice, points, load(x, points)),
        block(twice, points, apply("add", cell, load(x, points))),
        block(y, points, cell),
        temporaries=(twice,),
    )
    assert formats(narrow(whole))["twice"] is f32


def test_what_others_see_stays(points: ir.BlockIterator) -> None:
    x, value, y = buffer("x"), buffer("value"), buffer("y", bf16)
    whole = module(
        block(value, points, load(x, points)),
        block(y, points, ir.Load(value, at(points))),
    )
    assert narrow(whole) is whole
