"""Loads the lark grammars of this package, once and only when first needed, and words their syntax errors.

In: the name of a grammar file, a start rule, a text. Out: lark's parse tree, or a ``SpecError`` with a caret. The
meaning of a tree is for the callers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, TypeAlias

from .caret import spec_error

if TYPE_CHECKING:  # lark takes a while to import; a program without textual specs never needs it
    from lark import Lark, Token, Tree
    from lark.tree import Meta

    ParseTree: TypeAlias = Tree[Token]

Advice: TypeAlias = Callable[[str, int], str]
"""Maps a text and the offset of a syntax error to a sentence about a typical mistake, or to an empty string."""


def advice_on(mistakes: Sequence[tuple[str, str]], otherwise: str = "") -> Advice:
    """Return the advice that knows ``mistakes``, pairs of a pattern and a sentence: that on the first one at the error."""

    def advice(text: str, offset: int) -> str:
        for pattern, sentence in mistakes:
            for found in re.finditer(pattern, text):
                if found.start() - 1 <= offset <= found.end():
                    return sentence
        return otherwise

    return advice


@cache
def _parser(name: str, start: str) -> Lark:
    """One parser for each start rule: what the other forms use is no terminal of this one."""
    import lark

    text = files("stagedtensor.language").joinpath(f"{name}.lark").read_text(encoding="utf-8")
    return lark.Lark(text, start=start, parser="lalr", propagate_positions=True, maybe_placeholders=False)


def parse(
    name: str,
    start: str,
    text: str,
    *,
    what: str,
    words: Mapping[str, str],
    advice: Advice,
) -> ParseTree:
    """Parse ``text`` from rule ``start`` of grammar ``name``.

    ``words`` says what terminals are called in messages. Raises SpecError at the first fault.
    """
    parser = _parser(name, start)
    import lark

    try:
        return parser.parse(text)
    except lark.UnexpectedCharacters as error:
        offset, wanted = error.pos_in_stream or 0, error.allowed
        got = repr(text[offset])
    except lark.UnexpectedToken as error:
        wanted = error.accepts or error.expected
        if error.token.type == "$END":
            offset, got = len(text.rstrip()), "end of text"
        else:
            offset, got = error.pos_in_stream or 0, repr(str(error.token))
    hint = advice(text, offset)
    raise spec_error(
        text, offset, f"unexpected {got}", what=what, expected=_alternatives(wanted, words), advice=hint
    ) from None


def _alternatives(terminals: set[str] | None, words: Mapping[str, str]) -> str:
    """Word a set of terminals in the order of ``words``."""
    found = list(dict.fromkeys(words[name] for name in words if name in (terminals or ())))
    if not found:
        return ""
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} or {found[-1]}"


def offset_of(part: ParseTree | Token) -> int:
    """Return where a tree or token starts in its text (0 for an empty rule)."""
    import lark

    if isinstance(part, lark.Token):
        return part.start_pos or 0
    meta: Meta = part.meta
    return 0 if meta.empty else meta.start_pos


def is_token(part: ParseTree | Token) -> bool:
    """Whether a part of a tree is a token."""
    import lark

    return isinstance(part, lark.Token)


def subtree(part: ParseTree | Token) -> ParseTree:
    """Return a part that the grammar says is no token."""
    import lark

    assert isinstance(part, lark.Tree)
    return part
