"""Every CUDA source that the tests of a process generate, those of other folders too, compiles for GPUs when they are
done.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tests.cuda.running import SOURCES, complaints


@pytest.fixture(scope="session", autouse=True)
def _sources_compile(request: pytest.FixtureRequest) -> Iterator[None]:
    """For sm_90, and where slow tests are run each for the family before or the one after it as well.

    Programs drawn at random may spill a few registers: ptxas spares some in favour of more blocks at once.
    """
    yield
    if importlib.util.find_spec("cupy") is None:
        return
    slow = any(item.get_closest_marker("slow") for item in request.session.items)
    sources = list(SOURCES)
    found = complaints(sources, ["sm_90"], most_spilled=64)
    if slow:
        found += complaints(sources[::2], ["sm_80"], most_spilled=64)
        found += complaints(sources[1::2], ["sm_100"], most_spilled=64)
    if found:
        pytest.fail("\n".join(("CUDA sources of these tests do not compile well:", *found)), pytrace=False)
