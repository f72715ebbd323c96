"""Parses, verifies and runs a StableHLO module in the reference interpreter; run as a process of its own.

Arguments: the module's text, its arguments (npz), where the results go (npz), where the converts go (json). An op that the
interpreter does not know ends the process.
"""

from __future__ import annotations

import json
import sys
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
    """Return an argument; formats that a file does not know come as bytes."""
    if array.dtype.kind != "V":
        return ir.DenseElementsAttr.get(array)
    return ir.DenseElementsAttr.get(array.view(f"u{array.itemsize}"), type=type_)


def main(text: str, arguments: str, results: str, report: str) -> None:
    """Run one module."""
    registry = ir.DialectRegistry()
    _jax_mlir_ext.register_dialects(registry)
    with ir.Context() as context, ir.Location.unknown():
        context.append_dialect_registry(registry)
        stablehlo.register_dialect(context)
        context.load_all_available_dialects()
        with open(text) as file:
            module = ir.Module.parse(file.read())
        module.operation.verify()
        with open(report, "w") as file:
            json.dump(converts(module.operation), file)
        given = np.load(arguments)
        function = module.body.operations[0]
        types = ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value).inputs
        values = [attribute(given[key], type_) for key, type_ in zip(given.files, types, strict=True)]
        outs = stablehlo.eval_module(module, values)
        np.savez(results, *[np.array(out) for out in outs])


if __name__ == "__main__":
    main(*sys.argv[1:])
