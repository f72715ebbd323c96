"""The packaging tables against the tree. Needs the checkout; in an installed copy these tests are skipped."""

from __future__ import annotations

import fnmatch
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest

import stagedtensor

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "stagedtensor": "stagedtensor",
    "benchmarks": "stagedtensor.benchmarks",
    "codegen": "stagedtensor.codegen",
    "runtime": "stagedtensor.runtime",
}

pytestmark = pytest.mark.skipif(
    not (ROOT / "stagedtensor" / "codegen").is_symlink(), reason="not in a checkout: there is no tree to compare with"
)


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def source_files(pattern: str) -> dict[Path, str]:
    """Return the files of the source folders that match, with the package each belongs to."""
    found = {}
    for folder, package in FOLDERS.items():
        for directory, subfolders, files in os.walk(ROOT / folder):  # does not enter the links
            subfolders[:] = [name for name in subfolders if name != "__pycache__" and not name.startswith(".")]
            relative = Path(directory).relative_to(ROOT / folder)
            for name in files:
                if fnmatch.fnmatch(name, pattern):
                    found[Path(directory) / name] = ".".join([package, *relative.parts])
    return found


def test_the_links_lead_to_the_folders() -> None:
    for name in ("benchmarks", "codegen", "runtime"):
        link = ROOT / "stagedtensor" / name
        assert os.readlink(link) == f"../{name}"


def test_the_list_of_packages_is_the_tree() -> None:
    listed = project()["tool"]["setuptools"]["packages"]
    assert listed == sorted(listed)
    assert set(listed) == set(source_files("*.py").values())


def test_every_package_has_an_init_file() -> None:
    modules = source_files("*.py")
    with_init = {package for path, package in modules.items() if path.name == "__init__.py"}
    assert with_init == set(modules.values())


def test_every_data_file_ships() -> None:
    packages = set(project()["tool"]["setuptools"]["packages"])
    patterns = project()["tool"]["setuptools"]["package-data"]
    forgotten = []
    for path, package in source_files("*").items():
        if path.suffix in (".py", ".pyc"):
            continue
        owner, inside = package, path.name
        while owner not in packages:
            owner, _, last = owner.rpartition(".")
            inside = f"{last}/{inside}"
        # a pattern without a slash matches file names of the package folder only
        offered = [*patterns["*"], *patterns.get(owner, [])]
        if not any(fnmatch.fnmatch(inside, pattern) and inside.count("/") == pattern.count("/") for pattern in offered):
            forgotten.append(str(path.relative_to(ROOT)))
    assert forgotten == []


def test_the_version_is_one() -> None:
    assert project()["project"]["version"] == stagedtensor.__version__


def test_files_stay_readable_in_one_sitting() -> None:
    longest = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in source_files("*.py")
    }
    too_long = {name: lines for name, lines in longest.items() if lines > 560}
    assert too_long == {}
