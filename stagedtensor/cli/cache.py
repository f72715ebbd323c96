"""``cache info`` and ``cache clear``: what the kernel cache holds, and emptying it."""

from __future__ import annotations

import argparse

from stagedtensor.runtime.kernel_cache import CacheInfo, KernelCache


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``cache``."""
    parser.add_argument("action", choices=("info", "clear"), help="show what is there, or delete it")
    parser.add_argument(
        "--directory", metavar="DIR", help="another folder than $STAGEDTENSOR_CACHE or the user's cache"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print one line about the cache, after emptying it if asked."""
    cache = KernelCache(arguments.directory)
    if arguments.action == "clear":
        print(f"deleted {describe(cache.clear())}")
    else:
        print(describe(cache.info()))
    return 0


def describe(info: CacheInfo) -> str:
    """Return ``12 entries, 3.4 MiB of at most 1024.0 MiB in DIR``."""
    entries = "1 entry" if info.entries == 1 else f"{info.entries} entries"
    return f"{entries}, {info.bytes / 2**20:.1f} MiB of at most {info.max_bytes / 2**20:.1f} MiB in {info.directory}"
