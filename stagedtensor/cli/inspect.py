"""``inspect``: the source that a block of a model text compiles to, for a device that need not be there.

In: a file of model definitions, a block's configuration and the shapes of its inputs. Out: the kernels as a table, for
CUDA what each takes of a multiprocessor, and the source. Runs no kernel and writes no file.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stagedtensor.cast_twins import master_weights
from stagedtensor.errors import CompileError, LanguageError
from stagedtensor.functions.reductions import mean
from stagedtensor.numerics import Numerics
from stagedtensor.optim import sgd_update
from stagedtensor.policy import PrecisionPolicy
from stagedtensor.precision import precision
from stagedtensor.program import Comp, sequence
from stagedtensor.runtime.kernel_table import kernel_table, terminal_width
from stagedtensor.runtime.nvrtc import KernelResources, check_architecture, compile_cuda
from stagedtensor.session import Session
from stagedtensor.tensor import Tensor
from stagedtensor.terminals import placeholder
from stagedtensor.train import grad_update
from stagedtensor.vocabulary import language

if TYPE_CHECKING:
    from stagedtensor.runtime.inspection import Generated

_ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
_INPUT = re.compile(r"(?P<batch>[\dx]*?)(?:(?P<bar>\|)|x)?(?P<output>\d*)(?::(?P<prec>\w+))?")
_INPUT_FORM = (
    "sizes with x between them, the last one the output axis (32x784), or batch|output (8x64| has no output axis), "
    "then :bf16, :i32 or another precision, by default that of --precision, else f32"
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``inspect``."""
    parser.add_argument("model", metavar="MODEL.st", help="a file of model definitions")
    parser.add_argument("--block", metavar="NAME", help="the definition to compile; may be left out where there is one")
    parser.add_argument(
        "--config", metavar="NAME=VALUE,...", default="", help="the block's configuration, e.g. hid=64,out=10"
    )
    parser.add_argument(
        "--input", metavar="SIZES", action="append", default=[], help=f"one tensor it takes: {_INPUT_FORM}"
    )
    parser.add_argument(
        "--train", action="store_true", help="a training step on the mean of the result, not the forward part"
    )
    parser.add_argument(
        "--precision", metavar="PREC", help="mixed precision: activations and twins of parameters in PREC"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="what to generate for (default: cpu)")
    parser.add_argument("--target", metavar="NAME", help="the CPU target, by default this machine's")
    parser.add_argument(
        "--arch",
        metavar="SM",
        action="append",
        help=f"a GPU to compile for; may be repeated (default: {', '.join(_ARCHITECTURES)})",
    )
    parser.add_argument(
        "--numerics", metavar="NAME=VALUE,...", default="", help="fields of Numerics, e.g. tf32_matmul=True"
    )
    parser.add_argument("--no-source", action="store_true", help="print the tables only")


def run(arguments: argparse.Namespace) -> int:
    """Print kernel table, resources and source; status 1 where the model does not compile."""
    from stagedtensor.runtime.inspection import generated  # brings in the compiler, which the other commands do without

    try:
        numerics = Numerics(**pairs(arguments.numerics, "--numerics"))
    except (TypeError, ValueError) as error:
        raise LanguageError(f"--numerics: {str(error).splitlines()[0]}") from error
    architectures = tuple(arguments.arch or _ARCHITECTURES)
    for arch in architectures:
        check_architecture(arch)
    with Session():
        comp = computation(arguments)
        made = generated(
            comp, arguments.device, name=arguments.block or "model", target=arguments.target, numerics=numerics
        )
    count = len(made.kernels)
    print(kernel_table(f"{count} kernel{'s' * (count != 1)} for {made.device}", made.kernels, terminal_width()))
    if arguments.device == "cuda":
        print_resources(made, architectures, fast_math=numerics.fast_math)
    if not arguments.no_source:
        print(f"\n{made.source}", end="")
    return 0


def computation(arguments: argparse.Namespace) -> Comp | Tensor:
    """Build the model on placeholders of the given shapes: its result, or a training step on the result's mean."""
    try:
        module = language.load(arguments.model)
    except OSError as error:
        raise LanguageError(f"cannot read {arguments.model}: {error.strerror}", file=arguments.model) from error
    names = dir(module)
    name = arguments.block or (names[0] if len(names) == 1 else "")
    if name not in names:
        asked = f"defines no {name!r}" if name else "has several definitions: choose one with --block"
        raise LanguageError(
            f"{arguments.model} {asked}; it defines {', '.join(names) or 'nothing'}", file=arguments.model
        )
    configuration = pairs(arguments.config, "--config")
    inputs = [tensor(text, at, arguments.precision or "f32") for at, text in enumerate(arguments.input)]
    with master_weights(arguments.precision):
        result = applied(getattr(module, name), configuration, inputs)
    if not isinstance(result, Tensor):
        raise LanguageError(
            f"{name} gives {type(result).__name__}, not a tensor\n  expected its configuration in --config and one --input "
            "for each tensor that it is applied to",
            file=arguments.model,
        )
    loss = mean(result) if arguments.train else result
    if arguments.precision is not None:
        narrow = precision(arguments.precision)
        PrecisionPolicy(activation=narrow, grad=narrow).apply(loss)
    return sequence(grad_update(loss), sgd_update(loss, 0.1)) if arguments.train else result


def applied(definition: Any, configuration: dict[str, Any], inputs: Sequence[Tensor]) -> Any:
    """Apply a definition to its configuration, to ``()`` if it is a block, and to tensors."""
    if getattr(definition, "stage_at", None) is None:
        return definition(*inputs, **configuration) if callable(definition) else definition
    if configuration:
        definition = definition(**configuration)
    model = definition()
    return model(*inputs) if inputs else model


def pairs(text: str, option: str) -> dict[str, Any]:
    """Read ``hid=64,act="relu",bias=true``: numbers and texts as Python writes them, other words as texts.

    >>> pairs("hid=64,rate=0.5,kind=causal,bias=True", "--config")
    {'hid': 64, 'rate': 0.5, 'kind': 'causal', 'bias': True}
    """
    values: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, found, value = part.partition("=")
        if not found or not name.strip().isidentifier():
            raise LanguageError(f"{option} takes NAME=VALUE with commas between, got {part!r}")
        try:
            values[name.strip()] = ast.literal_eval(
                {"true": "True", "false": "False"}.get(value.strip(), value.strip())
            )
        except (ValueError, SyntaxError):
            values[name.strip()] = value.strip()
    return values


def tensor(text: str, at: int, default: str) -> Tensor:
    """Make the placeholder that ``32x784:bf16`` describes; without a precision it has the default one."""
    found = _INPUT.fullmatch(text)
    if found is None or not (found["batch"] or found["output"]) or "xx" in text:
        raise LanguageError(f"--input {text!r} describes no shape; expected {_INPUT_FORM}")
    batch = [int(size) for size in found["batch"].split("x") if size]
    output = [int(found["output"])] if found["output"] else []
    return placeholder(f"x{at or ''}", batch=batch, output=output, input=[], prec=precision(found["prec"] or default))


def print_resources(made: Generated, architectures: Sequence[str], *, fast_math: bool) -> None:
    """Compile for each architecture and print what each kernel takes; say what is missing where that cannot be done."""
    try:
        by_arch = {
            arch: {
                item.name: item
                for item in compile_cuda(made.source, arch, fast_math=fast_math, locate=made.locate).resources
            }
            for arch in architectures
        }
    except CompileError as error:
        if error.source:  # the text does not compile, which is a fault
            raise
        print(f"\nregisters and occupancy are not known: {error}")
        return
    rows = [("kernel", "launch", "shared bytes", *architectures)]
    for kernel in made.kernels:
        cells = [_resources(by_arch[arch].get(kernel.name), kernel.threads, arch) for arch in architectures]
        rows.append((kernel.name, kernel.launch, f"{kernel.shared_bytes:,}", *cells))
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    print("\nregisters of a thread, and the part of a multiprocessor's warps that can be resident")
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _resources(item: KernelResources | None, threads: int, arch: str) -> str:
    if item is None:
        return "-"
    spilled = f", {item.spill_bytes} bytes spilled" if item.spill_bytes else ""
    return f"{item.registers} registers, {item.occupancy(threads, arch):.0%}{spilled}"
