"""``ops``: the status of every public op, as the page of the documents or as JSON; written, or compared with a file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from stagedtensor.op_status import as_json, as_markdown, status

_FORMATS = {"md": as_markdown, "json": as_json}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``ops``."""
    parser.add_argument("--format", choices=tuple(_FORMATS), default="md", help="Markdown (the default) or JSON")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--write", metavar="PATH", type=Path, help="write the file instead of printing")
    where.add_argument(
        "--check", metavar="PATH", type=Path, help="status 1 where the file is not what would be written"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the matrix, write it, or say whether a file is fresh."""
    text = _FORMATS[arguments.format](status())
    if arguments.check is not None:
        path: Path = arguments.check
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            return 0
        command = f"python -m stagedtensor ops --format {arguments.format} --write {path}"
        found = "is out of date; write it anew" if path.is_file() else "is no file; write it"
        print(f"{path} {found} with {command}", file=sys.stderr)
        return 1
    if arguments.write is not None:
        try:
            arguments.write.write_text(text, encoding="utf-8")
        except OSError as error:
            print(f"{arguments.write} cannot be written: {error.strerror}", file=sys.stderr)
            return 1
    else:
        print(text, end="")
    return 0
