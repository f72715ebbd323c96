"""Line charts as SVG text: both axes logarithmic, one line with marks per series."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 70, 150, 36, 48
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf")

Series = Mapping[str, Sequence[tuple[float, float]]]


def line_chart(title: str, x_label: str, y_label: str, series: Series) -> str:
    """Return an SVG picture of the series, each a list of positive (x, y)."""
    points = [point for line in series.values() for point in line]
    if not points:
        raise ValueError(f"{title}: there is nothing to draw")
    if min(min(point) for point in points) <= 0:
        raise ValueError(f"{title}: a logarithmic axis has no place for 0 or less")
    across, up = (_Axis([point[at] for point in points]) for at in (0, 1))
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + across.share(x) * (right - LEFT), bottom - up.share(y) * (bottom - TOP)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>',
        f'<text x="{(LEFT + right) / 2:.0f}" y="{HEIGHT - 10}" text-anchor="middle">{escape(x_label)}</text>',
        f'<text x="16" y="{(TOP + bottom) / 2:.0f}" text-anchor="middle" '
        f'transform="rotate(-90 16 {(TOP + bottom) / 2:.0f})">{escape(y_label)}</text>',
    ]
    for value in across.ticks:
        x, _ = place(value, up.low)
        parts.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}" stroke="#ddd"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{value:g}</text>')
    for value in up.ticks:
        _, y = place(across.low, value)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for number, (name, line) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        places = [place(x, y) for x, y in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        parts.append(f'<text x="{right + 10}" y="{TOP + 14 + 18 * number}" fill="{colour}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


class _Axis:
    """One logarithmic axis: where a value lies between its ends, and the values that are written at it."""

    def __init__(self, values: Sequence[float]) -> None:
        self.low, self.high = min(values), max(values)
        if self.low == self.high:
            self.low, self.high = self.low / 2, self.high * 2
        steps = (1, 2, 5) if self.high / self.low < 300 else (1,)
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        marks = [step * 10.0**decade for decade in decades for step in steps]
        self.ticks = [mark for mark in marks if self.low * 0.999 <= mark <= self.high * 1.001]

    def share(self, value: float) -> float:
        return math.log(value / self.low) / math.log(self.high / self.low)
