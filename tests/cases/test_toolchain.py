"""The C toolchain: narrow formats give the same bits with and without native types, on every compiler and target."""

from __future__ import annotations

import functools
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stagedtensor as st

from .running import Array, Program

CELLS = np.concatenate(
    [
        np.random.default_rng(5).standard_normal(61) * 10.0 ** np.arange(-30, 31),
        [0.0, -0.0, np.inf, -np.inf, np.nan, 65504.0, 65519.99, 65520.0, 2.0**-24, 2.0**-25, 3 * 2.0**-25, 2.0**-133],
    ]
).astype(np.float32)


def narrow_work(**options: Any) -> list[Array]:
    """Conversions, arithmetic and reductions in every narrow format; returned as integer codes, NaN made one."""
    with st.Session(), st.Context("cpu", **options) as ctx:
        p = Program(ctx)
        x = p.input(CELLS)
        results = []
        for prec in (st.f16, st.bf16, st.f8e5m2, st.f8e4m3):
            y = st.cast(x, prec)
            z = y * y + 1.0 - st.relu(y)
            results += [y, z, st.exp(y), st.sum(st.where(y == y, st.clamp(y, -1.0, 1.0), 0.0)), st.cast(z, st.f32)]
        codes = []
        for cells in p.run(*results):
            clean = np.where(np.isnan(cells), cells.dtype.type(0), cells)
            codes.append(
                np.concatenate([clean.reshape(-1).view(f"u{cells.dtype.itemsize}"), np.isnan(cells).reshape(-1)])
            )
        return codes


@functools.cache
def by_default() -> list[Array]:
    """What the compiler and the target of this machine give."""
    return narrow_work()


@pytest.mark.parametrize("target", ["x86-64", "x86-64-v3"])
def test_narrow_formats_give_the_same_bits_on_every_target(target: str) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("x86-64 targets need an x86-64 machine")
    try:
        found = narrow_work(target=target)
    except st.errors.ContextError as error:
        pytest.skip(str(error))
    for codes, expected in zip(found, by_default(), strict=True):
        np.testing.assert_array_equal(codes, expected)


@pytest.mark.parametrize("compiler", ["gcc-11", "gcc-13", "clang", "gcc without _Float16"])
def test_narrow_formats_give_the_same_bits_with_every_compiler(
    compiler: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    command = shutil.which(compiler)
    if compiler == "gcc without _Float16":  # a compiler that does not know the type
        gcc = shutil.which("gcc")
        if gcc is None:
            pytest.skip("gcc is not installed")
        wrapper = tmp_path / "cc"
        wrapper.write_text(f'#!/bin/sh\nexec {gcc} -D_Float16=unknown_type_float16 "$@"\n')
        wrapper.chmod(0o755)
        command = str(wrapper)
    if command is None:
        pytest.skip(f"{compiler} is not installed")
    expected = by_default()
    monkeypatch.setenv("CC", command)
    found = narrow_work(cache_dir=tmp_path / "cache")
    for codes, reference in zip(found, expected, strict=True):
        np.testing.assert_array_equal(codes, reference)


def test_a_missing_compiler_is_a_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", str(tmp_path / "no-such-compiler"))
    with pytest.raises(st.errors.StagedTensorError, match="no-such-compiler"):
        narrow_work(cache_dir=tmp_path / "cache")
