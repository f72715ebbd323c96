"""Model texts at random: reading any text gives a module or a LanguageError, soon; printing keeps the syntax.

Texts are generated syntax, damaged examples, and token soup.
"""

from __future__ import annotations

import random
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as some

import stagedtensor as st
from stagedtensor.errors import LanguageError, StagedTensorError
from stagedtensor.language import model_ast as ast
from stagedtensor.language.model_format import format_definitions
from stagedtensor.language.model_parser import parse_text
from stagedtensor.language.model_text import Text

EXAMPLE = (Path(__file__).parents[2] / "examples" / "mlp.st").read_text(encoding="utf-8")
SECOND = """
let block ~heads ?(rate = 0.1) () x =
  let q = { wq : bf16 = kaiming (); i = [4]; o = [heads; 2] } * x in
  let (a, _) = (if heads > 1 && not (rate >= 0.5) then q else x *. 2., [| [1; 2]; [3; ~-4] |]) in
  softmax (q +* "...|h,d; ...|h,d => ...|h" q) ~axis:("output", -1) + (a ++ "...|h,d => ...|h" : f32) @^ "...|h => ...|0"
let step p m = m =: 0.9 *. m + p.grad ~logic:"...=>..."; p =- (if true then m else p) **. 2.; forward p
"""
_WORDS = (
    'let in fun if then else true false stage x y w dense relu ( ) [ ] [| |] { } , ; : -> = =: =+ =:+ =@^ || && < <= == + - * *. '
    '/. // % **. ~- ++ +* @^ @^+ @| ~a ~a: ~logic: ?( .grad 0. 1 2.5 1e9 "ij=>i" "" (* *) # _'
)  # fmt: skip
TOKENS = (*_WORDS.split(), "\n", "\t", "'", "\\", "é", "$", "^")
quiet = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def read(text: str) -> Any:
    """Return the module of a text, None if it is refused as it should be."""
    try:
        return st.language.parse(text, "fuzz.st")
    except LanguageError as error:
        refused = error
    place = f"fuzz.st:{refused.line}:{refused.column}: "
    assert (refused.file, str(refused)[: len(place)]) == ("fuzz.st", place)
    assert 1 <= refused.line <= text.count("\n") + 1
    assert refused.column >= 1
    return None


@quiet
@given(some.text(max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    read(text)
    read(f"let f x = {text}")


@quiet
@given(some.lists(some.sampled_from(TOKENS), max_size=25))
def test_any_tokens_are_read_or_refused(tokens: list[str]) -> None:
    read(" ".join(tokens))
    read("let f x = " + "".join(tokens))


@pytest.mark.parametrize("seed", range(150))
def test_damaged_texts_are_read_or_refused(seed: int) -> None:
    rng = random.Random(seed)
    text = list(rng.choice([EXAMPLE, SECOND]))
    for _ in range(rng.choice([1, 2, 5, 20])):
        at = rng.randrange(len(text))
        match rng.randrange(4):
            case 0:
                del text[at : at + rng.choice([1, 3, 30])]
            case 1:
                text[at:at] = rng.choice(TOKENS)
            case 2:
                text[at:at] = text[(start := rng.randrange(len(text))) : start + 20]
            case _:
                text[at] = chr(rng.choice([0, 9, 34, 40, 42, 91, 123, 233, 0x2028, 0x1F600]))
    module = read("".join(text))
    if module is not None:
        assert st.language.parse(str(module)) == module
        with st.Session():
            build(module)


def build(module: Any) -> None:
    """Use what a module defines; only errors of this package may come."""
    for name in dir(module):
        x = st.constant(np.ones((2, 4), np.float32), batch=1)
        for arguments in ((), (x,), (2,)):
            try:
                value = getattr(module, name)
                if callable(value):
                    value = value(*arguments)
                if callable(value):
                    value(x)
            except StagedTensorError:
                continue


# -- generated syntax -------------------------------------------------------------------------------------------------

names = some.sampled_from(["x", "y", "w", "dense", "relu", "_a", "b1", "output"])
strings = some.sampled_from(["", "ij;jk=>ik", "a b", "(*", "#"])
numbers = some.one_of(
    some.integers(0, 2**63 - 1), some.floats(0.0, 1e300, allow_nan=False).map(lambda value: value + 0.0)
)
patterns: some.SearchStrategy[ast.Pattern] = some.recursive(
    some.one_of(names, some.just("_")).map(ast.NamePattern),
    lambda inner: some.lists(inner, min_size=2, max_size=3).map(lambda items: ast.TuplePattern(tuple(items))),
    max_leaves=4,
)
leaves: some.SearchStrategy[Any] = some.one_of(
    numbers.map(ast.Number), strings.map(ast.String), some.booleans().map(ast.Boolean), names.map(ast.Name)
)


def several(item: Any, least: int = 0, most: int = 3) -> Any:
    return some.lists(item, min_size=least, max_size=most).map(tuple)


def no_let(body: Any) -> Any:
    return body.body if isinstance(body, ast.Let) else body


def compound(inner: Any) -> Any:
    parameters = several(
        some.one_of(
            patterns.map(ast.Positional),
            names.map(ast.Labelled),
            some.builds(ast.Optional_, names, inner),
            some.just(ast.UnitParameter()),
        ),
        1,
    )
    binary = some.sampled_from(["||", "&&", "<", "<=", "==", "!=", "+", "-", "*", "*.", "/.", "//", "%", "**.", "@|"])
    arguments = several(
        some.builds(ast.Argument, some.one_of(some.none(), names), some.one_of(inner, some.just(ast.Unit()))), 1
    )
    targets = some.one_of(names.map(ast.Name), some.builds(ast.Field, names.map(ast.Name), some.just("grad")))
    operators = some.sampled_from(["=:", "=+", "=-", "=*", "=/", "=@^", "=@-", "=:+", "=:@-"])
    bindings = some.one_of(
        some.builds(ast.Binding, patterns, some.just(()), inner),
        some.builds(ast.Binding, names.map(ast.NamePattern), parameters, inner),
    )
    sequences = some.lists(inner, min_size=2, max_size=3).map(
        lambda items: ast.Sequence_(
            (*items[:-1], *(items[-1].items if isinstance(items[-1], ast.Sequence_) else items[-1:]))
        )
    )
    return some.one_of(
        some.builds(ast.Field, inner, names),
        some.builds(ast.Apply_, inner, arguments),
        some.builds(ast.Negative, inner),
        some.builds(ast.Binary, binary, inner, inner),
        some.builds(ast.Reduce, some.sampled_from(["++", "@^", "@^^"]), inner, strings),
        some.builds(ast.Einsum, some.sampled_from(["+*", "@^*", "@^+"]), inner, strings, inner),
        several(inner, 2).map(ast.Tuple_),
        several(inner).map(ast.List_),
        several(inner).map(ast.BatchArray),
        some.builds(
            ast.InlineParameter,
            names,
            some.one_of(some.none(), names.map(ast.Name)),
            some.one_of(some.none(), inner),
            several(some.builds(ast.ParameterField, names, inner), 0, 2),
        ),
        some.builds(ast.Ascription, inner, names.map(ast.Name)),
        some.builds(
            ast.StageBoundary,
            some.none() | names.map(ast.Name),
            strings,
            inner,
            some.none() | some.builds(ast.Name, some.sampled_from(["narrow", "master"])),
        ),
        some.builds(lambda bound, body: ast.Let(bound, no_let(body)), several(bindings, 1, 2), inner),
        some.builds(ast.Fun, parameters, inner),
        some.builds(ast.If, inner, inner, inner),
        sequences,
        some.builds(ast.Assignment, targets, operators, inner, some.one_of(some.none(), strings)),
    )


definitions = some.builds(
    lambda name, body: ast.Definitions((ast.Definition(name, (), body),)),
    names,
    some.recursive(leaves, compound, max_leaves=12),
)


def exact(node: Any) -> Any:
    """Return syntax as nested tuples that tell 1 from 1.0."""
    if isinstance(node, ast.Syntax):
        return (type(node).__name__, *(exact(getattr(node, entry.name)) for entry in fields(node) if entry.compare))
    if isinstance(node, tuple):
        return tuple(map(exact, node))
    return (type(node).__name__, node)


@settings(quiet, max_examples=300)
@given(definitions)
def test_printing_generated_syntax_keeps_it(syntax: ast.Definitions) -> None:
    text = format_definitions(syntax)
    assert exact(parse_text(Text("t", text))) == exact(syntax)


def test_the_comparison_of_syntax_sees_differences() -> None:
    one = parse_text(Text("t", "let a = 1"))
    assert exact(one) != exact(parse_text(Text("t", "let a = 1.")))
    assert one != replace(one, items=())
