"""Parses, verifies and runs StableHLO modules in the reference interpreter; run as a process of its own.

Arguments: a folder with ``moduleN.mlir`` and ``argumentsN.npz``, and how many there are. Leaves ``resultsN.npz`` and
``convertsN.json`` there. An op that the interpreter does not know ends the process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir._mlir_libs import _jax_mlir_ext
from jaxlib.mlir.dialects import stablehlo


def converts(operation: Any) -> list[tuple[str, str, str]]:
    """Return (source type, result type, location) of every convert, in order."""
    found = []
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                if inner.operation.name == "stablehlo.convert":
                    src, dst = (ir.ShapedType(v.type).element_type for v in (inner.operands[0], inner.results[0]))
                    found.append((str(src), str(dst), str(inner.operation.location)))
                found.extend(converts(inner.operation))
    return found


def attribute(array: Any, type_: Any) -> Any:
    """Return an argument; formats that a file does not know come as bytes, and unsigned ones must be said to be so."""
    if array.dtype.kind not in "Vu":
        return ir.DenseElementsAttr.get(array)
    return ir.DenseElementsAttr.get(array.view(f"u{array.itemsize}"), type=type_)


def evaluate(folder: Path, at: int) -> None:
    """Run module ``at`` of the folder."""
    with ir.Location.unknown():
        module = ir.Module.parse((folder / f"module{at}.mlir").read_text())
        module.operation.verify()
        (folder / f"converts{at}.json").write_text(json.dumps(converts(module.operation)))
        given = np.load(folder / f"arguments{at}.npz")
        function = module.body.operations[0]
        types = ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value).inputs
        values = [attribute(given[key], type_) for key, type_ in zip(given.files, types, strict=True)]
        outs = stablehlo.eval_module(module, values)
        np.savez(folder / f"results{at}.npz", *[np.array(out) for out in outs])


def main(folder: str, count: str) -> None:
    """Run the modules of a folder, one after the other; says on stderr which one it is at."""
    registry = ir.DialectRegistry()
    _jax_mlir_ext.register_dialects(registry)
    with ir.Context() as context:
        context.append_dialect_registry(registry)
        stablehlo.register_dialect(context)
        context.load_all_available_dialects()
        for at in range(int(count)):
            print(f"module {at}", file=sys.stderr, flush=True)
            evaluate(Path(folder), at)


if __name__ == "__main__":
    main(*sys.argv[1:])
