"""Random programs: pointwise ops of mixed formats with broadcasting, casts, layout, placement, perhaps reductions.

Everything follows from the seed, so a failure is reproduced by its number. Values stay moderate, so that most cells of
a long chain are finite; NaN and infinities do occur.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import stagedtensor as st
from stagedtensor.op_table import OPS
from stagedtensor.precision import precision
from stagedtensor.tensor import apply_pointwise

from .running import Array, Program

BATCH, ROWS, COLUMNS = 3, 4, 10
SHAPES: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((BATCH,), (ROWS, COLUMNS)),
    ((BATCH,), (ROWS, COLUMNS)),
    ((), (ROWS, COLUMNS)),
    ((), (COLUMNS,)),
    ((), (ROWS, 1)),
    ((BATCH,), (1, COLUMNS)),
    ((), ()),
)
FLOATS = ("f32", "f32", "bf16", "f16", "f8e5m2", "f8e4m3")
INTEGERS = ("i32", "u8", "i8", "u16", "bool")
POINTWISE = tuple(
    name
    for name, op in OPS.items()
    if op.op_class not in ("random",) and name not in ("nonfinite", "pow", "exp", "exp2")
)


class Builder:
    """Grows one program from a seed."""

    def __init__(self, seed: int, *, reductions: bool, gradients: bool) -> None:
        self.rng = np.random.default_rng(seed)
        self.reductions, self.gradients = reductions, gradients
        self.leaves: list[tuple[st.Tensor, Array]] = []
        self.made: list[st.Tensor] = []

    def pick(self, *items: st.Tensor) -> st.Tensor:
        pool = items or (*[leaf for leaf, _ in self.leaves], *self.made, *self.made[-4:])
        return pool[int(self.rng.integers(len(pool)))]

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def leaf(self, name: str) -> None:
        batch, output = SHAPES[int(self.rng.integers(len(SHAPES)))] if self.leaves else SHAPES[0]
        names = FLOATS if self.gradients or not self.leaves or self.chance(0.7) else INTEGERS
        prec = names[int(self.rng.integers(len(names)))]
        wants = self.gradients and precision(prec).is_float and self.chance(0.7)
        tensor = st.placeholder(name, batch=batch, output=output, prec=prec, requires_grad=wants)
        shape = (*batch, *output)
        if precision(prec).is_float:
            values: Array = (self.rng.standard_normal(shape) * 1.5).astype(np.float32)
        else:
            values = self.rng.integers(0 if prec[0] in "ub" else -5, 2 if prec == "bool" else 6, shape)
        self.leaves.append((tensor, values))

    def step(self) -> None:
        moves: list[Callable[[], st.Tensor]] = [self.pointwise] * 8 + [self.cast] * 2 + [self.activation, self.layout]
        if self.reductions:
            moves += [self.reduction] * 2 + [self.contraction]
        result = moves[int(self.rng.integers(len(moves)))]()
        if self.chance(0.25):
            st.place(result, str(self.rng.choice(["virtual", "materialized"])))
        if result.node.specified is None and result.precision.is_float and self.chance(0.25):
            saturate = self.chance(0.3)
            st.specify(result, FLOATS[int(self.rng.integers(len(FLOATS)))], saturate=saturate)
        if result.grad is not None and self.chance(0.15):
            st.specify(result.grad, str(self.rng.choice(["bf16", "f32", "f16"])))
        self.made.append(result)

    def pointwise(self) -> st.Tensor:
        name = POINTWISE[int(self.rng.integers(len(POINTWISE)))]
        args: list[st.Tensor | float] = [self.pick() for _ in range(OPS[name].arity)]
        if len(args) > 1 and self.chance(0.2):
            args[-1] = float(self.rng.choice([2.0, 1.0, 0.0, 3.0]))
        return apply_pointwise(name, *args)

    def cast(self) -> st.Tensor:
        x = self.pick()
        target = str(self.rng.choice(FLOATS if x.grad is not None or self.chance(0.7) else INTEGERS))
        return st.cast(x, target, saturate=precision(target).is_float and self.chance(0.4))

    def activation(self) -> st.Tensor:
        functions = (st.gelu, st.silu, st.softplus, lambda x: st.leaky_relu(x, 0.1), lambda x: st.clamp(x, -1.0, 2.0))
        x = self.pick()
        return functions[int(self.rng.integers(len(functions)))](x if x.precision.is_float else st.cast(x, "f32"))

    def layout(self) -> st.Tensor:
        x = self.pick()
        shape = x.shape
        full = [axis.size for axis in shape.output] == [ROWS, COLUMNS]
        if full and self.chance(0.5):
            parts = st.narrow(x, 0, 6), st.narrow(x * 2.0, 6, COLUMNS)
            return st.concat(parts, axis=("output", 1))
        if full:
            return st.reshape(st.reshape(x, output=[COLUMNS * ROWS]) + 1, output=[ROWS, COLUMNS])
        return -x

    def reduction(self) -> st.Tensor:
        x = self.pick()
        functions = (st.sum, st.max, st.min, st.mean, lambda t, axis, keepdims: st.softmax(t, axis=axis))
        axes: list[str | tuple[str, int]] = [("output", at - len(x.shape.output)) for at in range(len(x.shape.output))]
        axes += ["batch"] if x.shape.batch else []
        if not axes:
            return -x
        axis = axes[int(self.rng.integers(len(axes)))]
        return functions[int(self.rng.integers(len(functions)))](x, axis=axis, keepdims=True)

    def contraction(self) -> st.Tensor:
        found = [t for t in (*[leaf for leaf, _ in self.leaves], *self.made) if _is_matrix(t)]
        if not found:
            return self.pointwise()
        left, right = self.pick(*found), self.pick(*found)
        product = st.einsum("...|ij; ...|kj => ...|ik", left, right)
        return st.einsum("...|ik; ...|kj => ...|ij", product, right)


def _is_matrix(t: st.Tensor) -> bool:
    shape = t.shape
    return [axis.size for axis in shape.output] == [ROWS, COLUMNS] and [axis.size for axis in shape.batch] == [BATCH]


def random_program(seed: int, *, steps: int = 20, reductions: bool = False, gradients: bool = False) -> Program:
    """Build the program of a seed: reads its last results, and the gradients of its leaves of full shape."""
    builder = Builder(seed, reductions=reductions, gradients=gradients)
    for at in range(5):
        builder.leaf(f"x{at}")
    for _ in range(steps):
        builder.step()
    reads = builder.made[-6:]
    if not gradients:
        return Program(builder.leaves, reads)
    ends = [t for t in reads if t.grad is not None]
    if not ends:
        return Program(builder.leaves, reads)
    total: st.Tensor | None = None
    for end in ends:
        part = st.sum(st.cast(end, "f32"))
        total = part if total is None else total + part
    assert total is not None
    comp = st.grad_update(total)
    written = set(comp.nodes())  # a leaf that nothing leads to has no gradient here
    wanted = [leaf.grad for leaf, _ in builder.leaves if leaf.grad is not None and leaf.grad.node in written]
    return Program(builder.leaves, [*ends, *(t for t in wanted if reductions or _is_matrix(t))], comp)
