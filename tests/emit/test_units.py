"""A source in several translation units: every kernel once, the same bits, errors at the lines of the whole source."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor.codegen.emit import units as splitting
from stagedtensor.codegen.emit.units import units
from stagedtensor.errors import CompileError
from stagedtensor.runtime import cpu
from stagedtensor.runtime.compiler import compile_shared, find_compiler
from stagedtensor.runtime.cpu_code import CpuCode
from stagedtensor.runtime.cpu_generation import translation_units
from stagedtensor.runtime.target import TARGETS, Target, detect

from .texts import text_for


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splitting, "_LEAST", 500)


def training_step() -> tuple[st.Tensor, st.Comp]:
    x = st.placeholder("x", batch=[8], output=[12], prec=st.f32)
    h = st.softmax(st.param("w1", output=[16]) @ x + st.param("b1", init=0.0))
    loss = st.mean((st.param("w2", output=[3]) @ h) ** 2)
    return loss, st.sequence(st.grad_update(loss), st.sgd_update(loss, 0.1, momentum=0.9))


def code(target: Target) -> CpuCode:
    with st.Session():
        return text_for(training_step()[1], target)[0]


def test_every_kernel_is_in_one_unit_and_declared_in_all() -> None:
    whole = code(TARGETS["x86-64"])
    found = units(whole.text, [(item.first, item.last) for item in whole.functions], 3, file="routine.c")
    assert found is not None
    assert len(found.kernels) == 3
    defined = re.compile(r"^ST_KERNEL void (\w+)\([^)]*\) \{", re.MULTILINE)
    declared = re.compile(r"^ST_KERNEL void (\w+)\([^)]*\);", re.MULTILINE)
    names = defined.findall(whole.text)
    assert len(names) == len(whole.functions)
    assert sorted(name for text in found.kernels for name in defined.findall(text)) == sorted(names)
    assert not defined.findall(found.routine)
    for text in (*found.kernels, found.routine):
        assert sorted(declared.findall(text)) == sorted(names)
    lengths = [len(text) for text in found.kernels]
    assert max(lengths) < 1.5 * min(lengths)
    assert units(whole.text, [(item.first, item.last) for item in whole.functions], 3, file="routine.c") == found


def test_short_sources_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = code(TARGETS["x86-64"])
    monkeypatch.setattr(splitting, "_LEAST", len(whole.text))
    assert translation_units(whole, 8) == ()


def test_an_error_is_told_at_the_line_of_the_whole_source(tmp_path: Path) -> None:
    whole = code(TARGETS["x86-64"])
    lines = whole.text.split("\n")
    at = whole.functions[-1].last - 1  # the closing brace of the last kernel, counted from 0
    lines[at] = "missing; }"
    broken = CpuCode(**{**vars(whole), "text": "\n".join(lines)})
    compiler = find_compiler()
    with pytest.raises(CompileError) as caught:
        compile_shared(
            broken.text,
            tmp_path / "f.so",
            flags=compiler.flags(TARGETS["x86-64"]),
            compiler=compiler,
            locate=broken.locate,
            split=translation_units(broken, 3),
        )
    assert re.search(rf"> +{at + 1} \| missing; }}", str(caught.value))
    assert "test_units.py" in str(caught.value)
    assert caught.value.source == broken.text


def test_the_number_of_units_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(0).normal(size=(8, 12)).astype(np.float32)
    results = []
    for count in (1, 2, 5):
        monkeypatch.setattr(cpu, "_MOST_UNITS", count)
        monkeypatch.setattr(cpu, "available_cpus", lambda count=count: count)
        with st.Session(), st.Context("cpu", cache_dir=tmp_path / str(count), target=detect().name) as ctx:
            loss, comp = training_step()
            step = ctx.compile(comp, name="step")
            ctx.init_params(loss, seed=0)
            data = next(node for node in step.stored_nodes if node.label == "x")
            ctx.set_values(data.tensor, x)
            for _ in range(5):
                ctx.run(step)
            params = [ctx.get_values(param).tobytes() for param in loss.params]
            results.append((step.source, ctx.get_values(loss).tobytes(), *params))
    assert results[0] == results[1] == results[2]
