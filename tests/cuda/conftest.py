"""Every CUDA source that the tests of a process generate, those of other folders too, compiles for GPUs when they are done."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tests.cuda.running import SOURCES, complaints


@pytest.fixture(scope="session", autouse=True)
def _sources_compile(request: pytest.FixtureRequest) -> Iterator[None]:
    """For sm_90; for the families before and after it as well where slow tests are run.

    Programs drawn at random may spill a few registers: ptxas spares some in favour of more blocks at once.
    """
    yield
    if importlib.util.find_spec("cupy") is None:
        return
    slow = any(item.get_closest_marker("slow") for item in request.session.items)
    archs = ("sm_90", "sm_80", "sm_100") if slow else ("sm_90",)
    found = complaints(SOURCES, archs, most_spilled=64)
    if found:
        pytest.fail("\n".join(("CUDA sources of these tests do not compile well:", *found)), pytrace=False)
