"""Well-formedness of the loop IR: every rule a small check; ``verify_expr.RULES`` is the list of them.

In: a proc or a module. Out: nothing, or an InternalError that names the rule, shows the statement and prints the code
around it. Passes are verified after each other under test. It does not judge a schedule's speed or the program's
meaning.
"""

from __future__ import annotations

from stagedtensor.codegen.intervals import Interval
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
    Comment,
    Const,
    Declare,
    Expr,
    For,
    If,
    Let,
    Load,
    Module,
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
    walk,
)
from stagedtensor.codegen.pretty import Printer, pretty
from stagedtensor.codegen.rewrite import expressions, symbols_of
from stagedtensor.codegen.verify_expr import BrokenRuleError, Scope, check_expr, check_store, fail
from stagedtensor.errors import InternalError
from stagedtensor.precision import Prec, i64

_COMBINES = ("", "add", "mul", "max", "min")
"""How blocks' partial states may merge."""


def verify(x: Proc | Module, *, native: frozenset[Prec] = frozenset()) -> None:
    """Raise InternalError if ``x`` breaks a rule; ``native`` are narrow formats that the target computes in itself."""
    checker = _Checker(native)
    procs = x.kernels if isinstance(x, Module) else (x,)
    code: Proc | Module = x
    try:
        if isinstance(x, Module):
            check_module(x)
        for proc in procs:
            code = proc
            checker.proc(proc)
    except BrokenRuleError as broken:
        raise InternalError(_message(broken, checker.stack, code)) from None


def _message(broken: BrokenRuleError, stack: list[Proc | Stmt], code: Proc | Module) -> str:
    lines = [f"loop IR {code.name} breaks rule {broken.rule}: {broken}"]
    callers = [item for item in stack if isinstance(item, Proc)]
    if len(callers) > 1:
        lines.append(f"in proc {callers[-1].name}, called through {' -> '.join(item.name for item in callers[:-1])}")
    # One printer for both, so that the statement has the names it has in the code.
    printer = Printer()
    around = list(printer.lines(callers[-1] if callers else code))
    if stack and not isinstance(stack[-1], Proc):
        lines += ["at:", *(f"  {line}" for line in printer.lines(stack[-1]))]
    return "\n".join([*lines, "in:", *(f"  {line}" for line in around)])


# -- modules, procs, buffers --------------------------------------------------------------------------------------


def check_module(module: Module) -> None:
    """Rules module-closed and parameters."""
    owned = dict.fromkeys((*module.external, *module.temporaries))
    if len(owned) != len(module.external) + len(module.temporaries):
        fail("parameters", f"module {module.name} lists a buffer twice")
    names = [proc.name for proc in module.kernels]
    if len(set(names)) != len(names):
        fail("parameters", f"module {module.name} has kernels of one name: {', '.join(names)}")
    for proc in module.kernels:
        for buffer in proc.params:
            if buffer not in owned:
                fail("module-closed", f"kernel {proc.name} uses {buffer}, which the module does not hold")
        for symbol in proc.scalars:
            if symbol not in module.scalars:
                fail("module-closed", f"kernel {proc.name} uses the scalar {symbol}, which the module does not have")


def check_buffer(buffer: Buffer) -> None:
    """Rule buffer-shape."""
    if any(size < 0 for size in buffer.shape):
        fail("buffer-shape", f"{buffer} has shape {buffer.shape}")
    if (buffer.saturate or buffer.flush_subnormal) and not buffer.type.is_float:
        fail("buffer-shape", f"{buffer} of type {buffer.type} saturates or flushes, which is for floats")
    rank = len(buffer.shape)
    for step in buffer.layout.steps:
        if isinstance(step, Reorder):
            fits = sorted(step.order) == list(range(rank))
        elif isinstance(step, Split):
            fits = 0 <= step.axis < rank and step.factor > 0
            rank += 1
        else:
            assert isinstance(step, Pad)
            fits = 0 <= step.axis < rank and step.multiple > 0
        if not fits:
            fail("buffer-shape", f"layout step {step} does not fit {buffer} of shape {buffer.shape}")


def check_iterator(item: BlockIterator, scope: Scope) -> None:
    """Rules iterator-type and iterator-bound."""
    if item.symbol.type is not i64 or item.extent.type is not i64:
        fail("iterator-type", f"{item.symbol} has type {item.symbol.type} and an extent of type {item.extent.type}")
    check_expr(item.extent, scope)
    for part in walk(item.extent):
        if not isinstance(part, Const | Apply) and not (isinstance(part, Var) and part.symbol in scope.scalars):
            fail("iterator-type", f"the extent of {item.symbol} is {pretty(item.extent)}")
    if item.bound < 0 or (isinstance(item.extent, Const) and item.extent.value != item.bound):
        fail("iterator-bound", f"{item.symbol} has extent {pretty(item.extent)} and bound {item.bound}")


class _Checker:
    """Walks procs with a scope. ``stack`` is what is being checked, outermost first; it stays at the fault."""

    def __init__(self, native: frozenset[Prec]) -> None:
        self.native = native
        self.stack: list[Proc | Stmt] = []
        self._bound: dict[Symbol | Buffer, None] = {}
        self._checked: dict[Proc, None] = {}

    def proc(self, proc: Proc) -> None:
        """Check a proc, once, and those it calls."""
        if proc in self._checked:
            return
        self._checked[proc] = None
        self.stack.append(proc)
        outer, self._bound = self._bound, {}
        items: tuple[Buffer | Symbol, ...] = (*proc.params, *proc.scalars)
        if len(set(items)) != len(items) or any(symbol.type is not i64 for symbol in proc.scalars):
            fail("parameters", f"proc {proc.name} lists a parameter twice or has a scalar that is not i64")
        for buffer in proc.params:
            check_buffer(buffer)
        self._bound.update(dict.fromkeys(items))
        scope = Scope(self.native, dict.fromkeys(proc.params), dict.fromkeys(proc.scalars), frozenset(proc.scalars))
        self.body(proc.body, scope)
        self._bound = outer
        self.stack.pop()

    def body(self, body: tuple[Stmt, ...], scope: Scope) -> None:
        """Check a body in a scope of its own; what it binds ends with it."""
        scope = scope.inner()
        for stmt in body:
            self.stack.append(stmt)
            self.stmt(stmt, scope)
            self.stack.pop()

    def bind(self, item: Symbol | Buffer) -> None:
        """Rule bound-once."""
        if item in self._bound:
            fail("bound-once", f"{item} is bound a second time")
        self._bound[item] = None

    def stmt(self, stmt: Stmt, scope: Scope) -> None:
        """Check one statement; what it brings into scope is added to ``scope``."""
        match stmt:
            case Block():
                _BlockChecker(self, stmt, scope).check()
            case For():
                self.loop(stmt, scope)
            case Store():
                check_store(stmt, scope)
            case Let():
                self.let(stmt, scope)
            case Declare():
                self.declare(stmt, scope)
            case Assign():
                self.assign(stmt, scope)
            case If():
                self.conditional(stmt, scope)
            case Alloc():
                check_buffer(stmt.buffer)
                self.bind(stmt.buffer)
                scope.buffers[stmt.buffer] = None
            case Barrier():
                if scope.divergent:
                    fail("barrier-uniform", "a Barrier where threads may not meet")
            case Scan():
                self.scan(stmt, scope)
            case Tile():
                for argument in stmt.arguments:
                    if isinstance(argument, Buffer):
                        if argument not in scope.buffers:
                            fail("buffer-in-scope", f"{argument} is neither a parameter nor allocated here")
                    else:
                        check_expr(argument, scope)
                self.body(stmt.loops, scope)
            case Call():
                self.call(stmt, scope)
            case Comment():
                pass

    # -- statements

    def iterate(self, item: BlockIterator, scope: Scope) -> None:
        """Check an iterator and bring it into scope."""
        check_iterator(item, scope)
        self.bind(item.symbol)
        scope.symbols[item.symbol] = None
        constant = isinstance(item.extent, Const)
        scope.ranges[item.symbol] = Interval(0, max(item.bound - 1, 0), exact=constant)
        scope.reachable = scope.reachable and item.bound > 0
        scope.certain = scope.certain and constant

    def loop(self, loop: For, scope: Scope) -> None:
        """Rules of iterators and loop-kind."""
        scope = scope.inner()
        self.iterate(loop.iterator, scope)
        if loop.iterator.kind != "data":
            fail("loop-kind", f"the loop over {loop.iterator.symbol} has a reduce iterator")
        if loop.kind in ("lane", "unroll") and not isinstance(loop.iterator.extent, Const):
            fail("loop-kind", f"the {loop.kind} loop over {loop.iterator.symbol} has a symbolic extent")
        if loop.kind in ("parallel", "vector", "lane", "grid"):
            scope.varying[loop.iterator.symbol] = None
        if loop.kind in ("parallel", "vector", "grid"):
            scope.variables = dict.fromkeys(scope.variables, False)
        if loop.kind in ("parallel", "vector"):
            scope.divergent = True  # threads take different numbers of iterations
        self.body(loop.body, scope)

    def let(self, let: Let, scope: Scope) -> None:
        """Rule let-type; the symbol comes into scope with its range."""
        check_expr(let.value, scope)
        if let.symbol.type is not let.value.type:
            fail("let-type", f"{let.symbol} of type {let.symbol.type} is given a value of type {let.value.type}")
        self.bind(let.symbol)
        scope.symbols[let.symbol] = None
        scope.values[let.symbol] = let.value
        if scope.varies(let.value):
            scope.varying[let.symbol] = None

    def declare(self, stmt: Declare, scope: Scope) -> None:
        """Rules let-type and narrow-state."""
        check_expr(stmt.init, scope)
        check_state(stmt.symbol, (stmt.init,), scope)
        self.bind(stmt.symbol)
        scope.symbols[stmt.symbol] = None
        scope.variables[stmt.symbol] = True
        scope.varying[stmt.symbol] = None  # what is assigned later is not followed

    def assign(self, stmt: Assign, scope: Scope) -> None:
        """Rules assign-declared, parallel-assign and let-type."""
        check_expr(stmt.value, scope)
        if stmt.symbol not in scope.variables:
            fail("assign-declared", f"{stmt.symbol} is assigned to, but it is no variable here")
        if not scope.variables[stmt.symbol]:
            fail("parallel-assign", f"{stmt.symbol} is declared outside the loop whose iterations assign to it")
        if stmt.symbol.type is not stmt.value.type:
            fail("let-type", f"{stmt.symbol} of type {stmt.symbol.type} is given a value of type {stmt.value.type}")

    def conditional(self, stmt: If, scope: Scope) -> None:
        """Check both branches, each under what the condition says."""
        check_expr(stmt.condition, scope)
        divergent = scope.divergent or scope.varies(stmt.condition)
        for body, condition in ((stmt.then, stmt.condition), (stmt.orelse, Const(1, i64))):
            branch = scope.where(condition)
            branch.divergent = divergent
            self.body(body, branch)

    def scan(self, scan: Scan, scope: Scope) -> None:
        """Check the carried values and the body that sees each step."""
        for item in scan.carried:
            check_expr(item.init, scope)
        scope = scope.inner()
        self.iterate(scan.iterator, scope)
        for item in scan.carried:
            self.bind(item.symbol)
            scope.symbols[item.symbol] = None
            scope.varying[item.symbol] = None
        for item in scan.carried:
            check_expr(item.update, scope)
            check_state(item.symbol, (item.init, item.update), scope)
        check_combines(scan.carried)
        self.body(scan.body, scope)

    def call(self, call: Call, scope: Scope) -> None:
        """Rule call-matches, and the called proc's own rules."""
        callee = call.proc
        if len(call.buffers) != len(callee.params) or len(call.scalars) != len(callee.scalars):
            fail("call-matches", f"{callee.name} takes {len(callee.params)} buffers and {len(callee.scalars)} scalars")
        for given, param in zip(call.buffers, callee.params, strict=True):
            if given not in scope.buffers:
                fail("buffer-in-scope", f"{given} is neither a parameter nor allocated here")
            for attribute in ("type", "shape", "layout", "saturate", "flush_subnormal"):
                if getattr(given, attribute) != getattr(param, attribute):
                    fail(
                        "call-matches", f"{given} is passed for {param} of {callee.name}, but their {attribute} differs"
                    )
        for scalar in call.scalars:
            check_expr(scalar, scope)
            if scalar.type is not i64:
                fail("call-matches", f"a scalar of type {scalar.type} is passed to {callee.name}")
        self.proc(callee)


# -- blocks -------------------------------------------------------------------------------------------------------


class _BlockChecker:
    """The rules of one block: which part may read which symbols, and which cells it may touch."""

    def __init__(self, checker: _Checker, block: Block, outer: Scope) -> None:
        self._checker = checker
        self._block = block
        self._outer = outer

    def check(self) -> None:
        """Check the block's parts, each in the scope that the grammar gives it."""
        block, checker = self._block, self._checker
        points = self._outer.inner()
        for item in block.iterators:
            checker.iterate(item, points)
        for accumulator in block.accumulators:
            checker.bind(accumulator.symbol)
        data_only = self._data_scope(points)
        for accumulator in block.accumulators:
            check_expr(accumulator.init, data_only)
        inside = points.inner()
        if block.guard is not None:
            check_expr(block.guard, points)
            inside = points.where(block.guard)
        inside.symbols.update({accumulator.symbol: None for accumulator in block.accumulators})
        for let in block.lets:
            checker.let(let, inside)
        for accumulator in block.accumulators:
            check_expr(accumulator.update, inside)
            check_state(accumulator.symbol, (accumulator.init, accumulator.update), inside)
        check_combines(block.accumulators)
        check_scatter(block)
        for store in block.stores:
            check_store(store, self._store_scope(data_only, inside))
        if not block.scatter:
            check_coverage(block)
            check_own_cells(block)

    def _data_scope(self, points: Scope) -> Scope:
        """The scope of inits, and the ground of the stores' scope: every iterator but the reduce ones."""
        scope = points.inner()
        for item in self._block.reduce:
            del scope.symbols[item.symbol]
            scope.hidden[item.symbol] = "init-domain"
        scope.hidden.update({item.symbol: "init-domain" for item in self._block.accumulators})
        scope.hidden.update({let.symbol: "init-domain" for let in self._block.lets})
        scope.reachable = self._outer.reachable and all(item.bound > 0 for item in self._block.data)
        return scope

    def _store_scope(self, data_only: Scope, inside: Scope) -> Scope:
        block = self._block
        if not block.accumulators:
            return inside
        scope = data_only.inner()
        scope.hidden = dict.fromkeys(scope.hidden, "store-domain")
        for accumulator in block.accumulators:
            scope.symbols[accumulator.symbol] = None
        if not block.reduce and block.guard is None:
            scope.symbols.update({let.symbol: None for let in block.lets})
            scope.values = dict(inside.values)
        return scope


def check_state(symbol: Symbol, given: tuple[Expr, ...], scope: Scope) -> None:
    """Rules narrow-state and let-type for a symbol that carries a value."""
    if symbol.type.is_narrow and symbol.type not in scope.native:
        fail("narrow-state", f"{symbol} has the narrow type {symbol.type}")
    for value in given:
        if value.type is not symbol.type:
            fail("let-type", f"{symbol} of type {symbol.type} is given a value of type {value.type}")


def check_combines(accumulators: tuple[Accumulator, ...]) -> None:
    """Rules combine-known and pair-matches."""
    by_symbol = {item.symbol: item for item in accumulators}
    for item in accumulators:
        if item.combine not in _COMBINES:
            fail("combine-known", f"{item.symbol} combines by {item.combine!r}")
        if item.combine and (not isinstance(item.neutral, Const) or item.neutral.type is not item.symbol.type):
            fail("combine-known", f"{item.symbol} combines by {item.combine} without a literal neutral of its type")
        if item.paired_with is not None:
            partner = by_symbol.get(item.paired_with)
            if partner is None or partner is item or partner.combine not in ("max", "min"):
                fail("pair-matches", f"{item.symbol} is paired with {item.paired_with}")


def check_scatter(block: Block) -> None:
    """Rules scatter-plain and reduce-states."""
    if block.scatter and block.accumulators:
        fail("scatter-plain", f"block {block.name} scatters and has accumulators")
    if block.reduce and not block.accumulators and not block.scatter:
        fail("reduce-states", f"block {block.name} reduces over {block.reduce[0].symbol} without an accumulator")


def check_coverage(block: Block) -> None:
    """Rule store-covers: a data iterator missing from the indices means that several points write one cell."""
    lets = {let.symbol: let.value for let in block.lets}
    for store in block.stores:
        used: dict[Symbol, None] = {}
        pending = list(store.indices)
        while pending:
            for symbol in symbols_of(pending.pop()):
                if symbol not in used:
                    used[symbol] = None
                    pending += [lets[symbol]] if symbol in lets else []
        for item in block.data:
            if item.bound > 1 and item.symbol not in used:
                fail("store-covers", f"{item.symbol} does not select the cell of {store.buffer} that is stored")


def check_own_cells(block: Block) -> None:
    """Rule reads-own-cell: points may run in any order and at once."""
    cells: dict[Buffer, list[tuple[Expr, ...]]] = {}
    for store in block.stores:
        cells.setdefault(store.buffer, []).append(store.indices)
    for expr in expressions(block):
        for part in walk(expr):
            if isinstance(part, Load) and part.buffer in cells and part.indices not in cells[part.buffer]:
                fail("reads-own-cell", f"{pretty(part)} is read in a block that stores to other cells of {part.buffer}")
