"""Identifiers of generated source: sanitised once, reserved words avoided, unique by order of appearance.

In: hints (labels of nodes, axes, kernels). Out: C, C++ and CUDA identifiers. A name is taken while the scope that it
was given in is open, so sibling loops may use the same one. Knows no types.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable

_KEYWORDS = frozenset(
    """
alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t char16_t char32_t class co_await
co_return co_yield compl concept const const_cast consteval constexpr constinit continue decltype default delete do double
dynamic_cast else enum explicit export extern false float for friend goto if import inline int int8_t int16_t int32_t
int64_t intptr_t long main module mutable namespace new noexcept not not_eq nullptr operator or or_eq override private
protected ptrdiff_t public register reinterpret_cast requires restrict return short signed size_t sizeof static
static_assert static_cast struct switch template this thread_local throw true try typedef typeid typename typeof uint8_t
uint16_t uint32_t uint64_t uintptr_t union unsigned using virtual void volatile wchar_t while xor xor_eq linux unix
half half2 float2 float4 int2 int4 uint2 uint4 dim3 threadIdx blockIdx blockDim gridDim warpSize clock clock64
frame scalars tid nt barrier arena NULL NAN INFINITY EOF assert errno stdin stdout stderr
""".split()  # noqa: SIM905 -- a word list reads better as text
)

_MATHEMATICS = frozenset(
    """
abs acos acosh asin asinh atan atan2 atanh cbrt ceil copysign cos cosh erf erfc exp exp2 expm1 fabs fdim floor fma fmax
fmin fmod frexp hypot ilogb ldexp lgamma llrint llround log log10 log1p log2 logb lrint lround modf nan nearbyint
nextafter nexttoward pow remainder remquo rint round scalbln scalbn sin sinh sqrt tan tanh tgamma trunc rsqrt
""".split()  # noqa: SIM905
)

_LIBRARY = frozenset(
    """
j0 j1 jn y0 y1 yn gamma signgam isnan isinf isfinite isnormal signbit fpclassify drem finite significand pow10 exp10
abort atexit atof atoi atol bsearch calloc div exit free getenv labs ldiv malloc mblen qsort rand realloc srand strtod
strtol system memchr memcmp memcpy memmove memset strcat strchr strcmp strcpy strlen strncpy strstr time index rindex
bcmp bcopy bzero ffs printf scanf puts getchar putchar fopen fclose fread fwrite read write open close link signal select
""".split()  # noqa: SIM905
)

_BASE = _KEYWORDS | _LIBRARY | {f"{name}{suffix}" for name in _MATHEMATICS for suffix in ("", "f", "l")}


def sanitise(hint: str) -> str:
    """Return ``hint`` as an identifier: ASCII letters, digits and single underscores, no leading digit or underscore.

    >>> sanitise("layer 1/w"), sanitise("2nd"), sanitise("β"), sanitise("x.grad")
    ('layer_1_w', 'n2nd', 'v', 'x_grad')
    """
    text = re.sub(r"_+", "_", re.sub(r"[^0-9A-Za-z]", "_", hint)).strip("_")
    if not text:
        return "v"
    return f"n{text}" if text[0].isdigit() else text


class Names:
    """Gives identifiers to keys (symbols, buffers), one scope inside another.

    ``reserved`` are names that generated text uses otherwise; names beginning with ``st_`` or ``ST_`` are the
    prelude's.
    """

    def __init__(self, reserved: Iterable[str] = ()) -> None:
        self._reserved = _BASE | frozenset(reserved)
        self._scopes: list[dict[Hashable, str]] = [{}]
        self._taken: list[set[str]] = [set()]
        self.given: set[str] = set()
        """Every name given so far, in any scope."""

    def push(self) -> None:
        """Open a scope."""
        self._scopes.append({})
        self._taken.append(set())

    def pop(self) -> None:
        """Close the innermost scope; its names are free again."""
        self._scopes.pop()
        self._taken.pop()

    def give(self, key: Hashable, hint: str) -> str:
        """Return a new name for ``key`` in the innermost scope, close to ``hint``."""
        base = sanitise(hint)
        if base.lower().startswith("st_"):
            base = f"v_{base}"  # the prelude's names all begin so, whichever of them are printed
        name, number = base, 1
        while not self._is_free(name):
            number += 1
            # "w1" and its second "w1_2", never "w12", which may be a label of its own.
            name = f"{base}_{number}"
        self._scopes[-1][key] = name
        self._taken[-1].add(name)
        self.given.add(name)
        return name

    def take_back(self, key: Hashable) -> None:
        """Free the name of ``key`` in the innermost scope, which nothing printed uses."""
        name = self._scopes[-1].pop(key)
        self._taken[-1].discard(name)
        self.given.discard(name)

    def alias(self, key: Hashable, name: str) -> None:
        """Let ``key`` share a name that was given already."""
        self._scopes[-1][key] = name

    def of(self, key: Hashable) -> str:
        """Return the name of ``key``; KeyError where it has none in an open scope."""
        for scope in reversed(self._scopes):
            if key in scope:
                return scope[key]
        raise KeyError(key)

    def has(self, key: Hashable) -> bool:
        """Tell whether ``key`` has a name in an open scope."""
        return any(key in scope for scope in self._scopes)

    def _is_free(self, name: str) -> bool:
        return name not in self._reserved and not any(name in taken for taken in self._taken)
