"""What was built of converts and regions: the list of converts, and a dump of a graph without names.

In: a tensor. Out: records in graph order, or text with one line per node. Each solves a throw-away copy; nothing is
settled or stored. Boundaries whose two sides solved equal are not there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from .node import HasNode, Node, Role, ancestors
from .precision import Prec
from .precision_requests import node_of
from .precision_rules import BARRIER
from .precision_solution import PrecisionSolution
from .precision_solver import solve_precisions
from .regions import Region
from .shapes.solver import solve_shapes
from .statements import OpRecord

ConvertRole: TypeAlias = Literal["boundary", "twin", "user"]


@dataclass(frozen=True)
class Convert:
    """One convert of a graph: why it is there, the region and side it belongs to, both precisions, its result."""

    role: ConvertRole
    region: str
    side: str
    src: Prec
    dst: Prec
    tensor: HasNode

    def __str__(self) -> str:
        return " ".join(filter(None, (self.region or self.role, self.side, f"{self.src} -> {self.dst}")))


def converts(root: HasNode) -> list[Convert]:
    """Return the converts that ``root`` is computed through, in graph order: boundaries, twins, the user's casts."""
    top = node_of(root, "converts")
    solution = solve_precisions([top])
    found = []
    for node in ancestors([top]):
        record = node.record
        if record is None or record.kind not in (BARRIER, "cast"):
            continue
        src, dst = solution.prec(record.operands[0].node), solution.prec(node)
        if src is not dst:
            region = record.attributes.get("region")
            name, side = (region.name, record.attributes["side"]) if region is not None else ("", "")
            found.append(Convert(role_of(record), name, side, src, dst, node.tensor))
    return found


def role_of(record: OpRecord) -> ConvertRole:
    """Return why a convert is there."""
    if record.kind == BARRIER:
        return "boundary"
    return "twin" if record.attributes.get("twin") else "user"


def boundaries(root: HasNode) -> list[Convert]:
    """Return the converts of region edges only, in graph order."""
    node_of(root, "boundaries")
    return [convert for convert in converts(root) if convert.role == "boundary"]


def dump(root: HasNode) -> str:
    """Return one line per node in graph order: op, operands by line, shape, precision, state, region and side.

    There is no label and no address in it, so that graphs which differ in names only have equal dumps.
    """
    top = node_of(root, "dump")
    solution, shapes = solve_precisions([top]), solve_shapes([top])
    places: dict[Node, int] = {}
    regions: dict[Region, int] = {}
    lines: list[str] = []
    for node in ancestors([top]):
        if dropped(node, solution):
            assert node.record is not None
            places[node] = places[node.record.operands[0].node]
            continue
        places[node] = len(lines)
        record, side = node.record, ""
        kind = node.role.value if record is None else record.kind
        operands = " ".join(f"%{places[operand.node]}" for operand in (record.operands if record is not None else ()))
        region = None if _is_weight(node) else node.region
        if record is not None and record.kind == BARRIER:
            region, side = record.attributes["region"], record.attributes["side"]
        where = f" r{regions.setdefault(region, len(regions))} {region.prec}" if region is not None else ""
        gradient = "" if node.gradient is None else f" grad {solution.prec(node.gradient)}"
        reason = solution.reason(node)
        lines.append(
            f"%{places[node]} = {kind}({operands}): {shapes.shape(node)} {reason.prec} {reason.state}{gradient}"
            f"{where}{f' {side}' if side else ''}"
        )
    return "\n".join(lines) + "\n"


def _is_weight(node: Node) -> bool:
    """Whether a node is a parameter or a twin, which belong to no one region: whoever reads them makes the twin."""
    record = node.record
    return node.role is Role.PARAM or (record is not None and bool(record.attributes.get("twin")))


def dropped(node: Node, solution: PrecisionSolution) -> bool:
    """Whether a node is a boundary whose two sides solved equal, which nothing reads."""
    record = node.record
    if record is None or record.kind != BARRIER:
        return False
    return solution.prec(record.operands[0].node) is solution.prec(node)
