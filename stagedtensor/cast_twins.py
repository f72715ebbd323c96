"""Cast twins: the narrow copies of parameters that a model reads, beside wide masters that the optimizer trains.

In: a parameter and a float format. Out: the twin, an ordinary cast node, with master value and gradient pinned wide.
``master_weights`` applies this to every parameter created inside a block. Nothing is compiled, run or stored here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import TypeVar

from .errors import PrecisionError
from .node import Node, Placement, Role
from .precision import Prec, PrecLike, join, precision
from .precision_requests import conflict, specify_node
from .source import user_source
from .tensor import Tensor, _parameter_hook, cast, tensor_of
from .terminals import cell_like

T = TypeVar("T")


class TwinPlacement(Enum):
    """Where a twin lives. Its values are the same bits under all three."""

    AUTO = "auto"
    """The compiler's choice."""
    VIRTUAL = "virtual"
    """No buffer: the master is cast again at each read."""
    MATERIALIZED = "materialized"
    """One buffer, which always reads as the cast of the master's present value."""


def _placement(placement: TwinPlacement | str) -> TwinPlacement:
    try:
        return TwinPlacement(placement)
    except ValueError:
        names = ", ".join(repr(known.value) for known in TwinPlacement)
        raise ValueError(f"placement: expected one of {names}, got {placement!r} ({user_source().quoted()})") from None


def _formats(prec: PrecLike, master_prec: PrecLike) -> tuple[Prec, Prec]:
    narrow, wide = precision(prec), precision(master_prec)
    for name, chosen in (("prec", narrow), ("master_prec", wide)):
        if not chosen.is_float:
            raise PrecisionError(
                f"a cast twin needs float formats, got {name}={chosen} ({user_source().quoted()}); gradients flow "
                "through the cast, and an integer has none"
            )
    if join(narrow, wide) is not wide:
        raise PrecisionError(
            f"master_prec={wide} cannot hold every value of prec={narrow} ({user_source().quoted()}); "
            f"use master_prec={join(narrow, wide)}"
        )
    return narrow, wide


def _twins(master: Node) -> Iterator[Tensor]:
    for record in master.consumers:
        if record.attributes.get("twin"):
            yield tensor_of(record.result)


def twin_of(p: Tensor) -> Tensor | None:
    """Return the twin of a parameter (the first made, if it has several formats), or None."""
    if not isinstance(p, Tensor):
        raise TypeError(f"twin_of takes a parameter, not {type(p).__name__} ({user_source().quoted()})")
    return next(_twins(p.node), None)


def cast_param(
    p: Tensor, prec: PrecLike, *, placement: TwinPlacement | str = "auto", master_prec: PrecLike = "f32"
) -> Tensor:
    """Return the twin of parameter ``p`` at ``prec``, of p's shape; p becomes its master.

    Value and gradient of the master are specified at ``master_prec`` unless they are specified already: a parameter
    takes its precision from its consumers, so an unpinned one would follow the cast down. A second call at the same
    ``prec`` gives the same twin. A parameter without gradient, or a master whose format is ``prec``, is returned as it
    is. Raises TypeError for what is no parameter, ValueError for a placement that is unknown or not the existing
    twin's, PrecisionError for formats that do not fit.

    >>> import stagedtensor as st
    >>> st.cast_param(st.param("w", input=[4], output=[3]), "bf16").precision
    bf16
    """
    if not isinstance(p, Tensor) or p.node.role is not Role.PARAM:
        what = f"{p.label!r} ({p.node.role.value})" if isinstance(p, Tensor) else type(p).__name__
        raise TypeError(f"cast_param takes a parameter, not {what} ({user_source().quoted()}); use st.cast")
    wanted = _placement(placement)
    narrow, wide = _formats(prec, master_prec)
    gradient = p.node.gradient
    if gradient is None:
        return p
    existing = next(
        (twin for twin in _twins(p.node) if twin.node.specified and twin.node.specified.prec is narrow), None
    )
    if existing is not None:
        known = TwinPlacement(existing.node.placement.value)
        if wanted is not TwinPlacement.AUTO and wanted is not known:
            raise ValueError(
                f"cast_param: the {narrow} twin of {p.label!r} has placement {known.value!r} already, not "
                f"{wanted.value!r} ({user_source().quoted()})"
            )
        return existing
    _pin((p.node, gradient), wide)
    twin = cast(p, narrow)
    if twin is p:
        return p
    record = twin.node.record
    assert record is not None
    record.attributes["twin"] = True
    if wanted is TwinPlacement.MATERIALIZED:
        cell_like(twin.node)
    else:
        twin.node.placement = Placement(wanted.value)
    return twin


def _pin(nodes: tuple[Node, Node], wide: Prec) -> None:
    """Specify both nodes of a master, or neither."""
    source = user_source()
    for node in nodes:
        if node.settled is not None and node.specified is None and node.settled.prec is not wide:
            raise conflict(node, wide, source)
    for node in nodes:
        if node.specified is None:
            specify_node(node, wide, by="master", source=source, unless_specified=True)


@contextmanager
def master_weights(
    prec: PrecLike | None,
    placement: TwinPlacement | str = "auto",
    master_prec: PrecLike = "f32",
    *,
    only: Callable[[Tensor], bool] | None = None,
) -> Iterator[None]:
    """Give each differentiable parameter created inside the block a twin, which the model reads instead of it.

    It must surround construction. The innermost block alone applies; ``prec=None`` switches twins off. Parameters that
    fail ``only`` get none (norm gains, biases). The block is invisible to other threads and tasks.

    >>> import stagedtensor as st
    >>> with st.master_weights("bf16", only=lambda p: not p.name.endswith("bias")):
    ...     w, bias = st.param("w", input=[4], output=[3]), st.param("bias", output=[3])
    >>> w.precision, bias.precision
    (bf16, f32)
    """
    if only is not None and not callable(only):
        raise TypeError(f"only is a test of a parameter, not {only!r} ({user_source().quoted()})")
    where = _placement(placement)

    formats = None if prec is None else _formats(prec, master_prec)

    def twin(p: Tensor) -> Tensor:
        if formats is None or (only is not None and not only(p)):
            return p
        return cast_param(p, formats[0], placement=where, master_prec=formats[1])

    token = _parameter_hook.set(twin)
    try:
        yield
    finally:
        _parameter_hook.reset(token)


def with_master_weights(
    build: Callable[[], T],
    prec: PrecLike,
    placement: TwinPlacement | str = "auto",
    master_prec: PrecLike = "f32",
) -> T:
    """Return ``build()``, run inside :func:`master_weights`."""
    with master_weights(prec, placement, master_prec):
        return build()
