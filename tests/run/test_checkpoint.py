"""Checkpoints: every format to the bit, resuming bitwise, crashes, mismatches, files of other projects."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import stagedtensor as st
from stagedtensor import nn
from stagedtensor.errors import CheckpointError, ContextError
from stagedtensor.tensor_file import read_tensors, write_tensors

SPECIAL = [1.5, -2.0, float("nan"), -0.0, 0.0]


def bits(array: np.ndarray[Any, Any]) -> bytes:
    return array.tobytes()


# -- files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", ["float64", "float32", "float16", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
)
def test_floats_come_back_to_the_bit(tmp_path: Path, dtype: Any) -> None:
    arrays = {
        "vector": np.array(SPECIAL, dtype),
        "cell": np.array(1.5, dtype),
        "none": np.zeros((3, 0), dtype),
        "matrix": np.arange(6).reshape(2, 3).astype(dtype).T,
    }
    write_tensors(tmp_path / "w.safetensors", arrays, {"note": "kept"})
    file = read_tensors(tmp_path / "w.safetensors")
    assert file.metadata["note"] == "kept"
    for name, array in arrays.items():
        found = file.arrays[name]
        assert (found.dtype, found.shape, bits(found)) == (array.dtype, array.shape, bits(array)), name


def test_integers_come_back(tmp_path: Path) -> None:
    arrays = {
        name: np.array([0, 1, np.iinfo(name).max if name != "bool" else 1], name)
        for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool")
        if name != "bool"
    } | {"bool": np.array([True, False])}
    write_tensors(tmp_path / "w.safetensors", arrays, {})
    file = read_tensors(tmp_path / "w.safetensors")
    for name, array in arrays.items():
        np.testing.assert_array_equal(file.arrays[name], array)
        assert file.arrays[name].dtype == array.dtype


def test_another_process_reads_the_formats(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    w = st.param("w", init=np.array([1.5, -2.0, np.nan, np.inf]), prec=st.bf16)
    s = st.param("s", init=np.array([1.5]), prec=st.f8e5m2)
    with st.Context("reference") as ctx:
        ctx.init_params([w, s])
        st.save(path, ctx, [w, s])
    text = (
        "import sys; from stagedtensor.tensor_file import read_tensors; file = read_tensors(sys.argv[1]); "
        "print({name: (file.precisions[name].name, array.tobytes().hex()) for name, array in sorted(file.arrays.items())})"
    )
    done = subprocess.run(
        [sys.executable, "-c", text, str(path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(st.__file__).parents[1])},
        check=True,
    )
    wide = np.array([1.5, -2.0, np.nan, np.inf], ml_dtypes.bfloat16)
    narrow = np.array([1.5], ml_dtypes.float8_e5m2)
    assert done.stdout.strip() == str({"s": ("f8e5m2", bits(narrow).hex()), "w": ("bf16", bits(wide).hex())})
    state = json.loads(read_tensors(path).metadata["stagedtensor"])
    assert state["precisions"] == {"w": "bf16", "s": "f8e5m2"}


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "w.safetensors"
    write_tensors(path, {"a": np.arange(4)}, {})
    before = path.read_bytes()
    for step in ("fsync", "replace"):

        def fail(*_: Any) -> None:
            raise OSError("the disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(os, step, fail)
            with pytest.raises(CheckpointError, match="disk is full"):
                write_tensors(path, {"a": np.arange(9)}, {})
        assert path.read_bytes() == before
        assert os.listdir(tmp_path) == [path.name]


def test_a_killed_process_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    write_tensors(path, {"a": np.arange(4)}, {})
    before = path.read_bytes()
    text = (
        "import os, sys, numpy as np; from stagedtensor.tensor_file import write_tensors; "
        "os.fsync = lambda _: os._exit(9); write_tensors(sys.argv[1], {'a': np.arange(1000)}, {})"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(st.__file__).parents[1])}
    assert subprocess.run([sys.executable, "-c", text, str(path)], env=environment).returncode == 9
    assert path.read_bytes() == before
    np.testing.assert_array_equal(read_tensors(path).arrays["a"], np.arange(4))


def _truncated(data: bytes) -> bytes:
    return data[:-3]


def _huge_header(data: bytes) -> bytes:
    return struct.pack("<Q", 1 << 60) + data[8:]


def _not_json(data: bytes) -> bytes:
    return data[:8] + b"!" + data[9:]


@pytest.mark.parametrize("damage", [_truncated, _huge_header, _not_json, lambda data: b""])
def test_damaged_files_are_refused(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "w.safetensors"
    write_tensors(path, {"a": np.arange(4.0)}, {})
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match=r"w\.safetensors"):
        read_tensors(path)
    with pytest.raises(CheckpointError, match="missing"):
        read_tensors(tmp_path / "missing.safetensors")


# -- resuming -----------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """A small training program of one leg."""

    ctx: st.Context
    x: st.Tensor
    loss: st.Tensor
    routine: st.Routine
    set_rate: Callable[[st.Context, int], None]
    dropout_step: st.Tensor
    scaler: st.LossScaler | None = None
    window: st.Tensor | None = None

    def steps(self, first: int, last: int) -> list[float]:
        losses = []
        for at in range(first, last):
            self.ctx.set_values(self.x, np.random.default_rng(at).normal(size=(6, 5)).astype(np.float32))
            self.set_rate(self.ctx, at)
            self.ctx.set_values(self.dropout_step, at)
            if self.scaler is None or self.window is None:
                self.ctx.run(self.routine)
            else:
                st.gated_step(
                    self.ctx,
                    scaler=self.scaler,
                    routine=self.routine,
                    window_checksum=self.window,
                    check_interval=3,
                    step=at,
                )
            losses.append(float(self.ctx.get_values(self.loss)))
        return losses


def program(leg: str) -> Run:
    ctx = st.Context("reference")
    prec = None if leg.startswith("f32") else leg
    x = st.placeholder("x", batch=[6], output=[5])
    step = st.host_scalar("dropout_step", 0, st.i32)
    with st.master_weights(prec):
        first, norm, drop, second = (
            nn.dense(4),
            nn.batch_norm(),
            nn.dropout(0.25, step=step),
            nn.dense(3, label="second"),
        )
    loss = st.mean(st.power(second(drop(st.relu(norm(first(x))))), 2.0))
    if prec is not None:
        st.PrecisionPolicy(activation=prec, grad=prec).apply(loss)
    rate, set_rate = st.scheduled_learning_rate(st.LrSchedule("cosine", 0.05, 10))
    scaler = window = None
    if leg == "f16":
        # far too large at first, and growing again soon: the schedule moves in every window
        scaler = st.LossScaler(init_scale=2.0**20, growth_interval=2, min_scale=0.5)
        window, update = st.gated_scaled_update(scaler, loss, rate, momentum=0.9)
    else:
        optimizer = (
            st.adamw_update(loss, rate) if leg == "bf16" else st.sgd_update(loss, rate, momentum=0.9, nesterov=True)
        )
        update = st.sequence(st.grad_update(loss), optimizer)
    routine = ctx.compile(st.sequence(update, nn.update_running(loss)), name="step")
    return Run(ctx, x, loss, routine, set_rate, step, scaler, window)


@pytest.mark.parametrize("leg", ["f32", "bf16", "f16"])
def test_resuming_continues_the_same_run(tmp_path: Path, leg: str) -> None:
    path = tmp_path / "run.safetensors"
    with st.Session():
        whole = program(leg)
        whole.ctx.init_params(whole.loss, seed=1)
        first = whole.steps(0, 4)
        st.save(path, whole.ctx, whole.loss, optimizer=whole.routine, scaler=whole.scaler, step=4)
        rest = whole.steps(4, 9)
    with st.Session():
        again = program(leg)
        again.ctx.init_params(again.loss, seed=2)
        report = st.load(path, again.ctx, again.loss, optimizer=again.routine, scaler=again.scaler)
        assert report.step == 4
        assert (report.missing, report.mismatched, report.extra, report.converted) == ((), (), (), ())
        assert again.steps(4, 9) == rest
        for mine, theirs in zip(again.loss.params, whole.loss.params, strict=True):
            assert bits(again.ctx.get_values(mine)) == bits(whole.ctx.get_values(theirs)), mine.name
        if whole.scaler is not None and again.scaler is not None:
            assert again.scaler.state_dict() == whole.scaler.state_dict()
            assert whole.scaler.skipped_steps > 0
    assert len(set(first + rest)) == 9, "the loss moves"


def test_a_file_loads_before_the_first_compile(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    with st.Session():
        run = program("f32")
        run.ctx.init_params(run.loss, seed=1)
        run.steps(0, 2)
        st.save(path, run.ctx, run.loss)
        kept = {p.name: run.ctx.get_values(p) for p in run.loss.params}
    with st.Session(), st.Context("reference") as ctx:
        x = st.placeholder("x", batch=[6], output=[5])
        st.param("unrelated", output=[2])
        y = nn.dense(4)(x)
        report = st.load(path, ctx, y)
        assert set(report.loaded) == {"dense.w", "dense.b"}
        assert "batch_norm.gain" in report.extra
        ctx.compile(y)
        assert bits(ctx.get_values(y.params[0])) == bits(kept["dense.w"])


def test_loaded_masters_reach_their_twins(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    write_tensors(path, {"w": np.full((1, 2), 3.25, np.float32)}, {})
    with st.Session(), st.Context("reference") as ctx:
        x = st.placeholder("x", batch=[1], output=[2])
        with st.master_weights("bf16", "materialized"):
            y = st.param("w", output=[1]) @ x
        routine = ctx.compile(y)
        ctx.init_params(y)
        ctx.set_values(x, [[1.0, 1.0]])
        ctx.run(routine)
        st.load(path, ctx, y)
        ctx.run(routine)
        assert ctx.get_values(y).item() == 6.5


# -- mismatches ---------------------------------------------------------------------------------------------------


def model() -> st.Tensor:
    return nn.mlp([4, 3])(st.placeholder("x", batch=[2], output=[5]))


def test_every_mismatch_is_reported_and_nothing_written(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    write_tensors(
        path,
        {
            "mlp.dense.w": np.ones((4, 6), np.float32),
            "mlp.dense.b": np.ones(4, np.float64),
            "mlp.dense_1.w": np.ones((3, 4), np.float32),
            "other": np.ones(1, np.float32),
        },
        {},
    )
    with st.Session(), st.Context("reference") as ctx:
        y = model()
        ctx.init_params(y, seed=0)
        before = {p.name: bits(ctx.get_values(p)) for p in y.params}
        with pytest.raises(CheckpointError) as caught:
            st.load(path, ctx, y)
        text = str(caught.value)
        for part in (
            "mlp.dense.w: expected shape (4, 5)",
            "mlp.dense.b: expected f32, the file has f64",
            "mlp.dense_1.b: not in the file",
            "not wanted: other",
            "test_checkpoint.py",
        ):
            assert part in text
        assert {p.name: bits(ctx.get_values(p)) for p in y.params} == before

        report = st.load(path, ctx, y, strict=False)
        assert set(report.loaded) == {"mlp.dense.b", "mlp.dense_1.w"}
        assert report.converted == ("mlp.dense.b",)
        assert report.missing == ("mlp.dense_1.b",)
        assert report.extra == ("other",)
        assert "expected shape (4, 5)" in report.mismatched[0]
        assert "missing: mlp.dense_1.b" in str(report)


def test_weights_of_another_project(tmp_path: Path) -> None:
    path = tmp_path / "theirs.safetensors"
    kernel = np.random.default_rng(0).normal(size=(6, 2, 3, 3)).astype(np.float16)
    save_file({"conv1.weight": kernel, "conv1.bias": np.ones(6, np.float16)}, path)
    with st.Session(), st.Context("reference") as ctx:
        y = nn.conv2d(6, 3)(st.placeholder("x", batch=[1], output=[5, 5, 2]))
        names: dict[str, Any] = {
            "conv2d.w": ("conv1.weight", lambda a: a.transpose(0, 2, 3, 1)),
            "conv2d.b": "conv1.bias",
        }
        report = st.load(path, ctx, y, names=names)
        assert set(report.converted) == {"conv2d.w", "conv2d.b"}
        np.testing.assert_array_equal(ctx.get_values(y.params[0]), kernel.transpose(0, 2, 3, 1).astype(np.float32))
        assert st.load(path, ctx, y, names=names.get).loaded == report.loaded
        with pytest.raises(CheckpointError, match=r"conv2d\.v'; near: conv2d\.w"):
            st.load(path, ctx, y, names={"conv2d.v": "conv1.weight"})
        with pytest.raises(CheckpointError, match=r"conv2d\.w \(as nowhere\)"):
            st.load(path, ctx, y, names={"conv2d.w": "nowhere"})


@pytest.mark.parametrize(
    ("names", "error", "text"),
    [
        (["w"], TypeError, "a dictionary or a function"),
        ({"dense.w": 5}, TypeError, r"'dense.w' stands for 5; expected a name in the file"),
        ({"dense.w": ("w",)}, TypeError, "expected a name in the file"),
        (lambda name: 5, TypeError, "stands for 5"),
        (
            {"dense.w": ("w", lambda a: a.reshape(7))},
            CheckpointError,
            r"'dense.w' failed(?s:.*)ValueError(?s:.*)nothing was",
        ),
        ({"dense.w": ("w", lambda a: a * 1j)}, CheckpointError, "dense.w: its function made an array of dtype complex"),
        ({"dense.w": ("w", lambda a: a.astype(np.int8))}, CheckpointError, "dense.w: expected f32, the file has i8"),
    ],
)
def test_a_wrong_map_of_names_loads_nothing(tmp_path: Path, names: Any, error: type[Exception], text: str) -> None:
    path = tmp_path / "theirs.safetensors"
    save_file({"w": np.zeros((2, 3), np.float32), "b": np.zeros(2, np.float32)}, path)
    with st.Session(), st.Context("reference") as ctx:
        y = nn.dense(2)(st.placeholder("x", batch=[1], output=[3]))
        if isinstance(names, dict):
            names = {"dense.b": "b", **names}
        with pytest.raises(error, match=text):
            st.load(path, ctx, y, names=names)
        assert not any(map(ctx.is_initialized, y.params))


def test_what_cannot_be_saved_or_loaded(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    with st.Session(), st.Context("reference") as ctx:
        y = model()
        with pytest.raises(CheckpointError, match=r"mlp\.dense\.w, mlp\.dense\.b"):
            st.save(path, ctx, y)
        ctx.init_params(y)
        with pytest.raises(CheckpointError, match="No such file"):
            st.save(tmp_path / "nowhere" / "w.safetensors", ctx, y)
        st.save(path, ctx, y)
        with pytest.raises(CheckpointError, match="loss scaler: not in the file"):
            st.load(path, ctx, y, scaler=(scaler := st.LossScaler()))
        with st.Context("reference") as other:  # the refused load did not tie the scaler to its context
            scaler.load_state_dict(other, st.LossScaler(init_scale=8.0).state_dict())
            assert other.get_values(scaler.scale) == 8.0
        rate = st.host_scalar("rate", 0.1)
        loss = st.sum(y)
        with pytest.raises(CheckpointError, match=r"optimizer/mlp\.dense\.b/\w+: not in the file"):
            st.load(path, ctx, loss, optimizer=st.sgd_update(loss, rate, momentum=0.9))
        with pytest.raises(TypeError, match="optimizer"):
            st.save(path, ctx, y, optimizer=y)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="step"):
            st.save(path, ctx, y, step=-1)
        twice = st.sum(st.param("w", output=[2])) + st.sum(st.param("w", output=[3]))
        with pytest.raises(ContextError, match="two parameters are called 'w'"):
            st.save(path, ctx, twice)


def test_the_same_state_gives_the_same_file(tmp_path: Path) -> None:
    files = []
    for name in ("a", "b"):
        with st.Session():
            run = program("f32")
            run.ctx.init_params(run.loss, seed=1)
            run.steps(0, 2)
            st.save(tmp_path / name, run.ctx, run.loss, optimizer=run.routine, step=2)
        files.append((tmp_path / name).read_bytes())
    assert files[0] == files[1]


def test_an_optimizer_of_the_user_resumes(tmp_path: Path) -> None:
    """Its state is a parameter that is not trained, which no path leads to from the loss."""
    path = tmp_path / "own.safetensors"
    with st.Session():
        x = st.placeholder("x", batch=[4], output=[3])
        w, v = st.param("w", output=[2]), st.param("w.mean_square", init=0.0, trainable=False)
        loss = st.sum((w @ x) ** 2.0)
        text = "v =: 0.9 *. v + 0.1 *. g *. g; p =- 0.01 *. g /. (sqrt(v) + 1e-6)"
        descent = st.computation(text, p=w, g=w.grad, v=v)
        step = st.sequence(st.grad_update(loss), descent)

        def start() -> tuple[st.Context, st.Routine]:
            ctx = st.Context("reference")
            ctx.set_values(x, np.ones((4, 3)))
            return ctx, ctx.compile(step)

        def run(ctx: st.Context, routine: st.Routine) -> Any:
            for _ in range(2):
                ctx.run(routine)
            return ctx.get_values(w)

        ctx, routine = start()
        ctx.init_params(loss, seed=0)
        with pytest.raises(CheckpointError, match=r"no values yet: w\.mean_square\n"):
            st.save(path, ctx, loss, optimizer=routine)
        ctx.init_params(step, seed=0)
        run(ctx, routine)
        st.save(path, ctx, loss, optimizer=routine)
        expected = run(ctx, routine)
        for optimizer in (None, descent):
            again, routine = start()
            report = st.load(path, again, loss, optimizer=optimizer or routine)
            assert set(report.loaded) == {"w", "w.mean_square"}
            assert not report.extra
            np.testing.assert_array_equal(run(again, routine), expected)


def test_names_that_a_file_needs_itself_are_refused(tmp_path: Path) -> None:
    """Otherwise a save would succeed, and the file be unreadable or lack a parameter."""
    path = tmp_path / "w.safetensors"
    with st.Session(), st.Context("reference") as ctx:
        inner = st.sum(st.param("__metadata__", output=[2]))
        ctx.init_params(inner)
        with pytest.raises(CheckpointError, match="'__metadata__' is the file's own entry"):
            st.save(path, ctx, inner)
        w = st.param("w", output=[2])
        update = st.sgd_update(st.sum(w * w), 0.1, momentum=0.9)
        ctx.init_params(w)
        ctx.run(ctx.compile(st.sequence(st.grad_update(st.sum(w * w)), update)))
        st.save(path, ctx, w, optimizer=update)
        name = next(name for name in read_tensors(path).arrays if name.startswith("optimizer/"))
        both = st.sum(st.param(name, output=[2])) + st.sum(w)
        ctx.init_params(both)
        with pytest.raises(CheckpointError, match=f"two things would be called {name!r}"):
            st.save(path, ctx, both, optimizer=update)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("step", "x", "its step is 'x', expected an integer"),
        ("step", -1, "its step is -1"),
        ("step", 1.5, "its step is 1.5"),
        ("scaler", 3, "loss scaler state: expected what state_dict"),
        ("scaler", {"version": 1}, "is missing"),
    ],
)
def test_damaged_metadata_is_named_with_the_file(tmp_path: Path, key: str, value: Any, text: str) -> None:
    path = tmp_path / "w.safetensors"
    with st.Session(), st.Context("reference") as ctx:
        w = st.param("w", output=[2])
        ctx.init_params(w, seed=0)
        st.save(path, ctx, w, scaler=st.LossScaler(), step=3)
        file = read_tensors(path)
        state = json.loads(file.metadata["stagedtensor"])
        write_tensors(path, file.arrays, {"stagedtensor": json.dumps(state | {key: value})})
        ctx.set_values(w, np.zeros(2, np.float32))
        with pytest.raises(CheckpointError, match=rf"w\.safetensors' is damaged: .*{text}"):
            st.load(path, ctx, w, scaler=st.LossScaler())
        np.testing.assert_array_equal(ctx.get_values(w), 0)
