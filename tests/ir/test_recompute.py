"""Recomputation: which values are computed again, where, and that no bit changes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from stagedtensor.codegen import loop_ir as ir
from stagedtensor.codegen.effects import block_of
from stagedtensor.codegen.lower import lower
from stagedtensor.codegen.passes.fuse import fuse
from stagedtensor.codegen.passes.inline import inline
from stagedtensor.codegen.passes.prune import prune
from stagedtensor.codegen.passes.recompute import recompute
from stagedtensor.codegen.verify import verify
from stagedtensor.functions.attention import attention
from stagedtensor.functions.pointwise import exp, tanh
from stagedtensor.functions.reductions import sum_
from stagedtensor.node import Node
from stagedtensor.numerics import Numerics
from stagedtensor.precision import Prec, bf16, f32
from stagedtensor.session import Session
from stagedtensor.statements import Apply, NumberLiteral, Statement
from stagedtensor.tensor import Tensor
from stagedtensor.terminals import param, placeholder
from tests.ir.programs import assign, at, forward, gradients, run, same_bits, solved
from tests.run import blocks

rng = np.random.default_rng(5)


@pytest.fixture(autouse=True)
def _session() -> Iterator[None]:
    with Session():
        yield


def inlined(statements: list[Statement], keep: list[Tensor | Node]) -> ir.Module:
    """The module that recomputation gets."""
    return inline(prune(lower(solved(statements, keep=keep), Numerics(), "cpu")))


def again(module: ir.Module, *, scarce: int = 0, large: int = 0) -> ir.Module:
    """The module with recomputation wherever it is legal (more than a little work under ``scarce`` and ``large``)."""
    result = recompute(module, least_peak=0, scarce=scarce, least_bytes=64, large=large)
    verify(result)
    return result


def copies(module: ir.Module) -> list[str]:
    """Names of the buffers that are computed again."""
    names = [store.buffer.name for kernel in module.kernels for store in block_of(kernel).stores]
    return [name.removesuffix(".again") for name in names if name.endswith(".again")]


def values(*tensors: Tensor) -> dict[Node, np.ndarray]:
    """Random values of tensors, by their shapes."""
    made = {}
    for tensor in tensors:
        assert tensor.shape is not None
        made[tensor.node] = rng.standard_normal(tensor.shape.dims).astype(np.float32)
    return made


def equal(left: ir.Module, right: ir.Module, given: dict[Node, np.ndarray], wanted: list[Node]) -> None:
    """Assert that both modules leave the same bits."""
    a, b = run(left, given), run(right, given)
    for node in wanted:
        same_bits(a[node], b[node])


def long_way(start: Tensor, mixer: Tensor, steps: int = 5) -> Tensor:
    """A chain of products that need one another."""
    result = start
    for _ in range(steps):
        result = mixer @ result * 0.1
    return result


def test_a_late_reader_gets_a_copy_and_the_same_bits() -> None:
    x = placeholder("x", batch=[16], output=[16], prec="f32")
    mixer = param("mixer", input=[16], output=[16])
    e = exp(x)
    y = (tanh(long_way(mixer @ e, mixer)) * e).named("y")
    module = inlined(forward(y), [y])
    late = again(module)
    assert copies(late) == ["exp"]
    assert late.recomputed == 16 * 16 * 4
    order = [store.buffer.name for kernel in late.kernels for store in block_of(kernel).stores]
    assert order.index("exp.again") == order.index("y") - 1
    fused = fuse(inline(late))
    verify(fused)
    made = values(x, mixer)
    equal(module, late, made, [y.node])
    equal(module, fused, made, [y.node])
    assert "exp.again" not in [buffer.name for buffer in fused.temporaries], (
        "a single reader computes it where it reads"
    )


def test_products_with_weights_are_kept() -> None:
    x = placeholder("x", batch=[16], output=[16], prec="f32")
    mixer = param("mixer", input=[16], output=[16])
    h = mixer @ x
    y = (long_way(mixer @ h, mixer) * h).named("y")
    module = inlined(forward(y), [y])
    assert again(module) is module


def test_a_value_whose_operand_changes_is_kept() -> None:
    p, rest = param("p", input=[16], output=[16]), param("rest", input=[16], output=[16])
    e = exp(p)
    early, late = (rest @ e).named("early"), (long_way(rest @ e, rest) * e).named("late")
    statements = [*forward(early), assign(p, Apply("sub", (at(p), NumberLiteral(1.0)))), *forward(late)[1:]]
    assert copies(again(inlined(statements, [early, late]))) == []


def attended() -> tuple[list[Tensor], Tensor, list[Statement]]:
    """Attention over attention: while the second one's gradients are computed, the first one's scores would wait."""
    q, k, v = (placeholder(name, batch=[2, 16], output=[2, 4], prec="f32", requires_grad=True) for name in "qkv")
    loss = sum_(tanh(attention(attention(q, k, v, causal=True), k, v)), None).named("loss")
    return [q, k, v], loss, gradients(loss)


def test_attention_computes_its_scores_again_where_memory_is_scarce() -> None:
    operands, loss, statements = attended()
    wanted = [item.node.gradient for item in operands if item.node.gradient is not None]
    assert len(wanted) == 3
    for node in wanted:
        node.observable = True
    module = inlined(statements, [loss])
    assert "scores" not in copies(again(module, scarce=1 << 40)), "more than a little work"
    assert "scores" not in copies(again(module, large=4096)), "no larger than that"
    late = again(module)
    assert {"scores", "scaled_scores", "softmax_quotient"} <= set(copies(late))
    assert late.recomputed > 0
    fused = fuse(inline(late))
    verify(fused)
    made = values(*operands)
    equal(module, late, made, [loss.node, *wanted])
    equal(module, fused, made, [loss.node, *wanted])


def test_small_programs_stay_as_they_are() -> None:
    module = inlined(attended()[2], [])
    assert recompute(module) is module


ROWS, WIDTH, NARROW = 64, 256, 16


def matrix(name: str, rows: int, columns: int, prec: Prec = f32) -> ir.Buffer:
    return ir.Buffer(name, prec, (rows, columns))


def pointwise(target: ir.Buffer, op: str, *operands: ir.Buffer) -> ir.Block:
    i, j = (blocks.axis(name, extent) for name, extent in zip("ij", target.shape, strict=True))
    value = blocks.apply(op, *(blocks.load(operand, i, j) for operand in operands))
    return ir.Block(target.name, (i, j), (blocks.store(target, (i, j), value),))


def meanwhile(terms: int) -> tuple[list[ir.Block], list[ir.Buffer]]:
    """Products of ``terms`` terms: while the second runs, most bytes are alive."""
    first, second = matrix("first", ROWS, terms), matrix("second", ROWS, WIDTH)
    made = [
        blocks.contraction(matrix("a", ROWS, terms), matrix("b", terms, terms), first, (ROWS, terms, terms), "NN"),
        blocks.contraction(first, matrix("c", terms, WIDTH), second, (ROWS, WIDTH, terms), "NN"),
        pointwise(matrix("seen", ROWS, WIDTH), "neg", second),
    ]
    return made, [first, second]


def with_sums(prec: Prec, terms: int) -> ir.Module:
    """Sums of a product of two operands in ``prec``, read at once and once more at the end."""
    h, x, w = matrix("h", ROWS, WIDTH), matrix("x", ROWS, NARROW, prec), matrix("w", WIDTH, NARROW, prec)
    between, temporaries = meanwhile(terms)
    return blocks.module(
        blocks.contraction(x, w, h, (ROWS, WIDTH, NARROW), "NT"),
        pointwise(matrix("early", ROWS, WIDTH), "exp", h),
        *between,
        pointwise(matrix("late", ROWS, WIDTH), "tanh", h),
        temporaries=(h, *temporaries),
    )


def test_wide_sums_of_narrow_operands_are_computed_again_where_other_products_are_much_more_work() -> None:
    whole = with_sums(bf16, WIDTH)
    late = again(whole)
    assert copies(late) == ["h"]
    given = {buffer: blocks.random_array(buffer, seed) for seed, buffer in enumerate(whole.external)}
    before, after = blocks.run_reference(whole, given), blocks.run_reference(late, given)
    for buffer in whole.external:
        assert blocks.same_bits(before[buffer], after[buffer])
    assert copies(again(with_sums(f32, WIDTH))) == [], "the operands are as wide as the sums"
    assert copies(again(with_sums(bf16, 2 * NARROW))) == [], "the other products are too little work"


def test_the_sweep_that_shares_a_copys_operands_goes_before_the_copys_reader() -> None:
    h, y, dx = (matrix(name, ROWS, WIDTH) for name in ("h", "y", "dx"))
    g, w = matrix("g", ROWS, WIDTH), matrix("w", WIDTH, WIDTH)
    between, temporaries = meanwhile(WIDTH)
    whole = blocks.module(
        blocks.contraction(matrix("x", ROWS, WIDTH), w, h, (ROWS, WIDTH, WIDTH), "NN"),
        pointwise(y, "exp", h),
        blocks.contraction(y, w, matrix("out", ROWS, WIDTH), (ROWS, WIDTH, WIDTH), "NN"),
        *between,
        blocks.contraction(y, g, matrix("dw", WIDTH, WIDTH), (WIDTH, WIDTH, ROWS), "TN"),
        blocks.contraction(g, w, dx, (ROWS, WIDTH, WIDTH), "NT"),
        pointwise(matrix("dh", ROWS, WIDTH), "mul", dx, h),
        temporaries=(h, y, dx, *temporaries),
    )
    late = again(whole)
    order = [store.buffer.name for kernel in late.kernels for store in block_of(kernel).stores]
    assert order[-4:] == ["dx", "y.again", "dw", "dh"]
    fused = fuse(late)
    verify(fused)
    last = [[store.buffer.name for store in block_of(kernel).stores] for kernel in fused.kernels[-2:]]
    assert last == [["y.again", "dh"], ["dw"]]
