"""Blocks built by hand, and one way to run a module: scheduled, printed, compiled, called through ctypes."""

from __future__ import annotations

import atexit
import ctypes
import functools
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stagedtensor.codegen import loop_ir as ir
from stagedtensor.codegen.emit.c import CSource, emit_module
from stagedtensor.codegen.interpret import run_module
from stagedtensor.codegen.passes.hoist import hoist
from stagedtensor.codegen.passes.jam import jam
from stagedtensor.codegen.schedule import schedule
from stagedtensor.codegen.schedule.keep_rows import keep_rows
from stagedtensor.codegen.verify import verify
from stagedtensor.numerics import Numerics
from stagedtensor.precision import Prec, f32, i64
from stagedtensor.runtime.compiler import find_compiler
from stagedtensor.runtime.kernel_cache import KernelCache
from stagedtensor.runtime.shared_library import load_library
from stagedtensor.runtime.target import Target, detect
from stagedtensor.runtime.thread_pool import POOL_HEADER, ThreadPool

Array = npt.NDArray[Any]
ZERO = ir.Const(0.0, f32)


def axis(name: str, extent: int, kind: ir.IteratorKind = "data") -> ir.BlockIterator:
    """An iterator of fixed extent."""
    return ir.BlockIterator(ir.Symbol(name, i64), ir.index(extent), extent, kind)


def at(*iterators: ir.BlockIterator) -> tuple[ir.Expr, ...]:
    """The indices that the iterators are."""
    return tuple(ir.Var(item.symbol) for item in iterators)


def load(buffer: ir.Buffer, *iterators: ir.BlockIterator, prec: Prec = f32) -> ir.Expr:
    """A cell at compute precision."""
    cell = ir.Load(buffer, at(*iterators))
    return cell if buffer.type is prec else ir.Cast(cell, prec)


def store(buffer: ir.Buffer, iterators: Sequence[ir.BlockIterator], value: ir.Expr) -> ir.Store:
    """A store with the rounding of the buffer's format."""
    if value.type is not buffer.type:
        value = ir.Cast(value, buffer.type, buffer.saturate, buffer.flush_subnormal)
    return ir.Store(buffer, at(*iterators), value)


def apply(op: str, *args: ir.Expr, prec: Prec = f32) -> ir.Expr:
    """A table op."""
    return ir.Apply(op, args, prec)


def module(*blocks: ir.Block, temporaries: Sequence[ir.Buffer] = (), scalars: Sequence[ir.Symbol] = ()) -> ir.Module:
    """One kernel per block; every buffer that is no temporary is external, in order of appearance."""
    from stagedtensor.codegen.rewrite import buffers_read, buffers_written

    kernels: list[ir.Proc] = []
    external: dict[ir.Buffer, None] = {}
    for block in blocks:
        params = tuple(dict.fromkeys((*buffers_read(block), *buffers_written(block))))
        kernels.append(ir.Proc(block.name, params, (block,), scalars=tuple(scalars)))
        external.update(dict.fromkeys(item for item in params if item not in temporaries))
    return ir.Module("routine", tuple(kernels), tuple(external), tuple(temporaries), tuple(scalars))


@functools.lru_cache(maxsize=1)
def cache() -> KernelCache:
    """A kernel cache for this process."""
    folder = tempfile.mkdtemp(prefix="stagedtensor-test-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return KernelCache(Path(folder))


@functools.lru_cache(maxsize=8)
def pool(threads: int) -> ThreadPool:
    """A pool of ``threads`` threads."""
    return ThreadPool(threads, cache=cache())


def compiled(whole: ir.Module, target: Target | None = None) -> tuple[CSource, ctypes.CDLL]:
    """Schedule, verify, print and compile a module."""
    target = target or detect()
    scheduled = keep_rows(jam(hoist(schedule(whole, target, Numerics()))))
    verify(scheduled)
    source = emit_module(scheduled, target, header=POOL_HEADER)
    library = load_library(
        source.text,
        compiler=find_compiler(),
        target=target,
        cache=cache(),
        extra_flags=("-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter"),
    )
    return source, library


def run_c(
    whole: ir.Module,
    arrays: Mapping[ir.Buffer, Array],
    scalars: Mapping[ir.Symbol, int] | None = None,
    *,
    threads: int = 1,
    target: Target | None = None,
) -> dict[ir.Buffer, Array]:
    """Run the compiled module on copies of ``arrays`` (logical shapes); return the copies."""
    source, library = compiled(whole, target)
    copies = {buffer: np.array(arrays[buffer], copy=True, order="C") for buffer in source.buffers}
    # NaN in every float format.
    arena = np.full(source.arena_bytes + 64 + threads * source.thread_bytes + 64, 0xFF, np.uint8)
    start = -arena.ctypes.data % 64
    addresses = [copies[buffer].ctypes.data for buffer in source.buffers] + [arena[start:].ctypes.data]
    frame = (ctypes.c_void_p * len(addresses))(*addresses)
    values = (ctypes.c_int64 * max(1, len(source.scalars)))(*((scalars or {})[symbol] for symbol in source.scalars))
    entry = ctypes.cast(getattr(library, source.entry), ctypes.c_void_p).value
    assert entry is not None
    pool(threads).run(entry, ctypes.addressof(frame), ctypes.addressof(values))
    return copies


def run_reference(
    whole: ir.Module, arrays: Mapping[ir.Buffer, Array], scalars: Mapping[ir.Symbol, int] | None = None
) -> dict[ir.Buffer, Array]:
    """Run the module in the interpreter on copies of ``arrays``; return the copies."""
    copies = {buffer: np.array(arrays[buffer], copy=True, order="C") for buffer in whole.external}
    run_module(whole, copies, scalars)
    return copies


def random_array(buffer: ir.Buffer, seed: int = 0, *, low: float = -2.0, high: float = 2.0) -> Array:
    """Values of the buffer's format: floats in a range, small integers."""
    generator = np.random.default_rng(seed)
    if buffer.type.is_float:
        return generator.uniform(low, high, buffer.shape).astype(buffer.type.numpy_dtype)
    if buffer.type.name == "bool":
        return generator.integers(0, 2, buffer.shape).astype(np.bool_)
    least = -9 if buffer.type.is_signed else 0
    return generator.integers(least, 10, buffer.shape).astype(buffer.type.numpy_dtype)


def same_bits(lhs: Array, rhs: Array) -> bool:
    """Tell whether two arrays agree in every bit; NaN codes included."""
    return lhs.dtype == rhs.dtype and lhs.shape == rhs.shape and lhs.tobytes() == rhs.tobytes()


def contraction(
    lhs: ir.Buffer,
    rhs: ir.Buffer,
    out: ir.Buffer,
    sizes: tuple[int, int, int],
    form: str,
    epilogue: Any = None,
) -> ir.Block:
    """``out[m,n] = sum_k lhs * rhs`` with f32 (or the format's own) accumulators; form NN, NT or TN."""
    m, n, k = axis("m", sizes[0]), axis("n", sizes[1]), axis("k", sizes[2], "reduce")
    prec = f32 if lhs.type.is_narrow else lhs.type
    acc = ir.Symbol("acc", prec)
    a = load(lhs, k, m, prec=prec) if form == "TN" else load(lhs, m, k, prec=prec)
    b = load(rhs, n, k, prec=prec) if form == "NT" else load(rhs, k, n, prec=prec)
    zero = ir.Const(0.0 if prec.is_float else 0, prec)
    update = (
        ir.Fma(a, b, ir.Var(acc))
        if prec is f32
        else ir.Apply("add", (ir.Var(acc), ir.Apply("mul", (a, b), prec)), prec)
    )
    value: ir.Expr = ir.Var(acc)
    if epilogue is not None:
        value = epilogue(value, m, n)
    return ir.Block(
        out.name,
        (m, n, k),
        (store(out, (m, n), value),),
        (ir.Accumulator(acc, zero, update, "add", zero),),
        origins=(ir.Origin(f"{out.name} = {lhs.name} @ {rhs.name}", "model.py:1"),),
    )
