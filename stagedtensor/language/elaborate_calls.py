"""Application in the textual language: functions and blocks of a text, words, and functions of Python.

In: a value and the arguments of one juxtaposition. Out: the value of the application. A function takes its arguments in
order, labelled ones anywhere; missing ones leave a function of the rest. ``()`` opens a block's stage.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from stagedtensor.blocks import Block, applied_model, applying, entered
from stagedtensor.errors import LanguageError, StagedTensorError
from stagedtensor.source import written_at
from stagedtensor.tensor import Tensor

from . import model_ast as ast
from .caret import near
from .model_arrays import as_tensor
from .model_values import UNIT, BatchArray, Function, Given, Machine, Scope, Stage, fault, kind_of


def apply(machine: Machine, function: Any, given: Sequence[Given], at: int | None, label: str | None = None) -> Any:
    """Apply a value to arguments. ``label`` names the block whose ``()`` is the last argument."""
    rest = list(given)
    while rest:
        if isinstance(function, Function):
            function, rest = _apply_function(machine, function, rest, at, label)
        elif isinstance(function, Block):
            function, rest = _apply_block(machine, function, rest, at, label)
        elif isinstance(function, Waiting):
            function, rest = function.function, [*function.given, *rest]
        elif callable(function) and not isinstance(function, Tensor):
            function, rest = _apply_word(machine, function, rest, at)
        else:
            raise _no_function(machine, function, rest, at)
    return function


def _place(argument: Given, at: int | None) -> int | None:
    return argument.at if argument.at is not None else at


def _no_function(machine: Machine, value: Any, rest: Sequence[Given], at: int | None) -> LanguageError:
    place = _place(rest[0], at)
    advice = ""
    if isinstance(value, Tensor):
        advice = (
            f"{value.label!r} is a tensor: were too many arguments given, or is an operator missing before this one?"
        )
    elif rest[0].value is UNIT:
        advice = "() applies the stage of a block"
    return fault(machine, place, f"{kind_of(value)} is applied to {kind_of(rest[0].value)}", "a function", advice)


# -- functions and blocks of a text -----------------------------------------------------------------------------------


def _apply_function(
    machine: Machine, function: Function, rest: list[Given], at: int | None, label: str | None
) -> tuple[Any, list[Given]]:
    segment = function.segment
    labels = [parameter.name for parameter in segment if isinstance(parameter, ast.Labelled | ast.Optional_)]
    room = sum(isinstance(parameter, ast.Positional) for parameter in segment)
    taken = list(function.given)
    is_block = function.stage_at is not None
    while rest:
        argument = rest[0]
        if argument.label is None:
            if argument.value is UNIT and is_block:
                break
            if sum(entry.label is None for entry in taken) == room:
                break
        elif argument.label not in labels:
            if is_block or not _complete(segment, taken):
                raise _unknown_label(machine, function, argument, labels, at)
            break
        elif any(entry.label == argument.label for entry in taken):
            raise fault(machine, _place(argument, at), f"~{argument.label} is given twice to {function.name!r}")
        taken.append(argument)
        rest = rest[1:]
    now = replace(function, given=tuple(taken))
    if is_block:
        if not rest:
            return now, []
        if rest[0].value is not UNIT:
            raise _not_staged(machine, now, rest[0], at)
        _check_complete(machine, now, _place(rest[0], at))
        return _enter(machine, now, _place(rest[0], at), label if len(rest) == 1 else None), rest[1:]
    if _complete(segment, taken):
        return _run(machine, now, at), rest
    if rest:
        _check_complete(machine, now, _place(rest[0], at))
    return now, []


def _missing(segment: Sequence[ast.Parameter], given: Sequence[Given]) -> list[str]:
    """Return what a segment still needs, as messages call it."""
    labels = {entry.label for entry in given}
    n_given = sum(entry.label is None for entry in given)
    positional = [parameter for parameter in segment if isinstance(parameter, ast.Positional)]
    needed = [f"~{p.name}" for p in segment if isinstance(p, ast.Labelled) and p.name not in labels]
    return needed + [
        p.pattern.name if isinstance(p.pattern, ast.NamePattern) else "a tuple" for p in positional[n_given:]
    ]


def _complete(segment: Sequence[ast.Parameter], given: Sequence[Given]) -> bool:
    return not _missing(segment, given)


def _check_complete(machine: Machine, function: Function, at: int | None) -> None:
    missing = _missing(function.segment, function.given)
    if missing:
        raise fault(machine, at, f"{function.name!r} lacks {' and '.join(missing)}", "them before this argument")


def _unknown_label(
    machine: Machine, function: Function, argument: Given, labels: Sequence[str], at: int | None
) -> LanguageError:
    later = function.parameters[(function.stage_at or 0) :]
    if any(isinstance(p, ast.Labelled | ast.Optional_) and p.name == argument.label for p in later):
        advice = f"~{argument.label} comes after (): it goes to what {function.name} () returns"
    else:
        advice = near(str(argument.label), labels) or "it has no labelled argument"
    return fault(machine, _place(argument, at), f"{function.name!r} has no argument ~{argument.label}", advice=advice)


def _not_staged(machine: Machine, function: Function, argument: Given, at: int | None) -> LanguageError:
    name = function.name
    bound = " ".join(f"~{p.name}" for p in function.segment if isinstance(p, ast.Labelled))
    call = f"{name} {bound} ()" if bound else f"{name} ()"
    if argument.at is None:
        return fault(
            machine, None, f"the block {name!r} takes no such argument before ()", "configuration by label",
            f"call it with configuration, then without arguments, then with tensors: {name}(...)()(x)",
        )  # fmt: skip
    return fault(
        machine,
        argument.at,
        f"the block {name!r} is used without its stage: it is applied to {kind_of(argument.value)}",
        "() after its configuration",
        f"bind it where the parameters are made: let layer = {call} in fun x -> layer x",
    )


def _bindings(machine: Machine, function: Function, at: int | None) -> Scope:
    """Return the function's scope with its segment's arguments bound; defaults see the parameters before them."""
    scope = function.scope
    positional = iter([entry for entry in function.given if entry.label is None])
    labelled = {entry.label: entry.value for entry in function.given if entry.label is not None}
    for parameter in function.segment:
        match parameter:
            case ast.Positional(pattern):
                entry = next(positional)
                scope = scope.bind(destructured(machine, pattern, entry.value, _place(entry, at)))
            case ast.Labelled(name):
                scope = scope.bind({name: labelled[name]})
            case ast.Optional_(name, default):
                value = labelled[name] if name in labelled else function.machine.evaluate(default, scope)
                scope = scope.bind({name: value})
    return scope


def destructured(machine: Machine, pattern: ast.Pattern, value: Any, at: int | None) -> dict[str, Any]:
    """Bind the names of a pattern to the parts of a value."""
    if isinstance(pattern, ast.NamePattern):
        return {} if pattern.name == "_" else {pattern.name: value}
    if not isinstance(value, tuple | list) or len(value) != len(pattern.items):
        got = f"{kind_of(value)} of {len(value)} items" if isinstance(value, tuple | list) else kind_of(value)
        raise fault(
            machine, at, f"{got} does not fit a pattern of {len(pattern.items)}", f"a tuple of {len(pattern.items)}"
        )
    bound: dict[str, Any] = {}
    for item, part in zip(pattern.items, value, strict=True):
        bound.update(destructured(machine, item, part, at))
    return bound


def _run(machine: Machine, function: Function, at: int | None) -> Any:
    """Evaluate the body of a function whose arguments are all there."""
    scope = _bindings(machine, function, at)
    stage = scope.stage
    context: AbstractContextManager[Any] = nullcontext()
    if stage is not None and not stage.open:
        context = applying(stage.name)
    elif stage is None and at is None:  # called from Python: no stage is around
        context = applying(function.name)
    with context:
        return function.machine.evaluate(function.body, scope)


def _enter(machine: Machine, block: Function, at: int | None, label: str | None) -> Any:
    """Apply ``()``: open the stage, make the parameters, return the body's value or a function of the tensors."""
    _check_stage(machine, block.name, at)
    position = block.stage_at
    assert position is not None
    configured = _bindings(machine, block, at)
    rest = block.parameters[position + 1 :]
    with entered(block.name, label) as frame:
        stage = Stage(block.name, frame)
        scope = Scope(configured.names, stage)
        try:
            if not rest:
                return block.machine.evaluate(block.body, scope)
            names = frozenset(name for name, _ in ast.parameter_names(rest))
            block.machine.make_parameters(block.body, scope, names)
        finally:
            stage.open = False
    return Function(block.name, rest, block.body, scope, block.machine)


def _check_stage(machine: Machine, name: str, at: int | None) -> None:
    model = applied_model()
    if model is not None:
        raise fault(
            machine,
            at,
            f"the block {name!r} would make its parameters anew at every application of {model!r}",
            "() outside what is applied to tensors",
            f"bind it before: let layer = {name} ... () in fun x -> layer x",
        )


# -- words and functions of Python ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Waiting:
    """A word that lacks arguments."""

    function: Any
    given: tuple[Given, ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the word with the remaining arguments."""
        positional = [entry.value for entry in self.given if entry.label is None]
        labelled = {entry.label: entry.value for entry in self.given if entry.label is not None}
        return self.function(*positional, *args, **labelled, **kwargs)

    def __repr__(self) -> str:
        name = getattr(self.function, "__name__", type(self.function).__name__).strip("_")
        return f"<{name}, which waits for more arguments after {len(self.given)}>"


@dataclass(frozen=True)
class Signature:
    """What a Python function takes: positional parameters that it must and may have, keywords, which are tensors."""

    required: tuple[str, ...]
    positional: tuple[str, ...]
    variadic: bool
    tensors: frozenset[str]


def _signature(function: Any) -> Signature | None:
    """Return the signature, None where Python does not know it."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    star = [p for p in parameters if p.kind is p.VAR_POSITIONAL]
    required = [p.name for p in positional if p.default is p.empty] + [p.name for p in star]
    tensors = frozenset(p.name for p in parameters if str(p.annotation).startswith("TensorLike"))
    return Signature(tuple(required), tuple(p.name for p in positional), bool(star), tensors)


def _apply_word(machine: Machine, function: Any, rest: list[Given], at: int | None) -> tuple[Any, list[Given]]:
    signature = _signature(function)
    taken: list[Given] = []
    n_positional = 0
    called = False
    while rest:
        argument = rest[0]
        if argument.label is None:
            if argument.value is UNIT:
                called, rest = True, rest[1:]
                break
            if signature is not None and not signature.variadic and n_positional >= len(signature.positional):
                break
            n_positional += 1
        taken.append(argument)
        rest = rest[1:]
    if signature is not None and not called and not rest:
        labels = {entry.label for entry in taken}
        unlabelled = [name for name in signature.required if name not in labels]
        if n_positional < len(unlabelled):
            return Waiting(function, tuple(taken)), []
    return call_python(machine, function, taken, at), rest


def _apply_block(
    machine: Machine, block: Block[Any], rest: list[Given], at: int | None, label: str | None
) -> tuple[Any, list[Given]]:
    """Apply a block of Python: what stands before ``()`` is its configuration."""
    for count, argument in enumerate(rest):
        if argument.label is None and argument.value is UNIT:
            _check_stage(machine, block.name, _place(argument, at))
            name = label if count == len(rest) - 1 else None
            return call_python(machine, block, rest[:count], at, label=name), rest[count + 1 :]
    tensor = next((argument for argument in rest if isinstance(argument.value, Tensor)), None)
    if tensor is not None:
        call = f"{block.name} ()"
        raise fault(
            machine, tensor.at, f"the block {block.name!r} is used without its stage", "() after its configuration",
            f"bind it where the parameters are made: let layer = {call} in fun x -> layer x",
        )  # fmt: skip
    return Waiting(block, tuple(rest)), []


def call_python(
    machine: Machine, function: Any, given: Sequence[Given], at: int | None, *, label: str | None = None
) -> Any:
    """Call a Python function; faults of its arguments become LanguageError, arrays given for tensors become tensors."""
    signature = _signature(function)
    tensors = signature.tensors if signature is not None else frozenset()
    positional: list[Any] = []
    labelled: dict[str, Any] = {}
    name = getattr(function, "__name__", type(function).__name__).strip("_")
    with written_at(machine.text.source(at) if at is not None else None):
        for entry in given:
            place = _place(entry, at)
            if entry.label is None:
                count = len(positional)
                known = signature.positional if signature is not None else ()
                wants = count < len(known) and known[count] in tensors
                wants = wants or (
                    signature is not None and signature.variadic and count >= len(known) and bool(tensors)
                )
                positional.append(_argument(machine, entry.value, wants, place))
            elif entry.label in labelled:
                raise fault(machine, place, f"~{entry.label} is given twice to {name!r}")
            else:
                labelled[entry.label] = _argument(machine, entry.value, entry.label in tensors, place)
        if label is not None:
            labelled["label"] = label
    ours = _is_ours(function)
    source = machine.text.source(at) if at is not None and ours else None
    try:
        with written_at(source):
            return function(*positional, **labelled)
    except StagedTensorError:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        if not ours:
            raise
        raise fault(machine, at, f"{name}: {str(error).removeprefix(f'{name}: ').removeprefix(f'{name}() ')}") from None


def _is_ours(function: Any) -> bool:
    """Whether a function is one of this package: what it builds has the line of the text as its source."""
    module = getattr(function, "__module__", None) or type(function).__module__
    return str(module).partition(".")[0] == __name__.partition(".")[0]


def _argument(machine: Machine, value: Any, wants_tensor: bool, at: int | None) -> Any:
    if isinstance(value, BatchArray) or (wants_tensor and isinstance(value, list | tuple)):
        return as_tensor(value, lambda problem, expected: fault(machine, at, problem, expected))
    if value is UNIT:
        raise fault(machine, at, "() is no argument here", "a value")
    if wants_tensor and (isinstance(value, str) or callable(value)):
        raise fault(machine, at, f"{kind_of(value)} stands where a tensor is needed", "a tensor or a number")
    return value
