"""Guards that keep every s-th value of a reduce iterator: solved, compiled and run, against the interpreter."""

from __future__ import annotations

import pytest

import stagedtensor as st
from stagedtensor.codegen import loop_ir as ir
from stagedtensor.codegen.schedule.congruent import solved
from stagedtensor.precision import f32, i64
from tests.run.blocks import ZERO, apply, at, axis, module, random_array, run_c, run_reference, same_bits, store


def upsampled(size: int, kernel: int, step: int, sign: int) -> ir.Block:
    """``dx[i, c] = sum over k of dy[(i - k) / step, c] * w[k]`` where that is a cell; ``sign`` 1 has i + k."""
    count = (size + kernel) // step + 1
    dy, w, dx = ir.Buffer("dy", f32, (count, 8)), ir.Buffer("w", f32, (kernel,)), ir.Buffer("dx", f32, (size, 8))
    i, c, k = axis("i", size), axis("c", 8), axis("k", kernel, "reduce")
    inner = apply("sub" if sign == -1 else "add", *at(i, k), prec=i64)
    quotient, zero = apply("floordiv", inner, ir.index(step), prec=i64), ir.index(0)
    tests = [
        apply("lt", apply("mod", inner, ir.index(step), prec=i64), ir.index(1), prec=i64),
        apply("ge", quotient, zero, prec=i64),
        apply("lt", quotient, ir.index(count), prec=i64),
    ]
    guard = apply("and", apply("and", tests[0], tests[1], prec=i64), tests[2], prec=i64)
    acc = ir.Symbol("acc", f32)
    update = ir.Fma(ir.Load(dy, (quotient, *at(c))), ir.Load(w, at(k)), ir.Var(acc))
    return ir.Block(
        "dx",
        (i, c, k),
        (store(dx, (i, c), ir.Var(acc)),),
        (ir.Accumulator(acc, ZERO, update, "add", ZERO),),
        guard=guard,
    )


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize(("size", "kernel", "step"), [(12, 2, 2), (13, 3, 2), (11, 5, 3), (9, 2, 4), (10, 7, 2)])
def test_strided_windows_turned_around(size: int, kernel: int, step: int, sign: int) -> None:
    block = upsampled(size, kernel, step, sign)
    changed = solved(block)
    assert sum(item.bound for item in changed.reduce) == (-(-kernel // step) if kernel > step else 0)
    whole = module(block)
    arrays = {buffer: random_array(buffer, seed) for seed, buffer in enumerate(whole.external)}
    expected = run_reference(whole, arrays)
    for one in (whole, module(changed)):
        got = run_c(one, arrays)
        for buffer in whole.external:
            assert same_bits(got[buffer], expected[buffer]), buffer.name


def test_a_pools_gradient_needs_no_loop() -> None:
    """Windows that do not overlap: each cell has one window, the guard says nothing more."""
    changed = solved(upsampled(12, 2, 2, -1))
    assert not changed.reduce
    assert not changed.accumulators
    assert changed.guard is None


def test_other_guards_stay() -> None:
    block = upsampled(12, 3, 1, -1)
    assert solved(block) is block


def test_the_gradient_of_a_pool_that_is_compiled_has_no_sums() -> None:
    with st.Session(), st.Context("cpu") as ctx:
        x = st.placeholder("x", batch=[2], output=[8, 8, 4], prec="f32", requires_grad=True)
        routine = ctx.compile(st.grad_update(st.sum(st.tanh(st.avg_pool2d(x, 2)))))
        (kernel,) = (item for item in routine.kernels if "x.grad" in item.writes)
    assert kernel.path.startswith("elementwise"), kernel.path
    assert "floormod" not in kernel.source
