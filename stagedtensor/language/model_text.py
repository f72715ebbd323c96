"""The text of a model: its lines and places, its comments, and the errors that point into it.

In: a name and a text. Out: the text with comments blanked (places stay), sources of lines for what is built, and
``LanguageError`` with file, line, column, the line and a caret. Parses no expression.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cached_property

from stagedtensor.errors import LanguageError
from stagedtensor.source import Source

from .caret import pointed

MAX_LENGTH = 200_000
"""Characters that a text may have."""

_LEXEMES = re.compile(r'"[^"\n]*"|\(\*|\*\)|#[^\n]*')
_DELIMITERS = re.compile(r"\(\*|\*\)")


@dataclass(frozen=True)
class TextSource(Source):
    """One line of a model text, which may be no file."""

    content: str = field(default="", compare=False)

    @property
    def text(self) -> str:
        """The line itself, stripped."""
        return self.content.strip()


@dataclass(frozen=True)
class Comment:
    """One comment as written, with its delimiters, and where it starts."""

    text: str
    at: int


@dataclass(frozen=True, eq=False)
class Text:
    """A model text. ``name`` is its file, or what ``parse`` was told."""

    name: str
    content: str

    def check(self) -> None:
        """Raise LanguageError if the text is too long or holds a character that no text holds."""
        if len(self.content) > MAX_LENGTH:
            raise self.fault(MAX_LENGTH, f"the text has {len(self.content)} characters", f"at most {MAX_LENGTH}")
        if "\0" in self.content:
            raise self.fault(self.content.index("\0"), "a zero character", "text")

    # -- places -------------------------------------------------------------------------------------------------------
    @cached_property
    def _starts(self) -> list[int]:
        return [0, *(found.end() for found in re.finditer("\n", self.content))]

    def line(self, at: int) -> int:
        """Return the line of an offset, from 1."""
        return bisect_right(self._starts, at)

    def column(self, at: int) -> int:
        """Return the column of an offset, from 1."""
        return at - self._starts[self.line(at) - 1] + 1

    def source(self, at: int) -> TextSource:
        """Return the source of what is built by the expression at an offset."""
        line = self.line(at)
        start = self._starts[line - 1]
        end = self._starts[line] if line < len(self._starts) else len(self.content)
        return TextSource(self.name, line, self.content[start:end])

    def fault(self, at: int, problem: str, expected: str = "", advice: str = "") -> LanguageError:
        """Build the error for a place: where, what, the line with a caret, what was expected, what to do."""
        at = max(0, min(at, len(self.content)))
        line, column = self.line(at), self.column(at)
        lines = [f"{self.name}:{line}:{column}: {problem}", self._pointed(at)]
        if expected:
            lines.append(f"  expected {expected}")
        if advice:
            lines.append(f"  {advice}")
        return LanguageError("\n".join(lines), file=self.name, line=line, column=column)

    def _pointed(self, at: int) -> str:
        """A window of a long line: an error message stays readable."""
        start = self._starts[self.line(at) - 1]
        end = self.content.find("\n", at)
        line, offset = self.content[start : end if end >= 0 else None], at - start
        first = max(0, offset - 80)
        return pointed(line[first : offset + 80], offset - first)

    # -- comments -----------------------------------------------------------------------------------------------------
    @cached_property
    def comments(self) -> tuple[Comment, ...]:
        """The comments: ``(* ... *)``, which nest, and ``#`` to the end of the line; none inside strings."""
        found: list[Comment] = []
        at = 0
        while (lexeme := _LEXEMES.search(self.content, at)) is not None:
            at = lexeme.end()
            if lexeme.group() == "(*":
                at = self._end_of_comment(lexeme.start())
            elif lexeme.group() == "*)":
                raise self.fault(
                    lexeme.start(), "no comment is open here", advice="a comment is (* ... *), and they nest"
                )
            elif lexeme.group().startswith('"'):
                continue
            found.append(Comment(self.content[lexeme.start() : at].rstrip(), lexeme.start()))
        return tuple(found)

    def _end_of_comment(self, start: int) -> int:
        depth = 0
        for delimiter in _DELIMITERS.finditer(self.content, start):
            depth += 1 if delimiter.group() == "(*" else -1
            if depth == 0:
                return delimiter.end()
        raise self.fault(start, "this comment does not end", "'*)'")

    @cached_property
    def code(self) -> str:
        """The text with its comments blanked: what stands where stays as it is."""
        parts, at = [], 0
        for comment in self.comments:
            parts += [self.content[at : comment.at], re.sub(r"[^\n]", " ", comment.text)]
            at = comment.at + len(comment.text)
        return "".join((*parts, self.content[at:]))
