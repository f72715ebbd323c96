"""The storage formats of cells, their names, and the join that promotes them.

In: a format, its name or alias, or a numpy dtype. Out: the one interned :class:`Prec`, and the least format that holds
values drawn from several others. Formats are joined as *requirements* and realised once, because the formats alone form
no lattice. Values are converted in ``conversion.py``; which node gets which format is the precision solver's matter.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Final, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

from stagedtensor.errors import PrecisionError
from stagedtensor.source import user_source


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Prec:
    """One storage format. Interned: compare with ``is`` or ``==``; copies and pickles give the same object.

    ``bits`` and ``bytes`` are the size of a cell, ``mantissa_bits`` leaves out the implicit leading one.
    ``max_finite`` is exact (an int for integers); ``min_normal`` and ``min_subnormal`` are the least positive values
    (1 for integers). ``c_type`` and ``cuda_type`` name the type that stores a cell, not the one that computes.

    >>> precision("half"), bf16.bits, f8e4m3.max_finite
    (f16, 16, 448.0)
    """

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    is_signed: bool
    has_inf: bool
    max_finite: float | int
    min_normal: float | int
    min_subnormal: float | int
    numpy_dtype: np.dtype[Any]
    c_type: str
    cuda_type: str
    aliases: tuple[str, ...]

    @property
    def bytes(self) -> int:
        """Size of a cell in bytes."""
        return self.bits // 8

    @property
    def is_float(self) -> bool:
        """Whether the cells are floating-point numbers."""
        return self.exponent_bits > 0

    @property
    def is_integer(self) -> bool:
        """Whether the cells are integers; bool and u4x32 are not."""
        return self.exponent_bits == 0 and self.mantissa_bits > 1

    @property
    def is_narrow(self) -> bool:
        """Whether this is a float of fewer than 32 bits: f16, bf16, f8e5m2, f8e4m3."""
        return self.is_float and self.bits < 32

    @property
    def min_finite(self) -> float | int:
        """The least value a cell can hold: ``-max_finite`` for floats, the least integer otherwise."""
        if self.is_float:
            return -self.max_finite
        return -self.max_finite - 1 if self.is_signed else 0

    @property
    def storage_dtype(self) -> np.dtype[Any]:
        """The numpy dtype of raw cells where numpy's own type for the format is not available.

        uint16 for f16 and bf16, uint8 for fp8 and bool, ``numpy_dtype`` for every other format.
        """
        if self.is_narrow or self.mantissa_bits == 1:
            return np.dtype(f"uint{self.bits}")
        return self.numpy_dtype

    def __repr__(self) -> str:
        """The name, as users write it."""
        return self.name

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        """Copy and unpickle to the interned object."""
        return precision, (self.name,)


def _float(
    name: str,
    exponent_bits: int,
    mantissa_bits: int,
    dtype: npt.DTypeLike,
    c_type: str,
    cuda_type: str,
    *aliases: str,
    has_inf: bool = True,
) -> Prec:
    bias = (1 << exponent_bits - 1) - 1
    # A format without infinities spends its top exponent on numbers; only the all-ones code of it is NaN.
    top_exponent = bias if has_inf else bias + 1
    top_significand = 2.0 - 2.0**-mantissa_bits if has_inf else 2.0 - 2.0 ** (1 - mantissa_bits)
    return Prec(
        name,
        1 + exponent_bits + mantissa_bits,
        exponent_bits,
        mantissa_bits,
        is_signed=True,
        has_inf=has_inf,
        max_finite=math.ldexp(top_significand, top_exponent),
        min_normal=math.ldexp(1.0, 1 - bias),
        min_subnormal=math.ldexp(1.0, 1 - bias - mantissa_bits),
        numpy_dtype=np.dtype(dtype),
        c_type=c_type,
        cuda_type=cuda_type,
        aliases=aliases,
    )


def _integer(bits: int, *, signed: bool, cuda_type: str, aliases: tuple[str, ...] = ()) -> Prec:
    numpy_name = f"{'int' if signed else 'uint'}{bits}"
    value_bits = bits - signed
    return Prec(
        f"{'i' if signed else 'u'}{bits}",
        bits,
        0,
        value_bits,
        is_signed=signed,
        has_inf=False,
        max_finite=(1 << value_bits) - 1,
        min_normal=1,
        min_subnormal=1,
        numpy_dtype=np.dtype(numpy_name),
        c_type=f"{numpy_name}_t",
        cuda_type=cuda_type,
        aliases=(numpy_name, *aliases),
    )


def _word(
    name: str, bits: int, mantissa_bits: int, dtype: npt.DTypeLike, c_type: str, cuda_type: str, *aliases: str
) -> Prec:
    """A format that is not a number of the usual kinds: bool and the counter state."""
    return Prec(
        name,
        bits,
        0,
        mantissa_bits,
        is_signed=False,
        has_inf=False,
        max_finite=mantissa_bits,
        min_normal=mantissa_bits,
        min_subnormal=mantissa_bits,
        numpy_dtype=np.dtype(dtype),
        c_type=c_type,
        cuda_type=cuda_type,
        aliases=aliases,
    )


f64: Final = _float("f64", 11, 52, np.float64, "double", "double", "float64", "fp64", "double")
f32: Final = _float("f32", 8, 23, np.float32, "float", "float", "float32", "fp32", "single")
f16: Final = _float("f16", 5, 10, np.float16, "uint16_t", "__half", "float16", "fp16", "half")
bf16: Final = _float("bf16", 8, 7, ml_dtypes.bfloat16, "uint16_t", "__nv_bfloat16", "bfloat16")
f8e5m2: Final = _float("f8e5m2", 5, 2, ml_dtypes.float8_e5m2, "uint8_t", "__nv_fp8_e5m2", "float8_e5m2", "fp8")
f8e4m3: Final = _float(
    "f8e4m3", 4, 3, ml_dtypes.float8_e4m3fn, "uint8_t", "__nv_fp8_e4m3", "float8_e4m3fn", has_inf=False
)
i64: Final = _integer(64, signed=True, cuda_type="long long")
i32: Final = _integer(32, signed=True, cuda_type="int")
i16: Final = _integer(16, signed=True, cuda_type="short")
i8: Final = _integer(8, signed=True, cuda_type="signed char")
u64: Final = _integer(64, signed=False, cuda_type="unsigned long long")
u32: Final = _integer(32, signed=False, cuda_type="unsigned int")
u16: Final = _integer(16, signed=False, cuda_type="unsigned short")
u8: Final = _integer(8, signed=False, cuda_type="unsigned char", aliases=("byte",))
bool_: Final = _word("bool", 8, 1, np.bool_, "uint8_t", "bool", "bool_")
u4x32: Final = _word("u4x32", 128, 0, np.uint32, "u4x32_t", "uint4")
"""Counter-based generator state: a host array of it is uint32 with an extra last axis of 4."""

FLOATS: Final = (f64, f32, f16, bf16, f8e5m2, f8e4m3)
INTEGERS: Final = (i64, i32, i16, i8, u64, u32, u16, u8)
ALL: Final = (*FLOATS, *INTEGERS, bool_, u4x32)

_BY_NAME: Final[dict[str, Prec]] = {spelling: prec for prec in ALL for spelling in (prec.name, *prec.aliases)}
# By the dtype's own name, which is the same for both byte orders and for long and long long.
_BY_DTYPE: Final[dict[str, Prec]] = {prec.numpy_dtype.name: prec for prec in ALL if prec is not u4x32}


PrecLike: TypeAlias = Prec | str | npt.DTypeLike
"""What names a format: the format, a name or alias, or a numpy dtype."""


def precision(x: PrecLike) -> Prec:
    """Return the interned format that `x` names: a format, a name or alias in any case, or a numpy dtype.

    Raises PrecisionError, with near matches, for anything else; Python's ``float`` and ``int`` are refused because
    they name no width.

    >>> precision("BFloat16"), precision(np.int8), precision("fp8")
    (bf16, i8, f8e5m2)
    """
    if isinstance(x, Prec):
        return x
    if isinstance(x, str):
        found = _BY_NAME.get(x.strip().lower())
        if found is None:
            raise _unknown(repr(x), x.strip().lower())
        return found
    if x is bool:
        return bool_
    if isinstance(x, np.dtype) or (isinstance(x, type) and issubclass(x, np.generic)):
        try:
            dtype = np.dtype(x)
        except TypeError:  # an abstract scalar type such as np.floating
            raise _unknown(repr(x), getattr(x, "__name__", "")) from None
        found = _BY_DTYPE.get(dtype.name)
        if found is None:
            raise _unknown(f"dtype {dtype}", dtype.name)
        return found
    raise _unknown(repr(x), x.__name__ if isinstance(x, type) else "")


def _unknown(shown: str, key: str) -> PrecisionError:
    near = difflib.get_close_matches(key, _BY_NAME, n=4, cutoff=0.5)
    lines = [f"unknown precision {shown}", f"  {user_source().quoted()}"]
    if near:
        lines.append(f"  near matches: {', '.join(near)}")
    lines.append(f"  known precisions: {', '.join(prec.name for prec in ALL)}")
    return PrecisionError("\n".join(lines))


@dataclass(frozen=True, slots=True)
class Requirement:
    """What a format must offer to hold given values; a lattice under ``|``, realised to a format at the end.

    Floats ask for exponent and mantissa bits, integers for a signed and an unsigned width, and each field joins by
    its maximum. Any float absorbs integers, any integer absorbs bool. Counter state joins only with itself:
    with anything else the requirement is in ``conflict`` and stays so. ``Requirement()`` is the neutral element.
    """

    exponent_bits: int = 0
    mantissa_bits: int = 0
    signed_bits: int = 0
    unsigned_bits: int = 0
    boolean: bool = False
    counter: bool = False
    conflict: bool = False

    @staticmethod
    def of(prec: Prec) -> Requirement:
        """The requirement that `prec` is the least format for."""
        return _REQUIREMENTS[prec]

    def __or__(self, other: Requirement) -> Requirement:
        """The join: associative, commutative, idempotent, and never an error."""
        if self.conflict or other.conflict or self._clashes(other) or other._clashes(self):
            return _CONFLICT
        if self.counter or other.counter:
            return _COUNTER
        exponent = max(self.exponent_bits, other.exponent_bits)
        if exponent:
            return Requirement(exponent, max(self.mantissa_bits, other.mantissa_bits))
        signed = max(self.signed_bits, other.signed_bits)
        unsigned = max(self.unsigned_bits, other.unsigned_bits)
        if signed or unsigned:
            return _integer_requirement(signed, unsigned)
        return Requirement(boolean=self.boolean or other.boolean)

    def _clashes(self, other: Requirement) -> bool:
        return self.counter and other != Requirement() and not other.counter

    @property
    def is_lossy(self) -> bool:
        """Whether no format holds it: u64 joined with a signed integer, realised as i64."""
        return self.signed_bits == 64 and self.unsigned_bits == 64

    def realise(self) -> Prec:
        """Return the least format that meets the requirement.

        Floats: the fewest total bits, ties to fewer exponent bits. Raises PrecisionError for a conflict and for the
        neutral requirement, which nothing contributed to.
        """
        if self.conflict:
            raise PrecisionError(
                f"u4x32 joins only with itself, but it met another precision\n  {user_source().quoted()}\n"
                "  counter state may be read by samplers and counter operations only"
            )
        if self.counter:
            return u4x32
        if self.exponent_bits:
            return _least_float(self.exponent_bits, self.mantissa_bits)
        if self.signed_bits:
            return _BY_NAME[f"i{self.signed_bits}"]
        if self.unsigned_bits:
            return _BY_NAME[f"u{self.unsigned_bits}"]
        if self.boolean:
            return bool_
        raise PrecisionError(f"the join of no precision at all is undefined\n  {user_source().quoted()}")


@cache
def _least_float(exponent_bits: int, mantissa_bits: int) -> Prec:
    fitting = (prec for prec in FLOATS if prec.exponent_bits >= exponent_bits and prec.mantissa_bits >= mantissa_bits)
    return min(fitting, key=lambda prec: (prec.bits, prec.exponent_bits))


def _integer_requirement(signed: int, unsigned: int) -> Requirement:
    """Normalise widths so that equal meaning is equal value; u64 stays visible beside a signed width."""
    if signed and unsigned >= signed:
        signed = min(64, 2 * unsigned)
    if signed > unsigned:
        unsigned = 0
    return Requirement(signed_bits=signed, unsigned_bits=unsigned)


def _requirement(prec: Prec) -> Requirement:
    if prec.is_float:
        return Requirement(prec.exponent_bits, prec.mantissa_bits)
    if prec.is_integer:
        return Requirement(signed_bits=prec.bits) if prec.is_signed else Requirement(unsigned_bits=prec.bits)
    return Requirement(boolean=True) if prec is bool_ else Requirement(counter=True)


_CONFLICT: Final = Requirement(conflict=True)
_COUNTER: Final = Requirement(counter=True)
_REQUIREMENTS: Final[dict[Prec, Requirement]] = {prec: _requirement(prec) for prec in ALL}


def join_requirement(*items: Prec | Requirement) -> Requirement:
    """Join formats and requirements into one requirement, in any order with the same result; never raises."""
    return _joined(frozenset(items))


@lru_cache(1024)
def _joined(items: frozenset[Prec | Requirement]) -> Requirement:
    """The solver asks for the joins of a few formats, again and again."""
    joined = Requirement()
    for item in items:
        joined = joined | (_REQUIREMENTS[item] if isinstance(item, Prec) else item)
    return joined


def join(*precs: PrecLike) -> Prec:
    """Return the least format for values drawn from all of `precs` (formats or their names), whatever their order.

    All contributors must be given at once: folding pairwise is not the same. Raises PrecisionError where u4x32 meets
    another format, and for no argument.

    >>> join(f8e4m3, f8e5m2), join("f16", "bf16"), join(f8e4m3, f8e5m2, bf16), join(u8, i8), join(i64, f16)
    (f16, f32, bf16, i16, f16)
    """
    formats = [item if isinstance(item, Prec) else precision(item) for item in precs]
    requirement = join_requirement(*formats)
    if requirement.conflict:
        raise PrecisionError(
            f"u4x32 joins only with itself, got {', '.join(item.name for item in formats)}\n  {user_source().quoted()}\n"
            "  counter state may be read by samplers and counter operations only"
        )
    return requirement.realise()


def arithmetic_join(*precs: Prec) -> Prec:
    """Return :func:`join` for the operands of arithmetic: u8 where all of them are bool."""
    joined = join(*precs)
    return u8 if joined is bool_ else joined
