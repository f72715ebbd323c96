"""Parses index specs: ``"ij;jk=>ik"`` gives a ``Spec`` of axis terms.

In: the text, the number of operands, the names that have sizes of their own. Out: the spec, checked for everything that
can be said without shapes. Faults are ``SpecError`` with a caret. Sizes and shapes are the shape solver's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from stagedtensor.dims import PRINT_ORDER, RowKind
from stagedtensor.shapes.equations import term_names
from stagedtensor.specs import Affine, Anonymous, AxisTerm, Concat, Name, Position, RowSpec, ShapeSpec, Spec
from stagedtensor.statement_text import term_text, variable_text

from .caret import near, spec_error
from .grammar import advice_on, is_token, offset_of, parse, subtree

if TYPE_CHECKING:
    from lark import Token

    from .grammar import ParseTree

WHAT = "einsum spec"
_WORDS = {
    "LETTER": "an index letter",
    "NAME": "an index name",
    "INT": "an integer",
    "UNDERSCORE": "'_'",
    "ELLIPSIS": "'...'",
    "ROW_NAME": "'..name..'",
    "COMMA": "','",
    "PLUS": "'+'",
    "PADDED": "'=+'",
    "VALID": "'<+'",
    "STAR": "'*'",
    "CIRCUMFLEX": "'^'",
    "BAR": "'|'",
    "ARROW": "'->'",
    "SEMICOLON": "';'",
    "RESULT": "'=>'",
    "$END": "end of text",
}


@dataclass(frozen=True)
class _Located:
    """A term, or the name of a row variable, with its place in the text."""

    term: AxisTerm | str
    offset: int


@dataclass(frozen=True)
class _Shape:
    """One shape of a spec with places; ``offset`` is where it starts."""

    rows: dict[RowKind, tuple[_Located, ...]]
    offset: int

    def items(self) -> Iterator[_Located]:
        """Yield all terms and row variables in the order they are written."""
        for kind in PRINT_ORDER:
            yield from self.rows.get(kind, ())


def parse_spec(
    text: str, n_operands: int | None = None, *, sized: Sequence[str] = (), result_exists: bool = False
) -> Spec:
    """Parse an index spec for ``n_operands`` operands (None: any number).

    ``sized`` names axes whose sizes are given apart from the operands; only such an axis may be in the result alone,
    unless the result is a tensor that exists (``result_exists``, an assignment).
    A spec without ``=>`` is NumPy's: ``"bij,bjk->bik"``, or ``"ij,jk"`` with the result NumPy derives; its tensors
    have output rows only and ``...`` broadcasts.

    >>> parse_spec("ij;jk=>ik", 2).result.output.terms
    (Name(name='i'), Name(name='k'))
    >>> parse_spec("...|2*o+k, c; k -> c => ...|o", 2).operands[0].output.terms[0]
    Affine(stride=2, over='o', dilation=1, kernel='k', padded=False)

    Raises SpecError with a caret for a malformed spec, a wrong number of operands, a result index that is repeated or
    that nothing gives a size.
    """
    if not isinstance(text, str):
        raise TypeError(f'an {WHAT} is a string such as "ij;jk=>ik", not {text!r}')
    return _parse_cached(text, n_operands, frozenset(sized), result_exists)


@lru_cache(maxsize=512)
def _parse_cached(text: str, n_operands: int | None, sized: frozenset[str], result_exists: bool) -> Spec:
    if "=>" not in text:
        return _numpy_spec(text, n_operands, sized, result_exists)
    names = any(mark in text for mark in ",*+^")
    tree = parse("einsum", "name_spec" if names else "letter_spec", text, what=WHAT, words=_WORDS, advice=_ADVICE)
    reader = _Reader(text)
    shapes = [reader.shape(subtree(part)) for part in tree.children if not is_token(part)]
    operands, result = shapes[:-1], shapes[-1]
    _check_count(text, operands, n_operands)
    _check_result(text, operands, result, sized, result_exists)
    _check_concats(text, operands, result)
    return Spec(tuple(map(_shape_spec, operands)), _shape_spec(result), text=text)


# -- the tree -----------------------------------------------------------------------------------------------------


class _Reader:
    """Reads shapes off a parse tree, numbering anonymous axes."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.anonymous = 0

    def shape(self, tree: ParseTree) -> _Shape:
        """Read one shape: the row before ``|`` is batch, the one before ``->`` input, the last output."""
        pending: ParseTree | None = None
        rows: dict[RowKind, tuple[_Located, ...]] = {}
        for part in tree.children:
            if not is_token(part):
                pending = subtree(part)
                continue
            kind: RowKind = "batch" if part == "|" else "input"
            assert pending is not None
            rows[kind] = self.row(pending, kind)
        assert pending is not None
        rows["output"] = self.row(pending, "output")
        return _Shape(rows, offset_of(tree))

    def row(self, tree: ParseTree, kind: RowKind) -> tuple[_Located, ...]:
        """Read one row; refuses a second row variable and axis names that no comma parts."""
        found: list[_Located] = []
        comma_seen = True
        for part in tree.children:
            if is_token(part):
                comma_seen = True
                continue
            item = self.item(subtree(part), kind)
            variable = isinstance(item.term, str)
            before = found[-1].term if found else ""
            if not (tree.data != "name_row" or comma_seen or isinstance(item.term, str) or isinstance(before, str)):
                raise spec_error(
                    self.text,
                    item.offset,
                    f"no ',' between {term_text(before)!r} and {term_text(item.term)!r}",
                    what=WHAT,
                    expected="','",
                    advice="a spec with any of , * + ^ has comma separated names",
                )
            if variable and any(isinstance(other.term, str) for other in found):
                raise spec_error(
                    self.text, item.offset, "two row variables in one row", what=WHAT, expected="at most one"
                )
            found.append(item)
            comma_seen = False
        return tuple(found)

    def item(self, tree: ParseTree, kind: RowKind) -> _Located:
        """Read one term or row variable."""
        at = offset_of(tree)
        tokens: list[Token] = tree.children  # type: ignore[assignment]
        match tree.data:
            case "letter" | "name":
                return _Located(Name(str(tokens[0])), at)
            case "position":
                return _Located(Position(int(tokens[0])), at)
            case "any":
                self.anonymous += 1
                return _Located(Anonymous(self.anonymous), at)
            case "row_variable" | "ellipsis":
                word = str(tokens[0])
                return _Located(kind if word == "..." else word.strip(". \t\n"), at)
            case "concat":
                return _Located(Concat(tuple(_part(token) for token in tokens)), at)
            case _:
                return _Located(self.affine(tree), at)

    def affine(self, tree: ParseTree) -> Affine:
        """Read ``stride*over + dilation*kernel``."""
        left, sign, right = tree.children
        (stride, over), (dilation, kernel) = _scaled(subtree(left)), _scaled(subtree(right))
        for factor, word in ((stride, "stride"), (dilation, "dilation")):
            if factor < 1:
                raise spec_error(
                    self.text,
                    offset_of(tree),
                    f"{word} {factor} in a convolution axis",
                    what=WHAT,
                    expected="at least 1",
                )
        if over == kernel:
            raise spec_error(
                self.text,
                offset_of(tree),
                f"{over!r} is both the position and the kernel of one convolution axis",
                what=WHAT,
                expected="two different names",
            )
        return Affine(stride, over, dilation, kernel, padded=str(subtree(sign).children[0]) == "=+")


def _scaled(tree: ParseTree) -> tuple[int, str]:
    tokens = tree.children
    return (int(str(tokens[0])), str(tokens[1])) if len(tokens) == 2 else (1, str(tokens[0]))


def _part(token: Token) -> Name | int:
    return int(token) if token.type == "INT" else Name(str(token))


def _shape_spec(shape: _Shape) -> ShapeSpec:
    return ShapeSpec(*(_row_spec(shape.rows.get(kind, ())) for kind in PRINT_ORDER))


def _row_spec(items: tuple[_Located, ...]) -> RowSpec:
    leading: list[AxisTerm] = []
    trailing: list[AxisTerm] = []
    variable: str | None = None
    for item in items:
        if isinstance(item.term, str):
            variable = item.term
        else:
            (leading if variable is None else trailing).append(item.term)
    return RowSpec(tuple(leading), variable, tuple(trailing))


# -- checks -------------------------------------------------------------------------------------------------------


def _check_count(text: str, operands: Sequence[_Shape], n_operands: int | None) -> None:
    if n_operands is None or len(operands) == n_operands:
        return
    extra = operands[n_operands].offset if len(operands) > n_operands else text.find("=>")
    raise spec_error(
        text,
        extra,
        f"the spec has {len(operands)} operand{'s' * (len(operands) != 1)}, {n_operands} "
        f"tensor{'s' * (n_operands != 1)} {'were' if n_operands != 1 else 'was'} given",
        what=WHAT,
        expected=f"{n_operands} shape{'s' * (n_operands != 1)} before the result",
        advice="shapes are parted by ';' (by ',' in a NumPy spec, which has '->' and no '=>')",
    )


def _check_result(
    text: str, operands: Sequence[_Shape], result: _Shape, sized: frozenset[str], result_exists: bool
) -> None:
    names = {
        name: None for shape in operands for item in shape.items() if not isinstance(item.term, str)
        for name in term_names(item.term)
    }  # fmt: skip
    variables = {item.term for shape in operands for item in shape.items() if isinstance(item.term, str)}
    seen: set[str] = set()
    for item in result.items():
        keys = (f"..{item.term}..",) if isinstance(item.term, str) else term_names(item.term)
        for key in keys:
            if key in seen:
                raise spec_error(
                    text,
                    item.offset,
                    f"the result has {key!r} twice",
                    what=WHAT,
                    expected="each index of the result once",
                )
            seen.add(key)
        if result_exists:
            continue
        if isinstance(item.term, str):
            if item.term not in variables:
                raise spec_error(
                    text,
                    item.offset,
                    f"no operand has the row variable {variable_text(item.term)!r} of the result",
                    what=WHAT,
                    expected="a row variable of the operands",
                    advice="'...' stands for ..batch.., ..input.. or ..output.. by the row it is in",
                )
            continue
        for key in keys:
            if key not in names and key not in sized:
                raise spec_error(
                    text,
                    item.offset,
                    f"result index {key!r} is in no operand, so nothing gives it a size",
                    what=WHAT,
                    expected=f"an index of the operands, or sizes={{{key!r}: ...}}",
                    advice=near(key, names),
                )


def _check_concats(text: str, operands: Sequence[_Shape], result: _Shape) -> None:
    """A block is told by the names used beside a concatenation, so one tensor names one part of it at most."""
    shapes = (*operands, result)
    for shape in shapes:
        for item in shape.items():
            if not isinstance(item.term, Concat):
                continue
            parts, written = term_names(item.term), term_text(item.term)
            if not parts:
                raise spec_error(
                    text, item.offset, f"{written!r} names no part", what=WHAT, expected="a name beside '^'"
                )
            if len(set(parts)) < len(parts):
                raise spec_error(
                    text, item.offset, f"{written!r} has a part twice", what=WHAT, expected="each part of '^' once"
                )
            for other in shapes:
                mine = sorted(set(parts) & _plain_names(other))
                if len(mine) > 1 or (mine and other is shape):
                    raise spec_error(
                        text,
                        other.offset,
                        f"this shape uses {' and '.join(map(repr, mine))} of {written!r}, which are different blocks",
                        what=WHAT,
                        expected="one part of a concatenation in each shape",
                        advice="an outer product of parts takes two einsums: split first",
                    )


def _plain_names(shape: _Shape) -> set[str]:
    return {name for item in shape.items() if not isinstance(item.term, str | Concat) for name in term_names(item.term)}


# -- NumPy's form -------------------------------------------------------------------------------------------------


def _numpy_spec(text: str, n_operands: int | None, sized: frozenset[str], result_exists: bool) -> Spec:
    for mark in ";|":
        if mark in text:
            raise spec_error(
                text,
                len(text.rstrip()) if "->" not in text else text.rfind("->"),
                f"a spec with {mark!r} has no '=>'",
                what=WHAT,
                expected="'=>' before the result",
                advice="'->' parts the input row from the output row; NumPy specs have ',' and '->' alone",
            )
    tree = parse("einsum", "numpy_spec", text, what=WHAT, words=_WORDS, advice=_ADVICE)
    reader = _Reader(text)
    operands: list[_Shape] = []
    result: _Shape | None = None
    row_start, arrow = 0, False
    for part in tree.children:
        if is_token(part):
            arrow = part == "->"
            row_start = offset_of(part) + len(str(part))
            continue
        row = reader.row(subtree(part), "output")
        shape = _Shape({"output": row}, row[0].offset if row else row_start)
        if arrow:
            result = shape
        else:
            operands.append(shape)
    _check_count(text, operands, n_operands)
    if result is None:
        result = _implicit_result(operands)
    _check_result(text, operands, result, sized, result_exists)
    ellipsis = any(isinstance(item.term, str) for shape in operands for item in shape.items())
    return Spec(tuple(map(_shape_spec, operands)), _shape_spec(result), broadcast=ellipsis, text=text)


def _implicit_result(operands: Sequence[_Shape]) -> _Shape:
    """NumPy's rule: the ellipsis, then the letters that occur once, sorted."""
    items = [item for shape in operands for item in shape.items()]
    letters = [item.term.name for item in items if isinstance(item.term, Name)]
    row: list[_Located] = [_Located("output", 0)] if any(isinstance(item.term, str) for item in items) else []
    row.extend(_Located(Name(letter), 0) for letter in sorted(letters) if letters.count(letter) == 1)
    return _Shape({"output": tuple(row)}, 0)


# -- typical mistakes ---------------------------------------------------------------------------------------------

_MISTAKES: tuple[tuple[str, str], ...] = (
    (r"=\s+>|-\s+>", "arrows are written without a space: '=>' before the result, '->' between input and output row"),
    (r"=>.*=>", "a spec has one '=>', before the result"),
    (r"->[^;=]*\|", "rows stand in the order batch | input -> output"),
    (r"\|[^;=]*\|", "a shape has one batch row: batch | input -> output"),
    (r"->[^;=]*->", "a shape has one input row: batch | input -> output"),
    (r"(?<!\.)\.(?!\.)|\.{4,}|(?<!\.)\.\.(?![\s\w.])", "a row variable is written '...' or '..name..'"),
    (r"\(|\)", "axes are not grouped by parentheses here: use st.reshape"),
    (r"(?<![=])>|=(?![>+])", "the result stands after '=>'"),
    (r"[A-Za-z]\w*\s*\*\s*[0-9]", "a factor stands before the name: 2*o"),
    (r"\+[^,;|=>\-]*\+", "a convolution axis has two terms: stride*o + dilation*k"),
    (r"-(?!>)", "a convolution axis is a sum: stride*o + dilation*k"),
    (r",\s*(,|;|\||->|=>|$)|(^|;|\||->|=>)\s*,", "a comma stands between two names"),
)
_ADVICE = advice_on(_MISTAKES)
