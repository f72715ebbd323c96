"""Running exported modules under the StableHLO interpreter, and beside this package's own back end."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import stagedtensor as st
from stagedtensor.node import ancestors
from tests.oracles.gradients import grad_of

Array = np.ndarray[Any, Any]
WORKER = Path(__file__).with_name("worker.py")


class InterpreterError(AssertionError):
    """The worker failed or died."""


@dataclass(frozen=True)
class Run:
    """Results and converts of a module."""

    results: list[Array]
    converts: list[tuple[str, str, str]]


def interpret(text: str, arguments: Sequence[Array]) -> Run:
    """Parse, verify and run a module in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("module.mlir", "arguments.npz", "results.npz", "converts.json")]
        files[0].write_text(text)
        np.savez(files[1], *arguments)
        command = [sys.executable, str(WORKER), *map(str, files)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode != 0:
            raise InterpreterError(
                f"the interpreter ended with {done.returncode}:\n{done.stderr[-3000:]}\n{text[:4000]}"
            )
        with np.load(files[2]) as held:
            results = [held[key] for key in held.files]
        return Run(results, [tuple(item) for item in json.loads(files[3].read_text())])


def both(
    root: st.Tensor | st.Comp, values: dict[str, Array], loss: st.Tensor, device: str = "cpu", **options: Any
) -> tuple[list[Array], list[Array], Run]:
    """Return what the interpreter and what this package computes for the results of an export, and the run.

    ``values`` are fed by label; parameters start as their initializers say.
    """
    text, signature = st.export.to_stablehlo(root, **options), st.export.signature(root, **options)
    # arguments are terminals or twins; aliases inside composites share their labels
    nodes = {
        node.label: st.tensor.tensor_of(node)
        for node in ancestors([loss.node])
        if node.record is None or node.record.attributes.get("twin")
    }
    if isinstance(root, st.Tensor):
        results = [root]
    else:
        results = [loss, *(grad_of(param) for param in st.trainable_params(loss))]
    with st.Context(device) as ctx:
        routine = ctx.compile(root, keep=[tensor for tensor in nodes.values() if tensor.node.record is not None])
        ctx.init_params(loss)
        for label, value in values.items():
            ctx.set_values(nodes[label], value)
        ctx.run(routine)
        arguments = [_fed(ctx, nodes[entry.name], entry, values) for entry in signature.arguments]
        wanted = [ctx.get_values(result) for result in results]
    assert [entry.name for entry in signature.results] == [result.label for result in results]
    run = interpret(text, arguments)
    return run.results, wanted, run


def _fed(ctx: st.Context, tensor: st.Tensor, entry: Any, values: dict[str, Array]) -> Array:
    value = values[entry.name] if entry.name in values else ctx.get_values(tensor)
    return np.asarray(value).astype(entry.precision.numpy_dtype).reshape(entry.shape)
