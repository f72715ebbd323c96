"""Functions of generated C that are no arithmetic and so stand outside the prelude: partitions, transposed squares.

In: a name. Out: its text, for the head of a translation unit. They move values and count iterations, no more.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Helper:
    """A function of generated source that is not part of the prelude."""

    name: str
    text: str


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


HELPERS: dict[str, Helper] = {
    helper.name: helper for helper in (PART_FUNCTION, *(_transpose(lanes) for lanes in (4, 8, 16)))
}
"""Every helper by name."""
