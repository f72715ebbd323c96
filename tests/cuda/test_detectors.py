"""The emulator finds what it is there to find: each fault is planted into a kernel's text that runs clean without it."""

from __future__ import annotations

import numpy as np
import pytest

from stagedtensor.codegen import loop_ir as ir
from stagedtensor.errors import MemoryCheckError
from stagedtensor.precision import bf16, f32
from tests.cuda.running import Edit, run_emulated
from tests.run.blocks import (
    Array,
    apply,
    axis,
    contraction,
    load,
    module,
    random_array,
    run_reference,
    same_bits,
    store,
)


def product() -> tuple[ir.Module, dict[ir.Buffer, Array]]:
    a, b, c = ir.Buffer("a", f32, (20, 24)), ir.Buffer("b", f32, (24, 18)), ir.Buffer("c", f32, (20, 18))
    whole = module(contraction(a, b, c, (20, 18, 24), "NN"))
    return whole, {a: random_array(a), b: random_array(b, 1), c: np.zeros((20, 18), np.float32)}


def replaced(old: str, new: str, count: int = 1) -> Edit:
    return lambda text: text.replace(old, new, count)


def finding(edit: Edit) -> str:
    whole, arrays = product()
    with pytest.raises(MemoryCheckError) as caught:
        run_emulated(whole, arrays, edit=edit)
    return str(caught.value)


def test_the_kernel_is_clean_without_a_fault() -> None:
    whole, arrays = product()
    expected, got = run_reference(whole, arrays), run_emulated(whole, arrays)
    assert all(same_bits(got[buffer], expected[buffer]) for buffer in whole.external)


def test_missing_barrier_before_the_tiles_are_read() -> None:
    message = finding(replaced("__syncthreads();", ";"))
    assert "thread" in message
    assert "block 0" in message
    assert "without a barrier" in message or "nobody wrote" in message


def test_missing_barrier_before_the_tiles_are_written_again() -> None:
    def edit(text: str) -> str:
        at = text.rindex("__syncthreads();")
        return text[:at] + text[at + len("__syncthreads();") :]

    message = finding(edit)
    assert "touches a cell that another thread touches without a barrier between" in message
    assert "_tile" in message
    assert "generated line" in message


def test_read_beyond_an_operand() -> None:
    message = finding(replaced("first_row + place < 20", "first_row + place < 21"))
    assert "outside the buffer" in message
    assert "read of 4 bytes at cell 480 of a, which has 480 cells" in message
    assert "a[" in message  # the generated line


def test_write_beyond_the_result() -> None:
    message = finding(replaced("row < 20 && column", "row < 21 && column"))
    assert "write of 4 bytes" in message
    assert "of c, which has 360 cells" in message


def test_write_beyond_a_shared_array() -> None:
    message = finding(replaced("ST_SHARED(float, left_tile, 528)", "ST_SHARED(float, left_tile, 500)"))
    assert "left_tile, which has 500 cells" in message


def test_read_of_shared_memory_that_nobody_wrote() -> None:
    message = finding(replaced("left_tile[33 * layer + place] =", "if (place != 3) left_tile[33 * layer + place] ="))
    assert "nobody wrote" in message
    assert "left_tile" in message


def test_two_blocks_write_one_cell() -> None:
    x, y = ir.Buffer("x", f32, (600,)), ir.Buffer("y", f32, (600,))
    i = axis("i", 600)
    whole = module(ir.Block("copy", (i,), (store(y, [i], apply("neg", load(x, i))),)))
    arrays = {x: random_array(x), y: np.zeros(600, np.float32)}
    with pytest.raises(MemoryCheckError, match="was written by thread 0 of block 0"):
        run_emulated(whole, arrays, edit=replaced("y[i] =", "y[i % 256] ="))


def test_barrier_that_some_threads_skip() -> None:
    message = finding(replaced("threadIdx.x;", "threadIdx.x; if (thread == 5) return;"))
    assert "barrier that others never reach" in message


@pytest.mark.parametrize("access", ["&x[4 * i_group", "&y[4 * i_group"])
def test_four_cells_in_one_access_that_start_between_multiples_of_16(access: str) -> None:
    x, y = ir.Buffer("x", f32, (1 << 14,)), ir.Buffer("y", f32, (1 << 14,))
    i = axis("i", 1 << 14)
    whole = module(ir.Block("copy", (i,), (store(y, [i], apply("neg", load(x, i))),)))
    arrays = {x: random_array(x), y: np.zeros(1 << 14, np.float32)}
    run_emulated(whole, arrays)
    with pytest.raises(MemoryCheckError, match="16 bytes at once at an address that is no multiple of 16") as caught:
        run_emulated(whole, arrays, edit=replaced(access, f"{access} + 1"))
    assert "generated line" in str(caught.value)


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ("st_copy_async(1 + ", "16 bytes at once at an address that is no multiple of 16"),
        ("for (int copy = 0; copy < 300; copy++) st_copy_async(", "more copies than the emulator keeps"),
    ],
)
def test_asynchronous_copies_that_no_thread_may_start(new: str, message: str) -> None:
    a, b, c = ir.Buffer("a", bf16, (32, 32)), ir.Buffer("b", bf16, (32, 32)), ir.Buffer("c", f32, (32, 32))
    whole = module(contraction(a, b, c, (32, 32, 32), "NN"))
    arrays = {a: random_array(a), b: random_array(b, 1), c: np.zeros((32, 32), np.float32)}
    run_emulated(whole, arrays)
    with pytest.raises(MemoryCheckError, match=message):
        run_emulated(whole, arrays, edit=replaced("st_copy_async(&left_tile", f"{new}&left_tile"))


def test_a_temporary_read_before_it_is_written() -> None:
    x, h, y = ir.Buffer("x", f32, (50,)), ir.Buffer("h", f32, (50,)), ir.Buffer("y", f32, (50,))
    i, j = axis("i", 50), axis("j", 50)
    whole = module(
        ir.Block("hidden", (i,), (store(h, [i], apply("neg", load(x, i))),)),
        ir.Block("out", (j,), (store(y, [j], apply("exp", load(h, j))),)),
        temporaries=[h],
    )
    arrays = {x: random_array(x), y: np.zeros(50, np.float32)}
    run_emulated(whole, arrays)
    with pytest.raises(MemoryCheckError, match="nobody wrote"):
        run_emulated(whole, arrays, edit=replaced("i < 50", "i < 49"))


def test_findings_name_the_user_s_expression() -> None:
    x, y = ir.Buffer("x", f32, (40,)), ir.Buffer("y", f32, (40,))
    i = axis("i", 40)
    block = ir.Block("copy", (i,), (store(y, [i], load(x, i)),), origins=(ir.Origin("y =: x", "model.py:7"),))
    arrays = {x: random_array(x), y: np.zeros(40, np.float32)}
    with pytest.raises(MemoryCheckError, match=r"computing y =: x  \(model.py:7\)"):
        run_emulated(module(block), arrays, edit=replaced("i < 40", "i < 41"))
