"""Contexts under misuse: reading before compiling, failed compiles, interrupts, reentry, impossible sizes."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor.errors import ContextError


def test_reading_before_compiling_fixes_no_format() -> None:
    with st.Session(), st.Context("cpu") as ctx:
        x = st.placeholder("x", output=[4])
        ctx.set_values(x, [1.1, 2.0, 3.0, 4.0])
        assert ctx.get_values(x).dtype == np.float32
        st.specify(x, st.f64)
        doubled = x * 2.0
        ctx.run(ctx.compile(doubled))
        assert ctx.get_values(doubled).tolist() == [2.2, 4.0, 6.0, 8.0]
        assert ctx.get_values(x).dtype == np.float64


def test_reading_before_compiling_fixes_no_shape() -> None:
    with st.Session(), st.Context("cpu") as ctx:
        x = st.placeholder("x", output=[None])
        ctx.set_values(x, [3.0])
        assert ctx.get_values(x).tolist() == [3.0]
        total = x + np.ones(4, np.float32)
        with pytest.raises(ContextError, match=r"shape \(1,\)"):
            ctx.compile(total)
        ctx.set_values(x, [3.0, 4.0, 5.0, 6.0])
        ctx.run(ctx.compile(total))
        assert ctx.get_values(total).tolist() == [4.0, 5.0, 6.0, 7.0]


def test_a_routine_of_another_context_may_settle_what_this_one_has_read() -> None:
    with st.Session(), st.Context("cpu") as first, st.Context("cpu") as second:
        x = st.placeholder("x", output=[3])
        first.set_values(x, [1.0, 2.0, 3.0])
        first.get_values(x)
        y = x * 2.0
        st.specify(x, st.f16)
        second.compile(y)
        first.run(first.compile(y))
        assert first.get_values(y).tolist() == [2.0, 4.0, 6.0]


def test_a_view_before_compiling_is_refused() -> None:
    with st.Session(), st.Context("cpu") as ctx:
        w = st.param("w", output=[2], init=1.0)
        ctx.init_params(w)
        with pytest.raises(ContextError, match="get_values"):
            ctx.view(w)
        ctx.compile(w * 2.0)
        assert ctx.view(w).tolist() == [1.0, 1.0]


def test_impossible_sizes_are_named_and_leave_no_buffers() -> None:
    with st.Session(), st.Context("cpu") as ctx:
        small = st.placeholder("small", output=[4])
        ctx.set_values(small, [1.0, 2.0, 3.0, 4.0])
        for size, words in ((2**45, "128.0 TiB"), (2**63, "32.0 EiB")):
            with pytest.raises(ContextError, match=f"placeholder 'huge'.* {words}"):
                ctx.compile(st.sum(small) + st.sum(st.placeholder("huge", output=[size])))
        st.specify(small, st.f64)  # nothing is settled, and no f32 buffer was left behind
        doubled = small * 2.0
        ctx.run(ctx.compile(doubled))
        assert ctx.get_values(doubled).tolist() == [2.0, 4.0, 6.0, 8.0]


def test_interrupts_leave_a_usable_context() -> None:
    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def loop_for_ever(interrupted_after: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, interrupted_after)
        while True:
            ctx.set_values(x, np.ones(64, np.float32))
            ctx.run(routine)
            ctx.get_values(y)

    with st.Session(), st.Context("cpu", threads=2) as ctx:
        x = st.placeholder("x", output=[64])
        y = st.sum(x)
        routine = ctx.compile(y)
        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            for number in range(60):
                with pytest.raises(KeyboardInterrupt):
                    loop_for_ever(0.0008 + 0.00003 * number)
        finally:
            signal.signal(signal.SIGALRM, before)
        ctx.set_values(x, np.ones(64))
        ctx.run(routine)
        assert ctx.get_values(y) == 64.0


def test_a_call_around_this_one_is_refused() -> None:
    """Values whose conversion calls back into the context do not get half-way states."""
    with st.Session(), st.Context("cpu") as ctx:
        x = st.placeholder("x", output=[2])
        found: list[str] = []

        class Reentrant:
            def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
                with pytest.raises(ContextError) as error:
                    ctx.close()
                found.append(str(error.value))
                return np.ones(2, np.float32)

        ctx.set_values(x, Reentrant())
        assert "around this one" in found[0]
        assert ctx.get_values(x).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("options", [{"name": 3}, {"name": ""}, {"numerics": "fast"}])
def test_options_of_compile_are_checked(options: dict[str, Any]) -> None:
    with st.Session(), st.Context("cpu") as ctx, pytest.raises(TypeError, match="test_hardening_context"):
        ctx.compile(st.constant(1.0) * 2.0, **options)


@pytest.mark.parametrize("options", [{"target": 3}, {"cache_dir": 3}, {"cache_dir": ""}])
def test_options_of_a_context_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"target|cache_dir"):
        st.Context("cpu", **options)


def test_one_tensor_may_be_kept_without_a_list() -> None:
    with st.Session(), st.Context("cpu") as ctx:
        inner = st.constant(np.arange(3.0, dtype=np.float32)) + 1.0
        outer = inner * 2.0
        ctx.run(ctx.compile(outer, keep=inner))
        assert ctx.get_values(inner).tolist() == [1.0, 2.0, 3.0]


def test_values_that_stand_for_no_number_are_refused() -> None:
    with st.Session(), st.Context("cpu") as ctx:
        x = st.placeholder("x", output=[3], prec=st.f32)
        for values in (np.ma.array([1.0, 2.0, 3.0], mask=[False, True, False]), [10**400, 1, 2], [1, 2, None]):
            with pytest.raises(ContextError):
                ctx.set_values(x, values)
            assert not ctx.is_initialized(x)
        ctx.set_values(x, np.ma.array([1.0, 2.0, 3.0]))
        assert ctx.get_values(x).tolist() == [1.0, 2.0, 3.0]


def test_a_manifest_that_no_parser_reads_is_a_damaged_entry(tmp_path: Path) -> None:
    for _ in range(2):
        with st.Session(), st.Context("cpu", cache_dir=tmp_path, threads=1) as ctx:
            y = st.constant(np.ones(3, np.float32)) * 3.0
            ctx.run(ctx.compile(y))
            assert ctx.get_values(y).tolist() == [3.0, 3.0, 3.0]
        for manifest in tmp_path.glob("*/manifest.json"):
            manifest.write_text("[" * 100_000, encoding="utf-8")


def test_a_folder_that_everybody_shares_is_refused_and_left_alone(tmp_path: Path) -> None:
    shared = tmp_path / "everybody"
    shared.mkdir()
    shared.chmod(0o1777)
    with (
        st.Session(),
        st.Context("cpu", cache_dir=shared) as ctx,
        pytest.raises(ContextError, match="shared by everybody"),
    ):
        ctx.compile(st.constant(np.ones(3, np.float32)) * 3.0)
    assert shared.stat().st_mode & 0o7777 == 0o1777
    shared.chmod(0o755)  # only its owner can put code there: nothing to change
    with st.Session(), st.Context("cpu", cache_dir=shared) as ctx:
        ctx.compile(st.constant(np.ones(3, np.float32)) * 3.0)
    assert shared.stat().st_mode & 0o7777 == 0o755


def test_what_is_not_computed_cannot_be_kept() -> None:
    with st.Session(), st.Context("cpu") as ctx:
        w = st.param("w", output=[2], init=1.0)
        inside, outside = w * 2.0, w * 3.0
        with pytest.raises(ContextError, match=r"does not compute:\n  op 'mul'"):
            ctx.compile(st.grad_update(st.sum(inside)), keep=[inside, outside])
        routine = ctx.compile(st.grad_update(st.sum(inside)), keep=[inside, w])
        ctx.init_params(w)
        ctx.run(routine)
        assert ctx.get_values(inside).tolist() == [2.0, 2.0]
