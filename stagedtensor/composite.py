"""Composites: functions of several nodes that round once.

``@composite("name")`` turns any function of tensors into one op for rounding purposes: the interior runs at the compute
precision of the result, each argument enters through an interior alias and the result leaves through one rounding; each
argument's gradient is rounded once, when the alias hands it on. Composites nest; interiors follow the outermost.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from .errors import StagedTensorError
from .predicates import declare_op_kind
from .source import user_source
from .specs import pointwise
from .statement_text import op_text
from .statements import Composite, Operand, Slot
from .tensor import Tensor, _composite, apply_op, read_here

F = TypeVar("F", bound=Callable[..., Tensor])


def composite(name: str, *, float_only: bool = False, wide_result: bool = False) -> Callable[[F], F]:
    """Make a function of tensors one op: one rounding for the result, one for each argument's gradient.

    ``float_only``: integer arguments join with the session default. ``wide_result``: the result is f32 or wider
    whatever the arguments are (losses). Every tensor argument (positional or keyword) becomes an alias inside.

    >>> import stagedtensor as st
    >>> @st.composite("square_sum")
    ... def square_sum(x):
    ...     return st.sum(x * x)
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise TypeError(f"a composite's name is an identifier, not {name!r}")
    declare_op_kind(name)

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def build(*args: Any, **kwargs: Any) -> Tensor:
            return _build(name, function, args, kwargs, float_only=float_only, wide_result=wide_result)

        return build  # type: ignore[return-value]

    return decorate


def _build(
    name: str, function: Callable[..., Tensor], args: Any, kwargs: Any, *, float_only: bool, wide_result: bool
) -> Tensor:
    args = [read_here(value) if isinstance(value, Tensor) else value for value in args]
    kwargs = {key: read_here(value) if isinstance(value, Tensor) else value for key, value in kwargs.items()}
    from_user = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    outer = list(dict.fromkeys(from_user))
    if not outer:
        return function(*args, **kwargs)
    group = Composite(name, user_source(), parent=_composite.get(), float_only=float_only, wide_result=wide_result)
    token = _composite.set(group)
    try:
        aliases = {tensor: enter(tensor, group) for tensor in outer}

        def inside(value: Any) -> Any:
            return aliases[value] if isinstance(value, Tensor) else value

        inner = function(*map(inside, args), **{key: inside(value) for key, value in kwargs.items()})
    finally:
        _composite.reset(token)
    if not isinstance(inner, Tensor):
        raise StagedTensorError(f"composite {name!r} must return one tensor, it returned {type(inner).__name__}")
    slots = {alias: Slot.DATA for alias in aliases.values()}
    for alias in aliases.values():
        uses = {
            operand.slot for record in alias.node.consumers for operand in record.operands if operand.node is alias.node
        }
        if uses and Slot.DATA not in uses:
            slots[alias] = uses.pop()
    group.operands = tuple(Operand(tensor.node, slots[alias]) for tensor, alias in aliases.items())
    group.aliases = tuple(alias.node for alias in aliases.values())
    group.inner = inner.node
    text = op_text(name, [tensor.node for tensor in outer])
    result = apply_op("leave", (inner,), pointwise(1), lambda a: a, composite=group, label=name, text=text)
    result.node.tags |= {name}
    if result.node.gradient is not None:
        result.node.gradient.tags |= {name}
    group.result = result.node
    return result


def enter(tensor: Tensor, group: Composite) -> Tensor:
    """Return the interior alias of an argument."""
    return apply_op(
        "enter", (tensor,), pointwise(1), lambda a: a, composite=group, label=tensor.label, text=tensor.label
    )
