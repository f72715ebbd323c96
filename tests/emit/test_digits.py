"""Digits of bytes: what is read from a table in a register, and the text of a product with an encoded weight."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import stagedtensor as st
from stagedtensor.block_formats import ROW_ENCODINGS
from stagedtensor.codegen.emit.digits import digit_in, possible_bits, with_digit
from stagedtensor.codegen.loop_ir import Apply, Buffer, Cast, Const, Expr, Load, Symbol, Var
from stagedtensor.codegen.rewrite import symbols_of
from stagedtensor.encodings import PACKED_ENCODINGS, Encoded
from stagedtensor.precision import f32, i32, i64, u8, u32
from stagedtensor.runtime.target import TARGETS

from .texts import text_for

LANE, ROW = Symbol("i_lane", i64), Symbol("i_row", i64)
CELLS, STEPS = Buffer("bytes", u8, (64,)), Buffer("steps", f32, (64,))
BYTE = Cast(Load(CELLS, (Var(LANE),)), u32)
STEP = Load(STEPS, (Var(ROW),))


def varies(expr: Expr) -> bool:
    return LANE in symbols_of(expr)


def bits(op: str, arg: Expr, number: int) -> Expr:
    return Apply(op, (arg, Const(number, u32)), u32)


def scaled(field: Expr, factor: Expr = STEP) -> Expr:
    return Apply("mul", (factor, Cast(Cast(field, i32), f32)), f32)


def test_the_last_bits_of_a_byte_and_a_field_at_its_top_are_digits() -> None:
    assert digit_in(scaled(bits("mod", BYTE, 16)), varies) == BYTE
    high = bits("floordiv", BYTE, 16)
    assert digit_in(scaled(high), varies) == high
    middle = bits("floordiv", BYTE, 4)
    assert digit_in(scaled(bits("mod", middle, 4)), varies) == middle
    assert with_digit(scaled(high), high, Const(3, u32)) == scaled(Const(3, u32))


def test_wide_fields_two_fields_and_other_values_of_the_lane_are_none() -> None:
    low, high = bits("mod", BYTE, 16), bits("floordiv", BYTE, 16)
    assert digit_in(scaled(bits("mod", BYTE, 32)), varies) is None
    assert digit_in(scaled(Apply("add", (low, bits("mul", high, 16)), u32)), varies) is None
    assert digit_in(scaled(low, Load(STEPS, (Var(LANE),))), varies) is None
    assert digit_in(Cast(low, f32), varies) is None, "one operation costs as much as a table"
    assert digit_in(scaled(Const(3, u32)), varies) is None


def test_bits_of_fields() -> None:
    assert possible_bits(BYTE) == 0xFF
    assert possible_bits(bits("mul", bits("floordiv", BYTE, 64), 16)) == 0x30
    assert possible_bits(Const(5, u32)) == 0xFFFFFFFF


def kernel_of(name: str) -> str:
    """Print the product of a weight of zeros with a vector."""
    encoding = next(item for item in PACKED_ENCODINGS if item.name == name)
    weight = Encoded((4, 512), st.f32, encoding, bytes(4 * 512 // encoding.elements * encoding.nbytes))
    with st.Session():
        product = st.constant(weight) @ st.placeholder("x", output=[512])
        source = text_for(st.forward(product), TARGETS["avx512"], [product])[0].text
    return source[source.index("// schedule") : source.index("void step")]


def test_a_product_with_an_encoded_weight(golden: Callable[[str], None]) -> None:
    kernel = kernel_of("Q4_K")
    assert kernel.count("st_among_vf32") == 2 * 16 // 2
    assert kernel.count("st_stream_u8_vi32") == 3, "one line to come is asked for beside each line of a block"
    golden(kernel)


@pytest.mark.parametrize("name", [encoding.name for encoding in ROW_ENCODINGS if encoding.name != "TQ1_0"])
def test_blocks_are_decoded_in_vectors(name: str) -> None:
    kernel = kernel_of(name)
    assert "st_fma_vf32" in kernel
    assert "st_fma_f32" not in kernel
