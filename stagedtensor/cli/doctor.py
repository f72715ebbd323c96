"""``doctor``: what this machine offers and what is missing, each with the line that installs it.

Looks at compilers, the processor, CUDA and optional packages, and prints tables. CuPy is imported only here and only
to ask for devices; other optional packages are looked up without importing them.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import platform
import shutil
import subprocess
import warnings
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stagedtensor.cli.cache import describe
from stagedtensor.errors import CompileError, ContextError
from stagedtensor.runtime.compiler import Compiler, accepts, available_compilers, find_compiler, has_float16
from stagedtensor.runtime.kernel_cache import KernelCache
from stagedtensor.runtime.target import detect, processor_name
from stagedtensor.runtime.thread_pool import available_cpus

_PROBE = "#include <math.h>\n#include <stdint.h>\nint32_t probe(float x) { return (int32_t)floorf(x); }\n"
_CUDA13_DRIVER = 580  # first driver series for CUDA 13

# A broken CUDA set-up fails in many ways, and this command is here to tell which. CuPy's own are RuntimeErrors.
_CUDA_FAILURES = (ImportError, OSError, RuntimeError, AttributeError, ValueError)

_OPTIONAL = (
    ("gguf", "gguf", "weights from GGUF files"),
    ("matplotlib", "plot", "plots of training runs"),
    ("sklearn", "examples", "the digits data of the examples"),
)


@dataclass(frozen=True)
class Finding:
    """One line of the report; ``install`` is what to type where the piece is missing or broken."""

    what: str
    found: str
    good: bool = True
    install: str = ""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``doctor``: none."""


def run(arguments: argparse.Namespace) -> int:
    """Print the report; status 1 where not even the CPU back end would work."""
    console = Console(highlight=False)
    compilers = available_compilers()
    cpu = compiler_findings(compilers)
    sections = {
        "Python": python_findings(),
        "C compilers (the first is used)": cpu,
        "Processor": processor_findings(compilers[0] if compilers else None),
        "CUDA": cuda_findings(),
        "Optional packages": optional_findings(),
        "Kernel cache": cache_findings(),
    }
    for title, findings in sections.items():
        table = Table("", "", "", title=title, title_justify="left", show_header=False)
        for finding in findings:
            table.add_row(
                Text("ok" if finding.good else "--"), Text(finding.what), Text(finding.found, overflow="fold")
            )
        console.print(table)
    installs = [finding for findings in sections.values() for finding in findings if finding.install]
    if installs:
        console.print("To install what is missing:")
        for finding in installs:
            console.print(Text(f"  {finding.what}: {finding.install}"), soft_wrap=True)
    return 0 if cpu[0].good else 1


def python_findings() -> list[Finding]:
    """Report the interpreter and the required packages with their versions."""
    findings = [Finding("Python", f"{platform.python_version()} on {platform.platform()}")]
    for package in ("numpy", "ml_dtypes", "lark", "rich", "safetensors"):
        try:
            findings.append(Finding(package, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            findings.append(Finding(package, "not installed", False, f"pip install {package}"))
    return findings


def compiler_findings(compilers: list[Compiler]) -> list[Finding]:
    """Report each compiler found and whether it builds a small library with the flags that routines get."""
    target = detect()
    findings = []
    for compiler in compilers:
        works = accepts(compiler, compiler.flags(compiler.usable(target)), _PROBE)
        install = "" if works else "its C library headers are missing or it is broken: apt-get install gcc libc6-dev"
        text = compiler.version if works else f"{compiler.version} (cannot build a small library)"
        findings.append(Finding(" ".join(compiler.command), text, works, install))
    try:
        find_compiler()
    except CompileError as error:
        fact, _, advice = str(error).partition("\n")
        findings.insert(0, Finding("C compiler", fact, False, advice))
    return findings


def processor_findings(compiler: Compiler | None) -> list[Finding]:
    """Report the processor, the target chosen for it and what of it the compiler knows."""
    target = detect()
    findings = [
        Finding("processor", f"{processor_name()}, {available_cpus()} usable threads"),
        Finding("target", f"{target.name}: {' '.join(sorted(target.features)) or 'no assumptions'}"),
    ]
    if compiler is not None:
        usable = compiler.usable(target)
        if usable is not target:
            install = f"a newer compiler would use {target.name}: apt-get install gcc"
            findings.append(Finding("compiler's target", f"{usable.name}: the compiler is too old", False, install))
        found = "native" if has_float16(compiler, usable) else "absent: integer conversions are used, same results"
        findings.append(Finding("_Float16", found))
    return findings


def cuda_findings() -> list[Finding]:
    """Report the driver, CuPy, its devices and NVRTC."""
    driver = _driver()
    findings = [Finding("NVIDIA driver", driver or "none found", bool(driver))]
    major = driver.split(".")[0] if driver else ""
    extra = "cuda12" if major.isdigit() and int(major) < _CUDA13_DRIVER else "cuda13"
    install = f'pip install "stagedtensor[{extra}]"'
    if importlib.util.find_spec("cupy") is None:
        findings.append(Finding("CuPy", "not installed", False, install))
        return findings
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cupy = importlib.import_module("cupy")
    except _CUDA_FAILURES as error:
        findings.append(Finding("CuPy", f"does not import: {error}", False, install))
        return findings
    findings.append(Finding("CuPy", str(cupy.__version__)))
    try:
        for index in range(cupy.cuda.runtime.getDeviceCount()):
            properties = cupy.cuda.runtime.getDeviceProperties(index)
            capability = f"sm_{properties['major']}{properties['minor']}"
            memory = f"{properties['totalGlobalMem'] / 2**30:.0f} GiB"
            findings.append(Finding(f"cuda:{index}", f"{properties['name'].decode()}, {capability}, {memory}"))
    except _CUDA_FAILURES as error:
        findings.append(Finding("devices", f"none: {str(error).splitlines()[0] if str(error) else error!r}", False))
    try:
        version = ".".join(map(str, cupy.cuda.nvrtc.getVersion()))
        findings.append(Finding("NVRTC", version))
    except _CUDA_FAILURES as error:
        packages = "nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cuda-crt"
        findings.append(Finding("NVRTC", f"does not load: {error}", False, f"pip install {packages}"))
    return findings


def _driver() -> str:
    """Return the version of the NVIDIA driver, or an empty text."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    lines = done.stdout.split()
    return lines[0] if lines else ""


def optional_findings() -> list[Finding]:
    """Report the optional packages, without importing them."""
    findings = []
    for module, extra, purpose in _OPTIONAL:
        if importlib.util.find_spec(module) is None:
            install = f'pip install "stagedtensor[{extra}]"'
            findings.append(Finding(module, f"not installed ({purpose})", False, install))
        else:
            findings.append(Finding(module, f"installed ({purpose})"))
    return findings


def cache_findings() -> list[Finding]:
    """Report where compiled kernels are kept, and whether that folder may be used."""
    cache = KernelCache()
    try:
        cache.check()
    except ContextError as error:
        return [Finding("kernel cache", str(error), False, f"export STAGEDTENSOR_CACHE={Path.home() / 'kernels'}")]
    return [Finding("kernel cache", describe(cache.info()))]
