"""C text: kernels as goldens, literals, names, precedence, barriers and the memory plan."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from stagedtensor.codegen import loop_ir as ir
from stagedtensor.codegen.emit.barriers import barriers_before
from stagedtensor.codegen.emit.c import emit_module
from stagedtensor.codegen.emit.c_like import C_OPS, CDialect, ExpressionPrinter, literal
from stagedtensor.codegen.emit.names import Names, sanitise
from stagedtensor.codegen.passes.plan_memory import plan_memory
from stagedtensor.codegen.schedule import schedule
from stagedtensor.numerics import Numerics
from stagedtensor.op_table import OPS
from stagedtensor.precision import Prec, bf16, f32, f64, i8, i32, i64, u32
from stagedtensor.runtime.target import target
from tests.run.blocks import ZERO, apply, axis, contraction, load, module, store
from tests.run.test_schedule_c import summed

TARGET = target("avx512")


def text(whole: ir.Module) -> str:
    return emit_module(schedule(whole, TARGET, Numerics()), TARGET, prelude=False).text


def test_dense_layer(golden: Callable[[str], None]) -> None:
    x, w, b, h = (
        ir.Buffer("x", bf16, (32, 64)),
        ir.Buffer("w1", bf16, (64, 128)),
        ir.Buffer("b1", bf16, (128,)),
        ir.Buffer("h", bf16, (32, 128)),
    )
    block = contraction(
        x, w, h, (32, 128, 64), "NN", lambda value, i, j: apply("relu", apply("add", value, load(b, j)))
    )
    golden(text(module(block)))


def test_elementwise_with_selection(golden: Callable[[str], None]) -> None:
    x, y = ir.Buffer("x.value", f32, (1000,)), ir.Buffer("double", f32, (1000,))
    i = axis("element", 1000)
    cell = load(x, i)
    test = apply(
        "or", apply("lt", cell, ir.Const(-1.5, f32)), apply("and", cell, apply("not", apply("ge", cell, ZERO)))
    )
    value = apply("where", test, apply("mul", cell, apply("sub", cell, apply("add", cell, ZERO))), apply("neg", cell))
    golden(text(module(ir.Block("double", (i,), (store(y, [i], value),)))))


def test_row_sum_and_parts(golden: Callable[[str], None]) -> None:
    x, rows, total = ir.Buffer("x", f32, (300, 301)), ir.Buffer("rows", f32, (300,)), ir.Buffer("total", f32, ())
    golden(text(module(summed(x, rows, 1), summed(x, total, 1))))


def test_same_text_twice_and_whatever_was_printed_before() -> None:
    def whole() -> ir.Module:
        a, b, c = ir.Buffer("a", f32, (9, 8)), ir.Buffer("b", f32, (8, 20)), ir.Buffer("c", f32, (9, 20))
        return module(contraction(a, b, c, (9, 20, 8), "NN"))

    assert text(whole()) == text(whole())


@pytest.mark.parametrize(
    ("value", "prec", "expected"),
    [
        (0.1, f64, "0.1"),
        (0.10000000149011612, f32, "0.1f"),
        (1.0, f32, "1.0f"),
        (-0.0, f32, "-0.0f"),
        (1e30, f64, "1e+30"),
        (float("inf"), f32, "st_from_bits_f32(0x7f800000u)"),
        (float("-inf"), f64, "-st_from_bits_f64(0x7ff0000000000000u)"),
        (float("nan"), f32, "st_from_bits_f32(0x7fc00000u)"),
        (-(2**63), i64, "INT64_MIN"),
        (-(2**31), i32, "INT32_MIN"),
        (-5, i8, "-5"),
        (2**32 - 1, u32, "4294967295u"),
    ],
)
def test_literals(value: float, prec: Prec, expected: str) -> None:
    assert literal(value, prec)[0].code == expected


def test_names_avoid_keywords_libraries_and_each_other() -> None:
    names = Names()
    given = [
        names.give(object(), hint) for hint in ("double", "exp", "w1", "w1", "w1 2", "st_exp_f32", "", "__x", "nan")
    ]
    assert given == ["double_2", "exp_2", "w1", "w1_2", "w1_2_2", "v_st_exp_f32", "v", "x", "nan_2"]
    assert len(set(given)) == len(given)
    assert not {"double", "exp", "nan"} & set(given)
    assert sanitise("größe/1") == "gr_e_1"


def test_names_are_free_again_after_their_scope() -> None:
    names = Names()
    names.push()
    assert names.give("a", "i_k") == "i_k"
    names.pop()
    assert names.give("b", "i_k") == "i_k"


def test_precedence_prints_needed_parentheses_only() -> None:
    names = Names()
    a, b, c = (ir.Symbol(hint, f32) for hint in "abc")
    for symbol in (a, b, c):
        names.give(symbol, symbol.hint)
    printer = ExpressionPrinter(CDialect(), names)
    x, y, z = ir.Var(a), ir.Var(b), ir.Var(c)
    cases = {
        "a + b * c": apply("add", x, apply("mul", y, z)),
        "(a + b) * c": apply("mul", apply("add", x, y), z),
        "a + b + c": apply("add", apply("add", x, y), z),
        "a + (b + c)": apply("add", x, apply("add", y, z)),
        "a - (b - c)": apply("sub", x, apply("sub", y, z)),
        "a / (b * c)": apply("div", x, apply("mul", y, z)),
        "-(-a)": apply("neg", apply("neg", x)),
        "-(a + b)": apply("neg", apply("add", x, y)),
        "(float)(a < b + c)": apply("lt", x, apply("add", y, z)),
        "a > 0.0f && (b != 0.0f || c == 0.0f) ? a : b": apply(
            "where", apply("and", apply("gt", x, ZERO), apply("or", y, apply("not", z))), x, y
        ),
        "a + (b > c ? b : c)": apply("add", x, apply("where", apply("gt", y, z), y, z)),
    }
    assert {expected: printer.text(expr) for expected, expr in cases.items()} == {key: key for key in cases}


def test_every_op_has_c_text() -> None:
    assert set(OPS) == C_OPS


# -- barriers and memory ------------------------------------------------------------------------------------------


def chain(size: int, count: int) -> ir.Module:
    """``count`` elementwise kernels, each reading what the one before wrote."""
    whole = [ir.Buffer(f"t{place}", f32, (size,)) for place in range(count + 1)]
    blocks = []
    for source, result in pairwise(whole):
        i = axis("i", size)
        blocks.append(ir.Block(result.name, (i,), (store(result, [i], apply("exp", load(source, i))),)))
    return schedule(module(*blocks, temporaries=whole[1:-1]), TARGET, Numerics())


def test_no_barrier_where_each_thread_keeps_its_cells() -> None:
    whole = chain(100_000, 4)
    assert barriers_before(whole, plan_memory(whole)) == (False,) * 4


def test_no_barrier_between_kernels_of_thread_0() -> None:
    whole = chain(100, 3)
    assert barriers_before(whole, plan_memory(whole)) == (False,) * 3


def test_barrier_where_a_kernel_reads_what_other_threads_wrote() -> None:
    x, y, z = ir.Buffer("x", f32, (500, 400)), ir.Buffer("y", f32, (500, 400)), ir.Buffer("z", f32, (400, 500))
    i, j, r, s = axis("i", 500), axis("j", 400), axis("r", 400), axis("s", 500)
    whole = module(
        ir.Block("y", (i, j), (store(y, (i, j), apply("exp", load(x, i, j))),)),
        ir.Block("z", (r, s), (store(z, (r, s), load(y, s, r)),)),
        temporaries=(y,),
    )
    done = schedule(whole, TARGET, Numerics())
    assert barriers_before(done, plan_memory(done)) == (False, True)


def test_elementwise_results_take_the_place_of_their_operands() -> None:
    whole = chain(100_000, 5)
    plan = plan_memory(whole)
    assert plan.peak == 400_000
    assert plan.saved == 3 * 400_000
    assert [item.offset for item in plan.placements] == [0, 0, 0, 0]
    assert "t1" in emit_module(whole, TARGET, prelude=False).text


def test_live_buffers_never_overlap() -> None:
    whole = chain(1000, 4)
    x = whole.external[0]
    (i,) = (axis("i", 1000),)
    late = schedule(module(ir.Block("out", (i,), (store(x, [i], load(whole.temporaries[0], i)),))), TARGET, Numerics())
    longer = ir.Module("m", (*whole.kernels, *late.kernels), whole.external, whole.temporaries)
    plan = plan_memory(longer)
    items = plan.placements
    for first in items:
        assert first.offset % 64 == 0
        for second in items:
            together = first.first <= second.last and second.first <= first.last
            apart = first.offset + first.nbytes <= second.offset or second.offset + second.nbytes <= first.offset
            chained = second.in_place_of is not None or first.in_place_of is not None
            assert first is second or not together or apart or chained
    kept = next(item for item in items if item.buffer is whole.temporaries[0])
    for item in items:
        if item.buffer is not kept.buffer:
            assert item.offset >= kept.offset + kept.nbytes or item.offset + item.nbytes <= kept.offset


def test_lines_lead_back_to_the_users_code() -> None:
    a, b, c = ir.Buffer("a", f32, (9, 8)), ir.Buffer("b", f32, (8, 20)), ir.Buffer("c", f32, (9, 20))
    source = emit_module(schedule(module(contraction(a, b, c, (9, 20, 8), "NN")), TARGET, Numerics()), TARGET)
    lines = source.text.splitlines()
    inside = next(number for number, line in enumerate(lines, 1) if line.lstrip().startswith("st_multiply_f32_"))
    assert source.locate(inside) == "model.py:1: c = a @ b"
    assert source.locate(1) is None
    for kernel in source.kernels:
        assert "\n".join(lines[kernel.lines[0] - 1 : kernel.lines[1]]) + "\n" == kernel.text
