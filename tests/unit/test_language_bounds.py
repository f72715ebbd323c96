"""Texts are data: they reach nothing of Python, and what they can make is bounded."""

from __future__ import annotations

import pytest

import stagedtensor as st
from stagedtensor.errors import LanguageError

pytestmark = pytest.mark.usefixtures("session")


def x() -> st.Tensor:
    return st.placeholder("x", batch=[2], output=[3])


@pytest.mark.parametrize("text", ["__import__", "open", "fun x -> x.node", "fun x -> x.__class__", "relu.__globals__"])
def test_no_names_of_python_are_reached(text: str) -> None:
    def reach() -> None:
        found = st.language.parse(f"let f = {text}").f
        found(x())

    with pytest.raises(LanguageError):
        reach()


@pytest.mark.parametrize(
    "text",
    [
        "let m = let f g x = g g x in f f 1",
        "let m = let a f x = f (f x) in let b f = a (a f) in let c f = b (b f) in let d f = c (c f) in\n"
        "  let e f = d (d f) in let g f = e (e f) in g (fun x -> x + 1) 0",
        "let m = let w f = f f in w w",
    ],
)
def test_endless_definitions_end(text: str) -> None:
    with pytest.raises(LanguageError, match=r"steps|too deep"):
        _ = st.language.parse(text).m


@pytest.mark.parametrize(
    ("first", "again", "last"),
    [
        ("let a0 = [1.; 2.]", "let a{} = [a{}; a{}]", "a60 *. x"),
        ("let a0 = (1., 2.)", "let a{} = (a{}, a{})", "a60"),
        ("let a0 = [1.]", "let a{} = [a{}; a{}]", "if a60 == [1.] then 1 else 2"),
        ("let a0 = 1", "let a{} = [a{}; a{}]", "{ w = a60 } + x"),
        ("let a0 = 1", "let a{} = [a{}; a{}]", "concat [a60; a60]"),
    ],
)
def test_lists_that_double_end(first: str, again: str, last: str) -> None:
    """Sixty short definitions that would be more cells than a computer has bytes."""
    lines = [first, *(again.format(at, at - 1, at - 1) for at in range(1, 61)), f"let m () x = {last}"]
    with pytest.raises(LanguageError, match=r"m\.st:1\d:\d+: more than 200000 items"):
        st.language.parse("\n".join(lines), "m.st").m()(x())


def test_blocks_that_one_call_makes_are_bounded() -> None:
    """A count in a text is a loop of Python: without a bound, a short file would fill the memory."""
    module = st.language.parse("let net ~layers () =\n  nn.gpt 4 ~layers ~width:2 ~heads:1 ~tokens:2 ()", "net.st")
    with pytest.raises(LanguageError, match=r"more blocks than one call into a text may make\n  at net\.st:2: "):
        module.net(layers=10**9)()
    assert module.net(layers=3)() is not None  # every call has an allowance of its own
