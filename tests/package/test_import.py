"""Importing the package: light, silent, without optional packages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

OPTIONAL = ("cupy", "gguf", "iree", "jax", "matplotlib", "scipy", "sklearn", "torch")

REPORT = """
import json, os, subprocess, sys
started = []
sys.addaudithook(lambda event, arguments: started.append(event) if event in ("subprocess.Popen", "os.system") else None)
written = []
def opened(event, arguments):
    if event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
        written.append(str(arguments[0]))
sys.addaudithook(opened)
exec({statement!r})
print(json.dumps({{"modules": sorted(sys.modules), "started": started, "written": written}}))
"""


def outside(statement: str, folder: Path) -> dict[str, list[str]]:
    """Run ``statement`` in a fresh interpreter with ``folder`` as home; return what it imported, started and opened."""
    environment = {
        **os.environ,
        "HOME": str(folder),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "STAGEDTENSOR_CACHE": str(folder / "kernels"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    code = REPORT.format(statement=statement)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    report: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return report


def test_import_brings_in_no_optional_package(tmp_path: Path) -> None:
    roots = {name.partition(".")[0] for name in outside("import stagedtensor", tmp_path)["modules"]}
    assert not roots & set(OPTIONAL)


def test_import_starts_nothing_and_writes_nothing(tmp_path: Path) -> None:
    report = outside("import stagedtensor", tmp_path)
    assert report["started"] == []
    assert report["written"] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("statement", "key"),
    [
        ("import sys, types; sys.modules['torch'] = types.ModuleType('torch')", "modules"),
        ("import subprocess, sys; subprocess.run([sys.executable, '-c', ''])", "started"),
        ("open('here', 'w').close()", "written"),
    ],
)
def test_the_checks_above_can_fail(statement: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = outside(statement, tmp_path)[key]
    assert "torch" in found if key == "modules" else found


def test_import_is_quick(tmp_path: Path) -> None:
    """Processor time on top of a bare NumPy import, the best of a few: a busy machine must not fail it.

    The modules' bytecode is cached, as it is for a user from the second import on.
    """
    code = """
import resource, numpy
def spent():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
before = spent()
import stagedtensor
print(spent() - before)
"""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    command = [sys.executable, "-c", code]
    seconds = min(
        float(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)
        for _ in range(5)
    )
    assert seconds < 0.2, f"import stagedtensor took {seconds:.2f} s of processor time on top of NumPy"
