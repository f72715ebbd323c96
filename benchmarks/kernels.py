"""Kernels by themselves: contraction, an elementwise chain, softmax rows, each in all arms.

Operands and results are in the precision that is measured, row-major, and rounded from the same f32 draws. A result
counts if it is near the one in f64. The share of peak is of the machine's measured operations per second for
contractions, of its copy speed for the others.
"""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

import stagedtensor as st
from stagedtensor.benchmarks.arm import OURS, Arm
from stagedtensor.benchmarks.ceilings import Ceilings
from stagedtensor.benchmarks.results import Row
from stagedtensor.benchmarks.timing import Effort, take_turns
from stagedtensor.benchmarks.workloads import CELL_BYTES, Array

NUMPY = {"f32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16)}
GATES = {"f32": 2.0**-16, "bf16": 2.0**-7, "f16": 2.0**-10}
"""Largest distance from f64, relative to the largest cell: two roundings of the result, and room for sums in f32."""
SCALE, SHIFT = 1.5, 0.25


@dataclass(frozen=True)
class Kernel:
    """One kernel: ``kind`` is gemm, elementwise or rows; ``form`` says which operand of a gemm is transposed."""

    kind: str
    shape: tuple[int, ...]
    form: str = "nn"

    @property
    def name(self) -> str:
        """The name that rows and filters use."""
        if self.kind != "gemm":
            return self.kind
        return f"gemm-{self.shape[0]}" + ("" if self.form == "nn" else f"-{self.form}")

    @property
    def text(self) -> str:
        """What it computes."""
        size = "x".join(map(str, self.shape))
        match self.kind:
            case "gemm":
                return f"product of {size} matrices, {self.form.upper()}"
            case "elementwise":
                return f"gelu(x * w + b), tanh form, of {size} cells"
            case _:
                return f"softmax of {size} rows"

    def operands(self) -> list[Array]:
        """Draw the operands in f32."""
        rng = np.random.default_rng(0)
        return [rng.standard_normal(self.shape, np.float32) for _ in range(2 if self.kind == "gemm" else 1)]

    def flops(self) -> float:
        """Return the operations of a gemm; 0 for what memory bounds."""
        return 2.0 * math.prod(self.shape) * self.shape[0] if self.kind == "gemm" else 0.0

    def nbytes(self, precision: str) -> float:
        """Return the bytes that are read and written once."""
        return (3.0 if self.kind == "gemm" else 2.0) * math.prod(self.shape) * CELL_BYTES[precision]

    def expected(self, operands: Sequence[Array]) -> tuple[Any, Array]:
        """Return which rows or cells are looked at, and their values in f64."""
        wide = [operand.astype(np.float64) for operand in operands] if self.kind != "elementwise" else []
        match self.kind:
            case "gemm":
                at: Any = slice(None, None, max(1, self.shape[0] // 16))
                left = (wide[0].T if self.form == "tn" else wide[0])[at]
                return at, left @ (wide[1].T if self.form == "nt" else wide[1])
            case "elementwise":
                at = slice(None, None, 997)
                u = operands[0][at].astype(np.float64) * SCALE + SHIFT
                return at, 0.5 * u * (1 + np.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))
            case _:
                at = slice(None, None, max(1, self.shape[0] // 64))
                powers = np.exp(wide[0][at] - wide[0][at].max(-1, keepdims=True))
                return at, powers / powers.sum(-1, keepdims=True)


KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        *(Kernel("gemm", (size, size)) for size in (256, 512, 1024, 2048)),
        Kernel("gemm", (1024, 1024), "nt"),
        Kernel("gemm", (1024, 1024), "tn"),
        Kernel("elementwise", (1 << 24,)),
        Kernel("rows", (16384, 1024)),
    )
}


def rounded(operands: Sequence[Array], precision: str) -> list[Array]:
    """Return the operands in the precision."""
    return [operand.astype(NUMPY[precision]) for operand in operands]


def our_arm(kernel: Kernel, precision: str, operands: Sequence[Array], threads: int) -> Arm:
    """Compile the kernel as a routine of its own."""
    ctx = st.Context("cpu", threads=threads)
    with st.Session():
        batch = list(kernel.shape[:-1]) if kernel.kind == "rows" else []
        output = list(kernel.shape[len(batch) :])
        inputs = [
            st.placeholder(name, batch=batch, output=output, prec=precision)
            for name, _ in zip("ab", operands, strict=False)
        ]
        match kernel.kind:
            case "gemm":
                spec = {"nn": "i k; k j => i j", "nt": "i k; j k => i j", "tn": "k i; k j => i j"}[kernel.form]
                y = st.einsum(spec, *inputs)
            case "elementwise":
                y = st.gelu(inputs[0] * SCALE + SHIFT, approximate="tanh")
            case _:
                y = st.softmax(inputs[0])
        st.specify(y, precision)
        began = time.perf_counter()
        routine = ctx.compile(y, name=kernel.name.replace("-", "_"))
        compile_s = time.perf_counter() - began
        for t, cells in zip(inputs, operands, strict=True):
            ctx.set_values(t, cells)
    run = ctx.run
    return Arm(
        OURS, lambda at: run(routine), lambda handle: None, lambda handle: ctx.get_values(y), ctx.close, compile_s
    )


def torch_arm(kernel: Kernel, precision: str, operands: Sequence[Array], threads: int, *, compiled: bool) -> Arm:
    """Return the kernel in torch, eager or compiled."""
    import torch

    torch.set_num_threads(threads)
    functions: Any = torch.nn.functional
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[precision]
    given = [torch.tensor(operand.astype(np.float32)).to(dtype) for operand in operands]
    if kernel.form == "tn":
        given[0] = given[0].T
    if kernel.form == "nt":
        given[1] = given[1].T
    functions_by_kind: dict[str, Callable[..., Any]] = {
        "gemm": lambda a, b: torch.matmul(a, b),
        "elementwise": lambda x: functions.gelu(x * SCALE + SHIFT, approximate="tanh"),
        "rows": lambda x: torch.softmax(x, -1),
    }
    run: Callable[..., Any] = functions_by_kind[kernel.kind]
    compile_s = None
    if compiled:
        run = torch.compile(run)
        began = time.perf_counter()
        with torch.no_grad():
            run(*given)
        compile_s = time.perf_counter() - began

    def step(at: int) -> Any:
        with torch.no_grad():
            return run(*given)

    def read(handle: Any) -> Array:
        cells: Array = handle.float().numpy()
        return cells

    return Arm("torch.compile" if compiled else "torch", step, lambda handle: None, read, compile_s=compile_s)


def jax_arm(kernel: Kernel, precision: str, operands: Sequence[Array]) -> Arm:
    """Return the kernel jitted by JAX."""
    import jax
    import jax.numpy as jnp

    given = [jnp.array(operand) for operand in operands]
    specs = {"nn": "ik,kj->ij", "nt": "ik,jk->ij", "tn": "ki,kj->ij"}
    functions_by_kind: dict[str, Callable[..., Any]] = {
        "gemm": lambda a, b: jnp.einsum(specs[kernel.form], a, b),
        "elementwise": lambda x: jax.nn.gelu(x * SCALE + SHIFT, approximate=True),
        "rows": lambda x: jax.nn.softmax(x, -1),
    }
    run = jax.jit(functions_by_kind[kernel.kind])
    began = time.perf_counter()
    run(*given).block_until_ready()
    compile_s = time.perf_counter() - began
    return Arm(
        "jax",
        lambda at: run(*given),
        lambda handle: handle.block_until_ready(),
        lambda handle: np.asarray(handle),
        compile_s=compile_s,
    )


def build(arm: str, kernel: Kernel, precision: str, operands: Sequence[Array], threads: int) -> Arm:
    """Build one arm."""
    match arm:
        case "ours":
            return our_arm(kernel, precision, operands, threads)
        case "torch" | "torch.compile":
            return torch_arm(kernel, precision, operands, threads, compiled=arm == "torch.compile")
        case "jax":
            return jax_arm(kernel, precision, operands)
    raise ValueError(f"no arm is called {arm!r}")


def leg(kernel: Kernel, precision: str, arms: Sequence[str], effort: Effort, peaks: Ceilings) -> list[Row]:
    """Build, check and time the arms of one kernel; rows carry the share of the machine's peak."""
    operands = rounded(kernel.operands(), precision)
    at, exact = kernel.expected(operands)
    rows, ready = [], []
    for name in arms:
        row = Row(kernel.name, precision, peaks.threads, name)
        rows.append(row)
        try:
            arm = build(name, kernel, precision, operands, peaks.threads)
            found = np.asarray(arm.read(arm.step(0)))[at].astype(np.float64)
        except Exception as failure:  # of any library: the other arms are still worth timing
            row.error = f"{type(failure).__name__}: {failure}"[:500]
            print(f"{row.key} {name}: {row.error}", file=sys.stderr)
            continue
        row.compile_s = arm.compile_s
        row.parity = float(np.abs(found - exact).max() / np.abs(exact).max())
        row.counts = row.parity <= GATES[precision] if name == OURS else bool(np.isfinite(found).all())
        ready.append((row, arm))
    samples = take_turns([arm for _, arm in ready], effort) if ready else {}
    for row, arm in ready:
        taken = samples[arm.name]
        row.median_ms, row.p10_ms, row.p90_ms = (taken.quantile(share) for share in (0.5, 0.1, 0.9))
        row.noisy = taken.noisy
        seconds = row.median_ms * 1e-3
        if kernel.kind == "gemm":
            row.share = kernel.flops() / seconds / peaks.flops[precision]
        else:
            row.share = kernel.nbytes(precision) / seconds / peaks.copy
        arm.close()
    gc.collect()
    return rows
