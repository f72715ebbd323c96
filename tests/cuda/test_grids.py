"""Blocks of threads that take several rows or tiles one after another: the same bits as with one each, and no races."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from stagedtensor.codegen import loop_ir as ir
from stagedtensor.codegen.schedule.cuda import launch
from stagedtensor.precision import bf16, f16, f32
from tests.cuda.running import emitted, run_emulated
from tests.cuda.test_row_tiles import chain
from tests.cuda.test_rows_together import centred
from tests.cuda.test_skipped_points import padded
from tests.cuda.test_templates import row_sum
from tests.cuda.test_tensor_cores import narrow_product
from tests.run.blocks import apply, axis, contraction, load, module, random_array, same_bits, store

Case = tuple[ir.Module, dict[ir.Buffer, Any]]


def sums(columns: int) -> Case:
    x, y = ir.Buffer("x", f32, (5, columns)), ir.Buffer("y", f32, (5,))
    return row_sum(x, y, [axis("i", 5)], [axis("k", columns, "reduce")]), {x: random_array(x), y: np.zeros(5, "f4")}


def points() -> Case:
    x, y = ir.Buffer("x", f32, (9, 101)), ir.Buffer("y", f32, (9, 101))
    i, j = axis("i", 9), axis("j", 101)
    block = ir.Block("exps", (i, j), (store(y, [i, j], apply("exp", load(x, i, j))),))
    return module(block), {x: random_array(x), y: np.zeros(y.shape, "f4")}


def product() -> Case:
    a, b, c = ir.Buffer("a", f32, (70, 20)), ir.Buffer("b", f32, (20, 90)), ir.Buffer("c", f32, (70, 90))
    arrays = {a: random_array(a), b: random_array(b, 1), c: np.zeros(c.shape, "f4")}
    return module(contraction(a, b, c, (70, 90, 20), "NN")), arrays


def infinite_in_the_first_tile() -> Case:
    whole, arrays, w, _ = padded(bf16, 16, swapped=False, width=70)
    arrays[w][0, 0, 3] = np.inf  # of three tiles, one block takes the first and the last
    return whole, arrays


CASES: dict[str, tuple[Callable[[], Case], str]] = {
    "points": (points, "one thread per point"),
    "rows by a warp": (lambda: sums(40), "32 threads per result"),
    "rows by a block": (lambda: sums(700), "256 threads per result"),
    "rows through steps, by a warp": (lambda: centred(80, 40)[:2], "32 threads per row"),
    "rows through steps, by a block": (lambda: centred(130, 520)[:2], "256 threads per row"),
    "tiles in shared memory": (product, "multiply-add"),
    "tensor cores, 16-byte copies": (
        lambda: narrow_product(f16, f16, (72, 72, 136), "NN")[:2],
        "16-byte copies",
    ),
    "tensor cores, cell by cell": (
        lambda: narrow_product(bf16, bf16, (70, 71, 33), "NT")[:2],
        "copies cell by cell",
    ),
    "tensor cores, skipped points": (infinite_in_the_first_tile, "points outside an operand skipped"),
    "tiles of rows": (lambda: chain(f16, rows=50)[:2], "tiles of 16 rows"),
    "tiles of rows, in order": (lambda: chain(f32, rows=50)[:2], "tiles of 16 rows"),
}


@pytest.mark.parametrize("name", list(CASES))
def test_a_smaller_grid_gives_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, words = CASES[name]
    whole, arrays = build()
    expected = run_emulated(whole, arrays)
    assert max(kernel.launch.blocks for kernel in emitted(whole).kernels) > 2
    monkeypatch.setattr(launch, "MOST_BLOCKS", 2)
    monkeypatch.setattr(launch, "MOST_COOPERATIVE", 2)
    kernels = emitted(whole).kernels
    assert all(kernel.launch.blocks <= 2 for kernel in kernels)
    assert any(words in kernel.proc.path for kernel in kernels)
    found = run_emulated(whole, arrays)
    for buffer in whole.external:
        assert same_bits(found[buffer], expected[buffer]), buffer.name


def test_every_point_and_every_row_has_a_block_up_to_the_most() -> None:
    assert [launch.blocks_for(work) for work in (0, 1, 256, 257, 1 << 40)] == [1, 1, 1, 2, launch.MOST_BLOCKS]
    assert [launch.cooperative_blocks(count) for count in (0, 1, 257, 1 << 40)] == [1, 1, 257, launch.MOST_COOPERATIVE]
