"""Generated code from the kernel cache: found for the same program, not for another, with nothing generated anew."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor import nn
from stagedtensor.block_formats import Q8_0
from stagedtensor.codegen import fingerprint as fingerprints
from stagedtensor.codegen.fingerprint import fingerprint
from stagedtensor.node import Node
from stagedtensor.program import solve_program
from stagedtensor.runtime import cpu, cpu_generation, generator_version, linking
from stagedtensor.runtime.cpu_code import loads
from stagedtensor.runtime.target import detect
from stagedtensor.statements import Scope
from tests.encodings.samples import sample

Built = tuple[Any, dict[str, Any]]


@pytest.fixture(autouse=True)
def fixed_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of the package may be younger than this process."""
    monkeypatch.setattr(cpu, "generator_version", lambda: "one")


def network(
    *,
    literal: float = 0.5,
    width: int = 8,
    label: str = "w1",
    prec: Any = None,
    policy: Any = None,
    placement: str = "auto",
    saturate: bool = False,
    init: float = 1.0,
) -> st.Tensor:
    """A small network; every argument but the last changes the program."""
    x = st.placeholder("x", batch=[4], output=[6], prec=prec or st.f32)
    h = st.relu(st.param(label, output=[width]) @ x * literal + st.host_scalar("shift", init))
    out = st.param("w2", output=[3]) @ st.place(h, placement).cast(st.f16, saturate=saturate)
    if policy is not None:
        st.PrecisionPolicy(activation=policy).apply(out)
    return st.mean(out * out)


def compiled(folder: Path, build: Callable[[], Any] = network, **options: Any) -> tuple[st.Routine, bool]:
    """Compile in a new session and context; return the routine, and whether its code was generated."""
    calls: list[int] = []
    generate = cpu_generation.generate_cpu

    def counted(*args: Any, **given: Any) -> Any:
        calls.append(1)
        return generate(*args, **given)

    with pytest.MonkeyPatch.context() as patch, st.Session():
        patch.setattr(cpu_generation, "generate_cpu", counted)
        ctx = st.Context("cpu", cache_dir=folder, target=options.pop("target", None))
        routine = ctx.compile(build(), name="step", **options)
    return routine, bool(calls)


def test_the_same_program_is_not_generated_again(tmp_path: Path) -> None:
    first, generated = compiled(tmp_path)
    assert generated
    again, generated = compiled(tmp_path)
    assert not generated
    assert again.source == first.source
    assert again.kernels == first.kernels
    assert str(again) == str(first)
    assert again.executable.temporaries == first.executable.temporaries
    assert again.executable.types == first.executable.types
    assert [node.label for node in again.executable.external] == [node.label for node in first.executable.external]
    lines = range(1, len(first.source.splitlines()) + 1)
    assert first.executable.locate is not None
    assert again.executable.locate is not None
    places = [first.executable.locate(line) for line in lines]
    assert places == [again.executable.locate(line) for line in lines]
    assert any(place and "test_code_cache.py" in place for place in places)


def test_what_a_cached_routine_computes(tmp_path: Path) -> None:
    results = []
    for _ in range(2):
        with st.Session(), st.Context("cpu", cache_dir=tmp_path) as ctx:
            loss = network()
            step = ctx.compile(st.sequence(st.grad_update(loss), st.sgd_update(loss, 0.1)))
            ctx.init_params(loss, seed=1)
            x = next(node for node in step.stored_nodes if node.label == "x")
            ctx.set_values(x.tensor, np.linspace(-1, 1, 24).reshape(4, 6))
            for _ in range(3):
                ctx.run(step)
            results.append((ctx.stats.compiles, ctx.get_values(loss).tobytes()))
    assert results[0][1] == results[1][1]
    assert [compiles for compiles, _ in results] == [1, 0]


CHANGES: dict[str, dict[str, Any]] = {
    "literal": {"literal": 0.25},
    "sign of zero": {"literal": -0.0},
    "shape": {"width": 9},
    "label": {"label": "w"},
    "precision": {"prec": st.bf16},
    "policy": {"policy": st.bf16},
    "placement": {"placement": "materialized"},
    "saturation": {"saturate": True},
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_program_is_generated(change: str, tmp_path: Path) -> None:
    compiled(tmp_path, lambda: network(literal=0.0 if change == "sign of zero" else 0.5))
    routine, generated = compiled(tmp_path, lambda: network(**CHANGES[change]))
    assert generated
    fresh, _ = compiled(tmp_path / "fresh", lambda: network(**CHANGES[change]))
    assert routine.source == fresh.source


def test_options_of_compile_are_part_of_the_key(tmp_path: Path) -> None:
    compiled(tmp_path)
    for options in ({"numerics": st.Numerics(fast_math=True)}, {"fusion": False}, {"target": "x86-64"}):
        assert compiled(tmp_path, **options)[1], options
        assert not compiled(tmp_path, **options)[1], options


def test_what_is_kept_is_part_of_the_key(tmp_path: Path) -> None:
    for keep, expected in ((False, True), (True, True), (True, False), (False, False)):
        with st.Session(), st.Context("cpu", cache_dir=tmp_path) as ctx:
            x = st.placeholder("x", output=[8], prec=st.f32)
            inner = (x * 2.0).named("inner")
            with pytest.MonkeyPatch.context() as patch:
                if not expected:
                    patch.setattr(cpu_generation, "generate_cpu", None)
                ctx.compile(inner + 1.0, keep=[inner] if keep else [])


def test_an_encoding_of_the_users_own_is_not_taken_for_ours_of_that_name(tmp_path: Path) -> None:
    """Nothing in a fingerprint says what a function computes."""

    def doubled(block: Any, element: Any) -> Any:
        assert Q8_0.decode is not None
        return Q8_0.decode(block, element) + Q8_0.decode(block, element)

    blocks = np.ones((2, 34), np.uint8)
    blocks[:, :2] = np.array([1.0], "<f2").view(np.uint8)
    for encoding, expected in ((Q8_0, 64.0), (replace(Q8_0, decode=doubled), 128.0), (Q8_0, 64.0)):
        with st.Session(), st.Context("cpu", cache_dir=tmp_path) as ctx:
            weights = st.constant(st.encodings.Encoded((1, 64), st.f32, encoding, blocks.tobytes()))
            product = weights @ st.constant(np.ones(64))
            ctx.run(ctx.compile(product))
            assert ctx.get_values(product) == expected


def test_values_of_host_scalars_and_folders_are_no_part_of_the_key(tmp_path: Path) -> None:
    compiled(tmp_path)
    assert not compiled(tmp_path, lambda: network(init=2.0))[1]


def test_another_version_of_the_generator_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled(tmp_path)
    monkeypatch.setattr(cpu, "generator_version", lambda: "two")
    assert compiled(tmp_path)[1]
    monkeypatch.setattr(cpu, "generator_version", lambda: None)
    assert compiled(tmp_path)[1]
    assert compiled(tmp_path)[1]


def test_debug_generates_and_verifies(tmp_path: Path) -> None:
    compiled(tmp_path)
    assert compiled(tmp_path, debug=True)[1]


def test_a_library_is_the_same_when_lines_have_moved(tmp_path: Path) -> None:
    x = "st.placeholder('x', output=[4], prec=st.f32)"
    routines = []
    for lines in (1, 5):
        scope: dict[str, Any] = {"st": st}
        with st.Session(), st.Context("cpu", cache_dir=tmp_path) as ctx:
            exec(compile("\n" * lines + f"y = {x} * 3.0", "model.py", "exec"), scope)
            routines.append((ctx.compile(scope["y"], name="step").source, ctx.stats.compiles, ctx.stats.cache_hits))
    (first, *counts), (second, *again) = routines
    assert "model.py:2" in first
    assert second == first.replace("model.py:2", "model.py:6")
    assert (counts, again) == ([1, 0], [0, 1])


# -- damage -------------------------------------------------------------------------------------------------------


def entries(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*.json") if path.name != "manifest.json")


def test_damaged_code_is_generated_anew(tmp_path: Path) -> None:
    first, _ = compiled(tmp_path)
    (path,) = entries(tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    again, generated = compiled(tmp_path)
    assert generated
    assert again.source == first.source
    assert not compiled(tmp_path)[1]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"functions": [], "kernels": [{"source": 3}], "text": ""}'])
def test_what_is_no_code_is_generated_anew(content: str, tmp_path: Path) -> None:
    """As whole as its manifest says, and yet nothing that this version wrote."""
    first, _ = compiled(tmp_path)
    (path,) = entries(tmp_path)
    path.write_text(content, encoding="utf-8")
    manifest = path.parent / "manifest.json"
    stated = json.loads(manifest.read_text(encoding="utf-8"))
    stated |= {"bytes": len(content), "sha256": hashlib.sha256(content.encode()).hexdigest()}
    manifest.write_text(json.dumps(stated), encoding="utf-8")
    again, generated = compiled(tmp_path)
    assert generated
    assert again.source == first.source


def test_a_library_that_is_gone_is_built_from_the_cached_code(tmp_path: Path) -> None:
    first, _ = compiled(tmp_path)
    for library in tmp_path.rglob("*.so"):
        library.unlink()
    again, generated = compiled(tmp_path)
    assert not generated
    assert again.source == first.source
    assert again.context.stats.compiles == 1


# -- fingerprints -------------------------------------------------------------------------------------------------


def transformer() -> Any:
    x = st.placeholder("x", batch=[2, 8], prec=st.i32)
    with st.master_weights("bf16"):
        step = st.host_scalar("step", 0, st.i32)
        network = nn.gpt(11, width=16, layers=1, heads=2, tokens=8, rate=0.1, step=step)
        loss = st.cross_entropy(network(x), x)
    st.PrecisionPolicy(activation=st.bf16, grad=st.bf16).apply(loss)
    return st.sequence(st.grad_update(loss), st.adamw_update(loss, 0.1))


def image() -> Any:
    x = st.placeholder("x", batch=[2], output=[8, 8, 1], prec=st.f32)
    return st.grad_update(st.mean(st.max_pool2d(nn.conv2d(3, 4)(x), 2)))


def indexing() -> Any:
    x = st.placeholder("x", batch=[st.dynamic("n", 6)], output=[5], prec=st.f32)
    joined = st.concat([x, x * 2.0, st.constant(np.arange(5.0), batch=0, label="row") + x])
    return [st.argmax(joined), st.gather(st.param("table", output=[7], input=[3]), st.argmax(x))]


def packed() -> Any:
    weight = st.constant(sample(st.encodings.Q4_0, 4, 2), label="weight")
    return weight @ st.placeholder("x", batch=[3], output=[64], prec=st.f32)


PROGRAMS = (network, transformer, image, indexing, packed)


@pytest.mark.parametrize("build", PROGRAMS)
def test_generation_reads_of_nodes_and_scopes_what_fingerprints_hold(
    build: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fact that generation reads and the fingerprint lacks would give one program the code of another."""
    with st.Session():
        solved = solve_program(build(), "step")
        program = linking.for_codegen(solved, frozenset())
        assert fingerprint(program) is not None
        read: dict[type, set[str]] = {Node: set(), Scope: set()}
        for kind, names in read.items():

            def recorded(self: Any, name: str, names: set[str] = names) -> Any:
                names.add(name)
                return object.__getattribute__(self, name)

            monkeypatch.setattr(kind, "__getattribute__", recorded, raising=False)
        cpu_generation.generate_cpu(
            program,
            detect(),
            st.Numerics(),
            {},
            fusion=True,
            check=True,
        )
        monkeypatch.undo()
    passed_on = {"shape_node", "value", "owner", "declared"}  # of which solved shapes are, and these stand there
    assert read[Node] - {name for name in read[Node] if name.startswith("__")} <= fingerprints.NODE_FACTS | passed_on
    assert read[Scope] - {name for name in read[Scope] if name.startswith("__")} <= fingerprints.SCOPE_FACTS


_TEXTS = """
import hashlib, sys
import tests.cases.test_code_cache as cases
import stagedtensor as st
from stagedtensor.codegen.fingerprint import fingerprint
from stagedtensor.program import solve_program
from stagedtensor.runtime import linking
for build in cases.PROGRAMS:
    with st.Session():
        found = fingerprint(linking.for_codegen(solve_program(build(), "step"), frozenset()))
        print(hashlib.sha256(found.content).hexdigest())
"""


def test_fingerprints_are_the_same_in_every_process() -> None:
    texts = set()
    for seed in ("1", "2"):
        environment = dict(os.environ, PYTHONHASHSEED=seed)
        texts.add(
            subprocess.run([sys.executable, "-c", _TEXTS], env=environment, capture_output=True, check=True).stdout
        )
    assert len(texts) == 1
    assert len(texts.pop().split()) == len(PROGRAMS)


def test_code_survives_being_written() -> None:
    with st.Session():
        solved = solve_program(transformer(), "step")
        target = detect()
        program = linking.for_codegen(solved, frozenset())
        code = cpu_generation.generate_cpu(program, target, st.Numerics(), {}, fusion=True, check=False)
    assert loads(code.dumps()) == code


def test_files_that_changed_since_they_were_loaded_have_no_version(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("one = 1\n")
    written = path.stat().st_mtime
    first = generator_version.version_of(iter([path]), loaded=written + 1)
    assert first is not None
    assert generator_version.version_of(iter([path]), loaded=written - 1) is None
    path.write_text("one = 2\n")
    assert generator_version.version_of(iter([path]), loaded=path.stat().st_mtime + 1) not in (None, first)
    assert generator_version.version_of(iter([tmp_path / "missing.py"]), loaded=written) is None


def test_the_version_covers_generator_and_solvers() -> None:
    names = {str(path.relative_to(generator_version._PACKAGE)) for path in generator_version._files()}
    assert {
        "codegen/lower.py",
        "codegen/schedule/choose.py",
        "codegen/prelude/bits.h",
        "shapes/projections.py",
    } <= names
    assert {"conversion.py", "op_table.py", "runtime/cpu_generation.py", "runtime/pool/pool.h"} <= names
