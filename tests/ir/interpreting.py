"""Small procedures for the tests of the reference interpreter, and how they are run."""

from __future__ import annotations

from typing import Any

import numpy as np

from stagedtensor.codegen.interpret import run_proc
from stagedtensor.codegen.loop_ir import (
    Accumulator,
    Apply,
    Block,
    BlockIterator,
    Buffer,
    Cast,
    Const,
    Expr,
    Fma,
    IteratorKind,
    Load,
    Proc,
    Store,
    Symbol,
    Var,
    index,
)
from stagedtensor.codegen.verify import verify
from stagedtensor.precision import Prec, f32, i64

Array = np.ndarray[Any, np.dtype[Any]]
ZERO = Const(0.0, f32)


def iterator(hint: str, extent: int, kind: IteratorKind = "data") -> BlockIterator:
    return BlockIterator(Symbol(hint, i64), index(extent), extent, kind)


def at(*items: BlockIterator) -> tuple[Expr, ...]:
    return tuple(Var(item.symbol) for item in items)


def op(name: str, *args: Expr) -> Apply:
    return Apply(name, args, args[-1].type)


def run(proc: Proc, *arrays: Array, scalars: tuple[int, ...] = ()) -> None:
    verify(proc)
    run_proc(proc, dict(zip(proc.params, arrays, strict=True)), dict(zip(proc.scalars, scalars, strict=True)))


def random(shape: tuple[int, ...], seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def matmul(m: int, n: int, k: int, type_: Prec = f32) -> Proc:
    a, b, c = Buffer("a", type_, (m, k)), Buffer("b", type_, (k, n)), Buffer("c", type_, (m, n))
    i, j, r, acc = iterator("i", m), iterator("j", n), iterator("k", k, "reduce"), Symbol("acc", f32)

    def wide(expr: Expr) -> Expr:
        return expr if type_ is f32 else Cast(expr, f32)

    update = Fma(wide(Load(a, at(i, r))), wide(Load(b, at(r, j))), Var(acc))
    value: Expr = Var(acc) if type_ is f32 else Cast(Var(acc), type_)
    state = Accumulator(acc, ZERO, update, "add", ZERO)
    return Proc("matmul", (a, b, c), (Block("c", (i, j, r), (Store(c, at(i, j), value),), (state,)),))
