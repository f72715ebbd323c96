"""Finding compilers, compiling, and what a failure tells."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stagedtensor.errors import CompileError
from stagedtensor.runtime.compiler import (
    Compiler,
    Unit,
    accepts,
    compile_shared,
    find_compiler,
    has_float16,
    identify,
    user_line,
)
from stagedtensor.runtime.target import TARGETS, detect, target

GENERIC = TARGETS["generic"]
ZIG = (sys.executable, "-m", "ziglang", "cc")


def program(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return find_compiler()


def test_a_compiled_function_runs(compiler: Compiler, tmp_path: Path) -> None:
    out = tmp_path / "f.so"
    compile_shared("double f(double a) { return a * 3 + 1; }\n", out, flags=compiler.flags(detect()), compiler=compiler)
    function = ctypes.CDLL(str(out)).f
    function.restype, function.argtypes = ctypes.c_double, (ctypes.c_double,)
    assert function(2.5) == 8.5


def test_several_units_become_one_library(compiler: Compiler, tmp_path: Path) -> None:
    out = tmp_path / "f.so"
    units = ["int g(int);\nint f(int a) { return g(a) + 1; }\n", "int g(int a) { return 10 * a; }\n"]
    compile_shared(units, out, flags=compiler.flags(GENERIC), compiler=compiler)
    assert ctypes.CDLL(str(out)).f(4) == 41


WHOLE = "int g(int a) { return 10 * a; }\n/* model.py:9 */\nint f(int a) { return g(a) + one; }\n"


def test_units_of_one_source_speak_of_its_lines(compiler: Compiler, tmp_path: Path) -> None:
    out = tmp_path / "f.so"
    first = Unit("int g(int a) { return 10 * a; }\n", ("-O0",))
    rest = 'int g(int);\n#line 2 "routine.c"\n/* model.py:9 */\nint f(int a) { return g(a) + one; }\n'
    with pytest.raises(CompileError) as caught:
        compile_shared(WHOLE, out, flags=compiler.flags(GENERIC), compiler=compiler, split=[first, Unit(rest)])
    assert "at model.py:9" in str(caught.value)
    assert ">     3 | int f(int a) { return g(a) + one; }" in str(caught.value)
    assert caught.value.source == WHOLE
    flags = (*compiler.flags(GENERIC), "-Done=2")
    compile_shared(WHOLE, out, flags=flags, compiler=compiler, split=[first, Unit(rest, ("-Uone", "-Done=1"))])
    assert ctypes.CDLL(str(out)).f(4) == 41


def test_the_first_failure_ends_the_other_compilers(tmp_path: Path) -> None:
    """The units share the time of the one that fails; nothing runs on behind the error."""
    command = program(
        tmp_path,
        "cc",
        'case "$*" in *--version*) echo "cc 12.1.0" ;; *_1.c*) echo no; exit 1 ;; *) touch started; sleep 60 ;; esac',
    )
    began = time.monotonic()
    with pytest.raises(CompileError, match="ended with status 1"):
        compile_shared(["int a;", "int b;"], tmp_path / "f.so", flags=(), compiler=identify((str(command),)))
    assert time.monotonic() - began < 20


def test_products_and_sums_are_rounded_apart_and_integers_wrap(compiler: Compiler, tmp_path: Path) -> None:
    out = tmp_path / "f.so"
    source = "float f(float a, float b, float c) { return a * b + c; }\nint wrapped(int a) { return a + 1 < a; }\n"
    compile_shared(source, out, flags=compiler.flags(detect()), compiler=compiler)
    library = ctypes.CDLL(str(out))
    library.f.restype, library.f.argtypes = ctypes.c_float, (ctypes.c_float,) * 3
    near_one = 1.0 + 2.0**-12
    # (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24, whose last term the rounding of the product drops; an fma would keep it.
    assert library.f(near_one, near_one, -(1.0 + 2.0**-11)) == 0.0
    assert library.wrapped(2**31 - 1) == 1


FAULTY = """\
#include <stdint.h>

/* y = w * x + b    at model.py:12 */
void y(float *restrict out, const float *restrict w) {
    for (int64_t i = 0; i < 4; i++) {
        out[i] = w[i] * missing;
    }
}
"""


def test_a_failure_shows_the_users_line_the_source_and_the_command(compiler: Compiler, tmp_path: Path) -> None:
    out = tmp_path / "f.so"
    with pytest.raises(CompileError) as caught:
        compile_shared(FAULTY, out, flags=compiler.flags(GENERIC), compiler=compiler)
    text = str(caught.value)
    assert "at model.py:12" in text
    assert ">     6 |         out[i] = w[i] * missing;" in text
    assert "      3 | /* y = w * x + b" in text
    assert "missing" in caught.value.output
    assert caught.value.source == FAULTY
    assert "command:" in text
    assert "-ffp-contract=off" in text
    assert not out.exists()


def test_locate_names_the_users_line(compiler: Compiler, tmp_path: Path) -> None:
    asked: list[int] = []

    def locate(line: int) -> str | None:
        asked.append(line)
        return "train.py:7: loss = y.mean()"

    with pytest.raises(CompileError, match=r"at train.py:7: loss = y.mean\(\)"):
        compile_shared(FAULTY, tmp_path / "f.so", flags=compiler.flags(GENERIC), compiler=compiler, locate=locate)
    assert asked == [6]


def test_a_comment_further_down_does_not_count() -> None:
    text = ["int a;", "/* late.py:3 */", "int b;"]
    assert user_line(text, 1) is None
    assert user_line(text, 3) == "late.py:3"


def test_an_undefined_symbol_fails_when_built_not_when_loaded(compiler: Compiler) -> None:
    flags = compiler.flags(GENERIC)
    assert accepts(compiler, flags, "int here(void) { return 1; }\n")
    assert not accepts(compiler, flags, "int nowhere(void);\nint here(void) { return nowhere(); }\n")


def test_float16_probe_agrees_with_the_compiler(compiler: Compiler) -> None:
    defined = accepts(compiler, compiler.flags(detect()), "#ifndef __FLT16_MANT_DIG__\n#error no _Float16\n#endif\n")
    assert has_float16(compiler, detect()) == defined


def test_no_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CompileError, match=r'pip install "stagedtensor\[cc\]".*apt-get install gcc'):
        find_compiler()


def test_cc_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    with pytest.raises(CompileError, match=r"CC names 'no-such-compiler'"):
        find_compiler()


def test_cc_may_carry_arguments(monkeypatch: pytest.MonkeyPatch, compiler: Compiler, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", f"{compiler.command[0]} -DCHOSEN=7")
    chosen = find_compiler()
    assert chosen.command[1] == "-DCHOSEN=7"
    compile_shared("int f(void) { return CHOSEN; }\n", tmp_path / "f.so", flags=chosen.flags(GENERIC))
    assert ctypes.CDLL(str(tmp_path / "f.so")).f() == 7


def test_a_broken_first_choice_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    program(tmp_path, "cc", "exit 1")
    gcc = program(tmp_path, "gcc", "echo 'gcc (Other 1) 9.3.0'")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin{os.pathsep}/nowhere")
    found = find_compiler()
    assert found.command == (str(gcc),)
    assert (found.kind, found.major) == ("gcc", 9)


@pytest.mark.parametrize(
    ("line", "kind", "major"),
    [
        ("cc (Debian 12.2.0-14+deb12u1) 12.2.0", "gcc", 12),
        ("gcc (Ubuntu 11.4.0-1ubuntu1~22.04) 11.4.0", "gcc", 11),
        ("gcc (GCC) 8.5.0 20210514 (Red Hat 8.5.0-4)", "gcc", 8),
        ("Debian clang version 14.0.6", "clang", 14),
        ("Apple clang version 15.0.0 (clang-1500.3.9.4)", "clang", 15),
    ],
)
def test_kind_and_version_are_read(tmp_path: Path, line: str, kind: str, major: int) -> None:
    found = identify((str(program(tmp_path, "compiler", f"echo '{line}'")),))
    assert (found.kind, found.major, found.version) == (kind, major, line)


def test_a_compiler_too_old_for_a_target_gets_the_next_lower() -> None:
    old = Compiler(("gcc",), "gcc", "gcc 9.3.0", 9)
    assert old.usable(target("avx512+amx")) is target("avx512")
    assert Compiler(("gcc",), "gcc", "gcc 7.1", 7).usable(target("avx512+amx")) is target("x86-64-v3")
    assert Compiler(("gcc",), "gcc", "gcc 9.4", 9).usable(target("avx512+bf16")) is target("avx512")
    assert Compiler(("gcc",), "gcc", "gcc 12.2", 12).usable(target("avx512+amx")) is target("avx512+amx")


def test_a_compiler_that_hangs_is_stopped_with_its_children(tmp_path: Path) -> None:
    command = program(tmp_path, "slow", f"sleep 30 & echo $! > {tmp_path}/child; wait")
    slow = Compiler((str(command),), "gcc", "slow 1.0", 1)
    with pytest.raises(CompileError, match=r"did not finish within 0\.5 s"):
        compile_shared("int a;\n", tmp_path / "f.so", flags=(), compiler=slow, timeout=0.5)
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and _runs(child):
        time.sleep(0.01)
    assert not _runs(child)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_importing_starts_no_compiler(tmp_path: Path) -> None:
    marker = tmp_path / "started"
    cc = program(tmp_path, "cc", f"touch {marker}")
    code = "import stagedtensor.runtime.compiler, stagedtensor.runtime.thread_pool, stagedtensor.cli"
    environment = {**os.environ, "CC": str(cc), "STAGEDTENSOR_CACHE": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    assert not marker.exists()
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="needs the package ziglang")
def test_the_compiler_from_the_package_index(tmp_path: Path) -> None:
    zig = identify(ZIG)
    assert zig.kind == "zig"
    plain = zig.flags(GENERIC)
    probe = "#ifdef __AVX__\n#error built for this machine\n#endif\nint here(void) { return 1; }\n"
    assert accepts(zig, plain, probe) or detect().name == "aarch64"
    compile_shared("float f(float a) { return a * 2; }\n", tmp_path / "f.so", flags=zig.flags(detect()), compiler=zig)
    function = ctypes.CDLL(str(tmp_path / "f.so")).f
    function.restype, function.argtypes = ctypes.c_float, (ctypes.c_float,)
    assert function(1.5) == 3.0
