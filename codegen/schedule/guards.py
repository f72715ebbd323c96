"""Guards as lists of conditions that must all hold.

In: a guard. Out: its parts, or parts joined again. Evaluates nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from stagedtensor.codegen.loop_ir import Apply, Expr


def conjuncts(guard: Expr | None) -> tuple[Expr, ...]:
    """Return the parts of a conjunction; none for no guard."""
    if guard is None:
        return ()
    if isinstance(guard, Apply) and guard.op == "and":
        return tuple(part for arg in guard.args for part in conjuncts(arg))
    return (guard,)


def conjunction(parts: Sequence[Expr]) -> Expr | None:
    """Return the conjunction of ``parts``, None for none."""
    whole: Expr | None = None
    for part in parts:
        whole = part if whole is None else Apply("and", (whole, part), whole.type)
    return whole
