"""Arguments that used to be taken and turned into something else without a word."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor.errors import CompileError, ContextError, PrecisionError, ShapeError
from stagedtensor.runtime.compiler import compile_shared, identify

from .running import both_devices


@both_devices
def test_ids_in_the_upper_half_of_u64_read_the_last_row(device: str) -> None:
    with st.Session(), st.Context(device) as ctx:
        table = st.placeholder("table", input=[2], output=[3], prec=st.f32)
        ids = st.placeholder("ids", batch=[4], prec=st.u64)
        rows = st.gather(table, ids)
        routine = ctx.compile(rows)
        ctx.set_values(table, [[0, 1], [2, 3], [4, 5]])
        ctx.set_values(ids, np.array([0, 2, 3, 2**63 + 5], np.uint64))
        ctx.run(routine)
        assert ctx.get_values(rows).tolist() == [[0, 1], [4, 5], [4, 5], [4, 5]]


def test_a_host_scalar_of_integers_takes_integers_it_can_hold() -> None:
    with st.Session():
        assert st.host_scalar("count", 200, prec=st.u8).precision is st.u8
        for value in (2.5, 256, -1, float("nan")):
            with pytest.raises(ValueError, match="does not hold"):
                st.host_scalar("count", value, prec=st.u8)


def test_a_settled_cell_of_integers_takes_integers_it_can_hold() -> None:
    with st.Session(), st.Context("cpu") as ctx:
        count, one = st.host_scalar("count", 2, prec=st.i32), st.placeholder("one", output=[1], prec=st.i32)
        total = count + one
        routine = ctx.compile(total)
        ctx.set_values(one, [5])
        for value in (7, -(2**31), 2**31 - 6):
            ctx.set_values(count, value)
            ctx.run(routine)
            assert ctx.get_values(total).tolist() == [value + 5]
        for wrong, message in ((2**31, "allowed"), (-(2**31) - 1, "allowed"), (1.5, "float values")):
            with pytest.raises(ContextError, match=message):
                ctx.set_values(count, wrong)
        with pytest.raises(ContextError, match="got an array of shape"):
            ctx.set_values(one, 7)
        ctx.run(routine)
        assert ctx.get_values(total).tolist() == [2**31 - 1]


def test_an_axis_is_named_once() -> None:
    with st.Session():
        x = st.placeholder("x", output=[2, 3])
        for axis in ([0, 0], [0, -2], [("output", -1), 1]):
            with pytest.raises(ShapeError, match="twice"):
                st.sum(x, axis=axis)


def test_a_compiler_that_writes_nothing_is_named(tmp_path: Path) -> None:
    command = tmp_path / "cc"
    command.write_text('#!/bin/sh\necho "gcc (fake) 1.0"\n', encoding="utf-8")
    command.chmod(0o755)
    with pytest.raises(CompileError, match="wrote no library"):
        compile_shared("int x;", tmp_path / "out.so", flags=(), compiler=identify((str(command),)))
    assert not (tmp_path / "out.so").exists()


def test_importing_loads_no_compiler_of_the_package() -> None:
    code = (
        "import sys, stagedtensor; print(sorted(m for m in sys.modules if m.startswith('stagedtensor.codegen.lower')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("position", "wrong"), [(0, None), (1, None), (1, "cpu"), (2, None), (2, 3), (2, ["loss"])])
def test_checkpoints_name_a_wrong_argument(tmp_path: Path, position: int, wrong: Any) -> None:
    with st.Session(), st.Context("reference") as ctx:
        loss = st.sum(st.param("w", output=[2], init=1.0))
        ctx.init_params(loss)
        arguments: list[Any] = [tmp_path / "model.safetensors", ctx, loss]
        st.save(*arguments)
        arguments[position] = wrong
        for function in (st.save, st.load):
            with pytest.raises(TypeError, match="expected"):
                function(*arguments)
        scaler: Any = wrong or 3
        with pytest.raises(TypeError, match="LossScaler"):
            st.save(tmp_path / "model.safetensors", ctx, loss, scaler=scaler)


def test_parameters_are_drawn_for_tensors_only() -> None:
    with st.Session(), st.Context("reference") as ctx:
        for wrong in (None, 3, ["loss"]):
            with pytest.raises(TypeError, match="test_hardening_arguments"):
                ctx.init_params(wrong)  # type: ignore[arg-type]
        w = st.param("w", output=[2], init=1.0)
        ctx.init_params(t for t in (w * 2.0, w))
        assert ctx.get_values(w).tolist() == [1.0, 1.0]


def test_a_tensor_is_no_array_and_no_data() -> None:
    with st.Session():
        x = st.placeholder("x", output=[3]) * 2.0
        for convert in (np.asarray, np.sum, lambda t: np.dot(np.ones(3), t), lambda t: np.array([t, t])):
            with pytest.raises(TypeError):
                convert(x)
        assert copy.copy(x) is x
        for keep in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=r"st\.save"):
                keep(x)
        joined: Any = np.ones(3, np.float32) + x
        assert isinstance(joined, st.Tensor)


def test_an_interrupt_stays_an_interrupt_when_the_compiler_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def communicate(process: subprocess.Popen[bytes], *_: Any, **__: Any) -> Any:
        process.wait()
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", communicate)
    with pytest.raises(KeyboardInterrupt):
        identify((sys.executable, "-E"))


@pytest.mark.parametrize(
    "build",
    [lambda x: st.permute(x, [1, 0]), lambda x: st.concat([x, x]), st.sum, st.softmax, lambda x: x + x],
    ids=range(5),
)
def test_counter_state_is_read_by_no_operation(build: Callable[[st.Tensor], st.Tensor]) -> None:
    """Moving it needs no arithmetic, so that only compiling would notice: in the C compiler."""
    with (
        st.Session(),
        st.Context("cpu") as ctx,
        pytest.raises(PrecisionError, match=r"counter state(?s:.*)test_hardening_argu"),
    ):
        ctx.compile(build(st.placeholder("x", output=[2, 3], prec=st.u4x32)))
