"""Reads of encoded weights as expressions: the bytes of a block, decoded in f32.

In: an encoded value, its byte buffer seen as bytes, halves and words, and the logical indices of an element. Out: the
expression of its f32 value, made from the encoding's one description. Nothing is simplified here: with a constant
position in the block, the choices of the description fold away.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stagedtensor.block_formats import Encoding, Value
from stagedtensor.codegen.loop_ir import Apply, Buffer, Cast, Const, Expr, Load, index
from stagedtensor.encoded import INPUT_BLOCK_MAJOR, Encoded
from stagedtensor.errors import InternalError
from stagedtensor.precision import Prec, f16, f32, i8, i32, u8, u16, u32

View = Callable[[Prec], Buffer]
"""The byte buffer as cells of a format."""


def decoded(value: Encoded, view: View, indices: tuple[Expr, ...]) -> Expr:
    """Return the f32 value of the element at logical ``indices`` of ``value``."""
    encoding = value.encoding
    if encoding.decode is None:
        raise InternalError(f"{encoding} is no packed encoding")
    row, column = _row(value, indices), _Term(indices[-1])
    if encoding.whole:
        words = (value.codes.size + 3) // 4
        element = row * value.shape[-1] + column
        return _expr(encoding.decode(_Block(view, _Term(index(0)), encoding, words), element))
    block, element = column // encoding.elements, column % encoding.elements
    place = block * value.rows + row if value.order is INPUT_BLOCK_MAJOR else row * value.row_blocks + block
    return _expr(encoding.decode(_Block(view, place, encoding, 0), element))


def _row(value: Encoded, indices: tuple[Expr, ...]) -> _Term:
    """The number of a row: all axes but the last, folded."""
    row = _Term(index(0))
    for size, position in zip(value.shape[:-1], indices[:-1], strict=True):
        row = row * size + _Term(position)
    return row


def _expr(value: Value) -> Expr:
    assert isinstance(value, _Term)
    return value.expr


@dataclass(frozen=True, eq=False)
class _Term:
    """An expression with the operators of the descriptions.

    Bytes are u32, whose quotients and remainders by powers of 2 are shifts and masks; what may be negative is i32,
    positions are i64, values f32.
    """

    expr: Expr

    def __floordiv__(self, other: int) -> _Term:
        return self._with("floordiv", other)

    def __mod__(self, other: int) -> _Term:
        return self._with("mod", other)

    def __add__(self, other: _Term | int) -> _Term:
        return self._with("add", other)

    def __sub__(self, other: _Term | int) -> _Term:
        signed = self if self.expr.type is not u32 else _Term(Cast(self.expr, i32))
        return signed._with("sub", other)

    def __mul__(self, other: _Term | int) -> _Term:
        return self._with("mul", other)

    def __eq__(self, other: object) -> _Term:  # type: ignore[override]
        assert isinstance(other, int)
        return self._with("eq", other)

    def __ge__(self, other: int) -> _Term:
        return self._with("ge", other)

    def __lt__(self, other: int) -> _Term:
        return self._with("lt", other)

    def _with(self, op: str, other: _Term | int) -> _Term:
        prec = self.expr.type
        operand = Const(other, prec) if isinstance(other, int) else other.expr
        if operand.type is not prec:
            raise InternalError(f"decoding: {op} of {prec} and {operand.type}")
        return _Term(Apply(op, (self.expr, operand), prec))


@dataclass(frozen=True)
class _Block:
    """Reads from the block at ``place``; of a whole tensor, whose f32 scale is at word ``words``."""

    view: View
    place: _Term
    encoding: Encoding
    words: int

    def _load(self, prec: Prec, offset: _Term | int) -> Expr:
        position = self.place * (self.encoding.nbytes // prec.bytes) + offset
        return Load(self.view(prec), (position.expr,))

    def u8(self, offset: Value) -> Value:
        return _Term(Cast(self._load(u8, offset), u32))

    def i8(self, offset: Value) -> Value:
        return _Term(Cast(self._load(i8, offset), i32))

    def u16(self, place: Value) -> Value:
        return _Term(Cast(self._load(u16, place), u32))

    def half(self, offset: int) -> Value:
        return _Term(Cast(self._load(f16, offset // 2), f32))

    def scale(self) -> Value:
        return _Term(Load(self.view(f32), (index(self.words),)))

    def real(self, integer: Value) -> Value:
        signed = integer.expr if integer.expr.type is not u32 else Cast(integer.expr, i32)
        return _Term(Cast(signed, f32))

    def where(self, condition: Value, then: Value, otherwise: Value) -> Value:
        branches = tuple(Const(part, u32) if isinstance(part, int) else part.expr for part in (then, otherwise))
        return _Term(Apply("where", (condition.expr, *branches), branches[0].type))
