"""Index specs: spaces, names, empty results, repeated indices, and errors that say what is wrong where."""

from __future__ import annotations

import numpy as np
import pytest

import stagedtensor as st

from .running import both_devices, program

RNG = np.random.default_rng(0)
A, B = RNG.integers(-4, 5, (2, 3)).astype(float), RNG.integers(-4, 5, (3, 4)).astype(float)
V, W = RNG.integers(-4, 5, 2).astype(float), RNG.integers(-4, 5, (3, 3)).astype(float)
CUBE = RNG.integers(-4, 5, (2, 3, 4)).astype(float)


@both_devices
def test_specs_agree_with_numpy_whatever_their_spaces(device: str) -> None:
    cases = [
        ("i,jk->ijk", (V, B)), ("i, jk -> ijk", (V, B)), (" i , jk->ijk ", (V, B)), ("ij,jk->ik", (A, B)),
        ("ij,jk->ki", (A, B)), ("ij,jk->", (A, B)), ("ij->", (A,)), ("ij->ji", (A,)), ("ij->j", (A,)), ("ii->i", (W,)),
        ("ii->", (W,)), ("ij,ij->ij", (A, A)), ("i,i->", (V, V)), ("i,j->", (V, V)), ("ijk->kj", (CUBE,)),
        ("ij,jk", (A, B)), ("...j->...", (CUBE,)), ("...ij,...jk->...ik", (CUBE.transpose(0, 2, 1), CUBE)),
        ("Ij,jK->IK", (A, B)), ("iI,Ik->ik", (A, B)),
    ]  # fmt: skip
    with program(device) as p:
        results = [st.einsum(spec, *(p.input(value) for value in values)) for spec, values in cases]
        for found, (spec, values) in zip(p.run(*results), cases, strict=True):
            expected = np.einsum(spec.replace(" ", ""), *values)
            assert found.shape == expected.shape, spec
            np.testing.assert_array_equal(found, expected, err_msg=spec)


@both_devices
def test_long_names_underscores_and_upper_case(device: str) -> None:
    with program(device) as p:
        a, b = p.input(A), p.input(B)
        results = p.run(
            st.einsum("row, inner; inner, col => row, col", a, b),
            st.einsum("Row_1,k;k,_col => Row_1,_col", a, b),
            st.einsum("ij; jk => ik", a, b),
            st.einsum("ij=>0", a),
            st.einsum("i_ => i", a),
            st.einsum("... => 0", a),
        )
        for found in results[:3]:
            np.testing.assert_array_equal(found, A @ B)
        assert results[3].ravel().tolist() == [A.sum()]
        np.testing.assert_array_equal(results[4], A.sum(1))
        assert results[5].ravel().tolist() == [A.sum()]


@pytest.mark.parametrize(
    ("spec", "shapes", "mentions"),
    [
        ("ij,jk->iz", [(2, 3), (3, 4)], ["z"]),
        ("ij;jk=>iz", [(2, 3), (3, 4)], ["z"]),
        ("row, inner; iner, col => row, col2", [(2, 3), (3, 4)], ["col2"]),
        ("ij,jk->ik", [(2, 3), (5, 4)], ["3", "5"]),
        ("ij;jk=>ik", [(2, 3), (5, 4)], ["3", "5"]),
        ("ij,jk->ik", [(2, 3)], ["2", "1"]),
        ("ij->i", [(2, 3), (3, 4)], ["1", "2"]),
        ("ijk,jk->ik", [(2, 3), (3, 4)], ["3", "2"]),
        ("ij,jk->ik->k", [(2, 3), (3, 4)], ["->"]),
        ("ij,j(k->ik", [(2, 3), (3, 4)], ["("]),
        ("ii->i", [(2, 3)], ["2", "3"]),
        ("", [(2, 3)], [""]),
    ],
)
def test_errors_name_the_index_and_the_sizes(spec: str, shapes: list[tuple[int, ...]], mentions: list[str]) -> None:
    with program() as p:
        inputs = [p.input(np.ones(shape)) for shape in shapes]
        with pytest.raises((st.errors.SpecError, st.errors.ShapeError)) as caught:
            p.ctx.compile(st.einsum(spec, *inputs))
        message = str(caught.value)
        for mention in mentions:
            assert mention in message, message
        assert "test_einsum_cases.py" in message, message


def test_a_mistyped_index_does_not_become_a_sum_in_silence() -> None:
    """A name that one operand alone has is summed, as in NumPy; in the result it is an error with near matches."""
    with program() as p:
        a, b = p.input(A), p.input(B)
        with pytest.raises(st.errors.SpecError) as caught:
            st.einsum("row, inner; inner, col => row, cool", a, b)
        message = str(caught.value)
        assert "cool" in message
        assert "col" in message
        assert "^" in message
