"""Named targets, near-match errors and detection from the kernel's text."""

from __future__ import annotations

import pytest

from stagedtensor.errors import ContextError
from stagedtensor.runtime import target as targets
from stagedtensor.runtime.target import TARGETS, choose, cpu_features, detect, target

V3 = "sse2 avx avx2 fma f16c bmi1 bmi2 abm movbe popcnt"
AVX512 = f"{V3} avx512f avx512cd avx512bw avx512dq avx512vl"
AMX = f"{AVX512} avx512_bf16 amx_tile amx_bf16 amx_int8"


def cpuinfo(*flags: str) -> str:
    return "\n\n".join(f"processor\t: {i}\nmodel name\t: A CPU\nflags\t\t: {line}" for i, line in enumerate(flags))


def test_dots_count_where_they_are_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    with_dots = f"{AVX512} avx512_bf16"
    assert choose(cpu_features(cpuinfo(with_dots))).name == "avx512"
    assert choose(cpu_features(cpuinfo(with_dots)), fast_dots=True).name == "avx512+bf16"
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    for vendor, name in (("AuthenticAMD", "avx512+bf16"), ("GenuineIntel", "avx512")):
        monkeypatch.setattr(
            targets, "_read_cpuinfo", lambda vendor=vendor: f"vendor_id\t: {vendor}\n{cpuinfo(with_dots)}"
        )
        assert targets._detect.__wrapped__().name == name


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (("fpu sse2",), "x86-64"),
        ((V3,), "x86-64-v3"),
        ((V3.replace("fma ", ""),), "x86-64"),
        ((AVX512,), "avx512"),
        ((AVX512.replace("avx512vl", ""),), "x86-64-v3"),
        ((AMX,), "avx512+amx"),
        ((AMX, V3), "x86-64-v3"),  # cores that differ: a thread may run on either
    ],
)
def test_the_best_target_that_every_core_runs_is_chosen(flags: tuple[str, ...], name: str) -> None:
    assert choose(cpu_features(cpuinfo(*flags))).name == name


def test_detect_finds_a_known_target_and_asks_for_nothing_the_machine_lacks() -> None:
    found = detect()
    assert TARGETS[found.name] is found
    assert found.missing(found) == ()


@pytest.mark.parametrize(("granted", "name"), [(True, "avx512+amx"), (False, "avx512")])
def test_tiles_count_only_where_the_system_grants_them(
    monkeypatch: pytest.MonkeyPatch, granted: bool, name: str
) -> None:
    monkeypatch.setattr(targets, "_read_cpuinfo", lambda: cpuinfo(AMX))
    monkeypatch.setattr(targets, "request_tile_permission", lambda: granted)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert targets._detect.__wrapped__().name == name


@pytest.mark.parametrize(("machine", "name"), [("aarch64", "aarch64"), ("arm64", "aarch64"), ("riscv64", "generic")])
def test_other_architectures(monkeypatch: pytest.MonkeyPatch, machine: str, name: str) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert targets._detect.__wrapped__().name == name


def test_a_misspelt_target_names_the_near_one() -> None:
    with pytest.raises(ContextError, match=r"unknown CPU target 'x86_64_v3'; did you mean 'x86-64-v3'"):
        target("x86_64_v3")
    with pytest.raises(
        ContextError, match=r"Known targets: generic, x86-64, x86-64-v3, avx512, avx512\+bf16, avx512\+amx, aarch64"
    ):
        target("sparc")


def test_missing_features_are_named() -> None:
    assert target("x86-64-v3").missing(target("x86-64")) == tuple(sorted(target("x86-64-v3").features - {"sse2"}))
    assert "amx_bf16" in target("avx512+amx").missing(target("avx512"))


def test_flags_are_explicit_and_never_of_the_building_machine() -> None:
    for entry in TARGETS.values():
        assert not any("native" in flag for flag in entry.flags)
        assert entry.vector_bytes in (16, 32, 64)
    assert "-mavx512bf16" in TARGETS["avx512+amx"].flags
    assert "-mamx-bf16" in TARGETS["avx512+amx"].flags
