"""Runs a routine's C text for aarch64 on any machine: compiled by zig, executed by the Unicorn processor emulator.

In: the text, its entry, and the bytes behind each pointer of its frame. Out: the bytes after one run on one thread.
Needs the packages ziglang and unicorn.
"""

from __future__ import annotations

import importlib
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stagedtensor.runtime.compiler import BASE_FLAGS

ZIG = (sys.executable, "-m", "ziglang", "cc")
_PAGE = 1 << 16
_RETURN, _STACK, _DATA = 0x1000_0000, 0x2000_0000, 0x4000_0000
_STACK_BYTES = 1 << 22
_LOADED = 1


def compiled(text: str, folder: Path, *flags: str, target: str = "aarch64-linux-musl") -> Path:
    """Return the object file of ``text``; AssertionError with the compiler's words where it does not compile."""
    source, result = folder / "routine.c", folder / "routine.o"
    source.write_text(text, encoding="utf-8")
    _zig("-target", target, *BASE_FLAGS, "-O2", *flags, "-c", str(source), "-o", str(result))
    return result


def run(text: str, entry: str, frame: Sequence[bytes], folder: Path) -> list[bytes]:
    """Return what the pointers of ``frame`` point to after one call of ``entry`` without scalars."""
    program = folder / "routine.elf"
    whole = f"{text}\nint main(void) {{ return 0; }} /* the linker asks for it */\n"
    _zig(
        "-target", "aarch64-linux-musl", "-static", f"-Wl,-e,{entry}", str(compiled(whole, folder)), "-o", str(program)
    )
    unicorn: Any = importlib.import_module("unicorn")
    registers: Any = importlib.import_module("unicorn.arm64_const")
    machine = unicorn.Uc(unicorn.UC_ARCH_ARM64, unicorn.UC_MODE_ARM)
    start = _load(machine, program.read_bytes())
    machine.mem_map(_RETURN, _PAGE)
    machine.mem_map(_STACK, _STACK_BYTES)
    barrier = struct.pack("<ii", 1, 0).ljust(512, b"\0")  # one thread: it waits for nobody
    places, at = [], _DATA
    for content in (*frame, barrier, bytes(8 * len(frame)), bytes(64)):
        size = -(-max(1, len(content)) // _PAGE) * _PAGE
        machine.mem_map(at, size)
        machine.mem_write(at, content)
        places.append(at)
        at += size
    cells, waits, pointers, scalars = places[: len(frame)], *places[len(frame) :]
    machine.mem_write(pointers, struct.pack(f"<{len(cells)}Q", *cells))
    for number, value in enumerate((pointers, scalars, 0, 1, waits)):
        machine.reg_write(getattr(registers, f"UC_ARM64_REG_X{number}"), value)
    machine.reg_write(registers.UC_ARM64_REG_SP, _STACK + _STACK_BYTES - 256)
    machine.reg_write(registers.UC_ARM64_REG_LR, _RETURN)
    machine.emu_start(start, _RETURN)
    return [bytes(machine.mem_read(place, len(content))) for place, content in zip(cells, frame, strict=True)]


def _load(machine: Any, data: bytes) -> int:
    """Map the segments of an ELF program and return its entry."""
    entry, headers = struct.unpack_from("<QQ", data, 24)
    size, count = struct.unpack_from("<HH", data, 54)
    segments = []
    for number in range(count):
        kind, _, offset, address, _, filled, total = struct.unpack_from("<IIQQQQQ", data, headers + number * size)
        if kind == _LOADED:
            segments.append((address, total, data[offset : offset + filled]))
    low = min(address for address, _, _ in segments) // _PAGE * _PAGE
    high = -(-max(address + total for address, total, _ in segments) // _PAGE) * _PAGE
    machine.mem_map(low, high - low)
    for address, _, content in segments:
        machine.mem_write(address, content)
    return int(entry)


def _zig(*arguments: str) -> None:
    done = subprocess.run([*ZIG, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
