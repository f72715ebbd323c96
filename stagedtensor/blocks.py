"""Blocks: functions that make parameters, and the paths that name these.

``@block`` turns a function of configuration into one whose parameters are named by a path, ``mlp.first.dense.w``. A
call is the stage at which parameters come into being; what it returns is applied to tensors and makes none. The
naming state is two context variables, invisible to other threads and tasks. No tensor is touched here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Generic, TypeVar, overload

from .errors import LanguageError
from .source import user_source

T = TypeVar("T")


@dataclass(eq=False)
class Frame:
    """One open block: its path, and the names that parts of it already have."""

    path: str
    taken: set[str] = field(default_factory=set)

    def claim(self, name: str) -> str:
        """Return ``name``, or ``name_1``, ``name_2``, ... if a part of this block has it already."""
        choice, count = name, 0
        while choice in self.taken:
            count += 1
            choice = f"{name}_{count}"
        self.taken.add(choice)
        return choice


_frame: ContextVar[Frame | None] = ContextVar("stagedtensor_block", default=None)
_applied: ContextVar[str | None] = ContextVar("stagedtensor_applied_model", default=None)
_allowance: ContextVar[list[int] | None] = ContextVar("stagedtensor_block_allowance", default=None)


def qualified(name: str) -> str:
    """Return the path of a parameter ``name`` that is made here: the open block's path before it."""
    frame = _frame.get()
    return f"{frame.path}.{name}" if frame is not None else name


@contextmanager
def entered(name: str, label: str | None = None) -> Iterator[Frame]:
    """Open the block ``name``: parameters made inside get its path.

    With a ``label`` the path is parent, label, name; without one parent, name. A part's name is unique in its parent.
    Outside any block nothing is counted, so that names do not depend on what else a process has built.
    """
    parent = _frame.get()
    allowance = _allowance.get()
    if allowance is not None:
        allowance[0] -= 1
        if allowance[0] < 0:
            raise LanguageError(
                f"more blocks than one call into a text may make\n  {user_source().quoted()}\n"
                "  make the count of layers smaller, or build the model in Python"
            )
    if parent is None:
        path = name if label is None else f"{label}.{name}"
    else:
        part = parent.claim(label or name)
        path = f"{parent.path}.{part}" if label is None else f"{parent.path}.{part}.{name}"
    frame = Frame(path)
    with inside(frame):
        yield frame


@contextmanager
def at_most(count: int) -> Iterator[None]:
    """Let what runs inside open ``count`` blocks; one more is a LanguageError."""
    token = _allowance.set([count])
    try:
        yield
    finally:
        _allowance.reset(token)


@contextmanager
def inside(frame: Frame) -> Iterator[None]:
    """Make ``frame`` the open block; parameters may be made."""
    frame_token, applied_token = _frame.set(frame), _applied.set(None)
    try:
        yield
    finally:
        _applied.reset(applied_token)
        _frame.reset(frame_token)


@contextmanager
def applying(name: str) -> Iterator[None]:
    """Mark what runs inside as the application of the model ``name``: no parameter may be made."""
    token = _applied.set(name)
    try:
        yield
    finally:
        _applied.reset(token)


def applied_model() -> str | None:
    """Return the name of the model that is being applied to tensors, None outside."""
    return _applied.get()


def check_stage(what: str) -> None:
    """Raise LanguageError where ``what`` ("parameter 'w'") would be made while a model is applied to tensors."""
    model = _applied.get()
    if model is not None:
        raise LanguageError(
            f"{what} would be made anew at every application of {model!r}\n  {user_source().quoted()}\n"
            f"  make it when the block {model!r} is called, and only use it in the function that the block returns"
        )


class Block(Generic[T]):
    """A function whose call is the stage at which parameters are made; see :func:`block`."""

    def __init__(self, function: Callable[..., T], name: str) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self.name = name
        """The last part of the path of its parameters."""

    def __call__(self, *args: Any, label: str | None = None, **kwargs: Any) -> T:
        """Make the parameters and return what the function returns."""
        if label is not None and (not isinstance(label, str) or not label):
            raise TypeError(f"{self.name}: label is a non-empty string, not {label!r} ({user_source().quoted()})")
        check_stage(f"the block {self.name!r}")
        with entered(self.name, label):
            try:
                made = self._function(*args, **kwargs)
            except TypeError as error:
                # tensors are not known at this layer; all of them have a node
                if not any(hasattr(value, "node") for value in (*args, *kwargs.values())):
                    raise
                raise TypeError(
                    f"the block {self.name!r} was given a tensor where its configuration stands: {error}\n"
                    f"  {user_source().quoted()}\n"
                    f"  configure it first, then apply what it returns: layer = {self.name}(...); y = layer(x)"
                ) from error
        return _guarded(made, self.name)

    def __repr__(self) -> str:
        return f"<block {self.name}>"


def _guarded(made: T, name: str) -> T:
    """Wrap a function that a block returns, so that an application that makes parameters is an error."""
    if not isinstance(made, FunctionType):
        return made

    @functools.wraps(made)
    def apply(*args: Any, **kwargs: Any) -> Any:
        with applying(name):
            return made(*args, **kwargs)

    return apply  # type: ignore[return-value]


@overload
def block(function: Callable[..., T], /) -> Block[T]: ...


@overload
def block(*, name: str) -> Callable[[Callable[..., T]], Block[T]]: ...


def block(function: Callable[..., T] | None = None, /, *, name: str | None = None) -> Any:
    """Name the parameters that a function makes after it; its call is the stage at which they come into being.

    A call takes ``label=``: inside a block ``mlp``, ``dense(64, label="first")`` names ``mlp.first.dense.w``. Without a
    label the path is ``mlp.dense.w``, the second time ``mlp.dense_1.w``. ``name=`` replaces the function's name.

    >>> import stagedtensor as st
    >>> @st.block
    ... def dense(hid):
    ...     w, b = st.param("w"), st.param("b", output=[hid], init=0.0)
    ...     return lambda x: st.relu(w @ x + b)
    >>> layer = dense(64)                # makes dense.w and dense.b
    >>> y = layer(st.placeholder("x", output=[3]))     # makes none; applying it twice shares them
    >>> [p.name for p in y.params]
    ['dense.w', 'dense.b']

    Raises LanguageError where the returned function makes a parameter, or calls a block.
    """
    if function is None:
        if not isinstance(name, str) or not name:
            raise TypeError(f"block: name is a non-empty string, not {name!r} ({user_source().quoted()})")
        return functools.partial(_make, name=name)
    if not callable(function):
        raise TypeError(f"block decorates a function, not {function!r} ({user_source().quoted()})")
    return _make(function, name=getattr(function, "__name__", "block"))


def _make(function: Callable[..., T], *, name: str) -> Block[T]:
    return Block(function, name.replace("<lambda>", "block"))
