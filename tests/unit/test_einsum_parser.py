"""Index specs: what they parse to, and the text of every kind of error."""

from __future__ import annotations

import re

import pytest

from stagedtensor.errors import SpecError
from stagedtensor.language.einsum_parser import parse_spec
from stagedtensor.language.spec_domain import blocks, named_anonymous, removed
from stagedtensor.specs import Affine, Anonymous, Concat, Name, Position, RowSpec, ShapeSpec, Spec

IX, JX, KX = Name("i"), Name("j"), Name("k")


def out(*terms: object, variable: str | None = None) -> ShapeSpec:
    return ShapeSpec(output=RowSpec(tuple(terms), variable))  # type: ignore[arg-type]


def shapes(text: str) -> tuple[ShapeSpec, ...]:
    spec = parse_spec(text)
    return (*spec.operands, spec.result)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ij;jk=>ik", [out(IX, JX), out(JX, KX), out(IX, KX)]),
        ("i=>", [out(IX), out()]),
        ("=>", [out(), out()]),
        ("i_=>i", [out(IX, Anonymous(1)), out(IX)]),
        ("i=>_i", [out(IX), out(Anonymous(1), IX)]),
        ("i_j;_=>ij", [out(IX, Anonymous(1), JX), out(Anonymous(2)), out(IX, JX)]),
        ("i12=>i", [out(IX, Position(12)), out(IX)]),
        ("i1j2=>ij", [out(IX, Position(1), JX, Position(2)), out(IX, JX)]),
        ("Ii=>iI", [out(Name("I"), IX), out(IX, Name("I"))]),
        ("rows, k; k, n_2 => rows, n_2", [out(Name("rows"), KX), out(KX, Name("n_2")), out(Name("rows"), Name("n_2"))]),
        ("_, _x => _x", [out(Anonymous(1), Name("_x")), out(Name("_x"))]),
        ("o+k=>o", [out(Affine(1, "o", 1, "k")), out(Name("o"))]),
        ("2*o+3*k=>o", [out(Affine(2, "o", 3, "k")), out(Name("o"))]),
        ("2*o<+k=>o", [out(Affine(2, "o", 1, "k")), out(Name("o"))]),
        ("2*o=+k=>o", [out(Affine(2, "o", 1, "k", padded=True)), out(Name("o"))]),
        ("a;b=>a^b", [out(Name("a")), out(Name("b")), out(Concat((Name("a"), Name("b"))))]),
        ("a^b=>a", [out(Concat((Name("a"), Name("b")))), out(Name("a"))]),
        ("a=>a^3", [out(Name("a")), out(Concat((Name("a"), 3)))]),
        ("2^a=>a", [out(Concat((2, Name("a")))), out(Name("a"))]),
        ("ij,jk->ik", [out(IX, JX), out(JX, KX), out(IX, KX)]),
        ("ij,jk", [out(IX, JX), out(JX, KX), out(IX, KX)]),
        ("ba", [out(Name("b"), Name("a")), out(Name("a"), Name("b"))]),
        ("ii", [out(IX, IX), out()]),
        ("i->", [out(IX), out()]),
        ("", [out(), out()]),
    ],
)
def test_output_rows(text: str, expected: list[ShapeSpec]) -> None:
    assert list(shapes(text)) == expected


def test_rows_stand_in_the_order_batch_input_output() -> None:
    (operand, result) = shapes("b|i->j=>j|b->i")
    assert operand == ShapeSpec(RowSpec((Name("b"),)), RowSpec((IX,)), RowSpec((JX,)))
    assert result == ShapeSpec(RowSpec((JX,)), RowSpec((Name("b"),)), RowSpec((IX,)))
    (only_batch, _) = shapes("b|=>b|")
    assert only_batch == ShapeSpec(RowSpec((Name("b"),)))


def test_ellipsis_means_the_row_it_is_in() -> None:
    (operand, result) = shapes("...|...->... => ...|...->...")
    assert (
        operand == result == ShapeSpec(RowSpec(variable="batch"), RowSpec(variable="input"), RowSpec(variable="output"))
    )
    (moved, _) = shapes("..batch..|..x.. => ..x..,a|..batch.. ".replace(",a", ""))
    assert moved == ShapeSpec(RowSpec(variable="batch"), output=RowSpec(variable="x"))


def test_terms_stand_before_and_after_a_row_variable() -> None:
    (letters, _) = shapes("i...jk=>i...k")
    assert letters.output == RowSpec((IX,), "output", (JX, KX))
    (commas, _) = shapes("i, .. rest .., j, 2*o+k => i")
    assert commas.output == RowSpec((IX,), "rest", (JX, Affine(2, "o", 1, "k")))
    assert shapes("...h,w=>h,w")[0].output == RowSpec((), "output", (Name("h"), Name("w")))


@pytest.mark.parametrize("text", ["i j ; j k => i k", "ij;\n jk =>\tik", " ij;jk=>ik "])
def test_spaces_mean_nothing(text: str) -> None:
    assert shapes(text) == shapes("ij;jk=>ik")


def test_spaces_mean_nothing_in_numpy_specs() -> None:
    assert shapes("i, jk -> ijk") == shapes("i,jk->ijk") == shapes("i,jk->i j k")


def test_numpy_ellipsis_broadcasts_and_is_first_in_the_implicit_result() -> None:
    spec = parse_spec("...ij,...jk")
    assert spec.broadcast
    assert spec.result.output == RowSpec((), "output", (IX, KX))
    assert not parse_spec("ij,jk").broadcast
    assert not parse_spec("...;...=>...").broadcast


def test_text_is_kept() -> None:
    assert parse_spec("ij;jk=>ik").text == "ij;jk=>ik"


def test_given_sizes_allow_a_result_index_of_no_operand() -> None:
    assert parse_spec("i=>ij", 1, sized=("j",)).result == out(IX, JX)
    assert parse_spec("i=>ij", 1, result_exists=True).result == out(IX, JX)


FAULTS = [
    # text, operands, column of the caret, words of the message
    ("ij;jk->ik", 2, 5, ["a spec with ';' has no '=>'", "'=>' before the result"]),
    ("ij;jk", 2, 5, ["no '=>'"]),
    ("b|ij->i", 1, 4, ["a spec with '|' has no '=>'"]),
    ("ij;jk=>ik=>k", 2, 9, ["unexpected '=>'", "one '=>'"]),
    ("ij= >i", 1, 2, ["unexpected '='", "without a space"]),
    ("ij=i", 1, 2, ["unexpected '='", "the result stands after '=>'"]),
    ("(ij)=>i", 1, 0, ["unexpected '('", "st.reshape"]),
    ("i?=>i", 1, 1, ["unexpected '?'", "an index letter"]),
    ("i->j|k=>i", 1, 4, ["unexpected '|'", "batch | input -> output"]),
    ("a|b|c=>a", 1, 3, ["one batch row"]),
    ("a->b->c=>a", 1, 4, ["one input row"]),
    (".i=>i", 1, 0, ["'...' or '..name..'"]),
    ("....=>i", 1, 3, ["'...' or '..name..'"]),
    ("a,=>a", 1, 2, ["a comma stands between two names", "expected an index name"]),
    ("a,,b=>a", 1, 2, ["a comma stands between"]),
    ("a b,c=>a", 1, 2, ["no ',' between 'a' and 'b'"]),
    ("o*2+k=>o", 1, 1, ["a factor stands before the name"]),
    ("2*o-k=>o", 1, 3, ["a convolution axis is a sum"]),
    ("a+b+c=>a", 1, 3, ["a convolution axis has two terms"]),
    ("0*o+k=>o", 1, 0, ["stride 0", "at least 1"]),
    ("o+0*k=>o", 1, 0, ["dilation 0"]),
    ("o+o=>o", 1, 0, ["both the position and the kernel"]),
    ("a^^b=>a", 1, 2, ["unexpected '^'", "an index name or an integer"]),
    ("2^3=>", 1, 0, ["names no part"]),
    ("a^a=>a", 1, 0, ["a part twice"]),
    ("a^b=>a,b", 1, 5, ["'a' and 'b' of 'a^b'", "different blocks"]),
    ("a;b=>a^b,a", 2, 9, ["the result has 'a' twice"]),
    ("a,b=>a^b", 1, 0, ["different blocks"]),
    ("......=>", 1, 3, ["two row variables in one row"]),
    ("ij=>ijj", 1, 6, ["the result has 'j' twice"]),
    ("ij=>ik", 1, 5, ["result index 'k' is in no operand", "sizes={'k': ...}"]),
    ("batch, ch => batsh", 1, 13, ["'batsh' is in no operand", "did you mean 'batch'?"]),
    ("i=>...", 1, 3, ["no operand has the row variable '..output..'"]),
    ("ij;jk=>ik", 3, 5, ["the spec has 2 operands, 3 tensors were given"]),
    ("ij;jk;kl=>il", 2, 6, ["the spec has 3 operands, 2 tensors were given"]),
    ("ij,jk->ik", 1, 3, ["the spec has 2 operands, 1 tensor was given"]),
    ("ij->ik", 1, 5, ["result index 'k'"]),
    ("i2->i", 1, 1, ["unexpected '2'"]),
    ("ij->k->i", 1, 5, ["unexpected '->'"]),
]


@pytest.mark.parametrize(("text", "n_operands", "column", "words"), FAULTS, ids=[fault[0] for fault in FAULTS])
def test_faults_show_the_spec_a_caret_and_the_line(text: str, n_operands: int, column: int, words: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(text, n_operands)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("einsum spec: ")
    assert lines[1] == f"  {text}"
    assert lines[2] == f"  {' ' * column}^"
    for word in words:
        assert word in str(caught.value)
    assert f"at {__file__.rsplit('/', 1)[-1]}:" in str(caught.value)


def test_the_whole_text_of_one_error() -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec("ij;jk=>iq", 2)
    text = re.sub(r"at \S+: .*", "at LINE", str(caught.value))
    assert text == (
        "einsum spec: result index 'q' is in no operand, so nothing gives it a size\n"
        "  ij;jk=>iq\n"
        "          ^\n"
        "  expected an index of the operands, or sizes={'q': ...}\n"
        "  at LINE\n"
        "  known here: i, j, k"
    )


def test_only_the_faulty_line_of_a_long_spec_is_shown() -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec("rows, k;\nk, cols => rows, colz", 2)
    assert "\n  k, cols => rows, colz\n                   ^\n" in str(caught.value)


def test_a_spec_is_a_string() -> None:
    with pytest.raises(TypeError, match="a string such as"):
        parse_spec(["ij"])  # type: ignore[arg-type]


# -- what is iterated ---------------------------------------------------------------------------------------------


def removed_rows(text: str) -> ShapeSpec | None:
    spec = parse_spec(text)
    return removed(spec.operands, spec.result).rows()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ij=>ij", ShapeSpec()),
        ("ij;jk=>ik", out(JX)),
        ("b|i->j=>", ShapeSpec(RowSpec((), None, (Name("b"),)), RowSpec((), None, (IX,)), RowSpec((), None, (JX,)))),
        ("...|i=>i", ShapeSpec(RowSpec(variable="batch"))),
        ("2*o+k=>o", out(KX)),
        ("a^b=>a", ShapeSpec()),
        ("a;b=>a^b", ShapeSpec()),
        ("i0=>i", ShapeSpec()),
    ],
)
def test_removed_axes(text: str, expected: ShapeSpec) -> None:
    found = removed_rows(text)
    assert found is not None
    for kind in ("batch", "input", "output"):
        assert found.row(kind).terms == expected.row(kind).terms
        assert found.row(kind).variable == expected.row(kind).variable


def test_a_kernel_of_the_result_is_removed() -> None:
    spec = parse_spec("o;k=>o+k")
    assert list(removed(spec.operands, spec.result).keys) == [("name", "k")]


def test_removed_row_variables_find_rows_of_their_own() -> None:
    rows = removed_rows("..a..; ..b.. =>")
    assert rows is not None
    assert {rows.batch.variable, rows.input.variable, rows.output.variable} == {"a", "b", None}
    assert removed_rows("..a..; ..b..; ..c..; ..d.. =>") is None


def test_blocks_of_a_joined_axis() -> None:
    assert blocks(parse_spec("a,x; b,x; x => a^b, x")) == ((0, 2), (1, 2))
    assert blocks(parse_spec("a,c; e,f => a^e, c^f")) == ((0,), (), (), (1,))
    assert blocks(parse_spec("a => 2^a^3")) == ((0,),)
    assert blocks(parse_spec("a^b => b^a")) is None


def test_anonymous_axes_get_names_that_are_free() -> None:
    spec: Spec = named_anonymous(parse_spec("_, any1 => any1"))
    assert spec.operands[0] == out(Name("any1_"), Name("any1"))
