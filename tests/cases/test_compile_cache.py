"""Compiling: a failed build leaves nothing behind, equal names do not collide, processes share a cold cache."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import stagedtensor as st

from .running import Program, both_devices, program, same


@both_devices
def test_a_failed_compile_leaves_nothing_behind(device: str) -> None:
    with program(device) as p:
        x = p.input([1.0, 2.0])
        w = st.param("w", input=None, output=None)
        y = (w @ x).named("y")
        messages = []
        for _ in range(2):
            with pytest.raises(st.errors.ShapeError) as caught:
                p.ctx.compile(y)
            messages.append(str(caught.value).splitlines()[0])
        assert messages[0] == messages[1]
        assert p.ctx.memory_report().stored_bytes == 0
        fixed = y + p.input([10.0, 20.0, 30.0])  # now the size is known
        p.ctx.set_values(w, np.ones((3, 2)))
        same(p.run(fixed)[0], [13, 23, 33])


@both_devices
def test_a_failed_compile_settles_no_precision(device: str) -> None:
    with program(device) as p:
        x = p.input([1.0, 2.0], st.f16)
        y = x * 70000.0
        for _ in range(2):
            with pytest.raises(st.errors.ConstantRangeError, match="70000"):
                p.ctx.compile(y)
        st.specify(y, st.f32)
        constant = st.constant(70000.0, prec=st.f32)
        same(p.run(x * constant)[0], [70000, 140000])


def test_routines_of_one_name_stay_apart() -> None:
    with program() as p:
        x = p.input([1.0, 2.0])
        first, second = (x + 1.0).named("y"), (x * 10.0).named("y")
        one, other = p.ctx.compile(first, name="step"), p.ctx.compile(second, name="step")
        p.feed()
        for routine in (one, other, one):
            p.ctx.run(routine)
        same(p.ctx.get_values(first), [2, 3])
        same(p.ctx.get_values(second), [10, 20])
        assert p.ctx.compile(first, name="step") is one


def test_numerics_and_targets_have_binaries_of_their_own(tmp_path: Path) -> None:
    def train(numerics: st.Numerics) -> tuple[int, int]:
        with st.Session(), st.Context("cpu", cache_dir=tmp_path) as ctx:
            p = Program(ctx)
            p.run(st.sum(p.input([1.0, 2.0]) / 3.0), numerics=numerics)
            return ctx.stats.compiles, ctx.stats.cache_hits

    assert train(st.Numerics()) == (1, 0)
    assert train(st.Numerics()) == (0, 1)
    assert train(st.Numerics(fast_math=True)) == (1, 0)
    assert train(st.Numerics()) == (0, 1)


def test_a_corrupt_cache_entry_is_rebuilt(tmp_path: Path) -> None:
    def run() -> int:
        with st.Session(), st.Context("cpu", cache_dir=tmp_path) as ctx:
            p = Program(ctx)
            same(p.run(p.input([1.0, 2.0]) * 3.0)[0], [3, 6])
            return ctx.stats.compiles

    assert run() == 1
    libraries = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix == ".so"]
    assert libraries
    for path in libraries:
        # a new file, since the old one may still be mapped
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content[: len(content) // 2])
        path.chmod(0o700)
    assert run() == 1


_WORKER = """
import sys
import stagedtensor as st
offset, folder = float(sys.argv[1]), sys.argv[2]
with st.Session(), st.Context("cpu", cache_dir=folder) as ctx:
    x = st.placeholder("x", output=[3], prec=st.f32)
    shared, own = (x * 2.0).named("y"), (x + offset).named("y")
    same, different = ctx.compile(shared, name="step"), ctx.compile(own, name="step")
    ctx.set_values(x, [1.0, 2.0, 3.0])
    ctx.run(same)
    ctx.run(different)
    assert ctx.get_values(shared).tolist() == [2.0, 4.0, 6.0]
    assert ctx.get_values(own).tolist() == [1.0 + offset, 2.0 + offset, 3.0 + offset]
print("right")
"""


@pytest.mark.parametrize("count", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_processes_share_a_cold_cache(count: int, tmp_path: Path) -> None:
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", _WORKER, str(at % 2), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for at in range(count)
    ]
    for worker in workers:
        out, err = worker.communicate(timeout=120)
        assert worker.returncode == 0, err
        assert out.strip() == "right"
    assert not [path for path in tmp_path.rglob("*") if ".tmp" in path.name]
