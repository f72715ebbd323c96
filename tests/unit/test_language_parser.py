"""Parsing and printing of model texts: syntax, layout, comments, faults with carets, bounds."""

from __future__ import annotations

from pathlib import Path

import pytest

import stagedtensor as st
from stagedtensor.errors import LanguageError
from stagedtensor.language import model_ast as ast
from stagedtensor.language.model_parser import MAX_NESTING, parse_text
from stagedtensor.language.model_text import MAX_LENGTH, Text

EXAMPLE = Path(__file__).parents[2] / "examples" / "mlp.st"

TEXTS = [
    "",
    "let a = 1",
    "let a = (1, (2, 3))",
    "let a = [1; 2.5; 1e-9]",
    "let a = [1, 2]",
    "let a = [| [1; 2]; [3; ~-4] |]",
    "let a = [| |]",
    "let f (q, (k, _)) ~heads ?(rate = 0.1) = q",
    "let b ~hid () x = relu ({ w } * x + { b = 0.; o = [hid] })",
    "let b () = { w : bf16 = kaiming (); o = [1]; i = (2); trainable = false }",
    "let f x = (x : f32)",
    'let f x = stage f16 "body" (x + 1.)',
    'let f x y = x ++ "ij=>i" + x +* "ij;jk=>ik" y @^ "ij=>i" @^+ "i;j=>ij" y @^* "i;j=>ij" y @^^ "i=>0"',
    "let f x i = x @| i + 1",
    "let f x = (-x) **. 2. - -(x - (1. - 2.)) *. x /. x // x % x * x",
    "let f x = x **. 2. **. 3.",
    "let f x = (x **. 2.) **. 3.",
    "let f x y = x < y && (x <= y || not (x != y)) == true",
    "let f x = if x > 0 then 1 else if x < 0 then 2 else (fun y -> y)",
    "let f x = (if x > 0 then 1 else 2) + 3",
    "let f x = let a = 1 in let g ~b y = y in g ~b:a (let c = x in c)",
    "let f x = fun y -> fun z -> x y z",
    "let f p m = m =: 0.9 *. m + p.grad; p =- 0.1 *. m; forward m",
    'let f c a b = c =:+ a *. b ~logic:"ij;jk=>ik"; (a =@^ b; b =@- a); c =/ 2.; c =:@^ a',
    "let f x = (let a = 1 in x =: a; x); x; fun y -> y",
    "let f x = g ~a ~b:-1 ~c:(f x) ~-x (x).grad x.grad ()\nlet h = 1",
    'let f x = softmax ~axis:("output", -1) x',
    "let _x = 1 let \u00e9 = _x",
]


@pytest.mark.parametrize("text", TEXTS)
def test_what_is_printed_parses_to_the_same(text: str) -> None:
    syntax = parse_text(Text("t", text))
    printed = st.language.format(text)
    assert parse_text(Text("t", printed)) == syntax
    assert st.language.format(printed) == printed


def body(text: str) -> ast.Expr:
    return parse_text(Text("t", f"let f = {text}")).items[0].body


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("a + b * c", "a + (b * c)"),
        ("a * b *. c", "(a * b) *. c"),
        ("a - b - c", "(a - b) - c"),
        ("-a *. b", "(-a) *. b"),
        ("-a **. b", "-(a **. b)"),
        ("~-a **. b", "(-a) **. b"),
        ("f a + g b", "(f a) + (g b)"),
        ("f a.grad", "f (a.grad)"),
        ("f ~-a", "f (-a)"),
        ("f ~a", "f ~a:a"),
        ("a + b < c && d", "((a + b) < c) && d"),
        ("a || b && c", "a || (b && c)"),
        ('a * b ++ "s"', '(a * b) ++ "s"'),
        ('a +* "s" b * c', 'a +* "s" (b * c)'),
        ("fun x -> x; y", "fun x -> (x; y)"),
        ("let x = a in x; y", "let x = a in (x; y)"),
        ("if a then b else c; d", "(if a then b else c); d"),
        ("x =: a + b", "x =: (a + b)"),
        ("let x = a in (let y = b in c)", "let x = a in let y = b in c"),
        ("[a, b]", "[a; b]"),
        ("a;", "a"),
        ("(* c *) a # d", "a"),
    ],
)
def test_binding(first: str, second: str) -> None:
    assert body(first) == body(second)


def test_operators_do_not_need_spaces() -> None:
    assert body("a*b+c*.d-e/.f") == body("a * b + c *. d - e /. f")
    assert body("{b=0.;o=[n]}") == body("{ b = 0. ; o = [ n ] }")
    assert body("a =-b") == body("a =- b")
    assert parse_text(Text("t", "let a =-1")).items[0].body == ast.Negative(ast.Number(1))


def test_comments_nest_and_stay_out_of_strings() -> None:
    text = '(* a (* b *) "*)" let x = 1 # c (* d\nlet y = "(* # *)"\n# end'
    with pytest.raises(LanguageError, match=r"t:1:17"):
        parse_text(Text("t", text))
    syntax = parse_text(Text("t", text.replace('"*)" ', "*) ")))
    assert [item.name for item in syntax.items] == ["x", "y"]
    assert syntax.items[1].body == ast.String("(* # *)")


def test_the_printer_keeps_comments() -> None:
    text = "# first\nlet a = 1 # after\n(* inside *)\nlet b =\n  (* deep *) 2\n# last\n"
    assert st.language.format(text) == (
        "# first\n# after\nlet a = 1\n\n(* inside *)\n(* deep *)\nlet b = 2\n\n# last\n"
    )


def test_the_example_is_laid_out_as_the_printer_does() -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    assert parse_text(Text("t", st.language.format(text))) == parse_text(Text("t", text))
    assert st.language.load(EXAMPLE) == st.language.parse(text)


def test_a_fault_in_a_long_line_shows_a_part_of_it() -> None:
    with pytest.raises(LanguageError) as caught:
        st.language.parse(f"let f x = {'x + ' * 60}?")
    assert max(map(len, str(caught.value).split("\n"))) < 200


@pytest.mark.parametrize("opening", ["(", "[", "-", "~-", "fun x -> ", "let a = ", "if ", "f (", "{ w = ", "x.a + ("])
def test_nesting_is_bounded(opening: str) -> None:
    with pytest.raises(LanguageError):
        st.language.parse(f"let a = {opening * 20_000}")


def test_deep_nesting_that_is_complete_is_refused_and_what_is_allowed_prints() -> None:
    deep = MAX_NESTING + 5
    with pytest.raises(LanguageError, match=f"nest more than {MAX_NESTING} deep"):
        st.language.parse(f"let a = {'(' * deep}1{')' * deep}")
    with pytest.raises(LanguageError, match="bind parts of it with let"):
        st.language.parse(f"let f x = {'x + ' * deep}x")
    fine = f"let f x = {'x + ' * (MAX_NESTING - 10)}x"
    assert st.language.parse(str(st.language.parse(fine))) == st.language.parse(fine)


def test_length_is_bounded(tmp_path: Path) -> None:
    with pytest.raises(LanguageError, match=f"at most {MAX_LENGTH}"):
        st.language.parse(" " * (MAX_LENGTH + 1))
    path = tmp_path / "long.st"
    path.write_bytes(b"#" * (9 * MAX_LENGTH))
    with pytest.raises(LanguageError, match="at most"):
        st.language.load(path)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "bad.st"
    path.write_bytes(b"let a = 1 # \xff\xfe")
    with pytest.raises(LanguageError, match=r"bad\.st: byte 12 is no UTF-8"):
        st.language.load(path)
    path.write_bytes(b"\xef\xbb\xbflet a = 1\r\nlet b = a\r\n")
    assert st.language.load(path).b == 1


def test_parse_takes_strings() -> None:
    with pytest.raises(TypeError, match="a text and a name"):
        st.language.parse(b"let a = 1")  # type: ignore[arg-type]


@pytest.mark.parametrize("word", ["let", "in", "fun", "if", "then", "else", "true", "false", "stage"])
@pytest.mark.parametrize("text", ["let {} x = x", "let f {} = 1", "let f ~{} () x = x", "let f () x = {{ {} }} + x"])
def test_keywords_are_no_names(word: str, text: str) -> None:
    with pytest.raises(LanguageError) as caught:
        st.language.parse(text.format(word))
    assert caught.value.line == 1
