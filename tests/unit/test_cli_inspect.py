"""``inspect``: tables and source for devices that are not there, its ways of describing inputs, its errors."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import stagedtensor as st
from stagedtensor.cli import main
from stagedtensor.cli.inspect import tensor
from stagedtensor.errors import LanguageError

MODEL = """
let dense ~hid () x = relu ({ w } * x + { b = 0.; o = [hid] })
let double x = x *. 2.
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "nets.st"
    path.write_text(MODEL, encoding="utf-8")
    return str(path)


def inspected(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["inspect", *arguments]) == 0
    return capsys.readouterr().out


def test_cpu_source_is_that_of_the_named_target(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    printed = inspected(capsys, model, "--block", "dense", "--config", "hid=8", "--input", "4x6", "--target", "aarch64")
    assert printed.startswith("1 kernel for cpu (aarch64)")
    with st.Session():
        x = st.placeholder("x", batch=[4], output=[6])
        y = st.language.load(model).dense(hid=8)()(x)
        with st.Context("cpu", target="x86-64") as ctx:
            other = ctx.compile(y, name="dense").source
    assert "void dense(" in printed
    assert "void dense(" in other


def test_cuda_source_needs_no_gpu_and_is_what_a_routine_has(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("cupy")
    printed = inspected(
        capsys,
        model,
        "--block",
        "dense",
        "--config",
        "hid=32",
        "--input",
        "32x64",
        "--device",
        "cuda",
        "--arch",
        "sm_90",
    )
    with st.Session(), st.Context("cuda-emulated") as ctx:
        x = st.placeholder("x", batch=[32], output=[64])
        routine = ctx.compile(st.language.load(model).dense(hid=32)()(x), name="dense")
        assert printed.endswith("\n" + routine.source)
        (kernel,) = routine.resources("sm_90")
        expected = f"{kernel.registers} registers, {kernel.occupancy(routine.kernels[0].threads, 'sm_90'):.0%}"
    (line,) = [line for line in printed.splitlines() if line.startswith("relu ") and "registers" in line]
    assert expected in line
    assert f"{routine.kernels[0].shared_bytes:,}" in line
    assert "sm_80" not in printed


def test_every_architecture_by_default(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("cupy")
    printed = inspected(capsys, model, "--block", "double", "--input", "300", "--device", "cuda", "--no-source")
    for arch in ("sm_80", "sm_90", "sm_100"):
        assert arch in printed
    assert "__global__" not in printed


def test_without_nvrtc_the_source_is_printed_all_the_same(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "cupy" else found(name))
    printed = inspected(capsys, model, "--block", "double", "--input", "300", "--device", "cuda")
    assert 'pip install "stagedtensor[cuda13]"' in printed
    assert "__global__" in printed


def test_mixed_precision_step(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    printed = inspected(
        capsys,
        *(model, "--block", "dense", "--config", "hid=32", "--input", "32x64", "--device", "cuda"),
        *("--precision", "bf16", "--train", "--arch", "sm_80"),
    )
    assert "contraction, tensor cores, bf16 x bf16 into f32" in printed
    assert "dense.w.grad" in printed


def test_numerics_reach_the_source(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = (model, "--block", "double", "--input", "300:bf16", "--device", "cuda", "--no-source")
    assert "elementwise" in inspected(capsys, *asked, "--numerics", "narrow_compute=f32", "--arch", "sm_80")
    assert main(["inspect", *asked, "--numerics", "narow=1"]) == 1
    assert "Numerics has no field 'narow'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "shape", "prec"),
    [
        ("32x784", "32 | -> 784", "f32"),
        ("784", "784", "f32"),
        ("2x3x4:bf16", "2,3 | -> 4", "bf16"),
        ("8x64|:i32", "8,64 |", "i32"),
        ("8|64", "8 | -> 64", "f32"),
    ],
)
def test_inputs(text: str, shape: str, prec: str) -> None:
    with st.Session():
        made = tensor(text, 0, "f32")
        assert str(made.shape).startswith(shape)
        assert str(made.precision) == prec


@pytest.mark.parametrize("text", ["", "x", "3xx4", "-3", "3x4:", "|", "three"])
def test_inputs_that_are_none(text: str) -> None:
    with st.Session(), pytest.raises(LanguageError, match="describes no shape"):
        tensor(text, 0, "f32")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "has several definitions: choose one with --block; it defines dense, double"),
        (("--block", "dens"), "defines no 'dens'"),
        (("--block", "dense", "--config", "hid"), "--config takes NAME=VALUE"),
        (("--block", "dense", "--config", "hid=8"), "gives Function, not a tensor"),
        (("--block", "double", "--input", "4", "--device", "cuda", "--arch", "sm90"), "expected a GPU architecture"),
    ],
)
def test_errors(model: str, arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", model, *arguments]) == 1
    assert message in capsys.readouterr().err


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["inspect", str(tmp_path / "none.st")]) == 1
    assert "cannot read" in capsys.readouterr().err
