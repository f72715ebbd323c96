"""Which tensor-core instruction multiplies two operands, and why none does.

In: a product and the numerics of its routine. Out: the product with its operands in the format that the instruction
takes, and the :class:`Instruction`, or the reason in words. Every format named here holds the operands' values exactly,
except that f32 operands are rounded to tf32, which ``Numerics(tf32_matmul=True)`` allows. Products of fp8 go through
f16 or bf16: the instructions of fp8 itself add up in fewer bits than f32 on some GPUs, so
``Numerics(fp8_fast_accumulate=True)`` has to ask.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from stagedtensor.codegen.loop_ir import Cast, Expr
from stagedtensor.codegen.schedule.cuda.operands import Product
from stagedtensor.numerics import Numerics
from stagedtensor.precision import Prec, bf16, f8e4m3, f8e5m2, f16, f32

CHUNK_BYTES = 16
"""Bytes of one asynchronous copy, and of one row of the matrices that ldmatrix reads."""


@dataclass(frozen=True)
class Instruction:
    """One form of mma.sync: 16 rows, 8 columns, ``depth`` products each, sums in f32.

    Cells are staged as ``staged``; of two formats of fp8 the left one, the other being as wide.
    """

    name: str
    staged: Prec
    depth: int
    operands: tuple[str, str] = ("", "")
    """What it multiplies, where that is not twice ``name``."""

    @property
    def function(self) -> str:
        """The prelude's function."""
        return f"st_mma_m16n8k{self.depth}_{self.name}"

    @property
    def words(self) -> str:
        """The formats that it multiplies."""
        left, right = self.operands
        return f"{left or self.name} x {right or self.name}"

    @property
    def chunk(self) -> int:
        """Staged cells of 16 bytes."""
        return CHUNK_BYTES // self.staged.bytes


_F16, _BF16 = Instruction("f16", f16, 16), Instruction("bf16", bf16, 16)
TF32 = Instruction("tf32", f32, 8)
_HOLDS: dict[Prec, tuple[Instruction, ...]] = {
    f16: (_F16, TF32),
    bf16: (_BF16, TF32),
    f8e4m3: (_F16, _BF16, TF32),
    f8e5m2: (_F16, _BF16, TF32),
}
"""The instructions whose operands hold every value of a narrow format: tf32 has f32's range and f16's precision."""


def for_tensor_cores(given: Product, numerics: Numerics) -> tuple[Product, Instruction] | str:
    """Return the product in the formats of an instruction, and the instruction; the reason where there is none."""
    if given.accumulator.symbol.type is not f32:
        return f"no mma: sums in {given.accumulator.symbol.type}"
    if given.sign not in ("fma", "add"):
        return "no mma: products are subtracted"
    left, right = _narrow(given.left), _narrow(given.right)
    if left is None or right is None:
        if not numerics.tf32_matmul:
            return "no mma: f32 operands, which Numerics(tf32_matmul=True) would allow"
        return given, TF32
    fp8 = (f8e4m3, f8e5m2)
    if numerics.fp8_fast_accumulate and left.type in fp8 and right.type in fp8 and given.guard is None:
        names = left.type.name.removeprefix("f8"), right.type.name.removeprefix("f8")
        short = Instruction("_".join(names), left.type, 32, (left.type.name, right.type.name))
        return replace(given, left=left, right=right), short
    instruction = next(item for item in _HOLDS[left.type] if item in _HOLDS[right.type])
    if instruction is TF32:
        return given, TF32
    prec = instruction.staged
    return replace(given, left=_in_format(left, prec), right=_in_format(right, prec)), instruction


def _narrow(operand: Expr) -> Expr | None:
    """The narrow value that an operand is widened from."""
    if isinstance(operand, Cast) and operand.type is f32 and not operand.flush and operand.arg.type in _HOLDS:
        return operand.arg
    return None


def _in_format(value: Expr, prec: Prec) -> Expr:
    return value if value.type is prec else Cast(Cast(value, f32), prec)
