"""Dropout with counter-based masks: nothing is stored, forward and backward draw the same numbers again."""

from __future__ import annotations

from stagedtensor.composite import composite
from stagedtensor.initializers import stream_key
from stagedtensor.settings import is_number
from stagedtensor.source import user_source
from stagedtensor.specs import ALL_ROWS, RowSpec, ShapeSpec, Spec
from stagedtensor.statements import Access, Apply, DimValue, Expr, LinearIndex, NumberLiteral, Slot
from stagedtensor.tensor import Tensor, TensorLike, apply_op, lift

_CELL = ShapeSpec(RowSpec(), RowSpec(), RowSpec())


@composite("dropout", float_only=True)
def _dropout(x: Tensor, rate: float, key: tuple[int, int], step: tuple[Tensor]) -> Tensor:
    def tree(value: Access, count: Access) -> Expr:
        # whatever the extents of a run, no other step draws the same numbers
        offset = Apply("mul", (count, DimValue(("batch", "output", "input"), greatest=True)))
        counter = Apply("add", (LinearIndex(ALL_ROWS), offset))
        draw = Apply("random_uniform", (NumberLiteral(key[0]), NumberLiteral(key[1]), counter))
        kept = Apply("ge", (draw, NumberLiteral(rate)))
        return Apply("where", (kept, Apply("mul", (value, NumberLiteral(1.0 / (1.0 - rate)))), NumberLiteral(0.0)))

    return apply_op(
        "dropout",
        (x, step[0]),
        Spec((ALL_ROWS, _CELL), ALL_ROWS),
        tree,
        slots=(Slot.DATA, Slot.INDEX),
    )


def dropout(x: TensorLike, rate: float, *, step: TensorLike = 0, seed: int = 0, name: str = "dropout") -> Tensor:
    """Set each cell to 0 with probability ``rate`` and scale the others by 1 / (1 - rate).

    ``step`` is an integer cell (``st.host_scalar("step", 0, st.i32)``) that the host advances: each value draws another
    mask. Masks are keyed by ``seed`` and ``name``; give every dropout of a model its own name. Leave it out for
    evaluation.
    """
    if not is_number(rate) or not 0.0 <= rate < 1.0:
        raise ValueError(f"dropout: rate is in [0, 1), got {rate!r} ({user_source().quoted()})")
    tensor = lift(x)
    if rate == 0.0:
        return tensor
    return _dropout(tensor, float(rate), stream_key(seed, name), (lift(step),))
