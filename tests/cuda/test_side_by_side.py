"""Independent kernels share a launch: what goes together, what stays apart, and that nothing is computed differently."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor.benchmarks.ours import model
from stagedtensor.benchmarks.workloads import LOSS_SCALE, MOMENTUM, WORKLOADS
from stagedtensor.codegen import loop_ir as ir
from stagedtensor.codegen.emit.cuda import emit_cuda
from stagedtensor.codegen.schedule.cuda import launch_of, parts_of, schedule_cuda, side_by_side
from stagedtensor.errors import MemoryCheckError
from stagedtensor.precision import f32
from stagedtensor.runtime import emulated
from stagedtensor.runtime.emulated import EmulatedRoutine, WatchedBuffer, load_emulated
from stagedtensor.runtime.inspection import Generated, generated
from tests.run.blocks import apply, axis, cache, contraction, load, module, store


def doubled(name: str, source: ir.Buffer, target: ir.Buffer, factor: str = "add") -> ir.Block:
    i = axis("i", source.shape[0])
    value = load(source, i)
    return ir.Block(name, (i,), (store(target, (i,), apply(factor, value, value)),))


def merged(*blocks: ir.Block, temporaries: tuple[ir.Buffer, ...] = ()) -> ir.Module:
    return side_by_side(schedule_cuda(module(*blocks, temporaries=temporaries)))


def cells(count: int, name: str) -> ir.Buffer:
    return ir.Buffer(name, f32, (count,))


def test_independent_kernels_share_a_launch_and_dependent_ones_do_not() -> None:
    a, b, c, d, e = (cells(40, name) for name in "abcde")
    whole = merged(doubled("first", a, b), doubled("second", b, c), doubled("third", d, e))
    assert [len(parts_of(kernel)) for kernel in whole.kernels] == [2, 1]
    assert [part.name for part in parts_of(whole.kernels[0])] == ["first", "third"]
    assert launch_of(whole.kernels[0]).blocks == 2


def test_a_kernel_that_writes_what_another_reads_comes_after_it() -> None:
    a, b, c = (cells(40, name) for name in "abc")
    whole = merged(doubled("reads", a, b), doubled("writes", c, a))
    assert [kernel.name for kernel in whole.kernels] == ["reads", "writes"]


def test_a_launch_has_no_more_arguments_than_fit_into_4_kib() -> None:
    steps = [doubled(f"step{k}", cells(40, f"x{k}"), cells(40, f"y{k}")) for k in range(450)]
    kernels = merged(*steps).kernels
    assert [len(parts_of(kernel)) for kernel in kernels] == [200, 200, 50]
    assert all(8 * len(kernel.params) <= 4096 for kernel in kernels)


def test_the_parts_of_a_launch_share_the_memory_that_a_kernel_has_without_asking() -> None:
    def square(k: int) -> ir.Block:
        a, b, c = (ir.Buffer(f"{name}{k}", f32, (64, 64)) for name in "abc")
        return contraction(a, b, c, (64, 64, 64), "NN")

    kernels = merged(*(square(k) for k in range(6))).kernels
    # 8320 bytes each, 16 layers of two tiles of 64 cells and one of padding: the sixth does not fit
    assert [len(parts_of(kernel)) for kernel in kernels] == [5, 1]


def test_a_value_that_would_only_hold_memory_is_computed_when_it_is_needed() -> None:
    a, b, c, d, e, f = (cells(40, name) for name in "abcdef")
    steps = (doubled("one", a, b), doubled("two", b, c), doubled("copy", a, e))
    whole = merged(*steps, doubled("three", c, d), doubled("uses", e, f), temporaries=(e,))
    names = [[part.name for part in parts_of(kernel)] for kernel in whole.kernels]
    assert names == [["one", "copy"], ["two", "uses"], ["three"]]
    late = merged(*steps, doubled("three", c, d), _sum_of(d, e, f), temporaries=(e,))
    assert [[part.name for part in parts_of(kernel)] for kernel in late.kernels][2] == ["copy", "three"]


def _sum_of(left: ir.Buffer, right: ir.Buffer, target: ir.Buffer) -> ir.Block:
    i = axis("i", left.shape[0])
    return ir.Block("uses", (i,), (store(target, (i,), apply("add", load(left, i), load(right, i))),))


def run(whole: ir.Module, edit: Callable[[str], str] = lambda text: text, **arrays: Any) -> dict[str, Any]:
    source = emit_cuda(whole)
    source = replace(source, text=edit(source.text))
    held = {buffer: WatchedBuffer(buffer.size, buffer.type, written=True) for buffer in source.buffers}
    for buffer, watched in held.items():
        watched.cells[...] = arrays.get(buffer.name, 0)
    EmulatedRoutine(load_emulated(source, cache()), source, held, np.zeros(1, np.int64)).run()
    return {buffer.name: watched.cells.copy() for buffer, watched in held.items()}


def test_a_result_does_not_take_the_place_of_what_a_neighbour_reads() -> None:
    a, b, c, d, e = (cells(1, name) for name in ("a", "b", "c", "d", "e"))
    whole = merged(
        doubled("makes", a, b),
        doubled("reads", b, c),
        doubled("overwrites", b, d),
        doubled("ends", d, e),
        temporaries=(b, d),
    )
    assert len(whole.kernels) == 3
    found = run(whole, a=3.0)
    assert found["c"] == 12.0
    assert found["e"] == 24.0


def test_a_lone_point_beside_many_is_computed_by_one_thread() -> None:
    a, b = cells(1, "a"), cells(1, "b")
    c, d = cells(1000, "c"), cells(1000, "d")
    cell = ir.Load(a, (ir.index(0),))
    point = ir.Block("point", (), (ir.Store(b, (ir.index(0),), apply("add", cell, cell)),))
    whole = merged(point, doubled("many", c, d, "mul"))
    assert len(whole.kernels) == 1
    found = run(whole, a=2.0, c=3.0)
    assert found["b"] == 4.0
    assert np.array_equal(found["d"], np.full(1000, 9.0, np.float32))


def test_a_finding_names_the_part_that_it_is_in() -> None:
    a, b, c, d = (cells(40, name) for name in "abcd")
    first = replace(doubled("first", a, b), origins=(ir.Origin("b =: a + a", "model.py:1"),))
    second = replace(doubled("second", c, d, "mul"), origins=(ir.Origin("d =: c * c", "model.py:2"),))
    with pytest.raises(MemoryCheckError) as caught:
        run(merged(first, second), lambda text: text.replace("d[i]", "d[i + 40]"))
    assert "model.py:2" in str(caught.value)
    assert "model.py:1" not in str(caught.value)


def test_warps_of_one_block_take_a_row_each_and_a_lone_result_is_computed_once() -> None:
    x, sums = ir.Buffer("x", f32, (21, 40)), cells(21, "sums")
    y, total = cells(64, "y"), cells(1, "total")
    whole = merged(_row_sums(x, sums), _total(y, total), doubled("pointwise", cells(9, "u"), cells(9, "v")))
    (kernel,) = whole.kernels
    assert launch_of(kernel).threads == 256
    assert launch_of(kernel).blocks == 3 + 1 + 1
    values = np.arange(21 * 40, dtype=np.float32)
    found = run(whole, x=values, y=np.arange(64, dtype=np.float32))
    np.testing.assert_array_equal(found["sums"], values.reshape(21, 40).sum(1))
    assert found["total"] == 63 * 32


def _row_sums(x: ir.Buffer, target: ir.Buffer) -> ir.Block:
    i, k = axis("i", x.shape[0]), axis("k", x.shape[1], "reduce")
    return ir.Block("sums", (i, k), (store(target, (i,), ir.Var(_STATE)),), (_sum(load(x, i, k)),))


def _total(y: ir.Buffer, target: ir.Buffer) -> ir.Block:
    k = axis("k", y.shape[0], "reduce")
    return ir.Block("total", (k,), (ir.Store(target, (ir.index(0),), ir.Var(_STATE)),), (_sum(load(y, k)),))


_STATE = ir.Symbol("acc", f32)


def _sum(value: ir.Expr) -> ir.Accumulator:
    zero = ir.Const(0.0, f32)
    return ir.Accumulator(_STATE, zero, apply("add", ir.Var(_STATE), value), "add", zero)


def test_threads_of_a_warp_that_do_not_meet_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with st.Session(), st.Context("cuda-emulated") as ctx:
        assert "__syncwarp();" in _two_softmaxes(ctx).source
    host_source = emulated.host_source
    monkeypatch.setattr(emulated, "host_source", lambda source: host_source(source).replace("__syncwarp();", ";"))
    with st.Session(), st.Context("cuda-emulated") as ctx, pytest.raises(MemoryCheckError, match="without a barrier"):
        _two_softmaxes(ctx)


def _two_softmaxes(ctx: st.Context) -> st.Routine:
    inputs = [st.placeholder(name, batch=[70], output=[40]) for name in "xy"]
    routine = ctx.compile([st.softmax(t) for t in inputs])
    for t in inputs:
        ctx.set_values(t, np.ones((70, 40)))
    ctx.run(routine)
    return routine


def small() -> Generated:
    x = st.placeholder("x", batch=[20], output=[300], prec="f16")
    return generated([st.sum(st.cast(x, "f32"), axis="output"), st.placeholder("y", output=[40]) * 2.0], "cuda")


def test_text(golden: Callable[[str], None]) -> None:
    with st.Session():
        (kernel,) = small().kernels
    golden(re.sub(r"  \(test_side_by_side\.py:\d+\)", "", kernel.source))


def step(name: str, precision: str) -> Generated:
    _, _, loss = model(WORKLOADS[name], precision)
    rate = st.host_scalar("learning_rate", 0.05)
    if precision == "f16":
        return generated(
            st.gated_scaled_update(st.LossScaler(init_scale=LOSS_SCALE), loss, rate, momentum=MOMENTUM)[1], "cuda"
        )
    return generated(st.sequence(st.grad_update(loss), st.sgd_update(loss, rate, momentum=MOMENTUM)), "cuda")


LAUNCHES = {"mlp-small": (9, 10, 13), "mlp-mid": (10, 11, 14), "conv": (14, 15, 18)}


@pytest.mark.parametrize("name", LAUNCHES)
def test_launches_of_a_training_step(name: str) -> None:
    for precision, most in zip(("f32", "bf16", "f16"), LAUNCHES[name], strict=True):
        with st.Session():
            assert len(step(name, precision).kernels) <= most


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "most"), [("f32", 85), ("bf16", 98), ("f16", 100)])
def test_launches_of_a_transformer(precision: str, most: int) -> None:
    with st.Session():
        assert len(step("gpt-mini", precision).kernels) <= most


def test_the_flag_of_large_gradients_is_computed_where_they_are() -> None:
    with st.Session():
        made = step("mlp-mid", "f16")
    noted = [kernel for kernel in made.kernels if "part of grad_flag in the epilogue" in kernel.path]
    assert len(noted) == 3  # the three matrices, one in each
    swept = [kernel for kernel in made.kernels if "grad_flag_part" in kernel.writes]
    assert len(swept) == 1
    assert sum(kernel.nbytes for kernel in swept) < 20_000  # biases


@pytest.mark.parametrize("planted", [np.inf, np.nan, 1.0])
@pytest.mark.parametrize("precision", ["f16", "f32"])
def test_an_infinity_in_one_cell_of_a_gradient_is_noted(planted: float, precision: str) -> None:
    with st.Session(), st.Context("cuda-emulated") as ctx:
        x = st.placeholder("x", batch=[40], output=[70], prec=precision)
        seed = st.placeholder("seed", batch=[40], output=[50], prec=precision)
        w = st.param("w", output=[50])
        with st.master_weights(None if precision == "f32" else precision):
            loss = st.sum(st.cast((w @ x) * seed, "f32"))
        flag, checksum = st.grad_checksum(loss)
        ctx.init_params(loss)
        routine = ctx.compile(st.sequence(st.grad_update(loss), checksum), keep=[flag])
        assert any("part of grad_flag in the epilogue" in kernel.path for kernel in routine.kernels)
        ctx.set_values(x, np.ones((40, 70)))
        values = np.ones((40, 50))
        values[39, 49] = planted
        ctx.set_values(seed, values)
        ctx.run(routine)
        assert ctx.get_values(flag) == (0.0 if planted == 1.0 else np.inf)
