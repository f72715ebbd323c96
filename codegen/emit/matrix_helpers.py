"""The functions of generated C that multiply on a matrix unit: rows in memory times a panel of pairs, into f32 sums.

In: nothing. Out: names and texts, one for each unit and size of a tile, whose sums start from 0 or go on. They call the
``st_tile_...`` functions of the prelude, or ``st_dot_bf16``, which are instructions or plain C, and are the same text
for both.
"""

from __future__ import annotations

from stagedtensor.codegen.schedule.matrix_copy import COLUMNS, HALF, SIDE, TERMS
from stagedtensor.codegen.schedule.matrix_tile import DOT_TILES, MATRIX_TILES

_SUMS_IN_REGISTERS = 16


def matrix_tile_name(kind: str, rows: int, columns: int) -> str:
    """Return the function for tiles of ``kind`` (such as ``matrix_multiply`` or ``dot_multiply_add``) of such a size.

    >>> matrix_tile_name("matrix_multiply", 32, 32)
    'st_matrix_multiply_32x32'
    """
    return f"st_{kind}_{rows}x{columns}"


def _on_tiles(kind: str, rows: int, columns: int) -> str:
    """Sums are tiles 0 to 3, rows of terms 4 and 5, columns 6 and 7: two by two of each where there are 32 rows."""
    bands = range(rows // SIDE)
    sums = [(2 * band + side, band, side) for band in bands for side in range(2)]
    places = {tile: f"&acc[{band * SIDE}][{side * SIDE}], {4 * COLUMNS}" for tile, band, side in sums}
    fresh = kind == "matrix_multiply"
    starts = [f"st_tile_zero({tile});" if fresh else f"st_tile_load({tile}, {places[tile]});" for tile, _, _ in sums]

    def block(row_cells: str, row_step: str, band_step: str, column_cells: str, pad: str) -> list[str]:
        lines = [
            f"st_tile_load({4 + band}, {row_cells}{f' + {SIDE} * {band_step}' if band else ''}, {row_step});"
            for band in bands
        ]
        lines += [
            f"st_tile_load({6 + side}, {column_cells}{f' + {COLUMNS}' if side else ''}, {4 * COLUMNS});"
            for side in range(2)
        ]
        lines += [f"st_tile_multiply_bf16({tile}, {4 + band}, {6 + side});" for tile, band, side in sums]
        return [pad + line for line in lines]

    lines = [
        *_head(
            kind, rows, columns, f"Blocks of {TERMS} terms in", "order; in each, even and odd terms are summed apart."
        ),
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


def _by_dots(kind: str, rows: int, columns: int) -> str:
    """So many rows at a time that their sums, and a line of a panel, stay in registers."""
    lanes, word = (SIDE, "st_") if columns >= SIDE else (HALF, "st_half_")
    vectors = columns // lanes
    band = _SUMS_IN_REGISTERS // vectors
    start = f"({word}dots){{0}}" if kind == DOT_TILES[0] else f"*(const {word}dots *)&acc[band + r][{lanes} * c]"
    load = "st_load_pairs" if lanes == SIDE else "st_load_half_pairs"
    each_row = [f"#pragma GCC unroll {band}", f"        for (int64_t r = 0; r < {band}; r++)"]
    each_vector = [f"#pragma GCC unroll {vectors}", f"            for (int64_t c = 0; c < {vectors}; c++)"]

    def step(pair: str, last: str = "") -> list[str]:
        return [
            *(
                f"            const {word}pairs column_{at} = {load}(panel + {2 * lanes * at}){last};"
                for at in range(vectors)
            ),
            f"#pragma GCC unroll {band}",
            f"            for (int64_t r = 0; r < {band}; r++) {{",
            f"                const {word}pairs pair = ({word}pairs){{0}} + {pair};",
            *(
                f"                sum[r][{at}] = {word}dot_bf16(sum[r][{at}], pair, column_{at});"
                for at in range(vectors)
            ),
            "            }",
        ]

    lines = [
        *_head(kind, rows, columns, "Pairs of terms in", "order; of a pair, the second is added first."),
        f"    for (int64_t band = 0; band < {rows}; band += {band}) {{",
        f"        {word}dots sum[{band}][{vectors}];",
        *each_row,
        *each_vector,
        f"                sum[r][c] = {start};",
        "        const uint16_t *row = rows + band * next_row, *panel = columns;",
        f"        for (int64_t k = 0; k < count / 2; k++, row += 2, panel += {2 * columns}) {{",
        *step("st_pair(row + r * next_row)"),
        "        }",
        "        if (count % 2) { /* the last term, and 0 */",
        *step("row[r * next_row]", " & 0xffffu"),
        "        }",
        *each_row,
        *each_vector,
        f"                *({word}dots *)&acc[band + r][{lanes} * c] = sum[r][c];",
        "    }",
        "}",
    ]
    return "\n".join(lines) + "\n"


def _head(kind: str, rows: int, columns: int, *order: str) -> tuple[str, ...]:
    sign = "+=" if kind.endswith("_add") else "="
    start = (
        f"/* acc[r][c] {sign} rows[r] * columns[c] over all terms: {rows} rows, {columns} columns in pairs of terms."
    )
    return (
        f"{start} {order[0]}",
        f"   {order[1]} */",
        f"static __attribute__((noinline, unused)) void {matrix_tile_name(kind, rows, columns)}(",
        f"    float (*restrict acc)[{columns}],",
        "    const uint16_t *restrict rows, int64_t next_row, const uint16_t *restrict columns, int64_t count",
        ") {",
    )


_TEXTS = (
    (
        MATRIX_TILES,
        _on_tiles,
        (SIDE, 2 * SIDE),
        (COLUMNS,),
        ("st_tile_zero", "st_tile_load", "st_tile_store", "st_tile_multiply_bf16"),
    ),
    (DOT_TILES, _by_dots, (SIDE,), (SIDE, COLUMNS), ("st_load_pairs", "st_pair", "st_dot_bf16")),
    (DOT_TILES, _by_dots, (SIDE,), (HALF,), ("st_load_half_pairs", "st_pair", "st_half_dot_bf16")),
)
MATRIX_FUNCTIONS: dict[str, tuple[str, frozenset[str]]] = {
    matrix_tile_name(kind, rows, columns): (text(kind, rows, columns), frozenset(needs))
    for kinds, text, heights, widths, needs in _TEXTS
    for kind in kinds
    for rows in heights
    for columns in widths
}
"""Name -> text, and the functions of the prelude that it calls."""
