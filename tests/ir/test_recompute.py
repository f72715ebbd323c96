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
from stagedtensor.session import Session
from stagedtensor.statements import Apply, NumberLiteral, Statement
from stagedtensor.tensor import Tensor
from stagedtensor.terminals import param, placeholder
from tests.ir.programs import assign, at, forward, gradients, run, same_bits, solved

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
    assert "exp.again" not in [buffer.name for buffer in fused.temporaries], "a single reader computes it where it reads"


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
