"""A self-contained HTML page about one routine: graph, kernels, precisions, memory plan, roofline.

In: a compiled routine. Out: one file without scripts or references to other files. Measures the machine's copy
bandwidth and multiplication rate with NumPy for the roofline (a fraction of a second); changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path

import numpy as np

from .runtime.device import Kernel, MemoryLine
from .runtime.routine import Routine

COLOURS = {
    "f64": "#7b3294",
    "f32": "#2c7bb6",
    "bf16": "#e66101",
    "f16": "#d7191c",
    "f8e5m2": "#b2182b",
    "f8e4m3": "#ef8a62",
}
_OTHER = "#4d4d4d"
_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1100px; color: #222; }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; padding: .25em .6em; vertical-align: top; }
tr:nth-child(even) { background: #f5f5f5; } pre { background: #f5f5f5; padding: .8em; overflow: auto; font-size: 12px; }
.chip { color: #fff; border-radius: 3px; padding: 0 .35em; margin-right: .25em; white-space: nowrap; }
svg { max-width: 100%; height: auto; } summary { cursor: pointer; } svg text { font: 11px system-ui, sans-serif; }
"""


def colour(precision: str) -> str:
    """Return the colour a precision is drawn in."""
    return COLOURS.get(precision, _OTHER)


def report(routine: Routine, path: str | Path) -> Path:
    """Write the page to ``path`` and return it."""
    if not isinstance(routine, Routine):
        raise TypeError(f"report takes a routine from ctx.compile, not {type(routine).__name__}")
    target = Path(path)
    target.write_text(page(routine), encoding="utf-8")
    return target


def page(routine: Routine) -> str:
    """Return the page's HTML."""
    precisions = {name: entry.precision for name, entry in routine.precisions.items()}
    types = routine.executable.types
    sections = (
        ("Graph", f"<p>{_legend({*types.values(), *precisions.values()})}</p>{graph(routine.kernels, types)}"),
        ("Kernels", _kernels(routine.kernels, types)),
        ("Precisions", _precisions(routine)),
        (
            "Memory",
            memory(routine.executable.temporaries, routine.executable.arena_bytes, routine.executable.saved_bytes),
        ),
        ("Roofline", roofline(routine.kernels, *machine_peaks())),
        ("Source", f"<pre>{escape(routine.source)}</pre>"),
    )
    body = "\n".join(f"<h2>{title}</h2>\n{content}" for title, content in sections)
    title = f"routine {escape(routine.name)} on {escape(routine.context.device_name)}"
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style></head>\n'
        f"<body><h1>{title}</h1>\n{body}\n</body></html>\n"
    )


def _legend(precisions: set[str]) -> str:
    return " ".join(_chip(name, name) for name in sorted(precisions))


def _chip(text: str, precision: str) -> str:
    return f'<span class="chip" style="background:{colour(precision)}">{escape(text)}</span>'


# -- graph --------------------------------------------------------------------------------------------------------


def layers(kernels: Sequence[Kernel]) -> list[int]:
    """Return each kernel's depth: one more than the deepest kernel whose result it reads (launch order decides)."""
    depth: list[int] = []
    latest: dict[str, int] = {}
    for at, kernel in enumerate(kernels):
        sources = [latest[name] for name in kernel.reads if name in latest]
        depth.append(1 + max((depth[source] for source in sources), default=-1))
        latest.update(dict.fromkeys(kernel.writes, at))
    return depth


def graph(kernels: Sequence[Kernel], types: Mapping[str, str]) -> str:
    """Draw kernels as boxes by depth, an edge per buffer in the colour of its precision."""
    width, height, gap = 150, 24, 46
    depth = layers(kernels)
    columns: dict[int, int] = {}
    places: list[tuple[float, float]] = []
    for level in depth:
        column = columns.get(level, 0)
        columns[level] = column + 1
        places.append((10 + column * (width + 14), 10 + level * (height + gap)))
    edges: list[str] = []
    latest: dict[str, int] = {}
    for at, kernel in enumerate(kernels):
        for name in kernel.reads:
            if name in latest:
                x0, y0 = places[latest[name]]
                x1, y1 = places[at]
                middle = (y0 + height + y1) / 2
                edges.append(
                    f'<path d="M{x0 + width / 2:.0f} {y0 + height:.0f} C{x0 + width / 2:.0f} {middle:.0f} '
                    f'{x1 + width / 2:.0f} {middle:.0f} {x1 + width / 2:.0f} {y1:.0f}" fill="none" '
                    f'stroke="{colour(types.get(name, ""))}" stroke-width="1.6"><title>{escape(name)} '
                    f"{types.get(name, '')}</title></path>"
                )
        latest.update(dict.fromkeys(kernel.writes, at))
    boxes = [
        f'<g><rect x="{x:.0f}" y="{y:.0f}" width="{width}" height="{height}" rx="4" fill="#fff" '
        f'stroke="{colour(types.get(kernel.writes[0], "") if kernel.writes else "")}" stroke-width="2"/>'
        f'<text x="{x + 6:.0f}" y="{y + 16:.0f}">{escape(_short(kernel.name, 20))}</text>'
        f"<title>{escape('; '.join(kernel.expressions))}</title></g>"
        for kernel, (x, y) in zip(kernels, places, strict=True)
    ]
    total_width = max((x + width + 10 for x, _ in places), default=10)
    total_height = max((y + height + 10 for _, y in places), default=10)
    return (
        f'<svg viewBox="0 0 {total_width:.0f} {total_height:.0f}" width="{total_width:.0f}" role="img">'
        f"{''.join(edges)}{''.join(boxes)}</svg>"
    )


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


# -- tables -------------------------------------------------------------------------------------------------------


def _kernels(kernels: Sequence[Kernel], types: Mapping[str, str]) -> str:
    rows = []
    for kernel in kernels:
        chips = "".join(_chip(name, types.get(name, "")) for name in kernel.reads)
        chips += " &rarr; " + "".join(_chip(name, types.get(name, "")) for name in kernel.writes)
        expressions = "<br>".join(map(escape, kernel.expressions))
        rows.append(
            f"<tr><td><details><summary><b>{escape(kernel.name)}</b></summary><pre>{escape(kernel.source)}</pre></details>"
            f"{expressions}<br>{chips}</td><td>{kernel.flops:,}</td><td>{kernel.nbytes:,}</td>"
            f"<td>{escape(kernel.path)}</td></tr>"
        )
    head = "<tr><th>kernel</th><th>flops</th><th>bytes</th><th>path</th></tr>"
    return f"<table>{head}{''.join(rows)}</table>"


def _precisions(routine: Routine) -> str:
    rows = "".join(
        f"<tr><td>{escape(entry.node)}</td><td>{_chip(entry.precision, entry.precision)}</td>"
        f"<td>{escape(entry.reason)}</td></tr>"
        for entry in routine.precisions.values()
    )
    return f"<table><tr><th>node</th><th>precision</th><th>reason</th></tr>{rows}</table>"


def memory(lines: Sequence[MemoryLine], arena: int, saved: int) -> str:
    """Draw the arena: time (kernels) to the right, bytes downward; a box per temporary."""
    summary = f"<p>arena {arena:,} bytes; sharing saved {saved:,} bytes</p>"
    placed = [line for line in lines if line.live is not None and line.offset is not None and line.nbytes]
    if not placed or not arena:
        return summary
    last = max(line.live[1] for line in placed if line.live) + 1
    boxes = []
    for line in placed:
        assert line.live is not None
        assert line.offset is not None
        x, width = 1000 * line.live[0] / last, 1000 * (line.live[1] + 1 - line.live[0]) / last
        y, height = 300 * line.offset / arena, max(2.0, 300 * line.nbytes / arena)
        boxes.append(
            f'<g><rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
            f'fill="{colour(line.precision)}" fill-opacity=".55" stroke="#fff"/><title>{escape(line.node)} '
            f"{line.precision} {escape(line.shape)}: {line.nbytes:,} bytes, kernels {line.live[0]} to {line.live[1]}"
            f"</title></g>"
        )
    return f'{summary}<svg viewBox="0 0 1000 302" width="1000" role="img">{"".join(boxes)}</svg>'


# -- roofline -----------------------------------------------------------------------------------------------------


def machine_peaks() -> tuple[float, float]:
    """Measure (multiply-add flops per second, copied bytes per second) of this machine with NumPy; best of a few."""
    a = np.random.default_rng(0).random((384, 384), dtype=np.float32)
    source, target = np.ones(1 << 23, np.uint8), np.empty(1 << 23, np.uint8)

    def best(action: Callable[[], object]) -> float:
        times = []
        for _ in range(5):
            start = time.perf_counter()
            action()
            times.append(time.perf_counter() - start)
        return min(times)

    flops = 2.0 * 384**3 / best(lambda: a @ a)
    copied = 2.0 * source.nbytes / best(lambda: np.copyto(target, source))
    return flops, copied


def roofline(kernels: Sequence[Kernel], peak_flops: float, bandwidth: float) -> str:
    """Draw kernels at their arithmetic intensity under the machine's roof; log scales."""
    points = [(kernel.flops / kernel.nbytes, kernel) for kernel in kernels if kernel.flops and kernel.nbytes]
    ridge = peak_flops / bandwidth
    least, most = 2.0**-6, max(2.0**8, ridge * 4, *(intensity * 2 for intensity, _ in points), 1.0)

    def across(intensity: float) -> float:
        return 60 + 900 * float(np.log(intensity / least) / np.log(most / least))

    def down(rate: float) -> float:
        low, high = bandwidth * least, peak_flops * 2
        return 290 - 270 * float(np.log(rate / low) / np.log(high / low))

    roof = " ".join(f"{across(x):.1f},{down(min(peak_flops, bandwidth * x)):.1f}" for x in (least, ridge, most))
    marks = "".join(
        f'<circle cx="{across(max(least, intensity)):.1f}" cy="{down(min(peak_flops, bandwidth * max(least, intensity))):.1f}" '
        f'r="4" fill="#d7191c" fill-opacity=".6"><title>{escape(kernel.name)}: {intensity:.2f} flops per byte, at least '
        f"{1e6 * max(kernel.flops / peak_flops, kernel.nbytes / bandwidth):.2f} us</title></circle>"
        for intensity, kernel in points
    )
    floor = sum(max(kernel.flops / peak_flops, kernel.nbytes / bandwidth) for kernel in kernels)
    return (
        f"<p>roof measured with NumPy on this machine: {peak_flops / 1e9:.0f} GFLOP/s, {bandwidth / 1e9:.1f} GB/s copied; "
        f"least time of the kernels one after another: {floor * 1e6:.1f} us</p>"
        f'<svg viewBox="0 0 1000 310" width="1000" role="img"><polyline points="{roof}" fill="none" stroke="#2c7bb6" '
        f'stroke-width="2"/>{marks}<text x="60" y="306">flops per byte (log)</text></svg>'
    )
