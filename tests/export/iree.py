"""Running exported modules under IREE: compiled for the CPU, in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from .interpreter import Run

Array = np.ndarray[Any, Any]


def execute(text: str, arguments: Sequence[Array]) -> Run:
    """Compile a module and run its function; converts are not looked at."""
    tools = pytest.importorskip("iree.compiler.tools", reason="IREE is not installed: pip install 'stagedtensor[iree]'")
    runtime = pytest.importorskip("iree.runtime", reason="IREE is not installed: pip install 'stagedtensor[iree]'")
    # a processor of its own choosing would warn; what is compiled is run once
    options = ["--iree-llvmcpu-target-cpu=generic"]
    binary = tools.compile_str(text, target_backends=["llvm-cpu"], input_type="stablehlo", extra_args=options)
    context = runtime.SystemContext(config=runtime.Config("local-task"))
    module = runtime.VmModule.copy_buffer(context.instance, binary)
    context.add_vm_module(module)
    results = context.modules[module.name]["main"](*arguments)
    several = results if isinstance(results, tuple | list) else [results]
    return Run([np.array(result.to_host()) for result in several], [])
