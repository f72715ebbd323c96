"""The command line ``python -m stagedtensor``: arguments in, exit status out.

Each subcommand is one row of ``COMMANDS`` and one module beside this file. Errors of the package end as one message on
standard error and status 1; ``-v`` lowers the threshold of the log, ``-vv`` further.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from stagedtensor.cli import bench, cache, doctor, inspect, ops
from stagedtensor.cli.command import Command
from stagedtensor.errors import StagedTensorError

COMMANDS: dict[str, Command] = {
    "doctor": Command(
        "show what was found on this machine and how to install what is missing", doctor.configure, doctor.run
    ),
    "inspect": Command(
        "print the kernels and source of a block of a model text, without running it", inspect.configure, inspect.run
    ),
    "ops": Command("show the status of every op: back ends, gradients, export, encodings", ops.configure, ops.run),
    "bench": Command("measure training steps and kernels beside torch and JAX", bench.configure, bench.run),
    "cache": Command("show or empty the cache of compiled kernels", cache.configure, cache.run),
}
"""Subcommands by name, in the order that ``--help`` lists them."""

_LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = argparse.ArgumentParser(prog="python -m stagedtensor", description="A staged tensor language.")
    parser.add_argument("-v", "--verbose", action="count", default=0, help="log more; twice for everything")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=command.help, description=command.help)
        # Accepted on either side of the command; suppressed so that its absence here keeps what stood before.
        subparser.add_argument("-v", "--verbose", action="count", default=argparse.SUPPRESS, help="log more")
        command.configure(subparser)
        subparser.set_defaults(run=command.run)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 0 done, 1 an error that was told, 2 wrong usage."""
    parsed = build_parser().parse_args(arguments)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("stagedtensor").setLevel(_LEVELS[min(parsed.verbose, len(_LEVELS) - 1)])
    try:
        status: int = parsed.run(parsed)
    except StagedTensorError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        sys.stderr.close()  # the reader has gone, e.g. `| head`: nothing to complain of
        return 1
    except KeyboardInterrupt:
        return 130
    return status
