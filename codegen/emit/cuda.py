"""CUDA source of a routine: a module scheduled for CUDA -> one translation unit of ``extern "C"`` kernels.

In: a module whose kernels carry their launch. Out: :class:`CudaSource`: the text, and per kernel its launch dimensions
and arguments in order. The same text is compiled for GPUs and, beside the emulation header, for the host. Kernels take
pointers, and where they need run-time extents or indices one pointer to all of them, which stays valid when a captured
graph is replayed. Chooses no schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from stagedtensor.codegen.affine import constant
from stagedtensor.codegen.emit.body import BodyPrinter, loop_name
from stagedtensor.codegen.emit.c import (
    cells_in_common,
    comment_lines,
    shape_text,
    signature_text,
    used_buffers,
    used_scalars,
)
from stagedtensor.codegen.emit.c_like import Dialect, ExpressionPrinter, Level, Text
from stagedtensor.codegen.emit.names import Names, sanitise
from stagedtensor.codegen.emit.share import Shared
from stagedtensor.codegen.loop_ir import (
    Alloc,
    Apply,
    Barrier,
    Buffer,
    Declare,
    Expr,
    For,
    Let,
    Load,
    Module,
    Origin,
    Proc,
    Stmt,
    Symbol,
    Tile,
    index,
)
from stagedtensor.codegen.passes.plan_memory import MemoryPlan, plan_memory
from stagedtensor.codegen.prelude import prelude_source
from stagedtensor.codegen.prelude.cuda import cuda_functions, cuda_names
from stagedtensor.codegen.rewrite import buffers_written, substitute, walk_stmts
from stagedtensor.codegen.schedule.cuda import WARP, Launch, launch_of, parts_of
from stagedtensor.errors import InternalError
from stagedtensor.precision import Prec

_INDENT = "    "
_BUILT_IN = """
all any ballot brev clz popc ffsll mul24 mulhi umulhi sad usad saturate assert double2int double2ll double2uint double2ull
float2double int2double uint2double ll2double ull2double dadd dsub dmul fdivide fdividef exp10f j0f j1f jnf y0f y1f ynf
llabs llmax llmin max min norm norm3d norm3df norm4d norm4df normf normcdf normcdff normcdfinv normcdfinvf powi powif rcbrt
rcbrtf rhypot rhypotf rnorm rnormf rnorm3d rnorm3df rnorm4d rnorm4df sincos sincosf sincospi sincospif sinpi sinpif cospi
cospif erfcinv erfcinvf erfcx erfcxf erfinv erfinvf ullmax ullmin umax umin cyl_bessel_i0 cyl_bessel_i0f cyl_bessel_i1
cyl_bessel_i1f atomicAdd atomicAnd atomicCAS atomicDec atomicExch atomicInc atomicMax atomicMin atomicOr atomicSub atomicXor
""".split()  # noqa: SIM905 -- a word list reads better as text
"""Functions that CUDA declares by itself: a kernel of such a name would be an overload, which C linkage forbids."""
_SCALARS = "const int64_t *__restrict__ scalars"
_HEAD = """\
#ifndef ST_SHARED
/* An array shared by the threads of a block. */
#define ST_SHARED(type, name, count) __shared__ __align__(16) type name[count]
#endif
"""
_HEAD_AT = """\
#ifndef ST_SHARED_AT
/* An array at a place in the shared memory that the launch asks for. */
extern __shared__ __align__(16) unsigned char st_shared_bytes[];
#define ST_SHARED_AT(type, name, count, place) type *const name = (type *)(st_shared_bytes + (place))
#endif
"""


@dataclass(frozen=True)
class CudaDialect:
    """CUDA C++: narrow floats are their bits, as in C."""

    def type_name(self, prec: Prec) -> str:
        """Return the type of a value of ``prec``."""
        return prec.c_type


@dataclass(frozen=True)
class CudaKernel:
    """One kernel as launched. Kernels that differ in names alone are one function, with one ``name`` and ``text``.

    ``buffers`` are its pointer arguments in order; ``scalars`` tells whether a pointer to the routine's scalars
    follows. ``lines`` are its first and last in the whole text, from 1; ``text`` begins with the functions that it
    calls.
    """

    proc: Proc
    name: str
    text: str
    lines: tuple[int, int]
    launch: Launch
    buffers: tuple[Buffer, ...]
    writes: frozenset[Buffer]
    scalars: bool
    shared_bytes: int

    @property
    def origins(self) -> tuple[Origin, ...]:
        """What it computes."""
        return self.proc.origins


@dataclass(frozen=True)
class CudaSource:
    """A translation unit. Temporaries lie in an arena of ``arena_bytes`` bytes at ``plan.offsets``."""

    text: str
    kernels: tuple[CudaKernel, ...]
    buffers: tuple[Buffer, ...]
    scalars: tuple[Symbol, ...]
    arena_bytes: int
    plan: MemoryPlan
    places: tuple[tuple[int, int, tuple[Origin, ...]], ...] = ()
    """First and last line of every function, and what it computes where it was printed first."""

    def origins(self, line: int) -> tuple[Origin, ...]:
        """Return what the function around line ``line`` (from 1) of the text computes; () outside functions."""
        return next((origins for first, last, origins in self.places if first <= line <= last), ())

    def locate(self, line: int) -> str | None:
        """Return the expression and user's line behind line ``line`` (from 1) of the text, None outside kernels."""
        origins = self.origins(line)
        return f"{origins[0].source}: {origins[0].text}" if origins else None


def emit_cuda(module: Module, *, prelude: bool = True, plan: MemoryPlan | None = None) -> CudaSource:
    """Print a scheduled module as CUDA C++; ``prelude=False`` leaves out what stands before the kernels."""
    plan = plan_memory(module) if plan is None else plan
    functions = _Functions(plan, module.scalars)
    printed = [functions.kernel(proc) for proc in module.kernels]
    head = _head(functions.used, placed=any(launch_of(proc).offsets for proc in module.kernels)) if prelude else ""
    line = head.count("\n") + 1
    lines: dict[str, tuple[int, int]] = {}
    places: list[tuple[int, int, tuple[Origin, ...]]] = []
    for name, item in functions.printed.items():
        last = line + item.text.count("\n") - 1
        lines[name] = (line, last)
        places.append((line, last, item.proc.origins))
        line = last + 2
    text = head + "\n".join(item.text for item in functions.printed.values())
    kernels = tuple(_placed(item, functions, lines[item.name]) for item in printed)
    return CudaSource(text, kernels, module.external, module.scalars, plan.peak, plan, tuple(places))


def _head(used: set[str], *, placed: bool) -> str:
    device = used & cuda_names()
    own = _HEAD_AT if placed else ""
    return f"{prelude_source(used - device, dialect='cuda')}\n{cuda_functions(device)}{_HEAD}{own}\n"


@dataclass(frozen=True)
class _Printed:
    """One function; ``callees`` are the names of those it calls."""

    proc: Proc
    name: str
    text: str
    buffers: tuple[Buffer, ...]
    writes: frozenset[Buffer]
    scalars: bool
    used: Set[str]
    given: Set[str]
    callees: tuple[str, ...] = ()


class _Functions:
    """The functions of a translation unit: kernels, and parts of kernels. Those that do the same are printed once."""

    def __init__(self, plan: MemoryPlan, scalars: tuple[Symbol, ...]) -> None:
        self.printed: dict[str, _Printed] = {}
        self.used: set[str] = set()
        self._plan = plan
        self._scalars = scalars
        self._names = Names(_BUILT_IN)
        self._shared = Shared()

    def kernel(self, proc: Proc) -> _Printed:
        """Print a kernel, one of several parts after these."""
        parts = parts_of(proc)
        name = self._names.give(proc, proc.name)
        if len(parts) == 1:
            return self._kept(proc, _function(proc, name, self._plan, self._scalars))
        callees = [
            self._kept(part, _function(part, self._names.give(part, part.name), self._plan, self._scalars, part=True))
            for part in parts
        ]
        return self._kept(proc, _side_by_side(proc, name, self._plan, callees))

    def _kept(self, proc: Proc, function: _Printed) -> _Printed:
        first = self._shared.find(function.text, function.name, function.given)
        if first is None:
            self.printed[function.name] = function
            self.used |= function.used
            return function
        self._names.take_back(proc)
        return replace(function, name=first, text=self.printed[first].text)


def _placed(item: _Printed, functions: _Functions, lines: tuple[int, int]) -> CudaKernel:
    called = [functions.printed[name] for name in dict.fromkeys(item.callees)]
    shared = sum(_shared_bytes(function.proc) for function in called or [item])
    text = "\n".join((*(function.text for function in called), item.text))
    launch = launch_of(item.proc)
    return CudaKernel(item.proc, item.name, text, lines, launch, item.buffers, item.writes, item.scalars, shared)


def _shared_bytes(proc: Proc) -> int:
    arrays = (stmt.buffer for stmt in walk_stmts(proc.body) if isinstance(stmt, Alloc))
    launch = launch_of(proc)
    own = sum(buffer.nbytes for buffer in arrays if buffer.space == "shared" and buffer not in launch.offsets)
    return own + launch.dynamic_bytes


def _function(proc: Proc, name: str, plan: MemoryPlan, scalars: tuple[Symbol, ...], *, part: bool = False) -> _Printed:
    """Print a kernel, or with ``part`` a function that does its work in ``blocks`` blocks, of which it is ``block``."""
    launch = launch_of(proc)
    buffers = used_buffers(proc)
    common = cells_in_common(plan, proc, buffers)
    names = Names(("block", "blocks") if part else ())
    written = {common[buffer] for buffer in buffers_written(proc.body) if buffer in common}
    given: list[Buffer] = []
    parameters: list[str] = ["const int64_t block", "const int64_t blocks"] if part else []
    described: list[str] = []
    for buffer in buffers:
        whole = common[buffer]
        if whole is not buffer:
            names.alias(buffer, names.of(whole))
            described.append(f"{sanitise(buffer.name)} : {shape_text(buffer)} in place of {names.of(whole)}")
            continue
        label = names.give(buffer, buffer.name)
        parameters.append(_pointer(buffer, label, buffer in written))
        described.append(f"{label} : {shape_text(buffer)}")
        given.append(buffer)
    lines: list[str] = []
    needed = used_scalars(proc)
    if needed:
        parameters.append(_SCALARS)
    for symbol in needed:
        lines.append(f"const int64_t {names.give(symbol, symbol.hint)} = scalars[{scalars.index(symbol)}];")
    printer = CudaBody(names, launch, counts=proc.scalars, part=part)
    if launch.thread is not None:
        lines.append(f"const int64_t {names.give(launch.thread, launch.thread.hint)} = {printer.thread};")
    body = printer.body(proc.body, 1)
    opening = "".join(f"{_INDENT}{line}\n" for line in lines)
    heading = "".join(f"// {line}\n" for line in comment_lines(proc, described))
    start = f"{_part_start(launch) if part else _kernel_start(launch)} {name}"
    text = f"{heading}{signature_text(start, parameters)} {{\n{opening}{body}}}\n"
    return _Printed(proc, name, text, tuple(given), frozenset(written), bool(needed), printer.used, names.given)


def _pointer(buffer: Buffer, label: str, written: bool) -> str:
    return f"{'' if written else 'const '}{buffer.type.c_type} *__restrict__ {label}"


def _kernel_start(launch: Launch) -> str:
    bounds = f"{launch.threads}, {launch.resident}" if launch.resident else str(launch.threads)
    return f'extern "C" __global__ void __launch_bounds__({bounds})'


def _part_start(launch: Launch) -> str:
    """Products keep their results in registers, which no call should move."""
    return "static __device__ __forceinline__ void" if launch.resident else "static __device__ void"


def _side_by_side(proc: Proc, name: str, plan: MemoryPlan, parts: Sequence[_Printed]) -> _Printed:
    """Print the kernel that shares its blocks out among functions."""
    buffers = tuple(dict.fromkeys(buffer for part in parts for buffer in part.buffers))
    common = cells_in_common(plan, proc, buffers)
    written = {common[buffer] for part in parts for buffer in part.writes}
    names = Names((*(part.name for part in parts), "block"))
    given = tuple(dict.fromkeys(common[buffer] for buffer in buffers))
    parameters = [_pointer(buffer, names.give(buffer, buffer.name), buffer in written) for buffer in given]
    scalars = any(part.scalars for part in parts)
    if scalars:
        parameters.append(_SCALARS)
    lines = ["const int64_t block = blockIdx.x;"]
    first, threads = 0, launch_of(proc).threads
    for place, part in enumerate(parts):
        launch = launch_of(part.proc)
        number, each = f"block - {first}" if first else "block", 1
        if launch.is_warp and threads > WARP:  # each warp is a block of it
            each = threads // WARP
            number = f"({number})" if first else number
            number = f"{number} * {each} + threadIdx.x / {WARP}"
        count = -(-launch.blocks // each)
        arguments = [number, str(count * each)]
        arguments += [names.of(common[buffer]) for buffer in part.buffers] + ["scalars"] * part.scalars
        first += count
        test = f"if (block < {first}) " if place + 1 < len(parts) else ""
        lines += [f"{'} else ' if place else ''}{test}{{", f"{_INDENT}{part.name}({', '.join(arguments)});"]
    lines.append("}")
    body = "".join(f"{_INDENT}{line}\n" for line in lines)
    heading = f"// {len(parts)} kernels side by side, each in a range of the blocks\n"
    text = f"{heading}{signature_text(f'{_kernel_start(launch_of(proc))} {name}', parameters)} {{\n{body}}}\n"
    callees = tuple(part.name for part in parts)
    return _Printed(proc, name, text, given, frozenset(written), scalars, set(), names.given, callees)


class CudaExpressions(ExpressionPrinter):
    """Expressions with what only CUDA has: values of other threads of the warp."""

    def _apply(self, expr: Apply) -> Text:
        if expr.op == "shuffle_down":
            value, lanes = expr.args
            name = f"st_shuffle_down_{expr.type.name}"
            self.used.add(name)
            return Text(f"{name}({self.text(value)}, {self.text(lanes)})", Level.POSTFIX)
        return super()._apply(expr)


class CudaBody(BodyPrinter):
    """Statements of one kernel: loops dealt out to the launch, shared arrays, barriers."""

    def __init__(self, names: Names, launch: Launch, counts: tuple[Symbol, ...], *, part: bool = False) -> None:
        dialect: Dialect = CudaDialect()
        callees: Mapping[Proc, str] = {}
        super().__init__(dialect, names, parallel=False, callees=callees, counts=counts)
        self._printer = CudaExpressions(dialect, names, nonnegative=self.nonnegative)
        self._launch = launch
        self._block, self._blocks = ("block", "blocks") if part else ("blockIdx.x", "gridDim.x")
        self._warp = part and launch.is_warp
        self.thread = f"threadIdx.x % {WARP}" if self._warp else "threadIdx.x"
        if launch.thread is not None:
            self._counted.add(launch.thread)
            self._printer.bounds[launch.thread] = launch.threads

    def _statement(self, stmt: Stmt, depth: int) -> Iterator[str]:
        pad = _INDENT * depth
        match stmt:
            case Barrier():
                yield f"{pad}{'__syncwarp' if self._warp else '__syncthreads'}();"
            case Alloc(buffer) if buffer.space == "shared":
                label = self.names.give(buffer, buffer.name)
                start = self._launch.offsets.get(buffer)
                macro, place = ("ST_SHARED", "") if start is None else ("ST_SHARED_AT", f", {start}")
                yield f"{pad}{macro}({self._type(buffer.type)}, {label}, {max(1, buffer.size)}{place});"
            case Tile():
                yield from self._tile(stmt, pad)
            case _:
                yield from super()._statement(stmt, depth)

    def _array(self, buffer: Buffer) -> str:
        """Registers have no addresses to align, and C++ has another word for it."""
        return super()._array(buffer).removeprefix("_Alignas(64) ")

    def _tile(self, stmt: Tile, pad: str) -> Iterator[str]:
        """A named micro-kernel is one call of a prelude function of its name."""
        self.used.add(stmt.name)
        arguments = [self._argument(item) for item in stmt.arguments]
        yield f"{pad}{stmt.name}({', '.join(arguments)});"

    def _argument(self, item: Expr | Buffer) -> str:
        """A buffer by its name, a cell by its address, a test as one."""
        if isinstance(item, Buffer):
            return self.names.of(item)
        if isinstance(item, Apply) and item.op in ("and", "lt"):
            return self._printer.condition(item).code
        text = self._printer.text(item)
        return f"&{text}" if isinstance(item, Load) else text

    def _once(self, body: tuple[Stmt, ...], depth: int) -> Iterator[str]:
        """A loop of one iteration is its body, in a scope of its own where it introduces names."""
        if any(isinstance(stmt, Let | Declare | Alloc) for stmt in body):
            yield from self._scope_braced(body, depth)
        else:
            yield from self._statements(body, depth)

    def _loop(self, stmt: For, depth: int) -> Iterator[str]:
        pad = _INDENT * depth
        symbol = stmt.iterator.symbol
        extent = constant(stmt.iterator.extent)
        if stmt.kind not in ("grid", "lane"):
            if extent == 1 and stmt.kind != "parallel":
                yield from self._once(substitute(stmt.body, {symbol: index(0)}), depth)
                return
            for line in super()._loop(stmt, depth):
                yield line.replace("#pragma GCC unroll", f"{pad}#pragma unroll") if line.startswith("#pragma") else line
            return
        dealt = self._launch.dealt.get(symbol)
        if dealt is None:
            raise InternalError(f"the launch does not say what walks the loop over {symbol.hint}")
        limit = self._printer.index(stmt.iterator.extent).code
        self.names.push()
        name = self.names.give(symbol, loop_name(symbol.hint))
        self._counted.add(symbol)
        self._printer.bounds[symbol] = stmt.iterator.bound
        threads = self._launch.threads
        wide = "(int64_t)" if self._block == "blockIdx.x" else ""
        start, step = {
            "blocks": (self._block, self._blocks),
            "threads of a block": (self.thread, str(threads)),
            "threads of the grid": (
                f"{wide}{self._block} * {threads} + threadIdx.x",
                f"{wide}{self._blocks} * {threads}",
            ),
        }[dealt]
        yield f"{pad}for (int64_t {name} = {start}; {name} < {limit}; {name} += {step}) {{"
        yield from self._statements(stmt.body, depth + 1)
        yield f"{pad}}}"
        self.names.pop()
