"""CUDA schedules: blocks -> kernels with their launch dimensions.

In: a module of kernels whose bodies are blocks. Out: a module of kernels, each one launch; ``attributes["launch"]`` of
a kernel holds its :class:`Launch`. A schedule may change speed and the order of sums, never an accumulator's type nor a
rounding. Prints nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from stagedtensor.codegen.loop_ir import Alloc, Block, Buffer, Cost, Module, Proc, Stmt
from stagedtensor.codegen.passes.place import Decision, Mode
from stagedtensor.codegen.rewrite import buffers_read, buffers_written, walk_stmts
from stagedtensor.codegen.schedule.analysis import cost_of, prune, without_single_lets
from stagedtensor.codegen.schedule.cuda.chains import Chains, chains
from stagedtensor.codegen.schedule.cuda.choose import by_rows, plan_block, several_parts, whole
from stagedtensor.codegen.schedule.cuda.epilogues import Epilogues
from stagedtensor.codegen.schedule.cuda.launch import SHARED_BYTES, WARP, CudaNest, Launch
from stagedtensor.codegen.schedule.cuda.row_group import RowGroup
from stagedtensor.codegen.schedule.cuda.row_tiles import RowTiling
from stagedtensor.codegen.schedule.cuda.side_by_side import parts_of, proc_launch as launch_of, side_by_side
from stagedtensor.codegen.schedule.cuda.together import groups, together
from stagedtensor.errors import InternalError
from stagedtensor.numerics import Numerics

__all__ = ["SHARED_BYTES", "WARP", "Launch", "launch_of", "parts_of", "schedule_cuda", "side_by_side"]


def schedule_cuda(
    module: Module, numerics: Numerics | None = None, *, fusion: bool = True, shared_bytes: int = SHARED_BYTES
) -> Module:
    """Return ``module`` with every block turned into one or several kernels, and with ``fusion`` rows kept together.

    ``numerics`` says which liberties the kernels have, ``shared_bytes`` how much shared memory a block of threads may
    ask for.
    """
    chosen = numerics or Numerics()
    work = [(kernel, block) for kernel in module.kernels for block in _blocks(kernel)]
    plain = [without_single_lets(block) for _, block in work]
    through = RowTiling(plain, module.temporaries, chosen, shared_bytes) if fusion else RowTiling((), (), chosen, 0)
    kernels: list[Proc] = []
    epilogues = Epilogues(plain, chosen, through.members)
    taken = chains(plain, several_parts, epilogues.ask) if fusion else Chains()
    scratch: list[Buffer] = list(taken.scratch)
    for part in _parts(plain, through) if fusion else [[place] for place in range(len(work))]:
        if isinstance(part, RowGroup):
            tiles = through.tiles(part)
            kernels.append(_whole([work[place] for place in part.places], tiles.body, tiles.launch, tiles.path))
            continue
        if len(part) > 1:
            members = [plain[place] for place in part]
            kernels.append(_whole([work[place] for place in part], *together(members)))
            continue
        kernel, block = work[part[0]]
        base = kernel.name if len(kernel.body) == 1 else block.name
        if part[0] in taken.blocks:
            kernels += [_proc(kernel, block, item.name, whole(item)) for item in taken.blocks[part[0]]]
            continue
        for nest in plan_block(block, chosen, epilogues.notes.get(part[0])):
            kernels.append(_proc(kernel, block, base, replace(nest, path=through.said(part[0], nest.path))))
            scratch += nest.scratch
    stored = tuple(buffer for buffer in module.temporaries if buffer not in through.slabs)
    spared = Decision(Mode.LOCAL, "a tile of its rows at a time, in shared memory")
    placements = {**module.placements, **{item.node: spared for item in through.slabs if item.node is not None}}
    return replace(module, kernels=tuple(kernels), temporaries=(*stored, *scratch), placements=placements)


def _parts(blocks: Sequence[Block], through: RowTiling) -> Iterator[RowGroup | list[int]]:
    """Blocks that share a launch, in order: tiles of rows, single rows, blocks alone; the last two by their places."""
    run: list[int] = []
    for item in _ordered(range(len(blocks)), through, set()):
        if isinstance(item, RowGroup):
            yield from _by_rows(blocks, run)
            yield item
            run = []
        else:
            run.append(item)
    yield from _by_rows(blocks, run)


def _ordered(places: Iterable[int], through: RowTiling, done: set[int]) -> Iterator[RowGroup | int]:
    """Groups, and the places of all other blocks; those that a group follows stand before it."""
    for place in places:
        if place in done:
            continue
        group = through.groups.get(place)
        if group is not None:
            done.update(group.own)
            yield from _ordered(group.before, through, done)
            yield group
        elif place not in through.members:
            done.add(place)
            yield place


def _by_rows(blocks: Sequence[Block], run: Sequence[int]) -> Iterator[list[int]]:
    for group in groups([blocks[place] for place in run], by_rows):
        yield [run[at] for at in group]


def _blocks(kernel: Proc) -> Iterator[Block]:
    for stmt in kernel.body:
        if not isinstance(stmt, Block):
            raise InternalError(f"kernel {kernel.name} holds {type(stmt).__name__}, which has no CUDA schedule")
        yield stmt


def _whole(work: Sequence[tuple[Proc, Block]], body: tuple[Stmt, ...], launch: Launch, path: str) -> Proc:
    """Return the kernel of several blocks; it is called like the last one, which the others are there for."""
    costs = [cost_of(without_single_lets(block)) for _, block in work]
    nest = CudaNest("", body, launch, path, Cost(sum(cost.flops for cost in costs), sum(cost.nbytes for cost in costs)))
    kernel, block = work[-1]
    origins = tuple(dict.fromkeys(origin for proc, item in work for origin in item.origins or proc.origins))
    base = kernel.name if len(kernel.body) == 1 else block.name
    return replace(_proc(kernel, block, base, nest), origins=origins)


def _proc(kernel: Proc, block: Block, base: str, nest: CudaNest) -> Proc:
    body = prune(nest.body)
    own = {stmt.buffer for stmt in walk_stmts(body) if isinstance(stmt, Alloc)}
    params = dict.fromkeys((*buffers_read(body), *buffers_written(body)))
    return replace(
        kernel,
        name=f"{base}{nest.suffix}",
        params=tuple(buffer for buffer in params if buffer not in own),
        body=body,
        path=nest.path,
        cost=nest.cost,
        origins=block.origins or kernel.origins,
        attributes={**kernel.attributes, "launch": nest.launch},
    )
