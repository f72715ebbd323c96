"""The code in the documents runs, and prints what the documents say it prints.

In ``README.md``, ``ARCHITECTURE.md`` and ``docs/*.md`` the blocks fenced as ``python`` are executed top to bottom, one
namespace a document. ``<!-- not run: why -->`` before a block leaves it out; ``<!-- prints -->`` before a ``text``
block says that it is the standard output of the block above. Line numbers of the document in such output are not
compared.
"""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

import stagedtensor as st

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    path
    for path in (ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md")))
    if path.exists()
]

FENCE = re.compile(r"^```(?P<language>\w*)\s*$")
MARK = re.compile(r"^<!--\s*(?P<mark>prints|not run: .+?)\s*-->\s*$")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the mark on the line before it, the number of its first line, its text."""

    language: str
    mark: str
    line: int
    text: str


def blocks(document: str) -> list[Block]:
    """Return the fenced blocks of a document."""
    found: list[Block] = []
    lines = document.splitlines()
    mark, at = "", 0
    while at < len(lines):
        fence = FENCE.match(lines[at])
        if fence:
            end = lines.index("```", at + 1)
            found.append(Block(fence["language"], mark, at + 2, "\n".join(lines[at + 1 : end])))
            mark, at = "", end + 1
            continue
        marked = MARK.match(lines[at])
        if marked:
            mark = marked["mark"]
        elif lines[at].strip():
            mark = ""
        at += 1
    return found


def run(document: str, name: str) -> list[tuple[Block, str]]:
    """Execute the Python blocks; return each block that says what is printed with what was printed."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    printed, outputs = "", []
    for block in blocks(document):
        if block.language == "python" and not block.mark.startswith("not run"):
            # empty lines before it, so that tracebacks and reported source lines are the document's
            code = compile("\n" * (block.line - 1) + block.text, name, "exec")
            stream = io.StringIO()
            with contextlib.redirect_stdout(stream):
                exec(code, namespace)
            printed = stream.getvalue()
        elif block.mark == "prints":
            outputs.append((block, printed))
    return outputs


def comparable(text: str, name: str) -> list[str]:
    """Return the lines without trailing spaces and without line numbers of the document."""
    plain = re.sub(rf"{re.escape(name)}:(\d+|N)\b", f"{name}:N", text)
    return [line.rstrip() for line in plain.strip().splitlines()]


@pytest.mark.skipif(not DOCUMENTS, reason="not in a checkout: there are no documents")
@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_document(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with st.Session():
        outputs = run(path.read_text(encoding="utf-8"), path.name)
    for block, printed in outputs:
        assert comparable(printed, path.name) == comparable(block.text, path.name), f"{path.name}:{block.line}"


def test_the_runner_notices_a_failing_block_and_wrong_output() -> None:
    document = "```python\nprint(1 + 1)\n```\n\n<!-- prints -->\n```text\n3\n```\n"
    [(block, printed)] = run(document, "some.md")
    assert comparable(printed, "some.md") == ["2"]
    assert comparable(block.text, "some.md") == ["3"]
    with pytest.raises(ZeroDivisionError):
        run("text\n```python\n1 / 0\n```\n", "some.md")
    assert run("<!-- not run: shows an error -->\n```python\n1 / 0\n```\n", "some.md") == []


def test_the_documents_link_to_files_that_exist() -> None:
    broken = [
        f"{path.name}: {target}"
        for path in DOCUMENTS
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
        if not (path.parent / target).exists()
    ]
    assert broken == []
