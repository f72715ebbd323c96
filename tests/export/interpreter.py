"""Running exported modules under the StableHLO interpreter, and beside this package's own back end."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
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
    (run,) = interpret_all([(text, arguments)])
    return run


def interpret_all(modules: Sequence[tuple[str, Sequence[Array]]], timeout: float = 120) -> list[Run]:
    """Run several modules in one process; the first that fails, or whose op ends the process, is shown."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for at, (text, arguments) in enumerate(modules):
            (folder / f"module{at}.mlir").write_text(text)
            np.savez(folder / f"arguments{at}.npz", *arguments)
        command = [sys.executable, str(WORKER), name, str(len(modules))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
        if done.returncode != 0:
            at = int(re.findall(r"^module (\d+)$", done.stderr, flags=re.MULTILINE)[-1])
            raise InterpreterError(
                f"the interpreter ended with {done.returncode}:\n{done.stderr[-3000:]}\n{modules[at][0][:4000]}"
            )
        return [_read(folder, at) for at in range(len(modules))]


def _read(folder: Path, at: int) -> Run:
    with np.load(folder / f"results{at}.npz") as held:
        results = [held[key] for key in held.files]
    return Run(results, [tuple(item) for item in json.loads((folder / f"converts{at}.json").read_text())])


def both(
    root: st.Tensor | st.Comp,
    values: dict[str, Array],
    loss: st.Tensor,
    execute: Callable[[str, Sequence[Array]], Run] = interpret,
    **options: Any,
) -> tuple[list[Array], list[Array], Run]:
    """Return what ``execute`` and what this package computes for the results of an export, and the run.

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
    with st.Context("cpu") as ctx:
        routine = ctx.compile(root, keep=[tensor for tensor in nodes.values() if tensor.node.record is not None])
        ctx.init_params(loss)
        for label, value in values.items():
            ctx.set_values(nodes[label], value)
        ctx.run(routine)
        arguments = [_fed(ctx, nodes[entry.name], entry, values) for entry in signature.arguments]
        wanted = [ctx.get_values(result) for result in results]
    assert [entry.name for entry in signature.results] == [result.label for result in results]
    run = execute(text, arguments)
    return run.results, wanted, run


def _fed(ctx: st.Context, tensor: st.Tensor, entry: Any, values: dict[str, Array]) -> Array:
    value = values[entry.name] if entry.name in values else ctx.get_values(tensor)
    return np.asarray(value).astype(entry.precision.numpy_dtype).reshape(entry.shape)
