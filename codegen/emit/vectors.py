"""Loops printed with explicit vectors, where compilers would find worse code by themselves.

In: a loop of independent iterations over adjacent cells. Out: its lines, sixteen iterations a step, by the functions of
``prelude/vectors.h``; None for a loop that holds anything else, or nothing that profits (half precision,
exponentials, bytes, results too large for the cache).
The same operations in the same order as the scalar text, so the same bits. Knows AVX-512 only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from stagedtensor.codegen.affine import affine, constant, flat_index
from stagedtensor.codegen.emit.c_like import ExpressionPrinter, Level, Text
from stagedtensor.codegen.emit.digits import digit_in, possible_bits, power_of_two, with_digit
from stagedtensor.codegen.loop_ir import (
    Apply,
    Buffer,
    Cast,
    Const,
    Expr,
    Fma,
    For,
    Let,
    Load,
    Stmt,
    Store,
    Symbol,
    Var,
    children,
    index,
    walk,
)
from stagedtensor.codegen.prelude.vectors import CELLS
from stagedtensor.codegen.rewrite import substitute, symbols_of
from stagedtensor.precision import Prec, bf16, f16, f32, i8, i32, i64, u8, u32

_TYPES = {f32: "st_vf32", i32: "st_vi32", u32: "st_vu32"}
_INFIX = {"add": ("+", Level.SUM), "sub": ("-", Level.SUM), "mul": ("*", Level.PRODUCT), "div": ("/", Level.PRODUCT)}
_FUNCTIONS = {
    "exp": "st_exp_vf32",
    "sigmoid": "st_sigmoid_vf32",
    "tanh": "st_tanh_vf32",
    "erf": "st_erf_vf32",
    "erfc": "st_erfc_vf32",
    "sqrt": "st_sqrt_vf32",
    "rsqrt": "st_rsqrt_vf32",
    "recip": "st_recip_vf32",
    "nonfinite": "st_nonfinite_vf32",
    "maximum": "st_max_vf32",
    "minimum": "st_min_vf32",
    "abs": "st_abs_vf32",
    "relu": "st_relu_vf32",
}
_TESTS = ("eq", "ne", "lt", "le", "gt", "ge")
_PROFIT = ("exp", "sigmoid", "tanh", "erf", "erfc")
_COSTLY_LANES = ("maximum", "minimum")
"""Compilers let each of a reduction's steps wait for several masks; a vector needs one, which waits for nothing."""
_MOST_UNROLLED = 4
_LEAST = 4
_ALL = (1 << CELLS) - 1
_LINE_BYTES = 64
_LARGE = 1 << 25
"""Bytes of a result from which it is written past the cache: several times what a core keeps for itself."""


def in_vectors(loop: For, bounds: Mapping[Symbol, int]) -> bool:
    """Tell whether ``loop`` can and should be printed with vectors; ``bounds`` limit the loop variables in scope."""
    if loop.kind not in ("lane", "vector", "parallel"):
        return False
    extent = constant(loop.iterator.extent)
    if extent is None or extent < _LEAST:
        return False
    return _Judge(loop, bounds).fits()


def _is_large(buffer: Buffer) -> bool:
    return buffer.space == "global" and buffer.nbytes >= _LARGE


def _is_costly(expr: Expr) -> bool:
    return isinstance(expr, Apply) and expr.op in _PROFIT


def _stride(buffer: Buffer, indices: tuple[Expr, ...], lane: Symbol, bounds: Mapping[Symbol, int]) -> int | None:
    return flat_index(buffer, indices, bounds).coefficient(lane)


class _Judge:
    """Which statements and expressions have vector text."""

    def __init__(self, loop: For, bounds: Mapping[Symbol, int]) -> None:
        self._lane = loop.iterator.symbol
        self._bounds = {**bounds, self._lane: loop.iterator.bound}
        self._lanes = loop.kind == "lane" and (constant(loop.iterator.extent) or 1) % CELLS == 0
        self._unrolled = loop.kind == "lane" and (constant(loop.iterator.extent) or 0) <= _MOST_UNROLLED * CELLS
        self._body = loop.body
        self._varying: set[Symbol] = {self._lane}
        self._sure: set[Expr] = set()
        self._profits = False

    def fits(self) -> bool:
        for stmt in self._body:
            if not isinstance(stmt, Let | Store):
                return False
            self._collect(stmt.value)
        for stmt in self._body:
            if isinstance(stmt, Let):
                if not self._varies(stmt.value):
                    continue
                if stmt.symbol.type not in _TYPES or not self._value(stmt.value):
                    return False
                self._varying.add(stmt.symbol)
            elif isinstance(stmt, Store) and not self._store(stmt):
                return False
        return self._profits

    def _collect(self, expr: Expr) -> None:
        """Note the loads that are evaluated at every point."""
        if isinstance(expr, Load):
            self._sure.add(expr)
        if isinstance(expr, Apply) and expr.op == "where":
            self._collect(expr.args[0])
            return
        for part in children(expr):
            self._collect(part)

    def _varies(self, expr: Expr) -> bool:
        return any(symbol in self._varying for symbol in symbols_of(expr))

    def _store(self, stmt: Store) -> bool:
        if _stride(stmt.buffer, stmt.indices, self._lane, self._bounds) != 1:
            return False
        value = stmt.value
        self._profits |= _is_large(stmt.buffer)
        if stmt.buffer.type in (f16, bf16):
            if not isinstance(value, Cast) or value.saturate or value.flush or value.arg.type is not f32:
                return False
            self._profits = True
            return self._value(value.arg)
        return stmt.buffer.type is f32 and self._value(value)

    def _value(self, expr: Expr) -> bool:
        if not self._varies(expr):
            return expr.type in _TYPES
        match expr:
            case Var(symbol):
                return symbol.type in _TYPES and symbol is not self._lane
            case Load(buffer, indices):
                return buffer.type in _TYPES and _stride(buffer, indices, self._lane, self._bounds) == 1
            case Fma(a, b, c):
                return expr.type is f32 and all(map(self._value, (a, b, c)))
            case Cast():
                return self._cast(expr)
            case Apply():
                return expr.type in _TYPES and self._apply(expr)
        return False

    def _cast(self, expr: Cast) -> bool:
        arg = expr.arg
        if expr.saturate or expr.flush:
            return False
        if isinstance(arg, Load):
            if _stride(arg.buffer, arg.indices, self._lane, self._bounds) != 1:
                return False
            if arg.type in (u8, i8):
                self._profits = True
                return expr.type in (f32, i32) or (expr.type is u32 and arg.type is u8)
            if arg.type in (f16, bf16):
                self._profits |= arg.type is f16
                return expr.type is f32
        if isinstance(arg, Cast) and expr.type is f32 and arg.type in (f16, bf16) and arg.arg.type is f32:
            self._profits = True
            return not (arg.saturate or arg.flush) and self._value(arg.arg)
        if expr.type is i32 and arg.type is i64:
            return affine(arg).coefficient(self._lane) == 1 and not any(isinstance(part, Load) for part in walk(arg))
        known = {(f32, i32), (i32, u32), (u32, i32)}
        return (expr.type, arg.type) in known and self._value(arg)

    def _apply(self, expr: Apply) -> bool:
        op, args = expr.op, expr.args
        if op in ("floordiv", "mod"):
            return expr.type is u32 and power_of_two(args[1]) is not None and self._value(args[0])
        if op == "where":
            test, *branches = args
            if not self._test(test) or not all(map(self._value, branches)):
                return False
            loads = (part for branch in branches for part in walk(branch) if isinstance(part, Load))
            return all(load in self._sure or self._inside(load) for load in loads)
        if op in _INFIX:
            return (op != "div" or expr.type is f32) and all(map(self._value, args))
        if op in ("neg", "identity"):
            return self._value(args[0])
        if op in _TESTS:
            return expr.type is f32 and self._test(expr)
        self._profits |= op in _PROFIT or (op in _COSTLY_LANES and self._lanes)
        return op in _FUNCTIONS and expr.type is f32 and all(map(self._value, args))

    def _inside(self, load: Load) -> bool:
        """Whether the cell exists at every point: its index is a sum of loop variables that stays in the buffer."""
        flat = flat_index(load.buffer, load.indices)
        greatest = flat.constant
        for atom, factor in flat.terms:
            if not isinstance(atom, Var) or atom.symbol not in self._bounds or factor < 0:
                return False
            greatest += factor * max(0, self._bounds[atom.symbol] - 1)
        return flat.constant >= 0 and greatest < load.buffer.size

    def _test(self, expr: Expr) -> bool:
        if not self._varies(expr):
            return True
        if not isinstance(expr, Apply):
            return expr.type is f32 and self._value(expr)  # what is not 0
        if expr.op in ("and", "or", "not"):
            return all(map(self._test, expr.args))
        if expr.op not in _TESTS:
            return False
        if expr.args[0].type is i64:
            known = expr.args[0] == Var(self._lane) and constant(expr.args[1]) is not None
            return self._unrolled and expr.op == "lt" and known
        return expr.args[0].type in (f32, i32) and all(map(self._value, expr.args))


@dataclass
class VectorPrinter:
    """Prints the body of one loop that :func:`in_vectors` accepts.

    ``give`` names a let; ``asks`` tells whether a load from a line of memory should also ask for a line to come.
    """

    printer: ExpressionPrinter
    lane: Symbol
    give: Callable[[Symbol], str]
    asks: Callable[[object], bool]

    def __post_init__(self) -> None:
        self._varying: set[Symbol] = {self.lane}
        self._start: Expr = Var(self.lane)
        self._some = ""
        self._busy = False

    def step(self, body: Sequence[Stmt], start: Expr, some: str = "") -> Iterator[tuple[str, str]]:
        """Yield (what is set, value) for the sixteen iterations from ``start``; a call has nothing on its left.

        ``some`` is the text of a mask: the iterations that there are, where not all sixteen.
        """
        self._start, self._some = start, some
        self._varying = {self.lane}
        self._busy = any(
            _is_costly(part) for stmt in body if isinstance(stmt, Let | Store) for part in walk(stmt.value)
        )
        for stmt in body:
            if isinstance(stmt, Let):
                varies = self._varies(stmt.value)
                text = self._vector(stmt.value).code if varies else self.printer.text(stmt.value)
                kind = _TYPES[stmt.symbol.type] if varies else stmt.symbol.type.c_type
                if varies:
                    self._varying.add(stmt.symbol)
                    self._use("vectors")
                yield f"const {kind} {self.give(stmt.symbol)}", text
            elif isinstance(stmt, Store):
                yield "", self._store(stmt)

    def _varies(self, expr: Expr) -> bool:
        return any(symbol in self._varying for symbol in symbols_of(expr))

    def _use(self, name: str) -> str:
        name = name if name.startswith("st_") else f"st_{name}"
        self.printer.used.add(name)
        return name

    def _call(self, name: str, *args: str) -> Text:
        return Text(f"{self._use(name)}({', '.join(args)})", Level.POSTFIX)

    def _memory(self, verb: str, kind: str, place: str, *value: str) -> Text:
        if self._some:
            return self._call(f"{'store' if value else 'load'}_some_{kind}", self._some, place, *value)
        return self._call(f"{verb}_{kind}", place, *value)

    def _loads(self, buffer: Buffer) -> str:
        """Memory delivers while exponentials are computed, if it is asked early."""
        return "ahead" if self._busy and _is_large(buffer) and buffer.type in (f32, f16, bf16) else "load"

    def _place(self, buffer: Buffer, indices: tuple[Expr, ...]) -> str:
        moved = tuple(substitute(part, {self.lane: self._start}) for part in indices)
        return f"&{self.printer.cell(buffer, moved).code}"

    def _line(self, load: Load) -> tuple[object, ...]:
        """The line of memory in which a vector of bytes begins, as far as the text tells."""
        moved = tuple(substitute(part, {self.lane: self._start}) for part in load.indices)
        flat = flat_index(load.buffer, moved)
        return load.buffer, flat.terms, flat.constant // _LINE_BYTES

    def _store(self, stmt: Store) -> str:
        place = self._place(stmt.buffer, stmt.indices)
        verb = "put" if _is_large(stmt.buffer) else "store"
        if stmt.buffer.type is f32:
            return self._memory(verb, "vf32", place, self._vector(stmt.value).code).code
        assert isinstance(stmt.value, Cast)
        narrow = self._call(f"vf32_to_{stmt.buffer.type.name}", self._vector(stmt.value.arg).code)
        return self._memory(verb, "vu16", place, narrow.code).code

    def _vector(self, expr: Expr) -> Text:
        """A vector, also where every cell is the same."""
        if not self._varies(expr):
            wide = "f32" if expr.type is f32 else "i32"
            text = self._call(f"all_v{wide}", self.printer.text(expr))
            return Text(f"(st_vu32){text.code}", Level.UNARY) if expr.type is u32 else text
        return self._value(expr)

    def _operand(self, expr: Expr) -> Text:
        """A vector, or a scalar that C widens beside one."""
        return self._value(expr) if self._varies(expr) else self.printer.expr(expr)

    def _value(self, expr: Expr) -> Text:
        if expr.type is f32 and (digit := digit_in(expr, self._varies)) is not None:
            return self._among(expr, digit)
        match expr:
            case Var(symbol):
                return Text(self.printer.names.of(symbol))
            case Load(buffer, indices):
                place, verb = self._place(buffer, indices), self._loads(buffer)
                if buffer.type is u32:
                    return Text(f"(st_vu32){self._memory(verb, 'vi32', f'(const int32_t *){place}').code}", Level.UNARY)
                return self._memory(verb, f"v{buffer.type.name}", place)
            case Fma(a, b, c):
                return self._call("fma_vf32", *(self._vector(part).code for part in (a, b, c)))
            case Cast():
                return self._cast(expr)
        assert isinstance(expr, Apply)
        return self._apply(expr)

    def _among(self, expr: Expr, digit: Expr) -> Text:
        """The values of all digits in one register, of which each iteration takes its own."""
        places, start = self._value(digit), self._start
        self._start = index(0)
        table = self._value(with_digit(expr, digit, Cast(Cast(Var(self.lane), i32), u32)))
        self._start = start
        return self._call("among_vf32", table.code, places.code)

    def _cast(self, expr: Cast) -> Text:
        arg = expr.arg
        if isinstance(arg, Load) and arg.type in (u8, i8):
            verb = "stream" if self.asks(self._line(arg)) else "load"
            whole = self._memory(verb, f"{arg.type.name}_vi32", self._place(arg.buffer, arg.indices))
            return self._converted(whole, i32, expr.type)
        if isinstance(arg, Load) and arg.type in (f16, bf16):
            halves = self._memory(self._loads(arg.buffer), "vu16", self._place(arg.buffer, arg.indices))
            return self._call(f"{arg.type.name}_to_vf32", halves.code)
        if isinstance(arg, Cast) and arg.type in (f16, bf16):
            return self._call(f"through_{arg.type.name}_vf32", self._vector(arg.arg).code)
        if arg.type is i64:
            first = substitute(arg, {self.lane: self._start})
            known = constant(first)
            return self._call("ramp_vi32", self.printer.text(Cast(first, i32)) if known is None else str(known))
        return self._converted(self._value(arg), arg.type, expr.type)

    def _converted(self, value: Text, source: Prec, target: Prec) -> Text:
        if source is target:
            return value
        if target is f32:
            return self._call("i32_to_vf32", value.code)
        return Text(f"({_TYPES[target]}){value.at(Level.UNARY)}", Level.UNARY)

    def _apply(self, expr: Apply) -> Text:
        op, args = expr.op, expr.args
        if op == "where":
            return self._where(*args)
        if op in _TESTS:
            return self._where(expr, Const(1.0, f32), Const(0.0, f32))
        if op in ("floordiv", "mod"):
            power = power_of_two(args[1])
            assert power is not None
            sign, by = (">>", str(power)) if op == "floordiv" else ("&", f"{(1 << power) - 1}u")
            return Text(f"({self._value(args[0]).at(Level.PRODUCT)} {sign} {by})")
        if expr.type is u32 and (text := self._of_bits(expr)) is not None:
            return text
        if op in _INFIX:
            sign, level = _INFIX[op]
            lhs, rhs = self._operand(args[0]).at(level), self._operand(args[1]).at(Level(level + 1))
            return Text(f"{lhs} {sign} {rhs}", level)
        if op == "identity":
            return self._value(args[0])
        if op == "neg":
            inner = self._value(args[0]).at(Level.UNARY)
            return Text(f"-({inner})" if inner.startswith("-") else f"-{inner}", Level.UNARY)
        return self._call(_FUNCTIONS[op], *(self._vector(part).code for part in args))

    def _of_bits(self, expr: Apply) -> Text | None:
        """Sums of separate bits as ``|``; a field of bits that is moved up, by one shift."""
        lhs, rhs = expr.args if len(expr.args) == 2 else (expr, expr)
        if expr.op == "add" and self._varies(lhs) and self._varies(rhs) and not possible_bits(lhs) & possible_bits(rhs):
            return Text(f"({self._value(lhs).at(Level.UNARY)} | {self._value(rhs).at(Level.UNARY)})")
        up = power_of_two(rhs) if expr.op == "mul" else None
        width = power_of_two(lhs.args[1]) if isinstance(lhs, Apply) and lhs.op == "mod" else None
        if up is None or width is None or not isinstance(lhs, Apply):
            return None
        field, down = lhs.args[0], 0
        if isinstance(field, Apply) and field.op == "floordiv" and (power := power_of_two(field.args[1])) is not None:
            field, down = field.args[0], power
        inner = self._value(field).at(Level.UNARY)
        moved = f"({inner} << {up - down})" if up > down else f"({inner} >> {down - up})" if down > up else inner
        return Text(f"({moved} & {((1 << width) - 1) << up}u)")

    def _where(self, test: Expr, then: Expr, other: Expr) -> Text:
        if isinstance(test, Apply) and test.args[0].type is i64 and self._varies(test):
            early = self._early(test)
            if early in (0, _ALL):
                return self._vector(then if early else other)
        branches = self._vector(then), self._vector(other)
        if not self._varies(test):
            condition = self.printer.condition(test).at(Level.OR)
            return Text(f"{condition} ? {branches[0].at(Level.OR)} : {branches[1].at(Level.OR)}", Level.TERNARY)
        pick = "pick_vf32" if then.type is f32 else "pick_vi32"
        if then.type is u32:
            codes = [f"(st_vi32){branch.at(Level.UNARY)}" for branch in branches]
            return Text(f"(st_vu32){self._call(pick, self._test(test), *codes).code}", Level.UNARY)
        return self._call(pick, self._test(test), *(branch.code for branch in branches))

    def _early(self, test: Apply) -> int:
        """The mask of the iterations below a constant."""
        first, limit = constant(self._start), constant(test.args[1])
        assert first is not None
        assert limit is not None
        return _ALL & ((1 << max(0, limit - first)) - 1)

    def _test(self, expr: Expr) -> str:
        """A mask with one bit a cell."""
        if not self._varies(expr):
            return f"(({self.printer.condition(expr).code}) ? 0xffff : 0)"
        if not isinstance(expr, Apply):
            return self._call("ne_vf32", self._value(expr).code, self._vector(Const(0.0, f32)).code).code
        if expr.args[0].type is i64:
            return hex(self._early(expr))
        if expr.op == "not":
            return f"({self._test(expr.args[0])} ^ 0xffff)"
        if expr.op in ("and", "or"):
            return f"({self._test(expr.args[0])} {'&' if expr.op == 'and' else '|'} {self._test(expr.args[1])})"
        lhs, rhs = (self._vector(part).code for part in expr.args)
        op = expr.op
        if op in ("gt", "ge"):
            op, lhs, rhs = ("lt" if op == "gt" else "le"), rhs, lhs
        kind = "vf32" if expr.args[0].type is f32 else "vi32"
        return self._call(f"{op}_{kind}", lhs, rhs).code


def pieces(loop: For) -> tuple[tuple[Expr, int], ...]:
    """Return (start, iterations) of each vector of a short loop of lanes, written out; none for one that stays a loop."""
    extent = constant(loop.iterator.extent)
    if loop.kind != "lane" or extent is None or extent > _MOST_UNROLLED * CELLS:
        return ()
    return tuple((index(start), min(CELLS, extent - start)) for start in range(0, extent, CELLS))
