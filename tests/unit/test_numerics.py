"""The numeric choices, their validation, and the compute and accumulate decisions."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest

from stagedtensor.numerics import NATIVE_NARROW, Numerics, accum_prec, compute_prec
from stagedtensor.precision import ALL, FLOATS, Prec, bf16, f8e4m3, f8e5m2, f16, f32

BACKENDS = ("cpu", "reference", "emulated", "cuda")
FLAGS = ("tf32_matmul", "f16_native_accumulate", "fp8_fast_accumulate", "fast_math")


def test_defaults() -> None:
    assert dataclasses.asdict(Numerics()) == {
        "narrow_compute": "f32",
        "accumulate": "f32",
        "tf32_matmul": False,
        "f16_native_accumulate": False,
        "fp8_fast_accumulate": False,
        "fast_math": False,
    }


def test_frozen_comparable_copyable() -> None:
    numerics = Numerics(fast_math=True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        numerics.fast_math = False  # type: ignore[misc]
    assert numerics == Numerics(fast_math=True) != Numerics()
    assert hash(numerics) == hash(Numerics(fast_math=True))
    for again in (
        copy.deepcopy(numerics),
        pickle.loads(pickle.dumps(numerics)),
        dataclasses.replace(Numerics(), fast_math=True),
    ):
        assert again == numerics


def test_every_field_is_in_the_key() -> None:
    changed: list[dict[str, Any]] = [
        {}, {"narrow_compute": "native"}, {"accumulate": "storage"}, *({flag: True} for flag in FLAGS)
    ]  # fmt: skip
    keys = {Numerics(**fields).key() for fields in changed}
    assert len(keys) == len(changed) == len(dataclasses.fields(Numerics)) + 1
    assert Numerics().key() == Numerics(fast_math=False).key()


def test_a_new_field_changes_the_key() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Extended(Numerics):
        flush_denormals: bool = False

    assert Extended().key() != Numerics().key()
    assert Extended().key() != Extended(flush_denormals=True).key()


def test_unknown_field() -> None:
    with pytest.raises(TypeError, match=r"no field 'fastmath'; did you mean fast_math\?\n.*test_numerics\.py"):
        Numerics(fastmath=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="no field 'zzz'; did you mean narrow_compute, accumulate"):
        dataclasses.replace(Numerics(), zzz=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        Numerics("native")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("field", "value"),
    [("narrow_compute", "f16"), ("narrow_compute", "storage"), ("narrow_compute", True), ("narrow_compute", f32),
     ("accumulate", "native"), ("accumulate", "F32"), ("accumulate", None)],
)  # fmt: skip
def test_value_outside_its_set(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"Numerics\.{field} must be 'f32' or '\w+', got .*\n.*test_numerics\.py"):
        Numerics(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("value", [1, 0, "True", None])
def test_flags_are_bools(flag: str, value: object) -> None:
    with pytest.raises(TypeError, match=rf"Numerics\.{flag} must be True or False, got"):
        Numerics(**{flag: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("prec", ALL, ids=str)
def test_defaults_widen_narrow_floats_only(prec: Prec, backend: str) -> None:
    expected = f32 if prec in (f16, bf16, f8e5m2, f8e4m3) else prec
    assert compute_prec(prec, Numerics(), backend) is expected
    assert accum_prec(prec, Numerics(), backend) is expected
    assert accum_prec(prec, Numerics(), backend, contraction=True) is expected


@pytest.mark.parametrize("prec", ALL, ids=str)
def test_native_compute_only_where_the_hardware_has_it(prec: Prec, monkeypatch: pytest.MonkeyPatch) -> None:
    for backend in BACKENDS:
        assert compute_prec(prec, Numerics(narrow_compute="native"), backend) is compute_prec(prec, Numerics(), backend)
    monkeypatch.setitem(NATIVE_NARROW, "cuda", frozenset((f16, bf16)))
    native = Numerics(narrow_compute="native")
    for backend in BACKENDS:
        truly = backend == "cuda" and prec in (f16, bf16)
        assert compute_prec(prec, native, backend) is (prec if truly else compute_prec(prec, Numerics(), backend))
        assert accum_prec(prec, native, backend) is accum_prec(prec, Numerics(), backend)


@pytest.mark.parametrize("prec", ALL, ids=str)
def test_storage_accumulation_is_at_the_format(prec: Prec) -> None:
    for backend in BACKENDS:
        assert accum_prec(prec, Numerics(accumulate="storage"), backend) is prec
        assert compute_prec(prec, Numerics(accumulate="storage"), backend) is compute_prec(prec, Numerics(), backend)


@pytest.mark.parametrize("prec", FLOATS, ids=str)
def test_native_f16_accumulation_is_for_contractions(prec: Prec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NATIVE_NARROW, "cuda", frozenset((f16, bf16)))
    numerics = Numerics(f16_native_accumulate=True)
    for backend in BACKENDS:
        expected = f16 if prec is f16 and backend == "cuda" else accum_prec(prec, Numerics(), backend)
        assert accum_prec(prec, numerics, backend, contraction=True) is expected
        assert accum_prec(prec, numerics, backend) is accum_prec(prec, Numerics(), backend)


def test_other_flags_choose_no_width() -> None:
    numerics = Numerics(tf32_matmul=True, fp8_fast_accumulate=True, fast_math=True)
    for prec in ALL:
        assert compute_prec(prec, numerics, "cuda") is compute_prec(prec, Numerics(), "cuda")
        assert accum_prec(prec, numerics, "cuda", contraction=True) is accum_prec(prec, Numerics(), "cuda")
