"""Finds the C compiler and turns C text into a shared library.

In: C source text, flags of a :class:`~stagedtensor.runtime.target.Target`. Out: a shared library at the path asked
for, or a :class:`CompileError` that shows the command, what the compiler said, the numbered lines around the first
error and the user's own line. The compiler is looked for and identified once per process, at the first use. Knows
nothing of the cache.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from stagedtensor.errors import CompileError
from stagedtensor.runtime.target import TARGETS, Target

logger = logging.getLogger(__name__)

Locate = Callable[[int], str | None]
"""Maps a line of generated source (counted from 1) to the user's line that it computes, or None."""

INSTALL_HINT = 'Install one: pip install "stagedtensor[cc]" (a compiler from PyPI), or apt-get install gcc.'

BASE_FLAGS = (
    "-std=gnu11",
    "-O3",
    "-fPIC",
    "-ffp-contract=off",  # a*b+c rounds twice unless the program says fma: the same on every target
    "-fwrapv",  # integer arithmetic wraps, as in NumPy
    "-fno-math-errno",
    "-fno-trapping-math",
)
# Plain gcc would keep _Float16 intermediates in float over whole expressions, a rounding fewer than written.
_KIND_FLAGS = {"gcc": ("-fexcess-precision=standard",), "clang": (), "zig": ("-fno-sanitize=undefined",)}

# First major versions that know all the flags of a target; -m flags of other targets are older than any we meet.
_MINIMUM_MAJOR = {
    "avx512": {"gcc": 8, "clang": 7},
    "avx512+bf16": {"gcc": 10, "clang": 9},
    "avx512+amx": {"gcc": 11, "clang": 12},
}
_NEXT_LOWER = {"avx512+amx": "avx512", "avx512+bf16": "avx512", "avx512": "x86-64-v3"}

_ERROR_LINE = re.compile(r"^(?P<file>[^\s:][^:\n]*):(?P<line>\d+):(?:\d+:)?\s*(?:fatal )?error: ", re.MULTILINE)
_USER_LINE = re.compile(r"[\w./\\-]+\.(?:py|st|ipynb):\d+(?:[^*\n]*)")
_EXCERPT_LINES = 5  # shown on each side of the error
_MESSAGE_LINES = 15
_COMMENT_REACH = 60  # how far above an error the comment naming the user's line may stand


@dataclass(frozen=True)
class Compiler:
    """A C compiler of this machine: ``command`` runs it, ``version`` is the first line it says of itself."""

    command: tuple[str, ...]
    kind: str
    version: str
    major: int

    @property
    def identity(self) -> str:
        """The text that distinguishes this compiler in a cache key."""
        return f"{self.kind}\n{shlex.join(self.command)}\n{self.version}"

    def supports(self, target: Target) -> bool:
        """Tell whether this version knows all flags of ``target``."""
        return self.major >= _MINIMUM_MAJOR.get(target.name, {}).get("gcc" if self.kind == "gcc" else "clang", 0)

    def usable(self, target: Target) -> Target:
        """Return ``target``, or the next lower one whose flags this compiler knows."""
        lower = target
        while not self.supports(lower):
            lower = TARGETS[_NEXT_LOWER[lower.name]]
        if lower is not target:
            logger.info("%s does not know target %s; using %s", self.version, target.name, lower.name)
        return lower

    def flags(self, target: Target, extra: Sequence[str] = ()) -> tuple[str, ...]:
        """Return every flag of a compilation for ``target``, in the order given to the compiler."""
        machine = target.flags
        if self.kind == "zig":
            # Without a processor this one compiles for the machine it runs on. It spells names with underscores.
            machine = tuple(flag.replace("-march=x86-64", "-march=x86_64") for flag in machine) or ("-mcpu=baseline",)
        return (*BASE_FLAGS, *_KIND_FLAGS[self.kind], *machine, *extra)


def find_compiler() -> Compiler:
    """Return the first of $CC, cc, gcc, clang, ``python -m ziglang cc``; CompileError where there is none."""
    return _find(os.environ.get("CC", "").strip(), os.environ.get("PATH", ""))


@functools.lru_cache(maxsize=8)
def _find(chosen: str, path: str) -> Compiler:
    if chosen:
        command = tuple(shlex.split(chosen))
        if shutil.which(command[0], path=path) is None:
            raise CompileError(
                f"the environment variable CC names {command[0]!r}, which is not a program on PATH.\n"
                f"Unset CC to use the compiler of the system, or correct it. {INSTALL_HINT}"
            )
        return identify(command)
    for name in ("cc", "gcc", "clang"):
        found = shutil.which(name, path=path)
        if found is None:
            continue
        try:
            return identify((found,))
        except CompileError as error:  # e.g. the stub that macOS has before its tools are installed
            logger.info("passing over %s: %s", found, error)
    if importlib.util.find_spec("ziglang") is not None:
        return identify((sys.executable, "-m", "ziglang", "cc"))
    raise CompileError(
        f"no C compiler: looked for $CC, cc, gcc, clang on PATH and for the Python package ziglang.\n{INSTALL_HINT}"
    )


def available_compilers() -> list[Compiler]:
    """Return every compiler found, the one that would be used first."""
    candidates: list[tuple[str, ...]] = []
    chosen = shlex.split(os.environ.get("CC", ""))
    if chosen:
        candidates.append(tuple(chosen))
    candidates += [(found,) for name in ("cc", "gcc", "clang") if (found := shutil.which(name)) is not None]
    if importlib.util.find_spec("ziglang") is not None:
        candidates.append((sys.executable, "-m", "ziglang", "cc"))
    compilers = []
    for command in candidates:
        try:
            compilers.append(identify(command))
        except CompileError as error:
            logger.info("%s", error)
    return compilers


@functools.lru_cache(maxsize=16)
def identify(command: tuple[str, ...]) -> Compiler:
    """Ask ``command`` what it is; CompileError where it does not answer like a C compiler."""
    try:
        code, output = _run([*command, "--version"], cwd=None, timeout=60.0)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"cannot run the C compiler {shlex.join(command)!r}: {error}.\n{INSTALL_HINT}") from error
    if code != 0 or not output.strip():
        raise CompileError(
            f"{shlex.join(command)!r} is not a working C compiler: --version ended with status {code}.\n{INSTALL_HINT}",
            output=output,
        )
    version = output.strip().splitlines()[0]
    # A wrapper may be called anything: what it prints decides.
    kind = "zig" if "ziglang" in command or Path(command[0]).name == "zig" else "clang" if "clang" in version else "gcc"
    number = re.search(r"(?:version |\) |^)(\d+)\.\d+", version) or re.search(r"(\d+)\.\d+", version)
    return Compiler(command, kind, version, int(number.group(1)) if number else 0)


@dataclass(frozen=True)
class Unit:
    """One of several translation units, with flags of its own behind those of all."""

    text: str
    flags: tuple[str, ...] = ()


def compile_shared(
    source: str | Sequence[str],
    out: Path,
    *,
    flags: Sequence[str],
    compiler: Compiler | None = None,
    locate: Locate | None = None,
    libraries: Sequence[str] = ("-lm",),
    name: str = "routine",
    timeout: float = 600.0,
    split: Sequence[Unit] = (),
) -> None:
    """Compile C text into the shared library ``out``.

    Several texts are separate translation units, compiled side by side. ``split`` are the units to compile in place of
    the one text ``source``, in whose lines (``#line``, file ``{name}.c``) errors are then told. ``flags`` is what
    :meth:`Compiler.flags` returned, ``timeout`` counts seconds for each run of the compiler. Raises CompileError;
    ``out`` is then not written.
    """
    compiler = compiler or find_compiler()
    texts = [source] if isinstance(source, str) else list(source)
    units = list(split) or [Unit(text) for text in texts]
    with tempfile.TemporaryDirectory(prefix="stagedtensor-") as scratch_name:
        scratch = Path(scratch_name)
        library = scratch / "library.so"
        link = ["-shared", *(["-Wl,-z,defs"] if sys.platform.startswith("linux") else []), "-o", str(library)]
        names = [f"{name}.c"] if len(units) == 1 else [f"{name}_{index}.c" for index in range(len(units))]
        for file, unit in zip(names, units, strict=True):
            (scratch / file).write_text(unit.text, encoding="utf-8")
        sources = {f"{name}.c": texts[0]} if split else dict(zip(names, texts, strict=True))
        if len(units) == 1:
            command = [*compiler.command, *flags, *units[0].flags, *link, names[0], *libraries]
            _checked(command, scratch, timeout, sources, locate)
        else:
            commands = [
                [*compiler.command, *flags, *unit.flags, "-c", file, "-o", f"{file}.o"]
                for file, unit in zip(names, units, strict=True)
            ]
            _checked_together(commands, scratch, timeout, sources, locate)
            command = [*compiler.command, *flags, *link, *(f"{file}.o" for file in names), *libraries]
            _checked(command, scratch, timeout, sources, locate)
        if not library.is_file():
            raise CompileError(
                f"{compiler.command[0]!r} reported success but wrote no library; is it a C compiler?\n"
                f"  command: {shlex.join(command)}\n  set CC to a working one, or unset it"
            )
        shutil.move(library, out)


@functools.lru_cache(maxsize=64)
def accepts(compiler: Compiler, flags: tuple[str, ...], source: str) -> bool:
    """Tell whether ``source`` compiles and links with nothing left undefined; asked once per process."""
    with tempfile.TemporaryDirectory(prefix="stagedtensor-") as scratch:
        try:
            compile_shared(source, Path(scratch) / "probe.so", flags=flags, compiler=compiler, name="probe")
        except CompileError:
            return False
    return True


_FLOAT16_PROBE = """\
_Float16 narrow(float value) { return (_Float16)value; }
float wide(_Float16 value) { return (float)value; }
_Float16 narrow_double(double value) { return (_Float16)value; }
"""


def has_float16(compiler: Compiler, target: Target) -> bool:
    """Tell whether ``_Float16`` exists and its conversions link; without it code uses the integer conversions."""
    return accepts(compiler, compiler.flags(target), _FLOAT16_PROBE)


def _checked_together(
    commands: Sequence[list[str]], cwd: Path, timeout: float, sources: Mapping[str, str], locate: Locate | None
) -> None:
    """Run compilers side by side; the first failure, or an interrupt, ends the others."""
    running: list[subprocess.Popen[bytes]] = []
    with ThreadPoolExecutor(max_workers=len(commands)) as workers:
        waiting = [workers.submit(_checked, command, cwd, timeout, sources, locate, running) for command in commands]
        try:
            wait(waiting, return_when=FIRST_EXCEPTION)
            for done in waiting:
                if done.done():
                    done.result()
        except BaseException:
            while wait(waiting, timeout=0.05).not_done:  # some may only be starting
                for process in running:
                    if process.poll() is None:
                        _kill(process)
            raise


def _checked(
    command: list[str],
    cwd: Path,
    timeout: float,
    sources: Mapping[str, str],
    locate: Locate | None,
    running: list[subprocess.Popen[bytes]] | None = None,
) -> None:
    logger.debug("running %s", shlex.join(command))
    whole = "\n".join(sources.values())
    try:
        code, output = _run(command, cwd=cwd, timeout=timeout, running=running)
    except subprocess.TimeoutExpired as error:
        raise CompileError(
            f"the C compiler did not finish within {timeout:g} s and was stopped.\n  command: {shlex.join(command)}",
            source=whole,
        ) from error
    except OSError as error:
        raise CompileError(
            f"cannot run the C compiler {command[0]!r}: {error}.\n{INSTALL_HINT}", source=whole
        ) from error
    if code != 0:
        raise CompileError(describe_failure(command, code, output, sources, locate), source=whole, output=output)
    if output:
        logger.debug("the compiler said:\n%s", output)


def describe_failure(
    command: Sequence[str], code: int, output: str, sources: Mapping[str, str], locate: Locate | None
) -> str:
    """Return the message for a failed compilation: user's line, compiler's words, excerpt, command."""
    how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
    parts = [f"the C compiler {how} on generated source."]
    found = next((match for match in _ERROR_LINE.finditer(output) if Path(match["file"]).name in sources), None)
    excerpt: list[str] = []
    if found is not None:
        file, line = Path(found["file"]).name, int(found["line"])
        text = sources[file].splitlines()
        user = (locate(line) if locate is not None else None) or user_line(text, line)
        if user:
            parts.append(f"  at {user}")
        excerpt = [f"  {file}, around line {line}:", *numbered(text, line)]
    said = output.strip().splitlines()
    parts += [f"  {entry}" for entry in said[:_MESSAGE_LINES]]
    if len(said) > _MESSAGE_LINES:
        parts.append(f"  ... {len(said) - _MESSAGE_LINES} more lines in the error's .output")
    parts += excerpt
    parts.append(f"  command: {shlex.join(command)}")
    parts.append("The whole source is in the error's .source.")
    return "\n".join(parts)


def numbered(text: Sequence[str], line: int) -> list[str]:
    """Return the lines around ``line`` (from 1) with their numbers, the line itself marked ``>``."""
    first, last = max(1, line - _EXCERPT_LINES), min(len(text), line + _EXCERPT_LINES)
    return [f"  {'>' if at == line else ' '} {at:5d} | {text[at - 1]}" for at in range(first, last + 1)]


def user_line(text: Sequence[str], line: int) -> str | None:
    """Return the ``file.py:12`` that the nearest comment at or above ``line`` names."""
    for at in range(min(line, len(text)), max(0, line - _COMMENT_REACH), -1):
        _, opened, comment = text[at - 1].partition("/*")
        found = _USER_LINE.search(comment) if opened else None
        if found is not None:
            return found.group(0).strip()
    return None


def _run(
    command: Sequence[str],
    *,
    cwd: Path | None,
    timeout: float,
    running: list[subprocess.Popen[bytes]] | None = None,
) -> tuple[int, str]:
    """Return status and output; ``running`` takes the process, for those who may have to end it."""
    environment = dict(os.environ, LC_ALL="C")  # messages are parsed
    # A group of its own: the driver's children end with it on a timeout or an interrupt.
    with subprocess.Popen(
        command,
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        if running is not None:
            running.append(process)
        try:
            output, _ = process.communicate(timeout=timeout)
        except BaseException:
            _kill(process)
            raise
    return process.returncode, output.decode("utf-8", errors="replace")


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):  # it may have ended, or not have its own group yet
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
