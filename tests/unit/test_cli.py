"""The command line: what it prints, its exit status, what it must not import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stagedtensor.cli import COMMANDS, build_parser, main
from stagedtensor.op_status import status
from stagedtensor.public_ops import PUBLIC_OPS
from stagedtensor.runtime.kernel_cache import KernelCache, digest


def build(path: Path) -> None:
    path.write_bytes(b"code")


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("STAGEDTENSOR_CACHE", str(tmp_path / "kernels"))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path / "kernels"


def test_doctor_reports_each_piece(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for text in ("C compilers", "target", "NVIDIA driver", "CuPy", "numpy", str(folder)):
        assert text in printed


def test_doctor_without_a_compiler_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert 'pip install "stagedtensor[cc]"' in printed
    assert 'pip install "stagedtensor[cuda13]"' in printed


def test_cache_is_shown_and_emptied(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    KernelCache().get_or_build(digest("a"), build)
    assert main(["cache", "info"]) == 0
    assert capsys.readouterr().out.startswith("1 entry, 0.0 MiB of at most 1024.0 MiB in ")
    assert main(["cache", "clear"]) == 0
    assert capsys.readouterr().out.startswith("deleted 1 entry")
    assert list(folder.iterdir()) == []
    assert main(["cache", "info"]) == 0
    assert capsys.readouterr().out.startswith("0 entries")


def test_ops_prints_the_matrix(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {name: PUBLIC_OPS[name] for name in ("add", "sign")}
    monkeypatch.setattr("stagedtensor.cli.ops.status", lambda: status(chosen))
    assert main(["ops"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "| add | yes | yes | yes | yes | n/a |" in lines
    assert "| sign | yes | yes | n/a | yes | n/a |" in lines
    assert "| op | forward C | forward CUDA | Backward | StableHLO | fused encodings |" in lines


def test_an_error_is_one_message_and_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    KernelCache().get_or_build(digest("a"), build)
    owner = folder.stat().st_uid
    monkeypatch.setattr("os.getuid", lambda: owner + 1)
    assert main(["cache", "clear"]) == 1
    assert capsys.readouterr().err.startswith("error: refusing ")


def test_wrong_usage_is_status_2() -> None:
    with pytest.raises(SystemExit) as caught:
        main(["no-such-command"])
    assert caught.value.code == 2


@pytest.mark.parametrize(("arguments", "level"), [([], 0), (["-v"], 1), (["-vv"], 2)])
def test_verbose_is_accepted_before_and_after_the_command(arguments: list[str], level: int) -> None:
    assert build_parser().parse_args([*arguments, "ops"]).verbose == level
    assert build_parser().parse_args(["ops", *arguments]).verbose == level


def test_each_command_has_a_line_of_help() -> None:
    text = build_parser().format_help()
    for name in COMMANDS:
        assert name in text


def test_starting_the_command_line_imports_no_optional_package(folder: Path) -> None:
    code = (
        "import sys, stagedtensor.cli; stagedtensor.cli.main(['cache', 'info']);"
        "bad = {'cupy', 'torch', 'jax', 'matplotlib', 'sklearn', 'ziglang'} & set(sys.modules);"
        "sys.exit(str(bad) if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ), capture_output=True)
    assert not folder.exists()
