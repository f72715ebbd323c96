"""``benchmarks/gpu.py`` from end to end, in tiny sizes: our side on the stand-in for CuPy, torch's on its CPU device."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import stagedtensor as st
from stagedtensor.benchmarks import gpu
from stagedtensor.benchmarks.workloads import start
from stagedtensor.runtime import cuda
from tests.cuda import fake_cupy


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = fake_cupy.module()
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setattr(cuda, "_cupy", lambda: module)
    monkeypatch.setattr(cuda.CudaDevice, "_load", fake_cupy.load)
    monkeypatch.setattr(gpu, "torch", None)
    return module


@pytest.mark.slow
def test_every_workload_runs_and_counts(
    pretended: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "find_torch", lambda: None)  # it would time a GPU, and there is none
    gpu.main(["--quick", "--rounds", "1", "--json", str(tmp_path / "rows.json")])
    rows = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    assert all(row["counts"] for row in rows), [row for row in rows if not row["counts"]]
    assert all(row["ours_us"] > 0 for row in rows)
    done = {(row["workload"], row["precision"]) for row in rows}
    assert {("product 64", prec) for prec in ("f16", "bf16", "tf32", "f32")} <= done
    assert {("softmax", "bf16"), ("gelu(x*w+b)", "f32"), ("attention", "f16")} <= done
    assert {(f"step {tiny.name}", prec) for tiny in gpu.TINY for prec in ("f32", "bf16", "f16")} <= done
    assert all(
        "tensor cores" in row["path"] for row in rows if row["workload"] == "product 64" and row["precision"] != "f32"
    )
    assert all("rows through" in row["path"] for row in rows if row["workload"] == "attention")
    printed = capsys.readouterr().out
    assert printed.count("step tiny gpt") == 6, "each row as it comes, and in the table"


def test_a_wrong_result_does_not_count(pretended: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = gpu.Bench("cuda", True, 1)
    right = next(gpu.products(bench))
    assert right.counts
    assert right.error is not None
    monkeypatch.setattr(gpu, "UNITS", {prec: unit * 2.0**-20 for prec, unit in gpu.UNITS.items()})
    assert not next(gpu.products(bench)).counts


def test_time_runs_out(pretended: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu, "BUDGET_S", 0.0)
    rows = gpu.measured(gpu.Bench("cuda", True, 1))
    assert len(rows) == 1
    assert "out of time" in capsys.readouterr().out


@pytest.mark.skipif(cuda.gpu_count() > 0, reason="there is a GPU")
def test_without_a_device_one_message_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        gpu.main([])
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "device 'cuda' needs" in printed.err
    assert "Traceback" not in printed.err


@pytest.mark.peers
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
@pytest.mark.parametrize("prec", ["f32", "bf16"])
def test_torch_computes_the_same_steps(prec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "torch", importlib.import_module("torch"))
    bench = gpu.Bench("cuda", True, 1, peer="cpu", began=time.perf_counter())
    for workload in gpu.TINY:
        begin = start(workload)
        run, last = gpu.their_step(bench, prec, workload, begin, compiled=False)
        theirs = gpu.followed(run, last)
        with st.Session(), st.Context("reference") as ctx:
            ours = gpu.followed(*gpu.our_step(ctx, prec, workload, begin))
        worst = max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
        assert worst < (1e-4 if prec == "f32" else 2e-2), workload.name
        assert math.isfinite(worst)
