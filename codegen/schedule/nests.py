"""One launch of a block: what every template's loops become, with the line for reports.

In: loops, the choice in words, cost, whether threads are worth it. Out: a :class:`Nest`. Decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from stagedtensor.codegen.loop_ir import Buffer, Cost, For, Stmt
from stagedtensor.codegen.rewrite import walk_stmts


@dataclass(frozen=True)
class Nest:
    """One launch: its name's ending, statements, the choice in words, cost, and scratch it introduces."""

    suffix: str
    body: tuple[Stmt, ...]
    path: str
    cost: Cost
    scratch: tuple[Buffer, ...] = ()


def one_launch(
    body: tuple[Stmt, ...], path: str, cost: Cost, parallel: bool, suffix: str = "", scratch: tuple[Buffer, ...] = ()
) -> Nest:
    """Return ``body`` as a launch; ``path`` gets the words on threads."""
    threads = parallel and any(isinstance(stmt, For) and stmt.kind == "parallel" for stmt in walk_stmts(body))
    where = "static partition over threads" if threads else "one thread"
    return Nest(suffix, body, f"{path}, {where}", cost, scratch)
