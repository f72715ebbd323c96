"""The ``bench`` command: arguments, results, pages; one small real run without other libraries. No figure is judged."""

from __future__ import annotations

import argparse
import json
import math
import sys
import xml.etree.ElementTree
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor.benchmarks import (
    ceilings,
    chart,
    command,
    compile_time,
    curves,
    kernel_times,
    ours,
    overheads,
    pages,
    results,
    runner,
    timing,
)
from stagedtensor.benchmarks.arm import Arm
from stagedtensor.benchmarks.kernels import KERNELS
from stagedtensor.benchmarks.results import Results, Row
from stagedtensor.benchmarks.workloads import WORKLOADS, Convolutions, Gpt, Mlp, Workload, flops, least_bytes, start
from stagedtensor.cli import main
from stagedtensor.runtime.thread_pool import available_cpus

FIELDS = (
    "workload", "precision", "threads", "arm", "median_ms", "p10_ms", "p90_ms", "compile_s", "cached_s", "peak_mb",
    "final_loss", "parity",
)  # fmt: skip


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.configure(parser)
    return parser.parse_args(arguments)


def row(arm: str, ms: float, *, workload: str = "mlp-small", precision: str = "f32", counts: bool = True) -> Row:
    return Row(workload, precision, 2, arm, ms, ms * 0.9, ms * 1.2, 1.5, 0.1, 20.0, 0.5, 1e-6, counts)


def positive(value: float | None) -> float:
    assert value is not None
    assert value > 0
    return value


# -- arguments ------------------------------------------------------------------------------------------------------


def test_everything_is_measured_unless_said_otherwise() -> None:
    plan = command.plan(parsed("--arms", "ours"))
    assert plan.workloads == (*WORKLOADS, *KERNELS)
    assert plan.precisions == ("f32", "bf16", "f16")
    assert plan.threads == ((1, 2) if available_cpus() > 1 else (1,))
    assert plan.arms == ("ours",)
    assert (plan.memory, plan.cached, plan.profile) == (True, True, True)


def test_quick_measures_the_main_workloads_on_the_most_threads() -> None:
    plan = command.plan(parsed("--quick", "--arms", "ours", "--no-memory"))
    assert {"mlp-small", "mlp-mid", "gpt-mini", "conv", "elementwise", "rows"} <= set(plan.workloads)
    assert plan.threads == (min(2, available_cpus()),)
    assert plan.effort.rounds < timing.Effort().rounds
    assert not plan.memory


def test_filters_take_names_and_groups() -> None:
    plan = command.plan(
        parsed("--workloads", "conv, gemm,conv", "--precisions", "f16", "--threads", "1", "--arms", "ours")
    )
    assert plan.workloads[0] == "conv"
    assert plan.workloads[1:] == tuple(name for name in KERNELS if name.startswith("gemm"))
    assert plan.legs()[0] == ("conv", "f16")
    assert plan.threads == (1,)
    assert parsed("--workloads", "micro").workloads == tuple(KERNELS)
    assert parsed("--workloads", "training").workloads == tuple(WORKLOADS)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--workloads", "mlp-tiny"), "no workload is called 'mlp-tiny'"),
        (("--workloads", ","), "expected names of workloads"),
        (("--precisions", "f8"), "there are f32, bf16, f16"),
        (("--threads", "0"), "0 threads: this machine offers 1 to"),
        (("--threads", "two"), "expected whole numbers"),
        (("--arms", "ours,mxnet"), "no arm is called 'mxnet'"),
    ],
)
def test_wrong_arguments_say_what_there_is(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_an_arm_whose_library_is_missing_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        parsed("--arms", "ours,jax")
    assert 'pip install "stagedtensor[bench]"' in capsys.readouterr().err
    assert command.plan(parsed()).arms == ("ours",)


def test_no_compile_leaves_one_arm_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "available", list)
    assert command.plan(parsed("--quick")).arms == ("ours", "torch", "torch.compile", "jax")
    assert command.plan(parsed("--quick", "--no-compile")).arms == ("ours", "torch", "jax")


# -- results --------------------------------------------------------------------------------------------------------


def test_a_ratio_is_the_fastest_peer_over_ours() -> None:
    rows = [row("ours", 2.0), row("torch", 5.0), row("jax", 3.0), row("ours", 4.0, precision="bf16")]
    assert results.ratios(rows) == {"mlp-small/f32/2": 1.5}


def test_what_does_not_count_makes_no_ratio() -> None:
    assert results.ratios([row("ours", 2.0, counts=False), row("jax", 3.0)]) == {}
    rows = [row("ours", 2.0), row("torch", 1.0, counts=False), row("jax", 3.0)]
    assert results.ratios(rows) == {"mlp-small/f32/2": 1.5}
    failed = Row("mlp-small", "f32", 2, "torch", error="it broke")
    assert results.ratios([row("ours", 2.0), failed]) == {}


def test_sizes_of_a_kernel_have_a_geometric_mean() -> None:
    rows = [
        *(row("ours", 1.0, workload=f"gemm-{size}") for size in (256, 512)),
        row("torch", 0.5, workload="gemm-256"),
        row("torch", 8.0, workload="gemm-512"),
    ]
    assert results.ratios(rows) == {"gemm-256/f32/2": 0.5, "gemm-512/f32/2": 8.0, "gemm/f32/2": 2.0}


def test_ours_has_to_agree_and_to_move() -> None:
    reference = [2.0, 1.8, 1.6]
    assert results.judged([2.0, 1.8, 1.6], reference, "f32", ours=True) == (0.0, True)
    parity, counts = results.judged([2.0, 1.8, 1.61], reference, "f32", ours=True)
    assert parity == pytest.approx(0.01 / 1.6)
    assert not counts
    assert results.judged([2.0, 1.8, 1.605], reference, "bf16", ours=True)[1]
    assert results.judged([2.0, 1.8, 1.61], reference, "f32", ours=False)[1]
    assert not results.judged([2.0, 2.0, 2.0], [2.0, 2.0, 2.0], "f32", ours=True)[1]
    assert not results.judged([2.0, math.nan], reference, "f32", ours=False)[1]


def measured() -> Results:
    rows = [
        row("ours", 0.05), row("torch", 0.5), row("jax", 0.1),
        row("ours", 0.06, precision="bf16"), row("jax", 0.3, precision="bf16"),
        row("ours", 3.0, workload="gemm-512"), row("jax", 1.0, workload="gemm-512"),
    ]  # fmt: skip
    rows[-2].share = rows[-1].share = 0.5
    peak = {"threads": 2, "flops": {"f32": 1e11, "bf16": 1e12, "f16": 2.5e11}, "copy": 1e10, "target": "avx512"}
    profiles = {"mlp-small/f32/2": [["relu", 0.03], ["waiting for other threads", 0.01]]}
    return Results(
        {"processor": "one", "threads": "2", "date": "2026-01-01"}, {"2": peak}, rows, profiles, {"ctx.run": 2.5}
    )


def test_the_json_has_rows_and_ratios(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    measured().save(path)
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["ratios"] == {
        "mlp-small/f32/2": 2.0, "mlp-small/bf16/2": 5.0, "gemm-512/f32/2": 0.333, "gemm/f32/2": 0.333,
    }  # fmt: skip
    assert all(set(FIELDS) <= set(entry) for entry in content["rows"])
    assert results.load(path) == measured()


def test_later_results_replace_earlier_ones(tmp_path: Path) -> None:
    merged = measured()
    merged.merge(Results(rows=[row("jax", 0.2)]))
    assert len(merged.rows) == len(measured().rows)
    assert merged.ratios()["mlp-small/f32/2"] == 4.0


def test_saved_results_give_table_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results.json"
    measured().save(path)
    assert main(["bench", "--from", str(path), "--write-docs", str(tmp_path)]) == 0
    assert "mlp-small" in capsys.readouterr().out
    page = (tmp_path / "benchmarks.md").read_text(encoding="utf-8")
    assert "| mlp-small | f32 | 0.05 (0.045-0.06) | 0.5 (0.45-0.6) | 0.1 (0.09-0.12) | **2** |" in page
    assert "| mlp-small | 2 | 0.833 |  |" in page  # f32 over bf16
    assert "`relu` 75%" in page
    assert "| ctx.run | 2.5 |" in page
    tables = [line for line in page.splitlines() if line.startswith("|")]
    assert all(line.endswith(" |") for line in tables)


def test_a_page_from_a_busy_machine_says_so() -> None:
    disturbed = measured()
    assert "busy with other work" not in pages.benchmarks(disturbed)
    for entry in disturbed.rows:
        entry.noisy = True
    assert "busy with other work: 7 of 7 figures" in pages.benchmarks(disturbed)


def test_the_page_names_the_floor() -> None:
    page = pages.benchmarks(measured())
    workload = WORKLOADS["mlp-small"]
    by_flops, by_bytes = flops(workload) / 1e11 * 1e3, least_bytes(workload, "f32") / 1e10 * 1e3
    assert f"**{pages.number(0.05 / max(by_flops, by_bytes))}**" in page


@pytest.mark.parametrize(
    ("value", "text"), [(None, ""), (0.0, "0"), (0.05678, "0.0568"), (12345.0, "12300"), (2.0, "2")]
)
def test_numbers_on_pages(value: float | None, text: str) -> None:
    assert pages.number(value) == text


# -- timing ---------------------------------------------------------------------------------------------------------


def test_disturbed_rounds_are_left_out() -> None:
    quiet = [(0.01, {"a": float(at)}) for at in (1, 2, 3)]
    samples = timing.chosen([(0.5, {"a": 100.0}), *quiet])["a"]
    assert samples.ms == [1e3, 2e3, 3e3]
    assert not samples.noisy
    assert samples.quantile(0.5) == 2e3
    assert samples.quantile(0.1) == pytest.approx(1.2e3)


def test_too_few_quiet_rounds_are_noisy() -> None:
    samples = timing.chosen([(0.5, {"a": 9.0}), (0.0, {"a": 1.0}), (0.4, {"a": 2.0})])["a"]
    assert samples.ms == [9e3, 1e3, 2e3]
    assert samples.noisy


def test_arms_take_turns_and_see_every_batch_once() -> None:
    calls: list[tuple[str, int]] = []

    def arm(name: str) -> Arm:
        return Arm(name, lambda at: calls.append((name, at)), lambda handle: None, lambda handle: 0.0)

    samples = timing.take_turns([arm("a"), arm("b")], timing.Effort(rounds=3, block_s=1e-5, leg_s=1.0))
    assert {name: len(found.ms) for name, found in samples.items()} == {"a": 3, "b": 3}
    firsts = [name for (name, _), (before, _) in zip(calls[1:], calls, strict=False) if name != before]
    assert {"a", "b"} == set(firsts)
    for name in ("a", "b"):
        numbers = [at for other, at in calls if other == name][6:]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


# -- workloads ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=lambda workload: workload.name)
def test_the_network_has_the_parameters_of_the_workload(workload: Workload) -> None:
    if isinstance(workload, Gpt):
        workload = replace(workload, layers=1)
    with st.Session(), st.Context("cpu") as ctx:
        _, _, loss = ours.model(workload, "f32")
        ctx.init_params(loss)
        shapes = {p.label: ctx.get_values(p).shape for p in loss.params}
    assert shapes == workload.parameters()


def test_least_work_by_hand() -> None:
    mlp = Mlp("", (3, 5, 2), 4)
    assert flops(mlp) == 4 * (4 * 3 * 5) + 6 * (4 * 5 * 2)
    assert least_bytes(mlp, "bf16") == 16 * (15 + 5 + 10 + 2) + 2 * 2 * 4 * 7
    convolutions = Convolutions("", (8, 8, 1), (2,), (3,), batch=1, kernel=3)
    assert convolutions.flat() == (3, 3, 2)
    assert flops(convolutions) == 4 * (36 * 9 * 2) + 6 * (18 * 3)
    gpt = Gpt("", 1, 4, 2, 3, 5, 1)
    assert flops(gpt) == 6 * (3 * 12 * 16 + 3 * 4 * 4 + 3 * 4 * 5)


def test_every_start_is_the_same() -> None:
    first, again = start(WORKLOADS["lenet"]), start(WORKLOADS["lenet"])
    for name, cells in first.parameters.items():
        np.testing.assert_array_equal(cells, again.parameters[name])
    np.testing.assert_array_equal(first.batches[3][0], again.batches[3][0])


# -- the machine, profiles, charts ----------------------------------------------------------------------------------


def test_the_floor_is_of_both_numbers() -> None:
    peak = ceilings.Ceilings(2, {"f32": 2e9, "bf16": 4e9, "f16": 2e9}, 1e9, "generic")
    assert peak.floor_ms(4e6, 3e6, "f32") == (2.0, 3.0)
    assert peak.floor_ms(4e6, 3e6, "bf16") == (1.0, 3.0)


def test_clocks_stand_behind_every_call_of_the_last_function() -> None:
    text = (
        "ST_KERNEL void relu(float *x) {\n    helper(x);\n}\n\nvoid step(void **frame, int tid) {\n    float *x = frame[0];\n"
        "    if (tid == 0) relu(x);  // x\n    st_barrier_wait(barrier, tid);\n    relu(x);\n}\n"
    )
    timed, names = kernel_times.with_clocks(text)
    assert names == ["relu", kernel_times.WAITING]
    assert "double st_profile[2];" in timed
    assert timed.count("st_profile_count(0, st_profile_last)") == 2
    assert timed.count("st_profile_count(1, st_profile_last)") == 1
    assert timed.index("double st_profile[2]") < timed.index("void step(")


def test_charts_are_svg() -> None:
    text = chart.line_chart("a < b", "x", "y", {"one": [(1, 2.0), (10, 20.0)], "two": [(1, 3.0), (10, 3.0)]})
    root = xml.etree.ElementTree.fromstring(text)
    lines = [element for element in root if element.tag.endswith("polyline")]
    assert len(lines) == 2
    (x0, y0), (x1, y1) = ([float(cell) for cell in point.split(",")] for point in lines[0].get("points", "").split())
    assert x1 > x0
    assert y1 < y0  # up is smaller
    with pytest.raises(ValueError, match="0 or less"):
        chart.line_chart("t", "x", "y", {"one": [(0, 1.0)]})


def test_saved_curves_give_a_page_and_charts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = [(8.0, 1.0), (16.0, 2.0), (32.0, 8.0)]
    saved = curves.Curve("batch", "Step time against the batch", "batch", "ms per step", {"f32": line, "bf16": line})
    compiles = [
        compile_time.Row(f"{nodes} nodes", nodes, 5, 100, 0.1, 0.05, 0.2, nodes / 20, nodes / 10, 0.25, 0.2)
        for nodes in (10, 10, 100)
    ]
    machine = {"processor": "one", "threads": "2", "date": "2026-01-01"}
    growth = curves.Growth([saved, curves.compile_curve(compiles)], compiles, machine)
    curves.save(growth, tmp_path / "curves.json")
    assert curves.load(tmp_path / "curves.json").compiles == compiles
    assert main(["bench", "--curves", "--from", str(tmp_path / "curves.json"), "--write-docs", str(tmp_path)]) == 0
    page = (tmp_path / "growth.md").read_text(encoding="utf-8")
    assert "| 16 | 2 | 2 | 1.00 |" in page
    assert "| 32 | 8 | 8 | 2.00 |" in page
    assert "figures/batch.svg" in page
    assert "| 100 | 10 | 5 | 0.35 | 0.25 | 1.00 |" in page  # compile time by number of nodes
    assert "| 10 nodes | 10 | 5 | 100 | 0.1 | 0.2 | 0.5 | 1 | 0.25 |" in page
    xml.etree.ElementTree.parse(tmp_path / "figures" / "batch.svg")
    assert "wrote" in capsys.readouterr().out


DYING = """#!{python}
import json, sys
job = json.loads(sys.argv[3])
workload, precision = job["legs"][0]
if workload == "conv":
    sys.exit(3)
row = dict(workload=workload, precision=precision, threads=job["threads"], arm="ours", median_ms=1.0)
print(json.dumps(dict(rows=[row])), flush=True)
sys.exit(3 if len(job["legs"]) > 1 else 0)
"""


def test_a_leg_that_ends_the_process_costs_itself_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text(DYING.format(python=sys.executable), encoding="utf-8")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    plan = runner.Plan(("mlp-small", "conv", "lenet"), ("f32",), (1,), ("ours", "jax"), timing.Effort())
    rows = [entry for content in runner.timed(plan, 1, tmp_path / "scratch") for entry in content["rows"]]
    assert [(entry["workload"], entry["arm"]) for entry in rows] == [
        ("mlp-small", "ours"), ("conv", "ours"), ("conv", "jax"), ("lenet", "ours"),
    ]  # fmt: skip
    assert rows[1]["error"] == "the timing process ended with status 3"


@pytest.mark.slow
def test_a_small_run_without_other_libraries() -> None:
    plan = runner.Plan(
        ("mlp-small", "gemm-256"), ("f16",), (1,), ("ours",), timing.Effort(rounds=3, block_s=0.005, leg_s=2.0)
    )
    lines: list[str] = []
    kept: list[int] = []
    found = runner.run(plan, lines.append, lambda so_far: kept.append(len(so_far.rows)))
    step, product = found.rows
    assert {1, 2} <= set(kept)
    assert [line.partition(":")[0] for line in lines] == ["mlp-small/f16/1", "gemm-256/f16/1"]
    assert step.error is None
    assert step.counts
    assert 0 < positive(step.p10_ms) <= positive(step.median_ms) <= positive(step.p90_ms)
    positive(step.cached_s)
    positive(step.compile_s)
    assert positive(step.final_loss) < 2.3
    assert positive(step.peak_mb) < positive(step.process_mb)
    assert product.counts
    positive(product.share)
    names = [name for name, _ in found.profiles["mlp-small/f16/1"]]
    assert any("momentum" in name for name in names)
    assert found.peaks["1"]["flops"]["f32"] > 0
    assert found.ratios() == {}
    positive(found.overheads[overheads.GATED])
