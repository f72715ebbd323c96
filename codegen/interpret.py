"""The reference interpreter: what loop IR means, executed on NumPy arrays without a compiler.

In: a proc or module, memory for its buffers, values of its scalars. Out: the arrays, changed in place. Blocks run over
whole data grids (``interpret_vector``); every other statement runs one iteration after another, which serves small
scheduled procs. Loops of every kind run in order and barriers do nothing: a legal schedule cannot tell.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np

from stagedtensor.codegen.interpret_expr import Compiler, Frame, locator
from stagedtensor.codegen.interpret_memory import flat_cells, fresh_memory
from stagedtensor.codegen.interpret_ops import Array
from stagedtensor.codegen.interpret_vector import BlockRunner
from stagedtensor.codegen.loop_ir import (
    Alloc,
    Assign,
    Barrier,
    Block,
    Buffer,
    Call,
    Comment,
    Declare,
    Expr,
    For,
    If,
    Let,
    Module,
    Proc,
    Scan,
    Stmt,
    Store,
    Symbol,
    Tile,
)
from stagedtensor.errors import InternalError

Action: TypeAlias = Callable[[Frame], None]


def run_proc(proc: Proc, arrays: Mapping[Buffer, Array], scalars: Mapping[Symbol, int] | None = None) -> None:
    """Execute ``proc`` on ``arrays``, changing them in place.

    Each is a parameter's memory, contiguous, of its ``numpy_dtype``. Raises InternalError for a missing or unfit array,
    a missing scalar and any access out of bounds.
    """
    memory = {buffer: flat_cells(_given(arrays, buffer, proc.name), buffer) for buffer in proc.params}
    with np.errstate(all="ignore"):
        _run(proc, memory, _scalars(proc.scalars, scalars or {}, proc.name))


def run_module(module: Module, arrays: Mapping[Buffer, Array], scalars: Mapping[Symbol, int] | None = None) -> None:
    """Execute the kernels of ``module`` in order; ``arrays`` holds every external buffer and may hold temporaries.

    Temporaries that are not given start as NaN or the greatest integer. Raises as :func:`run_proc` does.
    """
    memory = {buffer: flat_cells(_given(arrays, buffer, module.name), buffer) for buffer in module.external}
    for buffer in module.temporaries:
        memory[buffer] = flat_cells(arrays[buffer] if buffer in arrays else fresh_memory(buffer), buffer)
    values = _scalars(module.scalars, scalars or {}, module.name)
    with np.errstate(all="ignore"):
        for proc in module.kernels:
            missing = [buffer for buffer in proc.params if buffer not in memory]
            if missing:
                raise InternalError(f"interpreter: kernel {proc.name} uses {missing} that module {module.name} lacks")
            _run(proc, {buffer: memory[buffer] for buffer in proc.params}, values)


def _given(arrays: Mapping[Buffer, Array], buffer: Buffer, where: str) -> Array:
    if buffer not in arrays:
        raise InternalError(f"interpreter: {where} needs memory for {buffer} {buffer.type}{list(buffer.shape)}")
    return arrays[buffer]


def _scalars(symbols: tuple[Symbol, ...], given: Mapping[Symbol, int], where: str) -> dict[Symbol, Array]:
    missing = [symbol for symbol in symbols if symbol not in given]
    if missing:
        raise InternalError(f"interpreter: {where} needs values for {missing}")
    return {symbol: np.asarray(given[symbol], symbol.type.numpy_dtype) for symbol in symbols}


_prepared: weakref.WeakKeyDictionary[Proc, Action] = weakref.WeakKeyDictionary()
"""Procs are compared by identity, and a prepared one is worth keeping: a training loop runs it many times."""


def _run(proc: Proc, memory: dict[Buffer, Array], values: dict[Symbol, Array]) -> None:
    action = _prepared.get(proc)
    if action is None:
        action = _prepared[proc] = _Preparation().body(proc.body)
    action(Frame(values.copy(), memory))


class _Preparation:
    """Turns statements into actions on a frame. An action holds parts of the proc, never the proc itself."""

    def __init__(self) -> None:
        self._compile = Compiler()

    def body(self, body: tuple[Stmt, ...]) -> Action:
        actions = [self._stmt(stmt) for stmt in body if not isinstance(stmt, Barrier | Comment)]
        if len(actions) == 1:
            return actions[0]

        def run(frame: Frame) -> None:
            for action in actions:
                action(frame)

        return run

    def _stmt(self, stmt: Stmt) -> Action:
        match stmt:
            case Block():
                return BlockRunner(stmt, self._compile).run
            case For():
                return self._for(stmt)
            case Store():
                return self._store(stmt)
            case Let() | Assign():
                return self._bind(stmt.symbol, stmt.value)
            case Declare():
                return self._bind(stmt.symbol, stmt.init)
            case If():
                return self._if(stmt)
            case Alloc():
                return _alloc(stmt.buffer)
            case Scan():
                return self._scan(stmt)
            case Tile():
                return self.body(stmt.loops)
            case Call():
                return self._call(stmt)
            case Barrier() | Comment():
                return self.body(())

    def _for(self, loop: For) -> Action:
        symbol, extent, body = loop.iterator.symbol, self._compile(loop.iterator.extent), self.body(loop.body)

        def run(frame: Frame) -> None:
            for position in range(int(extent(frame, None))):
                frame.values[symbol] = np.asarray(position, np.int64)
                body(frame)

        return run

    def _store(self, store: Store) -> Action:
        buffer, value, locate = store.buffer, self._compile(store.value), locator(store.buffer, "store to")
        indices = [self._compile(index) for index in store.indices]

        def run(frame: Frame) -> None:
            offset = locate([index(frame, None) for index in indices], None)
            frame.cells(buffer)[offset] = value(frame, None)

        return run

    def _bind(self, symbol: Symbol, value: Expr) -> Action:
        evaluate = self._compile(value)

        def run(frame: Frame) -> None:
            frame.values[symbol] = evaluate(frame, None)

        return run

    def _if(self, stmt: If) -> Action:
        condition, then, orelse = self._compile(stmt.condition), self.body(stmt.then), self.body(stmt.orelse)

        def run(frame: Frame) -> None:
            (then if condition(frame, None) else orelse)(frame)

        return run

    def _scan(self, scan: Scan) -> Action:
        symbol, extent, body = scan.iterator.symbol, self._compile(scan.iterator.extent), self.body(scan.body)
        init = [(item.symbol, self._compile(item.init)) for item in scan.carried]
        updates = [(item.symbol, self._compile(item.update)) for item in scan.carried]

        def run(frame: Frame) -> None:
            frame.values.update({state: value(frame, None) for state, value in init})
            positions = range(int(extent(frame, None)))
            for position in reversed(positions) if scan.reverse else positions:
                frame.values[symbol] = np.asarray(position, np.int64)
                frame.values.update({state: value(frame, None) for state, value in updates})
                body(frame)

        return run

    def _call(self, call: Call) -> Action:
        callee, buffers = call.proc, call.buffers
        scalars = [self._compile(scalar) for scalar in call.scalars]
        body = _Preparation().body(callee.body)

        def run(frame: Frame) -> None:
            memory = {param: frame.cells(buffer) for param, buffer in zip(callee.params, buffers, strict=True)}
            values = {symbol: value(frame, None) for symbol, value in zip(callee.scalars, scalars, strict=True)}
            body(Frame(values, memory))

        return run


def _alloc(buffer: Buffer) -> Action:
    def run(frame: Frame) -> None:
        frame.memory[buffer] = flat_cells(fresh_memory(buffer), buffer)

    return run
