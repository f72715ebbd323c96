"""The prelude: the C functions that generated source calls, printed only as far as they are called.

In: names of functions, a dialect, the target's features. Out: text to stand at the top of a translation unit. The same
text serves C and CUDA; a function gives the same bits on every target, with or without features (f64 transcendentals,
which are the C library's, agree within 2 ulp). ``mirror`` holds the same functions in NumPy. Needs a compiler that
neither contracts nor reassociates floating-point expressions: ``-ffp-contract=off -fwrapv`` and no fast-math.

Storage in C: f16 and bf16 are uint16_t, fp8 and bool uint8_t. Known features: ``fma`` (a hardware fused multiply-add),
``avx`` and ``neon`` (rounding instructions); others are ignored. The conversion instructions F16C and AVX512-BF16 are
left alone here: compilers do not vectorise the first from plain C (``vectors`` names it), and the second flushes
subnormals.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from stagedtensor.codegen.prelude.conversions import (
    conversion as conversion,
    conversion_sections,
    round_trip as round_trip,
)
from stagedtensor.codegen.prelude.sections import Section, written_sections
from stagedtensor.errors import InternalError
from stagedtensor.precision import Prec, precision

__all__ = ["DIALECTS", "FEATURES", "conversion", "known_names", "op_function", "prelude_source", "round_trip"]

FEATURES = frozenset({"fma", "avx", "neon"})

# Ops of the op table whose function has another stem.
_STEMS = {"mod": "floormod", "maximum": "max", "minimum": "min"}

# Always inlined: a loop around a call that stays a call is not vectorised.
_HEADS = {
    "c": """\
#include <stdint.h>
{includes}
#define ST_FN static inline __attribute__((always_inline))
#define ST_TABLE static const
""",
    "cuda": """\
#ifdef __CUDACC_RTC__ /* the run-time compiler has no standard headers */
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#define INT32_MAX 0x7fffffff
#define INT32_MIN (-INT32_MAX - 1)
#define UINT32_MAX 0xffffffffu
#define INT64_MAX 0x7fffffffffffffffll
#define INT64_MIN (-INT64_MAX - 1)
#define UINT64_MAX 0xffffffffffffffffull
#else
#include <stdint.h>
{includes}#endif
#define ST_FN static __device__ __forceinline__
#define ST_TABLE static __device__ const
""",
}
DIALECTS = tuple(_HEADS)


@cache
def _sections() -> dict[str, tuple[Section, ...]]:
    """All variants of every function by name, in the order in which they are to be tried."""
    written = written_sections()
    derived = conversion_sections(frozenset(section.name for section in written))
    variants: dict[str, tuple[Section, ...]] = {}
    for section in (*written, *derived):
        variants[section.name] = (*variants.get(section.name, ()), section)
    return variants


@cache
def known_names() -> frozenset[str]:
    """Return the name of every function, type and table that :func:`prelude_source` can print."""
    return frozenset(_sections())


def op_function(op: str, prec: Prec | str) -> str | None:
    """Return the function that computes a scalar op of the op table at `prec`, or None where C's own operator does.

    >>> op_function("mod", "i32"), op_function("add", "f32")
    ('st_floormod_i32', None)
    """
    name = f"st_{_STEMS.get(op, op)}_{precision(prec).name}"
    return name if name in _sections() else None


def _choose(name: str, dialect: str, features: frozenset[str]) -> Section:
    for section in _sections().get(name, ()):
        if section.serves(dialect, features):
            return section
    raise InternalError(f"the prelude has no {name!r} for dialect {dialect!r}")


def prelude_source(names: Iterable[str], *, dialect: str = "c", features: frozenset[str] = frozenset()) -> str:
    """Return the text that defines `names` and what they depend on, each once, dependencies first.

    The text depends on the set of names, the dialect and the features alone. Raises InternalError for an unknown name
    or dialect.
    """
    if dialect not in _HEADS:
        raise InternalError(f"unknown dialect {dialect!r}, expected one of {', '.join(DIALECTS)}")
    ordered: dict[str, Section] = {}

    def add(name: str, path: tuple[str, ...]) -> None:
        if name in ordered:
            return
        if name in path:
            raise InternalError(f"prelude sections need each other: {' -> '.join((*path, name))}")
        section = _choose(name, dialect, features)
        for needed in section.needs:
            add(needed, (*path, name))
        ordered[name] = section

    for name in sorted(set(names)):
        add(name, ())
    headers = sorted({header for section in ordered.values() for header in section.includes})
    includes = "".join(f"#include <{header}>\n" for header in headers)
    # The blank line after the headers is part of the template; without headers it would be doubled.
    head = _HEADS[dialect].replace("{includes}", includes)
    return "\n".join([head, *(section.text + "\n" for section in ordered.values())])
