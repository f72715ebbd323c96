"""Statement strings: trees, places and the text of errors."""

from __future__ import annotations

import pytest

from stagedtensor.errors import SpecError
from stagedtensor.language.statement_parser import Call, Contraction, Number, Reference, Term, parse_statements


def shown(term: Term) -> str:
    """A tree in prefix form."""
    match term:
        case Number(value, _):
            return repr(value)
        case Reference():
            return str(term)
        case Contraction(left, right, _):
            return f"({shown(left)} * {shown(right)})"
        case Call(function, args, _, _):
            return f"{function}({', '.join(map(shown, args))})"


def tree(expr: str) -> str:
    (statement,) = parse_statements(f"y =: {expr}")
    return shown(statement.expr)


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        ("a", "a"),
        ("p.grad", "p.grad"),
        ("p . grad", "p.grad"),
        ("2", "2"),
        ("2.5e-3", "0.0025"),
        (".5", "0.5"),
        ("a + b - c", "sub(add(a, b), c)"),
        ("a + b *. c", "add(a, mul(b, c))"),
        ("a *. b /. c", "div(mul(a, b), c)"),
        ("a **. b **. c", "pow(a, pow(b, c))"),
        ("-a **. 2", "neg(pow(a, 2))"),
        ("~-a **. 2", "pow(neg(a), 2)"),
        ("a **. -b", "pow(a, neg(b))"),
        ("a - -b", "sub(a, neg(b))"),
        ("(a + b) *. c", "mul(add(a, b), c)"),
        ("a +. b -. c", "sub(add(a, b), c)"),
        ("a + b < c *. d", "lt(add(a, b), mul(c, d))"),
        ("a >= 1", "ge(a, 1)"),
        ("a == b", "eq(a, b)"),
        ("a != b", "ne(a, b)"),
        ("where(a <= b, a, and(b, 1))", "where(le(a, b), a, and(b, 1))"),
        ("a * b", "(a * b)"),
        ("a*.b", "mul(a, b)"),
        ("2.*.b", "mul(2.0, b)"),
        ("β1 *. m", "mul(β1, m)"),
        ("a # what it is\n + b", "add(a, b)"),
    ],
)
def test_expressions(expr: str, expected: str) -> None:
    assert tree(expr) == expected


@pytest.mark.parametrize(
    ("operator", "op", "reset"),
    [
        ("=:", None, True),
        ("=+", "add", False),
        ("=-", "sub", False),
        ("=*", "mul", False),
        ("=/", "div", False),
        ("=@^", "max", False),
        ("=@-", "min", False),
        ("=:+", "add", True),
        ("=:-", "sub", True),
        ("=:*", "mul", True),
        ("=:/", "div", True),
        ("=:@^", "max", True),
        ("=:@-", "min", True),
    ],
)
@pytest.mark.parametrize("space", ["", " "])
def test_operators(operator: str, op: str | None, reset: bool, space: str) -> None:
    (statement,) = parse_statements(f"c{space}{operator}{space}a")
    assert (statement.op, statement.reset) == (op, reset)
    assert shown(statement.expr) == "a"


def test_statements_are_parted_by_semicolons() -> None:
    text = "\n  m =: beta *. m + p.grad;  # momentum\n\n  p =- lr *. m;\n"
    first, second = parse_statements(text)
    assert first.text == "m =: beta *. m + p.grad"
    assert second.text == "p =- lr *. m"
    assert text[second.offset] == "p"
    assert text[second.operator_offset :].startswith("=-")


@pytest.mark.parametrize("quote", ['"', "'"])
def test_index_maps(quote: str) -> None:
    text = f"c =:+ a *. b ~logic:{quote}ij;jk=>ik{quote}; d =: c"
    first, second = parse_statements(text)
    assert first.logic == "ij;jk=>ik"
    assert text[first.logic_offset :].startswith("ij;jk")
    assert second.logic is None


def test_targets_may_be_gradients() -> None:
    (statement,) = parse_statements("p.grad =* scale")
    assert str(statement.target) == "p.grad"


FAULTS = [
    ("", 0, ["no statement", "p =- lr *. m"]),
    (" ; ", 0, ["no statement"]),
    ("p = 3", 2, ["unexpected '='", "a set is written '=:'"]),
    ("p += 3", 2, ["unexpected '+'", "'=+' accumulates"]),
    ("p := 3", 2, ["unexpected ':'", "a set is written '=:'"]),
    ("p =: a / b", 7, ["unexpected '/'", "expected '/.'"]),
    ("p =: a ** b", 7, ["unexpected '**'", "expected '**.'"]),
    ("p =: a and b", 7, ["unexpected 'and'", "and(a, b)"]),
    ("p =: a < b < c", 11, ["unexpected '<'", "do not chain"]),
    ("p.value =: 3", 1, ["unexpected '.'", "only its gradient"]),
    ("p =: a b", 7, ["unexpected 'b'", "';' or end of text"]),
    ("p =: (a", 7, ["unexpected end of text", "expected ')'"]),
    ("p =: f(a,)", 9, ["unexpected ')'", "a name, a number"]),
    ("=: 3", 0, ["unexpected '=:'", "expected a name"]),
    ("p =:", 4, ["unexpected end of text", "a name, a number, '('"]),
    ("p =: a[0]", 6, ["unexpected '['", "~logic"]),
    ("p =: a @ b", 7, ["unexpected '@'", "a contraction is a * b"]),
    ("p =: a ~map:'i'", 7, ["unexpected '~'", "~logic"]),
    ("p =: a ~logic 'i'", 14, ["expected ':'"]),
    ("p =: a ~logic:'ij=>i", 14, ["an index map"]),
    ("p =: $", 5, ["unexpected '$'"]),
    ("p", 1, ["unexpected end of text", "'=:'"]),
]


@pytest.mark.parametrize(("text", "column", "words"), FAULTS, ids=[fault[0] for fault in FAULTS])
def test_faults_show_the_statement_and_a_caret(text: str, column: int, words: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        parse_statements(text)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("statement: ")
    assert lines[1] == f"  {text}"
    assert lines[2] == f"  {' ' * column}^"
    for word in words:
        assert word in str(caught.value)


def test_the_faulty_line_alone_is_shown() -> None:
    with pytest.raises(SpecError) as caught:
        parse_statements("m =: a;\np = 3;\nq =: 1")
    assert "\n  p = 3;\n    ^\n" in str(caught.value)


def test_a_computation_is_a_string() -> None:
    with pytest.raises(TypeError, match="is a string"):
        parse_statements(3)  # type: ignore[arg-type]
