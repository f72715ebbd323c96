"""Passes: each on small programs, what they keep (bits, order, visibility), and random programs with and without
fusion.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from stagedtensor.codegen import loop_ir as ir
from stagedtensor.codegen.effects import MAX_DEPTH, block_of, is_deep, kernel_name
from stagedtensor.codegen.passes.normalise_zeroing import normalise_zeroing
from stagedtensor.codegen.passes.place import Mode
from stagedtensor.codegen.pretty import pretty
from stagedtensor.functions.normalised import layer_norm, softmax
from stagedtensor.functions.pointwise import exp, maximum, relu, tanh, where
from stagedtensor.functions.reductions import max_, sum_
from stagedtensor.losses import cross_entropy
from stagedtensor.node import Placement, Specified
from stagedtensor.precision import Prec, bf16, f16, f32
from stagedtensor.session import Session
from stagedtensor.statements import Apply, NumberLiteral, Statement
from stagedtensor.tensor import Tensor, cast, place, tensor_of
from stagedtensor.terminals import cell, host_scalar, param, placeholder, state
from tests.ir.programs import assign, at, both, forward, gradients, modules, same_bits, solved

rng = np.random.default_rng(11)


@pytest.fixture(autouse=True)
def _session() -> Iterator[None]:
    with Session():
        yield


def specified(tensor: Tensor, prec: Prec) -> Tensor:
    """Give a tensor's value a precision."""
    tensor.node.specified = Specified(prec, tensor.node.source)
    return tensor


def kernels(statements: list[Statement], keep: list[Tensor], **options: Any) -> list[str]:
    """The kernel names of the fused module."""
    return [kernel.name for kernel in modules(solved(statements, keep=keep), **options)[1].kernels]


def store_texts(module: ir.Module) -> list[str]:
    """Every store, let and update of a module as text, comments left out."""
    lines = []
    for kernel in module.kernels:
        lines += [
            line.strip() for line in pretty(block_of(kernel)).splitlines()[1:] if not line.strip().startswith("#")
        ]
    return lines


# -- names ---------------------------------------------------------------------------------------------------------


def test_kernel_names() -> None:
    assert kernel_name(["w1.grad", "w1"]) == "w1_grad_w1"
    assert kernel_name(["a", "b", "c", "d"]) == "a_b_to_d"
    assert kernel_name(["1.5"]) == "k_1_5"


# -- zeroing -------------------------------------------------------------------------------------------------------


def test_zero_then_pointwise_accumulation_is_a_set_that_keeps_minus_zero() -> None:
    g, x = cell("g"), placeholder("x", prec="f32")
    steps = [assign(g, NumberLiteral(0.0)), assign(g, at(x), "add")]
    program = normalise_zeroing(solved(steps))
    assert [(step.op, step.reset) for step in program.statements] == [(None, False)]
    (value,) = both(solved(steps), {x: -0.0}, [g])
    assert np.signbit(value)


def test_zero_stays_where_it_is_seen() -> None:
    g, x, y = cell("g"), placeholder("x", prec="f32"), cell("y")
    zero, add = assign(g, NumberLiteral(0.0)), assign(g, at(x), "add")
    look = assign(y, at(g))
    assert len(normalise_zeroing(solved([zero, look, add])).statements) == 3
    doubled = assign(g, Apply("add", (at(g), at(x))), "add")
    assert len(normalise_zeroing(solved([zero, doubled])).statements) == 2
    assert len(normalise_zeroing(solved([zero])).statements) == 1


def test_zero_before_a_reduction_is_its_start() -> None:
    w = param("w", input=[4], output=[3])
    loss = sum_(w @ placeholder("x", output=[4], prec="f32")).named("loss")
    steps = gradients(loss)
    fills = [step for step in steps if step.text.endswith("=: 0")]
    program = normalise_zeroing(solved(steps, keep=[loss]))
    assert fills
    assert not [step for step in program.statements if step.text.endswith("=: 0")]


# -- placement and inlining ----------------------------------------------------------------------------------------


def decisions(statements: list[Statement], keep: list[Tensor]) -> dict[str, tuple[Mode, str]]:
    _, module = modules(solved(statements, keep=keep))
    return {node.label: (decision.mode, decision.reason) for node, decision in module.placements.items()}


def test_a_single_reader_inlines_with_the_rounding_kept() -> None:
    x = placeholder("x", output=[8], prec="bf16")
    y = exp((x * x).named("t")).named("y")
    assert store_texts(modules(solved(forward(y), keep=[y]))[1]) == [
        "let x_1: f32 = f32(x[output])",
        "y[output] = bf16(exp(f32(bf16(x_1 * x_1))))",
    ]


def test_costly_values_with_several_readers_keep_a_buffer_and_cheap_ones_do_not() -> None:
    x = placeholder("x", output=[8], prec="f32")
    costly, cheap = exp(x).named("costly"), (x * 2.0).named("cheap")
    a = sum_(costly + cheap)
    b = placeholder("b", batch=[3], output=[8], prec="f32") * costly * cheap
    found = decisions(forward(a, b), [a, b])
    assert found["costly"][0] is Mode.BUFFER
    assert found["cheap"][0] is Mode.VIRTUAL


def test_requests_are_followed() -> None:
    x = placeholder("x", output=[8], prec="f32")
    hidden, shown = exp(x).named("hidden"), (x + 1.0).named("shown")
    place(hidden, Placement.VIRTUAL)
    place(shown, Placement.MATERIALIZED)
    a, b = sum_(hidden), sum_(hidden * shown)
    found = decisions(forward(a, b), [a, b])
    assert found["hidden"] == (Mode.VIRTUAL, "virtual by request")
    assert found["shown"] == (Mode.BUFFER, "materialized by request")


def test_twins_are_virtual_for_elementwise_readers_and_stored_for_contractions() -> None:
    w, b = param("w", input=[4], output=[3], prec="f32"), param("b", output=[3], prec="f32")
    x = placeholder("x", batch=[5], output=[4], prec="bf16")
    y = (cast(w, "bf16") @ x + cast(b, "bf16")).named("y")
    found = decisions(forward(y), [y])
    assert found["w.bf16"][0] is Mode.BUFFER
    assert found["b.bf16"][0] is Mode.VIRTUAL


def test_a_value_is_not_recomputed_from_what_has_changed() -> None:
    p, q = param("p", output=[4], trainable=False), param("q", output=[4], trainable=False)
    old = (p * 3.0).named("old")
    steps = [*forward(old), assign(p, Apply("add", (at(p), NumberLiteral(1.0)))), assign(q, at(old))]
    found = decisions(steps, [])
    assert found["old"] == (Mode.LOCAL, "made and read in one kernel")
    got = both(solved(steps), {p: [1.0, 2.0, 3.0, 4.0]}, [p, q])
    assert got[0].tolist() == [2.0, 3.0, 4.0, 5.0]
    assert got[1].tolist() == [3.0, 6.0, 9.0, 12.0]


def test_in_place_update_may_read_the_old_value_of_its_own_cell_only() -> None:
    p = param("p", output=[4], trainable=False)
    old = (p * 3.0).named("old")
    own = [*forward(old), assign(p, at(old))]
    assert decisions(own, [])["old"][0] is Mode.VIRTUAL
    assert both(solved(own), {p: [1.0, 2.0, 3.0, 4.0]}, [p])[0].tolist() == [3.0, 6.0, 9.0, 12.0]


def test_accumulated_versions_round_one_by_one() -> None:
    x = placeholder("x", output=[4], prec="bf16")
    t, y = (x * 1.0).named("t"), cell("y", "bf16")
    y = specified((t + 0.0).named("y"), bf16)
    steps = [*forward(t), assign(t, NumberLiteral(1.0), "add"), assign(t, NumberLiteral(1.0), "add"), *forward(y)[1:]]
    got = both(solved(steps, keep=[y]), {x: [256.0, 255.0, 1.0, 0.5]}, [y])
    assert got[0].astype(float).tolist() == [256.0, 256.0, 3.0, 2.5]


def test_repeated_squares_do_not_grow_the_code() -> None:
    x = placeholder("x", output=[4], prec="f64")
    y = x
    for _ in range(24):
        y = y * y
    y.named("y")
    _, fused = modules(solved(forward(y), keep=[y]))
    assert len(fused.kernels) == 1
    assert len(block_of(fused.kernels[0]).lets) == 24


def test_long_chains_are_named_on_the_way() -> None:
    x = placeholder("x", output=[4], prec="f32")
    y = x
    for _ in range(150):
        y = relu(y * 0.5)
    y.named("y")
    program = solved(forward(y), keep=[y])
    _, fused = modules(program)
    (kernel,) = fused.kernels
    assert all(not is_deep(let.value, 3 * MAX_DEPTH) for let in block_of(kernel).lets)
    both(program, {x: [1.0, -1.0, 3e38, np.nan]}, [y])


# -- fusion --------------------------------------------------------------------------------------------------------


def test_bias_and_activation_join_the_contraction() -> None:
    w, b = param("w", input=[6], output=[4]), param("b", output=[4])
    y = relu(w @ placeholder("x", batch=[3], output=[6], prec="f32") + b).named("y")
    assert store_texts(modules(solved(forward(y), keep=[y]))[1]) == [
        "acc acc: f32 = 0.0 combine add neutral 0.0",
        "acc <- fma(w[output, contracted], x[batch, contracted], acc)",
        "y[batch, output] = relu(acc + b[output])",
    ]


def sgd(p: Tensor, lr: Tensor, momentum: bool = True) -> list[Statement]:
    gradient = p.node.gradient
    assert gradient is not None
    m = state(p, "momentum", "f32")
    return [
        assign(gradient, Apply("mul", (at(gradient), NumberLiteral(0.5)))),
        assign(m, Apply("add", (Apply("mul", (at(m), NumberLiteral(0.9))), at(gradient)))),
        assign(p, Apply("sub", (at(p), Apply("mul", (at(lr), at(m)))))),
    ]


def test_an_optimizer_is_one_sweep_per_parameter() -> None:
    lr = host_scalar("lr", 0.1)
    params = [param("w", input=[4], output=[3]), param("u", input=[4], output=[3])]
    for p in params:
        assert p.node.gradient is not None
        p.node.gradient.observable = True
    # what all parameters do first, then what all do second: the sweeps still meet
    parts = [sgd(p, lr) for p in params]
    steps = [step for stage in zip(*parts, strict=True) for step in stage]
    assert kernels(steps, []) == ["w_grad_w_momentum_w", "u_grad_u_momentum_u"]
    gradient = params[0].node.gradient
    assert gradient is not None
    both(solved(steps), {params[0]: 1.5, gradient: 3.0}, params)


def test_a_sweep_reads_the_rounded_value_it_stores() -> None:
    p = param("p", output=[4], prec="bf16", trainable=False)
    q = param("q", output=[4], prec="f32", trainable=False)
    steps = [assign(p, Apply("add", (at(p), NumberLiteral(1.0)))), assign(q, at(p))]
    assert kernels(steps, []) == ["p_q"]
    assert both(solved(steps), {p: [256.0, 1.0, 2.0, 3.0]}, [q])[0].tolist() == [256.0, 2.0, 3.0, 4.0]


def test_what_a_sweep_can_compute_is_not_stored_by_the_gradient() -> None:
    w = param("w", input=[6], output=[4])
    loss = sum_(w @ placeholder("x", batch=[3], output=[6], prec="f32")).named("loss")
    gradient = w.node.gradient
    assert gradient is not None
    gradient.observable = True
    scaled = (tensor_of(gradient) * 0.5).named("scaled")
    gate = host_scalar("gate", 1.0)
    steps = [
        *gradients(loss),
        *forward(scaled),
        assign(gradient, at(scaled)),
        assign(gate, Apply("mul", (at(gate), NumberLiteral(2.0)))),
        assign(w, Apply("where", (at(gate), at(scaled), at(w)))),
    ]
    module = modules(solved(steps, keep=[loss]))[1]
    assert "scaled" not in [buffer.name for buffer in module.temporaries]
    assert module.kernels[-1].name == "w_grad_w"


def test_sibling_reductions_share_a_kernel_and_contractions_do_not() -> None:
    x = placeholder("x", batch=[5], output=[7], prec="f32")
    a, b, c = sum_(x, "output").named("a"), max_(x, "output").named("b"), sum_(x * x, "output").named("c")
    assert kernels(forward(a, b, c), [a, b, c]) == ["a_b_c"]
    w, v = param("w", input=[7], output=[4]), param("v", input=[7], output=[4])
    d, e = (w @ x).named("d"), (v @ x).named("e")
    assert kernels(forward(d, e), [d, e]) == ["d", "e"]


def test_blocks_of_other_points_stay_apart() -> None:
    x = placeholder("x", output=[4, 4], prec="f32")
    y = exp(x).named("y")
    p = param("p", output=[4, 4], trainable=False)
    first = assign(p, at(y))
    total = sum_(p, ("output", 0)).named("total")
    steps = [*forward(y), first, *forward(total), assign(p, NumberLiteral(0.0))]
    values = rng.standard_normal((4, 4))
    names = kernels(steps, [y, total])
    assert names == ["y_p", "total", "p"]
    both(solved(steps, keep=[y, total]), {x: values}, [y, total, p])


def test_dead_statements_go_and_visible_ones_stay() -> None:
    x = placeholder("x", output=[4], prec="f32")
    unused, y = exp(x).named("unused"), (x + 1.0).named("y")
    assert kernels([*forward(unused), *forward(y)], [y]) == ["y"]
    assert kernels([*forward(unused), *forward(y)], [y, unused]) == ["unused_y"]


def test_softmax_and_layer_norm_in_bf16() -> None:
    x = placeholder("x", batch=[3], output=[16], prec="bf16")
    y, z = softmax(x).named("y"), layer_norm(x).named("z")
    values = rng.standard_normal((3, 16)).astype(np.float32).astype(ml_dtypes.bfloat16)
    got = both(solved(forward(y, z), keep=[y, z]), {x: values}, [y, z])
    a = values.astype(np.float64)
    shifted = np.exp(a - a.max(1, keepdims=True))
    np.testing.assert_allclose(got[0].astype(float), shifted / shifted.sum(1, keepdims=True), rtol=2.0**-8)
    centred = a - a.mean(1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(got[1].astype(float), expected, rtol=2.0**-8, atol=2.0**-9)


# -- narrow storage ------------------------------------------------------------------------------------------------


def narrow_program(prec: Prec, wide_inside: bool, placement: Placement) -> tuple[Tensor, Tensor, Tensor]:
    a, b = (placeholder(name, output=[517], prec=prec) for name in "ab")
    parts = [a * b]
    parts.append(parts[0] + a)
    parts.append(a + b)
    parts.append(parts[2] * b)
    y = parts[1] * parts[3]
    for part in parts:
        place(part, placement)
        if wide_inside:
            specified(part, f32)
    return a, b, specified(y, prec).named("y")


@pytest.mark.parametrize("prec", [bf16, f16])
def test_narrow_storage_is_that_of_buffers_however_it_is_placed(prec: Prec) -> None:
    n = np.arange(517)
    av, bv = 0.125 + (n % 23) * 0.3125, 0.5 + (n % 17) * 0.1875
    dtype = prec.numpy_dtype
    x, z = av.astype(np.float32).astype(dtype), bv.astype(np.float32).astype(dtype)
    wide_x, wide_z = x.astype(np.float32), z.astype(np.float32)

    def rounded(values: Any) -> Any:
        return values.astype(dtype).astype(np.float32)

    each = rounded(rounded(rounded(wide_x * wide_z) + wide_x) * rounded(rounded(wide_x + wide_z) * wide_z)).astype(
        dtype
    )
    once = (((wide_x * wide_z) + wide_x) * ((wide_x + wide_z) * wide_z)).astype(dtype)
    differing = {}
    for wide_inside, expected in ((False, each), (True, once)):
        for placement in (Placement.AUTO, Placement.VIRTUAL, Placement.MATERIALIZED):
            with Session():
                a, b, y = narrow_program(prec, wide_inside, placement)
                (value,) = both(solved(forward(y), keep=[y]), {a: x, b: z}, [y])
            same_bits(value, expected)
        differing[wide_inside] = value
    assert int((differing[True] != differing[False]).sum()) == {bf16: 145, f16: 81}[prec]


def test_the_fused_kernel_rounds_five_times_or_once() -> None:
    for wide_inside, roundings in ((False, 5), (True, 1)):
        with Session():
            _, _, y = narrow_program(bf16, wide_inside, Placement.AUTO)
            _, fused = modules(solved(forward(y), keep=[y]))
        assert len(fused.kernels) == 1
        assert "\n".join(store_texts(fused)).count("bf16(") == roundings


# -- whole steps and random programs -------------------------------------------------------------------------------


@pytest.mark.parametrize("prec", ["f32", "bf16", "f16"])
def test_a_training_step_is_the_same_with_and_without_fusion(prec: str) -> None:
    x = placeholder("x", batch=[8], output=[12], prec=prec)
    labels = placeholder("labels", batch=[8], prec="i32")
    w1, b1 = param("w1", input=[12], output=[16]), param("b1", output=[16])
    w2, b2 = param("w2", input=[16], output=[5]), param("b2", output=[5])
    loss = cross_entropy(w2 @ relu(w1 @ x + b1) + b2, labels).named("loss")
    params, lr = [w1, b1, w2, b2], host_scalar("lr", 0.5)
    steps = gradients(loss)
    for p in params:
        steps += sgd(p, lr)
    values: dict[Any, Any] = {x: rng.standard_normal((8, 12)), labels: rng.integers(0, 5, 8)}
    for p, shape in zip(params, [(16, 12), (16,), (5, 16), (5,)], strict=True):
        values[p] = rng.standard_normal(shape) * 0.3
    program = solved(steps, keep=[loss])
    got = both(program, values, [loss, *params])
    moved = [np.abs(value.astype(float) - values[p]).max() for value, p in zip(got[1:], params, strict=True)]
    assert min(moved) > 1e-3
    assert len(modules(program)[1].kernels) <= 12


OPS: list[Any] = [
    lambda a, b: a + b,
    lambda a, b: a * b,
    lambda a, b: a - b,
    lambda a, _: exp(a * 0.1),
    lambda a, _: relu(a),
    lambda a, _: tanh(a),
    maximum,
    lambda a, b: where(a > 0.0, a, b),
    lambda a, b: a + sum_(b, "output", keepdims=True),
    lambda a, b: a - max_(b, "batch", keepdims=True),
    lambda a, _: cast(cast(a, "bf16"), "f32"),
    lambda a, _: cast(a, "f16"),
]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    choices=st.lists(
        st.tuples(st.integers(0, len(OPS) - 1), st.integers(0, 9), st.integers(0, 9)), min_size=3, max_size=14
    ),
    updates=st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 9), st.sampled_from(["set", "add", "sub"])), max_size=5
    ),
    prec=st.sampled_from(["f32", "bf16", "f16", "f64"]),
)
def test_random_programs_are_the_same_with_and_without_fusion(
    choices: list[tuple[int, int, int]], updates: list[tuple[int, int, str]], prec: str
) -> None:
    with Session():
        x, y = (placeholder(name, batch=[3], output=[4], prec=prec) for name in "xy")
        values = [x, y]
        for kind, left, right in choices:
            values.append(OPS[kind](values[left % len(values)], values[right % len(values)]))
        states = [param(name, output=[4], prec=prec, trainable=False) for name in ("p", "q")]
        totals = [sum_(value, "batch") for value in values[-3:]]
        steps = forward(*values, *totals)
        for which, source, op in updates:
            read: Any = (*totals, *states)[source % 5]
            steps.append(
                assign(states[which], Apply("mul", (at(read), NumberLiteral(0.5))), None if op == "set" else op)
            )
            if source % 2:
                late = sum_(values[source % len(values)] * states[which])
                steps += [step for step in forward(late) if step not in steps]
                totals.append(late)
        keep = [values[-1], *totals]
        data = np.random.default_rng(len(choices))
        feeds = {item: data.standard_normal((3, 4)) for item in (x, y)} | {
            item: data.standard_normal(4) for item in states
        }
        both(solved(steps, keep=[*keep, *states]), feeds, [*keep, *states])
