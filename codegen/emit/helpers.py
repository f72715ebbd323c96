"""Functions of generated C that stand outside the prelude: partitions, transposed squares, tiles of multiply-adds.

In: a name. Out: its text, for the head of a translation unit, and the prelude functions that it calls. They move
values, count iterations and run loops over the prelude's arithmetic; they know no formats but f32 and f64.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from stagedtensor.codegen.emit.matrix_helpers import MATRIX_FUNCTIONS


@dataclass(frozen=True)
class Helper:
    """A function of generated source that is not part of the prelude; ``needs`` are functions of the prelude."""

    name: str
    text: str
    needs: frozenset[str] = frozenset()


PART_FUNCTION = Helper(
    "st_part",
    """\
/* Where part `part` of `parts` begins in a range of `count`, cut at multiples of `grain` so that no cache line is shared. */
static inline int64_t st_part(int64_t count, int64_t grain, int part, int parts) {
    const int64_t begin = (count + grain - 1) / grain * part / parts * grain;
    return begin < count ? begin : count;
}
""",
)


def transpose_name(lanes: int) -> str:
    """Return the function that transposes a square of ``lanes`` floats.

    >>> transpose_name(16)
    'st_transpose_f32x16'
    """
    return f"st_transpose_f32x{lanes}"


def _transpose(lanes: int) -> Helper:
    """Swap off-diagonal blocks of 1, 2, 4 ... lanes: each step is one shuffle of two registers per row."""
    name, vector = transpose_name(lanes), f"st_f32x{lanes}"
    lines = [
        f"/* to[c * stride + r] = square[r][c] for a square of {lanes} floats, in registers. */",
        f"typedef float {vector} __attribute__((vector_size({4 * lanes}), aligned(4), may_alias));",
        f"ST_FN void {name}(float *restrict to, int64_t stride, float (*restrict square)[{lanes}]) {{",
    ]
    rows = [f"r0_{row}" for row in range(lanes)]
    for row in range(lanes):
        lines.append(f"    const {vector} {rows[row]} = *(const {vector} *)square[{row}];")
    step, span = 1, 1
    while span < lanes:
        new = [f"r{step}_{row}" for row in range(lanes)]
        for row in range(lanes):
            mine, other = rows[row], rows[row ^ span]
            lanes_taken = [lane if (lane & span) == (row & span) else lanes + (lane ^ span) for lane in range(lanes)]
            picked = ", ".join(map(str, lanes_taken))
            lines.append(f"    const {vector} {new[row]} = __builtin_shufflevector({mine}, {other}, {picked});")
        rows, span, step = new, span * 2, step + 1
    for row in range(lanes):
        lines.append(f"    *({vector} *)(to + {row} * stride) = {rows[row]};")
    lines.append("}")
    return Helper(name, "\n".join(lines) + "\n")


_FIXED: dict[str, Helper] = {
    helper.name: helper for helper in (PART_FUNCTION, *(_transpose(lanes) for lanes in (4, 8, 16)))
}


def tile_name(kind: str, prec: str, rows: int, columns: int, loops: int) -> str:
    """Return the function for tiles of ``kind`` (``multiply`` or ``multiply_add``) whose terms run in ``loops`` loops.

    >>> tile_name("multiply", "f32", 6, 64, 1), tile_name("multiply", "f32", 6, 64, 2)
    ('st_multiply_f32_6x64', 'st_multiply_f32_6x64_in_2')
    """
    return f"st_{kind}_{prec}_{rows}x{columns}" + (f"_in_{loops}" if loops > 1 else "")


_SHORT = 16
_TILE_NAME = re.compile(r"st_(multiply|multiply_add)_(f32|f64)_(\d+)x(\d+)(?:_in_(\d))?")


def _tile(name: str, kind: str, prec: str, rows: int, columns: int, loops: int) -> Helper:
    """A tile of sums in registers: every sum takes its terms in the order of the loops."""
    cell = {"f32": "float", "f64": "double"}[prec]
    sign, start = ("=", "0.0f" if prec == "f32" else "0.0") if kind == "multiply" else ("+=", "acc[r][c]")
    # gcc writes a short loop out before its vectoriser sees it, unless told not to
    whole = ["#pragma GCC unroll 1"] if columns <= _SHORT else []
    parameters = [f"    int64_t count_{at}, int64_t rows_{at}, int64_t columns_{at}" for at in range(loops)]
    lines = [
        f"/* acc[r][c] {sign} rows[r] * columns[c] over all terms, each sum in their order: {rows} rows, {columns} columns. */",
        f"static __attribute__((noinline, unused)) void {name}(",
        f"    {cell} (*restrict acc)[{columns}],",
        f"    const {cell} *restrict rows, int64_t next_row, const {cell} *restrict columns,",
        ",\n".join(parameters),
        ") {",
        f"    {cell} sum[{rows}][{columns}];",
        f"    for (int64_t r = 0; r < {rows}; r++) {{",
        *whole,
        f"        for (int64_t c = 0; c < {columns}; c++) sum[r][c] = {start};",
        "    }",
    ]
    row, column = "rows", "columns"
    for at in range(loops):
        pad = "    " * (at + 1)
        inner_row, inner_column = f"row_{at}", f"column_{at}"
        lines += [
            f"{pad}const {cell} *{inner_row} = {row}, *{inner_column} = {column};",
            f"{pad}for (int64_t k_{at} = 0; k_{at} < count_{at}; k_{at}++, {inner_row} += rows_{at}, {inner_column} += columns_{at}) {{",
        ]
        row, column = inner_row, inner_column
    pad = "    " * (loops + 1)
    lines += [
        f"#pragma GCC unroll {rows}",
        f"{pad}for (int64_t r = 0; r < {rows}; r++) {{",
        f"{pad}    const {cell} factor = {row}[r * next_row];",
        *whole,
        f"{pad}    for (int64_t c = 0; c < {columns}; c++) sum[r][c] = st_fma_{prec}(factor, {column}[c], sum[r][c]);",
        f"{pad}}}",
        *("    " * at + "}" for at in range(loops, 0, -1)),
        f"    for (int64_t r = 0; r < {rows}; r++) {{",
        *whole,
        f"        for (int64_t c = 0; c < {columns}; c++) acc[r][c] = sum[r][c];",
        "    }",
        "}",
    ]
    return Helper(name, "\n".join(lines) + "\n", frozenset((f"st_fma_{prec}",)))


def helpers_among(names: Iterable[str]) -> tuple[Helper, ...]:
    """Return the helpers that ``names`` name, in the order of their names; other names are the prelude's."""
    found: list[Helper] = []
    for name in sorted(names):
        match = _TILE_NAME.fullmatch(name)
        if name in _FIXED:
            found.append(_FIXED[name])
        elif name in MATRIX_FUNCTIONS:
            found.append(Helper(name, *MATRIX_FUNCTIONS[name]))
        elif match is not None:
            kind, prec, rows, columns, loops = match.groups()
            found.append(_tile(name, kind, prec, int(rows), int(columns), int(loops or 1)))
    return tuple(found)
