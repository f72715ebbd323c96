"""Rewriting and inspecting the loop IR: mappers, substitution, fresh copies, free symbols, buffers read and written.

In: expressions, statements or bodies. Out: new ones; nothing is changed in place, and what a function does not touch
comes back equal. Symbols are objects that are bound once, so substitution cannot capture; copying a piece of code
into the same proc a second time needs :func:`fresh_copy`, which renews every symbol and scratch buffer bound inside.

>>> from stagedtensor.codegen.loop_ir import Apply, Const, Symbol, Var
>>> from stagedtensor.precision import f32
>>> x, y = Symbol("x", f32), Symbol("y", f32)
>>> substitute(Apply("add", (Var(x), Const(1.0, f32)), f32), {x: Var(y)}).args[0]
Var(symbol=%y)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any, TypeAlias, TypeVar, overload

from stagedtensor.codegen.loop_ir import (
    Accumulator,
    Alloc,
    Assign,
    Barrier,
    Block,
    BlockIterator,
    Buffer,
    Call,
    Comment,
    Const,
    Declare,
    Expr,
    For,
    If,
    Let,
    Load,
    Proc,
    Scan,
    Stmt,
    Store,
    Symbol,
    Tile,
    Var,
    children,
    inside,
    walk,
    with_children,
)
from stagedtensor.codegen.pieces import remembered, replace
from stagedtensor.errors import InternalError

Body = tuple[Stmt, ...]
Kept = TypeVar("Kept", bound=Stmt)
"""A statement that stays a statement of its class."""


class Rewriter:
    """Base of passes that rebuild code: they override ``expr``, ``stmt``, ``symbol`` or ``buffer``.

    ``super()`` goes deeper. ``stmt`` may give several statements or none. ``symbol`` and ``buffer`` are asked at
    binders and uses alike.
    """

    def symbol(self, symbol: Symbol) -> Symbol:
        """Return the symbol to stand for ``symbol``."""
        return symbol

    def buffer(self, buffer: Buffer) -> Buffer:
        """Return the buffer to stand for ``buffer``."""
        return buffer

    def expr(self, expr: Expr) -> Expr:
        """Rebuild an expression from its rewritten parts."""
        match expr:
            case Var():
                symbol = self.symbol(expr.symbol)
                return expr if symbol is expr.symbol else Var(symbol)
            case Load():
                buffer, indices = self.buffer(expr.buffer), self.exprs(expr.indices)
                return expr if buffer is expr.buffer and indices is expr.indices else Load(buffer, indices)
            case Const():
                return expr
        parts = children(expr)
        new = self.exprs(parts)
        return expr if new is parts else with_children(expr, new)

    def exprs(self, parts: tuple[Expr, ...]) -> tuple[Expr, ...]:
        """Rewrite expressions in order."""
        return same_where_equal(parts, [self.expr(part) for part in parts])

    def body(self, body: Body) -> Body:
        """Rewrite the statements of a body in order."""
        return same_where_equal(body, [new for stmt in body for new in self.stmt(stmt)])

    def iterator(self, iterator: BlockIterator) -> BlockIterator:
        """Rewrite an iterator's symbol and extent."""
        symbol, extent = self.symbol(iterator.symbol), self.expr(iterator.extent)
        if symbol is iterator.symbol and extent is iterator.extent:
            return iterator
        return BlockIterator(symbol, extent, iterator.bound, iterator.kind)

    def accumulator(self, accumulator: Accumulator) -> Accumulator:
        """Rewrite an accumulator's symbols and expressions."""
        neutral, paired = accumulator.neutral, accumulator.paired_with
        return _changed(
            accumulator,
            symbol=self.symbol(accumulator.symbol),
            init=self.expr(accumulator.init),
            update=self.expr(accumulator.update),
            neutral=None if neutral is None else self.expr(neutral),
            paired_with=None if paired is None else self.symbol(paired),
        )

    def store(self, store: Store) -> Store:
        """Rewrite a store's buffer, indices and value."""
        buffer, indices, value = self.buffer(store.buffer), self.exprs(store.indices), self.expr(store.value)
        if buffer is store.buffer and indices is store.indices and value is store.value:
            return store
        return Store(buffer, indices, value)

    def let(self, let: Let) -> Let:
        """Rewrite a let's symbol and value."""
        symbol, value = self.symbol(let.symbol), self.expr(let.value)
        return let if symbol is let.symbol and value is let.value else Let(symbol, value)

    def block(self, block: Block) -> Block:
        """Rewrite all parts of a block."""
        return _changed(
            block,
            iterators=same_where_equal(block.iterators, [self.iterator(item) for item in block.iterators]),
            stores=same_where_equal(block.stores, [self.store(item) for item in block.stores]),
            accumulators=same_where_equal(block.accumulators, [self.accumulator(item) for item in block.accumulators]),
            lets=same_where_equal(block.lets, [self.let(item) for item in block.lets]),
            guard=None if block.guard is None else self.expr(block.guard),
        )

    def stmt(self, stmt: Stmt) -> Body:
        """Rebuild a statement from its rewritten parts."""
        match stmt:
            case Block():
                return (self.block(stmt),)
            case For():
                return (_changed(stmt, iterator=self.iterator(stmt.iterator), body=self.body(stmt.body)),)
            case Store():
                return (self.store(stmt),)
            case Let():
                return (self.let(stmt),)
            case Declare():
                return (_changed(stmt, symbol=self.symbol(stmt.symbol), init=self.expr(stmt.init)),)
            case Assign():
                return (_changed(stmt, symbol=self.symbol(stmt.symbol), value=self.expr(stmt.value)),)
            case If():
                condition, then, orelse = self.expr(stmt.condition), self.body(stmt.then), self.body(stmt.orelse)
                return (_changed(stmt, condition=condition, then=then, orelse=orelse),)
            case Alloc():
                return (Alloc(self.buffer(stmt.buffer)),)
            case Scan():
                iterator = self.iterator(stmt.iterator)
                carried = tuple(self.accumulator(item) for item in stmt.carried)
                return (replace(stmt, iterator=iterator, carried=carried, body=self.body(stmt.body)),)
            case Tile():
                arguments = tuple(
                    self.buffer(item) if isinstance(item, Buffer) else self.expr(item) for item in stmt.arguments
                )
                return (replace(stmt, loops=self.body(stmt.loops), arguments=arguments),)
            case Call():
                buffers = tuple(self.buffer(item) for item in stmt.buffers)
                return (replace(stmt, buffers=buffers, scalars=self.exprs(stmt.scalars)),)
            case Barrier() | Comment():
                return (stmt,)

    def proc(self, proc: Proc) -> Proc:
        """Rewrite a proc's body; its parameters are asked for too."""
        params = tuple(self.buffer(item) for item in proc.params)
        scalars = tuple(self.symbol(item) for item in proc.scalars)
        return replace(proc, params=params, scalars=scalars, body=self.body(proc.body))

    @overload
    def piece(self, piece: Expr) -> Expr: ...
    @overload
    def piece(self, piece: Body) -> Body: ...
    @overload
    def piece(self, piece: Kept) -> Kept: ...
    def piece(self, piece: Expr | Stmt | Body) -> Expr | Stmt | Body:
        """Rewrite an expression, a body, or a statement that stays one statement."""
        if isinstance(piece, tuple):
            return self.body(piece)
        if isinstance(piece, Expr):
            return self.expr(piece)
        (stmt,) = self.stmt(piece)
        return stmt


# -- mapping ------------------------------------------------------------------------------------------------------


Part = TypeVar("Part")
Parts = TypeVar("Parts", Accumulator, Block, For, Declare, Assign, If)


def same_where_equal(old: tuple[Part, ...], new: Sequence[Part]) -> tuple[Part, ...]:
    """Return ``new``, or ``old`` itself where it has the very same parts: what is remembered of its owner then stays."""
    return old if (not new and not old) or (len(old) == len(new) and all(map(is_, old, new))) else tuple(new)


def _changed(piece: Parts, **parts: Any) -> Parts:
    """Return ``piece`` with these parts, itself where it has them already."""
    for name, part in parts.items():
        if getattr(piece, name) is not part:
            return replace(piece, **parts)
    return piece


class _MapExpressions(Rewriter):
    def __init__(self, function: Callable[[Expr], Expr]) -> None:
        self.function = function

    def expr(self, expr: Expr) -> Expr:
        return self.function(super().expr(expr))


class _MapStatements(Rewriter):
    def __init__(self, function: Callable[[Stmt], Stmt | Body]) -> None:
        self.function = function

    def expr(self, expr: Expr) -> Expr:
        return expr

    def stmt(self, stmt: Stmt) -> Body:
        new = self.function(super().stmt(stmt)[0])
        return new if isinstance(new, tuple) else (new,)


@overload
def map_expr(piece: Expr, function: Callable[[Expr], Expr]) -> Expr: ...
@overload
def map_expr(piece: Body, function: Callable[[Expr], Expr]) -> Body: ...
@overload
def map_expr(piece: Kept, function: Callable[[Expr], Expr]) -> Kept: ...
def map_expr(piece: Expr | Stmt | Body, function: Callable[[Expr], Expr]) -> Expr | Stmt | Body:
    """Apply ``function`` to every expression of an expression, statement or body, innermost first."""
    return _MapExpressions(function).piece(piece)


def map_stmts(body: Body, function: Callable[[Stmt], Stmt | Body]) -> Body:
    """Apply ``function`` to every statement of a body, innermost first; it may give a tuple of statements, or ``()``."""
    return _MapStatements(function).body(body)


# -- substitution and copies --------------------------------------------------------------------------------------


Values: TypeAlias = Mapping[Symbol, Expr]
Buffers: TypeAlias = Mapping[Buffer, Buffer]


class _Substitute(Rewriter):
    def __init__(self, values: Values, buffers: Buffers) -> None:
        self.values = values
        self.buffers = buffers

    def symbol(self, symbol: Symbol) -> Symbol:
        if symbol in self.values:
            value = self.values[symbol]
            if not isinstance(value, Var):
                raise InternalError(f"cannot substitute an expression for {symbol} where it is bound or assigned")
            return value.symbol
        return symbol

    def buffer(self, buffer: Buffer) -> Buffer:
        return self.buffers.get(buffer, buffer)

    def expr(self, expr: Expr) -> Expr:
        if isinstance(expr, Var):
            return self.values.get(expr.symbol, expr)
        return super().expr(expr)


@overload
def substitute(piece: Expr, values: Values, buffers: Buffers | None = None) -> Expr: ...
@overload
def substitute(piece: Body, values: Values, buffers: Buffers | None = None) -> Body: ...
@overload
def substitute(piece: Kept, values: Values, buffers: Buffers | None = None) -> Kept: ...
def substitute(piece: Expr | Stmt | Body, values: Values, buffers: Buffers | None = None) -> Expr | Stmt | Body:
    """Replace symbols by expressions (not again inside these) and buffers by buffers.

    A symbol that ``piece`` itself binds or assigns may be replaced by a ``Var`` only (a renaming).
    """
    return _Substitute(values, buffers or {}).piece(piece)


@overload
def fresh_copy(piece: Body) -> Body: ...
@overload
def fresh_copy(piece: Kept) -> Kept: ...
def fresh_copy(piece: Stmt | Body) -> Stmt | Body:
    """Return a copy in which every symbol and scratch buffer bound inside ``piece`` is a new object of the same hint."""
    body: Body = piece if isinstance(piece, tuple) else (piece,)
    symbols = {symbol: Var(Symbol(symbol.hint, symbol.type)) for symbol in bound_symbols(body)}
    buffers = {stmt.buffer: replace(stmt.buffer) for stmt in walk_stmts(body) if isinstance(stmt, Alloc)}
    return _Substitute(symbols, buffers).piece(piece)


# -- inspection ---------------------------------------------------------------------------------------------------


def bodies(stmt: Stmt) -> tuple[Body, ...]:
    """Return the bodies that stand in a statement: those of loops and of a Tile, both branches of an If; not of Calls."""
    match stmt:
        case For() | Scan():
            return (stmt.body,)
        case If():
            return (stmt.then, stmt.orelse)
        case Tile():
            return (stmt.loops,)
        case _:
            return ()


def walk_stmts(body: Body) -> Iterator[Stmt]:
    """Yield every statement, parents first; the loops of a Tile and both branches of an If are entered, Calls are not."""
    for stmt in body:
        yield stmt
        yield from _inside(stmt)


@remembered
def _inside(stmt: Stmt) -> tuple[Stmt, ...]:
    return tuple(inner for body in bodies(stmt) for inner in walk_stmts(body))


@remembered
def expressions(stmt: Stmt) -> tuple[Expr, ...]:
    """Return the whole expressions that stand in a statement itself, not those of statements inside it."""
    return tuple(_expressions(stmt))


def _expressions(stmt: Stmt) -> Iterator[Expr]:
    match stmt:
        case Block():
            yield from (item.extent for item in stmt.iterators)
            if stmt.guard is not None:
                yield stmt.guard
            yield from (item.value for item in stmt.lets)
            yield from _accumulator_expressions(stmt.accumulators)
            for store in stmt.stores:
                yield from expressions(store)
        case For():
            yield stmt.iterator.extent
        case Store():
            yield from stmt.indices
            yield stmt.value
        case Let() | Assign():
            yield stmt.value
        case Declare():
            yield stmt.init
        case If():
            yield stmt.condition
        case Scan():
            yield stmt.iterator.extent
            yield from _accumulator_expressions(stmt.carried)
        case Tile():
            yield from (item for item in stmt.arguments if not isinstance(item, Buffer))
        case Call():
            yield from stmt.scalars


def _accumulator_expressions(accumulators: tuple[Accumulator, ...]) -> Iterator[Expr]:
    for item in accumulators:
        yield item.init
        yield item.update
        if item.neutral is not None:
            yield item.neutral


def binders(stmt: Stmt) -> tuple[Symbol, ...]:
    """Return the symbols that a statement itself binds, in order."""
    match stmt:
        case Block():
            return (
                *(item.symbol for item in stmt.iterators),
                *(item.symbol for item in stmt.accumulators),
                *(item.symbol for item in stmt.lets),
            )
        case For():
            return (stmt.iterator.symbol,)
        case Let() | Declare():
            return (stmt.symbol,)
        case Scan():
            return (stmt.iterator.symbol, *(item.symbol for item in stmt.carried))
        case _:
            return ()


def bound_symbols(body: Body) -> tuple[Symbol, ...]:
    """Return every symbol bound in a body, in order of appearance."""
    return tuple(symbol for stmt in walk_stmts(body) for symbol in binders(stmt))


def symbols_of(expr: Expr) -> tuple[Symbol, ...]:
    """Return the symbols an expression reads, each once, in order of appearance."""
    if isinstance(expr, Var):
        return (expr.symbol,)
    return () if isinstance(expr, Const) else _symbols_inside(expr)


@remembered
def _symbols_inside(expr: Expr) -> tuple[Symbol, ...]:
    return tuple(dict.fromkeys(part.symbol for part in inside(expr) if isinstance(part, Var)))


def free_symbols(piece: Expr | Stmt | Body) -> tuple[Symbol, ...]:
    """Return the symbols read or assigned in ``piece`` but not bound in it, in order of appearance."""
    if isinstance(piece, Expr):
        return symbols_of(piece)
    body: Body = piece if isinstance(piece, tuple) else (piece,)
    if len(body) == 1 and isinstance(body[0], Block):
        return _free_in_block(body[0])
    bound = set(bound_symbols(body))
    seen: dict[Symbol, None] = {}
    for stmt in walk_stmts(body):
        if isinstance(stmt, Assign):
            seen.setdefault(stmt.symbol)
        for expr in expressions(stmt):
            seen.update(dict.fromkeys(symbols_of(expr)))
    return tuple(symbol for symbol in seen if symbol not in bound)


@remembered
def _free_in_block(block: Block) -> tuple[Symbol, ...]:
    seen = dict.fromkeys(chain.from_iterable(map(symbols_of, expressions(block))))
    for symbol in binders(block):
        seen.pop(symbol, None)
    return tuple(seen)


def buffers_read(piece: Expr | Stmt | Body) -> tuple[Buffer, ...]:
    """Return the buffers that are loaded from, in order; a Call counts what its proc reads."""
    if not isinstance(piece, tuple):
        return _loaded(piece) if isinstance(piece, Expr) else _read(piece)
    return tuple(dict.fromkeys(buffer for stmt in piece for buffer in _read(stmt)))


def _loaded(expr: Expr) -> tuple[Buffer, ...]:
    return () if isinstance(expr, Var | Const) else _loaded_inside(expr)


@remembered
def _loaded_inside(expr: Expr) -> tuple[Buffer, ...]:
    return tuple(dict.fromkeys(part.buffer for part in walk(expr) if isinstance(part, Load)))


@remembered
def _read(stmt: Stmt) -> tuple[Buffer, ...]:
    seen: dict[Buffer, None] = {}
    for expr in expressions(stmt):
        seen.update(dict.fromkeys(_loaded(expr)))
    if isinstance(stmt, Call):
        seen.update(dict.fromkeys(_through_call(stmt, buffers_read(stmt.proc.body))))
    for body in bodies(stmt):
        seen.update(dict.fromkeys(buffers_read(body)))
    return tuple(seen)


def buffers_written(piece: Stmt | Body) -> tuple[Buffer, ...]:
    """Return the buffers that are stored to, in order; a Call counts what its proc writes."""
    if not isinstance(piece, tuple):
        return _written(piece)
    return tuple(dict.fromkeys(buffer for stmt in piece for buffer in _written(stmt)))


@remembered
def _written(stmt: Stmt) -> tuple[Buffer, ...]:
    seen: dict[Buffer, None] = {}
    match stmt:
        case Store():
            seen.setdefault(stmt.buffer)
        case Block():
            seen.update(dict.fromkeys(store.buffer for store in stmt.stores))
        case Call():
            seen.update(dict.fromkeys(_through_call(stmt, buffers_written(stmt.proc.body))))
    for body in bodies(stmt):
        seen.update(dict.fromkeys(buffers_written(body)))
    return tuple(seen)


def _through_call(call: Call, used: tuple[Buffer, ...]) -> Iterator[Buffer]:
    given = dict(zip(call.proc.params, call.buffers, strict=True))
    return (given[buffer] for buffer in used if buffer in given)
