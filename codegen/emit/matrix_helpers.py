"""The functions of generated C that multiply on matrix tiles: rows in memory times a panel of pairs, into f32 sums.

In: nothing. Out: names and texts, one for each height of a tile, whose sums start from 0 or go on. They call the ``st_tile_...``
functions of the prelude, which are instructions or plain C, and are the same text for both.
"""

from __future__ import annotations

from stagedtensor.codegen.schedule.matrix_copy import COLUMNS, SIDE, TERMS
from stagedtensor.codegen.schedule.matrix_tile import MATRIX_TILES


def matrix_tile_name(kind: str, rows: int) -> str:
    """Return the function for tiles of ``kind`` (``matrix_multiply`` or ``matrix_multiply_add``) of so many rows.

    >>> matrix_tile_name("matrix_multiply", 32)
    'st_matrix_multiply_32x32'
    """
    return f"st_{kind}_{rows}x{COLUMNS}"


def _function(kind: str, rows: int) -> str:
    """Sums are tiles 0 to 3, rows of terms 4 and 5, columns 6 and 7: two by two of each where there are 32 rows."""
    bands = range(rows // SIDE)
    sums = [(2 * band + side, band, side) for band in bands for side in range(2)]
    places = {tile: f"&acc[{band * SIDE}][{side * SIDE}], {4 * COLUMNS}" for tile, band, side in sums}
    fresh = kind == "matrix_multiply"
    starts = [f"st_tile_zero({tile});" if fresh else f"st_tile_load({tile}, {places[tile]});" for tile, _, _ in sums]
    sign = "=" if fresh else "+="

    def block(row_cells: str, row_step: str, band_step: str, column_cells: str, pad: str) -> list[str]:
        lines = [
            f"st_tile_load({4 + band}, {row_cells}{f' + {SIDE} * {band_step}' if band else ''}, {row_step});" for band in bands
        ]
        lines += [f"st_tile_load({6 + side}, {column_cells}{f' + {COLUMNS}' if side else ''}, {4 * COLUMNS});" for side in range(2)]
        lines += [f"st_tile_multiply_bf16({tile}, {4 + band}, {6 + side});" for tile, band, side in sums]
        return [pad + line for line in lines]

    lines = [
        f"/* acc[r][c] {sign} rows[r] * columns[c] over all terms: {rows} rows, {COLUMNS} columns in pairs of terms. Blocks of {TERMS} terms in",
        "   order; in each, even and odd terms are summed apart. */",
        f"static __attribute__((noinline, unused)) void {matrix_tile_name(kind, rows)}(",
        f"    float (*restrict acc)[{COLUMNS}],",
        "    const uint16_t *restrict rows, int64_t next_row, const uint16_t *restrict columns, int64_t count",
        ") {",
        *(f"    {line}" for line in starts),
        f"    const int64_t whole = count / {TERMS} * {TERMS};",
        f"    for (int64_t k = 0; k < whole; k += {TERMS}) {{",
        *block("rows + k", "2 * next_row", "next_row", f"columns + {COLUMNS} * k", "        "),
        "    }",
        "    if (whole < count) { /* the last terms, and zeros */",
        f"        _Alignas(64) uint16_t row_cells[{rows}][{TERMS}] = {{{{0}}}}, column_cells[{TERMS // 2}][{2 * COLUMNS}] = {{{{0}}}};",
        "        for (int64_t k = 0; k < count - whole; k++) {",
        f"            for (int64_t r = 0; r < {rows}; r++) row_cells[r][k] = rows[r * next_row + whole + k];",
        f"            const uint16_t *const pairs = columns + {COLUMNS} * whole + k / 2 * {2 * COLUMNS} + k % 2;",
        f"            for (int64_t c = 0; c < {COLUMNS}; c++) column_cells[k / 2][2 * c + k % 2] = pairs[2 * c];",
        "        }",
        *block("row_cells[0]", str(2 * TERMS), str(TERMS), "column_cells[0]", "        "),
        "    }",
        *(f"    st_tile_store({tile}, {places[tile]});" for tile, _, _ in sums),
        "}",
    ]
    return "\n".join(lines) + "\n"


MATRIX_FUNCTIONS: dict[str, tuple[str, frozenset[str]]] = {
    matrix_tile_name(kind, rows): (
        _function(kind, rows),
        frozenset(("st_tile_zero", "st_tile_load", "st_tile_store", "st_tile_multiply_bf16")),
    )
    for kind in MATRIX_TILES
    for rows in (SIDE, 2 * SIDE)
}
"""Name -> text, and the functions of the prelude that it calls."""
