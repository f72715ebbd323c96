"""The status page of the ops: complete, fresh, and true of what its samples do when they run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor import functions, losses, op_status
from stagedtensor.autodiff.rules import DERIVATIVES
from stagedtensor.autodiff.structural import STRUCTURAL
from stagedtensor.cli import main
from stagedtensor.op_status import COLUMNS, Status, problems, status
from stagedtensor.op_table import OPS
from stagedtensor.public_ops import BLOCKS, PUBLIC_OPS, SPELLED, PublicOp, Values, sample
from stagedtensor.runtime.cuda import is_available
from tests.oracles.gradients import grad_of, weighted

Array = np.ndarray[Any, Any]
PAGE = Path(__file__).parents[2] / "docs" / "ops-status.md"

_WITH_GRADIENT = """
add sub mul div neg recip pow mod fma abs maximum minimum clamp where
exp exp2 expm1 log log2 log10 sqrt rsqrt sin cos tanh erf
relu leaky_relu elu sigmoid silu gelu softmax log_softmax matmul matmul_nt einsum
sum mean variance max min transpose permute reshape flatten squeeze unsqueeze narrow concat split pad2d tril
gather index_select unfold conv1d conv2d conv3d conv_transpose1d max_pool2d avg_pool2d upsample2d
layer_norm rms_norm cross_entropy attention cast
"""
_WITHOUT = "sign floor floor_div lt le gt ge eq ne argmax one_hot stop_gradient"
DIFFERENTIABLE, NON_DIFFERENTIABLE = _WITH_GRADIENT.split(), _WITHOUT.split()


@pytest.fixture(scope="module")
def matrix() -> dict[str, Status]:
    return {row.name: row for row in status()}


# -- the matrix -------------------------------------------------------------------------------------------------------


def test_status_names_every_op(matrix: dict[str, Status]) -> None:
    assert len(DIFFERENTIABLE) == 68
    assert set(DIFFERENTIABLE) | set(NON_DIFFERENTIABLE) <= matrix.keys()
    assert sum(matrix[name].backward for name in DIFFERENTIABLE) == 68
    assert all(matrix[name].cells()[3] == "n/a" for name in NON_DIFFERENTIABLE)


def test_status_is_yes_everywhere(matrix: dict[str, Status]) -> None:
    for row in matrix.values():
        assert "no" not in row.cells(), row
    assert {row.name for row in matrix.values() if row.encodings is not None} == {
        "matmul", "matmul_nt", "gather", "index_select",
    }  # fmt: skip
    assert {len(row.encodings) for row in matrix.values() if row.encodings is not None} == {12}


def test_status_tells_composites_and_arity(matrix: dict[str, Status]) -> None:
    kinds = {name: (matrix[name].kind, matrix[name].arity) for name in ("fma", "softmax", "layer_norm", "relu")}
    assert kinds == {
        "fma": ("primitive", 3), "softmax": ("composite", 1), "layer_norm": ("composite", 3), "relu": ("primitive", 1),
    }  # fmt: skip


@pytest.mark.skipif(not PAGE.exists(), reason="not in a checkout: there is no page")
def test_status_page_is_fresh_and_a_stale_copy_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, matrix: dict[str, Status]
) -> None:
    monkeypatch.setattr("stagedtensor.cli.ops.status", lambda: list(matrix.values()))
    assert main(["ops", "--check", str(PAGE)]) == 0
    stale = tmp_path / "stale.md"
    stale.write_text(PAGE.read_text(encoding="utf-8").replace("| yes |", "| no |", 1), encoding="utf-8")
    assert main(["ops", "--check", str(stale)]) == 1
    assert f"--write {stale}" in capsys.readouterr().err
    assert main(["ops", "--check", str(tmp_path / "missing.md")]) == 1
    assert "missing.md is no file; write it" in capsys.readouterr().err
    assert main(["ops", "--write", str(tmp_path / "no" / "page.md")]) == 1
    assert "page.md cannot be written: No such file or directory" in capsys.readouterr().err


def test_status_as_json_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, matrix: dict[str, Status]) -> None:
    monkeypatch.setattr("stagedtensor.cli.ops.status", lambda: list(matrix.values()))
    path = tmp_path / "status.json"
    assert main(["ops", "--format", "json", "--write", str(path)]) == 0
    entries = {entry["op"]: entry for entry in json.loads(path.read_text())}
    assert entries["matmul"]["fused encodings"] == "12"
    assert entries["matmul"]["encodings"][0] == "Q4_0"
    assert set(COLUMNS) <= entries["add"].keys()
    assert entries["sign"]["Backward"] == "n/a"
    assert "step" in entries["sign"]["non_differentiable"]


def test_status_totals_count_what_is_done(matrix: dict[str, Status]) -> None:
    rows = [matrix["add"], replace(matrix["sub"], backward=False), matrix["sign"], matrix["matmul"]]
    page = op_status.as_markdown(rows)
    assert "| done / applicable | 4 / 4 | 4 / 4 | 2 / 3 | 4 / 4 | 12 / 12 |" in page


# -- the tables behind it ---------------------------------------------------------------------------------------------


def test_coverage_is_complete() -> None:
    assert problems() == []


def test_coverage_wants_a_row_for_every_public_function(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = (f"{functions.__name__}.", losses.__name__)
    public = {name for name in st.__all__ if getattr(getattr(st, name), "__module__", "").startswith(modules)}
    assert "conv2d" in public
    assert BLOCKS.keys() <= public
    assert {SPELLED.get(name, name) for name in public - BLOCKS.keys()} <= PUBLIC_OPS.keys()
    fewer = {name: row for name, row in PUBLIC_OPS.items() if name != "variance"}
    assert problems(fewer) == ["var: a public function without a row in public_ops"]


def injected(**changed: Any) -> list[str]:
    row = PublicOp(**{"name": "injected", "build": st.tanh, "operands": (Values((3,)),), **changed})
    return problems({**PUBLIC_OPS, "injected": row})


def test_coverage_wants_a_gradient_or_a_reason() -> None:
    assert injected() == []
    assert injected(build=st.sign) == ["injected: has neither a gradient nor a reason for having none"]
    assert injected(build=st.sign, non_differentiable="steps") == []
    assert injected(non_differentiable="steps") == ["injected: has gradients, and yet a reason for having none (steps)"]
    assert injected(operands=()) == ["injected: a row without operands has no sample"]


def test_coverage_wants_rules_that_are_dispatched_to(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(STRUCTURAL, "unused", STRUCTURAL["tree"])
        assert problems() == ["unused: a gradient rule that no op is dispatched to"]
    with monkeypatch.context() as patch:
        patch.delitem(STRUCTURAL, "softplus")
        assert problems() == ["softplus: a gradient rule that does not exist"]
    with monkeypatch.context() as patch:
        patch.delitem(DERIVATIVES, "erf")
        assert problems() == ["erf: the scalar op has neither a derivative nor a reason for having none"]
    with monkeypatch.context() as patch:
        patch.setitem(DERIVATIVES, "floor", DERIVATIVES["relu"])
        assert "floor: the scalar op has both a derivative and a reason for having none" in problems()
    with monkeypatch.context() as patch:
        patch.setitem(DERIVATIVES, "unknown", DERIVATIVES["relu"])
        assert problems() == ["unknown: a derivative that no op is dispatched to"]
    with monkeypatch.context() as patch:
        patch.setitem(OPS, "unknown", replace(OPS["relu"], name="unknown", non_differentiable="a test"))
        assert problems() == ["unknown: a scalar op that no sample computes"]


def test_coverage_refusals_are_a_no_and_faults_are_raised() -> None:
    def refused(x: st.Tensor) -> st.Tensor:
        noise: st.Tensor = st.uniform(0, 1, output=[3])  # counter-based random numbers have no StableHLO form
        return x + noise

    row = PublicOp("draw", refused, (Values((3,)),))
    assert [entry.stablehlo for entry in status({"draw": row})] == [False]

    def faulty(x: st.Tensor) -> st.Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        status({"fault": PublicOp("fault", faulty, (Values((3,)),))})


# -- the samples, run -------------------------------------------------------------------------------------------------

GPU = [pytest.mark.gpu, pytest.mark.skipif(not is_available(), reason="no GPU")]
NAMES = list(PUBLIC_OPS)
WITH_GRADIENT = [
    name for name in NAMES if name != "cast" and (name in DIFFERENTIABLE or not PUBLIC_OPS[name].non_differentiable)
]


def by_group(names: list[str]) -> pytest.MarkDecorator:
    groups = [names[at : at + 20] for at in range(0, len(names), 20)]
    return pytest.mark.parametrize("names", groups, ids=lambda group: f"{group[0]}-{group[-1]}")


def results(names: Sequence[str], device: str) -> list[Array]:
    with st.Session(), st.Context(device) as ctx:
        samples = [sample(PUBLIC_OPS[name]) for name in names]
        routine = ctx.compile([built.result for built in samples])
        for built in samples:
            ctx.init_params(built.result)
        ctx.run(routine)
        return [ctx.get_values(built.result).astype(np.float64) for built in samples]


@by_group(NAMES)
@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda-emulated", marks=pytest.mark.slow), pytest.param("cuda", marks=GPU)]
)
def test_coverage_samples_run_forward(names: list[str], device: str) -> None:
    for name, found, wanted in zip(names, results(names, device), results(names, "reference"), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=2e-6, err_msg=name)
        assert np.abs(wanted).max() > 0, name


@by_group(WITH_GRADIENT)
def test_coverage_gradients_are_central_differences(names: list[str]) -> None:
    """All ops of a group are one routine; a run moves one cell of each of them."""
    step = 1e-5
    with st.Session(default_prec=st.f64, default_grad_prec=st.f64), st.Context("cpu") as ctx:
        samples = [sample(PUBLIC_OPS[name], st.f64) for name in names]
        lost = [weighted(built) for built in samples]
        routine = ctx.compile(st.grad_update(lost))
        for loss in lost:
            ctx.init_params(loss)
        params = [[(p, ctx.get_values(p)) for p in built.params] for built in samples]
        ctx.run(routine)
        found = [
            np.concatenate([_gradient(ctx, loss, param, values) for param, values in held])
            for loss, held in zip(lost, params, strict=True)
        ]
        numeric = [np.zeros_like(slope) for slope in found]
        for cell in range(max(slope.size for slope in found)):
            sides = []
            for sign in (1.0, -1.0):
                for held in params:
                    _move(ctx, held, cell, sign * step)
                ctx.run(routine)
                sides.append([float(ctx.get_values(loss)) for loss in lost])
            for slope, above, below in zip(numeric, *sides, strict=True):
                if cell < slope.size:
                    slope[cell] = (above - below) / (2 * step)
    for built, got, want in zip(samples, found, numeric, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * np.abs(want).max(), err_msg=built.op.name)
        assert np.abs(want).max() > 1e-3, f"{built.op.name}: the check would pass with no gradient at all"


def _gradient(ctx: st.Context, loss: st.Tensor, param: st.Tensor, values: Array) -> Array:
    """The gradient of a parameter, zeros where the op passes it none."""
    trained = {entry.node for entry in st.trainable_params(loss)}
    slope = ctx.get_values(grad_of(param)) if param.node in trained else np.zeros_like(values)
    return slope.reshape(-1)


def _move(ctx: st.Context, held: list[tuple[st.Tensor, Array]], cell: int, by: float) -> None:
    """Set the parameters of one op to their values with one cell of them moved."""
    for param, values in held:
        moved = values.copy()
        if 0 <= cell < values.size:
            moved.flat[cell] += by
        ctx.set_values(param, moved)
        cell -= values.size


def test_samples_are_the_same_every_time() -> None:
    first, second = (sample(PUBLIC_OPS["matmul"]) for _ in range(2))
    for a, b in zip(first.values, second.values, strict=True):
        np.testing.assert_array_equal(a, b)
    other = sample(PUBLIC_OPS["matmul"], seed=1)
    assert (other.values[0] != first.values[0]).all()
