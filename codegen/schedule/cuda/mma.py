"""CUDA template for contractions on tensor cores: mma.sync, products and sums in f32.

In: a :class:`Product` whose operands are in the format of an instruction. Out: its loops. Copies of the next tiles run
while the present ones are multiplied: two or three stages of shared memory, one barrier per stage. ldmatrix reads eight
rows of 16 bytes at once. Each warp holds its part of the results in fragments, and the epilogue reads them in place.
"""

from __future__ import annotations

from dataclasses import dataclass

from stagedtensor.codegen.affine import add, floor_divide, modulo, multiply
from stagedtensor.codegen.loop_ir import (
    Alloc,
    Barrier,
    Buffer,
    Const,
    Expr,
    If,
    Let,
    Load,
    Stmt,
    Store,
    Symbol,
    Var,
    index,
)
from stagedtensor.codegen.schedule.cuda.formats import Instruction
from stagedtensor.codegen.schedule.cuda.launch import STATIC_SHARED, WARP, Launch, less, points_of
from stagedtensor.codegen.schedule.cuda.operands import (
    Multiplied,
    Product,
    Side,
    Tiles,
    initial,
    nest_of,
    result_stores,
    tiles,
)
from stagedtensor.codegen.schedule.cuda.panel import Panel, Resident, call
from stagedtensor.codegen.schedule.cuda.skipped import Watch, watch
from stagedtensor.codegen.schedule.nest import index_symbol, loop
from stagedtensor.precision import f32, i64, u32

_DEPTH_BYTES = 64
"""Bytes of depth in one stage: two steps of the instruction."""
_M, _N = 16, 8


@dataclass(frozen=True)
class Shape:
    """Rows and columns of a tile, and of the part that one warp holds."""

    rows: int
    columns: int
    warp_rows: int
    warp_columns: int

    @property
    def across(self) -> int:
        """Warps side by side."""
        return self.columns // self.warp_columns

    @property
    def threads(self) -> int:
        """Threads of all warps."""
        return WARP * self.across * (self.rows // self.warp_rows)


_SHAPES = (Shape(128, 128, 64, 32), Shape(64, 64, 32, 32), Shape(32, 32, 16, 16))
ENOUGH_TILES = 96
"""Tiles that keep a large device busy; with fewer, smaller ones finish sooner."""


def mma_shape(given: Product) -> Shape:
    """Return the largest tile that leaves every multiprocessor one and does not lie mostly outside the results."""
    rows, columns, _ = given.sizes
    fitting = [shape for shape in _SHAPES if 2 * rows > shape.rows and 2 * columns > shape.columns]
    batch = points_of(given.batch)
    for shape in fitting:
        if batch * -(-rows // shape.rows) * -(-columns // shape.columns) >= ENOUGH_TILES:
            return shape
    return _SHAPES[-1]


def mma(given: Product, instruction: Instruction) -> tuple[tuple[Stmt, ...], Launch, str]:
    """Return the statements of a product whose operands fit ``instruction``, their launch and a few words."""
    shape = mma_shape(given)
    thread = Symbol("thread", i64)
    across = tiles(given, shape.rows, shape.columns)
    parts = multiplied(given, instruction, shape, across, thread)
    nest, words = nest_of(parts, given, across, thread, shape.threads)
    return nest, across.launch(shape.threads, thread), words


def multiplied(
    given: Product,
    instruction: Instruction,
    shape: Shape,
    across: Tiles,
    thread: Symbol,
    resident: Resident | None = None,
    *,
    left_by_cell: bool = False,
) -> Multiplied:
    """Return the work of one tile of ``shape`` at ``across``.

    ``resident`` is the left operand where fragments of it are read from shared memory; with ``left_by_cell`` it is
    there too, but in no form for that.
    """
    stages = _stages(given, instruction, shape, across, resident, left_by_cell)
    watched = watch(given, instruction)
    down, beside = shape.warp_rows // _M, shape.warp_columns // _N
    states = Buffer(given.accumulator.symbol.hint, f32, (down, beside, 4), "register")
    lane, warp_row, warp_column = index_symbol("lane"), index_symbol("warp_row"), index_symbol("warp_column")
    warp = floor_divide(Var(thread), WARP)
    here: list[Stmt] = [
        Let(lane, modulo(Var(thread), WARP)),
        Let(warp_row, multiply(floor_divide(warp, shape.across), shape.warp_rows)),
        Let(warp_column, multiply(modulo(warp, shape.across), shape.warp_columns)),
    ]
    place = _Place(Var(lane), Var(warp_row), Var(warp_column))
    layers = -(-given.sizes[2] // stages.depth)

    def issue(layer: Expr) -> list[Stmt]:
        return stages.issue(layer, across, thread, shape.threads)

    ahead, layer = index_symbol("i_stage"), index_symbol("i_depth")
    first = stages.count - 1  # layers whose copies run before the first one is multiplied
    next_layer = add(Var(layer), first)
    commit, wait = call("st_copy_async_commit"), call(f"st_copy_async_wait_{stages.count - 2}")
    steps: list[Stmt] = [
        wait,
        Barrier(),
        *(_where(True, less(next_layer, layers), issue(next_layer)) if layers > first else ()),
        commit,
        _multiply(place, states, stages, Var(layer), watched),
    ]
    body: list[Stmt] = [
        Alloc(states),
        *([] if watched is None else [Alloc(watched.seen), watched.clear()]),
        _fill(given, across, place, states),
        loop(ahead, first, [*_where(layers < first, less(Var(ahead), layers), issue(Var(ahead))), commit], "unroll"),
        loop(layer, layers, steps),
        *_finished(given, across, place, states, watched, shape, thread),
        Barrier(),  # the next tile's copies go into the stages just read
    ]
    words = (
        f"contraction, tensor cores, {instruction.words} into f32, "
        f"tiles of {shape.rows} x {shape.columns} x {stages.depth} "
        f"in {stages.count} stages, {stages.words}"
    )
    if watched is not None:
        words += ", points outside an operand skipped"
    return Multiplied(stages.arrays, tuple(here), tuple(body), words)


@dataclass(frozen=True)
class _Stages:
    """Both operands in shared memory, each with its array: ``count`` stages that take a layer of depth in turn."""

    left: tuple[Panel | Resident, Buffer]
    right: tuple[Panel, Buffer]
    count: int

    @property
    def instruction(self) -> Instruction:
        """What multiplies them."""
        return self.right[0].instruction

    @property
    def depth(self) -> int:
        """Depth of one stage."""
        return self.right[0].depth

    @property
    def _copied(self) -> dict[Panel, Buffer]:
        return {panel: tile for panel, tile in (self.left, self.right) if isinstance(panel, Panel)}

    @property
    def arrays(self) -> tuple[Buffer, ...]:
        """The arrays that belong to the product alone."""
        return tuple(self._copied.values())

    @property
    def words(self) -> str:
        """How the operands get there."""
        vector = {panel.vector for panel in self._copied}
        if len(vector) > 1:
            return "16-byte copies of one operand"
        return "16-byte copies" if vector == {True} else "copies cell by cell"

    def issue(self, layer: Expr, across: Tiles, thread: Symbol, threads: int) -> list[Stmt]:
        """Start the copies of one layer of depth into its stage."""
        stage, start = modulo(layer, self.count), multiply(layer, self.depth)
        (left, left_tile), (right, right_tile) = self.left, self.right
        return [
            *left.copy(left_tile, stage, across.row, start, thread, threads),
            *right.copy(right_tile, stage, across.column, start, thread, threads),
        ]


def _stages(
    given: Product, instruction: Instruction, shape: Shape, across: Tiles, resident: Resident | None, left_by_cell: bool
) -> _Stages:
    """As many stages as fit into the shared memory that a kernel has without asking, three at the most."""
    depth = depth_of(instruction)
    guards = [given.guard if given.guarded == side else None for side in ("left", "right")]
    left_side = Side(given.left, given.rows, given.depth, across.batch, guards[0])
    right_side = Side(given.right, given.columns, given.depth, across.batch, guards[1])
    left = resident or Panel("left_tile", left_side, shape.rows, depth, instruction, by_cell=left_by_cell)
    right = Panel("right_tile", right_side, shape.columns, depth, instruction)
    count = 3 if 3 * (left.nbytes + right.nbytes) <= STATIC_SHARED else 2
    return _Stages((left, left.buffer(count)), (right, right.buffer(count)), count)


def depth_of(instruction: Instruction) -> int:
    """Return the depth of one stage."""
    return _DEPTH_BYTES // instruction.staged.bytes


def _finished(
    given: Product, across: Tiles, place: _Place, states: Buffer, watched: Watch | None, shape: Shape, thread: Symbol
) -> list[Stmt]:
    """The stores of a tile, from the fragments or, where these may be wrong, from sums computed anew."""
    results = _results(given, across, place, states)
    if watched is None:
        return [results]
    return watched.instead(across, (shape.rows, shape.columns), shape.threads, thread, results)


def _where(needed: bool, test: Expr, body: list[Stmt]) -> list[Stmt]:
    return [If(test, tuple(body))] if needed else body


@dataclass(frozen=True)
class _Place:
    """Where a thread stands: its lane, and the first row and column of its warp within the tile."""

    lane: Expr
    row: Expr
    column: Expr


def _multiply(
    place: _Place,
    states: Buffer,
    stages: _Stages,
    layer: Expr,
    watched: Watch | None,
) -> Stmt:
    """One layer of depth: fragments, then every pair of them through mma."""
    down, beside, _ = states.shape
    instruction, (left, left_tile), (right, right_tile) = stages.instruction, stages.left, stages.right
    step = index_symbol("i_step")
    first = multiply(Var(step), instruction.depth)
    left_fragment = Buffer("left_fragment", u32, (down, 4), "register")
    right_fragment = Buffer("right_fragment", u32, (beside, 2), "register")
    m, n, pair = index_symbol("i_down"), index_symbol("i_beside"), index_symbol("i_pair")
    row, column = add(place.row, multiply(Var(m), _M)), add(place.column, multiply(Var(pair), 2 * _N))
    # Registers of four matrices: of the left operand, two of rows and then the same deeper; of the right one, two of
    # depth and then the same further across.
    left_target, right_target = (
        Load(left_fragment, (Var(m), index(0))),
        Load(right_fragment, (multiply(Var(pair), 2), index(0))),
    )
    left_load = left.fragment(left_tile, layer, row, first, place.lane, left_target, along_first=True)
    right_load = right.fragment(right_tile, layer, column, first, place.lane, right_target, along_first=False)
    if watched is not None:
        left_load += watched.note("left", left_target)
        right_load += watched.note("right", right_target)
    again = index_symbol("i_down")
    product = call(
        instruction.function,
        Load(states, (Var(again), Var(n), index(0))),
        Load(left_fragment, (Var(again), index(0))),
        Load(right_fragment, (Var(n), index(0))),
    )
    body: list[Stmt] = [
        Alloc(left_fragment),
        Alloc(right_fragment),
        loop(m, down, left_load, "unroll"),
        loop(pair, beside // 2, right_load, "unroll"),
        loop(again, down, [loop(n, beside, [product], "unroll")], "unroll"),
    ]
    return loop(step, stages.depth // instruction.depth, body, "unroll")


def _cells(place: _Place, across: Tiles, m: Expr, n: Expr, register: Expr) -> tuple[Expr, Expr]:
    """Row and column of a register of an accumulator fragment: thread 4g + t has rows g, g + 8, columns 2t, 2t + 1."""
    row = add(multiply(m, _M), add(floor_divide(place.lane, 4), multiply(floor_divide(register, 2), 8)))
    column = add(multiply(n, _N), add(multiply(modulo(place.lane, 4), 2), modulo(register, 2)))
    return add(across.row, add(place.row, row)), add(across.column, add(place.column, column))


def _over_states(states: Buffer, body: list[Stmt], m: Symbol, n: Symbol, register: Symbol) -> Stmt:
    down, beside, registers = states.shape
    return loop(m, down, [loop(n, beside, [loop(register, registers, body, "unroll")], "unroll")], "unroll")


def _fill(given: Product, across: Tiles, place: _Place, states: Buffer) -> Stmt:
    m, n, register = index_symbol("i_down"), index_symbol("i_beside"), index_symbol("i_register")
    row, column = index_symbol("row"), index_symbol("column")
    lets, value = initial(given, across, Var(row), Var(column))
    store = Store(states, (Var(m), Var(n), Var(register)), value)
    if isinstance(value, Const):
        return _over_states(states, [store], m, n, register)
    here, there = _cells(place, across, Var(m), Var(n), Var(register))
    return _over_states(states, [Let(row, here), Let(column, there), *lets, store], m, n, register)


def _results(given: Product, across: Tiles, place: _Place, states: Buffer) -> Stmt:
    m, n, register = index_symbol("i_down"), index_symbol("i_beside"), index_symbol("i_register")
    row, column = index_symbol("row"), index_symbol("column")
    here, there = _cells(place, across, Var(m), Var(n), Var(register))
    stores = result_stores(given, across, Var(row), Var(column), Load(states, (Var(m), Var(n), Var(register))))
    return _over_states(states, [Let(row, here), Let(column, there), *stores], m, n, register)
