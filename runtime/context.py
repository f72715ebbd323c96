"""``Context``: device-resident tensors, compiled routines, and the calls that move data between host and device."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from stagedtensor.dims import Shape
from stagedtensor.errors import ContextError, StagedTensorError
from stagedtensor.initializers import Initializer, stream_key
from stagedtensor.node import HasNode, Node, Role, refuse_encoded
from stagedtensor.numerics import Numerics
from stagedtensor.precision import Prec, f32, f64
from stagedtensor.program import Comp, as_computation, shapes_and_precisions, solve_program
from stagedtensor.runtime import id_checks, linking
from stagedtensor.runtime.device import Array, Device, Tuned
from stagedtensor.runtime.devices import open_device
from stagedtensor.runtime.garbage import search_paused
from stagedtensor.runtime.reports import MemoryReport, Stats
from stagedtensor.runtime.routine import Routine
from stagedtensor.runtime.store import BACKED_BY_DATA, ZERO_AT_ALLOCATION, Store, describe
from stagedtensor.runtime.trial import contents
from stagedtensor.runtime.tune import allowed_seconds
from stagedtensor.settings import is_integer
from stagedtensor.source import user_source


def node_of(t: HasNode | Node) -> Node:
    """Return the node of a tensor (or the node itself)."""
    if isinstance(t, Node):
        return t
    node = getattr(t, "node", None)
    if not isinstance(node, Node):
        raise TypeError(f"expected a tensor, got {type(t).__name__} ({user_source().quoted()})")
    return node


class Context:
    """Device-resident tensors and compiled routines on one device.

    ``device``: "auto", "cpu", "reference" (a NumPy interpreter), "cuda", "cuda:1", "cuda-emulated". ``threads``: how
    many threads a routine may use (results do not depend on it). ``target``: the CPU target, default what the machine
    has.
    """

    def __init__(
        self,
        device: str = "auto",
        *,
        cache_dir: str | Path | None = None,
        threads: int | None = None,
        numerics: Numerics | None = None,
        target: str | None = None,
    ) -> None:
        if numerics is not None:
            _require_numerics(numerics)
        self._device: Device = open_device(device, cache_dir=cache_dir, threads=threads, target=target)
        self.numerics = numerics or Numerics()
        self._store = Store(self._device)
        self._routines: dict[Any, Routine] = {}
        self._consumed: set[Node] = set()
        self._stats = Stats()
        self._busy = threading.Lock()
        self._closed = False

    # -- facts ----------------------------------------------------------------------------------------------------
    @property
    def device_name(self) -> str:
        """The device in use."""
        return self._device.name

    @property
    def stats(self) -> Stats:
        """A snapshot of the counts so far."""
        counts = Stats(**vars(self._stats))
        counts.uploads, counts.uploaded_bytes = self._store.uploads, self._store.uploaded_bytes
        counts.downloads, counts.downloaded_bytes = self._store.downloads, self._store.downloaded_bytes
        return counts

    def memory_report(self) -> MemoryReport:
        """Report every buffer: node, shape, precision, bytes, live range, arena offset; and what planning saved."""
        stored = self._store.lines()
        routines = {routine.name: routine.executable for routine in self._routines.values()}
        return MemoryReport(
            stored,
            {name: executable.temporaries for name, executable in routines.items()},
            sum(line.nbytes for line in stored),
            {name: executable.arena_bytes for name, executable in routines.items()},
            {name: executable.thread_bytes for name, executable in routines.items()},
            {name: executable.saved_bytes for name, executable in routines.items()},
            {name: executable.recomputed_bytes for name, executable in routines.items()},
        )

    # -- compiling ------------------------------------------------------------------------------------------------
    def compile(
        self,
        comp: Comp | HasNode | Iterable[HasNode],
        *,
        name: str | None = None,
        numerics: Numerics | None = None,
        keep: HasNode | Iterable[HasNode] = (),
        tune: bool | float = False,
        debug: bool = False,
        fusion: bool = True,
    ) -> Routine:
        """Settle shapes and precisions, generate and compile; errors come here, never at the first run.

        ``comp`` is a computation, a tensor or several (their forward). ``keep`` names tensors that stay readable. The
        same computation compiled twice gives the cached routine. ``fusion=False`` gives every statement a kernel and
        every node a buffer: slow; a sum may be added in another order. ``tune`` tries a few other schedules of the same
        bits on copies of the values and takes the fastest, for at most about 30 seconds (or that many, as a number);
        cached. ``debug`` verifies the generated code and raises after a run whose gather ids or class labels were out
        of range. A failed compile settles nothing.
        """
        if numerics is not None:
            _require_numerics(numerics)
        if name is not None and (not isinstance(name, str) or not name):
            raise TypeError(f"compile: name is a non-empty string, not {name!r} ({user_source().quoted()})")
        seconds = None if debug else allowed_seconds(tune)
        with self._enter():
            computation, wanted = as_computation(comp)
            kept = frozenset((*wanted, *(node_of(t) for t in ([keep] if isinstance(keep, HasNode) else keep))))
            chosen = numerics if numerics is not None else self.numerics
            key = (computation.key(), kept, chosen.key(), debug, fusion, name, seconds)
            known = self._routines.get(key)
            if known is not None:
                self._stats.routine_hits += 1
                return known
            started = time.perf_counter()
            called = name or computation.name
            with search_paused():
                routine = self._build(computation, called, chosen, kept, debug=debug, fusion=fusion, seconds=seconds)
            routine.compile_seconds = time.perf_counter() - started
            self._routines[key] = routine
            return routine

    def _build(
        self,
        comp: Comp,
        name: str,
        numerics: Numerics,
        kept: frozenset[Node],
        *,
        debug: bool,
        fusion: bool,
        seconds: float | None,
    ) -> Routine:
        solved = solve_program(comp, name, keep=kept)
        looked_up = id_checks.lookups(solved.statements, solved.shape) if debug else ()
        kept |= {node for item in looked_up for node in item.nodes}
        facts = linking.inspect(solved, comp)
        borrowed = frozenset(node for node in facts.inputs if node in self._store.stored)
        linking.check_inputs(facts, borrowed, kept.difference(self._store.stored))
        program = linking.for_codegen(solved, kept | borrowed)
        if seconds is None or not isinstance(self._device, Tuned):
            executable = self._device.compile(program, numerics, fusion=fusion, debug=debug)
        else:
            try:
                executable = self._device.tune(
                    program,
                    numerics,
                    lambda node: contents(self._store, node, solved.shape(node), solved.prec(node)),
                    lambda built: linking.largest(facts, built.scalars),
                    fusion=fusion,
                    seconds=seconds,
                )
            except MemoryError as error:
                raise ContextError(
                    f"there is too little memory to try schedules of routine {name!r} on copies of what it reads and writes "
                    f"({error})\n  compile it without tune="
                ) from None
        if executable.from_cache:
            self._stats.cache_hits += 1
        else:
            self._stats.compiles += 1
        scalars = np.zeros(max(1, len(executable.scalars)), np.int64)
        with self._store.all_or_nothing():
            buffers = [
                self._store.ensure(node, solved.shape(node), solved.prec(node)).buffer for node in executable.external
            ]
            try:
                launch = executable.bind(buffers, scalars)
            except MemoryError as error:
                what, nbytes = f"the temporaries of routine {name!r}", executable.arena_bytes
                raise self._store.shortage(what, nbytes, error, executable.temporaries) from None
            solved.settle(name)
        self._store.arenas[name] = executable.arena_bytes
        routine = Routine(
            name,
            self,
            executable,
            numerics,
            tuple(node for node in facts.inputs if node not in facts.always_ready),
            tuple(node for node in facts.outputs if node in self._store.stored),
            facts.consumes,
            facts.produces,
            facts.indices,
            facts.extents,
            linking.precisions(solved),
            dict(comp.attributes),
        )
        routine.scalars, routine.launch = scalars, self._with_checks(launch, looked_up)
        routine.simple = not (executable.scalars or facts.consumes or facts.produces)
        return routine

    def _with_checks(self, launch: Callable[[], None], looked_up: Sequence[id_checks.Lookup]) -> Callable[[], None]:
        if not looked_up:
            return launch

        def run() -> None:
            launch()
            id_checks.check(looked_up, self._store.read, lambda node: self._store.stored[node].shape)

        return run

    # -- running --------------------------------------------------------------------------------------------------
    def run(self, routine: Routine, **bindings: int) -> None:
        """Run a routine; static indices and dynamic extents are bound by name.

        Raises ContextError for a routine of another context, uninitialised inputs (all named), an index out of range,
        or an optimizer update whose gradients were already consumed.
        """
        if self._busy.locked():
            self._refuse_entry()
        with self._busy:
            if self._closed or getattr(routine, "context", None) is not self:
                self._refuse(routine)
            if not routine.checked:
                self._check_inputs(routine)
            if not routine.simple or bindings:
                self._before(routine, bindings)
            routine.launch()
            self._stats.runs += 1
            self._stats.kernel_launches += len(routine.executable.kernels)

    def _refuse(self, routine: Routine) -> None:
        if self._closed:
            raise ContextError("this context is closed")
        if not isinstance(routine, Routine):
            raise TypeError(f"run takes a routine from ctx.compile, not {type(routine).__name__}")
        raise ContextError(f"routine {routine.name!r} belongs to another context; compile it with this one")

    def _check_inputs(self, routine: Routine) -> None:
        missing = [node for node in routine.inputs if not self._store.is_initialized(node)]
        if missing:
            lines = "\n".join(f"  {describe(node)}: {_how_to_fill(node)}" for node in missing)
            raise ContextError(f"routine {routine.name!r} reads uninitialised inputs:\n{lines}")
        self._store.initialized.update(routine.outputs)
        routine.checked = True

    def _before(self, routine: Routine, bindings: Mapping[str, int]) -> None:
        extents: Mapping[str, int] = {}
        if routine.executable.scalars or bindings:
            extents = routine.bind(bindings, self._store.extents)
            self._store.require_extents(routine.inputs, extents)
        twice = routine.consumes & self._consumed if not routine.consumes <= routine.produces else None
        if twice:
            labels = ", ".join(sorted(node.label for node in twice))
            raise ContextError(
                f"routine {routine.name!r} would unscale {labels} a second time: run a gradient routine first "
                "(an update consumes its gradients)"
            )
        self._consumed -= routine.produces
        self._consumed |= routine.consumes
        if routine.extents:
            self._store.note_extents(routine.outputs, extents)

    # -- data -----------------------------------------------------------------------------------------------------
    def set_values(self, t: HasNode, values: Any) -> None:
        """Copy host values into ``t``, converting once; compiles nothing and never aliases the caller's memory."""
        node = node_of(t)
        held = self._store.stored.get(node)
        # the common case, a scalar into a settled cell of its own kind, costs one NumPy store
        if held is not None and held.cell is not None and held.takes(values) and not self._closed:
            held.cell[()] = values
            self._store.uploads += 1
            self._store.uploaded_bytes += held.prec.bytes
            self._store.initialized.add(node)
            return
        with self._enter():
            if held is None:
                self._check_writable(node)
                self._set_pending(node, values)
            else:
                if not held.may_be_set:
                    self._check_writable(node)
                    held.may_be_set = True
                self._store.write(node, values)
            self._consumed.discard(node)

    def _check_writable(self, node: Node) -> None:
        refuse_encoded(node, "set_values: there is no assignment to")
        if node.role in (Role.CONSTANT, Role.LITERAL, Role.RANGE):
            raise ContextError(f"set_values: {describe(node)} is constant; use st.placeholder or st.host_scalar")
        if linking.is_twin(node):
            raise ContextError(f"set_values: {describe(node)} is a cast twin; set its master instead")
        if node.role in (Role.OP, Role.SAMPLER, Role.GRADIENT) and node not in self._store.stored:
            raise ContextError(
                f"set_values: {describe(node)} is computed and has no buffer of its own (virtual or local to a "
                f"routine); keep it with ctx.compile(..., keep=[...]) or set what it is computed from"
            )

    def _set_pending(self, node: Node, values: Any) -> None:
        shape, prec, certain = self._outlook(node)
        data = self._store.check_kind(node, values, prec if certain else f64 if prec.is_float else prec)
        if shape is not None:
            self._store.check_shape(node, data, shape)
            self._store.bind_extents(node, data, shape)
        self._store.pending[node] = np.array(data, order="C", copy=True)

    def _outlook(self, node: Node) -> tuple[Shape | None, Prec, bool]:
        """Shape and precision as everything built so far has them; settles nothing."""
        try:
            shapes, precisions = shapes_and_precisions([node])
            shape, prec = shapes.shape(node), precisions.prec(node)
        except StagedTensorError:
            fixed = node.specified.prec if node.specified else node.default_prec
            return None, fixed, node.specified is not None
        return shape, prec, node.specified is not None or node.settled is not None

    def get_values(self, t: HasNode) -> Array:
        """Wait and return a fresh array in the node's own dtype (ml_dtypes for bf16 and fp8)."""
        node = node_of(t)
        held = self._store.stored.get(node)
        # the common case of a step, a scalar that the host sees, costs one NumPy copy
        if held is not None and held.cell is not None and node in self._store.initialized and not self._busy.locked():
            self._store.downloads += 1
            self._store.downloaded_bytes += held.cell.nbytes
            return held.cell.copy()
        with self._enter():
            self._require_values(node)
            if node.encoded is not None:
                return node.encoded.numpy()
            if node in self._store.stored:
                return self._store.read(node)
            # no routine has fixed its shape and precision yet: what it would be now, and nothing is stored
            shapes, precisions = shapes_and_precisions([node])
            return self._store.preview(node, shapes.shape(node), precisions.prec(node))

    def view(self, t: HasNode, *, writable: bool = False) -> Any:
        """Return a zero-copy array over the node's buffer; invalid after ``close``."""
        node = node_of(t)
        with self._enter():
            self._require_values(node)
            held = self._store.stored.get(node)
            if held is None:
                if node.settled is None or node.settled_shape is None:
                    raise ContextError(
                        f"view: {describe(node)} has no buffer until a routine that uses it is compiled, for its shape and "
                        f"precision may still change\n  {user_source().quoted()}\n  compile first, or use ctx.get_values"
                    )
                shapes, precisions = shapes_and_precisions([node])
                held = self._store.ensure(node, shapes.shape(node), precisions.prec(node))
            array = self._device.view(held.buffer).reshape(held.shape.dims)
            if isinstance(array, np.ndarray):  # CuPy's arrays have no such flag
                array.flags.writeable = writable
            return array

    def _require_values(self, node: Node) -> None:
        """Say why a node has nothing to read, where it has not; bring a stored twin up to date."""
        master = linking.master_of(node)
        if master is not None and node in self._store.stored and self._store.is_initialized(master):
            # a stored twin always reads as the cast of its master's present value
            self._store.write(node, self._store.read(master))
            return
        if node in self._store.stored:
            if not self._store.is_initialized(node):
                raise ContextError(f"{describe(node)} has no values yet: {_how_to_fill(node)}")
            return
        if node in self._store.pending or node.role in BACKED_BY_DATA | ZERO_AT_ALLOCATION:
            return
        raise ContextError(f"{describe(node)} cannot be read: {_how_to_fill(node)}")

    def is_initialized(self, t: HasNode) -> bool:
        """Whether ``t`` has values to read."""
        return self._store.is_initialized(node_of(t))

    def init_params(
        self, loss: HasNode | Comp | Iterable[HasNode | Comp], seed: int = 0, *, only_missing: bool = True
    ) -> None:
        """Draw initial values for the parameters of ``loss`` (or of several tensors); settles nothing.

        Of a computation: for all parameters that its assignments mention, your optimizer's own state included. Streams
        are keyed by ``seed`` and the parameter's name. ``only_missing`` leaves parameters that have values.
        """
        if not is_integer(seed):
            raise TypeError(f"init_params: seed is an integer, not {seed!r}")
        with self._enter():
            params = linking.parameters(loss)
            linking.check_names(params)
            todo = [node for node in params if not (only_missing and self._store.is_initialized(node))]
            if not todo:
                return
            shapes, precisions = shapes_and_precisions(todo)
            drawn = {node: self._draw(node, shapes.shape(node), precisions.prec(node), int(seed)) for node in todo}
            for node, cells in drawn.items():
                if node in self._store.stored:
                    self._store.write(node, cells)
                else:
                    self._store.pending[node] = cells

    def _draw(self, node: Node, shape: Shape, prec: Prec, seed: int) -> Array:
        if node.data is not None:
            return np.array(node.data, copy=True).reshape(shape.dims)
        init = node.init
        assert isinstance(init, Initializer)
        wide = np.float64 if prec is f64 else np.float32
        if init.kind == "constant" or (init.fan and not shape.input and not linking.has_explicit_init(node)):
            value = init.first if init.kind == "constant" else 0.0
            return np.full(shape.dims, value, np.float64 if prec is f64 or not prec.is_float else wide)
        first, second = init.parameters(shape, node.label)
        spread = second if init.kind == "normal" else second - first
        try:
            cells = self._device.draw(init.kind, shape.size, prec, stream_key(seed, node.label), first, spread)
        except MemoryError as error:
            raise self._store.shortage(f"initial values of {describe(node)}", shape.size * f32.bytes, error) from None
        return cells.reshape(shape.dims)

    def copy_from(self, other: Context, tensors: Iterable[HasNode]) -> None:
        """Copy the values of ``tensors`` from another context."""
        for t in list(tensors):
            self.set_values(t, other.get_values(t))

    # -- life -----------------------------------------------------------------------------------------------------
    def sync(self) -> None:
        """Wait for everything enqueued."""
        with self._enter():
            self._device.sync()

    def close(self) -> None:
        """Free every buffer and end the threads; closing twice is allowed, closing under a running call is not."""
        if self._closed:
            return
        with self._enter():
            self._closed = True
            self._store.clear()
            self._device.close()

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _enter(self) -> threading.Lock:
        """Return the lock to enter with, or refuse.

        Asking first and then ``with lock`` (not a try-acquire): an interrupt cannot fall between taking the lock and
        the block that gives it back. Two threads that ask at the same moment go in one after the other.
        """
        if self._busy.locked():
            self._refuse_entry()
        if self._closed:
            raise ContextError("this context is closed")
        return self._busy

    def _refuse_entry(self) -> NoReturn:
        raise ContextError(
            "this context is in use by another call, of another thread or around this one; give each thread a context of "
            f"its own\n  {user_source().quoted()}"
        )

    def __repr__(self) -> str:
        return f"<context on {self.device_name}: {len(self._store.stored)} buffers, {len(self._routines)} routines>"


def _require_numerics(numerics: object) -> None:
    if not isinstance(numerics, Numerics):
        raise TypeError(f"numerics is st.Numerics(...), not {numerics!r} ({user_source().quoted()})")


def _how_to_fill(node: Node) -> str:
    if node.role is Role.PARAM:
        return "call ctx.init_params(loss), ctx.set_values or st.load"
    if node.role is Role.PLACEHOLDER:
        return "call ctx.set_values"
    return "run a routine that computes it, compiled with keep=[...] if it is not kept by itself"
