"""The text form of the loop IR, for goldens, error messages and before/after examples. It is not parsed back.

In: a module, proc, statement, body or expression. Out: text with one fact a line. Names are hints, with ``_1``, ``_2``
added in order of appearance where a hint is taken, so the text depends on the code alone. An i64 literal is bare, an
f32 literal has a point, literals of other types carry their type; ``bf16(x)`` is a conversion, ``bf16.sat.flush(x)``
one with both flags; ops with a symbol are infix, the others calls.

>>> from stagedtensor.codegen.loop_ir import Apply, Cast, Const, Symbol, Var
>>> from stagedtensor.precision import bf16, f32
>>> x = Var(Symbol("x", f32))
>>> pretty(Cast(Apply("mul", (Apply("add", (x, Const(1.0, f32)), f32), x), f32), bf16))
'bf16((x + 1.0) * x)'
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from stagedtensor.codegen.loop_ir import (
    Accumulator,
    Alloc,
    Apply,
    Assign,
    Barrier,
    Block,
    BlockIterator,
    Buffer,
    Call,
    Cast,
    Comment,
    Const,
    Cost,
    Declare,
    Expr,
    Fma,
    For,
    If,
    Let,
    Load,
    Module,
    Origin,
    Pad,
    Proc,
    Reorder,
    Scan,
    Split,
    Stmt,
    Store,
    Symbol,
    Tile,
    Var,
)
from stagedtensor.codegen.rewrite import walk_stmts
from stagedtensor.op_table import OPS
from stagedtensor.precision import bool_, f32, i64

_INDENT = "  "
_BINDING = {
    **dict.fromkeys(("lt", "le", "gt", "ge", "eq", "ne"), 1),
    **dict.fromkeys(("add", "sub"), 2),
    **dict.fromkeys(("mul", "div", "floordiv", "mod"), 3),
    "neg": 4,
    "pow": 5,
}
"""How tightly the infix ops bind; a call or a name binds tightest."""
_ATOM = 9


def pretty(x: Module | Proc | Stmt | tuple[Stmt, ...] | Expr) -> str:
    """Return the text of ``x``, without a newline at the end."""
    if isinstance(x, Expr):
        return Printer().expr(x)
    return "\n".join(Printer().lines(x))


class Printer:
    """Prints pieces of one proc under one set of names."""

    def __init__(self) -> None:
        self._names: dict[Symbol | Buffer, str] = {}
        self._taken: set[str] = set()

    def name(self, item: Symbol | Buffer) -> str:
        """Return the name of a symbol or buffer, choosing it at its first appearance."""
        if item not in self._names:
            hint = item.hint if isinstance(item, Symbol) else item.name
            name, suffix = hint, 0
            while name in self._taken:
                suffix += 1
                name = f"{hint}_{suffix}"
            self._taken.add(name)
            self._names[item] = name
        return self._names[item]

    def lines(self, x: Module | Proc | Stmt | tuple[Stmt, ...]) -> Iterator[str]:
        """Yield the lines of ``x``."""
        match x:
            case Module():
                yield from self._module(x)
            case Proc():
                yield from self._proc(x)
            case tuple():
                yield from self._body(x)
            case _:
                yield from self._stmt(x)

    # -- expressions

    def expr(self, expr: Expr, binding: int = 0) -> str:
        """Return the text of an expression, in parentheses where its context binds tighter than ``binding`` allows."""
        text, own = self._expr(expr)
        return f"({text})" if own < binding else text

    def _expr(self, expr: Expr) -> tuple[str, int]:
        match expr:
            case Const():
                text = _literal(expr)
                return text, 4 if text.startswith("-") else _ATOM
            case Var():
                return self.name(expr.symbol), _ATOM
            case Load():
                return self._cell(expr.buffer, expr.indices), _ATOM
            case Cast():
                flags = f"{'.sat' if expr.saturate else ''}{'.flush' if expr.flush else ''}"
                return f"{expr.type}{flags}({self.expr(expr.arg)})", _ATOM
            case Fma():
                return f"fma({self._list((expr.a, expr.b, expr.c))})", _ATOM
            case Apply():
                return self._apply(expr)

    def _apply(self, expr: Apply) -> tuple[str, int]:
        own = _BINDING.get(expr.op)
        if own is None or len(expr.args) not in (1, 2):
            # The op of the table is told apart from the node of the same name.
            called = "op.fma" if expr.op == "fma" else expr.op
            return f"{called}({self._list(expr.args)})", _ATOM
        symbol = OPS[expr.op].symbol
        if len(expr.args) == 1:
            return f"{symbol}{self.expr(expr.args[0], own)}", own
        left, right = expr.args
        # Every op groups to the left, so a right operand of the same binding needs parentheses.
        return f"{self.expr(left, own)} {symbol} {self.expr(right, own + 1)}", own

    def _list(self, parts: tuple[Expr, ...]) -> str:
        return ", ".join(self.expr(part) for part in parts)

    def _cell(self, buffer: Buffer, indices: tuple[Expr, ...]) -> str:
        return f"{self.name(buffer)}[{self._list(indices)}]"

    # -- statements

    def _body(self, body: tuple[Stmt, ...], indent: str = "") -> Iterator[str]:
        for stmt in body:
            for line in self._stmt(stmt):
                yield indent + line
        if not body:
            yield f"{indent}pass"

    def _stmt(self, stmt: Stmt) -> Iterator[str]:
        match stmt:
            case Block():
                yield from self._block(stmt)
            case For():
                kind = "" if stmt.kind == "serial" else f" {stmt.kind}"
                yield f"for {self._iterator(stmt.iterator)}{kind}:"
                yield from self._body(stmt.body, _INDENT)
            case Store():
                yield f"{self._cell(stmt.buffer, stmt.indices)} = {self.expr(stmt.value)}"
            case Let():
                value = self.expr(stmt.value)
                yield f"let {self._typed(stmt.symbol)} = {value}"
            case Declare():
                init = self.expr(stmt.init)
                yield f"var {self._typed(stmt.symbol)} = {init}"
            case Assign():
                yield f"{self.name(stmt.symbol)} <- {self.expr(stmt.value)}"
            case If():
                yield f"if {self.expr(stmt.condition)}:"
                yield from self._body(stmt.then, _INDENT)
                if stmt.orelse:
                    yield "else:"
                    yield from self._body(stmt.orelse, _INDENT)
            case Alloc():
                yield f"alloc {self._declaration(stmt.buffer)} {stmt.buffer.space}"
            case Barrier():
                yield "barrier"
            case Scan():
                direction = " reverse" if stmt.reverse else ""
                yield f"scan {self._iterator(stmt.iterator)}{direction}:"
                yield from self._accumulators(stmt.carried, "carry")
                yield from self._body(stmt.body, _INDENT)
            case Tile():
                arguments = ", ".join(
                    self.name(item) if isinstance(item, Buffer) else self.expr(item) for item in stmt.arguments
                )
                yield f"tile {stmt.name} {stmt.m}x{stmt.n}x{stmt.k}({arguments}):"
                yield from self._body(stmt.loops, _INDENT)
            case Call():
                buffers = ", ".join(map(self.name, stmt.buffers))
                scalars = f"; {self._list(stmt.scalars)}" if stmt.scalars else ""
                yield f"call {stmt.proc.name}({buffers}{scalars})"
            case Comment():
                yield f"# {stmt.text}"

    def _block(self, block: Block) -> Iterator[str]:
        words = ["block", block.name, *(["scatter"] if block.scatter else [])]
        iterators = ", ".join(
            f"{'reduce ' if item.kind == 'reduce' else ''}{self._iterator(item)}" for item in block.iterators
        )
        yield f"{' '.join(words)} over {iterators}:" if iterators else f"{' '.join(words)}:"
        inside: list[str] = [*_origins(block.origins), *_cost(block.cost)]
        if block.composite:
            inside.append(f"# part of {block.composite}")
        if block.guard is not None:
            inside.append(f"where {self.expr(block.guard)}")
        for let in block.lets:
            inside.extend(self._stmt(let))
        for line in inside:
            yield _INDENT + line
        yield from self._accumulators(block.accumulators, "acc")
        for store in block.stores:
            for line in self._stmt(store):
                yield _INDENT + line

    def _accumulators(self, accumulators: tuple[Accumulator, ...], word: str) -> Iterator[str]:
        for item in accumulators:
            init = self.expr(item.init)
            how = f" combine {item.combine}" if item.combine else ""
            if item.neutral is not None:
                how += f" neutral {self.expr(item.neutral)}"
            if item.paired_with is not None:
                how += f" with {self.name(item.paired_with)}"
            yield f"{_INDENT}{word} {self._typed(item.symbol)} = {init}{how}"
        for item in accumulators:
            yield f"{_INDENT}{_INDENT}{self.name(item.symbol)} <- {self.expr(item.update)}"

    def _iterator(self, item: BlockIterator) -> str:
        text = f"{self.name(item.symbol)} < {self.expr(item.extent)}"
        return text if isinstance(item.extent, Const) else f"{text} (<= {item.bound})"

    def _typed(self, symbol: Symbol) -> str:
        return f"{self.name(symbol)}: {symbol.type}"

    def _declaration(self, buffer: Buffer) -> str:
        shape = ",".join(map(str, buffer.shape))
        flags = f"{' saturate' if buffer.saturate else ''}{' flush' if buffer.flush_subnormal else ''}"
        layout = "".join(f" {_layout_step(step)}" for step in buffer.layout.steps)
        return f"{self.name(buffer)}: {buffer.type}[{shape}]{flags}{layout}"

    # -- procs and modules

    def _proc(self, proc: Proc) -> Iterator[str]:
        params = ", ".join(self._declaration(buffer) for buffer in proc.params)
        scalars = f"; {', '.join(self.name(symbol) for symbol in proc.scalars)}" if proc.scalars else ""
        yield f"proc {proc.name}({params}{scalars}):"
        for line in (*_origins(proc.origins), *_cost(proc.cost)):
            yield _INDENT + line
        if proc.path:
            yield f"{_INDENT}# path: {proc.path}"
        yield from self._body(proc.body, _INDENT)

    def _module(self, module: Module) -> Iterator[str]:
        scalars = f"({', '.join(self.name(symbol) for symbol in module.scalars)})" if module.scalars else ""
        yield f"module {module.name}{scalars}"
        for word, buffers in (("external", module.external), ("temporary", module.temporaries)):
            for buffer in buffers:
                yield f"{_INDENT}{word} {self._declaration(buffer)}"
        for proc in (*_called(module.kernels), *module.kernels):
            # Buffers keep the names of the module's list; symbols start anew in every proc.
            inner = Printer()
            inner._names, inner._taken = dict(self._names), set(self._taken)
            yield ""
            yield from inner._proc(proc)


def _called(procs: tuple[Proc, ...]) -> tuple[Proc, ...]:
    """Return the procs that are called from ``procs``, callees before their callers, each once."""
    found: dict[Proc, None] = {}
    for proc in procs:
        for stmt in walk_stmts(proc.body):
            if isinstance(stmt, Call) and stmt.proc not in found:
                found.update(dict.fromkeys(_called((stmt.proc,))))
                found.setdefault(stmt.proc)
    return tuple(found)


def _origins(origins: tuple[Origin, ...]) -> Iterator[str]:
    for origin in origins:
        at = f" at {origin.source}" if origin.source else ""
        yield f"# {origin.label}: {origin.text}{at}" if origin.label else f"# {origin.text}{at}"


def _cost(cost: Cost) -> Iterator[str]:
    if cost != Cost():
        yield f"# cost: {cost.flops} flops, {cost.nbytes} bytes, {cost.live_bytes} live"


def _layout_step(step: Split | Reorder | Pad) -> str:
    match step:
        case Split():
            return f"split({step.axis}, {step.factor})"
        case Reorder():
            return f"reorder({', '.join(map(str, step.order))})"
        case Pad():
            return f"pad({step.axis}, {step.multiple}, {step.fill!r})"


def _literal(const: Const) -> str:
    value, type_ = const.value, const.type
    if type_ is bool_:
        return "true" if value else "false"
    if not type_.is_float:
        # A fraction or infinity is a fault, but the printer serves the messages about faults too.
        text = str(int(value)) if math.isfinite(value) and value == int(value) else repr(value)
        return text if type_ is i64 else f"{text}:{type_}"
    number = float(value)
    if math.isfinite(number) and type_ is f32:
        with np.errstate(over="ignore"):
            text = str(np.float32(number))  # the shortest text that gives this f32 back
    else:
        text = repr(number)
    return text if type_ is f32 else f"{text}:{type_}"
