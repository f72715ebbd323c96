"""Which template a block gets, and why: a small cost model over shapes and strides.

In: one block and the target's constants. Out: a :class:`Plan`: the loop nests in launch order, each with a line for
reports. Nothing here measures; the same block on the same named target always gets the same plan.
"""

from __future__ import annotations

from dataclasses import replace

from stagedtensor.codegen.affine import constant
from stagedtensor.codegen.loop_ir import (
    Block,
    BlockIterator,
    Cost,
    Expr,
    Load,
    Stmt,
    children,
    walk,
    with_children,
)
from stagedtensor.codegen.rewrite import symbols_of
from stagedtensor.codegen.schedule.analysis import (
    Contraction,
    contraction,
    cost_of,
    depends,
    displace_each_other,
    points,
    reads_every_cell,
    stride,
    without_single_lets,
)
from stagedtensor.codegen.schedule.columns import TileShape, blocked_columns, columns
from stagedtensor.codegen.schedule.elementwise import elementwise
from stagedtensor.codegen.schedule.encoded import encoded_contraction, encoded_elementwise, encoded_in
from stagedtensor.codegen.schedule.machine import Machine
from stagedtensor.codegen.schedule.matrix_tile import matrix_nests, multiplies_bf16
from stagedtensor.codegen.schedule.nest import collapse, expressions, inline_lets, loads_in
from stagedtensor.codegen.schedule.nests import Nest, one_launch
from stagedtensor.codegen.schedule.pack import Packed, pack, panel_axes, relaid
from stagedtensor.codegen.schedule.roles import (
    MOST_REPEATS,
    ROWS_OF_A_TILE,
    Roles,
    is_plain,
    lanes_filled,
    repeats,
    roles_of,
    unit_iterator,
    unit_strides,
)
from stagedtensor.codegen.schedule.rows import rows, serial
from stagedtensor.codegen.schedule.scatter import scatter
from stagedtensor.codegen.schedule.split import combinable, split
from stagedtensor.codegen.schedule.transpose import fits, transposing
from stagedtensor.codegen.schedule.widened import WideCopies, narrow_load, rounds
from stagedtensor.precision import f32

_MOST_SCRATCH = 1 << 28
_ROWS_THAT_REPAY = 16
_USES_THAT_REPAY = 8
_FAR_ROWS = 512
_FIRST_CACHE = 1 << 15
_TERMS_OF_A_BLOCK = 64
_LEAST_TERMS, _MOST_TERMS = 64, 128
_WIDE_TILES = 0.95  # measured: rows of more than four vectors must waste less to be as fast


def plan_block(block: Block, machine: Machine, copies: WideCopies | None = None) -> tuple[Nest, ...]:
    """Return the nests that compute ``block``; ``copies`` are those that earlier kernels made, and get what it adds."""
    block = without_single_lets(block)
    cost = cost_of(block)
    parallel = cost.flops > machine.serial_flops or cost.nbytes > machine.serial_bytes
    if block.scatter:
        return (one_launch(*scatter(block, parallel=parallel), cost, parallel),)
    if not block.accumulators:
        decoding = (
            encoded_elementwise(block, parallel=parallel) if encoded_in(*expressions(block)) is not None else None
        )
        return (one_launch(*(decoding or elementwise(block, parallel=parallel)), cost, parallel),)
    if encoded_in(*expressions(block)) is not None:
        planned = encoded_contraction(block, machine.reduction_lanes(f32), parallel=parallel)
        return (one_launch(*(planned or serial(block, parallel=parallel)), cost, parallel),)
    found = contraction(collapse(block))
    if found is not None:
        why_not = ""
        if machine.matrix_unit is not None and multiplies_bf16(found):
            on_unit = matrix_nests(found, machine, cost, parallel=parallel)
            if not isinstance(on_unit, str):
                return on_unit
            why_not = f", not on the matrix unit: {on_unit}"
        tiled = _contraction(found, machine, cost, parallel, copies or WideCopies())
        if tiled is not None and why_not:
            tiled = (*tiled[:-1], replace(tiled[-1], path=tiled[-1].path + why_not))
        if tiled is not None:
            return tiled
    return _reduction(block, machine, cost, parallel)


# -- contractions -------------------------------------------------------------------------------------------------


def _contraction(
    found: Contraction, machine: Machine, cost: Cost, parallel: bool, copies: WideCopies
) -> tuple[Nest, ...] | None:
    block, prec = found.block, found.block.accumulators[0].symbol.type
    roles = roles_of(found, machine.lanes(prec))
    if roles is None or any(item.bound == 0 for item in block.iterators):
        return None
    vector, row = roles.vector, roles.row
    width, height = vector.bound, 1 if row is None else row.bound
    unit = unit_strides(roles.column_operand, vector)
    pack_columns = _pays_to_pack_columns(block, roles, machine)
    if not unit and not pack_columns:
        return None
    in_place = _terms_of_a_block_in_place(block, roles, machine)
    pack_columns = pack_columns and not in_place
    shape = tile_shape(machine, prec.bytes, height, width, padded=pack_columns)
    pack_rows = machine.panels and not in_place and _pays_to_pack_rows(block, roles, shape, width)
    work = _Copied(block, machine, copies)
    # What is copied into panels anyway is widened there.
    row_operand = work.widened(roles.row_operand, packed=pack_rows)
    column_operand = work.widened(roles.column_operand, packed=pack_columns)
    work.round_once()
    if pack_columns:
        if work.pack(column_operand, vector, shape.columns):
            shape = replace(shape, padded_columns=True)
        elif unit:
            shape = tile_shape(machine, prec.bytes, height, width, padded=False)
        else:
            return None
    if row is not None and pack_rows and work.pack(row_operand, row, shape.rows):
        shape = replace(shape, padded_rows=True)
    if row is not None and _pays_to_relay(work.block, row_operand, row, shape):
        work.relay(row_operand, row)
    block = work.block
    steps = in_place or _steps_of_a_block(block, machine)
    if row is not None and steps:
        blocked = blocked_columns(block, vector, row, shape, steps, parallel=parallel)
        if blocked is not None:
            body, path, sums = blocked
            return (*work.nests, one_launch(body, _note(path, work.panels), cost, parallel, scratch=(sums,)))
    across = points(block.reduce) * width * prec.bytes <= machine.cache_bytes
    body, path = columns(block, vector, row, shape, parallel=parallel, rows_outside=across)
    return (*work.nests, one_launch(body, _note(path, work.panels), cost, parallel))


class _Copied:
    """A contraction whose operands are copied: ``block`` reads what ``nests`` write, ``panels`` of them in tile order."""

    def __init__(self, block: Block, machine: Machine, copies: WideCopies) -> None:
        self.block = block
        self.nests: list[Nest] = []
        self.panels = 0
        self._machine, self._copies = machine, copies

    def widened(self, operand: Expr, *, packed: bool) -> Expr:
        """Return ``operand``, or its wide copy where that pays; one that is to be ``packed`` takes a copy that exists."""
        if not _pays_to_widen(self.block, operand) or (packed and not self._copies.has(operand)):
            return operand
        wide, nests = _widened(operand, self._copies, self._machine)
        self.block = _replace_operand(self.block, operand, wide)
        self.nests += nests
        return wide

    def round_once(self) -> None:
        """Take values that pass through a narrow format from copies that are rounded once."""
        self.block, nests = _rounded_once(self.block, self._copies, self._machine)
        self.nests += nests

    def pack(self, operand: Expr, tiled: BlockIterator, size: int) -> bool:
        """Copy ``operand`` into panels of ``size`` steps of ``tiled``, and tell whether that can be done."""
        packed = _packed(self.block, operand, tiled, size)
        if packed is None:
            return False
        self._read(packed, operand)
        return True

    def relay(self, operand: Expr, row: BlockIterator) -> None:
        """Copy ``operand`` with its rows side by side, if it is not too large."""
        laid = relaid(self.block, operand, row)
        if laid is not None and laid.buffer.nbytes <= _MOST_SCRATCH:
            self._read(laid, operand)

    def _read(self, packed: Packed, operand: Expr) -> None:
        self.nests.append(_pack_nest(packed, self._machine))
        self.block = _replace_operand(self.block, operand, packed.operand)
        self.panels += 1


def _pays_to_pack_columns(block: Block, roles: Roles, machine: Machine) -> bool:
    """Worth it where results are not adjacent along the operand, or are many, or are computed once in panels."""
    operand, width, height = roles.column_operand, roles.vector.bound, 1 if roles.row is None else roles.row.bound
    if height < ROWS_OF_A_TILE or (block.guard is not None and not reads_every_cell(operand, block)):
        return False
    if not unit_strides(operand, roles.vector):
        return True
    if not machine.panels or repeats(block, operand) > MOST_REPEATS:
        return False  # windows over an image: panels would hold every value many times
    lanes = machine.lanes(block.accumulators[0].symbol.type)
    if lanes_filled(width, lanes) < width / (-(-width // lanes) * lanes):
        return True
    if height >= 64 and width >= 128 and points(block.reduce) >= 64:
        return True
    computed = not is_plain(operand) and (rounds(operand) or not narrow_load(operand))
    return height >= _ROWS_THAT_REPAY and computed


def _note(path: str, packs: int) -> str:
    return f"contraction, {path}" + (f", {packs} packed operand{'s' if packs > 1 else ''}" if packs else "")


def _terms_of_a_block_in_place(block: Block, roles: Roles, machine: Machine) -> int:
    """Terms of a block where both operands lie across the terms (as in X^T dY): with few terms at a time neither needs
    a copy.

    0 where an operand lies otherwise, where sums are short, or too many to stay in the cache from block to block.
    """
    row, operands = roles.row, (roles.row_operand, roles.column_operand)
    if row is None or block.guard is not None or len(block.reduce) != 1:
        return 0
    (terms,) = block.reduce
    if constant(terms.extent) is None or terms.bound < 2 * _LEAST_TERMS or roles.vector.bound % machine.lanes(f32):
        return 0
    prec = block.accumulators[0].symbol.type
    if points(block.data) * prec.bytes > machine.cache_bytes or row.bound < ROWS_OF_A_TILE:
        return 0
    for operand, tiled in zip(operands, (row, roles.vector), strict=True):
        if not (is_plain(operand) or narrow_load(operand) is not None) or not unit_strides(operand, tiled):
            return 0
    far = [stride(load, terms.symbol) for load in loads_in(roles.row_operand)]
    if any(step is None or abs(step) * prec.bytes < _FAR_ROWS // 2 for step in far):
        return 0
    return max((steps for steps in range(_LEAST_TERMS, _MOST_TERMS + 1) if terms.bound % steps == 0), default=0)


def _steps_of_a_block(block: Block, machine: Machine) -> int:
    """Steps of the outermost reduce iterator whose operands stay in the cache; 0 where all of them do, or no step's do."""
    if block.guard is not None or len(block.reduce) < 2 or any(constant(item.extent) is None for item in block.reduce):
        return 0
    outer, terms = block.reduce[0], points(block.reduce[1:])
    loads = loads_in(*(item.update for item in block.accumulators))
    whole = sum(
        load.buffer.nbytes
        for load in loads
        if outer.symbol in {symbol for part in load.indices for symbol in symbols_of(part)}
    )
    if whole <= machine.cache_bytes or terms < _TERMS_OF_A_BLOCK or any(load.buffer.type.is_narrow for load in loads):
        return 0
    if points(block.data) * block.accumulators[0].symbol.type.bytes > machine.cache_bytes:
        return 0  # the sums themselves would come and go
    divisors = [steps for steps in range(1, outer.bound) if outer.bound % steps == 0]
    fitting = [steps for steps in divisors if whole * steps <= outer.bound * machine.cache_bytes // 2]
    return max(fitting, default=0)


def _pays_to_widen(block: Block, operand: Expr) -> bool:
    """Worth it where every value is used several times and the buffer has no more cells than that."""
    load = narrow_load(operand)
    if load is None or 4 * load.buffer.size > _MOST_SCRATCH:
        return False
    if points(block.iterators) < _USES_THAT_REPAY * load.buffer.size:
        return False
    read = points(tuple(item for item in block.iterators if depends(operand, item)))
    return load.buffer.size <= read


def _widened(operand: Expr, copies: WideCopies, machine: Machine) -> tuple[Load, list[Nest]]:
    wide, filling = copies.of(operand)
    if filling is None:
        return wide, []
    cost = cost_of(filling)
    body, _ = elementwise(filling, parallel=cost.nbytes > machine.serial_bytes)
    suffix = f"_{wide.buffer.name}"
    return wide, [
        one_launch(body, "widens an operand", cost, cost.nbytes > machine.serial_bytes, suffix, (wide.buffer,))
    ]


def _rounded_once(block: Block, copies: WideCopies, machine: Machine) -> tuple[Block, list[Nest]]:
    """Round small buffers that the stores take through a narrow format as whole buffers, not again for every result."""
    nests: list[Nest] = []
    stored = block.stores
    for expr in dict.fromkeys(part for store in block.stores for part in walk(store.value)):
        load = narrow_load(expr)
        if load is None or not rounds(expr) or points(block.data) < _ROWS_THAT_REPAY * load.buffer.size:
            continue
        wide, nest = _widened(expr, copies, machine)
        nests += nest
        stored = tuple(replace(store, value=_exchange(store.value, expr, wide)) for store in stored)
    return (block if not nests and stored is block.stores else replace(block, stores=stored)), nests


def _packed(block: Block, operand: Expr, tiled: BlockIterator, size: int) -> Packed | None:
    axes = panel_axes(block, operand, tiled)
    if axes is None or not loads_in(operand):
        return None
    result = pack(block, operand, tiled, size, axes)
    return None if result.buffer.nbytes > _MOST_SCRATCH else result


def _pack_nest(packed: Packed, machine: Machine) -> Nest:
    cost = cost_of(packed.block)
    parallel = cost.nbytes > machine.serial_bytes
    lanes, turned = machine.lanes(f32), packed.turned
    if turned is not None and fits(turned.target, turned.rows, turned.columns, lanes):
        body, how = transposing(turned, lanes, parallel=parallel), f", transposing squares of {lanes}"
    else:
        (body, _), how = elementwise(packed.block, parallel=parallel, keep_nest=True), ""
    suffix = f"_{packed.buffer.name}"
    return one_launch(body, f"packs an operand into panels{how}", cost, parallel, suffix, (packed.buffer,))


def _pays_to_pack_rows(block: Block, roles: Roles, shape: TileShape, width: int) -> bool:
    """Rows are read by broadcast, so only a far stride along k, or work per value repeated by panels, is worth a copy."""
    row = roles.row
    if row is None or block.guard is not None or width <= shape.columns:
        return False
    if row.bound < 2 * shape.rows or points(block.reduce) < 64:
        return False
    if not is_plain(roles.row_operand) and not narrow_load(roles.row_operand):
        return width >= 4 * shape.columns
    inner = block.reduce[-1]
    steps = [stride(load, inner.symbol) for load in loads_in(roles.row_operand)]
    return any(step is None or abs(step) * roles.row_operand.type.bytes >= 512 for step in steps) and row.bound >= 64


def _pays_to_relay(block: Block, operand: Expr, row: BlockIterator, shape: TileShape) -> bool:
    """Rows far apart that windows read again and again, too many for the first cache: worth a copy side by side."""
    if min(shape.rows, shape.columns) < _USES_THAT_REPAY or repeats(block, operand) <= MOST_REPEATS:
        return False
    steps = [stride(load, row.symbol) for load in loads_in(operand)]
    apart = [abs(step) * operand.type.bytes for step in steps if step is not None]
    if len(apart) < len(steps) or any(nbytes < _FAR_ROWS for nbytes in apart):
        return False
    too_long = shape.rows * points(block.reduce) * operand.type.bytes > _FIRST_CACHE
    return too_long or any(displace_each_other(shape.rows, nbytes) for nbytes in apart)


def _replace_operand(block: Block, operand: Expr, by: Load) -> Block:
    (item,) = block.accumulators
    return replace(block, accumulators=(replace(item, update=_exchange(item.update, operand, by)),))


def _exchange(expr: Expr, old: Expr, new: Expr) -> Expr:
    if expr == old:
        return new
    parts = children(expr)
    if not parts or isinstance(expr, Load):
        return expr
    return with_children(expr, tuple(_exchange(part, old, new) for part in parts))


def tile_shape(machine: Machine, cell_bytes: int, height: int, width: int, *, padded: bool) -> TileShape:
    """Return the register tile for ``height`` rows and ``width`` columns of accumulators of ``cell_bytes``.

    A tile of m rows and v vectors takes m*v + v registers and does m*v multiply-adds for m + v loads; 2.4 of them per
    load keep the arithmetic busy. Cells computed in vain count against a shape.
    """
    lanes = max(1, machine.vector_bytes // cell_bytes)
    best: tuple[float, TileShape] | None = None
    for vectors in (4, 5, 6, 3, 2, 1):
        if vectors > machine.tile_vectors:
            continue
        size = vectors * lanes
        if not padded and size > width:
            if size - width >= lanes:
                continue
            size = width
        elif vectors == 1 and 2 * width <= lanes:
            size = lanes // 2
        useful_columns = width / (-(-width // size) * vectors * lanes)
        room = (machine.registers - vectors - 1) // vectors
        for height_of_tile in range(1, min(room, 14 if vectors == 1 else machine.tile_rows, max(1, height)) + 1):
            useful_rows = height / (-(-height // height_of_tile) * height_of_tile)
            reuse = height_of_tile * vectors / (height_of_tile + vectors)
            score = useful_columns * useful_rows * min(1.0, reuse / 2.4) * (1.0 if vectors <= 4 else _WIDE_TILES)
            if best is None or score > best[0] + 1e-9:
                best = (score, TileShape(height_of_tile, size))
    assert best is not None
    return best[1]


# -- other reductions ---------------------------------------------------------------------------------------------


def _reduction(block: Block, machine: Machine, cost: Cost, parallel: bool) -> tuple[Nest, ...]:
    widest = max(block.accumulators, key=lambda item: item.symbol.type.bytes).symbol.type
    lanes = machine.reduction_lanes(widest)
    halves = split(block, machine, lanes) if parallel else None
    if halves is not None:
        partial = cost_of(halves.partial)
        body, path = _single(halves.partial, machine, lanes, True)
        if halves.rest is not None:
            body += _single(halves.rest, machine, lanes, False)[0]
        merge = cost_of(halves.merge)
        second = _single(halves.merge, machine, lanes, False)
        return (
            one_launch(body, f"{path}, {halves.parts} parts", partial, True, "_parts", halves.scratch),
            one_launch(second[0], f"merges {halves.parts} parts in order", merge, False),
        )
    body, path = _single(block, machine, lanes, parallel)
    return (one_launch(body, path, cost, parallel),)


def _single(block: Block, machine: Machine, lanes: int, parallel: bool) -> tuple[tuple[Stmt, ...], str]:
    """Lanes along memory, a tile of columns, or plain order."""
    if not block.reduce:
        return serial(block, parallel=parallel)
    updates = [inline_lets(block, item.update) for item in block.accumulators]
    vector = unit_iterator(block)
    columns_fit = vector is not None and constant(vector.extent) is not None and vector.bound > 1
    if columns_fit and vector is not None:
        columns_fit = all(unit_strides(update, vector) for update in updates) and any(
            depends(update, vector) for update in updates
        )
    merged = collapse(block)
    inner = merged.reduce[-1]
    rows_fit = combinable(block) and all(
        unit_strides(inline_lets(merged, item.update), inner) for item in merged.accumulators
    )
    enough = vector is not None and vector.bound >= machine.lanes(block.accumulators[0].symbol.type)
    if columns_fit and vector is not None and (enough or not rows_fit or inner.bound < lanes):
        prec = block.accumulators[0].symbol.type
        # whole vectors of each accumulator, four registers in all
        vectors = machine.lanes(prec) * max(1, 4 // max(1, len(block.accumulators)))
        width = min(vector.bound, vectors)
        return columns(block, vector, None, TileShape(1, max(1, width)), parallel=parallel)
    if rows_fit and inner.bound >= 4:
        return rows(block, _fitting_lanes(lanes, inner.bound), parallel=parallel)
    return serial(block, parallel=parallel)


def _fitting_lanes(lanes: int, bound: int) -> int:
    """Fewer lanes for rows shorter than all of them."""
    while lanes > 4 and lanes > bound:
        lanes //= 2
    return lanes
