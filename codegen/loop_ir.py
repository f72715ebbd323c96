"""The loop IR. Here is its grammar; ``verify`` holds the rules, ``pretty`` the text, ``interpret`` the meaning.

::

    proc  := Proc(name, params: buffer*, scalars: scalar*, body: stmt*)      callable by other procs
    stmt  := Block(name, iterators, accumulators, guard, stores, ...)       a statement before it is scheduled
           | For(iterator, kind, body)      kind: serial | parallel | vector | unroll | lane | grid
           | Store(buffer, indices, value)  value already has the buffer's element type
           | Let(symbol, value)             single assignment
           | Declare(symbol, type, init)    a mutable scalar (an accumulator being carried) | Assign(symbol, value)
           | If(condition, then, orelse)
           | Alloc(buffer)                  space: register | local | shared | global
           | Barrier()                      all threads of the region
           | Scan(...)                      carried values over one axis, each step visible
           | Tile(...)                      a named micro-kernel m x n x k; its meaning is ``Tile.loops``
           | Call(proc, buffers, scalars)
           | Comment(text)
    expr  := Const | Var | Load | Cast | Apply | Fma
    index := an expr of type i64

A Block's ``iterators`` are data or reduce. Its ``accumulators`` (typed, several) start from ``init``, take ``update``
at every reduce point whose ``guard`` holds, in row-major order of the reduce iterators, and ``stores`` run once per
data point afterwards, reading the accumulators as variables: the storage rounding lives in the stores alone, so a
split, lane-wise or padded form cannot narrow partial sums. A block with accumulators and no reduce iterator has one
reduce point. The lets and updates of one point see the states before the point, all of them (as in argmax, where the
position looks at the old maximum). The stores of one data point run in order, each seeing what the ones before wrote.

Types: every expr has one (a ``Prec``). Narrow float types come only from ``Load`` and ``Cast``; ``Apply`` and ``Fma``
on them are illegal. Integer arithmetic wraps. The branch of a ``where`` that is not taken may load out of bounds.
Indices are logical; ``Buffer.layout`` maps them to memory at emission and in the interpreter. Extents may be symbolic
(``Var`` of an i64 scalar parameter) with a static maximum. Symbols are objects: names become text at emission only, so
no pass can capture.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any, Literal, TypeAlias

from stagedtensor.codegen.layout import (
    ROW_MAJOR as ROW_MAJOR,
    Layout as Layout,
    Pad as Pad,
    Reorder as Reorder,
    Split as Split,
)
from stagedtensor.codegen.pieces import piece, remembered, replace
from stagedtensor.precision import Prec, i64


@piece(frozen=True, eq=False)
class Symbol:
    """A scalar name; identity is the object, ``hint`` is what emission tries to print."""

    hint: str
    type: Prec

    def __repr__(self) -> str:
        return f"%{self.hint}"


# -- buffers ------------------------------------------------------------------------------------------------------

Space: TypeAlias = Literal["register", "local", "shared", "global"]


@piece(frozen=True, eq=False)
class Buffer:
    """Storage of one node version (or a scratch area). Identity is the object."""

    name: str
    type: Prec
    shape: tuple[int, ...]
    space: Space = "global"
    layout: Layout = ROW_MAJOR
    node: Any = None
    """The node it holds, if any."""
    saturate: bool = False
    flush_subnormal: bool = False

    @property
    def size(self) -> int:
        """Cells in memory."""
        count = 1
        for dim in self.layout.physical_shape(self.shape):
            count *= dim
        return count

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.size * self.type.bytes

    def __repr__(self) -> str:
        return f"@{self.name}"


# -- expressions --------------------------------------------------------------------------------------------------


@piece(frozen=True, eq=False)
class Const:
    """A literal of a compute type (float value, int, or bool as 0/1).

    Equal are literals of one type and one value, by the bits: 0.0 and -0.0 differ, NaN equals itself.
    """

    value: float | int
    type: Prec

    def _key(self) -> str | float | int:
        return float(self.value).hex() if self.type.is_float else self.value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Const) and self.type is other.type and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self.value) if self.value == self.value else 0


@piece(frozen=True, eq=False)
class Var:
    """The value of a symbol: an iterator, a let, an accumulator or a scalar parameter."""

    symbol: Symbol

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Var) and self.symbol is other.symbol

    def __hash__(self) -> int:
        return hash(self.symbol)

    @property
    def type(self) -> Prec:
        """The symbol's type."""
        return self.symbol.type


@piece(frozen=True)
class Load:
    """One cell of a buffer, in the buffer's element type."""

    buffer: Buffer
    indices: tuple[Expr, ...]

    @property
    def type(self) -> Prec:
        """The buffer's element type."""
        return self.buffer.type


@piece(frozen=True)
class Cast:
    """One conversion by the rules of the precision page; ``flush`` stores subnormals as 0."""

    arg: Expr
    type: Prec
    saturate: bool = False
    flush: bool = False


@piece(frozen=True)
class Apply:
    """A row of the op table on arguments of type ``type``.

    Those of predicates may have any type, those of random ops are u32, u32, u64. Comparisons and logic give 0 or 1
    (``nonfinite`` 0 or +inf) in ``type``.
    """

    op: str
    args: tuple[Expr, ...]
    type: Prec


@piece(frozen=True)
class Fma:
    """a*b + c with one rounding; f32 and f64 only."""

    a: Expr
    b: Expr
    c: Expr

    @property
    def type(self) -> Prec:
        """The type of the addend."""
        return self.c.type


Expr: TypeAlias = Const | Var | Load | Cast | Apply | Fma


def children(expr: Expr) -> tuple[Expr, ...]:
    """Return the direct subexpressions."""
    if isinstance(expr, Apply):
        return expr.args
    if isinstance(expr, Load):
        return expr.indices
    if isinstance(expr, Cast):
        return (expr.arg,)
    if isinstance(expr, Fma):
        return (expr.a, expr.b, expr.c)
    return ()


def with_children(expr: Expr, parts: tuple[Expr, ...]) -> Expr:
    """Return ``expr`` with its direct subexpressions replaced."""
    match expr:
        case Load():
            return replace(expr, indices=parts)
        case Cast():
            return replace(expr, arg=parts[0])
        case Apply():
            return replace(expr, args=parts)
        case Fma():
            return Fma(*parts)
        case _:
            return expr


def walk(expr: Expr) -> tuple[Expr, ...]:
    """Return every subexpression, the expression itself included, parents first."""
    return (expr,) if isinstance(expr, Var | Const) else (expr, *inside(expr))


@remembered
def inside(expr: Expr) -> tuple[Expr, ...]:
    """Return every proper subexpression, parents first."""
    found: list[Expr] = []
    for part in children(expr):
        found += walk(part)
    return tuple(found)


def index(value: int) -> Const:
    """Return an index constant."""
    return Const(value, i64)


# -- statements ---------------------------------------------------------------------------------------------------

LoopKind: TypeAlias = Literal["serial", "parallel", "vector", "unroll", "lane", "grid"]
IteratorKind: TypeAlias = Literal["data", "reduce"]


@piece(frozen=True)
class BlockIterator:
    """An i64 symbol running over ``0 .. extent-1``; ``extent`` may be symbolic, ``bound`` is its static maximum."""

    symbol: Symbol
    extent: Expr
    bound: int
    kind: IteratorKind = "data"


@piece(frozen=True)
class Accumulator:
    """A typed running value of a Block: ``init``, then ``update`` at each reduce point (reads itself as ``Var``).

    ``combine`` names how two partial states merge (a write op of the op table: add, mul, max, min), with ``neutral`` as
    the state of an empty part; "" means the order is serial and must not be split. A pair (argmax) names its value
    accumulator in ``paired_with`` and merges with it: the greater value wins, NaN first, the lower position at ties.
    """

    symbol: Symbol
    init: Expr
    update: Expr
    combine: str = ""
    neutral: Expr | None = None
    paired_with: Symbol | None = None


@piece(frozen=True)
class Origin:
    """What a piece of code computes, for comments and error messages."""

    text: str
    source: str
    label: str = ""


@piece(frozen=True)
class Cost:
    """Floating-point operations, least bytes moved, bytes alive."""

    flops: int = 0
    nbytes: int = 0
    live_bytes: int = 0


@piece(frozen=True)
class Store:
    """Write one cell; ``value.type`` is the buffer's element type."""

    buffer: Buffer
    indices: tuple[Expr, ...]
    value: Expr


@piece(frozen=True)
class Let:
    """Name a value."""

    symbol: Symbol
    value: Expr


@piece(frozen=True)
class Declare:
    """Introduce a mutable scalar with an initial value."""

    symbol: Symbol
    init: Expr


@piece(frozen=True)
class Assign:
    """Overwrite a declared scalar."""

    symbol: Symbol
    value: Expr


@piece(frozen=True)
class Block:
    """One program statement (or several merged ones) before scheduling; see the module docstring.

    ``lets`` are evaluated per reduce point before the updates (or per data point where there is no reduce iterator);
    where there are reduce iterators, the stores do not see them.
    ``guard`` skips points: with accumulators it skips updates (the point contributes nothing; the stores still run at
    every data point), without accumulators it skips stores.
    ``scatter``: the stores' indices depend on reduce iterators or on data, so ``stores`` run at every point, in
    row-major order of ``iterators`` as listed, reading and writing the target; a scatter block has no accumulators.
    Without ``scatter`` no two data points write one cell, and a buffer that is written is read at that cell only.
    ``late``: a copy of an earlier block, put where it stands to shorten the life of what it computes.
    """

    name: str
    iterators: tuple[BlockIterator, ...]
    stores: tuple[Store, ...]
    accumulators: tuple[Accumulator, ...] = ()
    lets: tuple[Let, ...] = ()
    guard: Expr | None = None
    scatter: bool = False
    origins: tuple[Origin, ...] = ()
    cost: Cost = Cost()
    composite: str = ""
    late: bool = False

    @property
    def data(self) -> tuple[BlockIterator, ...]:
        """The data iterators."""
        return tuple(item for item in self.iterators if item.kind == "data")

    @property
    def reduce(self) -> tuple[BlockIterator, ...]:
        """The reduce iterators."""
        return tuple(item for item in self.iterators if item.kind == "reduce")


@piece(frozen=True)
class For:
    """A loop. ``vector``: iterations are independent and adjacent in memory. ``lane``: a fixed number of partial states."""

    iterator: BlockIterator
    body: tuple[Stmt, ...]
    kind: LoopKind = "serial"


@piece(frozen=True)
class If:
    """Conditional statements; the condition is tested against zero."""

    condition: Expr
    then: tuple[Stmt, ...]
    orelse: tuple[Stmt, ...] = ()


@piece(frozen=True)
class Alloc:
    """Bring a scratch buffer into scope until the enclosing body ends."""

    buffer: Buffer


@piece(frozen=True)
class Barrier:
    """All threads of the region meet."""


@piece(frozen=True)
class Scan:
    """Carried values along one iterator: at each step the updates give new ones, then ``body`` runs.

    All updates see the old states. ``reverse`` runs the iterator from its last value to 0. The carried symbols are in
    scope in the updates and the body.
    """

    iterator: BlockIterator
    carried: tuple[Accumulator, ...]
    body: tuple[Stmt, ...]
    reverse: bool = False


@piece(frozen=True)
class Tile:
    """A named micro-kernel: C[m,n] += A[m,k] * B[k,n] on fragments; ``loops`` is its meaning."""

    name: str
    m: int
    n: int
    k: int
    loops: tuple[Stmt, ...]
    arguments: tuple[Expr | Buffer, ...] = ()


@piece(frozen=True)
class Call:
    """Run another proc on buffers and scalars, positionally."""

    proc: Proc
    buffers: tuple[Buffer, ...]
    scalars: tuple[Expr, ...] = ()


@piece(frozen=True)
class Comment:
    """A line of explanation in generated source."""

    text: str


Stmt: TypeAlias = Block | For | Store | Let | Declare | Assign | If | Alloc | Barrier | Scan | Tile | Call | Comment


@piece(frozen=True, eq=False)
class Proc:
    """A procedure over buffers and scalar parameters.

    ``scalars`` are i64 parameters (dynamic extents, static indices). ``origins``, ``path`` and ``cost`` describe it in
    reports: which DSL expressions it computes, which code path was chosen and why.
    """

    name: str
    params: tuple[Buffer, ...]
    body: tuple[Stmt, ...]
    scalars: tuple[Symbol, ...] = ()
    origins: tuple[Origin, ...] = ()
    path: str = ""
    cost: Cost = Cost()
    attributes: dict[str, Any] = field(default_factory=dict)


@piece(frozen=True, eq=False)
class Module:
    """A whole routine: procs in launch order, the buffers they share and the scalar parameters of the routine.

    ``external`` buffers are bound by the context; ``temporaries`` live in the routine's arena.
    """

    name: str
    kernels: tuple[Proc, ...]
    external: tuple[Buffer, ...]
    temporaries: tuple[Buffer, ...]
    scalars: tuple[Symbol, ...] = ()
    placements: dict[Any, Any] = field(default_factory=dict)
    """Node -> where its values live and why (``passes.place.Decision``), for those that were free to have no buffer."""
    recomputed: int = 0
    """Bytes of temporaries fewer alive at once, because values are computed again in front of late readers."""
