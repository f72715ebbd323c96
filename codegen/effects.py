"""How unscheduled kernels are taken apart and put together: one block each, with what it loads and stores.

In: blocks. Out: their loads, procs over the buffers they touch, kernel names, modules with other kernels. Passes before
scheduling work on kernels of exactly one block; ``block_of`` and ``kernel_of`` are the way in and out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from stagedtensor.codegen import loop_ir as ir
from stagedtensor.codegen.pieces import remembered, replace
from stagedtensor.codegen.rewrite import buffers_read, buffers_written, expressions, free_symbols
from stagedtensor.errors import InternalError


def block_of(kernel: ir.Proc) -> ir.Block:
    """Return the one block of an unscheduled kernel."""
    if len(kernel.body) != 1 or not isinstance(kernel.body[0], ir.Block):
        raise InternalError(f"kernel {kernel.name} is not a single block before scheduling")
    return kernel.body[0]


def loads_of(expr: ir.Expr) -> tuple[ir.Load, ...]:
    """Return every load of an expression, parents first, repeated ones too."""
    if isinstance(expr, ir.Var | ir.Const):
        return ()
    inner = _loads_inside(expr)
    return (expr, *inner) if isinstance(expr, ir.Load) else inner


@remembered
def _loads_inside(expr: ir.Expr) -> tuple[ir.Load, ...]:
    return tuple(part for part in ir.inside(expr) if isinstance(part, ir.Load))


def loads(block: ir.Block) -> Iterator[ir.Load]:
    """Yield every load of a block, those of its stores included."""
    for expr in expressions(block):
        yield from loads_of(expr)


MAX_DEPTH = 24
"""How deep an expression may nest before its parts get names: for readers of the text, and for recursive passes."""


def is_deep(expr: ir.Expr, limit: int = MAX_DEPTH) -> bool:
    """Whether an expression nests deeper than ``limit``."""
    level: list[ir.Expr] = [expr]
    for _ in range(limit):
        level = [part for item in level for part in ir.children(item)]
        if not level:
            return False
    return True


def domain(iterators: Iterable[ir.BlockIterator]) -> int:
    """Return the number of points, dynamic extents at their maximum."""
    count = 1
    for iterator in iterators:
        count *= iterator.bound
    return count


def kernel_of(block: ir.Block) -> ir.Proc:
    """Wrap a block: the buffers it reads, those it only writes, and the scalar parameters it needs."""
    body = (block,)
    buffers = tuple(dict.fromkeys((*buffers_read(block), *buffers_written(block))))
    return ir.Proc(block.name, buffers, body, free_symbols(body), block.origins, cost=block.cost)


def kernel_name(labels: Iterable[str]) -> str:
    """Return an identifier made of the labels of a kernel's targets; of more than three, the first two and the last."""
    parts = [re.sub(r"\W+", "_", label).strip("_") or "value" for label in dict.fromkeys(labels)]
    if len(parts) > 3:
        parts = [*parts[:2], "to", parts[-1]]
    name = "_".join(parts)
    return name if not name[0].isdigit() else f"k_{name}"


def named(module: ir.Module) -> ir.Module:
    """Name every kernel after the buffers it stores; repeated names are numbered in order of appearance."""
    kernels = []
    for kernel in module.kernels:
        name = kernel_name(store.buffer.name for store in block_of(kernel).stores)
        kernels.append(kernel if name == kernel.name else kernel_of(replace(block_of(kernel), name=name)))
    return with_kernels(module, distinct_names(kernels))


def distinct_names(kernels: Iterable[ir.Proc]) -> tuple[ir.Proc, ...]:
    """Number repeated kernel names in order of appearance."""
    taken: set[str] = set()
    counts: dict[str, int] = {}
    result = []
    for kernel in kernels:
        name, count = kernel.name, counts.get(kernel.name, 1)
        while name in taken:
            count += 1
            name = f"{kernel.name}_{count}"
        counts[kernel.name] = count
        taken.add(name)
        result.append(kernel if name == kernel.name else kernel_of(replace(block_of(kernel), name=name)))
    return tuple(result)


def with_kernels(module: ir.Module, kernels: Iterable[ir.Proc]) -> ir.Module:
    """Return the module with other kernels; temporaries and scalars that none of them uses are dropped."""
    kept = tuple(kernels)
    used = {buffer for kernel in kept for buffer in kernel.params}
    scalars = {symbol for kernel in kept for symbol in kernel.scalars}
    return replace(
        module,
        kernels=kept,
        temporaries=tuple(buffer for buffer in module.temporaries if buffer in used),
        scalars=tuple(symbol for symbol in module.scalars if symbol in scalars),
    )


def map_blocks(module: ir.Module, function: Callable[[ir.Block], ir.Block]) -> ir.Module:
    """Apply ``function`` to the block of every kernel."""
    return with_kernels(module, map(partial(_with_block, function=function), module.kernels))


def _with_block(kernel: ir.Proc, function: Callable[[ir.Block], ir.Block]) -> ir.Proc:
    before = block_of(kernel)
    after = function(before)
    return kernel if after is before else kernel_of(after)
