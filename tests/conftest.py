"""Fixtures of all tests: a ``session``; ``golden`` compares a text with a file that ``--update-golden`` rewrites."""

from __future__ import annotations

import difflib
import getpass
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stagedtensor.session import Session

_FOLDER = Path(__file__).parent / "golden"

# Tests never touch the user's kernel cache; one of their own survives runs, so that a second run compiles little.
os.environ.setdefault(
    "STAGEDTENSOR_CACHE", os.path.join(tempfile.gettempdir(), f"stagedtensor-tests-{getpass.getuser()}")
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files anew instead of comparing")


@pytest.fixture(autouse=True)
def _no_cached_code_of_a_changed_generator(request: pytest.FixtureRequest) -> None:
    """Where a test replaces parts of the compiler, code is neither kept in the kernel cache nor taken from it."""
    if "monkeypatch" in request.fixturenames:
        monkeypatch = request.getfixturevalue("monkeypatch")
        monkeypatch.setattr("stagedtensor.runtime.cpu.generator_version", lambda: None)


@pytest.fixture
def session() -> Iterator[Session]:
    """A session of the test's own; a module whose tests all want one says ``pytest.mark.usefixtures``."""
    with Session() as opened:
        yield opened


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Return a function that compares a text with ``tests/golden/<file>/<test>.txt``."""
    module = Path(str(request.path)).stem.removeprefix("test_")
    name = request.node.name.removeprefix("test_")
    safe = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in name).strip("_")
    path = _FOLDER / module / f"{safe}.txt"

    def check(text: str) -> None:
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        if not path.exists():
            pytest.fail(f"{path} is missing; run pytest --update-golden and look at it")
        expected = path.read_text(encoding="utf-8")
        if text != expected:
            lines = difflib.unified_diff(expected.splitlines(), text.splitlines(), "golden", "now", lineterm="")
            pytest.fail("\n".join(["the text differs from its golden file (--update-golden rewrites it)", *lines]))

    return check
