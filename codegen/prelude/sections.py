"""Reads the prelude's text files into sections: one C function each, with what it needs.

In: the ``*.h`` files beside this module. Out: :class:`Section` values. A file is a row of sections, each opened by a
line ``//! name | clause | clause``. Clauses: ``needs a b`` (other sections), ``include math.h``, ``dialect c`` or
``dialect cuda``, ``if fma`` (any one of the target features listed), ``for f32 f64`` (one copy a format, with ``@S@``
its name, ``@F@`` or ``@T@`` its C type, ``@INF@`` the bits of infinity, ``@U@`` the unsigned type, ``@W@`` a type that
multiplies without overflow traps, ``@BITS@`` its width). Several sections of one name are variants: the first whose
clauses hold is taken. Chooses nothing itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files

from stagedtensor.errors import InternalError

FILES = ("bits.h", "codecs.h", "arithmetic.h", "transcendental.h", "random.h")

# 2 / pi = 0.a2f9836e... in hexadecimal, enough for the largest float exponent plus 96 bits.
_TWO_OVER_PI = 0xA2F9836E4E441529FC2757D1F534DDC0DB6295993C439041FE5163AB
_TWO_OVER_PI_BITS = 224
_INFINITY_BITS = {"f32": "0x7f800000u", "f64": "0x7ff0000000000000u"}


@dataclass(frozen=True, slots=True)
class Section:
    """The text of one function, and when and with what it may be printed."""

    name: str
    text: str
    needs: tuple[str, ...] = ()
    includes: tuple[str, ...] = ()
    dialect: str | None = None
    features: frozenset[str] = field(default_factory=frozenset)

    def serves(self, dialect: str, features: frozenset[str]) -> bool:
        """Whether this variant may be printed for the dialect and the target features."""
        return self.dialect in (None, dialect) and (not self.features or bool(self.features & features))


def two_over_pi_words() -> tuple[int, ...]:
    """Return the 26 overlapping 32-bit words of 2 / pi; word k ends at weight 2^-(8k - 1)."""
    words = []
    for k in range(26):
        shift = _TWO_OVER_PI_BITS - (8 * k - 1)
        words.append((_TWO_OVER_PI >> shift if shift >= 0 else _TWO_OVER_PI << -shift) & 0xFFFFFFFF)
    return tuple(words)


def _table_text() -> str:
    words = [f"0x{word:08x}u" for word in two_over_pi_words()]
    return ",\n    ".join(", ".join(words[start : start + 9]) for start in range(0, len(words), 9))


def _substitutions(name: str) -> dict[str, str]:
    bits = name[1:]
    if name[0] == "f":
        return {"S": name, "F": "double" if name == "f64" else "float", "INF": _INFINITY_BITS[name]}
    return {
        "S": name,
        "T": f"{'u' if name[0] == 'u' else ''}int{bits}_t",
        "U": f"uint{bits}_t",
        "W": "uint64_t" if bits == "64" else "uint32_t",
        "BITS": bits,
    }


def _fill(text: str, values: dict[str, str]) -> str:
    for key, value in values.items():
        text = text.replace(f"@{key}@", value)
    return text


def _parse(text: str) -> Iterator[Section]:
    for chunk in text.split("//! ")[1:]:
        header, _, body = chunk.partition("\n")
        name, *clauses = (part.strip() for part in header.split("|"))
        given: dict[str, list[str]] = {}
        for clause in clauses:
            keyword, *words = clause.split()
            given[keyword] = words
        unknown = given.keys() - {"needs", "include", "dialect", "if", "for"}
        if unknown:
            raise InternalError(f"prelude section {name}: unknown clause {sorted(unknown)}")
        formats: Iterable[dict[str, str]] = [_substitutions(word) for word in given.get("for", [])] or [{}]
        for values in formats:
            yield Section(
                name=_fill(name, values),
                text=_fill(body.strip("\n"), {**values, "TWO_OVER_PI": _table_text()}),
                needs=tuple(_fill(word, values) for word in given.get("needs", [])),
                includes=tuple(given.get("include", [])),
                dialect=given["dialect"][0] if "dialect" in given else None,
                features=frozenset(given.get("if", [])),
            )


@cache
def written_sections() -> tuple[Section, ...]:
    """Return the sections of all text files, in file order."""
    return tuple(section for name in FILES for section in sections_of(name))


@cache
def sections_of(file: str) -> tuple[Section, ...]:
    """Return the sections of one text file beside this module."""
    text = (files("stagedtensor.codegen.prelude") / file).read_text(encoding="utf-8")
    return tuple(_parse(text))
