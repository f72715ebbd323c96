"""The page of results: results in, Markdown out.

Tables of times with ratios, compile times, peak memory, floors, where our time goes, and kernels beside the machine's
peaks. Everything on the page is computed from the results; nothing is measured here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from stagedtensor.benchmarks.arm import ARMS, OURS
from stagedtensor.benchmarks.ceilings import Ceilings
from stagedtensor.benchmarks.kernels import KERNELS
from stagedtensor.benchmarks.results import Results, Row
from stagedtensor.benchmarks.workloads import WORKLOADS, flops, least_bytes

NOTICE = "<!-- Written by python -m stagedtensor bench --write-docs; measure again instead of editing. -->\n"
SHOWN_KERNELS = 4
NAMES = {"ours": "ours", "torch": "torch eager", "torch.compile": "torch.compile", "jax": "JAX jit"}


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table; columns after the first are aligned to the right where their head says so by a trailing colon."""
    rule = ["---:" if title.endswith(":") else "---" for title in head]
    cells = [[title.removesuffix(":") for title in head], rule, *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells) + "\n"


def number(value: float | None, digits: int = 3) -> str:
    """Return a number with so many significant digits, without exponent."""
    if value is None:
        return ""
    if value == 0:
        return "0"
    text = f"{value:.{digits}g}"
    return f"{float(text):.0f}" if "e" in text else text


def benchmarks(results: Results) -> str:
    """Return the page."""
    training = [row for row in results.rows if row.workload in WORKLOADS]
    kernels = [row for row in results.rows if row.workload in KERNELS]
    parts = [
        NOTICE,
        "# Benchmarks\n",
        introduction(),
        machine(results),
        repeat(),
        workloads(dict.fromkeys(row.workload for row in training)),
        times(results, training, "## Training steps\n", "Milliseconds per step: median, p10 to p90. "),
        narrow(training),
        compile_times(training),
        memory(training),
        floors(results, training),
        shares(results),
        overheads(results),
        times(results, kernels, "## Kernels by themselves\n", "Milliseconds per call: median, p10 to p90. "),
        peaks(results, kernels),
    ]
    return "\n".join(part for part in parts if part)


def introduction() -> str:
    """Say what is measured and what counts."""
    return (
        "A training step is everything: forward, backward, SGD with momentum 0.9 on f32 masters; in f16 also dynamic loss\n"
        "scaling, skipped steps included. Every arm starts from the same parameters and sees the same 16 batches in turn. Ours\n"
        "copies its batch in at every step; the others hold theirs as tensors of their own. bf16 and f16 are twins, activations\n"
        "and activation gradients of that format on our side, autocast (with a gradient scaler) in torch, casts by hand in JAX.\n"
        "Attention is torch's fused function in f32 and written out in the narrow legs, where that is faster.\n\n"
        "All arms take turns in one process. Before its block an arm waits a few milliseconds, so that the workers of the arm\n"
        "before go to sleep, and runs steps that do not count; a block is timed as a whole. Rounds in which other processes used\n"
        "the machine are left out; `~` marks a figure for which too few quiet rounds remained. Our figure counts only if the\n"
        "losses of the first ten steps are within 2e-3 (f32, f16) or 4e-3 (bf16) of torch's in f32 and the loss moved; `!` marks\n"
        "one that does not. The ratio is the time of the fastest other arm over ours: above 1, ours is faster.\n"
    )


def machine(results: Results) -> str:
    """Describe where the figures are from."""
    lines = [(name, value) for name, value in results.machine.items()]
    for threads, peak in sorted(results.peaks.items()):
        said = f"{peak['flops']['f32'] / 1e9:.0f} GFLOP/s f32"
        if peak["flops"]["bf16"] > peak["flops"]["f32"]:
            said += f", {peak['flops']['bf16'] / 1e9:.0f} GFLOP/s bf16"
        plural = "" if threads == "1" else "s"
        said += f", copy {peak['copy'] / 1e9:.1f} GB/s read and written"
        lines.append((f"measured peak, {threads} thread{plural}", said))
    text = "## The machine\n\n" + markdown(("", ""), lines)
    noisy = sum(row.noisy for row in results.rows)
    if 2 * noisy > len(results.rows):
        text += (
            f"\nThe machine was busy with other work: {noisy} of {len(results.rows)} figures are disturbed (`~`), libraries whose "
            "workers wait\nby spinning most of all. Measure again on a quiet machine before drawing conclusions.\n"
        )
    return text


def repeat() -> str:
    """Say how to measure again."""
    return (
        "## Measuring again\n\n"
        "```bash\n"
        'pip install "stagedtensor[bench]"\n'
        "python -m stagedtensor bench --json results.json --write-docs docs   # everything\n"
        "python -m stagedtensor bench --quick --no-compile                    # a few minutes\n"
        "python -m stagedtensor bench --workloads mlp-small,gemm --precisions bf16 --threads 2 --arms ours,jax\n"
        "python -m stagedtensor bench --curves --write-docs docs              # how costs grow\n"
        "```\n\n"
        "`--from results.json` writes table and page from saved results. `--workloads micro` is the kernels by themselves. The\n"
        "JSON has a row per arm and a map `ratios` by `workload/precision/threads`. The command is in the installed package too.\n"
    )


def workloads(names: Iterable[str]) -> str:
    """List the training workloads."""
    lines = [(name, WORKLOADS[name].text) for name in names]
    return "## Workloads\n\n" + markdown(("name", "network"), lines) if lines else ""


def arms_of(rows: Iterable[Row]) -> list[str]:
    """Return the arms that have rows, in the usual order."""
    there = {row.arm for row in rows}
    return [arm for arm in ARMS if arm in there]


def timing(row: Row | None) -> str:
    """Return ``0.06 (0.058-0.07)`` with marks."""
    if row is None or row.median_ms is None:
        return "failed" if row is not None and row.error else ""
    marks = ("~" if row.noisy else "") + ("" if row.counts else "!")
    return f"{number(row.median_ms)} ({number(row.p10_ms, 2)}-{number(row.p90_ms, 2)}){marks}"


def times(results: Results, rows: Sequence[Row], title: str, what: str) -> str:
    """Return the tables of times, one per number of threads."""
    if not rows:
        return ""
    arms, ratios = arms_of(rows), results.ratios()
    parts = [title, what + "The last column is the time of the fastest other arm over ours.\n"]
    for threads in sorted({row.threads for row in rows}, reverse=True):
        lines = []
        chosen = [row for row in rows if row.threads == threads]
        for key in dict.fromkeys(row.key for row in chosen):
            by_arm = {row.arm: row for row in chosen if row.key == key}
            workload, precision, _ = key.split("/")
            figures = [timing(by_arm.get(arm)) for arm in arms]
            lines.append((workload, precision, *figures, f"**{number(ratios[key])}**" if key in ratios else ""))
        for key, ratio in ratios.items():
            if (
                key.startswith("gemm/")
                and key.endswith(f"/{threads}")
                and any(row.workload in KERNELS for row in chosen)
            ):
                _, precision, _ = key.split("/")
                lines.append(("gemm, geometric mean", precision, *("" for _ in arms), f"**{number(ratio)}**"))
        parts.append(f"{threads} thread{'s' if threads > 1 else ''}:\n")
        parts.append(markdown(("workload", "precision", *(f"{NAMES[arm]}:" for arm in arms), "ratio:"), lines))
    return "\n".join(parts)


def narrow(rows: Sequence[Row]) -> str:
    """Compare our narrow steps with our f32 steps."""
    mine = {
        (row.workload, row.precision, row.threads): row.median_ms for row in rows if row.arm == OURS and row.median_ms
    }
    lines = []
    for workload, precision, threads in mine:
        if precision != "f32":
            continue
        gains = [
            number(mine[(workload, "f32", threads)] / mine[key]) if (key := (workload, other, threads)) in mine else ""
            for other in ("bf16", "f16")
        ]
        if any(gains):
            lines.append((workload, str(threads), *gains))
    if not lines:
        return ""
    return (
        "## What narrow precision gains\n\nOur f32 step over our narrow step: above 1, narrow is faster.\n\n"
        + markdown(("workload", "threads:", "bf16:", "f16:"), lines)
    )


def most_threads(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with the most threads that were measured."""
    limit = max((row.threads for row in rows), default=0)
    return [row for row in rows if row.threads == limit]


def compile_times(rows: Sequence[Row]) -> str:
    """Compare first compiles, and compiles from a cache on disk."""
    rows = most_threads([row for row in rows if row.compile_s is not None])
    if not rows:
        return ""
    return (
        "## Compiling\n\nSeconds until a step is ready, with an empty cache; in brackets, from the cache on disk. Ours is "
        "`ctx.compile`; the others' is\ntheir first step.\n\n" + by_arm(rows, compiling)
    )


def by_arm(rows: Sequence[Row], cell: Callable[[Row], str]) -> str:
    """Return a table with a line per workload and precision, and the ``cell`` of each arm's row."""
    arms = arms_of(rows)
    lines = []
    for key in dict.fromkeys(row.key for row in rows):
        found = {row.arm: cell(row) for row in rows if row.key == key}
        lines.append((*key.split("/")[:2], *(found.get(arm, "") for arm in arms)))
    return markdown(("workload", "precision", *(f"{NAMES[arm]}:" for arm in arms)), lines)


def compiling(row: Row) -> str:
    """Return ``1.2 (0.05)``: cold, and from the cache where that was measured."""
    return number(row.compile_s) + (f" ({number(row.cached_s, 2)})" if row.cached_s is not None else "")


def memory(rows: Sequence[Row]) -> str:
    """Compare peak memory."""
    rows = most_threads([row for row in rows if row.peak_mb is not None])
    if not rows:
        return ""
    return (
        "## Peak memory\n\nMB that a fresh process came to hold beyond what its imports took; in brackets, the whole process. "
        "Batches, compiling and five\nsteps are in it.\n\n"
        + by_arm(rows, lambda row: f"{number(row.peak_mb)} ({number(row.process_mb)})")
    )


def floors(results: Results, rows: Sequence[Row]) -> str:
    """Compare our steps with the least time that their operations and their bytes take."""
    lines = []
    for row in most_threads([row for row in rows if row.arm == OURS and row.median_ms]):
        peak = results.peaks.get(str(row.threads))
        if peak is None or row.median_ms is None:
            continue
        workload = WORKLOADS[row.workload]
        work, nbytes = flops(workload), least_bytes(workload, row.precision)
        by_flops, by_bytes = Ceilings(**peak).floor_ms(work, nbytes, row.precision)
        figures = (work / 1e9, by_flops, nbytes / 1e6, by_bytes, row.median_ms)
        gap = row.median_ms / max(by_flops, by_bytes)
        lines.append((row.workload, row.precision, *map(number, figures), f"**{number(gap)}**"))
    if not lines:
        return ""
    head = (
        "workload",
        "precision",
        "GFLOP:",
        "at peak, ms:",
        "MB:",
        "at copy speed, ms:",
        "ours, ms:",
        "over the floor:",
    )
    return (
        "## How far from the floor\n\nTwo numbers bound a step from below: the operations of its products over the measured "
        "peak, and the\nbytes that it cannot avoid (masters and momentum read and written once, activations written and read "
        "once) over\nthe copy speed. Where the masters stay in the caches, the second bound can be beaten.\n\n"
        + markdown(head, lines)
    )


def shares(results: Results) -> str:
    """Show the longest kernels of our steps."""
    lines = []
    for key, entries in results.profiles.items():
        workload, precision, threads = key.split("/")
        if int(threads) != max(int(other.split("/")[2]) for other in results.profiles):
            continue
        total = sum(spent for _, spent in entries) or 1.0
        longest = [f"`{name}` {spent / total:.0%}" for name, spent in entries[:SHOWN_KERNELS]]
        rest = sum(spent for _, spent in entries[SHOWN_KERNELS:])
        lines.append((workload, precision, str(len(entries)), ", ".join(longest), f"{rest / total:.0%}"))
    if not lines:
        return ""
    return (
        "## Where the time goes\n\nThe longest kernels of our step as thread 0 sees them, by clocks between the calls. A kernel "
        "is named after\nwhat it computes: `..._grad` with `..._momentum` is a weight's gradient with its update behind it, "
        "`..._panels`\nthe packing of an operand.\n\n"
        + markdown(("workload", "precision", "kernels:", "longest", "others:"), lines)
    )


def overheads(results: Results) -> str:
    """Show what calls and the test for overflow cost."""
    lines = [(name, number(value)) for name, value in results.overheads.items()]
    return "## Overheads\n\n" + markdown(("cost", "measured:"), lines) if lines else ""


def peaks(results: Results, rows: Sequence[Row]) -> str:
    """Show kernels beside the machine's peaks."""
    rows = [row for row in most_threads(rows) if row.share is not None]
    if not rows:
        return ""
    arms = arms_of(rows)
    lines = []
    for key in dict.fromkeys(row.key for row in rows):
        by_arm = {row.arm: row for row in rows if row.key == key}
        workload, precision, _ = key.split("/")
        cells = [f"{row.share:.0%}" if (row := by_arm.get(arm)) and row.share is not None else "" for arm in arms]
        lines.append((workload, precision, KERNELS[workload].text, *cells))
    return "Share of the measured peak: of operations for products, of a copy's bytes for the others.\n\n" + markdown(
        ("kernel", "precision", "computes", *(f"{NAMES[arm]}:" for arm in arms)), lines
    )
