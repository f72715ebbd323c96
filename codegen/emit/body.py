"""Statements of the loop IR as C text, indented, with scoped names.

In: the body of one proc. Out: its lines, and the prelude functions they call. A parallel loop becomes this thread's
part of a static partition; what stands beside it in the same proc is thread 0's. Prints no signatures.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import replace

from stagedtensor.codegen.affine import affine, constant, minimum, subtract, to_expr
from stagedtensor.codegen.emit.c_like import Dialect, ExpressionPrinter
from stagedtensor.codegen.emit.folds import fold
from stagedtensor.codegen.emit.helpers import PART_FUNCTION, tile_name, transpose_name
from stagedtensor.codegen.emit.matrix_helpers import matrix_tile_name
from stagedtensor.codegen.emit.names import Names, sanitise
from stagedtensor.codegen.emit.vectors import VectorPrinter, in_vectors, pieces
from stagedtensor.codegen.intervals import Interval, interval
from stagedtensor.codegen.loop_ir import (
    Alloc,
    Apply,
    Assign,
    Barrier,
    Block,
    Buffer,
    Call,
    Cast,
    Comment,
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
)
from stagedtensor.codegen.prelude.vectors import CELLS
from stagedtensor.codegen.rewrite import symbols_of, walk_stmts
from stagedtensor.codegen.schedule.matrix_copy import TRANSPOSE_PAIRS
from stagedtensor.codegen.schedule.matrix_tile import DOT_TILES, MATRIX_TILES
from stagedtensor.codegen.schedule.microkernel import MULTIPLY, MULTIPLY_ADD
from stagedtensor.codegen.schedule.transpose import TRANSPOSE
from stagedtensor.errors import InternalError
from stagedtensor.precision import Prec, f16, f32, i64

_INDENT = "    "
_WIDTH = 120
_SHORT = 16
"""Iterations up to which gcc writes a loop out before its vectoriser sees it, unless told not to."""
_ONE_HALF = "st_one_f16_to_f32"
FLAT_GRAIN = 64
"""Elements: a whole number of cache lines in every format."""


def partition_grain(stmt: For) -> int:
    """Return the unit in which iterations of a parallel loop are dealt out: cells in a flat loop, else single steps."""
    inner = any(isinstance(part, For) for part in walk_stmts(stmt.body))
    return 1 if inner else FLAT_GRAIN


class BodyPrinter:
    """Prints the statements of one proc. ``used`` collects the functions called.

    ``counts`` are scalar parameters: extents and static indices, which are never negative. ``given`` are local arrays
    that the caller provides, named already. ``vectors`` allows explicit vectors.
    """

    def __init__(
        self,
        dialect: Dialect,
        names: Names,
        *,
        parallel: bool,
        callees: Mapping[Proc, str],
        counts: Iterable[Symbol] = (),
        given: Iterable[Buffer] = (),
        vectors: bool = False,
    ) -> None:
        self.names = names
        self.vectors = vectors
        self.dialect = dialect
        self.parallel = parallel
        self.callees = callees
        self._given = frozenset(given)
        self._counted: set[Symbol] = set(counts)
        self._asked: set[object] = set()
        self._innermost = False
        self._printer = ExpressionPrinter(dialect, names, nonnegative=self.nonnegative)

    @property
    def used(self) -> set[str]:
        """Prelude functions and helpers that the text calls."""
        return self._printer.used

    def nonnegative(self, expr: Expr) -> bool:
        """Tell whether an index is certainly not negative: a sum of loop variables with positive factors."""
        value = affine(expr)
        return value.constant >= 0 and all(factor > 0 and self._counts(atom) for atom, factor in value.terms)

    def _limit(self, symbol: Symbol, value: Expr) -> None:
        """Note what is known of an index that is named: that it is not negative, and its limit."""
        if self.nonnegative(value):
            self._counted.add(symbol)
        bounds = self._printer.bounds
        reach = interval(value, {part: Interval(0, bounds[part] - 1) for part in symbols_of(value) if part in bounds})
        if reach.low >= 0 and not reach.is_empty and math.isfinite(reach.high):
            bounds[symbol] = int(reach.high) + 1

    def _counts(self, atom: Expr) -> bool:
        if isinstance(atom, Var):
            return atom.symbol in self._counted
        if isinstance(atom, Apply) and atom.op in ("floordiv", "mod"):
            divisor = constant(atom.args[1])
            return divisor is not None and divisor > 0 and self.nonnegative(atom.args[0])
        if isinstance(atom, Apply) and atom.op in ("minimum", "maximum"):
            return all(self.nonnegative(arg) for arg in atom.args)
        return False

    # -- bodies ---------------------------------------------------------------------------------------------------
    def body(self, body: tuple[Stmt, ...], depth: int) -> str:
        """Return the text of a proc's body."""
        lines = self._top(body, depth) if self.parallel else self._statements(body, depth)
        return "".join(f"{line}\n" for line in lines)

    def _top(self, body: tuple[Stmt, ...], depth: int) -> Iterator[str]:
        """Parallel loops for every thread, anything else with an effect for thread 0."""
        alone: list[Stmt] = []
        for stmt in body:
            # A let belongs to whatever it stands in front of or in the midst of.
            shared = isinstance(stmt, Barrier) or holds_parallel_loop(stmt)
            shared = shared or (isinstance(stmt, Let | Comment) and not alone)
            if shared:
                yield from self._alone(alone, depth)
                alone = []
                yield from self._statement(stmt, depth)
            else:
                alone.append(stmt)
        yield from self._alone(alone, depth)

    def _widened(self, value: Expr) -> str:
        """One half of memory as a float by the machine's own instruction; "" for anything else.

        Compilers do not find it. In an innermost loop it would keep them from vectors of their own.
        """
        if not (self.vectors and not self._innermost and isinstance(value, Cast) and isinstance(value.arg, Load)):
            return ""
        if value.type is not f32 or value.arg.type is not f16 or value.flush:
            return ""
        self.used.add(_ONE_HALF)
        return f"{_ONE_HALF}({self._printer.text(value.arg)})"

    def _alone(self, body: list[Stmt], depth: int) -> Iterator[str]:
        if body:
            yield f"{_INDENT * depth}if (tid == 0) {{"
            yield from self._scope(tuple(body), depth + 1)
            yield f"{_INDENT * depth}}}"

    def _scope(self, body: tuple[Stmt, ...], depth: int) -> Iterator[str]:
        self.names.push()
        yield from self._statements(body, depth)
        self.names.pop()

    def _statements(self, body: tuple[Stmt, ...], depth: int) -> Iterator[str]:
        for stmt in body:
            yield from self._statement(stmt, depth)

    def _statement(self, stmt: Stmt, depth: int) -> Iterator[str]:
        pad = _INDENT * depth
        text = self._printer.text
        if self.vectors and (folded := fold(stmt)) is not None:
            yield self._fold(*folded, pad)
            return
        match stmt:
            case For():
                yield from self._loop(stmt, depth)
            case Store(buffer, indices, value):
                yield from _assignment(pad, self._printer.cell(buffer, indices).code, text(value))
            case Let(symbol, value):
                shown = self._widened(value) or text(value)
                yield from _assignment(pad, f"const {self._type(symbol.type)} {self._give(symbol)}", shown)
                if symbol.type is i64:
                    self._limit(symbol, value)
            case Declare(symbol, init):
                shown = text(init)
                yield f"{pad}{self._type(symbol.type)} {self._give(symbol)} = {shown};"
            case Assign(symbol, value):
                yield f"{pad}{self.names.of(symbol)} = {text(value)};"
            case If():
                yield from self._if(stmt, depth)
            case Alloc(buffer):
                if buffer not in self._given:
                    yield f"{pad}{self._array(buffer)};"
            case Barrier():
                yield f"{pad}st_barrier_wait(barrier, tid);"
            case Comment(remark):
                yield f"{pad}// {' '.join(remark.split())}"
            case Tile(name=name) if name == TRANSPOSE:
                yield self._transpose(stmt, pad)
            case Tile(name=name) if name in (MULTIPLY, MULTIPLY_ADD):
                yield from self._multiply(stmt, pad)
            case Tile(name=name) if name == TRANSPOSE_PAIRS:
                yield self._transpose_pairs(stmt, pad)
            case Tile(name=name) if name in (*MATRIX_TILES, *DOT_TILES):
                yield self._matrix_multiply(stmt, pad)
            case Tile():
                yield f"{pad}// {stmt.name}: {stmt.m} x {stmt.n} x {stmt.k}"
                yield from self._scope_braced(stmt.loops, depth)
            case Scan():
                yield from self._scan(stmt, depth)
            case Call():
                arguments = [self.names.of(item) for item in stmt.buffers]
                arguments += [text(item) for item in stmt.scalars]
                yield f"{pad}{self.callees[stmt.proc]}({', '.join(arguments)});"
            case Block():
                raise InternalError(f"block {stmt.name} reached emission without a schedule")

    def _fold(self, name: str, states: Buffer, count: int, pad: str) -> str:
        self.used.update((name, "st_load_vf32", "st_store_vf32"))
        place = self.names.of(states)
        return f"{pad}st_store_vf32({place}, {name}({count}, st_load_vf32({place})));"

    def _transpose(self, stmt: Tile, pad: str) -> str:
        target, start, stride, square = stmt.arguments
        assert isinstance(target, Buffer)
        assert isinstance(square, Buffer)
        assert not isinstance(start, Buffer)
        assert not isinstance(stride, Buffer)
        name = transpose_name(stmt.m)
        self.used.add(name)
        place = self._printer.index(start).code
        to = f"{self.names.of(target)} + {place}"
        return f"{pad}{name}({to}, {self._printer.index(stride).code}, {self.names.of(square)});"

    def _multiply(self, stmt: Tile, pad: str) -> Iterator[str]:
        acc, first_sum, rows, first_row, row_step, columns, first_column, *loops = stmt.arguments
        assert isinstance(acc, Buffer)
        name = tile_name(stmt.name, acc.type.name, stmt.m, stmt.n, len(loops) // 3)
        self.used.add(name)
        operands = f"{self._cell_address(rows, first_row)}, {self._index_text(row_step)}"
        operands = f"{operands}, {self._cell_address(columns, first_column)}"
        if acc.space != "register":
            place = f"({self._type(acc.type)} (*)[{stmt.n}])({self._cell_address(acc, first_sum)})"
        else:
            place = self.names.of(acc)
        operands = f"{place}, {operands}"
        terms = [", ".join(map(self._index_text, loops[at : at + 3])) for at in range(0, len(loops), 3)]
        line = f"{pad}{name}({operands}, {', '.join(terms)});"
        if len(line) <= _WIDTH:
            yield line
            return
        yield f"{pad}{name}("
        yield f"{pad}{_INDENT}{operands},"
        yield from (f"{pad}{_INDENT}{part}," for part in terms[:-1])
        yield f"{pad}{_INDENT}{terms[-1]}"
        yield f"{pad});"

    def _transpose_pairs(self, stmt: Tile, pad: str) -> str:
        target, start, stride, square = stmt.arguments
        assert isinstance(square, Buffer)
        name = transpose_name(stmt.m)
        self.used.add(name)
        words = f"(float (*)[{stmt.m}]){self.names.of(square)}"
        return f"{pad}{name}((float *)({self._cell_address(target, start)}), {self._index_text(stride)}, {words});"

    def _matrix_multiply(self, stmt: Tile, pad: str) -> str:
        sums, rows, first_row, step, panel, first, count = stmt.arguments
        assert isinstance(sums, Buffer)
        name = matrix_tile_name(stmt.name, stmt.m, stmt.n)
        self.used.add(name)
        operands = (
            f"{self._cell_address(rows, first_row)}, {self._index_text(step)}, {self._cell_address(panel, first)}"
        )
        return f"{pad}{name}({self.names.of(sums)}, {operands}, {self._index_text(count)});"

    def _cell_address(self, buffer: Expr | Buffer, start: Expr | Buffer) -> str:
        assert isinstance(buffer, Buffer)
        place = self._index_text(start)
        return self.names.of(buffer) if place == "0" else f"{self.names.of(buffer)} + {place}"

    def _index_text(self, part: Expr | Buffer) -> str:
        assert not isinstance(part, Buffer)
        return self._printer.index(part).code

    def _type(self, prec: Prec) -> str:
        return self.dialect.type_name(prec)

    def _give(self, symbol: Symbol) -> str:
        return self.names.give(symbol, symbol.hint)

    def _array(self, buffer: Buffer) -> str:
        shape = buffer.layout.physical_shape(buffer.shape)
        subscripts = "".join(f"[{max(extent, 1)}]" for extent in shape) or "[1]"
        if buffer.layout.steps:
            subscripts = f"[{max(buffer.size, 1)}]"
        # Whole vectors of a tile of accumulators, and of a slab, lie in one cache line each.
        whole = buffer.layout.steps or buffer.space == "register"
        aligned = "_Alignas(64) " if whole and len(buffer.shape) > 1 else ""
        return f"{aligned}{self._type(buffer.type)} {self.names.give(buffer, buffer.name)}{subscripts}"

    def _scope_braced(self, body: tuple[Stmt, ...], depth: int) -> Iterator[str]:
        yield f"{_INDENT * depth}{{"
        yield from self._scope(body, depth + 1)
        yield f"{_INDENT * depth}}}"

    # -- control --------------------------------------------------------------------------------------------------
    def _loop(self, stmt: For, depth: int) -> Iterator[str]:
        pad = _INDENT * depth
        symbol = stmt.iterator.symbol
        stmt = clipped(stmt)
        if self.vectors and in_vectors(stmt, self._printer.bounds):
            yield from self._vector_loop(stmt, depth)
            return
        extent = self._printer.index(stmt.iterator.extent).code
        self.names.push()
        name = self.names.give(symbol, loop_name(symbol.hint))
        self._counted.add(symbol)
        self._printer.bounds[symbol] = stmt.iterator.bound
        if stmt.kind == "parallel":
            start, stop = yield from self._part(stmt, extent, pad)
        else:
            start, stop = "0", extent
            if stmt.kind == "unroll" and constant(stmt.iterator.extent) != 1:
                yield f"#pragma GCC unroll {max(1, stmt.iterator.bound)}"
            elif _least(stmt) <= (constant(stmt.iterator.extent) or 0) <= _SHORT:
                yield "#pragma GCC unroll 1"
        yield f"{pad}for (int64_t {name} = {start}; {name} < {stop}; {name}++) {{"
        asked, self._asked = self._asked, set()
        outer, self._innermost = self._innermost, not any(isinstance(part, For) for part in walk_stmts(stmt.body))
        yield from self._statements(stmt.body, depth + 1)
        self._asked, self._innermost = asked, outer
        yield f"{pad}}}"
        self.names.pop()

    def _asks(self, line: object) -> bool:
        """Whether nothing of this loop's body asked beside this line of memory yet; from now on something has."""
        known = line in self._asked
        self._asked.add(line)
        return not known

    def _part(self, stmt: For, extent: str, pad: str) -> Generator[str, None, tuple[str, str]]:
        """This thread's part of a parallel loop: where it begins and ends."""
        grain = partition_grain(stmt)
        self.used.add(PART_FUNCTION.name)
        stop = self.names.give(stmt, "stop")
        yield f"{pad}const int64_t {stop} = st_part({extent}, {grain}, tid + 1, nt);"
        return f"st_part({extent}, {grain}, tid, nt)", stop

    def _vector_loop(self, stmt: For, depth: int) -> Iterator[str]:
        """A loop in steps of one vector, the last under a mask; short loops of lanes are written out."""
        pad, symbol = _INDENT * depth, stmt.iterator.symbol
        vectors = VectorPrinter(self._printer, symbol, self._give, self._asks)
        if places := pieces(stmt):
            braced = any(isinstance(part, Let) for part in stmt.body)
            for place, count in places:
                some = hex((1 << count) - 1) if count < CELLS else ""
                yield from (f"{pad}{{",) if braced else ()
                yield from self._vector_steps(vectors, stmt, place, depth + braced, some)
                yield from (f"{pad}}}",) if braced else ()
            return
        extent = constant(stmt.iterator.extent) or 0
        if extent % CELLS == 0:
            self.names.push()
        name = self.names.give(symbol, loop_name(symbol.hint))  # one that the last vector needs outlives the loop
        self._counted.add(symbol)
        self._printer.bounds[symbol] = stmt.iterator.bound
        start, stop = "0", str(extent)
        if stmt.kind == "parallel":
            start, stop = yield from self._part(stmt, stop, pad)
        if extent % CELLS == 0:
            yield f"{pad}for (int64_t {name} = {start}; {name} < {stop}; {name} += {CELLS}) {{"
            yield from self._vector_steps(vectors, stmt, Var(symbol), depth + 1)
            self.names.pop()
        else:
            yield f"{pad}int64_t {name} = {start};"
            yield f"{pad}for (; {name} + {CELLS} <= {stop}; {name} += {CELLS}) {{"
            yield from self._vector_steps(vectors, stmt, Var(symbol), depth + 1)
            yield f"{pad}}}"
            yield f"{pad}if ({name} < {stop}) {{"
            self.names.push()
            some = self.names.give((stmt, "some"), "some")
            self.used.update(("st_vectors", "st_first_cells"))
            yield f"{pad}{_INDENT}const st_vmask {some} = st_first_cells({stop} - {name});"
            yield from self._vector_steps(vectors, stmt, Var(symbol), depth + 1, some)
            self.names.pop()
        yield f"{pad}}}"

    def _vector_steps(
        self, vectors: VectorPrinter, stmt: For, start: Expr, depth: int, some: str = ""
    ) -> Iterator[str]:
        pad = _INDENT * depth
        self.names.push()
        for left, right in vectors.step(stmt.body, start, some):
            yield from _assignment(pad, left, right) if left else (f"{pad}{right};",)
        self.names.pop()

    def _if(self, stmt: If, depth: int) -> Iterator[str]:
        pad = _INDENT * depth
        yield f"{pad}if ({self._printer.condition(stmt.condition).code}) {{"
        yield from self._scope(stmt.then, depth + 1)
        if stmt.orelse:
            yield f"{pad}}} else {{"
            yield from self._scope(stmt.orelse, depth + 1)
        yield f"{pad}}}"

    def _scan(self, stmt: Scan, depth: int) -> Iterator[str]:
        """Carried values are updated together: each new state is computed from the old ones."""
        pad, inner = _INDENT * depth, _INDENT * (depth + 1)
        yield f"{pad}{{"
        self.names.push()
        for item in stmt.carried:
            init = self._printer.text(item.init)
            yield f"{inner}{self._type(item.symbol.type)} {self._give(item.symbol)} = {init};"
        symbol = stmt.iterator.symbol
        extent = self._printer.text(stmt.iterator.extent)
        self.names.push()
        name = self.names.give(symbol, loop_name(symbol.hint))
        self._counted.add(symbol)
        if stmt.reverse:
            yield f"{inner}for (int64_t {name} = {extent} - 1; {name} >= 0; {name}--) {{"
        else:
            yield f"{inner}for (int64_t {name} = 0; {name} < {extent}; {name}++) {{"
        deeper = _INDENT * (depth + 2)
        if len(stmt.carried) == 1:
            (item,) = stmt.carried
            yield f"{deeper}{self.names.of(item.symbol)} = {self._printer.text(item.update)};"
        else:
            nexts: list[tuple[str, str]] = []
            for item in stmt.carried:
                old = self.names.of(item.symbol)
                new = self.names.give((stmt, item.symbol), f"{old}_next")
                yield f"{deeper}const {self._type(item.symbol.type)} {new} = {self._printer.text(item.update)};"
                nexts.append((old, new))
            for old, new in nexts:
                yield f"{deeper}{old} = {new};"
        yield from self._statements(stmt.body, depth + 2)
        yield f"{inner}}}"
        self.names.pop()
        self.names.pop()
        yield f"{pad}}}"


def holds_parallel_loop(stmt: Stmt) -> bool:
    """Tell whether a statement is a loop dealt out to threads, or a loop around one: every thread runs that."""
    return isinstance(stmt, For) and (stmt.kind == "parallel" or any(map(holds_parallel_loop, stmt.body)))


def _least(stmt: For) -> int:
    """The iterations from which a short loop is worth vectors; few lanes merge faster written out."""
    return {"vector": 2, "lane": 8}.get(stmt.kind, _SHORT + 1)


def _assignment(pad: str, left: str, right: str) -> Iterator[str]:
    """One line, or two where one would be long."""
    if len(pad) + len(left) + len(right) + 4 <= _WIDTH:
        yield f"{pad}{left} = {right};"
    else:
        yield f"{pad}{left} ="
        yield f"{pad}{_INDENT}{right};"


def clipped(stmt: For) -> For:
    """Turn a predicate ``i + rest < limit`` around a whole loop body into the loop's end, which compilers vectorise."""
    if len(stmt.body) != 1 or stmt.kind not in ("serial", "vector"):
        return stmt
    (inner,) = stmt.body
    if not isinstance(inner, If) or inner.orelse:
        return stmt
    condition, symbol = inner.condition, stmt.iterator.symbol
    if not isinstance(condition, Apply) or condition.op != "lt" or condition.type is not i64:
        return stmt
    position, limit = affine(condition.args[0]), condition.args[1]
    if position.coefficient(symbol) != 1 or symbol in symbols_of(limit):
        return stmt
    left = subtract(limit, to_expr(position.without(symbol)))
    return For(replace(stmt.iterator, extent=minimum(stmt.iterator.extent, left)), inner.then, stmt.kind)


def loop_name(hint: str) -> str:
    """Return what a loop variable is called: ``i_<axis>``.

    >>> loop_name("hid"), loop_name("i_k"), loop_name("")
    ('i_hid', 'i_k', 'i')
    """
    base = sanitise(hint) if hint else ""
    if not base:
        return "i"
    return base if base == "i" or base.startswith("i_") else f"i_{base}"
