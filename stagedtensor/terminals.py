"""Terminals: placeholders, parameters, constants, host scalars, ranges, static indices, random tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .blocks import check_stage, qualified
from .conversion import convert, ingest, representable
from .dims import Axis, CapturedDim, DeclaredAxis, DeclaredRow, DeclaredShape, DynamicDim, Index, Shape
from .encoded import Encoded
from .errors import EncodingError, PrecisionError, ShapeError
from .initializers import DEFAULT, Initializer, as_initializer, stream_key
from .node import Node, Placement, Role, Specified
from .precision import Prec, f32, i32, precision
from .settings import is_integer, is_number
from .source import user_source
from .specs import ALL_ROWS, FILL
from .statements import Apply, LinearIndex, NumberLiteral
from .tensor import Tensor, _parameter_hook, add_gradient, adopt, apply_op, encoded_constant, new_node

Rows = Sequence[Any] | int | None
"""Axes as the user writes them: sizes, ``None`` (inferred), ``("label", size)``, ``st.dynamic`` extents, captures."""


def index(name: str, size: int) -> Index:
    """Declare a static index running over ``0 .. size-1``; ``x[i]`` reads the leftmost batch axis at it."""
    _check_name(name, "index")
    if not is_integer(size, 1):
        raise ShapeError(f"index {name!r}: expected a size of at least 1, got {size!r} ({user_source().quoted()})")
    return Index(name, int(size))


def dynamic(name: str, max: int) -> DynamicDim:
    """Declare a run-time extent up to ``max`` for a batch axis; bind it with ``ctx.run(routine, name=extent)``."""
    _check_name(name, "dynamic extent")
    if not is_integer(max, 1):
        raise ShapeError(f"dynamic {name!r}: expected a maximum of at least 1, got {max!r} ({user_source().quoted()})")
    return DynamicDim(name, int(max))


def _check_name(name: Any, what: str) -> None:
    if not isinstance(name, str) or not name:
        raise TypeError(f"the name of a {what} is a non-empty string, not {name!r} ({user_source().quoted()})")


def declared_axis(entry: Any) -> DeclaredAxis:
    """Read one axis as the user wrote it."""
    label = None
    if isinstance(entry, tuple):
        if len(entry) != 2 or not isinstance(entry[0], str):
            raise ShapeError(f'expected an axis as a size or ("label", size), got {entry!r} ({user_source().quoted()})')
        label, entry = entry
    if entry is None or isinstance(entry, DynamicDim | CapturedDim):
        return DeclaredAxis(entry, label)
    if not is_integer(entry, 0):
        raise ShapeError(
            f"expected an axis size (an integer >= 0, None to infer it, or st.dynamic), got {entry!r} "
            f"({user_source().quoted()})"
        )
    return DeclaredAxis(int(entry), label)


def declared_row(rows: Rows, *, open_if_none: bool) -> DeclaredRow:
    """Read one row; None is open or empty, a bare integer is one axis."""
    if rows is None:
        return DeclaredRow(open=open_if_none)
    if is_integer(rows) or isinstance(rows, DynamicDim | CapturedDim):
        rows = [rows]
    if isinstance(rows, str) or not isinstance(rows, Sequence):
        raise ShapeError(f"expected a row as a list of sizes, got {rows!r} ({user_source().quoted()})")
    return DeclaredRow(tuple(declared_axis(entry) for entry in rows))


def placeholder(
    name: str,
    *,
    batch: Rows = (),
    input: Rows = (),
    output: Rows = (),
    prec: Any = None,
    requires_grad: bool = False,
) -> Tensor:
    """Declare data that the host feeds with ``ctx.set_values``; axis sizes may be None (inferred from use)."""
    _check_name(name, "placeholder")
    declared = DeclaredShape(
        declared_row(batch, open_if_none=False),
        declared_row(input, open_if_none=False),
        declared_row(output, open_if_none=False),
    )
    format_ = None if prec is None else precision(prec)
    if requires_grad and format_ is not None and not format_.is_float:
        raise PrecisionError(
            f"placeholder {name!r}: {format_} cannot carry a gradient; use a float precision ({user_source().quoted()})"
        )
    node = new_node(Role.PLACEHOLDER, name, declared=declared, top_down=True)
    return _finish(node, format_, requires_grad)


def param(
    name: str,
    *,
    input: Rows = None,
    output: Rows = None,
    init: Any = None,
    prec: Any = None,
    trainable: bool = True,
) -> Tensor:
    """Declare a parameter; rows left None are inferred from use. It never has batch axes.

    ``init`` is a number, an initializer, or an array (its values and shape; never its format). A 2-d array is read as
    ``(output, input)`` unless rows are given. None draws uniformly from +-1/sqrt(fan_in) where there is an input row,
    else 0. Inside a block the name is a path: the block's, then ``name``.
    """
    _check_name(name, "parameter")
    name = qualified(name)
    check_stage(f"parameter {name!r}")
    format_ = None if prec is None else precision(prec)
    if isinstance(init, Encoded):
        raise EncodingError(
            f"parameter {name!r}: encoded weights are never trained; use st.constant(encoded), or init=encoded.numpy() "
            f"({user_source().quoted()})"
        )
    data = None
    initializer = as_initializer(init) if init is not None else None
    if init is not None and initializer is None:
        data = ingest(init).array
        declared = _rows_of_array(name, data, input, output)
    else:
        declared = DeclaredShape(
            DeclaredRow(), declared_row(input, open_if_none=True), declared_row(output, open_if_none=True)
        )
    if trainable and format_ is not None and not format_.is_float:
        raise PrecisionError(
            f"parameter {name!r}: {format_} cannot be trained; pass trainable=False or a float precision "
            f"({user_source().quoted()})"
        )
    node = new_node(Role.PARAM, name, declared=declared, top_down=True)
    node.trainable = trainable
    node.init = initializer if initializer is not None else None if data is not None else DEFAULT
    node.data = None if data is None else data.copy()
    node.observable = True
    result = _finish(node, format_, trainable)
    hook = _parameter_hook.get()
    return hook(result) if hook is not None and trainable else result


def _finish(node: Node, prec: Prec | None, with_gradient: bool) -> Tensor:
    if prec is not None:
        node.specified = Specified(prec, node.source, "user")
    if with_gradient:
        add_gradient(node)
    adopt(node)
    return Tensor(node)


def _rows_of_array(name: str, data: np.ndarray[Any, Any], input_: Rows, output: Rows) -> DeclaredShape:
    shape = data.shape
    if input_ is None and output is None:
        split = 1 if data.ndim == 2 else data.ndim
    elif input_ is not None:
        split = data.ndim - (len(input_) if isinstance(input_, Sequence) else input_)
    else:
        split = len(output) if isinstance(output, Sequence) else output or 0
    declared = (shape[:split], shape[split:]) if 0 <= split <= data.ndim else None
    for given, taken in ((output, declared and declared[0]), (input_, declared and declared[1])):
        wanted = tuple(given) if isinstance(given, Sequence) else None
        fits = taken is not None and (
            wanted is None
            or (len(wanted) == len(taken) and all(w in (None, t) or w == t for w, t in zip(wanted, taken, strict=True)))
        )
        if not fits:
            raise ShapeError(
                f"parameter {name!r}: init has shape {shape}, which does not split into output {output!r} and input "
                f"{input_!r} ({user_source().quoted()})"
            )
    assert declared is not None
    return DeclaredShape(
        DeclaredRow(),
        declared_row(list(declared[1]), open_if_none=False),
        declared_row(list(declared[0]), open_if_none=False),
    )


def constant(
    value: Any,
    *,
    batch: int | None = None,
    input: int | None = None,
    output: int | None = None,
    prec: Any = None,
    label: str | None = None,
) -> Tensor:
    """Make a constant of a number, a nested list, an array or an encoded weight.

    All axes go into the output row unless rows are given as axis counts (memory order batch, output, input). Arrays
    bring their format; numbers and lists take it from use; ``prec`` converts at ingestion.
    """
    if isinstance(value, Tensor):
        raise TypeError(f"tensor {value.label!r} is not a constant; use st.cast to change its precision")
    if isinstance(value, Encoded):
        if (batch, input, output, prec) != (None,) * 4:
            raise EncodingError(
                f"constant: an encoded weight has its last axis as input row, the others as output row, and its own "
                f"precision; rows and prec cannot be given ({user_source().quoted()})"
            )
        return encoded_constant(value, label)
    data, own = ingest(value)
    counts = {"batch": batch, "input": input, "output": output}
    for row, count in counts.items():
        if count is not None and not is_integer(count, 0):
            raise ShapeError(f"constant: {row} is a number of axes, got {count!r} ({user_source().quoted()})")
    given = sum(int(count or 0) for count in counts.values())
    rest = data.ndim - given
    if output is None and rest >= 0:
        counts["output"], rest = rest, 0
    if rest != 0:
        raise ShapeError(
            f"constant: rows batch={batch}, output={output}, input={input} name {given} axes, the array has "
            f"{data.ndim} (shape {data.shape}) ({user_source().quoted()})"
        )
    n_batch, n_output = int(counts["batch"] or 0), int(counts["output"] or 0)
    format_ = precision(prec) if prec is not None else own
    node = new_node(
        Role.LITERAL if format_ is None else Role.CONSTANT,
        label or (str(value) if isinstance(value, bool | int | float) else "constant"),
        declared=shape_of_array(data, n_batch, n_output),
        top_down=format_ is None,
    )
    if format_ is None:
        node.literal, node.data = value, data.copy()
        adopt(node)
    else:
        node.specified = Specified(format_, node.source, "data")
        node.data = convert(data, format_)
    return Tensor(node)


def shape_of_array(data: np.ndarray[Any, Any], batch: int = 0, output: int | None = None) -> DeclaredShape:
    """Declare an array's shape: ``batch`` axes, then ``output`` axes (None: all the rest), then input axes."""
    end = data.ndim if output is None else batch + output

    def row(sizes: tuple[int, ...]) -> DeclaredRow:
        return DeclaredRow(tuple(DeclaredAxis(size) for size in sizes))

    return DeclaredShape(row(data.shape[:batch]), row(data.shape[end:]), row(data.shape[batch:end]))


def range_(n: int, *, prec: Any = i32) -> Tensor:
    """Return 0 .. n-1 as a vector; its precision is fixed (i32), so no user of it can narrow it."""
    if not is_integer(n, 0):
        raise ShapeError(f"range: expected a length >= 0, got {n!r} ({user_source().quoted()})")
    node = new_node(Role.RANGE, f"range{n}", declared=DeclaredShape(output=DeclaredRow((DeclaredAxis(int(n)),))))
    node.specified = Specified(precision(prec), node.source, "range")
    return Tensor(node)


def host_scalar(name: str, value: float, prec: Any = f32) -> Tensor:
    """Make one device-resident cell that the host overwrites with ``ctx.set_values``; never baked into source."""
    _check_name(name, "host scalar")
    if not is_number(value):
        raise TypeError(f"host scalar {name!r}: expected a number, got {value!r} ({user_source().quoted()})")
    format_ = precision(prec)
    if not format_.is_float and not representable(value, format_):
        raise ValueError(f"host scalar {name!r}: {format_} does not hold {value!r} exactly ({user_source().quoted()})")
    node = new_node(Role.HOST_SCALAR, name, declared=DeclaredShape())
    node.specified = Specified(format_, node.source, "cell")
    node.data = convert(np.asarray(value), format_)
    return Tensor(cell_like(node))


def cell(label: str, prec: Any = f32) -> Tensor:
    """Make one device-resident cell, zero at allocation, that computations accumulate into and the host reads."""
    node = new_node(Role.CELL, label, declared=DeclaredShape())
    node.specified = Specified(precision(prec), node.source, "cell")
    return Tensor(cell_like(node))


def cell_like(node: Node) -> Node:
    """Mark ``node`` as stored and visible to the host."""
    node.placement = Placement.MATERIALIZED
    node.observable = True
    return node


def state(owner: Tensor, kind: str, prec: Any, *, one_cell: bool = False) -> Tensor:
    """Make optimizer state of ``owner``'s shape, or of one cell.

    It is zero at allocation and saved by (parameter name, ``kind``). Cells whose magnitude is below the least normal
    number are stored as 0.
    """
    node = new_node(Role.STATE, f"{owner.label}.{kind}", declared=DeclaredShape() if one_cell else None)
    node.owner, node.state_kind = owner.node, kind
    node.specified = Specified(precision(prec), node.source, "cell")
    node.flush_subnormal = node.specified.prec.is_float
    return Tensor(cell_like(node))


# -- random values ------------------------------------------------------------------------------------------------


def _sampler(init: Initializer, name: str | None, seed: int, rows: dict[str, Rows], prec: Any) -> Any:
    if all(row is None for row in rows.values()):
        if prec is not None or name is not None or seed:
            raise TypeError(
                "a random tensor needs rows, e.g. st.uniform(0, 1, output=[4]); without rows this is an initializer, "
                "which takes its stream from the parameter's name and init_params(seed=)"
            )
        return init
    declared = DeclaredShape(*(declared_row(rows[kind], open_if_none=False) for kind in ("batch", "input", "output")))
    sizes = [axis.size for kind in ("batch", "input", "output") for axis in declared.row(kind).axes]
    if any(size is None for size in sizes):
        raise ShapeError(f"a random tensor's sizes must all be given, got {rows} ({user_source().quoted()})")
    key0, key1 = stream_key(seed, name or "random")
    low, high = init.parameters(_shape_for_fans(declared), name or "random")
    draw = "random_normal" if init.kind == "normal" else "random_uniform"
    spread = high if init.kind == "normal" else high - low

    result = apply_op(
        draw,
        (),
        FILL,
        lambda: Apply(
            "add",
            (
                NumberLiteral(low),
                Apply(
                    "mul",
                    (
                        NumberLiteral(spread),
                        Apply(draw, (NumberLiteral(key0), NumberLiteral(key1), LinearIndex(ALL_ROWS))),
                    ),
                ),
            ),
        ),
        rule=None,
        label=name or draw,
        top_down=True,
    )
    result.node.declared, result.node.role = declared, Role.SAMPLER
    return _finish(result.node, None if prec is None else precision(prec), False)


def _shape_for_fans(declared: DeclaredShape) -> Shape:
    def row(kind: Any) -> tuple[Axis, ...]:
        sizes = (axis.size for axis in declared.row(kind).axes)
        return tuple(Axis(size.max if isinstance(size, DynamicDim) else size) for size in sizes)  # type: ignore[arg-type]

    return Shape(row("batch"), row("input"), row("output"))


def uniform(
    low: float = 0.0,
    high: float = 1.0,
    *,
    name: str | None = None,
    seed: int = 0,
    batch: Rows = None,
    input: Rows = None,
    output: Rows = None,
    prec: Any = None,
) -> Any:
    """Uniform values in [low, high): an initializer, or a random tensor where rows are given.

    A tensor's stream is keyed by ``seed`` and ``name``; an initializer's by ``init_params(seed=)`` and the parameter's
    name.
    """
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        raise ValueError(f"uniform: expected finite low <= high, got {low} and {high}")
    rows = {"batch": batch, "input": input, "output": output}
    return _sampler(Initializer("uniform", float(low), float(high)), name, seed, rows, prec)


def normal(
    mean: float = 0.0,
    std: float = 1.0,
    *,
    name: str | None = None,
    seed: int = 0,
    batch: Rows = None,
    input: Rows = None,
    output: Rows = None,
    prec: Any = None,
) -> Any:
    """Normal values: an initializer, or a random tensor where rows are given (see :func:`uniform`)."""
    if not (math.isfinite(mean) and math.isfinite(std) and std >= 0):
        raise ValueError(f"normal: expected a finite mean and std >= 0, got {mean} and {std}")
    rows = {"batch": batch, "input": input, "output": output}
    return _sampler(Initializer("normal", float(mean), float(std)), name, seed, rows, prec)


def kaiming(gain: float = 1.0) -> Initializer:
    """Normal with standard deviation gain * sqrt(2 / fan_in) (He et al. 2015)."""
    return Initializer("normal", 0.0, float(gain), "kaiming")


def xavier(gain: float = 1.0) -> Initializer:
    """Uniform in +-gain * sqrt(6 / (fan_in + fan_out)) (Glorot and Bengio 2010)."""
    bound = float(gain) * math.sqrt(3.0)
    return Initializer("uniform", -bound, bound, "xavier")
