"""Statements, trees and index specs as a user would write them.

In: statements over nodes. Out: text for ``repr`` of computations, comments and error messages; nodes show by label.
Nothing here is read back or decides anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from .dims import RowKind
from .node import Node
from .op_table import OPS
from .specs import (
    ALL_ROWS,
    CONTRACTION,
    Affine,
    Anonymous,
    AxisTerm,
    Concat,
    Gathered,
    Name,
    Position,
    RowSpec,
    ShapeSpec,
    Sliced,
    StaticIndex,
)
from .statements import (
    Access,
    Apply,
    DimValue,
    Expr,
    FiniteLimit,
    IterValue,
    LinearIndex,
    NumberLiteral,
    Statement,
    WriteOp,
    accesses,
)

WRITE_SYMBOLS: dict[WriteOp, str] = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "max": "@^",
    "min": "@-",
    "argmax": "argmax",
    "argmin": "argmin",
}
"""What follows ``=`` (accumulate) or ``=:`` (reset, then accumulate)."""

_INFIX = {"add": ("+", 1), "sub": ("-", 1), "mul": ("*.", 2), "div": ("/.", 2), "pow": ("**.", 4)}
_COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}


# -- index specs --------------------------------------------------------------------------------------------------


def term_text(term: AxisTerm) -> str:
    """Return an axis term as it is written in a spec (indices by data or by a static index in brackets)."""
    match term:
        case Name(name):
            return name
        case Position(position):
            return str(position)
        case Anonymous():
            return "_"
        case Affine(stride, over, dilation, kernel, padded):
            first = f"{stride}*{over}" if stride != 1 else over
            second = f"{dilation}*{kernel}" if dilation != 1 else kernel
            return f"{first}{'=+' if padded else '+'}{second}"
        case Concat(parts):
            return "^".join(part.name if isinstance(part, Name) else str(part) for part in parts)
        case Sliced(name, start, size, step):
            stop = "" if size is None else str(start + size * step)
            return f"{name}[{start}:{stop}{f':{step}' if step != 1 else ''}]"
        case StaticIndex(name):
            return f"[{name}]"
        case Gathered(operand):
            return f"[#{operand}]"
    raise TypeError(f"{term!r} is no axis term")


def variable_text(variable: str, kind: RowKind | None = None) -> str:
    """Return a row variable; ``...`` where it is the one that stands for its own row."""
    return "..." if variable == kind else f"..{variable}.."


def rows_text(rows: ShapeSpec) -> str:
    """Return one tensor's rows, ``...|i,k->j``; empty rows before the output row are left out."""
    batch, input_, output = (_row_text(rows.row(kind), kind) for kind in _KINDS)
    return f"{f'{batch}|' if batch else ''}{f'{input_}->' if input_ else ''}{output}"


_KINDS: tuple[RowKind, RowKind, RowKind] = ("batch", "input", "output")


def _row_text(row: RowSpec, kind: RowKind) -> str:
    middle = [variable_text(row.variable, kind)] if row.variable is not None else []
    return ",".join([*map(term_text, row.leading), *middle, *map(term_text, row.trailing)])


# -- trees and statements -----------------------------------------------------------------------------------------


NameOf = Callable[[Node], str]


def _label(node: Node) -> str:
    return node.label


def distinct_names(nodes: Iterable[Node]) -> dict[Node, str]:
    """Return a name for each node: its label, numbered from the second node of one label on; gradients follow values."""
    names: dict[Node, str] = {}
    taken: set[str] = set()
    for node in nodes:
        value = node.value or node
        if value not in names:
            name, count = value.label, 1
            while name in taken:
                count += 1
                name = f"{value.label}_{count}"
            taken.add(name)
            names[value] = name
        if value is not node:
            names[node] = f"{names[value]}.grad"
    return names


def expr_text(expr: Expr, level: int = 0, name: NameOf = _label) -> str:
    """Return a tree with ``*. /. **.`` for the pointwise products; ``level`` is the binding strength around it."""
    match expr:
        case Access(node):
            return name(node)
        case NumberLiteral(value):
            return f"({value})" if level > 1 and not value >= 0 else str(value)
        case DimValue(names):
            return f"size({', '.join(names)})" if names else "1"
        case IterValue(iterator):
            return f"index({iterator})"
        case LinearIndex():
            return "cell"
        case FiniteLimit(highest):
            return "greatest" if highest else "least"
        case Apply(op, (argument,)) if op == "neg":
            text, own = f"-{expr_text(argument, 3, name)}", 3
        case Apply(op, (left, right)) if op in _INFIX:
            symbol, own = _INFIX[op]
            right_level = own if op == "pow" else own + 1
            text = f"{expr_text(left, own + (op == 'pow'), name)} {symbol} {expr_text(right, right_level, name)}"
        case Apply(op, (left, right)) if op in _COMPARISONS:
            text, own = f"{expr_text(left, 1, name)} {_COMPARISONS[op]} {expr_text(right, 1, name)}", 0
            return f"({text})" if level > 0 else text
        case Apply(op, arguments):
            if not arguments:
                return op if op in OPS else f"{op}()"
            return f"{op}({', '.join(expr_text(argument, 0, name) for argument in arguments)})"
    return f"({text})" if level > own else text


def write_text(op: WriteOp | None, reset: bool) -> str:
    """Return the assignment operator: ``=:``, ``=+``, ``=:+`` ..."""
    return "=:" if op is None else f"={':' if reset else ''}{WRITE_SYMBOLS[op]}"


def statement_text(statement: Statement, name: NameOf = _label) -> str:
    """Return a statement on one line; an index map follows as ``~logic`` unless all is pointwise.

    ``h =:+ x * w``, ``m =: beta *. m + p.grad``, ``y =:+ x ~logic:"i,j=>i"``.
    """
    reads = tuple(accesses(statement.expr))
    head = f"{name(statement.target.node)} {write_text(statement.op, statement.reset)} "
    rows = tuple(read.rows for read in reads)
    scalar = not rows and statement.target.rows == ShapeSpec()
    if scalar or all(item == ALL_ROWS for item in (*rows, statement.target.rows)):
        return head + expr_text(statement.expr, 0, name)
    if rows == CONTRACTION.operands and statement.target.rows == CONTRACTION.result:
        match statement.expr:
            case Apply("mul", (left, right)):
                return f"{head}{expr_text(left, 3, name)} * {expr_text(right, 3, name)}"
    read = "; ".join(map(rows_text, rows)).rstrip()
    logic = f"{read} => {rows_text(statement.target.rows)}".strip()
    return f'{head}{expr_text(statement.expr, 0, name)}  ~logic:"{logic}"'


# -- ops as users write them --------------------------------------------------------------------------------------

_LONGEST_TEXT = 40
_PRECEDENCE = {"@": 3, "*": 3, "/": 3, "//": 3, "%": 3, "+": 2, "-": 2, "**": 4} | dict.fromkeys(
    ("<", "<=", ">", ">=", "==", "!="), 1
)
_CLOSED = 9


def _symbol(kind: str, arity: int) -> str:
    if kind == "matmul":
        return "@"
    return OPS[kind].symbol if kind in OPS and arity == 2 else ""


def op_text(kind: str, operands: Sequence[Node]) -> str:
    """Return the op as a user would write it; operands without a name of their own are written out while short."""
    parts = [_operand_text(node) for node in operands]
    symbol = _symbol(kind, len(parts))
    if symbol:
        level = _PRECEDENCE[symbol]
        (left, left_level), (right, right_level) = parts
        left = f"({left})" if left_level < level else left
        right = f"({right})" if right_level <= level else right
        return f"{left} {symbol} {right}"
    return f"{kind}({', '.join(text for text, _ in parts)})" if parts else kind


def _operand_text(node: Node) -> tuple[str, int]:
    record = node.record
    if record is None or node.label != record.kind or not record.statements:
        return node.label, _CLOSED
    text = record.statements[0].text
    if len(text) > _LONGEST_TEXT:
        return node.label, _CLOSED
    return text, _PRECEDENCE.get(_symbol(record.kind, len(record.operands)), _CLOSED)
