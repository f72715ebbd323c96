"""C source of a routine: a scheduled module -> one translation unit.

In: a module whose blocks are loop nests, the target, and the memory plan. Out: :class:`CSource`: a static function per
kernel and one entry ``void NAME(void **frame, const int64_t *scalars, int tid, int nt, st_barrier *barrier)`` that
every thread of the pool runs. The text depends on module and target alone. Chooses no schedule.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from stagedtensor.codegen.emit.barriers import barriers_before, is_parallel
from stagedtensor.codegen.emit.body import BodyPrinter
from stagedtensor.codegen.emit.c_like import CDialect
from stagedtensor.codegen.emit.form import form_of
from stagedtensor.codegen.emit.helpers import helpers_among
from stagedtensor.codegen.emit.names import Names, sanitise
from stagedtensor.codegen.emit.scratch import bytes_of_a_thread, scratch_of
from stagedtensor.codegen.emit.share import Shared
from stagedtensor.codegen.loop_ir import Alloc, Barrier, Buffer, Call, Module, Origin, Proc, Symbol, Tile
from stagedtensor.codegen.passes.plan_memory import ALIGNMENT, MemoryPlan, plan_memory
from stagedtensor.codegen.pieces import remembered
from stagedtensor.codegen.prelude import FEATURES, prelude_source
from stagedtensor.codegen.prelude.matrix_units import BEGIN, END, needs_of_units, unit_functions, unit_names
from stagedtensor.codegen.prelude.vectors import (
    FEATURE as VECTOR_FEATURE,
    PUTS,
    PUTS_END,
    vector_functions,
    vector_names,
)
from stagedtensor.codegen.rewrite import buffers_read, buffers_written, expressions, symbols_of, walk_stmts
from stagedtensor.codegen.schedule.machine import TargetInfo
from stagedtensor.codegen.schedule.matrix_tile import MATRIX_TILES
from stagedtensor.errors import InternalError

_LINE = 110
_BARRIER_TYPE = "typedef struct st_barrier st_barrier;\n"
_BARRIER_WAIT = "void st_barrier_wait(st_barrier *barrier, int tid);\n"
KERNEL = "ST_KERNEL void"
_KERNEL_MACRO = """\
/* A kernel stays a function of its own: inlined into the routine its parameters would lose their restrict. */
#define ST_KERNEL static __attribute__((noinline))
"""
_FEATURE_NAMES = {"avx": "sse4.1"}


@dataclass(frozen=True)
class KernelText:
    """One kernel as printed: proc, C name, text, the lines it takes (first, last; from 1), and what it computes."""

    proc: Proc
    name: str
    text: str
    lines: tuple[int, int]
    origins: tuple[Origin, ...]
    path: str


@dataclass(frozen=True)
class CSource:
    """A translation unit and how to call it.

    ``frame`` holds the address of each of ``buffers`` in order, then that of an arena aligned to 64: ``arena_bytes``
    bytes for all threads, behind them ``thread_bytes`` for each (it may be null where both are 0). ``scalars`` are the
    i64 parameters in order.
    """

    text: str
    entry: str
    buffers: tuple[Buffer, ...]
    scalars: tuple[Symbol, ...]
    arena_bytes: int
    thread_bytes: int
    kernels: tuple[KernelText, ...]
    plan: MemoryPlan

    def locate(self, line: int) -> str | None:
        """Return the expression and user's line behind line ``line`` (from 1) of the text, None outside kernels."""
        for kernel in self.kernels:
            if kernel.lines[0] <= line <= kernel.lines[1] and kernel.origins:
                origin = kernel.origins[0]
                return f"{origin.source}: {origin.text}"
        return None


def emit_module(
    module: Module, target: TargetInfo, *, prelude: bool = True, header: str = "", plan: MemoryPlan | None = None
) -> CSource:
    """Print ``module`` as C.

    ``header`` declares ``st_barrier`` and ``st_barrier_wait``; ``prelude=False`` leaves out everything before the
    kernels (for reading and tests, not for compiling). ``plan`` defaults to :func:`plan_memory`'s.
    """
    plan = plan_memory(module) if plan is None else plan
    file_names = Names()
    entry = file_names.give(module, module.name)
    functions = _Functions(file_names, plan, vectors=VECTOR_FEATURE in target.features)
    kernel_names: list[str] = []
    for kernel in module.kernels:
        for callee in _callees(kernel):
            functions.print(callee)
        kernel_names.append(functions.print(kernel))
    used = functions.used
    driver = _entry(module, entry, kernel_names, plan)
    needs_barrier = "st_barrier_wait" in driver or any("st_barrier_wait" in text for text in functions.texts.values())
    head = ""
    if prelude:
        helpers = helpers_among(used)
        prelude_names = used.union(*(helper.needs for helper in helpers)) - {helper.name for helper in helpers}
        prelude_names |= needs_of_units(prelude_names)
        head = _head(prelude_names - vector_names() - unit_names(), target, header, needs_barrier)
        vectors = vector_functions(used & vector_names()) + unit_functions(prelude_names)
        head += f"\n{vectors.rstrip()}\n" if vectors else ""
        head += "".join(f"\n{helper.text}" for helper in helpers)
        head += "\n" + _KERNEL_MACRO
        head += "\n"
    line = head.count("\n") + 1
    lines: dict[str, tuple[int, int]] = {}
    pieces = [head]
    for name, text in functions.texts.items():
        last = line + text.count("\n") - 1
        lines[name] = (line, last)
        pieces += (text, "\n")
        line = last + 2
    pieces.append(driver)
    kernels = [
        KernelText(proc, name, functions.texts[name], lines[name], proc.origins, proc.path)
        for proc, name in functions.names.items()
    ]
    return CSource(
        text="".join(pieces),
        entry=entry,
        buffers=module.external,
        scalars=module.scalars,
        arena_bytes=plan.peak,
        thread_bytes=bytes_of_a_thread(module.kernels),
        kernels=tuple(kernels),
        plan=plan,
    )


class _Functions:
    """The functions of a file: each proc has one, which procs that differ in names alone share."""

    def __init__(self, file_names: Names, plan: MemoryPlan, *, vectors: bool = False) -> None:
        self._vectors = vectors
        self.names: dict[Proc, str] = {}
        self.texts: dict[str, str] = {}
        self.used: set[str] = set()
        self._file_names = file_names
        self._plan = plan
        self._shared = Shared()
        self._forms: dict[Hashable, str] = {}

    def print(self, proc: Proc) -> str:
        """Return the name of the proc's function, printing it if it is the first of its kind."""
        if proc in self.names:
            return self.names[proc]
        form = form_of(proc, cells_in_common(self._plan, proc, used_buffers(proc)), self.names)
        known = self._forms.get(form)
        if known is not None:
            self.names[proc] = known
            return known
        name = self._file_names.give(proc, proc.name)
        text, used, given = _function(proc, name, self._plan, self.names, vectors=self._vectors)
        first = self._shared.find(text, name, given)
        if first is not None:
            self._file_names.take_back(proc)
            self.names[proc] = self._forms[form] = first
            return first
        self.names[proc], self.texts[name] = name, text
        self._forms[form] = name
        self.used |= used
        return name


def _head(used: set[str], target: TargetInfo, header: str, needs_barrier: bool) -> str:
    features = frozenset(_FEATURE_NAMES.get(name, name) for name in target.features) & FEATURES
    text = prelude_source(used, dialect="c", features=features)
    if not needs_barrier:
        return f"{text}\n{_BARRIER_TYPE}"
    return f"{text}\n{header.rstrip() or _BARRIER_TYPE + _BARRIER_WAIT}\n"


def _callees(proc: Proc) -> Iterator[Proc]:
    for stmt in walk_stmts(proc.body):
        if isinstance(stmt, Call):
            yield from _callees(stmt.proc)
            yield stmt.proc


# -- functions ----------------------------------------------------------------------------------------------------


@remembered
def used_buffers(proc: Proc) -> tuple[Buffer, ...]:
    """Return the buffers of a proc that its caller provides, in order of appearance: what is read, then written."""
    own = {stmt.buffer for stmt in walk_stmts(proc.body) if isinstance(stmt, Alloc)}
    touched = dict.fromkeys((*buffers_read(proc.body), *buffers_written(proc.body)))
    return tuple(buffer for buffer in touched if buffer not in own)


@remembered
def used_scalars(proc: Proc) -> tuple[Symbol, ...]:
    """Return the scalar parameters that a proc reads, in the order of its declaration."""
    read = {symbol for stmt in walk_stmts(proc.body) for expr in expressions(stmt) for symbol in symbols_of(expr)}
    return tuple(symbol for symbol in proc.scalars if symbol in read)


@remembered
def _has_barrier(proc: Proc) -> bool:
    return any(isinstance(stmt, Barrier) for stmt in walk_stmts(proc.body))


def cells_in_common(plan: MemoryPlan, proc: Proc, buffers: tuple[Buffer, ...]) -> dict[Buffer, Buffer]:
    """Map each buffer of one proc to the one that is printed: in-place results occupy the same cells."""
    first: dict[tuple[int, str], Buffer] = {}
    shared: dict[Buffer, Buffer] = {}
    for buffer in buffers:
        offset = plan.offsets.get(buffer)
        if offset is None or buffer.nbytes == 0:
            shared[buffer] = buffer
            continue
        shared[buffer] = first.setdefault((offset, buffer.type.name), buffer)
    return shared


def _function(
    proc: Proc, name: str, plan: MemoryPlan, callees: dict[Proc, str], *, vectors: bool
) -> tuple[str, set[str], set[str]]:
    """Return a function's text, what it uses of prelude and helpers, and the names it gives."""
    buffers = used_buffers(proc)
    shared = cells_in_common(plan, proc, buffers)
    names = Names()
    written = {shared[buffer] for buffer in buffers_written(proc.body) if buffer in shared}
    parameters: list[str] = []
    described: list[str] = []
    for buffer in buffers:
        whole = shared[buffer]
        if whole is not buffer:
            names.alias(buffer, names.of(whole))
            described.append(f"{sanitise(buffer.name)} : {shape_text(buffer)} in place of {names.of(whole)}")
            continue
        given = names.give(buffer, buffer.name)
        constness = "" if buffer in written else "const "
        parameters.append(f"{constness}{buffer.type.c_type} *restrict {given}")
        described.append(f"{given} : {shape_text(buffer)}")
    own = scratch_of(proc)
    for buffer in own:
        parameters.append(f"{buffer.type.c_type} *restrict {names.give(buffer, buffer.name)}")
    for symbol in used_scalars(proc):
        parameters.append(f"int64_t {names.give(symbol, symbol.hint)}")
    if is_parallel(proc):
        parameters += ("int tid", "int nt")
    if _has_barrier(proc):
        parameters.append("st_barrier *barrier")
    printer = BodyPrinter(
        CDialect(), names, parallel=is_parallel(proc), callees=callees, counts=proc.scalars, given=own, vectors=vectors
    )
    body = printer.body(proc.body, 1)
    if PUTS & printer.used:
        printer.used.add(PUTS_END)
        body += f"    {PUTS_END}();\n"
    if any(isinstance(stmt, Tile) and stmt.name in MATRIX_TILES for stmt in walk_stmts(proc.body)):
        printer.used.update((BEGIN, END))
        body = f"    {BEGIN}();\n{body}    {END}();\n"
    heading = "".join(f"// {line}\n" for line in comment_lines(proc, described))
    text = f"{heading}{signature_text(f'{KERNEL} {name}', parameters)} {{\n{body}}}\n"
    return text, printer.used, names.given


def signature_text(start: str, parameters: list[str]) -> str:
    """Return the head of a function, on several lines where one would be long."""
    line = f"{start}({', '.join(parameters) or 'void'})"
    if len(line) <= _LINE:
        return line
    inner = ",\n    ".join(parameters)
    return f"{start}(\n    {inner}\n)"


def shape_text(buffer: Buffer) -> str:
    """Return format and shape, such as ``f32[4,8]``."""
    return f"{buffer.type}[{','.join(map(str, buffer.shape))}]"


def comment_lines(proc: Proc, described: list[str]) -> Iterator[str]:
    """Yield what stands above a kernel: expressions with the user's lines, buffers, the schedule."""
    for origin in proc.origins:
        text = " ".join(origin.text.split())
        yield f"{text}  ({origin.source})" if origin.source else text
    line = ""
    for item in described:
        if line and len(line) + len(item) + 2 > _LINE:
            yield line
            line = ""
        line = f"{line}, {item}" if line else item
    if line:
        yield line
    if proc.path:
        yield f"schedule: {proc.path}"


_SUMMARY = 60


def summary(proc: Proc) -> str:
    """Return what a kernel computes, shortened, with the user's line."""
    if not proc.origins:
        return proc.name
    origin = proc.origins[-1]
    text = " ".join(origin.text.split())
    return f"{text if len(text) <= _SUMMARY else text[: _SUMMARY - 4] + ' ...'}  ({origin.source})"


# -- the routine --------------------------------------------------------------------------------------------------


def _entry(module: Module, entry: str, kernel_names: list[str], plan: MemoryPlan) -> str:
    names = Names((entry, *kernel_names))
    lines: list[str] = []
    position = {buffer: place for place, buffer in enumerate(module.external)}
    used: dict[Buffer, None] = {}
    scalars: dict[Symbol, None] = {}
    for kernel in module.kernels:
        used.update(dict.fromkeys(used_buffers(kernel)))
        scalars.update(dict.fromkeys(used_scalars(kernel)))
    if any(buffer not in position for buffer in used):
        lines.append(f"char *const arena = frame[{len(module.external)}];")
    thread_bytes = bytes_of_a_thread(module.kernels)
    if thread_bytes:
        first = -(-plan.peak // ALIGNMENT) * ALIGNMENT
        lines.append(
            f"char *const own = (char *)frame[{len(module.external)}] + {first} + (int64_t)tid * {thread_bytes};"
        )
    for buffer in module.external:
        if buffer in used:
            lines.append(f"{buffer.type.c_type} *const {names.give(buffer, buffer.name)} = frame[{position[buffer]}];")
    for buffer in used:
        if buffer in position:
            continue
        if buffer not in plan.offsets:
            raise InternalError(f"buffer {buffer.name} of {module.name} is neither external nor planned")
        c_type = buffer.type.c_type
        given = names.give(buffer, buffer.name)
        lines.append(f"{c_type} *const {given} = ({c_type} *)(arena + {plan.offsets[buffer]});")
    for place, symbol in enumerate(module.scalars):
        if symbol in scalars:
            lines.append(f"const int64_t {names.give(symbol, symbol.hint)} = scalars[{place}];")
    waits = barriers_before(module, plan)
    for kernel, name, wait in zip(module.kernels, kernel_names, waits, strict=True):
        if wait:
            lines.append("st_barrier_wait(barrier, tid);")
        buffers = used_buffers(kernel)
        shared = cells_in_common(plan, kernel, buffers)
        arguments = [names.of(buffer) for buffer in buffers if shared[buffer] is buffer]
        arguments += [f"({item.type.c_type} *)(own + {offset})" for item, offset in scratch_of(kernel).items()]
        arguments += [names.of(symbol) for symbol in used_scalars(kernel)]
        if is_parallel(kernel):
            arguments += ("tid", "nt")
        if _has_barrier(kernel):
            arguments.append("barrier")
        call = f"{name}({', '.join(arguments)});"
        call = call if is_parallel(kernel) else f"if (tid == 0) {call}"
        # a function that stands for several kernels says at the call what it is here
        lines.append(f"{call}  // {summary(kernel)}" if kernel_names.count(name) > 1 else call)
    signature = f"void {entry}(void **frame, const int64_t *scalars, int tid, int nt, st_barrier *barrier)"
    return signature + " {\n" + "".join(f"    {line}\n" for line in lines) + "}\n"
