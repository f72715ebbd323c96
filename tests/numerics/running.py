"""Runs one program under several settings and compares cells bit for bit.

A program is a function that builds tensors and returns what to feed and what to read; it is built anew, in a session of
its own, for each setting. Values of NaN cells are not compared, only that both are NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

import stagedtensor as st
from stagedtensor.runtime.routine import Routine
from stagedtensor.runtime.target import detect, target as target_by_name
from tests.oracles.rounding import codes_of, same_codes

Array: TypeAlias = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Setting:
    """Where and how a program is compiled."""

    device: str = "cpu"
    fusion: bool = True
    target: str | None = None
    threads: int | None = None
    numerics: st.Numerics = field(default_factory=st.Numerics)

    def __str__(self) -> str:
        parts = [self.device, "fused" if self.fusion else "unfused", self.target or "", f"{self.threads or ''}"]
        return " ".join(part for part in parts if part)


COMPILED = "cpu"
"""The device that settings for "cpu" run on; the suite of another device puts its name here."""
REFERENCE = Setting("reference")
FUSED = Setting()
UNFUSED = Setting(fusion=False)


def runnable_targets() -> tuple[str, ...]:
    """Return the named targets that this machine runs."""
    machine = detect()
    names = ("x86-64", "x86-64-v3", "avx512") if machine.name != "aarch64" else ("aarch64",)
    return tuple(name for name in names if not target_by_name(name).missing(machine))


@dataclass(eq=False)
class Program:
    """Tensors to feed with values, tensors to read, and a computation (None: the forward of what is read)."""

    feeds: Sequence[tuple[st.Tensor, Any]]
    reads: Sequence[st.Tensor]
    comp: st.Comp | None = None
    bindings: Mapping[str, int] = field(default_factory=dict)
    inspect: Callable[[Routine], None] | None = None


Build: TypeAlias = Callable[[], Program]


def placed(setting: Setting) -> Setting:
    """Return the setting on the device under test: another device than the CPU has neither targets nor threads."""
    if setting.device != "cpu" or COMPILED == "cpu":
        return setting
    return replace(setting, device=COMPILED, target=None, threads=None)


def run(build: Build, setting: Setting = FUSED, *, session: Mapping[str, Any] | None = None) -> list[Array]:
    """Build, compile and run a program once; return the cells of what it reads."""
    setting = placed(setting)
    with (
        st.Session(**(session or {})),
        st.Context(setting.device, target=setting.target, threads=setting.threads) as ctx,
    ):
        program = build()
        for tensor, values in program.feeds:
            ctx.set_values(tensor, values)
        routine = ctx.compile(
            program.comp if program.comp is not None else list(program.reads),
            keep=program.reads,
            fusion=setting.fusion,
            numerics=setting.numerics,
        )
        ctx.run(routine, **program.bindings)
        if program.inspect is not None:
            program.inspect(routine)
        return [ctx.get_values(tensor) for tensor in program.reads]


def different(left: Array, right: Array) -> Array:
    """Return the mask of cells that differ in bits (any NaN equals any NaN)."""
    assert left.dtype == right.dtype, f"{left.dtype} and {right.dtype}"
    assert left.shape == right.shape, f"{left.shape} and {right.shape}"
    if left.dtype == np.bool_:
        return np.asarray(left != right)
    name = str(st.precision(left.dtype))
    return ~same_codes(codes_of(left), codes_of(right), name).reshape(left.shape)


def assert_same_bits(left: Array, right: Array, what: str, inputs: Iterable[Array] = ()) -> None:
    """Fail, showing the first cells, where two arrays differ in bits."""
    wrong = different(left, right)
    if wrong.any():
        at = np.flatnonzero(wrong.reshape(-1))[:4]
        fed = [values.reshape(-1)[at].tolist() for values in inputs if values.size == left.size]
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {left.size} cells differ; at {at.tolist()}: "
            f"{left.reshape(-1)[at].tolist()} != {right.reshape(-1)[at].tolist()}, inputs {fed}"
        )


def assert_same_everywhere(
    build: Build,
    settings: Sequence[Setting] = (REFERENCE, FUSED, UNFUSED),
    names: Sequence[str] = (),
    *,
    session: Mapping[str, Any] | None = None,
) -> list[Array]:
    """Run a program under every setting, require equal bits, and return the cells of the first setting."""
    first = run(build, settings[0], session=session)
    for setting in list(dict.fromkeys(map(placed, settings)))[1:]:
        found = run(build, setting, session=session)
        for at, (expected, cells) in enumerate(zip(first, found, strict=True)):
            assert_same_bits(cells, expected, f"{names[at] if names else at} on {setting} against {settings[0]}")
    return first
