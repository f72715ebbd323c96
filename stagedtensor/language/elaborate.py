"""The elaborator: evaluates model syntax by making the calls that the same model in Python makes.

In: syntax, a scope, the words. Out: values: tensors, functions, numbers, computations. Parameters are made when ``()``
is applied, those of a function's body in the order of the text when the function is made. Every node gets the line of
the text as its source. Evaluation is bounded in steps; nothing of Python but words and given functions is ever called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from stagedtensor import boundary
from stagedtensor.blocks import applying, inside
from stagedtensor.errors import GradientError, LanguageError, StagedTensorError
from stagedtensor.precision import Prec
from stagedtensor.source import written_at
from stagedtensor.tensor import Tensor, apply_pointwise
from stagedtensor.terminals import constant, param

from . import model_ast as ast
from .caret import near
from .elaborate_calls import apply, destructured
from .elaborate_operators import OperatorError, checked, is_number, on_numbers, on_tensors, on_values
from .elaborate_statements import computation_of
from .model_arrays import as_tensor, is_array, leaves, number_array
from .model_scope import PARAMETER_FIELDS
from .model_text import Text
from .model_values import UNIT, BatchArray, Function, Given, Scope, Stage, bounded, fault, kind_of, sized, step
from .words import words

_EINSUM = {"++": {}, "@^": {"reduce": "max"}, "@^^": {"reduce": "max"}, "+*": {}, "@^*": {"reduce": "max"},
           "@^+": {"reduce": "max", "combine": "add"}}  # fmt: skip
"""What einsum is given for each operator."""


@dataclass(frozen=True, eq=False)
class Later:
    """A definition without parameters: evaluated when it is first used."""

    evaluate: Callable[[], Any]


@dataclass(frozen=True, eq=False)
class Elaborator:
    """Evaluates the expressions of one text."""

    text: Text

    # -- entry from Python --------------------------------------------------------------------------------------------
    def call(self, function: Function, given: list[Given], label: str | None) -> Any:
        """Apply a function to arguments from Python; none at all are ``()``."""
        if label is not None and (not isinstance(label, str) or not label):
            raise fault(self, None, f"{function.name!r}: label is a non-empty string, not {label!r}")
        if label is not None and function.stage_at is None:
            raise fault(self, None, f"{function.name!r} is no block, so it takes no label")
        if not given and function.stage_at is None:
            raise fault(
                self, None, f"{function.name!r} is called with nothing, and has no () left", "its arguments",
                "the parameters of a model are made at one (): model = net(); y = model(x)",
            )  # fmt: skip
        arguments = [Given(entry.label, from_python(self, entry.value, function.name)) for entry in given]
        with self._guarded(function.name):
            if label is not None and arguments:  # the label is for the () to come
                configured = apply(self, function, arguments, None)
                return _Configured(configured, label)
            return self.to_python(apply(self, function, arguments or [Given(None, UNIT)], None, label))

    def run(self, body: ast.Expr, scope: Scope, name: str) -> Any:
        """Evaluate a definition without parameters."""
        with self._guarded(name), applying(name):
            return self.to_python(self.evaluate(body, scope))

    @contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        with bounded() as outermost:
            try:
                yield
            except RecursionError:
                if not outermost:
                    raise
                raise fault(
                    self, None, f"{name!r} applies functions too deep", "fewer functions inside each other"
                ) from None

    def to_python(self, value: Any) -> Any:
        """Return a value as Python gets it."""
        if isinstance(value, BatchArray):
            return as_tensor(value, self._refusal(None))
        if type(value) in (list, tuple) and any(isinstance(item, BatchArray) for item in value):
            return type(value)(map(self.to_python, value))
        return value

    def _refusal(self, at: int | None) -> Callable[[str, str], LanguageError]:
        return lambda problem, expected: fault(self, at, problem, expected)

    # -- expressions --------------------------------------------------------------------------------------------------
    def evaluate(self, node: ast.Expr, scope: Scope, label: str | None = None) -> Any:
        """Return the value of an expression; ``label`` names the block that it makes, if it makes one."""
        step(self, node.at)
        match node:
            case ast.Number(value) | ast.String(value) | ast.Boolean(value):
                return value
            case ast.Unit():
                return UNIT
            case ast.Name(name):
                return self._lookup(name, scope, node.at)
            case ast.Apply_(function, arguments):
                return self._apply(node, function, arguments, scope, label)
            case ast.Binary(operator, left, right):
                return self._binary(node, operator, left, right, scope)
            case ast.Let(bindings, body):
                return self._let(bindings, body, scope, label)
            case ast.Fun(parameters, body):
                return self._function("fun", parameters, body, scope)
            case ast.InlineParameter():
                return self._parameter(node, scope)
            case ast.If(condition, yes, no):
                return self.evaluate(yes if self.condition(condition, scope) else no, scope, label)
            case ast.Negative(value):
                return self._negative(node, self.evaluate(value, scope))
            case ast.Tuple_(items):
                return sized(self, tuple(self._items(items, scope)), node.at)
            case ast.List_(items):
                return sized(self, self._items(items, scope), node.at)
            case ast.BatchArray(items):
                return sized(self, BatchArray(self._items(items, scope)), node.at)
            case ast.Reduce(operator, value, spec):
                return self._einsum(node, operator, spec, [value], scope)
            case ast.Einsum(operator, left, spec, right):
                return self._einsum(node, operator, spec, [left, right], scope)
            case ast.Field(value, name):
                return self._field(node, self.evaluate(value, scope), name)
            case ast.Ascription(value, precision):
                return self._ascribed(node, self.evaluate(value, scope), precision, scope)
            case ast.Sequence_(items):
                return self._sequence(items, scope)
            case ast.Assignment():
                return computation_of(self, [node], scope)
            case ast.StageBoundary():
                region = self._region(node, scope)
                with region:
                    value = self.evaluate(node.value, scope)
                return region.leave(value)

    def _items(self, items: tuple[ast.Expr, ...], scope: Scope) -> list[Any]:
        return [self.evaluate(item, scope) for item in items]

    def _lookup(self, name: str, scope: Scope, at: int) -> Any:
        if name not in scope.names:
            raise self.text.fault(at, f"unbound name {name!r}", advice=near(name, scope.names))
        value = scope.names[name]
        return value.evaluate() if isinstance(value, Later) else value

    def condition(self, node: ast.Expr, scope: Scope) -> bool:
        """Evaluate the condition of an ``if``."""
        value = self.evaluate(node, scope)
        if isinstance(value, bool):
            return value
        advice = "a choice between tensors is where condition a b" if isinstance(value, Tensor) else ""
        raise self.text.fault(
            node.at, f"the condition is {kind_of(value)}", "true or false, known when the model is built", advice
        )

    def _let(self, bindings: tuple[ast.Binding, ...], body: ast.Expr, scope: Scope, label: str | None) -> Any:
        for binding in bindings:
            name = binding.pattern.name if isinstance(binding.pattern, ast.NamePattern) else None
            if binding.parameters:
                value = self._function(name or "_", binding.parameters, binding.value, scope)
            else:
                value = self.evaluate(binding.value, scope, None if name == "_" else name)
            scope = scope.bind(destructured(self, binding.pattern, value, binding.at))
        return self.evaluate(body, scope, label)

    def _function(self, name: str, parameters: tuple[ast.Parameter, ...], body: ast.Expr, scope: Scope) -> Function:
        made = Function(name, parameters, body, scope, self)
        if made.stage_at is None:
            self.make_parameters(body, scope, frozenset(name for name, _ in ast.parameter_names(parameters)))
        return made

    def _apply(
        self, node: ast.Expr, function: ast.Expr, arguments: tuple[ast.Argument, ...], scope: Scope, label: str | None
    ) -> Any:
        value = self.evaluate(function, scope)
        given = [Given(argument.label, self.evaluate(argument.value, scope), argument.at) for argument in arguments]
        return apply(self, value, given, node.at, label)

    # -- operators ----------------------------------------------------------------------------------------------------
    @contextmanager
    def _at(self, at: int) -> Iterator[None]:
        """Build nodes with the line at ``at`` as their source; name the place where operands do not fit."""
        try:
            with written_at(self.text.source(at)):
                yield
        except OperatorError as error:
            raise self.text.fault(at, *error.args) from None
        except StagedTensorError:
            raise
        except (TypeError, ValueError) as error:
            raise self.text.fault(at, str(error)) from None

    def _binary(self, node: ast.Expr, operator: str, left: ast.Expr, right: ast.Expr, scope: Scope) -> Any:
        first = self.evaluate(left, scope)
        if operator in ("&&", "||") and isinstance(first, bool):
            if first is (operator == "||"):
                return first
            second = self.evaluate(right, scope)
            if isinstance(second, bool):
                return second
        else:
            second = self.evaluate(right, scope)
        with self._at(node.at):
            if operator == "@|":
                return self._tensor(first, node.at)[second]
            if is_number(first) and is_number(second) and operator not in ("&&", "||"):
                return on_numbers(operator, first, second)
            if not _is_tensor(first) and not _is_tensor(second) and not (_is_rows(first) or _is_rows(second)):
                return on_values(operator, first, second)
            return on_tensors(operator, self._operand(first, node.at), self._operand(second, node.at))

    def _operand(self, value: Any, at: int) -> Any:
        """Return an operand: arrays become tensors, numbers stay."""
        return as_tensor(value, self._refusal(at)) if is_array(value) else value

    def _tensor(self, value: Any, at: int) -> Tensor:
        found = self._operand(value, at)
        if not isinstance(found, Tensor):
            raise OperatorError(f"{kind_of(found)} stands where a tensor is needed", "a tensor", "")
        return found

    def _negative(self, node: ast.Expr, value: Any) -> Any:
        with self._at(node.at):
            if is_number(value):
                return checked(-value)
            if _is_tensor(value) or is_array(value):
                return apply_pointwise("neg", self._operand(value, node.at))
        raise self.text.fault(node.at, f"'-' has {kind_of(value)}", "a number or a tensor")

    def _einsum(self, node: ast.Expr, operator: str, spec: str, operands: list[ast.Expr], scope: Scope) -> Any:
        values = [self.evaluate(operand, scope) for operand in operands]
        with self._at(node.at):
            tensors = [self._operand(value, node.at) for value in values]
            return words()["einsum"](spec, *tensors, **_EINSUM[operator])

    def _field(self, node: ast.Expr, value: Any, name: str) -> Any:
        if isinstance(value, Tensor):
            if name != "grad":
                raise self.text.fault(node.at, f"a tensor has no field {name!r}", "grad")
            if value.grad is None:
                raise GradientError(
                    f"{value.label!r} has no gradient\n  {self.text.source(node.at).quoted()}\n"
                    "  only what leads to a trainable parameter (or to a placeholder with requires_grad=True) has one"
                )
            return value.grad
        if isinstance(value, Mapping) and name in value:  # captured sizes
            return value[name]
        if isinstance(value, Mapping):  # captured sizes or blocks
            owner = repr(node.value.name) if isinstance(node, ast.Field) and isinstance(node.value, ast.Name) else "it"
            raise self.text.fault(node.at, f"{owner} has no {name!r}", advice=near(name, value))
        raise self.text.fault(
            node.at, f"{kind_of(value)} has no field {name!r}", "the gradient of a tensor or a captured size"
        )

    def precision_of(self, node: ast.Name, scope: Scope) -> Prec:
        """Return the precision that a name stands for."""
        value = self._lookup(node.name, scope, node.at)
        if not isinstance(value, Prec):
            raise self.text.fault(node.at, f"{node.name!r} is {kind_of(value)}", "a precision such as bf16")
        return value

    def _ascribed(self, node: ast.Expr, value: Any, precision: ast.Name, scope: Scope) -> Any:
        prec = self.precision_of(precision, scope)
        with self._at(node.at):
            if is_number(value):
                return constant(value, prec=prec)
            tensor = self._tensor(value, node.at)
            words()["specify"](tensor, prec)
            return tensor

    def _region(self, node: ast.StageBoundary, scope: Scope) -> boundary.Stage:
        """Make the region of ``stage precision "label"``; a name that is bound to a precision means that one."""
        prec: Any = None if node.precision is None else node.precision.name
        bound = scope.names.get(prec)
        with self._at(node.at):
            weights: boundary.Weights = "narrow" if node.weights and node.weights.name == "narrow" else "master"
            return boundary.stage(node.label, bound if isinstance(bound, Prec) else prec, weights)

    def _sequence(self, items: tuple[ast.Expr, ...], scope: Scope) -> Any:
        """Join computations; assignments in a row are one computation, as in a string."""
        parts: list[Any] = []
        run: list[ast.Assignment] = []
        for item in (*items, None):
            if isinstance(item, ast.Assignment):
                run.append(item)
                continue
            if run:
                parts.append(computation_of(self, run, scope))
                run = []
            if item is not None:
                value = self.evaluate(item, scope)
                if kind_of(value) != "a computation":
                    raise self.text.fault(item.at, f"{kind_of(value)} stands between ';'", "a computation")
                parts.append(value)
        with self._at(items[0].at):
            return words()["sequence"](*parts)

    # -- parameters ---------------------------------------------------------------------------------------------------
    def make_parameters(self, body: ast.Expr, scope: Scope, hidden: frozenset[str]) -> None:
        """Make the parameters in a function's body in the order of the text.

        ``hidden`` are names that the application will bind: rows and initial values cannot depend on them. Of an
        ``if`` whose condition is known only the branch that is taken counts.
        """
        if scope.stage is None or not scope.stage.open:
            return
        step(self, body.at)
        match body:
            case ast.InlineParameter():
                if id(body) not in scope.stage.made:
                    self._check_known(body, hidden)
                    self._parameter(body, scope)
            case ast.Let(bindings, inner):
                for binding in bindings:
                    if not any(isinstance(parameter, ast.UnitParameter) for parameter in binding.parameters):
                        names = frozenset(name for name, _ in ast.parameter_names(binding.parameters))
                        self.make_parameters(binding.value, scope, hidden | names)
                    hidden |= {name.name for name in ast.bound_names(binding.pattern)}
                self.make_parameters(inner, scope, hidden)
            case ast.Fun(parameters, inner):
                names = frozenset(name for name, _ in ast.parameter_names(parameters))
                self.make_parameters(inner, scope, hidden | names)
            case ast.If(condition, yes, no):
                self.make_parameters(condition, scope, hidden)
                if _mentions(condition, hidden) is None:
                    self.make_parameters(yes if self.condition(condition, scope) else no, scope, hidden)
                else:
                    self.make_parameters(yes, scope, hidden)
                    self.make_parameters(no, scope, hidden)
            case ast.StageBoundary(_, _, inner):
                with self._region(body, scope):
                    self.make_parameters(inner, scope, hidden)
            case _:
                for child in ast.children(body):
                    inner_node = child.value if isinstance(child, ast.Argument) else child
                    self.make_parameters(inner_node, scope, hidden)  # type: ignore[arg-type]

    def _check_known(self, node: ast.InlineParameter, hidden: frozenset[str]) -> None:
        for child in ast.children(node):
            found = _mentions(child, hidden)
            if found is not None:
                raise self.text.fault(
                    found.at,
                    f"{found.name!r} is known only when the function is applied",
                    f"configuration: the parameter {node.name!r} is made at ()",
                )

    def _parameter(self, node: ast.InlineParameter, scope: Scope) -> Any:
        stage = scope.stage
        if stage is not None and id(node) in stage.made:
            return stage.made[id(node)]
        if stage is None or not stage.open:
            raise self.text.fault(node.at, f"the parameter {node.name!r} is not made at ()")
        if node.name in stage.names:
            raise self._repeated(node, stage)
        options: dict[str, Any] = {}
        if node.precision is not None:
            options["prec"] = self.precision_of(node.precision, scope)
        for field in node.fields:
            options[PARAMETER_FIELDS[field.name]] = self.evaluate(field.value, scope)
        if node.initial is not None:
            self._initial(node.initial, self.evaluate(node.initial, scope), options)
        with self._at(node.at), inside(stage.frame):
            made = param(node.name, **options)
        stage.made[id(node)], stage.names[node.name] = made, node
        return made

    def _repeated(self, node: ast.InlineParameter, stage: Stage) -> LanguageError:
        first = self.text.line(stage.names[node.name].at)
        return self.text.fault(
            node.at,
            f"the stage of {stage.name!r} has a parameter {node.name!r} already (line {first})",
            advice=f"bind it where it is made, let {node.name} = {{ {node.name} }} in, to use it in several places; "
            "else give it another name",
        )

    def _initial(self, node: ast.Expr, value: Any, options: dict[str, Any]) -> None:
        """Put an initial value into the options of ``param``: an array brings its rows."""
        if not is_array(value):
            options["init"] = value
            return
        if any(isinstance(leaf, Tensor) for leaf in leaves(value)):
            raise self.text.fault(node.at, "the initial value of a parameter is an array of tensors", "numbers")
        cells, counts = number_array(value, self._refusal(node.at))
        if counts["batch"]:
            raise self.text.fault(node.at, "a parameter has no batch axis", "[ ] for output axes, ( , ) for input axes")
        options["init"] = np.asarray(cells)
        options.setdefault("output", counts["output"])
        options.setdefault("input", counts["input"])


class _Configured:
    """A configured block with the label of the ``()`` to come."""

    def __init__(self, block: Any, label: str) -> None:
        self._block = block
        self._label = label

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._block(*args, **{"label": self._label, **kwargs})


def _mentions(node: ast.Syntax, names: frozenset[str]) -> ast.Name | None:
    """Return the first of ``names`` that an expression mentions."""
    if isinstance(node, ast.Name):
        return node if node.name in names else None
    return next((found for child in ast.children(node) if (found := _mentions(child, names)) is not None), None)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or hasattr(value, "__tensor__") or isinstance(value, np.ndarray)


def _is_rows(value: Any) -> bool:
    """Whether a list or tuple can only be meant as an array: all its leaves are numbers or tensors."""
    return is_array(value) and all(is_number(leaf) or _is_tensor(leaf) for leaf in leaves(value))


def from_python(elaborator: Elaborator, value: Any, name: str) -> Any:
    """Return a value from Python as the language has it."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list):
        return [from_python(elaborator, item, name) for item in value]
    if type(value) is tuple:
        return tuple(from_python(elaborator, item, name) for item in value)
    if isinstance(value, dict | set | bytes | complex):
        raise fault(
            elaborator,
            None,
            f"{name!r} is given {kind_of(value)}",
            "numbers, truth values, strings, tensors, lists, tuples or functions",
        )
    return value
