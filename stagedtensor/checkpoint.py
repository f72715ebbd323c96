"""Checkpoints: parameters, optimizer state, loss scaler and step count in one safetensors file.

Parameters are keyed by name, optimizer state by (parameter name, kind). Loading compares everything first and reports
every mismatch at once; it writes nothing until all is right. Files of other projects, safetensors or GGUF, load through
a name map.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from .conversion import convert
from .errors import CheckpointError, PrecisionError
from .gguf_tensors import is_gguf, read_gguf
from .loss_scaler import LossScaler, validated_state
from .node import Node, Role
from .precision import Prec, precision
from .program import Comp, shapes_and_precisions
from .runtime.context import Context
from .runtime.linking import check_names, parameters
from .runtime.routine import Routine
from .settings import is_integer
from .source import user_source
from .tensor import Tensor, tensor_of
from .tensor_file import Array, TensorFile, read_tensors, write_tensors

Source: TypeAlias = str | tuple[str, Callable[[Array], Array]]
"""A name in the file, perhaps with a function that brings the array into this package's layout."""

NameMap: TypeAlias = Mapping[str, Source] | Callable[[str], Source | None]
"""What a parameter is called in the file; a name that is not mapped stands for itself."""

_KEY, _VERSION = "stagedtensor", 1


@dataclass(frozen=True)
class LoadReport:
    """What a load did. All names are those of this program, except ``extra``."""

    loaded: tuple[str, ...]
    converted: tuple[str, ...]
    """Loaded with a conversion, since the file holds another precision."""
    missing: tuple[str, ...]
    """Wanted, and not in the file."""
    mismatched: tuple[str, ...]
    """In the file, and left out since the shape does not fit; one line each."""
    extra: tuple[str, ...]
    """In the file, and not wanted."""
    step: int | None
    """The step count that was saved."""

    def __str__(self) -> str:
        lines = [f"loaded {len(self.loaded)} tensors" + (f" of step {self.step}" if self.step is not None else "")]
        for what in ("converted", "missing", "mismatched", "extra"):
            found = getattr(self, what)
            lines += [f"{what}: {', '.join(found)}"] if found else []
        return "\n".join(lines)


def save(
    path: str | Path,
    ctx: Context,
    loss: Tensor | Iterable[Tensor],
    *,
    optimizer: Comp | Routine | None = None,
    scaler: LossScaler | None = None,
    step: int | None = None,
) -> None:
    """Write the parameters of ``loss`` (or of several tensors) to a safetensors file, in their own precisions.

    ``optimizer`` (the computation or the compiled step) adds the state it keeps, ``scaler`` the loss scaler with the
    open windows of its gated routines, ``step`` a count that ``load`` gives back. The file is replaced at once or not
    at all. Raises CheckpointError where a parameter has no values, ContextError where two share a name.
    """
    _check_arguments("save", path, ctx, scaler)
    wanted = _everything(_parameters(loss), optimizer, scaler)
    without = [
        name for name, node in wanted.items() if node.role is Role.PARAM and not ctx.is_initialized(tensor_of(node))
    ]
    if without:
        raise CheckpointError(
            f"save: these parameters have no values yet: {', '.join(without)}\n  {user_source().quoted()}\n"
            "  call ctx.init_params(loss) first, or ctx.init_params(computation) where an optimizer has parameters of its own"
        )
    if step is not None and not is_integer(step, 0):
        raise TypeError(f"save: step is an integer of at least 0, not {step!r} ({user_source().quoted()})")
    arrays = {name: ctx.get_values(tensor_of(node)) for name, node in wanted.items()}
    state: dict[str, Any] = {"version": _VERSION, "step": None if step is None else int(step)}
    state["precisions"] = {name: precision(array.dtype).name for name, array in arrays.items()}
    if scaler is not None:
        state["scaler"] = scaler.state_dict()
    write_tensors(path, arrays, {_KEY: json.dumps(state), "format": "pt"})


def _check_arguments(what: str, path: object, ctx: object, scaler: object) -> None:
    if not isinstance(path, str | Path):
        raise TypeError(f"{what}: expected the path of a file, not {path!r} ({user_source().quoted()})")
    if not isinstance(ctx, Context):
        raise TypeError(f"{what}: expected a context, not {type(ctx).__name__} ({user_source().quoted()})")
    if scaler is not None and not isinstance(scaler, LossScaler):
        raise TypeError(f"{what}: scaler is a LossScaler, not {type(scaler).__name__} ({user_source().quoted()})")


def load(
    path: str | Path,
    ctx: Context,
    loss: Tensor | Iterable[Tensor],
    *,
    optimizer: Comp | Routine | None = None,
    scaler: LossScaler | None = None,
    strict: bool = True,
    names: NameMap | None = None,
) -> LoadReport:
    """Read what :func:`save` wrote, or another project's safetensors or GGUF file through ``names``.

    Packed weights of a GGUF file are decoded, and its extents turned round: ``(in, out)`` is shape ``(out, in)``.
    Everything is compared before anything is written, and every mismatch is reported at once: a missing name, another
    shape, another precision. With ``strict=False`` what fits is loaded; with it, or with ``names``, floats convert to
    the parameter's precision, rounding once. Raises CheckpointError.

    >>> import stagedtensor as st
    >>> names = {"conv2d.w": ("conv1.weight", lambda a: a.transpose(0, 2, 3, 1)), "conv2d.b": "conv1.bias"}
    """
    _check_arguments("load", path, ctx, scaler)
    file = read_gguf(path) if is_gguf(path) else read_tensors(path)
    wanted = _parameters(loss)
    sources = _sources(names, wanted)
    wanted = _everything(wanted, optimizer, scaler)
    plan = _Plan(file, wanted, sources, convert=not strict or names is not None)
    state = _saved_state(file)
    faults = [f"{name}: not in the file" for name in plan.missing] + plan.mismatched
    scaler_state = None if scaler is None else state.get("scaler")
    if scaler is not None:
        scaler.check_context(ctx)
        if scaler_state is None:
            faults.append("the loss scaler: not in the file")
        else:
            scaler_state = _scaler_state(path, scaler_state)
    if strict and faults:
        near = _near_names(plan)
        lines = "\n".join(f"  {fault}" for fault in faults)
        raise CheckpointError(
            f"{str(path)!r} does not fit this program:\n{lines}\n  {user_source().quoted()}\n"
            f"  nothing was loaded; pass names= to rename, or strict=False to load what fits{near}"
        )
    for name, array in plan.arrays.items():
        ctx.set_values(tensor_of(wanted[name]), array)
    if scaler is not None:
        scaler.bind(ctx)
        if scaler_state is not None:
            scaler.load_state_dict(ctx, scaler_state)
    return LoadReport(
        tuple(plan.arrays),
        tuple(plan.converted),
        tuple(plan.missing),
        tuple(plan.mismatched),
        tuple(name for name in file.arrays if name not in plan.used),
        state.get("step"),
    )


class _Plan:
    """What goes where: the arrays that fit, by this program's names, and what does not."""

    def __init__(
        self, file: TensorFile, wanted: Mapping[str, Node], sources: Mapping[str, Source], *, convert: bool
    ) -> None:
        self.arrays: dict[str, Array] = {}
        self.used: set[str] = set()
        self.missing: list[str] = []
        self.mismatched: list[str] = []
        self.converted: list[str] = []
        self.file = file
        shapes, precisions = shapes_and_precisions(list(wanted.values()))
        for name, node in wanted.items():
            source = sources.get(name, name)
            stored, change = (source, None) if isinstance(source, str) else source
            if stored not in file.arrays:
                if stored in file.unreadable:
                    self.mismatched.append(f"{name}: {file.unreadable[stored]}")
                    continue
                self.missing.append(name if stored == name else f"{name} (as {stored})")
                continue
            self.used.add(stored)
            array, prec = file.arrays[stored], file.precisions[stored]
            if change is not None:
                array = _changed(name, change, array)
                try:
                    prec = precision(array.dtype)
                except PrecisionError:
                    self.mismatched.append(
                        f"{name}: its function made an array of dtype {array.dtype}, which no format is"
                    )
                    continue
            shape = shapes.shape(node)
            if array.shape != shape.dims:
                self.mismatched.append(f"{name}: expected shape {shape.dims} ({shape}), the file has {array.shape}")
                continue
            self._take(name, array, prec, precisions.prec(node), convert)

    def _take(self, name: str, array: Array, stored: Prec, prec: Prec, may_convert: bool) -> None:
        if stored is not prec:
            if not may_convert or stored.is_float != prec.is_float:
                self.mismatched.append(f"{name}: expected {prec}, the file has {stored}")
                return
            array = convert(array, prec)
            self.converted.append(name)
        self.arrays[name] = array


def _changed(name: str, change: Callable[[Array], Array], array: Array) -> Array:
    try:
        return np.asarray(change(array))
    except Exception as error:
        raise CheckpointError(
            f"names: the function for {name!r} failed on an array of shape {array.shape}: {type(error).__name__}: {error}\n"
            f"  {user_source().quoted()}\n  nothing was loaded"
        ) from error


def _parameters(loss: Tensor | Iterable[Tensor]) -> dict[str, Node]:
    nodes = parameters(loss)
    check_names(nodes)
    return {node.label: node for node in nodes}


def _everything(
    parameters: dict[str, Node], optimizer: Comp | Routine | None, scaler: LossScaler | None
) -> dict[str, Node]:
    """Return what a checkpoint holds by its name in the file."""
    kept = dict(parameters)
    for name, node in (_optimizer_state(optimizer) | _windows(scaler)).items():
        if kept.setdefault(name, node) is not node:
            raise CheckpointError(
                f"two things would be called {name!r} in the file: a parameter, and state of the optimizer or scaler\n"
                f"  {kept[name].source.quoted()}\n  give the parameter another name"
            )
    return kept


def _optimizer_state(optimizer: Comp | Routine | None) -> dict[str, Node]:
    """Return the optimizer's state by key; two computations of one kind on one parameter share it.

    An optimizer of the user keeps its state in parameters that are not trained: those go by their own names.
    """
    if optimizer is None:
        return {}
    if isinstance(optimizer, Routine):
        nodes: Iterable[Node] = optimizer.stored_nodes
    elif isinstance(optimizer, Comp):
        nodes = optimizer.nodes()
    else:
        raise TypeError(
            f"optimizer is a computation or a compiled routine, not {type(optimizer).__name__} ({user_source().quoted()})"
        )
    found = {
        f"optimizer/{node.owner.label}/{node.state_kind}": node
        for node in nodes
        if node.role is Role.STATE and node.owner is not None
    }
    own = [node for node in nodes if node.role is Role.PARAM and not node.trainable]
    check_names(own)
    return dict(sorted((found | {node.label: node for node in own}).items()))


def _windows(scaler: LossScaler | None) -> dict[str, Node]:
    if scaler is None:
        return {}
    return {
        f"scaler/window{at}/{part}": getattr(window, part).node
        for at, window in enumerate(scaler.windows)
        for part in ("flags", "skips", "runs")
    }


def _sources(names: NameMap | None, wanted: Mapping[str, Node]) -> dict[str, Source]:
    if names is None:
        return {}
    if isinstance(names, Mapping):
        _check_keys(names, wanted)
        found: dict[str, Any] = dict(names)
    elif callable(names):
        found = {name: source for name in wanted if (source := names(name)) is not None}
    else:
        raise TypeError(
            f"names is a dictionary or a function from names here to names in the file, not {type(names).__name__} "
            f"({user_source().quoted()})"
        )
    for name, source in found.items():
        pair = isinstance(source, tuple) and len(source) == 2 and isinstance(source[0], str) and callable(source[1])
        if not pair and not isinstance(source, str):
            raise TypeError(
                f"names: {name!r} stands for {source!r}; expected a name in the file, or (name, function of the array) "
                f"({user_source().quoted()})"
            )
    return found


def _check_keys(names: Mapping[str, Any], wanted: Mapping[str, Node]) -> None:
    unknown = [name for name in names if name not in wanted]
    if unknown:
        hints = [hint for name in unknown for hint in difflib.get_close_matches(name, wanted, 1)]
        raise CheckpointError(
            f"names: no parameter is called {', '.join(map(repr, unknown))}"
            + (f"; near: {', '.join(hints)}" if hints else "")
            + f"\n  {user_source().quoted()}\n  the keys are names of this program, the values those in the file"
        )


def _near_names(plan: _Plan) -> str:
    left = [name for name in plan.file.arrays if name not in plan.used]
    return f"\n  in the file and not wanted: {', '.join(left[:8])}{' ...' if len(left) > 8 else ''}" if left else ""


def _saved_state(file: TensorFile) -> dict[str, Any]:
    text = file.metadata.get(_KEY)
    if text is None:
        return {}
    try:
        state = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{str(file.path)!r}: the metadata {_KEY!r} is no JSON: {error}") from None
    if not isinstance(state, dict) or state.get("version") != _VERSION:
        raise CheckpointError(
            f"{str(file.path)!r} was written by another version: expected {_VERSION}, "
            f"got {state.get('version') if isinstance(state, dict) else state!r}"
        )
    step = state.get("step")
    if step is not None and (type(step) is not int or step < 0):
        raise _damaged(file.path, f"its step is {step!r}, expected an integer of at least 0")
    return state


def _scaler_state(path: str | Path, state: Any) -> dict[str, Any]:
    try:
        return validated_state(state)
    except CheckpointError as error:
        raise _damaged(path, str(error)) from None


def _damaged(path: str | Path, problem: str) -> CheckpointError:
    return CheckpointError(
        f"the metadata {_KEY!r} of {str(path)!r} is damaged: {problem}\n  {user_source().quoted()}\n"
        "  nothing was loaded; take another checkpoint"
    )
