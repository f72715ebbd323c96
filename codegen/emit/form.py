"""What a proc does apart from the names in it: procs of one form have the same function, without printing it again.

In: a scheduled proc, and which of its buffers are the same cells. Out: a hashable value. Symbols and buffers count by
the order in which they appear; of a buffer its format, shape and place in memory stand there too. Origins, paths and
costs are left out. Decides nothing and prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

from stagedtensor.codegen import loop_ir as ir


def form_of(proc: ir.Proc, whole: Mapping[ir.Buffer, ir.Buffer], callees: Mapping[ir.Proc, str]) -> Hashable:
    """Return the form of ``proc``.

    ``whole`` maps buffers to those that stand for their cells (themselves by default), ``callees`` the procs that it
    calls to the names of their functions.
    """
    writer = _Writer(whole, callees)
    writer.body(proc.body)
    return (*writer.parts, *(writer.symbols.get(symbol) for symbol in proc.scalars if symbol in writer.symbols))


class _Writer:
    def __init__(self, whole: Mapping[ir.Buffer, ir.Buffer], callees: Mapping[ir.Proc, str]) -> None:
        self.parts: list[Any] = []
        self.symbols: dict[ir.Symbol, int] = {}
        self._buffers: dict[ir.Buffer, int] = {}
        self._whole = whole
        self._callees = callees

    def body(self, body: Iterable[ir.Stmt]) -> None:
        for stmt in body:
            self.parts.append(type(stmt))
            _STATEMENTS[type(stmt)](self, stmt)
        self.parts.append(None)

    def symbol(self, symbol: ir.Symbol) -> None:
        number = self.symbols.get(symbol)
        if number is None:
            number = self.symbols[symbol] = len(self.symbols)
            self.parts.append(symbol.type)
        self.parts.append(number)

    def buffer(self, buffer: ir.Buffer) -> None:
        number = self._buffers.get(buffer)
        if number is None:
            self._buffers[buffer] = number = len(self._buffers)
            cells = self._whole.get(buffer, buffer)
            self.parts += (buffer.type, buffer.shape, buffer.layout, buffer.space)
            self.parts.append(self._buffers.setdefault(cells, number))
        self.parts.append(number)

    def expr(self, expr: ir.Expr) -> None:
        """A literal and the symbol of a variable stand for themselves; anything else begins with its class."""
        if isinstance(expr, ir.Var):
            self.symbol(expr.symbol)
        elif isinstance(expr, ir.Const):
            self.parts.append(expr)
        elif isinstance(expr, ir.Apply):
            self.parts += (ir.Apply, expr.op, expr.type, len(expr.args))
            self.exprs(expr.args)
        elif isinstance(expr, ir.Load):
            self.parts.append(ir.Load)
            self.buffer(expr.buffer)
            self.exprs(expr.indices)
        elif isinstance(expr, ir.Cast):
            self.parts += (ir.Cast, expr.type, expr.saturate, expr.flush)
            self.expr(expr.arg)
        else:
            self.parts.append(ir.Fma)
            self.exprs((expr.a, expr.b, expr.c))

    def exprs(self, exprs: Iterable[ir.Expr]) -> None:
        for expr in exprs:
            self.expr(expr)

    # -- statements -----------------------------------------------------------------------------------------------
    def iterator(self, iterator: ir.BlockIterator) -> None:
        self.symbol(iterator.symbol)
        self.expr(iterator.extent)
        self.parts += (iterator.bound, iterator.kind)

    def accumulator(self, item: ir.Accumulator) -> None:
        self.symbol(item.symbol)
        self.exprs((item.init, item.update))
        self.parts.append(item.combine)
        if item.neutral is not None:
            self.expr(item.neutral)
        self.parts.append("pair")
        if item.paired_with is not None:
            self.symbol(item.paired_with)

    def loop(self, stmt: ir.For) -> None:
        self.iterator(stmt.iterator)
        self.parts.append(stmt.kind)
        self.body(stmt.body)

    def store(self, stmt: ir.Store) -> None:
        self.buffer(stmt.buffer)
        self.exprs((*stmt.indices, stmt.value))

    def named(self, stmt: ir.Let | ir.Assign) -> None:
        self.symbol(stmt.symbol)
        self.expr(stmt.value)

    def declare(self, stmt: ir.Declare) -> None:
        self.symbol(stmt.symbol)
        self.expr(stmt.init)

    def condition(self, stmt: ir.If) -> None:
        self.expr(stmt.condition)
        self.body(stmt.then)
        self.body(stmt.orelse)

    def scan(self, stmt: ir.Scan) -> None:
        self.iterator(stmt.iterator)
        self.parts += (stmt.reverse, len(stmt.carried))
        for item in stmt.carried:
            self.accumulator(item)
        self.body(stmt.body)

    def tile(self, stmt: ir.Tile) -> None:
        self.parts += (stmt.name, stmt.m, stmt.n, stmt.k, len(stmt.arguments))
        for item in stmt.arguments:
            if isinstance(item, ir.Buffer):
                self.buffer(item)
            else:
                self.expr(item)
        self.body(stmt.loops)

    def call(self, stmt: ir.Call) -> None:
        self.parts += (self._callees[stmt.proc], len(stmt.buffers))
        for buffer in stmt.buffers:
            self.buffer(buffer)
        self.exprs(stmt.scalars)

    def block(self, stmt: ir.Block) -> None:
        """No schedule: a block is like itself only."""
        self.parts.append(stmt)


_STATEMENTS: dict[type, Callable[[_Writer, Any], None]] = {
    ir.Alloc: lambda writer, stmt: writer.buffer(stmt.buffer),
    ir.Assign: _Writer.named,
    ir.Barrier: lambda writer, stmt: None,
    ir.Block: _Writer.block,
    ir.Call: _Writer.call,
    ir.Comment: lambda writer, stmt: None,
    ir.Declare: _Writer.declare,
    ir.For: _Writer.loop,
    ir.If: _Writer.condition,
    ir.Let: _Writer.named,
    ir.Scan: _Writer.scan,
    ir.Store: _Writer.store,
    ir.Tile: _Writer.tile,
}
"""How each class of statements is written."""
